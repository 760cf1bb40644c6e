"""A GPT and an MLP as lists of layers with explicit forward and backward passes.

Shapes: R ranks in this call, B sequences a rank, T tokens, N = B * T rows, D width, H heads,
E = D // H width of a head, V vocabulary.

Every array has the rank axis first and nothing here mixes ranks: row r of a result depends on row
r of the arguments only. See [Note: same bits] below. Layers own no arrays. Parameters come in as a
dict of views, gradients go out through another dict of views, so that whoever holds the memory
(a stage, a test, a notebook) decides where it lies and how long.

[Note: same bits]
A rank's numbers are the same bits whether it is computed alone (R = 1), in a stack of R ranks, or
in any chunk of ranks. ``np.matmul`` calls one matrix product per rank, with shapes that do not
depend on R. ``einsum`` and products whose rows are merged over ranks would choose other block
sizes for other R, hence other orders of addition. Sums run over axes of one rank only. BLAS must
use one thread: with two, most products have other last bits.

[Note: what backward needs]
``forward`` returns its result and a cache: the arrays that ``backward`` will read, and nothing
else. Each layer says in its docstring how many elements that is per rank. What can be had again
for one cheap pass (the scaled output of a layer norm) is not kept.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import MappingProxyType
from typing import final

import numpy as np

from zero_nb.config import UsageError

__all__ = [
    "DIGITS",
    "DIGITS_TRAINING",
    "GPT",
    "LESSON",
    "LESSON_TRAINING",
    "MLP",
    "Attention",
    "Embedding",
    "FeedForward",
    "GPTConfig",
    "Head",
    "Layer",
    "Linear",
    "MLPConfig",
    "Model",
    "TrainingPreset",
]

LAYER_NORM_EPS = 1e-5
"""Added to the variance in every layer norm, as in PyTorch."""

_GELU_SCALE = math.sqrt(2 / math.pi)
_GELU_CUBIC = 0.044715


# ---------------------------------------------------------------------------------------------
# What a layer and a model are
# ---------------------------------------------------------------------------------------------


class Layer(ABC):
    """A named piece of a model with a forward and a backward pass.

    Attributes
    ----------
    name : str
        Unique in its model, for example ``"layers.0.attn"``.
    shapes : dict of str to tuple of int
        Full parameter name to shape (no rank axis), in the model's parameter order. The weight of
        a linear map is ``(out, in)``, as in PyTorch.
    """

    name: str
    shapes: dict[str, tuple[int, ...]]

    @abstractmethod
    def forward(self, params, x):
        """Compute the layer.

        Parameters
        ----------
        params : dict of str to ndarray
            At least this layer's parameters, each ``(R, *shape)``; views with any stride over the
            rank axis are fine.
        x : ndarray
            ``(R, B, ...)``, contiguous. Never written to.

        Returns
        -------
        y : ndarray
            ``(R, B, ...)``, a new array in the dtype of the parameters.
        cache : tuple of ndarray
            What `backward` needs; see [Note: what backward needs].
        """

    @abstractmethod
    def backward(self, params, cache, dy, grads):
        """Propagate a gradient.

        Parameters
        ----------
        params, cache
            As in, and from, `forward`.
        dy : ndarray
            Gradient of the loss with respect to `forward`'s result. It may be overwritten.
        grads : dict of str to ndarray
            At least this layer's parameters, each a writable ``(R, *shape)``. Written, not added
            to.

        Returns
        -------
        dx : ndarray or None
            Gradient with respect to `forward`'s input; None for the first layer of a model.
        """


class Model(ABC):
    """A list of layers, applied one after the other, and a loss.

    Attributes
    ----------
    layers : tuple of Layer
    blocks : tuple of (str, tuple of str)
        The layers grouped as a learner would: unit name and the names of its layers.
    tied : dict of str to str
        Second names of parameters that two layers share; `init` gives one array for both.
    """

    layers: tuple[Layer, ...]
    blocks: tuple[tuple[str, tuple[str, ...]], ...]
    tied: dict[str, str] = MappingProxyType({})

    @property
    def shapes(self):
        """Every parameter's shape, in parameter order (dict of str to tuple of int)."""
        return {name: shape for layer in self.layers for name, shape in layer.shapes.items()}

    @property
    def numel(self):
        """The number of parameters, Ψ (int)."""
        return sum(math.prod(shape) for name, shape in self.shapes.items() if name not in self.tied)

    def forward(self, params, x):
        """Apply all layers.

        Parameters
        ----------
        params : dict of str to ndarray
            All parameters, each ``(R, *shape)``.
        x : ndarray
            Input of the first layer, ``(R, B, ...)``.

        Returns
        -------
        y : ndarray
            Output of the last layer.
        caches : list of tuple
            One cache a layer, for `backward`.
        """
        caches = []
        for layer in self.layers:
            x, cache = layer.forward(params, x)
            caches.append(cache)
        return x, caches

    def backward(self, params, caches, dy, grads):
        """Apply all layers' `Layer.backward`, last layer first; fills `grads`."""
        for layer, cache in zip(reversed(self.layers), reversed(caches), strict=True):
            dy = layer.backward(params, cache, dy, grads)

    @abstractmethod
    def init(self, seed):
        """Draw initial parameters.

        Parameters
        ----------
        seed : int
            Seed of ``numpy.random.default_rng``.

        Returns
        -------
        dict of str to ndarray
            float32, no rank axis, in parameter order. The same seed gives the same bits.
        """

    @abstractmethod
    def count(self, targets):
        """Return how many terms of the mean `targets` stands for (int)."""

    @abstractmethod
    def loss(self, y, targets, global_count):
        """Compute each rank's share of the loss, and its gradient.

        The mean is taken here and nowhere else: each rank divides by the number of terms on *all*
        ranks, so collectives only ever sum.

        Parameters
        ----------
        y : ndarray
            Output of the last layer. Overwritten: the gradient takes its place.
        targets : ndarray
            With the rank axis first.
        global_count : int
            Sum of `count` over all ranks and micro-batches of the step.

        Returns
        -------
        loss_R : ndarray of float64, shape (R,)
            Sum of the rank's own terms over `global_count`; the shares add up to the loss.
        dy : ndarray
            Gradient of the loss with respect to `y`, in the memory of `y`.
        """


# ---------------------------------------------------------------------------------------------
# Pieces shared by the layers
# ---------------------------------------------------------------------------------------------


def _rows(x):
    """View (R, B, ..., K) as (R, N, K), one row a token."""
    return x.reshape(x.shape[0], -1, x.shape[-1])


def _linear(x_RNK, weight, bias=None):
    """Return x W^T + b, one product per rank."""
    y = np.matmul(x_RNK, weight.transpose(0, 2, 1))
    if bias is not None:
        y += bias[:, None, :]
    return y


def _linear_backward(x_RNK, weight, dy_RNM, dweight, dbias=None, input_grad=True):
    """Write the gradients of weight and bias; return that of x, if wanted."""
    np.matmul(dy_RNM.transpose(0, 2, 1), x_RNK, out=dweight)
    if dbias is not None:
        np.sum(dy_RNM, axis=1, out=dbias)
    return np.matmul(dy_RNM, weight) if input_grad else None


def _affine(xhat_RND, weight, bias):
    """Return the output of a layer norm from its normalised input."""
    y = xhat_RND * weight[:, None, :]
    y += bias[:, None, :]
    return y


def _normalize(x_RND):
    """Return (x - mean) / std over the last axis, and 1 / std as (R, N, 1)."""
    xhat = x_RND - np.mean(x_RND, axis=-1, keepdims=True)
    variance = np.mean(xhat * xhat, axis=-1, keepdims=True)
    variance += LAYER_NORM_EPS
    rstd = np.reciprocal(np.sqrt(variance, out=variance), out=variance)
    xhat *= rstd
    return xhat, rstd


def _layer_norm_backward(xhat, rstd, weight, dy, dweight, dbias):
    """Write the gradients of weight and bias; return that of the input. Overwrites dy."""
    np.sum(dy, axis=1, out=dbias)
    product = dy * xhat
    np.sum(product, axis=1, out=dweight)
    # With dxhat = dy * weight, dx = rstd * (dxhat - mean(dxhat) - xhat * mean(dxhat * xhat)).
    dy *= weight[:, None, :]
    np.multiply(dy, xhat, out=product)
    along = np.mean(product, axis=-1, keepdims=True)
    dy -= np.mean(dy, axis=-1, keepdims=True)
    dy -= np.multiply(xhat, along, out=product)
    dy *= rstd
    return dy


def _gelu(u):
    """Return GELU(u) in its tanh form and its slope at u. Overwrites u with the value."""
    square = u * u
    z = square * (_GELU_SCALE * _GELU_CUBIC)
    z += _GELU_SCALE
    z *= u
    gate = np.tanh(z, out=z)
    gate += 1.0
    gate *= 0.5
    # The value is u * gate. With dgate/du = 2 gate (1 - gate) sqrt(2/pi) (1 + 3 * 0.044715 u^2)
    # the slope, gate + u * dgate/du, is gate + value * (1 - gate) * (a polynomial in u^2).
    slope = square
    slope *= 6 * _GELU_SCALE * _GELU_CUBIC
    slope += 2 * _GELU_SCALE
    value = np.multiply(u, gate, out=u)
    slope *= value
    slope *= 1.0 - gate
    slope += gate
    return value, slope


# ---------------------------------------------------------------------------------------------
# Layers of the GPT
# ---------------------------------------------------------------------------------------------


@final
class Embedding(Layer):
    """Sum of a token's vector and its position's vector.

    Kept for backward per rank: the B * T token numbers (int64, the batch itself).

    Parameters
    ----------
    config : GPTConfig
    name : str
    """

    def __init__(self, config, name="embed"):
        self.name = name
        self.shapes = {
            "tok.weight": (config.vocab_size, config.width),
            "pos.weight": (config.seq_len, config.width),
        }

    def forward(self, params, x):
        """Look up tokens ``(R, B, T)``, T at most seq_len; see `Layer.forward`.

        Raises
        ------
        UsageError
            If there are more tokens than positions, or a token is outside the vocabulary.
        """
        return self.at(params, x, 0), (x,)

    def at(self, params, x, position):
        """Look up tokens ``(R, B, T)`` whose first stands at `position`; no cache."""
        tokens, positions = params["tok.weight"], params["pos.weight"]
        stop = position + x.shape[-1]
        if stop > positions.shape[1]:
            raise UsageError(
                f"{stop} tokens in a sequence, but the model has {positions.shape[1]} positions; "
                "cut the sequence or build the model with a larger seq_len"
            )
        if x.size and (x.min() < 0 or x.max() >= tokens.shape[1]):
            raise UsageError(
                f"tokens from {x.min()} to {x.max()}, but the vocabulary has {tokens.shape[1]}; "
                "use the vocab_size of the data set for the model"
            )
        y = np.empty((*x.shape, tokens.shape[2]), tokens.dtype)
        for r in range(len(x)):  # a rank looks up in its own table
            np.take(tokens[r], x[r], axis=0, out=y[r], mode="clip")  # unchecked: checked above
        y += positions[:, None, position:stop]
        return y

    def backward(self, params, cache, dy, grads):
        """Scatter `dy` to the rows that were used, in token order; see `Layer.backward`."""
        (x,) = cache
        width, steps = dy.shape[-1], dy.shape[2]
        dtok, dpos = grads["tok.weight"], grads["pos.weight"]
        column = np.arange(width)
        for r in range(len(x)):
            # np.add.at adds in the order of the index; flat, it is five times as fast as by rows.
            where = x[r].reshape(-1, 1) * width + column
            flat = np.zeros(dtok[r].size, dtok.dtype)
            np.add.at(flat, where.reshape(-1), dy[r].reshape(-1))
            dtok[r] = flat.reshape(dtok[r].shape)
        dpos[:, steps:] = 0
        np.sum(dy, axis=1, out=dpos[:, :steps])


@final
class Attention(Layer):
    """Layer norm, causal self-attention, and the residual: ``x + proj(attend(qkv(ln1(x))))``.

    The rows of ``qkv.weight`` are packed [q | k | v], each with its heads one after the other.

    Kept for backward per rank, in elements: B * T * (5 D + H T + 1). These are the normalised
    input (D), 1 / std (1), q, k and v (3 D), the attention weights (H T) and the attended
    values (D).

    Parameters
    ----------
    config : GPTConfig
    block : str
        Prefix of the parameter names, for example ``"layers.0"``; the layer is ``block + ".attn"``.
    """

    def __init__(self, config, block):
        width = config.width
        self.name = f"{block}.attn"
        self.heads = config.heads
        self._ln, self._qkv, self._proj = f"{block}.ln1", f"{block}.qkv", f"{block}.proj"
        self.shapes = {
            f"{self._ln}.weight": (width,),
            f"{self._ln}.bias": (width,),
            f"{self._qkv}.weight": (3 * width, width),
            f"{self._qkv}.bias": (3 * width,),
            f"{self._proj}.weight": (width, width),
            f"{self._proj}.bias": (width,),
        }

    def _split(self, x, parts):
        """View (R, B, T, parts * D) as a tuple of parts, each (R, B, H, T, E)."""
        ranks, batch, steps, width = x.shape
        x = x.reshape(ranks, batch, steps, parts, self.heads, width // (parts * self.heads))
        return tuple(x[:, :, :, i].transpose(0, 1, 3, 2, 4) for i in range(parts))

    def _project(self, params, x):
        """Return the normalised input, 1 / std, and packed (R, B, T, 3 D) with q scaled."""
        xhat, rstd = _normalize(_rows(x))
        h = _affine(xhat, params[f"{self._ln}.weight"], params[f"{self._ln}.bias"])
        qkv = _linear(h, params[f"{self._qkv}.weight"], params[f"{self._qkv}.bias"])
        width = x.shape[-1]
        # 1 / sqrt(E) on q instead of on the scores: E numbers a row instead of T.
        qkv[..., :width] *= 1 / math.sqrt(width // self.heads)
        return xhat, rstd, qkv.reshape(*x.shape[:-1], 3 * width)

    def _finish(self, params, x, context):
        """Return x + proj(context)."""
        y = _linear(_rows(context), params[f"{self._proj}.weight"], params[f"{self._proj}.bias"])
        y = y.reshape(x.shape)
        y += x
        return y

    def forward(self, params, x):
        """Attend over ``(R, B, T, D)``; see `Layer.forward`."""
        xhat, rstd, qkv = self._project(params, x)
        q, k, v = self._split(qkv, 3)
        weights = np.matmul(q, k.swapaxes(-1, -2))
        steps = x.shape[2]
        weights += np.triu(np.full((steps, steps), -np.inf, weights.dtype), 1)
        _softmax(weights)
        context = np.empty_like(x)
        np.matmul(weights, v, out=self._split(context, 1)[0])
        return self._finish(params, x, context), (xhat, rstd, qkv, weights, context)

    def backward(self, params, cache, dy, grads):
        """See `Layer.backward`."""
        xhat, rstd, qkv, weights, context = cache
        proj, ln = self._proj, self._ln
        dcontext = _linear_backward(
            _rows(context),
            params[f"{proj}.weight"],
            _rows(dy),
            grads[f"{proj}.weight"],
            grads[f"{proj}.bias"],
        ).reshape(context.shape)

        q, k, v = self._split(qkv, 3)
        (dout,) = self._split(dcontext, 1)
        dqkv = np.empty_like(qkv)
        dq, dk, dv = self._split(dqkv, 3)
        np.matmul(weights.swapaxes(-1, -2), dout, out=dv)
        # Softmax: dscore = weight * (dweight - sum(dweight * weight)); that sum over the T keys
        # equals the sum of dcontext * context over the E entries of the head.
        dscores = np.matmul(dout, v.swapaxes(-1, -2))
        (product,) = self._split(dcontext * context, 1)
        dscores -= np.sum(product, axis=-1, keepdims=True)
        dscores *= weights
        np.matmul(dscores, k, out=dq)
        np.matmul(dscores.swapaxes(-1, -2), q, out=dk)
        width = context.shape[-1]
        dqkv[..., :width] *= 1 / math.sqrt(width // self.heads)

        h = _affine(xhat, params[f"{ln}.weight"], params[f"{ln}.bias"])
        dh = _linear_backward(
            h,
            params[f"{self._qkv}.weight"],
            _rows(dqkv),
            grads[f"{self._qkv}.weight"],
            grads[f"{self._qkv}.bias"],
        )
        dx = _layer_norm_backward(
            xhat, rstd, params[f"{ln}.weight"], dh, grads[f"{ln}.weight"], grads[f"{ln}.bias"]
        ).reshape(dy.shape)
        dx += dy
        return dx

    def step(self, params, x, keys, values, position):
        """Attend for one new token, with the keys and values of the earlier ones at hand.

        Parameters
        ----------
        params : dict of str to ndarray
            As in `forward`.
        x : ndarray
            ``(R, B, 1, D)``, the token at `position`.
        keys, values : ndarray
            ``(R, B, H, T, E)``; entries before `position` are read, the one at it is written.
        position : int
            Counted from 0.

        Returns
        -------
        ndarray
            ``(R, B, 1, D)``: what `forward` would give for this token.
        """
        _, _, qkv = self._project(params, x)
        q, k, v = self._split(qkv, 3)
        stop = position + 1
        keys[:, :, :, position:stop] = k
        values[:, :, :, position:stop] = v
        weights = np.matmul(q, keys[:, :, :, :stop].swapaxes(-1, -2))
        _softmax(weights)
        context = np.empty_like(x)
        np.matmul(weights, values[:, :, :, :stop], out=self._split(context, 1)[0])
        return self._finish(params, x, context)


def _softmax(scores):
    """Turn scores into weights over the last axis, in place."""
    scores -= np.max(scores, axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= np.sum(scores, axis=-1, keepdims=True)


@final
class FeedForward(Layer):
    """Layer norm, two linear maps and the residual: ``x + fc2(gelu(fc1(ln2(x))))``.

    Kept for backward per rank, in elements: B * T * (9 D + 1). These are the normalised input
    (D), 1 / std (1), the value of GELU (4 D) and its slope (4 D).

    Parameters
    ----------
    config : GPTConfig
    block : str
        Prefix of the parameter names, for example ``"layers.0"``; the layer is ``block + ".mlp"``.
    """

    def __init__(self, config, block):
        width = config.width
        self.name = f"{block}.mlp"
        self._ln, self._fc1, self._fc2 = f"{block}.ln2", f"{block}.fc1", f"{block}.fc2"
        self.shapes = {
            f"{self._ln}.weight": (width,),
            f"{self._ln}.bias": (width,),
            f"{self._fc1}.weight": (4 * width, width),
            f"{self._fc1}.bias": (4 * width,),
            f"{self._fc2}.weight": (width, 4 * width),
            f"{self._fc2}.bias": (width,),
        }

    def forward(self, params, x):
        """Transform ``(R, B, T, D)`` token by token; see `Layer.forward`."""
        xhat, rstd = _normalize(_rows(x))
        h = _affine(xhat, params[f"{self._ln}.weight"], params[f"{self._ln}.bias"])
        u = _linear(h, params[f"{self._fc1}.weight"], params[f"{self._fc1}.bias"])
        value, slope = _gelu(u)
        y = _linear(value, params[f"{self._fc2}.weight"], params[f"{self._fc2}.bias"])
        y = y.reshape(x.shape)
        y += x
        return y, (xhat, rstd, value, slope)

    def backward(self, params, cache, dy, grads):
        """See `Layer.backward`."""
        xhat, rstd, value, slope = cache
        ln, fc1, fc2 = self._ln, self._fc1, self._fc2
        du = _linear_backward(
            value,
            params[f"{fc2}.weight"],
            _rows(dy),
            grads[f"{fc2}.weight"],
            grads[f"{fc2}.bias"],
        )
        du *= slope
        h = _affine(xhat, params[f"{ln}.weight"], params[f"{ln}.bias"])
        dh = _linear_backward(
            h, params[f"{fc1}.weight"], du, grads[f"{fc1}.weight"], grads[f"{fc1}.bias"]
        )
        dx = _layer_norm_backward(
            xhat, rstd, params[f"{ln}.weight"], dh, grads[f"{ln}.weight"], grads[f"{ln}.bias"]
        ).reshape(dy.shape)
        dx += dy
        return dx


@final
class Head(Layer):
    """Layer norm and a linear map to one logit a token of the vocabulary, no bias.

    Kept for backward per rank, in elements: B * T * (D + 1). These are the normalised input (D)
    and 1 / std (1). The B * T * V logits are not kept: their gradient takes their place.

    Parameters
    ----------
    config : GPTConfig
    name : str
    """

    def __init__(self, config, name="head"):
        self.name = name
        self.shapes = {
            "lnf.weight": (config.width,),
            "lnf.bias": (config.width,),
            "head.weight": (config.vocab_size, config.width),
        }

    def forward(self, params, x):
        """Turn ``(R, B, T, D)`` into logits ``(R, B, T, V)``; see `Layer.forward`."""
        xhat, rstd = _normalize(_rows(x))
        h = _affine(xhat, params["lnf.weight"], params["lnf.bias"])
        logits = _linear(h, params["head.weight"])
        return logits.reshape(*x.shape[:-1], logits.shape[-1]), (xhat, rstd)

    def backward(self, params, cache, dy, grads):
        """See `Layer.backward`."""
        xhat, rstd = cache
        h = _affine(xhat, params["lnf.weight"], params["lnf.bias"])
        dh = _linear_backward(h, params["head.weight"], _rows(dy), grads["head.weight"])
        dx = _layer_norm_backward(
            xhat, rstd, params["lnf.weight"], dh, grads["lnf.weight"], grads["lnf.bias"]
        )
        return dx.reshape(*dy.shape[:-1], dx.shape[-1])


# ---------------------------------------------------------------------------------------------
# The GPT
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GPTConfig:
    """Size of a GPT.

    Attributes
    ----------
    vocab_size : int
        Number of different tokens, V.
    seq_len : int
        Number of positions, T: the most tokens the model sees at once. A training sample has one
        token more, because the targets are the inputs moved by one.
    width : int
        Length of the vector that stands for a token, D. A multiple of `heads`.
    heads : int
        Attention heads, H.
    blocks : int
        Number of (attention, feed-forward) pairs.
    tied : bool
        Whether the head's weight is the embedding's: one parameter with two names.

    Raises
    ------
    UsageError
        If a size is not a positive integer, or heads do not divide width.
    """

    vocab_size: int
    seq_len: int
    width: int
    heads: int
    blocks: int
    tied: bool = False

    def __post_init__(self):
        for name in ("vocab_size", "seq_len", "width", "heads", "blocks"):
            _check_size(name, getattr(self, name))
        if self.width % self.heads:
            raise UsageError(
                f"width {self.width} is not a multiple of heads {self.heads}; "
                "every head has width // heads entries"
            )


def _check_size(name, value):
    """Raise UsageError unless value is an integer of at least 1."""
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 1:
        raise UsageError(f"{name} must be an integer of at least 1, got {value!r}")


DIGITS = GPTConfig(vocab_size=27, seq_len=64, width=48, heads=4, blocks=2)
"""Draws digits: 10 class tokens and 17 grey levels, 64 pixels; 62,304 parameters."""

LESSON = GPTConfig(vocab_size=27, seq_len=16, width=64, heads=4, blocks=8)
"""Shows memory: digits pooled to 4 x 4 pixels; 404,480 parameters, 12 % of them in each block."""


@dataclass(frozen=True)
class TrainingPreset:
    """How a model is trained, and drawn from: AdamW with warm-up, decay and clipping.

    Attributes
    ----------
    steps : int
    batch : int
        Sequences a step, over all ranks.
    lr : float
        The highest learning rate.
    warmup : int
        Steps in which the learning rate rises to `lr` in a straight line.
    min_lr_ratio : float
        Where the cosine that follows ends, as a share of `lr`.
    betas : tuple of float
    eps : float
    weight_decay : float
        Decoupled, on every parameter.
    max_grad_norm : float
        Gradients are scaled down to this global norm.
    temperature : float
        For drawing.
    """

    steps: int
    batch: int
    lr: float
    warmup: int
    min_lr_ratio: float = 0.05
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0
    temperature: float = 0.8


DIGITS_TRAINING = TrainingPreset(steps=500, batch=32, lr=8e-3, warmup=50)
"""Held-out loss about 1.29 (unigram entropy 2.07); about 87 % of drawn digits are recognised."""

LESSON_TRAINING = TrainingPreset(steps=30, batch=4, lr=2e-3, warmup=10)
"""One sequence a rank on four ranks: enough to see the loss fall, in seconds."""


@final
class GPT(Model):
    """A small GPT-2: pre-norm blocks, learned positions, GELU in its tanh form.

    Parameters
    ----------
    config : GPTConfig

    Notes
    -----
    The loss is the mean cross entropy over tokens, in nats.

    References
    ----------
    Radford et al., "Language Models are Unsupervised Multitask Learners", 2019 (pre-norm,
    initial values). Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016, section 2.

    Examples
    --------
    >>> GPT(DIGITS).numel
    62304
    >>> [unit for unit, _ in GPT(DIGITS).blocks]
    ['embed', 'layers.0', 'layers.1', 'head']
    """

    def __init__(self, config):
        self.config = config
        layers, blocks = [Embedding(config)], [("embed", ("embed",))]
        for i in range(config.blocks):
            block = f"layers.{i}"
            pair = (Attention(config, block), FeedForward(config, block))
            layers.extend(pair)
            blocks.append((block, tuple(layer.name for layer in pair)))
        layers.append(Head(config))
        if config.tied:
            # The first and the last layer share a weight, so they are gathered together.
            blocks[0] = ("root", ("embed", "head"))
        else:
            blocks.append(("head", ("head",)))
        self.layers, self.blocks = tuple(layers), tuple(blocks)
        self.tied = {"head.weight": "tok.weight"} if config.tied else {}

    def init(self, seed):
        """Draw weights from N(0, 0.02²) as GPT-2; biases 0, layer norms 1. See `Model.init`.

        The two maps of a block that end in the residual stream are scaled by 1 / sqrt(2 blocks),
        so that the stream's variance does not grow with depth.
        """
        rng = np.random.default_rng(seed)
        residual = 0.02 / math.sqrt(2 * self.config.blocks)
        params = {}
        for name, shape in self.shapes.items():
            if name.endswith(".bias"):
                params[name] = np.zeros(shape, np.float32)
            elif len(shape) == 1:
                params[name] = np.ones(shape, np.float32)
            else:
                std = residual if name.endswith((".proj.weight", ".fc2.weight")) else 0.02
                params[name] = rng.normal(0.0, std, shape).astype(np.float32)
        return params | {alias: params[name] for alias, name in self.tied.items()}

    def count(self, targets):
        """Return the number of target tokens (int); negative ones are padding and do not count."""
        return int(np.count_nonzero(np.asarray(targets) >= 0))

    def loss(self, y, targets, global_count):
        """Compute the cross entropy of logits ``(R, B, T, V)``; see `Model.loss`.

        `targets` are tokens, ``(R, B, T)``; a negative one (such as PyTorch's -100) is padding,
        which has no loss and no gradient.
        """
        logits = _rows(y)
        picked = targets.reshape(len(targets), -1, 1)
        padding = picked < 0
        if padding.any():
            picked = np.where(padding, 0, picked)
        logits -= np.max(logits, axis=-1, keepdims=True)
        wanted = np.take_along_axis(logits, picked, axis=-1)
        np.exp(logits, out=logits)
        total = np.sum(logits, axis=-1, keepdims=True)
        terms = np.log(total) - wanted
        # The gradient of a term with respect to the logits is softmax - one-hot.
        logits /= total
        hit = np.take_along_axis(logits, picked, axis=-1)
        hit -= 1.0
        np.put_along_axis(logits, picked, hit, axis=-1)
        logits *= 1 / int(global_count)
        if padding.any():
            terms[padding] = 0.0
            logits *= ~padding
        return _sum_per_rank(terms) / int(global_count), logits.reshape(y.shape)


def _sum_per_rank(terms):
    """Sum everything but the first axis in float64, one rank at a time: the same bits for any R."""
    return np.array([np.sum(row, dtype=np.float64) for row in terms], dtype=np.float64)


# ---------------------------------------------------------------------------------------------
# The MLP
# ---------------------------------------------------------------------------------------------


@final
class Linear(Layer):
    """A linear map, followed by tanh or not: ``tanh(x W^T + b)``.

    Kept for backward per rank, in elements: B * in for the input (which is the batch itself or
    the result of the layer before, kept once), and B * out for the result if there is a tanh.

    Parameters
    ----------
    name : str
    inputs, outputs : int
    tanh : bool
        Whether tanh follows.
    first : bool
        Whether this is the first layer of its model, whose input needs no gradient.
    """

    def __init__(self, name, inputs, outputs, *, tanh, first):
        self.name = name
        self.tanh = tanh
        self.first = first
        self.shapes = {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}

    def forward(self, params, x):
        """Map ``(R, B, in)`` to ``(R, B, out)``; see `Layer.forward`."""
        y = _linear(x, params[f"{self.name}.weight"], params[f"{self.name}.bias"])
        if not self.tanh:
            return y, (x,)
        np.tanh(y, out=y)
        return y, (x, y)

    def backward(self, params, cache, dy, grads):
        """See `Layer.backward`."""
        x = cache[0]
        if self.tanh:
            y = cache[1]
            slope = y * y
            np.subtract(1.0, slope, out=slope)
            dy *= slope
        return _linear_backward(
            x,
            params[f"{self.name}.weight"],
            dy,
            grads[f"{self.name}.weight"],
            grads[f"{self.name}.bias"],
            input_grad=not self.first,
        )


@dataclass(frozen=True)
class MLPConfig:
    """Size of an MLP.

    Attributes
    ----------
    sizes : tuple of int
        Widths from input to output, at least two: ``(16, 64, 64, 4)`` has three layers.

    Raises
    ------
    UsageError
        If there are fewer than two sizes, or one is not a positive integer.
    """

    sizes: tuple[int, ...]

    def __post_init__(self):
        object.__setattr__(self, "sizes", tuple(self.sizes))
        if len(self.sizes) < 2:
            raise UsageError(f"sizes needs an input and an output width, got {self.sizes}")
        for i, size in enumerate(self.sizes):
            _check_size(f"sizes[{i}]", size)


@final
class MLP(Model):
    """Linear layers with tanh between; each layer is a unit of its own.

    Parameters
    ----------
    config : MLPConfig

    Notes
    -----
    The loss is the mean squared error over all elements of the output.

    Examples
    --------
    >>> MLP(MLPConfig((16, 64, 64, 4))).numel
    5508
    """

    def __init__(self, config):
        self.config = config
        last = len(config.sizes) - 2
        self.layers = tuple(
            Linear(f"layers.{i}", inputs, outputs, tanh=i < last, first=i == 0)
            for i, (inputs, outputs) in enumerate(
                zip(config.sizes[:-1], config.sizes[1:], strict=True)
            )
        )
        self.blocks = tuple((layer.name, (layer.name,)) for layer in self.layers)

    def init(self, seed):
        """Draw weights from N(0, 1 / inputs); biases 0. See `Model.init`."""
        rng = np.random.default_rng(seed)
        return {
            name: np.zeros(shape, np.float32)
            if len(shape) == 1
            else rng.normal(0.0, 1 / math.sqrt(shape[1]), shape).astype(np.float32)
            for name, shape in self.shapes.items()
        }

    def count(self, targets):
        """Return the number of target elements (int)."""
        return int(np.size(targets))

    def loss(self, y, targets, global_count):
        """Compute the squared error of ``(R, B, out)``; see `Model.loss`.

        `targets` has the shape and dtype of `y`.
        """
        y -= targets
        loss_R = _sum_per_rank(y * y) / int(global_count)
        y *= 2 / int(global_count)
        return loss_R, y
