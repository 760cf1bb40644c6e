"""What the teacher's page says is so: its cases, its exercises and its sums."""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from zero_nb import cli
from zero_nb.learn.registry import (
    find_exercise,
    find_prediction,
    has_check,
    keys_of,
    notebooks,
)

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
PAGE = (FOLDER / "teacher.md").read_text("utf-8")
CASES = re.findall(r"\| \d \| `zero-nb (plan [^`]*)` \| (none|\d) \|", PAGE)


def minutes_of(part):
    """What the rows of a part's table add up to; rows of cases begin with a command."""
    return sum(int(text) for text in re.findall(r"^\| (\d+) \| (?!`)", part, re.M))


def test_there_are_six_lessons_of_90_minutes_and_a_choice_for_the_last():
    lessons = PAGE.split("## Homework")[0].split("### Lesson ")[1:]
    assert [lesson[0] for lesson in lessons] == ["1", "2", "3", "4", "5", "6", "6"]
    for lesson in lessons:
        assert minutes_of(lesson) == 90, lesson.splitlines()[0]
        assert "| ask |" in lesson
        assert "exit ticket" in lesson or "test, form B" in lesson
        assert "**Common answers.**" in lesson
    assert minutes_of(PAGE.split("## The shape of a lesson")[1].split("\n## ")[0]) == 90


def test_the_weights_add_up():
    marks = PAGE.split("## Marks")[1].split("\n## ")[0]
    weights = [int(text) for text in re.findall(r"\| (\d+) % \|", marks)]
    assert sum(weights) == 100
    assert len(weights) == 6


def every_exercise():
    """Key, kind and title of all that learners do, in the order of the notebooks."""
    for number in notebooks():
        for key in keys_of(number):
            if has_check(key):
                exercise = find_exercise(key)
                yield key, "core" if exercise.core else "more", exercise.title
            else:
                yield key, "guess", find_prediction(key).title


def test_the_table_names_every_exercise():
    table = re.findall(r"^\| (\w+-[a-z]) \| (\w+) \| (.*) \|$", PAGE, re.M)
    assert table == list(every_exercise())


def test_every_exercise_that_is_named_exists_and_every_notebook_has_its_place():
    text = PAGE.split("## All exercises")[0]
    known = {key for key, *_ in every_exercise()}
    named = set(re.findall(r"\b([01A]\d?-[a-z])\b", text))
    assert named <= known
    assert {key.split("-")[0] for key in named} == set(notebooks())
    core = {key for key, kind, _ in every_exercise() if kind == "core"}
    assert core <= named
    taught = text.split("## The lessons")[1].split("## The discussion questions")[0]
    for path in sorted(FOLDER.glob("[01]*.ipynb")):
        assert re.search(rf"\b{path.name[:2]}\b", taught), path.name


def test_every_notebook_has_sentences_that_show_understanding():
    part = PAGE.split("## The discussion questions")[1].split("\n## ")[0]
    numbers = re.findall(r"^- \*\*(\d\d)\*\* \S", part, re.M)
    assert numbers == [f"{number:02}" for number in range(13)]


@pytest.mark.parametrize("words", sorted(set(re.findall(r"`zero-nb (quiz[^`]*)`", PAGE))))
def test_a_command_for_questions_can_be_typed(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli.app, shlex.split(words))
    assert done.exit_code == 0, done.output
    assert done.stdout


@pytest.mark.parametrize(("words", "stage"), CASES)
def test_a_case_of_lesson_6_has_the_stage_it_says(words, stage):
    done = CliRunner().invoke(cli.app, shlex.split(words))
    assert done.exit_code == 0, done.output
    fits = re.findall(r"(\d) +[\d,]+ +[\d.]+ +[\d.]+ +(yes|no)", done.stdout)
    assert len(fits) == 4
    lowest = next((number for number, answer in fits if answer == "yes"), "none")
    assert lowest == stage
    if stage == "none":
        assert "saved activations are" in done.stdout


def test_there_are_six_cases():
    assert len(CASES) == 6
