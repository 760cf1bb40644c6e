"""When one process fails, all end, with one message that names the rank, the place, the cause."""

import io
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import psutil
import pytest

import saved_runs
from mpi_runs import CASES_FILE, fresh_mark, left_over, new_segments, run, segments
from zero_nb.cluster import launch
from zero_nb.config import UsageError
from zero_nb.train import checkpoint

DEADLINE_S = 2  # of the cases that fail; they make no long pauses themselves
TIME_LIMIT_S = 4

FAILURES = [  # ranks, case, what is told
    (2, "raise", "rank 1 failed after all_reduce of 'head': OSError: the disk is full (mpi_cases"),
    (2, "kill", "rank 1: killed by SIGKILL after all_reduce of 'head'"),
    (2, "crash", "rank 1: ended by SIGSEGV after all_reduce of 'head' (Fatal Python error: Segm"),
    (2, "exit", "rank 1: ended with status 0 after all_reduce of 'head'"),
    (3, "detour", "the ranks have diverged: ranks 0, 1 at all_gather of 'loss' (control, "
                  "2 elements, 16 bytes, collective "),
    (3, "detour", "; rank 2 at all_reduce of 'detour' (grad, 4 elements, 16 bytes, collective "),
    (2, "other size", "rank 1 at all_reduce of 'detour' (grad, 4 elements, 16 bytes, collective "),
    (2, "leave early", "rank 1 at all_gather of 'agree'"),
    (3, "hang", f" waited {DEADLINE_S} s in all_gather of 'loss' (collective "),
    (3, "hang", "rank 2 did not come to it; rank 2 was last heard of after all_reduce of 'head'"),
    (2, "stop", "rank 1 did not come to it; rank 1 was last heard of after all_reduce of 'head'"),
]  # fmt: skip


@cache
def started():
    """Start every case that fails, three at a time, the longest first: they mostly wait."""
    pool = ThreadPoolExecutor(3)
    cases = {("sleep", 2): {"time_limit_s": TIME_LIMIT_S}}
    cases |= {(case, world_size): {} for world_size, case, _ in reversed(FAILURES)}
    return {key: pool.submit(fail, *key, **settings) for key, settings in cases.items()}


def fail(case, world_size, time_limit_s=60):
    """Run a case that fails; return the error, the seconds it took, and what was left."""
    mark, before, stdout = fresh_mark(), segments(), io.StringIO()
    start = time.monotonic()
    with pytest.raises(launch.RunError) as caught:
        launch.run_mpi(
            ["1", case], world_size, program=(CASES_FILE,), stdout=stdout,
            time_limit_s=time_limit_s, env={"TEST_DEADLINE_S": str(DEADLINE_S), mark: "1"},
        )  # fmt: skip
    seconds = time.monotonic() - start
    return str(caught.value), seconds, stdout.getvalue(), left_over(mark), new_segments(before)


@pytest.mark.parametrize(("world_size", "case", "told"), FAILURES)
def test_a_rank_that_fails_ends_the_run_with_one_message(world_size, case, told):
    message, seconds, printed, processes, shared_memory = started()[case, world_size].result()
    assert told in message
    assert "\n" not in message
    assert printed == ""
    assert seconds < DEADLINE_S + 20  # what is not the deadline is starting Python on busy cores
    assert not processes
    assert not shared_memory


def test_a_rank_killed_while_saving_leaves_the_last_checkpoint_whole(clean, tmp_path):
    with pytest.raises(launch.RunError, match=r"^rank 1: killed by SIGKILL"):
        run(2, 1, "killed while saving", env=clean | {"TEST_FOLDER": str(tmp_path)})
    again = saved_runs.make(1, 3, seed=9, precision="bf16")
    checkpoint.load(again, tmp_path)
    wanted = saved_runs.train(saved_runs.make(3, 2, precision="bf16"), 2)
    assert again.steps_done == 2
    assert again.weights_sha256() == wanted.weights_sha256()


def test_hosted_ranks_fail_together(clean):
    with pytest.raises(
        launch.RunError, match=r"^ranks 2-3: killed by SIGKILL after all_reduce of 'head'"
    ):
        run(4, 2, "kill", env=clean)


def test_what_is_asked_in_vain_is_a_usage_error(clean):
    with pytest.raises(UsageError, match=r"^there is no stage 7$"):
        run(2, 1, "impossible", env=clean)


def test_time_limit():
    message, seconds, _, processes, shared_memory = started()["sleep", 2].result()
    assert f"the time limit of {TIME_LIMIT_S} s is over; rank 0 " in message
    assert seconds < TIME_LIMIT_S + 2
    assert not processes
    assert not shared_memory


def test_a_program_that_breaks_before_it_joins(clean):
    with pytest.raises(launch.RunError, match="ModuleNotFoundError: No module named 'nowhere'"):
        launch.run_mpi([], 2, program=("-c", "import nowhere"), env=clean)


LAUNCHER = """
import sys
from zero_nb.cluster import launch
try:
    launch.run_mpi(["1", "sleep"], 2, program=(sys.argv[1],), progress=print)
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_launcher_takes_its_processes_with_it(number, clean):
    """Ctrl-C and a polite kill within a second; they notice themselves if it is killed."""
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, CASES_FILE], env=os.environ | clean, text=True,
        stdout=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    mark, end = next(iter(clean)), time.monotonic() + 30
    while not any(trained(mark)) and time.monotonic() < end:
        time.sleep(0.05)
    assert len(left_over(mark)) >= 4, "launcher, mpiexec and two ranks"
    start = time.monotonic()
    launcher.send_signal(number)
    launcher.wait(timeout=10)
    while left_over(mark) and time.monotonic() - start < 10:
        time.sleep(0.02)
    assert time.monotonic() - start < (5.0 if number == signal.SIGKILL else 1.0)
    out = launcher.stdout.read()
    launcher.stdout.close()
    assert ("interrupted" in out) == (number == signal.SIGINT)


def trained(mark):
    """Status files of the run with `mark` that tell of a collective."""
    for process in psutil.process_iter():
        try:
            environ = process.environ()
            folder = environ.get("ZERO_NB_MPI_FOLDER")
            if mark in environ and folder:
                for path in Path(folder).glob("*.status"):
                    if b"'head'" in path.read_bytes():
                        yield path
        except (psutil.Error, OSError):
            pass
