"""Precision recipes: what each keeps, byte for byte, what it sends, and fp16's loss scale at work.

The table below is written by hand from the papers and documents named in `zero_nb.theory.memory`;
the ledger measures, theory predicts, and all three have to say the same.
"""

import logging

import numpy as np
import pytest

from tiny import STAGES, gpt, gpt_batches, mlp, mlp_batches
from tiny_task import mlp_task
from zero_nb.compare import train_stage
from zero_nb.config import PRECISIONS, UsageError
from zero_nb.core.precision import BFLOAT16, FLOAT16, FLOAT32
from zero_nb.theory import memory, traffic
from zero_nb.train.engine import Engine
from zero_nb.train.optim import SGD, get_rule
from zero_nb.train.optimizer import ZeROOptimizer
from zero_nb.train.recipes import RECIPES, get_recipe
from zero_nb.train.scaling import DynamicLossScale, LossScaleError

BYTES = {  # parameter, gradient, master copy; gradient with several micro-batches; on the wire
    "fp32": (4, 4, 0, 4, 4),
    "bf16": (2, 2, 4, 4, 2),
    "bf16-fp32-grads": (2, 4, 4, 4, 4),
    "bf16-both-grads": (2, 6, 4, 6, 2),
    "fp16": (2, 2, 4, 4, 2),
}
MOMENTS = {"adamw": 8, "adam": 8, "sgd": 0, "momentum": 4}

by_stage = pytest.mark.parametrize("stage", STAGES)
by_precision = pytest.mark.parametrize("precision", PRECISIONS)


def test_the_recipes_are_those_that_can_be_named():
    assert tuple(RECIPES) == PRECISIONS
    assert set(BYTES) == set(PRECISIONS)
    assert set(PRECISIONS) <= set(memory.PRECISIONS)


# --- bytes held ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "optimizer", "each"),
    [
        ("fp32", "adamw", 16),
        ("bf16", "adamw", 16),
        ("bf16-fp32-grads", "adamw", 18),
        ("bf16-both-grads", "adamw", 20),
        ("fp16", "adam", 16),
        ("fp32", "momentum", 12),
        ("fp32", "sgd", 8),
    ],
)
@by_stage
def test_bytes_of_one_parameter_on_one_rank(stage, precision, optimizer, each):
    """No stage saves anything where there is nobody to share with."""
    run, _ = train_stage(
        stage, world_size=1, steps=1, task=mlp_task(), precision=precision, optimizer=optimizer
    )
    assert run.held_total == each * run.numel
    assert sum(run.formula_bytes.values()) == each * run.numel
    assert run.padding_bytes == {"param": 0, "grad": 0, "optim": 0}


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("optimizer", MOMENTS)
@by_precision
def test_held_bytes_are_the_formula_and_padding(precision, optimizer, micro_batches):
    """Three ranks, which divide none of the units but one; largest rank, to the byte."""
    param, grad, master, grad_of_many, _ = BYTES[precision]
    numels, size = (42, 24, 4), 3
    numel, padded = sum(numels), sum(-(-n // size) * size for n in numels)
    each = {
        "param": param,
        "grad": grad if micro_batches == 1 else grad_of_many,
        "optim": master + MOMENTS[optimizer],
    }
    first_stage = {"param": 3, "grad": 2, "optim": 1}  # that shards it
    for stage in STAGES:
        cut = {kind: size if stage >= first else 1 for kind, first in first_stage.items()}
        formula = {kind: each[kind] * numel // cut[kind] for kind in each}
        held = {kind: each[kind] * padded // cut[kind] for kind in each}
        run, engine = train_stage(
            stage, world_size=size, steps=2, task=mlp_task(), precision=precision,
            optimizer=optimizer, micro_batches=micro_batches,
        )  # fmt: skip
        assert [unit.layout.numel for unit in engine.optimizer.units] == list(numels)
        assert run.held_bytes == held
        assert run.formula_bytes == formula
        assert run.padding_bytes == {kind: held[kind] - formula[kind] for kind in held}
        # The ledger itself, between the next backward and its step, on every rank.
        engine.forward_backward(*mlp_batches(engine.model, 1, size=12)[0])
        assert engine.ledger.held_bytes() == held
        for kind, size_bytes in held.items():
            assert engine.ledger.bytes_by_rank(kind) == [size_bytes] * size
        engine.optimizer.zero_grad()
        assert engine.ledger.held_bytes() == held | {"grad": 0}


@by_precision
@by_stage
def test_master_and_moments_of_a_rank_are_float32_and_the_rest_as_the_recipe_says(stage, precision):
    """Which array has which format: the sum alone could be right by accident."""
    recipe = RECIPES[precision]
    engine = Engine(mlp(), stage=stage, world_size=2, precision=precision)
    engine.forward_backward(*mlp_batches(engine.model, 1, size=4)[0])
    for unit in engine.optimizer.units:
        arrays = unit.optim.arrays()
        assert ("master" in arrays) == recipe.master
        assert all(array.dtype == np.float32 for array in arrays.values())
        assert unit.param.dtype == recipe.param.dtype
        low = unit.state.low_grad
        assert (low is not None) == recipe.both_grads
        assert low is None or (low.dtype, low.shape) == (np.uint16, unit.grad.shape)
        assert unit.grad.dtype == np.float32 or recipe.grad.itemsize == 2


# --- what is sent --------------------------------------------------------------------------------


@by_precision
@by_stage
def test_gradients_and_parameters_travel_in_the_recipes_formats(stage, precision):
    engine = Engine(mlp(), stage=stage, world_size=3, precision=precision)
    report = engine.train_step(*mlp_batches(engine.model, 1, size=6)[0])
    log, numels = engine.world.log, [unit.layout.numel for unit in engine.optimizer.units]
    param, _, _, _, wire = BYTES[precision]
    assert log.bytes_sent("grad") == wire * log.elements_sent("grad") > 0
    assert log.bytes_sent("param") == param * log.elements_sent("param")
    assert report.bytes_sent == traffic.bytes_per_step(
        stage, 3, numels, precision, reduce_itemsize=wire
    )


FITTING = [
    ("fp32", "bf16", BFLOAT16), ("fp32", "fp16", FLOAT16), ("fp32", "fp32", FLOAT32),
    ("bf16", "bf16", BFLOAT16), ("bf16-fp32-grads", "bf16", BFLOAT16),
    ("bf16-fp32-grads", "fp16", FLOAT16), ("bf16-fp32-grads", "float32", FLOAT32),
    ("bf16-both-grads", "bf16", BFLOAT16), ("fp16", "float16", FLOAT16),
]  # fmt: skip


@pytest.mark.parametrize(("precision", "reduce_dtype", "wire"), FITTING)
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_reduce_dtype_changes_what_is_sent_and_nothing_that_is_held(
    precision, reduce_dtype, wire, micro_batches
):
    assert get_recipe(precision, reduce_dtype).wire is wire
    hashes = set()
    for stage in STAGES:
        settings = {"stage": stage, "world_size": 3, "precision": precision}
        engine = Engine(mlp(), reduce_dtype=reduce_dtype, micro_batches=micro_batches, **settings)
        plain = Engine(mlp(), micro_batches=micro_batches, **settings)
        batches = mlp_batches(engine.model, 2, size=6)
        for batch in batches:
            report, other = engine.train_step(*batch), plain.train_step(*batch)
        assert report.held_bytes == other.held_bytes
        assert report.elements_sent == other.elements_sent
        log = engine.world.log
        assert log.bytes_sent("grad") == wire.itemsize * log.elements_sent("grad") > 0
        assert log.bytes_sent("param") == plain.world.log.bytes_sent("param")
        hashes.add(engine.optimizer.weights_sha256())
        if wire is RECIPES[precision].wire:
            assert engine.optimizer.weights_sha256() == plain.optimizer.weights_sha256()
        else:
            assert engine.optimizer.weights_sha256() != plain.optimizer.weights_sha256()
    assert len(hashes) == (1 if micro_batches == 1 else 2)  # stages 0 = 1 and 2 = 3


def test_sums_are_in_float32_whatever_the_reduce_dtype():
    """512 ranks send 1.0 in bfloat16, whose running sum would stall at 256."""
    for stage in STAGES:
        opt = ZeROOptimizer(
            {"w": np.zeros(3, np.float32)}, stage=stage, world_size=512, precision="bf16",
            rule=SGD(lr=1.0),
        )  # fmt: skip
        opt.backward({"w": np.ones((512, 3), np.float32)})
        opt.step()
        np.testing.assert_array_equal(opt.weights()["w"], np.full(3, -512, np.float32))


@pytest.mark.parametrize(
    ("precision", "reduce_dtype", "words"),
    [
        ("bf16", "fp32", "float32 does not fit gradients held in bfloat16; .* bf16-fp32-grads"),
        ("bf16", "fp16", "float16 does not fit gradients held in bfloat16"),
        ("fp16", "bf16", "bfloat16 does not fit gradients held in float16"),
        ("fp16", "fp32", "float32 does not fit gradients held in float16"),
        ("bf16-both-grads", "fp32", "float32 .* bf16-fp32-grads"),
        ("fp32", "fp8", "unknown precision 'fp8'; choose one of float32"),
        ("fp8", None, "unknown precision 'fp8'; choose one of fp32, bf16, bf16-fp32-grads, "),
        ("FP32", None, "unknown precision 'FP32'"),
        (None, None, "unknown precision None"),
    ],
)
def test_recipes_that_do_not_exist_or_fit_are_refused(precision, reduce_dtype, words):
    with pytest.raises(UsageError, match=words):
        get_recipe(precision, reduce_dtype)
    if precision is not None:
        with pytest.raises(UsageError, match=words):
            Engine(mlp(), precision=precision, reduce_dtype=reduce_dtype)


# --- where masters start -------------------------------------------------------------------------


@by_stage
@pytest.mark.parametrize(
    ("precision", "fmt"), [("bf16", BFLOAT16), ("fp16", FLOAT16), ("fp32", FLOAT32)]
)
def test_masters_start_unrounded_or_rounded_if_asked(stage, precision, fmt):
    start = mlp().init(0)
    for rounded in (False, True):
        engine = Engine(
            mlp(), stage=stage, world_size=3, precision=precision, rounded_start=rounded
        )
        for name, array in engine.optimizer.weights().items():
            want = fmt.widen(fmt.round(start[name])) if rounded else start[name]
            assert array.tobytes() == want.tobytes()
        with engine.optimizer.gathered_parameters() as used:  # what is computed with: no matter
            for name, array in used.items():
                want = fmt.widen(fmt.round(start[name]))
                assert array[2].tobytes() == want.tobytes()


@pytest.mark.parametrize("precision", [p for p in PRECISIONS if RECIPES[p].master])
def test_a_master_keeps_updates_that_its_16_bit_parameter_cannot_show(precision):
    """1 - 100 x 1e-3 is 0.9; the parameters alone would stay at 1, their next value below is
    0.996 (bfloat16) or 0.9995 (float16)."""
    opt = ZeROOptimizer(
        {"w": np.ones(1, np.float32)}, world_size=2, stage=3, precision=precision,
        rule=SGD(lr=1e-3), loss_scale=DynamicLossScale(1.0) if precision == "fp16" else None,
    )  # fmt: skip
    for _ in range(100):
        opt.backward({"w": np.full((2, 1), 0.5, np.float32)})
        opt.step()
    assert opt.weights()["w"][0] == pytest.approx(0.9, abs=1e-5)
    with opt.gathered_parameters() as used:
        assert used["w"][1, 0] == pytest.approx(0.9, abs=2e-3)


# --- fp16 and its loss scale, through the engine -------------------------------------------------


def fp16(stage=3, world_size=3, *, scale, micro_batches=1, **settings):
    """An engine in fp16 whose loss scale is given, and the calls of its schedule."""
    calls = []

    def schedule(step):
        calls.append(step)
        return 1.0

    engine = Engine(
        gpt(), stage=stage, world_size=world_size, precision="fp16", schedule=schedule,
        micro_batches=micro_batches, rule=get_rule("adamw", lr=1e-2), max_grad_norm=1.0,
        loss_scale=scale, **settings,
    )  # fmt: skip
    return engine, calls


@pytest.mark.parametrize("micro_batches", [1, 2])
@by_stage
def test_a_loss_scale_too_large_skips_steps_until_it_fits(stage, micro_batches, caplog):
    """2^22 times a gradient of about 0.5 is far above 65504; 2^16 times it is not."""
    batches = gpt_batches(12, size=6)
    engine, calls = fp16(
        stage, scale=DynamicLossScale(2.0**22, hysteresis=2), micro_batches=micro_batches
    )
    before, held = engine.optimizer.weights_sha256(), engine.ledger.held_bytes()
    skipped = 0
    with caplog.at_level(logging.WARNING, "zero_nb"):
        for batch in batches:
            report = engine.train_step(*batch)
            if report.result.applied:
                break
            skipped += 1
            # Nothing moved: no weight, no state, no schedule; it was counted and said.
            assert engine.optimizer.weights_sha256() == before
            assert engine.ledger.held_bytes() == held
            assert (report.result.grad_norm, report.result.grad_scale) == (np.inf, 0.0)
            assert calls == []
            assert (engine.optimizer.steps_done, engine.optimizer.skipped_steps) == (0, skipped)
            assert set(engine.optimizer.rule.steps.values()) == {0}
            assert np.isfinite(report.loss)  # the loss itself is not scaled
    assert skipped >= 3
    # The first overflow is forgiven, each other one halves the scale.
    assert report.result.loss_scale == engine.optimizer.loss_scale == 2.0 ** (22 - (skipped - 1))
    assert len(caplog.records) == skipped
    assert "skipped a step on all ranks" in caplog.text
    assert calls == [0]
    assert engine.optimizer.steps_done == 1
    # From here on it is the run that began with this scale and never saw the other batches.
    twin, _ = fp16(
        stage, scale=DynamicLossScale(report.result.loss_scale), micro_batches=micro_batches
    )
    assert twin.train_step(*batches[skipped]).result == report.result
    assert twin.optimizer.weights_sha256() == engine.optimizer.weights_sha256() != before


def test_all_stages_skip_the_same_steps_and_end_with_the_same_weights():
    ends = set()
    for stage in STAGES:
        engine, _ = fp16(stage, scale=DynamicLossScale(2.0**19, growth_interval=3, hysteresis=1))
        reports = [engine.train_step(*batch) for batch in gpt_batches(12, size=6)]
        scales = tuple(report.result.loss_scale for report in reports)
        applied = tuple(report.result.applied for report in reports)
        ends.add((engine.optimizer.weights_sha256(), scales, applied))
    ((_, scales, applied),) = ends
    assert not all(applied)
    assert any(applied)
    assert any(b > a for a, b in zip(scales, scales[1:], strict=False))  # grew, too


@pytest.mark.parametrize(("precision", "bad"), [("fp16", 1e6), ("bf16", np.inf), ("fp32", np.nan)])
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@by_stage
def test_one_sample_of_one_rank_is_enough_for_all_to_skip(stage, precision, bad):
    """In float16 a gradient of 1e6 is infinite; in the others something has to be already."""
    model = mlp()
    ((inputs, targets),) = mlp_batches(model, 1, size=6)
    spoilt = targets.copy()
    spoilt[5] = bad  # rank 2's
    scale = DynamicLossScale(1.0) if precision == "fp16" else None
    engine = Engine(model, stage=stage, world_size=3, precision=precision, loss_scale=scale)
    before = engine.optimizer.weights_sha256()
    assert not engine.train_step(inputs, spoilt).result.applied
    assert engine.optimizer.weights_sha256() == before
    for unit in engine.optimizer.units:
        assert all(np.all(moment == 0) for moment in unit.optim.moments.values())
    assert engine.train_step(inputs, targets).result.applied
    assert (engine.optimizer.steps_done, engine.optimizer.skipped_steps) == (1, 1)


def test_gradients_that_overflow_at_the_floor_end_the_run_with_the_weights_as_they_were():
    model = mlp()
    ((inputs, targets),) = mlp_batches(model, 1, size=6)
    engine = Engine(
        model, stage=2, world_size=3, precision="fp16",
        loss_scale=DynamicLossScale(4.0, hysteresis=1),
    )  # fmt: skip
    before = engine.optimizer.weights_sha256()
    huge = targets + np.float32(1e6)  # gradients of 1e6, beyond 65504 without any scale
    for scale in (4.0, 2.0):
        assert engine.optimizer.loss_scale == scale
        assert not engine.train_step(inputs, huge).result.applied
    with pytest.raises(LossScaleError, match="overflow at the smallest loss scale, 1;"):
        engine.train_step(inputs, huge)
    assert engine.optimizer.weights_sha256() == before
    assert engine.ledger.current_bytes("grad") == engine.ledger.current_bytes("bucket") == 0
    assert engine.train_step(inputs, targets).result.applied


@by_stage
def test_a_loss_scale_saves_gradients_that_float16_cannot_hold(stage):
    """1e-9 is below half of the smallest float16, 3e-8; times 2^16 it is an ordinary number."""
    model = mlp()
    ((inputs, targets),) = mlp_batches(model, 1, size=6)
    start = model.init(0)
    start["layers.2.weight"][...] = 0  # so that the output is 0, and its error the target
    targets = np.full_like(targets, 3e-9)
    moved = {}
    for scale in (1.0, 2.0**16):
        engine = Engine(
            model, stage=stage, world_size=3, precision="fp16", rule=SGD(lr=1e6),
            loss_scale=DynamicLossScale(scale), params=start,
        )  # fmt: skip
        before = engine.optimizer.weights()
        assert engine.train_step(inputs, targets).result.applied
        moved[scale] = max(
            float(np.abs(array - before[name]).max())
            for name, array in engine.optimizer.weights().items()
        )
    assert moved[1.0] == 0.0
    assert moved[2.0**16] > 0.0


@by_stage
def test_the_loss_scale_is_taken_out_of_gradients_and_norms_again(stage):
    """Plain SGD shows it: a scale left in would move weights by 2^4 or 2^12 times too much.

    float16 rounds a gradient to 11 bits whatever its power of two, unless it is below 6e-5, where
    the smaller scale loses some: 2^-11 of a gradient of at most 1, times lr, in two steps.
    """
    batches = gpt_batches(2, size=6)
    plain = Engine(gpt(), stage=stage, world_size=3, rule=SGD(lr=0.1), max_grad_norm=1e9)
    norms = [plain.train_step(*batch).result.grad_norm for batch in batches]
    for scale in (2.0**4, 2.0**12):
        engine = Engine(
            gpt(), stage=stage, world_size=3, precision="fp16", rule=SGD(lr=0.1),
            loss_scale=DynamicLossScale(scale), max_grad_norm=1e9,
        )  # fmt: skip
        results = [engine.train_step(*batch).result for batch in batches]
        assert all(result.grad_scale == 1 / scale for result in results)
        np.testing.assert_allclose([r.grad_norm for r in results], norms, rtol=1e-3)
        wanted = plain.optimizer.weights()
        for name, array in engine.optimizer.weights().items():
            np.testing.assert_allclose(array, wanted[name], rtol=0, atol=2 * 0.1 * 2**-11)
    assert max(np.abs(wanted[n] - a).max() for n, a in gpt().init(0).items()) > 1e-2


def test_fp16_without_a_scale_of_ones_own_gets_a_dynamic_one_and_other_recipes_none():
    for precision in PRECISIONS:
        scaler = Engine(mlp(), precision=precision).optimizer.scaler
        assert isinstance(scaler, DynamicLossScale) == (precision == "fp16")
    assert Engine(mlp(), precision="fp16").optimizer.loss_scale == 65536.0


@by_precision
def test_every_recipe_learns_as_fp32_does(precision):
    """Twelve sentences: the losses of 30 steps, near those of fp32 all the way."""
    ((inputs, targets),) = gpt_batches(1, size=12)
    curves = []
    for recipe in ("fp32", precision):
        engine = Engine(
            gpt(), stage=3, world_size=3, precision=recipe, rule=get_rule("adamw", lr=3e-3),
            loss_scale=DynamicLossScale(2.0**10) if recipe == "fp16" else None,
        )  # fmt: skip
        reports = [engine.train_step(inputs, targets) for _ in range(30)]
        assert all(report.result.applied for report in reports)
        curves.append([report.loss for report in reports])
    assert curves[0][-1] < curves[0][0] - 1
    np.testing.assert_allclose(curves[1], curves[0], atol=0.03)
