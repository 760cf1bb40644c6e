"""What the processes of an MPI run tell the one that started them, through a folder of files.

The launcher makes the folder, writes its own process id into it and names it in the environment.
Process p writes

==================  ===========================================================================
``p.start.json``    when it has joined: its process id, and the ranks it hosts
``p.status``        256 bytes, rewritten all the time: the collective it is in or came from
``p.failure.json``  why it cannot go on
``p.fault``         Python's own words if it crashes
``p.done``          when its work is done
``p.exit``          (its shell:) with which status it ended
==================  ===========================================================================

so that the launcher can say which rank was where even when that rank cannot speak any more.
Standard library only: the launcher needs no MPI.
"""

import faulthandler
import json
import mmap
import os
import shutil
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import final

__all__ = [
    "FOLDER_VARIABLE",
    "OUTPUT",
    "TICK",
    "Failure",
    "Member",
    "RunFolder",
    "is_alive",
    "mapped_segments",
    "ranks_text",
]

FOLDER_VARIABLE = "ZERO_NB_MPI_FOLDER"
"""Environment variable that names the folder."""

TICK = "\x1e"
"""First character of a line that reports progress, as JSON, to the launcher."""

OUTPUT = "\x1f"
"""First character of a line of the run's own output. MPI's launchers write to stdout, too."""

_STATUS_BYTES = 256


def ranks_text(ranks):
    """Return ``"rank 2"`` or ``"ranks 4-7"``; `ranks` are consecutive."""
    ranks = list(ranks)
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]}"


def mapped_segments(pid):
    """Return the paths of MPICH's shared memory that a process has and that still have a name.

    Parameters
    ----------
    pid : int or "self"

    Returns
    -------
    set of str
        Empty where the system does not tell (only Linux does).
    """
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return set()
    paths = {"/" + line.partition("/")[2] for line in lines if not line.endswith("(deleted)")}
    return {path for path in paths if path.startswith("/dev/shm/mpich_shm_")}


def is_alive(pid):
    """Whether a process exists and is not a mere entry waiting to be collected (bool)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        pass
    if Path("/proc/self/stat").exists():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@dataclass(frozen=True)
class Failure:
    """Why a process cannot go on.

    Attributes
    ----------
    kind : str
        ``"usage"`` (asked for something impossible), ``"raised"`` (an exception),
        ``"diverged"`` (ranks are at different collectives) or ``"stuck"`` (a rank did not come).
    message : str
        One line that names rank, collective and cause.
    missing : tuple of int
        Ranks that did not come.
    details : str
        Traceback.
    """

    kind: str
    message: str
    missing: tuple = ()
    details: str = ""


@final
class Member:
    """One process's side of the folder; without a folder it keeps everything to itself.

    Parameters
    ----------
    process : int
        Number of this process.
    folder : path-like, optional
        From the environment by default. On another machine it may not exist.
    """

    def __init__(self, process, folder=None):
        folder = folder or os.environ.get(FOLDER_VARIABLE)
        self.process = process
        self.folder = Path(folder) if folder and Path(folder).is_dir() else None
        self._where, self._waiting = b"", False
        if self.folder is None:
            self._map = bytearray(_STATUS_BYTES)
            return
        path = self._path("status")
        path.write_bytes(bytes(_STATUS_BYTES))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _STATUS_BYTES)

    def tell_crashes(self):
        """Let Python say where it crashes, should it come to that."""
        if self.folder is not None:
            self._fault = self._path("fault").open("w")  # open as long as this process lives
            faulthandler.enable(self._fault)

    @property
    def launched(self):
        """Whether a launcher of ours reads along."""
        return self.folder is not None

    def launcher_lives(self):
        """Whether the launcher that made the folder still exists, and the folder with it."""
        try:
            return is_alive(int((self.folder / "launcher").read_text()))
        except OSError:
            return False

    def _path(self, name):
        """Where this process writes `name`."""
        return self.folder / f"{self.process}.{name}"

    def _write(self, name, text):
        """Write a file so that nobody ever sees half of it."""
        if self.folder is not None and self.folder.is_dir():
            draft = self._path(name + ".part")
            draft.write_text(text)
            draft.replace(self._path(name))

    def start(self, ranks):
        """Say that this process hosts `ranks`."""
        self._write("start.json", json.dumps({"pid": os.getpid(), "ranks": list(ranks)}))

    def enter(self, where):
        """Note the collective that begins, for example ``"all_gather of 'head'"``."""
        self._where = where.encode()[: _STATUS_BYTES - 2]
        self._map[: len(self._where) + 2] = b"c" + self._where + b"\0"

    def wait(self, waiting):
        """Note whether this process waits inside the collective, or computes after it."""
        self._map[0] = ord("w" if waiting else "c")

    def tick(self, **values):
        """Report progress to the launcher; process 0 only."""
        if self.folder is not None and self.process == 0:
            sys.__stdout__.write(TICK + json.dumps(values) + "\n")
            sys.__stdout__.flush()

    def fail(self, failure):
        """Say why this process cannot go on."""
        self._write("failure.json", json.dumps(asdict(failure)))

    def done(self):
        """Say that this process's work is done."""
        self._write("done", "")


@final
class RunFolder:
    """The launcher's side: makes the folder, reads what the processes wrote, removes it.

    Parameters
    ----------
    processes : int
    """

    def __init__(self, processes):
        self.processes = processes
        self.path = Path(tempfile.mkdtemp(prefix="zero-nb-mpi-"))
        (self.path / "launcher").write_text(str(os.getpid()))

    def remove(self):
        """Delete the folder."""
        shutil.rmtree(self.path, ignore_errors=True)

    def count(self):
        """Return how many processes have joined, failed, ended and done their work, by name.

        One look at the folder, so that it may be had many times a second.
        """
        names = ("start.json", "failure.json", "exit", "done")
        found = [name.partition(".")[2] for name in os.listdir(self.path)]
        return {name.removesuffix(".json"): found.count(name) for name in names}

    def _json(self, process, name):
        """Read one JSON file of a process, None if there is none."""
        try:
            return json.loads((self.path / f"{process}.{name}.json").read_text())
        except FileNotFoundError:
            return None

    def starts(self):
        """Return what the processes that have joined said, by process: pid and ranks."""
        found = {process: self._json(process, "start") for process in range(self.processes)}
        return {process: start for process, start in found.items() if start}

    def failures(self):
        """Return the `Failure` of each process that has one, by process."""
        found = {process: self._json(process, "failure") for process in range(self.processes)}
        return {process: Failure(**failure) for process, failure in found.items() if failure}

    def ends(self):
        """Return with which status processes have ended, by process, as a shell tells it."""
        found = {}
        for process in range(self.processes):
            try:
                found[process] = int((self.path / f"{process}.exit").read_text())
            except (FileNotFoundError, ValueError):  # not yet, or being written
                continue
        return found

    def is_done(self, process):
        """Whether a process has said that its work is done."""
        return (self.path / f"{process}.done").exists()

    def where(self, process):
        """Say where a process was last heard of: ``"in all_gather of 'head'"``."""
        try:
            status = (self.path / f"{process}.status").read_bytes()
        except FileNotFoundError:
            status = b""
        place = status[1:].split(b"\0")[0].decode(errors="replace")
        if not place:
            return "before its first collective"
        return f"{'in' if status[:1] == b'w' else 'after'} {place}"

    def fault(self, process):
        """Return Python's own first words of a crash, in brackets, or nothing."""
        try:
            lines = (self.path / f"{process}.fault").read_text().splitlines()
        except FileNotFoundError:
            return ""
        return f"({lines[0]})" if lines else ""
