"""Kernels and training where threads and processes meet: on every threading layer of Numba here.

Each case is a Python of its own, since a layer is chosen once and a fault ends the process. What
is asked for is that none crashes, none hangs, and all give the same bits.
"""

import os
import shutil
import stat
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import numba
import pytest

import zero_nb

pytestmark = pytest.mark.skipif(numba.config.DISABLE_JIT, reason="Python starts no such threads")

TESTS = Path(__file__).resolve().parent
LIMIT_S = 120  # a hang; each case takes a few seconds


def installed(layer):
    """Whether Numba can load a threading layer on this machine."""
    try:
        import_module(f"numba.np.ufunc.{layer}")
    except ImportError:
        return False
    return True


POOLS = {"workqueue": "workqueue", "omp": "omppool", "tbb": "tbbpool"}
LAYERS = [layer for layer, module in POOLS.items() if installed(module)]

# What every program begins with: all kernels in their parallel form, and work with a known result.
HEAD = """
import hashlib, os, sys, threading, time
import numpy as np
import tiny
from zero_nb.core import kernels, rank_axis
from zero_nb.core.precision import BFLOAT16
from zero_nb.train.engine import Engine
from zero_nb.train.optim import AdamW
kernels.PARALLEL_FROM = 0
x_RN = np.sin(np.arange(4 * 50_000, dtype=np.float32)).reshape(4, -1)

def cast_once():
    return hashlib.sha256(BFLOAT16.round(x_RN).tobytes()).hexdigest()

def kernels_once():
    bits = BFLOAT16.round(x_RN)
    sums = rank_axis.sum_rows(x_RN), rank_axis.sum_rows(bits, fmt=BFLOAT16)
    return hashlib.sha256(b"".join(part.tobytes() for part in sums)).hexdigest()

def train(stage=3):
    engine = Engine(
        tiny.gpt(), stage=stage, precision="bf16", world_size=3, rule=AdamW(lr=3e-2),
        max_grad_norm=0.05,
    )
    for batch in tiny.gpt_batches(2):
        engine.train_step(*batch)
    return engine.optimizer.weights_sha256()
"""


def start(program, **environment):
    """Start another Python."""
    path = os.pathsep.join([str(TESTS), *(p for p in sys.path if p)])
    # Python 3.12 and newer warn of a fork while threads run, which is what is tried here.
    quiet = ("-W", "error", "-W", "ignore::DeprecationWarning")
    return subprocess.Popen(
        [sys.executable, *quiet, "-c", program],
        env={**os.environ, "PYTHONPATH": path, "NUMBA_NUM_THREADS": "2", **environment},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def end(process):
    """Return what a Python printed; fail if it crashed, or hangs."""
    try:
        out, err = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        pytest.fail(f"hangs after {LIMIT_S} s")
    assert process.returncode == 0, err
    return out.split()


def run(program, **environment):
    """Run a program; return the words it printed."""
    return end(start(HEAD + program, **environment))


@pytest.fixture(scope="module")
def usual():
    """What the work gives in one thread of one process: digest of the kernels, of the weights."""
    return run("print(kernels_once(), train())", NUMBA_NUM_THREADS="1")


each_layer = pytest.mark.parametrize("layer", LAYERS)


def test_there_is_a_layer_everywhere_and_linux_has_two():
    assert "workqueue" in LAYERS
    if sys.platform == "linux":
        assert "omp" in LAYERS


THREADS = """
found = []
def work():
    for _ in range(20):
        found.append(kernels_once())
    found.append(train())
threads = [threading.Thread(target=work) for _ in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(len(found), *sorted(set(found), key=found.index))
print(__import__("numba").threading_layer())
"""


@each_layer
def test_two_threads_call_parallel_kernels_at_once(layer, usual):
    kernel_bits, weights = usual
    count, *found, used = run(THREADS, NUMBA_THREADING_LAYER=layer)
    assert used == layer
    assert count == "42"
    assert found == [kernel_bits, weights]


FORK = """
before = kernels_once()
stop = threading.Event()
def busy():
    while not stop.is_set():
        kernels_once()
other = threading.Thread(target=busy)
other.start()  # so that somebody is in a kernel, or has its lock, when the process is split
time.sleep(0.05)
for _ in range(3):
    child = os.fork()
    if child == 0:
        status = 1
        try:
            print("child:", kernels_once(), train(), flush=True)
            status = 0
        finally:
            os._exit(status)
    end = time.monotonic() + 30
    ended, status = os.waitpid(child, os.WNOHANG)
    while not ended and time.monotonic() < end:
        time.sleep(0.01)
        ended, status = os.waitpid(child, os.WNOHANG)
    if not ended:
        os.kill(child, 9)
        print("hangs")
        break
    elif status:
        print("status", status)
stop.set()
other.join()
print("parent:", before == kernels_once())
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@each_layer
def test_a_forked_child_runs_kernels_and_trains(layer, usual):
    """GNU's OpenMP ends such a child at its first parallel kernel; a lock may stay locked."""
    said = " ".join(run(FORK, NUMBA_THREADING_LAYER=layer))
    assert said.count(" ".join(["child:", *usual])) == 3, said  # TBB complains in between
    assert said.endswith("parent: True")


@each_layer
def test_four_processes_on_whatever_cores_there_are(layer, usual):
    program = HEAD + "print(kernels_once(), train())"
    processes = [start(program, NUMBA_THREADING_LAYER=layer) for _ in range(4)]
    assert [end(process) for process in processes] == [usual] * 4


@pytest.fixture
def read_only(tmp_path):
    """A copy of the package where nothing can be written, not even by root."""
    package = tmp_path / "zero_nb"
    shutil.copytree(
        Path(zero_nb.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__")
    )
    folders = [path for path in package.rglob("*") if path.is_dir()]
    for folder in [package, *folders]:
        (folder / "__pycache__").touch()  # a file where the cache's folder would be
        folder.chmod(stat.S_IREAD | stat.S_IEXEC)
    yield tmp_path
    for folder in [package, *folders]:
        folder.chmod(stat.S_IRWXU)


@each_layer
def test_a_read_only_installation_and_no_home(layer, read_only):
    """Where no cache can be written, kernels are compiled each time, and nothing else changes."""
    usual = run("print(cast_once())", NUMBA_NUM_THREADS="1")
    nowhere = str(read_only / "zero_nb" / "__init__.py" / "home")
    homes = dict.fromkeys(("HOME", "XDG_CACHE_HOME", "LOCALAPPDATA", "APPDATA"), nowhere)
    program = f"import sys; sys.path.insert(0, {str(read_only)!r})" + HEAD
    program += "print(kernels.__file__, cast_once())"  # one kernel: each takes seconds to compile
    used, found = end(start(program, NUMBA_THREADING_LAYER=layer, NUMBA_CACHE_DIR="", **homes))
    assert used == str(read_only / "zero_nb" / "core" / "kernels.py")
    assert [found] == usual
