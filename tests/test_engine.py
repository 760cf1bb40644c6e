"""The engine: real training, the same bits at every stage, and bytes that are the formula's.

Formulas come from `zero_nb.theory`, which knows neither this engine nor its padding.
"""

import concurrent.futures.thread
import functools
import os
import subprocess
import sys
import time
import tracemalloc

import numpy as np
import pytest

import naive_training as naive
from tiny import (
    PRECISIONS,
    STAGES,
    STEPS,
    VOCAB,
    WORLD_SIZES,
    dirty_memory,
    gpt,
    gpt_batches,
    mlp,
    mlp_batches,
)
from zero_nb.cluster.simulated import SimulatedWorld
from zero_nb.config import UsageError
from zero_nb.core.precision import BFLOAT16, FLOAT32
from zero_nb.theory.memory import model_state_bytes, padding_bytes
from zero_nb.theory.traffic import bytes_per_step, elements_per_step
from zero_nb.train.engine import Engine, group_layers
from zero_nb.train.ledger import KINDS
from zero_nb.train.optim import SGD, AdamW

FORMATS = {"fp32": FLOAT32, "bf16": BFLOAT16}
STRADDLING = (
    ("embed", "layers.0.attn"),
    ("layers.0.mlp",),
    ("layers.1.attn", "layers.1.mlp", "head"),
)
UNITS = {"model": "model", "block": "block", "sublayer": "sublayer", "lists": STRADDLING}

by_stage = pytest.mark.parametrize("stage", STAGES)
by_precision = pytest.mark.parametrize("precision", PRECISIONS)
by_units = pytest.mark.parametrize("units", UNITS.values(), ids=UNITS)


def trained(model, batches, **settings):
    """An engine after some steps, and its reports."""
    engine = Engine(model, **({"rule": AdamW(lr=0.01)} | settings))
    return engine, [engine.train_step(*batch) for batch in batches]


def numels(engine):
    """Elements of each flat parameter, unpadded: all that theory is told."""
    return [unit.layout.numel for unit in engine.optimizer.units]


@functools.cache
def measured(world_size, stage, precision, units):
    """Elements of each flat parameter, and the reports of three steps."""
    engine, reports = trained(
        gpt(), gpt_batches(3, size=16), stage=stage, world_size=world_size, precision=precision,
        units=units,
    )  # fmt: skip
    return numels(engine), reports


# --- one set of weights for all stages -----------------------------------------------------------


@by_precision
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_stage_and_unit_gives_the_weights_of_ranks_that_hold_everything(
    world_size, precision
):
    """Bit for bit those of the slow twin, which knows no units, shards, padding or stages."""
    model, batches = gpt(), gpt_batches(3, size=24)
    weights, losses = naive.data_parallel(
        model, model.init(0), batches, world_size, naive.NaiveAdam(lr=0.01), FORMATS[precision]
    )
    for stage in STAGES:
        for name, units in UNITS.items():
            engine, reports = trained(
                model, batches, stage=stage, world_size=world_size, precision=precision, units=units
            )
            assert [report.loss for report in reports] == losses, (stage, name)
            for parameter, array in engine.optimizer.weights().items():
                same = array.tobytes() == weights[parameter].tobytes()
                assert same, (stage, name, parameter)


@by_stage
@by_precision
@pytest.mark.parametrize("bucket", [None, 1000])
def test_memory_that_was_never_written_is_never_read(bucket, precision, stage, monkeypatch):
    settings = {"stage": stage, "world_size": 8, "precision": precision, "max_grad_norm": 1.0}
    settings |= {"reduce_bucket_size": bucket}
    clean, _ = trained(gpt(), gpt_batches(2), **settings)
    dirty_memory(monkeypatch)
    dirty, _ = trained(gpt(), gpt_batches(2), **settings)
    assert dirty.optimizer.weights_sha256() == clean.optimizer.weights_sha256()


@by_precision
@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_ranks_that_own_padding_only_change_nothing(world_size, precision):
    model = mlp(5, 7, 3, 1)  # a last unit of 4 elements
    batches = mlp_batches(model, 3)
    weights, _ = naive.data_parallel(
        model, model.init(0), batches, world_size, naive.NaiveSGD(0.01, 0.9), FORMATS[precision]
    )
    for stage in STAGES:
        engine, _ = trained(
            model, batches, stage=stage, world_size=world_size, precision=precision,
            rule=SGD(lr=0.01, momentum=0.9),
        )  # fmt: skip
        for name, array in engine.optimizer.weights().items():
            assert array.tobytes() == weights[name].tobytes(), (stage, name)


@by_precision
def test_more_ranks_than_one_change_last_bits_only(precision):
    """Sums over ranks round in another order: near, but another number for another W."""
    runs = {
        w: trained(gpt(), gpt_batches(3), world_size=w, precision=precision, rule=SGD(lr=0.1))
        for w in (1, 8)
    }
    assert len({engine.optimizer.weights_sha256() for engine, _ in runs.values()}) == 2
    one, eight = (engine.optimizer.weights() for engine, _ in runs.values())
    # A gradient in bfloat16 is off by up to 2^-8 of itself at every rank, of about 0.1 here.
    tolerance = 1e-6 if precision == "fp32" else 3 * 0.1 * 2**-8
    for name, array in one.items():
        np.testing.assert_allclose(eight[name], array, rtol=0, atol=tolerance)


@by_stage
@by_precision
def test_threads_over_ranks_change_neither_bits_nor_bytes(stage, precision, monkeypatch):
    results = set()
    for threads in (1, 2, 3, 5, None):
        monkeypatch.setattr(os, "cpu_count", lambda threads=threads: threads)
        engine, reports = trained(
            gpt(), gpt_batches(2, size=16), stage=stage, world_size=8, precision=precision
        )
        measured = [(r.loss, r.peak_bytes, *r.largest_bytes.values()) for r in reports]
        results.add((engine.optimizer.weights_sha256(), *measured))
    assert len(results) == 1


CHILD = """
import numpy as np
from tiny import gpt_batches, mlp, mlp_batches
from zero_nb.train.engine import Engine
from zero_nb.train.model import DIGITS, GPT

wide = mlp(64, 520, 520, 8)  # enough elements for kernels that run in parallel
tokens = np.random.default_rng(0).integers(0, 27, (16, 65))
for stage in (0, 3):
    for precision in ("fp32", "bf16"):
        settings = {"stage": stage, "precision": precision, "max_grad_norm": 1.0}
        engine = Engine(wide, world_size=3, units="model", **settings)
        for inputs, targets in mlp_batches(wide, 2, size=300):
            engine.train_step(inputs, targets)
        print(engine.optimizer.weights_sha256())
        engine = Engine(GPT(DIGITS), world_size=2, **settings)
        engine.train_step(tokens[:, :-1].copy(), tokens[:, 1:].copy())
        print(engine.optimizer.weights_sha256())
"""


def test_threads_of_numba_and_blas_do_not_change_the_weights(project):
    """Whatever the environment asks for, in processes of their own."""
    printed = set()
    for threads in ("1", "2"):
        names = ("NUMBA_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
        path = os.pathsep.join([str(project), str(project / "tests")])
        environment = os.environ | dict.fromkeys(names, threads) | {"PYTHONPATH": path}
        done = subprocess.run(
            [sys.executable, "-c", CHILD], env=environment, capture_output=True, text=True,
            timeout=300, cwd=project,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        hashes = done.stdout.split()
        # At each of four settings: stage 0 = stage 3, and the models differ.
        assert hashes[:4] == hashes[4:]
        assert len(set(hashes)) == 4
        printed.add(tuple(hashes))
    assert len(printed) == 1


@by_precision
@pytest.mark.parametrize(("world_size", "samples"), [(3, 8), (8, 11), (4, 6), (5, 5), (2, 23)])
def test_uneven_batches_give_one_set_of_weights_near_that_of_one_rank(
    world_size, samples, precision
):
    batches = gpt_batches(3, size=samples)
    settings = {"rule": SGD(lr=0.1), "precision": precision}
    runs = [
        trained(gpt(), batches, stage=stage, world_size=world_size, **settings) for stage in STAGES
    ]
    assert len({engine.optimizer.weights_sha256() for engine, _ in runs}) == 1
    assert len({tuple(report.loss for report in reports) for _, reports in runs}) == 1
    alone, alone_reports = trained(gpt(), batches, **settings)
    # As in test_more_ranks_than_one_change_last_bits_only; a sample lost or counted twice would
    # change the loss by 1 / samples of itself.
    tolerance = 1e-6 if precision == "fp32" else 3 * 0.1 * 2**-8
    for mine, its in zip(runs[0][1], alone_reports, strict=True):
        assert mine.loss == pytest.approx(its.loss, rel=1e-6 if precision == "fp32" else 1e-3)
    for name, array in alone.optimizer.weights().items():
        np.testing.assert_allclose(
            runs[0][0].optimizer.weights()[name], array, rtol=0, atol=tolerance
        )


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("samples", [8, 9, 11, 15, 16, 23, 64])
def test_ranks_take_the_samples_in_turn_and_equally_many_within_one(world_size, samples):
    model, seen = mlp(), []
    ((inputs, targets),) = mlp_batches(model, 1, size=samples)
    own_loss = model.loss

    def watched(y, targets, global_count):
        seen.extend((float(rank[0, 0]), rank.copy()) for rank in targets)
        return own_loss(y, targets, global_count)

    model.loss = watched
    targets[:, 0] = np.arange(samples)
    Engine(model, world_size=world_size).train_step(inputs, targets)
    parts = [rank for _, rank in sorted(seen, key=lambda part: part[0])]
    assert len(parts) == world_size
    np.testing.assert_array_equal(np.concatenate(parts), targets)
    sizes = {len(part) for part in parts}
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("world_size", [2, 3])
def test_an_even_batch_given_to_uneven_code_has_the_same_bits(world_size):
    """One rank's bits do not depend on whether it is computed in a stack or by itself."""
    (inputs, targets), *_ = gpt_batches(1, size=4 * world_size)
    stacked, _ = trained(gpt(), [(inputs, targets)], world_size=world_size)
    weights, _ = naive.data_parallel(
        gpt(), gpt().init(0), [(inputs, targets)], world_size, naive.NaiveAdam(lr=0.01)
    )
    for name, array in stacked.optimizer.weights().items():
        assert array.tobytes() == weights[name].tobytes()


@by_stage
@by_precision
@pytest.mark.parametrize(("size", "hosted"), [(4, 1), (4, 2), (3, 1)])
def test_a_world_that_hosts_some_ranks_only_trains_to_the_same_bits(size, hosted, stage, precision):
    batches = gpt_batches(2, size=size + 1)  # uneven, too

    def work(world):
        engine, reports = trained(gpt(), batches, stage=stage, world=world, precision=precision)
        return engine.optimizer.weights_sha256(), [r.loss for r in reports], reports[-1].held_bytes

    from zero_nb.core.blas import one_blas_thread

    with one_blas_thread():
        results = naive.in_threads(size, hosted, work)
    assert all(result == work(SimulatedWorld(size)) for result in results)


def test_it_learns():
    """Twelve sentences by heart, at stage 3 on three ranks in bfloat16."""
    ((inputs, targets),) = gpt_batches(1, size=12)
    _, reports = trained(gpt(), [(inputs, targets)] * 60, stage=3, world_size=3, precision="bf16")
    assert reports[0].loss == pytest.approx(np.log(VOCAB), abs=0.1)
    assert reports[-1].loss < 1.0


# --- bytes held: the ledger beside the formula --------------------------------------------------


@by_precision
@by_stage
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8, 16])
def test_held_bytes_are_the_formula_plus_padding_at_the_first_and_the_last_step(
    world_size, stage, precision
):
    for units in UNITS.values():
        counts, reports = measured(world_size, stage, precision, units)
        assert sum(counts) == gpt().numel
        formula = model_state_bytes(stage, world_size, sum(counts), precision).as_dict()
        padding = padding_bytes(stage, world_size, counts, precision).as_dict()
        for report in (reports[0], reports[-1]):
            assert report.held_bytes == {k: formula[k] + padding[k] for k in formula}


@pytest.mark.parametrize(
    ("rule", "optimizer"), [(SGD(), "sgd"), (SGD(momentum=0.9), "momentum"), (AdamW(), "adamw")]
)
@by_stage
def test_held_bytes_of_other_rules_are_the_formulas_too(rule, optimizer, stage):
    engine, reports = trained(gpt(), gpt_batches(1, size=4), stage=stage, world_size=4, rule=rule)
    counts = numels(engine)
    formula = model_state_bytes(stage, 4, sum(counts), "fp32", optimizer).as_dict()
    padding = padding_bytes(stage, 4, counts, "fp32", optimizer).as_dict()
    assert reports[0].held_bytes == {k: formula[k] + padding[k] for k in formula}


@by_precision
@by_stage
def test_every_hosted_rank_holds_as_much_as_the_fullest(stage, precision):
    engine = Engine(gpt(), stage=stage, world_size=8, precision=precision)
    engine.forward_backward(*gpt_batches(1, size=8)[0])
    for kind, held in engine.ledger.held_bytes().items():
        assert engine.ledger.bytes_by_rank(kind) == [held] * 8


@by_precision
@by_stage
def test_what_numpy_really_allocated_agrees_with_the_ledger(stage, precision):
    """Within 1 %, for 1.1 million parameters: tracemalloc sees every buffer NumPy asks for.

    Kernels are warm and activations freed; what the ledger does not know of would show here.
    """
    model = mlp(61, 1009, 997, 7)
    assert model.numel > 1_000_000
    ((inputs, targets),) = mlp_batches(model, 1, size=8)
    trained(mlp(), mlp_batches(mlp(), 1), stage=stage, world_size=4, precision=precision)

    def allocated():
        only = tracemalloc.DomainFilter(inclusive=True, domain=np.lib.tracemalloc_domain)
        trace = tracemalloc.take_snapshot().filter_traces([only])
        return sum(entry.size for entry in trace.statistics("filename"))

    def booked():
        return sum(sum(engine.ledger.bytes_by_rank(kind)) for kind in KINDS)

    tracemalloc.start()
    try:
        engine = Engine(model, stage=stage, world_size=4, precision=precision)
        assert allocated() == pytest.approx(booked(), rel=0.01)
        engine.forward_backward(inputs, targets)
        assert engine.ledger.current_bytes("activation") == 0
        assert allocated() == pytest.approx(booked(), rel=0.01)
        with_gradients = booked()
        engine.optimizer.step()
        assert booked() < with_gradients
        assert allocated() == pytest.approx(booked(), rel=0.01)
        with engine.optimizer.gathered_parameters():
            assert allocated() == pytest.approx(booked(), rel=0.01)
        held = {kind: engine.ledger.current_bytes(kind) for kind in KINDS}
        assert [kind for kind, size in held.items() if size] == ["param", "optim"]
    finally:
        tracemalloc.stop()


@by_precision
@by_stage
def test_activations_are_what_the_layers_say_they_keep(stage, precision):
    engine, (report,) = trained(
        gpt(), gpt_batches(1, size=8), stage=stage, world_size=4, precision=precision
    )
    width, heads, tokens = engine.model.config.width, engine.model.config.heads, 2 * STEPS
    kept = 2 * (tokens * (5 * width + heads * STEPS + 1) + tokens * (9 * width + 1))
    kept += tokens * (width + 1) + tokens * VOCAB  # head, and the logits
    assert report.largest_bytes["activation"] == 4 * kept + 8 * tokens  # tokens are int64
    assert engine.ledger.current_bytes("activation") == 0


@by_units
@by_precision
def test_stage_3_gathers_one_unit_at_a_time(precision, units):
    engine, (report,) = trained(
        gpt(), gpt_batches(1, size=4), stage=3, world_size=4, precision=precision, units=units
    )
    itemsize = 4 if precision == "fp32" else 2
    largest = max(-(-numel // 4) * 4 for numel in numels(engine))
    assert report.largest_bytes["unsharded"] == itemsize * largest
    assert report.largest_bytes["bucket"] == itemsize * largest
    assert engine.ledger.current_bytes("unsharded") == 0


@by_precision
def test_a_higher_stage_needs_less_at_its_peak(precision):
    peaks, held = [], []
    for stage in STAGES:
        _, (report,) = trained(
            gpt(), gpt_batches(1, size=4), stage=stage, world_size=4, precision=precision
        )
        peaks.append(report.peak_bytes)
        held.append(sum(report.held_bytes.values()))
        assert report.peak_bytes >= held[-1]
        assert report.peak_bytes <= sum(report.largest_bytes.values())
    assert peaks == sorted(set(peaks), reverse=True)
    assert held == sorted(set(held), reverse=True)


@by_stage
def test_a_thread_that_is_slow_to_let_go_does_not_change_what_is_measured(stage, monkeypatch):
    """A worker holds its job for a moment after it is done; memory must not wait for that."""
    job = concurrent.futures.thread._WorkItem
    prompt = job.run

    def late(self):
        prompt(self)
        time.sleep(0.002)

    monkeypatch.setattr("zero_nb.train.engine._threads", lambda: 2)
    _, on_time = trained(gpt(), gpt_batches(1, size=4), stage=stage, world_size=4)
    monkeypatch.setattr(job, "run", late)
    _, delayed = trained(gpt(), gpt_batches(1, size=4), stage=stage, world_size=4)
    assert delayed[0].peak_bytes == on_time[0].peak_bytes
    assert delayed[0].largest_bytes == on_time[0].largest_bytes


def test_the_timeline_of_a_step_ends_where_it_began_and_names_units_and_phases():
    engine, _ = trained(gpt(), gpt_batches(2, size=4), stage=3, world_size=4)
    events = engine.ledger.events
    assert {event.phase for event in events} <= {"outside", "forward", "backward", "reduce", "step"}
    assert sum(event.delta_bytes for event in events) == 0
    gathered = [e.label for e in events if e.kind == "unsharded" and e.delta_bytes > 0]
    upwards = [unit.name for unit in engine.optimizer.units]
    assert gathered == upwards + upwards[::-1]
    phases = [e.phase for e in events if e.kind == "unsharded" and e.delta_bytes > 0]
    assert phases == ["forward"] * 4 + ["backward"] * 4


# --- what is sent --------------------------------------------------------------------------------


@by_precision
@by_stage
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8, 16])
def test_elements_and_bytes_sent_are_the_papers_counted_with_padding(world_size, stage, precision):
    for units in UNITS.values():
        counts, reports = measured(world_size, stage, precision, units)
        padded = sum(-(-n // world_size) * world_size for n in counts)
        for report in reports:
            assert report.elements_sent == elements_per_step(stage, world_size, counts)
            factor = (2, 2, 2, 3)[stage]
            assert report.elements_sent * world_size == factor * padded * (world_size - 1)
            assert report.bytes_sent == bytes_per_step(stage, world_size, counts, precision)


def test_collectives_of_a_step_in_their_order():
    units = ["embed", "layers.0", "layers.1", "head"]
    reduced = [("reduce_scatter", "grad", unit) for unit in units[::-1]]
    gathered = [("all_gather", "param", unit) for unit in units]
    backward = [step for pair in zip(gathered[::-1], reduced, strict=True) for step in pair]
    expected = {
        0: [("all_reduce", "grad", unit) for unit in units[::-1]],
        1: reduced + gathered,
        2: reduced + gathered,
        3: gathered + backward,
    }
    for stage in STAGES:
        engine, _ = trained(gpt(), gpt_batches(2, size=4), stage=stage, world_size=2)
        log = [t for t in engine.world.log.transfers if t.purpose in ("param", "grad")]
        assert [(t.collective, t.purpose, t.label) for t in log] == expected[stage]


@by_stage
def test_the_loss_is_agreed_on_with_one_number_a_rank(stage):
    engine, _ = trained(gpt(), gpt_batches(1, size=4), stage=stage, world_size=4)
    control = [t for t in engine.world.log.transfers if t.purpose == "control"]
    assert [t.elements_sent for t in control if t.label == "loss"] == [3]


# --- reports, evaluation -------------------------------------------------------------------------


def test_a_report_tells_the_loss_before_the_update_and_what_the_optimizer_did():
    batches = gpt_batches(2, size=4)
    engine, reports = trained(
        gpt(), batches, stage=2, world_size=2, schedule=lambda step: 1 / (1 + step)
    )
    assert [report.result.lr for report in reports] == [0.01, 0.005]
    assert all(report.result.applied for report in reports)
    assert all(report.seconds > 0 for report in reports)
    assert all(report.held_bytes == report.result.held_bytes for report in reports)
    assert engine.optimizer.steps_done == 2


@by_stage
@by_precision
def test_evaluation_is_the_loss_of_the_next_step_and_changes_nothing(stage, precision):
    batch, *_ = gpt_batches(1, size=7)
    engine, _ = trained(gpt(), [batch], stage=stage, world_size=3, precision=precision)
    before, held = engine.optimizer.weights_sha256(), engine.ledger.current_bytes()
    engine.world.log.clear()
    loss = engine.evaluate(*batch)
    assert engine.world.log.elements_sent("param", "grad") == 0
    assert engine.ledger.current_bytes() == held
    assert engine.optimizer.weights_sha256() == before
    assert engine.train_step(*batch).loss == loss


def test_the_callers_batch_is_left_as_it_is():
    model = mlp()
    for world_size in (1, 3, 5):
        ((inputs, targets),) = mlp_batches(model, 1, size=15)
        kept = inputs.copy(), targets.copy()
        trained(model, [(inputs, targets)], world_size=world_size)
        np.testing.assert_array_equal(inputs, kept[0])
        np.testing.assert_array_equal(targets, kept[1])


def test_initial_parameters_are_drawn_from_the_seed_or_given():
    hashes = {
        Engine(gpt(), stage=stage, world_size=world_size, seed=3).optimizer.weights_sha256()
        for stage in STAGES
        for world_size in (1, 4)
    }
    hashes.add(Engine(gpt(), params=gpt().init(3)).optimizer.weights_sha256())
    assert len(hashes) == 1
    assert Engine(gpt(), seed=4).optimizer.weights_sha256() not in hashes


# --- which layers are gathered together -----------------------------------------------------------


def test_layers_are_grouped_by_model_block_sublayer_or_by_name():
    model = gpt()
    by_kind = {
        name: {unit: [layer.name for layer in layers] for unit, layers in found.items()}
        for name, found in ((name, group_layers(model, units)) for name, units in UNITS.items())
    }
    layers = [layer.name for layer in model.layers]
    assert by_kind["model"] == {"model": layers}
    assert by_kind["sublayer"] == {name: [name] for name in layers}
    assert by_kind["block"] == {name: list(members) for name, members in model.blocks}
    assert by_kind["lists"] == {"+".join(names): list(names) for names in STRADDLING}


@pytest.mark.parametrize(
    ("units", "words"),
    [
        ("layer", "unknown units 'layer'; choose model, block, sublayer, or lists of layer names"),
        ([["layers.0"]], "every layer exactly once; layers are layers.0, layers.1, .*got layers.0"),
        ([["layers.0", "layers.1"], ["layers.1", "layers.2"]], "every layer exactly once"),
        ([["layers.0", "layers.1", "layers.2", "head"]], "every layer exactly once; .*head"),
        ([], "every layer exactly once"),
    ],
)
def test_a_grouping_that_does_not_fit_the_model_is_refused(units, words):
    with pytest.raises(UsageError, match=words):
        Engine(mlp(), units=units)


@by_stage
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_batch_that_does_not_fit_is_refused_and_changes_nothing(stage, world_size):
    engine = Engine(gpt(), stage=stage, world_size=world_size)
    ((inputs, targets),) = gpt_batches(1, size=6)
    before, held = engine.optimizer.weights_sha256(), engine.ledger.current_bytes()
    for call in (engine.train_step, engine.evaluate):
        with pytest.raises(UsageError, match="6 inputs but 5 targets"):
            call(inputs, targets[:5])
        words = (
            f"batch of 1 leaves ranks of {world_size} without a sample; .* at least {world_size}"
        )
        with pytest.raises(UsageError, match=words):
            call(inputs[:1], targets[:1])
    assert engine.optimizer.weights_sha256() == before
    assert engine.ledger.current_bytes() == held
    assert engine.train_step(inputs, targets).result.applied
