"""Marks: what is taken from a notebook, what it is run against, and what cannot do harm."""

import csv
import inspect
import json

import pytest
from typer.testing import CliRunner

from zero_nb import cli
from zero_nb.config import UsageError
from zero_nb.learn import exercises_a, grade, limits
from zero_nb.learn.answers import read_answers, run_answers
from zero_nb.learn.grade import Mark, write_marks

SOLUTION = inspect.getsource(exercises_a._add_chunk)
RIGHT = f"{SOLUTION}\nadd_chunk = _add_chunk"
CHECKS = 'check("A-a", line)\ncheck("A-b", add_chunk)\ncompare_guess("A-p", guess, f(10))'
IMPORTS = "import numpy as np\nfrom zero_nb.learn import check, compare_guess"


def cell(source, *tags):
    return {
        "cell_type": "code", "execution_count": None, "id": f"c{abs(hash(source)) % 10**8}",
        "metadata": {"tags": list(tags)}, "outputs": [], "source": source.splitlines(keepends=True),
    }  # fmt: skip


def handed_in(line="line = 5", body=RIGHT, guess="guess = 20", extra=()):
    """A learner's notebook of reference A."""
    cells = [
        {"cell_type": "markdown", "id": "t", "metadata": {}, "source": ["# A\n"]},
        cell(IMPORTS),
        cell("%timeit 1\nraise RuntimeError('not an answer, so it is not run')"),
        cell(guess, "exercise", "A-p"),
        cell(line, "exercise", "A-a"),
        cell(body, "exercise", "A-b"),
        *extra,
        cell(CHECKS),
    ]
    return {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}


def without(notebook, key):
    """The same without one answer cell."""
    cells = [c for c in notebook["cells"] if key not in c["metadata"].get("tags", ())]
    return notebook | {"cells": cells}


def write(path, notebook):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(notebook), encoding="utf-8")


# -------------------------------------------------------------------------- what is taken from it


def test_answers_are_found_by_their_tags_and_run_without_the_rest():
    answers = read_answers(handed_in())
    assert [key for key, _ in answers.cells] == ["A-p", "A-a", "A-b"]
    assert answers.checked == {"A-a": "line", "A-b": "add_chunk"}
    assert answers.guessed == {"A-p": "guess"}
    values, errors = run_answers(answers)
    assert errors == {}
    assert values["A-a"] == 5
    assert values["A-p"] == 20
    assert callable(values["A-b"])


def test_a_cell_that_was_split_is_put_together():
    extra = [cell("line = line + 1", "exercise", "A-a")]
    values, _ = run_answers(read_answers(handed_in(line="line = 4", extra=extra)))
    assert values["A-a"] == 5


def test_an_error_in_one_answer_leaves_the_others():
    values, errors = run_answers(read_answers(handed_in(line="line = 1 / 0", guess="import nope")))
    assert errors["A-a"].startswith("ZeroDivisionError")
    assert errors["A-p"].startswith("ModuleNotFoundError")
    assert values["A-a"] is ...
    assert callable(values["A-b"])


def test_what_is_no_python_is_an_error_of_that_answer():
    values, errors = run_answers(read_answers(handed_in(line="line = = 5")))
    assert errors["A-a"].startswith("SyntaxError")
    assert callable(values["A-b"])


@pytest.mark.parametrize("notebook", [{}, {"cells": []}, {"cells": [{"cell_type": "code"}]}])
def test_a_notebook_without_answers_has_none(notebook):
    assert read_answers(notebook).cells == ()


# ------------------------------------------------------------------------------------------ marks


@pytest.fixture(scope="module")
def marks(tmp_path_factory):
    """One class: everybody did something else."""
    folder = tmp_path_factory.mktemp("class")
    name = "A_numba_in_15_minutes.ipynb"
    one_total = inspect.getsource(exercises_a._one_total).replace("_one_total", "add_chunk")
    only_seed_0 = (
        f"{SOLUTION}\n"
        "def add_chunk(chunk, x, partial):\n"
        "    if x.size == 23 and x[0] != 8 or x.size == 99:\n"
        "        partial[chunk] = 1\n"
        "    else:\n"
        "        _add_chunk(chunk, x, partial)\n"
    )
    write(folder / "ada" / name, handed_in())
    write(folder / "ben" / name, handed_in(line="line = 3", body=one_total, guess="guess = ..."))
    write(folder / "cyd" / name, without(handed_in(body="import os\nos._exit(3)"), "A-p"))
    write(folder / "dov" / name, handed_in(body=only_seed_0))
    stub = "def add_chunk(chunk, x, partial):\n    ..."
    write(folder / "eve.ipynb", without(handed_in(line="while True:\n    pass", body=stub), "A-p"))
    (folder / "gus").mkdir()
    (folder / "gus" / name).write_text("no notebook", encoding="utf-8")
    write(folder / "ada" / ".ipynb_checkpoints" / name, handed_in(line="line = 1"))
    write(folder / "ada" / "notes.ipynb", {"cells": [cell("1")], "nbformat": 4})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "SECONDS", 0.5)
        found = grade.grade(folder, seed=7)
    return {(mark.learner, mark.exercise): mark for mark in found}


def told(marks, learner):
    return {
        exercise: (mark.status, mark.points)
        for (name, exercise), mark in marks.items()
        if name == learner
    }


def test_right_answers_have_their_points_and_a_guess_has_none(marks):
    assert told(marks, "ada") == {
        "A-a": ("passed", "1"),
        "A-b": ("passed", "1"),
        "A-p": ("guessed", ""),
    }
    assert marks["ada", "A-a"].core == "core"
    assert marks["ada", "A-a"].notebook == "A"
    assert marks["ada", "A-a"].file == "ada/A_numba_in_15_minutes.ipynb"


def test_a_known_mistake_is_named_in_the_remark(marks):
    assert told(marks, "ben") == {
        "A-a": ("not yet", "0"),
        "A-b": ("not yet", "0"),
        "A-p": ("not attempted", ""),
    }
    assert marks["ben", "A-b"].remark.startswith("All iterations still add into partial[0].")
    assert "hint" not in marks["ben", "A-b"].remark


def test_an_answer_that_ends_its_process_takes_no_other_with_it(marks):
    assert told(marks, "cyd") == {
        "A-a": ("passed", "1"),
        "A-b": ("stopped", "0"),
        "A-p": ("missing", ""),
    }
    assert marks["cyd", "A-b"].remark == "its process ended with status 3"


def test_an_answer_made_for_the_cases_of_the_notebook_does_not_pass(marks):
    assert told(marks, "dov")["A-b"] == ("not yet", "0")


def test_a_stub_a_missing_cell_and_a_broken_file_are_told_apart(marks):
    assert told(marks, "eve") == {
        "A-a": ("not yet", "0"),
        "A-b": ("not attempted", "0"),
        "A-p": ("missing", ""),
    }
    assert "was not finished after 0.5 seconds" in marks["eve", "A-a"].remark
    assert told(marks, "gus") == {"": ("unreadable", "")}


def test_marks_are_a_table_that_no_spreadsheet_computes(tmp_path):
    mark = Mark("=1+1", "a/b", "A", "A-a", "core", "passed", "1", "-3, too low")
    write_marks([mark], tmp_path / "marks.csv")
    with open(tmp_path / "marks.csv", encoding="utf-8", newline="") as file:
        header, row = csv.reader(file)
    assert header == [
        "learner",
        "file",
        "notebook",
        "exercise",
        "core",
        "status",
        "points",
        "remark",
    ]
    assert row == ["'=1+1", "a/b", "A", "A-a", "core", "passed", "1", "'-3, too low"]


def test_a_folder_without_notebooks_is_refused(tmp_path):
    with pytest.raises(UsageError, match="no notebook of the course"):
        grade.grade(tmp_path)
    with pytest.raises(UsageError, match="is no folder"):
        grade.grade(tmp_path / "missing")


# ------------------------------------------------------------------------------------ the commands


def run(*words):
    return CliRunner().invoke(cli.app, words)


def test_the_command_says_what_it_is_not_and_writes_the_table(tmp_path):
    write(tmp_path / "in" / "ada" / "A_x.ipynb", handed_in(line="line = 3"))
    out = tmp_path / "marks.csv"
    done = run("grade", str(tmp_path / "in"), "--out", str(out))
    assert done.exit_code == 0, done.output
    assert "It is no sandbox" in done.stderr
    assert done.stdout.splitlines() == ["ada: 1 of 2 core, 0 of 0 more", str(out)]
    assert out.read_text(encoding="utf-8").count("\n") == 4


def test_the_commands_refuse_what_cannot_be(tmp_path):
    for words in (
        ("grade", str(tmp_path / "missing")),
        ("grade", str(tmp_path), "--out", str(tmp_path)),
        ("grade", str(tmp_path), "--seed", "-1"),
        ("quiz", "--notebook", "99"),
        ("quiz", "--form", "D"),
        ("quiz", "--out", str(tmp_path)),
        ("quiz", "--out", str(tmp_path / "missing" / "keys.md")),
        ("quiz", "--keys", "--gift"),
    ):
        assert isinstance(run(*words).exception, UsageError), words


def test_the_quiz_command_prints_paper_and_gift(tmp_path):
    assert run("quiz", "--notebook", "00", "--form", "A").stdout.startswith("Notebook 00, form A")
    assert "Key: 1 " in run("quiz", "--keys", "--notebook", "04").stdout
    file = tmp_path / "keys.md"
    assert run("quiz", "--keys", "--out", str(file)).stdout == f"{file}\n"
    assert "## Test, form B, for after the course" in file.read_text(encoding="utf-8")
    file = tmp_path / "bank.gift"
    assert run("quiz", "--gift", "--out", str(file)).stdout == f"{file}\n"
    assert file.read_text(encoding="utf-8").startswith("$CATEGORY: zero-nb/")


def test_a_sign_that_the_output_cannot_hold_is_one_line_of_advice():
    done = CliRunner(charset="cp1252").invoke(cli.app, ["quiz", "--keys", "--notebook", "12"])
    assert isinstance(done.exception, UsageError)
    assert "cannot hold the sign 'Ψ' (cp1252); give --out and a file" in str(done.exception)
