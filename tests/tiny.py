"""Small models on purpose awkward: nothing divides, and some ranks own padding only."""

import numpy as np

from zero_nb.train.model import GPT, MLP, GPTConfig, MLPConfig

WORLD_SIZES = (1, 2, 3, 4, 8)
STAGES = (0, 1, 2, 3)
PRECISIONS = ("fp32", "bf16")

VOCAB, STEPS = 13, 6


def gpt():
    """16,500 parameters; units of 475, 2 x 7825 and 375, odd and no multiple of 3 (but for two)."""
    return GPT(GPTConfig(vocab_size=VOCAB, seq_len=STEPS, width=25, heads=5, blocks=2))


def gpt_batches(count, size=24, seed=5):
    """Global batches of tokens and the tokens that follow them."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, VOCAB, (count, size, STEPS + 1))
    return [(batch[:, :-1].copy(), batch[:, 1:].copy()) for batch in tokens]


def mlp(*sizes):
    """An MLP; its last unit of 4 elements leaves most of 8 ranks with padding only."""
    return MLP(MLPConfig(sizes or (5, 7, 3, 1)))


def mlp_batches(model, count, size=24, seed=6):
    """Global batches of inputs and targets."""
    rng = np.random.default_rng(seed)
    inputs, outputs = model.config.sizes[0], model.config.sizes[-1]
    return [
        (
            rng.normal(size=(size, inputs)).astype(np.float32),
            rng.normal(size=(size, outputs)).astype(np.float32),
        )
        for _ in range(count)
    ]


SHAPES = {"embed": (5, 7), "scale": (), "bias": (3,), "empty": (0, 4), "head": (2, 3, 5)}
"""A model of one's own: 69 elements, a 0-d parameter and an empty one among them."""

UNITS = {"first": ["embed", "scale"], "second": ["bias", "empty", "head"]}


def own_params(seed=1):
    """Initial parameters of `SHAPES`."""
    rng = np.random.default_rng(seed)
    return {name: np.asarray(rng.normal(size=s), np.float32) for name, s in SHAPES.items()}


def own_grads(world_size, seed=2):
    """One gradient a rank for `SHAPES`; a rank's does not depend on how many there are."""
    drawn = {name: [] for name in SHAPES}
    for rank in range(world_size):
        rng = np.random.default_rng([seed, rank])
        for name, shape in SHAPES.items():
            drawn[name].append(np.asarray(rng.normal(size=shape), np.float32))
    return {name: np.stack(grads) for name, grads in drawn.items()}


def dirty_memory(monkeypatch):
    """Let NumPy hand out memory that is full of NaN, as it may after any other use of it."""
    empty, empty_like = np.empty, np.empty_like

    def soiled(array):
        # All bits of a bfloat16 set are a NaN too.
        array.fill(np.nan if array.dtype.kind == "f" else np.array(-1).astype(array.dtype))
        return array

    def dirty(*args, **kwargs):
        return soiled(empty(*args, **kwargs))

    def dirty_like(*args, **kwargs):
        return soiled(empty_like(*args, **kwargs))

    monkeypatch.setattr(np, "empty", dirty)
    monkeypatch.setattr(np, "empty_like", dirty_like)


def padding_of(array, unit, world):
    """Where an (R, F) or (R, S) array of a unit has padding: a mask of its shape."""
    full = np.zeros((world.size, unit.layout.padded_numel), bool)
    full[:, unit.layout.numel :] = True
    return full if array.shape == full.shape else world.own_shard(full).copy()
