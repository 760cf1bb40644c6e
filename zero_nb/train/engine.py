"""The engine: a model driven forward and backward through a `ZeROOptimizer`.

Shape suffixes: R ranks hosted here, B samples a rank, F padded flat length of a unit.

The engine decides when each unit's parameters are needed, the optimizer and its stage decide
what that means:

1. forward, unit by unit upwards: unshard at the first layer of a unit, reshard after its last;
2. loss, divided by the terms of the mean on all ranks;
3. backward, downwards: unshard, let the layers write the unit's gradient, reshard, post_backward;
4. step.

[Note: chunks of ranks]
Layers compute on chunks of the rank axis, each chunk in a thread of its own. With equal batches a
chunk is a part of the stacked arrays; with unequal ones every rank is a chunk, so that no row is
padded (padding rows would change bits). A rank's bits do not depend on its chunk: see
[Note: same bits] in model.py.
"""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import final

import numpy as np

from zero_nb.config import UsageError
from zero_nb.core.blas import one_blas_thread
from zero_nb.train.buckets import GradientBuffer
from zero_nb.train.optimizer import StepResult, ZeROOptimizer

__all__ = ["Engine", "StepReport", "group_layers"]


@dataclass(frozen=True)
class StepReport:
    """What one training step did, and what it took; bytes and elements are per rank.

    Attributes
    ----------
    loss : float
        Mean over the global batch, before the update.
    result : StepResult
        What the optimizer did.
    elements_sent, bytes_sent : int
        Parameters and gradients one rank sent.
    held_bytes : dict
        param, grad and optim on the fullest rank, after backward and before the step.
    peak_bytes : int
        The largest sum over all kinds on one rank during the step.
    largest_bytes : dict
        The largest of each kind during the step, each at its own time.
    seconds : float
    """

    loss: float
    result: StepResult
    elements_sent: int
    bytes_sent: int
    held_bytes: dict
    peak_bytes: int
    largest_bytes: dict
    seconds: float


def group_layers(model, units="block"):
    """Return which layers are gathered together.

    Parameters
    ----------
    model : Model
    units : {"model", "block", "sublayer"} or sequence of sequence of str
        One unit for all, one a block, one a layer, or layer names of your own in model order.

    Returns
    -------
    dict of str to tuple of Layer

    Raises
    ------
    UsageError
        If a layer is unknown, missing or named twice.
    """
    by_name = {layer.name: layer for layer in model.layers}
    if units == "model":
        groups = {"model": tuple(by_name)}
    elif units == "block":
        groups = dict(model.blocks)
    elif units == "sublayer":
        groups = {name: (name,) for name in by_name}
    elif isinstance(units, str):
        raise UsageError(
            f"unknown units {units!r}; choose model, block, sublayer, or lists of layer names"
        )
    else:
        groups = {"+".join(names): tuple(names) for names in units}
    flat = [name for names in groups.values() for name in names]
    if sorted(flat) != sorted(by_name):
        raise UsageError(
            f"units must name every layer exactly once; layers are {', '.join(by_name)}; "
            f"got {', '.join(flat)}"
        )
    return {unit: tuple(by_name[name] for name in names) for unit, names in groups.items()}


@dataclass(frozen=True)
class _Chunk:
    """Some consecutive hosted ranks and what they compute with."""

    ranks: slice
    inputs: np.ndarray
    targets: np.ndarray


@final
class Engine:
    """Trains a model over the ranks of a world.

    Parameters
    ----------
    model : Model
    units : str or sequence, default "block"
        See `group_layers`.
    seed : int, default 0
        Of the initial parameters; the same on every rank.
    params : mapping of str to ndarray, optional
        Initial parameters, instead of drawing them.
    **settings
        For `ZeROOptimizer`: stage, world_size or world, rule, precision, schedule, ...

    Attributes
    ----------
    model : Model
    optimizer : ZeROOptimizer
    world : World
    ledger : Ledger
    """

    def __init__(self, model, *, units="block", seed=0, params=None, **settings):
        self.model = model
        groups = group_layers(model, units)
        params = model.init(seed) if params is None else params
        self.optimizer = ZeROOptimizer(
            {name: params[name] for name in model.shapes},
            units={
                unit: [name for layer in layers for name in layer.shapes]
                for unit, layers in groups.items()
            },
            **settings,
        )
        self.world, self.ledger = self.optimizer.world, self.optimizer.ledger
        unit_named = {unit.name: unit for unit in self.optimizer.units}
        self._unit_of = {
            layer.name: unit_named[unit] for unit, layers in groups.items() for layer in layers
        }
        order = [self._unit_of[layer.name] for layer in model.layers]
        # A unit's last use in a pass: no later layer of that pass needs it.
        self._last_forward = [unit not in order[i + 1 :] for i, unit in enumerate(order)]
        self._last_backward = [unit not in order[:i] for i, unit in enumerate(order)]

    # --- training --------------------------------------------------------------------------

    def train_step(self, inputs, targets):
        """Forward, backward and one optimizer step on one global batch.

        Parameters
        ----------
        inputs, targets : ndarray
            The global batch, (G, ...). Rank r takes the r-th of W parts that differ by at most
            one sample.

        Returns
        -------
        StepReport
        """
        start = time.perf_counter()
        with one_blas_thread():
            self.world.log.clear()
            self.ledger.begin_step()
            loss = self.forward_backward(inputs, targets)
            result = self.optimizer.step()
        log = self.world.log
        return StepReport(
            loss=loss,
            result=result,
            elements_sent=log.elements_sent("param", "grad"),
            bytes_sent=log.bytes_sent("param", "grad"),
            held_bytes=result.held_bytes,
            peak_bytes=self.ledger.peak_bytes,
            largest_bytes=self.ledger.largest_bytes,
            seconds=time.perf_counter() - start,
        )

    def forward_backward(self, inputs, targets):
        """Compute the loss and hand every unit's gradient to the stage.

        Parameters
        ----------
        inputs, targets : ndarray
            See `train_step`.

        Returns
        -------
        float
            Mean loss over the global batch.
        """
        chunks = self._chunks(inputs, targets)
        for chunk in chunks:
            self._keep(chunk.ranks, (chunk.inputs,), "batch")
        with one_blas_thread():
            outputs, caches = self._forward(chunks, keep=True)
            loss, gradients = self._loss(chunks, outputs, self.model.count(targets))
            del outputs
            self._backward(chunks, caches, gradients)
        self.ledger.phase = "outside"
        return loss

    def evaluate(self, inputs, targets):
        """Return the mean loss of the current parameters, booked as purpose ``"other"``."""
        chunks = self._chunks(inputs, targets)
        with one_blas_thread(), self.world.purpose("other"):
            outputs, _ = self._forward(chunks, keep=False)
            loss, _ = self._loss(chunks, outputs, self.model.count(targets))
        return loss

    def _forward(self, chunks, *, keep):
        """Run all layers upwards; return each chunk's result and, if kept, each layer's caches."""
        self.ledger.phase = "forward"
        values, caches = [chunk.inputs for chunk in chunks], []
        for i, layer in enumerate(self.model.layers):
            unit = self._unit_of[layer.name]
            params = self.optimizer.unshard(unit)

            def run(c, layer=layer, params=params, values=values):
                return layer.forward(_rows(params, chunks[c].ranks), values[c])

            results = _each(run, len(chunks))
            del params, run
            values = [value for value, _ in results]
            if keep:
                caches.append([cache for _, cache in results])
                for chunk, cache in zip(chunks, caches[-1], strict=True):
                    self._keep(chunk.ranks, cache, layer.name)
            del results
            if self._last_forward[i]:
                self.optimizer.reshard(unit)
        for chunk, value in zip(chunks, values, strict=True):
            self._keep(chunk.ranks, (value,), "output")
        return values, caches

    def _loss(self, chunks, outputs, global_count):
        """Return the mean loss over all ranks, and each chunk's gradient of its outputs."""
        results = _each(
            lambda c: self.model.loss(outputs[c], chunks[c].targets, global_count), len(chunks)
        )
        loss_R = np.concatenate([loss for loss, _ in results])
        loss_W = self.world.all_gather_scalars(loss_R[:, None], label="loss")[:, 0]
        # Python's sum adds in rank order.
        return float(sum(loss_W.tolist())), [gradient for _, gradient in results]

    def _backward(self, chunks, caches, gradients):
        """Run all layers downwards, handing each unit's gradient over once it is complete."""
        self.ledger.phase = "backward"
        buffers = {}
        for i in reversed(range(len(self.model.layers))):
            layer = self.model.layers[i]
            unit = self._unit_of[layer.name]
            params = self.optimizer.unshard(unit)
            if unit.name not in buffers:
                buffers[unit.name] = GradientBuffer(unit)
            views, cache = buffers[unit.name].views, caches.pop()

            def run(c, layer=layer, params=params, views=views, cache=cache, dy=gradients):
                rows = chunks[c].ranks
                return layer.backward(_rows(params, rows), cache[c], dy[c], _rows(views, rows))

            gradients = _each(run, len(chunks))
            del params, views, cache, run
            if self._last_backward[i]:
                self.optimizer.reshard(unit)
                self.optimizer.post_backward(unit, buffers.pop(unit.name).grad_RF)

    # --- batches and memory ------------------------------------------------------------------

    def _chunks(self, inputs, targets):
        """Cut the global batch among the hosted ranks; see [Note: chunks of ranks]."""
        size, samples = self.world.size, len(inputs)
        if len(targets) != samples:
            raise UsageError(f"{samples} inputs but {len(targets)} targets")
        if samples < size:
            raise UsageError(
                f"a global batch of {samples} leaves ranks of {size} without a sample; "
                f"use a batch of at least {size}"
            )
        ranks = self.world.ranks
        if samples % size:
            cuts = np.linspace(0, samples, size + 1).astype(int)
            spans = [slice(cuts[rank], cuts[rank + 1]) for rank in ranks]
            return [
                _Chunk(slice(i, i + 1), inputs[None, span].copy(), targets[None, span].copy())
                for i, span in enumerate(spans)
            ]
        own = slice(ranks[0] * (samples // size), (ranks[-1] + 1) * (samples // size))
        stack = (len(ranks), samples // size)
        own_inputs = inputs[own].reshape(*stack, *inputs.shape[1:])
        own_targets = targets[own].reshape(*stack, *targets.shape[1:])
        parts = min(_threads(), len(ranks))
        cuts = np.linspace(0, len(ranks), parts + 1).astype(int)
        return [
            _Chunk(slice(a, b), own_inputs[a:b].copy(), own_targets[a:b].copy())
            for a, b in zip(cuts[:-1], cuts[1:], strict=True)
        ]

    def _keep(self, ranks, arrays, label):
        """Book arrays of some ranks as activations."""
        for array in arrays:
            self.ledger.register(array, "activation", label, rank_index=ranks)


def _rows(arrays, ranks):
    """Return the rows of some ranks of every array."""
    return {name: array[ranks] for name, array in arrays.items()}


def _threads():
    """Number of threads that compute ranks side by side."""
    return max(1, os.cpu_count() or 1)


@cache
def _pool():
    """Return the threads that compute chunks of ranks, started at first use."""
    return ThreadPoolExecutor(_threads(), thread_name_prefix="zero_nb-rank")


def _each(function, count):
    """Return function(0), ..., function(count - 1), computed side by side."""
    if count == 1:
        return [function(0)]
    # A thread still refers to its job for a moment after it has said that it is done. Through
    # `call` that job reaches the arrays only as long as they are needed here: memory is given
    # back when this thread drops it, and so the ledger counts the same bytes in every run.
    job, results = [function], [None] * count

    def call(index):
        results[index] = job[0](index)

    try:
        for _ in _pool().map(call, range(count)):
            pass
        return results.copy()
    finally:
        job.clear()
        results.clear()
