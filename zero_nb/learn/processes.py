"""Start the programs of `real_ranks` as real processes from a notebook; step aside without MPI."""

import atexit
import inspect
import json
import re
import shutil
import sys
import tempfile
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import final

from zero_nb.cluster import launch
from zero_nb.config import UsageError
from zero_nb.learn import real_ranks

__all__ = [
    "ProcessRun",
    "Skipped",
    "Source",
    "new_folder",
    "show_part",
    "skip_without_mpi",
    "start_ranks",
    "why_no_mpi",
]

TIME_LIMIT_S = 50.0
"""Far more than a run takes; less than a notebook's cell may."""

_GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536"}
"""Lets the GNU C library give freed arrays back, so that the resident set shows what is left."""


def why_no_mpi():
    """Return why no processes can be started here, or ``""`` if they can (str)."""
    if sys.platform == "win32":
        return "processes of MPI are started on Linux and macOS only; on Windows use WSL"
    try:
        launch.find_mpiexec()
    except UsageError as error:
        return str(error)
    return ""


@final
@dataclass(frozen=True, repr=False)
class Skipped:
    """Why a notebook skips itself.

    Attributes
    ----------
    why : str
    """

    why: str

    def __repr__(self):
        """Return the line that a notebook shows."""
        why = self.why[:1].upper() + self.why[1:]
        return (
            f"{why}. Then restart the kernel. Until then this notebook skips all cells below; "
            "what they show is in the file as it was, if you close it without saving."
        )


def skip_without_mpi():
    """Let the cells below do nothing if no processes can be started here.

    To be called in the first cell: every cell that IPython runs after it is skipped.

    Returns
    -------
    Skipped or None
        None where MPI is installed.
    """
    why = why_no_mpi()
    if not why:
        return None
    if "IPython" in sys.modules:
        from IPython import get_ipython

        shell = get_ipython()
        if shell is not None:
            shell.input_transformers_cleanup.append(_skip)
    return Skipped(why)


def _skip(lines):
    """What IPython runs instead of a cell."""
    return ["pass\n"]


@final
@dataclass(frozen=True, repr=False)
class Source:
    """A part of the program that the ranks run, as its file has it.

    Attributes
    ----------
    name : str
    text : str
        Without its docstring.
    """

    name: str
    text: str

    def __repr__(self):
        """Return the code: this is what a notebook shows."""
        return f"From zero_nb/learn/real_ranks.py, run by every rank:\n{self.text}"

    def _repr_html_(self):
        """The same, in letters of one width."""
        import html

        title, _, code = repr(self).partition("\n")
        return (
            f'<p>{html.escape(title)}</p><pre style="font-family: monospace">'
            f"{html.escape(code)}</pre>"
        )


def show_part(name):
    """Show a part of the ranks' program.

    Parameters
    ----------
    name : str
        A key of `real_ranks.PARTS`.

    Returns
    -------
    Source

    Raises
    ------
    UsageError
        If there is none of this name.
    """
    part = _part(name)
    code = inspect.getsource(part).replace(f'"""{part.__doc__}"""', "", 1)
    lines = [line.partition("  # noqa")[0] for line in code.splitlines() if line.strip()]
    return Source(name, "\n".join(lines))


def _part(name):
    """A part by its name."""
    if name not in real_ranks.PARTS:
        raise UsageError(f"there is no part {name!r}; there are {', '.join(real_ranks.PARTS)}")
    return real_ranks.PARTS[name]


@final
@dataclass(frozen=True)
class ProcessRun:
    """What real processes told, and how their run ended.

    Attributes
    ----------
    told : dict
        What rank 0 wrote down, by part; lists and numbers.
    problem : str
        What the launcher said if the run was ended, else ``""``.
    """

    told: dict = field(repr=False)
    problem: str

    @property
    def places(self):
        """Where each rank was when they had diverged, by rank (dict of int to str).

        Empty if they had not.
        """
        found = {}
        _, _, sides = self.problem.partition("the ranks have diverged: ")
        for side in re.split(r"; |\. All must", sides):
            ranks, at, place = side.partition(" at ")
            if at and ranks.startswith("rank"):
                where = re.sub(r" \(.*", "", place)
                found |= {int(rank): where for rank in re.findall(r"\d+", ranks)}
        return dict(sorted(found.items()))


def start_ranks(world_size, parts, folder):
    """Run parts of the program as `world_size` processes, one rank in each, and wait for them.

    Parameters
    ----------
    world_size : int
    parts : sequence of str
        Keys of `real_ranks.PARTS`, in the order in which they are to be run.
    folder : Path
        Where the processes read and write.

    Returns
    -------
    ProcessRun

    Raises
    ------
    UsageError
        If MPI is missing or there is no such part.
    """
    for part in parts:
        _part(part)
    _compile()
    before = {path.name for path in folder.glob("*.json")}
    problem = ""
    try:
        launch.run_mpi(
            [str(folder), *parts],
            world_size,
            program=("-m", "zero_nb.learn.real_ranks"),
            time_limit_s=TIME_LIMIT_S,
            env=_GIVE_BACK,
        )
    except launch.RunError as error:
        problem = str(error)
    told = {
        path.stem: json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(folder.glob("*.json"))
        if path.name not in before
    }
    return ProcessRun(told, problem)


@cache
def _compile():
    """Compile what the ranks need here if need be, not in every process at once."""
    from zero_nb.compare import load_kernels

    load_kernels(0, precision="fp32")


def new_folder():
    """Make a folder for what processes exchange, removed when this process ends (Path)."""
    folder = Path(tempfile.mkdtemp(prefix="zero-nb-ranks-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
