"""A world of real processes: the same collectives over MPI. The only file that imports mpi4py.

Shape suffixes: R ranks hosted by this process, W world_size, P processes (W = P * R), F padded
flat length, S = F // W.

[Note: sums in rank order]
MPI's own reductions add in an order of their own choice, so their bits differ from one number of
processes to the next. Here every slice goes to its owner unsummed (all-to-all), and is added
there in rank order: (W-1)/W of the bytes, as on a ring, and the bits of `SimulatedWorld`.

[Note: polite waiting]
Blocking inside MPI spins, and with more processes than cores the spinning ones keep the others
from computing. Every call here is non-blocking and is tested 200 times (10 if there are fewer
cores than processes: measured, half the time at 4 processes on 2 cores), then between sleeps of
no length, then of half a millisecond; Ctrl-C is heard, and a deadline ends the wait.

[Note: order check]
Each process tells every other which collective it begins, in 128 bytes that travel beside the
collective's own messages: ranks that diverge get an error naming both sides instead of a hang,
and whoever waits in vain knows for whom.

[Note: what passes through MPI]
A process with R ranks sends to the other processes what their ranks need: R (W-R) slices in a
reduce_scatter, and its R slices once to each of the P-1 others in an all_gather. What its own ranks
give each other is copied without MPI. Both are counted, by purpose; together they are R times
what the log books for one rank. (A broadcast travels along a chain: the last process sends
nothing, as the last rank of a ring does.) With one rank a process everything passes through MPI.
Order checks, and the figures gathered at the end, are counted apart.
"""

import math
import os
import socket
import struct
import sys
import time
from collections import Counter
from importlib.util import find_spec
from typing import final

import numpy as np

from zero_nb.cluster.launch import INSTALL_HINT, processes_here
from zero_nb.cluster.rundir import Member, ranks_text
from zero_nb.cluster.world import PURPOSES, World
from zero_nb.config import UsageError
from zero_nb.core import rank_axis

__all__ = ["DEADLINE_S", "CollectiveError", "MPIWorld", "load_mpi"]

DEADLINE_S = 120.0
"""Seconds a rank waits inside one collective before it gives up."""

_BLOCK_ELEMENTS = 1 << 20  # what an all-to-all receives at a time: bounds its memory
_CHAIN_BYTES = 1 << 20  # pieces of a broadcast, so that all links of the chain work at once
_TESTS_BEFORE_SLEEP = 200
_TESTS_BEFORE_SLEEP_CROWDED = 10
_BUSY_S = 0.01  # after so long, half a millisecond more is not felt
_NAP_S = 0.0005
_TAG_ORDER, _TAG_CHAIN = 1, 2

_RECORD = struct.Struct("<qqq16s8s80s")  # number, elements, bytes, collective, purpose, label


class CollectiveError(RuntimeError):
    """A collective could not finish; its text names the rank, the collective and the cause.

    The world is of no use afterwards: end the run.

    Attributes
    ----------
    kind : str
        ``"diverged"`` or ``"stuck"``.
    missing : tuple of int
        Ranks that did not come.
    """

    def __init__(self, text, kind, missing=()):
        super().__init__(text)
        self.kind, self.missing = kind, tuple(missing)


def load_mpi():
    """Return the module ``mpi4py.MPI``; a `UsageError` says what to install if there is none."""
    if find_spec("mpi4py") is None:
        raise UsageError(INSTALL_HINT)
    from mpi4py import MPI

    return MPI


@final
class MPIWorld(World):
    """Ranks in several processes, one or more in each.

    Parameters
    ----------
    local_ranks : int, default 1
        Ranks hosted by each process (R), the same in all.
    comm : mpi4py.MPI.Comm, optional
        All processes by default.
    deadline_s : float
        Seconds to wait inside one collective before giving up.
    check_order : bool, default True
        See [Note: order check]. Its messages grow with the number of processes; switch it off
        for hundreds of them.
    member : Member, optional
        Who is told where this process is.

    Attributes
    ----------
    process, processes : int
        Number of this process, and how many there are (P).
    mpi_bytes, local_bytes : Counter
        Bytes this process gave to MPI for other processes, and bytes copied between its own
        ranks, by purpose.
    order_bytes : int
        Bytes of order checks this process sent.
    place : str
        The collective this process is in or came from, ``"all_gather of 'head'"``.
    member : Member
        Tells the launcher where this process is; its ``tick`` reports progress.

    Raises
    ------
    UsageError
        If mpi4py is missing, or processes disagree on `local_ranks`.
    """

    def __init__(
        self, local_ranks=1, *, comm=None, deadline_s=DEADLINE_S, check_order=True, member=None
    ):
        self._mpi = load_mpi()
        comm = self._mpi.COMM_WORLD if comm is None else comm
        self.process, self.processes = comm.rank, comm.size
        self.deadline_s = float(deadline_s)
        first = self.process * local_ranks
        super().__init__(self.processes * local_ranks, range(first, first + local_ranks))
        self.mpi_bytes, self.local_bytes = Counter(), Counter()
        self.order_bytes = 0
        self.member = Member(self.process) if member is None else member
        self.place = ""
        self._number, self._now = 0, None
        self._checks, self._checking = (), False
        self._buffers = {}
        crowded = (processes_here() or self.processes) > (os.cpu_count() or 1)
        self._tests = _TESTS_BEFORE_SLEEP_CROWDED if crowded else _TESTS_BEFORE_SLEEP
        # A communicator of our own, so that nobody else's messages are taken for ours.
        self._comm, request = comm.Idup()
        self._wait([request])
        self._agree_on_local_ranks(local_ranks)
        if check_order and self.processes > 1:
            self._prepare_order_check()
        self._announce = self._begin

    def _agree_on_local_ranks(self, local_ranks):
        """Refuse processes that host different numbers of ranks."""
        mine, all_P = np.array([local_ranks]), np.empty(self.processes, np.int64)
        self._wait([self._comm.Iallgather(mine, all_P)])
        if (all_P != local_ranks).any():
            raise UsageError(
                f"every process must host as many ranks; got {all_P.tolist()} by process"
            )

    # --- the collectives ---------------------------------------------------------------------

    def _reduce_scatter(self, x_RF, fmt, out_RS):
        for columns, sums_RC in self._summed_blocks(x_RF, fmt):
            out_RS[:, columns] = sums_RC

    def _all_reduce(self, x_RF, fmt):
        # Every slice of a block has been sent when its sum is written over the own one.
        own_RS = self.own_shard(x_RF)
        for columns, sums_RC in self._summed_blocks(x_RF, fmt):
            own_RS[:, columns] = sums_RC
        self._all_gather_in_place(x_RF)

    def _all_gather(self, x_RS, out_RF):
        self._count_gather(x_RS.nbytes)
        self._wait([self._comm.Iallgather(_bytes(x_RS), _bytes(out_RF[0]))])
        self._spread(out_RF)

    def _all_gather_in_place(self, x_RF):
        own_RS = self.own_shard(x_RF)
        for row, rank in zip(own_RS[1:], self.ranks[1:], strict=True):
            x_RF[0, rank * row.size : (rank + 1) * row.size] = row
        self._count_gather(own_RS.size * own_RS.itemsize)
        self._wait([self._comm.Iallgather(self._mpi.IN_PLACE, _bytes(x_RF[0]))])
        self._spread(x_RF)

    def _broadcast(self, x_RN, root):
        home = root // self.hosted
        if home == self.process and root != self.ranks[0]:
            x_RN[0] = x_RN[root - self.ranks[0]]
        self._chain(_bytes(x_RN[0]), home)
        self._spread(x_RN)
        self.local_bytes[self._purpose_now] += x_RN[1:].nbytes

    def _all_gather_scalars(self, values_RK):
        out_WK = np.empty((self.size, values_RK.shape[1]), values_RK.dtype)
        self._count_gather(values_RK.nbytes)
        self._wait([self._comm.Iallgather(_bytes(values_RK), _bytes(out_WK))])
        return out_WK

    @property
    def first_here(self):
        """Whether this is the first process on its machine (bool)."""
        for name in ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"):
            if name in os.environ:
                return os.environ[name] == "0"
        return self.process == 0

    def barrier(self, label):
        """Wait until every process has come here, however long it takes.

        Parameters
        ----------
        label : str
            What the meeting is for.
        """
        self._open(f"barrier of {label!r}", "barrier", "control", label, 0, 0)
        self._wait([self._comm.Ibarrier()], deadline_s=float("inf"))

    # --- moving bytes ------------------------------------------------------------------------

    def _summed_blocks(self, x_RF, fmt):
        """Yield column ranges of the own slices, and their sums (R, C) over all ranks.

        [Note: sums in rank order]. A block is what is received at a time.
        """
        rows, size, processes = self.hosted, self.size, self.processes
        shard = x_RF.shape[1] // size
        full_RPRS = x_RF.reshape(rows, processes, rows, shard)
        step = max(1, _BLOCK_ELEMENTS // (size * rows))
        for start in range(0, shard, step) or (0,):
            columns = slice(start, min(start + step, shard))
            width = columns.stop - start
            received_WRC = self._buffer("received", (size, rows, width), x_RF.dtype)
            counts = [rows * rows * width * x_RF.itemsize] * processes
            if rows == 1:  # the slices of one row can be sent from where they lie
                sent = x_RF
                offsets = [(p * shard + start) * x_RF.itemsize for p in range(processes)]
            else:
                sent = self._buffer("sent", (processes, rows, rows, width), x_RF.dtype)
                np.copyto(sent, full_RPRS[..., columns].transpose(1, 0, 2, 3))
                offsets = [p * counts[0] for p in range(processes)]
            self._count(counts[0] * (processes - 1), (rows - 1) * rows * width * x_RF.itemsize)
            packed = [p * counts[0] for p in range(processes)]
            byte = self._mpi.BYTE
            self._wait(
                [
                    self._comm.Ialltoallv(
                        [_bytes(sent), counts, offsets, byte],
                        [_bytes(received_WRC), counts, packed, byte],
                    )
                ]
            )
            sums_RC = self._buffer("sums", (rows, width), x_RF.dtype)
            rank_axis.sum_rows(received_WRC.reshape(size, rows * width), fmt, out=sums_RC)
            yield columns, sums_RC

    def _chain(self, data, home):
        """Pass `data` from process `home` to the next, and so on, in pieces."""
        comm, place = self._comm, (self.process - home) % self.processes
        before, after = (self.process - 1) % self.processes, (self.process + 1) % self.processes
        sending = []
        for start in range(0, data.size, _CHAIN_BYTES) or (0,):
            piece = data[start : start + _CHAIN_BYTES]
            if place > 0:
                self._wait([comm.Irecv(piece, before, _TAG_CHAIN)])
            if place < self.processes - 1:
                sending.append(comm.Isend(piece, after, _TAG_CHAIN))
                self._count(piece.nbytes, 0)
        self._wait(sending)

    def _spread(self, x_RN):
        """Copy row 0 to the other hosted ranks."""
        if self.hosted > 1:
            rank_axis.spread(x_RN[0], x_RN)

    def _buffer(self, name, shape, dtype):
        """Return a part of a standing buffer, so that a step allocates none."""
        needed = math.prod(shape) * np.dtype(dtype).itemsize
        if name not in self._buffers or self._buffers[name].nbytes < needed:
            self._buffers[name] = np.empty(needed, np.uint8)
        return self._buffers[name][:needed].view(dtype).reshape(shape)

    # --- counting ----------------------------------------------------------------------------

    @property
    def _purpose_now(self):
        """What the collective that runs is booked under."""
        return self._now.purpose

    def _count(self, mpi_bytes, local_bytes):
        """Book what this process gives to others, and what its own ranks give each other."""
        self.mpi_bytes[self._purpose_now] += mpi_bytes
        self.local_bytes[self._purpose_now] += local_bytes

    def _count_gather(self, own_bytes):
        """Book an all_gather to which this process contributes `own_bytes`."""
        through_mpi = own_bytes * (self.processes - 1)
        # Each of the R ranks receives W-1 slices of own_bytes / R; what MPI did not bring was
        # copied from row 0.
        self._count(through_mpi, own_bytes * (self.size - 1) - through_mpi)

    def process_figures(self, traced_peak_bytes=-1):
        """Return what each process sent and held; every process must ask.

        Parameters
        ----------
        traced_peak_bytes : int, optional
            What tracemalloc saw at most in this process; passed on to all.

        Returns
        -------
        list of dict
            One a process, in order: ``process``, ``ranks``, ``host``, ``logged_bytes`` (the log,
            times hosted ranks), ``mpi_bytes``, ``local_bytes`` (by purpose), ``order_bytes``,
            ``tracemalloc_peak_bytes`` (None if not given) and ``resident_bytes`` (the largest
            resident set so far; None where the system does not tell).
        """
        logged = self.log.total_bytes
        mine = [self.hosted * logged[purpose] for purpose in PURPOSES]
        mine += [self.mpi_bytes[purpose] for purpose in PURPOSES]
        mine += [self.local_bytes[purpose] for purpose in PURPOSES]
        mine += [self.order_bytes, traced_peak_bytes, _resident_bytes()]
        host = np.frombuffer(socket.gethostname().encode()[:64].ljust(64, b"\0"), np.int64)
        row = np.concatenate([np.array(mine, np.int64), host])
        self._open("the figures of all processes", "figures", "control", "", row.size, row.nbytes)
        table = np.empty((self.processes, row.size), np.int64)
        self._wait([self._comm.Iallgather(row, table)])
        return [self._figures(process, table[process]) for process in range(self.processes)]

    def _figures(self, process, row):
        """Return one process's row of the table as a dict."""
        numbers, kinds = row.tolist(), len(PURPOSES)
        logged, mpi, local = (numbers[i * kinds : (i + 1) * kinds] for i in range(3))
        order, traced, resident = numbers[3 * kinds : 3 * kinds + 3]
        first = process * self.hosted
        return {
            "process": process,
            "ranks": list(range(first, first + self.hosted)),
            "host": row[3 * kinds + 3 :].tobytes().rstrip(b"\0").decode(errors="replace"),
            "logged_bytes": dict(zip(PURPOSES, logged, strict=True)),
            "mpi_bytes": dict(zip(PURPOSES, mpi, strict=True)),
            "local_bytes": dict(zip(PURPOSES, local, strict=True)),
            "order_bytes": order,
            "tracemalloc_peak_bytes": None if traced < 0 else traced,
            "resident_bytes": None if resident < 0 else resident,
        }

    # --- order and waiting ---------------------------------------------------------------------

    def _prepare_order_check(self):
        """Make the requests that carry each process's record to every other."""
        self._record = np.zeros(_RECORD.size, np.uint8)
        self._records = np.zeros((self.processes, _RECORD.size), np.uint8)
        others = [p for p in range(self.processes) if p != self.process]
        comm, tag = self._comm, _TAG_ORDER
        receive = [comm.Recv_init(self._records[p], p, tag) for p in others]
        send = [comm.Send_init(self._record, p, tag) for p in others]
        self._checks, self._others = receive + send, others

    def _begin(self, transfer):
        """Take note of the collective that begins."""
        self._now = transfer
        self._open(
            f"{transfer.collective} of {transfer.label!r}",
            transfer.collective,
            transfer.purpose,
            transfer.label,
            transfer.elements_sent,
            transfer.bytes_sent,
        )

    def _open(self, place, collective, purpose, label, elements, sent_bytes):
        """Tell the others what begins here; what they begin is compared while waiting."""
        self._number += 1
        self.place = place
        self.member.enter(place)
        if self._checks:
            text = (collective.encode(), purpose.encode(), label.encode()[:80])
            _RECORD.pack_into(self._record, 0, self._number, elements, sent_bytes, *text)
            self._records[self.process] = self._record
            self._mpi.Prequest.Startall(self._checks)
            self.order_bytes += self._record.nbytes * len(self._others)
            self._checking = True

    def _wait(self, requests, deadline_s=None):
        """Wait for the order check that is under way, if any, and for `requests`, politely."""
        if not self._completed(requests):
            self.member.wait(True)
            self._wait_politely(requests, self.deadline_s if deadline_s is None else deadline_s)
            self.member.wait(False)

    def _wait_politely(self, requests, deadline_s):
        """See [Note: polite waiting]."""
        start = time.monotonic()
        for _ in range(self._tests):
            if self._completed(requests):
                return
        while not self._completed(requests):
            waited = time.monotonic() - start
            if waited > deadline_s:
                raise self._stuck(deadline_s)
            time.sleep(0 if waited < _BUSY_S else _NAP_S)

    def _completed(self, requests):
        """Whether the order check and `requests` are through; the ranks agree if so."""
        testall = self._mpi.Request.Testall
        if self._checking and testall(self._checks):
            self._checking = False
            self._compare_records()
        try:
            return testall(requests) and not self._checking
        except self._mpi.Exception as error:
            # Sizes that do not fit are what divergence looks like from here: say which it was.
            self._finish_order_check()
            raise CollectiveError(
                f"{ranks_text(self.ranks)} failed in {self.place}: {error}", "stuck"
            ) from None

    def _finish_order_check(self, patience_s=1.0):
        """Give the records that are under way a moment to come, and compare them."""
        start = time.monotonic()
        while self._checking and time.monotonic() - start < patience_s:
            if self._mpi.Request.Testall(self._checks):
                self._checking = False
                self._compare_records()
            time.sleep(_NAP_S)

    def _compare_records(self):
        """Raise if not every process is at the same collective."""
        if (self._records == self._record).all():
            return
        sides = {}
        for process, record in enumerate(self._records):
            sides.setdefault(record.tobytes(), []).append(process)
        told = "; ".join(
            f"{self._ranks_of(processes)} at {_described(record)}"
            for record, processes in sides.items()
        )
        raise CollectiveError(
            f"the ranks have diverged: {told}. All must make the same calls in the same order",
            "diverged",
        )

    def _stuck(self, deadline_s):
        """Return the error of a wait that took too long, naming whom it was for."""
        missing = []
        if self._checking:
            receiving = self._checks[: len(self._others)]
            arrived = [request.Test() for request in receiving]
            missing = [p for p, came in zip(self._others, arrived, strict=True) if not came]
        cause = (
            f"{self._ranks_of(missing)} did not come to it"
            if missing
            else "a rank stopped inside it, or the network did"
        )
        ranks = [p * self.hosted + i for p in missing for i in range(self.hosted)]
        return CollectiveError(
            f"{ranks_text(self.ranks)} waited {deadline_s:g} s in {self.place} (collective "
            f"{self._number}): {cause}",
            "stuck",
            ranks,
        )

    def _ranks_of(self, processes):
        """Name the ranks of some processes."""
        if self.hosted > 1:
            spans = [range(p * self.hosted, (p + 1) * self.hosted) for p in processes]
            return ", ".join(ranks_text(span) for span in spans)
        word = "rank" if len(processes) == 1 else "ranks"
        return f"{word} {', '.join(map(str, processes))}"


def _bytes(array):
    """Return a contiguous array's memory as bytes: bf16 has no type in MPI, bytes always do."""
    return array.reshape(-1).view(np.uint8)


def _described(record):
    """Say what a record of the order check announced."""
    number, elements, sent_bytes, *text = _RECORD.unpack(record)
    collective, purpose, label = (part.rstrip(b"\0").decode(errors="replace") for part in text)
    if collective == "barrier":
        return f"{label!r}"
    return (
        f"{collective} of {label!r} ({purpose}, {elements:,} elements, {sent_bytes:,} bytes, "
        f"collective {number})"
    )


def _resident_bytes():
    """Return the largest resident set of this process so far, or -1."""
    try:
        import resource
    except ImportError:  # Windows
        return -1
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
