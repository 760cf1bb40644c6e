"""Gradients on their way to their owners: what a backward pass writes, and what travels together.

Shape suffixes: R ranks hosted here, W world_size, F padded flat length of a unit, S = F // W,
C columns of a bucket.

[Note: buckets]
Seen as (W, S), a unit's gradient has one row for each owner. A bucket takes column ranges of it,
the same columns of every row, so a full bucket is reduce-scattered as it lies and every rank gets
its part of each unit in it. Units come in backward order; one that does not fit is cut, so all
buckets but the last are exactly full. Sums are element by element: results do not depend on the
bucket size. The buffer has min(reduce_bucket_size, padded numel of the model) elements, exists
during backward only, and is what lets stage 2 use more memory than stage 1 when it is large.

[Note: a bucket in flight]
With `overlap` one message is in flight while the next one is filled: a second bucket, or, where
every unit travels alone, the gradient of the unit before. It is waited for when the next message
is complete, and at the end of the backward pass; so two are alive at most, whatever the timing.
"""

from dataclasses import dataclass, field
from typing import final

import numpy as np

__all__ = ["GradientBuckets", "GradientBuffer"]


@final
class GradientBuffer:
    """The float32 gradient of one unit while its backward pass writes it, contiguous.

    Layers write into `targets`, so that no gradient is copied before it travels. A parameter used
    by several layers (tied weights) is written by the first and added to by the others.

    Parameters
    ----------
    unit : Unit

    Attributes
    ----------
    grad_RF : ndarray, shape (R, F), float32
        Padding is zero.
    """

    def __init__(self, unit):
        layout = unit.layout
        self.unit = unit
        self.grad_RF = np.empty((unit.world.hosted, layout.padded_numel), np.float32)
        self.grad_RF[:, layout.numel :] = 0.0
        # A float32 gradient is what travels; in a 16-bit recipe it is only computed with.
        kind = "bucket" if unit.recipe.wire.dtype == np.float32 else "workspace"
        unit.ledger.register(self.grad_RF, kind, unit.name)
        self._views = unit.views(self.grad_RF)
        self._written = set()
        self._more = []

    def targets(self, names):
        """Return where to write the gradients of some parameters: name -> ``(R, *shape)``.

        Parameters
        ----------
        names : iterable of str
            Those that are not this unit's are left out. Call `add_up` after writing.
        """
        targets = {}
        for name in names:
            if name not in self._views:
                continue
            view, key = self._views[name], self.unit.aliases.get(name, name)
            if key in self._written:
                targets[name] = np.empty(view.shape, np.float32)
                self._more.append((view, targets[name]))
            else:
                self._written.add(key)
                targets[name] = view
        return targets

    def add_up(self):
        """Add what later users of a parameter wrote."""
        with np.errstate(over="ignore", invalid="ignore"):  # the finite check sees to it
            for view, more in self._more:
                view += more
        self._more.clear()

    def finish(self):
        """Return the whole gradient; parameters that nothing wrote to have gradient zero."""
        for name in self.unit.layout.names:
            if name not in self._written:
                self._views[name][...] = 0.0
        return self.grad_RF


@dataclass
class _Bucket:
    """One buffer of a format: (R, W, C) seen flat, and which column ranges lie in it."""

    flat: np.ndarray
    columns: int
    used: int = 0
    ranges: list = field(default_factory=list)  # (unit, first column of the shard, columns)


@dataclass(frozen=True)
class _InFlight:
    """A message under way, what it will bring, and what must not change until it has."""

    pending: object
    shard_RC: np.ndarray
    ranges: tuple
    bucket: _Bucket | None
    sent: np.ndarray


@final
class GradientBuckets:
    """Reduce-scatters gradients to their owners, in buckets if a size is given.

    Parameters
    ----------
    world : World
    ledger : Ledger
    bucket_numel : int or None
        Elements of a bucket on one rank. None: every unit's gradient travels alone, from where
        backward wrote it, and there is no buffer.
    overlap : bool
        Keep one message in flight while the next one is made, see [Note: a bucket in flight].
    """

    def __init__(self, world, ledger, bucket_numel=None, *, overlap=False):
        self.world, self.ledger = world, ledger
        self.bucket_numel, self.overlap = bucket_numel, overlap
        self._filling = {}  # format -> bucket
        self._free = {}  # format -> an emptied buffer
        self._in_flight = []

    def reduce_scatter(self, unit, grad_RF):
        """Send a unit's partial float32 gradient (R, F) to its owners, now or in a full bucket."""
        unit.check_room()
        if self.bucket_numel is None or unit.layout.padded_numel == 0:
            self._send_alone(unit, grad_RF)
            return
        shard = unit.layout.shard_numel
        grad_RWS = grad_RF.reshape(self.world.hosted, self.world.size, shard)
        start = 0
        while start < shard:
            bucket = self._open(unit.recipe.wire)
            count = min(bucket.columns - bucket.used, shard - start)
            self._put(bucket, unit, grad_RWS, start, count)
            start += count
            if bucket.used == bucket.columns:
                self._send(self._filling.pop(unit.recipe.wire), unit.recipe.wire)

    def flush(self):
        """Reduce what is in the buckets and give their memory back; the end of a backward pass."""
        for fmt in list(self._filling):
            self._send(self._filling.pop(fmt), fmt)
        self._arrive()
        self._free.clear()

    def discard(self):
        """Forget what is in the buckets."""
        for message in self._in_flight:
            message.pending.wait()
        self._in_flight.clear()
        self._filling.clear()
        self._free.clear()

    def _send_alone(self, unit, grad_RF):
        """Send one unit's gradient from where it lies."""
        wire_RF = unit.to_wire(grad_RF)
        self._arrive()
        with self.world.deferred() as pending:
            shard_RS = self.world.reduce_scatter(wire_RF, fmt=unit.recipe.wire, label=unit.name)
        self._in_flight.append(_InFlight(pending, shard_RS, ((unit, None, None),), None, wire_RF))
        if not self.overlap:
            self._arrive()

    def _open(self, fmt):
        """Return the bucket being filled, making one if there is none."""
        if fmt not in self._filling:
            self._filling[fmt] = self._free.pop(fmt, None) or self._make(fmt)
        return self._filling[fmt]

    def _make(self, fmt):
        """Allocate a bucket."""
        columns = max(1, self.bucket_numel // self.world.size)
        flat = np.empty((self.world.hosted, self.world.size * columns), fmt.dtype)
        self.ledger.register(flat, "bucket", "bucket")
        return _Bucket(flat.reshape(-1), columns)

    def _put(self, bucket, unit, grad_RWS, start, count):
        """Copy columns start ... start + count of a gradient, rounded to the wire, to the end."""
        part = grad_RWS[:, :, start : start + count]
        wire = unit.recipe.wire
        if part.dtype != wire.dtype:
            part = self.ledger.register(part.copy(), "workspace", unit.name)
            part = self.ledger.register(wire.round(part), "workspace", unit.name)
        view = bucket.flat.reshape(self.world.hosted, self.world.size, bucket.columns)
        view[:, :, bucket.used : bucket.used + count] = part
        bucket.ranges.append((unit, start, count))
        bucket.used += count

    def _send(self, bucket, fmt):
        """Send a bucket; what was in flight before has to arrive first."""
        wire_RN = self._message(bucket)
        self._arrive()
        with self.world.deferred() as pending:
            shard_RC = self.world.reduce_scatter(wire_RN, fmt=fmt, label="bucket")
        self._in_flight.append(
            _InFlight(pending, shard_RC, tuple(bucket.ranges), bucket, bucket.flat)
        )
        if not self.overlap:
            self._arrive()

    def _message(self, bucket):
        """Return the used part of a bucket as one contiguous (R, W * columns) message."""
        hosted, size, used = self.world.hosted, self.world.size, bucket.used
        wire = bucket.flat
        if used < bucket.columns:
            # Close the gaps between the owners' rows, so that the message is contiguous; every
            # row moves towards the front, so going upwards overwrites nothing unread.
            for row in range(1, hosted * size):
                source = wire[row * bucket.columns : row * bucket.columns + used]
                wire[row * used : (row + 1) * used] = source.copy()
        return wire[: hosted * size * used].reshape(hosted, size * used)

    def _arrive(self):
        """Wait for what is in flight and hand each unit its part; its buffer is free again."""
        for message in self._in_flight:
            message.pending.wait()
            if message.bucket is None:
                message.ranges[0][0].accumulate(message.shard_RC)
                continue
            at = 0
            for unit, start, count in message.ranges:
                columns_Rn = np.ascontiguousarray(message.shard_RC[:, at : at + count])
                unit.accumulate_columns(columns_Rn, start)
                at += count
            message.bucket.used = 0
            message.bucket.ranges.clear()
            fmt = message.ranges[0][0].recipe.wire
            self._free[fmt] = message.bucket
        self._in_flight.clear()
