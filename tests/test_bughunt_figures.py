"""Figures of notebook 09: their sentences and numbers come from what is drawn."""

import pytest

from zero_nb.show import bughunt_figures as figures

CAUGHT = {
    "one fault": {"first check": "before step 1", "second check": "after step 2"},
    "another": {"second check": "when built"},
    "a third": {},
}
CHECKS = ("first check", "second check", "idle check")
NAMED = {"one fault": "first check", "another": "second check", "a third": "idle check"}


def test_a_catch_matrix_says_every_catch_and_its_moment():
    figure = figures.catch_matrix(CAUGHT, CHECKS, NAMED)
    assert "one fault by first check (before step 1), second check (after step 2)" in figure.alt
    assert "another by second check (when built)" in figure.alt
    assert "a third by nothing" in figure.alt
    assert "2 of 3 are caught by the check made for them" in figure.alt
    assert "no check catches more than 2 (second check)" in figure.alt
    assert figure.data["one fault"]["first check"] == "before step 1"
    assert figure.data["a third"]["idle check"] == "not caught"


def test_cells_have_words_so_that_colour_is_not_needed():
    """Text is drawn as paths; the words of a cell are asked of the function that writes them."""
    assert figures._short("before step 1") == "before 1"
    assert figures._short("when built") == "built"
    assert figures._short("in step 12") == "in 12"
    looks = (figures._NAMED, figures._TOO, figures._MISSED)
    assert len({(look.color, look.hatch) for look in looks}) == 3
    assert figures._TOO.hatch


def test_other_catches_give_another_picture():
    one = figures.catch_matrix(CAUGHT, CHECKS, NAMED)
    two = figures.catch_matrix(CAUGHT | {"a third": {"idle check": "in step 1"}}, CHECKS, NAMED)
    assert one.svg != two.svg
    assert "3 of 3" in two.alt


def test_loss_curves_are_told_in_whole_fives_rounded_down():
    right = [2.0, 1.5, 1.0, 1.0, 1.0]
    faulty = {"slow": [2.0, 1.9, 1.8, 1.8, 1.8], "up": [2.0, 2.0, 2.2, 2.2, 2.2]}
    figure = figures.faulty_losses(right, faulty)
    assert "right one falls by over 50 %" in figure.alt
    assert "slow 10 %" in figure.alt
    assert "up -10 %" in figure.alt
    assert figure.data["slow"] == (2.0, 1.9, 1.8, 1.8, 1.8)


@pytest.mark.parametrize("count", [1, 9])
def test_one_to_nine_curves_have_a_panel_each(count):
    faulty = {f"fault {i}": [2.0, 1.0, 1.0] for i in range(count)}
    figure = figures.faulty_losses([2.0, 1.0, 1.0], faulty)
    assert f"each of {count} faulty trainers" in figure.alt
    assert set(figure.data) == {"right", *faulty}


def test_what_is_hidden_at_a_world_size_is_named():
    counts = {2: {"a": 0, "b": 1, "c": 0}, 3: {"a": 1, "b": 2, "c": 4}}
    figure = figures.caught_over_world_size(counts)
    assert "W = 2: a, c; W = 3: none" in figure.alt
    assert figure.data["W = 3"]["c"] == 4
