"""ZeROOptimizer as a user meets it: gradients per rank in, parameters out."""

import hashlib

import numpy as np
import pytest

from naive_training import NaiveAdam, in_threads, rounded, stored_as, sum_over_ranks, to_float32
from tiny import PRECISIONS, SHAPES, STAGES, UNITS, own_grads, own_params
from zero_nb.cluster.simulated import SimulatedWorld
from zero_nb.config import UsageError, ZeROConfig, ZeROStage
from zero_nb.core.precision import BFLOAT16, FLOAT32
from zero_nb.train.ledger import Ledger
from zero_nb.train.optim import SGD, AdamW, ParameterGroup
from zero_nb.train.optimizer import ZeROOptimizer

FORMATS = {"fp32": FLOAT32, "bf16": BFLOAT16}
by_stage = pytest.mark.parametrize("stage", STAGES)
by_precision = pytest.mark.parametrize("precision", PRECISIONS)


def optimizer(stage=2, world_size=3, **settings):
    return ZeROOptimizer(
        own_params(), stage=stage, world_size=world_size, **({"units": UNITS} | settings)
    )


def same(got, want):
    assert list(got) == list(want)
    for name, array in want.items():
        assert got[name].dtype == array.dtype
        np.testing.assert_array_equal(got[name], array, err_msg=name)


# --- a step ------------------------------------------------------------------------------------


@by_stage
@by_precision
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_steps_equal_those_of_ranks_that_each_hold_everything(world_size, precision, stage):
    fmt, twin, weights = FORMATS[precision], NaiveAdam(lr=0.1), own_params()
    opt = optimizer(stage, world_size, precision=precision, rule=AdamW(lr=0.1))
    for step in range(3):
        grads = own_grads(world_size, seed=step)
        opt.backward(grads)
        assert opt.step().applied
        summed = {
            name: to_float32(sum_over_ranks(stored_as(grad, fmt), fmt), fmt)
            for name, grad in grads.items()
        }
        twin(weights, summed)
    same(opt.weights(), weights)
    assert opt.steps_done == 3
    with opt.gathered_parameters() as params:
        used = {name: rounded(array, fmt) for name, array in weights.items()}
        same(params, {name: np.stack([array] * world_size) for name, array in used.items()})


@by_stage
def test_gradients_of_ranks_are_summed_not_averaged(stage):
    opt = optimizer(stage, 4, rule=SGD(lr=1.0))
    ones = {name: np.ones((4, *shape), np.float32) for name, shape in SHAPES.items()}
    opt.backward(ones)
    opt.step()
    same(opt.weights(), {name: array - np.float32(4) for name, array in own_params().items()})


def test_what_the_caller_gave_stays_the_callers():
    params, grads = own_params(), own_grads(3)
    kept_params, kept_grads = own_params(), own_grads(3)
    for stage in STAGES:
        for world_size, own in ((3, grads), (1, {n: g[:1] for n, g in grads.items()})):
            opt = ZeROOptimizer(params, stage=stage, world_size=world_size, max_grad_norm=0.1)
            opt.backward(own)
            opt.step()
            same(params, kept_params)
            same(grads, kept_grads)
    params["embed"][...] = 0
    assert np.all(opt.weights()["embed"] != 0)


def test_a_step_tells_what_it_did():
    opt = optimizer(2, 4, rule=SGD(lr=0.5), schedule=lambda step: 1 / (step + 1))
    for factor in (1.0, 0.5):
        opt.backward(own_grads(4))
        held = opt.ledger.held_bytes()
        result = opt.step()
        assert (result.applied, result.grad_norm, result.grad_scale) == (True, None, 1.0)
        assert result.lr == opt.lr == 0.5 * factor
        assert result.held_bytes == held == {"param": 4 * 72, "grad": 4 * 18, "optim": 0}


def test_stage_and_settings_from_a_config_or_from_keywords_are_the_same():
    config = ZeROConfig(stage=3, world_size=4, precision="bf16")
    by_config = ZeROOptimizer(own_params(), config)
    by_keyword = ZeROOptimizer(own_params(), stage="stage_3", world_size=4, precision="bf16")
    for opt in (by_config, by_keyword):
        assert opt.stage.number is ZeROStage.STAGE_3
        assert opt.world.size == 4
        assert opt.recipe.name == "bf16"
    default = ZeROOptimizer(own_params())
    assert (default.stage.number, default.world.size, default.recipe.name) == (1, 1, "fp32")
    assert [unit.name for unit in default.units] == ["model"]
    assert default.numel == optimizer().numel == 69


def test_a_world_and_a_ledger_of_ones_own_are_used():
    world, ledger = SimulatedWorld(3), Ledger(3)
    opt = ZeROOptimizer(own_params(), stage=1, world=world, ledger=ledger)
    assert opt.world is world
    assert opt.ledger is ledger
    assert ledger.current_bytes("param") == 4 * 69
    assert world.log.elements_sent("other") == 69  # the initial broadcast


def test_initial_parameters_are_rank_0s_count_and_not_a_training_transfer():
    opt = optimizer(3, 4)
    purposes = {t.purpose for t in opt.world.log.transfers}
    assert purposes == {"other"}
    assert opt.world.log.elements_sent() == 0


# --- refusals: what was wrong, and nothing is changed ------------------------------------------


def test_settings_are_refused_by_name():
    config, params = ZeROConfig(), own_params()
    world = SimulatedWorld(3)
    cases = [
        ({"config": config, "stage": 2}, "stage given by config and by keyword"),
        ({"config": config, "world_size": 2}, "world_size given by config and by"),
        ({"config": config, "precision": "bf16"}, "precision given by config and by"),
        ({"config": {"stage": 1}}, "config must be a ZeROConfig, got dict"),
        ({"stage": 4}, "no ZeRO stage 4"),
        ({"world_size": 0}, "world_size must be at least 1"),
        ({"precision": "fp8"}, "unknown precision 'fp8'; choose one of fp32, bf16"),
        ({"world": world, "world_size": 4}, r"world_size 4 does not fit SimulatedWorld\(size=3"),
        ({"rule": "adam"}, "rule must be a zero_nb Rule"),
        ({"groups": [ParameterGroup(("embed",))]}, "in no parameter group: scale, bias"),
        ({"max_grad_norm": 0}, "max_grad_norm must be a finite number above 0"),
        ({"units": {"a": ["embed"]}}, "every parameter exactly once; missing: bias"),
    ]
    for settings, words in cases:
        with pytest.raises(UsageError, match=words):
            ZeROOptimizer(params, **settings)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({}, "non-empty mapping of name to float32 array"),
        ([np.ones(3, np.float32)], "non-empty mapping"),
        (None, "non-empty mapping"),
        ({"a": np.ones(3)}, "parameter 'a' must be a float32 array, got float64"),
        ({"a": np.ones(3, np.float32), "b": [1.0]}, "parameter 'b' must be .* got list"),
        ({"a": np.ones(3, np.dtype(np.float32).newbyteorder())}, "parameter 'a' must be"),
        ({"a": np.ones(3, np.uint16)}, "parameter 'a' must be a float32 array, got uint16"),
    ],
)
def test_parameters_that_do_not_fit_are_refused(params, words):
    with pytest.raises(UsageError, match=words):
        ZeROOptimizer(params)


def wrong_gradients():
    """Gradients that do not fit `SHAPES` on three ranks, and what the error must say."""
    good = own_grads(3)
    missing = {name: grad for name, grad in good.items() if name != "bias"}
    return {
        "missing": (missing, "missing gradients: bias"),
        "unknown": (good | {"tail": good["bias"]}, "unknown or frozen gradients: tail"),
        "no rank axis": (
            good | {"embed": good["embed"][0]},
            r"'embed' must be float32 \(3, 5, 7\)",
        ),
        "two ranks": (good | {"bias": good["bias"][:2]}, r"'bias' must .*\(3, 3\), one row a rank"),
        "transposed": (good | {"embed": good["embed"].swapaxes(1, 2)}, r"got float32 \(3, 7, 5\)"),
        "float64": (good | {"head": good["head"].astype(np.float64)}, "'head' must .* got float64"),
        "foreign": (
            good | {"head": good["head"].astype(good["head"].dtype.newbyteorder())},
            "'head' must be float32",
        ),
        "numbers": (good | {"scale": [1.0, 2.0, 3.0]}, r"'scale' must be float32 \(\)"),
        "short list": (good | {"scale": [None]}, "'scale' is a list of 1; one entry a hosted rank"),
        "text": (good | {"scale": "none"}, r"'scale' must be float32 \(3,\)"),
    }


@by_stage
@pytest.mark.parametrize("what", wrong_gradients())
def test_gradients_that_do_not_fit_are_refused_before_any_is_taken(stage, what):
    grads, words = wrong_gradients()[what]
    opt = optimizer(stage)
    before, logged = opt.weights_sha256(), len(opt.world.log)
    with pytest.raises(UsageError, match=words):
        opt.backward(grads)
    assert len(opt.world.log) == logged
    assert opt.ledger.current_bytes("grad") == opt.ledger.current_bytes("bucket") == 0
    with pytest.raises(UsageError, match="the gradient of 0 of 1 micro-batches"):
        opt.step()
    assert opt.weights_sha256() == before
    opt.backward(own_grads(3))
    assert opt.step().applied


@by_stage
def test_a_second_backward_before_the_step_is_refused_and_the_first_one_kept(stage):
    opt = optimizer(stage)
    opt.backward(own_grads(3))
    with pytest.raises(
        UsageError,
        match=r"already holds a gradient of every micro-batch.*call step\(\) or zero_grad",
    ):
        opt.backward(own_grads(3, seed=9))
    opt.step()
    once = optimizer(stage)
    once.backward(own_grads(3))
    once.step()
    assert opt.weights_sha256() == once.weights_sha256()


@by_stage
def test_a_step_without_gradients_is_refused_and_counts_nothing(stage):
    opt = optimizer(stage)
    before = opt.weights_sha256()
    with pytest.raises(UsageError, match="0 of 1 micro-batches; run the backward passes before"):
        opt.step()
    assert (opt.steps_done, opt.weights_sha256()) == (0, before)
    fresh = optimizer(stage)
    for chosen in (opt, fresh):
        chosen.backward(own_grads(3))
        chosen.step()
    assert opt.weights_sha256() == fresh.weights_sha256()  # Adam's step count is 1 in both


@by_stage
def test_zero_grad_drops_gradients_and_their_memory(stage):
    opt = optimizer(stage)
    opt.zero_grad()  # without any is fine
    opt.backward(own_grads(3, seed=9))
    opt.zero_grad()
    assert opt.ledger.current_bytes("grad") == 0
    opt.backward(own_grads(3))
    opt.step()
    fresh = optimizer(stage)
    fresh.backward(own_grads(3))
    fresh.step()
    assert opt.weights_sha256() == fresh.weights_sha256()


# --- reading ------------------------------------------------------------------------------------


@by_stage
@by_precision
def test_initial_weights_come_back_unrounded_in_parameter_order(stage, precision):
    for world_size in (1, 2, 8):
        opt = optimizer(stage, world_size, precision=precision)
        same(opt.weights(), own_params())


@by_stage
def test_the_hash_is_over_little_endian_weights_without_padding_in_parameter_order(stage):
    opt = optimizer(
        stage, 8, units={"late": ["head", "bias"], "early": ["empty", "scale", "embed"]}
    )
    content = b"".join(array.astype("<f4").tobytes() for array in own_params().values())
    assert opt.weights_sha256() == hashlib.sha256(content).hexdigest()


def test_weights_are_copies():
    opt = optimizer(0, 1)
    for array in opt.weights().values():
        array[...] = 0
    same(opt.weights(), own_params())


@by_stage
@by_precision
def test_gathered_parameters_are_whole_read_only_and_given_back(stage, precision):
    opt = optimizer(stage, precision=precision)
    current = opt.ledger.current_bytes()
    opt.world.log.clear()
    with opt.gathered_parameters() as params:
        assert list(params) == list(SHAPES)
        for name, array in params.items():
            assert (array.dtype, array.shape) == (np.float32, (3, *SHAPES[name]))
            want = rounded(own_params()[name], FORMATS[precision])
            np.testing.assert_array_equal(array, np.stack([want] * 3))
            with pytest.raises(ValueError, match="read-only"):
                array[...] = 0
    del params, array
    assert opt.ledger.current_bytes() == current
    assert opt.world.log.elements_sent("param", "grad") == 0
    assert (opt.world.log.elements_sent("other") > 0) == (stage == 3)


@by_stage
def test_gathered_parameters_are_given_back_after_an_error_and_training_goes_on(stage):
    opt = optimizer(stage)
    current = opt.ledger.current_bytes()

    def interrupted():
        with opt.gathered_parameters():
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        interrupted()
    assert opt.ledger.current_bytes() == current
    opt.backward(own_grads(3))
    opt.step()
    with opt.gathered_parameters() as params:  # not what was gathered before the step
        same(params, {name: np.stack([array] * 3) for name, array in opt.weights().items()})


def test_partition_of_finds_a_parameter_on_a_rank():
    opt = optimizer(2, 4)
    part = opt.partition_of("scale", 3)  # the last of 36 elements, 9 a rank
    assert (part.offset, part.length, part.shard_offset, part.unit.name) == (0, 1, 8, "first")
    assert part.values().tolist() == [own_params()["scale"]]
    assert [opt.partition_of("scale", rank).length for rank in range(4)] == [0, 0, 0, 1]
    with pytest.raises(UsageError, match="no parameter 'tail'; there are embed, scale, bias"):
        opt.partition_of("tail", 0)
    with pytest.raises(ValueError, match="do not exist at world_size 4"):
        opt.partition_of("scale", 4)


# --- the same in every world -------------------------------------------------------------------


@by_stage
@by_precision
@pytest.mark.parametrize(("size", "hosted"), [(4, 1), (4, 2), (3, 1), (2, 1)])
def test_a_world_that_hosts_some_ranks_only_gives_the_same_bits(size, hosted, stage, precision):
    """What MPI will rely on: no stage or optimizer code sees more than its own ranks' rows."""

    def work(world):
        opt = ZeROOptimizer(
            own_params(), stage=stage, world=world, units=UNITS, precision=precision,
            max_grad_norm=1.0,
        )  # fmt: skip
        norms = []
        for step in range(2):
            grads = own_grads(size, seed=step)
            opt.backward({name: grad[list(world.ranks)] for name, grad in grads.items()})
            held = opt.ledger.held_bytes()
            norms.append(opt.step().grad_norm)
        return opt.weights_sha256(), tuple(norms), held, opt.world.log.total_elements

    results = in_threads(size, hosted, work)
    assert all(result == results[0] for result in results)
    alone = work(SimulatedWorld(size))
    assert results[0] == alone


def test_rank_0s_initial_parameters_reach_the_ranks_that_drew_others():
    def work(world):
        params = own_params()
        for array in params.values():
            array += world.ranks[0]
        return ZeROOptimizer(params, stage=3, world=world).weights()

    for weights in in_threads(3, 1, work):
        same(weights, own_params())
