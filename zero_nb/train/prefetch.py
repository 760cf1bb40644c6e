"""When stage 3 gathers and drops units: in time, not too early, and no more than asked for.

The first step records in which order units are fetched; from the second on the order is known and
the next units are gathered while this one computes.

[Note: the trace of a step]
A trace is the list of fetches of one step, forward and backward of all micro-batches. It is
*invalid* at first, *recording* in the next step, then *complete*. A step that fetches another unit
than the trace says, or more or fewer of them, makes it invalid: what is in flight is waited for
and dropped, the step goes on fetching at need, and the next one records anew. Values never depend
on any of it: a unit is used only after its gather has arrived.

[Note: live units]
A unit is live while it is gathered, from the moment its gather is issued. ``unsharded`` bytes are
those of the live units: the one computing, those prefetched, and those kept for their next use.
Everything is issued, waited for and dropped at places that the order alone decides, so bytes do
not depend on timing.

[Note: how far ahead]
One unit ahead hides a gather behind the unit before it; more helps only where some gathers take
longer than that. Units are sent for in the order of the trace as soon as they are not live: who
looks over the turn gathers for the backward pass what the forward pass has just dropped, and so
what is needed last comes first.
"""

import math
from collections import Counter
from dataclasses import dataclass
from enum import Enum
from typing import final

import numpy as np

from zero_nb.config import UsageError

__all__ = ["FetchCounts", "Prefetcher", "TraceState", "agree_on_trace", "check_same_trace"]


class TraceState(Enum):
    """What is known about the order of units; see [Note: the trace of a step]."""

    INVALID = "invalid"
    RECORDING = "recording"
    COMPLETE = "complete"


@dataclass(frozen=True)
class FetchCounts:
    """How the fetches of one step were served.

    Attributes
    ----------
    hits : int
        Gathered ahead.
    misses : int
        Gathered when needed.
    kept : int
        Still there from an earlier use.
    wasted : int
        Gathered ahead and dropped unused, because the trace was wrong.
    """

    hits: int = 0
    misses: int = 0
    kept: int = 0
    wasted: int = 0


@final
class Prefetcher:
    """Fetches and releases the units of an optimizer for an engine.

    Below stage 3, and for persistent units, there is nothing to gather and everything here passes
    through.

    Parameters
    ----------
    optimizer : ZeROOptimizer
    prefetch_bucket_size : int, default 0
        Elements to gather ahead: units are added while fewer are under way, so the last one may
        overshoot (and is counted). 0 gathers only when needed.
    max_live_parameters : int, optional
        Elements that may be gathered at a time. Nothing is prefetched or kept beyond it; the unit
        that is needed is gathered all the same.
    max_reuse_distance : int, default 0
        Keep a unit whose next use, by the trace, is no more than this many elements of other
        units away. 0 drops every unit after its last use in a pass.
    reshard_after_forward : bool or collection of str, default True
        Whether units are dropped between the forward and the backward pass; or the names of those
        that are (FSDP2 keeps the root, the last unit to be dropped).

    Attributes
    ----------
    state : TraceState
    """

    def __init__(
        self,
        optimizer,
        *,
        prefetch_bucket_size=0,
        max_live_parameters=None,
        max_reuse_distance=0,
        reshard_after_forward=True,
    ):
        self.optimizer = optimizer
        self.ahead = _at_least_zero("prefetch_bucket_size", prefetch_bucket_size)
        limit = math.inf if max_live_parameters is None else max_live_parameters
        self.max_live = _at_least_zero("max_live_parameters", limit)
        self.reuse_distance = _at_least_zero("max_reuse_distance", max_reuse_distance)
        self.gathered_units = tuple(u for u in optimizer.units if optimizer.gathers(u))
        self._dropped_early = self._names(reshard_after_forward)
        self._by_name = {unit.name: unit for unit in self.gathered_units}
        self.state = TraceState.INVALID
        self.trace = ()
        self._seen = []
        self._in_flight = {}  # unit name -> Pending
        self._counts = Counter()

    def _names(self, reshard_after_forward):
        """Return the names of the units that are dropped after their forward use."""
        every = {unit.name for unit in self.optimizer.units}
        if isinstance(reshard_after_forward, bool):
            return every if reshard_after_forward else set()
        names = set(reshard_after_forward)
        if isinstance(reshard_after_forward, str) or names - every:
            raise UsageError(
                "reshard_after_forward must be True, False, or names of units "
                f"({', '.join(sorted(every))}); got {reshard_after_forward!r}"
            )
        return names

    # --- one step ----------------------------------------------------------------------------

    def begin_step(self):
        """Start following the trace from its beginning, or recording one."""
        self._seen.clear()
        self._counts.clear()
        if self.state is TraceState.INVALID:
            self.state = TraceState.RECORDING
        if self.state is TraceState.COMPLETE:
            self._look_ahead()

    def end_step(self):
        """Finish the trace and drop what is still gathered; after the last backward pass."""
        if self.state is TraceState.RECORDING:
            if self.gathered_units:
                names = [unit.name for unit in self.gathered_units]
                agree_on_trace(self.optimizer.world, self._seen, names)
            self.trace, self.state = tuple(self._seen), TraceState.COMPLETE
        elif self.state is TraceState.COMPLETE and len(self._seen) < len(self.trace):
            self._invalidate()
        # What was kept for a use that never came must not outlive the update of its parameters.
        self._drop_all()

    def abandon(self):
        """Give a step up: wait for what is in flight and drop everything gathered."""
        self._invalidate()
        self._drop_all()

    def _drop_all(self):
        """Drop every unit, and the widened copies of those that are not gathered."""
        for unit in self.optimizer.units:
            self.optimizer.reshard(unit)

    @property
    def counts(self):
        """How the fetches since `begin_step` were served."""
        return FetchCounts(**self._counts)

    def fetch(self, unit):
        """Return a unit's parameters to compute with, name -> ``(R, *shape)`` float32.

        Waits for the unit if it is under way, gathers it if it is not, and issues the gathers of
        the units that the trace says come next.
        """
        if unit.name in self._by_name and unit.name not in self.optimizer.gathered_names:
            arriving = self._in_flight.pop(unit.name, None)
            self._follow(unit)
            if arriving is not None:
                arriving.wait()
                self._counts["hits"] += 1
            elif unit.unsharded is not None:
                self._counts["kept"] += 1
            else:
                self.optimizer.stage_of(unit).unshard(unit)
                self._counts["misses"] += 1
            if self.state is TraceState.COMPLETE:
                self._look_ahead()
        return self.optimizer.unshard(unit)

    def release(self, unit, *, forward):
        """Let a unit go after its last use in a pass, unless it is to be kept."""
        if self._keeps(unit, forward):
            self.optimizer.put_by(unit)
        else:
            self.optimizer.reshard(unit)

    def _keeps(self, unit, forward):
        """Whether a unit stays gathered until its next use."""
        if unit.name not in self._by_name or self._live() > self.max_live:
            return False
        if forward and unit.name not in self._dropped_early:
            return True
        if self.state is not TraceState.COMPLETE or self.reuse_distance == 0:
            return False
        distance = 0
        for name in self.trace[len(self._seen) :]:
            if name == unit.name:
                return distance <= self.reuse_distance
            distance += self._by_name[name].layout.padded_numel
        return False

    # --- following the trace -------------------------------------------------------------------

    def _follow(self, unit):
        """Note a fetch, and check it against the trace."""
        at = len(self._seen)
        self._seen.append(unit.name)
        if self.state is TraceState.COMPLETE and self.trace[at : at + 1] != (unit.name,):
            self._invalidate()

    def _invalidate(self):
        """Give the trace up: wait for what is in flight and drop it."""
        self.state = TraceState.INVALID
        for name, pending in self._in_flight.items():
            pending.wait()
            self.optimizer.reshard(self._by_name[name])
            self._counts["wasted"] += 1
        self._in_flight.clear()

    def _look_ahead(self):
        """Issue the gathers of the next units, as far as bucket and limit allow."""
        under_way = sum(self._by_name[name].layout.padded_numel for name in self._in_flight)
        for name in self.trace[len(self._seen) :]:
            if under_way >= self.ahead:
                return
            unit = self._by_name[name]
            if name in self._in_flight or unit.unsharded is not None:
                continue
            if self._live() + unit.layout.padded_numel > self.max_live:
                return
            with self.optimizer.world.deferred() as pending:
                self.optimizer.stage_of(unit).unshard(unit)
            self._in_flight[name] = pending
            under_way += unit.layout.padded_numel

    def _live(self):
        """Elements of the units gathered now, those under way included."""
        return sum(u.layout.padded_numel for u in self.gathered_units if u.unsharded is not None)


def agree_on_trace(world, trace, names):
    """Check that every rank fetched the same units in the same order.

    Parameters
    ----------
    world : World
    trace : sequence of str
        What the ranks of this process fetched.
    names : sequence of str
        All units, in the same order on every rank.

    Raises
    ------
    UsageError
        Naming the first difference and both sides. Lengths are compared first, so that nobody
        waits for a message that does not come.
    """
    number = {name: i for i, name in enumerate(names)}
    lengths_RK = np.full((world.hosted, 1), len(trace), np.int64)
    lengths = world.all_gather_scalars(lengths_RK, label="trace")[:, 0].tolist()
    # Every rank sends as many numbers as the longest trace has: -1 where its own has ended.
    codes_RK = np.full((world.hosted, max(lengths)), -1, np.int64)
    codes_RK[:, : len(trace)] = [number[name] for name in trace]
    codes_WK = world.all_gather_scalars(codes_RK, label="trace")
    traces = [[names[c] for c in row if c >= 0] for row in codes_WK.tolist()]
    check_same_trace(traces)


def check_same_trace(traces):
    """Check the orders of several ranks against rank 0's.

    Parameters
    ----------
    traces : sequence of sequence of str
        One a rank.

    Raises
    ------
    UsageError
        Naming the ranks, the first call that differs, and both lengths.
    """
    first = list(traces[0])
    for rank, other in enumerate(traces):
        other = list(other)
        if other == first:
            continue
        at = next(
            (i for i, pair in enumerate(zip(first, other, strict=False)) if pair[0] != pair[1]),
            min(len(first), len(other)),
        )
        sides = [trace[at] if at < len(trace) else "nothing" for trace in (first, other)]
        raise UsageError(
            f"ranks fetch units in different order: call {at} is {sides[0]} on rank 0 and "
            f"{sides[1]} on rank {rank} (lengths {len(first)} and {len(other)}); every rank must "
            "run the same layers"
        )


def _at_least_zero(name, value):
    """Return a number of elements, or say what is wrong with it."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer) or not value >= 0:
        raise UsageError(f"{name} must be a number of elements of at least 0, got {value!r}")
    return value
