"""Short questions with feedback for each option: in a notebook, on paper, and for Moodle.

The bank is ``quiz.yaml``, which also says how its entries are written, and one ``quiz_NN.yaml`` a
notebook. Every question has three
parallel forms: the same idea with other numbers. Notebooks show form A of their own questions; a
pre-test and a post-test are two forms of a set of their own. What a teacher needs to go through
them with a class is in `teachers_edition`.
"""

import html
import random
from dataclasses import dataclass
from functools import cache
from typing import final

from zero_nb.config import UsageError
from zero_nb.learn.files import read_yaml
from zero_nb.learn.session import GUESSED, NOT_ATTEMPTED, SESSION
from zero_nb.learn.words import with_tooltips

__all__ = [
    "FORMS",
    "Option",
    "Question",
    "Quiz",
    "bank",
    "entries",
    "gift",
    "misconceptions",
    "posttest",
    "pretest",
    "quiz",
    "select",
    "sheet",
    "teachers_edition",
]

FORMS = ("A", "B", "C")
PRETEST = "test"
"""The notebook under which the bank keeps the questions of the pre-test and post-test."""
_TESTS = {"A": ", for before the course", "B": ", for after the course"}


@final
@dataclass(frozen=True)
class Option:
    """One answer to choose.

    Attributes
    ----------
    text : str
    right : bool
    feedback : str
        What choosing it says about the idea behind it.
    """

    text: str
    right: bool
    feedback: str


@final
@dataclass(frozen=True)
class Question:
    """One question in one form.

    Attributes
    ----------
    name : str
        Such as ``"04-q1"``.
    form : str
        One of `FORMS`.
    code : str
        The misconception it asks about, such as ``"M9"``.
    notebook : str
        Where it is asked, or `PRETEST`.
    source : str
        The notebook that answers it.
    stem : str
    options : tuple of Option
        In the order in which they are shown; exactly one is right.
    """

    name: str
    form: str
    code: str
    notebook: str
    source: str
    stem: str
    options: tuple[Option, ...]

    @property
    def letter(self):
        """The letter of the right option (str)."""
        return "abcdefgh"[[option.right for option in self.options].index(True)]


@cache
def bank():
    """Return every `Question` in every form (tuple), in the order of the files.

    Raises
    ------
    ValueError
        If an entry of the file is incomplete: names it.
    """
    return tuple(question for entry in entries() for question in _questions(entry))


@cache
def entries():
    """Return the bank's entries (tuple of dict) as the files have them."""
    return tuple(read_yaml("quiz"))


def _questions(entry):
    """The forms of one entry."""
    name = entry["id"]
    if set(entry["forms"]) != set(FORMS):
        raise ValueError(f"question {name} needs the forms {', '.join(FORMS)}")
    for form in FORMS:
        numbers = entry["forms"][form] or {}
        options = [
            Option(
                _filled(option["text"], numbers, name),
                bool(option.get("right", False)),
                _filled(option["feedback"], numbers, name),
            )
            for option in entry["options"]
        ]
        # Another order in each form, the same on every machine.
        random.Random(f"{name}{form}").shuffle(options)
        yield Question(
            name,
            form,
            entry["code"],
            str(entry["notebook"]),
            str(entry.get("source", entry["notebook"])),
            _filled(entry["stem"], numbers, name),
            tuple(options),
        )


def _filled(text, numbers, name):
    """A text with the numbers of one form in it."""
    told = {key: _number(value) for key, value in numbers.items()}
    try:
        return " ".join(str(text).format(**told).split())
    except KeyError as error:
        raise ValueError(f"question {name}: not every form has a number {error}") from error


def _number(value):
    """A number as one writes it: digits in groups where there are many."""
    return f"{value:,}" if isinstance(value, int) and abs(value) >= 10_000 else value


@final
@dataclass(frozen=True, repr=False)
class Quiz:
    """Questions to read; in a browser each option opens to its feedback.

    Attributes
    ----------
    title : str
    questions : tuple of Question
    feedback : bool
        Whether options open.
    """

    title: str
    questions: tuple[Question, ...]
    feedback: bool = True

    def __repr__(self):
        """Return questions and options without the answers: what the notebook tests compare."""
        lines = [self.title]
        for number, question in enumerate(self.questions, 1):
            lines.append(f"{number}. {question.stem}")
            for letter, option in _lettered(question):
                lines.append(f"   {letter}) {option.text}")
        return "\n".join(lines)

    def _repr_html_(self):
        """Nested lists; an option is a button that keyboards and screen readers know."""
        items = []
        for question in self.questions:
            options = "".join(
                f"<li>{self._option(letter, option)}</li>" for letter, option in _lettered(question)
            )
            items.append(
                f'<li style="margin-bottom: 1em"><p>{with_tooltips(question.stem)}</p>'
                f'<ul style="list-style: none; padding-left: 0.5em">{options}</ul></li>'
            )
        title, questions = html.escape(self.title), f"<ol>{''.join(items)}</ol>"
        if self.feedback:
            return f"<p><strong>{title}</strong></p>{questions}"
        return f"<details><summary>{title}</summary>{questions}</details>"

    def _option(self, letter, option):
        """One option."""
        text = f"{letter}) {html.escape(option.text)}"
        if not self.feedback:
            return text
        word = "Right." if option.right else "Not quite."
        return (
            f"<details><summary>{text}</summary>"
            f"<p><strong>{word}</strong> {html.escape(option.feedback)}</p></details>"
        )


def quiz(notebook, form="A"):
    """Show the short quiz of a notebook.

    Parameters
    ----------
    notebook : str
        Such as ``"04"``.
    form : str
        One of `FORMS`.

    Returns
    -------
    Quiz
    """
    found = select(notebook, form)
    return Quiz("Choose an option to read what it says.", found)


def select(notebook=None, form=None):
    """Choose questions from the bank.

    Parameters
    ----------
    notebook : str, optional
        Such as ``"04"``, ``"A"`` or ``"test"``; all if not given.
    form : str, optional
        One of `FORMS`; all if not given.

    Returns
    -------
    tuple of Question
        At least one.

    Raises
    ------
    UsageError
        If there is no such form, or no question for the notebook.
    """
    if form is not None and form not in FORMS:
        raise UsageError(f"there is no form {form!r}; choose one of {', '.join(FORMS)}")
    found = tuple(
        question
        for question in bank()
        if notebook in (None, question.notebook) and form in (None, question.form)
    )
    if not found:
        names = sorted({question.notebook for question in bank()})
        raise UsageError(f"no questions for {notebook!r}; there are some for {', '.join(names)}")
    return found


@final
@dataclass(frozen=True, repr=False)
class TestOutcome:
    """How a test went: how many, and where to read on; not which option is right.

    Attributes
    ----------
    text : str
    """

    text: str

    def __repr__(self):
        """Return the text: this is what a notebook shows."""
        return self.text


def pretest(form="A", answers=...):
    """Show the test before the course, or say how it went; `posttest` is its twin.

    Parameters
    ----------
    form : str
        One of `FORMS`: A before the course.
    answers : str, optional
        One letter a question, such as ``"abcabc"``. Letters may have blanks between them.

    Returns
    -------
    Quiz or TestOutcome
        The questions, or how many were right and which notebooks answer the others. Never raises
        for any `answers`.
    """
    questions = select(PRETEST, form)
    key = f"test-{form}"
    if answers is ... or answers is None:
        SESSION.note(key, NOT_ATTEMPTED)
        return Quiz(f"Test, form {form}: {len(questions)} questions.", questions, feedback=False)
    letters = "".join(answers.split()).lower() if isinstance(answers, str) else ""
    if len(letters) != len(questions) or set(letters) - set("abcdefgh"):
        return TestOutcome(
            f"Write {len(questions)} letters, one for each question, such as "
            f"{'abcd' * len(questions)!s:.{len(questions)}}."
        )
    SESSION.note(key, GUESSED)
    wrong = [q for q, letter in zip(questions, letters, strict=True) if q.letter != letter]
    text = f"{len(questions) - len(wrong)} of {len(questions)} right."
    if wrong:
        places = ", ".join(sorted({q.source for q in wrong}))
        text += f" The notebooks that answer the others: {places}."
    return TestOutcome(text)


def posttest(form="B", answers=...):
    """Show the test after the course, or say how it went.

    A parallel form of `pretest`: the same ideas with other numbers, so other answers.

    Parameters
    ----------
    form : str
        One of `FORMS`: B after the course, C for whoever writes it later.
    answers : str, optional
        One letter a question, such as ``"abcabc"``. Letters may have blanks between them.

    Returns
    -------
    Quiz or TestOutcome
        See `pretest`. Never raises for any `answers`.
    """
    return pretest(form, answers)


def sheet(questions):
    """Write questions for paper; their keys are in `teachers_edition`.

    Parameters
    ----------
    questions : sequence of Question

    Returns
    -------
    str
        A part for each notebook and form.
    """
    lines = []
    for (notebook, form), part in _parts(questions):
        lines += [f"{_title(notebook)}, form {form}", ""]
        for number, question in enumerate(part, 1):
            lines.append(f"{number}. {question.stem}")
            lines += [f"   [ ] {letter}) {o.text}" for letter, o in _lettered(question)] + [""]
    return "\n".join(lines)


def teachers_edition(questions):
    """Write questions with their keys, for the teacher, as Markdown.

    Parameters
    ----------
    questions : sequence of Question

    Returns
    -------
    str
        The parts of `sheet` in the same order with the same numbers and letters. Each begins with
        its key. Below each question are the misconception it asks about and, for each option,
        what choosing it says.
    """
    lines = [
        "# Questions with their keys",
        "",
        "For the teacher: do not hand out. Numbers and letters are those of the sheets that",
        "`zero-nb quiz` prints. Codes such as M9 name misconceptions; the list is at the end.",
        "",
    ]
    for (notebook, form), part in _parts(questions):
        extra = _TESTS.get(form, "") if notebook == PRETEST else ""
        keys = " · ".join(f"{number} {question.letter}" for number, question in enumerate(part, 1))
        lines += [f"## {_title(notebook)}, form {form}{extra}", "", f"Key: {keys}", ""]
        for number, question in enumerate(part, 1):
            where = f", answered in notebook {question.source}" if notebook == PRETEST else ""
            lines += [f"**{number}.** {question.stem}", f"*({question.code}{where})*", ""]
            for letter, option in _lettered(question):
                text = f"**{option.text}** (right)" if option.right else option.text
                lines.append(f"- {letter}) {text}: *{option.feedback}*")
            lines.append("")
    lines += ["## The misconceptions", ""]
    asked = {question.code for question in questions}
    lines += [f"- {code}: {text}" for code, text in misconceptions().items() if code in asked]
    return "\n".join(lines) + "\n"


@cache
def misconceptions():
    """Return the misconceptions of the course (dict of str to str): a sentence for each code."""
    return {entry["code"]: entry["text"] for entry in read_yaml("misconceptions")}


def _parts(questions):
    """Questions by notebook and form, in this order: what is printed together."""
    parts = {}
    for question in sorted(questions, key=lambda q: (q.notebook, q.form, q.name)):
        parts.setdefault((question.notebook, question.form), []).append(question)
    return parts.items()


def _title(notebook):
    """How a part of the bank is called on paper."""
    return "Test" if notebook == PRETEST else f"Notebook {notebook}"


def _lettered(question):
    """The options of a question with their letters."""
    return zip("abcdefgh", question.options, strict=False)


def gift(questions=None):
    """Write questions in Moodle's GIFT format.

    Parameters
    ----------
    questions : sequence of Question, optional
        All of `bank` if not given.

    Returns
    -------
    str
        UTF-8 text; a category for each notebook, each option with its feedback.
    """
    lines, category = [], None
    for question in bank() if questions is None else questions:
        if question.notebook != category:
            category = question.notebook
            lines += [f"$CATEGORY: zero-nb/{category}", ""]
        lines.append(f"::{question.name} {question.form}:: {_escaped(question.stem)} {{")
        for option in question.options:
            sign = "=" if option.right else "~"
            lines.append(f"  {sign}{_escaped(option.text)} #{_escaped(option.feedback)}")
        lines += ["}", ""]
    return "\n".join(lines)


def _escaped(text):
    """A text with GIFT's own signs taken literally."""
    return "".join(f"\\{sign}" if sign in "~=#{}:\\" else sign for sign in text)
