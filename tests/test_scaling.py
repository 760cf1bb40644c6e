"""The global norm, clipping by it, and that padding and other ranks' splits do not matter."""

import math

import numpy as np
import pytest

from tiny import SHAPES, STAGES, UNITS, own_params, padding_of
from zero_nb.config import UsageError
from zero_nb.train.optim import SGD
from zero_nb.train.optimizer import ZeROOptimizer
from zero_nb.train.scaling import check_max_grad_norm, check_norm_type, clip_factor

NUMEL = 69


def reduced_gradient(seed=3):
    """What the sum over ranks is to be."""
    rng = np.random.default_rng(seed)
    return {
        name: (rng.normal(size=shape) * 10.0 ** rng.integers(-3, 3, shape)).astype(np.float32)
        for name, shape in SHAPES.items()
    }


def on_one_rank(gradient, world_size, rank):
    """The same sum, exactly: one rank has it and the others have zeros."""
    grads = {n: np.zeros((world_size, *g.shape), np.float32) for n, g in gradient.items()}
    for name, grad in gradient.items():
        grads[name][rank] = grad
    return grads


def one_step(gradient, *, world_size=3, rank=0, **settings):
    """One step of plain descent with lr 1: the weights move by the scaled gradient."""
    settings = {"max_grad_norm": 1.0, "rule": SGD(lr=1.0), "units": UNITS} | settings
    opt = ZeROOptimizer(own_params(), world_size=world_size, **settings)
    opt.backward(on_one_rank(gradient, world_size, rank))
    return opt, opt.step()


def true_norm(gradient):
    return math.sqrt(math.fsum(float(x) ** 2 for g in gradient.values() for x in g.reshape(-1)))


# --- the norm ----------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_norm_has_the_same_bits_for_every_stage_world_size_and_unit(precision):
    gradient = reduced_gradient()
    norms = {
        one_step(
            gradient, stage=stage, world_size=world_size, rank=rank, units=units,
            precision=precision,
        )[1].grad_norm
        for stage in STAGES
        for world_size, rank in [(1, 0), (2, 1), (3, 0), (4, 3), (8, 5), (16, 2)]
        for units in (None, UNITS, {name: [name] for name in SHAPES})
    }  # fmt: skip
    assert len(norms) == 1
    # Each of 69 squares is off by at most 2^-52 of the square of the power of two above the
    # largest magnitude, so by 2^-50 of the largest square: the norm by less than 2^-44 of itself.
    # A gradient in bfloat16 is off by up to 2^-8 of itself.
    tolerance = 2.0**-44 if precision == "fp32" else 2.0**-8
    assert norms.pop() == pytest.approx(true_norm(gradient), rel=tolerance)


@pytest.mark.parametrize("numel", [2047, 2048, 2049])
def test_how_finely_squares_are_counted_depends_on_real_elements_only(numel):
    """The grid is coarser above each power of two; padding must not lift a model above it."""
    rng, norms = np.random.default_rng(numel), set()
    params = {name: np.zeros(n, np.float32) for name, n in (("a", 1000), ("b", numel - 1000))}
    gradient = {n: rng.normal(size=p.shape).astype(np.float32) for n, p in params.items()}
    for world_size in (1, 2, 3, 5, 8):
        for units in (None, {"a": ["a"], "b": ["b"]}):
            opt = ZeROOptimizer(params, world_size=world_size, units=units, max_grad_norm=1.0)
            opt.backward(on_one_rank(gradient, world_size, 0))
            norms.add(opt.step().grad_norm)
    assert len(norms) == 1


def test_one_ranks_shard_is_not_the_norm_and_neither_is_the_sum_of_norms():
    gradient = {name: np.full(shape, 2, np.float32) for name, shape in SHAPES.items()}
    for stage in STAGES:
        norm = one_step(gradient, stage=stage, world_size=4)[1].grad_norm
        assert norm == pytest.approx(2 * math.sqrt(NUMEL), rel=1e-7)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world_size", [2, 4, 8, 16])
def test_padding_takes_no_part_whatever_it_holds(stage, world_size):
    gradient = reduced_gradient()
    clean, clean_result = one_step(gradient, stage=stage, world_size=world_size)
    dirty = ZeROOptimizer(
        own_params(), stage=stage, world_size=world_size, rule=SGD(lr=1.0), units=UNITS,
        max_grad_norm=1.0,
    )  # fmt: skip
    dirty.backward(on_one_rank(gradient, world_size, 0))
    padding = 0
    for unit in dirty.units:
        mask = padding_of(unit.grad, unit, dirty.world)
        unit.grad[mask] = np.nan
        padding += mask.sum()
    assert padding > 0
    result = dirty.step()
    assert result.grad_norm == clean_result.grad_norm
    assert dirty.weights_sha256() == clean.weights_sha256()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_gradient_that_is_not_finite_is_skipped_by_all_ranks_and_changes_nothing(stage, bad):
    gradient = reduced_gradient()
    gradient["head"].reshape(-1)[-1] = bad  # in the last rank's slice only
    opt = ZeROOptimizer(
        own_params(), stage=stage, world_size=3, rule=SGD(lr=1.0, momentum=0.5), units=UNITS,
        max_grad_norm=1.0,
    )  # fmt: skip
    before = opt.weights_sha256()
    opt.backward(on_one_rank(gradient, 3, 0))
    assert not opt.step().applied
    assert opt.weights_sha256() == before
    assert (opt.steps_done, opt.skipped_steps) == (0, 1)
    assert opt.ledger.current_bytes("grad") == 0
    opt.backward(on_one_rank(reduced_gradient(), 3, 0))
    opt.step()
    fresh, _ = one_step(reduced_gradient(), stage=stage, rule=SGD(lr=1.0, momentum=0.5))
    assert opt.weights_sha256() == fresh.weights_sha256()


def test_a_gradient_of_zeros_has_norm_0_and_is_not_divided_by_it():
    zeros = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    opt, result = one_step(zeros)
    assert (result.grad_norm, result.grad_scale) == (0.0, 1.0)
    np.testing.assert_array_equal(opt.weights()["head"], own_params()["head"])


def test_a_norm_beyond_float32_is_still_a_number():
    gradient = {name: np.full(shape, 3e38, np.float32) for name, shape in SHAPES.items()}
    result = one_step(gradient)[1]
    assert result.grad_norm == pytest.approx(true_norm(gradient), rel=2.0**-24)
    assert result.grad_norm > float(np.finfo(np.float32).max)


def test_the_norm_costs_one_number_a_rank_beside_the_finite_check_and_only_if_it_is_asked_for():
    sent = {}
    for bound in (None, 1.0):
        opt, result = one_step(reduced_gradient(), world_size=4, max_grad_norm=bound)
        control = [t for t in opt.world.log.transfers if t.purpose == "control"]
        sent[bound] = {t.label: t.elements_sent for t in control}
    assert sent[1.0] == sent[None] | {"norm": 3}
    assert sent[None]["max"] == 3
    _, result = one_step(reduced_gradient(), max_grad_norm=None)
    assert (result.grad_norm, result.grad_scale) == (None, 1.0)


# --- clipping ----------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_a_clipped_step_moves_by_max_grad_norm_along_the_gradient(stage):
    gradient = reduced_gradient()
    opt, result = one_step(gradient, stage=stage, max_grad_norm=0.5)
    scale = 0.5 / result.grad_norm
    assert result.grad_scale == pytest.approx(scale, rel=1e-15)
    for name, before in own_params().items():
        want = before - np.float32(1.0) * (gradient[name] * np.float32(result.grad_scale))
        np.testing.assert_array_equal(opt.weights()[name], want)


def test_a_gradient_within_the_bound_is_left_as_it_is():
    norm = true_norm(reduced_gradient())
    opt, result = one_step(reduced_gradient(), max_grad_norm=norm * 1.001)
    unclipped, _ = one_step(reduced_gradient(), max_grad_norm=None)
    assert result.grad_scale == 1.0
    assert opt.weights_sha256() == unclipped.weights_sha256()


def test_the_factor_brings_a_norm_down_to_the_bound_and_never_up():
    assert clip_factor(4.0, 1.0) == 0.25
    assert clip_factor(1.0, 1.0) == 1.0
    assert clip_factor(0.5, 1.0) == 1.0
    assert clip_factor(0.0, 1.0) == 1.0
    assert clip_factor(1e300, None) == 1.0


@pytest.mark.parametrize("value", [0, -1.0, math.inf, math.nan, "1", [1.0]])
def test_a_bound_that_is_no_positive_number_is_refused(value):
    words = r"max_grad_norm must be a finite number above 0, or None for no clipping; got"
    with pytest.raises(UsageError, match=words):
        check_max_grad_norm(value)
    with pytest.raises(UsageError, match=words):
        ZeROOptimizer(own_params(), max_grad_norm=value)


def test_a_bound_becomes_a_float_and_none_stays_none():
    assert check_max_grad_norm(None) is None
    assert type(check_max_grad_norm(2)) is float


def test_a_norm_that_would_overflow_is_refused_with_the_reason():
    with pytest.raises(UsageError, match=r"at least 0\.1, got 0\.01: .* overflow"):
        check_norm_type(0.01)
