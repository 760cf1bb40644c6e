"""Figures of notebooks 07 and 08: their sentences and numbers come from what is drawn."""

import pytest

from zero_nb.show import cost_figures as figures
from zero_nb.theory.overlapped import overlapped_data_parallel
from zero_nb.theory.schedule import LayerWork, StepOptions, StepWork, UnitSize
from zero_nb.theory.timeline import Link, lay_out, timeline

# Two layers; a unit takes 1 ms on the link, forward 2 ms, backward 4 ms.
LINK = Link(bytes_per_s=4000 * 0.5 / 1e-3)
WORK = StepWork(
    (UnitSize("u1", 1000), UnitSize("u2", 1000)),
    (LayerWork("l1", ("u1",), 2e-3, 4e-3), LayerWork("l2", ("u2",), 2e-3, 4e-3)),
)


def steps():
    """A step of data parallelism and one of stage 3, both with overlap."""
    options = StepOptions(3, 2, prefetch_bucket_size=1, overlap_comm=True)
    return {
        "data parallelism": lay_out(overlapped_data_parallel(WORK, StepOptions(0, 2)), LINK),
        "stage 3": timeline(WORK, options, LINK),
    }


# ------------------------------------------------------------------------------- notebook 07


def test_lanes_tell_what_each_step_takes():
    figure = figures.lanes_side_by_side(steps(), "Two layers")
    assert "Two layers: data parallelism takes 14 ms, of which it computes 12" in figure.alt
    assert figure.data["data parallelism"]["step ms"] == pytest.approx(14)
    assert figure.data["stage 3"]["computes ms"] == pytest.approx(12)
    for data in figure.data.values():
        assert data["step ms"] == pytest.approx(data["computes ms"] + data["stands still ms"])


def test_curves_over_bandwidth_keep_their_numbers_and_both_units():
    curves = {
        "stage 3": figures.TimeCurve(3, True, (4.0, 2.0, 1.5)),
        "data parallelism": figures.TimeCurve(0, False, (3.0, 1.5, 1.25)),
    }
    figure = figures.step_time_over_bandwidth([100, 200, 400], curves, 1.0, crossing=288)
    assert figure.data["GB/s"] == (12.5, 25, 50)
    assert figure.data["stage 3 ms"] == (4000, 2000, 1500)
    assert "stage 3 from 4000 ms to 1500 ms" in figure.alt
    assert "A line at 288 Gb/s" in figure.alt


def test_the_map_of_ratios_names_its_ends_and_counts_its_classes():
    ratios = [[1.49, 1.2], [1.2, 1.01]]
    figure = figures.time_ratio_map([512, 4096], [25, 400], ratios)
    assert "the same, within 5 % in 1, up to 1.3 times in 2, 1.3 to 1.5 times in 1" in figure.alt
    assert "1.49, with 512 tokens at 25 Gb/s" in figure.alt
    assert "smallest 1.01, with 4,096 tokens at 400 Gb/s" in figure.alt
    assert figure.data["512 tokens"] == (1.49, 1.2)
