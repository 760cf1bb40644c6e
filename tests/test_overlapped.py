"""Data parallelism that reduces while it computes: the same messages, sent earlier."""

from dataclasses import replace

import pytest

from zero_nb.config import UsageError
from zero_nb.theory.overlapped import overlapped_data_parallel
from zero_nb.theory.schedule import Compute, LayerWork, Send, StepOptions, StepWork, UnitSize
from zero_nb.theory.schedule import schedule as write_schedule
from zero_nb.theory.timeline import Link, lay_out

RANKS, NUMEL = 4, 4000
# One second for what a reduce-scatter of a unit sends in float32.
LINK = Link(bytes_per_s=4 * NUMEL * (RANKS - 1) / RANKS)
OPTIONS = StepOptions(0, RANKS)


def work(layers=3, forward_s=1.0):
    """Equal layers, each a unit of its own; backward takes twice as long as forward."""
    return StepWork(
        tuple(UnitSize(f"u{i}", NUMEL) for i in range(layers)),
        tuple(LayerWork(f"l{i}", (f"u{i}",), forward_s, 2 * forward_s) for i in range(layers)),
    )


def order(step):
    """What is computed and sent, in order."""
    return [
        each.name if isinstance(each, Compute) else f"send {each.name}"
        for each in step.instructions
        if isinstance(each, Compute | Send) and not each.name.startswith(("update", "loss", "rest"))
    ]


def test_each_gradient_is_sent_when_its_backward_pass_is_over():
    step = overlapped_data_parallel(work(), OPTIONS)
    assert order(step) == ["l0", "l1", "l2", "l2", "send u2", "l1", "send u1", "l0", "send u0"]


def test_what_is_sent_held_and_computed_stays_the_same():
    plain, moved = write_schedule(work(), OPTIONS), overlapped_data_parallel(work(), OPTIONS)
    assert moved.elements_sent() == plain.elements_sent() > 0
    assert moved.peak_bytes == plain.peak_bytes
    assert len(moved.instructions) == len(plain.instructions)


@pytest.mark.parametrize(("forward_s", "step_s"), [(1.0, 3 * 3 + 2), (4.0, 4 * 9 + 2)])
def test_where_messages_fit_under_backward_only_the_last_one_shows(forward_s, step_s):
    line = lay_out(overlapped_data_parallel(work(forward_s=forward_s), OPTIONS), LINK)
    assert line.step_s == pytest.approx(step_s, rel=1e-12)  # sums of seconds in another order
    assert line.exposed_s == pytest.approx(2, rel=1e-9)


def test_where_they_do_not_the_link_decides():
    line = lay_out(overlapped_data_parallel(work(forward_s=0.5), OPTIONS), LINK)
    # Forward, the first backward, then three messages of 2 s each, one after the other.
    assert line.step_s == pytest.approx(3 * 0.5 + 1 + 3 * 2, rel=1e-12)


def test_only_the_last_micro_batch_sends():
    step = overlapped_data_parallel(work(2), replace(OPTIONS, micro_batches=2))
    names = ["l0", "l1", "l1", "l0", "l0", "l1", "l1", "send u1", "l0", "send u0"]
    assert order(step) == names


def test_a_tied_unit_waits_for_its_first_layer():
    tied = StepWork(
        (UnitSize("table", NUMEL, tied=True), UnitSize("u", NUMEL)),
        (
            LayerWork("embed", ("table",)),
            LayerWork("block", ("u",), 1, 2),
            LayerWork("head", ("table",), 1, 2),
        ),
    )
    step = overlapped_data_parallel(tied, OPTIONS)
    assert order(step)[-4:] == ["block", "send u", "embed", "send table"]


def test_frozen_units_send_nothing():
    frozen = StepWork(
        (UnitSize("a", NUMEL, trainable=False), UnitSize("b", NUMEL)),
        (LayerWork("l0", ("a",), 1, 2), LayerWork("l1", ("b",), 1, 2)),
    )
    assert [send.name for send in overlapped_data_parallel(frozen, OPTIONS).sends] == ["b"]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_other_stages_are_refused(stage):
    with pytest.raises(UsageError, match=f"stage 0, got stage {stage}"):
        overlapped_data_parallel(work(), StepOptions(stage, RANKS))
