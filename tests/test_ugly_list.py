"""The ugly list: one set of parameters that hits most of what went wrong in public systems at once.

0-d, empty, Fortran-ordered, tied three ways, frozen, never used, used by one rank in one
micro-batch, two decay groups that interleave; every stage and order of summing, padding filled
with a sentinel. Compared bit by bit with `naive_training.NaiveOptimizer`, which knows of no unit,
shard or padding.
"""

from functools import cache

import numpy as np
import pytest

from naive_training import NaiveOptimizer
from own_model import (
    bits_of_padding,
    fill_padding,
    full_state,
    given_gradients,
    same_bits,
    same_on_every_rank,
)
from zero_nb.core.precision import FLOAT16, FLOAT32
from zero_nb.train import checkpoint
from zero_nb.train.checkpoint import LAYOUTS
from zero_nb.train.optim import AdamW, ParameterGroup
from zero_nb.train.optimizer import ZeROOptimizer
from zero_nb.train.scaling import DynamicLossScale

WORLD_SIZES = (1, 2, 3, 4, 8)
SENTINEL = 7777.0
F32 = np.float32

SHAPES = {
    "five": (5,),
    "fortran": (3, 4),
    "scalar": (),
    "none": (0,),
    "one": (1,),
    "emb": (7, 3),
    "frozen": (6,),
    "never": (2,),
}
TIED = {"head": "emb", "out": "emb"}
FROZEN = ("frozen",)
UNITS = {
    "embed": ["emb", "five", "none"],  # 26 elements
    "block": ["fortran", "frozen", "scalar", "never"],  # 15 trained, 6 frozen
    "last": ["one", "head", "out"],  # 1 element: with 8 ranks 7 own padding only
}
OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
GROUPS = [  # interleaved, and none of them in parameter order
    (("emb", "never", "fortran"), {}),
    (("one", "five", "scalar", "none"), {"weight_decay": 0.0, "lr": 2e-2}),
]

# Stage, and whether ranks are added first; the stages' own way, then the ways they can be asked.
MICRO_BATCHES_FIRST = [(0, None), (1, None), (3, False)]
RANKS_FIRST = [(2, None), (3, None), (0, True)]


def params():
    rng = np.random.default_rng(11)
    drawn = {name: np.asarray(rng.normal(size=s), np.float32) for name, s in SHAPES.items()}
    drawn["fortran"] = np.asfortranarray(drawn["fortran"])
    assert not drawn["fortran"].flags.c_contiguous
    return drawn


def gradients(world_size, micro_batches, step, scale=1.0):
    """What `backward` is given for each micro-batch of a step."""
    rng = np.random.default_rng([12, world_size, micro_batches, step])
    batches = []
    for micro in range(micro_batches):
        grads = given_gradients(rng, SHAPES, TIED, FROZEN, world_size, scale)
        grads["never"] = None
        # Used by rank 0 alone, in the last micro-batch alone.
        first = np.asarray(grads["one"])[0] if micro == micro_batches - 1 else None
        grads["one"] = [first] + [None] * (world_size - 1)
        batches.append(grads)
    return batches


def optimizer(stage, world_size, micro_batches, every=None, **settings):
    own = params()
    own |= {alias: own[name] for alias, name in TIED.items()}
    return ZeROOptimizer(
        own,
        stage=stage,
        world_size=world_size,
        micro_batches=micro_batches,
        reduce_every_micro_batch=every,
        units=UNITS,
        frozen=FROZEN,
        rule=AdamW(**OPTIONS),
        groups=[ParameterGroup(names, dict(options)) for names, options in GROUPS],
        max_grad_norm=2.0,
        **settings,
    )


def twin(world_size, micro_batches, ranks_first, fmt=FLOAT32):
    return NaiveOptimizer(
        params(), world_size=world_size, micro_batches=micro_batches, ranks_first=ranks_first,
        options=OPTIONS, groups=GROUPS, tied=TIED, frozen=FROZEN, fmt=fmt, max_grad_norm=2.0,
    )  # fmt: skip


@cache
def expected(world_size, micro_batches, ranks_first, steps=3):
    """The twin after some steps, and the norms it saw."""
    naive = twin(world_size, micro_batches, ranks_first)
    norms = [naive.step(gradients(world_size, micro_batches, step))[1] for step in range(steps)]
    return naive, norms


def backward(opt, batches, sentinel=None):
    """All micro-batches of a step; the padding of the gradient held filled after each."""
    for grads in batches:
        opt.backward(grads)
        if sentinel is not None:
            fill_padding(opt, sentinel, ("grad",))


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize(
    ("ways", "ranks_first"),
    [(MICRO_BATCHES_FIRST, False), (RANKS_FIRST, True)],
    ids=["micro-batches first", "ranks first"],
)
@pytest.mark.parametrize("bucket", [None, 7])
def test_the_ugly_list_equals_computers_that_hold_everything(
    ways, ranks_first, world_size, micro_batches, bucket
):
    naive, norms = expected(world_size, micro_batches, ranks_first)
    for stage, every in ways:
        opt = optimizer(
            stage, world_size, micro_batches, every,
            reduce_bucket_size=bucket, overlap_comm=bucket is not None,
        )  # fmt: skip
        fill_padding(opt, SENTINEL)
        before = bits_of_padding(opt)
        for step, norm in enumerate(norms):
            backward(opt, gradients(world_size, micro_batches, step), SENTINEL)
            result = opt.step()
            assert result.applied
            assert result.grad_norm == norm  # to the bit: see [Note: order-free norm]
        same_bits(opt.weights(), naive.weights | {a: naive.weights[n] for a, n in TIED.items()})
        same_bits(full_state(opt), naive.state)
        same_on_every_rank(opt)
        assert opt.rule.steps == naive.steps
        assert opt.rule.steps["never"] == 0
        assert bits_of_padding(opt) == before, "the sentinel changed"


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_the_two_orders_of_summing_differ_in_last_digits_only(world_size):
    """3e-6: a few units in the last place of weights of about 1, after Adam's square root."""
    one, other = expected(world_size, 3, False)[0], expected(world_size, 3, True)[0]
    for name, weights in one.weights.items():
        np.testing.assert_allclose(weights, other.weights[name], rtol=0, atol=3e-6, err_msg=name)
    if world_size > 1:  # they are really different sums
        assert any(np.any(one.state[name][0] != other.state[name][0]) for name in one.trainable)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_what_is_frozen_or_never_used_keeps_its_bits(world_size):
    for stage, every in MICRO_BATCHES_FIRST + RANKS_FIRST:
        opt = optimizer(stage, world_size, 1, every)
        backward(opt, gradients(world_size, 1, 0))
        opt.step()
        weights = opt.weights()
        same_bits({n: weights[n] for n in ("frozen", "never")}, params())
        assert all(np.all(moment == 0) for moment in full_state(opt)["never"])


# --- fp16 with one forced inf --------------------------------------------------------------------


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize(
    ("ways", "ranks_first"),
    [(MICRO_BATCHES_FIRST, False), (RANKS_FIRST, True)],
    ids=["micro-batches first", "ranks first"],
)
def test_the_ugly_list_in_fp16_skips_a_step_with_one_inf_on_all_ranks(
    ways, ranks_first, world_size, micro_batches
):
    naive = twin(world_size, micro_batches, ranks_first, FLOAT16)
    batches = [gradients(world_size, micro_batches, step, scale=1024.0) for step in range(3)]
    # One element, of one rank, in one micro-batch; a shard that other ranks own.
    batches[1][-1]["fortran"][world_size - 1, 0, 1] = np.inf
    applied = [naive.step(grads, 1024.0 / 2 ** (step == 2)) for step, grads in enumerate(batches)]
    assert [done for done, _ in applied] == [True, False, True]
    for stage, every in ways:
        opt = optimizer(
            stage, world_size, micro_batches, every, precision="fp16", reduce_bucket_size=7,
            loss_scale=DynamicLossScale(1024.0, hysteresis=1),
        )  # fmt: skip
        fill_padding(opt, SENTINEL)
        padding = bits_of_padding(opt)
        for step, (done, norm) in enumerate(applied):
            before = snapshot(opt)
            backward(opt, batches[step])
            result = opt.step()
            assert (result.applied, result.grad_norm) == (done, norm)
            assert (snapshot(opt) == before) == (not done)
        assert (opt.steps_done, opt.skipped_steps, opt.loss_scale) == (2, 1, 512.0)
        same_bits(opt.weights(), naive.weights | {a: naive.weights[n] for a, n in TIED.items()})
        same_bits(full_state(opt), naive.state)
        with opt.gathered_parameters() as used:
            want = naive.used()
            same_bits({name: used[name][0] for name in SHAPES}, want)
        same_on_every_rank(opt)
        assert bits_of_padding(opt) == padding, "the sentinel changed"


# --- saved on N ranks, loaded on M --------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("here", "there"), [(1, 8), (3, 2), (4, 3), (8, 4)])
def test_the_ugly_list_saved_on_some_ranks_trains_on_others_to_the_same_weights(
    here, there, layout, precision, tmp_path
):
    """Fed reduced gradients: another number of ranks adds in another order."""
    scale = {"loss_scale": DynamicLossScale(1024.0)} if precision == "fp16" else {}
    ways = MICRO_BATCHES_FIRST + RANKS_FIRST
    saved = optimizer(2, here, 1, precision=precision, **scale)
    fill_padding(saved, SENTINEL)
    backward(saved, gradients(here, 1, 0, scale=saved.loss_scale))
    saved.step()
    checkpoint.save(saved, tmp_path, layout=layout)
    opts = []
    for stage, every in ways:
        opt = optimizer(stage, there, 1, every, precision=precision, **scale)
        fill_padding(opt, SENTINEL)
        padding = bits_of_padding(opt)
        checkpoint.load(opt, tmp_path)
        same_bits(opt.weights(), saved.weights())
        same_bits(full_state(opt), full_state(saved))
        same_on_every_rank(opt)
        assert opt.rule.steps == saved.rule.steps
        assert bits_of_padding(opt) == padding
        opts.append(opt)
    rng = np.random.default_rng(13)
    drawn = given_gradients(rng, SHAPES, {}, FROZEN, 1)
    reduced = {name: np.asarray(grad[0]) for name, grad in drawn.items()}
    for opt in (saved, *opts):
        opt.set_gradients(
            {name: np.asarray(grad * F32(opt.loss_scale)) for name, grad in reduced.items()}
        )
        assert opt.step().applied
        same_bits(opt.weights(), saved.weights())
        same_bits(full_state(opt), full_state(saved))


def snapshot(opt):
    """Every byte that a skipped step must leave alone, of every rank."""
    arrays = [
        array.tobytes()
        for unit in opt.units
        for array in (unit.param, *unit.optim.arrays().values())
    ]
    return arrays, dict(opt.rule.steps), opt.steps_done
