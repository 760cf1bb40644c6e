"""Real processes do what simulated ranks do, to the bit; the command starts them or joins them.

The same cases run under mpiexec (`mpi_runs.py`) and here with simulated ranks. What happens when
a rank fails: `test_mpi_failures.py`.
"""

import atexit
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

import pytest

import mpi_cases
import saved_runs
from mpi_runs import CASES_FILE, run
from zero_nb.cluster import launch
from zero_nb.cluster.simulated import SimulatedWorld
from zero_nb.train import checkpoint

TEXT = Path(__file__).resolve()  # any text of some length to train on
WORLDS = [(2, 1), (3, 1), (4, 1), (8, 1), (8, 4)]  # world_size, ranks a process
PURPOSES = ("param", "grad", "control", "other")

FOLDERS = tempfile.TemporaryDirectory(prefix="zero-nb-test-mpi-")
atexit.register(FOLDERS.cleanup)


def cases_of(world_size, local_ranks):
    """Eight processes crowd two cores: there only what has most in it."""
    if world_size // local_ranks < 8:
        return list(mpi_cases.CASES)
    kept = ("collectives", "fp32 uneven", "bf16 uneven", "checkpoint of stage 2")
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
    cases = ("collectives", "stage 3 fp32 uneven")
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


def _wait_for_cable(namespace, seconds=10):
    """Return once the cable carries."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        shown = subprocess.run(
            ["ip", "-n", namespace, "addr", "show", "dev", "wire"],
            check=True, capture_output=True, text=True, timeout=20,
        ).stdout  # fmt: skip
        if "state UP" in shown and "tentative" not in shown:
            return
        time.sleep(0.02)
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
            # An address of IPv6 is tentative for a second or two, until the neighbours were asked
            # for it, and UCX finds such a host unreachable: there is none.
            ip("netns", "exec", namespace, "sh", "-c",
               "echo 1 >/proc/sys/net/ipv6/conf/wire/disable_ipv6 || true")  # fmt: skip
            ip("-n", namespace, "addr", "add", f"{address}/24", "dev", "wire")
            ip("-n", namespace, "link", "set", "lo", "up")
            ip("-n", namespace, "link", "set", "wire", "up")
        for namespace in names:
            _wait_for_cable(namespace)
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
    assert done.returncode == 0, done.stderr
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
