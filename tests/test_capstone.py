"""Notebook 11: what its cases ask for is what the planner says, and its figures count right."""

import pytest

from zero_nb.learn import exercises_11 as exercises
from zero_nb.show import capstone_figures as figures
from zero_nb.theory.network import Network
from zero_nb.theory.plan import ClusterSpec, plan
from zero_nb.theory.setting import BYTE_KINDS

GIB = 2**30
SLOW = ClusterSpec(64, 80 * GIB, Network(8, 300e9, 10e9 / 8), 312e12)

CASES = {  # key, and which plan of it: the model, the devices, the rest of what is asked
    ("11-b", "solution"): ("llama-13b", ("a100-80gb", 16), {}),
    ("11-b", "stage 3"): ("llama-13b", ("a100-80gb", 16), {"stage": 3}),
    ("11-c", "solution"): ("llama-7b", ("h100-80gb", 16), {"micro_batch": 4}),
    ("11-c", "80e9"): ("llama-7b", ("h100-80gb", 16, 80 * 10**9), {"micro_batch": 4}),
    ("11-d", "solution"): (
        "llama-3-8b", ("h100-80gb", 64), {"micro_batches": 4, "seq": 8192}
    ),
    ("11-d", "a stage that is there"): (
        "llama-3-8b", ("h100-80gb", 64), {"micro_batches": 4, "seq": 8192, "stage": 3}
    ),
    ("11-e", "solution"): ("opt-66b", ("a100-80gb", 64), {"tp": 4, "sequence_parallel": True}),
    ("11-e", "without tensor parallelism"): ("opt-66b", ("a100-80gb", 64), {}),
    ("11-f", "solution"): ("llama-13b", SLOW, {"micro_batch": 2}),
    ("11-f", "more room"): ("llama-13b", SLOW, {"micro_batch": 2, "stage": 3}),
    ("11-g", "solution"): ("llama-65b", ("a100-80gb", 24), {"stage": 3, "recompute": "full"}),
}  # fmt: skip


def asked(key, which):
    """The planner's answer to a case."""
    model, cluster, options = CASES[key, which]
    cluster = cluster if isinstance(cluster, ClusterSpec) else ClusterSpec.of(*cluster)
    return plan(model, cluster, **options)


def told(key, which):
    """What the exercise takes for it."""
    exercise = exercises.EXERCISES[key]
    return exercise.solution if which == "solution" else exercise.wrong[which].answer


@pytest.mark.parametrize(("key", "which"), CASES)
def test_a_case_asks_for_what_the_planner_says(key, which):
    p, answer = asked(key, which), told(key, which)
    assert answer["binding"] == max(p.bytes, key=p.bytes.get)
    assert answer["left"] == pytest.approx(p.left_bytes / 1e9, abs=0.005)  # two decimals
    assert answer["stage"] == p.stage
    if key == "11-e":  # asked for: ranks that share a piece
        assert answer["W"] == (16 if which == "solution" else 64)
    else:
        assert answer["W"] == p.smallest_world_size


@pytest.mark.parametrize("key", ["11-b", "11-c", "11-d", "11-e", "11-f", "11-g"])
def test_the_largest_term_has_no_rival_and_no_smaller_stage_fits(key):
    p = asked(key, "solution")
    first, second = sorted(p.bytes.values())[-2:][::-1]
    assert first > 1.02 * second
    assert p.stage == p.smallest_stage
    assert set(exercises.KINDS) <= set(BYTE_KINDS)


def test_only_one_of_the_three_changes_makes_11_d_fit():
    asked_for = {"micro_batch": 4, "seq": 8192}
    run = ("llama-3-8b", ClusterSpec.of("h100-80gb", 64))
    assert not any(plan(*run, stage=stage, **asked_for).fits for stage in range(4))
    assert not plan("llama-3-8b", ClusterSpec.of("h100-80gb", 512), stage=3, **asked_for).fits
    assert not plan(*run, stage=3, loss="chunked", **asked_for).fits
    assert asked("11-d", "solution").fits


def test_in_11_f_the_network_decides_and_stage_3_takes_half_as_long_again():
    p, higher = (asked("11-f", which) for which in ("solution", "more room"))
    assert p.time.limit == "data-parallel communication"
    assert higher.time.bound_s / p.time.bound_s == pytest.approx(1.5, rel=0.01)
    assert plan("llama-13b", ClusterSpec.of("a100-80gb", 64), micro_batch=2).time.limit == (
        "arithmetic"
    )


def test_11_g_does_not_fit_on_16():
    p = plan("llama-65b", ClusterSpec.of("a100-80gb", 16), stage=3, recompute="full")
    assert not p.fits
    assert round(-p.left_bytes / 1e9, 1) == 2.3


def test_a_hint_that_names_a_number_names_the_right_one():
    p = plan("llama-13b", ClusterSpec.of("a100-80gb", 16), stage=1)
    assert f"{p.total_bytes / 1e9:.1f} GB" in exercises.EXERCISES["11-b"].hints[2]


def test_the_prediction_is_what_the_planner_says():
    few, many = (
        plan("llama-7b", ClusterSpec.of("a100-80gb", size), stage=3, micro_batch=2)
        for size in (8, 64)
    )
    truth = 100 * many.total_bytes / few.total_bytes
    assert exercises.TRUTH["11-p"] == pytest.approx(truth, abs=0.05)


# -------------------------------------------------------------------------------------- figures


def test_table_1_has_every_cell_and_says_how_many_agree():
    figure = figures.paper_table_1()
    assert "54 of 54 recomputed cells are as printed" in figure.alt
    assert figure.data["DP 64"]["7.5B, stage 1"] == "31.4"
    assert figure.data["DP 1024"]["1T, stage 3"] == "15.6"


def test_a_cell_that_differs_would_show_both_numbers():
    from zero_nb.show.style import sheet

    with sheet(2, 1) as (_, ax):
        figures._cell(ax, 0, 0, 10 * 10**9, "10", "11")
        figures._cell(ax, 1, 0, 40 * 10**9, "40", "40")
        assert [text.get_text() for text in ax.texts] == ["10 (11)", "40"]
        assert [text.get_fontweight() for text in ax.texts] == ["bold", "normal"]


def test_totals_add_up_to_the_plans():
    plans = [plan("gpt2", ClusterSpec.of("t4-16gb", size), stage=3) for size in (2, 8)]
    figure = figures.totals_over_devices(plans)
    for p in plans:
        assert sum(figure.data[f"{p.world_size} devices"].values()) == p.total_bytes
    assert "on 2, 8 devices" in figure.alt
    with pytest.raises(ValueError, match="at least one plan"):
        figures.totals_over_devices([])
