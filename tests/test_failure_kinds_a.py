"""Failure kinds A: partition, padding, shapes. Each test is named with the kind's code."""

import numpy as np
import pytest

from naive_training import in_threads
from own_model import fill_padding
from tiny import STAGES
from zero_nb.cluster.simulated import SimulatedWorld
from zero_nb.config import UsageError
from zero_nb.core import flat
from zero_nb.core.partition import (
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
from zero_nb.theory.estimators import deepspeed_padding
from zero_nb.train import named
from zero_nb.train.optim import SGD, AdamW
from zero_nb.train.optimizer import ZeROOptimizer

F32 = np.float32
by_stage = pytest.mark.parametrize("stage", STAGES)


def ranks(world_size, *values):
    """A gradient in which every rank contributes its share of `values`."""
    return np.stack([np.asarray(values, F32) / F32(world_size)] * world_size)


def test_A1_padding_may_cover_whole_ranks_and_is_booked_to_each():
    layout = flat_layout([(5,)], 4, align=8)
    assert [layout.info(r).padding for r in range(4)] == [0, 0, 1, 2]
    assert [layout.info(r).length for r in range(4)] == [2, 2, 1, 0]
    assert deepspeed_padding(5, 4) == (8, 2, 2)
    # The public case: 266,240 elements on 768 ranks, aligned to 2 elements a rank.
    layout = flat_layout([(266_240,)], 768, align=1536)
    padding = [layout.info(r).padding for r in range(768)]
    assert layout.buffer_numels == (348,) * 768
    assert padding[-4:] == [0, 328, 348, 348]
    assert (sum(padding), max(padding[:-3])) == (1024, 0)
    assert deepspeed_padding(266_240, 768) == (267_264, 348, 3)


@pytest.mark.parametrize("world_size", range(1, 20))
def test_A1_no_rank_ever_has_a_negative_length_or_more_padding_than_room(world_size):
    for numel in range(40):
        layout = flat_layout([(numel,)], world_size)
        spans = flat.FlatLayout(("w",), ((numel,),), world_size)
        infos = [layout.info(r) for r in range(world_size)]
        assert sum(info.length for info in infos) == numel
        for rank, info in enumerate(infos):
            assert 0 <= info.padding <= info.numel == spans.shard_numel
            assert sum(stop - start for start, stop, _ in spans.spans(rank)) == info.length


def test_A3_what_was_cut_with_ceil_is_put_together_with_ceil():
    a, b = np.array([1, 2, 3, 4, 5], F32), np.array([10, 11, 12], F32)
    shards = partition_parameters_flat([a, b], 4)
    assert [list(map(len, shard)) for shard in shards] == [[2, 1], [2, 1], [1, 1], [0, 0]]
    for got, want in zip(gather_parameters_flat(shards), (a, b), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("cut", [ceil_div_layout, balanced_layout, whole_layout, flat_layout])
def test_A3_every_layout_gives_back_exactly_what_it_was_given(cut):
    for world_size in range(1, 9):
        arrays = [np.arange(n, dtype=F32) + 100 * n for n in (5, 3, 0, 1, 7)]
        layout = cut([a.shape for a in arrays], world_size)
        for got, want in zip(gather(partition(arrays, layout), layout), arrays, strict=True):
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("numel", "world_size", "lengths"),
    [
        (5, 4, [2, 2, 1, 0]),
        (7, 6, [2, 2, 2, 1, 0, 0]),
        (9, 8, [2, 2, 2, 2, 1, 0, 0, 0]),
        (3, 4, [1, 1, 1, 0]),
        (1, 4, [1, 0, 0, 0]),
    ],
)
def test_A4_chunks_are_of_ceil_n_over_w_and_the_trailing_ones_short(numel, world_size, lengths):
    assert list(ceil_div_layout([(numel,)], world_size).loads) == lengths
    array = np.arange(numel, dtype=F32)
    for helper in (
        partition_parameters_flat,
        partition_gradients_flat,
        partition_optimizer_state,
    ):
        shards = helper([array], world_size)
        assert [len(shard[0]) for shard in shards] == lengths
        np.testing.assert_array_equal(np.concatenate([shard[0] for shard in shards]), array)
    flat_param = flat.FlatLayout(("w",), ((numel,),), world_size)
    spans = [flat_param.spans(rank) for rank in range(world_size)]
    assert [sum(stop - start for start, stop, _ in span) for span in spans] == lengths
    # The other rule is there too, under its own name.
    even = [len(part) for part in np.array_split(array, world_size)]
    assert list(balanced_layout([(numel,)], world_size).loads) == even


@by_stage
def test_A6_a_tied_weight_is_trained_on_every_rank_although_its_shard_is_padded(stage):
    emb = np.zeros(5, F32)
    for params in ({"emb": emb, "head": emb}, {"head": emb, "emb": emb, "also": emb}):
        opt = ZeROOptimizer(params, stage=stage, world_size=2, rule=SGD(lr=1.0))
        first, *others = params
        grads = {first: ranks(2, *[1.0] * 5)}
        opt.backward(grads | {name: np.zeros((2, 5), F32) for name in others})
        opt.step()
        with opt.gathered_parameters() as used:
            for name in params:
                np.testing.assert_array_equal(used[name], np.full((2, 5), -1, F32))
                np.testing.assert_array_equal(opt.weights()[name], np.full(5, -1, F32))


@by_stage
def test_A6_both_uses_of_a_tied_weight_add_to_its_gradient(stage):
    emb = np.zeros((5, 1), F32)
    opt = ZeROOptimizer({"emb": emb, "head": emb}, stage=stage, world_size=2, rule=SGD(lr=1.0))
    assert opt.numel == 5
    opt.backward({"emb": np.full((2, 5, 1), 0.25, F32), "head": np.full((2, 5, 1), 0.5, F32)})
    opt.step()
    np.testing.assert_array_equal(opt.weights()["head"], np.full((5, 1), -1.5, F32))


@pytest.mark.parametrize("cut", [ceil_div_layout, balanced_layout, whole_layout, flat_layout])
def test_A7_gathering_never_reads_padding_whatever_it_holds(cut):
    one, two = np.arange(1, 6, dtype=F32), np.arange(1, 8, dtype=F32)
    layout = cut([one.shape, two.shape], 2)
    shards = partition([one, two], layout)
    # Buffers that are longer than what was written, as a real one may be.
    padded = sum(layout.info(rank).padding for rank in range(2))
    for rank, shard in enumerate(shards):
        shard[layout.info(rank).length :] = 7777
    for got, want in zip(gather(shards, layout), (one, two), strict=True):
        np.testing.assert_array_equal(got, want)
    assert padded == 0 or cut is flat_layout


@by_stage
@pytest.mark.parametrize("world_size", [2, 3, 5, 8])
def test_A7_no_stage_lets_padding_into_a_parameter(stage, world_size):
    params = {"one": np.arange(1, 6, dtype=F32), "two": np.arange(1, 8, dtype=F32)}
    opt = ZeROOptimizer(
        params, stage=stage, world_size=world_size, units={"a": ["one"], "b": ["two"]},
        rule=SGD(lr=1.0),
    )  # fmt: skip
    assert fill_padding(opt, 7777) > 0 or world_size == 1
    opt.backward({name: ranks(world_size, *np.zeros(len(a))) for name, a in params.items()})
    opt.step()
    with opt.gathered_parameters() as used:
        for name, array in params.items():
            np.testing.assert_array_equal(used[name], np.stack([array] * world_size))
            np.testing.assert_array_equal(opt.weights()[name], array)


def test_A8_a_shard_that_starts_past_the_end_is_empty_and_not_of_negative_length():
    layout = flat_layout([(32,)], 4, align=4 * 128)
    assert layout.buffer_numels == (128,) * 4
    assert [layout.info(r).length for r in range(4)] == [32, 0, 0, 0]
    shards = partition([np.ones(32, F32)], layout)
    assert [float(shard.sum()) for shard in shards] == [32, 0, 0, 0]  # what is left over is zeroed
    np.testing.assert_array_equal(gather_flat(shards, layout), np.ones(32, F32))


def test_A11_a_shard_that_is_only_padding_is_skipped_and_a_hole_is_not():
    layout = flat_layout([(5,)], 4, align=8)
    shards = partition([np.arange(1, 6, dtype=F32)], layout)
    assert layout.info(3).pieces == ()
    shards[3][:] = 7777  # nothing real: not read, not corrupt
    np.testing.assert_array_equal(gather_flat(shards, layout), np.arange(1, 6, dtype=F32))
    with pytest.raises(ValueError, match=r"shard of rank 1 must have shape \(2,\), got \(1,\)"):
        gather_flat([shards[0], shards[1][:1], *shards[2:]], layout)
    with pytest.raises(ValueError, match="3 shards for world_size 4"):
        gather_flat([shards[0], *shards[2:]], layout)


@by_stage
def test_A11_ranks_that_own_padding_only_train_like_the_others(stage):
    start = np.arange(1, 6, dtype=F32)
    opt = ZeROOptimizer({"w": start}, stage=stage, world_size=8, rule=SGD(lr=1.0))
    assert [opt.partition_of("w", rank).length for rank in range(8)] == [1] * 5 + [0] * 3
    fill_padding(opt, 7777)
    opt.backward({"w": ranks(8, 8, 16, 24, 32, 40)})
    assert opt.step().applied
    np.testing.assert_array_equal(opt.weights()["w"], start - np.array([8, 16, 24, 32, 40], F32))


def test_A12_a_rank_that_owns_no_parameter_holds_an_empty_buffer():
    layout = whole_layout([(6,)], 2)
    shards = partition([np.arange(6, dtype=F32)], layout)
    assert [len(shard) for shard in shards] == [6, 0]
    np.testing.assert_array_equal(gather(shards, layout)[0], np.arange(6, dtype=F32))


@by_stage
def test_A12_a_rank_that_owns_nothing_joins_every_collective_and_has_the_same_weights(stage):
    """One element on two ranks, each in its own thread: a rank that stayed away would hang."""

    def work(world):
        opt = ZeROOptimizer(
            {"w": np.ones(1, F32)}, stage=stage, world=world, rule=AdamW(lr=0.5), max_grad_norm=1.0
        )
        owned = opt.partition_of("w", world.ranks[0]).length
        for _ in range(2):
            opt.backward({"w": np.ones((1, 1), F32)})
            assert opt.step().applied
        log = [(t.collective, t.purpose, t.elements_sent) for t in world.log.transfers]
        return owned, opt.weights_sha256(), log

    (owned_0, hash_0, log_0), (owned_1, hash_1, log_1) = in_threads(2, 1, work)
    assert (owned_0, owned_1) == (1, 0)
    assert hash_0 == hash_1
    assert log_0 == log_1


@by_stage
@pytest.mark.parametrize("apart", [False, True])
def test_A13_empty_parameters_need_no_collective_and_change_nothing(stage, apart):
    shapes = {"a": (0,), "b": (3,), "c": (2, 0, 4), "d": (2,)}
    units = {name: [name] for name in shapes} if apart else None

    def train(names):
        opt = ZeROOptimizer(
            {name: np.ones(shapes[name], F32) for name in names},
            stage=stage, world_size=2, max_grad_norm=1.0, rule=AdamW(lr=0.5),
            units=units and {name: [name] for name in names},
        )  # fmt: skip
        opt.world.log.clear()
        results = []
        for _ in range(2):
            opt.backward({name: np.ones((2, *shapes[name]), F32) for name in names})
            results.append(opt.step())
        return opt, results

    opt, results = train(shapes)
    without, expected = train(["b", "d"])
    for name in ("b", "d"):
        np.testing.assert_array_equal(opt.weights()[name], without.weights()[name])
    for name in ("a", "c"):
        assert opt.weights()[name].shape == shapes[name]
    assert [r.grad_norm for r in results] == [r.grad_norm for r in expected]
    assert np.all(np.isfinite([r.grad_norm for r in results]))
    sent = [t for t in opt.world.log.transfers if t.purpose in ("param", "grad")]
    wanted = [t for t in without.world.log.transfers if t.purpose in ("param", "grad")]
    assert sent == wanted
    assert all(t.elements_sent for t in sent)


@by_stage
def test_A13_a_model_of_nothing_can_be_stepped(stage):
    opt = ZeROOptimizer({"a": np.ones((0, 3), F32)}, stage=stage, world_size=2, max_grad_norm=1.0)
    opt.backward({"a": np.ones((2, 0, 3), F32)})
    result = opt.step()
    assert (result.applied, result.grad_norm, result.grad_scale) == (True, 0.0, 1.0)


@by_stage
def test_A15_a_0d_parameter_is_one_element_of_rank_0_and_keeps_its_shape(stage):
    opt = ZeROOptimizer(
        {"temperature": np.array(2.0, F32)}, stage=stage, world_size=4, rule=SGD(lr=1.0)
    )
    assert [opt.partition_of("temperature", rank).length for rank in range(4)] == [1, 0, 0, 0]
    fill_padding(opt, 7777)
    opt.backward({"temperature": np.full(4, 0.125, F32)})
    opt.step()
    # From some ranks only, as a list: a row of it is a scalar.
    opt.backward({"temperature": [np.array(0.5, F32), None, np.float32(0.25), None]})
    opt.step()
    weight = opt.weights()["temperature"]
    assert isinstance(weight, np.ndarray)
    assert (weight.shape, weight.dtype, float(weight)) == ((), np.float32, 0.75)
    with opt.gathered_parameters() as used:
        np.testing.assert_array_equal(used["temperature"], np.full(4, 0.75, F32))


def test_A15_flat_helpers_take_a_0d_array_as_one_element():
    shards = partition_parameters_flat([np.array(3.0, F32)], 3)
    assert [len(shard[0]) for shard in shards] == [1, 0, 0]
    (back,) = flat.unflatten(flat.flatten([np.array(3.0, F32)], 3), [()])
    assert (back.shape, float(back)) == ((), 3.0)
    world = SimulatedWorld(3)
    shards = named.partition_parameters({"t": np.array(3.0, F32)}, world)
    gathered = named.gather_parameters(shards, world)["t"]
    np.testing.assert_array_equal(gathered, np.full(3, 3.0, F32))


def test_A17_a_fortran_ordered_array_is_flattened_in_c_order():
    array = np.asfortranarray(np.array([[0, 1, 2], [3, 4, 5]], F32))
    np.testing.assert_array_equal(flat.flatten([array], 1), np.arange(6, dtype=F32))
    shards = partition_parameters_flat([array], 2)
    np.testing.assert_array_equal(shards[0][0], [0, 1, 2])
    np.testing.assert_array_equal(shards[1][0], [3, 4, 5])
    for given in (array, array.T.copy().T, np.arange(12, dtype=F32).reshape(2, 6)[:, ::2]):
        layout = flat_layout([given.shape], 4)
        (back,) = gather(partition([given], layout), layout)
        np.testing.assert_array_equal(back, given)


@by_stage
def test_A17_updates_of_a_transposed_weight_arrive_where_they_belong(stage):
    start = np.asfortranarray(np.arange(6, dtype=F32).reshape(2, 3))
    grad = np.asfortranarray(np.arange(6, dtype=F32).reshape(2, 3) * 10)
    opt = ZeROOptimizer({"w": start}, stage=stage, world_size=2, rule=SGD(lr=1.0))
    # Gradients in the other memory order than parameters, and the rank axis not outermost.
    rows = np.moveaxis(np.stack([grad / 2] * 2, axis=-1), -1, 0)
    assert not rows.flags.c_contiguous
    opt.backward({"w": rows})
    opt.step()
    np.testing.assert_array_equal(opt.weights()["w"], start - grad)
    np.testing.assert_array_equal(start, np.arange(6, dtype=F32).reshape(2, 3))


@pytest.mark.parametrize(("numel", "world_size", "padded"), [(5, 4, 8), (32_001, 8, 32_008)])
def test_A18_what_does_not_divide_is_refused_by_name_or_padded_and_sliced_back(
    numel, world_size, padded
):
    world = SimulatedWorld(world_size)
    rows = np.ones((world_size, numel), F32)
    for collective in (world.reduce_scatter, world.all_reduce):
        with pytest.raises(UsageError, match=rf"{numel} elements over {world_size} ranks.*pad"):
            collective(rows)
    with pytest.raises(ValueError, match=rf"{numel} is not a multiple of world_size {world_size}"):
        flat.own_shard(rows, range(world_size), world_size)
    assert flat.padded_numel(numel, world_size) == padded
    full = flat.pad(rows, world_size, fill=7777)
    assert full.shape == (world_size, padded)
    whole = world.all_gather(world.reduce_scatter(full))
    np.testing.assert_array_equal(whole[:, :numel], np.full((world_size, numel), world_size, F32))
