"""Bytes per rank by kind, over time: what is held, what is transient, and the peak.

The ledger counts storage, not names: an array is booked under the array that owns its memory,
once, however many views are registered; and it is booked out when that owner is really freed,
that is when the last view of it dies.
"""

import weakref
from dataclasses import dataclass
from typing import final

import numpy as np

from zero_nb.config import UsageError

__all__ = ["HELD_KINDS", "KINDS", "Ledger", "LedgerEvent", "owner_of"]

KINDS = ("param", "grad", "optim", "unsharded", "bucket", "activation", "workspace")
"""param, grad, optim: the model states of the paper. unsharded: gathered stage-3 units.
bucket: gradients on their way to their owners. activation: kept by the forward pass for the
backward pass. workspace: copies widened to float32 to compute with, and gradients before they
are rounded (NumPy has no 16-bit products); real GPUs do not need it."""

HELD_KINDS = ("param", "grad", "optim")


@dataclass(frozen=True, slots=True)
class LedgerEvent:
    """One array booked in or out, and the bytes of the fullest rank after it.

    Attributes
    ----------
    phase : str
        ``"forward"``, ``"backward"``, ``"reduce"``, ``"step"`` or ``"outside"``.
    label : str
        The unit or layer the array belongs to.
    kind : str
        One of `KINDS`.
    delta_bytes : int
        Of the rank with the most; negative when freed.
    total_bytes : dict
        Bytes on the fullest rank by kind, after the event.
    """

    phase: str
    label: str
    kind: str
    delta_bytes: int
    total_bytes: dict


def owner_of(array):
    """Return the array that owns the memory `array` looks into."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


@final
class Ledger:
    """Counts the bytes of registered arrays per hosted rank.

    Parameters
    ----------
    hosted : int
        Number of ranks hosted by this process (R).
    record : bool, default True
        Keep a timeline of `LedgerEvent` for the current step.

    Attributes
    ----------
    events : list of LedgerEvent
        Since the last `begin_step`.
    listener : callable or None
        Called with each `LedgerEvent` as it happens.
    """

    def __init__(self, hosted, *, record=True):
        self.hosted = hosted
        self.record = record
        self.phase = "outside"
        self.listener = None
        self.events = []
        self._entries = {}  # id of the owner -> (weak reference, kind, label, ranks, bytes of each)
        self._table = np.zeros((len(KINDS), hosted), np.int64)
        self._current = dict(zip(KINDS, self._table, strict=True))  # views of the table's rows
        self._total = np.zeros(hosted, np.int64)
        self._largest = dict.fromkeys(KINDS, 0)
        self._peak = 0

    def register(self, array, kind, label="", *, rank_index=None):
        """Book the memory behind `array` under `kind`.

        Parameters
        ----------
        array : ndarray
            With the rank axis first, unless `rank_index` says that one rank owns all of it.
        kind : str
            One of `KINDS`. Registering the same memory again moves it to the new kind.
        label : str
            For the timeline.
        rank_index : int or slice, optional
            The hosted ranks whose memory this is, when it is not all of them.

        Returns
        -------
        ndarray
            `array`, so that an assignment can be wrapped.
        """
        if kind not in self._current:
            raise UsageError(f"unknown kind of memory {kind!r}; choose one of {', '.join(KINDS)}")
        owner = owner_of(array)
        key = id(owner)
        known = self._entries.get(key)
        if known is not None:
            if known[1] == kind:
                return array
            self._book_out(key)
        span = self._span(rank_index)
        ranks = self._total[span].size
        # Rows of one array are equally long; what does not divide would be a wrong rank axis.
        assert owner.nbytes % max(ranks, 1) == 0, (owner.shape, ranks)
        per_rank = owner.nbytes // ranks
        reference = weakref.ref(owner, lambda _, key=key: self._book_out(key))
        self._entries[key] = (reference, kind, label, span, per_rank)
        self._book(kind, label, span, per_rank)
        return array

    def _span(self, rank_index):
        """Return the hosted ranks that an index, a slice or None (all of them) means, a slice."""
        if rank_index is None or isinstance(rank_index, slice):
            return slice(None) if rank_index is None else rank_index
        first = range(self.hosted)[rank_index]
        return slice(first, first + 1)

    def _book_out(self, key):
        """Forget the owner `key`: it was freed, or moves to another kind."""
        _, kind, label, span, per_rank = self._entries.pop(key)
        self._book(kind, label, span, -per_rank)

    def _book(self, kind, label, span, change):
        """Add `change` to the running sums of the ranks in `span` and note the event."""
        current = self._current[kind]
        for sums in (current[span], self._total[span]):
            sums += change
        fullest = int(self._total.argmax())
        if change > 0:  # what is freed sets no record
            self._largest[kind] = max(self._largest[kind], int(current[current.argmax()]))
            self._peak = max(self._peak, int(self._total[fullest]))
        if self.record or self.listener is not None:
            totals = dict(zip(KINDS, self._table[:, fullest].tolist(), strict=True))
            event = LedgerEvent(self.phase, label, kind, change, totals)
            if self.record:
                self.events.append(event)
            if self.listener is not None:
                self.listener(event)

    # --- reading it ----------------------------------------------------------------------

    def begin_step(self):
        """Start a new timeline and a new peak from what is held now."""
        self.events.clear()
        self._largest = {kind: int(values.max()) for kind, values in self._current.items()}
        self._peak = int(self._total.max())

    def current_bytes(self, kind=None):
        """Bytes now on the fullest rank, of one kind or of all together."""
        return int((self._total if kind is None else self._current[kind]).max())

    def held_bytes(self):
        """Bytes of the model states now, by kind, each on its fullest rank."""
        return {kind: self.current_bytes(kind) for kind in HELD_KINDS}

    def bytes_by_rank(self, kind):
        """Bytes of one kind now, one number a hosted rank."""
        return self._current[kind].tolist()

    @property
    def peak_bytes(self):
        """The largest sum over all kinds on one rank since `begin_step`."""
        return self._peak

    @property
    def largest_bytes(self):
        """The largest bytes of each kind on one rank since `begin_step`, each at its own time."""
        return dict(self._largest)
