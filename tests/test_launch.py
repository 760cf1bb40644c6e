"""What the launcher reads from the processes' folder, and how it starts and ends them: no MPI."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from zero_nb.cluster import launch
from zero_nb.cluster.rundir import Failure, Member, RunFolder, is_alive, mapped_segments, ranks_text
from zero_nb.config import UsageError

posix = pytest.mark.skipif(sys.platform == "win32", reason="processes are started on POSIX only")


@pytest.fixture
def folder():
    made = RunFolder(3)
    yield made
    made.remove()
    assert not made.path.exists()


def test_ranks_have_a_name():
    assert ranks_text([2]) == "rank 2"
    assert ranks_text(range(4, 8)) == "ranks 4-7"


def test_the_launcher_reads_what_a_process_wrote(folder):
    member = Member(1, folder.path)
    assert folder.where(1) == folder.where(2) == "before its first collective"
    member.start(range(2, 4))
    assert folder.starts() == {1: {"pid": os.getpid(), "ranks": [2, 3]}}
    assert folder.count() == {"start": 1, "failure": 0, "exit": 0, "done": 0}
    member.enter("all_gather of 'a rather long name'")
    member.enter("all_gather of 'head'")
    assert folder.where(1) == "after all_gather of 'head'"
    member.wait(True)
    assert folder.where(1) == "in all_gather of 'head'"
    member.wait(False)
    assert folder.where(1) == "after all_gather of 'head'"
    member.enter("x" * 1000)
    assert folder.where(1) == "after " + "x" * 254
    assert not folder.is_done(1)
    member.done()
    assert folder.is_done(1)
    assert not folder.is_done(2)
    failure = Failure("stuck", "rank 2 waited", (0, 1), "where\nit was")
    member.fail(failure)
    assert folder.failures() == {1: Failure("stuck", "rank 2 waited", [0, 1], "where\nit was")}
    assert folder.fault(1) == folder.fault(2) == ""
    assert folder.count() == {"start": 1, "failure": 1, "exit": 0, "done": 1}
    assert member.launcher_lives()


def test_a_process_without_a_launcher_keeps_it_to_itself(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ZERO_NB_MPI_FOLDER", str(tmp_path / "on another machine"))
    member = Member(0)
    assert not member.launched
    member.start([0])
    member.enter("all_gather of 'head'")
    member.wait(True)
    member.tick(loss=1.0)
    member.fail(Failure("raised", "text"))
    member.done()
    assert not list(tmp_path.iterdir())
    assert capsys.readouterr().out == ""


@posix
@pytest.mark.parametrize(
    ("program", "status"),
    [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 137), ("kill -11 $$", 139)],
)
def test_a_line_of_shell_writes_down_how_a_process_ended(folder, program, status):
    (folder.path / "2.done").touch()  # else it waits for the launcher
    env = os.environ | {"PMI_RANK": "2", "ZERO_NB_MPI_FOLDER": str(folder.path)}
    command = ["/bin/sh", "-c", launch._SHELL, "sh", "/bin/sh", "-c", program]
    subprocess.run(command, env=env, timeout=20, check=False, capture_output=True)
    assert folder.ends() == {2: status}


@posix
def test_descendants_of_descendants_are_found_and_killed():
    script = "sleep 60 & sh -c 'sleep 60 & wait' & wait"
    root = subprocess.Popen(["/bin/sh", "-c", script])
    end = time.monotonic() + 10
    while len(launch._descendants(root.pid)) < 3 and time.monotonic() < end:
        time.sleep(0.02)
    family = launch._descendants(root.pid)
    assert len(family) == 3
    assert os.getpid() not in family
    assert all(is_alive(pid) for pid in family)
    launch._kill({*family, root.pid})
    assert root.wait(timeout=10) in (0, -signal.SIGKILL)  # its children went first, or it did
    end = time.monotonic() + 10
    while any(is_alive(pid) for pid in family) and time.monotonic() < end:
        time.sleep(0.02)
    assert not any(is_alive(pid) for pid in family)
    launch._kill(family)  # nothing to do, nothing to say


def test_segments_of_a_process_that_is_no_more():
    assert mapped_segments(2**22 + 1) == set()
    assert isinstance(mapped_segments("self"), set)


@posix
@pytest.mark.parametrize(
    ("world_size", "local_ranks", "told"),
    [
        (4, 3, "4 ranks cannot be hosted 3 a process; --local-ranks must divide --world-size"),
        (4, 0, "4 ranks cannot be hosted 0 a process"),
        (0, 1, "world_size must be at least 1 rank, got 0"),
    ],
)
def test_numbers_that_do_not_fit_are_refused_before_anything_starts(world_size, local_ranks, told):
    with pytest.raises(UsageError) as caught:
        launch.run_mpi([], world_size, local_ranks)
    assert told in str(caught.value)


@posix
def test_cores_are_shared_out_and_blas_has_one(folder):
    env = launch._environment(folder, 3, {"MORE": "1"})
    assert env["OPENBLAS_NUM_THREADS"] == env["OMP_NUM_THREADS"] == "1"
    assert env["NUMBA_NUM_THREADS"] == str(max(1, launch._cores() // 3))
    assert env["MORE"] == "1"
    assert env["ZERO_NB_MPI_FOLDER"] == str(folder.path)


def test_under_another_launcher_cores_are_shared_out_once(monkeypatch):
    monkeypatch.setattr(launch, "_cores", lambda: 8)
    monkeypatch.setattr(launch.os, "cpu_count", lambda: 8)
    for name in ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE"):
        monkeypatch.delenv(name, raising=False)
    assert launch.processes_here() is None
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "3")
    assert launch.processes_here() == 3
    monkeypatch.setenv("NUMBA_NUM_THREADS", "restored at the end, whatever it was")
    monkeypatch.delenv("NUMBA_NUM_THREADS")
    launch.share_cores()
    assert os.environ["NUMBA_NUM_THREADS"] == "2"
    monkeypatch.setenv("NUMBA_NUM_THREADS", "5")  # somebody else has decided
    launch.share_cores()
    assert os.environ["NUMBA_NUM_THREADS"] == "5"
    monkeypatch.delenv("NUMBA_NUM_THREADS")
    monkeypatch.setattr(launch, "_cores", lambda: 2)  # bound to two of eight cores
    launch.share_cores()
    assert "NUMBA_NUM_THREADS" not in os.environ


def test_where_mpiexec_is_missing_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setattr(launch.shutil, "which", lambda *_, **__: None)
    with pytest.raises(UsageError, match=r"pip install 'zero-nb\[mpi\]'"):
        launch.find_mpiexec()


@pytest.mark.parametrize("name", launch._LAUNCHERS)
def test_other_launchers_are_recognised(name, monkeypatch):
    for other in launch._LAUNCHERS:
        monkeypatch.delenv(other, raising=False)
    assert not launch.under_launcher()
    monkeypatch.setenv(name, "2")
    assert launch.under_launcher()


def test_failures_survive_json():
    failure = Failure("diverged", "two sides", (1,), "")
    assert Failure(**json.loads(json.dumps(failure.__dict__))).message == "two sides"
