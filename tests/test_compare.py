"""Measured beside predicted: runs of stages, their tables and JSON, and the grid of memory."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from tiny import STAGES
from tiny_task import PRESET, gpt_task, mlp_task
from zero_nb.cluster.simulated import SimulatedWorld
from zero_nb.compare import (
    Comparison,
    compare_stages,
    digits_task,
    measure_memory,
    text_task,
    train_stage,
)
from zero_nb.config import UsageError, ZeROStage
from zero_nb.theory.memory import zero_stage_memory_reduction
from zero_nb.train.data import DataError
from zero_nb.train.engine import Engine
from zero_nb.train.ledger import HELD_KINDS, KINDS
from zero_nb.train.model import LESSON
from zero_nb.train.optim import SGD, Adam, AdamW, warmup_cosine

by_stage = pytest.mark.parametrize("stage", STAGES)

STAGE_KEYS = {
    "stage": int, "losses": list, "held_out_loss": float, "weights_sha256": str,
    "held_bytes": dict, "formula_bytes": dict, "padding_bytes": dict, "peak_bytes": int,
    "elements_sent": int, "formula_elements": int, "step_seconds": float,
}  # fmt: skip


@pytest.fixture(scope="module")
def comparison():
    """Four stages on three ranks, which divide no unit of the GPT but two."""
    return compare_stages(3, 3, "bf16", task=gpt_task())


# --- four stages ---------------------------------------------------------------------------------


def test_four_stages_on_the_same_samples_end_with_the_same_weights(comparison):
    assert [run.stage for run in comparison.stages] == list(STAGES)
    assert comparison.same_weights
    assert len({run.losses for run in comparison.stages}) == 1
    assert len({run.held_out_loss for run in comparison.stages}) == 1
    assert len(comparison.stages[0].losses) == comparison.steps == 3


def test_measured_is_predicted_for_each_kind(comparison):
    for run in comparison.stages:
        for kind in HELD_KINDS:
            assert run.held_bytes[kind] == run.formula_bytes[kind] + run.padding_bytes[kind]
        assert run.held_total == sum(run.held_bytes.values())
        assert run.elements_sent == run.formula_elements > 0
        assert run.peak_bytes > run.held_total
        assert set(run.largest_bytes) == set(KINDS)
        assert all(run.largest_bytes[kind] >= run.held_bytes[kind] for kind in HELD_KINDS)
    totals = [run.held_total for run in comparison.stages]
    assert totals == sorted(set(totals), reverse=True)


def test_json_of_a_comparison_has_the_documented_keys_and_types(comparison):
    told = json.loads(json.dumps(comparison.to_json(), allow_nan=False))
    assert list(told) == ["world_size", "precision", "numel", "steps", "stages"]
    assert (told["world_size"], told["precision"], told["steps"]) == (3, "bf16", 3)
    assert told["numel"] == gpt_task().model.numel
    for stage, run in zip(told["stages"], comparison.stages, strict=True):
        assert {key: type(value) for key, value in stage.items()} == STAGE_KEYS
        assert list(stage) == list(STAGE_KEYS)
        assert all(type(loss) is float for loss in stage["losses"])
        for kinds in (stage["held_bytes"], stage["formula_bytes"], stage["padding_bytes"]):
            assert {kind: type(size) for kind, size in kinds.items()} == {
                "param": int, "grad": int, "optim": int,
            }  # fmt: skip
        assert re.fullmatch("[0-9a-f]{64}", stage["weights_sha256"])
        assert stage["losses"] == list(run.losses)
        assert stage["step_seconds"] > 0


def test_the_table_has_the_numbers_of_the_runs(comparison):
    header, body = comparison.rows()
    assert header[0] == "stage"
    table = [dict(zip(header, row, strict=True)) for row in body]
    for row, run in zip(table, comparison.stages, strict=True):
        assert int(row["stage"]) == run.stage
        for kind in HELD_KINDS:
            assert int(row[kind].replace(",", "")) == run.held_bytes[kind]
        cells = " ".join(row.values())
        for number in (run.held_total, run.peak_bytes, run.elements_sent):
            assert f"{number:,}" in cells
        assert run.weights_sha256.startswith(row["weights"])
        share = 100 * run.held_total / comparison.stages[0].held_total
        assert any(cell == f"{share:.1f}%" for cell in row.values())
    text, html = repr(comparison), comparison._repr_html_()
    for cell in [*header, *(cell for row in body for cell in row)]:
        assert cell in text
        assert f">{cell}</t" in html
    assert len({len(line) for line in text.splitlines()}) == 1
    assert "world_size 3" in html
    assert html.count("<tr>") == 5


def test_other_weights_are_noticed(comparison):
    wrong = replace(comparison.stages[3], weights_sha256="0" * 64)
    assert not replace(comparison, stages=(*comparison.stages[:3], wrong)).same_weights
    assert not Comparison(1, "fp32", 1, 1, (comparison.stages[0], wrong)).same_weights


def test_progress_is_told_every_step_of_every_stage():
    told = []
    compare_stages(2, 2, "fp32", task=mlp_task(), progress=told.append)
    assert len(told) == 8
    assert all(np.isfinite(report.loss) for report in told)


def test_a_comparison_is_the_beginning_of_the_long_run():
    """Its learning rates are those of the preset's schedule, warm-up first, however short it is."""
    told = []
    task = mlp_task()
    long = replace(task, training=replace(PRESET, steps=40, warmup=4))
    compare_stages(1, 5, "fp32", task=long, progress=told.append)
    want = [
        PRESET.lr * warmup_cosine(step, warmup=4, total=40, final=PRESET.min_lr_ratio)
        for step in range(5)
    ]
    for stage in STAGES:
        got = [report.result.lr for report in told[5 * stage : 5 * stage + 5]]
        np.testing.assert_allclose(got, want)


# --- one stage -----------------------------------------------------------------------------------


@by_stage
def test_a_run_is_the_training_of_an_engine_on_the_same_batches(stage):
    task = gpt_task()
    run, engine = train_stage(stage, world_size=2, steps=3, precision="fp32", task=task, seed=4)
    schedule = {"warmup": 1, "total": 3, "final": PRESET.min_lr_ratio}
    plain = Engine(
        task.model, stage=stage, world_size=2, seed=4, max_grad_norm=PRESET.max_grad_norm,
        rule=AdamW(PRESET.lr, PRESET.betas, PRESET.eps, PRESET.weight_decay),
        schedule=lambda step: warmup_cosine(step, **schedule),
    )  # fmt: skip
    batches = [task.dataset.batch(step, PRESET.batch, 4) for step in range(3)]
    assert run.losses == tuple(plain.train_step(*batch).loss for batch in batches)
    assert run.weights_sha256 == plain.optimizer.weights_sha256()
    assert run.held_out_loss == plain.evaluate(*task.dataset.held_out())
    assert engine.optimizer.weights_sha256() == run.weights_sha256  # evaluating changed nothing
    assert engine.optimizer.steps_done == 3


@pytest.mark.parametrize(
    ("optimizer", "rule"),
    [
        ("adamw", AdamW(PRESET.lr, PRESET.betas, PRESET.eps, PRESET.weight_decay)),
        ("adam", Adam(PRESET.lr, PRESET.betas, PRESET.eps, PRESET.weight_decay)),
        ("sgd", SGD(PRESET.lr, weight_decay=PRESET.weight_decay)),
        ("momentum", SGD(PRESET.lr, momentum=0.9, weight_decay=PRESET.weight_decay)),
    ],
)
def test_the_optimizer_has_the_presets_hyper_parameters(optimizer, rule):
    _, engine = train_stage(2, world_size=2, steps=1, task=mlp_task(), optimizer=optimizer)
    assert engine.optimizer.rule.rule == rule


@by_stage
def test_settings_reach_the_engine(stage):
    settings = {"world_size": 2, "steps": 2, "precision": "bf16-fp32-grads", "task": mlp_task()}
    run, engine = train_stage(
        stage, micro_batches=3, reduce_dtype="bf16", reduce_bucket_size=9, units="model",
        batch=13, seed=1, **settings,
    )  # fmt: skip
    opt = engine.optimizer
    assert (opt.micro_batches, opt.recipe.wire.name) == (3, "bfloat16")
    assert [unit.name for unit in opt.units] == ["model"]
    assert opt.buckets.bucket_numel == 9
    sent = {0: 2, 1: 2, 2: 4, 3: 9}[stage] * 70 // 2
    assert run.elements_sent == run.formula_elements == sent
    others = [
        train_stage(stage, **(settings | other))[0].weights_sha256
        for other in ({}, {"batch": 13}, {"seed": 1}, {"micro_batches": 3})
    ]
    assert len({run.weights_sha256, *others}) == 5


def test_a_world_of_ones_own_is_trained_in():
    world = SimulatedWorld(3)
    run, engine = train_stage(3, world=world, steps=1, task=mlp_task())
    assert engine.world is world
    assert run.world_size == 3


@pytest.mark.parametrize(("steps", "warmup"), [(1, 1), (9, 1), (20, 2), (35, 3), (500, 50)])
def test_a_short_run_keeps_the_shape_of_the_schedule(steps, warmup):
    task = mlp_task()
    task = replace(task, training=replace(PRESET, warmup=50))
    told = []
    train_stage(0, world_size=1, steps=1, schedule_steps=steps, task=task, progress=told.append)
    assert told[0].result.lr == pytest.approx(PRESET.lr / warmup)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"stage": 4}, "there is no ZeRO stage 4; choose 0, 1, 2 or 3"),
        ({"stage": "two"}, "there is no ZeRO stage 'two'"),
        ({"world_size": 0}, "world_size must be at least 1 rank, got 0"),
        ({"world_size": 2.0}, "world_size must be a whole number"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"steps": -3}, "steps must be at least 1, got -3"),
        ({"precision": "int8"}, "unknown precision 'int8'; choose one of fp32, bf16"),
        ({"optimizer": "adamax"}, "unknown optimizer 'adamax'; choose one of adamw, adam, sgd"),
        ({"optimizer": "lamb"}, "lamb needs the norms of each layer's weights and update, but"),
        ({"optimizer": "Shampoo"}, "Shampoo needs the left and right preconditioner matrices"),
        ({"micro_batches": 0}, "micro_batches must be at least 1 micro-batch, got 0"),
        ({"micro_batches": 7}, "batch of 12 leaves ranks of 2 without one sample for each of 7"),
        ({"world_size": 13}, "batch of 12 leaves ranks of 13 without a sample; .* at least 13"),
        ({"reduce_dtype": "fp32"}, "float32 does not fit gradients held in bfloat16"),
        ({"reduce_bucket_size": 0}, "reduce_bucket_size must be at least 1 element, got 0"),
        ({"units": "tensor"}, "unknown units 'tensor'"),
        ({"schedule_steps": 0}, "schedule_steps must be at least 1 step, got 0"),
        ({"batch": 0}, "size must be at least 1, got 0|batch of 0 leaves|batch must be"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_a_step(settings, words):
    told = []
    stage = settings.get("stage", 2)
    given = {"world_size": 2, "steps": 1, "task": mlp_task()} | settings
    given.pop("stage", None)
    with pytest.raises(UsageError, match=words):
        train_stage(stage, progress=told.append, **given)
    assert told == []


# --- tasks ---------------------------------------------------------------------------------------


def test_tasks_of_the_presets():
    digits, lesson = digits_task(), digits_task("lesson")
    assert (digits.dataset.seq_len, digits.model.numel) == (64, 62_304)
    assert (lesson.dataset.seq_len, lesson.model.config) == (16, LESSON)
    with pytest.raises(UsageError, match="unknown preset 'letters'; choose one of digits, lesson"):
        digits_task("letters")


def test_a_text_is_a_task_with_a_vocabulary_of_bytes(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(b"to be or not to be, that is the question\n" * 40)
    task = text_task(path, seq_len=16)
    assert (task.model.config.vocab_size, task.model.config.seq_len) == (256, 16)
    run, _ = train_stage(1, world_size=2, steps=8, task=task)
    assert run.losses[-1] < run.losses[0]
    with pytest.raises(DataError, match="there is no file"):
        text_task(tmp_path / "none.txt")


# --- the grid of memory --------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-both-grads"])
def test_the_grid_is_measured_at_every_stage_and_world_size(precision):
    task, sizes, told = mlp_task(), (1, 3, 16), []
    grid = measure_memory(sizes, precision, task=task, progress=told.append)
    each = {"fp32": (4, 4, 8), "bf16": (2, 2, 12), "bf16-both-grads": (2, 6, 12)}[precision]
    assert len(told) == 4 * len(sizes)  # 16 ranks although the preset's batch is 12
    assert (grid.numel, grid.world_sizes, grid.precision) == (70, sizes, precision)
    for column, size in enumerate(sizes):
        padded = sum(-(-n // size) * size for n in (42, 24, 4))
        for stage in STAGES:
            cut = [size if stage >= first else 1 for first in (3, 2, 1)]
            held = sum(b * padded // c for b, c in zip(each, cut, strict=True))
            assert grid.held_bytes[stage, column] == held
            formula = sum(b * 70 // c for b, c in zip(each, cut, strict=True))
            assert grid.formula_bytes[stage, column] == formula
            saved = zero_stage_memory_reduction(stage, size, *(70 * b for b in each))
            assert grid.saved_fraction[stage, column] == pytest.approx(saved)
            whole = sum(each) * padded
            assert grid.measured_fraction[stage, column] == pytest.approx(1 - held / whole)
    assert np.all(grid.measured_fraction[0] == 0)
    assert np.all(grid.measured_fraction[:, 0] == 0)  # nobody to share with


def test_a_stage_may_be_named():
    runs = [
        train_stage(name, world_size=2, steps=1, task=mlp_task())[0]
        for name in (2, "2", "stage_2", ZeROStage.STAGE_2)
    ]
    assert {(run.stage, run.weights_sha256) for run in runs} == {(2, runs[0].weights_sha256)}
