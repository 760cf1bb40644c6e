"""The figures of notebooks 01 to 03: the numbers behind each, and what its sentence claims."""

import numpy as np
import pytest

from zero_nb import SGD, AdamW, Engine, Ledger
from zero_nb.cluster.ring import (
    ring_all_gather,
    ring_all_reduce,
    ring_broadcast,
    ring_reduce_scatter,
)
from zero_nb.compare import digits_task
from zero_nb.show.lesson_figures_a import (
    busiest_rank,
    differences,
    identical_grid,
    memory_over_steps,
    ring_grid,
    traffic_limits,
)
from zero_nb.train.model import GPT, GPTConfig

MODEL = GPT(GPTConfig(vocab_size=27, seq_len=16, width=10, heads=2, blocks=1))


def recorded(rule, steps):
    """A timeline from the first array on."""
    ledger, timeline = Ledger(hosted=1), []
    ledger.listener = timeline.append
    engine = Engine(MODEL, stage=0, rule=rule, precision="fp32", ledger=ledger)
    peaks = []
    for step in range(steps):
        batch = digits_task("lesson").dataset.batch(step, 2)
        peaks.append(engine.train_step(*batch).peak_bytes)
    return timeline, peaks


# ------------------------------------------------------------------------- memory over the steps


def test_memory_over_steps_tells_phases_in_order_and_the_ledgers_peaks():
    timeline, peaks = recorded(AdamW(), 2)
    figure = memory_over_steps({"ours": timeline})
    phases = figure.data["ours"]
    assert list(phases) == [
        "made", "forward 1", "backward 1", "step 1", "forward 2", "backward 2", "step 2",
    ]  # fmt: skip
    numel = MODEL.numel
    assert phases["made"]["param"] == 4 * numel
    assert phases["made"]["optim"] == 8 * numel
    assert phases["backward 1"]["grad"] == 4 * numel
    assert "grad" not in phases["step 1"]
    for step, peak in enumerate(peaks, 1):
        in_step = [phases[f"{part} {step}"]["peak"] for part in ("forward", "backward", "step")]
        assert max(in_step) == peak
    assert "appear in the phase “made”" in figure.alt


def test_memory_over_steps_says_when_states_never_appear():
    timeline, _ = recorded(SGD(), 1)
    figure = memory_over_steps({"a": timeline, "b": timeline})
    assert figure.alt.count("never appear") == 2
    assert list(figure.data) == ["a", "b"]


@pytest.mark.parametrize("timelines", [{}, {"empty": []}])
def test_memory_over_steps_needs_events(timelines):
    with pytest.raises(ValueError, match="at least one"):
        memory_over_steps(timelines)


# --------------------------------------------------------------------------- who holds the same


def test_identical_grid_compares_bits():
    zero = np.zeros((3, 2), np.float32)
    signed = np.array([[0.0], [-0.0], [0.0]], np.float32)
    nan = np.full((3, 1), np.nan)
    figure = identical_grid({"weights": zero, "zeros": signed, "nan": nan})
    assert figure.data == {"weights": "A A A", "zeros": "A B A", "nan": "A A A"}
    assert "Identical on all ranks: weights, nan." in figure.alt
    assert "Different: zeros." in figure.alt


def test_identical_grid_looks_at_rows_of_any_shape_and_stride():
    wide = np.arange(24.0).reshape(2, 3, 4)[:, :, ::2]
    figure = identical_grid({"wide": wide})
    assert figure.data == {"wide": "A B"}
    assert "Identical on all ranks: nothing." in figure.alt


@pytest.mark.parametrize("states", [{}, {"a": np.zeros((2, 1)), "b": np.zeros((3, 1))}])
def test_identical_grid_needs_states_of_one_world(states):
    with pytest.raises(ValueError, match="same number of ranks"):
        identical_grid(states)


# ------------------------------------------------------------------------------------ differences


def test_differences_keep_the_values_and_order_the_names():
    figure = differences({"low": [0.0, 1e-8, 2e-8], "high": [1e-4, 1e-4, 1e-3]})
    assert figure.data["low"] == (0.0, 1e-8, 2e-8)
    assert figure.alt.endswith("From the top at the end: high, low.")
    assert "3 steps" in figure.alt


@pytest.mark.parametrize(
    "curves",
    [{}, {"a": [1.0], "b": [1.0, 2.0]}, {"zero": [0.0, 0.0]}, {name: [1.0] for name in "abcde"}],
)
def test_differences_refuse_what_cannot_be_drawn(curves):
    with pytest.raises(ValueError, match=r"curve|logarithmic"):
        differences(curves)


# ------------------------------------------------------------------------------------------ rings


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_ring_grid_follows_what_the_ring_computes(world_size):
    # Rank r contributes 2**r everywhere: a sum tells whose contributions are in it.
    x_WF = np.repeat(2.0 ** np.arange(world_size), 2 * world_size).astype(np.float32)
    x_WF = x_WF.reshape(world_size, -1)
    scattered, reduced = ring_reduce_scatter(x_WF), ring_all_reduce(x_WF)
    figure = ring_grid(scattered, world_size)
    assert len(figure.data) == world_size
    all_letters = "abcdef"[:world_size]
    last = list(figure.data.values())[-1]
    for rank in range(world_size):
        chunks = last[f"rank {rank}"].split(" | ")
        assert chunks[rank] == all_letters
        assert chunks.count(all_letters) == 1
        assert (scattered.rows[rank] == 2**world_size - 1).all()
    figure = ring_grid(reduced, world_size)
    titles = list(figure.data)
    assert titles[0] == "start"
    assert [title.split(": ")[1] for title in titles[1:]] == (
        ["add"] * (world_size - 1) + ["copy"] * (world_size - 1)
    )
    assert set(list(figure.data.values())[-1].values()) == {" | ".join([all_letters] * world_size)}
    assert f"each rank holds {world_size} of {world_size} full sums" in figure.alt


def test_ring_grid_partial_sums_never_count_a_rank_twice():
    x_WF = np.ones((4, 8), np.float32)
    for panel in ring_grid(ring_all_reduce(x_WF), 4).data.values():
        for row in panel.values():
            for chunk in row.split(" | "):
                assert len(set(chunk)) == len(chunk)


def test_ring_grid_refuses_other_runs():
    x_WF = np.ones((3, 3), np.float32)
    with pytest.raises(ValueError, match="ring_reduce_scatter or ring_all_reduce"):
        ring_grid(ring_all_gather(x_WF), 3)
    with pytest.raises(ValueError, match="ring_reduce_scatter or ring_all_reduce"):
        ring_grid(ring_broadcast(x_WF), 3)
    with pytest.raises(ValueError, match="from 2 to 6"):
        ring_grid(ring_all_reduce(np.ones((7, 7), np.float32)), 7)


def test_busiest_rank_says_what_it_was_given():
    sizes = (2, 3, 4)
    star = [(w - 1, 2 * (w - 1)) for w in sizes]
    ring = [(2 * (w - 1) / w, 2 * (w - 1)) for w in sizes]
    figure = busiest_rank(sizes, star, ring)
    assert figure.data["busiest, through rank 0"] == (1, 2, 3)
    assert figure.data["all, ring"] == (2, 4, 6)
    assert "it grows to 3 M, on the ring it stays below 2 M" in figure.alt
    assert "All ranks together: equal, up to 6 M." in figure.alt
    assert "different" in busiest_rank(sizes, star, [(1, 1), (1, 1), (1, 1)]).alt


def test_traffic_limits_are_ratios_of_what_was_sent():
    sizes = (2, 4, 64)
    sent = {"two": [2 * 640 * (w - 1) // w for w in sizes], "three": [960, 1440, 1890]}
    figure = traffic_limits(sizes, sent, 640)
    assert figure.data["two"] == (1.0, 1.5, 1.96875)
    assert figure.data["three"] == (1.5, 2.25, 1890 / 640)
    assert "two from 1.00 to 1.97 Ψ, three from 1.50 to 2.95 Ψ" in figure.alt
