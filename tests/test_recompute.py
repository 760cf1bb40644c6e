"""Recomputed layers: the same bits, fewer bytes, one forward pass more."""

import numpy as np
import pytest

from zero_nb.config import UsageError
from zero_nb.train.model import GPT, GPTConfig
from zero_nb.train.recompute import run_passes

CONFIG = GPTConfig(vocab_size=7, seq_len=6, width=8, heads=2, blocks=3)
MODEL = GPT(CONFIG)
RANKS, SAMPLES = 2, 3
INNER = [layer.name for layer in MODEL.layers[1:-1]]
TOKENS = SAMPLES * CONFIG.seq_len


def arrays():
    """Parameters, inputs and targets, each an array of its own."""
    rng, shape = np.random.default_rng(0), (RANKS, SAMPLES, CONFIG.seq_len)
    inputs, targets = (rng.integers(0, CONFIG.vocab_size, shape) for _ in range(2))
    params = {name: np.stack([value] * RANKS) for name, value in MODEL.init(0).items()}
    return params, inputs, targets


def run(recompute=()):
    """One forward and backward pass on fresh arrays."""
    return run_passes(MODEL, *arrays(), recompute)


@pytest.mark.parametrize("names", [INNER, INNER[::2], INNER[-1:], ["embed"], ["head"]], ids=str)
def test_gradients_have_the_same_bits(names):
    kept, again = run(), run(names)
    assert again.loss == kept.loss
    for name, grad in kept.grads.items():
        assert np.array_equal(again.grads[name], grad), name
    assert again.forwards == kept.forwards + len(names)


def test_the_peak_is_what_layers_keep():
    # For each token of a rank in float32, see the docstrings of the layers.
    attn, mlp = 5 * 8 + 2 * 6 + 1, 9 * 8 + 1
    tokens = 8 * TOKENS  # the batch itself, int64
    assert run().peak_bytes == tokens + 4 * TOKENS * (3 * (attn + mlp) + 8 + 1)


def test_recomputed_layers_keep_their_inputs_and_one_cache_at_a_time():
    # Six inputs of width 8; the largest cache, a feed-forward layer's, comes on top of them.
    at_turn = 4 * TOKENS * (6 * 8 + 9 * 8 + 1)
    assert run(INNER).peak_bytes == 8 * TOKENS + at_turn


def test_nothing_is_left_but_the_batch():
    for names in ((), INNER):
        assert run(names).activation_bytes[-1] == 8 * TOKENS


def test_the_gradients_are_those_of_the_model():
    params, inputs, targets = arrays()
    y, caches = MODEL.forward(params, inputs)
    _, dy = MODEL.loss(y, targets, MODEL.count(targets))
    grads = {name: np.empty_like(params[name]) for name in MODEL.shapes}
    MODEL.backward(params, caches, dy, grads)
    for name, grad in run(INNER).grads.items():
        assert np.array_equal(grad, grads[name]), name


def test_an_unknown_layer_is_refused():
    with pytest.raises(
        UsageError, match=r"no layer layers\.9\.mlp; layers are embed, layers\.0\.attn"
    ):
        run(["layers.9.mlp"])
