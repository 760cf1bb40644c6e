"""Mark the exercises in learners' notebooks, against cases that they have not seen.

[Note: no sandbox]
Each notebook's answers run in a process of their own, with limits on time, memory and files, in an
empty folder. That protects a teacher from an endless loop and a forgotten bracket. It does not
protect from somebody who wants to do harm, or to be given a mark: such code runs with the
teacher's rights. Grade the work of people you know, or inside a container.
"""

import csv
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path
from typing import final

import zero_nb
from zero_nb.config import UsageError
from zero_nb.learn import limits
from zero_nb.learn.answers import read_answers, run_answers
from zero_nb.learn.checking import judge
from zero_nb.learn.registry import (
    find_exercise,
    find_prediction,
    has_check,
    keys_of,
    notebooks,
)
from zero_nb.learn.session import GUESSED, NOT_ATTEMPTED, NOT_YET, PASSED

__all__ = ["MISSING", "STOPPED", "UNREADABLE", "Mark", "grade", "write_marks"]

MISSING = "missing"
STOPPED = "stopped"
UNREADABLE = "unreadable"

_MEMORY = 4 * 1024**3
_FILE_BYTES = 10_000_000
_SECONDS_FOR_EACH = 30
_FIRST = re.compile(r"(\d\d|[A-Za-z])_")


@final
@dataclass(frozen=True)
class Mark:
    """One exercise of one learner: a line of the table.

    Attributes
    ----------
    learner : str
        The folder of the notebook inside the graded one, or its file name.
    file : str
        The notebook inside the graded folder.
    notebook : str
        Such as ``"04"``.
    exercise : str
        Its key; empty if the notebook could not be read.
    core : str
        ``"core"`` or empty.
    status : str
        ``"passed"``, ``"not yet"``, ``"not attempted"``, ``"guessed"`` (a prediction, right or
        wrong), ``"missing"`` (no such cell), ``"stopped"`` (its process ended), ``"unreadable"``.
    points : str
        ``"1"`` or ``"0"``; empty for a prediction.
    remark : str
        What the check said.
    """

    learner: str
    file: str
    notebook: str
    exercise: str
    core: str
    status: str
    points: str
    remark: str


def grade(folder, *, seed=1, progress=None):
    """Mark every notebook below a folder.

    Parameters
    ----------
    folder : str or Path
        One folder a learner in it, or notebooks named after learners.
    seed : int
        An answer has to pass with the cases of the notebook, of this seed and of the next one.
    progress : callable, optional
        Called with each path before it is marked.

    Returns
    -------
    list of Mark
        By learner, file and exercise.

    Raises
    ------
    UsageError
        If there is no such folder, or no notebook of the course in it.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder; give the one with the learners' notebooks")
    marks = []
    for path in sorted(folder.rglob("*.ipynb")):
        if ".ipynb_checkpoints" in path.parts:
            continue
        if progress is not None:
            progress(path)
        marks += _marks(folder, path, seed)
    if not marks:
        raise UsageError(f"no notebook of the course in {folder}; its exercises have tags")
    return sorted(marks, key=lambda mark: (mark.learner, mark.file, mark.exercise))


def write_marks(marks, path):
    """Write marks as CSV, for a spreadsheet.

    Parameters
    ----------
    marks : sequence of Mark
    path : str or Path
    """
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([field.name for field in fields(Mark)])
        writer.writerows([_harmless(cell) for cell in astuple(mark)] for mark in marks)


def _harmless(cell):
    """A cell that no spreadsheet takes for a formula."""
    return f"'{cell}" if cell[:1] in ("=", "+", "-", "@", "\t", "\r") else cell


def _marks(folder, path, seed):
    """The marks of one notebook."""
    inside = path.relative_to(folder)
    learner = inside.parent.as_posix() if inside.parent.name else path.stem
    try:
        notebook = json.loads(path.read_text(encoding="utf-8"))
        answers = read_answers(notebook)
    except (OSError, ValueError, AttributeError, TypeError) as error:
        return [Mark(learner, inside.as_posix(), "", "", "", UNREADABLE, "", str(error))]
    known = {key: None for key, _ in answers.cells if key.split("-")[0] in notebooks()}
    named = _FIRST.match(path.name)
    number = next(iter(known), named.group(1).upper() if named else "").split("-")[0]
    if number not in notebooks():
        return []
    wanted = [key for key in keys_of(number) if key in known]
    found = _run_apart(notebook, wanted, seed)
    return [
        _mark(
            learner,
            inside.as_posix(),
            number,
            key,
            *found.get(key, (MISSING, "there is no cell with its tag")),
        )
        for key in keys_of(number)
    ]


def _mark(learner, file, number, key, status, remark):
    """One line."""
    checked = has_check(key)
    core = (find_exercise if checked else find_prediction)(key).core
    points = str(int(status == PASSED)) if checked else ""
    return Mark(learner, file, number, key, "core" if core else "", status, points, remark)


# ------------------------------------------------------------------------------ in another process


def _run_apart(notebook, keys, seed):
    """Judge answers in processes of their own: by key, status and remark."""
    found, _ = _run_once(notebook, keys, seed)
    for key in keys:
        if key not in found:  # an answer took the process with it: now each on its own
            alone, reason = _run_once(notebook, [key], seed)
            found[key] = alone.get(key, (STOPPED, reason))
    return found


def _run_once(notebook, keys, seed):
    """Judge answers in one process: what it came to, and why it went no further."""
    with tempfile.TemporaryDirectory(prefix="zero-nb-grade-", ignore_cleanup_errors=True) as place:
        task, results = Path(place, "task.json"), Path(place, "results.jsonl")
        task.write_text(
            json.dumps(
                {
                    "notebook": notebook,
                    "keys": keys,
                    "seeds": [0, seed, seed + 1],
                    "seconds": limits.SECONDS,
                }
            ),
            encoding="utf-8",
        )
        empty = Path(place, "empty")
        empty.mkdir()
        seconds = _SECONDS_FOR_EACH * (1 + len(keys))
        try:
            done = subprocess.run(
                [sys.executable, "-m", "zero_nb.learn.grade", str(task), str(results)],
                cwd=empty, env=_environment(place), stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=seconds, check=False,
            )  # fmt: skip
            reason = f"its process ended with status {done.returncode}"
        except subprocess.TimeoutExpired:
            reason = f"it was not finished after {seconds} seconds"
        lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    found = {}
    for line in lines:
        try:
            key, status, remark = json.loads(line)
        except ValueError:  # its process ended while it wrote
            continue
        if key in keys:
            found[key] = (status, remark)
    return found, reason


def _environment(place):
    """Few variables: where programs are, and where files may go."""
    kept = ("PATH", "SYSTEMROOT", "LANG", "LC_ALL", "NUMBA_CACHE_DIR", "NUMBA_DISABLE_JIT")
    return {name: os.environ[name] for name in kept if name in os.environ} | {
        "HOME": place,
        "MPLCONFIGDIR": place,
        "NUMBA_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(zero_nb.__file__).resolve().parent.parent),
        "PYTHONDONTWRITEBYTECODE": "1",
        "TEMP": place,
        "TMP": place,
        "TMPDIR": place,
        "ZERO_NB_SCORE": "off",
    }


def _limit(seconds):
    """Limit this process, where the platform can."""
    try:
        import resource
    except ImportError:  # Windows: the time limit from outside is left
        return
    wanted = {"RLIMIT_CPU": seconds, "RLIMIT_AS": _MEMORY, "RLIMIT_FSIZE": _FILE_BYTES}
    for name, limit in wanted.items():
        try:
            resource.setrlimit(getattr(resource, name), (limit, limit))
        except (AttributeError, OSError, ValueError):  # not known here, or lower already
            continue


def _judged(key, values, errors, seeds):
    """Status and remark of one answer."""
    if not has_check(key):
        return (NOT_ATTEMPTED if values.get(key, ...) is ... else GUESSED), ""
    if key in errors:
        return NOT_YET, f"the cell ended in {errors[key]}"
    verdicts = [judge(key, find_exercise(key), values.get(key, ...), seed=seed) for seed in seeds]
    worst = next((verdict for verdict in verdicts if not verdict.passed), verdicts[0])
    return worst.status, worst.text.partition(" Stuck? Run hint(")[0]


def _work(task, results):
    """Judge answers in this process and write a line for each as soon as it is known."""
    task = json.loads(Path(task).read_text(encoding="utf-8"))
    limits.SECONDS = task["seconds"]
    for key in task["keys"]:
        if has_check(key):  # ours first, so that nothing is compiled in a learner's time
            exercise = find_exercise(key)
            for seed in task["seeds"]:
                exercise.judge(exercise.solution, seed)
    _limit(_SECONDS_FOR_EACH * (1 + len(task["keys"])))
    with open(results, "w", encoding="utf-8") as file:
        answers = read_answers(task["notebook"])
        if len(task["keys"]) == 1:
            cells = tuple(cell for cell in answers.cells if cell[0] in task["keys"])
            answers = replace(answers, cells=cells)
        values, errors = run_answers(answers)
        for key in task["keys"]:
            status, remark = _judged(key, values, errors, task["seeds"])
            file.write(json.dumps([key, status, remark]) + "\n")
            file.flush()


if __name__ == "__main__":
    _work(*sys.argv[1:])
    # A thread that was stopped in vain must not keep the process.
    os._exit(0)
