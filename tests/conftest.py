"""What every test shares: hypothesis profiles and the place of the project."""

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
