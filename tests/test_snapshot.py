"""A run's state in memory: taken at one stage, world size and arrangement, put in place at another.

Files are test_checkpoint.py's.
"""

import json
import logging

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tiny
from naive_training import in_threads, rounded
from own_model import bits_of_padding, fill_padding, same_on_every_rank
from saved_runs import FROZEN, OPTIONS, OTHER, SHAPES, arrays, everything, make, params, train
from tiny import STAGES, WORLD_SIZES
from zero_nb.config import UsageError
from zero_nb.core.precision import BFLOAT16
from zero_nb.train import snapshot
from zero_nb.train.optim import SGD, Adam, AdamW, ParameterGroup
from zero_nb.train.optimizer import ZeROOptimizer

RECIPES = ("fp32", "bf16", "bf16-fp32-grads", "bf16-both-grads", "fp16")
SENTINEL = 7777.0
by_stage = pytest.mark.parametrize("stage", STAGES)


# --- the whole state, anywhere ---------------------------------------------------------------


@by_stage
@pytest.mark.parametrize("precision", RECIPES)
def test_H1_G2_G7_H4_H6_the_state_is_the_same_at_any_stage_world_size_and_arrangement(
    precision, stage
):
    saved = train(make(stage, 4, precision=precision), 5, overflow=(2,))
    want, state = everything(saved), saved.state_dict()
    assert want["counts"] == (4, 1)
    for there, world_size in ((3, 5), (2, 8), (1, 3), (0, 2), (stage, 4)):
        opt = make(there, world_size, precision=precision, seed=8, **OTHER)
        assert everything(opt) != want
        opt.load_state_dict(state)
        assert everything(opt) == want
        same_on_every_rank(opt)
        again = opt.state_dict()
        for kind in ("weights", "moments"):
            np.testing.assert_equal(
                renamed(again[kind]), renamed(state[kind]), err_msg=f"{there} {world_size}"
            )


def renamed(tensors):
    """Tied parameters under one name."""
    if "exp_avg" in tensors:
        return {moment: renamed(by_name) for moment, by_name in tensors.items()}
    return {"emb" if name == "head" else name: tensor for name, tensor in tensors.items()}


@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=5),
    worlds=st.tuples(st.integers(1, 8), st.integers(1, 8)),
    stages=st.tuples(st.sampled_from(STAGES), st.sampled_from(STAGES)),
    precision=st.sampled_from(RECIPES),
    frozen=st.integers(0, 31),
)
def test_any_state_fits_anywhere(sizes, worlds, stages, precision, frozen):
    names = [f"p{i}" for i in range(len(sizes))]
    own = {name: np.arange(1, sizes[i] + 1, dtype="f4") / 3 for i, name in enumerate(names)}
    kept = [name for i, name in enumerate(names) if frozen >> i & 1]

    def made(number, units):
        return ZeROOptimizer(
            own if number == 0 else {name: array * 0 for name, array in own.items()},
            stage=stages[number], world_size=worlds[number], precision=precision, frozen=kept,
            units=units,
        )  # fmt: skip

    saved = made(0, {name: [name] for name in names})
    for unit in saved.units:  # a loud state; every element another
        for i, array in enumerate(unit.optim.arrays().values()):
            own_RS = unit.own(array)
            ranks = np.arange(saved.world.size)[:, None]
            own_RS[...] = i + 100.0 * ranks + np.arange(own_RS.shape[1])
            if array.shape[1] != unit.layout.shard_numel:
                saved.world.all_gather(own_RS, out=array, purpose="other")
    opt = made(1, {"all": names[::-1]})
    fill_padding(opt, SENTINEL)
    padding = bits_of_padding(opt)
    state = saved.state_dict()
    opt.load_state_dict(state)
    again = opt.state_dict()
    for kind in ("weights", "moments"):
        np.testing.assert_equal(again[kind], state[kind])
    assert bits_of_padding(opt) == padding
    same_on_every_rank(opt)


@by_stage
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_A3_A11_every_element_is_in_one_ranks_pieces_and_padding_in_none(world_size, stage):
    opt = make(stage, world_size, precision="bf16")
    fill_padding(opt, SENTINEL)
    joined = {name: np.full(SHAPES[name], np.nan, np.float32).reshape(-1) for name in SHAPES}
    for row, rank in enumerate(opt.world.ranks):
        pieces = [p for p in snapshot.owned_pieces(opt, row) if p[0] == "weight"]
        parts = snapshot.owned_parts(opt, rank)
        assert len(parts) == len(pieces)
        for piece, part in zip(pieces, parts, strict=True):
            _, name, values, fmt = piece
            start, stop = part.offset, part.stop
            assert name == part.name
            assert np.isnan(joined[name][start:stop]).all()
            joined[name][start:stop] = fmt.widen(values.copy())
    want = params()
    for name in SHAPES:
        expected = rounded(want[name], BFLOAT16) if name in FROZEN else want[name]
        np.testing.assert_array_equal(joined[name], expected.reshape(-1))


def test_A1_ranks_that_own_padding_only_have_no_pieces():
    opt = ZeROOptimizer({"five": np.ones(5, np.float32)}, stage=3, world_size=4)
    sizes = [[p[2].size for p in snapshot.owned_pieces(opt, row)] for row in range(4)]
    assert sizes == [[2, 2, 2], [2, 2, 2], [1, 1, 1], []]


def test_H1_padding_is_stripped_ten_values_on_four_ranks_are_two_a_rank_on_five():
    values = np.arange(10, dtype=np.float32)
    saved = ZeROOptimizer({"ten": values}, stage=3, world_size=4)
    opt = ZeROOptimizer({"ten": values * 0}, stage=3, world_size=5)
    opt.load_state_dict(saved.state_dict())
    assert [saved.units[0].layout.shard_numel, opt.units[0].layout.shard_numel] == [3, 2]
    np.testing.assert_array_equal(opt.units[0].param, values.reshape(5, 2))


@by_stage
def test_G7_the_step_count_is_part_of_the_state(stage):
    settings = {"stage": stage, "world_size": 3, "rule": Adam(lr=1.0, eps=0.0)}
    start = {"w": np.zeros(4, np.float32)}
    opt = ZeROOptimizer(start, **settings)
    state = opt.state_dict()
    for moment in state["moments"].values():
        moment["w"][...] = 1.0
    state["parameters"]["w"]["updates"] = 1000
    opt.load_state_dict(state)
    opt.set_gradients({"w": np.ones(4, np.float32)})
    opt.step()
    np.testing.assert_allclose(opt.weights()["w"], -0.7954, atol=5e-5)
    assert opt.rule.steps == {"w": 1001}


def test_state_is_a_copy_whole_and_plain():
    opt = train(make(3, 4, precision="bf16"), 2)
    state = opt.state_dict()
    before = {name: tensor.copy() for name, tensor in state["weights"].items()}
    assert {n: t.shape for n, t in state["weights"].items()} == SHAPES
    assert {t.dtype for n, t in state["weights"].items() if n not in FROZEN} == {np.dtype("f4")}
    assert state["weights"]["frozen"].dtype == np.uint16
    assert state["moments"].keys() == {"exp_avg", "exp_avg_sq"}
    assert state["moments"]["exp_avg"].keys() == SHAPES.keys() - set(FROZEN)
    train(opt, 1)
    for name, tensor in before.items():
        np.testing.assert_array_equal(state["weights"][name], tensor)
    rest = {name: value for name, value in state.items() if name not in ("weights", "moments")}
    assert json.loads(json.dumps(rest, allow_nan=False)) == rest
    kept = opt.state_dict()
    opt.load_state_dict(state)
    state["weights"]["mat"][...] = SENTINEL  # loading copied
    assert not (opt.weights()["mat"] == SENTINEL).any()
    assert opt.steps_done == kept["steps_done"] - 1


def test_what_is_sent_is_no_training_traffic():
    opt = make(2, 4)
    state = opt.state_dict()
    opt.load_state_dict(state)
    assert {t.purpose for t in opt.world.log.transfers} == {"other"}


@by_stage
@pytest.mark.parametrize("hosted", [1, 2])
def test_processes_that_host_some_ranks_have_the_same_state(hosted, stage):
    want = train(make(stage, 4, precision="bf16"), 3)
    state = want.state_dict()

    def work(world):
        opt = train(make(stage, 4, precision="bf16", world=world), 3)
        other = make((stage + 1) % 4, 4, precision="bf16", world=world, seed=5, **OTHER)
        other.load_state_dict(opt.state_dict())
        return opt.state_dict(), everything(other)

    for taken, loaded in in_threads(4, hosted, work):
        np.testing.assert_equal(taken, state)
        assert loaded == everything(want)


# --- other precisions ----------------------------------------------------------------------------


@pytest.mark.parametrize("there", RECIPES)
@pytest.mark.parametrize("here", RECIPES)
def test_trained_weights_and_moments_move_between_precisions(here, there):
    saved = ZeROOptimizer(tiny.own_params(), stage=1, world_size=3, precision=here)
    for step in range(3):
        saved.backward(tiny.own_grads(3, seed=step))
        assert saved.step().applied
    opt = ZeROOptimizer(tiny.own_params(7), stage=3, world_size=2, precision=there)
    scale = opt.loss_scale
    opt.load_state_dict(saved.state_dict())
    want, got = everything(saved), everything(opt)
    for part in want.keys() - {"used", "loss_scale"}:
        assert got[part] == want[part], part
    fmt = opt.recipe.param
    want_used = {n: fmt.widen(fmt.round(w.copy())).tobytes() for n, w in saved.weights().items()}
    assert got["used"] == dict(sorted(want_used.items()))
    both = saved.scaler is not None and opt.scaler is not None
    assert opt.loss_scale == (saved.loss_scale if both else scale)


@by_stage
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_G9_frozen_16_bit_parameters_keep_their_bits(precision, stage):
    odd = np.array([0x7F81, 0x8000, 0x0001, 0xFFC1, 0x7C01], np.uint16)  # NaNs, -0, subnormal
    saved = make(stage, 3, precision=precision)
    (unit,) = (unit for unit in saved.units if not unit.trainable)
    full_RF = np.zeros((3, unit.layout.padded_numel), np.uint16)
    full_RF[:, :5] = odd
    unit.param[...] = unit.fit(full_RF, unit.param)
    state = saved.state_dict()
    opt = make(3 - stage, 4, precision=precision)
    opt.load_state_dict(state)
    np.testing.assert_array_equal(state["weights"]["frozen"], odd)
    np.testing.assert_array_equal(opt.state_dict()["weights"]["frozen"], odd)


def test_frozen_parameters_move_to_and_from_float32_but_not_between_16_bit_formats():
    plain, half = make(1, 2), make(1, 2, precision="bf16")
    wide = half.weights()["frozen"].tobytes()
    assert wide == rounded(params()["frozen"], BFLOAT16).tobytes()
    state = half.state_dict()
    plain_state = plain.state_dict()
    plain.load_state_dict(state)
    assert plain.weights()["frozen"].tobytes() == wide
    half.load_state_dict(plain_state)
    assert half.weights()["frozen"].tobytes() == wide
    with pytest.raises(UsageError, match=r"'frozen' is stored as float16 here, bfloat16 there"):
        make(1, 2, precision="fp16").load_state_dict(state)


# --- what does not fit -----------------------------------------------------------------------


def change(state, *path, to):
    for key in path[:-1]:
        state = state[key]
    state[path[-1]] = to


def drop(state, *path):
    for key in path[:-1]:
        state = state[key]
    del state[path[-1]]


WRONG_STATES = {
    "shape": (lambda s: change(s, "parameters", "mat", "shape", to=[4, 3]), "'mat' has shape"),
    "missing": (lambda s: drop(s, "parameters", "mat"), "'mat' is not in the saved state"),
    "unknown": (lambda s: change(s, "parameters", "x", to=s["parameters"]["mat"]), "no 'x' here"),
    "untied": (lambda s: change(s, "parameters", "emb", "tied", to=[]), "'head' is not in the"),
    "frozen": (lambda s: change(s, "parameters", "mat", "trainable", to=False), "trained here, fr"),
    "dtype": (lambda s: change(s, "parameters", "mat", "dtype", to="float16"), "is stored as"),
    "rule": (lambda s: change(s, "rule", "name", to="Adam"), r"AdamW \(exp_avg, exp_avg_sq\) here"),
    "moments": (
        lambda s: change(s, "rule", "moments", to=["exp_avg"]),
        r"Adam.* \(exp_avg\) there",
    ),
    "option": (
        lambda s: change(s, "groups", 0, "options", "speed", to=1),
        "options that AdamW has",
    ),
    "lr": (lambda s: change(s, "groups", 0, "options", "lr", to=-1.0), "lr must be a finite"),
    "count": (lambda s: change(s, "steps_done", to=-1), "steps_done must be a whole number"),
    "updates": (lambda s: change(s, "parameters", "mat", "updates", to=0.5), "updates of mat"),
    "scale": (lambda s: change(s, "loss_scale", "scale", to=0.0), "loss scale must be finite"),
    "factor": (lambda s: change(s, "lr_factor", to=float("nan")), "lr_factor must be finite"),
    "foreign": (lambda s: s.clear(), "not the state of a ZeROOptimizer: KeyError"),
    "half": (lambda s: drop(s, "groups"), "not the state of a ZeROOptimizer"),
    "tensor": (lambda s: drop(s, "moments", "exp_avg", "mat"), "exp_avg of 'mat' must be float32"),
    "moment": (lambda s: drop(s, "moments", "exp_avg_sq"), "exp_avg_sq of 'emb' must be"),
    "wide": (
        lambda s: change(s, "weights", "mat", to=np.zeros((3, 4))),
        r"must be float32 \(3, 4\), got float64 \(3, 4\)",
    ),
    "turned": (
        lambda s: change(s, "weights", "mat", to=np.zeros((4, 3), np.float32)),
        r"must be float32 \(3, 4\), got float32 \(4, 3\)",
    ),
}


@pytest.mark.parametrize("wrong", WRONG_STATES)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(wrong):
    spoil, says = WRONG_STATES[wrong]
    state = train(make(2, 3, precision="fp16"), 2).state_dict()
    spoil(state)
    opt = train(make(1, 4, precision="fp16"), 1)
    before, held = everything(opt), arrays(opt)
    with pytest.raises(UsageError, match=says):
        opt.load_state_dict(state)
    assert everything(opt) == before
    assert arrays(opt) == held


def test_parameters_tied_otherwise_are_refused():
    own = {name: np.ones(2, np.float32) for name in "abc"}
    tied = ZeROOptimizer(own | {"b": own["a"]})
    other = ZeROOptimizer(own | {"b": own["c"]})
    with pytest.raises(UsageError, match="a = b is one parameter here, tied otherwise"):
        tied.load_state_dict(other.state_dict())


def test_many_differences_are_counted():
    ours = {f"a{i}": np.ones(1, np.float32) for i in range(9)}
    with pytest.raises(UsageError, match=r"'a0' is not in .*; and 5 more"):
        ZeROOptimizer(ours).load_state_dict(
            ZeROOptimizer({"w": np.ones(1, np.float32)}).state_dict()
        )


def test_a_rule_with_other_fixed_options_is_refused():
    own = {"w": np.ones(3, np.float32)}
    saved = ZeROOptimizer(own, rule=SGD(momentum=0.5, nesterov=True))
    with pytest.raises(UsageError, match="nesterov is False here, True there"):
        ZeROOptimizer(own, rule=SGD(momentum=0.5)).load_state_dict(saved.state_dict())
    with pytest.raises(UsageError, match=r"SGD \(no state\) here, SGD \(momentum_buffer\) there"):
        ZeROOptimizer(own, rule=SGD()).load_state_dict(saved.state_dict())


def test_groups_are_found_by_name_and_their_saved_options_count():
    saved = make(1, 2)
    saved.groups[0].options["lr"] = 0.5
    opt = make(1, 2, **OTHER)
    opt.load_state_dict(saved.state_dict())
    assert [opt.rule.options(group)["lr"] for group in opt.groups] == [0.03, 0.5, 0.03]
    assert [opt.rule.options(group)["weight_decay"] for group in opt.groups] == [0.0, 0.1, 0.0]
    assert opt.rule.options(opt.groups[0])["betas"] == OPTIONS["betas"]
    one = make(1, 2, groups=((tuple(name for name in SHAPES if name not in FROZEN), {}),))
    with pytest.raises(UsageError, match="group 0 joins parameters that had different options"):
        one.load_state_dict(saved.state_dict())


def test_an_empty_group_keeps_its_options():
    own = {"w": np.ones(3, np.float32)}
    groups = [ParameterGroup(("w",)), ParameterGroup((), {"lr": 0.25})]
    opt = ZeROOptimizer(own, groups=groups)
    opt.load_state_dict(ZeROOptimizer(own, rule=AdamW(lr=0.125)).state_dict())
    assert [opt.rule.options(group)["lr"] for group in opt.groups] == [0.125, 0.25]


def test_a_model_that_is_frozen_as_a_whole_has_a_state():
    own = {"w": np.arange(3, dtype=np.float32)}
    saved = ZeROOptimizer(own, frozen=["w"], stage=3, world_size=2)
    opt = ZeROOptimizer({"w": own["w"] * 0}, frozen=["w"], stage=1, world_size=3)
    opt.load_state_dict(saved.state_dict())
    np.testing.assert_array_equal(opt.weights()["w"], own["w"])


# --- between steps only ------------------------------------------------------------------------


@by_stage
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_no_state_is_taken_while_gradients_are_held(micro_batches, stage, caplog):
    opt = make(stage, 2, micro_batches=micro_batches)
    state = opt.state_dict()
    grads = {name: np.ones((2, *SHAPES[name]), np.float32) for name in SHAPES if name != "frozen"}
    opt.backward(grads | {"head": grads["emb"]})
    with pytest.raises(UsageError, match="gradients are held"):
        opt.state_dict()
    opt.load_state_dict(state)  # drops them
    opt.state_dict()
    with caplog.at_level(logging.WARNING), pytest.raises(UsageError, match="micro-batches"):
        opt.step()


@by_stage
def test_what_was_gathered_before_loading_is_not_used_after_it(stage):
    opt = make(stage, 2, precision="bf16")
    state = train(make(stage, 2, precision="bf16"), 3).state_dict()
    for unit in opt.units:
        opt.unshard(unit)
    opt.load_state_dict(state)
    want = everything(train(make(stage, 2, precision="bf16"), 3))
    assert everything(opt) == want


def test_a_failure_in_one_process_is_a_failure_in_all():
    def work(world):
        opt = make(1, 3, world=world)
        state = opt.state_dict()
        if 1 in world.ranks:
            del state["weights"]["mat"]
        before = arrays(opt)
        with pytest.raises(UsageError) as caught:
            opt.load_state_dict(state)
        assert arrays(opt) == before
        return str(caught.value)

    said = in_threads(3, 1, work)
    assert "weight of 'mat' must be float32" in said[1]
    assert all("loading failed in the process of rank 1" in said[rank] for rank in (0, 2))
