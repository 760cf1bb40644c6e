"""A GPT whose head is its embedding: one parameter, two names, two layers that use it.

Its unit is needed by the first and by the last layer, so it stays gathered from the first forward
to the last backward use, and its gradient is what both layers add.
"""

import math

import numpy as np
import pytest

import naive_training as naive
from tiny import PRECISIONS, STAGES, STEPS, VOCAB, gpt_batches
from tiny_task import PRESET, Samples
from zero_nb.compare import Task, train_stage
from zero_nb.core.precision import BFLOAT16, FLOAT32
from zero_nb.theory import memory
from zero_nb.theory.traffic import step_traffic
from zero_nb.train.engine import Engine
from zero_nb.train.model import GPT, GPTConfig
from zero_nb.train.optim import SGD, AdamW
from zero_nb.train.sampling import draw_tokens

FORMATS = {"fp32": FLOAT32, "bf16": BFLOAT16}
SHARED, ALIAS = "tok.weight", "head.weight"
APART = (
    ("embed", "layers.0.attn"),
    ("layers.0.mlp", "layers.1.attn", "layers.1.mlp"),
    ("head",),
)
"""The head in another unit than the embedding: its weight is in the embedding's all the same."""
UNITS = {"model": "model", "block": "block", "sublayer": "sublayer", "apart": APART}

by_stage = pytest.mark.parametrize("stage", STAGES)
by_precision = pytest.mark.parametrize("precision", PRECISIONS)
by_units = pytest.mark.parametrize("units", UNITS.values(), ids=UNITS)


def gpt(tied=True):
    """The small GPT of the other tests, tied: 16,175 parameters and not 16,500."""
    return GPT(GPTConfig(vocab_size=VOCAB, seq_len=STEPS, width=25, heads=5, blocks=2, tied=tied))


def trained(batches, **settings):
    """An engine after some steps, and its reports."""
    engine = Engine(gpt(), **({"rule": AdamW(lr=0.01)} | settings))
    return engine, [engine.train_step(*batch) for batch in batches]


def twin(batches, world_size, fmt, update):
    """Train on computers that each hold everything, and add the gradients of both uses."""
    model = gpt()
    weights = {n: array.copy() for n, array in model.init(0).items() if n != ALIAS}
    losses = []
    for inputs, targets in batches:
        used = {n: naive.rounded(array, fmt) for n, array in weights.items()}
        used[ALIAS] = used[SHARED]
        parts = zip(np.split(inputs, world_size), np.split(targets, world_size), strict=True)
        loss, rows = 0.0, []
        for x, t in parts:
            share, grads = naive.gradient(model, used, x, t, model.count(targets))
            grads[SHARED] = grads[SHARED] + grads.pop(ALIAS)
            rows.append(grads)
            loss += share
        losses.append(float(loss))
        summed = {
            n: naive.to_float32(
                naive.sum_over_ranks([naive.stored_as(grads[n], fmt) for grads in rows], fmt), fmt
            )
            for n in weights
        }
        update(weights, summed)
    return weights, losses


# --- the model -----------------------------------------------------------------------------------


def test_a_tied_model_has_its_weight_once():
    model, params = gpt(), gpt().init(0)
    assert model.numel == gpt(tied=False).numel - VOCAB * 25 == 16_175
    assert model.tied == {ALIAS: SHARED}
    assert params[ALIAS] is params[SHARED]
    assert sum(array.size for n, array in params.items() if n != ALIAS) == model.numel
    assert dict(model.blocks)["root"] == ("embed", "head")


@pytest.mark.parametrize("steps", [STEPS, STEPS - 2])
def test_the_gradient_of_the_shared_weight_is_the_slope_of_the_loss(steps):
    """Finite differences in float64: both uses move together, and their gradients add up."""
    model, rng = gpt(), np.random.default_rng(2)
    params = {n: 0.5 * rng.normal(size=(1, *s)) for n, s in model.shapes.items()}
    x, t = rng.integers(0, VOCAB, (2, 1, 3, steps))
    count = model.count(t)

    def loss(shared):
        y, _ = model.forward(params | {SHARED: shared, ALIAS: shared}, x)
        return float(model.loss(y, t, count)[0][0])

    shared = params[SHARED]
    grads = {n: np.empty_like(array) for n, array in params.items()}
    y, caches = model.forward(params | {ALIAS: shared}, x)
    _, dy = model.loss(y, t, count)
    model.backward(params | {ALIAS: shared}, caches, dy, grads)
    both = grads[SHARED] + grads[ALIAS]
    assert np.abs(grads[SHARED]).max() > 1e-4  # neither use is small beside the other
    assert np.abs(grads[ALIAS]).max() > 1e-4
    h = 1e-5
    directions = [rng.normal(size=shared.shape) for _ in range(4)]
    for at in rng.choice(shared.size, 12, replace=False):
        single = np.zeros_like(shared)
        single.reshape(-1)[at] = 1
        directions.append(single)
    for direction in directions:
        slope = (loss(shared + h * direction) - loss(shared - h * direction)) / (2 * h)
        # The difference is off by h^2 of third derivatives and by 1e-16 / h of rounding.
        assert float((both * direction).sum()) == pytest.approx(slope, rel=1e-6, abs=1e-9)


@by_stage
@by_units
def test_the_engine_reduces_the_sum_of_both_gradients(stage, units):
    """Beside float64 through the model: 2e-6 of the largest element, as for any float32 sum."""
    ((inputs, targets),) = gpt_batches(1, size=6)
    engine = Engine(gpt(), stage=stage, world_size=3, units=units)
    engine.forward_backward(inputs, targets)
    model = engine.model
    params = {n: array[None].astype(np.float64) for n, array in model.init(0).items()}
    grads = {n: np.empty_like(array) for n, array in params.items()}
    y, caches = model.forward(params, inputs[None])
    _, dy = model.loss(y, targets[None], model.count(targets))
    model.backward(params, caches, dy, grads)
    want = (grads[SHARED] + grads[ALIAS])[0]
    got = engine.optimizer.gradients()
    assert ALIAS not in got
    np.testing.assert_allclose(got[SHARED], want, rtol=0, atol=2e-6 * np.abs(want).max())
    assert np.abs(want - grads[ALIAS][0]).max() > 1e-3 * np.abs(want).max()


# --- the same bits -------------------------------------------------------------------------------


@by_precision
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_every_stage_and_unit_gives_the_weights_of_ranks_that_hold_everything(
    world_size, precision
):
    batches = gpt_batches(3)
    weights, losses = twin(batches, world_size, FORMATS[precision], naive.NaiveAdam(lr=0.01))
    for stage in STAGES:
        for name, units in UNITS.items():
            engine, reports = trained(
                batches, stage=stage, world_size=world_size, precision=precision, units=units
            )
            assert [report.loss for report in reports] == losses, (stage, name)
            got = engine.optimizer.weights()
            assert got[ALIAS] is got[SHARED]
            for parameter, array in weights.items():
                assert got[parameter].tobytes() == array.tobytes(), (stage, name, parameter)


@pytest.mark.parametrize("settings", [{"micro_batches": 3}, {"reduce_bucket_size": 900}])
def test_ties_stand_micro_batches_and_buckets(settings):
    """Stages 0 = 1 and 2 = 3; with buckets all four."""
    runs = [
        trained(gpt_batches(2), stage=stage, world_size=3, precision="bf16", **settings)
        for stage in STAGES
    ]
    hashes = [engine.optimizer.weights_sha256() for engine, _ in runs]
    assert hashes[0] == hashes[1]
    assert hashes[2] == hashes[3]
    if "micro_batches" not in settings:
        assert len(set(hashes)) == 1
    no_sync, _ = trained(
        gpt_batches(2), stage=3, world_size=3, precision="bf16", **settings,
        reduce_every_micro_batch=False,
    )  # fmt: skip
    assert no_sync.optimizer.weights_sha256() == hashes[0]


@by_stage
def test_both_names_stay_one_parameter_on_every_rank(stage):
    engine, _ = trained(gpt_batches(2), stage=stage, world_size=4, precision="bf16")
    with engine.optimizer.gathered_parameters() as used:
        assert np.shares_memory(used[ALIAS], used[SHARED])
        assert len({used[SHARED][rank].tobytes() for rank in range(4)}) == 1
    assert engine.optimizer.partition_of(ALIAS, 2) == engine.optimizer.partition_of(SHARED, 2)
    # It was trained, by a gradient that the head alone, or the embedding alone, does not have.
    assert np.all(engine.optimizer.weights()[SHARED] != engine.model.init(0)[SHARED])


@by_stage
def test_the_norm_counts_the_shared_gradient_once(stage):
    (batch,) = gpt_batches(1)
    engine = Engine(gpt(), stage=stage, world_size=3, max_grad_norm=1e-3)
    engine.forward_backward(*batch)
    grads = engine.optimizer.gradients()
    want = math.sqrt(sum(float(np.sum(np.square(g, dtype=np.float64))) for g in grads.values()))
    assert engine.optimizer.step().grad_norm == pytest.approx(want, rel=1e-6)


@by_stage
def test_freezing_either_name_freezes_both(stage):
    for name in (SHARED, ALIAS):
        engine, _ = trained(
            gpt_batches(2), stage=stage, world_size=2, frozen=(name,), rule=SGD(lr=0.1)
        )
        before, after = engine.model.init(0), engine.optimizer.weights()
        assert [n for n in before if np.array_equal(before[n], after[n])] == [SHARED, ALIAS]


def test_a_tied_model_learns_and_draws():
    """Twelve sentences by heart, with 2 % of the parameters fewer."""
    ((inputs, targets),) = gpt_batches(1, size=12)
    engine, reports = trained([(inputs, targets)] * 60, stage=3, world_size=3, precision="bf16")
    assert reports[-1].loss < 1.0
    with engine.optimizer.gathered_parameters() as params:
        drawn = draw_tokens(engine.model, params, inputs[:1, :1], STEPS, temperature=1e-3)
    assert drawn.shape == (1, STEPS)


# --- bytes and elements --------------------------------------------------------------------------


@by_units
@by_precision
@by_stage
def test_held_bytes_count_the_shared_weight_once(stage, precision, units):
    engine, (report,) = trained(
        gpt_batches(1), stage=stage, world_size=3, precision=precision, units=units
    )
    numels = [unit.layout.numel for unit in engine.optimizer.units]
    assert sum(numels) == engine.optimizer.numel == 16_175
    formula = memory.model_state_bytes(stage, 3, sum(numels), precision).as_dict()
    padding = memory.padding_bytes(stage, 3, numels, precision).as_dict()
    assert report.held_bytes == {kind: formula[kind] + padding[kind] for kind in formula}


@by_units
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_the_root_is_gathered_once_where_others_are_twice(units, micro_batches):
    """2Ψ for the unit with the shared weight, 3Ψ for the others: it stays over the turn."""
    engine, (report,) = trained(
        gpt_batches(1), stage=3, world_size=3, units=units, micro_batches=micro_batches
    )
    opt = engine.optimizer
    root = next(unit for unit in opt.units if SHARED in unit.layout.names)
    padded = {unit.name: unit.layout.padded_numel for unit in opt.units}
    sent = dict.fromkeys(padded, 0)
    for transfer in engine.world.log.transfers:
        if transfer.purpose in ("param", "grad"):
            sent[transfer.label] += transfer.elements_sent
    each = {name: (2 if name == root.name else 3) for name in padded}
    assert sent == {n: micro_batches * each[n] * padded[n] * 2 // 3 for n in padded}
    theory = step_traffic(
        3, 3, [unit.layout.numel for unit in opt.units], micro_batches=micro_batches,
        gathers=[1 if unit is root else 2 for unit in opt.units],
    )  # fmt: skip
    assert report.elements_sent == theory.elements == sum(sent.values())


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_other_stages_send_2_for_the_root_as_for_all(stage):
    engine, (report,) = trained(gpt_batches(1), stage=stage, world_size=3)
    numels = [unit.layout.numel for unit in engine.optimizer.units]
    assert report.elements_sent == step_traffic(stage, 3, numels).elements


@by_stage
def test_a_comparison_predicts_what_is_sent(stage):
    task = Task(Samples(gpt_batches), gpt(), PRESET)
    run, _ = train_stage(stage, world_size=3, steps=1, task=task, micro_batches=2)
    assert run.elements_sent == run.formula_elements


def test_the_root_lies_gathered_beside_the_unit_that_computes():
    engine, (report,) = trained(gpt_batches(1), stage=3, world_size=3)
    padded = [unit.layout.padded_numel for unit in engine.optimizer.units]
    root, *blocks = padded
    assert [unit.name for unit in engine.optimizer.units] == ["root", "layers.0", "layers.1"]
    assert report.largest_bytes["unsharded"] == 4 * (root + max(blocks))
    assert report.largest_bytes["bucket"] == 4 * (root + max(blocks))  # its gradient, too
    assert engine.ledger.current_bytes("unsharded") == engine.ledger.current_bytes("bucket") == 0


@by_stage
@by_units
def test_evaluation_gives_back_what_it_gathered(stage, units):
    (batch,) = gpt_batches(1, size=7)
    engine, _ = trained([batch], stage=stage, world_size=3, units=units)
    held = engine.ledger.current_bytes()
    loss = engine.evaluate(*batch)
    assert engine.ledger.current_bytes() == held
    assert engine.train_step(*batch).loss == loss
