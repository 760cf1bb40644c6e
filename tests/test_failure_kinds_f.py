"""Failure kinds F: precision and master weights."""

import numpy as np
import pytest

from tiny import STAGES
from zero_nb.core import flat
from zero_nb.core.precision import BFLOAT16, FLOAT16, FLOAT32
from zero_nb.train.optim import SGD, AdamW
from zero_nb.train.optimizer import ZeROOptimizer
from zero_nb.train.recipes import RECIPES

F32 = np.float32
by_stage = pytest.mark.parametrize("stage", STAGES)
SIXTEEN_BIT = [name for name, recipe in RECIPES.items() if recipe.param is not FLOAT32]


@by_stage
@pytest.mark.parametrize("precision", SIXTEEN_BIT)
def test_F1_small_updates_add_up_in_the_master(stage, precision):
    """100 updates of 1e-3 from 1: 0.9. Half a step of bfloat16 below 1 is 0.00195 and stalls."""
    opt = ZeROOptimizer(
        {"w": np.ones(3, F32)}, stage=stage, world_size=2, precision=precision, rule=SGD(lr=1e-3)
    )
    grad = np.full((2, 3), 0.5 * opt.loss_scale / 1024, F32)  # 1024: within float16's range
    opt.lr = 1e-3 * 1024
    alone = np.full(3, BFLOAT16.round(np.ones(1, F32))[0], np.uint16)
    for _ in range(100):
        opt.backward({"w": grad})
        opt.step()
        alone = BFLOAT16.round(BFLOAT16.widen(alone) - F32(1e-3))
    np.testing.assert_allclose(opt.weights()["w"], np.full(3, 0.9), rtol=1e-5)
    with opt.gathered_parameters() as used:  # the master rounded once, not 100 times
        np.testing.assert_array_equal(
            used["w"][1], opt.recipe.param.widen(opt.recipe.param.round(opt.weights()["w"]))
        )
    np.testing.assert_array_equal(BFLOAT16.widen(alone), np.ones(3))  # what happens without one


def test_F1_there_is_no_16_bit_recipe_without_a_master():
    assert SIXTEEN_BIT == ["bf16", "bf16-fp32-grads", "bf16-both-grads", "fp16"]
    assert all(RECIPES[name].master for name in SIXTEEN_BIT)


@by_stage
@pytest.mark.parametrize("precision", list(RECIPES))
@pytest.mark.parametrize("rounded_start", [False, True])
def test_F4_what_was_cast_is_what_is_kept(stage, precision, rounded_start):
    """Every array is stored as its recipe says, and a cast at the start reached the master."""
    start = np.array([1.0009765625, 1.001, 3.14159274, 1e-3], F32)
    opt = ZeROOptimizer(
        {"a": start, "b": start[::-1].copy()}, stage=stage, world_size=2, precision=precision,
        rounded_start=rounded_start, rule=AdamW(),
    )  # fmt: skip
    recipe, (unit,) = opt.recipe, opt.units
    assert unit.param.dtype == recipe.param.dtype
    assert all(array.dtype == np.float32 for array in unit.optim.arrays().values())
    assert ("master" in unit.optim.arrays()) == recipe.master
    cast = recipe.param.widen(recipe.param.round(start))
    assert np.any(cast != start) == (recipe.param is not FLOAT32)
    np.testing.assert_array_equal(opt.weights()["a"], cast if rounded_start else start)
    with opt.gathered_parameters() as used:
        for rank in range(2):
            np.testing.assert_array_equal(used["a"][rank], cast)
            np.testing.assert_array_equal(used["b"][rank], cast[::-1])
    opt.backward({name: np.ones((2, 4), F32) for name in "ab"})
    assert unit.grad.dtype == (np.float32 if stage < 2 and recipe.grad is FLOAT32 else
                               recipe.grad.dtype)  # fmt: skip
    np.testing.assert_array_equal(start, np.array([1.0009765625, 1.001, 3.14159274, 1e-3], F32))


def test_F5_one_flat_buffer_takes_one_dtype():
    half = [np.ones(1, np.float16) for _ in range(10)]
    with pytest.raises(TypeError, match=r"one dtype, got \['float16', 'float32'\]; make one"):
        flat.flatten([*half, np.ones(1, F32)], 1)
    assert flat.flatten(half, 1).nbytes == 20


@by_stage
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_F5_mixed_dtypes_lie_in_a_buffer_each(stage, precision, world_size):
    """Ten 16-bit parameters and one in float32: 24 bytes, not 44."""
    names = [f"p{i}" for i in range(11)]
    opt = ZeROOptimizer(
        {name: np.full(1, 1 + 2**-12, F32) for name in names}, stage=stage, world_size=world_size,
        precision=precision, keep_fp32=["p3"], rule=SGD(lr=0.25),
    )  # fmt: skip
    share = world_size if stage == 3 else 1
    wide = -(-1 // world_size) * world_size * 4 // share
    assert opt.ledger.current_bytes("param") == 20 // share + wide
    assert 20 + 4 == 24 == (opt.ledger.current_bytes("param") if world_size == 1 else 24)
    assert {unit.param.dtype for unit in opt.units} == {np.dtype(np.uint16), np.dtype(F32)}
    scale = opt.loss_scale / 1024
    opt.backward({name: np.full((world_size, 1), scale / world_size, F32) for name in names})
    opt.step()
    want = F32(1 + 2**-12) - F32(0.25) * F32(scale / opt.loss_scale)
    with opt.gathered_parameters() as used:
        np.testing.assert_array_equal(used["p3"], np.full((world_size, 1), want))
        fmt = BFLOAT16 if precision == "bf16" else FLOAT16
        rounded = fmt.widen(fmt.round(np.full(1, want, F32)))
        np.testing.assert_array_equal(used["p4"], np.full((world_size, 1), rounded))
    for name in names:
        np.testing.assert_array_equal(opt.weights()[name], [want])
