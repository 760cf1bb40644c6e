"""What all kernels have in common: how they are compiled, started and kept reproducible."""

import hashlib
import os
import subprocess
import sys
import threading

import numba
import numpy as np
import pytest

from zero_nb.core import kernels, rank_axis
from zero_nb.core.flat import FlatLayout, run_table
from zero_nb.core.norm import fixed_to_norm, max_abs, sum_squares_fixed
from zero_nb.core.partition import ceil_div_layout, gather_flat, partition
from zero_nb.core.precision import BFLOAT16, FLOAT16, FLOAT32
from zero_nb.core.update import adam_hyper, adam_update, sgd_hyper, sgd_update

JIT = not numba.config.DISABLE_JIT


def everything():
    """A checksum over the results of every kernel, on numbers that show any other rounding."""
    digest = hashlib.sha256()
    rng = np.random.default_rng(0)
    for fmt in (FLOAT32, BFLOAT16, FLOAT16):
        wide = (rng.standard_normal((5, 35)) * 2.0 ** rng.integers(-20, 9, (5, 35))).astype("f4")
        x = fmt.round(wide)
        results = [x, fmt.widen(x), rank_axis.sum_rows(x, fmt)]
        results += [rank_axis.sum_rows_everywhere(x.copy(), fmt)]
        results += [rank_axis.spread_diagonal(x.copy()), rank_axis.spread(x[1], x.copy())]
        layout = FlatLayout(("a", "b"), ((17,), (4, 4)), 5)
        place = dict.fromkeys(("TARGET", "GRAD", "STATE", "PARAM"), "shard")
        runs = run_table(layout, range(5), placements=place, hyper_of=(0, 1))
        largest = float(max_abs(x, runs, 5, fmt).max())
        sums = sum_squares_fixed(x, runs, 5, fmt, largest, 33)
        results += [sums, np.array(fixed_to_norm(int(sums.sum()), largest, 33))]
        shards = partition(x.reshape(-1), ceil_div_layout([(3,), (172,)], 4))
        results += [*shards, gather_flat(shards, ceil_div_layout([(3,), (172,)], 4))]
        for decoupled in (True, False):
            state = [abs(wide[i]).copy() for i in range(3)]
            hyper = np.stack([adam_hyper(0.1, (0.9, 0.99), 1e-8, d, 2) for d in (0.1, 0.3)])
            adam_update(
                *state[:1], x[0], *state[1:], runs, hyper, decoupled=decoupled, grad_format=fmt,
                param=(param := fmt.round(wide[4])), param_format=fmt,
            )  # fmt: skip
            results += [*state, param]
        state = [wide[i].copy() for i in range(2)]
        hyper = np.stack([sgd_hyper(0.1, 0.9, decay) for decay in (0.1, 0.3)])
        sgd_update(state[0], x[0], state[1], runs, hyper, nesterov=True, grad_format=fmt)
        for result in (*results, *state):
            digest.update(np.ascontiguousarray(result).tobytes())
    return digest.hexdigest()


PROGRAM = "import test_kernels; print(test_kernels.everything())"


def python(program, **environment):
    """What another Python prints; it fails if that one does."""
    path = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_same_bits_without_jit():
    assert python(PROGRAM, NUMBA_DISABLE_JIT="1") == everything()


@pytest.mark.skipif(not JIT, reason="nothing is compiled")
def test_the_same_bits_in_parallel_form(monkeypatch):
    sequential = everything()
    monkeypatch.setattr(kernels, "PARALLEL_FROM", 0)
    assert everything() == sequential


@pytest.mark.parametrize("form", [0, 1 << 60], ids=["parallel", "sequential"])
def test_the_same_bits_stored_past_the_caches(form, monkeypatch):
    usual = everything()
    monkeypatch.setattr(kernels, "PARALLEL_FROM", form)
    monkeypatch.setattr(kernels, "STREAM_FROM", 0)
    assert everything() == usual


THREADS = """
import threading
import numpy as np
from zero_nb.core import kernels, rank_axis
kernels.PARALLEL_FROM = 0
x = np.arange(4 * 50_000, dtype=np.float32).reshape(4, -1)
expected = rank_axis.sum_rows(x)
wrong = []
def work():
    for _ in range(50):
        if not np.array_equal(rank_axis.sum_rows(x), expected):
            wrong.append(1)
threads = [threading.Thread(target=work) for _ in range(4)]
[t.start() for t in threads]
[t.join() for t in threads]
print(len(wrong))
"""


@pytest.mark.skipif(not JIT, reason="nothing runs in parallel")
def test_threads_may_call_parallel_kernels_at_once_on_the_layer_that_would_abort():
    assert python(THREADS, NUMBA_THREADING_LAYER="workqueue", NUMBA_NUM_THREADS="2") == "0"


def test_little_work_is_sequential_and_much_is_parallel(monkeypatch):
    monkeypatch.setattr(kernels, "PARALLEL_FROM", 100)
    called = []
    for elements in (99, 100):
        kernels.launch(
            lambda *args: called.append(("sequential", args)),
            lambda *args: called.append(("parallel", args)),
            elements,
            1,
            2,
        )
    assert called == [("sequential", (1, 2)), ("parallel", (1, 2))]


@pytest.mark.skipif(not JIT, reason="Python has no lock to take")
def test_parallel_kernels_run_one_at_a_time(monkeypatch):
    monkeypatch.setattr(kernels, "PARALLEL_FROM", 0)
    inside, most = [], []

    def kernel():
        inside.append(1)
        most.append(len(inside))
        threading.Event().wait(0.005)
        inside.pop()

    threads = [threading.Thread(target=kernels.launch, args=(None, kernel, 1)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 4


def test_a_kernel_that_fails_gives_the_lock_back(monkeypatch):
    monkeypatch.setattr(kernels, "PARALLEL_FROM", 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            kernels.launch(None, lambda: 1 // 0, 1)


def test_where_no_cache_can_be_written_there_is_none(monkeypatch):
    seen = []

    def njit(cache=False, **options):
        seen.append({"cache": cache, **options})
        if cache:
            raise RuntimeError("cannot cache function 'f': no locator available")
        return lambda function: function

    monkeypatch.setattr(kernels, "njit", njit)

    @kernels._jit(parallel=True)
    def f():
        return 5

    assert f() == 5
    assert [options["cache"] for options in seen] == [True, False]
    for options in seen:
        assert options["error_model"] == "numpy"
        assert options["nogil"]
        assert options["parallel"]
        assert "fastmath" not in options


@pytest.mark.skipif(not JIT, reason="nothing is compiled")
def test_every_kernel_is_compiled_with_the_options_that_keep_its_bits():
    found = [getattr(kernels, name) for name in dir(kernels)]
    found = [f for f in found if hasattr(f, "targetoptions")]
    assert len(found) > 40
    for kernel in found:
        assert kernel.targetoptions["error_model"] == "numpy", kernel
        assert kernel.targetoptions["nogil"], kernel
        assert not kernel.targetoptions.get("fastmath"), kernel
        assert kernel.targetoptions.get("parallel", False) == kernel.__name__.endswith("_parallel")


@pytest.mark.parametrize("form", ["sequential", "parallel"])
def test_infinities_and_nans_pass_without_a_warning(form, monkeypatch):
    monkeypatch.setattr(kernels, "PARALLEL_FROM", 0 if form == "parallel" else 1 << 60)
    x = np.array([[np.inf, np.nan, 3e38, 1.0], [-np.inf, 1.0, 3e38, 2.0]], np.float32)
    total = rank_axis.sum_rows(x)
    assert np.isnan(total[:2]).all()
    assert total[2:].tolist() == [np.inf, 3.0]
    bits = BFLOAT16.round(np.array([np.nan, np.inf, 3.4e38], np.float32))
    assert bits.tolist() == [0x7FC0, 0x7F80, 0x7F80]
    target, state = np.ones(2, np.float32), [np.zeros(2, np.float32) for _ in range(2)]
    hyper = adam_hyper(0.1, (0.9, 0.999), 0.0, 0.0, 1)[None]
    grad = np.array([0.0, 1.0], np.float32)
    adam_update(target, grad, *state, np.array([[0, 0, 0, 0, 0, 2, 0]]), hyper, decoupled=True)
    assert np.isnan(target[0])  # 0 / 0 with eps = 0, as PyTorch gives
