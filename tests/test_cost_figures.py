"""Figures of notebooks 07 and 08: their sentences and numbers come from what is drawn."""

import pytest

from zero_nb.show import cost_figures as figures
from zero_nb.theory.overlapped import overlapped_data_parallel
from zero_nb.theory.schedule import LayerWork, StepOptions, StepWork, UnitSize
from zero_nb.theory.timeline import Link, lay_out, timeline
from zero_nb.train.recompute import Passes

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


# ------------------------------------------------------------------------------- notebook 08


def moment(activation):
    """Bytes by kind, of which activations grow."""
    states = {"param": 10, "optim": 20, "grad": 0, "unsharded": 5, "bucket": 5}
    return states | {"activation": activation, "workspace": 0}


def test_areas_over_the_batch_say_the_share_of_activations():
    figure = figures.kinds_over_batch([1, 4], {"stage 3": [moment(10), moment(160)]})
    assert "stage 3 from 50 B, 20% of it activations, to 200 B, 80% of it activations" in figure.alt
    assert figure.data["stage 3 activations bytes"] == (10, 160)
    assert figure.data["stage 3 optimizer states bytes"] == (20, 20)


def test_the_map_of_stages_finds_the_lowest_peak():
    peaks = [[[9, 9], [9, 9]], [[5, 5], [7, 7]], [[6, 4], [6, 6]], [[8, 8], [5, 5]]]
    figure = figures.cheapest_stage_map([100, 2000], [1, 8], peaks)
    assert "stage 1 in 1, from 100 to 100 parameters" in figure.alt
    assert "stage 2 in 1, from 100 to 100 parameters" in figure.alt
    assert "stage 3 in 2, from 2,000 to 2,000 parameters" in figure.alt
    assert figure.data["stage 2 peak bytes, 8 a rank"] == (4, 6)


def passes(*nbytes, forwards=2):
    return Passes(0.0, {}, forwards, nbytes)


def test_curves_of_activations_name_peak_and_price():
    runs = {"keep": passes(100, 900, 0), "again": passes(100, 300, 100, 0, forwards=4)}
    figure = figures.activation_curves(runs)
    assert "keep at most 900 B with 2 forward passes" in figure.alt
    assert "again at most 300 B with 4 forward passes" in figure.alt
    assert figure.data["again"]["peak bytes"] == 300


@pytest.mark.parametrize("count", [0, 5])
def test_too_many_curves_are_refused(count):
    with pytest.raises(ValueError, match=f"got {count}"):
        figures.activation_curves({str(i): passes(1) for i in range(count)})


def test_a_grid_gives_each_rank_its_slice_and_its_shard():
    figure = figures.rank_grid(data=2, tensor=4)
    assert figure.data["rank 5"] == "slice 1, shard 1 of 2"
    assert figure.data["rank 3"] == "slice 3, shard 0 of 2"
    assert "8 ranks: 2 rows of 4 ranks" in figure.alt
