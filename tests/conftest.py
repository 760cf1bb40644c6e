"""What every test shares: hypothesis profiles and the place of the project."""

import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# `ci` draws the same examples in every run, so that a red run can be repeated; `nightly`
# (`make test-long`, --hypothesis-profile=nightly) looks in new places. No deadline: the first call
# of a kernel compiles it.
settings.register_profile(
    "ci",
    max_examples=100,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "nightly",
    parent=settings.get_profile("ci"),
    max_examples=2000,
    derandomize=False,
    print_blob=True,
)
settings.load_profile("ci")


@pytest.fixture(scope="session")
def project() -> Path:
    """The root of the project: where pyproject.toml lies."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture
def clean():
    """Give a mark for the environment of an MPI run; nothing of it may be left afterwards."""
    import mpi_runs  # asks for an installed MPI

    mark, before = mpi_runs.fresh_mark(), mpi_runs.segments()
    yield {mark: "1"}
    end = time.monotonic() + 1.0
    while mpi_runs.left_over(mark) and time.monotonic() < end:
        time.sleep(0.05)
    assert not mpi_runs.left_over(mark)
    assert not mpi_runs.new_segments(before)
