"""Checks that the public wrappers make before a kernel runs: kernels themselves check nothing."""

from itertools import combinations

import numpy as np

from zero_nb.core.kernels import (
    HYPER,
    NUMEL,
    ROW,
    RUN_BLOCK,
    RUN_COLUMNS,
    UNCHECKED,
    _run_groups,
    _runs_total,
    runs_parallel,
)

_INT64 = np.dtype(np.int64)


def check_array(name, array, dtype=None, ndim=None, shape=None, writable=False, contiguous=True):
    """Refuse an array that a kernel could not take as it is.

    Parameters
    ----------
    name : str
        What the caller calls the array; it begins the error.
    array : numpy.ndarray
        The array to look at. Native byte order and alignment are always required.
    dtype : numpy.dtype, optional
        Exact dtype.
    ndim : int, optional
        Number of dimensions.
    shape : tuple of int or None, optional
        Exact shape; ``None`` in it stands for any length.
    writable : bool
        Whether the kernel writes to it.
    contiguous : bool
        Whether it must be C-contiguous.

    Returns
    -------
    numpy.ndarray
        The same array.

    Raises
    ------
    TypeError
        Not a NumPy array, another dtype, or foreign byte order.
    ValueError
        Another shape, read-only, not contiguous or not aligned.
    """
    # Most arrays are all that can be asked for, which takes a third of the time of the questions
    # below. (carray: C-contiguous, aligned and writable; its byte order is that of the dtype.)
    if (
        type(array) is np.ndarray
        and array.dtype is dtype
        and dtype.isnative
        and array.flags.carray
        and (ndim is None or array.ndim == ndim)
        and (shape is None or array.shape == shape or _has_shape(array, shape))
    ):
        return array
    if not isinstance(array, np.ndarray):
        raise TypeError(
            f"{name} must be a numpy.ndarray, got {type(array).__name__}; use numpy.asarray"
        )
    if not array.dtype.isnative:
        raise TypeError(
            f"{name} has foreign byte order ({array.dtype.str}); "
            f"convert it with astype({array.dtype.newbyteorder('=').str!r})"
        )
    if dtype is not None and array.dtype != dtype:
        raise TypeError(f"{name} must have dtype {np.dtype(dtype)}, got {array.dtype}")
    if ndim is not None and array.ndim != ndim:
        raise ValueError(f"{name} must have {ndim} dimensions, got shape {array.shape}")
    if shape is not None and not _has_shape(array, shape):
        wanted = ", ".join("any" if n is None else str(n) for n in shape)
        wanted = f"({wanted},)" if len(shape) == 1 else f"({wanted})"
        raise ValueError(f"{name} must have shape {wanted}, got {array.shape}")
    if contiguous and not array.flags.c_contiguous:
        raise ValueError(
            f"{name} must be C-contiguous, got strides {array.strides} for shape {array.shape}; "
            "use numpy.ascontiguousarray and keep the copy"
        )
    if not array.flags.aligned:
        raise ValueError(f"{name} is not aligned to its dtype {array.dtype}; copy it first")
    if writable and not array.flags.writeable:
        raise ValueError(f"{name} is written to but is read-only")
    return array


def _has_shape(array, shape):
    """Whether an array has this shape, in which None stands for any length."""
    got = array.shape
    if len(got) != len(shape):
        return False
    for axis, want in enumerate(shape):
        if want is None:
            continue
        if want != got[axis]:
            return False
    return True


def check_no_overlap(**arrays):
    """Refuse two arrays that share memory, where a kernel writes to at least one of them.

    Parameters
    ----------
    **arrays : numpy.ndarray or None
        Named arrays, C-contiguous (for these the bounds decide); ``None`` is left out.

    Raises
    ------
    ValueError
        Two of them overlap.
    """
    for (name, array), (other, second) in combinations(arrays.items(), 2):
        # Empty arrays share no memory.
        if array is not None and second is not None and np.may_share_memory(array, second):
            raise ValueError(f"{name} and {other} overlap in memory; give separate arrays")


def check_world_size(world_size):
    """Refuse anything but an integer of at least 1.

    Parameters
    ----------
    world_size : int
        Number of ranks.

    Returns
    -------
    int
        The same number as a Python integer.

    Raises
    ------
    ValueError
        Less than 1.
    TypeError
        Not an integer.
    """
    if isinstance(world_size, (bool, np.bool_)) or not isinstance(world_size, (int, np.integer)):
        raise TypeError(f"world_size must be an integer, got {world_size!r}")
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    return int(world_size)


def check_runs(runs, read=(), written=(), hyper_rows=None, rows=None):
    """Refuse a table of runs that points outside the buffers or writes an element twice.

    Parameters
    ----------
    runs : numpy.ndarray
        int64, shape (n, 7), see :func:`zero_nb.core.flat.run_table`.
    read, written : sequence of (str, int, int)
        Name of a buffer, its column in the table and its number of elements. Runs may not
        overlap in the columns that are written.
    hyper_rows : int, optional
        Rows of the table of hyper-parameters that column HYPER points into.
    rows : int, optional
        Number of results that column ROW points into.

    Returns
    -------
    int
        Number of elements of all runs.

    Raises
    ------
    TypeError
        Not an int64 array.
    ValueError
        Another shape, a negative length, a run outside its buffer, or two runs that write the
        same element.
    """
    check_array("runs", runs, dtype=_INT64, ndim=2, shape=(None, RUN_COLUMNS))
    sizes, once = [UNCHECKED] * RUN_COLUMNS, 0
    for _, column, size in (*read, *written):
        if size < sizes[column]:  # half the time of min()
            sizes[column] = size
    for _, column, _ in written:
        once |= 1 << column
    if hyper_rows is not None:
        sizes[HYPER] = hyper_rows
    if rows is not None:
        sizes[ROW] = rows
    total = _runs_total(runs, tuple(sizes), once)
    if total < 0:
        total = _look_closer(runs, read, written, hyper_rows, rows)
    return int(total)


def _look_closer(runs, read, written, hyper_rows, rows):
    """Say what is wrong with runs, or count their elements if they are only out of order."""
    numels = runs[:, NUMEL]
    if numels.min() < 0:
        raise ValueError(f"run {int(numels.argmin())} has a negative length {numels.min()}")
    for name, column, size in (*read, *written):
        _raise_if_outside(runs, name, column, size)
    for name, column, _ in written:
        _raise_if_twice(runs, name, column)
    for name, column, size in (("hyper", HYPER, hyper_rows), ("rows", ROW, rows)):
        low, high = runs[:, column].min(), runs[:, column].max()
        if size is not None and (low < 0 or high >= size):
            raise ValueError(f"runs point to {name} {low}..{high}, but there are {size}")
    return numels.sum()


def _raise_if_outside(runs, name, column, size):
    """Name the first run that leaves its buffer."""
    starts, numels = runs[:, column], runs[:, NUMEL]
    outside = np.flatnonzero((starts < 0) | (starts > size - numels))
    if outside.size:
        run = int(outside[0])
        start, numel = int(starts[run]), int(numels[run])
        raise ValueError(
            f"run {run} covers {name}[{start}:{start + numel}], but {name} has {size} "
            "elements; build the table for these buffers"
        )


def _raise_if_twice(runs, name, column):
    """Refuse runs that overlap, whatever their order."""
    runs = runs[runs[:, NUMEL] > 0]
    runs = runs[np.argsort(runs[:, column], kind="stable")]
    start, end = runs[:, column], runs[:, column] + runs[:, NUMEL]
    clash = np.flatnonzero(start[1:] < end[:-1])
    if clash.size:
        raise ValueError(
            f"two runs write {name}[{start[clash[0] + 1]}]; each element may be written once"
        )


def run_groups(runs, work):
    """Group consecutive runs into pieces of about equal work for parallel kernels.

    Parameters
    ----------
    runs : numpy.ndarray
        int64, shape (n, 7).
    work : int
        Work in all runs, in elements that are copied; little stays in one group.

    Returns
    -------
    numpy.ndarray
        int64; runs ``groups[i]:groups[i + 1]`` make one group.
    """
    if not runs_parallel(work):
        return np.array((0, len(runs)), np.int64)
    groups = np.zeros(len(runs) + 2, np.int64)
    return groups[: _run_groups(runs, RUN_BLOCK, groups) + 1]
