"""Predict, then compare: the truth is shown to those who have made a guess.

[Note: a guess first]
A number that one has predicted, right or wrong, is remembered; a number that one has only read is
not. So a notebook asks for a guess, and what it then shows passes through this module, which
shows nothing until there is a guess. Nothing here raises: a notebook without guesses runs clean.
"""

import math
import numbers
from dataclasses import dataclass

from zero_nb.learn.session import GUESSED, NOT_ATTEMPTED, SESSION

__all__ = [
    "PREDICTIONS",
    "Compared",
    "Mistake",
    "Prediction",
    "Waiting",
    "compare_guess",
    "reveal",
]

FIRST = "Write a guess first: put a number in the place of the three dots, then run this again."


@dataclass(frozen=True)
class Mistake:
    """A wrong guess that many make.

    Attributes
    ----------
    value : float
        What one gets that way, in the prediction's unit.
    text : str
        What was done, and what to think about instead.
    """

    value: float
    text: str


@dataclass(frozen=True)
class Prediction:
    """A number that a notebook asks for before it shows it.

    Attributes
    ----------
    unit : str
        Written after numbers, such as ``" %"``.
    within : float
        A guess this near to the measured value, in its unit, is close.
    low, high : float
        What a guess can be.
    mistakes : tuple of Mistake
        Recognised by their value.
    title : str
        What is asked for, a few words: the line on the score card.
    core : bool
        Whether it belongs to the core path.
    close : str
        Said of a close guess.
    advice : str
        Said of any other guess, after "Too high." or "Too low.".
    origin : str
        Where the truth comes from: ``"measured"``, or ``"modelled"`` where a formula gives it.
    """

    unit: str
    within: float
    low: float
    high: float
    mistakes: tuple[Mistake, ...]
    title: str
    core: bool = False
    close: str = "Close: you have seen what stays whole and what is sharded."
    advice: str = (
        "Count in bytes for each parameter: what stays whole on every rank, and what is divided?"
    )
    origin: str = "measured"


PREDICTIONS = {
    # Stage 1 on 4 ranks: 2 + 2 + 12/4 of 16 bytes a parameter.
    "00-a": Prediction(
        title="Predict the bar of stage 1",
        core=True,
        unit=" %",
        within=2.0,
        low=0.0,
        high=100.0,
        mistakes=(
            Mistake(
                25.0,
                "You divided all three states by 4. Stage 1 shards the optimizer states only; "
                "parameters and gradients stay whole on every rank.",
            ),
            Mistake(
                75.0,
                "You gave the three states equal shares, or took a quarter off. Look at the bar: "
                "the optimizer states are three quarters of it.",
            ),
            Mistake(
                18.75,
                "That is the shard of the optimizer states alone. Each rank still holds all "
                "parameters and all gradients; add them.",
            ),
            Mistake(
                56.25,
                "That is the part that is saved. The question is how much is left.",
            ),
            Mistake(
                34.375,
                "That is stage 2: you sharded the gradients as well. Stage 1 leaves them whole.",
            ),
        ),
    ),
    # Stage 1 on 16 ranks: 2 + 2 + 12/16 of 16 bytes a parameter.
    "00-b": Prediction(
        title="Predict stage 1 on more ranks",
        unit=" %",
        within=1.0,
        low=0.0,
        high=100.0,
        mistakes=(
            Mistake(
                10.9375,
                "You took a quarter of the bar at 4 ranks. Only the optimizer states in it become "
                "smaller; the whole parameters and gradients stay.",
            ),
            Mistake(
                6.25,
                "You divided all three states by 16. That is stage 3.",
            ),
            Mistake(
                25.0,
                "You left the optimizer states out. A sixteenth of them is small, but not nothing.",
            ),
            Mistake(
                70.3125,
                "That is the part that is saved. The question is how much is left.",
            ),
            Mistake(
                17.96875,
                "That is stage 2: you sharded the gradients as well. Stage 1 leaves them whole.",
            ),
        ),
    ),
}
"""By exercise: the notebook's number and a letter. Other notebooks keep theirs beside their
exercises, see `zero_nb.learn.registry`."""


@dataclass(frozen=True, repr=False)
class Waiting:
    """Shown in place of a truth as long as there is no guess.

    Attributes
    ----------
    text : str
        What to do.
    """

    text: str = FIRST

    def __repr__(self):
        """Return the text: this is what a notebook shows."""
        return self.text


@dataclass(frozen=True, repr=False)
class Compared:
    """A guess beside what was measured.

    Attributes
    ----------
    guess, measured : float
    unit : str
    close : bool
        Whether the guess is as near as the prediction asks for.
    text : str
        What the guess says about the idea behind it.
    origin : str
        Of the truth: ``"measured"`` or ``"modelled"``.
    """

    guess: float
    measured: float
    unit: str
    close: bool
    text: str
    origin: str = "measured"

    @property
    def ratio(self):
        """Guess divided by measured value; None where that is 0 (float)."""
        return self.guess / self.measured if self.measured else None

    def __repr__(self):
        """Return the three numbers and the comment: this is what a notebook shows."""
        ratio = "–" if self.ratio is None else f"{self.ratio:.2f}"
        return (
            f"predicted {self.guess:.6g}{self.unit}   "
            f"{self.origin} {self.measured:.6g}{self.unit}   ratio {ratio}\n{self.text}"
        )


def compare_guess(key, guess, measured):
    """Lay a guess beside the measured value, if there is a guess.

    Parameters
    ----------
    key : str
        The prediction, such as ``"00-a"``.
    guess : float
        What the learner wrote; ``...`` or None if nothing yet.
    measured : float
        In the unit of the prediction.

    Returns
    -------
    Compared or Waiting
        `Waiting` says what to do and does not contain the measured value. Never raises for
        anything a learner may have written.

    Raises
    ------
    KeyError
        If there is no such prediction: a slip of the notebook, not of the learner.
    """
    from zero_nb.learn.registry import find_prediction  # it looks into this module, too

    prediction = find_prediction(key)
    missing = _missing(guess, prediction)
    if missing:
        SESSION.note(key, NOT_ATTEMPTED)
        return Waiting(missing)
    SESSION.note(key, GUESSED)
    guess, measured = float(guess), float(measured)
    close = abs(guess - measured) <= prediction.within
    said = _comment(prediction, guess, measured, close)
    return Compared(guess, measured, prediction.unit, close, said, prediction.origin)


def _missing(guess, prediction):
    """Say why this is no guess yet; empty if it is one."""
    if guess is ... or guess is None:
        return FIRST
    if isinstance(guess, bool) or not isinstance(guess, numbers.Real):
        return f"A guess is one number, such as 60; this is a {type(guess).__name__}."
    unit = prediction.unit
    if not math.isfinite(guess) or not prediction.low <= guess <= prediction.high:
        low, high = f"{prediction.low:g}{unit}", f"{prediction.high:g}{unit}"
        return f"The value lies between {low} and {high}, and the guess does not. Look again."
    if unit == " %" and 0 < guess < 1:
        return f"Write percent: {guess:g} as a fraction would be {100 * guess:g}."
    return ""


def _comment(prediction, guess, measured, close):
    """Say what a guess tells about the idea behind it."""
    if close:
        return prediction.close
    mistakes = [m for m in prediction.mistakes if abs(m.value - guess) <= 0.5]
    if mistakes:
        return min(mistakes, key=lambda m: abs(m.value - guess)).text
    return f"Too {'high' if guess > measured else 'low'}. {prediction.advice}"


def reveal(guess, truth):
    """Return `truth`, a picture as a rule, once there is a guess.

    Parameters
    ----------
    guess : Compared or Waiting
        What `compare_guess` returned.
    truth : object
        What to show.

    Returns
    -------
    object
        `truth`, or a `Waiting` that says what to do.
    """
    return guess if isinstance(guess, Waiting) else truth
