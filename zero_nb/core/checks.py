"""Checks that the public wrappers make before a kernel runs: kernels themselves check nothing."""

import numpy as np

from zero_nb.core.kernels import (
    HYPER,
    NUMEL,
    ROW,
    RUN_BLOCK,
    RUN_COLUMNS,
    _run_extents,
    _run_groups,
    runs_parallel,
)


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
    if shape is not None and (
        array.ndim != len(shape)
        or any(
            want is not None and want != got for want, got in zip(shape, array.shape, strict=True)
        )
    ):
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
    present = [(name, array) for name, array in arrays.items() if array is not None and array.size]
    for i, (name, array) in enumerate(present):
        for other, second in present[i + 1 :]:
            if np.may_share_memory(array, second):
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
    check_array("runs", runs, dtype=np.int64, ndim=2, shape=(None, RUN_COLUMNS))
    if runs.shape[0] == 0:
        return 0
    low, high = np.empty(RUN_COLUMNS, np.int64), np.empty(RUN_COLUMNS, np.int64)
    ascending = np.empty(RUN_COLUMNS, np.bool_)
    total = _run_extents(runs, low, high, ascending)
    if low[NUMEL] < 0:
        raise ValueError(f"run {int(runs[:, NUMEL].argmin())} has a negative length {low[NUMEL]}")
    for name, column, size in (*read, *written):
        if low[column] < 0 or high[column] > size:
            _raise_outside(runs, name, column, size)
    for name, column, _ in written:
        if not ascending[column]:
            _raise_if_twice(runs, name, column)
    for name, column, size in (("hyper", HYPER, hyper_rows), ("rows", ROW, rows)):
        if size is not None and (low[column] < 0 or high[column] >= size):
            raise ValueError(
                f"runs point to {name} {low[column]}..{high[column]}, but there are {size}"
            )
    return int(total)


def _raise_outside(runs, name, column, size):
    """Name the first run that leaves its buffer."""
    for run, (start, numel) in enumerate(runs[:, [column, NUMEL]].tolist()):
        if start < 0 or start + numel > size:
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
    groups = np.zeros(max(len(runs), 1) + 1, np.int64)
    return groups[: max(_run_groups(runs, RUN_BLOCK, groups), 1) + 1]
