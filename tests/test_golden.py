"""The same training as PyTorch's single process, from its initial parameters and batches.

Tolerance 3e-6 for losses and final weights after 20 steps: the same models in float64 lie at most
1e-6 from PyTorch's float32 (so PyTorch's own rounding is that large), ours is of the same size, and
the order of additions differs. The K part of ``qkv.bias`` is left out under AdamW: softmax does not
see a shift of all keys, its true gradient is 0, and AdamW blows rounding noise up to whole steps of
lr.
"""

import functools

import numpy as np
import pytest

import golden
from zero_nb.train.engine import Engine
from zero_nb.train.optim import SGD, AdamW

RULES = {"adamw": AdamW(**golden.ADAMW), "sgd": SGD(**golden.SGD)}
TOLERANCE = 3e-6


@functools.cache
def trained(model, rule, variant, stage, world_size, units):
    """Train on the golden batches; return losses, norms and final weights."""
    engine = Engine(
        golden.MODELS[model],
        params=golden.init(model),
        units=units,
        stage=stage,
        world_size=world_size,
        rule=RULES[rule],
        max_grad_norm=golden.MAX_GRAD_NORM if variant == "clip" else None,
    )
    reports = [engine.train_step(*golden.batch(model, step)) for step in range(golden.STEPS)]
    losses = [report.loss for report in reports]
    norms = [report.result.grad_norm for report in reports]
    return losses, norms, engine.optimizer.weights()


def distance(weights, final, rule):
    """Largest difference of a weight, and the parameter it is in."""
    keep = golden.without_key_bias if rule == "adamw" else lambda name, array: array
    return max(
        (float(np.abs(keep(name, weights[name]) - keep(name, array)).max()), name)
        for name, array in final.items()
    )


cases = pytest.mark.parametrize(
    ("model", "rule"), [(m, r) for m in golden.MODELS for r in golden.OPTIMIZERS]
)


@cases
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_losses_and_final_weights_are_pytorchs(model, rule, stage, world_size):
    losses, _, weights = trained(model, rule, "base", stage, world_size, "block")
    wanted = golden.run(model, rule)
    assert np.abs(np.subtract(losses, wanted.loss)).max() <= TOLERANCE
    far, name = distance(weights, golden.final(model, rule), rule)
    assert far <= TOLERANCE, name


@cases
@pytest.mark.parametrize(("stage", "world_size"), [(0, 2), (1, 4), (2, 1), (3, 4)])
def test_clipped_training_is_pytorchs_with_its_global_norms(model, rule, stage, world_size):
    losses, norms, weights = trained(model, rule, "clip", stage, world_size, "sublayer")
    wanted = golden.run(model, rule, "clip")
    assert np.abs(np.subtract(losses, wanted.loss)).max() <= TOLERANCE
    np.testing.assert_allclose(norms, wanted.grad_norm, rtol=1e-5)
    # PyTorch multiplies by 1 / (norm + 1e-6), not 1 / norm: a millionth of the gradient.
    far, name = distance(weights, golden.final(model, rule, "clip"), rule)
    assert far <= TOLERANCE, name


def test_clipping_was_needed_and_matters():
    """The cases above would pass without clipping if no norm were above the bound."""
    for model in golden.MODELS:
        assert max(golden.run(model, "sgd", "clip").grad_norm) > golden.MAX_GRAD_NORM
        clipped, base = golden.final(model, "sgd", "clip"), golden.final(model, "sgd")
        assert distance(clipped, base, "sgd")[0] > 10 * TOLERANCE


def test_the_key_bias_alone_is_what_adamw_cannot_reproduce():
    """Leaving it out hides no other difference: q and v are compared, and SGD compares all."""
    _, _, weights = trained("gpt", "adamw", "base", 0, 1, "block")
    final = golden.final("gpt", "adamw")
    for name in final:
        kept = golden.without_key_bias(name, final[name])
        assert kept.size == final[name].size * (2 / 3 if name.endswith("qkv.bias") else 1)
    assert distance(weights, final, "adamw")[0] <= TOLERANCE
    _, _, weights = trained("gpt", "sgd", "base", 0, 1, "block")
    assert distance(weights, golden.final("gpt", "sgd"), "sgd")[0] <= TOLERANCE
