"""What happens when, as a trace that Perfetto and chrome://tracing open.

Lanes for computing and communicating, and memory of each rank by kind. The format is the Trace
Event Format: complete events (``ph: X``) with ``ts`` and ``dur`` in microseconds, counters
(``ph: C``), and names (``ph: M``). A process of the trace is a rank; the lanes stand in the first
one, because the ranks of one real process compute side by side.
"""

import json
import os
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import final

from zero_nb.config import UsageError
from zero_nb.train.ledger import KINDS

__all__ = [
    "COMM_LANE",
    "COMPUTE_LANE",
    "Tracer",
    "check_trace_path",
    "chrome_trace",
    "write_trace",
]

COMPUTE_LANE, COMM_LANE = 1, 2
"""Thread numbers of the two lanes."""


@final
class Tracer:
    """Records what an engine does, from now on until `stop`.

    Parameters
    ----------
    engine : Engine
        Its world's clock and its ledger report here.
    """

    def __init__(self, engine):
        self._engine = engine
        self._ranks = engine.world.ranks
        self._start = time.perf_counter()
        self._spans = []
        self._messages = engine.world.clock.spans = []
        self._waits = engine.world.clock.waits = []
        self._memory = [(self._start, kind, engine.ledger.bytes_by_rank(kind)) for kind in KINDS]
        engine.ledger.listener = self._listen
        engine.tracer = self

    def stop(self):
        """Record nothing more; what was recorded stays."""
        engine = self._engine
        engine.world.clock.spans = engine.world.clock.waits = engine.ledger.listener = None
        engine.tracer = None

    @contextmanager
    def span(self, name, kind):
        """Take the time of what happens inside the block."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._spans.append((name, kind, start, time.perf_counter()))

    @property
    def spans(self):
        """What was computed: a list of (name, kind, start, stop) in seconds from the start."""
        began = self._start
        return [
            (name, kind, start - began, stop - began) for name, kind, start, stop in self._spans
        ]

    @property
    def messages(self):
        """What was sent: a list of (Transfer, start, stop) in seconds from the start."""
        began = self._start
        return [(transfer, start - began, stop - began) for transfer, start, stop in self._messages]

    @property
    def waits(self):
        """When somebody stood still for a message: a list of (start, stop)."""
        return [(start - self._start, stop - self._start) for start, stop in self._waits]

    def _listen(self, event):
        """Note the memory after a ledger event."""
        by_rank = self._engine.ledger.bytes_by_rank(event.kind)
        self._memory.append((time.perf_counter(), event.kind, by_rank))

    def memory(self, rank):
        """Return the memory of a hosted rank over time.

        Returns
        -------
        list of (float, dict)
            Seconds from the tracer's start, and bytes by kind from then on.
        """
        row, held, series = self._ranks.index(rank), {}, []
        for at, kind, by_rank in self._memory:
            if held.get(kind) != by_rank[row]:
                held[kind] = by_rank[row]
                if len(held) == len(KINDS):
                    series.append((at - self._start, dict(held)))
        return series

    def to_chrome(self):
        """Return the trace as JSON can hold it, see `chrome_trace`."""
        spans = [
            (name if name == kind else f"{kind} {name}", kind, COMPUTE_LANE, start, stop, {})
            for name, kind, start, stop in self.spans
        ]
        spans += [("wait", "wait", COMPUTE_LANE, start, stop, {}) for start, stop in self.waits]
        spans += [
            (
                f"{transfer.collective} {transfer.label}",
                transfer.purpose,
                COMM_LANE,
                start,
                stop,
                {"elements_sent": transfer.elements_sent, "bytes_sent": transfer.bytes_sent},
            )
            for transfer, start, stop in self.messages
        ]
        return chrome_trace(spans, {rank: self.memory(rank) for rank in self._ranks})

    def write(self, path):
        """Write the trace; of several processes each writes a file of its own.

        Parameters
        ----------
        path : path-like
            ``trace.json``; the process whose first rank is 2 writes ``trace.rank2.json``.

        Returns
        -------
        Path
            What was written.
        """
        path = Path(path)
        if len(self._ranks) < self._engine.world.size:
            path = path.with_name(f"{path.stem}.rank{self._ranks[0]}{path.suffix}")
        write_trace(path, self.to_chrome())
        return path


def chrome_trace(spans, memory):
    """Lay spans and memory out in the Trace Event Format.

    Parameters
    ----------
    spans : sequence of (name, category, lane, start_s, stop_s, args)
        Of one process; those of a lane lie side by side or within one another.
    memory : mapping of int to sequence of (at_s, mapping of kind to bytes)
        By rank; the lanes are named after the first and the last.

    Returns
    -------
    dict
        ``{"traceEvents": [...], "displayTimeUnit": "ms"}``, sorted by time.
    """
    ranks = sorted(memory)
    hosted = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
    names = [_named("process_name", f"rank {rank}", rank, 0) for rank in ranks]
    names += [
        _named("thread_name", f"{what} ({hosted})", ranks[0], lane)
        for what, lane in (("computing", COMPUTE_LANE), ("communicating", COMM_LANE))
    ]
    events = [
        {
            "name": name,
            "cat": category,
            "ph": "X",
            "pid": ranks[0],
            "tid": lane,
            "ts": start * 1e6,
            "dur": max(0.0, stop - start) * 1e6,
            "args": args,
        }
        for name, category, lane, start, stop, args in spans
    ]
    events += [
        {
            "name": "bytes",
            "ph": "C",
            "pid": rank,
            "tid": 0,
            "ts": at * 1e6,
            "args": {kind: int(value) for kind, value in totals.items()},
        }
        for rank, series in memory.items()
        for at, totals in series
    ]
    events.sort(key=lambda event: event["ts"])
    return {"traceEvents": names + events, "displayTimeUnit": "ms"}


def _named(what, name, pid, tid):
    """Return the metadata event that names a process or a lane."""
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def write_trace(path, trace):
    """Write a trace in one step: never half a file.

    Parameters
    ----------
    path : path-like
        The folder must exist.
    trace : dict
        From `Tracer.to_chrome` or `chrome_trace`.
    """
    path = Path(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(trace, file, allow_nan=False)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp makes the file private
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def check_trace_path(path):
    """Refuse a path no trace can be written to; a `UsageError` says why."""
    path = Path(path)
    if path.is_dir():
        raise UsageError(f"the trace {path} is a folder; give a file, such as trace.json")
    if not path.parent.is_dir():
        raise UsageError(f"there is no folder {path.parent} to write the trace {path.name} to")
