"""Forward and backward once, with some layers recomputed: what that saves, and what it costs.

Chen et al., *Training Deep Nets with Sublinear Memory Cost*, arXiv:1604.06174: a recomputed layer
keeps its input only, and runs its forward pass a second time when backward comes to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np

from zero_nb.config import UsageError
from zero_nb.core.blas import one_blas_thread
from zero_nb.train.ledger import Ledger

__all__ = ["Passes", "run_passes"]


@final
@dataclass(frozen=True)
class Passes:
    """One forward and one backward pass.

    Attributes
    ----------
    loss : float
    grads : dict of str to ndarray
        Each ``(R, *shape)``.
    forwards : int
        Forward passes of layers, first and second ones.
    activation_bytes : tuple of int
        Kept for backward by one rank, after each array that was kept or dropped.
    """

    loss: float
    grads: dict
    forwards: int
    activation_bytes: tuple

    @property
    def peak_bytes(self):
        """The largest number of bytes kept at one time (int)."""
        return max(self.activation_bytes)


def run_passes(model, params, inputs, targets, recompute=()):
    """Run a model forward and backward.

    Parameters
    ----------
    model : Model
    params : dict of str to ndarray
        Each ``(R, *shape)``.
    inputs, targets : ndarray
        With the rank axis first.
    recompute : collection of str
        Names of layers that keep their input only.

    Returns
    -------
    Passes

    Raises
    ------
    UsageError
        If there is no layer of a name in `recompute`.
    """
    names = [layer.name for layer in model.layers]
    unknown = sorted(set(recompute) - set(names))
    if unknown:
        raise UsageError(f"no layer {', '.join(unknown)}; layers are {', '.join(names)}")
    ledger, forwards = Ledger(len(inputs)), 0
    grads = {name: np.empty_like(params[name]) for name in model.shapes}

    def keep(cache, name):
        """Book what a layer keeps."""
        for array in cache:
            ledger.register(array, "activation", name)
        return cache

    with one_blas_thread():
        x, caches = inputs, []
        for layer in model.layers:
            y, cache = layer.forward(params, x)
            forwards += 1
            caches.append(keep((x,) if layer.name in recompute else cache, layer.name))
            x = y
            del y, cache
        loss_R, dy = model.loss(x, targets, model.count(targets))
        del x
        for layer in reversed(model.layers):
            cache = caches.pop()
            if layer.name in recompute:
                again = layer.forward(params, cache[0])[1]
                cache = (*cache, *keep(again, layer.name))[1:]
                forwards += 1
                del again
            dy = layer.backward(params, cache, dy, grads)
            del cache
    booked = tuple(event.total_bytes["activation"] for event in ledger.events)
    return Passes(float(loss_R.sum()), grads, forwards, booked)
