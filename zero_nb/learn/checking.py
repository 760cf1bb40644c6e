"""Check an answer, ask for a hint, look at the score.

Nothing here raises for what a learner wrote: a notebook runs from top to bottom, whatever is in
it, and says in words how far it is.
"""

import html
from dataclasses import dataclass
from typing import final

from zero_nb.learn.registry import find_exercise, find_prediction, keys_of
from zero_nb.learn.session import (
    GUESSED,
    NOT_ATTEMPTED,
    NOT_YET,
    PASSED,
    SESSION,
    read_record,
    record_path,
    write_record,
)

__all__ = ["ScoreCard", "Verdict", "check", "hint", "judge", "reset_score", "score_card"]

_SIGNS = {PASSED: "✓", NOT_YET: "△", NOT_ATTEMPTED: "○", GUESSED: "◆"}


@final
@dataclass(frozen=True, repr=False)
class Verdict:
    """What `check` says.

    Attributes
    ----------
    key : str
    status : str
        ``"not attempted"``, ``"not yet"`` or ``"passed"``.
    text : str
        What was seen, or what to do.
    """

    key: str
    status: str
    text: str

    @property
    def passed(self):
        """Whether the answer is right (bool)."""
        return self.status == PASSED

    def __repr__(self):
        """Return key, status and text: this is what a notebook shows."""
        return f"{self.key} {self.status}: {self.text}"

    def _repr_html_(self):
        """The same with a sign that does not depend on colour."""
        text = html.escape(self.text)
        return (
            f'<p><strong><span aria-hidden="true">{_SIGNS[self.status]}</span> {self.key} '
            f"{self.status}</strong>: {text}</p>"
        )


def check(key, answer):
    """Say whether an answer is right.

    Parameters
    ----------
    key : str
        The exercise, such as ``"04-a"``.
    answer : object
        What the learner wrote: a function (not called), a value, or still ``...``.

    Returns
    -------
    Verdict
        Never raises for an answer, whatever it is; stops after some seconds.

    Raises
    ------
    UsageError
        If there is no such exercise: a slip of the notebook.
    """
    exercise = find_exercise(key)
    verdict = judge(key, exercise, answer)
    SESSION.note(key, verdict.status)
    return verdict


def judge(key, exercise, answer, **options):
    """As `check`, but for an exercise that is at hand, and without remembering the outcome.

    Parameters
    ----------
    key : str
    exercise : Exercise
    answer : object
    **options
        For `Exercise.judge`, such as another seed.

    Returns
    -------
    Verdict
    """
    try:
        # What is right needs no dots to be taken away; a partly written body may be right.
        reason = exercise.judge(answer, **options)
        if not reason:
            return Verdict(key, PASSED, f"{exercise.title}.")
        if exercise.is_open(answer):
            return Verdict(
                key,
                NOT_ATTEMPTED,
                "put your answer in the place of the three dots, then run this again.",
            )
    except Exception as error:  # an answer may raise from anywhere, also when it is printed
        reason = f"This answer cannot be judged ({type(error).__name__})"
    return Verdict(key, NOT_YET, f"{_sentence(reason)} Stuck? Run hint({key!r}).")


def _sentence(text):
    """A text in one line, with a full stop."""
    text = " ".join(text.split())
    return text if text.endswith((".", "?", "!")) else f"{text}."


@final
@dataclass(frozen=True, repr=False)
class Hint:
    """One hint.

    Attributes
    ----------
    key : str
    number : int
        1, 2 or 3.
    text : str
    """

    key: str
    number: int
    text: str

    def __repr__(self):
        """Return the hint: this is what a notebook shows."""
        more = f"Run hint({self.key!r}) again for the next one." if self.number < 3 else "The last."
        return f"Hint {self.number} of 3 for {self.key}: {self.text} {more}"


def hint(key):
    """Return the next of three hints; the last one again after that.

    Parameters
    ----------
    key : str
        The exercise, such as ``"04-a"``.

    Returns
    -------
    Hint
    """
    exercise = find_exercise(key)
    number = min(SESSION.hints.get(key, 0) + 1, 3)
    SESSION.hints[key] = number
    return Hint(key, number, exercise.hints[number - 1])


# ------------------------------------------------------------------------------------------ score


@final
@dataclass(frozen=True, repr=False)
class ScoreCard:
    """What has been done.

    Attributes
    ----------
    rows : tuple
        ``(key, title, core, status)`` for each exercise.
    title : str
    """

    rows: tuple
    title: str

    @property
    def passed(self):
        """Number of exercises that have passed (int)."""
        return sum(row[3] == PASSED for row in self.rows)

    def __repr__(self):
        """Return a table of text: what the notebook tests compare."""
        lines = [self.title]
        for key, title, core, status in self.rows:
            lines.append(f"  {key}  {status:<13}  {title}{' (core)' if core else ''}")
        return "\n".join(lines)

    def _repr_html_(self):
        """A table without colours of its own."""
        left = 'style="text-align: left"'
        head = "".join(f'<th scope="col" {left}>{name}</th>' for name in ("", "exercise", "status"))
        body = "".join(
            f'<tr><th scope="row">{key}</th>'
            f"<td {left}>{html.escape(title)}{' (core)' if core else ''}</td>"
            f'<td {left}><span aria-hidden="true">{_SIGNS[status]}</span> '
            f"{status}</td></tr>"
            for key, title, core, status in self.rows
        )
        caption = f"<caption {left}>{html.escape(self.title)}</caption>"
        return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def score_card(notebook=None):
    """Show what has been done.

    Parameters
    ----------
    notebook : str, optional
        Such as ``"04"``: its exercises, as far as they were checked in this kernel. Without it:
        everything in the learner's own file, see [Note: the learner's own record].

    Returns
    -------
    ScoreCard
    """
    if notebook is None:
        record = read_record()
        rows = [_row(key, record.get(key, {}).get("status", NOT_ATTEMPTED)) for key in record]
        place = record_path()
        where = "nothing is kept" if place is None else f"kept in {place.name}"
        return ScoreCard(tuple(sorted(rows)), f"Your record so far ({where}):")
    rows = tuple(_row(key, SESSION.status.get(key, NOT_ATTEMPTED)) for key in keys_of(notebook))
    done = sum(row[3] in (PASSED, GUESSED) for row in rows)
    return ScoreCard(rows, f"Notebook {notebook}, in this run: {done} of {len(rows)} done.")


def _row(key, status):
    """One line of the card."""
    for find in (find_exercise, find_prediction):
        try:
            found = find(key)
        except (KeyError, ValueError):
            continue
        return (key, found.title, found.core, status)
    # The test before or after the course, or an exercise of another version.
    return (key, "Answer the test" if key.startswith("test-") else "", False, status)


def reset_score():
    """Forget everything: what happened in this kernel, and the learner's own file.

    Returns
    -------
    ScoreCard
        An empty one.
    """
    SESSION.clear()
    if record_path() is not None and record_path().exists():
        write_record({})
    return score_card()
