"""What an exercise is: the right answer, the well-known wrong ones, and how to tell them apart.

[Note: judged by what it does]
A check never looks at how an answer is written. It runs it, writes down what was observed (what
came back, what was sent, how many elements were updated), and compares this with what the solution
does under the same conditions. Each known wrong answer is a program too. Where the learner's
observations are those of a wrong program in every case, the mistake has a name, and the learner
hears it; otherwise the first case that differs is told.
"""

import ast
import dis
import inspect
import linecache
import textwrap
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np

from zero_nb.learn.limits import NotYet, run_limited
from zero_nb.learn.observe import Raised, alike, difference, short
from zero_nb.learn.ranks import run_ranks

__all__ = ["Exercise", "FunctionExercise", "RankExercise", "ValueExercise", "Wrong", "is_stub"]

SEED = 0
"""The variant that `check` uses; a teacher grades with others."""


@final
@dataclass(frozen=True)
class Wrong:
    """A wrong answer that many give.

    Attributes
    ----------
    answer : object
        A function, a generator function, or a value: what one gets that way.
    text : str
        What was done, and what to think about instead; one to three short sentences.
    """

    answer: Any
    text: str


def _plain_trial(function, *args):
    """Run the function once; what it returns is what is observed."""
    return function(*args)


class Exercise(ABC):
    """What every exercise has.

    Attributes
    ----------
    title : str
        What is to be done, a few words with a verb: the line on the score card.
    solution : object
        A right answer.
    wrong : mapping of str to Wrong
        Known wrong answers by a short name.
    hints : tuple of str
        Three: where to look, how to begin, nearly the answer.
    core : bool
        Whether it belongs to the core path.
    """

    title: str
    solution: Any
    wrong: Mapping[str, Wrong]
    hints: tuple[str, str, str]
    core: bool

    @abstractmethod
    def is_open(self, answer):
        """Whether nothing has been written yet: the three dots are still there (bool)."""

    @abstractmethod
    def judge(self, answer, seed=SEED):
        """Say what is wrong with an answer.

        Parameters
        ----------
        answer : object
            Anything.
        seed : int
            Another seed gives other cases, where the exercise has cases.

        Returns
        -------
        str
            Empty if it is right. May raise for a strange answer; `check` catches it.
        """


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class FunctionExercise(Exercise):
    """A function to write.

    Attributes
    ----------
    cases : callable
        ``cases(rng)`` returns a list of tuples of arguments, fresh ones at each call and the same
        for the same random generator: small and awkward ones (1, 3 and 4 ranks, lengths that do
        not divide), with a loud sentinel in padding, and a few drawn from `rng`.
    trial : callable
        ``trial(function, *args)`` runs the function once and returns what was observed; by default
        what the function returns. It may raise `NotYet` with a sentence for the learner.
    tolerance : float
        See `zero_nb.learn.observe.alike`; 0 means equal.
    may_change : tuple of int
        Places of arguments that the function may write into.
    """

    title: str
    solution: Callable
    cases: Callable
    wrong: Mapping[str, Wrong]
    hints: tuple[str, str, str]
    trial: Callable = _plain_trial
    tolerance: float = 0.0
    may_change: tuple[int, ...] = ()
    core: bool = False
    _seen: dict = field(default_factory=dict, repr=False)

    def is_open(self, answer):
        return answer is ... or answer is None or is_stub(answer)

    def judge(self, answer, seed=SEED):
        refused = _no_function(answer)
        if refused:
            return refused
        expected = self._known("solution", self.solution, seed)
        args = self._args(seed)
        try:
            got = run_limited(lambda: [self._observe(answer, case) for case in args])
        except NotYet as error:
            return f"{_name(answer)} was stopped: {error}"
        if all(alike(a, b, self.tolerance) for a, b in zip(got, expected, strict=True)):
            return self._changed(answer, args, seed)
        for name, wrong in self.wrong.items():
            seen = self._known(name, wrong.answer, seed)
            if all(alike(a, b, self.tolerance) for a, b in zip(got, seen, strict=True)):
                return _prose(wrong.text)
        fresh = self._args(seed)
        return next(
            self._explain(answer, case, a, b)
            for case, a, b in zip(fresh, got, expected, strict=True)
            if not alike(a, b, self.tolerance)
        )

    def _args(self, seed):
        """Fresh arguments of every case."""
        return [tuple(case) for case in self.cases(np.random.default_rng(seed))]

    def _known(self, name, function, seed):
        """What one of our own answers does; worked out once, outside the learner's time."""
        if (name, seed) not in self._seen:
            self._seen[name, seed] = [self._observe(function, case) for case in self._args(seed)]
        return self._seen[name, seed]

    def _observe(self, function, args):
        """Run one case; an error is an observation too."""
        try:
            return self.trial(function, *args)
        except Exception as error:
            return _raised(error, function)

    def _changed(self, answer, args, seed):
        """Say that an argument was changed that should stay as it is."""
        for before, after in zip(self._args(seed), args, strict=True):
            for place, (old, new) in enumerate(zip(before, after, strict=True)):
                if not isinstance(old, np.ndarray) or place in self.may_change:
                    continue
                if difference(new, old):
                    return (
                        f"The result is right, but {_name(answer)} changed its argument "
                        f"{_parameter(self.solution, place)}; work on a copy"
                    )
        return ""

    def _explain(self, answer, args, got, expected):
        """Say what happened in one case."""
        if isinstance(got, Raised) and got.kind == "NotYet":
            return _prose(got.text)
        names = [_parameter(self.solution, place) for place in range(len(args))]
        told = [
            f"{name}={short(value)}"
            for name, value in zip(names, args, strict=True)
            if isinstance(value, int | float | str | list | tuple | dict | np.ndarray)
        ]
        case = f"{_name(answer)}({', '.join(told)})"
        if isinstance(got, Raised):
            where = f", {got.where}" if got.where else ""
            return f"{case} raised {got.kind}: {got.text}{where}"
        if got is None:
            return f"{case} returned None; is a return missing?"
        return f"{case}: the result {difference(got, expected, self.tolerance)}"


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class RankExercise(Exercise):
    """A program for one rank to write, as a generator: see [Note: one program, W ranks].

    Attributes
    ----------
    cases : callable
        ``cases(rng)`` returns a list; each case is the rows, one array a rank. Whole numbers in
        float32 make sums exact in every order.
    budget : callable, optional
        ``budget(world_size, numel)`` returns the largest allowed number of elements and of
        messages that one rank sends, ``(elements, messages)``; None for either: no limit.
    tolerance : float
    """

    title: str
    solution: Callable
    cases: Callable
    wrong: Mapping[str, Wrong]
    hints: tuple[str, str, str]
    budget: Callable | None = None
    tolerance: float = 0.0
    core: bool = False
    _seen: dict = field(default_factory=dict, repr=False)

    def is_open(self, answer):
        return answer is ... or answer is None or is_stub(answer)

    def judge(self, answer, seed=SEED):
        refused = _no_function(answer)
        if refused:
            return refused
        expected = self._known("solution", self.solution, seed)
        cases = self._rows(seed)
        try:
            got = run_limited(lambda: [run_ranks(answer, rows) for rows in cases])
        except NotYet as error:
            return f"{_name(answer)} was stopped: {error}"
        reasons = [
            self._explain(rows, a, b) for rows, a, b in zip(cases, got, expected, strict=True)
        ]
        if not any(reasons):
            return ""
        for name, wrong in self.wrong.items():
            seen = self._known(name, wrong.answer, seed)
            if all(self._same(a, b) for a, b in zip(got, seen, strict=True)):
                return _prose(wrong.text)
        return next(filter(None, reasons))

    def _rows(self, seed):
        """Fresh rows of every case."""
        return [list(rows) for rows in self.cases(np.random.default_rng(seed))]

    def _known(self, name, program, seed):
        """What one of our own programs does; worked out once, outside the learner's time."""
        if (name, seed) not in self._seen:
            self._seen[name, seed] = [run_ranks(program, rows) for rows in self._rows(seed)]
        return self._seen[name, seed]

    def _same(self, a, b):
        """Whether two runs cannot be told apart: results, counts, and where they stopped."""
        return (
            a.problem == b.problem
            and a.messages == b.messages
            and a.elements_sent == b.elements_sent
            and alike(a.results, b.results, self.tolerance)
        )

    def _explain(self, rows, got, expected):
        """Say what is wrong with one run; empty if nothing is."""
        ranks = "1 rank" if len(rows) == 1 else f"{len(rows)} ranks"
        case = f"With {ranks} and {_elements(rows)} elements"
        if got.problem:
            return f"{case}: {got.problem}"
        for rank, (a, b) in enumerate(zip(got.results, expected.results, strict=True)):
            if a is None and b is not None:
                return f"{case}: rank {rank} returned None; is a return missing?"
            found = difference(a, b, self.tolerance)
            if found:
                return f"{case}: the result of rank {rank} {found}"
        return self._over_budget(case, rows, got)

    def _over_budget(self, case, rows, got):
        """Say that a rank sent more than it may; empty if none did."""
        if self.budget is None:
            return ""
        limits_of = self.budget(len(rows), _elements(rows))
        counted = (got.elements_sent, got.messages)
        for limit, sent, what in zip(limits_of, counted, ("elements", "messages"), strict=True):
            if limit is not None and max(sent) > limit:
                rank = sent.index(max(sent))
                return (
                    f"{case}: the results are right, but rank {rank} sends {max(sent):,} {what}, "
                    f"and the budget is {limit:,}"
                )
        return ""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class ValueExercise(Exercise):
    """A value to find: a number, a word, an order (tuple), or an assignment (dict).

    The truth is never told.

    Attributes
    ----------
    solution : number, str, tuple or dict
    within : float
        A number this near to the truth is right.
    options : tuple of str
        The words to choose from; they are told if another one is given.
    unit : str
        Written behind numbers.
    """

    title: str
    solution: Any
    wrong: Mapping[str, Wrong]
    hints: tuple[str, str, str]
    within: float = 0.0
    options: tuple[str, ...] = ()
    unit: str = ""
    core: bool = False

    def is_open(self, answer):
        return _has_dots(answer)

    def judge(self, answer, seed=SEED):
        if callable(answer):
            return "This is a function; give the value itself"
        if isinstance(answer, np.ndarray | np.generic):
            answer = answer.tolist()
        if _near(answer, self.solution, self.within):
            return ""
        for wrong in self.wrong.values():
            if _near(answer, wrong.answer, self.within):
                return _prose(wrong.text)
        return self._explain(answer, self.solution, "")

    def _explain(self, got, truth, at):
        """Say what does not fit, without the truth."""
        if isinstance(truth, dict):
            if not isinstance(got, dict):
                return f"{at}Expected a dict with the keys {', '.join(map(str, truth))}"
            for key in truth:
                if key not in got:
                    return f"{at}The key {key!r} is missing"
            wrong = [key for key in truth if not _near(got[key], truth[key], self.within)]
            if not wrong:
                return f"{at}There are keys that were not asked for"
            right = f"{len(truth) - len(wrong)} of {len(truth)} are right; "
            return right + self._explain(got[wrong[0]], truth[wrong[0]], f"{at}{wrong[0]}: ")
        if isinstance(truth, tuple):
            return self._explain_tuple(got, truth, at)
        if isinstance(truth, str):
            if self.options and got not in self.options:
                return f"{at}Choose one of: {', '.join(self.options)}"
            return f"{at}{short(got)} does not fit"
        if isinstance(got, bool) or not isinstance(got, int | float):
            return f"{at}Expected a number, this is of type {type(got).__name__}"
        if got != got:
            return f"{at}Expected a number, this is nan"
        return f"{at}{short(got)}{self.unit} is too {'high' if got > truth else 'low'}"

    def _explain_tuple(self, got, truth, at):
        """Say what does not fit in a sequence."""
        if not isinstance(got, list | tuple):
            return f"{at}Expected {len(truth)} entries in a list"
        if len(got) != len(truth):
            return f"{at}Expected {len(truth)} entries, there are {len(got)}"
        if self.options:
            for entry in got:
                if entry not in self.options:
                    return f"{at}Choose from: {', '.join(self.options)}"
        right = sum(_near(a, b, self.within) for a, b in zip(got, truth, strict=True))
        place = next(
            i
            for i, (a, b) in enumerate(zip(got, truth, strict=True))
            if not _near(a, b, self.within)
        )
        if isinstance(truth[place], str):
            return f"{at}{right} of {len(truth)} are in their place"
        return f"{right} of {len(truth)} are right; " + self._explain(
            got[place], truth[place], f"{at}entry {place}: "
        )


# ---------------------------------------------------------------------------------------- helpers


def is_stub(function):
    """Whether a function still has its three dots instead of a body.

    Parameters
    ----------
    function : object

    Returns
    -------
    bool
        True if there is nothing in it but a docstring and ``...``, ``pass`` or a bare return; if
        its source is known, also if some of its statements are still ``...``.
    """
    code = getattr(function, "__code__", None)
    if not isinstance(code, types.CodeType):
        return False
    return _does_nothing(code) or _dots_in_source(function)


def _does_nothing(code):
    """Whether this code only returns None or Ellipsis."""
    idle = {"RESUME", "NOP", "LOAD_CONST", "RETURN_CONST", "RETURN_VALUE", "LOAD_COMMON_CONSTANT"}
    for instruction in dis.get_instructions(code):
        if instruction.opname not in idle:
            return False
        if "CONST" in instruction.opname and instruction.argval not in (None, ...):
            return False
    return True


def _dots_in_source(function):
    """Whether ``...`` stands as a statement, or is given a name, in the function's source."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError, ValueError):
        return False
    for node in ast.walk(tree):
        value = node.value if isinstance(node, ast.Expr | ast.Assign | ast.Return) else None
        if isinstance(value, ast.Constant) and value.value is ...:
            return True
    return False


def _has_dots(answer):
    """Whether a value is None or ``...``, or has ``...`` in it."""
    if answer is ... or answer is None:
        return True
    if isinstance(answer, dict):
        return any(value is ... for value in answer.values())
    return isinstance(answer, list | tuple) and any(value is ... for value in answer)


def _no_function(answer):
    """Say that this is no function; empty if it is one."""
    if callable(answer):
        return ""
    return (
        f"This is a value of type {type(answer).__name__}, not a function; give the function "
        "itself, without brackets behind its name"
    )


def _prose(text):
    """A sentence in one line, with a capital unless it begins with a name in code."""
    text = " ".join(text.split())
    if text.split(" ")[0].isalpha():
        text = text[0].upper() + text[1:]
    return text if text.endswith((".", "?", "!")) else f"{text}."


def _near(got, truth, within):
    """Whether two values are equal, numbers in them up to `within`."""
    if isinstance(truth, dict):
        return (
            isinstance(got, dict)
            and set(got) == set(truth)
            and all(_near(got[key], truth[key], within) for key in truth)
        )
    if isinstance(truth, tuple):
        return (
            isinstance(got, list | tuple)
            and len(got) == len(truth)
            and all(_near(a, b, within) for a, b in zip(got, truth, strict=True))
        )
    if isinstance(truth, bool | str) or truth is None:
        return type(got) is type(truth) and got == truth
    if isinstance(got, bool) or not isinstance(got, int | float):
        return False
    return abs(got - truth) <= within


def _name(function):
    """What a function is called."""
    name = getattr(function, "__name__", None)
    return name if isinstance(name, str) and name.isidentifier() else "Your function"


def _parameter(function, place):
    """The name of a parameter by its place."""
    names = list(inspect.signature(function).parameters)
    return names[place] if place < len(names) else f"number {place}"


def _raised(error, function):
    """An error as an observation, with the line of the learner's code it came from."""
    if isinstance(error, NotYet):
        return Raised("NotYet", str(error))
    code = getattr(function, "__code__", None)
    where = ""
    trace = error.__traceback__
    while trace is not None and code is not None:
        frame = trace.tb_frame
        if frame.f_code.co_filename == code.co_filename and trace.tb_lineno is not None:
            line = linecache.getline(code.co_filename, trace.tb_lineno).strip()
            where = f"in the line: {line}" if line else ""
        trace = trace.tb_next
    return Raised(type(error).__name__, " ".join(str(error).split()), where)


def _elements(rows):
    """Elements of the longest row."""
    return max((int(np.size(row)) for row in rows), default=0)
