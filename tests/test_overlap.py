"""Measured beside the timeline: costs are complete, and what is compared is the same step."""

import dataclasses

import pytest

from tiny import gpt, gpt_batches, mlp, mlp_batches
from zero_nb.cluster.simulated import EmulatedLink
from zero_nb.config import UsageError
from zero_nb.overlap import (
    Costs,
    Overlap,
    measure_costs,
    measure_overlap,
    predicted_step,
    step_work,
)
from zero_nb.theory.timeline import Link
from zero_nb.train.engine import Engine
from zero_nb.train.model import GPT, GPTConfig


def test_every_piece_of_a_step_is_timed_once():
    batch = gpt_batches(1, size=4)[0]
    costs = measure_costs(gpt(), batch, world_size=2, steps=3)
    layers = [layer.name for layer in gpt().layers]
    wanted = {(name, way) for name in layers for way in ("forward", "backward")}
    wanted |= {("update", unit) for unit in ("embed", "layers.0", "layers.1", "head")}
    wanted |= {("loss", ""), ("rest", "")}
    assert set(costs.seconds) == wanted
    assert all(took >= 0 for took in costs.seconds.values())
    assert costs.copy_s_per_byte > 0
    work = step_work(Engine(gpt(), stage=3, world_size=2), 2, seconds=costs.seconds)
    told = {(layer.name, "forward"): layer.forward_s for layer in work.layers}
    told |= {(layer.name, "backward"): layer.backward_s for layer in work.layers}
    told |= {("update", unit.name): unit.update_s for unit in work.units}
    assert told | {("loss", ""): work.loss_s, ("rest", ""): work.rest_s} == costs.seconds


def test_a_link_is_slower_by_the_copy_and_the_alarm_clock():
    costs = Costs({}, copy_s_per_byte=1e-9, oversleep_s=1e-4)
    link = costs.link(EmulatedLink(1e9, 2e-4))
    assert (type(link), link.bytes_per_s) == (Link, pytest.approx(0.5e9))
    assert link.latency_s == pytest.approx(3e-4)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_measured_step_and_its_timeline_are_the_same_step(stage):
    model = mlp(6, 16, 16, 4)
    settings = {"stage": stage, "precision": "bf16", "overlap_comm": True}
    settings |= {"micro_batches": 2, "prefetch_bucket_size": 1}
    got = measure_overlap(
        model, mlp_batches(model, 1, size=12)[0], EmulatedLink(1e7), Costs({}, 1e-9, 0.0),
        world_size=3, steps=3, **settings,
    )  # fmt: skip
    step = got.line.schedule
    assert got.report.largest_bytes == step.largest_bytes
    assert got.report.peak_bytes == step.peak_bytes
    assert got.report.bytes_sent == step.bytes_sent()
    # With no costs told, the line has the messages only; measured ones take at least as long.
    assert got.line.compute_s == 0
    assert got.line.step_s <= got.step_s
    assert got.error < 0
    assert got.comm_s >= 0.99 * got.report.bytes_sent / 1e7
    assert got.hidden_s == pytest.approx(got.comm_s - got.exposed_s)
    assert len(got.replayed) == 3
    for line, report in got.replayed:  # what was not waited for was computed, or something else
        assert line.compute_s == pytest.approx(report.seconds - report.exposed_s, rel=0.1)
    assert got.share_of_what_can_be_hidden is None or got.line.hidden_s > 0


def test_the_share_is_of_what_the_line_hides():
    line = dataclasses.make_dataclass("Line", ["hidden_s", "step_s"])
    report = dataclasses.make_dataclass("Report", ["seconds", "comm_s", "exposed_s"])
    replayed = (
        (line(0.5, 1.1), report(1.0, 0.6, 0.2)),
        (line(0.5, 1.2), report(1.0, 0.6, 0.3)),
        (line(0.0, 1.0), report(1.0, 0.6, 0.6)),
    )
    args = {"settings": {}, "link": None, "report": None, "replayed": replayed}

    def overlap(**given):
        return Overlap(**args, **given)

    got = overlap(step_s=2.0, comm_s=1.0, exposed_s=0.4, line=line(0.8, 1.9))
    assert got.share_of_what_can_be_hidden == pytest.approx(0.75)
    assert got.error == pytest.approx(-0.05)
    assert got.replayed_error == pytest.approx(0.1)
    assert got.replayed_share == pytest.approx(0.7)  # of two steps that could hide something
    got = overlap(step_s=2.0, comm_s=1.0, exposed_s=1.0, line=line(0.0, 2.0))
    assert got.share_of_what_can_be_hidden is None


def test_work_of_a_tied_gpt_and_of_an_mlp():
    config = GPTConfig(vocab_size=13, seq_len=6, width=25, heads=5, blocks=1, tied=True)
    tied = step_work(Engine(GPT(config), stage=3, world_size=2), 1)
    assert [(unit.name, unit.tied) for unit in tied.units] == [("root", True), ("layers.0", False)]
    assert tied.layers[-1].units == tied.layers[0].units == ("root",)
    work = step_work(Engine(mlp(), stage=3, world_size=2), 3)
    assert [layer.kept_bytes for layer in work.layers] == [4 * 3 * 7, 4 * 3 * 3, 0]
    assert (work.input_bytes, work.output_bytes) == (4 * 3 * 5, 4 * 3)


def test_settings_the_schedule_does_not_know_are_refused():
    engine = Engine(gpt(), stage=3, world_size=2)
    with pytest.raises(TypeError, match="unexpected keyword"):
        predicted_step(engine, 4, reduce_dtype="bfloat16")
    with pytest.raises(UsageError, match="prefetch_bucket_size must be a whole number"):
        predicted_step(engine, 4, prefetch_bucket_size=-1)
