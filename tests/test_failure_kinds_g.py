"""Failure kinds G: groups, optimizers, frozen parameters."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

from own_model import fill_padding, full_state
from tiny import STAGES
from zero_nb.config import UsageError
from zero_nb.core.partition import whole_layout
from zero_nb.core.update import adam_hyper
from zero_nb.train.optim import SGD, Adam, AdamW, ParameterGroup, Rule, get_rule
from zero_nb.train.optimizer import ZeROOptimizer

F32 = np.float32
by_stage = pytest.mark.parametrize("stage", STAGES)


@by_stage
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_G1_decay_stays_in_its_group(stage, world_size):
    opt = ZeROOptimizer(
        {"weight": np.ones(1, F32), "bias": np.ones(1, F32)}, stage=stage, world_size=world_size,
        rule=AdamW(lr=1.0, weight_decay=0.0),
        groups=[ParameterGroup(("weight",), {"weight_decay": 0.1}), ParameterGroup(("bias",))],
    )  # fmt: skip
    opt.backward({name: np.zeros((world_size, 1), F32) for name in ("weight", "bias")})
    opt.step()
    weights = opt.weights()
    assert [float(weights[name][0]) for name in ("weight", "bias")] == [F32(0.9), 1.0]


@by_stage
@pytest.mark.parametrize("order", [("p0", "p1", "p2"), ("p2", "p0", "p1")])
def test_G2_interleaved_groups_keep_each_parameter_its_own_state(stage, order):
    """Groups [p0, p2] and [p1]: by name, whatever the order of parameters, groups and units."""
    grads = {"p0": 1.0, "p1": 2.0, "p2": 4.0}
    states = []
    for groups in ([("p0", "p2"), ("p1",)], [("p1",), ("p2", "p0")]):
        opt = ZeROOptimizer(
            {name: np.zeros(3, F32) for name in order}, stage=stage, world_size=2,
            rule=Adam(lr=0.5), groups=[ParameterGroup(names) for names in groups],
        )  # fmt: skip
        opt.backward({name: np.full((2, 3), grads[name] / 2, F32) for name in order})
        opt.step()
        state = full_state(opt)
        for name, grad in grads.items():
            np.testing.assert_allclose(state[name][0], np.full(3, 0.1 * grad), rtol=1e-6)
        states.append(opt.state_dict()["moments"])
    for kind, tensors in states[0].items():
        for name, tensor in tensors.items():
            np.testing.assert_array_equal(tensor, states[1][kind][name], err_msg=name)


def trust_ratio(w, u):
    return float(np.linalg.norm(w) / np.linalg.norm(u))


def test_G5_rules_that_need_whole_tensors_are_refused_with_the_reason():
    """A flat slice has other norms than the layers it cuts: 1.67 and 2.69 instead of 2.6, 0.5."""
    w, u = np.array([3, 4, 12, 1], F32), np.array([0, 3, 4, 2], F32)
    assert [trust_ratio(w[:3], u[:3]), trust_ratio(w[3:], u[3:])] == pytest.approx([2.6, 0.5])
    wrong = [trust_ratio(w[:2], u[:2]), trust_ratio(w[2:], u[2:])]
    assert wrong == pytest.approx([1.6667, 2.6926], abs=1e-4)
    for name in ("lamb", "LARS", "adafactor", "muon", "shampoo"):
        with pytest.raises(UsageError, match=rf"{name} needs .*own slice.*such as AdamW"):
            get_rule(name)


def test_G5_so_is_one_of_ones_own_that_says_it_is_not_elementwise():
    @dataclass(frozen=True)
    class Lamb(Rule):
        lr: float = 0.1
        moment_names: ClassVar[tuple[str, ...]] = ()
        elementwise: ClassVar[bool] = False

        def hyper_row(self, options, step, grad_scale):
            raise AssertionError("never asked")

        def apply(self, *args, **kwargs):
            raise AssertionError("never asked")

    with pytest.raises(UsageError, match="Lamb needs the norms of each layer's weights"):
        ZeROOptimizer({"w": np.zeros(3, F32)}, rule=Lamb())


@by_stage
@pytest.mark.parametrize(
    "rule", [SGD(0.1, 0.9), Adam(0.1), AdamW(0.1)], ids=lambda r: type(r).__name__
)
def test_G5_element_wise_rules_are_safe_wherever_slices_cut(stage, rule):
    """An element's update needs that element only, so every cut gives the same bits."""
    start, rng = np.array([3, 4, 12, 1, 5, 9, 2], F32), np.random.default_rng(3)
    grads = rng.normal(size=(3, 7)).astype(F32)
    hashes = set()
    for world_size in range(1, 9):
        opt = ZeROOptimizer({"w": start}, stage=stage, world_size=world_size, rule=rule)
        for grad in grads:  # from rank 0 alone: the sum over ranks does not round
            opt.backward({"w": [grad] + [None] * (world_size - 1)})
            opt.step()
        hashes.add(opt.weights_sha256())
    assert len(hashes) == 1


@by_stage
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_G6_there_is_no_dummy_first_step(stage, precision):
    """The first move is 1.0 * lr, where a step of zeros before it would leave 0.74 * lr."""
    opt = ZeROOptimizer(
        {"w": np.ones(2, F32)}, stage=stage, world_size=2, precision=precision,
        rule=AdamW(lr=0.25, weight_decay=0.5),
    )  # fmt: skip
    assert opt.ledger.current_bytes("optim") > 0
    assert opt.rule.steps == {"w": 0}
    assert all(np.all(moment == 0) for moment in full_state(opt)["w"])
    np.testing.assert_array_equal(opt.weights()["w"], [1, 1])  # not decayed either
    opt.backward({"w": np.full((2, 2), 0.5, F32)})
    opt.step()
    np.testing.assert_allclose(opt.weights()["w"], np.full(2, 1 - 0.25 * 0.5 - 0.25), rtol=1e-6)
    m, v = 0.1, 0.001  # one step from zero, read as the second one
    dummy = (m / (1 - 0.9**2)) / np.sqrt(v / (1 - 0.999**2))
    assert dummy == pytest.approx(0.7441, abs=1e-4)


@by_stage
def test_G7_step_1001_is_not_step_1(stage):
    """m = v = 1: the next move is 0.7954 * lr by the count kept, 0.3162 * lr by a new one."""
    opt = ZeROOptimizer({"w": np.zeros(3, F32)}, stage=stage, world_size=2, rule=Adam(lr=1.0))
    state = opt.state_dict()
    for moments in state["moments"].values():
        moments["w"][...] = 1
    moved = {}
    for steps in (0, 1000):
        state["parameters"]["w"]["updates"] = steps
        state["steps_done"] = steps
        state["weights"]["w"][...] = 0
        opt.load_state_dict(state)
        opt.backward({"w": np.full((2, 3), 0.5, F32)})  # m and v stay 1
        opt.step()
        assert opt.rule.steps["w"] == steps + 1
        moved[steps] = -float(opt.weights()["w"][0])
    want = {
        steps: 1 / (1 - 0.9 ** (steps + 1)) * (1 - 0.999 ** (steps + 1)) ** 0.5
        for steps in (0, 1000)
    }
    assert moved == pytest.approx(want, rel=1e-5)
    assert want == pytest.approx({0: 0.3162, 1000: 0.7954}, abs=1e-4)
    row = adam_hyper(1.0, (0.9, 0.999), 0.0, 0.0, 1001)
    assert float(row[6] * row[5]) == pytest.approx(0.7954, abs=1e-4)


def test_G9_frozen_parameters_cost_their_parameter_bytes_only():
    """A tenth trained, Adam in fp32: 1.3 times the model's bytes, not 4.0."""
    params = {"base": np.ones(900, F32), "head": np.ones(100, F32)}
    opt = ZeROOptimizer(params, stage=0, world_size=1, frozen=["base"])
    opt.backward({"head": np.ones((1, 100), F32)})
    assert sum(opt.ledger.held_bytes().values()) == 1.3 * 4000
    everything = ZeROOptimizer(params, stage=0, world_size=1)
    everything.backward({name: np.ones((1, a.size), F32) for name, a in params.items()})
    assert sum(everything.ledger.held_bytes().values()) == 4.0 * 4000


@by_stage
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_G9_frozen_values_stay_are_gathered_and_saved(stage, precision, world_size):
    start = {"frozen": np.array([1, 2, 3, np.nan, -0.0], F32), "w": np.ones(4, F32)}
    opt = ZeROOptimizer(
        start, stage=stage, world_size=world_size, precision=precision, frozen=["frozen"],
        rule=AdamW(lr=0.5, weight_decay=0.1), max_grad_norm=1.0,
    )  # fmt: skip
    fill_padding(opt, 7777)
    assert "frozen" not in full_state(opt)
    before = opt.weights()["frozen"].tobytes()
    opt.world.log.clear()
    for _ in range(2):
        opt.backward({"w": np.full((world_size, 4), opt.loss_scale / 1024, F32)})
        result = opt.step()
        assert result.applied
        assert np.isfinite(result.grad_norm)
    labels = {t.label for t in opt.world.log.transfers if t.purpose in ("param", "grad")}
    assert not any("frozen" in label for label in labels)
    assert opt.weights()["frozen"].tobytes() == before
    assert np.all(np.isfinite(opt.weights()["w"]))
    assert "frozen" in opt.state_dict()["weights"]
    with opt.gathered_parameters() as used:
        np.testing.assert_array_equal(used["frozen"], np.stack([start["frozen"]] * world_size))
    with pytest.raises(UsageError, match="unknown or frozen gradients: frozen"):
        opt.backward({"w": np.ones((world_size, 4), F32), "frozen": np.ones((world_size, 5), F32)})


@pytest.mark.parametrize("frozen", [(), ("a",)])
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-fp32-grads", "bf16-both-grads"])
def test_G9_nothing_is_counted_as_saved_that_was_never_there(precision, micro_batches, frozen):
    """Stage 0 is the baseline: it saves nothing and sends nothing more, step after step."""
    opt = ZeROOptimizer(
        {"a": np.ones(8, F32), "w": np.ones(8, F32)}, stage=0, world_size=2, frozen=frozen,
        precision=precision, micro_batches=micro_batches,
    )  # fmt: skip
    for _ in range(2):
        for _ in range(micro_batches):
            opt.backward({name: np.ones((2, 8), F32) for name in "aw" if name not in frozen})
        opt.step()
        stats = opt.memory_stats()
        assert (stats.total_memory_saved, stats.communication_overhead) == (0, 0)


def test_G10_largest_first_and_the_loads_are_told():
    """Sizes 1, 1, 1, 1, 10 on two ranks: 10 and 4, where the order of the list gives 12 and 2."""
    layout = whole_layout([(n,) for n in (1, 1, 1, 1, 10)], 2)
    assert sorted(layout.loads) == [4, 10]
    assert layout.imbalance == pytest.approx(10 / 7)
    for world_size in range(1, 7):
        for sizes in ((5, 3, 3, 3), (1,), (), (0, 0, 4), (7, 7, 7, 1, 1, 1)):
            layout = whole_layout([(n,) for n in sizes], world_size)
            assert sum(layout.loads) == sum(sizes)
            # Graham's bound for largest first: at most 4/3 - 1/(3W) of the best possible.
            best = max([*sizes, -(-sum(sizes) // world_size)], default=0)
            assert max(layout.loads) <= (4 / 3) * best + max(sizes, default=0) / 3
