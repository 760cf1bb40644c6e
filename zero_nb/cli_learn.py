"""The commands ``zero-nb grade`` and ``zero-nb quiz``, for teachers.

`register` adds them to the command line.
"""

import sys
from collections import defaultdict
from pathlib import Path
from typing import Annotated

import typer

from zero_nb.config import UsageError

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add ``grade`` and ``quiz`` to a typer application.

    Parameters
    ----------
    app : typer.Typer
        Whoever runs it turns a `UsageError` into one line and a status that is not 0.
    """
    app.command("grade", epilog="Example: zero-nb grade handed-in --out marks.csv")(_grade)
    app.command("quiz", epilog="Example: zero-nb quiz --notebook 04 --form B")(_quiz)


def _grade(
    folder: Annotated[Path, typer.Argument(help="One folder a learner, with notebooks in it.")],
    out: Annotated[Path, typer.Option(help="The table, a line for each exercise.")] = Path(
        "marks.csv"
    ),
    seed: Annotated[int, typer.Option(help="Another seed draws other cases.")] = 1,
):
    """Mark learners' notebooks with new cases. No sandbox: it runs what they wrote."""
    from zero_nb.learn.grade import grade, write_marks

    if out.is_dir():
        raise UsageError(f"--out {out} is a folder; give a file, such as marks.csv")
    if seed < 0:
        raise UsageError(f"--seed must not be negative, got {seed}")
    sys.stderr.write(
        "This runs the learners' code with your rights, limited in time and memory. It is no "
        "sandbox: grade people you know.\n"
    )
    marks = grade(folder, seed=seed, progress=lambda path: sys.stderr.write(f"{path}\n"))
    write_marks(marks, out)
    points = defaultdict(list)
    for mark in marks:
        points[mark.learner].append(mark)
    for learner, theirs in points.items():
        core = [mark for mark in theirs if mark.points and mark.core]
        more = [mark for mark in theirs if mark.points and not mark.core]
        sys.stdout.write(f"{learner}: {_passed(core)} core, {_passed(more)} more\n")
    sys.stdout.write(f"{out}\n")


def _passed(marks):
    """How many of some marks have passed."""
    return f"{sum(mark.points == '1' for mark in marks)} of {len(marks)}"


def _quiz(
    notebook: Annotated[
        str | None, typer.Option(help="Such as 04, A or test; all if not given.")
    ] = None,
    form: Annotated[str | None, typer.Option(help="A, B or C; all if not given.")] = None,
    gift: Annotated[bool, typer.Option("--gift", help="For import into Moodle.")] = False,
    key: Annotated[bool, typer.Option("--key", help="Add the right answers at the end.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write to this file.")] = None,
):
    """Print the questions of the course: for paper, or for Moodle (--gift)."""
    from zero_nb.learn import questions

    chosen = questions.select(notebook, form)
    text = questions.gift(chosen) if gift else questions.sheet(chosen, key=key)
    if out is None:
        sys.stdout.write(text)
    elif out.is_dir():
        raise UsageError(f"--out {out} is a folder; give a file")
    else:
        out.write_text(text, encoding="utf-8")
        sys.stdout.write(f"{out}\n")
