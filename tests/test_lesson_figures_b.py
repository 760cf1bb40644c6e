"""Figures of notebooks 04 to 06: their sentences and numbers come from what is drawn."""

import numpy as np
import pytest

from zero_nb.core.flat import FlatLayout
from zero_nb.show import lesson_figures_b as figures
from zero_nb.train.engine import Engine
from zero_nb.train.model import MLP, MLPConfig
from zero_nb.train.optim import get_rule


def one_step(stage, *, world_size=3, precision="fp32", **settings):
    """Train a small MLP for one step; return its engine."""
    model = MLP(MLPConfig((6, 6, 6, 6)))
    engine = Engine(
        model,
        stage=stage,
        world_size=world_size,
        precision=precision,
        rule=get_rule("adamw", lr=1e-3),
        **settings,
    )
    x, y = np.random.default_rng(0).standard_normal((2, world_size, 6)).astype(np.float32)
    engine.train_step(x, y)
    return engine


# --------------------------------------------------------------------------------- ownership


def test_a_strip_counts_real_elements_and_padding():
    figure = figures.ownership_strip(FlatLayout(("a", "b"), ((5,), (5,)), 4))
    assert figure.data["real elements"] == (3, 3, 3, 1)
    assert figure.data["end"] == (3, 6, 9, 10)
    assert "padding 2" in figure.alt
    assert "inside a, b" in figure.alt


def test_a_strip_names_only_parameters_that_are_cut():
    figure = figures.ownership_strip(FlatLayout(("a", "b"), ((4,), (4,)), 2))
    assert "inside" not in figure.alt
    assert figure.data["real elements"] == (4, 4)


def test_a_rank_may_own_padding_only():
    figure = figures.ownership_strip(FlatLayout(("a",), ((5,),), 4))
    assert figure.data["first element"] == (0, 2, 4, 5)
    assert figure.data["real elements"] == (2, 2, 1, 0)


def test_a_long_strip_has_no_numbers_in_it_but_in_its_data():
    figure = figures.ownership_strip(FlatLayout(("a", "b"), ((1000,), (9,)), 3))
    assert figure.data["real elements"] == (337, 337, 335)


# ---------------------------------------------------------------------------- bytes and traffic


def test_held_bars_say_every_total():
    stages = [{"param": 40, "grad": 40, "optim": 80 // shard} for shard in (1, 2, 4, 8)]
    figure = figures.held_bars({"Adam": stages}, numel=10, world_size=2)
    assert "Adam 16, 12, 10, 9" in figure.alt
    assert figure.data["Adam"]["stage 3"] == 9


def test_sent_by_collective_adds_up():
    ways = {"one": [("all-reduce", 150)], "two": [("reduce-scatter", 75), ("all-gather", 75)]}
    figure = figures.sent_by_collective(ways, numel=100, world_size=4)
    assert "one: all-reduce 2, together 2" in figure.alt
    assert "two: reduce-scatter 1 and all-gather 1, together 2" in figure.alt


def test_equal_lines_share_a_name():
    sent = [[20, 20], [20, 20], [20, 30], [30, 60]]
    figure = figures.sent_over_micro_batches([1, 2], sent, numel=20, world_size=2)
    assert "stages 0 and 1 2, 2; stage 2 2, 3; stage 3 3, 6" in figure.alt
    assert figure.data["stage 3"] == (3, 6)


# ------------------------------------------------------------------------------ within a step


def test_gradient_memory_finds_the_peaks_of_a_ledger():
    engines = {
        "stage 1": one_step(1, precision="bf16"),
        "whole": one_step(2, precision="bf16", reduce_bucket_size=126),
    }
    timelines = {name: engine.ledger.events for name, engine in engines.items()}
    figure = figures.gradient_memory(timelines, numel=126, world_size=3)
    for name, engine in engines.items():
        highest = max(
            event.total_bytes["grad"] + event.total_bytes["bucket"]
            for event in engine.ledger.events
            if event.phase == "backward"
        )
        assert figure.data[name]["peak"] == highest / 126
    assert figure.data["whole"]["peak"] > figure.data["stage 1"]["peak"]
    assert figure.data["whole"]["end"] == pytest.approx(2 / 3)


def test_gradient_memory_takes_one_to_five_timelines():
    with pytest.raises(ValueError, match="1 to 5"):
        figures.gradient_memory({}, numel=1, world_size=1)


def test_the_letter_grid_says_what_each_rank_has():
    data = figures.letter_grid("ab", world_size=2).data
    assert data["between steps"]["rank 1"] == "a1 | b1"
    assert data["layer a computes"]["rank 0"] == "a0 a1 | b0"
    assert data["layer b computes"]["rank 1"] == "a1 | b0 b1"


def test_stage_3_lanes_show_gather_use_drop_in_their_order():
    engine = one_step(3)
    names = dict(zip([unit.name for unit in engine.optimizer.units], "abc", strict=True))
    what = list(figures.stage_3_lanes(engine.ledger.events, names).data["what"])
    assert what[:6] == ["gather a", "forward a", "drop a", "gather b", "forward b", "drop b"]
    for letter in "abc":
        assert what.count(f"gather {letter}") == 2
        assert what.count(f"reduce-scatter {letter}") == 1
        assert what.index(f"backward {letter}") < what.index(f"reduce-scatter {letter}")


def test_stage_3_lanes_refuse_a_step_without_gathers():
    engine = one_step(2)
    names = {unit.name: unit.name for unit in engine.optimizer.units}
    with pytest.raises(ValueError, match="no gather"):
        figures.stage_3_lanes(engine.ledger.events, names)


def test_peak_over_world_size_keeps_its_numbers():
    figure = figures.peak_over_world_size([1, 2], [1000, 700], [900.0, 450.0], 500)
    assert figure.data["measured peak"] == (1000, 700)
    assert "500 B" in figure.alt


def test_the_unit_slider_shows_the_peak_of_each_ledger():
    engines = {name: one_step(3, units=name) for name in ("model", "sublayer")}
    timelines = {name: engine.ledger.events for name, engine in engines.items()}
    kinds = ("param", "grad", "optim", "unsharded", "bucket")
    peaks = {
        name: max(
            sum(event.total_bytes[kind] for kind in kinds)
            for event in events
            if event.phase in ("forward", "backward")
        )
        for name, events in timelines.items()
    }
    middle = sum(peaks.values()) // 2
    slider = figures.unit_slider(timelines, numel=126, world_size=3, stage_2_peak=middle)
    assert slider.names == ("model", "sublayer")
    for name, figure in zip(slider.names, slider.figures, strict=True):
        assert figure.data["peak"] == peaks[name] / 126
        # Before the first gather: parameters and optimizer states, 12 bytes over 3 ranks.
        assert figure.data["begins with"] == pytest.approx(4)
        assert f"Unit: {name}." in figure.alt
    assert "above the peak of stage 2" in slider.figures[0].alt
    assert "below the peak of stage 2" in slider.figures[1].alt
    assert slider.figures[0].png != slider.figures[1].png
