"""A unit's parameters laid end to end and padded: the flat_param, its shards and its runs.

R ranks hosted by this process, W world_size, F padded flat length of a unit, S = F // W.

[Note: table of runs] A run is a stretch of real elements that are updated alike. Its row in the
table says where it begins in each flattened buffer (TARGET, GRAD, STATE, PARAM), how many
elements it has (NUMEL), which hosted rank it belongs to (ROW) and which row of hyper-parameters
it uses (HYPER). Padding is in no run. Long runs are cut at 16,384 elements, so that threads share
them evenly.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from zero_nb.core.checks import check_array, check_no_overlap, check_world_size
from zero_nb.core.kernels import (
    GRAD,
    HYPER,
    NUMEL,
    PARAM,
    ROW,
    RUN_BLOCK,
    RUN_COLUMNS,
    STATE,
    TARGET,
)

__all__ = [
    "GRAD",
    "HYPER",
    "NUMEL",
    "PARAM",
    "ROW",
    "RUN_COLUMNS",
    "RUN_LIMIT",
    "STATE",
    "TARGET",
    "FlatLayout",
    "flatten",
    "own_shard",
    "pad",
    "padded_numel",
    "run_table",
    "unflatten",
]

RUN_LIMIT = RUN_BLOCK  # elements of the longest run in a table
_PLACES = {"TARGET": TARGET, "GRAD": GRAD, "STATE": STATE, "PARAM": PARAM}


def padded_numel(numel, world_size):
    """Round a number of elements up to a multiple of world_size.

    Parameters
    ----------
    numel : int
        Number of elements, not negative.
    world_size : int
        Number of ranks.

    Returns
    -------
    int
        The smallest multiple of world_size that is not below numel.

    Raises
    ------
    ValueError
        numel is negative or world_size below 1.
    """
    world_size = check_world_size(world_size)
    if numel < 0:
        raise ValueError(f"numel must not be negative, got {numel}")
    return -(-int(numel) // world_size) * world_size


def pad(x, world_size, fill=0):
    """Copy an array with its last axis padded to a multiple of world_size.

    Parameters
    ----------
    x : numpy.ndarray
        Shape (..., n).
    world_size : int
        Number of ranks.
    fill : number
        Value of the padding.

    Returns
    -------
    numpy.ndarray
        Shape (..., F), the same dtype.

    Raises
    ------
    ValueError
        x has no axis or world_size is below 1.
    """
    if x.ndim == 0:
        raise ValueError("x has no axis to pad; use reshape(1) first")
    numel = x.shape[-1]
    out = np.empty((*x.shape[:-1], padded_numel(numel, world_size)), x.dtype)
    out[..., :numel] = x
    out[..., numel:] = fill
    return out


def flatten(arrays, world_size, out=None):
    """Lay arrays end to end in C order and pad to a multiple of world_size.

    Parameters
    ----------
    arrays : sequence of numpy.ndarray
        Any shapes (Fortran order is read in C order, a 0-d array is one element), one dtype.
    world_size : int
        Number of ranks.
    out : numpy.ndarray, optional
        Written instead of a new array: shape (F,), the same dtype. Its padding is left as it is.

    Returns
    -------
    numpy.ndarray
        ``out``, or a new array of shape (F,) whose padding is zero.

    Raises
    ------
    TypeError, ValueError
        No array or more than one dtype; ``out`` of another dtype, shape or layout, or overlapping.
    """
    arrays = [np.asarray(array) for array in arrays]
    dtypes = {array.dtype for array in arrays}
    if len(dtypes) != 1:
        raise TypeError(
            f"one flat buffer holds one dtype, got {sorted(map(str, dtypes)) or 'no array'}; "
            "make one buffer for each"
        )
    numel = sum(array.size for array in arrays)
    length = padded_numel(numel, world_size)
    if out is None:
        out = np.zeros(length, dtypes.pop())
    else:
        check_array("out", out, dtype=dtypes.pop(), shape=(length,), writable=True)
        for i, array in enumerate(arrays):
            check_no_overlap(**{f"arrays[{i}]": array, "out": out})
    at = 0
    for array in arrays:
        out[at : at + array.size].reshape(array.shape)[...] = array
        at += array.size
    return out


def unflatten(flat, shapes):
    """Cut a flat buffer into arrays of the given shapes, leaving the padding out.

    Parameters
    ----------
    flat : numpy.ndarray
        Shape (..., F).
    shapes : sequence of tuple of int
        Shapes in the order they were laid down.

    Returns
    -------
    list of numpy.ndarray
        Views of ``flat``, with its leading axes in front.

    Raises
    ------
    ValueError
        The shapes need more elements than there are.
    """
    numels = [math.prod(shape) for shape in shapes]
    if sum(numels) > flat.shape[-1]:
        raise ValueError(
            f"the shapes need {sum(numels)} elements, the flat buffer has {flat.shape[-1]}"
        )
    views, at = [], 0
    for shape, numel in zip(shapes, numels, strict=True):
        views.append(flat[..., at : at + numel].reshape((*flat.shape[:-1], *shape)))
        at += numel
    return views


def _check_ranks(ranks, world_size):
    """Return the hosted ranks as a range; they are consecutive and lie below world_size."""
    ranks = list(ranks)
    if not ranks or ranks != list(range(ranks[0], ranks[0] + len(ranks))):
        raise ValueError(f"hosted ranks must be consecutive and at least one, got {ranks}")
    if ranks[0] < 0 or ranks[-1] >= world_size:
        raise ValueError(f"ranks {ranks[0]}..{ranks[-1]} do not exist at world_size {world_size}")
    return range(ranks[0], ranks[-1] + 1)


def own_shard(x_RF, ranks, world_size):
    """View each row's own slice: row i of the result is slice number ranks[i] of row i.

    Parameters
    ----------
    x_RF : numpy.ndarray
        Shape (R, F), one row for each hosted rank, F a multiple of world_size.
    ranks : range
        The hosted global ranks, consecutive.
    world_size : int
        Number of ranks in the world.

    Returns
    -------
    numpy.ndarray
        Shape (R, S): a strided view, writable if ``x_RF`` is. It keeps the whole buffer alive;
        copy it where memory is to be given back.

    Raises
    ------
    ValueError
        Not two-dimensional, another number of rows than ranks, or F not a multiple.
    """
    world_size = check_world_size(world_size)
    ranks = _check_ranks(ranks, world_size)
    if x_RF.ndim != 2 or x_RF.shape[0] != len(ranks):
        raise ValueError(f"x_RF must have shape ({len(ranks)}, F), got {x_RF.shape}")
    numel = x_RF.shape[1]
    if numel % world_size:
        raise ValueError(
            f"numel {numel} is not a multiple of world_size {world_size}; pad the flat_param with "
            "flat.pad first"
        )
    shard = numel // world_size
    row_stride, stride = x_RF.strides
    # One row down is also one slice to the right, as hosted ranks are consecutive.
    return np.lib.stride_tricks.as_strided(
        x_RF[:, ranks[0] * shard :],
        shape=(len(ranks), shard),
        strides=(row_stride + shard * stride, stride),
        writeable=x_RF.flags.writeable,
    )


@dataclass(frozen=True)
class FlatLayout:
    """Where each parameter of a unit lies in its flat_param.

    Attributes
    ----------
    names : tuple of str
        Parameter names in the order they are laid down.
    shapes : tuple of tuple of int
        Their shapes; a 0-d parameter counts one element, an empty one none.
    world_size : int
        Number of ranks that share the flat_param.
    """

    names: tuple
    shapes: tuple
    world_size: int

    def __post_init__(self):
        object.__setattr__(self, "names", tuple(self.names))
        object.__setattr__(self, "shapes", tuple(tuple(map(int, s)) for s in self.shapes))
        object.__setattr__(self, "world_size", check_world_size(self.world_size))
        if len(self.names) != len(self.shapes):
            raise ValueError(f"{len(self.names)} names for {len(self.shapes)} shapes")
        if len(set(self.names)) != len(self.names):
            raise ValueError(f"names must differ, got {self.names}")

    @cached_property
    def numels(self):
        """Number of elements of each parameter."""
        return tuple(math.prod(shape) for shape in self.shapes)

    @cached_property
    def offsets(self):
        """Where each parameter begins in the flat_param, and at the end where the last one ends."""
        ends = [0]
        for numel in self.numels:
            ends.append(ends[-1] + numel)
        return tuple(ends)

    @property
    def numel(self):
        """Number of real elements."""
        return self.offsets[-1]

    @cached_property
    def padded_numel(self):
        """Number of elements with padding, F."""
        return padded_numel(self.numel, self.world_size)

    @property
    def shard_numel(self):
        """Number of elements of one rank's slice, S."""
        return self.padded_numel // self.world_size

    @property
    def padding(self):
        """Number of elements that are padding; they lie at the end, maybe over several ranks."""
        return self.padded_numel - self.numel

    @cached_property
    def _index(self):
        """Position of each name."""
        return {name: i for i, name in enumerate(self.names)}

    def view(self, flat_RF, name):
        """View one parameter inside a flat_param.

        Parameters
        ----------
        flat_RF : numpy.ndarray
            Shape (R, F), or (F,).
        name : str
            Parameter name.

        Returns
        -------
        numpy.ndarray
            View of shape (R, ...) or (...), where ... is the shape of the parameter.

        Raises
        ------
        KeyError
            No parameter of that name.
        ValueError
            The last axis is not F long.
        """
        if name not in self._index:
            raise KeyError(f"no parameter {name!r} in this unit; it has {', '.join(self.names)}")
        if flat_RF.shape[-1] != self.padded_numel:
            raise ValueError(f"flat_RF must end in {self.padded_numel}, got shape {flat_RF.shape}")
        i = self._index[name]
        part = flat_RF[..., self.offsets[i] : self.offsets[i + 1]]
        return part.reshape((*flat_RF.shape[:-1], *self.shapes[i]))

    def full_spans(self):
        """List the parameters as stretches of the whole flat_param.

        Returns
        -------
        list of (int, int, int)
            (start, stop, parameter index) in order; empty parameters are left out.
        """
        return self._spans(0, self.padded_numel)

    def spans(self, rank):
        """List the real elements inside one rank's shard.

        Parameters
        ----------
        rank : int
            Global rank.

        Returns
        -------
        list of (int, int, int)
            (start, stop, parameter index) with positions counted from the start of the shard.
            A shard that is only padding has none.

        Raises
        ------
        ValueError
            No such rank.
        """
        _check_ranks([rank], self.world_size)
        return self._spans(rank * self.shard_numel, (rank + 1) * self.shard_numel)

    def _spans(self, start, stop):
        """Parameters between two positions, counted from the first."""
        spans = []
        for i, (begin, end) in enumerate(pairwise(self.offsets)):
            low, high = max(begin, start), min(end, stop)
            if low < high:
                spans.append((low - start, high - start, i))
        return spans


def _merge(spans, hyper_of):
    """Join neighbouring spans of one hyper row, drop those of row -1, cut at RUN_LIMIT."""
    merged = []
    for start, stop, parameter in spans:
        hyper = hyper_of[parameter]
        if hyper < 0:
            continue
        if merged and merged[-1][1] == start and merged[-1][2] == hyper:
            merged[-1][1] = stop
        else:
            merged.append([start, stop, hyper])
    for start, stop, hyper in merged:
        for at in range(start, stop, RUN_LIMIT):
            yield at, min(at + RUN_LIMIT, stop), hyper


def run_table(layout, ranks, *, placements, hyper_of, replicated=False):
    """Build the table of runs of a unit for the hosted ranks, see [Note: table of runs].

    Parameters
    ----------
    layout : FlatLayout
        The unit.
    ranks : range
        The hosted global ranks, consecutive; row i of every buffer belongs to ranks[i].
    placements : dict of str to str
        How each of "TARGET", "GRAD", "STATE", "PARAM" is stored: ``"shard"`` in a buffer (R, S);
        ``"full_own"`` in a buffer (R, F), of which each row's own slice is meant; ``"full"`` in a
        buffer (R, F), all of it. A buffer that does not exist is left out (its column is -1).
    hyper_of : sequence of int
        For each parameter its row of hyper-parameters; -1 leaves the parameter out.
    replicated : bool
        True if every rank updates everything (stage 0): all placements are then ``"full"``.

    Returns
    -------
    numpy.ndarray
        int64, shape (n, 7), columns ROW, TARGET, GRAD, STATE, PARAM, NUMEL, HYPER. Offsets count
        elements of the flattened buffers.

    Raises
    ------
    ValueError
        Unknown placement or buffer, or another number of hyper rows than parameters.
    """
    ranks = _check_ranks(ranks, layout.world_size)
    if len(hyper_of) != len(layout.names):
        raise ValueError(f"hyper_of has {len(hyper_of)} rows for {len(layout.names)} parameters")
    known = ("full",) if replicated else ("shard", "full_own")
    for buffer, place in placements.items():
        if buffer not in _PLACES:
            raise ValueError(f"unknown buffer {buffer!r}; choose among {', '.join(_PLACES)}")
        if place not in known:
            raise ValueError(
                f"{buffer} is placed {place!r}; with replicated={replicated} it must be one of "
                f"{', '.join(known)}"
            )
    full, shard = layout.padded_numel, layout.shard_numel
    table = []
    for row, rank in enumerate(ranks):
        base = {"full": row * full, "full_own": row * full + rank * shard, "shard": row * shard}
        spans = layout.full_spans() if replicated else layout.spans(rank)
        for start, stop, hyper in _merge(spans, hyper_of):
            run = [-1] * RUN_COLUMNS
            run[ROW], run[NUMEL], run[HYPER] = row, stop - start, hyper
            for buffer, place in placements.items():
                run[_PLACES[buffer]] = base[place] + start
            table.append(run)
    return np.array(table, np.int64).reshape(len(table), RUN_COLUMNS)
