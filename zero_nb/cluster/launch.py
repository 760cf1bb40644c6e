"""Start the processes of an MPI run on this machine, watch over them, and leave nothing behind.

Standard library only, so that it can say what to install where MPI is missing.

[Note: one message]
MPI's own launcher kills everybody when somebody dies, prints a page about it, and names whoever
comes first in its table. So it must not notice before we do: a line of shell stands between it and
each process, writes down how the process ended, and waits. Together with what the processes
say themselves (see `rundir`) the first cause is known, is told in one line, and everybody is ended.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections import deque
from contextlib import contextmanager, suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from zero_nb.cluster.rundir import (
    FOLDER_VARIABLE,
    OUTPUT,
    TICK,
    RunFolder,
    is_alive,
    mapped_segments,
    ranks_text,
)
from zero_nb.config import UsageError, check_world_size

__all__ = [
    "INSTALL_HINT",
    "RunError",
    "find_mpiexec",
    "processes_here",
    "run_mpi",
    "share_cores",
    "under_launcher",
]

INSTALL_HINT = "MPI is not installed; run: pip install 'zero-nb[mpi]'"

_LAUNCHERS = ("PMI_SIZE", "PMIX_RANK", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
"""What MPICH's and Intel's mpiexec, PMIx, Open MPI's mpirun, and srun set for each process."""

_SHELL = """
"$@"
status=$?
p="${PMI_RANK:-${PMIX_RANK:-$OMPI_COMM_WORLD_RANK}}"
echo $status > "$ZERO_NB_MPI_FOLDER/$p.exit"
[ -e "$ZERO_NB_MPI_FOLDER/$p.done" ] || sleep 10
exit $status
"""
"""Stands between mpiexec and a process, see [Note: one message]; MPI's own traffic passes by it."""

_POLL_S = 0.02
_GRACE_S = 0.3  # from the first sign of trouble until all who can have said what they know
_STUCK_GRACE_S = 1.0  # the others' deadlines end a moment later
_START_S = 120.0  # for all processes to join
_LINGER_S = 10.0  # from the end of the work to the end of the processes
_TAIL_LINES = 40


class RunError(RuntimeError):
    """An MPI run that failed and was ended; its text names the rank, the collective, the cause.

    Attributes
    ----------
    details : str
        Traceback, or the last lines the processes wrote, if there are any.
    """

    def __init__(self, text, details=""):
        super().__init__(text)
        self.details = details


def under_launcher():
    """Whether this process was started by a launcher of MPI, ours or another (bool)."""
    return any(name in os.environ for name in _LAUNCHERS)


def processes_here():
    """Return how many processes of the run are on this machine (int), None if nobody says."""
    for name in ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE"):
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return None


def share_cores():
    """Give this process its share of the cores, unless the launcher has shared them out.

    To be called before Numba is imported; BLAS has one thread anyway.
    """
    bound = _cores() < (os.cpu_count() or 1)
    if not bound:
        threads = max(1, _cores() // (processes_here() or 1))
        os.environ.setdefault("NUMBA_NUM_THREADS", str(threads))


def find_mpiexec():
    """Return the path of mpiexec: this environment's own, else the first on PATH.

    Raises
    ------
    UsageError
        If mpi4py or mpiexec is missing; the text says what to install.
    """
    if find_spec("mpi4py") is None:
        raise UsageError(INSTALL_HINT)
    scripts = sysconfig.get_path("scripts")
    found = shutil.which("mpiexec", path=scripts) or shutil.which("mpiexec")
    if found is None:
        raise UsageError(
            f"there is no mpiexec in {scripts} or on PATH; run: pip install 'zero-nb[mpi]'"
        )
    return found


def run_mpi(
    argv,
    world_size,
    local_ranks=1,
    *,
    program=("-m", "zero_nb"),
    time_limit_s=None,
    progress=None,
    stdout=None,
    env=None,
):
    """Run a Python program as the processes of one world, and wait for it.

    Process 0's stdout comes through as it is written; anything the processes wrote to stderr
    comes at the end of a run that succeeds. The program joins the world with
    `zero_nb.cluster.joined.joined`.

    Parameters
    ----------
    argv : sequence of str
        The program's arguments.
    world_size : int
        Ranks in all.
    local_ranks : int, default 1
        Ranks a process; `world_size` is a multiple of it.
    program : sequence of str
        What Python runs: this package's command by default.
    time_limit_s : float, optional
        Seconds after which the run is ended.
    progress : callable, optional
        Called with a dict each time process 0 ticks.
    stdout : file, optional
        Instead of ``sys.stdout``.
    env : mapping of str to str, optional
        More environment variables for the processes.

    Raises
    ------
    UsageError
        If MPI is missing, the numbers do not fit, or the processes were asked for something
        impossible.
    RunError
        If a rank raised, was killed, diverged or did not answer, or time was up. All processes
        have been ended by then, as they are when Ctrl-C or SIGTERM ends this one.
    """
    processes = _processes(world_size, local_ranks)
    command = [*_mpiexec_command(processes), "/bin/sh", "-c", _SHELL, "sh"]
    command += [sys.executable, "-m", "mpi4py", *program, *argv]
    folder = RunFolder(processes)
    with _terminated_like_interrupted():
        run = None
        try:
            run = _Run(command, folder, progress, stdout or sys.stdout, env)
            run.watch(local_ranks, time_limit_s)
        finally:
            if run is not None:
                run.end()
            folder.remove()


def _processes(world_size, local_ranks):
    """Return how many processes host `world_size` ranks."""
    world_size = check_world_size(world_size)
    if local_ranks < 1 or world_size % local_ranks:
        raise UsageError(
            f"{world_size} ranks cannot be hosted {local_ranks} a process; --local-ranks must "
            f"divide --world-size"
        )
    if sys.platform == "win32":
        raise UsageError(
            "--engine mpi starts processes on Linux and macOS only; on Windows use WSL"
        )
    return world_size // local_ranks


@cache
def _is_hydra(mpiexec):
    """Whether mpiexec is MPICH's."""
    answer = subprocess.run([mpiexec, "--version"], capture_output=True, text=True, timeout=30)
    return "HYDRA" in answer.stdout


def _mpiexec_command(processes):
    """Return the beginning of the command line, for this machine whatever a scheduler offers."""
    mpiexec = find_mpiexec()
    own = ()
    if _is_hydra(mpiexec):
        own = ("-launcher", "fork", "-rmk", "user", "-localhost", "127.0.0.1")
    return [mpiexec, *own, "-n", str(processes)]


def _environment(folder, processes, more):
    """Return the processes' environment: one BLAS thread, and the cores shared out."""
    threads = str(max(1, _cores() // processes))
    return (
        os.environ
        | {
            FOLDER_VARIABLE: str(folder.path),
            "OPENBLAS_NUM_THREADS": "1",  # two would change the bits
            "MKL_NUM_THREADS": "1",
            "VECLIB_MAXIMUM_THREADS": "1",
            "OMP_NUM_THREADS": "1",
            "NUMBA_NUM_THREADS": threads,
            # Open MPI refuses both unless told; MPICH does not look.
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "PRTE_ALLOW_RUN_AS_ROOT": "1",
            "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
            "OMPI_MCA_rmaps_base_oversubscribe": "1",
        }
        | dict(more or {})
    )


def _cores():
    """Number of cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextmanager
def _terminated_like_interrupted():
    """Let SIGTERM unwind the stack as Ctrl-C does, so that the processes are ended too."""

    def stop(number, frame):
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Run:
    """mpiexec and its processes, from start to end."""

    def __init__(self, command, folder, progress, stdout, env):
        self.folder, self.progress, self.stdout = folder, progress, stdout
        self.lines = deque(maxlen=_TAIL_LINES)
        self.began, self.done_at = time.monotonic(), None
        self.mpiexec = subprocess.Popen(
            command,
            env=_environment(folder, folder.processes, env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            bufsize=1,
            start_new_session=True,  # Ctrl-C in a terminal reaches this process only
        )
        self.pumps = [
            threading.Thread(target=pump, daemon=True) for pump in (self._pump_out, self._pump_err)
        ]
        for pump in self.pumps:
            pump.start()

    def _pump_out(self):
        """Pass on what process 0 writes and reports; keep the rest, it is not ours."""
        for line in self.mpiexec.stdout:
            if line.startswith(OUTPUT):
                self._say(line[len(OUTPUT) :])
            elif not line.startswith(TICK):
                self.lines.append(line)
            elif self.progress is not None:
                self.progress(json.loads(line[len(TICK) :]))

    def _say(self, line):
        """Pass on a line, as long as somebody reads: ``zero-nb train ... | head`` stops early."""
        with suppress(BrokenPipeError):
            self.stdout.write(line)
            self.stdout.flush()

    def _pump_err(self):
        """Keep what anybody writes to stderr."""
        self.lines.extend(self.mpiexec.stderr)

    # --- watching --------------------------------------------------------------------------

    def watch(self, local_ranks, time_limit_s):
        """Return when the run has succeeded; raise when it has failed or time is up."""
        self.local_ranks = local_ranks
        while self.mpiexec.poll() is None:
            count = self.folder.count()
            self._check_time(time_limit_s, count["start"])
            if count["failure"] or (count["exit"] and self._ended()) or self._lingers(count):
                break
            time.sleep(_POLL_S)
        self._collect_causes()
        self._raise_failure()
        for pump in self.pumps:
            pump.join(timeout=_LINGER_S)  # to the last line
        sys.stderr.writelines(self.lines)

    def _check_time(self, time_limit_s, joined):
        """Refuse to go on after the time limit, or if not everybody has joined."""
        elapsed = time.monotonic() - self.began
        if time_limit_s is not None and elapsed > time_limit_s:
            raise RunError(f"the time limit of {time_limit_s:g} s is over; {self._whereabouts()}")
        if elapsed > _START_S and joined < self.folder.processes:
            starts = self.folder.starts()
            late = next(p for p in range(self.folder.processes) if p not in starts)
            raise RunError(f"{self._ranks(late)} has not joined after {_START_S:g} s", self._tail())

    def _lingers(self, count):
        """Whether all work has been done for a while, but not all processes end."""
        if count["done"] < self.folder.processes:
            return False
        self.done_at = self.done_at or time.monotonic()
        return time.monotonic() - self.done_at > _LINGER_S

    def _ended(self):
        """How the processes ended that were not done and had no failure to report: by process."""
        said, ends = self.folder.failures(), self.folder.ends()
        return {
            process: status
            for process, status in ends.items()
            if process not in said and not self.folder.is_done(process)
        }

    def _collect_causes(self):
        """Wait until everybody who can has said what went wrong."""
        failures = self.folder.failures()
        if any(failure.kind in ("usage", "raised") for failure in failures.values()):
            return
        stuck = any(failure.kind == "stuck" for failure in failures.values())
        end = time.monotonic() + (_STUCK_GRACE_S if stuck else _GRACE_S)
        while failures and time.monotonic() < end and len(failures) < self.folder.processes:
            time.sleep(_POLL_S)
            failures = self.folder.failures()

    def _raise_failure(self):
        """Raise the first cause there is, if there is one."""
        failures, ended = self.folder.failures(), self._ended()
        for kind in ("usage", "raised", "diverged"):
            for failure in failures.values():
                if failure.kind == kind == "usage":
                    raise UsageError(failure.message)
                if failure.kind == kind:
                    raise RunError(failure.message, failure.details)
        for process, status in ended.items():
            raise RunError(self._obituary(process, status), self._tail())
        for failure in failures.values():
            raise RunError(failure.message + self._silent(failure, failures), failure.details)
        status = self.mpiexec.poll()
        if status:
            raise RunError(f"mpiexec ended with status {status}", self._tail())

    def _obituary(self, process, status):
        """Say how a process ended, and where."""
        who, where = self._ranks(process), self.folder.where(process)
        number = status - 128  # how a shell says that it was a signal
        if number == signal.SIGKILL:
            return f"{who}: killed by SIGKILL {where} (by hand, or for want of memory)"
        if 0 < number < signal.NSIG:
            fault = self.folder.fault(process)
            return f"{who}: ended by {signal.Signals(number).name} {where} {fault}".rstrip()
        return f"{who}: ended with status {status} {where}{self._last_words()}"

    def _silent(self, failure, failures):
        """Say what is known of those a stuck rank waited for."""
        missing = [p for p in range(self.folder.processes) if p not in failures]
        if failure.missing:
            missing = sorted({rank // self.local_ranks for rank in failure.missing})
        where = [f"{self._ranks(p)} was last heard of {self.folder.where(p)}" for p in missing]
        return f"; {', '.join(where)}" if where else ""

    def _whereabouts(self):
        """Say where every process is."""
        processes = range(min(self.folder.processes, 8))
        return ", ".join(f"{self._ranks(p)} {self.folder.where(p)}" for p in processes)

    def _last_words(self):
        """Return the last error a process printed, if any."""
        for pump in self.pumps:
            pump.join(timeout=_GRACE_S)  # let it read what is there
        errors = [line for line in self.lines if re.match(r"(\w+\.)*\w+(Error|Exception)\b", line)]
        return f": {errors[-1].strip()}" if errors else ""

    def _ranks(self, process):
        """Name the ranks of a process."""
        first = process * self.local_ranks
        return ranks_text(range(first, first + self.local_ranks))

    def _tail(self):
        """Return the last lines the processes wrote to stderr."""
        return "".join(self.lines)

    # --- ending ----------------------------------------------------------------------------

    def end(self):
        """End every process, and take away what they leave."""
        pids = {start["pid"] for start in self.folder.starts().values() if is_alive(start["pid"])}
        if self.mpiexec.poll() is not None and not pids:
            self._close()
            return
        family = _descendants(self.mpiexec.pid)
        helpers = {pid for pid in family if _parents().get(pid) == self.mpiexec.pid}
        segments = set().union(*(mapped_segments(pid) for pid in family | pids))
        # The ranks first, so that mpiexec and its helper see them end, and end by themselves.
        _kill((family | pids) - helpers)
        with suppress(subprocess.TimeoutExpired):
            self.mpiexec.wait(timeout=0.5)
        _kill(family | pids | {self.mpiexec.pid})
        self.mpiexec.wait()
        for path in segments:
            with suppress(OSError):
                os.unlink(path)
        self._close()

    def _close(self):
        """Close the pipes once they are empty."""
        for pump in self.pumps:
            pump.join(timeout=1.0)
        for pipe in (self.mpiexec.stdout, self.mpiexec.stderr):
            with suppress(OSError):
                pipe.close()


# --- processes -----------------------------------------------------------------------------


def _parents():
    """Return the parent of every process."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError, ValueError):
            stat = (entry / "stat").read_text().rpartition(")")[2].split()
            parents[int(entry.name)] = int(stat[1])
    if parents:
        return parents
    table = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True)
    return dict(tuple(map(int, line.split())) for line in table.stdout.splitlines())


def _descendants(pid):
    """Return the processes started by `pid`, and by those, and so on."""
    parents = _parents()
    found, new = set(), {pid}
    while new:
        new = {child for child, parent in parents.items() if parent in new} - found
        found |= new
    return found


def _kill(pids):
    """Kill processes; those that are gone already do not matter."""
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
