"""What cannot be done is said clearly, before anything has changed.

Settings are refused at construction; what is given to a step leaves every byte and count as it was.
"""

import math

import numpy as np
import pytest

from naive_training import in_threads
from tiny import STAGES
from zero_nb.config import UsageError
from zero_nb.train.ledger import Ledger
from zero_nb.train.optim import SGD, Adam, AdamW, ParameterGroup
from zero_nb.train.optimizer import ZeROOptimizer
from zero_nb.train.scaling import DynamicLossScale

F32 = np.float32
by_stage = pytest.mark.parametrize("stage", STAGES)


def params():
    return {"a": np.ones((2, 3), F32), "b": np.ones(4, F32), "fixed": np.ones(3, F32)}


def optimizer(stage=2, **settings):
    settings = {"world_size": 2, "rule": AdamW(lr=0.1), "frozen": ["fixed"]} | settings
    settings.setdefault("units", {"one": ["a", "fixed"], "two": ["b"]})
    return ZeROOptimizer(params(), stage=stage, **settings)


def grads(world_size=2, value=1.0):
    return {
        "a": np.full((world_size, 2, 3), value, F32), "b": np.full((world_size, 4), value, F32)
    }  # fmt: skip


def everything(opt):
    """All that a refused call must leave as it was."""
    held = [
        (unit.name, unit.batches_held, [
            None if array is None else array.tobytes()
            for array in (unit.param, unit.grad, unit.state.low_grad, *unit.optim.arrays().values())
        ])
        for unit in opt.units
    ]  # fmt: skip
    counts = (opt.steps_done, opt.skipped_steps, dict(opt.rule.steps), opt.lr, opt.loss_scale)
    return held, counts, opt.ledger.current_bytes(), dict(opt.world.log.total_elements)


# --- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"stage": 4}, "there is no ZeRO stage 4; choose 0, 1, 2 or 3"),
        ({"world_size": 0}, "world_size must be at least 1 rank, got 0"),
        ({"world_size": 2.5}, "world_size must be a whole number of ranks, got 2.5"),
        ({"world": 3}, "world must be a World or None, got 3"),
        ({"ledger": 3}, "ledger must be a Ledger or None, got 3"),
        ({"ledger": Ledger(3)}, "the ledger counts 3 ranks, the world hosts 2"),
        ({"precision": "fp8"}, "unknown precision 'fp8'; choose one of fp32, bf16"),
        ({"reduce_dtype": "int8"}, "unknown precision 'int8'; choose one of float32"),
        ({"precision": "bf16", "reduce_dtype": "fp32"}, "does not fit gradients held in bfloat16"),
        ({"precision": "bf16", "reduce_dtype": "fp16"}, "does not fit gradients held in bfloat16"),
        ({"micro_batches": 0}, "micro_batches must be at least 1 micro-batch, got 0"),
        ({"micro_batches": 1.5}, "micro_batches must be a whole number, got 1.5"),
        ({"micro_batches": True}, "micro_batches must be a whole number, got True"),
        ({"reduce_every_micro_batch": False}, "stage 2 cannot .* use stage 1 to reduce once"),
        ({"stage": 1, "reduce_every_micro_batch": True}, "stage 1 cannot .* stage 2 reduces every"),
        ({"reduce_bucket_size": 0}, "reduce_bucket_size must be at least 1 element, got 0"),
        ({"reduce_bucket_size": 1e6}, "reduce_bucket_size must be a whole number, got 1000000.0"),
        ({"units": ["a", "b"]}, r"units must map a unit's name to a list of names, got \['a'"),
        ({"units": {"a": "ab"}}, "units must map a unit's name to a list of names"),
        ({"units": {"u": ["a", "b"]}}, "exactly once; missing: fixed"),
        ({"units": {"u": ["a", "b", "fixed", "b"]}}, "exactly once; repeated: b"),
        ({"units": {"u": ["a", "b", "fixed", "c"]}}, "exactly once; unknown: c"),
        ({"frozen": "a"}, "frozen must be a collection of parameter names, got 'a'"),
        ({"frozen": ["fxied"]}, "frozen names no parameter: fxied"),
        ({"keep_fp32": 3}, "keep_fp32 must be a collection of parameter names, got 3"),
        ({"keep_fp32": ["c"]}, "keep_fp32 names no parameter: c"),
        ({"max_grad_norm": 0}, "max_grad_norm must be a finite number above 0, or None"),
        ({"max_grad_norm": "1"}, "max_grad_norm must be a finite number above 0.* got '1'"),
        ({"max_grad_norm": math.inf}, "max_grad_norm must be a finite number above 0"),
        ({"norm_type": 0}, r"norm_type must be above 0 \(2, 1, inf, ...\), got 0"),
        ({"norm_type": math.nan}, "norm_type must be above 0"),
        ({"norm_type": "2"}, "norm_type must be above 0 .* got '2'"),
        ({"loss_scale": 1024.0}, "loss_scale must be a DynamicLossScale or None, got 1024.0"),
        ({"schedule": 0.5}, "schedule must be a function of the step or None, got 0.5"),
        ({"rule": "adamw"}, r"rule must be a zero_nb Rule \(SGD, Adam, AdamW or your own\)"),
        ({"groups": [("a", "b")]}, "group 0 must be a ParameterGroup of a tuple of names"),
        ({"groups": [ParameterGroup("ab")]}, "group 0 must be a ParameterGroup of a tuple"),
        ({"groups": [ParameterGroup(("a",))]}, "in no parameter group: b"),
        ({"groups": [ParameterGroup(("a", "b", "fixed"))]}, "'fixed' is not a trainable parameter"),
        ({"groups": [ParameterGroup(("a", "b")), ParameterGroup(("a",))]}, "'a' is in two groups"),
        ({"groups": [ParameterGroup(("a", "b"), {"lr": -1})]}, "lr must be a finite number"),
        ({"groups": [ParameterGroup(("a", "b"), {"rho": 1})]}, "group 0 sets rho; .* AdamW may"),
    ],
)  # fmt: skip
def test_a_setting_that_cannot_be_met_is_refused_at_construction(settings, words):
    with pytest.raises(UsageError, match=words):
        optimizer(**settings)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "params must be a non-empty mapping of name to float32 array"),
        ([np.ones(3, F32)], "params must be a non-empty mapping"),
        ({"w": [1.0, 2.0]}, "parameter 'w' must be a float32 array, got list"),
        ({"w": np.ones(3)}, r"parameter 'w' must be a float32 array, got float64; convert it"),
        ({"w": np.ones(3, np.float16)}, "got float16; .* choose the stored format by precision"),
        ({"w": np.ones(3, ">f4")}, "parameter 'w' must be a float32 array, got >f4"),
    ],
)
def test_parameters_that_do_not_fit_are_refused(given, words):
    with pytest.raises(UsageError, match=words):
        ZeROOptimizer(given)


def test_views_of_one_array_are_neither_tied_nor_apart_and_refused():
    whole = np.arange(6, dtype=F32)
    for one, other in ((whole, whole[:]), (whole, whole[::2]), (whole[:4], whole[3:])):
        with pytest.raises(UsageError, match="'one' and 'other' share memory but are two arrays"):
            ZeROOptimizer({"one": one, "other": other})
    # Parts of one buffer that do not meet are what a model often is.
    for one, other in ((whole[:3], whole[3:]), (whole[::2], whole[1::2])):
        assert ZeROOptimizer({"one": one, "other": other}).numel == 6
    assert ZeROOptimizer({"one": whole, "other": whole}).numel == 6


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"scale": 0.0}, "must be finite and at least its floor"),
        ({"scale": math.inf}, "must be finite and at least its floor"),
        ({"scale": 0.5}, "got scale 0.5, floor 1"),
        ({"floor": 0.0}, "floor, which is above 0; got scale 65536.0, floor 0.0"),
        ({"growth_factor": 1.0}, "growth_factor must be above 1"),
        ({"backoff_factor": 1.0}, "backoff_factor between 0 and 1"),
        ({"growth_interval": 0}, "growth_interval must be at least 1 step"),
        ({"hysteresis": 0}, "hysteresis must be at least 1 overflow"),
    ],
)
def test_a_loss_scale_that_makes_no_sense_is_refused(fields, words):
    with pytest.raises(UsageError, match=words):
        DynamicLossScale(**fields)


# --- gradients -----------------------------------------------------------------------------------

BAD_GRADIENTS = [
    ({"a": np.ones((2, 2, 3), F32)}, "missing gradients: b"),
    (grads() | {"c": np.ones((2, 1), F32)}, "unknown or frozen gradients: c"),
    (grads() | {"fixed": np.ones((2, 3), F32)}, "unknown or frozen gradients: fixed"),
    (grads() | {"a": np.ones((2, 3, 2), F32)}, r"'a' must be float32 \(2, 2, 3\).*got float32"),
    (grads() | {"b": np.ones(4, F32)}, r"'b' must be float32 \(2, 4\), one row a rank"),
    (grads() | {"b": np.ones((3, 4), F32)}, r"'b' must be float32 \(2, 4\), one row a rank"),
    (grads() | {"b": np.ones((2, 4))}, "'b' must be float32.*got float64"),
    (grads() | {"b": 1.0}, "'b' must be float32.*got float"),
    (grads() | {"b": [np.ones(4, F32)]}, "'b' is a list of 1; one entry a hosted rank is 2"),
    (grads() | {"b": [np.ones(4, F32), np.ones(3, F32)]}, r"'b' must be float32 \(4,\)"),
    (grads() | {"b": [None, [1, 2, 3, 4]]}, r"'b' must be float32 \(4,\).*got list"),
    (grads() | {"b": (None, None)}, "'b' must be float32.*got tuple"),
]


@by_stage
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("given", range(len(BAD_GRADIENTS)))
def test_gradients_that_do_not_fit_are_refused_whole(stage, micro_batches, given):
    bad, words = BAD_GRADIENTS[given]
    opt = optimizer(stage, micro_batches=micro_batches, reduce_bucket_size=4)
    if micro_batches == 2:
        opt.backward(grads())
    before = everything(opt)
    with pytest.raises(UsageError, match=words):
        opt.backward(bad)
    assert everything(opt) == before
    opt.backward(grads())  # and then it goes on as if nothing had been given
    assert opt.step().applied
    fresh = optimizer(stage, micro_batches=micro_batches)
    for _ in range(micro_batches):
        fresh.backward(grads())
    fresh.step()
    assert opt.weights_sha256() == fresh.weights_sha256()


@pytest.mark.parametrize(
    ("stage", "every"), [(0, None), (0, True), (1, None), (2, None), (3, None), (3, False)]
)
def test_a_step_too_early_and_a_gradient_too_many_are_refused(stage, every):
    opt = optimizer(stage, micro_batches=2, reduce_every_micro_batch=every)
    for held in range(2):
        before = everything(opt)
        with pytest.raises(UsageError, match=rf"{held} of 2 micro-batches; run the backward"):
            opt.step()
        assert everything(opt) == before
        opt.backward(grads())
    before = everything(opt)
    with pytest.raises(UsageError, match=r"every micro-batch .* call step\(\) or zero_grad"):
        opt.backward(grads())
    assert everything(opt) == before
    assert opt.step().applied


@by_stage
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"a": np.ones((2, 3), F32)}, "missing gradients: b"),
        ({"a": np.ones((2, 3), F32), "b": None}, r"'b' must be float32 \(4,\), without a rank"),
        ({"a": np.ones((2, 3), F32), "b": [None, None]}, "'b' must be float32.*got list"),
        ({"a": np.ones((2, 3), F32), "b": np.ones((2, 4), F32)}, r"'b' must be float32 \(4,\)"),
        ({"a": np.ones((2, 3), F32), "b": np.ones(4)}, "'b' must be float32.*got float64"),
    ],
)
def test_reduced_gradients_that_do_not_fit_are_refused_whole(stage, given, words):
    opt = optimizer(stage)
    before = everything(opt)
    with pytest.raises(UsageError, match=words):
        opt.set_gradients(given)
    assert everything(opt) == before


@pytest.mark.parametrize(
    ("stage", "every"), [(0, None), (0, True), (1, None), (2, None), (3, None), (3, False)]
)
def test_reduced_gradients_on_top_of_others_are_refused(stage, every):
    opt = optimizer(stage, micro_batches=2, reduce_every_micro_batch=every)
    reduced = {name: grad[0] * 2 for name, grad in grads().items()}
    opt.backward(grads())
    before = everything(opt)
    with pytest.raises(UsageError, match=r"held already; call step\(\) or zero_grad\(\) first"):
        opt.set_gradients(reduced)
    assert everything(opt) == before
    opt.zero_grad()
    sent = dict(opt.world.log.total_elements)
    opt.set_gradients(reduced)
    assert dict(opt.world.log.total_elements) == sent  # as documented: nothing is sent
    opt.step()
    fresh = optimizer(stage)
    fresh.backward(grads())
    fresh.step()
    assert opt.weights_sha256() == fresh.weights_sha256()


# --- what fails in the middle of a step ----------------------------------------------------------


@by_stage
@pytest.mark.parametrize("value", [math.nan, -1.0, math.inf, "fast", None])
def test_a_schedule_that_returns_nonsense_changes_nothing_and_the_step_can_be_repeated(
    stage, value
):
    answers = [value, 1.0]
    opt = optimizer(stage, schedule=lambda step: answers.pop(0), max_grad_norm=1.0)
    before = opt.weights_sha256()
    opt.backward(grads())
    with pytest.raises(UsageError, match="schedule must return a finite factor of at least 0, got"):
        opt.step()
    assert opt.weights_sha256() == before
    assert (opt.steps_done, opt.rule.steps) == (0, {"a": 0, "b": 0})
    assert opt.step().applied
    fresh = optimizer(stage, max_grad_norm=1.0)
    fresh.backward(grads())
    fresh.step()
    assert opt.weights_sha256() == fresh.weights_sha256()


@by_stage
def test_a_schedule_that_fails_leaves_the_gradient_to_be_stepped_with(stage):
    def schedule(step):
        if not failed:
            failed.append(step)
            raise ZeroDivisionError
        return 1.0

    failed, opt = [], optimizer(stage, rule=SGD(lr=1.0))
    opt.schedule = schedule
    opt.backward(grads(value=0.25))
    with pytest.raises(ZeroDivisionError):
        opt.step()
    np.testing.assert_array_equal(opt.gradients()["b"], np.full(4, 0.5))
    opt.step()
    np.testing.assert_array_equal(opt.weights()["b"], np.full(4, 0.5))


@by_stage
@pytest.mark.parametrize(
    ("rule", "options", "words"),
    [
        (AdamW(), {"betas": (0.9, 1.0)}, "betas must be two numbers"),
        (AdamW(), {"lr": -1.0}, "lr must be a finite number of at least 0, got -1.0"),
        (AdamW(), {"learning_rate": 1.0}, "group 1 sets learning_rate; a group of AdamW may set"),
        (SGD(), {"momentum": 0.9}, "group 1 asks for .*momentum.* build the optimizer with it"),
    ],
)
def test_a_group_changed_to_what_cannot_be_is_refused_before_any_unit_is_updated(
    stage, rule, options, words
):
    groups = [ParameterGroup(("a",)), ParameterGroup(("b",))]
    opt = optimizer(stage, rule=rule, groups=groups)
    opt.backward(grads())
    before = opt.weights_sha256()
    groups[1].options.update(options)
    with pytest.raises(UsageError, match=words):
        opt.step()
    assert opt.weights_sha256() == before
    assert opt.rule.steps == {"a": 0, "b": 0}
    groups[1].options.clear()
    assert opt.step().applied


@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf, "fast", None])
def test_a_learning_rate_that_is_none_is_refused(value):
    opt = optimizer()
    before = opt.lr
    with pytest.raises(UsageError, match="lr must be"):
        opt.lr = value
    assert opt.lr == before


def test_unknown_names_are_answered_with_the_known_ones():
    opt = optimizer(units=None)
    with pytest.raises(UsageError, match="no parameter 'c'; there are a, b, fixed"):
        opt.partition_of("c", 0)


@by_stage
def test_asking_for_a_gradient_that_is_not_there(stage):
    with pytest.raises(UsageError, match="holds no gradient; run a backward pass first"):
        optimizer(stage).gradients()


@by_stage
def test_an_overflow_in_one_process_is_no_error_in_any(stage):
    """Float32 sums that overflow, on one rank, one micro-batch after the other."""

    def work(world):
        opt = ZeROOptimizer(
            {"w": np.ones(3, F32)}, stage=stage, world=world, micro_batches=2, rule=Adam()
        )
        for _ in range(2):
            opt.backward({"w": np.full((1, 3), 3e38 if world.ranks[0] == 1 else 1, F32)})
        return opt.step().applied, opt.weights()["w"].tolist()

    assert in_threads(2, 1, work) == [(False, [1.0, 1.0, 1.0])] * 2
