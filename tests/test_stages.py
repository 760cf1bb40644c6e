"""The stages: four siblings with the same verbs, what each holds, and what each sends."""

import ast
import difflib
import inspect
import textwrap

import numpy as np
import pytest

from tiny import PRECISIONS, SHAPES, STAGES, UNITS, own_grads, own_params, padding_of
from zero_nb.config import ZeROStage
from zero_nb.train.optim import AdamW
from zero_nb.train.optimizer import ZeROOptimizer
from zero_nb.train.stages import STAGES as BY_NUMBER
from zero_nb.train.stages import Stage

CLASSES = [BY_NUMBER[number] for number in ZeROStage]
VERBS = ["init_unit", "unshard", "reshard", "post_backward", "reduce", "step"]
NUMELS = {"first": 36, "second": 33}  # elements of UNITS
KIND_BYTES = {"fp32": (4, 4, 8), "bf16": (2, 2, 12)}  # parameter, gradient, AdamW's states


def optimizer(stage, world_size=5, **settings):
    return ZeROOptimizer(own_params(), stage=stage, world_size=world_size, units=UNITS, **settings)


# --- siblings ----------------------------------------------------------------------------------


def test_there_is_one_class_for_each_stage_and_they_are_siblings():
    assert [cls.number for cls in CLASSES] == list(ZeROStage)
    assert [cls.__name__ for cls in CLASSES] == [f"ZeROStage{n}" for n in range(4)]
    for cls in CLASSES:
        assert cls.__bases__ == (Stage,)
        assert getattr(cls, "__final__", False)


def test_every_stage_writes_every_verb_itself_in_the_order_of_a_training_step():
    for cls in (Stage, *CLASSES):
        methods = [n for n, value in vars(cls).items() if inspect.isfunction(value)]
        assert [name for name in methods if not name.startswith("__")] == VERBS
    assert set(VERBS) == Stage.__abstractmethods__


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_that_is_forgotten_is_an_error_and_not_another_stages(cls, verb):
    kept = {name: vars(cls)[name] for name in VERBS if name != verb}
    forgetful = type("Forgetful", (Stage,), kept)
    with pytest.raises(TypeError, match=verb):
        forgetful(None, None)


def code(cls):
    """The lines of a stage without its name, docstring, class attributes and blank lines."""
    source = textwrap.dedent(inspect.getsource(cls))
    (tree,) = ast.parse(source).body
    assert ast.get_docstring(tree)
    methods = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    lines = source.splitlines()[methods[0].lineno - 1 :]
    return [line for line in lines if line.strip()]


@pytest.mark.parametrize("below", [0, 1, 2])
def test_neighbours_can_be_read_side_by_side(below):
    """A learner sees a handful of lines change: at most eight leave and eight come."""
    old, new = code(CLASSES[below]), code(CLASSES[below + 1])
    diff = list(difflib.ndiff(old, new))
    left = [line for line in diff if line.startswith("- ")]
    came = [line for line in diff if line.startswith("+ ")]
    assert 1 <= len(left) <= 8, "\n".join(diff)
    assert 1 <= len(came) <= 8, "\n".join(diff)
    assert len(new) <= 40


# --- what a stage holds ------------------------------------------------------------------------


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world_size", [1, 2, 5, 16])
def test_a_rank_holds_its_share_of_what_the_stage_shards_and_all_of_the_rest(
    stage, precision, world_size
):
    opt = optimizer(stage, world_size, precision=precision)
    opt.backward(own_grads(world_size))
    padded = sum(-(-numel // world_size) * world_size for numel in NUMELS.values())
    shares = [world_size if stage >= first else 1 for first in (3, 2, 1)]
    held = opt.ledger.held_bytes()
    for kind, size, share in zip(held, KIND_BYTES[precision], shares, strict=True):
        assert held[kind] == size * padded // share, kind
        assert opt.ledger.bytes_by_rank(kind) == [held[kind]] * world_size


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", STAGES)
def test_no_rank_looks_into_another_ranks_memory(stage, precision):
    opt = optimizer(stage, 3, precision=precision)
    opt.backward(own_grads(3))
    for unit in opt.units:
        arrays = [unit.param, unit.grad, *unit.optim.arrays().values()]
        for array in arrays:
            assert array.shape[0] == 3
            assert array.flags.c_contiguous
            assert array.nbytes == array.shape[0] * array.shape[1] * array.itemsize
            for other in range(1, 3):
                assert not np.shares_memory(array[0], array[other])
        for i, array in enumerate(arrays):
            for other in arrays[i + 1 :]:
                assert not np.shares_memory(array, other)


@pytest.mark.parametrize("stage", STAGES)
def test_what_rank_1_does_to_its_row_no_other_rank_sees(stage):
    opt = optimizer(stage, 3)
    opt.backward(own_grads(3))
    for unit in opt.units:
        for array in [unit.param, unit.grad, *unit.optim.arrays().values()]:
            before = array.copy()
            array[1] = 1e6
            np.testing.assert_array_equal(array[0], before[0])
            np.testing.assert_array_equal(array[2], before[2])


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", STAGES)
def test_whole_parameters_are_the_same_on_every_rank_after_a_step(stage, precision):
    opt = optimizer(stage, 3, precision=precision)
    for step in range(2):
        opt.backward(own_grads(3, seed=step))
        opt.step()
    with opt.gathered_parameters() as params:
        for array in params.values():
            assert array.tobytes() == np.stack([array[0]] * 3).tobytes()


@pytest.mark.parametrize("stage", STAGES)
def test_whole_parameters_are_a_stages_own_until_stage_3_gathers_a_copy(stage):
    opt = optimizer(stage, 3)
    unit = opt.units[0]
    views = opt.unshard(unit)
    shared = all(np.shares_memory(view, unit.param) for view in views.values() if view.size)
    assert shared == (stage < 3)
    assert opt.ledger.current_bytes("unsharded") == (36 * 4 if stage == 3 else 0)
    del views
    opt.reshard(unit)
    assert opt.ledger.current_bytes("unsharded") == 0


def test_stage_3_gathers_once_however_often_it_is_asked():
    opt = optimizer(3, 3)
    opt.world.log.clear()
    first = opt.unshard(opt.units[0])
    second = opt.unshard(opt.units[0])
    assert len(opt.world.log) == 1
    assert np.shares_memory(first["embed"], second["embed"])


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_are_gone_after_the_step(stage):
    opt = optimizer(stage)
    opt.backward(own_grads(5))
    assert opt.ledger.current_bytes("grad") > 0
    opt.step()
    assert opt.ledger.current_bytes("grad") == 0
    assert opt.ledger.current_bytes("bucket") == opt.ledger.current_bytes("workspace") == 0


# --- what a stage sends ------------------------------------------------------------------------


EXPECTED = {
    0: [("all_reduce", "grad", "second"), ("all_reduce", "grad", "first")],
    1: [
        ("reduce_scatter", "grad", "second"),
        ("reduce_scatter", "grad", "first"),
        ("all_gather", "param", "first"),
        ("all_gather", "param", "second"),
    ],
}
EXPECTED[2] = EXPECTED[1]
EXPECTED[3] = EXPECTED[1][:2]  # parameters are gathered before use instead, see test_engine.py


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", STAGES)
def test_the_collectives_of_a_step_in_their_order(stage, precision):
    opt = optimizer(stage, 5, precision=precision, rule=AdamW())
    opt.world.log.clear()
    opt.backward(own_grads(5))
    sent_by_backward = len(opt.world.log)
    opt.step()
    log = [t for t in opt.world.log.transfers if t.purpose != "control"]
    assert [(t.collective, t.purpose, t.label) for t in log] == EXPECTED[stage]
    # Stages 2 and 3 send each gradient as soon as it is there, 0 and 1 at the end.
    assert sent_by_backward == (2 if stage >= 2 else 0)
    itemsize = 4 if precision == "fp32" else 2
    rounds = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}
    for transfer in log:
        shard = -(-NUMELS[transfer.label] // 5)
        assert transfer.elements_sent == rounds[transfer.collective] * shard * 4
        assert transfer.bytes_sent == itemsize * transfer.elements_sent


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8, 16])
def test_all_stages_and_units_give_the_same_weights(world_size, precision):
    hashes = set()
    for stage in STAGES:
        for units in (None, UNITS, {name: [name] for name in SHAPES}):
            opt = ZeROOptimizer(
                own_params(), stage=stage, world_size=world_size, units=units, precision=precision
            )
            for step in range(3):
                opt.backward(own_grads(world_size, seed=step))
                opt.step()
            hashes.add(opt.weights_sha256())
    assert len(hashes) == 1


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world_size", [2, 5, 8, 16])
def test_padding_is_never_read_by_an_update_and_never_written(stage, precision, world_size):
    """A loud sentinel in all padding: weights are the same bits, and it is still there after."""
    weights = []
    for sentinel in (0, 12345):
        opt = optimizer(stage, world_size, precision=precision)
        padded = [
            (array, padding_of(array, unit, opt.world))
            for unit in opt.units
            for array in [unit.param, *unit.optim.arrays().values()]
        ]
        for array, mask in padded:
            array[mask] = sentinel
        for step in range(2):
            opt.backward(own_grads(world_size, seed=step))
            opt.step()
        assert sum(mask.sum() for _, mask in padded) > 0
        for array, mask in padded:
            assert np.all(array[mask] == sentinel)
        weights.append(opt.weights_sha256())
    assert weights[0] == weights[1]
