"""A world of ranks: the collectives over the rank axis, and the log of what was sent.

Shape suffixes: R ranks hosted by this process, W world_size, F padded flat length,
S = F // W. See [Note: the rank axis].

[Note: the rank axis]
Row ``i`` of every array is what rank ``world.ranks[i]`` holds. A collective is a change of
placement: partial (R, F) -> replicated (R, F) is all_reduce, partial -> sharded (R, S) is
reduce_scatter, sharded -> replicated is all_gather. R is W in the simulated world and 1 (or a
few) under MPI; the stages are written once, for both.
"""

import time
from abc import ABC, abstractmethod
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

import numpy as np

from zero_nb.config import UsageError, check_world_size
from zero_nb.core import flat
from zero_nb.core.precision import FLOAT32
from zero_nb.core.threads import start_threads

__all__ = ["PURPOSES", "CommClock", "Pending", "Transfer", "TransferLog", "World"]

PURPOSES = ("param", "grad", "control", "other")
"""What is sent: parameters, gradients, agreed scalars, or anything outside training steps."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """One collective as one rank sees it on a ring.

    Attributes
    ----------
    collective : str
        ``"all_reduce"``, ``"reduce_scatter"``, ``"all_gather"`` or ``"broadcast"``.
    purpose : str
        One of `PURPOSES`.
    elements_sent, bytes_sent : int
        What one rank sends (it receives as many).
    label : str
        The unit it was for.
    """

    collective: str
    purpose: str
    elements_sent: int
    bytes_sent: int
    label: str


@final
class TransferLog:
    """Every `Transfer` since the last `clear`, and running totals that are never cleared."""

    def __init__(self):
        self.transfers = []
        self.total_elements = Counter()
        self.total_bytes = Counter()

    def add(self, transfer):
        """Append one transfer."""
        self.transfers.append(transfer)
        self.total_elements[transfer.purpose] += transfer.elements_sent
        self.total_bytes[transfer.purpose] += transfer.bytes_sent

    def clear(self):
        """Forget the single transfers; the totals stay."""
        self.transfers.clear()

    def elements_sent(self, *purposes):
        """Elements one rank sent since `clear`, over the given purposes (default param, grad)."""
        wanted = purposes or ("param", "grad")
        return sum(t.elements_sent for t in self.transfers if t.purpose in wanted)

    def bytes_sent(self, *purposes):
        """Bytes one rank sent since `clear`, over the given purposes (default param, grad)."""
        wanted = purposes or ("param", "grad")
        return sum(t.bytes_sent for t in self.transfers if t.purpose in wanted)

    def __len__(self):
        return len(self.transfers)


@final
class CommClock:
    """How long messages of parameters and gradients took, and how long somebody waited for them.

    Attributes
    ----------
    comm_s : float
        Time in which a message was under way.
    exposed_s : float
        Of that, the time nobody computed; the rest was hidden behind computing.
    spans, waits : list of (Transfer, float, float) and of (float, float), or None
        Begin and end of each message, and of each time somebody stood still for one, in
        ``time.perf_counter`` seconds, if a trace is wanted.
    """

    def __init__(self):
        self.spans = self.waits = None
        self.reset()

    def reset(self):
        """Start from zero; spans and waits are kept."""
        self.comm_s = self.exposed_s = 0.0

    def add(self, transfer, start, stop, *, waited):
        """Book one message; `waited` says that the caller stood still for it."""
        if self.spans is not None:
            self.spans.append((transfer, start, stop))
        if transfer.purpose in ("param", "grad"):
            self.comm_s += stop - start
            if waited:
                self.add_wait(start, stop)

    def add_wait(self, start, stop):
        """Book that somebody stood still."""
        self.exposed_s += stop - start
        if self.waits is not None:
            self.waits.append((start, stop))


class Pending:
    """Collectives under way; the plain one has nothing to wait for."""

    def wait(self):
        """Return once every result is there."""


# Elements one rank sends on a ring for a message of n elements (n a multiple of W): n (W-1)/W
# for reduce_scatter and all_gather, twice that for all_reduce, which is one after the other.
# A broadcast is passed on along the ring: every rank but the last sends all of it once.
_RING_ELEMENTS = {
    "reduce_scatter": lambda n, world_size: n // world_size * (world_size - 1),
    "all_gather": lambda n, world_size: n // world_size * (world_size - 1),
    "all_reduce": lambda n, world_size: 2 * (n // world_size) * (world_size - 1),
    "broadcast": lambda n, world_size: n if world_size > 1 else 0,
}


class World(ABC):
    """The ranks, the collectives between them, and the log of what they sent.

    Parameters
    ----------
    size : int
        Number of ranks (world_size, the paper's N_d).
    ranks : sequence of int
        The consecutive global ranks hosted by this process.

    Attributes
    ----------
    size : int
    ranks : tuple of int
    log : TransferLog
    clock : CommClock

    Notes
    -----
    Sums are taken in float32, in rank order, starting from rank 0's value, and rounded to the
    stored format once; no collective divides (the mean is in the loss). Every world gives the
    same bits. A message of no elements (empty parameters) is neither sent nor logged.
    """

    def __init__(self, size, ranks):
        self.size = check_world_size(size)
        self.ranks = tuple(int(rank) for rank in ranks)
        first = self.ranks[0] if self.ranks else -1
        if self.ranks != tuple(range(first, first + len(self.ranks))) or not (
            0 <= first and self.ranks[-1] < self.size
        ):
            raise UsageError(
                f"hosted ranks must be consecutive and within 0..{self.size - 1}, got {ranks}"
            )
        start_threads()
        self.log = TransferLog()
        self.clock = CommClock()
        self._purpose = None
        # Called with each `Transfer` before it happens, for worlds whose ranks could disagree.
        self._announce = None

    @property
    def hosted(self):
        """Number of ranks hosted by this process (R)."""
        return len(self.ranks)

    def __repr__(self):
        return f"{type(self).__name__}(size={self.size}, hosted={self.hosted})"

    @contextmanager
    def purpose(self, purpose):
        """Book every transfer inside the block under `purpose` (for example ``"other"``)."""
        before, self._purpose = self._purpose, _check_purpose(purpose)
        try:
            yield self
        finally:
            self._purpose = before

    @contextmanager
    def deferred(self):
        """Let the collectives inside the block go on while the caller computes.

        Their arguments are checked, their results allocated and their transfers logged at once,
        in program order, so that bytes do not depend on timing; only the filling happens later.

        Yields
        ------
        Pending
            To be waited for before a result is read or an argument changed.
        """
        yield Pending()

    # --- the collectives -----------------------------------------------------------------

    def all_reduce(self, x_RF, *, purpose="grad", fmt=FLOAT32, label=""):
        """Sum over ranks, in place: partial -> replicated.

        Parameters
        ----------
        x_RF : ndarray, shape (R, F), dtype of `fmt`
            Each rank's contribution; every row becomes the sum.
        purpose : str
            One of `PURPOSES`.
        fmt : Format
            How the elements are stored (and sent).
        label : str
            Name for the log.

        Returns
        -------
        ndarray, shape (R, F)
            `x_RF` itself.

        Raises
        ------
        UsageError
            If the shape, dtype or layout does not fit.
        """
        purpose = self._booked_as(purpose)
        self._check_full("all_reduce", x_RF, fmt)
        if x_RF.size:
            self._send(
                "all_reduce",
                x_RF.shape[1],
                fmt.itemsize,
                purpose,
                label,
                lambda: self._all_reduce(x_RF, fmt),
            )
        return x_RF

    def reduce_scatter(self, x_RF, *, purpose="grad", fmt=FLOAT32, label=""):
        """Sum over ranks, each rank keeping its slice: partial -> sharded.

        Parameters
        ----------
        x_RF : ndarray, shape (R, F), dtype of `fmt`
            Each rank's contribution; left as it is.

        Returns
        -------
        ndarray, shape (R, S)
            Freshly allocated: row i is slice ``ranks[i]`` of the sum.
        """
        purpose = self._booked_as(purpose)
        self._check_full("reduce_scatter", x_RF, fmt)
        out_RS = np.empty((self.hosted, x_RF.shape[1] // self.size), fmt.dtype)
        if x_RF.size:
            self._send(
                "reduce_scatter",
                x_RF.shape[1],
                fmt.itemsize,
                purpose,
                label,
                lambda: self._reduce_scatter(x_RF, fmt, out_RS),
            )
        return out_RS

    def all_gather(self, x_RS, *, out=None, purpose="param", fmt=FLOAT32, label=""):
        """Join the slices of all ranks on every rank: sharded -> replicated.

        Parameters
        ----------
        x_RS : ndarray, shape (R, S), dtype of `fmt`
            A contiguous array, or the view `own_shard(out)`: then the slices already stand in
            place and only the others' are filled in.
        out : ndarray, shape (R, F), optional
            Where to write; allocated if not given.

        Returns
        -------
        ndarray, shape (R, F)
        """
        purpose = self._booked_as(purpose)
        fits = isinstance(x_RS, np.ndarray) and x_RS.ndim == 2 and x_RS.shape[0] == self.hosted
        if not fits or x_RS.dtype != fmt.dtype:
            raise UsageError(
                f"all_gather takes ({self.hosted}, S) {fmt.dtype} shards, one row a hosted rank; "
                f"got {_described(x_RS)}"
            )
        full = x_RS.shape[1] * self.size
        if out is None:
            out = np.empty((self.hosted, full), fmt.dtype)
        elif not isinstance(out, np.ndarray) or out.shape != (self.hosted, full):
            raise UsageError(
                f"all_gather of {x_RS.shape} shards needs out of shape "
                f"({self.hosted}, {full}), got {_described(out)}"
            )
        self._check_full("all_gather", out, fmt)
        if not out.size:
            return out
        in_place = np.may_share_memory(x_RS, out)
        if in_place:
            own = self.own_shard(out)
            same_start = own.ctypes.data == x_RS.ctypes.data
            # A single row has no stride to compare.
            if not same_start or (self.hosted > 1 and own.strides != x_RS.strides):
                raise UsageError(
                    "all_gather shards overlap out; pass own_shard(out) or a separate array"
                )
        if in_place:
            fill = lambda: self._all_gather_in_place(out)  # noqa: E731
        else:
            own_RS = np.ascontiguousarray(x_RS)
            fill = lambda: self._all_gather(own_RS, out)  # noqa: E731
        self._send("all_gather", full, fmt.itemsize, purpose, label, fill)
        return out

    def broadcast(self, x_RN, *, root=0, purpose="other", fmt=FLOAT32, label=""):
        """Copy rank `root`'s row to every rank, in place.

        Parameters
        ----------
        x_RN : ndarray, shape (R, N), dtype of `fmt`
        root : int
            The rank whose row is kept.

        Returns
        -------
        ndarray, shape (R, N)
            `x_RN` itself.
        """
        purpose = self._booked_as(purpose)
        if root not in range(self.size):
            raise UsageError(f"broadcast root must be within 0..{self.size - 1}, got {root}")
        self._check_rows("broadcast", x_RN, fmt)
        if x_RN.size:
            self._send(
                "broadcast",
                x_RN.shape[1],
                fmt.itemsize,
                purpose,
                label,
                lambda: self._broadcast(x_RN, root),
            )
        return x_RN

    def all_gather_scalars(self, values_RK, *, purpose="control", label=""):
        """Make a few numbers of each rank known to all.

        Parameters
        ----------
        values_RK : ndarray, shape (R, K), int64 or float64

        Returns
        -------
        ndarray, shape (W, K)
            Row r is rank r's. To be combined in rank order, the same on every rank.
        """
        purpose = self._booked_as(purpose)
        values_RK = np.ascontiguousarray(values_RK)
        if values_RK.ndim != 2 or values_RK.shape[0] != self.hosted:
            raise UsageError(
                f"all_gather_scalars takes ({self.hosted}, K) values, got {values_RK.shape}"
            )
        numel = values_RK.shape[1] * self.size
        found = []
        self._send(
            "all_gather",
            numel,
            values_RK.itemsize,
            purpose,
            label,
            lambda: found.append(self._all_gather_scalars(values_RK)),
            at_once=True,
        )
        return found[0]

    def own_shard(self, x_RF):
        """Return the (R, S) view whose row i is slice ``ranks[i]`` of row i: no copy."""
        return flat.own_shard(x_RF, self.ranks, self.size)

    # --- what a world must do; arguments are checked, nothing is logged here ----------------

    @abstractmethod
    def _all_reduce(self, x_RF, fmt): ...

    @abstractmethod
    def _reduce_scatter(self, x_RF, fmt, out_RS): ...

    @abstractmethod
    def _all_gather(self, x_RS, out_RF): ...

    @abstractmethod
    def _all_gather_in_place(self, x_RF): ...

    @abstractmethod
    def _broadcast(self, x_RN, root): ...

    @abstractmethod
    def _all_gather_scalars(self, values_RK): ...

    # --- checks and the log -------------------------------------------------------------

    def _check_rows(self, collective, x_RN, fmt):
        """Refuse anything but a C-contiguous (R, N) array of the format's dtype."""
        if not isinstance(x_RN, np.ndarray) or x_RN.ndim != 2 or x_RN.shape[0] != self.hosted:
            raise UsageError(
                f"{collective} takes one row a hosted rank, ({self.hosted}, N); "
                f"got {_described(x_RN)}"
            )
        if x_RN.dtype != fmt.dtype or not x_RN.dtype.isnative:
            raise UsageError(
                f"{collective} of {fmt.name} takes native {fmt.dtype} elements, got {x_RN.dtype}"
            )
        if not (x_RN.flags.c_contiguous and x_RN.flags.aligned and x_RN.flags.writeable):
            raise UsageError(
                f"{collective} takes a C-contiguous, aligned, writable array; copy it first with "
                "np.ascontiguousarray"
            )

    def _check_full(self, collective, x_RF, fmt):
        """Like `_check_rows`, and F must divide among the ranks."""
        self._check_rows(collective, x_RF, fmt)
        if x_RF.shape[1] % self.size:
            raise UsageError(
                f"{collective} of {x_RF.shape[1]} elements over {self.size} ranks: not a "
                "multiple; pad the flat_param with zero_nb.core.flat.pad first"
            )

    def _booked_as(self, purpose):
        """Return the purpose to log under; refused before anything is sent."""
        return _check_purpose(purpose) if self._purpose is None else self._purpose

    def _send(self, collective, numel, itemsize, purpose, label, fill, *, at_once=False):
        """Announce a message of `numel` elements, have it carried out by `fill`, and log it."""
        elements = _RING_ELEMENTS[collective](numel, self.size)
        transfer = Transfer(collective, purpose, elements, elements * itemsize, label)
        if self._announce is not None:
            self._announce(transfer)
        if at_once:  # scalars: the answer is wanted here
            World._carry(self, transfer, fill)
        else:
            self._carry(transfer, fill)
        self.log.add(transfer)

    def _carry(self, transfer, fill):
        """Carry a message out, now; a world may do it later for what is `deferred`."""
        start = time.perf_counter()
        fill()
        self.clock.add(transfer, start, time.perf_counter(), waited=True)


def _check_purpose(purpose):
    """Return `purpose` if there is one of that name."""
    if purpose not in PURPOSES:
        raise UsageError(f"unknown purpose {purpose!r}; choose one of {', '.join(PURPOSES)}")
    return purpose


def _described(array):
    """Say what was given instead of the array that was expected."""
    if isinstance(array, np.ndarray):
        return f"{array.shape} {array.dtype}"
    return type(array).__name__
