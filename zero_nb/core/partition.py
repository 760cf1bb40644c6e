"""Cut a list of tensors among ranks, and put it together again: four layouts, one copy kernel.

R ranks, W world_size. A *layout* is a table of segments: stretches of tensors, and where each lies
in which rank's buffer. Partition and gather walk the same table; only the direction of the copy
differs.

===================  ==========================================  ==================================
layout               how it cuts                                 imbalance
===================  ==========================================  ==================================
``flat_layout``      all tensors end to end, padded to W         only the padding at the end
``ceil_div_layout``  each tensor alone, ceil(n / W) a rank        grows with many small tensors
``balanced_layout``  each tensor alone, sizes differ by one       none, extra elements take turns
``whole_layout``     no tensor is cut, largest first to the       as large as one tensor may be
                     least loaded rank
===================  ==========================================  ==================================
"""

import heapq
import math
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from zero_nb.core.addresses import ShapeTable, addresses_of, check_apart
from zero_nb.core.checks import check_array, check_world_size
from zero_nb.core.flat import padded_numel, unflatten
from zero_nb.core.kernels import _walk, _walk_parallel, copy_blocks, launch, streams


@dataclass(frozen=True)
class PartitionInfo:
    """What one rank holds.

    Attributes
    ----------
    rank : int
        The rank.
    offset : int
        Where its buffer begins when the buffers of all ranks lie end to end, in elements.
    length : int
        Real elements in it.
    padding : int
        Elements at its end that belong to no tensor. It can be the whole buffer.
    pieces : tuple of (int, int, int, int)
        (tensor index, first element of the tensor in C order, elements, position in the buffer).
    """

    rank: int
    offset: int
    length: int
    padding: int
    pieces: tuple

    @property
    def numel(self):
        """Elements of the buffer, with padding."""
        return self.length + self.padding


@dataclass(frozen=True, eq=False)
class Layout:
    """Which rank holds which elements of a list of tensors.

    Made by :func:`flat_layout`, :func:`ceil_div_layout`, :func:`balanced_layout` or
    :func:`whole_layout`.

    Attributes
    ----------
    kind : str
        ``"flat"``, ``"ceil_div"``, ``"balanced"`` or ``"whole"``.
    shapes : tuple of tuple of int
        Shapes of the tensors; a 0-d tensor counts one element.
    world_size : int
        Number of ranks.
    segments : numpy.ndarray
        int64, shape (n, 4): rank, tensor, first element of the tensor, elements; by rank, in the
        order they lie in its buffer. None is empty.
    buffer_numels : tuple of int
        Elements of each rank's buffer, with padding.
    """

    kind: str
    shapes: tuple
    world_size: int
    segments: np.ndarray
    buffer_numels: tuple

    @cached_property
    def numels(self):
        """Number of elements of each tensor."""
        return tuple(math.prod(shape) for shape in self.shapes)

    @property
    def numel(self):
        """Number of elements of all tensors."""
        return sum(self.numels)

    @cached_property
    def loads(self):
        """Real elements of each rank."""
        rank, elements = self.segments[:, 0], self.segments[:, 3]
        loads = np.zeros(self.world_size, np.int64)
        np.add.at(loads, rank, elements)
        return tuple(loads.tolist())

    @property
    def imbalance(self):
        """Largest load over the mean load, in real elements: 1.0 is even, W is all on one rank."""
        return max(self.loads) * self.world_size / self.numel if self.numel else 1.0

    def info(self, rank):
        """Describe what one rank holds.

        Parameters
        ----------
        rank : int
            Global rank.

        Returns
        -------
        PartitionInfo
            Offset, length, padding and pieces.

        Raises
        ------
        ValueError
            No such rank.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} does not exist at world_size {self.world_size}")
        first, last = np.searchsorted(self.segments[:, 0], (rank, rank + 1))
        mine = self.segments[first:last, 1:]
        places = np.cumsum(mine[:, 2]) - mine[:, 2]
        pieces = tuple(
            (*piece, at) for piece, at in zip(mine.tolist(), places.tolist(), strict=True)
        )
        length = self.loads[rank]
        return PartitionInfo(
            rank=rank,
            offset=sum(self.buffer_numels[:rank]),
            length=length,
            padding=self.buffer_numels[rank] - length,
            pieces=pieces,
        )

    @cached_property
    def table(self):
        """Starts of the segments in all tensors end to end, with the end, and what a walk needs.

        The second array has for each segment rank, tensor, first element of the tensor, first
        element of the rank's buffer. Segments are in the order of the tensors: a walk then reads
        or writes both sides in order, and the processor sees what comes next.
        """
        rank, tensor, first, elements = self.segments.T
        before = np.cumsum(self.loads) - self.loads
        places = np.cumsum(elements) - elements - before[rank]
        full = self.tensor_starts[tensor] + first
        order = np.argsort(full, kind="stable")
        walk = np.stack((rank, tensor, first, places), axis=1)[order]
        return np.append(full[order], self.numel), walk

    @cached_property
    def tensor_starts(self):
        """Where each tensor begins when all lie end to end, in elements."""
        return np.concatenate(([0], np.cumsum(self.numels, dtype=np.int64)))[:-1].astype(np.int64)

    @cached_property
    def tensor_table(self):
        """Shapes of the tensors, for a kernel."""
        return ShapeTable.of(self.shapes)

    @cached_property
    def buffer_table(self):
        """Shapes of the ranks' buffers, for a kernel."""
        return ShapeTable.of((numel,) for numel in self.buffer_numels)


def _prepare(shapes, world_size):
    """Return shapes as tuples of int, their numels and the checked world_size."""
    shapes = tuple(tuple(int(n) for n in shape) for shape in shapes)
    return shapes, [math.prod(shape) for shape in shapes], check_world_size(world_size)


def _by_rank(kind, shapes, world_size, columns, buffer_numels=None):
    """Make a layout of columns rank, tensor, first, elements: drop the empties, sort by rank."""
    segments = np.stack([np.asarray(column, np.int64).reshape(-1) for column in columns], axis=1)
    segments = segments[segments[:, 3] > 0]
    segments = np.ascontiguousarray(segments[np.argsort(segments[:, 0], kind="stable")])
    if buffer_numels is None:
        loads = np.bincount(segments[:, 0], weights=segments[:, 3], minlength=world_size)
        buffer_numels = (int(load) for load in loads)
    segments.flags.writeable = False
    return Layout(kind, shapes, world_size, segments, tuple(buffer_numels))


def _cut_each(kind, shapes, world_size, starts):
    """Make a layout that cuts each tensor alone; starts has shape (tensors, W + 1)."""
    tensors = len(shapes)
    rank = np.broadcast_to(np.arange(world_size), (tensors, world_size))
    tensor = np.broadcast_to(np.arange(tensors)[:, None], (tensors, world_size))
    first = starts[:, :-1]
    return _by_rank(kind, shapes, world_size, (rank, tensor, first, np.diff(starts, axis=1)))


def flat_layout(shapes, world_size, align=None):
    """Lay all tensors end to end, pad, and give each rank an equal slice (the default of ZeRO).

    Parameters
    ----------
    shapes : sequence of tuple of int
        Shapes of the tensors.
    world_size : int
        Number of ranks.
    align : int, optional
        The padded length is a multiple of it; itself a multiple of world_size, its default.

    Returns
    -------
    Layout
        Every buffer has the same length. The padding lies at the end and may cover several ranks.

    Raises
    ------
    ValueError
        world_size below 1 or align not a multiple of it.
    """
    shapes, numels, world_size = _prepare(shapes, world_size)
    align = world_size if align is None else align
    if align < 1 or align % world_size:
        raise ValueError(f"align {align} is not a multiple of world_size {world_size}")
    shard = padded_numel(sum(numels), align) // world_size
    ends = np.cumsum(numels, dtype=np.int64)
    starts = ends - numels
    if shard == 0 or not numels:
        empty = np.empty(0, np.int64)
        return _by_rank("flat", shapes, world_size, (empty,) * 4, (shard,) * world_size)
    cuts = np.unique(np.concatenate((starts, ends, np.arange(world_size + 1) * shard)))
    cuts = cuts[cuts <= ends[-1]]
    begin = cuts[:-1]
    # The tensor of a cut is the last one that begins there or before: empty ones come first.
    tensor = np.searchsorted(starts, begin, side="right") - 1
    columns = (begin // shard, tensor, begin - starts[tensor], np.diff(cuts))
    return _by_rank("flat", shapes, world_size, columns, (shard,) * world_size)


def ceil_div_layout(shapes, world_size):
    """Cut each tensor alone into chunks of ceil(n / W); trailing ranks may get less, or nothing.

    This is the specification's rule (and torch.chunk's): n = 5 on 4 ranks gives 2, 2, 1, 0.

    Parameters
    ----------
    shapes : sequence of tuple of int
        Shapes of the tensors.
    world_size : int
        Number of ranks.

    Returns
    -------
    Layout
        Without padding.

    Raises
    ------
    ValueError
        world_size below 1.
    """
    shapes, numels, world_size = _prepare(shapes, world_size)
    numels = np.array(numels, np.int64)[:, None]
    chunk = -(-numels // world_size)
    starts = np.minimum(np.arange(world_size + 1) * chunk, numels)
    return _cut_each("ceil_div", shapes, world_size, starts)


def balanced_layout(shapes, world_size):
    """Cut each tensor alone so that the ranks' sizes differ by at most one, in each and in all.

    One tensor is cut as numpy.array_split does: n = 5 on 4 ranks gives 2, 1, 1, 1. The next tensor
    gives its extra elements to the ranks that follow, so that the sums stay within one as well.

    Parameters
    ----------
    shapes : sequence of tuple of int
        Shapes of the tensors.
    world_size : int
        Number of ranks.

    Returns
    -------
    Layout
        Without padding.

    Raises
    ------
    ValueError
        world_size below 1.
    """
    shapes, numels, world_size = _prepare(shapes, world_size)
    numels = np.array(numels, np.int64)[:, None]
    extra = numels % world_size
    turn = np.cumsum(extra, axis=0) - extra  # whose turn it is to get the first extra element
    sizes = numels // world_size + ((np.arange(world_size) - turn) % world_size < extra)
    starts = np.concatenate((np.zeros_like(numels), np.cumsum(sizes, axis=1)), axis=1)
    return _cut_each("balanced", shapes, world_size, starts)


def whole_layout(shapes, world_size):
    """Give each tensor whole to one rank: largest first, to the least loaded, lowest rank first.

    Parameters
    ----------
    shapes : sequence of tuple of int
        Shapes of the tensors.
    world_size : int
        Number of ranks; with fewer tensors than ranks some hold nothing.

    Returns
    -------
    Layout
        Without padding. Within a rank tensors keep the order of the list.

    Raises
    ------
    ValueError
        world_size below 1.
    """
    shapes, numels, world_size = _prepare(shapes, world_size)
    loads = [(0, rank) for rank in range(world_size)]
    owner = [0] * len(numels)
    for tensor in sorted(range(len(numels)), key=lambda i: -numels[i]):
        load, rank = heapq.heappop(loads)
        owner[tensor] = rank
        heapq.heappush(loads, (load + numels[tensor], rank))
    columns = (owner, range(len(numels)), np.zeros(len(numels), np.int64), numels)
    return _by_rank("whole", shapes, world_size, [list(column) for column in columns])


def _check_items(dtype):
    """Refuse what cannot be copied byte by byte, or is no number."""
    if dtype.hasobject or dtype.itemsize not in (1, 2, 4, 8):
        raise TypeError(f"cannot copy dtype {dtype}; items of 1, 2, 4 or 8 bytes are known")


def _tensors(arrays, layout):
    """Return addresses and dtype of the tensors, and what has to be kept alive meanwhile."""
    if isinstance(arrays, np.ndarray):
        check_array("arrays", arrays, ndim=1, shape=(layout.numel,))
        starts = layout.tensor_starts * arrays.itemsize + arrays.ctypes.data
        return starts, arrays.dtype, arrays
    arrays = list(arrays)
    if len(arrays) != len(layout.shapes):
        raise ValueError(f"{len(arrays)} arrays for a layout of {len(layout.shapes)} tensors")
    return addresses_of("arrays[{}]", arrays, layout.tensor_table, copy=True)


def _walk_all(shards, tensors, layout, dtype, to_full):
    """Copy between buffers of ranks and tensors, given as addresses."""
    starts, segments = layout.table
    real = int(starts[-1])
    args = (shards, tensors, starts, segments, dtype.itemsize, to_full)
    args += (streams(real * dtype.itemsize), 0, copy_blocks(real))
    launch(_walk, _walk_parallel, real, *args)


def partition(arrays, layout, out=None):
    """Cut tensors among ranks.

    Parameters
    ----------
    arrays : sequence of numpy.ndarray, or numpy.ndarray
        Tensors of the layout's shapes and of one dtype, read in C order whatever their layout in
        memory; or one C-contiguous 1-D buffer with all of them end to end.
    layout : Layout
        Who gets what.
    out : sequence of numpy.ndarray, optional
        Written instead of new arrays: for each rank a buffer as described below, overlapping
        nothing. Its padding is left as it is.

    Returns
    -------
    list of numpy.ndarray
        ``out``, or for each rank its own 1-D buffer, sharing memory with nothing. Padding is zero.

    Raises
    ------
    TypeError, ValueError
        Another number of tensors, another shape, mixed dtypes or foreign byte order; a buffer of
        ``out`` of another dtype, length or layout in memory, read-only or overlapping.
    """
    tensors, dtype, kept = _tensors(arrays, layout)
    _check_items(dtype)
    if out is None:
        out = [np.empty(numel, dtype) for numel in layout.buffer_numels]
        for buffer, load in zip(out, layout.loads, strict=True):
            buffer[load:] = 0
        shards, _, _ = addresses_of("out[{}]", out, layout.buffer_table)
    else:
        shards = _check_out(out, layout, dtype, tensors)
    _walk_all(shards, tensors, layout, dtype, False)
    del kept
    return list(out)


def _check_out(out, layout, dtype, tensors):
    """Return the addresses of the ranks' buffers, which may be written to and overlap nothing."""
    out = list(out)
    if len(out) != layout.world_size:
        raise ValueError(f"out has {len(out)} buffers for world_size {layout.world_size}")
    table = layout.buffer_table
    shards, _, _ = addresses_of("out[{}]", out, table, dtype=dtype, writable=True)
    written = "out[{}]", shards, table.numels
    check_apart(written, ("arrays[{}]", tensors, layout.tensor_table.numels), dtype.itemsize)
    return shards


def gather_flat(shards, layout, out=None):
    """Put tensors together again, end to end in one buffer.

    Parameters
    ----------
    shards : sequence of numpy.ndarray
        For each rank its 1-D buffer, C-contiguous, of one dtype. Padding is not read.
    layout : Layout
        The layout they were cut with.
    out : numpy.ndarray, optional
        Written instead of a new array: 1-D, ``layout.numel`` elements of the same dtype, no
        overlap with a shard.

    Returns
    -------
    numpy.ndarray
        ``out``, or a new array, of shape (numel,).

    Raises
    ------
    TypeError, ValueError
        Another number of ranks, a buffer of another length or layout in memory, or mixed dtypes;
        the error names the rank.
    """
    shards = list(shards)
    if len(shards) != layout.world_size:
        raise ValueError(f"{len(shards)} shards for world_size {layout.world_size}")
    table = layout.buffer_table
    addresses, dtype, kept = addresses_of("shard of rank {}", shards, table)
    _check_items(dtype)
    if out is None:
        out = np.empty(layout.numel, dtype)
    check_array("out", out, dtype=dtype, shape=(layout.numel,), writable=True)
    at, numel = np.array([out.ctypes.data]), np.array([out.size])
    check_apart(("out", at, numel), ("shard of rank {}", addresses, table.numels), dtype.itemsize)
    tensors = layout.tensor_starts * dtype.itemsize + out.ctypes.data
    _walk_all(addresses, tensors, layout, dtype, True)
    del kept
    return out


def gather(shards, layout):
    """Put tensors together again; the exact inverse of :func:`partition`.

    Parameters
    ----------
    shards : sequence of numpy.ndarray
        For each rank its 1-D buffer, see :func:`gather_flat`.
    layout : Layout
        The layout they were cut with.

    Returns
    -------
    list of numpy.ndarray
        Tensors of the layout's shapes; views that lie end to end in one new buffer.

    Raises
    ------
    TypeError, ValueError
        See :func:`gather_flat`.
    """
    return unflatten(gather_flat(shards, layout), layout.shapes)


# ---------------------------------------------------------------------------------------------
# The specification's flat helpers: [rank][i] shards, each array cut alone


def _by_dtype(dtypes):
    """Group positions by dtype: one buffer never holds two."""
    groups = defaultdict(list)
    for i, dtype in enumerate(dtypes):
        groups[dtype].append(i)
    return groups


def _partition_each(arrays, world_size):
    """Cut each array alone by ceil-div and return [rank][i]."""
    world_size = check_world_size(world_size)
    arrays = [np.asarray(array) for array in arrays]
    partitioned = [[None] * len(arrays) for _ in range(world_size)]
    for indices in _by_dtype([array.dtype for array in arrays]).values():
        group = [arrays[i] for i in indices]
        layout = ceil_div_layout([(array.size,) for array in group], world_size)
        buffers = partition([array.reshape(-1) for array in group], layout)
        chunks = np.array([-(-array.size // world_size) for array in group])
        sizes = np.array([array.size for array in group])
        for rank, buffer in enumerate(buffers):
            ends = np.cumsum(np.clip(sizes - rank * chunks, 0, chunks)).tolist()
            start = 0
            for i, end in zip(indices, ends, strict=True):
                partitioned[rank][i] = buffer[start:end]
                start = end
    return partitioned


def partition_parameters_flat(arrays, world_size):
    """Cut each parameter alone in chunks of ceil(n / world_size); trailing shards may be empty.

    Parameters
    ----------
    arrays : sequence of array_like
        Parameters, flattened in C order; a 0-d one counts one element.
    world_size : int
        Number of ranks.

    Returns
    -------
    list of list of numpy.ndarray
        ``[rank][i]``: rank's 1-D shard of array i, of the array's dtype. Shards of one rank and
        dtype share that rank's buffer; no memory is shared with ``arrays`` or another rank.

    Raises
    ------
    ValueError
        world_size below 1.
    TypeError
        A dtype that cannot be copied (objects, foreign byte order).

    Examples
    --------
    >>> [len(rank[0]) for rank in partition_parameters_flat([[1.0, 2.0, 3.0, 4.0, 5.0]], 4)]
    [2, 2, 1, 0]
    """
    return _partition_each(arrays, world_size)


def partition_gradients_flat(arrays, world_size):
    """Cut each (already reduced) gradient alone, exactly as its parameter is cut.

    Parameters
    ----------
    arrays : sequence of array_like
        Gradients in the order of the parameters.
    world_size : int
        Number of ranks.

    Returns
    -------
    list of list of numpy.ndarray
        ``[rank][i]``, see :func:`partition_parameters_flat`.

    Raises
    ------
    ValueError, TypeError
        See :func:`partition_parameters_flat`.
    """
    return _partition_each(arrays, world_size)


def partition_optimizer_state(arrays, world_size):
    """Cut each optimizer state (a moment, a master copy) alone, exactly as its parameter is cut.

    Parameters
    ----------
    arrays : sequence of array_like
        States in the order of the parameters.
    world_size : int
        Number of ranks.

    Returns
    -------
    list of list of numpy.ndarray
        ``[rank][i]``, see :func:`partition_parameters_flat`.

    Raises
    ------
    ValueError, TypeError
        See :func:`partition_parameters_flat`.
    """
    return _partition_each(arrays, world_size)


def _check_each(partitioned):
    """Refuse shards that ceil-div could not have made, naming rank and index."""
    count = len(partitioned[0])
    for rank, shards in enumerate(partitioned):
        if len(shards) != count:
            index = min(len(shards), count)
            raise ValueError(
                f"rank {rank} has {len(shards)} shards and rank 0 has {count}: index {index} is "
                "missing on one of them; every rank must give one shard of each array, empty or not"
            )
    for index in range(count):
        pieces = [shards[index] for shards in partitioned]
        numel, chunk = sum(piece.size for piece in pieces), pieces[0].size
        for rank, piece in enumerate(pieces):
            if piece.ndim != 1 or piece.dtype != pieces[0].dtype:
                raise ValueError(
                    f"rank {rank}, index {index}: expected a 1-D shard of {pieces[0].dtype}, got "
                    f"shape {piece.shape} of {piece.dtype}"
                )
            expected = min(max(numel - rank * chunk, 0), chunk)
            if piece.size != expected or chunk != -(-numel // len(pieces)):
                raise ValueError(
                    f"rank {rank}, index {index}: a shard of {piece.size} elements does not fit; "
                    f"{numel} elements on {len(pieces)} ranks are cut in chunks of "
                    f"{-(-numel // len(pieces))}, the rest empty"
                )


def gather_parameters_flat(partitioned):
    """Put arrays together from ``[rank][i]`` shards; the exact inverse of the partition helpers.

    Parameters
    ----------
    partitioned : sequence of sequence of array_like
        ``[rank][i]`` shards as :func:`partition_parameters_flat` makes them.

    Returns
    -------
    list of numpy.ndarray
        The arrays, 1-D, of their own dtypes. No ranks give no arrays.

    Raises
    ------
    ValueError
        Ragged ranks, or shards that such a cut cannot give; the error names rank and index.

    Examples
    --------
    >>> gather_parameters_flat([[[1.0, 2.0]], [[3.0]]])
    [array([1., 2., 3.])]
    """
    partitioned = [[np.asarray(shard) for shard in shards] for shards in partitioned]
    if not partitioned:
        return []
    _check_each(partitioned)
    gathered = [None] * len(partitioned[0])
    for indices in _by_dtype([shard.dtype for shard in partitioned[0]]).values():
        numels = [sum(shards[i].size for shards in partitioned) for i in indices]
        layout = ceil_div_layout([(numel,) for numel in numels], len(partitioned))
        buffers = [np.concatenate([shards[i] for i in indices]) for shards in partitioned]
        for i, array in zip(indices, gather(buffers, layout), strict=True):
            gathered[i] = array
    return gathered
