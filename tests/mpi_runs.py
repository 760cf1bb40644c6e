"""Starting worlds of real processes for the tests, and looking at what is left of them.

pytest itself stays outside MPI: each world is one launch of ``mpi_cases.py``, which prints a JSON
line a case.
"""

import io
import json
import os
import sys
import time
import uuid
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

import mpi_cases
from zero_nb.cluster import launch

CASES_FILE = str(Path(mpi_cases.__file__))

if sys.platform == "win32":
    pytest.skip("MPI runs are started on Linux and macOS only", allow_module_level=True)
if find_spec("mpi4py") is None and not os.environ.get("CI"):
    pytest.skip("needs pip install 'zero-nb[mpi]'; never skipped in CI", allow_module_level=True)


def run(world_size, local_ranks, *cases, **settings):
    """Run cases in a world of real processes; return what process 0 printed, line by line."""
    stdout = io.StringIO()
    launch.run_mpi(
        [str(local_ranks), *cases],
        world_size,
        local_ranks,
        program=(CASES_FILE,),
        stdout=stdout,
        **({"time_limit_s": 120} | settings),
    )
    return [json.loads(line) for line in stdout.getvalue().splitlines()]


def left_over(mark):
    """Processes that were started with `mark` in their environment and still run."""
    found = []
    for process in psutil.process_iter(["pid", "name", "status"]):
        try:
            if process.info["status"] != psutil.STATUS_ZOMBIE and mark in process.environ():
                found.append(process.info)
        except (psutil.AccessDenied, psutil.NoSuchProcess, psutil.ZombieProcess):
            pass
    return found


def segments():
    """MPI's files in shared memory that no living process holds."""
    folder = Path("/dev/shm")
    held = set()
    for process in psutil.process_iter(["pid"]):
        held |= launch.mapped_segments(process.info["pid"])
    return {str(path) for path in folder.glob("mpich_shm_*")} - held if folder.is_dir() else set()


def fresh_mark():
    """Return a name for a run's environment by which its processes are known."""
    return f"ZERO_NB_TEST_{uuid.uuid4().hex}"


def new_segments(before, seconds=2.0):
    """Shared memory that is left since `before`; what other tests' runs just make goes away."""
    end = time.monotonic() + seconds
    while (found := segments() - before) and time.monotonic() < end:
        time.sleep(0.1)
    return found
