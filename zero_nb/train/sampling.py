"""Drawing from a trained GPT, one token after the other.

Shapes: R ranks that hold the parameters, n samples, C samples at a time on a rank, T positions,
H heads, E width of a head, V vocabulary.

[Note: the same drawings on any number of ranks]
Sample i takes its random numbers from a generator seeded with (seed, i) and is computed in chunk
i // C, always of exactly C samples. Ranks differ only in which chunks they draw. So what is drawn
depends on the parameters and the seed, to the bit, and not on the number of ranks, nor on how
many samples are asked for. (Sharing n samples evenly over ranks would give matrix products of
other shapes, hence other last bits, and once in a while another token.)
"""

import math
from dataclasses import dataclass

import numpy as np

from zero_nb.config import UsageError
from zero_nb.train.model import Attention

__all__ = ["CHUNK", "Drawing", "draw_digits", "draw_text", "draw_tokens"]

CHUNK = 32
"""C: samples a rank draws at a time. Part of what is drawn; see the note above."""


@dataclass(frozen=True)
class Drawing:
    """Digits drawn by a model.

    Attributes
    ----------
    images : ndarray of int64, shape (n, side, side)
        Grey levels 0 … 16.
    labels : ndarray of int64, shape (n,)
        The classes that were asked for.
    """

    images: np.ndarray
    labels: np.ndarray


def draw_digits(model, params, digits, per_class=50, *, seed=0, temperature=1.0):
    """Draw the same number of digits of each class.

    Parameters
    ----------
    model : GPT
    params : dict of str to ndarray
        All parameters, each ``(R, *shape)`` with equal rows; the R ranks share the work.
    digits : Digits
        What the model has learned from.
    per_class : int
    seed : int
    temperature : float
        Logits are divided by it: below 1 the likelier tokens are preferred.

    Returns
    -------
    Drawing
        In order of class; ``10 * per_class`` digits.

    Raises
    ------
    UsageError
        If per_class or temperature is not positive.
    """
    if per_class < 1:
        raise UsageError(f"per_class must be at least 1 digit, got {per_class}")
    labels = np.repeat(np.arange(digits.CLASSES, dtype=np.int64), per_class)
    tokens = draw_tokens(
        model,
        params,
        labels[:, None],
        digits.seq_len,
        allowed=range(digits.CLASSES, digits.vocab_size),
        seed=seed,
        temperature=temperature,
    )
    return Drawing(digits.decode(tokens), labels)


def draw_text(model, params, count=1, *, prompt=b"\n", length=None, seed=0, temperature=1.0):
    """Continue a piece of text.

    Parameters
    ----------
    model : GPT
        With a vocabulary of 256 bytes.
    params : dict of str to ndarray
        All parameters, each ``(R, *shape)`` with equal rows.
    count : int
        How many continuations.
    prompt : bytes
        At least one byte.
    length : int, optional
        Bytes to add; as many as the model has positions for by default.
    seed, temperature
        As in `draw_digits`.

    Returns
    -------
    list of bytes
        Without the prompt.

    Raises
    ------
    UsageError
        If count, length or temperature is not positive, the prompt is empty, or prompt and
        length together exceed the model's positions.
    """
    if count < 1 or not prompt:
        raise UsageError(f"need a count of at least 1 and a prompt, got {count}, {prompt!r}")
    length = model.config.seq_len - len(prompt) + 1 if length is None else length
    start = np.tile(np.frombuffer(prompt, np.uint8).astype(np.int64), (count, 1))
    tokens = draw_tokens(model, params, start, length, seed=seed, temperature=temperature)
    return [bytes(row) for row in tokens.astype(np.uint8)]


def draw_tokens(model, params, start, length, *, allowed=None, seed=0, temperature=1.0):
    """Continue token sequences.

    Parameters
    ----------
    model : GPT
    params : dict of str to ndarray
        All parameters, each ``(R, *shape)`` with equal rows.
    start : ndarray of int, shape (n, P)
        The first P tokens of each sequence, P >= 1.
    length : int
        Tokens to add to each.
    allowed : range, optional
        The tokens that may be drawn, with step 1; all by default.
    seed, temperature
        As in `draw_digits`.

    Returns
    -------
    ndarray of int64, shape (n, length)

    Raises
    ------
    UsageError
        If length or temperature is not positive, or there are too few positions in the model.
    """
    start = np.asarray(start, dtype=np.int64)
    count, given = start.shape
    _check_request(model, given, length, temperature)
    low, high = (0, model.config.vocab_size) if allowed is None else (allowed.start, allowed.stop)
    ranks = len(next(iter(params.values())))
    chunks = -(-count // CHUNK)
    rounds = -(-chunks // ranks)
    # Chunks that nobody asked for fill up the last round; they draw on and are thrown away.
    first = np.zeros((rounds * ranks * CHUNK, given), np.int64)
    first[:count] = start
    chance = np.zeros((len(first), length))
    for i in range(count):
        chance[i] = np.random.default_rng([seed, i]).random(length)
    drawn = [
        _draw(model, params, first_part, chance_part, low, high, temperature)
        for first_part, chance_part in zip(
            first.reshape(rounds, ranks, CHUNK, given),
            chance.reshape(rounds, ranks, CHUNK, length),
            strict=True,
        )
    ]
    return np.concatenate([part.reshape(-1, length) for part in drawn] or [first[:, :0]])[:count]


def _check_request(model, given, length, temperature):
    """Raise UsageError if nothing can be drawn that way."""
    if given < 1 or length < 1:
        raise UsageError(
            f"need at least 1 token to start with and 1 to draw, got {given}, {length}"
        )
    if not (math.isfinite(temperature) and temperature > 0):
        raise UsageError(f"temperature must be a positive number, got {temperature}")
    positions = model.config.seq_len
    if given + length - 1 > positions:
        raise UsageError(
            f"{given} tokens to start with and {length} to draw need {given + length - 1} "
            f"positions, the model has {positions}; draw fewer"
        )


def _draw(model, params, start, chance, low, high, temperature):
    """One round: (R, C, P) first tokens and (R, C, length) random numbers to (R, C, length)."""
    ranks, samples, given = start.shape
    length = chance.shape[-1]
    memory = _empty_memory(model, params, ranks, samples, given + length - 1)
    drawn = np.empty(chance.shape, np.int64)
    token = start[:, :, :1]
    for position in range(given + length - 1):
        logits = step(model, params, token, memory, position)
        following = position + 1
        if following < given:
            token = start[:, :, following : following + 1]
            continue
        at = following - given
        picked = low + _pick(logits[:, :, 0, low:high], chance[:, :, at], temperature)
        drawn[:, :, at] = picked
        token = picked[:, :, None]
    return drawn


def _pick(logits, chance, temperature):
    """Index of the entry in whose share of [0, 1) the random number falls; float64."""
    scaled = logits.astype(np.float64) / temperature
    scaled -= scaled.max(axis=-1, keepdims=True)
    up_to = np.cumsum(np.exp(scaled), axis=-1)
    # chance < 1, but chance * total may round up to the total: the last entry then.
    below = up_to[..., :-1] <= chance[..., None] * up_to[..., -1:]
    return below.sum(axis=-1)


def _empty_memory(model, params, ranks, samples, steps):
    """Room for the keys and values of every attention layer, each (R, C, H, T, E)."""
    config = model.config
    shape = (ranks, samples, config.heads, steps, config.width // config.heads)
    dtype = params["tok.weight"].dtype
    return {
        layer.name: (np.empty(shape, dtype), np.empty(shape, dtype))
        for layer in model.layers
        if isinstance(layer, Attention)
    }


def step(model, params, token, memory, position):
    """Return the logits for one more token of each sequence.

    Parameters
    ----------
    model : GPT
    params : dict of str to ndarray
        All parameters, each ``(R, *shape)``.
    token : ndarray of int64, shape (R, C, 1)
        The token at `position`.
    memory : dict of str to (ndarray, ndarray)
        Keys and values of each attention layer, ``(R, C, H, T, E)``, filled before `position`;
        this fills them at `position`.
    position : int

    Returns
    -------
    ndarray, shape (R, C, 1, V)
    """
    embedding, *rest = model.layers
    x = embedding.at(params, token, position)
    for layer in rest:
        if isinstance(layer, Attention):
            x = layer.step(params, x, *memory[layer.name], position)
        else:
            x, _ = layer.forward(params, x)
    return x
