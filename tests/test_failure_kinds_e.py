"""Failure kinds E: overflow, the loss scale, schedules."""

import logging
import math

import numpy as np
import pytest

from naive_training import in_threads
from own_model import full_state
from tiny import STAGES
from zero_nb.train.optim import SGD, AdamW
from zero_nb.train.optimizer import ZeROOptimizer
from zero_nb.train.scaling import DynamicLossScale, LossScaleError

F32 = np.float32
by_stage = pytest.mark.parametrize("stage", STAGES)
PRECISIONS = ("fp32", "bf16", "bf16-fp32-grads", "bf16-both-grads", "fp16")


@by_stage
@pytest.mark.parametrize("where", [0, 1, 2])
def test_E1_no_rank_steps_if_one_rank_saw_an_inf(stage, where):
    """Three ranks in threads of their own; only rank 1's samples overflow."""

    def work(world):
        opt = ZeROOptimizer(
            {"w": np.ones(3, F32)}, stage=stage, world=world, precision="fp16",
            rule=SGD(lr=0.1), loss_scale=DynamicLossScale(hysteresis=1),
        )  # fmt: skip
        grad = np.ones((1, 3), F32)
        if world.ranks[0] == 1:
            grad[0, where] = np.inf
        opt.backward({"w": grad})
        result = opt.step()
        with opt.gathered_parameters() as used:
            return result.applied, used["w"][0].copy(), opt.weights()["w"], opt.loss_scale

    for applied, used, weights, scale in in_threads(3, 1, work):
        assert not applied
        np.testing.assert_array_equal(used, np.ones(3))
        np.testing.assert_array_equal(weights, np.ones(3))
        assert scale == 32768.0


@by_stage
@pytest.mark.parametrize("bad", [None, math.inf, math.nan])
def test_E3_ranks_that_own_nothing_take_part_in_the_decision(stage, bad):
    """One element on four ranks: three have nothing to look at, and still know."""

    def work(world):
        opt = ZeROOptimizer(
            {"w": np.ones(1, F32)}, stage=stage, world=world, rule=SGD(lr=1.0), max_grad_norm=1e3
        )
        opt.backward({"w": np.full((1, 1), 1.0 if bad is None else bad, F32)})
        result = opt.step()
        return result.applied, result.grad_norm, float(opt.weights()["w"][0])

    results = in_threads(4, 1, work)
    assert results == [(True, 4.0, -3.0) if bad is None else (False, math.inf, 1.0)] * 4


def test_E4_the_first_overflow_is_forgiven_and_at_the_floor_it_raises():
    scale, seen = DynamicLossScale(65536.0, hysteresis=2), []
    for _ in range(4):
        scale.overflow()
        seen.append(scale.scale)
    assert seen == [65536, 32768, 16384, 8192]
    for start, floor, then in ((4.0, 1.0, [2, 1]), (20.0, 3.0, [10, 5, 3])):
        scale, seen = DynamicLossScale(start, hysteresis=1, floor=floor), []
        for _ in then:
            scale.overflow()
            seen.append(scale.scale)
        assert seen == then
        for _ in range(2):  # and again, should someone catch the error
            with pytest.raises(LossScaleError, match=f"smallest loss scale, {floor:g};"):
                scale.overflow()
            assert scale.scale == floor


@by_stage
def test_E4_in_training_it_rises_after_quiet_steps_and_ends_with_an_error(stage):
    opt = ZeROOptimizer(
        {"w": np.ones(3, F32)}, stage=stage, world_size=2, precision="fp16", rule=SGD(lr=0.0),
        loss_scale=DynamicLossScale(4.0, growth_interval=2, hysteresis=2, floor=2.0),
    )  # fmt: skip
    scales, ones = [], np.ones((2, 3), F32)
    for bad in (0, 0, 0, 1, 1, 0, 0, 1, 1):
        opt.backward({"w": ones * np.inf if bad else ones})
        assert opt.step().applied == (not bad)
        scales.append(opt.loss_scale)
    # Two quiet steps double it, the first overflow after quiet times is forgiven.
    assert scales == [4, 8, 8, 8, 4, 4, 8, 8, 4]
    before = opt.weights_sha256()
    opt.backward({"w": ones * np.inf})
    opt.step()
    opt.backward({"w": ones * np.inf})
    with pytest.raises(LossScaleError, match="lower the learning rate, clip, or train in bf16"):
        opt.step()
    assert opt.loss_scale == 2.0
    assert opt.weights_sha256() == before
    assert opt.ledger.current_bytes("grad") == 0


@by_stage
@pytest.mark.parametrize("precision", PRECISIONS)
def test_E6_what_was_not_scaled_is_not_unscaled(stage, precision):
    """A gradient of 1 in bf16 stays 1; the optimizer itself says what to multiply the loss by."""
    opt = ZeROOptimizer(
        {"w": np.zeros(3, F32)}, stage=stage, world_size=2, precision=precision, rule=SGD(lr=1.0),
        loss_scale=DynamicLossScale(1024.0) if precision == "fp16" else None,
    )  # fmt: skip
    assert opt.loss_scale == (1024.0 if precision == "fp16" else 1.0)
    opt.backward({"w": np.full((2, 3), 0.5 * opt.loss_scale, F32)})
    result = opt.step()
    assert (result.loss_scale, result.grad_scale) == (opt.loss_scale, 1 / opt.loss_scale)
    np.testing.assert_array_equal(opt.weights()["w"], np.full(3, -1))


@by_stage
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_E7_one_inf_poisons_neither_moments_nor_weights(stage, precision, micro_batches):
    """g = [inf, 1]; also inf and -inf in two micro-batches, whose sum is NaN."""
    opt = ZeROOptimizer(
        {"w": np.ones(2, F32), "other": np.ones((), F32)}, stage=stage, world_size=2,
        precision=precision, micro_batches=micro_batches, rule=AdamW(lr=0.1),
        loss_scale=DynamicLossScale(2.0) if precision == "fp16" else None,
    )  # fmt: skip
    good, bad = np.ones((2, 2), F32), np.array([[1, 1], [np.inf, 1]], F32)

    def step(*grads):
        for grad in grads[:micro_batches]:
            opt.backward({"w": grad, "other": np.ones(2, F32)})
        return opt.step()

    assert step(good, good).applied
    before, moments = opt.weights(), full_state(opt)
    kept = {name: [moment.copy() for moment in pair] for name, pair in moments.items()}
    assert not step(bad, good).applied
    assert not step(bad, -bad).applied
    for name, weights in opt.weights().items():
        np.testing.assert_array_equal(weights, before[name])
        for moment, was in zip(full_state(opt)[name], kept[name], strict=True):
            np.testing.assert_array_equal(moment, was)
    assert opt.rule.steps == {"w": 1, "other": 1}
    assert step(good, good).applied
    assert np.all(np.isfinite(opt.weights()["w"]))
    assert opt.rule.steps == {"w": 2, "other": 2}


@by_stage
def test_E8_a_skipped_step_is_counted_logged_and_told(stage, caplog):
    opt = ZeROOptimizer(
        {"w": np.ones(2, F32)}, stage=stage, world_size=2, rule=SGD(lr=1.0), max_grad_norm=1.0
    )
    told = []
    with caplog.at_level(logging.WARNING, "zero_nb"):
        for bad in (0, 1, 0, 1):
            opt.backward({"w": np.full((2, 2), np.nan if bad else 0.25, F32)})
            told.append(opt.step().applied)
    assert told == [True, False, True, False]
    assert (opt.steps_done, opt.skipped_steps) == (2, 2)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert all("skipped" in line and "not finite" in line for line in lines)
    assert ["1" in lines[0], "2" in lines[1]] == [True, True]


@by_stage
@pytest.mark.parametrize("world_size", [1, 4])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_E10_the_schedule_moves_once_for_each_applied_step(stage, world_size, micro_batches):
    """Whatever the ranks and micro-batches; a skipped step does not move it."""
    asked = []

    def schedule(step):
        asked.append(step)
        return 1 / 2**step

    opt = ZeROOptimizer(
        {"w": np.zeros(2, F32)}, stage=stage, world_size=world_size, rule=SGD(lr=8.0),
        micro_batches=micro_batches, schedule=schedule,
    )  # fmt: skip
    share, lrs = 1 / (world_size * micro_batches), []
    for bad in (0, 0, 1, 0):
        for _ in range(micro_batches):
            opt.backward({"w": np.full((world_size, 2), np.inf if bad else share, F32)})
        lrs.append(opt.step().lr)
    assert asked == [0, 1, 2]
    assert lrs == [8, 4, 4, 2]
    np.testing.assert_allclose(opt.weights()["w"], np.full(2, -14), rtol=1e-6)
