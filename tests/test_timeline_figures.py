"""Figures of time: their numbers are the schedule's and the ledger's, and nothing is clipped."""

from functools import cache

import pytest

from figure_checks import check_said_and_uncut
from tiny import gpt, gpt_batches
from zero_nb.compare import digits_task
from zero_nb.config import UsageError
from zero_nb.overlap import chrome_of
from zero_nb.show.step_view import moments_of, step_view
from zero_nb.show.timeline_figures import (
    LINK,
    RANKS,
    TIMELINE_FIGURES,
    _six_units,
    draw_trace,
    exposed_over_bandwidth,
)
from zero_nb.theory.schedule import StepOptions
from zero_nb.theory.timeline import timeline
from zero_nb.train.engine import Engine
from zero_nb.train.model import MLP, MLPConfig
from zero_nb.train.trace import Tracer


@cache
def drawn(name):
    """A figure of this module, drawn once."""
    return TIMELINE_FIGURES[name]()


@pytest.mark.parametrize("name", TIMELINE_FIGURES)
def test_every_figure_says_what_it_shows_and_nothing_reaches_the_edge(name):
    check_said_and_uncut(drawn(name))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_stages_picture_holds_the_timelines_numbers(stage):
    line = timeline(_six_units(), StepOptions(stage, RANKS, "bf16"), LINK)
    data = drawn(f"timeline_stage_{stage}").data
    assert data["milliseconds"] == pytest.approx(line.step_s * 1e3)
    shares = data["share of the time"]
    assert shares["computing"] == pytest.approx(line.compute_s / line.step_s)
    assert shares["standing still"] == pytest.approx(line.exposed_s / line.step_s)
    assert shares["communicating"] == pytest.approx(line.comm_s / line.step_s)
    assert data["bytes at most"]["together"] == line.schedule.peak_bytes
    for kind, nbytes in line.schedule.largest_bytes.items():
        assert data["bytes at most"][kind] == nbytes


def test_gathering_ahead_makes_the_picture_shorter_and_the_memory_higher():
    plain, ahead = drawn("timeline_stage_3").data, drawn("timeline_prefetch").data
    assert ahead["milliseconds"] < 0.75 * plain["milliseconds"]
    assert ahead["bytes at most"]["together"] > plain["bytes at most"]["together"]


def test_memory_through_a_step_is_the_ledgers():
    figure, task = drawn("memory_through_a_step"), digits_task("lesson")
    for stage in range(4):
        engine = Engine(task.model, stage=stage, world_size=4)
        report = engine.train_step(*task.dataset.batch(0, 4))
        seen = figure.data[f"stage {stage}"]
        for kind, largest in report.largest_bytes.items():
            if kind != "workspace":
                assert max(seen[f"{kind} bytes"]) == largest
        assert max(map(sum, zip(*seen.values(), strict=True))) == report.peak_bytes


def test_measured_peaks_lie_on_the_schedules_lines_and_above_their_floor():
    data = drawn("peak_over_ranks").data
    assert "exactly on them" in drawn("peak_over_ranks").alt
    for name, floor in data["floor bytes"].items():
        assert data[f"{name} measured bytes"] == data[f"{name} predicted bytes"]
        line = data[f"{name} measured bytes"]
        assert list(line) == sorted(line, reverse=True)
        assert floor < line[-1]


def test_exposed_shares_fall_with_bandwidth_and_stay_above_what_must_be_exposed():
    data = exposed_over_bandwidth("gpt2", world_size=32, tokens=2048).data
    lines = {name: line for name, line in data.items() if name.endswith(" share")}
    assert len(lines) == 5
    for line in lines.values():
        assert all(b <= a + 1e-12 for a, b in zip(line, line[1:], strict=False))
        assert all(
            least <= share + 1e-12 for least, share in zip(data["least share"], line, strict=True)
        )


# --- measured traces -----------------------------------------------------------------------------


def test_a_measured_trace_is_drawn_like_the_models():
    engine = Engine(gpt(), stage=3, world_size=2, prefetch_bucket_size=1)
    tracer = Tracer(engine)
    for batch in gpt_batches(2, size=4):
        report = engine.train_step(*batch)
    figure = draw_trace(tracer.to_chrome(), "Stage 3, measured", step=2, rank=1)
    assert figure.data["bytes at most"]["together"] == report.peak_bytes
    assert 0 < figure.data["share of the time"]["computing"] <= 1
    with pytest.raises(UsageError, match="no training step 3"):
        draw_trace(tracer.to_chrome(), "none", step=3)
    with pytest.raises(UsageError, match="nothing to draw of rank 7"):
        draw_trace(tracer.to_chrome(), "none", rank=7)


def test_the_same_timeline_gives_the_same_drawing():
    line = timeline(_six_units(), StepOptions(3, RANKS, "bf16"), LINK)
    one, two = (draw_trace(chrome_of(line), "Stage 3") for _ in range(2))
    assert one.svg == two.svg


# --- step by step --------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_moments_are_those_of_the_ledger(stage):
    engine = Engine(gpt(), stage=stage, world_size=2)
    batch = gpt_batches(1, size=4)[0]
    engine.train_step(*batch)
    moments = moments_of(engine, batch)
    # Moments join events (a layer's several arrays), so the peak may lie within one.
    peak = engine.ledger.peak_bytes
    assert 0.9 * peak <= max(moment.total for moment in moments) <= peak
    assert moments[0].total == moments[-1].total == engine.ledger.current_bytes()
    gathered = [m.text for m in moments if m.text.endswith("is gathered")]
    assert len(gathered) == (8 if stage == 3 else 0)
    reduced = [m for m in moments if m.text.endswith("is reduced to its owners")]
    assert len(reduced) == (4 if stage else 0)
    assert {moment.phase for moment in moments} >= {"before", "forward", "backward", "step"}


def test_moments_of_a_16_bit_run_are_refused():
    engine = Engine(gpt(), stage=3, world_size=2, precision="bf16")
    with pytest.raises(UsageError, match="in fp32, where nothing is widened; got bf16"):
        moments_of(engine, gpt_batches(1, size=4)[0])


def test_a_step_can_be_stepped_through():
    slider = step_view(3, world_size=2, units="model")
    assert len(slider.figures) == len(slider.names) > 15
    assert "data-lm-suppress-shortcuts" in slider._repr_html_()
    middle = next(i for i, name in enumerate(slider.names) if "is written" in name)
    assert "Gathered on every rank: model. Whole gradients being written: model." in repr(
        slider.figures[middle]
    )
    assert slider.figures[middle].data["model bucket bytes"] > 0
    with pytest.raises(UsageError, match="more than 80; use larger units"):
        step_view(3, world_size=2, micro_batches=3)


def test_a_step_of_another_model_with_other_names():
    model = MLP(MLPConfig((6, 6, 6)))
    slider = step_view(3, world_size=2, model=model, names="ab")
    said = [name.split(": ", 1)[1] for name in slider.names]
    assert said[2:5] == ["a is gathered", "a computes and keeps its activations", "a is dropped"]
    # The last layer has no function after it, and what it read is kept already.
    assert said[5:7] == ["b is gathered", "b computes, keeps nothing for backward, and is dropped"]
    assert [text for text in said if "updated" in text] == [
        "a is updated: its gradient goes",
        "b is updated: its gradient goes",
    ]
    assert slider.figures[3].data["a unsharded bytes"] == 4 * (6 * 6 + 6)
    assert "layers" not in repr(slider)
    with pytest.raises(UsageError, match="2 units need as many names, got 3"):
        step_view(3, world_size=2, model=model, names="abc")
