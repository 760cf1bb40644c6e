"""What happens when, as a trace that Perfetto and chrome://tracing open.

Three lanes: computing, communicating, and memory of the fullest rank by kind. The format is the
Trace Event Format: complete events (``ph: X``) with ``ts`` and ``dur`` in microseconds, and
counters (``ph: C``).
"""

import json
import os
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import final

__all__ = ["COMM_LANE", "COMPUTE_LANE", "Tracer", "chrome_trace", "write_trace"]

COMPUTE_LANE, COMM_LANE = 1, 2


@final
class Tracer:
    """Records what an engine does; set ``engine.tracer`` to one.

    Parameters
    ----------
    engine : Engine
        Its world's clock and its ledger report here from now on.
    """

    def __init__(self, engine):
        self._start = time.perf_counter()
        self._spans = []
        self._memory = []
        self._clock = engine.world.clock
        self._clock.spans = []
        self._size = engine.world.size
        self._ranks = engine.world.ranks
        engine.ledger.listener = self._listen
        engine.tracer = self

    @contextmanager
    def span(self, name, kind):
        """Take the time of what happens inside the block."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._spans.append((name, kind, start, time.perf_counter()))

    def _listen(self, event):
        """Note the memory after a ledger event."""
        self._memory.append((time.perf_counter(), dict(event.total_bytes)))

    def to_chrome(self):
        """Return the trace as JSON can hold it."""
        spans = [
            (f"{kind} {name}", kind, COMPUTE_LANE, start - self._start, stop - self._start, {})
            for name, kind, start, stop in self._spans
        ]
        spans += [
            (
                f"{transfer.collective} {transfer.label}",
                transfer.purpose,
                COMM_LANE,
                start - self._start,
                stop - self._start,
                {"elements_sent": transfer.elements_sent, "bytes_sent": transfer.bytes_sent},
            )
            for transfer, start, stop in self._clock.spans
        ]
        memory = [(at - self._start, totals) for at, totals in self._memory]
        hosted = f"{self._ranks[0]}-{self._ranks[-1]}" if len(self._ranks) > 1 else self._ranks[0]
        return chrome_trace(spans, memory, f"ranks {hosted} of {self._size}")


def chrome_trace(spans, memory, process, *, pid=0):
    """Lay spans and memory out in the Trace Event Format.

    Parameters
    ----------
    spans : sequence of (name, category, lane, start_s, stop_s, args)
    memory : sequence of (at_s, mapping of kind to bytes)
    process : str
        Name shown for the process.
    pid : int

    Returns
    -------
    dict
        ``{"traceEvents": [...], "displayTimeUnit": "ms"}``.
    """
    lanes = {COMPUTE_LANE: "compute", COMM_LANE: "communication"}
    events = [_named("process_name", process, pid, 0)]
    events += [_named("thread_name", name, pid, lane) for lane, name in lanes.items()]
    for name, category, lane, start, stop, args in sorted(spans, key=lambda span: span[3]):
        events.append(
            {
                "name": name,
                "cat": category,
                "ph": "X",
                "pid": pid,
                "tid": lane,
                "ts": start * 1e6,
                "dur": max(0.0, stop - start) * 1e6,
                "args": args,
            }
        )
    for at, totals in memory:
        events.append(
            {
                "name": "bytes on the fullest rank",
                "ph": "C",
                "pid": pid,
                "tid": 0,
                "ts": at * 1e6,
                "args": {kind: int(value) for kind, value in totals.items()},
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _named(what, name, pid, tid):
    """Return the metadata event that names a process or a lane."""
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def write_trace(path, trace):
    """Write a trace in one step: never half a file.

    Parameters
    ----------
    path : path-like
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
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
