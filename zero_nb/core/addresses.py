"""Where many arrays lie in memory, checked without Python's work for each of them.

A kernel cannot take a list of ten thousand arrays: numba would spend longer on the list than on the
copy. It gets their addresses. Asking each array for its address takes Python a microsecond; here a
kernel reads the fields of the array objects themselves, whose places are part of NumPy's stable C
interface, and falls back to asking where something is out of the ordinary.
"""

import math
import struct
import sys
from dataclasses import dataclass
from functools import cache

import numba
import numpy as np

from zero_nb.core.checks import check_array
from zero_nb.core.kernels import _first_overlap, _look_at_arrays

_C_CONTIGUOUS, _ALIGNED, _WRITEABLE = 0x0001, 0x0100, 0x0400  # NPY_ARRAY_* of NumPy's C interface


@dataclass(frozen=True, eq=False)
class ShapeTable:
    """Shapes of many arrays, as a kernel can read them.

    Attributes
    ----------
    shapes : tuple of tuple of int
        The shapes.
    numels : numpy.ndarray
        int64: elements of each.
    dims, dims_of : numpy.ndarray
        int64: all dimensions end to end; those of array i are ``dims[dims_of[i]:dims_of[i + 1]]``.
    """

    shapes: tuple
    numels: np.ndarray
    dims: np.ndarray
    dims_of: np.ndarray

    @classmethod
    def of(cls, shapes):
        """Make the table.

        Parameters
        ----------
        shapes : sequence of tuple of int
            The shapes.

        Returns
        -------
        ShapeTable
        """
        shapes = tuple(shapes)
        numels = np.array([math.prod(shape) for shape in shapes], np.int64)
        dims = np.array([n for shape in shapes for n in shape], np.int64)
        ends = np.cumsum([0, *(len(shape) for shape in shapes)], dtype=np.int64)
        return cls(shapes, numels, dims, ends)


def addresses_of(name, arrays, table, *, dtype=None, writable=False, copy=False):
    """Check many arrays and return where they lie.

    Parameters
    ----------
    name : str
        What the caller calls array i, with ``{}`` for i; it begins the error.
    arrays : list of numpy.ndarray
        The arrays: of one dtype, native byte order, aligned, C-contiguous.
    table : ShapeTable
        Their shapes.
    dtype : numpy.dtype, optional
        Exact dtype; that of the first array by default.
    writable : bool
        Whether they are written to.
    copy : bool
        Whether what is no such array may be copied to one that is; shape and dtype must be right.

    Returns
    -------
    addresses : numpy.ndarray
        int64, one for each array.
    dtype : numpy.dtype
        Their dtype.
    kept : list
        What has to be alive while the addresses are used.

    Raises
    ------
    TypeError, ValueError
        The first array that is not as it has to be; see :func:`zero_nb.core.checks.check_array`.
    """
    if not arrays:
        return np.empty(0, np.int64), np.dtype(np.float32), []
    if dtype is None:
        dtype = np.asarray(arrays[0]).dtype if copy else getattr(arrays[0], "dtype", None)
    if _fields_can_be_read() and isinstance(dtype, np.dtype) and dtype.isnative:
        addresses = np.empty(len(arrays), np.int64)
        if _read_fields(arrays, table, dtype, writable, addresses):
            return addresses, dtype, arrays
    return _ask_each(name, arrays, table, dtype, writable, copy)


def _read_fields(arrays, table, dtype, writable, addresses):
    """Read the addresses of ordinary arrays; false if one is not, or not as expected."""
    objects = np.fromiter(arrays, object, len(arrays))
    flags = _C_CONTIGUOUS | _ALIGNED | (_WRITEABLE if writable else 0)
    place = np.int64(objects.ctypes.data)
    args = (place, id(np.ndarray), id(dtype), flags, table.dims, table.dims_of, addresses)
    return _look_at_arrays(*args) == len(arrays)


def _ask_each(name, arrays, table, dtype, writable, copy):
    """Return the same by asking each array."""
    kept = []
    for i, (array, shape) in enumerate(zip(arrays, table.shapes, strict=True)):
        told = name.format(i)
        if copy:
            array = np.asarray(array)
            check_array(told, array, dtype=dtype, shape=shape, contiguous=False)
            array = np.ascontiguousarray(array).reshape(shape)
        else:
            check_array(told, array, dtype=dtype, shape=shape, writable=writable)
        kept.append(array)
    addresses = np.array([array.ctypes.data for array in kept], np.int64)
    return addresses, kept[0].dtype, kept


@cache
def _fields_can_be_read():
    """Whether arrays' fields lie where a kernel looks for them."""
    usual = (
        sys.implementation.name == "cpython"
        and object.__basicsize__ == 16  # neither free-threaded nor a debugging build
        and struct.calcsize("P") == 8
        and sys.byteorder == "little"
        and not numba.config.DISABLE_JIT
    )
    if not usual:
        return False
    probes = [np.zeros((2, 3)), np.zeros(5), np.zeros(())]
    table, addresses = ShapeTable.of([probe.shape for probe in probes]), np.zeros(3, np.int64)
    read = _read_fields(probes, table, probes[0].dtype, True, addresses)
    return read and addresses.tolist() == [probe.ctypes.data for probe in probes]


def check_apart(written, others, item):
    """Refuse buffers to be written to that overlap one another or something else.

    Parameters
    ----------
    written, others : (str, numpy.ndarray, numpy.ndarray)
        Name with ``{}`` for the number, int64 addresses, int64 elements.
    item : int
        Bytes of an element.

    Raises
    ------
    ValueError
        Two of them overlap; the error names both.
    """
    name, starts, numels = written
    order = np.argsort(starts, kind="stable")
    order = order[numels[order] > 0]
    starts, ends = starts[order], (starts + numels * item)[order]
    clash = np.flatnonzero(starts[1:] < ends[:-1])
    if clash.size:
        first, second = order[clash[0]], order[clash[0] + 1]
        _raise_overlap(name.format(first), name.format(second))
    other, lows, sizes = others
    if not len(starts) or not len(lows):
        return
    if lows.min() >= ends[-1] or (lows + sizes * item).max() <= starts[0]:
        return
    i = _first_overlap(lows, sizes, item, starts, ends)
    if i < len(lows):
        k = int(np.searchsorted(ends, lows[i], side="right"))
        _raise_overlap(other.format(i), name.format(order[k]))


def _raise_overlap(one, other):
    """Say which two overlap."""
    raise ValueError(f"{one} and {other} overlap in memory; give separate arrays")
