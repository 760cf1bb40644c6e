"""Sums and copies over the rank axis: the same bits as one rank after the other."""

import numba
import numpy as np
import pytest

import naive
from zero_nb.core import kernels
from zero_nb.core.precision import BFLOAT16, FLOAT16, FLOAT32
from zero_nb.core.rank_axis import spread, spread_diagonal, sum_rows, sum_rows_everywhere

JIT = not numba.config.DISABLE_JIT
FORMATS = pytest.mark.parametrize("fmt", [FLOAT32, BFLOAT16, FLOAT16], ids=lambda f: f.name)
# On both sides of passes of four rows.
ROWS = pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7, 8, 9, 13])
# On both sides of a block (8192), and odd; short where every element is a Python call.
COLUMNS = [0, 1, 5, 8191, 8192, 16_385] if JIT else [0, 1, 5, 23]


@pytest.fixture(params=["sequential", "parallel"])
def form(request, monkeypatch):
    """Either form of every kernel, with blocks that small arrays fill when they can be set."""
    monkeypatch.setattr(kernels, "PARALLEL_FROM", 0 if request.param == "parallel" else 1 << 60)
    if not JIT:
        monkeypatch.setattr(kernels, "SUM_BLOCK", 4)


def rows_of(rows, columns, fmt, seed=0):
    """Numbers of many sizes, so that another order of addition shows."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, columns)) * 2.0 ** rng.integers(-6, 6, (rows, columns))
    # What is stored is what was stored before: rounded by NumPy for speed, not by the kernel.
    bits = x.astype(np.float32).view(np.uint32) >> np.uint32(16)
    if fmt is BFLOAT16:
        return bits.astype(np.uint16)
    return x.astype(np.float16).view(np.uint16) if fmt is FLOAT16 else x.astype(np.float32)


def same_bits(a, b):
    return a.dtype == b.dtype and np.array_equal(a.view(f"u{a.itemsize}"), b.view(f"u{b.itemsize}"))


def expected_sum(x, fmt):
    """The naive sum; the exact rounding twin is slow, so only some columns of long rows."""
    keep = np.r_[0 : min(8, x.shape[1]), max(8, x.shape[1] - 8) : x.shape[1]]
    return keep, naive.sum_rows(np.ascontiguousarray(x[:, keep]), fmt)


@pytest.mark.usefixtures("form")
@FORMATS
@ROWS
@pytest.mark.parametrize("columns", COLUMNS)
def test_sum_rows_adds_in_row_order_and_rounds_once(fmt, rows, columns):
    x = rows_of(rows, columns, fmt)
    before = x.copy()
    out = sum_rows(x, fmt)
    keep, expected = expected_sum(x, fmt)
    assert out.shape == (columns,)
    assert same_bits(out[keep], expected)
    assert same_bits(x, before)
    if fmt is FLOAT32:
        assert same_bits(out, naive.sum_rows(x, fmt))


@pytest.mark.usefixtures("form")
@FORMATS
@ROWS
def test_all_reduce_leaves_the_bits_of_the_sum_in_every_row(fmt, rows):
    x = rows_of(rows, COLUMNS[-1], fmt)
    total = sum_rows(x, fmt)
    assert sum_rows_everywhere(x, fmt) is x
    for row in x:
        assert same_bits(row, total)


def test_the_order_of_addition_is_seen_by_these_numbers():
    x = rows_of(5, 400, FLOAT32)
    assert not same_bits(naive.sum_rows(x, FLOAT32), naive.sum_rows(x[::-1].copy(), FLOAT32))


def test_sums_start_from_row_0_so_that_minus_zero_stays():
    x = np.full((3, 4), -0.0, np.float32)
    assert np.signbit(sum_rows(x)).all()
    assert np.signbit(sum_rows_everywhere(x)).all()


def test_B2_a_sum_of_bfloat16_does_not_stall():
    ones = np.full((512, 3), 0x3F80, np.uint16)  # 1.0
    assert BFLOAT16.widen(sum_rows(ones, BFLOAT16)).tolist() == [512.0] * 3


def test_reduce_scatter_is_the_sum_seen_as_slices():
    x = rows_of(4, 20, FLOAT32)
    out = np.empty((4, 5), np.float32)
    assert sum_rows(x, out=out) is out
    assert same_bits(out.reshape(-1), sum_rows(x))


@pytest.mark.usefixtures("form")
@ROWS
@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("dtype", [np.float32, np.uint16, np.float64, np.int8])
def test_spread_fills_every_row(rows, columns, dtype):
    src = np.random.default_rng(0).integers(-100, 100, columns).astype(dtype)
    out = np.full((rows, columns), 77, dtype)
    assert spread(src, out) is out
    assert (out == src).all()


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("root", [0, 2])
def test_a_row_can_be_spread_to_the_others_in_place(root):
    x = rows_of(3, COLUMNS[-1], FLOAT32)
    src = x[root].copy()
    spread(x[root], x)
    assert (x == src).all()


def test_spread_keeps_every_bit():
    nans = np.array([0x7F800001, 0xFFC12345, 0x80000000], np.uint32).view(np.float32)
    out = spread(nans, np.zeros((3, 3), np.float32))
    assert (out.view(np.uint32) == nans.view(np.uint32)).all()


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("shard", [0, 1, 5, 8200 if JIT else 9])
@FORMATS
def test_all_gather_in_place_takes_each_slice_from_its_owner(rows, shard, fmt):
    x = rows_of(rows, rows * shard, fmt)
    expected = np.concatenate([x[r, r * shard : (r + 1) * shard] for r in range(rows)])
    assert spread_diagonal(x) is x
    for row in x:
        assert same_bits(row, expected)


@pytest.mark.skipif(numba.config.NUMBA_NUM_THREADS < 2 or not JIT, reason="needs two threads")
@FORMATS
def test_threads_change_nothing(fmt, monkeypatch):
    monkeypatch.setattr(kernels, "PARALLEL_FROM", 0)
    results = []
    for threads in (1, 2):
        before = numba.get_num_threads()
        numba.set_num_threads(threads)
        try:
            x = rows_of(7, 7 * 5001, fmt)
            everywhere = sum_rows_everywhere(x.copy(), fmt)
            results.append((sum_rows(x, fmt), everywhere, spread_diagonal(x)))
        finally:
            numba.set_num_threads(before)
    for one, two in zip(*results, strict=True):
        assert same_bits(one, two)


def test_what_a_kernel_could_not_take_is_refused_before_anything_is_written():
    x = np.full((2, 6), 7, np.float32)
    out = np.full(6, 7, np.float32)
    read_only = x.copy()
    read_only.flags.writeable = False
    for error, call in [
        (TypeError, lambda: sum_rows(x, BFLOAT16)),
        (TypeError, lambda: sum_rows(x.astype(">f4"))),
        (TypeError, lambda: sum_rows(x.tolist())),
        (ValueError, lambda: sum_rows(x[0])),
        (ValueError, lambda: sum_rows(x[:0])),
        (ValueError, lambda: sum_rows(x[:, ::2])),
        (ValueError, lambda: sum_rows(np.asfortranarray(x))),
        (ValueError, lambda: sum_rows(x, out=out[:5])),
        (TypeError, lambda: sum_rows(x, out=out.astype(np.float64))),
        (ValueError, lambda: sum_rows(x, out=x[1])),
        (ValueError, lambda: sum_rows_everywhere(read_only)),
        (ValueError, lambda: sum_rows_everywhere(x[:, 1:5])),
        (ValueError, lambda: spread(out[:5], x)),
        (TypeError, lambda: spread(out.astype(np.float64), x)),
        (ValueError, lambda: spread(x.reshape(-1)[3:9], x)),
        (ValueError, lambda: spread(out, read_only)),
        (TypeError, lambda: spread(np.zeros(6, complex), np.zeros((2, 6), complex))),
        (TypeError, lambda: spread(np.zeros(6, object), np.zeros((2, 6), object))),
        (ValueError, lambda: spread_diagonal(np.zeros((4, 5), np.float32))),
        (ValueError, lambda: spread_diagonal(read_only)),
    ]:
        with pytest.raises(error):
            call()
    assert (x == 7).all()
    assert (out == 7).all()


def test_A18_a_length_that_does_not_divide_is_named():
    with pytest.raises(ValueError, match=r"numel 5 is not a multiple of world_size 4.*flat\.pad"):
        spread_diagonal(np.zeros((4, 5), np.float32))
