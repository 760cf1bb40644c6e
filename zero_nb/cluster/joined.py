"""A process's part in an MPI run: join it, and if something goes wrong end it for all."""

import io
import logging
import os
import sys
import threading
import time
import traceback
import tracemalloc
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import final

from zero_nb.cluster.mpi import DEADLINE_S, CollectiveError, MPIWorld, load_mpi
from zero_nb.cluster.rundir import OUTPUT, Failure, Member, mapped_segments, ranks_text
from zero_nb.config import UsageError

__all__ = ["PeakTrace", "joined"]

_LAUNCHER_GRACE_S = 5.0  # for the launcher to read what went wrong, and end this process
_LAUNCHER_POLL_S = 0.5
_OTHERS_GRACE_S = 0.5  # for process 0 to say what all have to say


@contextmanager
def joined(local_ranks=1, *, world_size=None, deadline_s=DEADLINE_S, check_order=True):
    """Join the processes a launcher started; if one of them fails, all end.

    Works under `zero_nb.cluster.launch.run_mpi` and under any other launcher of MPI (mpiexec,
    srun). Only process 0 writes to stdout within the block. A block that ends without an error
    waits for all others.

    Parameters
    ----------
    local_ranks : int, default 1
        Ranks hosted by each process.
    world_size : int, optional
        Refuse any other number of ranks.
    deadline_s, check_order
        See `MPIWorld`.

    Yields
    ------
    MPIWorld

    Raises
    ------
    UsageError
        If mpi4py is missing. No other error leaves the block: it is reported in one line that
        names the rank, and ends every process with status 1 (2 if it is a `UsageError`).
    """
    mpi = load_mpi()
    comm = mpi.COMM_WORLD
    member, world = Member(comm.rank), None
    member.tell_crashes()
    if member.launched:
        _end_with_launcher(mpi, member)
    try:
        world = MPIWorld(
            local_ranks, comm=comm, deadline_s=deadline_s, check_order=check_order, member=member
        )
        member.start(world.ranks)
        world.barrier("start")
        _unlink_segments()
        _check_found(world, world_size)
        with _heard(member):
            yield world
            sys.stdout.flush()
            world.barrier("the end of the run")
    except BaseException as error:  # whatever it is, the others must not wait for this process
        _end_all(mpi, member, world, error)
    member.done()


def _check_found(world, world_size):
    """Refuse a world of another size than asked for, or processes that do not see each other."""
    tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS", 1))
    if world.processes == 1 and tasks > 1:
        raise UsageError(
            f"srun started {tasks} tasks, but each sees itself alone; choose how they find each "
            "other: srun --mpi=pmi2 (MPICH) or srun --mpi=pmix (Open MPI)"
        )
    if world_size is not None and world_size != world.size:
        raise UsageError(
            f"--world-size {world_size} was asked for, but {world.size} ranks were started: "
            f"{world.processes} by the launcher, times --local-ranks {world.hosted}"
        )


# --- failing -----------------------------------------------------------------------------


def _end_all(mpi, member, world, error):
    """Report an error in one line, and take every process down."""
    failure = _failure(member, world, error)
    member.fail(failure)
    _unlink_segments()
    interrupted = isinstance(error, KeyboardInterrupt)
    if member.launched:
        time.sleep(_LAUNCHER_GRACE_S)
    elif not interrupted:
        if failure.kind != "raised" and member.process:
            time.sleep(_OTHERS_GRACE_S)
        details = failure.details if os.environ.get("ZERO_NB_DEBUG") else ""
        sys.stderr.write(f"{details}zero-nb: {' '.join(failure.message.split())}\n")
        sys.stderr.flush()
    mpi.COMM_WORLD.Abort(130 if interrupted else 2 if failure.kind == "usage" else 1)


def _failure(member, world, error):
    """Put an error into one line."""
    details = "".join(traceback.format_exception(error))
    if isinstance(error, UsageError):
        return Failure("usage", str(error), (), details)
    if isinstance(error, CollectiveError):
        return Failure(error.kind, str(error), error.missing, details)
    who = ranks_text(world.ranks) if world else f"process {member.process}"
    place = f"after {world.place}" if world and world.place else "before its first collective"
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return Failure("raised", f"{who} failed {place}: {what} ({_origin(error)})", (), details)


def _origin(error):
    """Return the file and line where an error was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "no traceback"


def _end_with_launcher(mpi, member):
    """Take all processes down when the launcher is no more, however it died."""

    def watch():
        while member.launcher_lives():
            time.sleep(_LAUNCHER_POLL_S)
        mpi.COMM_WORLD.Abort(1)

    threading.Thread(target=watch, daemon=True, name="zero_nb-launcher").start()


# --- being a good neighbour ---------------------------------------------------------------


def _unlink_segments():
    """Take MPICH's shared memory out of the file system, now that every process here has it.

    It stays mapped, and is gone with the last process however that ends; MPICH itself leaves it
    behind when a process is killed.
    """
    for path in mapped_segments("self"):
        with suppress(FileNotFoundError):  # a neighbour was quicker
            os.unlink(path)


@contextmanager
def _heard(member):
    """Let only process 0 write to stdout and log, its lines marked if our launcher reads them."""
    if member.process == 0 and not member.launched:
        yield
        return
    before, logger = sys.stdout, logging.getLogger("zero_nb")
    with open(os.devnull, "w") as nowhere:
        sys.stdout = nowhere if member.process else _Marked(before)
        logger.disabled = member.process > 0
        try:
            yield
        finally:
            sys.stdout, logger.disabled = before, False


class _Marked(io.TextIOBase):
    """Begins every line with `OUTPUT`."""

    def __init__(self, file):
        self.file, self.begins = file, True

    def writable(self):
        return True

    def write(self, text):
        for line in text.splitlines(keepends=True):
            self.file.write(OUTPUT + line if self.begins else line)
            self.begins = line.endswith("\n")
        return len(text)

    def flush(self):
        self.file.flush()


@final
class PeakTrace:
    """The most memory Python and NumPy allocated from now until some steps are done.

    Tracing makes steps of small models slower by half, so it ends when the peak is known: every
    step after the first allocates alike.

    Parameters
    ----------
    steps : int, default 2
    """

    def __init__(self, steps=2):
        self.steps, self._peak = steps, 0
        tracemalloc.start()

    def after_step(self):
        """Take note that a step is done."""
        self.steps -= 1
        if self.steps == 0:
            self.stop()

    def stop(self):
        """End the tracing, if that has not happened, and return the peak in bytes."""
        if tracemalloc.is_tracing():
            self._peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        return self._peak
