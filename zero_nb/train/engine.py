"""The engine: a model driven forward and backward through a `ZeROOptimizer`.

Shape suffixes: R ranks hosted here, B samples a rank, F padded flat length of a unit.

The engine decides when each unit's parameters are needed, the optimizer and its stage decide
what that means:

1. forward, unit by unit upwards: unshard at the first layer of a unit, reshard after its last;
2. loss, divided by the terms of the mean on all ranks and in all micro-batches;
3. backward, downwards: unshard, let the layers write the unit's gradient, reshard, post_backward;
4. after the last micro-batch, step.

A unit with tied weights is used by the first and the last layer; it stays gathered from its first
forward to its last backward use.

[Note: chunks of ranks]
Layers compute on chunks of the rank axis, each chunk in a thread of its own. With equal batches a
chunk is a part of the stacked arrays; with unequal ones every rank is a chunk, so that no row is
padded (padding rows would change bits). A rank's bits do not depend on its chunk: see
[Note: same bits] in model.py.
"""

import os
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import final

import numpy as np

from zero_nb.config import UsageError
from zero_nb.core.blas import one_blas_thread
from zero_nb.train.allocator import keep_freed_memory
from zero_nb.train.buckets import GradientBuffer
from zero_nb.train.optimizer import StepResult, ZeROOptimizer
from zero_nb.train.prefetch import FetchCounts, Prefetcher

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
    comm_s, exposed_s : float
        Time in which parameters or gradients were under way; the part of it in which nothing was
        computed. The rest was hidden.
    fetches : FetchCounts
        How gathers were served (stage 3).
    """

    loss: float
    result: StepResult
    elements_sent: int
    bytes_sent: int
    held_bytes: dict
    peak_bytes: int
    largest_bytes: dict
    seconds: float
    comm_s: float = 0.0
    exposed_s: float = 0.0
    fetches: FetchCounts = field(default_factory=FetchCounts)


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
    prefetch_bucket_size, max_live_parameters, max_reuse_distance, reshard_after_forward
        When stage 3 gathers and drops units, see `zero_nb.train.prefetch.Prefetcher`.
    **settings
        For `ZeROOptimizer`: stage, world_size or world, rule, precision, schedule, ...

    Attributes
    ----------
    model : Model
    optimizer : ZeROOptimizer
    world : World
    ledger : Ledger
    prefetcher : Prefetcher
    tracer : Tracer or None
        Set it to record what happens when, see `zero_nb.train.trace`.
    """

    def __init__(
        self,
        model,
        *,
        units="block",
        seed=0,
        params=None,
        prefetch_bucket_size=0,
        max_live_parameters=None,
        max_reuse_distance=0,
        reshard_after_forward=True,
        **settings,
    ):
        keep_freed_memory()
        self.model = model
        groups = group_layers(model, units)
        params = model.init(seed) if params is None else params
        self.optimizer = ZeROOptimizer(
            {name: params[name] for name in model.shapes},
            units=_parameters_of(groups),
            **settings,
        )
        self.world, self.ledger = self.optimizer.world, self.optimizer.ledger
        self.prefetcher = Prefetcher(
            self.optimizer,
            prefetch_bucket_size=prefetch_bucket_size,
            max_live_parameters=max_live_parameters,
            max_reuse_distance=max_reuse_distance,
            reshard_after_forward=reshard_after_forward,
        )
        self.tracer = None
        self._units_of = [self._units_with(layer.shapes) for layer in model.layers]
        count = len(model.layers)
        users = {
            unit.name: [i for i in range(count) if unit in self._units_of[i]]
            for unit in self.optimizer.units
        }
        tied = {
            unit.name for unit in self.optimizer.units if unit.aliases and len(users[unit.name]) > 1
        }
        # Which units no later layer of a pass needs. Tied ones stay over the turn.
        self._last_forward = [
            [u for u in self._units_of[i] if users[u.name][-1] == i and u.name not in tied]
            for i in range(count)
        ]
        self._last_backward = [
            [u for u in self._units_of[i] if users[u.name][0] == i] for i in range(count)
        ]

    def _units_with(self, names):
        """Return the units that hold some of the named parameters."""
        names = {self.optimizer.aliases.get(name, name) for name in names}
        return [unit for unit in self.optimizer.units if names & set(unit.layout.names)]

    # --- training --------------------------------------------------------------------------

    def train_step(self, inputs, targets):
        """Forward, backward and one optimizer step on one global batch.

        Parameters
        ----------
        inputs, targets : ndarray
            The global batch, (G, ...). Rank r takes the r-th of W parts that differ by at most
            one sample, and cuts it in as many micro-batches as the optimizer wants.

        Returns
        -------
        StepReport
        """
        start = time.perf_counter()
        number = self.optimizer.steps_done + self.optimizer.skipped_steps + 1
        with one_blas_thread(), self._span(f"{number}", "training step"):
            self.world.log.clear()
            self.world.clock.reset()
            self.ledger.begin_step()
            loss = self.forward_backward(inputs, targets)
            with self._span("update", "update"):
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
            comm_s=self.world.clock.comm_s,
            exposed_s=self.world.clock.exposed_s,
            fetches=self.prefetcher.counts,
        )

    def forward_backward(self, inputs, targets):
        """Compute the loss and hand every unit's gradient to the stage, for all micro-batches.

        Parameters
        ----------
        inputs, targets : ndarray
            See `train_step`.

        Returns
        -------
        float
            Mean loss over the global batch: every term counts the same, however terms are spread
            over ranks and micro-batches.
        """
        micro_batches = self._micro_batches(inputs, targets)
        loss, count = 0.0, self._terms(targets)
        try:
            with one_blas_thread():
                self.prefetcher.begin_step()
                for chunks in micro_batches:
                    loss += self._micro_step(chunks, count)
                self.prefetcher.end_step()
        except BaseException:
            self.prefetcher.abandon()
            raise
        self.optimizer.mark_used(self.model.shapes)
        self.ledger.phase = "outside"
        return loss

    def _micro_step(self, chunks, count):
        """Run one micro-batch forward and backward; return its share of the loss."""
        for chunk in chunks:
            self._keep(chunk.ranks, (chunk.inputs,), "batch")
        outputs, caches = self._forward(chunks, self.prefetcher, keep=True)
        loss, gradients = self._loss(chunks, outputs, count, self.optimizer.loss_scale)
        del outputs
        self._backward(chunks, caches, gradients)
        return loss

    def evaluate(self, inputs, targets):
        """Return the mean loss of the current parameters, booked as purpose ``"other"``."""
        (chunks,) = self._micro_batches(inputs, targets, count=1)
        count = self._terms(targets)
        with one_blas_thread(), self.world.purpose("other"):
            # A prefetcher of its own: looking is no part of the steps' order of units.
            prefetcher = Prefetcher(self.optimizer)
            try:
                outputs, _ = self._forward(chunks, prefetcher, keep=False)
            finally:
                prefetcher.abandon()  # no backward pass will ask for what is still gathered
            loss, _ = self._loss(chunks, outputs, count, 1.0)
        return loss

    def _fetch(self, i, prefetcher):
        """Return the parameters that layer i computes with."""
        params = {}
        for unit in self._units_of[i]:
            params |= prefetcher.fetch(unit)
        return params

    def _span(self, name, kind):
        """Return a context in which the tracer, if any, takes the time."""
        return nullcontext() if self.tracer is None else self.tracer.span(name, kind)

    def _forward(self, chunks, prefetcher, *, keep):
        """Run all layers upwards; return each chunk's result and, if kept, each layer's caches."""
        self.ledger.phase = "forward"
        values, caches = [chunk.inputs for chunk in chunks], []
        for i, layer in enumerate(self.model.layers):
            params = self._fetch(i, prefetcher)

            def run(c, layer=layer, params=params, values=values):
                return layer.forward(_rows(params, chunks[c].ranks), values[c])

            with self._span(layer.name, "forward"):
                results = _each(run, len(chunks))
            del params, run
            values = [value for value, _ in results]
            if keep:
                caches.append([cache for _, cache in results])
                for chunk, cache in zip(chunks, caches[-1], strict=True):
                    self._keep(chunk.ranks, cache, layer.name)
            del results
            for unit in self._last_forward[i]:
                prefetcher.release(unit, forward=True)
        for chunk, value in zip(chunks, values, strict=True):
            self._keep(chunk.ranks, (value,), "output")
        return values, caches

    def _loss(self, chunks, outputs, global_count, loss_scale):
        """Return the mean loss over all ranks, and each chunk's gradient of its scaled outputs."""
        with self._span("loss", "loss"):
            results = _each(
                lambda c: self.model.loss(outputs[c], chunks[c].targets, global_count), len(chunks)
            )
        loss_R = np.concatenate([loss for loss, _ in results])
        loss_W = self.world.all_gather_scalars(loss_R[:, None], label="loss")[:, 0]
        gradients = [gradient for _, gradient in results]
        if loss_scale != 1.0:
            for gradient in gradients:
                gradient *= loss_scale
        # Python's sum adds in rank order.
        return float(sum(loss_W.tolist())), gradients

    def _backward(self, chunks, caches, gradients):
        """Run all layers downwards, handing each unit's gradient over once it is complete."""
        self.ledger.phase = "backward"
        buffers = {}
        for i in reversed(range(len(self.model.layers))):
            layer = self.model.layers[i]
            params, targets = self._fetch(i, self.prefetcher), {}
            for unit in self._units_of[i]:
                if unit.name not in buffers:
                    buffers[unit.name] = GradientBuffer(unit)
                targets |= buffers[unit.name].targets(layer.shapes)
            cache = caches.pop()

            def run(c, layer=layer, params=params, targets=targets, cache=cache, dy=gradients):
                rows = chunks[c].ranks
                return layer.backward(_rows(params, rows), cache[c], dy[c], _rows(targets, rows))

            used = gradients
            with self._span(layer.name, "backward"):
                gradients = _each(run, len(chunks))
            used.clear()  # the caller's list too: no gradient outlives its use
            del params, targets, cache, run
            for unit in self._units_of[i]:
                buffers[unit.name].add_up()
            for unit in self._last_backward[i]:
                self.prefetcher.release(unit, forward=False)
                buffer = buffers.pop(unit.name)
                if unit.trainable:
                    self.optimizer.post_backward(unit, buffer)
                del buffer
        self.optimizer.finish_backward()

    # --- batches and memory ------------------------------------------------------------------

    def _terms(self, targets):
        """Return how many terms the mean over the global batch has; refuse one of none."""
        count = self.model.count(targets)
        if count == 0:
            raise UsageError(
                f"none of the {np.size(targets)} targets counts (all are padding), so there is no "
                "mean; leave this batch out"
            )
        return count

    def _micro_batches(self, inputs, targets, count=None):
        """Cut the global batch among ranks, then each rank's part among micro-batches.

        Returns
        -------
        list of list of _Chunk
            One list a micro-batch; see [Note: chunks of ranks].
        """
        size, samples = self.world.size, len(inputs)
        count = self.optimizer.micro_batches if count is None else count
        if len(targets) != samples:
            raise UsageError(f"{samples} inputs but {len(targets)} targets")
        if samples < size * count:
            each = "a sample" if count == 1 else f"one sample for each of {count} micro-batches"
            raise UsageError(
                f"a global batch of {samples} leaves ranks of {size} without {each}; "
                f"use a batch of at least {size * count}, or fewer ranks"
            )
        cuts = _cuts(0, samples, size)
        parts = [_cuts(cuts[rank], cuts[rank + 1], count) for rank in self.world.ranks]
        return [
            self._chunks(inputs, targets, [(part[m], part[m + 1]) for part in parts])
            for m in range(count)
        ]

    def _chunks(self, inputs, targets, spans):
        """Return the chunks of one micro-batch, given each hosted rank's samples."""
        alike = len({stop - start for start, stop in spans}) == 1
        chunks = _cuts(0, len(spans), min(_threads(), len(spans)) if alike else len(spans))
        return [
            _Chunk(
                slice(first, last),
                *(
                    np.stack([array[start:stop] for start, stop in spans[first:last]])
                    for array in (inputs, targets)
                ),
            )
            for first, last in zip(chunks[:-1], chunks[1:], strict=True)
        ]

    def _keep(self, ranks, arrays, label):
        """Book arrays of some ranks as activations."""
        for array in arrays:
            self.ledger.register(array, "activation", label, rank_index=ranks)


def _parameters_of(groups):
    """Return the parameter names of each unit; a tied one only where it comes first."""
    seen, units = set(), {}
    for unit, layers in groups.items():
        names = [name for layer in layers for name in layer.shapes if name not in seen]
        units[unit] = list(dict.fromkeys(names))
        seen.update(names)
    return units


def _cuts(start, stop, parts):
    """Return parts + 1 places that cut start ... stop in parts that differ by at most one."""
    return [start + (stop - start) * part // parts for part in range(parts + 1)]


def _rows(arrays, ranks):
    """Return the rows of some ranks of every array."""
    return {name: array[ranks] for name, array in arrays.items()}


@cache
def _threads():
    """Number of threads that compute ranks side by side."""
    return max(1, os.cpu_count() or 1)


@cache
def _pool():
    """Return the threads that help to compute chunks of ranks, started at first use."""
    return ThreadPoolExecutor(max(1, _threads() - 1), thread_name_prefix="zero_nb-rank")


def _each(function, count):
    """Return function(0), ..., function(count - 1), computed side by side.

    This thread takes its share, and all of it if the others are slow to wake up: a small layer is
    done sooner than a sleeping thread is there.
    """
    if count == 1:
        return [function(0)]
    # A thread still refers to its job for a moment after it has said that it is done. Through
    # `work` that job reaches the arrays only as long as they are needed here: memory is given
    # back when this thread drops it, and so the ledger counts the same bytes in every run.
    job, results, waiting = [function], [None] * count, deque(range(count))

    def work():
        while True:
            try:
                index = waiting.popleft()
            except IndexError:
                return
            results[index] = job[0](index)

    helpers = [_pool().submit(work) for _ in range(min(count, _threads()) - 1)]
    try:
        try:
            work()
        finally:
            waiting.clear()  # after an error here nothing more is begun
            helpers = [helper for helper in helpers if not helper.cancel()]
            wait(helpers)
        for helper in helpers:
            helper.result()  # raises what was raised there
        return results.copy()
    finally:
        job.clear()
        results.clear()
