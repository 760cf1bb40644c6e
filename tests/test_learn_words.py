"""The glossary, the diff of two stages, and the limits under which answers run."""

import time

import numpy as np
import pytest

from zero_nb.config import UsageError
from zero_nb.learn import diff, limits
from zero_nb.learn.diff import show_diff
from zero_nb.learn.limits import NotYet, TooSlow, run_limited, traced_peak
from zero_nb.learn.observe import Raised, alike, difference, short
from zero_nb.learn.predict import Waiting
from zero_nb.learn.session import Session
from zero_nb.learn.words import glossary, glossary_terms, term, with_tooltips

TERMS = glossary_terms()

# ---------------------------------------------------------------------------------- the glossary


def test_the_words_of_the_course_are_there_in_order():
    names = list(TERMS)
    assert names == sorted(names, key=str.lower)
    assert len({entry.anchor for entry in TERMS.values()}) == len(TERMS)
    for word in ("rank", "shard", "replica", "stage", "held", "transient", "peak", "ring", "unit"):
        assert word in TERMS
    assert {entry.symbol for entry in TERMS.values()} >= {"W", "Ψ", "K", "m", "M", "S"}


@pytest.mark.parametrize("name", TERMS)
def test_a_word_is_explained_in_short_sentences(name):
    entry = TERMS[name]
    assert entry.text.endswith(".")
    assert len(entry.text) < 220
    for sentence in entry.text.split(". "):
        assert len(sentence.split()) <= 26, sentence
    assert entry.notebook in {"A", *(f"{number:02d}" for number in range(13))}
    assert f"{name}: " in repr(entry)


def test_a_word_is_shown_with_its_meaning_in_view_and_as_a_tooltip():
    html = term("rank")._repr_html_()
    assert html.count(TERMS["rank"].text) == 2
    assert "<dt" in glossary()._repr_html_()
    assert repr(glossary("shard", "rank")).splitlines()[0].startswith("shard: ")
    assert len(repr(glossary()).splitlines()) == len(TERMS)
    with pytest.raises(UsageError, match="'nonsense' is not in the glossary"):
        glossary("nonsense")


def test_tooltips_are_given_once_to_whole_words():
    html = with_tooltips("Two ranks: a rank, a <rank>, and a prank in Model Parallelism.")
    assert html.count("<dfn") == 2
    assert ">ranks</dfn>: a rank, a &lt;rank&gt;, and a prank in <dfn" in html
    assert ">Model Parallelism</dfn>." in html
    assert with_tooltips("nothing here & there") == "nothing here &amp; there"


# -------------------------------------------------------------------------------------- the diff


@pytest.fixture
def fresh(monkeypatch):
    session = Session()
    monkeypatch.setattr(diff, "SESSION", session)
    return session


def test_the_diff_waits_for_its_exercise(fresh):
    waiting = show_diff(1, 2, after="05-a")
    assert isinstance(waiting, Waiting)
    assert "after exercise 05-a has passed" in repr(waiting)
    fresh.status["05-a"] = "not yet"
    assert isinstance(show_diff(1, 2, after="05-a"), Waiting)
    fresh.status["05-a"] = "passed"
    assert "buckets.reduce_scatter" in repr(show_diff(1, 2, after="05-a"))


@pytest.mark.parametrize("stages", [(0, 1), (1, 2), (2, 3)])
def test_the_diff_is_of_the_real_source(stages):
    shown = show_diff(*stages)
    old, new = (diff._code(stage) for stage in stages)
    for line in shown.changed:
        sign, code = line[0], line[2:]
        assert (code in new and code not in old) == (sign == "+") or code in old + new
    whole = show_diff(*stages, whole=True)
    assert [line[2:] for line in whole.lines if line[0] != "+"] == old
    assert [line[2:] for line in whole.lines if line[0] != "-"] == new
    html = shown._repr_html_()
    assert html.count("<ins") == sum(line[0] == "+" for line in shown.lines)
    assert html.count("<del") == sum(line[0] == "-" for line in shown.lines)


def test_stage_1_differs_from_stage_0_where_the_paper_says():
    changed = "\n".join(show_diff(0, 1).changed)
    assert "-         unit.grad = self.world.all_reduce(" in changed
    assert "+         unit.grad = self.world.reduce_scatter(" in changed
    assert "+         self.world.all_gather(" in changed


# ------------------------------------------------------------------------------------ the limits


def test_what_is_quick_is_returned():
    assert run_limited(lambda: 3, 5) == 3


def test_an_endless_loop_is_stopped_and_its_thread_ends():
    began = time.perf_counter()

    def endless():
        while True:
            try:
                while True:
                    pass
            except Exception:
                pass

    with pytest.raises(TooSlow, match=r"was not finished after 0.1 seconds; does a loop never end"):
        run_limited(endless, 0.1)
    assert time.perf_counter() - began < 5


def test_errors_come_through_and_exits_become_a_sentence():
    with pytest.raises(ZeroDivisionError):
        run_limited(lambda: 1 / 0)
    for way_out in (SystemExit, KeyboardInterrupt, GeneratorExit):

        def leave(way_out=way_out):
            raise way_out

        with pytest.raises(NotYet, match=way_out.__name__):
            run_limited(leave)


def test_warnings_of_a_learner_do_not_reach_the_notebook():
    assert np.isinf(run_limited(lambda: np.float64(1) / np.zeros(1))[0])


def test_the_traced_peak_counts_what_lives_together():
    def together():
        a = np.ones(1_000_000)
        b = np.ones(500_000)
        return (a[:500_000] + b).sum()

    def one_after_another():
        for _ in range(4):
            np.ones(1_000_000)

    traced_peak(together)
    result, peak = traced_peak(together)
    assert result == 1_000_000
    assert 16_000_000 <= peak < 16_100_000
    _, peak = traced_peak(one_after_another)
    assert 8_000_000 <= peak < 8_100_000


def test_the_traced_peak_leaves_out_what_was_there_before():
    kept = np.ones(1_000_000)
    _, peak = traced_peak(lambda: kept.sum())
    assert peak < 100_000


def test_five_seconds_is_what_a_learner_is_told():
    assert limits.SECONDS == 5.0


# ----------------------------------------------------------------------------- what is observed


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (3, 3.0),
        (np.float32(3), 3),
        ((1, 2), [1, 2]),
        (np.array([1, 2]), (1, 2)),
        ((1, 2), np.array([1.0, 2.0], np.float32)),
        (float("nan"), np.nan),
        (np.array([np.nan, np.inf]), np.array([np.nan, np.inf])),
        ({"x": np.zeros(2)}, {"x": [0, 0]}),
        (None, None),
        ("a", "a"),
        (Raised("ValueError", "a"), Raised("ValueError", "b")),
        ([np.zeros((2, 2)), "x"], (np.zeros((2, 2)), "x")),
        (np.bool_(True), True),
        (np.zeros(0), []),
    ],
)
def test_alike(a, b):
    assert alike(a, b)
    assert difference(a, b) == ""


@pytest.mark.parametrize(
    ("got", "expected", "said"),
    [
        (3, 4, "is 3, expected 4"),
        ("3", 3, "is '3', expected 3"),
        (None, 3, "is None, expected 3"),
        (3, None, "is 3, expected None"),
        ((1, 2, 3), (1, 2), "has 3 entries, expected 2: (1, 2, 3)"),
        ((1, 3), (1, 2), "is (1, 3), expected (1, 2)"),
        (np.array([1, 3]), (1, 2), "is [1, 3], expected [1, 2]"),
        (np.zeros((2, 3)), np.zeros((3, 2)), "has shape (2, 3), expected (3, 2)"),
        (
            np.zeros((4, 5)),
            np.eye(4, 5),
            "differs in 4 of 20 elements; element [0, 0] is 0, expected 1",
        ),
        ([[1], [2, 3]], np.zeros(2), "is [[1], [2, 3]], expected an array of numbers"),
        ({"x": 1}, {"x": 2}, "x is 1, expected 2"),
        ({}, {"x": 2}, "has no 'x'"),
        ({"x": 2, "y": 1}, {"x": 2}, "has 'y', which was not asked for"),
        (3, {"x": 2}, "is 3, expected a dict with x"),
        (Raised("ValueError", "a"), 3, "is ValueError: a, expected 3"),
        (Raised("NotYet", "a"), Raised("NotYet", "b"), "is NotYet: a, expected NotYet: b"),
        (
            [np.zeros(1), np.zeros(2)],
            [np.zeros(1), np.ones(2)],
            "entry 1 is [0., 0.], expected [1., 1.]",
        ),
    ],
)
def test_not_alike_and_why(got, expected, said):
    assert not alike(got, expected)
    assert difference(got, expected) == said


def test_a_tolerance_is_relative_to_the_larger_number_or_to_one():
    assert not alike(1.0, 1.001)
    assert alike(1.0, 1.001, 0.01)
    assert alike(np.float32([1000.0]), np.float32([1001.0]), 0.01)
    assert alike(0.0, 0.005, 0.01)
    assert not alike(0.0, 0.05, 0.01)


def test_a_value_is_written_in_a_few_words_without_addresses():
    assert short(object()) == "of type object"
    assert short(np.zeros((20, 20))) == "an array of shape (20, 20)"
    assert short(np.float32(1 / 3)) == "0.333333"
    assert short((1,)) == "(1,)"
    assert len(short("x" * 1000)) == 120
    assert short({"a": [1, np.int64(2)]}) == "{'a': [1, 2]}"
