"""Layouts, partition and gather: everything comes back, and each rank holds what it should."""

import numba
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import naive
from zero_nb.core import kernels
from zero_nb.core.flat import unflatten
from zero_nb.core.partition import (
    PartitionInfo,
    balanced_layout,
    ceil_div_layout,
    flat_layout,
    gather,
    gather_flat,
    gather_parameters_flat,
    partition,
    partition_gradients_flat,
    partition_optimizer_state,
    partition_parameters_flat,
    whole_layout,
)

JIT = not numba.config.DISABLE_JIT
WORLDS = pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
LAYOUTS = [flat_layout, ceil_div_layout, balanced_layout, whole_layout]
EACH_LAYOUT = pytest.mark.parametrize("layout_of", LAYOUTS, ids=lambda f: f.__name__)
UGLY = ((5,), (3, 4), (), (0,), (1,), (7, 3), (6,), (2,))
SENTINEL = 77


def tensors(shapes, dtype=np.float32):
    """Tensors whose elements all differ, so that a wrong place shows."""
    numels = [int(np.prod(shape)) for shape in shapes]
    flat = np.arange(1, sum(numels) + 1).astype(dtype)
    ends = np.cumsum(numels)
    return [flat[e - n : e].reshape(s) for e, n, s in zip(ends, numels, shapes, strict=True)]


def lengths(layout):
    """Elements each rank holds of each tensor."""
    held = np.zeros((len(layout.shapes), layout.world_size), int)
    for rank in range(layout.world_size):
        for tensor, _, elements, _ in layout.info(rank).pieces:
            held[tensor, rank] += elements
    return held.tolist()


@EACH_LAYOUT
@WORLDS
@pytest.mark.parametrize("dtype", [np.float32, np.uint16, np.float64, np.int8, np.complex64])
def test_gather_is_the_inverse_of_partition(layout_of, world_size, dtype):
    layout = layout_of(UGLY, world_size)
    arrays = tensors(UGLY, dtype)
    buffers = partition(arrays, layout)
    for rank, buffer in enumerate(buffers):
        info = layout.info(rank)
        assert buffer.dtype == dtype
        assert buffer.shape == (info.numel,)
        assert buffer.base is None  # its own memory, not a view that keeps others alive
        for tensor, first, elements, at in info.pieces:
            expected = arrays[tensor].reshape(-1)[first : first + elements]
            assert (buffer[at : at + elements] == expected).all()
        assert (buffer[info.length :] == 0).all()
        buffer[info.length :] = SENTINEL  # A7: padding is never read
    for before, after in zip(arrays, gather(buffers, layout), strict=True):
        assert after.shape == before.shape
        assert after.dtype == dtype
        assert (after == before).all()


@EACH_LAYOUT
@given(
    numels=st.lists(st.integers(0, 11), max_size=7),
    world_size=st.sampled_from([1, 2, 3, 4, 8, 13]),
)
def test_every_element_has_exactly_one_owner(layout_of, numels, world_size):
    shapes = [(n,) for n in numels]
    layout = layout_of(shapes, world_size)
    owners = [np.zeros(n, int) for n in numels]
    for rank in range(world_size):
        info, at = layout.info(rank), 0
        for tensor, first, elements, place in info.pieces:
            assert place == at
            assert elements > 0
            owners[tensor][first : first + elements] += 1
            at += elements
        assert info.length == at == layout.loads[rank]
        assert 0 <= info.padding
        assert info.offset == sum(layout.info(r).numel for r in range(rank))
    assert all((owner == 1).all() for owner in owners)
    arrays = tensors(shapes)
    for before, after in zip(arrays, gather(partition(arrays, layout), layout), strict=True):
        assert (before == after).all()


@pytest.mark.parametrize(
    ("numel", "world_size", "expected"),
    [
        (5, 4, [2, 2, 1, 0]),
        (7, 6, [2, 2, 2, 1, 0, 0]),
        (9, 8, [2, 2, 2, 2, 1, 0, 0, 0]),
        (3, 4, [1, 1, 1, 0]),
        (1, 4, [1, 0, 0, 0]),
        (7, 3, [3, 3, 1]),
        (0, 2, [0, 0]),
    ],
)
def test_A4_ceil_div_is_not_array_split(numel, world_size, expected):
    assert lengths(ceil_div_layout([(numel,)], world_size)) == [expected]
    assert naive.chunks_ceil(numel, world_size) == expected


@pytest.mark.parametrize("numel", [0, 1, 5, 7, 16])
@WORLDS
def test_balanced_cuts_one_tensor_as_array_split(numel, world_size):
    expected = [len(part) for part in np.array_split(np.arange(numel), world_size)]
    assert lengths(balanced_layout([(numel,)], world_size)) == [expected]


@given(st.lists(st.integers(0, 30), max_size=9), st.integers(1, 9))
def test_balanced_sizes_differ_by_at_most_one_in_each_tensor_and_in_all(numels, world_size):
    layout = balanced_layout([(n,) for n in numels], world_size)
    for held in [*lengths(layout), layout.loads]:
        assert max(held) - min(held) <= 1


def test_A1_padding_can_cover_several_whole_ranks():
    layout = flat_layout([(5,)], 4, align=8)
    assert [layout.info(rank).padding for rank in range(4)] == [0, 0, 1, 2]
    public = flat_layout([(266240,)], 768, align=1536)
    assert set(public.buffer_numels) == {348}
    pads = [public.info(rank).padding for rank in range(768)]
    assert pads[-4:] == [0, 328, 348, 348]
    assert sum(pads) == 1024
    arrays = [np.arange(5)]
    assert gather(partition(arrays, layout), layout)[0].tolist() == [0, 1, 2, 3, 4]


def test_A11_a_shard_that_is_only_padding_is_legal():
    layout = flat_layout([(5,)], 4, align=8)
    assert layout.info(3) == PartitionInfo(rank=3, offset=6, length=0, padding=2, pieces=())
    buffers = partition([np.arange(1, 6)], layout)
    assert [b.tolist() for b in buffers] == [[1, 2], [3, 4], [5, 0], [0, 0]]


@EACH_LAYOUT
def test_A3_A7_rebuilding_two_arrays(layout_of):
    for values, world_size in [
        ([[1, 2, 3, 4, 5], [10, 11, 12]], 4),
        ([[1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6, 7]], 2),
    ]:
        arrays = [np.array(array) for array in values]
        layout = layout_of([array.shape for array in arrays], world_size)
        buffers = partition(arrays, layout)
        for rank, buffer in enumerate(buffers):
            buffer[layout.info(rank).length :] = 7777
        for before, after in zip(arrays, gather(buffers, layout), strict=True):
            assert before.tolist() == after.tolist()


def test_A8_lengths_are_never_negative():
    layout = ceil_div_layout([(32,)], 128 * 3)
    assert all(info >= 0 for info in lengths(layout)[0])
    assert sum(lengths(layout)[0]) == 32


def test_A12_with_fewer_tensors_than_ranks_some_hold_nothing():
    layout = whole_layout([(3,)], 2)
    assert [buffer.tolist() for buffer in partition([np.arange(3)], layout)] == [[0, 1, 2], []]


@EACH_LAYOUT
def test_A13_zero_size_tensors(layout_of):
    shapes = [(0,), (3,), (0, 4), (2,)]
    layout = layout_of(shapes, 2)
    back = gather(partition(tensors(shapes), layout), layout)
    assert [array.shape for array in back] == shapes
    for empty in ([], [(0,)], [(0,), (0, 2)]):
        layout = layout_of(empty, 3)
        assert layout.imbalance == 1.0
        buffers = partition([np.zeros(shape) for shape in empty], layout)
        assert [buffer.size for buffer in buffers] == [0, 0, 0]
        assert [array.shape for array in gather(buffers, layout)] == empty


@EACH_LAYOUT
def test_A15_a_scalar_counts_one_element_and_comes_back_as_a_scalar(layout_of):
    layout = layout_of([()], 3)
    buffers = partition([np.float32(2.5)], layout)
    assert layout.loads == (1, 0, 0)
    back = gather(buffers, layout)[0]
    assert back.shape == ()
    assert back == 2.5


def test_A17_fortran_order_is_read_in_c_order():
    weight = np.asfortranarray([[0, 1, 2], [3, 4, 5]])
    buffers = partition([weight], flat_layout([weight.shape], 2))
    assert [buffer.tolist() for buffer in buffers] == [[0, 1, 2], [3, 4, 5]]
    every_other = np.arange(10)[::2]
    assert partition([every_other], flat_layout([(5,)], 1))[0].tolist() == [0, 2, 4, 6, 8]


def test_G10_whole_tensors_go_largest_first_to_the_least_loaded():
    shapes = [(1,), (1,), (1,), (1,), (10,)]
    layout = whole_layout(shapes, 2)
    assert layout.loads == (10, 4)
    assert layout.imbalance == pytest.approx(10 / 7)


@given(st.lists(st.integers(0, 20), max_size=9), st.integers(1, 5))
def test_whole_owners_are_those_of_the_obvious_loop(numels, world_size):
    layout = whole_layout([(n,) for n in numels], world_size)
    owner = naive.greedy(numels, world_size)
    for rank in range(world_size):
        held = [tensor for tensor, *_ in layout.info(rank).pieces]
        assert held == [i for i, n in enumerate(numels) if n and owner[i] == rank]


def test_imbalance_is_the_largest_load_over_the_mean():
    shapes = [(5,), (5,), (5,)]
    assert ceil_div_layout(shapes, 4).loads == (6, 6, 3, 0)
    assert ceil_div_layout(shapes, 4).imbalance == pytest.approx(6 / 3.75)
    assert balanced_layout(shapes, 4).imbalance == pytest.approx(4 / 3.75)
    assert flat_layout(shapes, 4).imbalance == pytest.approx(4 / 3.75)
    assert whole_layout(shapes, 4).imbalance == pytest.approx(5 / 3.75)
    assert flat_layout(shapes, 1).imbalance == 1.0


@EACH_LAYOUT
@pytest.mark.parametrize("direction", ["sequential", "parallel"])
def test_blocks_that_begin_inside_segments(layout_of, direction, monkeypatch):
    # Several copy blocks, cut at other places than the segments are.
    numels = [70_000, 3, 65_536, 1, 0, 90_001] if JIT else [70, 3, 64, 1, 0, 90]
    if not JIT:
        monkeypatch.setattr(kernels, "COPY_BLOCK", 64)
    monkeypatch.setattr(kernels, "PARALLEL_FROM", 0 if direction == "parallel" else 1 << 60)
    arrays = tensors([(n,) for n in numels])
    for world_size in (1, 2, 3):
        layout = layout_of([(n,) for n in numels], world_size)
        buffers = partition(arrays, layout)
        for rank, buffer in enumerate(buffers):
            expected = [arrays[t][f : f + n] for t, f, n, _ in layout.info(rank).pieces]
            assert (buffer[: layout.loads[rank]] == np.concatenate(expected)).all()
        for before, after in zip(arrays, gather(buffers, layout), strict=True):
            assert (before == after).all()


@EACH_LAYOUT
def test_one_buffer_with_all_tensors_end_to_end_is_taken_as_it_is(layout_of):
    layout = layout_of(UGLY, 3)
    flat = np.arange(layout.numel, dtype=np.float32)
    buffers = partition(flat, layout)
    for one, other in zip(buffers, partition(unflatten(flat, UGLY), layout), strict=True):
        assert one.tolist() == other.tolist()
    out = np.full(layout.numel, SENTINEL, np.float32)
    assert gather_flat(buffers, layout, out=out) is out
    assert (out == flat).all()
    assert not np.shares_memory(gather_flat(buffers, layout), flat)


def test_partition_never_shares_memory_with_what_it_was_given():
    arrays = [np.zeros(4)]
    layout = flat_layout([(4,)], 1)
    buffers = partition(arrays, layout)
    assert not np.shares_memory(buffers[0], arrays[0])
    assert not np.shares_memory(gather(buffers, layout)[0], buffers[0])


@EACH_LAYOUT
@pytest.mark.parametrize("stored", ["usual", "streamed"])
def test_into_buffers_that_are_there(layout_of, stored, monkeypatch):
    if stored == "streamed":
        monkeypatch.setattr(kernels, "STREAM_FROM", 0)
    shapes = [(2_000 if JIT else 70, 3), (5,), (), (0,), (4_999 if JIT else 49,)]
    layout, arrays = layout_of(shapes, 3), tensors(shapes)
    room = np.full(sum(layout.buffer_numels) + 3, SENTINEL, np.float32)
    ends = np.cumsum(layout.buffer_numels) + 1  # not at the start of a line of the cache
    buffers = [room[e - n : e] for e, n in zip(ends, layout.buffer_numels, strict=True)]
    given = partition(arrays, layout, out=buffers)
    assert all(one is other for one, other in zip(given, buffers, strict=True))
    for rank, (mine, new) in enumerate(zip(buffers, partition(arrays, layout), strict=True)):
        load = layout.loads[rank]
        assert (mine[:load] == new[:load]).all()
        assert (mine[load:] == SENTINEL).all()  # padding is left alone
    assert [room[0], *room[-2:]] == [SENTINEL] * 3
    for before, after in zip(arrays, gather(buffers, layout), strict=True):
        assert (before == after).all()


class Odd(np.ndarray):
    """Not an ordinary array."""


def test_arrays_out_of_the_ordinary_are_read_like_others():
    layout, arrays = ceil_div_layout(UGLY, 3), tensors(UGLY)
    expected = [buffer.tolist() for buffer in partition(arrays, layout)]
    locked = arrays[5].copy()
    locked.flags.writeable = False
    odd = [
        arrays[0].view(Odd),
        np.asfortranarray(arrays[1]),
        arrays[2].item(),
        *arrays[3:5],
        locked,
    ]
    odd = [*odd[:2], np.float32(odd[2]), *odd[3:], np.repeat(arrays[6], 2)[::2], arrays[7]]
    assert [buffer.tolist() for buffer in partition(odd, layout)] == expected


def test_NaN_payloads_survive():
    bits = np.array([0x7F800001, 0xFFC12345, 0x80000000], np.uint32)
    layout = flat_layout([(3,)], 2)
    back = gather(partition([bits.view(np.float32)], layout), layout)[0]
    assert (back.view(np.uint32) == bits).all()


@EACH_LAYOUT
def test_a_layout_refuses_no_ranks(layout_of):
    with pytest.raises(ValueError, match="world_size must be at least 1, got 0"):
        layout_of([(3,)], 0)
    with pytest.raises(TypeError, match="integer"):
        layout_of([(3,)], 2.0)
    with pytest.raises(ValueError, match="rank 2 does not exist"):
        layout_of([(3,)], 2).info(2)


def test_what_does_not_fit_is_refused():
    layout = ceil_div_layout([(5,), (3,)], 2)  # buffers of 5 and 3
    x, y = np.zeros(5, np.float32), np.zeros(3, np.float32)
    good, gaps = partition([x, y], layout), np.zeros(6, np.float32)[::2]
    for error, message, call in [
        (ValueError, "align 6", lambda: flat_layout([(5,)], 4, align=6)),
        (ValueError, "align 0", lambda: flat_layout([(5,)], 4, align=0)),
        (ValueError, "1 arrays for a layout of 2", lambda: partition([x], layout)),
        (ValueError, r"arrays\[1\] must have shape", lambda: partition([x, x], layout)),
        (TypeError, r"arrays\[1\] must have dtype", lambda: partition([x, y.astype(int)], layout)),
        (TypeError, "byte order", lambda: partition([x.astype(">f4"), y.astype(">f4")], layout)),
        (ValueError, "arrays must have", lambda: partition(np.zeros(7, np.float32), layout)),
        (ValueError, "C-contiguous", lambda: partition(np.zeros(16, np.float32)[::2], layout)),
        (TypeError, "cannot copy dtype", lambda: partition(np.zeros(8, object), layout)),
        (TypeError, "cannot copy dtype", lambda: partition(np.zeros(8, complex), layout)),
        (ValueError, "1 shards for world_size 2", lambda: gather(good[:1], layout)),
        (ValueError, "shard of rank 1 must have shape", lambda: gather([good[0], good[0]], layout)),
        (TypeError, "shard of rank 1 must have", lambda: gather([good[0], y.astype(int)], layout)),
        (TypeError, "shard of rank 0 must be", lambda: gather([[0.0] * 5, y], layout)),
        (ValueError, "shard of rank 1 must be C-", lambda: gather([x, gaps], layout)),
        (ValueError, "out must have", lambda: gather_flat(good, layout, np.zeros(7, np.float32))),
        (TypeError, "out must have", lambda: gather_flat(good, layout, np.zeros(8))),
    ]:  # fmt: skip
        with pytest.raises(error, match=message):
            call()
    z, many = np.zeros(8, np.float32), np.zeros(20, np.float32)
    locked = np.zeros(3, np.float32)
    locked.flags.writeable = False
    for error, message, buffers in [
        (ValueError, "out has 1 buffers for world_size 2", good[:1]),
        (ValueError, r"out\[1\] must have shape", [good[0], good[0]]),
        (TypeError, r"out\[1\] must have dtype", [good[0], y.astype(int)]),
        (TypeError, r"out\[0\] must be a numpy.ndarray", [[0.0] * 5, y]),
        (ValueError, r"out\[1\] is written to but is read-only", [good[0], locked]),
        (ValueError, r"out\[1\] and out\[0\] overlap", [many[2:7], many[:3]]),
        (ValueError, r"arrays\[1\] and out\[1\] overlap", [good[0], z[5:]]),
        (ValueError, r"arrays\[0\] and out\[0\] overlap", [z[3:], y]),
    ]:
        with pytest.raises(error, match=message):
            partition(z, layout, out=buffers)
    parts = [many[:5], many[10:13]]  # between them there is room
    assert partition(parts, layout, out=[many[5:10], many[13:16]])[1].size == 3
    with pytest.raises(ValueError, match=r"arrays\[1\] and out\[1\] overlap"):
        partition(parts, layout, out=[many[5:10], many[8:11]][:1] + [many[12:15]])
    out = np.full(8, SENTINEL, np.float32)
    with pytest.raises(ValueError, match="shard of rank 1 and out overlap"):
        gather_flat([x, out[:3]], layout, out=out)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        gather_flat(good, layout, out=out)
    assert (out == SENTINEL).all()


# --- the flat helpers --------------------------------------------------------------------------

HELPERS = pytest.mark.parametrize(
    "cut",
    [partition_parameters_flat, partition_gradients_flat, partition_optimizer_state],
    ids=lambda f: f.__name__,
)


@HELPERS
@given(st.lists(st.integers(0, 11), max_size=6), st.sampled_from([1, 2, 3, 4, 8]))
def test_the_helpers_cut_each_array_alone(cut, numels, world_size):
    arrays = [np.arange(n, dtype=[np.float32, np.int64][i % 2]) for i, n in enumerate(numels)]
    shards = cut(arrays, world_size)
    assert len(shards) == world_size
    for i, array in enumerate(arrays):
        assert [len(rank[i]) for rank in shards] == naive.chunks_ceil(array.size, world_size)
        assert all(rank[i].dtype == array.dtype for rank in shards)
        assert np.concatenate([rank[i] for rank in shards]).tolist() == array.tolist()
    for before, after in zip(arrays, gather_parameters_flat(shards), strict=True):
        assert before.dtype == after.dtype
        assert before.tolist() == after.tolist()


@HELPERS
def test_the_helpers_own_their_memory(cut):
    arrays = [np.zeros(5), np.zeros((2, 3), np.float32)]
    shards = cut(arrays, 2)
    for rank in shards:
        for shard in rank:
            shard[...] = SENTINEL
    assert not np.concatenate([a.ravel() for a in arrays]).any()
    shards[0][0][...] = 1
    assert shards[1][0].tolist() == [SENTINEL] * 2


def test_the_helpers_flatten_in_c_order():
    shards = partition_parameters_flat([np.asfortranarray([[0, 1, 2], [3, 4, 5]]), 7.5], 2)
    assert shards[0][0].tolist() == [0, 1, 2]
    assert shards[1][0].tolist() == [3, 4, 5]
    assert [rank[1].tolist() for rank in shards] == [[7.5], []]


@pytest.mark.parametrize(
    ("partitioned", "message"),
    [
        ([[[1.0]], []], "rank 1 has 0 shards and rank 0 has 1: index 0"),
        ([[[1.0]], [[2.0], [3.0]]], "rank 1 has 2 shards and rank 0 has 1: index 1"),
        ([[[1.0, 2.0]], [[3.0, 4.0, 5.0]]], "rank 0, index 0: a shard of 2 elements"),
        ([[[1], [1, 2]], [[2], [3]], [[3], [4, 5]]], "rank 1, index 1: a shard of 1 elements"),
        ([[[1.0]], [[2]]], "rank 1, index 0: expected a 1-D shard of float64.*int64"),
        ([[[[1.0]]], [[[2.0]]]], r"rank 0, index 0: expected a 1-D shard.*\(1, 1\)"),
    ],
)
def test_ragged_shards_are_refused_by_rank_and_index(partitioned, message):
    with pytest.raises(ValueError, match=message):
        gather_parameters_flat(partitioned)
