"""All ranks in this process, each owning its own row of every array."""

import math
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import final

from zero_nb.cluster.world import Pending, World
from zero_nb.config import UsageError, check_world_size
from zero_nb.core import rank_axis
from zero_nb.core.precision import FLOAT32

__all__ = ["EmulatedLink", "SimulatedWorld"]

SMALL_SHARD = 1 << 10  # elements; below, W * W copies of a shard cost more than joining them first


@dataclass(frozen=True)
class EmulatedLink:
    """A link that messages are held up by, so that there is something to hide. Emulated.

    Parameters
    ----------
    bytes_per_s : float
        Bandwidth of one rank's link (beta is its inverse). Bytes, not bits.
    latency_s : float
        Start-up time of a message (alpha).

    Notes
    -----
    A message takes ``latency_s + bytes sent by one rank on a ring / bytes_per_s``, and then the
    time of the copy in memory. What it reads is read at the end of that time: a buffer that is
    written to too early shows in the result.
    """

    bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self):
        """Check both figures."""
        if not (math.isfinite(self.bytes_per_s) and self.bytes_per_s > 0):
            raise UsageError(f"bytes_per_s must be a finite number above 0, got {self.bytes_per_s}")
        if not (math.isfinite(self.latency_s) and self.latency_s >= 0):
            raise UsageError(f"latency_s must be a finite number of at least 0: {self.latency_s}")

    def seconds(self, transfer):
        """Return how long a message takes on this link."""
        return self.latency_s + transfer.bytes_sent / self.bytes_per_s


@final
class _UnderWay(Pending):
    """Messages under way, in order: in the communication thread, or still to be carried out."""

    def __init__(self, clock):
        self._clock, self._jobs = clock, []

    def add(self, job):
        """Wait for one more message; `job` returns when it has arrived."""
        self._jobs.append(job)

    def wait(self, since=None):
        """Return once every result is there, and book the time stood still.

        Parameters
        ----------
        since : float, optional
            When the caller began to stand still, if before this call.
        """
        start = time.perf_counter() if since is None else since
        while self._jobs:
            self._jobs.pop(0)()
        self._clock.add_wait(start, time.perf_counter())


@final
class SimulatedWorld(World):
    """A world whose ranks are the rows of this process's arrays.

    Every rank really owns its bytes: a collective copies and adds, no row is a view of
    another rank's row. A slice goes straight to its owner, and is added there in rank order;
    bytes are counted as on a ring, which moves as many.

    Parameters
    ----------
    size : int
        Number of ranks.
    link : EmulatedLink, optional
        Hold up messages of parameters and gradients. All go through one communication thread,
        in order, as on one link.
    """

    def __init__(self, size, *, link=None):
        super().__init__(size, range(check_world_size(size)))
        if link is not None and not isinstance(link, EmulatedLink):
            raise UsageError(f"link must be an EmulatedLink, got {type(link).__name__}")
        self.link = link
        self._under_way = None
        self._thread = None

    @contextmanager
    def deferred(self):
        """See `World.deferred`.

        On an emulated link a communication thread fills in the results. Without one nothing can
        be hidden on shared memory, so they are filled in when somebody waits for them: the
        latest moment allowed.
        """
        before, self._under_way = self._under_way, _UnderWay(self.clock)
        try:
            yield self._under_way
        finally:
            self._under_way = before

    def _carry(self, transfer, fill):
        held_up = self._is_held_up(transfer)
        if self._under_way is None and not held_up:
            super()._carry(transfer, fill)
            return
        job, start = [fill], time.perf_counter()
        if held_up:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="zero_nb-comm")
            arrival = self._thread.submit(self._fill, transfer, job).result
        else:
            arrival = partial(self._fill, transfer, job)
        waiting = _UnderWay(self.clock) if self._under_way is None else self._under_way
        waiting.add(arrival)
        if waiting is not self._under_way:
            waiting.wait(since=start)

    def _is_held_up(self, transfer):
        """Whether a message goes over the emulated link; one rank alone sends nothing."""
        on_link = transfer.purpose in ("param", "grad")
        return self.link is not None and self.size > 1 and on_link

    def _fill(self, transfer, job):
        """Carry a message out at the pace of the link, and book how long it took."""
        start = time.perf_counter()
        if self._is_held_up(transfer):
            time.sleep(self.link.seconds(transfer))
        # Taken out of the list: a thread refers to its job for a moment after it has said that it
        # is done, and must not keep the arrays alive that the caller drops then.
        job.pop()()
        self.clock.add(transfer, start, time.perf_counter(), waited=False)

    def _all_reduce(self, x_RF, fmt):
        if self.size == 1 and fmt is FLOAT32:
            return  # the sum of one row is the row; 16 bits would be widened and rounded again
        rank_axis.sum_rows_everywhere(x_RF, fmt)

    def _reduce_scatter(self, x_RF, fmt, out_RS):
        # Slice r of the sum is row r of the output, so with all ranks here the flat sum over
        # rows is the whole answer.
        rank_axis.sum_rows(x_RF, fmt, out=out_RS.reshape(-1))

    def _all_gather(self, x_RS, out_RF):
        rank_axis.spread(x_RS.reshape(-1), out_RF)

    def _all_gather_in_place(self, x_RF):
        if x_RF.shape[1] // self.size < SMALL_SHARD:
            # Joined once, then copied in one piece to every row, not in W tiny ones.
            shards = self.own_shard(x_RF).copy()  # reshape would not copy shards of one element
            rank_axis.spread(shards, x_RF)
            return
        rank_axis.spread_diagonal(x_RF)

    def _broadcast(self, x_RN, root):
        if self.size > 1:
            rank_axis.spread(x_RN[root], x_RN)

    def _all_gather_scalars(self, values_RK):
        return values_RK.copy()
