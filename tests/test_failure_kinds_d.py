"""Failure kinds D: the global norm and clipping."""

import math

import numpy as np
import pytest

from naive_training import in_threads
from own_model import fill_padding
from tiny import STAGES
from zero_nb.train.optim import SGD
from zero_nb.train.optimizer import ZeROOptimizer
from zero_nb.train.scaling import DynamicLossScale, clip_factor

F32 = np.float32
by_stage = pytest.mark.parametrize("stage", STAGES)
LAST_DIGIT = 2.0**-24  # of float32: the norm is that of float32 numbers


def optimizer(stage, world_size=2, shape=(2,), max_grad_norm=1.0, **settings):
    return ZeROOptimizer(
        {"w": np.zeros(shape, F32)}, stage=stage, world_size=world_size, rule=SGD(lr=1.0),
        max_grad_norm=max_grad_norm, **settings,
    )  # fmt: skip


def give(opt, *values):
    """A reduced gradient, of which every rank contributes the same share."""
    size = opt.world.size
    opt.backward({"w": np.stack([np.array(values, F32) / size] * size)})


def moved(opt):
    """The gradient that a step of lr 1 from 0 followed."""
    return -opt.weights()["w"]


@by_stage
def test_D1_the_norm_is_that_of_all_shards_and_not_of_the_own_one(stage):
    """Shards [3] and [4]: 5, and [0.6, 0.8]; each rank in a thread of its own."""

    def work(world):
        opt = ZeROOptimizer(
            {"w": np.zeros(2, F32)}, stage=stage, world=world, rule=SGD(lr=1.0), max_grad_norm=1.0
        )
        opt.backward({"w": np.array([[1.5, 2.0]], F32)})
        return opt.step().grad_norm, moved(opt)

    for norm, gradient in in_threads(2, 1, work):
        assert norm == 5.0
        np.testing.assert_allclose(gradient, [0.6, 0.8], rtol=1e-6)


@by_stage
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_D2_a_replicated_gradient_is_counted_once(stage, world_size):
    opt = optimizer(stage, world_size, max_grad_norm=100.0)
    give(opt, 3, 4)
    assert opt.step().grad_norm == pytest.approx(5.0, rel=LAST_DIGIT * world_size)


@by_stage
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_D3_a_tied_copy_is_counted_once(stage, world_size):
    """Sum of squares 800: 28.284, not 40."""
    emb = np.zeros((2, 4), F32)
    opt = ZeROOptimizer(
        {"emb": emb, "head": emb}, stage=stage, world_size=world_size, max_grad_norm=1e3
    )
    half = np.full((world_size, 2, 4), 5 / world_size, F32)  # both uses together: 8 * 10**2
    opt.backward({"emb": half, "head": half})
    assert opt.step().grad_norm == pytest.approx(math.sqrt(800), rel=LAST_DIGIT)


@by_stage
@pytest.mark.parametrize(
    ("gradient", "clipped"), [((3, 4), (0.6, 0.8)), ((0.03, 0.04), (0.03, 0.04))]
)
def test_D4_a_norm_is_brought_down_to_the_bound_and_never_up(stage, gradient, clipped):
    opt = optimizer(stage)
    give(opt, *gradient)
    result = opt.step()
    np.testing.assert_allclose(moved(opt), clipped, rtol=1e-6)
    assert (result.grad_scale == 1.0) == (gradient == clipped)
    assert clip_factor(5.0, 1.0) == 0.2
    assert clip_factor(0.05, 1.0) == 1.0


@by_stage
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf, 3.0])
def test_D6_a_norm_that_is_not_finite_is_reported_and_multiplies_nothing(stage, bad, norm_type):
    """Reported as inf with applied=False (where others say -1), and never 0 * inf."""
    opt = optimizer(stage, norm_type=norm_type)
    opt.backward({"w": np.array([[1, 2], [3, bad]], F32)})
    result = opt.step()
    assert (result.applied, result.grad_norm, result.grad_scale) == (False, math.inf, 0.0)
    np.testing.assert_array_equal(opt.weights()["w"], [0, 0])
    give(opt, 3, 4)
    assert opt.step().applied
    assert np.all(np.isfinite(opt.weights()["w"]))


@pytest.mark.parametrize(
    ("stage", "every"), [(0, None), (0, True), (1, None), (2, None), (3, None), (3, False)]
)
@pytest.mark.parametrize("bucket", [None, 2])
def test_D8_the_norm_is_that_of_the_sum_of_micro_batches(stage, every, bucket):
    opt = optimizer(
        stage, micro_batches=2, reduce_every_micro_batch=every, reduce_bucket_size=bucket
    )
    for _ in range(2):  # and no norm is remembered from one step to the next
        give(opt, 3, 4)
        give(opt, 3, 4)
        assert opt.step().grad_norm == 10.0
    np.testing.assert_allclose(moved(opt), [1.2, 1.6], rtol=1e-6)


@by_stage
def test_D11_the_norm_is_that_of_the_unscaled_gradient(stage):
    """Loss scale 1024, true norm 0.5, bound 1: left as it is, where 1/1024 of it was left."""
    opt = optimizer(stage, precision="fp16", loss_scale=DynamicLossScale(1024.0))
    give(opt, 0.3 * 1024, 0.4 * 1024)
    result = opt.step()
    assert result.grad_norm == pytest.approx(0.5, rel=2.0**-10)
    assert result.grad_scale == 1 / 1024
    np.testing.assert_allclose(moved(opt), [0.3, 0.4], rtol=2.0**-10)


@by_stage
def test_D12_the_sum_is_clipped_and_not_each_micro_batch(stage):
    """3 and then 1 with bound 1: the step is 1 long, not 2."""
    opt = optimizer(stage, shape=(1,), micro_batches=2)
    give(opt, 3)
    give(opt, 1)
    result = opt.step()
    assert (result.grad_norm, result.grad_scale) == (4.0, 0.25)
    np.testing.assert_array_equal(moved(opt), [1.0])


@by_stage
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_D13_gradients_are_really_scaled_and_nothing_is_gathered_for_it(stage, precision):
    def run(max_grad_norm):
        opt = ZeROOptimizer(
            {name: np.zeros(64, F32) for name in "abc"}, stage=stage, world_size=4,
            precision=precision, rule=SGD(lr=1.0), max_grad_norm=max_grad_norm,
            units={name: [name] for name in "abc"},
        )  # fmt: skip
        opt.ledger.begin_step()
        opt.world.log.clear()
        opt.backward({name: np.full((4, 64), 0.25, F32) for name in "abc"})
        result = opt.step()
        log = opt.world.log
        return (
            opt.weights()["a"], result, opt.ledger.peak_bytes,
            log.elements_sent(), log.elements_sent("control"),
        )  # fmt: skip

    free, _, peak, sent, control = run(None)
    clipped, result, clipped_peak, clipped_sent, clipped_control = run(1.0)
    assert result.grad_norm == pytest.approx(math.sqrt(3 * 64), rel=LAST_DIGIT)  # before clipping
    np.testing.assert_array_equal(free, np.full(64, -1))
    np.testing.assert_allclose(clipped, np.full(64, -1 / math.sqrt(3 * 64)), rtol=1e-6)
    assert (clipped_peak, clipped_sent) == (peak, sent)
    assert clipped_control == control + 3  # one number a rank, to the three others


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, 0.5, math.inf])
@pytest.mark.parametrize("world_size", [1, 3, 8])
def test_D1_D2_every_stage_has_the_same_bits_for_any_norm(norm_type, world_size):
    rng = np.random.default_rng(5)
    gradient = {
        "a": rng.normal(size=(3, 5)).astype(F32),
        "b": np.asarray(rng.normal(size=()), F32),
        "c": np.zeros((0,), F32),
        "d": 1e-3 * rng.normal(size=11).astype(F32),
    }
    flat = np.concatenate([g.reshape(-1) for g in gradient.values()]).astype(np.float64)
    want = np.max(np.abs(flat)) if math.isinf(norm_type) else None
    if want is None:
        want = np.sum(np.abs(flat) ** norm_type) ** (1 / norm_type)
    norms = set()
    for stage in STAGES:
        for units in (None, {"y": ["d", "a"], "x": ["c", "b"]}):
            opt = ZeROOptimizer(
                {name: np.zeros_like(g) for name, g in gradient.items()}, stage=stage,
                world_size=world_size, units=units, max_grad_norm=1e3, norm_type=norm_type,
            )  # fmt: skip
            # From one rank only: the sum over ranks then does not round.
            opt.backward({name: [g] + [None] * (world_size - 1) for name, g in gradient.items()})
            fill_padding(opt, 7777, ("grad",))
            norms.add(opt.step().grad_norm)
    assert len(norms) == 1
    assert norms.pop() == pytest.approx(float(want), rel=1e-7)


@by_stage
def test_D1_the_number_of_ranks_does_not_change_a_bit_of_the_norm(stage):
    """2048 elements: padded for three ranks they would need a coarser grid of their squares."""
    gradient, norms = np.random.default_rng(8).normal(size=2048).astype(F32), set()
    for world_size in (1, 2, 3, 5, 8):
        opt = optimizer(stage, world_size, shape=(2048,))
        opt.backward({"w": [gradient] + [None] * (world_size - 1)})
        norms.add(opt.step().grad_norm)
    assert len(norms) == 1
