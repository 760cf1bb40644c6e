"""The planner's lines beside the ledger of real training, byte for byte."""

import numpy as np
import pytest

from zero_nb.theory.own_engine import engine_lines, gpt_activation_bytes, mlp_activation_bytes
from zero_nb.train.engine import Engine
from zero_nb.train.model import DIGITS, GPT, LESSON, MLP, GPTConfig, MLPConfig

SIZES = (1, 2, 4, 8)
STAGES = (0, 1, 2, 3)
MLP_SIZES = (5, 13, 7)


def gpt_batch(config, samples):
    """Tokens and targets for a GPT."""
    rng = np.random.default_rng(0)
    shape = (samples, config.seq_len)
    return rng.integers(0, config.vocab_size, shape), rng.integers(0, config.vocab_size, shape)


def mlp_batch(samples):
    """Inputs and targets for an MLP."""
    rng = np.random.default_rng(0)
    sizes = (MLP_SIZES[0], MLP_SIZES[-1])
    return tuple(rng.normal(size=(samples, size)).astype(np.float32) for size in sizes)


CONFIG = GPTConfig(vocab_size=11, seq_len=5, width=12, heads=3, blocks=2)


def measured(model, batch, **settings):
    """Two steps; the second one's report, and the numels of the flat_params."""
    engine = Engine(model, seed=0, **settings)
    engine.train_step(*batch)
    report = engine.train_step(*batch)
    return report, [unit.layout.numel for unit in engine.optimizer.units]


def lines(report):
    """The ledger's side."""
    held, largest = report.held_bytes, report.largest_bytes
    return {
        **{kind: held[kind] for kind in ("param", "grad", "optim")},
        **{kind: largest[kind] for kind in ("bucket", "unsharded")},
    }


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize(
    "precision", ["fp32", "bf16", "bf16-fp32-grads", "bf16-both-grads", "fp16"]
)
def test_states_buckets_and_gathered_units_equal_the_ledger(stage, world_size, precision):
    report, numels = measured(
        GPT(CONFIG), gpt_batch(CONFIG, 8), stage=stage, world_size=world_size, precision=precision
    )
    assert lines(report) == vars(engine_lines(stage, world_size, numels, precision))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world_size", [1, 4])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_accumulation_holds_float32_gradients(stage, world_size, precision):
    report, numels = measured(
        GPT(CONFIG), gpt_batch(CONFIG, 12), stage=stage, world_size=world_size,
        precision=precision, micro_batches=3,
    )  # fmt: skip
    assert lines(report) == vars(
        engine_lines(stage, world_size, numels, precision, micro_batches=3)
    )


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("world_size", [1, 8])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("bucket_numel", [100, 10**6])
def test_buckets_of_a_size_equal_the_ledger(stage, world_size, precision, double, bucket_numel):
    report, numels = measured(
        GPT(CONFIG), gpt_batch(CONFIG, 8), stage=stage, world_size=world_size,
        precision=precision, reduce_bucket_size=bucket_numel, overlap_comm=double,
    )  # fmt: skip
    predicted = engine_lines(
        stage, world_size, numels, precision, bucket_numel=bucket_numel, double=double
    )
    assert lines(report) == vars(predicted)


@pytest.mark.parametrize("units", ["model", "block", "sublayer"])
@pytest.mark.parametrize("stage", STAGES)
def test_units_of_any_size(units, stage):
    report, numels = measured(
        GPT(CONFIG), gpt_batch(CONFIG, 4), units=units, stage=stage, world_size=4
    )
    assert lines(report) == vars(engine_lines(stage, 4, numels))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_activations_of_the_gpt_equal_the_ledger(stage, world_size, precision):
    report, _ = measured(
        GPT(CONFIG), gpt_batch(CONFIG, 9), stage=stage, world_size=world_size, precision=precision
    )
    samples = -(-9 // world_size)
    wanted = gpt_activation_bytes(samples, 5, width=12, heads=3, blocks=2, vocab=11)
    assert report.largest_bytes["activation"] == wanted


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world_size", SIZES)
def test_activations_and_lines_of_the_mlp_equal_the_ledger(stage, world_size):
    report, numels = measured(
        MLP(MLPConfig(MLP_SIZES)), mlp_batch(8), stage=stage, world_size=world_size
    )
    samples = -(-8 // world_size)
    assert report.largest_bytes["activation"] == mlp_activation_bytes(samples, MLP_SIZES)
    assert lines(report) == vars(engine_lines(stage, world_size, numels))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("config", "world_size", "precision"),
    [(DIGITS, 4, "bf16"), (DIGITS, 8, "fp32"), (LESSON, 2, "bf16"), (LESSON, 8, "bf16")],
    ids=["digits-4", "digits-8", "lesson-2", "lesson-8"],
)
def test_the_models_that_train_here(stage, config, world_size, precision):
    report, numels = measured(
        GPT(config), gpt_batch(config, 8), stage=stage, world_size=world_size, precision=precision
    )
    assert lines(report) == vars(engine_lines(stage, world_size, numels, precision))
    wanted = gpt_activation_bytes(
        8 // world_size, config.seq_len, config.width, config.heads, config.blocks,
        config.vocab_size,
    )  # fmt: skip
    assert report.largest_bytes["activation"] == wanted


@pytest.mark.parametrize("stage", STAGES)
def test_micro_batches_keep_the_activations_of_one(stage):
    report, _ = measured(
        GPT(CONFIG), gpt_batch(CONFIG, 12), stage=stage, world_size=2, micro_batches=3
    )
    wanted = gpt_activation_bytes(2, 5, width=12, heads=3, blocks=2, vocab=11, inputs=6)
    assert report.largest_bytes["activation"] == wanted


@pytest.mark.parametrize("rule", [("sgd", "SGD", {"lr": 0.1}), ("momentum", "SGD", None)])
def test_other_optimizers(rule):
    import zero_nb.train.optim as optim

    name, kind, options = rule
    options = options or {"lr": 0.1, "momentum": 0.9}
    for stage in STAGES:
        report, numels = measured(
            GPT(CONFIG), gpt_batch(CONFIG, 4), stage=stage, world_size=4,
            rule=getattr(optim, kind)(**options),
        )  # fmt: skip
        assert lines(report) == vars(engine_lines(stage, 4, numels, "fp32", name))
