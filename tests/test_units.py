"""Units: who owns which part of a parameter, and that everything assigned is booked."""

import math

import numpy as np
import pytest

from tiny import SHAPES, UNITS, WORLD_SIZES, own_params
from zero_nb.cluster.simulated import SimulatedWorld
from zero_nb.config import UsageError
from zero_nb.core.flat import FlatLayout
from zero_nb.core.precision import BFLOAT16
from zero_nb.train.ledger import Ledger
from zero_nb.train.optimizer import ZeROOptimizer
from zero_nb.train.recipes import get_recipe
from zero_nb.train.units import OptimState, Unit, ZeROState, group_by_unit


def unit_of(world_size, precision="fp32", names=tuple(SHAPES)):
    """A unit of its own, with a world and a ledger."""
    layout = FlatLayout(tuple(names), tuple(SHAPES[name] for name in names), world_size)
    world = SimulatedWorld(world_size)
    return Unit("u", layout, get_recipe(precision), world, Ledger(world_size))


# --- where a parameter lies ----------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [*WORLD_SIZES, 16, 100])
def test_the_ranks_parts_of_a_parameter_lie_end_to_end_and_are_all_of_it(world_size):
    unit = unit_of(world_size)
    flat = np.arange(unit.layout.padded_numel)
    for name, shape in SHAPES.items():
        numel, next_offset = math.prod(shape), 0
        whole = unit.layout.view(flat, name).reshape(-1)
        for rank in range(world_size):
            (part,) = (p for p in unit.partitions(rank) if p.name == name)
            assert (part.rank, part.shape, part.unit) == (rank, shape, unit)
            if not part.length:
                continue
            assert part.offset == next_offset
            next_offset += part.length
            shard = flat[rank * unit.layout.shard_numel :][: unit.layout.shard_numel]
            own = shard[part.shard_offset : part.shard_offset + part.length]
            assert own.tolist() == whole[part.offset : next_offset].tolist()
        assert next_offset == numel


def test_every_rank_lists_every_parameter_in_order():
    unit = unit_of(8)
    for rank in range(8):
        assert [part.name for part in unit.partitions(rank)] == list(SHAPES)


@pytest.mark.parametrize("rank", [-1, 3])
def test_there_is_no_part_on_a_rank_that_does_not_exist(rank):
    with pytest.raises(ValueError, match="do not exist at world_size 3"):
        unit_of(3).partitions(rank)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_values_are_what_the_rank_updates_and_never_a_copy(stage, precision):
    params = own_params()
    opt = ZeROOptimizer(params, stage=stage, world_size=3, units=UNITS, precision=precision)
    for name, array in params.items():
        parts = [opt.partition_of(name, rank) for rank in range(3)]
        joined = np.concatenate([part.values() for part in parts])
        assert joined.dtype == np.float32
        assert joined.tolist() == array.reshape(-1).tolist()  # the master is not rounded
        for part in parts:
            part.values()[...] = -5
    assert all(np.all(array == -5) for array in opt.weights().values())


def test_units_of_other_padding_show_it():
    assert repr(unit_of(8)) == "Unit('u', numel=69, padding=3, world_size=8)"


# --- states ------------------------------------------------------------------------------------


def test_every_assignment_is_booked_and_freed_when_it_is_replaced():
    ledger = Ledger(2)
    state = ZeROState(ledger, "u")
    state.param = np.zeros((2, 3), np.uint16)
    state.grad = np.zeros((2, 5), np.float32)
    state.optim = OptimState.like(np.ones((2, 4), np.float32), ("a", "b"), master=True)
    state.unsharded = np.zeros((2, 9), np.uint16)
    assert ledger.held_bytes() == {"param": 6, "grad": 20, "optim": 48}
    assert ledger.current_bytes("unsharded") == 18
    assert {event.label for event in ledger.events} == {"u"}
    state.grad = state.unsharded = None
    state.param = np.zeros((2, 1), np.uint16)
    assert ledger.held_bytes() == {"param": 2, "grad": 0, "optim": 48}
    assert ledger.current_bytes("unsharded") == 0
    assert (state.grad, state.unsharded) == (None, None)


def test_a_state_has_no_attribute_that_would_escape_the_ledger():
    with pytest.raises(AttributeError):
        ZeROState(Ledger(1), "u").gradient = np.zeros((1, 3), np.float32)


@pytest.mark.parametrize("master", [True, False])
def test_optimizer_state_starts_from_zero_moments_and_a_copy(master):
    owned = np.arange(6, dtype=np.float32).reshape(2, 3)
    state = OptimState.like(owned, ("exp_avg", "exp_avg_sq"), master=master)
    assert state.width == 3
    assert list(state.arrays()) == ["master"] * master + ["exp_avg", "exp_avg_sq"]
    for name, array in state.arrays().items():
        assert (array.dtype, array.shape) == (np.float32, (2, 3))
        assert not np.shares_memory(array, owned)
        assert array.tolist() == (owned.tolist() if name == "master" else [[0] * 3] * 2)
    assert (state.master is None) != master


def test_optimizer_state_of_own_slices_owns_only_their_bytes():
    world = SimulatedWorld(4)
    full = np.zeros((4, 20), np.float32)
    state = OptimState.like(world.own_shard(full), ("m",), master=True)
    for array in state.arrays().values():
        assert array.base is None
        assert array.nbytes == 4 * 5 * 4


# --- gradients -----------------------------------------------------------------------------------


def test_what_travels_is_float32_itself_or_a_rounded_copy_that_is_booked():
    unit = unit_of(2)
    grad = np.ones((2, unit.layout.padded_numel), np.float32)
    assert unit.to_wire(grad) is grad
    unit = unit_of(2, "bf16")
    bits = unit.to_wire(grad)
    assert bits.dtype == np.uint16
    assert BFLOAT16.widen(bits).tolist() == grad.tolist()
    assert unit.ledger.current_bytes("bucket") == bits.nbytes // 2


def unit_that_adds(micro_batches, precision="bf16", world_size=2):
    unit = unit_of(world_size, precision)
    return Unit("u", unit.layout, unit.recipe, unit.world, unit.ledger, micro_batches=micro_batches)


def test_the_first_gradient_is_kept_as_it_is():
    unit = unit_of(2)
    grad = np.ones((2, unit.layout.padded_numel), np.float32)
    unit.accumulate(grad)
    assert unit.grad is grad
    assert unit.ledger.current_bytes("grad") == 4 * unit.layout.padded_numel


def test_a_single_gradient_is_held_in_16_bits_and_several_in_float32():
    for micro_batches, dtype in ((1, np.uint16), (2, np.float32)):
        unit = unit_that_adds(micro_batches)
        unit.accumulate(np.ones((2, unit.layout.padded_numel), np.float32))
        assert unit.grad.dtype == dtype
        itemsize = np.dtype(dtype).itemsize
        assert unit.ledger.current_bytes("grad") == itemsize * unit.layout.padded_numel


def test_gradients_on_the_wire_are_added_in_float32():
    unit = unit_that_adds(3)
    for value in (256.0, 1.0, 1.0):  # in bfloat16, 256 + 1 would be 256 again
        bits = BFLOAT16.round(np.full((2, unit.layout.shard_numel), value, np.float32))
        unit.accumulate(bits)
    assert np.all(unit.grad == 258.0)


def test_columns_of_a_shard_are_added_where_they_belong():
    unit, whole = unit_that_adds(2, "fp32"), unit_that_adds(2, "fp32")
    shard = unit.layout.shard_numel
    for batch in range(2):
        grad = np.random.default_rng(batch).normal(size=(2, shard)).astype(np.float32)
        whole.accumulate(grad.copy())
        for start, stop in ((0, 5), (5, 6), (6, shard)):
            assert unit.batches_held == batch
            unit.accumulate_columns(grad[:, start:stop].copy(), start)
        assert unit.batches_held == batch + 1
    assert unit.grad.tobytes() == whole.grad.tobytes()


def test_a_gradient_too_many_is_refused_and_the_others_kept():
    unit = unit_that_adds(2, "fp32")
    grad = np.ones((2, unit.layout.shard_numel), np.float32)
    unit.accumulate(grad.copy())
    unit.accumulate(grad.copy())
    words = r"'u' already holds a gradient of every micro-batch.*call step\(\) or zero_grad"
    with pytest.raises(UsageError, match=words):
        unit.accumulate(grad)
    with pytest.raises(UsageError, match=words):
        unit.accumulate_columns(grad[:, :1], 0)
    assert np.all(unit.grad == 2)
    unit.drop_gradient()
    assert (unit.grad, unit.batches_held, unit.ledger.current_bytes("grad")) == (None, 0, 0)
    unit.accumulate(grad)
    assert np.all(unit.grad == 1)


# --- views -----------------------------------------------------------------------------------


def test_views_look_into_the_flat_buffer_without_padding_and_without_a_copy():
    unit = unit_of(8)
    flat = np.full((8, unit.layout.padded_numel), np.nan, np.float32)
    views = unit.views(flat)
    assert {name: view.shape[1:] for name, view in views.items()} == SHAPES
    for index, view in enumerate(views.values()):
        view[...] = index
    assert np.isnan(flat).sum() == 8 * unit.layout.padding
    assert not np.isnan(flat[:, : unit.layout.numel]).any()


def test_own_is_the_slice_of_a_full_buffer_and_a_shard_itself():
    unit = unit_of(4)
    full = np.arange(4 * unit.layout.padded_numel, dtype=np.float32).reshape(4, -1)
    own = unit.own(full)
    assert np.shares_memory(own, full)
    for rank in range(4):
        expected = np.split(full[rank], 4)[rank]
        assert own[rank].tolist() == expected.tolist()
    shard = own.copy()
    assert unit.own(shard) is shard


# --- grouping ----------------------------------------------------------------------------------


def test_a_grouping_keeps_the_order_it_was_given_in():
    grouped = group_by_unit(("a", "b", "c"), {"y": ["c", "a"], "x": ("b",)})
    assert grouped == {"y": ("c", "a"), "x": ("b",)}
    assert list(grouped) == ["y", "x"]


@pytest.mark.parametrize(
    ("units", "words"),
    [
        ({"x": ["a", "b", "c", "z"]}, "unknown: z"),
        ({"x": ["a"], "y": ["c"]}, "missing: b"),
        ({"x": ["a", "b"], "y": ["b", "c"]}, "repeated: b"),
        ({"x": ["a", "a", "b", "c"]}, "repeated: a"),
        ({}, "missing: a, b, c"),
    ],
)
def test_a_grouping_must_hold_every_parameter_exactly_once(units, words):
    with pytest.raises(UsageError, match=f"every parameter exactly once; {words}"):
        group_by_unit(("a", "b", "c"), units)
