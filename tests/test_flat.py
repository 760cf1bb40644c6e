"""The flat_param: padding, shards, views and the table of runs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero_nb.core.flat import (
    GRAD,
    HYPER,
    NUMEL,
    PARAM,
    ROW,
    RUN_COLUMNS,
    RUN_LIMIT,
    STATE,
    TARGET,
    FlatLayout,
    flatten,
    own_shard,
    pad,
    padded_numel,
    run_table,
    unflatten,
)

WORLDS = pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
UGLY = ((5,), (3, 4), (), (0,), (1,), (7, 3), (6,), (2,))
SENTINEL = np.float32(7777)


def layout_of(shapes, world_size):
    return FlatLayout(tuple(f"p{i}" for i in range(len(shapes))), shapes, world_size)


def test_padded_numel():
    assert [padded_numel(n, 4) for n in (0, 1, 4, 5)] == [0, 4, 4, 8]
    assert padded_numel(5, 1) == 5
    assert padded_numel(32001, 8) == 32008  # A18
    with pytest.raises(ValueError, match="world_size must be at least 1, got 0"):
        padded_numel(5, 0)
    with pytest.raises(ValueError, match="negative"):
        padded_numel(-1, 2)
    with pytest.raises(TypeError, match="integer"):
        padded_numel(5, 2.0)
    with pytest.raises(TypeError, match="integer"):
        padded_numel(5, True)


def test_pad_copies_and_fills():
    x = np.arange(10, dtype=np.float32).reshape(2, 5)
    padded = pad(x, 4, fill=SENTINEL)
    assert padded.shape == (2, 8)
    assert (padded[:, :5] == x).all()
    assert (padded[:, 5:] == SENTINEL).all()
    assert not np.may_share_memory(pad(x, 5), x)
    with pytest.raises(ValueError, match="no axis"):
        pad(np.float32(1).reshape(()), 2)


@WORLDS
def test_flatten_and_unflatten_are_inverse(world_size):
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape) for shape in UGLY]
    flat = flatten(arrays, world_size)
    numel = sum(array.size for array in arrays)
    assert flat.size == padded_numel(numel, world_size)
    assert (flat[numel:] == 0).all()
    for array, back in zip(arrays, unflatten(flat, UGLY), strict=True):
        assert back.shape == array.shape
        assert (back == array).all()
        assert back.size == 0 or np.shares_memory(back, flat)


def test_A17_fortran_order_is_read_in_c_order():
    weight = np.asfortranarray([[0, 1, 2], [3, 4, 5]])
    assert flatten([weight], 1).tolist() == [0, 1, 2, 3, 4, 5]


def test_flatten_into_out_leaves_the_padding():
    out = np.full(8, SENTINEL)
    assert flatten([np.zeros(5, np.float32)], 4, out=out) is out
    assert out.tolist() == [0] * 5 + [SENTINEL] * 3


def test_flatten_refuses_what_does_not_fit_before_writing():
    ones = np.ones(5, np.float32)
    out = np.full(8, SENTINEL)
    with pytest.raises(TypeError, match=r"one dtype.*float16.*float32"):  # F5
        flatten([ones, np.ones(1, np.float16)], 2)
    with pytest.raises(TypeError, match="no array"):
        flatten([], 2)
    with pytest.raises(TypeError):
        flatten([ones], 4, out=out.astype(np.float64))
    with pytest.raises(ValueError, match="shape"):
        flatten([ones], 4, out=out[:5])
    with pytest.raises(ValueError, match=r"arrays\[1\].*overlap"):
        flatten([ones[:3], out[:2]], 4, out=out)
    assert (out == SENTINEL).all()
    with pytest.raises(ValueError, match="need 6 elements"):
        unflatten(np.zeros(5), [(6,)])


def test_unflatten_keeps_leading_axes():
    flat = np.arange(24).reshape(2, 12)
    a, b = unflatten(flat, [(2, 3), ()])
    assert a.shape == (2, 2, 3)
    assert b.tolist() == [6, 18]


@WORLDS
def test_own_shard_is_each_ranks_slice_and_writes_through(world_size):
    for first in range(world_size):
        for hosted in range(1, world_size - first + 1):
            ranks = range(first, first + hosted)
            x = np.arange(hosted * world_size * 3, dtype=np.float32).reshape(hosted, -1)
            expected = [x[i, r * 3 : r * 3 + 3].tolist() for i, r in enumerate(ranks)]
            shard = own_shard(x, ranks, world_size)
            assert shard.tolist() == expected
            shard[...] = SENTINEL
            assert (x == SENTINEL).sum() == hosted * 3
            assert (own_shard(x, ranks, world_size) == SENTINEL).all()


def test_own_shard_works_on_any_strides_and_on_empty_shards():
    wide = np.arange(48).reshape(4, 12)
    expected = np.array([wide[i, 2 * i : 2 * i + 2] for i in range(4)])
    assert (own_shard(wide[:, :8], range(4), 4) == expected).all()
    assert own_shard(np.empty((2, 0)), range(2), 2).shape == (2, 0)
    frozen = np.zeros((2, 4))
    frozen.flags.writeable = False
    assert not own_shard(frozen, range(2), 2).flags.writeable


@pytest.mark.parametrize(
    ("shape", "ranks", "world_size", "message"),
    [
        ((2, 5), range(2), 2, "numel 5 is not a multiple of world_size 2"),
        ((3, 4), range(2), 2, r"shape \(2, F\)"),
        ((8,), range(2), 2, r"shape \(2, F\)"),
        ((2, 8), [0, 2], 4, "consecutive"),
        ((0, 8), [], 4, "at least one"),
        ((2, 8), range(3, 5), 4, "do not exist"),
        ((2, 8), range(-1, 1), 4, "do not exist"),
    ],
)
def test_own_shard_refuses(shape, ranks, world_size, message):
    with pytest.raises(ValueError, match=message):
        own_shard(np.zeros(shape), ranks, world_size)


# --- FlatLayout --------------------------------------------------------------------------------


def test_layout_numbers():
    layout = layout_of(UGLY, 4)
    assert layout.numels == (5, 12, 1, 0, 1, 21, 6, 2)
    assert layout.offsets == (0, 5, 17, 18, 18, 19, 40, 46, 48)
    assert (layout.numel, layout.padded_numel) == (48, 48)
    assert (layout.shard_numel, layout.padding) == (12, 0)
    assert layout_of(UGLY, 5).padding == 2
    nothing = layout_of(((0,),), 3)
    assert (nothing.padded_numel, nothing.shard_numel, nothing.spans(2)) == (0, 0, [])


def test_layout_is_a_value():
    assert layout_of(UGLY, 4) == layout_of([list(s) for s in UGLY], 4)
    assert hash(layout_of(UGLY, 4)) == hash(layout_of(UGLY, 4))
    with pytest.raises(AttributeError):
        layout_of(UGLY, 4).world_size = 2


def test_layout_refuses():
    with pytest.raises(ValueError, match="1 names for 2 shapes"):
        FlatLayout(("a",), ((1,), (2,)), 1)
    with pytest.raises(ValueError, match="names must differ"):
        FlatLayout(("a", "a"), ((1,), (2,)), 1)
    with pytest.raises(ValueError, match="world_size"):
        FlatLayout(("a",), ((1,),), 0)
    layout = layout_of(UGLY, 2)
    with pytest.raises(KeyError, match="no parameter 'x'"):
        layout.view(np.zeros((2, 48)), "x")
    with pytest.raises(ValueError, match="end in 48"):
        layout.view(np.zeros((2, 47)), "p0")
    with pytest.raises(ValueError, match="do not exist"):
        layout.spans(2)


@WORLDS
def test_views_are_the_parameters_and_write_through(world_size):
    layout = layout_of(UGLY, world_size)
    arrays = [np.random.default_rng(i).standard_normal(s) for i, s in enumerate(UGLY)]
    flat = flatten(arrays, world_size)
    both = np.stack([flat, -flat])
    for name, array in zip(layout.names, arrays, strict=True):
        assert (layout.view(flat, name) == array).all()
        view = layout.view(both, name)
        assert view.shape == (2, *array.shape)
        assert (view[1] == -array).all()
        view[...] = SENTINEL
    assert (both[:, : layout.numel] == SENTINEL).all()
    assert (both[:, layout.numel :] != SENTINEL).all()


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=6),
    st.sampled_from([1, 2, 3, 4, 8]),
)
def test_spans_cover_each_real_element_once(numels, world_size):
    layout = layout_of([(n,) for n in numels], world_size)
    owner = [i for i, n in enumerate(numels) for _ in range(n)]
    seen = []
    for rank in range(world_size):
        for start, stop, parameter in layout.spans(rank):
            assert 0 <= start < stop <= layout.shard_numel
            at = rank * layout.shard_numel
            seen += [(position, parameter) for position in range(at + start, at + stop)]
    assert seen == list(enumerate(owner))
    full = [(p, i) for start, stop, i in layout.full_spans() for p in range(start, stop)]
    assert full == seen


def test_A11_a_shard_that_is_only_padding_has_no_spans():
    layout = layout_of(((5,),), 4)
    assert [layout.spans(rank) for rank in range(4)] == [[(0, 2, 0)], [(0, 2, 0)], [(0, 1, 0)], []]


# --- run tables --------------------------------------------------------------------------------

EVERYWHERE = {"TARGET": "full_own", "GRAD": "shard", "STATE": "shard", "PARAM": "full_own"}


def test_a_table_says_where_each_run_lies():
    layout = layout_of(((3,), (4,)), 2)  # F = 8, S = 4, one element of padding
    runs = run_table(layout, range(2), placements=EVERYWHERE, hyper_of=[0, 1])
    named = {"ROW": ROW, "TARGET": TARGET, "GRAD": GRAD, "STATE": STATE, "PARAM": PARAM}
    assert runs.dtype == np.int64
    assert runs[:, [named["ROW"], NUMEL, HYPER]].tolist() == [[0, 3, 0], [0, 1, 1], [1, 3, 1]]
    assert runs[:, TARGET].tolist() == [0, 3, 8 + 4]
    assert runs[:, PARAM].tolist() == [0, 3, 8 + 4]
    assert runs[:, GRAD].tolist() == runs[:, STATE].tolist() == [0, 3, 4]


def test_neighbours_of_one_hyper_row_are_merged_and_left_out_ones_part_them():
    layout = layout_of(((3,), (4,), (0,), (5,)), 1)
    place = {"GRAD": "shard"}
    runs = run_table(layout, range(1), placements=place, hyper_of=[2, 2, 1, 2])
    assert runs[:, [GRAD, NUMEL, HYPER]].tolist() == [[0, 12, 2]]
    runs = run_table(layout, range(1), placements=place, hyper_of=[2, -1, 2, 2])
    assert runs[:, [GRAD, NUMEL, HYPER]].tolist() == [[0, 3, 2], [7, 5, 2]]
    assert (runs[:, [TARGET, STATE, PARAM]] == -1).all()
    nothing = run_table(layout, range(1), placements=place, hyper_of=[-1] * 4)
    assert nothing.shape == (0, RUN_COLUMNS)


def test_replicated_tables_cover_all_of_each_row():
    layout = layout_of(((3,), (4,)), 2)
    runs = run_table(
        layout,
        range(1, 2),
        placements=dict.fromkeys(("TARGET", "GRAD"), "full"),
        hyper_of=[0, 0],
        replicated=True,
    )
    assert runs[:, [ROW, TARGET, GRAD, NUMEL]].tolist() == [[0, 0, 0, 7]]


def test_a_hosted_part_of_the_world_counts_its_rows_from_zero():
    layout = layout_of(((16,),), 4)
    runs = run_table(layout, range(2, 4), placements=EVERYWHERE, hyper_of=[0])
    assert runs[:, [ROW, TARGET, GRAD]].tolist() == [[0, 8, 0], [1, 16 + 12, 4]]


def test_long_runs_are_cut():
    layout = layout_of(((2 * RUN_LIMIT + 3,),), 1)
    runs = run_table(layout, range(1), placements={"GRAD": "shard"}, hyper_of=[0])
    assert runs[:, NUMEL].tolist() == [RUN_LIMIT, RUN_LIMIT, 3]
    assert runs[:, GRAD].tolist() == [0, RUN_LIMIT, 2 * RUN_LIMIT]


@WORLDS
@pytest.mark.parametrize("place", ["shard", "full_own"])
def test_runs_visit_each_real_element_once_and_no_padding(world_size, place):
    layout = layout_of(UGLY, world_size)
    layout = layout if layout.padding else layout_of((*UGLY, (1,)), world_size)
    ranks = range(world_size)
    full = np.full((world_size, layout.padded_numel), SENTINEL)
    own = own_shard(full, ranks, world_size)
    flat = np.arange(layout.padded_numel, dtype=np.float32)
    flat[layout.numel :] = SENTINEL
    own[...] = flat.reshape(world_size, -1)
    buffer = full if place == "full_own" else own.copy()
    runs = run_table(layout, ranks, placements={"GRAD": place}, hyper_of=range(len(layout.names)))
    visited = [buffer.reshape(-1)[r[GRAD] : r[GRAD] + r[NUMEL]] for r in runs]
    assert np.concatenate(visited).tolist() == list(range(layout.numel))


def test_run_table_refuses():
    layout = layout_of(((3,), (4,)), 2)
    for message, change in [
        ("hyper_of has 1 rows for 2 parameters", {"hyper_of": [0]}),
        ("unknown buffer 'MASTER'", {"placements": {"MASTER": "shard"}}),
        ("GRAD is placed 'full'; with replicated=False", {"placements": {"GRAD": "full"}}),
        ("GRAD is placed 'shard'; with replicated=True", {"replicated": True}),
        ("do not exist", {"ranks": range(1, 3)}),
    ]:
        given = {"ranks": range(2), "placements": {"GRAD": "shard"}, "hyper_of": [0, 0], **change}
        with pytest.raises(ValueError, match=message):
            run_table(layout, given.pop("ranks"), **given)
