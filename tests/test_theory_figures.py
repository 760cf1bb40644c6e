"""Figures of formulas: their numbers are the formulas', and nothing is clipped."""

import math
from functools import cache

import pytest

from figure_checks import check_said_and_uncut
from zero_nb.config import UsageError
from zero_nb.show.planner_panel import plan_slider, plan_view, planner_panel
from zero_nb.show.slider import still_slider
from zero_nb.show.theory_figures import (
    PLAN_KINDS,
    THEORY_FIGURES,
    activations_over_batch,
    memory_per_device,
    plan_bars,
    saving_heat_map,
    traffic_by_stage,
)
from zero_nb.theory.memory import model_state_bytes, zero_stage_memory_reduction
from zero_nb.theory.plan import ClusterSpec, plan
from zero_nb.theory.traffic import elements_per_step


@cache
def drawn(name):
    """A figure of the gallery, drawn once."""
    return THEORY_FIGURES[name]()


@pytest.mark.parametrize("name", THEORY_FIGURES)
def test_every_figure_says_what_it_shows_and_nothing_reaches_the_edge(name):
    check_said_and_uncut(drawn(name))


@pytest.mark.parametrize("name", ["paper_figure_1", "plan_bars"])
def test_the_same_numbers_give_the_same_drawing(name):
    assert drawn(name).svg == THEORY_FIGURES[name]().svg


def test_figure_1_holds_the_papers_bytes():
    figure = drawn("paper_figure_1")
    totals = [sum(kinds.values()) for kinds in figure.data.values()]
    assert totals == [120_000_000_000, 31_406_250_000, 16_640_625_000, 1_875_000_000]
    assert "31.4 GB" in figure.alt


def test_lines_over_the_world_size_are_the_formula():
    figure = memory_per_device(10**9, world_sizes=[1, 3, 64])
    for stage in range(4):
        wanted = tuple(model_state_bytes(stage, w, 10**9).total for w in (1, 3, 64))
        assert figure.data[f"stage {stage} bytes"] == wanted


def test_heat_map_is_the_saved_fraction():
    data = saving_heat_map([1, 4, 100], "fp32").data
    wanted = [zero_stage_memory_reduction(2, w, 4, 4, 8) for w in (1, 4, 100)]
    assert list(data["stage 2 saved fraction"]) == pytest.approx(wanted)


def test_largest_model_at_64_is_table_2():
    data = drawn("largest_model").data
    place = data["world size"].index(64)
    got = [data[f"stage {stage} parameters"][place] / 1e9 for stage in range(4)]
    assert got == pytest.approx([2, 7.641791, 14.422535, 128], rel=1e-6)


def test_stacked_bars_are_the_plan():
    figure = activations_over_batch("gpt2", world_size=4, stage=1, batches=(1, 3), seq=512)
    for place, batch in enumerate((1, 3)):
        answer = plan("gpt2", 4, stage=1, micro_batch=batch, seq=512)
        parts = [figure.data[f"{look.label} bytes"][place] for look in PLAN_KINDS.values()]
        assert sum(parts) == answer.total_bytes
    figure = plan_bars("gpt2", ClusterSpec.of("t4", 4), seq=512)
    answer = plan("gpt2", ClusterSpec.of("t4", 4), seq=512)
    for row in answer.stages:
        assert sum(figure.data[f"stage {row['stage']}"].values()) == row["total_bytes"]
    assert "the smallest that fits" in figure.alt


def test_plan_bars_without_a_device_and_where_nothing_fits():
    assert "fits" not in plan_bars("gpt2", ClusterSpec(4)).alt
    assert "no stage fits" in plan_bars("gpt-3-175b", ClusterSpec.of("t4", 4)).alt


def test_traffic_is_the_formula():
    data = traffic_by_stage(8, (1, 3)).data
    for k in (1, 3):
        for stage in range(4):
            sent = elements_per_step(stage, 8, 8000, micro_batches=k) / 8000
            assert data[f"{k} micro-batches"][f"stage {stage}"] == pytest.approx(sent)
    with pytest.raises(UsageError):
        traffic_by_stage(8, ())


def test_which_16_adds_up():
    totals = [sum(parts.values()) for parts in drawn("which_16").data.values()]
    assert totals == [8, 12, 16, 16, 18, 20]


def test_reality_shows_every_published_row():
    figure = drawn("predicted_over_measured")
    assert len(figure.data["judged"]["row"]) == 34
    assert all(math.isfinite(v) for v in figure.data["judged"]["planned bytes"])
    assert "33 of 34 judged" in figure.alt


# --- slider and panel --------------------------------------------------------------------------


@cache
def two_pictures():
    """A slider over two plans."""
    return plan_slider("gpt2", "t4", (1, 4))


def test_a_still_slider_has_every_picture_and_every_sentence():
    slider = two_pictures()
    text = slider._repr_html_()
    assert text.count("<img ") == 2
    assert text.count("data-step hidden") == 1
    assert 'data-lm-suppress-shortcuts="true"' in text
    assert 'type="range"' in text
    for figure in slider.figures:
        assert figure.alt in repr(slider)


def test_two_sliders_on_one_page_have_their_own_labels():
    slider = two_pictures()
    assert slider._repr_html_().split('for="')[1].split('"')[0] not in slider._repr_html_()


@pytest.mark.parametrize(
    ("count", "names", "start", "message"),
    [
        (1, ["a"], 0, "at least two"),
        (2, ["a"], 0, "as many names"),
        (2, ["a|b", "c"], 0, "must not hold"),
        (2, ["a", "b"], 2, "start must be"),
    ],
)
def test_a_slider_refuses_what_it_cannot_show(count, names, start, message):
    with pytest.raises(UsageError, match=message):
        still_slider([drawn("which_16")] * count, names, "label", start=start)


def test_the_panel_shows_what_its_controls_say():
    pytest.importorskip("ipywidgets")
    panel = planner_panel("gpt2", world_size=4, device="t4-16gb")
    before = panel.view.value
    assert before == plan_view("gpt2", 4, "t4-16gb")
    panel.controls["world_size"].value = 16
    assert panel.view.value == plan_view("gpt2", 16, "t4-16gb") != before
    panel.controls["stage"].value = 3
    assert panel.view.value == plan_view("gpt2", 16, "t4-16gb", stage=3)
    assert "'stage': 3" in repr(panel)
    assert repr(panel.figure) in repr(panel)
    # Without a kernel the picture and its whole sentence are left.
    bundle = panel._repr_mimebundle_()
    assert bundle["text/plain"] == repr(panel)
    assert bundle["text/html"] == panel.view.value
