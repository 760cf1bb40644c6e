"""Failure kinds I: stage 3's gathers: order, lifetime, edits."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from naive_training import in_threads
from own_model import bits_of_padding, fill_padding
from tiny import STAGES, UNITS, mlp, mlp_batches, own_grads, own_params
from zero_nb.config import UsageError
from zero_nb.core.precision import BFLOAT16, FLOAT16, FLOAT32
from zero_nb.train.engine import Engine
from zero_nb.train.optimizer import ZeROOptimizer
from zero_nb.train.prefetch import agree_on_trace

F32 = np.float32
by_stage = pytest.mark.parametrize("stage", STAGES)
FORMATS = {"fp32": FLOAT32, "bf16": BFLOAT16, "fp16": FLOAT16}


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ("ABB", r"call 2 is nothing on rank 0 and B on rank 1 \(lengths 2 and 3\)"),
        ("A", r"call 1 is B on rank 0 and nothing on rank 1 \(lengths 2 and 1\)"),
        ("", r"call 0 is A on rank 0 and nothing on rank 1 \(lengths 2 and 0\)"),
        ("BA", r"call 0 is A on rank 0 and B on rank 1 \(lengths 2 and 2\)"),
    ],
)
def test_I2_ranks_that_call_units_a_different_number_of_times_are_told_and_do_not_wait(
    other, words
):
    """Rank 0 calls A, B and rank 1 A, B, B: each in its own thread, where a wait would be one."""
    refused = []

    def work(world):
        try:
            agree_on_trace(world, list(("AB", other)[world.ranks[0]]), ["A", "B"])
        except UsageError as error:
            refused.append(str(error))

    in_threads(2, 1, work)
    assert len(refused) == 2, "all ranks are told"
    assert all(re.search(words, said) for said in refused)
    in_threads(3, 1, lambda world: agree_on_trace(world, ["A", "B", "A"], ["A", "B"]))


# Names go in as sets wherever a set is allowed; what comes out must not depend on its order.
WITH_SETS = """
import json
import numpy as np
from zero_nb.train.optim import AdamW
from zero_nb.train.optimizer import ZeROOptimizer

names = [f"parameter {i}" for i in range(40)]
opt = ZeROOptimizer(
    {name: np.full(i % 7, i, np.float32) for i, name in enumerate(names)},
    stage=3, world_size=4, precision="bf16", rule=AdamW(), micro_batches=2, max_grad_norm=1.0,
    frozen=set(names[3:20:4]), keep_fp32=frozenset(names[1:30:3]), reduce_bucket_size=8,
    units={"even": names[::2], "odd": names[1::2]},
)
for batch in range(2):
    unused = {name for i, name in enumerate(names) if i % 3 == batch}
    opt.backward({
        name: None if name in unused else np.full((4, i % 7), i, np.float32)
        for i, name in enumerate(names) if name not in set(names[3:20:4])
    })
opt.step()
print(json.dumps([
    opt.weights_sha256(), list(opt.rule.steps.items()),
    [[unit.name, list(unit.layout.names)] for unit in opt.units],
    [[t.collective, t.label, t.elements_sent] for t in opt.world.log.transfers],
]))
"""


def test_I3_no_order_depends_on_the_hash_seed():
    """Processes whose sets are ordered differently make the same units and collectives."""
    root = Path(__file__).resolve().parent.parent
    running = [
        subprocess.Popen(
            [sys.executable, "-c", WITH_SETS], cwd=root, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, encoding="utf-8",
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        for seed in ("1", "2")
    ]  # fmt: skip
    said = [process.communicate(timeout=120)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0], said
    assert json.loads(said[0])
    assert said[0] == said[1]


@pytest.mark.parametrize(("keep_root", "unsharded"), [(False, 0), (True, 1000)])
def test_I6_a_root_that_stays_gathered_is_told_apart(keep_root, unsharded):
    """Root 1000, four children of 800, 8 ranks: 525 elements a rank, or 1400 with the root whole.

    The rank's own 125 elements of the root lie in its shard and in the gathered copy: the ledger
    counts memory, so it has them twice.
    """
    sizes = {"root": 1000} | {f"child{i}": 800 for i in range(4)}
    opt = ZeROOptimizer(
        {name: np.zeros(n, F32) for name, n in sizes.items()}, stage=3, world_size=8,
        units={name: [name] for name in sizes},
    )  # fmt: skip
    opt.ledger.begin_step()
    for unit in opt.units:  # a forward pass
        opt.unshard(unit)
        if unit.name != "root" or not keep_root:
            opt.reshard(unit)
    assert opt.ledger.current_bytes("param") == 4 * 525
    assert opt.ledger.current_bytes("unsharded") == 4 * unsharded
    different = 525 + unsharded - unsharded // 8
    assert different == (1400 if keep_root else 525)
    assert opt.ledger.largest_bytes["unsharded"] == 4 * (1800 if keep_root else 1000)


def test_I6_the_engine_drops_the_root_unless_asked_to_keep_it():
    """The default is a choice: what stays between the passes is told by the ledger."""
    model, stays = mlp(6, 10, 10, 5), {}
    batch = mlp_batches(model, 1, size=8)[0]
    units = [unit for unit, _ in model.blocks]
    for name, reshard in (("all dropped", True), ("root kept", units[:-1]), ("all kept", False)):
        engine = Engine(model, stage=3, world_size=4, reshard_after_forward=reshard)
        report = engine.train_step(*batch)
        forward = [event for event in engine.ledger.events if event.phase == "forward"]
        assert report.held_bytes["param"] == sum(
            u.param.nbytes // 4 for u in engine.optimizer.units
        )
        stays[name] = forward[-1].total_bytes["unsharded"]
    sizes = [4 * unit.layout.padded_numel for unit in engine.optimizer.units]
    assert stays == {"all dropped": 0, "root kept": sizes[-1], "all kept": sum(sizes)}


@by_stage
@pytest.mark.parametrize("precision", list(FORMATS))
def test_I7_an_edit_that_would_be_lost_is_an_error_at_once(stage, precision):
    opt = ZeROOptimizer(own_params(), stage=stage, world_size=3, precision=precision, units=UNITS)
    before = opt.weights_sha256()
    with opt.gathered_parameters() as params:
        for array in params.values():
            with pytest.raises(ValueError, match="read-only"):
                array[...] = 9
    assert opt.weights_sha256() == before


@by_stage
@pytest.mark.parametrize("precision", list(FORMATS))
@pytest.mark.parametrize("rank", [0, 2])
def test_I7_edits_of_the_rank_that_is_named_reach_all_ranks_and_masters(stage, precision, rank):
    start = own_params()
    opt = ZeROOptimizer(
        start, stage=stage, world_size=3, precision=precision, units=UNITS, frozen=["bias"],
        keep_fp32=["scale"],
    )  # fmt: skip
    fill_padding(opt, 7777)
    padding = bits_of_padding(opt)
    with opt.gathered_parameters(modify_rank=rank) as params:
        params["embed"][rank, 2] = 9
        params["scale"][rank] = -0.5
        params["bias"][rank, 1] = 4
    weights = opt.weights()
    fmt = FORMATS[precision]
    want = {name: array.copy() for name, array in start.items()}
    # A frozen 16-bit parameter has no master: what is stored is all there is.
    want["bias"] = fmt.widen(fmt.round(want["bias"]))
    want["embed"][2], want["scale"], want["bias"][1] = 9, np.array(-0.5, F32), 4
    for name, array in want.items():  # what was not edited kept every bit of its master
        np.testing.assert_array_equal(weights[name], array, err_msg=name)
    with opt.gathered_parameters() as params:
        for name, array in want.items():
            stored = array if name == "scale" else fmt.widen(fmt.round(array))
            np.testing.assert_array_equal(params[name], np.stack([stored] * 3), err_msg=name)
    assert bits_of_padding(opt) == padding


@by_stage
def test_I7_edits_of_another_rank_are_an_error_and_nothing_is_written(stage):
    opt = ZeROOptimizer(own_params(), stage=stage, world_size=3, units=UNITS)
    before, held = opt.weights_sha256(), opt.ledger.current_bytes()

    def edit(of_rank):
        with opt.gathered_parameters(modify_rank=1) as params:
            params["embed"][1] = 9
            params["head"][of_rank, 0, 0, 0] = 9

    with pytest.raises(UsageError, match=r"rank 2 changed unit 'second', but modify_rank is 1"):
        edit(2)
    assert opt.weights_sha256() == before
    with pytest.raises(UsageError, match=r"modify_rank must be within 0\.\.2, got 3"):
        opt.gathered_parameters(modify_rank=3).__enter__()
    assert opt.ledger.current_bytes() == held
    edit(1)
    assert opt.weights_sha256() != before


@by_stage
def test_I7_nothing_is_written_if_the_block_fails(stage):
    opt = ZeROOptimizer(own_params(), stage=stage, world_size=2, units=UNITS)
    before, held = opt.weights_sha256(), opt.ledger.current_bytes()

    def fail():
        with opt.gathered_parameters(modify_rank=0) as params:
            params["embed"][0] = 9
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail()
    assert opt.weights_sha256() == before
    assert opt.ledger.current_bytes() == held


@by_stage
def test_I7_both_names_of_a_tied_parameter_see_an_edit(stage):
    emb = np.zeros((2, 3), F32)
    opt = ZeROOptimizer({"emb": emb, "head": emb}, stage=stage, world_size=2)
    with opt.gathered_parameters(modify_rank=0) as params:
        params["head"][0, 1, 2] = 5
    for name in ("emb", "head"):
        assert opt.weights()[name][1, 2] == 5
    assert np.count_nonzero(opt.weights()["emb"]) == 1


@by_stage
def test_I7_training_goes_on_from_an_edit(stage):
    """The next step is that of a model that had these values from the start."""
    edited = own_params()
    edited["embed"][...] = 0.5
    opts = [
        ZeROOptimizer(params, stage=stage, world_size=2, units=UNITS, precision="bf16")
        for params in (own_params(), edited)
    ]
    with opts[0].gathered_parameters(modify_rank=1) as params:
        params["embed"][1] = 0.5
    for opt in opts:
        opt.backward(own_grads(2))
        opt.step()
    assert opts[0].weights_sha256() == opts[1].weights_sha256()


@pytest.mark.parametrize("precision", list(FORMATS))
def test_I10_bytes_fall_only_when_the_last_view_is_gone(precision):
    """A layer that keeps a weight for its backward pass keeps the whole gathered unit alive."""
    opt = ZeROOptimizer(own_params(), stage=3, world_size=3, precision=precision, units=UNITS)
    unit, kind = opt.units[0], "unsharded" if precision == "fp32" else "workspace"
    views = opt.unshard(unit)
    whole = 36 * 4
    assert opt.ledger.current_bytes(kind) == whole
    kept = views["embed"][0, :1]
    del views
    opt.reshard(unit)
    assert opt.ledger.current_bytes(kind) == whole
    np.testing.assert_array_equal(
        kept[0], FORMATS[precision].widen(FORMATS[precision].round(own_params()["embed"]))[0]
    )
    del kept
    assert opt.ledger.current_bytes("unsharded") == opt.ledger.current_bytes("workspace") == 0


def test_I10_so_it_is_after_a_block_of_gathered_parameters():
    opt = ZeROOptimizer(own_params(), stage=3, world_size=3, units=UNITS)
    with opt.gathered_parameters() as params:
        assert opt.ledger.current_bytes("unsharded") == (36 + 33) * 4
        kept = params["embed"].T
    del params
    assert opt.ledger.current_bytes("unsharded") == 36 * 4
    del kept
    assert opt.ledger.current_bytes("unsharded") == 0
