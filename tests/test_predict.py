"""Predict, then compare: nothing is shown before a guess, and known mistakes are recognised."""

from fractions import Fraction

import numpy as np
import pytest

from zero_nb.learn.predict import PREDICTIONS, Compared, Waiting, compare_guess, reveal
from zero_nb.theory.memory import model_state_bytes

PSI = 16 * 16  # every share of it below is a whole number of bytes
RANKS = {"00-a": 4, "00-b": 16}


def share(stage, world_size):
    """Percent of the stage-0 bytes, from the paper's formula."""
    whole = model_state_bytes(0, world_size, PSI, "bf16").total
    return 100 * model_state_bytes(stage, world_size, PSI, "bf16").total / whole


TRUTH = {key: share(1, ranks) for key, ranks in RANKS.items()}


def test_every_prediction_has_its_truth_here():
    assert list(TRUTH) == list(PREDICTIONS)
    assert TRUTH == {"00-a": 43.75, "00-b": 29.6875}


@pytest.mark.parametrize("key", PREDICTIONS)
@pytest.mark.parametrize(
    "guess",
    [..., None, "44", [44], True, float("nan"), float("inf"), -1, 101, 0.44, 1j, np.array([44.0])],
    ids=repr,
)
def test_what_is_no_guess_shows_nothing_and_never_raises(key, guess):
    said = compare_guess(key, guess, 123.456)
    assert isinstance(said, Waiting)
    assert "123" not in repr(said)
    assert len(repr(said)) > 20
    assert reveal(said, "the truth") is said


@pytest.mark.parametrize("guess", [..., None])
def test_without_a_guess_it_says_what_to_do(guess):
    assert repr(compare_guess("00-a", guess, 1.0)).startswith("Write a guess first")


@pytest.mark.parametrize("key", PREDICTIONS)
@pytest.mark.parametrize("kind", [int, float, np.float32, np.int64, Fraction])
def test_a_guess_may_be_any_real_number_and_then_the_truth_is_shown(key, kind):
    said = compare_guess(key, kind(50), TRUTH[key])
    assert isinstance(said, Compared)
    assert not said.close
    assert said.ratio == pytest.approx(50 / TRUTH[key])
    assert repr(said).startswith(f"predicted 50 %   measured {TRUTH[key]:.6g} %   ratio ")
    assert "Too high" in said.text
    assert reveal(said, "the truth") == "the truth"


@pytest.mark.parametrize("key", PREDICTIONS)
def test_a_close_guess_is_called_close_and_another_is_not(key):
    within = PREDICTIONS[key].within
    for distance, close in ((0, True), (within, True), (1.01 * within, False)):
        for guess in (TRUTH[key] - distance, TRUTH[key] + distance):
            said = compare_guess(key, guess, TRUTH[key])
            assert said.close is close
            assert said.text.startswith("Close") is close


@pytest.mark.parametrize(
    ("key", "place"), [(key, i) for key, p in PREDICTIONS.items() for i in range(len(p.mistakes))]
)
def test_a_known_mistake_is_named(key, place):
    mistake = PREDICTIONS[key].mistakes[place]
    for guess in (mistake.value, round(mistake.value)):
        said = compare_guess(key, guess, TRUTH[key])
        assert not said.close
        assert said.text == mistake.text


def test_the_known_mistakes_are_the_numbers_that_the_mistakes_give():
    everything, stage_2, optimizer, saved = {}, {}, {}, {}
    for key, ranks in RANKS.items():
        everything[key] = 100 / ranks
        stage_2[key] = share(2, ranks)
        optimizer[key] = 100 * (12 / 16) / ranks
        saved[key] = 100 - TRUTH[key]
    assert [mistake.value for mistake in PREDICTIONS["00-a"].mistakes] == [
        everything["00-a"],
        100 * (1 + 1 + 1 / 4) / 3,
        optimizer["00-a"],
        saved["00-a"],
        stage_2["00-a"],
    ]
    assert [mistake.value for mistake in PREDICTIONS["00-b"].mistakes] == [
        TRUTH["00-a"] / 4,
        everything["00-b"],
        100 * 4 / 16,
        saved["00-b"],
        stage_2["00-b"],
    ]


def test_a_measured_zero_has_no_ratio():
    said = compare_guess("00-a", 10, 0)
    assert said.ratio is None
    assert "ratio –" in repr(said)


def test_an_unknown_prediction_is_the_notebooks_slip():
    with pytest.raises(KeyError):
        compare_guess("00-z", 1, 1)
