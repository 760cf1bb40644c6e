"""What a stage saves: from the ledger and the log, against plain data parallelism."""

import pytest

from tiny import PRECISIONS, STAGES, UNITS, gpt, gpt_batches, own_grads, own_params
from zero_nb.theory.memory import model_state_bytes, padded_numel, zero_stage_memory_reduction
from zero_nb.theory.traffic import bytes_per_step
from zero_nb.train.engine import Engine
from zero_nb.train.optim import SGD
from zero_nb.train.optimizer import ZeROOptimizer
from zero_nb.train.stats import ZeROMemoryStats

NUMELS = [36, 33]


def test_the_total_is_always_in_step_and_asking_twice_changes_nothing():
    stats = ZeROMemoryStats(100, 200, 300)
    assert stats.total_memory_saved == 600
    assert stats.update_totals() == stats.update_totals() == 600
    stats.optimizer_memory_saved += 50
    assert stats.total_memory_saved == 650
    assert ZeROMemoryStats() == ZeROMemoryStats(0, 0, 0, 0)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_saved_bytes_are_the_papers_on_the_padded_parameters(world_size, stage, precision):
    opt = ZeROOptimizer(
        own_params(), stage=stage, world_size=world_size, precision=precision, units=UNITS
    )
    opt.backward(own_grads(world_size))
    opt.step()
    stats, whole = opt.memory_stats(), padded_numel(NUMELS, world_size)
    baseline = model_state_bytes(0, world_size, whole, precision)
    used = model_state_bytes(stage, world_size, whole, precision)
    assert stats.optimizer_memory_saved == baseline.optim - used.optim
    assert stats.gradient_memory_saved == baseline.grad - used.grad
    assert stats.parameter_memory_saved == baseline.param - used.param
    fraction = zero_stage_memory_reduction(
        stage, world_size, baseline.param, baseline.grad, baseline.optim
    )
    assert stats.total_memory_saved == pytest.approx(fraction * baseline.total, abs=1e-6)


def test_a_rule_without_state_has_nothing_to_save_there():
    opt = ZeROOptimizer(own_params(), stage=3, world_size=4, rule=SGD())
    opt.backward(own_grads(4))
    assert opt.memory_stats().optimizer_memory_saved == 0


@pytest.mark.parametrize("stage", STAGES)
def test_stats_are_those_of_the_ledger_at_the_moment_gradients_were_complete(stage):
    opt = ZeROOptimizer(own_params(), stage=stage, world_size=4, units=UNITS)
    opt.backward(own_grads(4))
    held = opt.ledger.held_bytes()
    before = opt.memory_stats()
    result = opt.step()
    after = opt.memory_stats()
    assert result.held_bytes == held
    assert before.communication_overhead == 0  # nothing is known of a step yet
    assert before.total_memory_saved == after.total_memory_saved
    baseline = model_state_bytes(0, 4, padded_numel(NUMELS, 4), "fp32")
    assert after.total_memory_saved == baseline.total - sum(held.values())


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", STAGES)
def test_communication_overhead_is_what_a_training_step_sends_beyond_data_parallelism(
    stage, precision
):
    engine = Engine(gpt(), stage=stage, world_size=4, precision=precision)
    numels = [unit.layout.numel for unit in engine.optimizer.units]
    beyond = bytes_per_step(stage, 4, numels, precision) - bytes_per_step(0, 4, numels, precision)
    for inputs, targets in gpt_batches(2, size=4):
        engine.train_step(inputs, targets)
        assert engine.optimizer.memory_stats().communication_overhead == beyond
    assert (beyond > 0) == (stage == 3)


def test_a_notebook_shows_a_table_with_a_heading_for_each_row():
    html = ZeROMemoryStats(1_000, 20, 3, 4_000_000)._repr_html_()
    for text in ("1,000", "20", "3", "1,023", "4,000,000", "<caption>", "scope='row'"):
        assert text in html
    assert html.count("<tr>") == html.count("</tr>") == 5


@pytest.mark.parametrize("stage", STAGES)
def test_what_is_sent_is_counted_for_the_last_step_alone(stage):
    """A model of one's own gathers nothing to compute: stage 3 sends half of the baseline."""
    opt = ZeROOptimizer(own_params(), stage=stage, world_size=3)
    baseline = 2 * 23 * 2 * 4  # all-reduce: 2 (W - 1) of 69 / 3 float32 elements
    for step in range(3):
        opt.backward(own_grads(3, seed=step))
        opt.step()
        overhead = opt.memory_stats().communication_overhead
        assert overhead == (-baseline // 2 if stage == 3 else 0)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("settings", [{"frozen": ["embed"]}, {"micro_batches": 2}])
def test_the_baseline_freezes_and_accumulates_alike(settings, stage, precision):
    """Nothing is saved by a stage that is compared with itself; a share of it by the others."""
    opt = ZeROOptimizer(
        own_params(), stage=stage, world_size=3, precision=precision, units=UNITS, **settings
    )
    grads = {n: g for n, g in own_grads(3).items() if n not in settings.get("frozen", ())}
    for _ in range(settings.get("micro_batches", 1)):
        opt.backward(grads)
    held = opt.ledger.held_bytes()
    opt.step()
    stats = opt.memory_stats()
    saved = {
        "param": stats.parameter_memory_saved,
        "grad": stats.gradient_memory_saved,
        "optim": stats.optimizer_memory_saved,
    }
    for kind, first in (("optim", 1), ("grad", 2), ("param", 3)):
        assert saved[kind] == (2 * held[kind] if stage >= first else 0), kind
