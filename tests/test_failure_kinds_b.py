"""Failure kinds B: averaging. Here the mean is in the loss and collectives only sum, in float32."""

import numpy as np
import pytest

from naive_training import in_threads
from tiny import STAGES, mlp, mlp_batches
from zero_nb.cluster.simulated import SimulatedWorld
from zero_nb.core.precision import BFLOAT16, FLOAT16
from zero_nb.train.engine import Engine
from zero_nb.train.optim import SGD
from zero_nb.train.optimizer import ZeROOptimizer
from zero_nb.train.scaling import DynamicLossScale

F32 = np.float32
by_stage = pytest.mark.parametrize("stage", STAGES)


def everywhere(world_size, value, fmt):
    """The same number on every rank, as stored."""
    return fmt.round(np.full((world_size, world_size), value, F32))


def both_sums(world, bits, fmt):
    """The sum as all_reduce and as reduce_scatter give it, every element."""
    scattered = fmt.widen(world.reduce_scatter(bits, fmt=fmt))
    reduced = fmt.widen(world.all_reduce(bits.copy(), fmt=fmt))
    assert np.all(scattered == scattered[0])
    assert np.all(reduced == scattered[0])
    return float(scattered[0, 0])


def test_B1_sums_of_float16_stay_in_range_and_are_rounded_once():
    """Divide by 32, sum, divide by 32: 100, where a running float16 sum has 107.125."""
    world = SimulatedWorld(1024)
    for value, mean in ((100.0, 100.0), (3e-5, 3.0517578125e-05)):
        total = both_sums(world, everywhere(1024, value / 32, FLOAT16), FLOAT16)
        assert total / 32 == mean
    running = np.float16(0)
    for _ in range(1024):
        running += np.float16(100 / 32)
    assert float(running) / 32 == 107.125  # what a sum in the stored format gives


@by_stage
@pytest.mark.parametrize("gradient", [100.0, 3e-5])
def test_B1_the_mean_over_many_ranks_neither_overflows_nor_vanishes(stage, gradient):
    """1,024 ranks in fp16. The mean is in the loss; the loss scale lifts what would underflow."""
    scale = 65536.0 if gradient < 1 else 64.0
    opt = ZeROOptimizer(
        {"w": np.zeros(1, F32)}, stage=stage, world_size=1024, precision="fp16",
        rule=SGD(lr=1.0), loss_scale=DynamicLossScale(scale),
    )  # fmt: skip
    opt.backward({"w": np.full((1024, 1), gradient / 1024 * opt.loss_scale, F32)})
    assert opt.step().applied
    # Two roundings to float16, of a rank's share and of the sum: 2 * 2**-11.
    assert float(opt.weights()["w"][0]) == pytest.approx(-gradient, rel=2.0**-10)


@pytest.mark.parametrize("fmt", [BFLOAT16, FLOAT16], ids=lambda fmt: fmt.name)
def test_B2_many_small_terms_are_all_counted(fmt):
    """512 times 1.0 in bfloat16: a running sum stalls at 256."""
    total = both_sums(SimulatedWorld(512), everywhere(512, 1.0, fmt), fmt)
    assert (total, total / 512) == (512.0, 1.0)


@by_stage
def test_B2_a_mean_over_many_ranks_is_right_in_bf16(stage):
    opt = ZeROOptimizer(
        {"w": np.zeros(1, F32)}, stage=stage, world_size=512, precision="bf16", rule=SGD(lr=1.0)
    )
    opt.backward({"w": np.full((512, 1), 1 / 512, F32)})
    opt.step()
    assert float(opt.weights()["w"][0]) == -1.0


@by_stage
def test_B4_tokens_count_the_same_however_many_a_rank_or_a_micro_batch_has(stage):
    """Rank 0 has tokens with gradients 1, 2, 3, rank 1 one with 10: the mean is 4, not 6."""
    shares = [np.array([[1, 2, 3]], F32).sum() / 4, np.array([10], F32).sum() / 4]
    opt = ZeROOptimizer({"w": np.zeros(1, F32)}, stage=stage, world_size=2, rule=SGD(lr=1.0))
    opt.backward({"w": np.array(shares, F32)[:, None]})
    opt.step()
    assert float(opt.weights()["w"][0]) == -4.0
    # The same four tokens as micro-batches of three and one.
    opt = ZeROOptimizer(
        {"w": np.zeros(1, F32)}, stage=stage, world_size=1, micro_batches=2, rule=SGD(lr=1.0)
    )
    for share in shares:
        opt.backward({"w": np.full((1, 1), share, F32)})
    opt.step()
    assert float(opt.weights()["w"][0]) == -4.0


@by_stage
@pytest.mark.parametrize(("world_size", "micro_batches"), [(2, 1), (3, 1), (1, 3), (2, 2), (3, 2)])
def test_B4_an_uneven_batch_trains_like_one_rank_that_has_all_of_it(
    stage, world_size, micro_batches
):
    """Seven samples: 3 and 4, 2, 2 and 3, ... a mean of means would weigh them unlike."""
    model = mlp()
    ((inputs, targets),) = mlp_batches(model, 1, size=7)
    rule = SGD(lr=1.0)
    alone = Engine(model, stage=0, world_size=1, rule=rule)
    whole = alone.train_step(inputs, targets)
    engine = Engine(
        model, stage=stage, world_size=world_size, micro_batches=micro_batches, rule=rule
    )
    report = engine.train_step(inputs, targets)
    assert report.loss == pytest.approx(whole.loss, rel=1e-6)
    for name, weights in alone.optimizer.weights().items():
        # The same terms in another order: some units in the last place of a sum of seven.
        got = engine.optimizer.weights()[name]
        np.testing.assert_allclose(got, weights, rtol=0, atol=1e-6, err_msg=name)


@by_stage
def test_B7_a_rank_without_a_gradient_counts_in_the_mean_and_gets_it(stage):
    def work(world):
        opt = ZeROOptimizer({"w": np.zeros(3, F32)}, stage=stage, world=world, rule=SGD(lr=1.0))
        mine = np.full((1, 3), 4 / 2, F32) if world.ranks[0] == 0 else None
        opt.backward({"w": mine})
        opt.step()
        with opt.gathered_parameters() as used:
            return used["w"].copy(), opt.weights()["w"]

    for used, weights in in_threads(2, 1, work):
        np.testing.assert_array_equal(used, np.full((1, 3), -2, F32))
        np.testing.assert_array_equal(weights, np.full(3, -2, F32))


@by_stage
@pytest.mark.parametrize("bucket", [None, 2])
def test_B7_in_one_process_too_and_its_reduced_gradient_is_kept(stage, bucket):
    opt = ZeROOptimizer(
        {"w": np.zeros(3, F32), "other": np.zeros(1, F32)}, stage=stage, world_size=2,
        rule=SGD(lr=1.0), reduce_bucket_size=bucket,
    )  # fmt: skip
    opt.backward({"w": [np.full(3, 4 / 2, F32), None], "other": np.zeros((2, 1), F32)})
    np.testing.assert_array_equal(opt.gradients()["w"], np.full(3, 2, F32))
    opt.step()
    with opt.gathered_parameters() as used:
        np.testing.assert_array_equal(used["w"], np.full((2, 3), -2, F32))
