"""Exercises of reference A: a race, and its repair."""

import numpy as np

from zero_nb.learn.exercise import FunctionExercise, ValueExercise, Wrong
from zero_nb.learn.limits import NotYet
from zero_nb.learn.predict import Mistake, Prediction

__all__ = ["EXERCISES", "PREDICTIONS"]

PREDICTIONS = {
    # FACTOR is 2 when the function is compiled.
    "A-p": Prediction(
        title="Predict what a compiled function does with a global",
        unit="",
        within=0.0,
        low=0.0,
        high=1000.0,
        mistakes=(
            Mistake(
                30.0,
                "That is what plain Python does. Numba read the global once, when it compiled.",
            ),
            Mistake(10.0, "The factor is not left out; it is an old one."),
            Mistake(3.0, "That is the new factor alone."),
        ),
        close="Right: the value at the time of compiling is part of the machine code.",
        advice="When did Numba look at FACTOR?",
    )
}


def _add_chunk(chunk, x, partial):
    """The solution: an element of its own for each iteration."""
    chunks = partial.size
    start, stop = chunk * x.size // chunks, (chunk + 1) * x.size // chunks
    total = np.float32(0)
    for i in range(start, stop):
        total += x[i] * x[i]
    partial[chunk] = total


def _one_total(chunk, x, partial):
    """Wrong: the right elements, added to one place."""
    chunks = partial.size
    for i in range(chunk * x.size // chunks, (chunk + 1) * x.size // chunks):
        partial[0] += x[i] * x[i]


def _everything(chunk, x, partial):
    """Wrong: each iteration takes all elements."""
    partial[chunk] = (x * x).sum()


def _without_the_tail(chunk, x, partial):
    """Wrong: chunks of a rounded length leave the last elements out."""
    length = x.size // partial.size
    part = x[chunk * length : (chunk + 1) * length]
    partial[chunk] = (part * part).sum()


def _without_squares(chunk, x, partial):
    """Wrong: adds the elements themselves."""
    chunks = partial.size
    partial[chunk] = x[chunk * x.size // chunks : (chunk + 1) * x.size // chunks].sum()


def _last_one_only(chunk, x, partial):
    """Wrong: overwrites instead of adding."""
    chunks = partial.size
    for i in range(chunk * x.size // chunks, (chunk + 1) * x.size // chunks):
        partial[chunk] = x[i] * x[i]


def _trial(function, x, chunks):
    """Run each iteration alone, see where it writes, then all of them one after another."""
    writer = {}
    for chunk in range(chunks):
        for place in _written(function, chunk, x, chunks):
            if writer.setdefault(place, chunk) != chunk:
                raise NotYet(
                    f"two iterations, {writer[place]} and {chunk}, write into partial[{place}]; "
                    "on two threads one addition may be lost"
                )
    partial = np.zeros(chunks, np.float32)
    for chunk in reversed(range(chunks)):  # any order has to do
        function(chunk, x, partial)
    return {"the sum of partial": float(partial.sum())}


def _written(function, chunk, x, chunks):
    """The places that one iteration writes to: those that change, whatever was there before."""
    places = set()
    for before in (0, 1):
        partial = np.full(chunks, before, np.float32)
        function(chunk, x, partial)
        places |= set(np.flatnonzero(partial != before).tolist())
    return places


def _cases(rng):
    """Lengths that do not divide, more chunks than elements; whole numbers, so sums are exact."""
    drawn = rng.integers(1, 9, 23).astype(np.float32)
    return [
        (np.arange(1, 11, dtype=np.float32), 4),
        (np.arange(1, 4, dtype=np.float32), 5),
        (np.full(7, 3, np.float32), 1),
        (drawn, 3),
    ]


EXERCISES = {
    "A-a": ValueExercise(
        title="Find the line with the race",
        core=True,
        solution=5,
        wrong={
            "the loop": Wrong(
                3,
                "Line 3 only divides the elements among threads. Which line uses memory that "
                "another thread uses too?",
            ),
            "the square": Wrong(
                4,
                "Line 4 reads an element of its own, and each iteration has its own `value`. "
                "Look for what all iterations write to.",
            ),
            "the return": Wrong(6, "Line 6 runs once, when all threads have finished."),
        },
        hints=(
            "A race needs memory that two threads use, and one of them writes to it.",
            "Which names mean the same memory in every iteration? Which of them is written to?",
            "Only total[0] is shared and written.",
        ),
    ),
    "A-b": FunctionExercise(
        title="Repair the race: give each iteration a place of its own",
        core=True,
        solution=_add_chunk,
        cases=_cases,
        trial=_trial,
        wrong={
            "one total": Wrong(
                _one_total,
                "All iterations still add into partial[0]. That is the race again. Give each "
                "iteration its own element of partial.",
            ),
            "everything": Wrong(
                _everything,
                "Each iteration adds up all of x, so the sum is too large. Iteration `chunk` "
                "takes its part of x only.",
            ),
            "without the tail": Wrong(
                _without_the_tail,
                "The last elements of x are in no chunk when the length does not divide. Let "
                "chunk c begin at c * x.size // chunks.",
            ),
            "without squares": Wrong(
                _without_squares, "You added the elements. Add their squares."
            ),
            "last one only": Wrong(
                _last_one_only,
                "Each element overwrites the one before it. Add them up first, then write once.",
            ),
        },
        hints=(
            "How many elements does partial have, and how many iterations are there?",
            "Iteration `chunk` begins at chunk * x.size // partial.size, and ends where the next "
            "one begins.",
            "Add the squares up in a variable of your own, then write partial[chunk] = total.",
        ),
    ),
}
"""By key, in the order of the notebook."""
