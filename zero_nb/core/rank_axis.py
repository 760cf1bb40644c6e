"""Sums and copies over the rank axis: the arithmetic of the collectives, in one process.

R rows (ranks), N columns; F padded flat length of a unit, S = F // R.

Sums are made in float32 in row order, from row 0 on, and rounded once; any two ways to compute
them here agree to the last bit, whatever the number of threads.
"""

import numpy as np

from zero_nb.core.checks import check_array, check_no_overlap
from zero_nb.core.kernels import (
    SUM_WORK,
    _spread,
    _spread_diagonal,
    _spread_diagonal_parallel,
    _spread_parallel,
    _sum_rows,
    _sum_rows_bits,
    _sum_rows_bits_parallel,
    _sum_rows_everywhere,
    _sum_rows_everywhere_bits,
    _sum_rows_everywhere_bits_parallel,
    _sum_rows_everywhere_parallel,
    _sum_rows_parallel,
    launch,
    streams,
    sum_blocks,
)
from zero_nb.core.precision import FLOAT32

FEW_ROWS = 4  # with more rows little of the traffic is written


def _check_rows(name, x, dtype=None, writable=False):
    """Refuse anything but a C-contiguous array with at least one row."""
    check_array(name, x, dtype=dtype, ndim=2, writable=writable)
    if x.shape[0] == 0:
        raise ValueError(f"{name} has no rows (shape {x.shape}); there is at least one rank")


def sum_rows(x_RN, fmt=FLOAT32, out=None):
    """Sum over rows, in float32, in row order, rounded once.

    With x of shape (W, F) the result seen as (W, S) is what a reduce-scatter leaves on each rank.

    Parameters
    ----------
    x_RN : numpy.ndarray
        Shape (R, N), the dtype of ``fmt``, C-contiguous.
    fmt : Format
        How x and the result are stored.
    out : numpy.ndarray, optional
        Written instead of a new array: N elements of any shape, no overlap with x.

    Returns
    -------
    numpy.ndarray
        ``out``, or a new array of shape (N,).

    Raises
    ------
    TypeError, ValueError
        An array of another dtype, shape or layout, read-only or overlapping ``out``.
    """
    _check_rows("x_RN", x_RN, fmt.dtype)
    rows, numel = x_RN.shape
    if out is None:
        out = np.empty(numel, fmt.dtype)
    check_array("out", out, dtype=fmt.dtype, writable=True)
    if out.size != numel:
        raise ValueError(f"out must have {numel} elements, one for each column, got {out.shape}")
    check_no_overlap(x_RN=x_RN, out=out)
    flat, flat_out, last = x_RN.reshape(-1), out.reshape(-1), sum_blocks(numel)
    if fmt is FLOAT32:
        stream = rows <= FEW_ROWS and streams(out.nbytes)
        work = x_RN.size * SUM_WORK
        launch(_sum_rows, _sum_rows_parallel, work, flat, rows, flat_out, stream, 0, last)
    else:
        args = (flat, rows, fmt.code, flat_out, 0, last)
        launch(_sum_rows_bits, _sum_rows_bits_parallel, x_RN.size * SUM_WORK, *args)
    return out


def sum_rows_everywhere(x_RN, fmt=FLOAT32):
    """Replace every row by the sum over rows (all-reduce), in place.

    Parameters
    ----------
    x_RN : numpy.ndarray
        Shape (R, N), the dtype of ``fmt``, C-contiguous, written to. No temporary larger than a
        block of the cache is made.
    fmt : Format
        How x is stored.

    Returns
    -------
    numpy.ndarray
        The same array; each row has the bits of ``sum_rows``.

    Raises
    ------
    TypeError, ValueError
        An array of another dtype, shape or layout, or read-only.
    """
    _check_rows("x_RN", x_RN, fmt.dtype, writable=True)
    rows, numel = x_RN.shape
    flat, last = x_RN.reshape(-1), sum_blocks(numel)
    if fmt is FLOAT32:
        kernels = _sum_rows_everywhere, _sum_rows_everywhere_parallel
        launch(*kernels, x_RN.size * SUM_WORK, flat, rows, numel, 0, last)
    else:
        kernels = _sum_rows_everywhere_bits, _sum_rows_everywhere_bits_parallel
        launch(*kernels, x_RN.size * SUM_WORK, flat, rows, numel, fmt.code, 0, last)
    return x_RN


def _as_bits(array):
    """View an array as unsigned integers of its item size, so that a copy keeps every bit."""
    size = array.dtype.itemsize
    if array.dtype.hasobject or size not in (1, 2, 4, 8):
        raise TypeError(f"cannot copy dtype {array.dtype}; items of 1, 2, 4 or 8 bytes are known")
    return array.reshape(-1).view(f"u{size}")


def spread(src_N, out_RN):
    """Copy one buffer to every row (broadcast, and all-gather of shards lying end to end).

    Parameters
    ----------
    src_N : numpy.ndarray
        N elements of any shape, C-contiguous. It may be exactly one of the rows of ``out_RN``.
    out_RN : numpy.ndarray
        Shape (R, N), the same dtype, C-contiguous, written to.

    Returns
    -------
    numpy.ndarray
        ``out_RN``.

    Raises
    ------
    TypeError, ValueError
        An array of another dtype, shape or layout, read-only, or an overlap that is not a row.
    """
    _check_rows("out_RN", out_RN, writable=True)
    check_array("src_N", src_N, dtype=out_RN.dtype)
    rows, numel = out_RN.shape
    if src_N.size != numel:
        raise ValueError(f"src_N must have {numel} elements, a row of out_RN, got {src_N.shape}")
    own_row = _row_of(src_N, out_RN)
    if own_row < 0:
        check_no_overlap(src_N=src_N, out_RN=out_RN)
    src, out = _as_bits(src_N), _as_bits(out_RN)
    args = (src, out, rows, own_row, streams(out.nbytes), 0, sum_blocks(numel))
    launch(_spread, _spread_parallel, out.size, *args)
    return out_RN


def _row_of(src, out_RN):
    """Which row of out_RN the source is, or -1."""
    row_bytes = out_RN.shape[1] * out_RN.itemsize
    apart = src.ctypes.data - out_RN.ctypes.data
    if row_bytes and 0 <= apart < out_RN.nbytes and apart % row_bytes == 0:
        return apart // row_bytes
    return -1


def spread_diagonal(x_RF):
    """All-gather in place: row r owns columns r*S to (r+1)*S and gives them to all other rows.

    Parameters
    ----------
    x_RF : numpy.ndarray
        Shape (R, F) with all ranks in it and F a multiple of R, any dtype of 1 to 8 bytes,
        C-contiguous, written to.

    Returns
    -------
    numpy.ndarray
        The same array, all rows equal.

    Raises
    ------
    TypeError, ValueError
        An array of another dtype, shape or layout, read-only, or F not a multiple of R.
    """
    _check_rows("x_RF", x_RF, writable=True)
    rows, numel = x_RF.shape
    if numel % rows:
        raise ValueError(
            f"numel {numel} is not a multiple of world_size {rows}; pad the flat_param with "
            "flat.pad first"
        )
    shard = numel // rows
    args = (_as_bits(x_RF), rows, shard, streams(x_RF.nbytes), 0, rows * sum_blocks(shard))
    launch(_spread_diagonal, _spread_diagonal_parallel, x_RF.size, *args)
    return x_RF
