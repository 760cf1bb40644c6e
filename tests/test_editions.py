"""Two editions of each notebook: one source, nothing given away, and answers that can be pasted."""

import functools
import json
import re
from pathlib import Path

import pytest

import nbtools
from zero_nb.learn.answers import read_answers, run_answers
from zero_nb.learn.checking import judge
from zero_nb.learn.predict import Compared, Waiting, compare_guess
from zero_nb.learn.registry import exercise_keys, find_exercise, keys_of, notebooks

SOLVED = [path for path in nbtools.solved_notebooks() if path.name not in nbtools.single_editions()]
LEARNER = sorted((nbtools.NOTEBOOKS / nbtools.LEARNER).glob("*.ipynb"))

MOST_WORDS = 1_600  # "about 1,500"
MOST_CODE_LINES = 180


@functools.cache
def read(path):
    return json.loads(Path(path).read_text(encoding="utf-8"))


def text_of(content):
    return content if isinstance(content, str) else "".join(content)


def source_of(cell):
    return text_of(cell["source"])


def number_of(path):
    """ "04" of 04_stage_1.ipynb."""
    return path.name.split("_")[0]


def shown_by(cell):
    """All that the outputs of a cell say, without the pixels of pictures."""
    said = "\n".join(
        text
        for output in cell.get("outputs", [])
        for text in nbtools._strings({k: v for k, v in output.items() if k != "execution_count"})
    )
    return nbtools._EMBEDDED.sub("", said)


def code_cells(path):
    return [cell for cell in read(path)["cells"] if cell["cell_type"] == "code"]


def ids(paths):
    return [path.stem for path in paths]


def regions(source):
    """The lines between the marks of a solved cell."""
    found, inside = [], False
    for line in source.split("\n"):
        if line.strip() in (nbtools.BEGIN, nbtools.END):
            inside = line.strip() == nbtools.BEGIN
        elif inside:
            found.append(line)
    return found


# -------------------------------------------------------------------------------- one source


def test_each_solved_notebook_has_its_learners_edition_and_no_other_exists():
    assert [path.name for path in LEARNER] == [path.name for path in SOLVED]
    assert len(SOLVED) > 0


@pytest.mark.parametrize("path", SOLVED, ids=ids(SOLVED))
def test_the_learners_edition_is_what_is_left_of_the_solved_one(path):
    expected = nbtools.strip(read(path), nbtools.single_editions())
    found = read(nbtools.learner_path(path))
    blank = {"execution_count": None, "outputs": []}
    cells = [cell | blank if cell["cell_type"] == "code" else cell for cell in found["cells"]]
    assert cells == expected["cells"], "run `make notebooks`"


@pytest.mark.parametrize("path", SOLVED, ids=ids(SOLVED))
def test_the_learners_edition_does_not_hold_a_line_of_a_solution(path):
    left = "\n".join(
        source_of(cell) + shown_by(cell) for cell in read(nbtools.learner_path(path))["cells"]
    )
    lines = [
        line.strip()
        for cell in code_cells(path)
        for line in regions(source_of(cell))
        if len(line.strip()) >= 24 and not line.strip().startswith("#")
    ]
    assert [line for line in lines if line in left] == []
    assert nbtools.BEGIN not in left


@pytest.mark.parametrize("path", SOLVED + LEARNER, ids=ids(SOLVED) + ids(LEARNER))
def test_every_link_to_a_file_leads_to_one(path):
    for cell in read(path)["cells"]:
        if cell["cell_type"] == "markdown":
            for hit in re.finditer(r"\]\(([^()\s]+)\)", source_of(cell)):
                target = hit.group(1).partition("#")[0]
                if target and "://" not in target:
                    assert (path.parent / target).exists(), hit.group(1)


@pytest.mark.parametrize("path", SOLVED, ids=ids(SOLVED))
def test_a_notebook_is_not_too_long(path):
    words = sum(
        len(source_of(cell).split())
        for cell in read(path)["cells"]
        if cell["cell_type"] == "markdown"
    )
    lines = sum(
        bool(line.strip()) and line.strip() not in (nbtools.BEGIN, nbtools.END)
        for cell in code_cells(path)
        for line in source_of(cell).split("\n")
    )
    assert words <= MOST_WORDS
    assert lines <= MOST_CODE_LINES


# ------------------------------------------------------------------------- nothing given away


def calls(source, name):
    """Whether a cell calls a function."""
    return re.search(rf"\b{name}\(", source) is not None


@pytest.mark.parametrize("path", LEARNER, ids=ids(LEARNER))
def test_the_empty_edition_waits_for_answers_and_guesses(path):
    first = {"guesses": 0, "checks": 0}
    for cell in code_cells(path):
        source, said = source_of(cell), shown_by(cell)
        if calls(source, "compare_guess"):
            first["guesses"] += 1
            assert "Write a guess first" in said, cell["id"]
            assert "measured" not in said, cell["id"]
            assert "modelled" not in said, cell["id"]
        if calls(source, "reveal"):
            assert "Write a guess first" in said, cell["id"]
            assert "<img" not in said, cell["id"]
        if calls(source, "check"):
            first["checks"] += 1
            assert "not attempted: put your answer" in said, cell["id"]
        if re.search(r"show_diff\([^)]*\bafter=", source):
            assert "shown here after exercise" in said, cell["id"]
        if calls(source, "score_card"):
            assert "passed" not in said, cell["id"]
            assert "0 of " in said, cell["id"]
    assert sum(first.values()) > 0


def measured_numbers(path):
    """The truths that the solved edition shows after a guess, as they are written."""
    found = set()
    for cell in code_cells(path):
        if calls(source_of(cell), "compare_guess"):
            found |= set(re.findall(r"(?:measured|modelled) ([\d.eE+-]*\d)", shown_by(cell)))
    return found


@pytest.mark.parametrize("path", SOLVED, ids=ids(SOLVED))
def test_no_output_of_the_empty_edition_shows_a_predicted_number(path):
    for number in measured_numbers(path):
        written = re.compile(rf"(?<![\d.,]){re.escape(number)}(?![\d,]|\.\d)")
        for cell in code_cells(nbtools.learner_path(path)):
            # One digit, or two, is also a rank or a stage: then only where it would be the truth.
            near = len(number.replace(".", "")) >= 3 or calls(source_of(cell), "compare_guess")
            if near:
                assert not written.search(shown_by(cell)), (number, cell["id"])


# --------------------------------------------------------------------------- answers are pasted


def parsed(path):
    return read_answers(read(path))


def keys_in(path):
    return [key for key, _ in parsed(path).cells]


def test_every_exercise_is_in_its_notebook_once():
    found = {number_of(path): keys_in(path) for path in SOLVED}
    for number in notebooks():
        assert sorted(found.get(number, [])) == keys_of(number), number
    for path in SOLVED:
        answers = parsed(path)
        for key in keys_in(path):
            assert (key in answers.checked) != (key in answers.guessed), key
            assert (key in answers.checked) == (key in exercise_keys()), key


@pytest.mark.parametrize("path", SOLVED, ids=ids(SOLVED))
def test_the_solved_edition_passed_everything_when_it_was_run(path):
    said = "\n".join(shown_by(cell) for cell in code_cells(path))
    for key in parsed(path).checked:
        assert f"{key} passed: " in said, key
        assert f"{key} not " not in said, key


@functools.cache
def answers_of(path):
    return run_answers(parsed(path))


PAIRS = [(path, key) for path in SOLVED for key in parsed(path).checked]
GUESSES = [(path, key) for path in SOLVED for key in parsed(path).guessed]


@pytest.mark.parametrize(("path", "key"), PAIRS, ids=[key for _, key in PAIRS])
def test_a_pasted_solution_turns_not_attempted_into_passed(path, key):
    empty, errors = answers_of(nbtools.learner_path(path))
    assert key not in errors
    assert judge(key, find_exercise(key), empty[key]).status == "not attempted"
    pasted, errors = answers_of(path)
    assert key not in errors, "an answer may use imports and other answers only"
    assert judge(key, find_exercise(key), pasted[key]).status == "passed"


@pytest.mark.parametrize(("path", "key"), GUESSES, ids=[key for _, key in GUESSES])
def test_a_pasted_guess_shows_the_truth(path, key):
    empty, _ = answers_of(nbtools.learner_path(path))
    assert isinstance(compare_guess(key, empty[key], 1.0), Waiting)
    pasted, errors = answers_of(path)
    assert key not in errors
    assert isinstance(compare_guess(key, pasted[key], 1.0), Compared)


# -------------------------------------------------------------------------------- the machinery


OUTPUT = {"name": "stdout", "output_type": "stream", "text": ["x"]}


def notebook(*cells):
    return {
        "cells": [
            {"cell_type": kind, "id": f"c{i}", "metadata": {}, "source": source}
            | ({"execution_count": 7, "outputs": [OUTPUT]} if kind == "code" else {})
            for i, (kind, source) in enumerate(cells)
        ],
        "metadata": {},
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def stripped(source):
    kept = nbtools.strip(notebook(("code", source)))["cells"][0]
    assert kept["outputs"] == []
    return source_of(kept)


@pytest.mark.parametrize(
    ("source", "left"),
    [
        ("a = 1\nb = 2", "a = 1\nb = 2"),
        (
            "def f(n):\n    ### BEGIN SOLUTION\n    m = n\n    return m\n    ### END SOLUTION",
            "def f(n):\n    ...",
        ),
        (
            "guess = ...\n### BEGIN SOLUTION\nguess = 3\n### END SOLUTION\ncheck('01-a', guess)",
            "guess = ...\ncheck('01-a', guess)",
        ),
        (
            "cards = {'A': ..., 'B': ...}\n### BEGIN SOLUTION\ncards = 3\n### END SOLUTION",
            "cards = {'A': ..., 'B': ...}",
        ),
        (
            "### BEGIN SOLUTION\na\n### END SOLUTION\nx\n  ### BEGIN SOLUTION\nb\n### END SOLUTION",
            "...\nx\n  ...",
        ),
    ],
)
def test_what_stands_between_the_marks_becomes_three_dots(source, left):
    assert stripped(source) == left


@pytest.mark.parametrize(
    "source",
    [
        "### BEGIN SOLUTION\na",
        "a\n### END SOLUTION",
        "### BEGIN SOLUTION\n### BEGIN SOLUTION\n### END SOLUTION",
        "### BEGIN SOLUTION\n### END SOLUTION\n### END SOLUTION",
    ],
)
def test_marks_that_do_not_fit_are_refused(source):
    with pytest.raises(ValueError, match="cell 0: "):
        stripped(source)


@pytest.mark.parametrize(
    ("link", "becomes"),
    [
        ("[next](05_stage_2.ipynb)", "[next](05_stage_2.ipynb)"),
        ("[word](B_glossary.ipynb#rank)", "[word](../B_glossary.ipynb#rank)"),
        ("[list](README.md)", "[list](../README.md)"),
        ("[paper](https://arxiv.org/abs/1910.02054)", "[paper](https://arxiv.org/abs/1910.02054)"),
        ("[here](#recap)", "[here](#recap)"),
    ],
)
def test_links_still_lead_somewhere_from_one_folder_deeper(link, becomes):
    single = frozenset({"B_glossary.ipynb"})
    cells = nbtools.strip(notebook(("markdown", f"see {link}.")), single)["cells"]
    assert source_of(cells[0]) == f"see {becomes}."


def test_run_writes_both_editions_and_runs_both(tmp_path, capsys):
    file = tmp_path / "09_example.ipynb"
    source = "answer = ...\n### BEGIN SOLUTION\nanswer = 3\n### END SOLUTION\nprint(answer)"
    original = nbtools.normalise(notebook(("markdown", "# Title"), ("code", source)))
    file.write_text(nbtools.to_text(original), encoding="utf-8")
    assert nbtools.main(["run", str(file)]) == 0
    learner = nbtools.learner_path(file)
    assert capsys.readouterr().out.splitlines() == [
        "09_example.ipynb: fine",
        "learner/09_example.ipynb: fine",
    ]
    assert [shown_by(cell).strip() for cell in code_cells(file)] == ["stdout\nstream\n3"]
    assert source_of(code_cells(learner)[0]) == "answer = ...\nprint(answer)"
    assert "Ellipsis" in shown_by(code_cells(learner)[0])
