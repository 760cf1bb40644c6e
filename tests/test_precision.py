"""Storage formats: bfloat16 and float16 bits against NumPy and against exact fractions."""

import numba
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import naive
from zero_nb.core import kernels
from zero_nb.core.precision import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    bfloat16_to_float32,
    float16_to_float32,
    float32_to_bfloat16,
    float32_to_float16,
    get_format,
)

EVERY = np.arange(1 << 16, dtype=np.uint16)
FORMATS = pytest.mark.parametrize("fmt", [FLOAT32, BFLOAT16, FLOAT16], ids=lambda f: f.name)
SIXTEEN = pytest.mark.parametrize("fmt", [BFLOAT16, FLOAT16], ids=lambda f: f.name)


def same_bits(a, b):
    return a.dtype == b.dtype and np.array_equal(a.view(f"u{a.itemsize}"), b.view(f"u{b.itemsize}"))


def test_every_float16_widens_as_in_numpy():
    expected = EVERY.view(np.float16).astype(np.float32)
    got = float16_to_float32(EVERY)
    number = ~np.isnan(expected)
    assert same_bits(got[number], expected[number])
    assert np.isnan(got[~number]).all()
    assert np.array_equal(np.signbit(got), np.signbit(expected))


@SIXTEEN
def test_widening_and_rounding_gives_every_number_back(fmt):
    back = fmt.round(fmt.widen(EVERY))
    number = ~np.isnan(fmt.widen(EVERY))
    assert np.array_equal(back[number], EVERY[number])


@SIXTEEN
def test_rounding_is_to_nearest_even_between_all_neighbours(fmt):
    # Up to infinity: the midpoints of all neighbours, and the float32 next to each on both sides.
    top = 0x7F80 if fmt is BFLOAT16 else 0x7C00
    low = EVERY[: top - 1]
    exact = fmt.widen(low).astype(np.float64), fmt.widen(low + np.uint16(1)).astype(np.float64)
    middle = ((exact[0] + exact[1]) / 2).astype(np.float32)
    normal = middle >= np.finfo(np.float32).tiny  # where float32 holds the midpoint exactly
    assert np.array_equal(middle[normal].astype(np.float64), ((exact[0] + exact[1]) / 2)[normal])
    even = low + (low & np.uint16(1))
    for sign, bit in ((1, 0), (-1, 0x8000)):
        signed = np.float32(sign) * middle
        assert np.array_equal(fmt.round(signed)[normal], (even | np.uint16(bit))[normal])
        below = np.nextafter(middle, np.float32(0)) * np.float32(sign)
        above = np.nextafter(middle, np.float32(np.inf)) * np.float32(sign)
        assert np.array_equal(fmt.round(below)[normal], (low | np.uint16(bit))[normal])
        high = low + np.uint16(1) | np.uint16(bit)
        assert np.array_equal(fmt.round(above)[normal], high[normal])


@pytest.mark.parametrize(
    ("x", "bits"),
    [
        (65504.0, 0x7BFF), (65519.996, 0x7BFF), (65520.0, 0x7C00), (1e30, 0x7C00),
        (-65520.0, 0xFC00), (np.inf, 0x7C00), (-np.inf, 0xFC00), (0.0, 0), (-0.0, 0x8000),
        (2.0**-14, 0x0400), (2.0**-24, 0x0001), (2.0**-25, 0x0000), (2.0**-25 * 1.0001, 0x0001),
        (2.0**-24 * 1.5, 0x0002), (2.0**-24 * 2.5, 0x0002), (-(2.0**-26), 0x8000),
        (2.0**-14 - 2.0**-25, 0x0400), (1e-45, 0x0000),
    ],
)  # fmt: skip
def test_float16_limits(x, bits):
    assert float32_to_float16(np.array([x], np.float32))[0] == bits


@pytest.mark.parametrize(
    ("x", "bits"),
    [
        (1.0, 0x3F80), (1.0 + 2.0**-8, 0x3F80), (1.0 + 3 * 2.0**-8, 0x3F82),
        (3.4028234663852886e38, 0x7F80), (3.3895313892515355e38, 0x7F7F), (np.inf, 0x7F80),
        (-np.inf, 0xFF80), (-0.0, 0x8000), (1e-45, 0x0000), (9.2e-41, 0x0001),
    ],
)  # fmt: skip
def test_bfloat16_limits(x, bits):
    assert float32_to_bfloat16(np.array([x], np.float32))[0] == bits


def test_nan_stays_nan_with_its_sign():
    payloads = np.array([0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0x7FABCDEF], np.uint32)
    nans = np.concatenate([payloads, payloads | np.uint32(0x80000000)]).view(np.float32)
    assert float32_to_bfloat16(nans).tolist() == [0x7FC0] * 4 + [0xFFC0] * 4
    half = float32_to_float16(nans)
    assert np.isnan(half.view(np.float16)).all()
    assert (half & 0x0200).all()  # quiet
    assert (half >> 15).tolist() == [0] * 4 + [1] * 4
    assert np.isnan(bfloat16_to_float32(np.array([0x7F81, 0xFFC0], np.uint16))).all()


@pytest.mark.parametrize("place", [0, 1, 17, 36, None])
@pytest.mark.parametrize("nan", [0x7F800001, 0xFFFFFFFF])
def test_a_nan_in_a_block_changes_nothing_beside_it(nan, place):
    # Every 16 upper bits that are no NaN, with lower bits below, on and above the middle; then
    # blocks of them with a NaN somewhere. Expected: rounded in more bits than can overflow.
    upper = np.delete(np.arange(1 << 16), np.r_[0x7F80:0x8000, 0xFF80:0x10000])
    if numba.config.DISABLE_JIT:
        upper = upper[::97]
    bits = (upper[:, None] << 16 | np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])).reshape(-1)
    bits = bits[: len(bits) // 37 * 37].reshape(-1, 37)
    expected = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    if place is not None:
        bits[:, place], expected[:, place] = nan, 0x7FC0 | nan >> 16 & 0x8000
    for block, want in zip(bits[::97], expected[::97], strict=True):
        x = block.astype(np.uint32).view(np.float32)
        assert np.array_equal(float32_to_bfloat16(x), want)
    x = bits.astype(np.uint32).view(np.float32)
    assert np.array_equal(float32_to_bfloat16(x), expected)


@given(arrays(np.float32, st.integers(0, 7), elements=st.floats(width=32, allow_nan=False)))
def test_rounding_agrees_with_exact_fractions(x):
    finite = x[np.isfinite(x)]
    assert np.array_equal(float32_to_bfloat16(finite), naive.store(finite, BFLOAT16))
    with np.errstate(over="ignore"):
        assert np.array_equal(float32_to_float16(x), x.astype(np.float16).view(np.uint16))


@FORMATS
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5), (2, 0, 3), (1027,)])
def test_shapes_are_kept_and_out_is_used(fmt, shape):
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    stored = fmt.round(x)
    assert stored.shape == shape
    assert stored.dtype == fmt.dtype
    out = np.empty_like(stored)
    assert fmt.round(x, out) is out
    assert same_bits(out, stored)
    wide = np.empty_like(x)
    assert fmt.widen(stored, wide) is wide
    assert same_bits(wide, fmt.widen(stored))
    assert not np.may_share_memory(fmt.round(x), x)


@FORMATS
def test_the_parallel_kernels_give_the_same_bits(fmt, monkeypatch):
    size = 150_001 if not numba.config.DISABLE_JIT else 301
    if numba.config.DISABLE_JIT:
        monkeypatch.setattr(kernels, "CAST_BLOCK", 100)
    x = np.random.default_rng(1).standard_normal(size).astype(np.float32)
    stored = fmt.round(x)
    wide = fmt.widen(stored)
    monkeypatch.setattr(kernels, "PARALLEL_FROM", 0)
    assert same_bits(fmt.round(x), stored)
    assert same_bits(fmt.widen(stored), wide)


def test_formats_by_name():
    assert get_format("bfloat16") is get_format("bf16") is get_format(BFLOAT16) is BFLOAT16
    assert get_format("fp32") is FLOAT32
    assert get_format("float16") is FLOAT16
    assert [f.itemsize for f in (FLOAT32, BFLOAT16, FLOAT16)] == [4, 2, 2]
    with pytest.raises(ValueError, match=r"unknown precision 'int8'.*float32.*bfloat16.*float16"):
        get_format("int8")


def test_what_a_kernel_could_not_take_is_refused_before_anything_is_written():
    x = np.ones(6, np.float32)
    out = np.full(6, 7, np.uint16)
    read_only = out.copy()
    read_only.flags.writeable = False
    both = np.zeros(24, np.uint8)
    for error, args in [
        (TypeError, ([1.0], out)),
        (TypeError, (x.astype(np.float64), out)),
        (TypeError, (x.astype(">f4"), out)),
        (ValueError, (np.ones(12, np.float32)[::2], out)),
        (TypeError, (x, out.astype(np.int16))),
        (ValueError, (x, out[:5])),
        (ValueError, (x, np.full(12, 7, np.uint16)[::2])),
        (ValueError, (x, read_only)),
        (ValueError, (both.view(np.float32), both[:12].view(np.uint16))),
    ]:
        with pytest.raises(error):
            float32_to_bfloat16(*args)
    unaligned = np.zeros(25, np.uint8)[1:].view(np.float32)
    if not unaligned.flags.aligned:
        with pytest.raises(ValueError, match="aligned"):
            float32_to_float16(unaligned)
    with pytest.raises(TypeError, match="bits must have dtype uint16"):
        bfloat16_to_float32(x)
    assert (out == 7).all()
