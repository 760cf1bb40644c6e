"""What the training engine of this package holds, predicted from sizes alone.

Written from the layers' equations and from what the stages promise, importing nothing of the
training side: tests lay these numbers beside the ledger's, byte for byte.  Bytes are per rank, of
the fullest rank.  What the engine calls workspace (copies widened to float32, because NumPy has no
16-bit products) is reported there and not planned here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zero_nb.theory.checks import check_count, check_stage
from zero_nb.theory.memory import ModelStateBytes, get_recipe, padded_numel, recipe_state_bytes

__all__ = [
    "EngineLines",
    "engine_lines",
    "gpt_activation_bytes",
    "gpt_kept_bytes",
    "mlp_activation_bytes",
]

# Bytes of a gradient element while it travels.
_WIRE = {"fp32": 4, "bf16": 2, "fp16": 2, "bf16-fp32-grads": 4, "bf16-both-grads": 2}


@dataclass(frozen=True)
class EngineLines:
    """Bytes of one rank by kind: states as held when gradients are complete, others at their most.

    Attributes
    ----------
    param, grad, optim : int
        With padding.
    bucket, unsharded : int
        The largest of the kind within a step.
    """

    param: int
    grad: int
    optim: int
    bucket: int
    unsharded: int


def engine_lines(
    stage: int,
    world_size: int,
    numels: Sequence[int],
    precision: str = "fp32",
    optimizer: str = "adamw",
    *,
    bucket_numel: int | None = None,
    double: bool = False,
    micro_batches: int = 1,
) -> EngineLines:
    """Predict the ledger of one step.

    Parameters
    ----------
    stage : int
        0–3.
    world_size : int
        W.
    numels : sequence of int
        Elements of each flat parameter, unpadded, in the order of the forward pass; one unit is
        gathered at a time.
    precision, optimizer : str
        See `zero_nb.theory.memory.get_recipe`.
    bucket_numel : int, optional
        Elements of a reduce bucket; without it each unit's gradient travels alone.
    double : bool
        Two buckets, one in flight.
    micro_batches : int
        k; gradients of several are added in float32.

    Returns
    -------
    EngineLines

    Notes
    -----
    States: arXiv:1910.02054 Section 5 on the padded sizes.  A gradient that is written in the
    format it travels in counts as a bucket while backward writes it; one that has to be rounded
    first is written in workspace, and its rounded copy is the bucket.
    """
    stage = check_stage(stage)
    world_size = check_count("world_size", world_size, least=1)
    padded = [padded_numel(numel, world_size) for numel in numels]
    recipe = get_recipe(precision, optimizer)
    if micro_batches > 1:
        recipe = replace(recipe, grad_bytes=max(4, recipe.grad_bytes))
    states: ModelStateBytes = recipe_state_bytes(stage, world_size, sum(padded), recipe)
    largest = max(padded, default=0)
    wire = _WIRE[precision]
    if stage >= 2 and bucket_numel is not None:
        bucket = _bucket_peak(padded, world_size, bucket_numel, wire, double)
    elif stage >= 2 or wire == 4 or recipe.grad_bytes > wire:
        bucket = wire * largest
    else:
        bucket = 0  # 16-bit gradients are held as they travel
    unsharded = recipe.param_bytes * largest if stage == 3 else 0
    return EngineLines(states.param, states.grad, states.optim, bucket, unsharded)


def _bucket_peak(
    padded: Sequence[int], world_size: int, bucket_numel: int, wire: int, double: bool
) -> int:
    """Largest sum of bucket buffers and the gradient being written, over a backward pass."""
    size = min(check_count("bucket_numel", bucket_numel, least=1), sum(padded))
    columns = max(1, size // world_size)
    buffer, peak, sent = wire * world_size * columns, 0, 0
    for numel in reversed(padded):
        sent += numel // world_size
        buffers = 2 if double and sent > columns else 1
        writing = 4 * numel if wire == 4 else 0
        peak = max(peak, buffers * buffer + writing)
    return peak


def gpt_activation_bytes(
    samples: int,
    tokens: int,
    width: int,
    heads: int,
    blocks: int,
    vocab: int,
    inputs: int | None = None,
) -> int:
    """Recipe ``zero_nb-fp32``: activations of the GPT when its forward pass ends.

    Parameters
    ----------
    samples : int
        Sequences of one micro-batch on the rank with the most, B.
    tokens : int
        T.
    width, heads, blocks, vocab : int
        D, H, L, V.
    inputs : int, optional
        Sequences of the whole step on that rank, where it has several micro-batches: their token
        numbers stay until the step is over.

    Returns
    -------
    int

    Notes
    -----
    For each token: its number (8 bytes), what the layers keep (`gpt_kept_bytes`) and the V logits,
    whose gradient takes their place.
    """
    kept = gpt_kept_bytes(samples, tokens, width, heads)
    layers = blocks * (kept["attn"] + kept["mlp"]) + kept["head"]
    return (
        8 * tokens * (samples if inputs is None else inputs)
        + layers
        + (4 * samples * tokens * vocab)
    )


def gpt_kept_bytes(samples: int, tokens: int, width: int, heads: int) -> dict[str, int]:
    """Activations that each kind of layer of the GPT keeps for its backward pass.

    Parameters
    ----------
    samples, tokens, width, heads : int
        See `gpt_activation_bytes`.

    Returns
    -------
    dict
        ``embed``, ``attn``, ``mlp`` and ``head`` to bytes.

    Notes
    -----
    For each token in float32: in attention the normalised input, q, k and v, the attended values
    (D + 3D + D), 1/std and the H·T attention weights; in the feed-forward layer the normalised
    input, the value and the slope of GELU (D + 8D) and 1/std; before the head the normalised input
    and 1/std. The embedding keeps the token numbers, which are the batch itself.
    """
    each = 4 * samples * tokens
    return {
        "embed": 0,
        "attn": each * (5 * width + heads * tokens + 1),
        "mlp": each * (9 * width + 1),
        "head": each * (width + 1),
    }


def mlp_activation_bytes(samples: int, sizes: Sequence[int]) -> int:
    """Activations of the MLP when its forward pass ends: its input and every layer's result.

    Parameters
    ----------
    samples : int
        B on the rank with the most.
    sizes : sequence of int
        Widths from input to output.

    Returns
    -------
    int
        All float32.
    """
    return 4 * samples * sum(sizes)
