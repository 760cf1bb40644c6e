"""Every exercise of every notebook, under the same conditions: see RULES.

A check is only worth something if it lets the right answer through, knows the wrong ones by name,
and survives whatever else it is given.
"""

import sys

import numpy as np
import pytest

from zero_nb.learn import limits
from zero_nb.learn.checking import Verdict, judge
from zero_nb.learn.exercise import FunctionExercise, RankExercise, ValueExercise
from zero_nb.learn.predict import compare_guess
from zero_nb.learn.registry import (
    exercise_keys,
    find_exercise,
    find_prediction,
    keys_of,
    notebooks,
)

KEYS = exercise_keys()
FUNCTIONS = [key for key in KEYS if isinstance(find_exercise(key), FunctionExercise)]
PROGRAMS = [key for key in KEYS if isinstance(find_exercise(key), RankExercise)]
VALUES = [key for key in KEYS if isinstance(find_exercise(key), ValueExercise)]
WRONG = [(key, name) for key in KEYS for name in find_exercise(key).wrong]
GUESSES = [key for number in notebooks() for key in keys_of(number) if key not in KEYS]
SEEDS = (0, 1, 2)


def status(key, answer, **options):
    """The status of an answer, after a look that the verdict can be shown."""
    verdict = judge(key, find_exercise(key), answer, **options)
    assert isinstance(verdict, Verdict)
    assert verdict.status in ("not attempted", "not yet", "passed")
    assert key in repr(verdict)
    assert key in verdict._repr_html_()
    return verdict.status


def test_every_exercise_is_of_one_of_three_kinds():
    assert sorted(FUNCTIONS + PROGRAMS + VALUES) == sorted(KEYS)
    assert len(KEYS) == len(set(KEYS)) > 0


@pytest.mark.parametrize("key", KEYS + GUESSES)
def test_a_key_belongs_to_its_notebook(key):
    number, _, letter = key.partition("-")
    assert number in notebooks()
    assert len(letter) == 1
    assert key in keys_of(number)


@pytest.mark.parametrize("key", KEYS)
def test_words_are_there_and_differ(key):
    exercise = find_exercise(key)
    assert exercise.title[0].isupper()
    assert not exercise.title.endswith(".")
    assert len(set(exercise.hints)) == 3
    assert exercise.wrong, "name at least one mistake that people make"
    texts = [wrong.text for wrong in exercise.wrong.values()]
    assert len(set(texts)) == len(texts)
    for text in (*exercise.hints, *texts):
        assert len(text) > 15


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("seed", SEEDS)
def test_the_solution_passes(key, seed):
    exercise = find_exercise(key)
    assert exercise.judge(exercise.solution, seed) == ""


@pytest.mark.parametrize(("key", "name"), WRONG)
def test_a_known_wrong_answer_is_called_by_its_name(key, name):
    exercise = find_exercise(key)
    wrong = exercise.wrong[name]
    verdict = judge(key, exercise, wrong.answer)
    assert verdict.status == "not yet"
    said = " ".join(wrong.text.split()).rstrip(".")
    # A capital at the beginning, a full stop at the end.
    assert verdict.text[0].lower() + verdict.text[1:] in (
        f"{said[0].lower()}{said[1:]}{end} Stuck? Run hint({key!r})." for end in ("", ".")
    )
    for seed in SEEDS:  # a teacher's variants do not let it through either
        assert status(key, wrong.answer, seed=seed) == "not yet"


@pytest.mark.parametrize("key", KEYS)
def test_an_exercise_that_is_left_alone_is_not_attempted(key):
    def nothing(*args): ...

    def explained(*args):
        """What is to be done."""
        ...  # noqa: PIE790

    def begun(*args):
        result = ...
        return result  # noqa: RET504

    stubs = [...] if key in VALUES else [..., nothing, explained, begun]
    for stub in stubs:
        assert status(key, stub) == "not attempted"


def overwriting(exercise):
    """The solution, which then writes into every array it was given."""

    def answer(*args):
        copies = [arg.copy() if isinstance(arg, np.ndarray) else arg for arg in args]
        result = exercise.solution(*copies)
        for arg in args:
            if isinstance(arg, np.ndarray) and arg.flags.writeable:
                arg[...] = 77
        return result

    return answer


@pytest.mark.parametrize("key", FUNCTIONS)
def test_a_function_that_overwrites_its_arguments_is_noticed_and_does_no_harm(key):
    exercise = find_exercise(key)
    args = exercise.cases(np.random.default_rng(0))[0]
    arrays = [isinstance(arg, np.ndarray) and arg.size > 0 for arg in args]
    free = [place in exercise.may_change for place in range(len(args))]
    verdict = judge(key, exercise, overwriting(exercise))
    plain = exercise.trial.__name__ == "_plain_trial"
    if plain and any(a and not f for a, f in zip(arrays, free, strict=True)):
        assert verdict.status == "not yet"
        assert "changed its argument" in verdict.text
    elif plain and not any(arrays):
        assert verdict.status == "passed"
    assert status(key, exercise.solution) == "passed"
    assert status(key, exercise.solution) == "passed"


@pytest.mark.parametrize("key", PROGRAMS)
def test_a_program_that_overwrites_what_it_was_given_harms_nobody(key):
    exercise = find_exercise(key)

    def overwriting_program(rank, world_size, mine):
        result = yield from exercise.solution(rank, world_size, mine.copy())
        mine[...] = 77
        return result

    assert status(key, overwriting_program) == "passed"
    assert status(key, exercise.solution) == "passed"


class Evil:
    """An object that fails wherever one touches it."""

    def __getattr__(self, name):
        raise ValueError(name)

    def __eq__(self, other):
        raise ValueError

    def __repr__(self):
        raise ValueError

    __array__ = __len__ = __iter__ = __bool__ = __float__ = __getitem__ = __repr__
    __hash__ = None


def a_generator(*args):
    yield 1


def asks_for_itself(*args):
    return asks_for_itself(*args)


NONSENSE = {
    "a number": 3,
    "a word": "three",
    "nothing in a list": [],
    "a list": [1, 2, 3],
    "a tuple of words": ("a", "b"),
    "a dict": {"a": 1},
    "nan": float("nan"),
    "an array": np.zeros((2, 3)),
    "an array of words": np.array(["a"]),
    "an object": object(),
    "an evil object": Evil(),
    "a list of evil": [Evil()],
    "a dict of evil": {"a": Evil()},
    "a type": int,
    "a module": sys,
    "an exception": ValueError("no"),
    "no parameters": lambda: 1,
    "None": lambda *args: print(end=""),
    "text": lambda *args: "text",
    "wrong shape": lambda *args: np.zeros((2, 3, 4)),
    "ragged": lambda *args: [[1], [2, 3]],
    "infinity": lambda *args: float("inf"),
    "its arguments": lambda *args: args,
    "evil": lambda *args: Evil(),
    "raises": lambda *args: 1 / 0,
    "raises strangely": lambda *args: (_ for _ in ()).throw(BaseException("no")),
    "exits": lambda *args: sys.exit(),
    "calls itself": asks_for_itself,
    "a generator": a_generator,
    "itself": lambda *args: NONSENSE,
}


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("what", NONSENSE)
def test_nonsense_never_passes_and_never_raises(key, what):
    assert status(key, NONSENSE[what]) == "not yet"


@pytest.mark.parametrize("key", FUNCTIONS + PROGRAMS)
def test_an_answer_that_never_ends_is_stopped(key, monkeypatch):
    monkeypatch.setattr(limits, "SECONDS", 0.05)
    exercise = find_exercise(key)
    exercise.judge(exercise.solution)  # ours is worked out before the clock starts

    def endless(*args):
        while True:
            try:
                while True:
                    pass
            except Exception:  # of no use: it is not an Exception that stops this
                pass

    verdict = judge(key, exercise, endless)
    assert verdict.status == "not yet"
    assert "was stopped: it was not finished after 0.05 seconds" in verdict.text


# ---------------------------------------------------------------------------------------- guesses


@pytest.mark.parametrize("key", GUESSES)
def test_a_prediction_has_its_words(key):
    prediction = find_prediction(key)
    assert prediction.title[0].isupper()
    assert prediction.low < prediction.high
    texts = [prediction.close, prediction.advice, *(m.text for m in prediction.mistakes)]
    assert all(text.endswith((".", "?", "!")) for text in texts)
    assert len(set(texts)) == len(texts)


@pytest.mark.parametrize("key", GUESSES)
def test_a_known_wrong_guess_is_recognised(key):
    prediction = find_prediction(key)
    assert prediction.mistakes
    for mistake in prediction.mistakes:
        assert prediction.low <= mistake.value <= prediction.high
        # Far from every guess: no mistake is taken for the truth.
        measured = prediction.high + 10 * prediction.within + 1
        assert compare_guess(key, mistake.value, measured).text == mistake.text
