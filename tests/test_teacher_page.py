"""What the teacher's page says is so: its cases, its exercises and its sums."""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from zero_nb import cli
from zero_nb.learn.registry import keys_of, notebooks

PAGE = (Path(__file__).resolve().parent.parent / "notebooks" / "teacher.md").read_text("utf-8")
CASES = re.findall(r"\| \d \| `zero-nb (plan [^`]*)` \| (none|\d) \|", PAGE)


def test_there_are_six_lessons_of_90_minutes():
    lessons = PAGE.split("### Lesson ")[1:]
    assert len(lessons) == 6
    for lesson in lessons:
        minutes = [int(text) for text in re.findall(r"^\| (\d+) \| (?!`)", lesson, re.M)]
        assert sum(minutes) == 90, lesson.splitlines()[0]
        assert "ask" in lesson
    shape = PAGE.split("## The shape of a lesson")[1].split("##")[0]
    assert sum(map(int, re.findall(r"^\| (\d+) \|", shape, re.M))) == 90


def test_the_weights_add_up():
    marks = PAGE.split("## Marks")[1].split("## If")[0]
    assert sum(map(int, re.findall(r"\| (\d+) % \|", marks))) == 100


def test_every_exercise_that_is_named_exists():
    named = set(re.findall(r"\b(0\d-[a-z])\b", PAGE))
    known = {key for number in notebooks() for key in keys_of(number)}
    assert named <= known
    assert {number.split("-")[0] for number in named} == {"00", "01", "02", "03", "04", "05", "06"}


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
