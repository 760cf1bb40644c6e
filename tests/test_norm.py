"""The order-free norm: the same bits for every split, and the right number."""

import math

import numba
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import naive
from zero_nb.core import checks, kernels
from zero_nb.core.flat import FlatLayout, flatten, own_shard, run_table
from zero_nb.core.norm import (
    fixed_to_norm,
    fixed_to_power_norm,
    max_abs,
    max_and_squares,
    sum_powers_fixed,
    sum_squares_fixed,
)
from zero_nb.core.precision import BFLOAT16, FLOAT16, FLOAT32

JIT = not numba.config.DISABLE_JIT
FORMATS = pytest.mark.parametrize("fmt", [FLOAT32, BFLOAT16, FLOAT16], ids=lambda f: f.name)
WORLDS = pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])


@pytest.fixture(params=["sequential", "parallel"])
def form(request, monkeypatch):
    """Either form of the kernels; the parallel one in more than one piece."""
    monkeypatch.setattr(kernels, "PARALLEL_FROM", 0 if request.param == "parallel" else 1 << 60)
    monkeypatch.setattr(checks, "RUN_BLOCK", 4)


def one_run(*numels):
    """A table of runs that lie end to end in row 0."""
    starts = np.cumsum((0, *numels))[:-1]
    return np.array([[0, -1, start, -1, -1, n, 0] for start, n in zip(starts, numels, strict=True)])


def norm_of(grad, runs, rows, fmt, total_numel):
    """All the way: maximum, sum over rows, norm; as the ranks of a world do it together."""
    largest = float(max_abs(grad, runs, rows, fmt).max())
    sums = sum_squares_fixed(grad, runs, rows, fmt, largest, total_numel)
    return fixed_to_norm(int(sums.sum()), largest, total_numel)


def gradients(fmt, seed=0):
    """Gradients of three parameters of many magnitudes, in the format, and as float32."""
    rng = np.random.default_rng(seed)
    arrays = [
        (rng.standard_normal(shape) * 10.0 ** rng.uniform(-4, 2, shape)).astype(np.float32)
        for shape in ((37,), (5, 9), (21,))
    ]
    stored = [naive.store(array, fmt) for array in arrays]
    return stored, np.concatenate([naive.widen(s, fmt).reshape(-1) for s in stored])


@pytest.mark.usefixtures("form")
@FORMATS
def test_every_split_gives_the_same_bits(fmt):
    stored, wide = gradients(fmt)
    found = set()
    for world_size in (1, 2, 3, 4, 8):
        layout = FlatLayout(("a", "b", "c"), tuple(s.shape for s in stored), world_size)
        ranks = range(world_size)
        full = np.stack([flatten(stored, world_size)] * world_size)
        full[:, layout.numel :] = 0x7FFF if fmt is not FLOAT32 else np.nan  # as loud as it gets
        shards = own_shard(full, ranks, world_size).copy()
        for place, grad in (("full_own", full), ("shard", shards)):
            for hyper_of in ((0, 0, 0), (0, 1, 0)):
                runs = run_table(layout, ranks, placements={"GRAD": place}, hyper_of=hyper_of)
                found.add(norm_of(grad, runs, world_size, fmt, layout.numel))
                found.add(norm_of(grad, runs[::-1].copy(), world_size, fmt, layout.numel))
        # Stage 0: every rank has it all, and each knows the norm alone (D2).
        runs = run_table(
            layout, ranks, placements={"GRAD": "full"}, hyper_of=(0, 0, 0), replicated=True
        )
        largest = max_abs(full, runs, world_size, fmt)
        sums = sum_squares_fixed(full, runs, world_size, fmt, float(largest[0]), layout.numel)
        assert len(set(largest.tolist())) == len(set(sums.tolist())) == 1
        found.add(fixed_to_norm(int(sums[-1]), float(largest[0]), layout.numel))
    assert len(found) == 1
    # Each square is off by half a step of the grid at most, far below the last digit of float32.
    assert found.pop() == pytest.approx(naive.norm(wide), rel=1e-12)


@FORMATS
@pytest.mark.usefixtures("form")
def test_the_sum_is_exactly_that_of_fractions_on_the_grid(fmt):
    stored, wide = gradients(fmt, seed=1)
    grad = np.concatenate([s.reshape(-1) for s in stored])
    largest = float(max_abs(grad, one_run(grad.size), 1, fmt)[0])
    assert largest == np.abs(wide).max()
    exponent = math.frexp(largest)[1]
    for total_numel in (grad.size, 4096, 4097, 1 << 30, 1 << 55):
        k = min(51, 61 - math.ceil(math.log2(total_numel)))
        sums = sum_squares_fixed(grad, one_run(grad.size), 1, fmt, largest, total_numel)
        assert int(sums[0]) == naive.sum_squares_fixed(wide, exponent, k)


@FORMATS
@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("order", ["as it comes", "rising", "falling", "zeros first"])
def test_one_pass_gives_the_same_maximum_and_sum(fmt, order):
    stored, wide = gradients(fmt, seed=3)
    grad = np.concatenate([s.reshape(-1) for s in stored])
    if order == "zeros first":
        grad[:40] = 0
    elif order != "as it comes":
        turn = np.argsort(np.abs(wide), kind="stable")
        grad = grad[turn if order == "rising" else turn[::-1]].copy()
    runs = one_run(*[9] * 11, grad.size - 99)
    runs[5:, 0] = 1
    rows = max_abs(grad, runs, 2, fmt)
    largest = float(rows.max())
    sums = sum_squares_fixed(grad, runs, 2, fmt, largest, grad.size)
    for guess in (0.0, 1e-3, largest, 2 * largest, 1e30):
        again, squares = max_and_squares(grad, runs, 2, fmt, grad.size, guess)
        assert again.tolist() == rows.tolist()
        known = squares[:, 1] == math.frexp(largest)[1]
        assert known.all() if guess == largest else known.any() == (guess < largest)
        begun = sum_squares_fixed(grad, runs, 2, fmt, largest, grad.size, squares)
        assert begun.tolist() == sums.tolist()


@FORMATS
@pytest.mark.parametrize("bad", [np.inf, np.nan, -np.nan])
def test_one_pass_finds_what_is_not_finite(fmt, bad):
    grad = fmt.round(np.array([1.0, -9.0, 3.0, bad, 2.0, 4.0], np.float32))
    runs = one_run(3, 2, 1)
    runs[1:, 0] = 1, 2
    for guess in (0.0, 2.0, 100.0):
        largest, squares = max_and_squares(grad, runs, 3, fmt, 6, guess)
        assert largest.tolist() == [9.0, np.inf, 4.0]
        with pytest.raises(ValueError, match=r"larger than max_abs 9\.0, or NaN"):
            sum_squares_fixed(grad, runs, 3, fmt, 9.0, 6, squares)


@given(
    arrays(np.float32, st.integers(1, 12), elements=st.floats(-(2.0**100), 2.0**100, width=32)),
    st.integers(0, 12),
)
def test_any_numbers_split_anywhere(x, cut):
    cut = min(cut, x.size)
    whole = norm_of(x, one_run(x.size), 1, FLOAT32, x.size)
    assert norm_of(x, one_run(cut, x.size - cut), 1, FLOAT32, x.size) == whole
    assert norm_of(x[::-1].copy(), one_run(x.size), 1, FLOAT32, x.size) == whole
    assert whole == pytest.approx(naive.norm(x), rel=1e-6)


@pytest.mark.parametrize(
    "x",
    [
        [3.0, 4.0], [3.4e38, 3.4e38, 3.4e38], [1e-45, 0.0], [1e-45] * 4, [1.17e-38, 1e-40],
        [-2.0], [2.0**127], [1.9999999], [1e20, 1e-20],
    ],
)  # fmt: skip
def test_extremes(x):
    x = np.array(x, np.float32)
    got = norm_of(x, one_run(x.size), 1, FLOAT32, x.size)
    assert got == pytest.approx(naive.norm(x), rel=1e-12)


def test_the_worst_case_is_as_the_note_says():
    # One large element, all others just too small for the grid: their squares round to nothing.
    n = (1 << 20) if JIT else (1 << 10)
    k = min(51, 61 - n.bit_length() + 1)
    x = np.full(n, 2.0 ** (-(k + 1) / 2) * 0.999, np.float32)
    x[0] = 0.999
    got = norm_of(x, one_run(n), 1, FLOAT32, n)
    exact = math.sqrt(float((x.astype(np.float64) ** 2).sum()))
    assert abs(got**2 - exact**2) <= n / 2 ** (k + 1)
    assert got < exact


@FORMATS
@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan, -np.nan])
def test_max_abs_is_the_finite_check(fmt, bad):
    x = np.array([1.0, -9.0, 3.0, bad, 2.0], np.float32)
    grad = fmt.round(x)
    runs = one_run(3, 2)
    runs[1, 0] = 2
    assert max_abs(grad, runs, 3, fmt).tolist() == [9.0, 0.0, np.inf]
    assert max_abs(grad, runs[:1], 1, fmt).tolist() == [9.0]  # what no run covers is not seen
    with pytest.raises(ValueError, match="no norm"):
        sum_squares_fixed(grad, runs, 3, fmt, np.inf, 5)


def test_E3_a_rank_without_elements_contributes_zero():
    grad = np.full(4, 5, np.float32)
    nothing = np.empty((0, 7), np.int64)
    assert max_abs(grad, nothing, 2).tolist() == [0.0, 0.0]
    assert sum_squares_fixed(grad, nothing, 2, FLOAT32, 5.0, 4).tolist() == [0, 0]
    assert fixed_to_norm(0, 0.0, 0) == 0.0
    assert sum_squares_fixed(np.zeros(4, np.float32), one_run(4), 1, FLOAT32, 0.0, 4) == [0]


def test_D1_the_norm_of_two_shards_is_that_of_the_whole():
    runs = one_run(1, 1)
    runs[1, 0] = 1
    assert norm_of(np.array([3, 4], np.float32), runs, 2, FLOAT32, 2) == 5.0


@pytest.mark.skipif(numba.config.NUMBA_NUM_THREADS < 2 or not JIT, reason="needs two threads")
@FORMATS
def test_threads_change_nothing(fmt, monkeypatch):
    monkeypatch.setattr(kernels, "PARALLEL_FROM", 0)
    monkeypatch.setattr(checks, "RUN_BLOCK", 1000)
    x = fmt.round(np.random.default_rng(0).standard_normal(30_011).astype(np.float32))
    runs = one_run(*[1000] * 30, 11)
    found = set()
    for threads in (1, 2):
        before = numba.get_num_threads()
        numba.set_num_threads(threads)
        try:
            found.add(norm_of(x, runs, 1, fmt, x.size))
        finally:
            numba.set_num_threads(before)
    assert len(found) == 1


@FORMATS
@pytest.mark.parametrize("p", [0.5, 1, 3, 2.5])
def test_other_powers(fmt, p):
    stored, wide = gradients(fmt, seed=2)
    grad = np.concatenate([s.reshape(-1) for s in stored])
    n = grad.size
    largest = float(max_abs(grad, one_run(n), 1, fmt)[0])
    found = set()
    for runs in (one_run(n), one_run(1, n - 1), one_run(50, 7, n - 57)):
        total = int(sum_powers_fixed(grad, runs, 1, fmt, largest, n, p)[0])
        found.add(fixed_to_power_norm(total, largest, n, p))
    assert len(found) == 1
    exact = math.fsum(abs(float(v)) ** p for v in wide) ** (1 / p)
    assert found.pop() == pytest.approx(exact, rel=1e-9)


def test_power_2_agrees_with_the_squares():
    x = np.array([3, 4], np.float32)
    total = int(sum_powers_fixed(x, one_run(2), 1, FLOAT32, 4.0, 2, 2)[0])
    assert fixed_to_power_norm(total, 4.0, 2, 2) == pytest.approx(5.0, rel=1e-14)
    assert sum_powers_fixed(0 * x, one_run(2), 1, FLOAT32, 0.0, 2, 1).tolist() == [0]


def test_what_makes_no_sense_is_refused():
    x = np.array([1, 2, np.nan, 8], np.float32)
    runs = one_run(2)
    for error, call in [
        (TypeError, lambda: max_abs(x, runs, 1, BFLOAT16)),
        (TypeError, lambda: max_abs(x.astype(">f4"), runs, 1)),
        (ValueError, lambda: max_abs(x[::2], runs, 1)),
        (ValueError, lambda: max_abs(x, one_run(5), 1)),
        (ValueError, lambda: max_abs(x, runs, 0)),
        (ValueError, lambda: sum_squares_fixed(x, runs, 1, FLOAT32, -1.0, 4)),
        (ValueError, lambda: sum_squares_fixed(x, runs, 1, FLOAT32, 2.0, 1)),
        (ValueError, lambda: sum_squares_fixed(x, runs, 1, FLOAT32, 0.5, 4)),
        (ValueError, lambda: sum_squares_fixed(x, one_run(3), 1, FLOAT32, 2.0, 4)),
        (ValueError, lambda: sum_squares_fixed(x, runs, 1, FLOAT32, 2.0, 4, np.zeros((5, 2), int))),
        (TypeError, lambda: sum_squares_fixed(x, runs, 1, FLOAT32, 2.0, 4, np.zeros((1, 2)))),
        (ValueError, lambda: max_and_squares(x, runs, 1, FLOAT32, 4, np.inf)),
        (ValueError, lambda: max_and_squares(x, runs, 1, FLOAT32, 1)),
        (ValueError, lambda: fixed_to_norm(1, np.nan, 4)),
        (ValueError, lambda: fixed_to_norm(1, 1.0, -1)),
        (ValueError, lambda: fixed_to_norm(-1, 1.0, 4)),
        (ValueError, lambda: sum_powers_fixed(x, runs, 1, FLOAT32, 2.0, 4, 0)),
        (ValueError, lambda: sum_powers_fixed(x, runs, 1, FLOAT32, 2.0, 4, np.inf)),
        (ValueError, lambda: sum_powers_fixed(x, runs, 1, FLOAT32, 1.5, 4, 1)),
        (ValueError, lambda: sum_powers_fixed(x, one_run(3), 1, FLOAT32, 2.0, 4, 1)),
        (ValueError, lambda: sum_powers_fixed(x, runs, 1, FLOAT32, 2.0, 1, 1)),
        (ValueError, lambda: fixed_to_power_norm(-1, 1.0, 4, 1)),
        (ValueError, lambda: fixed_to_power_norm(1, 1.0, 4, -1)),
    ]:
        with pytest.raises(error):
            call()
