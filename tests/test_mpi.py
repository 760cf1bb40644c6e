"""Real processes do what simulated ranks do, to the bit; and when one fails, all end.

pytest itself stays outside MPI: each world is one launch of ``mpi_cases.py``, which prints a JSON
line a case, and the same functions run here with simulated ranks.
"""

import atexit
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

import mpi_cases
import saved_runs
from zero_nb.cluster import launch
from zero_nb.cluster.simulated import SimulatedWorld
from zero_nb.config import UsageError
from zero_nb.train import checkpoint

TEXT = Path(__file__).resolve()  # any text of some length to train on
CASES_FILE = str(Path(mpi_cases.__file__))
WORLDS = [(2, 1), (3, 1), (4, 1), (8, 1), (8, 4)]  # world_size, ranks a process
DEADLINE_S = 2  # of the cases that fail; they make no long pauses themselves
PURPOSES = ("param", "grad", "control", "other")

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


FOLDERS = tempfile.TemporaryDirectory(prefix="zero-nb-test-mpi-")
atexit.register(FOLDERS.cleanup)


def cases_of(world_size, local_ranks):
    """Eight processes crowd two cores: there only what has most in it."""
    if world_size // local_ranks < 8:
        return list(mpi_cases.CASES)
    kept = ("collectives", "uneven", "checkpoint of stage 2")
    return [case for case in mpi_cases.CASES if case.endswith(kept)]


@cache
def real(world_size, local_ranks):
    """What a world of real processes answered, by case."""
    folder = Path(FOLDERS.name) / f"real {world_size} {local_ranks}"
    folder.mkdir()
    cases = cases_of(world_size, local_ranks)
    lines = run(world_size, local_ranks, *cases, env={"TEST_FOLDER": str(folder)})
    return {line["case"]: line for line in lines}


@cache
def simulated(world_size, case):
    """What the same case gives with simulated ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TEST_FOLDER", f"{FOLDERS.name}/simulated")
        return json.loads(json.dumps(mpi_cases.CASES[case](SimulatedWorld(world_size))))


each_world = pytest.mark.parametrize(("world_size", "local_ranks"), WORLDS, ids=str)


# --- the same bits ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world_size", "local_ranks", "case"),
    [(*world, case) for world in WORLDS for case in cases_of(*world)],
)
def test_real_processes_give_the_bits_and_the_log_of_simulated_ranks(world_size, local_ranks, case):
    line = real(world_size, local_ranks)[case]
    assert line["agree"], "the ranks do not agree with each other"
    assert line["result"] == simulated(world_size, case)


def test_several_ranks_in_each_of_three_processes():
    cases = ("collectives", "stage 1 bf16 uneven", "stage 3 fp32 uneven")
    lines = {line["case"]: line["result"] for line in run(6, 2, *cases)}
    assert {case: lines[case] for case in cases} == {case: simulated(6, case) for case in cases}


def test_stages_end_with_the_same_weights_in_real_processes():
    runs = [real(3, 1)[f"stage {stage}"]["result"] for stage in range(4)]
    assert len({result["weights_sha256"] for result in runs}) == 1
    assert len({tuple(map(tuple, result["sent"])) for result in runs}) == 2  # 3 Ψ at stage 3 only


def test_what_processes_saved_loads_with_simulated_ranks_and_the_other_way_round():
    """At once another stage and world size; and the files have the same bytes in both worlds."""
    saved = real(3, 1)["checkpoint of stage 2"]["result"]
    assert saved["files"] == simulated(3, "checkpoint of stage 2")["files"]
    assert len(saved["files"]) == 4  # one a rank, and checkpoint.json
    here = saved_runs.make(3, 2, seed=9, precision="bf16")
    checkpoint.load(here, Path(FOLDERS.name) / "real 3 1" / "sharded 2 3")
    there = saved_runs.train(saved_runs.make(2, 3, precision="bf16"), 2)
    assert here.weights_sha256() == there.weights_sha256()


# --- what passes through MPI -------------------------------------------------------------------


def broadcast_bytes(world_size, local_ranks):
    """Bytes that a chain saves its last process, by process, over the case "collectives"."""
    processes = world_size // local_ranks
    saved = [0] * processes
    for fmt in mpi_cases.COLLECTIVE_FORMATS:
        for shard in mpi_cases.COLLECTIVE_SHARDS:
            for root in mpi_cases.broadcast_roots(world_size):
                last = (root // local_ranks - 1) % processes
                saved[last] += world_size * shard * fmt.itemsize
    return saved


@each_world
def test_bytes_given_to_mpi_are_the_bytes_logged(world_size, local_ranks):
    """Logged is what every rank sends on a ring; see [Note: what passes through MPI]."""
    lines = real(world_size, local_ranks)
    last_case = cases_of(world_size, local_ranks)[-1]
    for after, purposes in (("collectives", PURPOSES), (last_case, PURPOSES[:3])):
        figures = lines[f"figures after {after}"]["result"]
        saved = broadcast_bytes(world_size, local_ranks)
        for process, told in enumerate(figures):
            for purpose in purposes:
                moved = told["mpi_bytes"][purpose] + told["local_bytes"][purpose]
                chain = saved[process] if purpose == "other" else 0
                assert moved + chain == told["logged_bytes"][purpose] > 0, (after, process, purpose)
            if local_ranks == 1:
                assert set(told["local_bytes"].values()) == {0}
            assert told["resident_bytes"] > 10_000_000
            assert told["ranks"] == [process * local_ranks + i for i in range(local_ranks)]
            assert told["order_bytes"] > 0


# --- failing ---------------------------------------------------------------------------------


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


@pytest.fixture
def clean():
    """Give a mark for a run's environment; nothing of the run may be left afterwards."""
    mark, before = f"ZERO_NB_TEST_{uuid.uuid4().hex}", segments()
    yield {mark: "1"}
    end = time.monotonic() + 1.0
    while left_over(mark) and time.monotonic() < end:
        time.sleep(0.05)
    assert not left_over(mark)
    assert segments() <= before


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
def failure(world_size, case):
    """Run a case that fails; return the error, the seconds it took, and what was left."""
    mark, before, stdout = f"ZERO_NB_TEST_{uuid.uuid4().hex}", segments(), io.StringIO()
    start = time.monotonic()
    with pytest.raises(launch.RunError) as caught:
        launch.run_mpi(
            ["1", case], world_size, program=(CASES_FILE,), stdout=stdout, time_limit_s=60,
            env={"TEST_DEADLINE_S": str(DEADLINE_S), mark: "1"},
        )  # fmt: skip
    seconds = time.monotonic() - start
    return str(caught.value), seconds, stdout.getvalue(), left_over(mark), segments() - before


@pytest.mark.parametrize(("world_size", "case", "told"), FAILURES)
def test_a_rank_that_fails_ends_the_run_with_one_message(world_size, case, told):
    message, seconds, printed, processes, shared_memory = failure(world_size, case)
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


def test_time_limit(clean):
    start = time.monotonic()
    with pytest.raises(launch.RunError, match="the time limit of 4 s is over; rank 0 "):
        run(2, 1, "sleep", time_limit_s=4, env=clean)
    assert time.monotonic() - start < 6


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


# --- two hosts, as two network namespaces ------------------------------------------------------

ADDRESSES = ("10.213.7.1", "10.213.7.2")

SHELL_FOR_SSH = """#!/bin/sh
# Called by mpiexec as ssh would be: [-x] ADDRESS COMMAND; runs it in that address's namespace.
[ "$1" = "-x" ] && shift
case "$1" in
    {0}) namespace={2} ;;
    {1}) namespace={3} ;;
    *) exit 1 ;;
esac
shift
exec ip netns exec "$namespace" sh -c "$*"
"""


def ip(*words):
    """Run iproute2."""
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20)


def _wait_for_addresses(namespace, seconds=10):
    """Return once the cable carries and no address is tentative any more.

    An address of IPv6 is, for a second or two, until the neighbours were asked for it; UCX finds
    such a host unreachable.
    """
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        shown = subprocess.run(
            ["ip", "-n", namespace, "addr", "show", "dev", "wire"],
            check=True, capture_output=True, text=True, timeout=20,
        ).stdout  # fmt: skip
        if "state UP" in shown and "tentative" not in shown:
            return
        time.sleep(0.1)
    pytest.skip(f"the virtual cable did not come up within {seconds} s: {shown}")


@pytest.fixture
def hosts():
    """Two network namespaces joined by a virtual cable; gone afterwards."""
    if sys.platform != "linux":
        pytest.skip("network namespaces are a thing of Linux")
    if os.geteuid() != 0:
        pytest.skip("only root may make network namespaces")
    if shutil.which("ip") is None:
        pytest.skip("needs the command `ip` (iproute2)")
    name = f"zeronb{os.getpid()}"
    names = (f"{name}a", f"{name}b")
    made = []
    try:
        try:
            for namespace in names:
                ip("netns", "add", namespace)
                made.append(namespace)
            ip("link", "add", "wire", "netns", names[0], "type", "veth", "peer", "name", "wire",
               "netns", names[1])  # fmt: skip
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this system makes no network namespaces: {error.stderr.strip()}")
        for namespace, address in zip(names, ADDRESSES, strict=True):
            ip("-n", namespace, "addr", "add", f"{address}/24", "dev", "wire")
            ip("-n", namespace, "link", "set", "lo", "up")
            ip("-n", namespace, "link", "set", "wire", "up")
        for namespace in names:
            _wait_for_addresses(namespace)
        yield names
    finally:
        for namespace in made:
            ip("netns", "del", namespace)


def test_two_hosts_train_over_a_network(hosts, tmp_path, clean):
    """Under a plain mpiexec with a hostfile, and what the network card counted is what we count."""
    cases = ("stage 2 bf16 uneven", "stage 3", "collectives")
    remote_shell = tmp_path / "remote-shell"
    remote_shell.write_text(SHELL_FOR_SSH.format(*ADDRESSES, *hosts))
    remote_shell.chmod(0o755)
    hostfile = tmp_path / "hosts"
    hostfile.write_text("".join(f"{address}:1\n" for address in ADDRESSES))
    command = [
        "ip", "netns", "exec", hosts[0], launch.find_mpiexec(), "-rmk", "user",
        "-launcher", "ssh", "-launcher-exec", str(remote_shell), "-localhost", ADDRESSES[0],
        "-f", str(hostfile), "-n", "2", sys.executable, "-m", "mpi4py", CASES_FILE, "1", *cases,
    ]  # fmt: skip
    # Without it MPI finds that both hosts share a memory, and leaves the wire alone.
    env = os.environ | clean | {"UCX_TLS": "tcp,self", "FI_PROVIDER": "tcp"}
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=100, start_new_session=True
    )
    assert done.returncode == 0, done.stderr
    lines = {line["case"]: line["result"] for line in map(json.loads, done.stdout.splitlines())}
    assert {case: lines[case] for case in cases} == {case: simulated(2, case) for case in cases}
    figures = lines[f"figures after {cases[-1]}"]
    for namespace, told in zip(hosts, figures, strict=True):
        counted = sum(told["mpi_bytes"].values()) + told["order_bytes"]
        statistics = subprocess.run(
            ["ip", "netns", "exec", namespace, "cat", "/sys/class/net/wire/statistics/tx_bytes"],
            check=True, capture_output=True, text=True,
        )  # fmt: skip
        # Above it: headers of packets and of MPI's messages, and the meeting at start and end.
        assert counted <= int(statistics.stdout) <= 1.2 * counted + 300_000


# --- the command -----------------------------------------------------------------------------


def command(*words, env=None, check=True, **settings):
    """Run zero-nb."""
    return subprocess.run(
        [sys.executable, "-m", "zero_nb", *words], env=os.environ | dict(env or {}), check=check,
        capture_output=True, text=True, timeout=100, **settings,
    )  # fmt: skip


def test_the_command_gives_the_simulated_json_and_what_each_process_took(clean):
    words = ("train", "--stage", "3", "--world-size", "4", "--steps", "2", "--data", str(TEXT))
    words += ("--json",)
    here = json.loads(command(*words).stdout)
    there = json.loads(command(*words, "--engine", "mpi", "--local-ranks", "2", env=clean).stdout)
    processes = there.pop("processes")
    assert here.pop("step_seconds") > 0 < there.pop("step_seconds")
    assert here == there
    assert [told["ranks"] for told in processes] == [[0, 1], [2, 3]]
    for told in processes:
        # All of the model's bytes in NumPy arrays are seen, and a resident set holds those.
        assert 2 * there["peak_bytes"] < told["tracemalloc_peak_bytes"] < told["resident_bytes"]


def test_the_command_joins_the_world_it_is_started_in(clean):
    words = ("train", "--engine", "mpi", "--steps", "1", "--data", str(TEXT), "--json")
    inside = [launch.find_mpiexec(), "-n", "2", sys.executable, "-m", "mpi4py", "-m", "zero_nb"]
    env = os.environ | clean
    done = subprocess.run([*inside, *words], env=env, capture_output=True, text=True, timeout=100)
    assert [told["ranks"] for told in json.loads(done.stdout)["processes"]] == [[0], [1]]
    done = subprocess.run(
        [*inside, *words, "--world-size", "3"], env=env, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 2
    ours = [line for line in done.stderr.splitlines() if line.startswith("zero-nb: ")]
    assert ours == [
        "zero-nb: --world-size 3 was asked for, but 2 ranks were started: 2 by the launcher, times "
        "--local-ranks 1"
    ]
    env = {"SLURM_STEP_NUM_TASKS": "2"}  # two tasks, and nothing that tells them of each other
    done = command(*words, env=env | clean, check=False)
    assert done.returncode == 2
    assert "zero-nb: srun started 2 tasks, but each sees itself alone; choose how" in done.stderr


def test_under_another_launcher_one_message_is_enough(clean):
    inside = [launch.find_mpiexec(), "-n", "3", sys.executable, "-m", "mpi4py", CASES_FILE, "1"]
    done = subprocess.run(
        [*inside, "detour"], env=os.environ | clean, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 1
    (ours,) = [line for line in done.stderr.splitlines() if line.startswith("zero-nb: ")]
    assert "the ranks have diverged" in ours


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--engine", "mpi", "--world-size", "3", "--local-ranks", "2"], "--local-ranks must"),
        (["--engine", "mpi", "--world-size", "2", "--data", "nowhere"], "there is no file nowhere"),
        (["--engine", "rays"], "unknown engine 'rays'; choose simulated or mpi"),
    ],
)
def test_the_command_refuses_in_one_line(words, told, clean):
    done = command("train", *words, env=clean, check=False)
    assert done.returncode == 2
    assert told in done.stderr
    assert done.stderr.count("\n") == 1


def test_without_mpi_one_line_says_what_to_install(tmp_path):
    """And everything else works: a finder that knows no mpi4py stands for its absence."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "from importlib.machinery import PathFinder\n"
        "class NoMPI(PathFinder):\n"
        "    @classmethod\n"
        "    def find_spec(cls, name, path=None, target=None):\n"
        "        return None if name == 'mpi4py' else super().find_spec(name, path, target)\n"
        "sys.meta_path[sys.meta_path.index(PathFinder)] = NoMPI\n"
    )
    env = {"PYTHONPATH": str(tmp_path)}
    done = command("train", "--engine", "mpi", env=env, check=False)
    assert done.returncode == 2
    assert done.stderr == f"zero-nb: {launch.INSTALL_HINT}\n"
    assert "pip install 'zero-nb[mpi]'" in launch.INSTALL_HINT
    done = command("train", "--steps", "1", "--world-size", "2", "--json", env=env)
    assert json.loads(done.stdout)["stage"] == 3
