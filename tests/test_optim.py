"""Rules against slow twins on whole tensors, groups, and schedules."""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

from naive_training import NaiveAdam, NaiveSGD
from tiny import SHAPES, STAGES, UNITS, own_grads, own_params
from zero_nb.config import UsageError
from zero_nb.train.optim import (
    SGD,
    Adam,
    AdamW,
    GroupedRule,
    ParameterGroup,
    Rule,
    warmup_cosine,
)
from zero_nb.train.optimizer import ZeROOptimizer

RULES = {
    "sgd": (SGD(lr=0.1), NaiveSGD(lr=0.1)),
    "sgd decayed": (SGD(lr=0.1, weight_decay=0.3), NaiveSGD(lr=0.1, weight_decay=0.3)),
    "momentum": (SGD(0.1, 0.9, weight_decay=0.3), NaiveSGD(0.1, 0.9, weight_decay=0.3)),
    "nesterov": (SGD(0.1, 0.9, nesterov=True), NaiveSGD(0.1, 0.9, nesterov=True)),
    "adam": (
        Adam(lr=0.1, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.3),
        NaiveAdam(0.1, (0.8, 0.95), 1e-3, 0.3, decoupled=False),
    ),
    "adamw": (
        AdamW(lr=0.1, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.3),
        NaiveAdam(0.1, (0.8, 0.95), 1e-3, 0.3, decoupled=True),
    ),
}


def fresh(twin):
    """The same twin without state."""
    copy = object.__new__(type(twin))
    copy.__dict__ = twin.__dict__ | {"state": {}, "t": 0}
    return copy


def train(rule, steps=4, **settings):
    """Take a few steps with a gradient that rank 0 has alone, so that no sum rounds."""
    settings = {"stage": 2, "world_size": 3, "units": UNITS} | settings
    opt = ZeROOptimizer(own_params(), rule=rule, **settings)
    for step in range(steps):
        grads = own_grads(opt.world.size, seed=step)
        for grad in grads.values():
            grad[1:] = 0
        opt.backward(grads)
        opt.step()
    return opt


def twin_train(twin, steps=4, names=tuple(SHAPES), schedule=lambda step: 1.0):
    """The same steps on whole tensors."""
    weights = {name: own_params()[name].copy() for name in names}
    for step in range(steps):
        grads = {name: grad[0].copy() for name, grad in own_grads(3, seed=step).items()}
        twin(weights, grads, factor=schedule(step))
    return weights


def same(got, want):
    for name, array in want.items():
        np.testing.assert_array_equal(got[name], array, err_msg=name)


# --- rules -------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", RULES)
def test_a_rule_on_shards_equals_its_slow_twin_on_whole_tensors(name, stage):
    rule, twin = RULES[name]
    same(train(rule, stage=stage).weights(), twin_train(fresh(twin)))


@pytest.mark.parametrize("name", RULES)
def test_defaults_are_pytorchs(name):
    defaults = {
        SGD: {"lr": 1e-2, "momentum": 0.0, "nesterov": False, "weight_decay": 0.0},
        Adam: {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0},
        AdamW: {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2},
    }
    kind = type(RULES[name][0])
    assert kind().options == defaults[kind]


@pytest.mark.parametrize(
    ("rule", "moments"),
    [(SGD(), 0), (SGD(momentum=0.5), 1), (Adam(), 2), (AdamW(), 2)],
    ids=["sgd", "momentum", "adam", "adamw"],
)
def test_only_the_moments_a_rule_needs_are_held(rule, moments):
    opt = train(rule, stage=0, world_size=1)
    assert opt.ledger.current_bytes("optim") == 4 * 69 * moments


OUTSIDE = [
    ({"lr": -0.1}, "lr must be a finite number of at least 0, got -0.1"),
    ({"lr": math.inf}, "lr must be a finite number of at least 0, got inf"),
    ({"lr": math.nan}, "lr must be a finite number of at least 0, got nan"),
    ({"lr": "fast"}, "lr must be a number.*got 'fast'"),
    ({"lr": [0.1]}, "lr must be a number"),
    ({"weight_decay": -1}, "weight_decay must be a finite number of at least 0, got -1"),
    ({"eps": -1e-8}, "eps must be a finite number of at least 0"),
    ({"betas": (0.9, 1.0)}, r"betas must be two numbers .* below 1, got \(0.9, 1.0\)"),
    ({"betas": (-0.1, 0.9)}, "betas must be two numbers of at least 0"),
    ({"betas": (0.9,)}, "betas must be two numbers"),
    ({"betas": 0.9}, "betas must be two numbers"),
    ({"betas": ("a", "b")}, "betas two of them"),
    ({"momentum": 1.0}, "momentum must be at least 0 and below 1, got 1.0"),
    ({"momentum": -0.5}, "momentum must be at least 0 and below 1, got -0.5"),
]


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (kind, options, words)
        for kind in (SGD, Adam, AdamW)
        for options, words in OUTSIDE
        if options.keys() <= kind().options.keys()
    ],
)
def test_hyper_parameters_outside_their_range_are_refused(kind, options, words):
    with pytest.raises(UsageError, match=words):
        kind(**options)
    with pytest.raises(UsageError, match=words):
        GroupedRule(kind(), ("a",), [ParameterGroup(("a",), options)])


def test_looking_ahead_needs_momentum():
    with pytest.raises(UsageError, match="nesterov needs a momentum above 0; got momentum 0"):
        SGD(nesterov=True)


def test_a_rule_of_ones_own_must_say_how_it_updates():
    class Forgetful(Rule):
        moment_names = ()

    with pytest.raises(TypeError, match="abstract"):
        Forgetful()


@dataclass(frozen=True)
class SignDescent(Rule):
    """A rule from outside the package: one step of size lr against the gradient's sign."""

    lr: float = 0.5

    moment_names: ClassVar[tuple[str, ...]] = ("last_sign",)

    def hyper_row(self, options, step, grad_scale):
        return np.array([options["lr"], grad_scale], np.float32)

    def apply(self, target, grad, moments, runs, hyper, *, grad_format, param, param_format):
        from zero_nb.core.flat import GRAD, HYPER, NUMEL, STATE, TARGET

        for run in runs:
            numel, (lr, scale) = run[NUMEL], hyper[run[HYPER]]
            g = np.sign(grad[run[GRAD] : run[GRAD] + numel] * scale)
            moments["last_sign"][run[STATE] : run[STATE] + numel] = g
            target[run[TARGET] : run[TARGET] + numel] -= lr * g


@pytest.mark.parametrize("stage", STAGES)
def test_a_rule_of_ones_own_is_sharded_like_the_others(stage):
    opt = train(SignDescent(), stage=stage, steps=1)
    grads, start = own_grads(3, seed=0), own_params()
    same(opt.weights(), {n: start[n] - np.float32(0.5) * np.sign(grads[n][0]) for n in start})


@pytest.mark.parametrize("rule", [None, "adam", AdamW, {"lr": 1}])
def test_what_is_no_rule_is_refused(rule):
    with pytest.raises(UsageError, match=r"rule must be a zero_nb Rule .*got"):
        GroupedRule(rule, ("a",))


# --- groups ------------------------------------------------------------------------------------


GROUPS = [
    ParameterGroup(("head", "embed"), {"lr": 0.3}),
    ParameterGroup(("scale", "bias"), {"weight_decay": 0.0}),
    ParameterGroup(("empty",)),
]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_each_group_trains_as_if_alone_with_its_hyper_parameters(stage, world_size):
    rule = AdamW(lr=0.1, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.3)
    opt = train(rule, stage=stage, world_size=world_size, groups=GROUPS)
    alone = (0.8, 0.95), 1e-3
    expected = twin_train(NaiveAdam(0.3, *alone, 0.3), names=("embed", "head"))
    expected |= twin_train(NaiveAdam(0.1, *alone, 0.0), names=("scale", "bias"))
    same(opt.weights(), expected)


@pytest.mark.parametrize("stage", STAGES)
def test_a_group_may_have_momentum_where_the_others_have_none(stage):
    groups = [
        ParameterGroup(("head", "scale"), {"momentum": 0.9}),
        ParameterGroup(("embed", "bias", "empty")),
    ]
    opt = train(SGD(lr=0.1), stage=stage, groups=groups)
    expected = twin_train(NaiveSGD(0.1, 0.9), names=("head", "scale"))
    expected |= twin_train(NaiveSGD(0.1), names=("embed", "bias"))
    same(opt.weights(), expected)


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ([("a",), ("b",)], "in no parameter group: c"),
        ([], "in no parameter group: a, b, c"),
        ([("a", "b"), ("b", "c")], "group 1: 'b' is in two groups"),
        ([("a", "a", "b", "c")], "group 0: 'a' is in two groups"),
        ([("a", "b", "c"), ("d",)], "group 1: 'd' is not a trainable parameter"),
    ],
)
def test_every_parameter_is_in_exactly_one_group(groups, words):
    with pytest.raises(UsageError, match=words):
        GroupedRule(AdamW(), ("a", "b", "c"), [ParameterGroup(names) for names in groups])


@pytest.mark.parametrize(
    ("rule", "options", "words"),
    [
        (AdamW(), {"momentum": 0.9}, "group 0 sets momentum; a group of AdamW may set lr, betas"),
        (SGD(), {"learning_rate": 1, "beta": 2}, "group 0 sets beta, learning_rate; .*SGD may set"),
        (SGD(momentum=0.9), {"nesterov": True}, r"group 0 sets nesterov; .*\(nesterov: for all\)"),
    ],
)
def test_options_a_rule_does_not_have_are_refused(rule, options, words):
    with pytest.raises(UsageError, match=words):
        GroupedRule(rule, ("a",), [ParameterGroup(("a",), options)])


def test_options_of_a_group_are_the_rules_own_where_it_says_nothing():
    grouped = GroupedRule(AdamW(lr=0.5, eps=1e-5), ("a",), [ParameterGroup(("a",), {"lr": 0.25})])
    assert grouped.options(grouped.groups[0]) == AdamW(lr=0.25, eps=1e-5).options
    grouped.lr_factor = 0.5
    assert grouped.options(grouped.groups[0])["lr"] == 0.125


def test_a_learning_rate_changed_in_a_group_is_used_from_the_next_step_on():
    group = ParameterGroup(tuple(SHAPES), {"lr": 0.5})
    opt = ZeROOptimizer(own_params(), rule=SGD(), groups=[group])
    assert opt.lr == 0.5
    group.options["lr"] = 0.25
    assert opt.lr == 0.25
    opt.backward({name: np.ones((1, *shape), np.float32) for name, shape in SHAPES.items()})
    opt.step()
    same(opt.weights(), {name: array - np.float32(0.25) for name, array in own_params().items()})


# --- schedules ---------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_a_schedule_scales_every_groups_learning_rate_at_each_step(stage):
    factors = [0.5, 2.0, 0.0, 1.5]
    groups = [ParameterGroup(tuple(SHAPES)[:2], {"lr": 0.2}), ParameterGroup(tuple(SHAPES)[2:])]
    rule = AdamW(lr=0.1, weight_decay=0.3)
    opt = train(rule, stage=stage, groups=groups, schedule=lambda step: factors[step])
    defaults = (0.9, 0.999), 1e-8, 0.3
    expected = twin_train(
        NaiveAdam(0.2, *defaults), names=tuple(SHAPES)[:2], schedule=factors.__getitem__
    )
    expected |= twin_train(
        NaiveAdam(0.1, *defaults), names=tuple(SHAPES)[2:], schedule=factors.__getitem__
    )
    same(opt.weights(), expected)
    assert opt.lr == pytest.approx(0.2 * 1.5)


def test_warmup_rises_in_equal_steps_to_1_then_a_cosine_falls_to_final():
    factors = [warmup_cosine(step, warmup=4, total=15, final=0.2) for step in range(15)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert factors[4] == 1.0  # the top of the cosine
    assert factors[9] == pytest.approx(0.6)  # half way down
    assert factors[14] == pytest.approx(0.2)
    falls = np.diff(factors[4:])
    assert np.all(falls < 0)
    assert falls == pytest.approx(falls[::-1])


def test_a_schedule_stays_at_its_final_value_and_stands_a_short_run():
    assert warmup_cosine(1000, warmup=4, total=15, final=0.2) == pytest.approx(0.2)
    assert warmup_cosine(0, warmup=0, total=1) == 1.0
    assert [warmup_cosine(step, warmup=2, total=2) for step in range(2)] == [0.5, 1.0]
    assert warmup_cosine(0, warmup=0, total=5) == 1.0
