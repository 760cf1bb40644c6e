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
    app.command("quiz", epilog="Example: zero-nb quiz --keys --out quiz_keys.md")(_quiz)


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
    keys: Annotated[
        bool, typer.Option("--keys", help="The teacher's edition: keys and feedback.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Write to this file.")] = None,
):
    """Print the questions of the course: for paper, with keys (--keys), or for Moodle (--gift)."""
    from zero_nb.learn import questions

    if gift and keys:
        raise UsageError("give --keys or --gift, not both: a GIFT file has the right answers in it")
    chosen = questions.select(notebook, form)
    write = questions.gift if gift else questions.teachers_edition if keys else questions.sheet
    text = write(chosen)
    if out is None:
        try:
            sys.stdout.write(text)
        except UnicodeEncodeError as error:  # a Windows code page, when output is redirected
            raise UsageError(
                f"this output cannot hold the sign {error.object[error.start]!r} "
                f"({sys.stdout.encoding}); give --out and a file"
            ) from error
    elif out.is_dir():
        raise UsageError(f"--out {out} is a folder; give a file")
    else:
        try:
            out.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UsageError(
                f"--out {out} cannot be written ({error.strerror}); give a file in a folder that "
                "exists and is yours"
            ) from error
        sys.stdout.write(f"{out}\n")
