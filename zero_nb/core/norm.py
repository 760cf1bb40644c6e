"""The norm of a gradient that lies in pieces on many ranks, with the same bits for every split.

[Note: order-free norm] A float sum depends on how the elements are split over shards, stages,
buckets and threads. Integers do not: they add up to the same total in any order. So the largest
magnitude of all, an exact and order-free maximum, sets a grid; each square is rounded to a number
of its steps, and the numbers are added. The maximum is the finite check too (infinite if any
element is not finite). All ranks add their totals (int64), and :func:`fixed_to_norm` turns the sum
into the norm.

The grid is as fine as int64 allows: k = min(51, 61 - ceil(log2(total_numel))) bits below the
square of the power of two above the largest magnitude. Rounding is to nearest, so for gradients
as they occur the norm is accurate to about float32's last digit. In the worst case, all other
elements just too small for the grid, the square is off by total_numel / 2**(k + 1) of its largest
possible term: 6e-5 of the norm at 8 million elements.

[Note: one pass] The grid is known when everything has been looked at, but most runs can be summed
while they are: :func:`max_and_squares` takes the grid of the largest magnitude so far and notes it
beside the sum of each run. The grid depends on the power of two above the maximum only, so it
seldom changes. :func:`sum_squares_fixed` sums anew what is on another grid than the final one.
"""

import math

import numba
import numpy as np

from zero_nb.core.checks import check_array, check_runs, run_groups
from zero_nb.core.kernels import (
    GRAD,
    NO_GRID,
    NUMEL,
    ROW,
    SQUARES_WORK,
    _max_and_squares,
    _max_and_squares_parallel,
    _max_bits,
    _max_bits_parallel,
    _max_of_rows,
    _sum_of_rows,
    launch,
)
from zero_nb.core.precision import FLOAT32


def _prepare(grad, runs, rows, fmt):
    """Check the gradient and the runs; return the flat gradient and the number of elements."""
    check_array("grad", grad, dtype=fmt.dtype)
    total = check_runs(runs, read=[("grad", GRAD, grad.size)], rows=rows)
    return grad.reshape(-1), total


def max_abs(grad, runs, rows, fmt=FLOAT32):
    """Largest magnitude of the elements of each row's runs; infinite if any is not finite.

    Parameters
    ----------
    grad : numpy.ndarray
        Gradients in ``fmt``, C-contiguous; offsets count elements of the flattened array.
    runs : numpy.ndarray
        int64, shape (n, 7); columns ROW, GRAD and NUMEL are used.
    rows : int
        Number of rows (hosted ranks).
    fmt : Format
        How the gradient is stored.

    Returns
    -------
    numpy.ndarray
        float32, shape (rows,); 0 for a row without runs.

    Raises
    ------
    TypeError, ValueError
        An array of another dtype or layout, or a run outside the buffer.
    """
    flat, total = _prepare(grad, runs, rows, fmt)
    groups = run_groups(runs, total)
    of_run = np.empty(len(runs), np.uint32)
    args = (*_bits_and_mask(flat, fmt), runs, of_run, groups, 0, len(groups) - 1)
    launch(_max_bits, _max_bits_parallel, total, *args)
    return _rows_of(of_run, runs, rows, fmt)


def _bits_and_mask(flat, fmt):
    """Return the gradient's bits, and the mask that takes the sign off."""
    if fmt is FLOAT32:
        return flat.view(np.uint32), np.uint32(0x7FFFFFFF)
    return flat, np.uint32(0x7FFF)


def _rows_of(of_run, runs, rows, fmt):
    """Return the largest magnitude of each row."""
    result = np.empty(rows, np.float32)
    _max_of_rows(of_run, runs, fmt.code, result)
    return result


def max_and_squares(grad, runs, rows, fmt, total_numel, guess=0.0):
    """Take :func:`max_abs` and begin :func:`sum_squares_fixed` in one pass, see [Note: one pass].

    Parameters
    ----------
    grad, runs, rows, fmt, total_numel
        As for :func:`sum_squares_fixed`.
    guess : float
        A magnitude that occurs, such as the largest of another unit, or 0. One that is larger
        than all the time costs a second pass, but no bits.

    Returns
    -------
    largest : numpy.ndarray
        float32, shape (rows,), as of :func:`max_abs`.
    squares : numpy.ndarray
        int64, shape (n, 2): the sum of each run, and the exponent of its grid. It goes to
        :func:`sum_squares_fixed`.

    Raises
    ------
    TypeError, ValueError
        An array of another dtype or layout, a run outside the buffer, more elements than
        total_numel, or a guess that is not finite.
    """
    flat, total = _prepare(grad, runs, rows, fmt)
    exponent, k = _grid(guess, total_numel)
    _check_numel(total, rows, total_numel)
    exponent = exponent if guess else NO_GRID
    of_run, squares = _squares_of_runs(flat, runs, fmt, exponent, k, total)
    return _rows_of(of_run, runs, rows, fmt), squares


def _squares_of_runs(flat, runs, fmt, exponent, k, total):
    """Return the largest magnitude of each run, and the sum of its squares beside its grid."""
    work = total * SQUARES_WORK
    groups = _one_a_thread(run_groups(runs, work))
    of_run, squares = np.empty(len(runs), np.uint32), np.empty((len(runs), 2), np.int64)
    args = (flat, *_bits_and_mask(flat, fmt), fmt.code, runs, exponent, k, of_run, squares, groups)
    launch(_max_and_squares, _max_and_squares_parallel, work, *args, 0, len(groups) - 1)
    return of_run, squares


def _one_a_thread(groups):
    """Join neighbouring groups, so that each thread has one: it learns its grid only once."""
    count, threads = len(groups) - 1, numba.get_num_threads()
    if count <= threads:
        return groups
    return groups[[count * part // threads for part in range(threads + 1)]]


def _grid(max_abs, total_numel):
    """Return e and k: the largest magnitude is below 2**e, squares are counted in 2**(2e - k)."""
    if not (math.isfinite(max_abs) and max_abs >= 0):
        raise ValueError(
            f"max_abs must be finite and not negative, got {max_abs}; a gradient that is not "
            "finite has no norm, skip the step"
        )
    if total_numel < 0:
        raise ValueError(f"total_numel must not be negative, got {total_numel}")
    exponent = math.frexp(max_abs)[1]
    log2_numel = max(int(total_numel) - 1, 0).bit_length()
    return exponent, min(51, 61 - log2_numel)


def sum_squares_fixed(grad, runs, rows, fmt, max_abs, total_numel, squares=None):
    """Sum of squares of each row's runs, as integers on a grid that all ranks share.

    Parameters
    ----------
    grad : numpy.ndarray
        Gradients in ``fmt``, C-contiguous; offsets count elements of the flattened array.
    runs : numpy.ndarray
        int64, shape (n, 7); columns ROW, GRAD and NUMEL are used.
    rows : int
        Number of rows (hosted ranks).
    fmt : Format
        How the gradient is stored.
    max_abs : float
        Largest magnitude over everything that goes into the norm, on all ranks (:func:`max_abs`).
    total_numel : int
        Number of elements that go into the norm, on all ranks, or more; it sets the grid.
    squares : numpy.ndarray, optional
        From :func:`max_and_squares` of the same gradient, runs and total_numel.

    Returns
    -------
    numpy.ndarray
        int64, shape (rows,); add these over units and ranks, then :func:`fixed_to_norm`.

    Raises
    ------
    TypeError, ValueError
        An array of another dtype or layout, a run outside the buffer, max_abs not finite, or an
        element in a higher power of two than max_abs, or more elements than total_numel.
    """
    flat, total = _prepare(grad, runs, rows, fmt)
    exponent, k = _grid(max_abs, total_numel)
    _check_numel(total, rows, total_numel)
    sums = np.zeros(rows, np.int64)
    if squares is not None:
        check_array("squares", squares, dtype=np.int64, shape=(len(runs), 2))
        if max_abs == 0 or _sum_of_rows(squares, runs, exponent, sums) == 0:
            return sums
        runs = runs[squares[:, 1] != exponent]
        total = int(runs[:, NUMEL].sum())
    elif max_abs == 0:
        return sums
    _, squares = _squares_of_runs(flat, runs, fmt, exponent, k, total)
    if _sum_of_rows(squares, runs, exponent, sums):
        _raise_larger(max_abs)
    return sums


def fixed_to_norm(total, max_abs, total_numel):
    """Turn the integer sum of squares over all units and ranks into the norm.

    Parameters
    ----------
    total : int
        Sum of the results of :func:`sum_squares_fixed`.
    max_abs : float
        As given there.
    total_numel : int
        As given there.

    Returns
    -------
    float
        The L2 norm, in float64.

    Raises
    ------
    ValueError
        max_abs is not finite, or total is negative.
    """
    exponent, k = _grid(max_abs, total_numel)
    _check_sum(total)
    return math.ldexp(math.sqrt(math.ldexp(float(int(total)), -k)), exponent)


def sum_powers_fixed(grad, runs, rows, fmt, max_abs, total_numel, p):
    """Sum of ``|x / max_abs| ** p`` of each row's runs, as integers on a grid all ranks share.

    For norms other than 2 and infinity; NumPy, not a kernel, since nobody trains with them for
    speed.

    Parameters
    ----------
    grad, runs, rows, fmt, max_abs, total_numel
        As for :func:`sum_squares_fixed`.
    p : float
        Above 0, finite.

    Returns
    -------
    numpy.ndarray
        int64, shape (rows,); add these over units and ranks, then :func:`fixed_to_power_norm`.

    Raises
    ------
    TypeError, ValueError
        See :func:`sum_squares_fixed`; or p is not above 0 and finite.
    """
    flat, total = _prepare(grad, runs, rows, fmt)
    _, k = _grid(max_abs, total_numel)
    _check_power(p)
    _check_numel(total, rows, total_numel)
    sums = np.zeros(rows, np.int64)
    if max_abs == 0:
        return sums
    for run in runs:
        part = flat[run[GRAD] : run[GRAD] + run[NUMEL]]
        share = np.abs(fmt.widen(part).astype(np.float64)) / max_abs
        if not np.all(share <= 1):
            _raise_larger(max_abs)
        sums[run[ROW]] += np.rint(np.ldexp(share**p, k)).astype(np.int64).sum()
    return sums


def fixed_to_power_norm(total, max_abs, total_numel, p):
    """Turn the integer sum of powers over all units and ranks into the p-norm.

    Parameters
    ----------
    total : int
        Sum of the results of :func:`sum_powers_fixed`.
    max_abs, total_numel, p
        As given there.

    Returns
    -------
    float
        The p-norm, in float64.

    Raises
    ------
    ValueError
        max_abs is not finite, total is negative, or p is not above 0 and finite.
    """
    _, k = _grid(max_abs, total_numel)
    _check_power(p)
    _check_sum(total)
    return float(max_abs) * math.ldexp(float(int(total)), -k) ** (1 / p)


def _check_power(p):
    """Refuse a power without a sum; the infinite one is max_abs itself."""
    if not (math.isfinite(p) and p > 0):
        raise ValueError(f"p must be above 0 and finite, got {p}; for infinity take max_abs")


def _check_sum(total):
    """Refuse a sum that no magnitudes give."""
    if total < 0:
        raise ValueError(f"a sum of powers of magnitudes is not negative, got {total}")


def _check_numel(total, rows, total_numel):
    """Refuse more elements than the grid leaves room for."""
    if total > max(rows, 1) * total_numel:
        raise ValueError(
            f"{total} elements on {rows} rows are more than total_numel {total_numel} on each; "
            "give the number over all units and ranks"
        )


def _raise_larger(max_abs):
    """Say that max_abs is not the largest magnitude."""
    raise ValueError(
        f"an element is larger than max_abs {max_abs}, or NaN; take the maximum over all units "
        "and ranks first"
    )
