"""A stage as the difference to the one before: from the real source, once it has been built."""

import difflib
import html
import inspect
from dataclasses import dataclass
from typing import final

from zero_nb.learn.predict import Waiting
from zero_nb.learn.session import SESSION
from zero_nb.train.stages import STAGES

__all__ = ["StageDiff", "as_html", "show_diff"]

_WORDS = {"+": "added", "-": "removed"}


@final
@dataclass(frozen=True, repr=False)
class StageDiff:
    """The lines in which two stages differ.

    Attributes
    ----------
    before, after : int
        The stages.
    lines : tuple of str
        The code of both, each line with ``+``, ``-`` or a blank in front.
    """

    before: int
    after: int
    lines: tuple

    @property
    def changed(self):
        """The lines that were added or removed only (tuple of str)."""
        return tuple(line for line in self.lines if line[0] in _WORDS)

    def __repr__(self):
        """Return the diff as text: this is what a notebook shows."""
        return "\n".join((self._title(), *self.lines))

    def _title(self):
        """What is shown."""
        return (
            f"From stage {self.before} to stage {self.after} in zero_nb/train/stages.py "
            "(- removed, + added):"
        )

    def _repr_html_(self):
        """The same, with the changed lines marked for eyes and for screen readers."""
        return as_html(self._title(), self.lines)


def as_html(title, lines):
    """Write a diff as HTML, with the changed lines marked for eyes and for screen readers.

    Parameters
    ----------
    title : str
    lines : sequence of str
        Code with ``+``, ``-`` or a blank in front.

    Returns
    -------
    str
    """
    body = []
    for line in lines:
        text = html.escape(line)
        tag = {"+": "ins", "-": "del"}.get(line[0])
        if tag:
            style = "text-decoration: none; font-weight: bold"
            text = f'<{tag} style="{style}">{text}</{tag}>'
        body.append(text)
    return (
        f'<p>{html.escape(title)}</p><pre style="font-family: monospace">{chr(10).join(body)}</pre>'
    )


def show_diff(before, after_stage, *, after=None, whole=False):
    """Show in which lines one stage differs from another, in the library's own source.

    Parameters
    ----------
    before, after_stage : int
        0 to 3.
    after : str, optional
        An exercise: before it has passed in this kernel, nothing is shown.
    whole : bool
        All lines, not only those around a change.

    Returns
    -------
    StageDiff or Waiting
    """
    if after is not None and not SESSION.has_passed(after):
        return Waiting(
            f"The library's own lines are shown here after exercise {after} has passed. "
            "Then run this again."
        )
    old, new = (_code(stage) for stage in (before, after_stage))
    context = max(len(old), len(new)) if whole else 2
    found = list(difflib.unified_diff(old, new, n=context, lineterm=""))[2:]
    lines = tuple("  ..." if line.startswith("@@") else f"{line[:1]} {line[1:]}" for line in found)
    return StageDiff(before, after_stage, lines[1:])


def _code(stage):
    """The source of a stage without empty lines."""
    lines = inspect.getsource(STAGES[stage]).splitlines()
    return [line for line in lines if line.strip()]
