"""Failure kinds C: accumulation and buckets."""

import numpy as np
import pytest

from naive_training import in_threads
from own_model import full_state
from tiny import STAGES
from zero_nb.config import UsageError
from zero_nb.theory.memory import model_state_bytes
from zero_nb.theory.traffic import elements_per_step
from zero_nb.train.buckets import GradientBuckets
from zero_nb.train.optim import SGD, AdamW
from zero_nb.train.optimizer import ZeROOptimizer

F32 = np.float32
by_stage = pytest.mark.parametrize("stage", STAGES)
by_way = pytest.mark.parametrize(
    ("stage", "every"), [(0, None), (0, True), (1, None), (2, None), (3, None), (3, False)]
)
by_buckets = pytest.mark.parametrize(
    ("bucket", "overlap"), [(None, False), (1, False), (4, True), (10**9, False), (10**9, True)]
)


def rows(*values):
    """One row a rank."""
    return np.array([np.atleast_1d(value) for value in values], F32)


@by_way
@by_buckets
def test_C1_every_micro_batch_is_reduced_the_last_one_too(stage, every, bucket, overlap):
    """Two ranks, two micro-batches, samples (1, 3) and (5, 7): the mean of all four."""
    opt = ZeROOptimizer(
        {"w": np.zeros(1, F32)}, stage=stage, world_size=2, micro_batches=2, rule=SGD(lr=1.0),
        reduce_every_micro_batch=every, reduce_bucket_size=bucket, overlap_comm=overlap,
    )  # fmt: skip
    for micro in (rows(1, 5), rows(3, 7)):
        opt.backward({"w": micro / 4})
    np.testing.assert_array_equal(opt.gradients()["w"], [4])
    opt.step()
    with opt.gathered_parameters() as used:
        np.testing.assert_array_equal(used["w"], rows(-4, -4))


@by_stage
@by_buckets
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_C3_a_missing_gradient_leaves_its_place_in_the_flat_buffer(
    stage, bucket, overlap, world_size
):
    opt = ZeROOptimizer(
        {"a": np.zeros(2, F32), "b": np.zeros(3, F32), "c": np.zeros(1, F32)},
        stage=stage, world_size=world_size, rule=SGD(lr=1.0),
        reduce_bucket_size=bucket, overlap_comm=overlap,
    )  # fmt: skip
    share = np.ones((world_size, 1), F32) / world_size
    opt.backward({"a": share * F32([1, 1]), "b": None, "c": share * F32(9)})
    gradient = np.concatenate(list(opt.gradients().values()))
    np.testing.assert_allclose(gradient, [1, 1, 0, 0, 0, 9], rtol=1e-6)
    assert np.all(gradient[2:5] == 0)
    opt.step()
    weights = opt.weights()
    np.testing.assert_allclose(weights["a"], [-1, -1], rtol=1e-6)
    np.testing.assert_array_equal(weights["b"], np.zeros(3))
    np.testing.assert_allclose(weights["c"], [-9], rtol=1e-6)


@by_way
@pytest.mark.parametrize("one_unit", [True, False])
def test_C4_an_unused_parameter_is_left_out_of_the_step_whole(stage, every, one_unit):
    """The policy: value, moments and step count unchanged, no decay; the norm does not see it."""
    names = ("first", "unused", "last")
    opt = ZeROOptimizer(
        {name: np.full(3, 2, F32) for name in names}, stage=stage, world_size=2,
        rule=AdamW(lr=0.5, weight_decay=0.1), max_grad_norm=100.0, reduce_every_micro_batch=every,
        units=None if one_unit else {name: [name] for name in names},
    )  # fmt: skip
    used = np.full((2, 3), 1.5, F32)
    for step in range(2):
        opt.backward({"first": used, "unused": None, "last": used})
        result = opt.step()
        # Six elements of 3 each: sqrt(6 * 9).
        assert result.grad_norm == pytest.approx(54**0.5, rel=2.0**-24)
        np.testing.assert_array_equal(opt.weights()["unused"], np.full(3, 2, F32))
        assert all(np.all(moment == 0) for moment in full_state(opt)["unused"])
        assert opt.rule.steps == {"first": step + 1, "unused": 0, "last": step + 1}
    # Its first real step is Adam's first: the bias correction is that of step 1.
    opt.backward(dict.fromkeys(names, used))
    opt.step()
    assert opt.rule.steps["unused"] == 1
    want = 2 * (1 - 0.5 * 0.1) - 0.5
    np.testing.assert_allclose(opt.weights()["unused"], np.full(3, want), rtol=1e-6)


@by_stage
def test_C5_ranks_may_use_different_parameters(stage):
    """Rank 0 uses a and b, rank 1 only a: each in its own thread, so a wrong count would hang."""

    def work(world):
        opt = ZeROOptimizer(
            {"a": np.zeros(3, F32), "b": np.zeros(2, F32)}, stage=stage, world=world,
            rule=SGD(lr=1.0), units={"a": ["a"], "b": ["b"]},
        )  # fmt: skip
        b = np.full((1, 2), 6, F32) if world.ranks[0] == 0 else None
        opt.backward({"a": np.full((1, 3), 1, F32), "b": b})
        opt.step()
        return opt.weights(), [(t.collective, t.elements_sent) for t in world.log.transfers]

    (weights_0, log_0), (weights_1, log_1) = in_threads(2, 1, work)
    assert log_0 == log_1
    for weights in (weights_0, weights_1):
        np.testing.assert_array_equal(weights["a"], np.full(3, -2))
        np.testing.assert_array_equal(weights["b"], np.full(2, -6))


@by_stage
def test_C5_a_shard_of_zeros_is_not_an_unused_parameter(stage):
    """Used, but the gradient is zero on rank 0's shard, or everywhere: decay and count go on."""
    for grad in ([0, 0, 0, 5], [0, 0, 0, 0]):
        opt = ZeROOptimizer(
            {"w": np.ones(4, F32)}, stage=stage, world_size=2,
            rule=AdamW(lr=1.0, weight_decay=0.5, betas=(0.0, 0.0)),
        )  # fmt: skip
        opt.backward({"w": rows(grad, grad)})
        opt.step()
        assert opt.rule.steps["w"] == 1
        moved = [0.5 - (g > 0) for g in grad]
        np.testing.assert_allclose(opt.weights()["w"], moved, rtol=1e-6)


@by_way
@by_buckets
@pytest.mark.parametrize("precision", ["bf16", "fp16", "bf16-fp32-grads", "bf16-both-grads"])
def test_C7_a_fresh_16_bit_gradient_meets_an_accumulated_one(
    stage, every, bucket, overlap, precision
):
    opt = ZeROOptimizer(
        {"p": np.zeros(3, F32), "q": np.zeros(2, F32)}, stage=stage, world_size=2,
        micro_batches=2, precision=precision, rule=SGD(lr=1.0), reduce_every_micro_batch=every,
        reduce_bucket_size=bucket, overlap_comm=overlap, units={"p": ["p"], "q": ["q"]},
    )  # fmt: skip
    scale = opt.loss_scale / 1024  # small integers: exact in every format
    for p in (None, np.full((2, 3), 0.5, F32)):
        opt.backward({"p": None if p is None else p * F32(scale), "q": np.full((2, 2), scale, F32)})
    opt.step()
    np.testing.assert_array_equal(opt.weights()["p"], np.full(3, -1 / 1024))
    np.testing.assert_array_equal(opt.weights()["q"], np.full(2, -4 / 1024))


def test_C9_gradients_are_sharded_while_they_are_accumulated():
    """26 billion parameters in bf16 on 16 ranks: 3.25 GB, not 52."""
    assert model_state_bytes(1, 16, 26 * 10**9).grad == 52 * 10**9
    assert model_state_bytes(2, 16, 26 * 10**9).grad == 3_250_000_000
    assert model_state_bytes(3, 16, 26 * 10**9).grad == 3_250_000_000


@pytest.mark.parametrize(
    ("stage", "every", "share"),
    [(0, None, 1), (0, True, 1), (1, None, 1), (2, None, 16), (3, None, 16), (3, False, 1)],
)
def test_C9_measured_after_each_micro_batch(stage, every, share):
    """The sum of micro-batches is float32 here: 4 bytes an element that is held."""
    opt = ZeROOptimizer(
        {"w": np.zeros(160, F32)}, stage=stage, world_size=16, precision="bf16", micro_batches=3,
        reduce_every_micro_batch=every,
    )  # fmt: skip
    for _ in range(2):
        opt.backward({"w": np.ones((16, 160), F32)})
        assert opt.ledger.current_bytes("grad") == 4 * 160 // share
        assert opt.ledger.current_bytes("bucket") == opt.ledger.current_bytes("workspace") == 0


def test_C10_holding_whole_gradients_is_refused_where_they_are_sharded_at_once():
    params = {"w": np.zeros(4, F32)}
    for k in (1, 4):
        with pytest.raises(UsageError, match=r"stage 2 cannot.*no_sync is illegal; use stage 1"):
            ZeROOptimizer(params, stage=2, micro_batches=k, reduce_every_micro_batch=False)
        with pytest.raises(UsageError, match=r"stage 1 cannot.*stage 2 reduces every micro-batch"):
            ZeROOptimizer(params, stage=1, micro_batches=k, reduce_every_micro_batch=True)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_C10_stage_3_may_hold_whole_gradients_at_the_price_of_their_memory(k):
    numel, world_size = 64, 4

    def run(every):
        opt = ZeROOptimizer(
            {"w": np.zeros(numel, F32)}, stage=3, world_size=world_size, micro_batches=k,
            reduce_every_micro_batch=every, rule=SGD(lr=1.0),
        )  # fmt: skip
        opt.world.log.clear()
        opt.ledger.begin_step()
        for _ in range(k):
            for _ in range(2):  # gathered in forward and in backward
                opt.unshard(opt.units[0])
                opt.reshard(opt.units[0])
            opt.backward({"w": np.ones((world_size, numel), F32)})
        opt.step()
        np.testing.assert_array_equal(opt.weights()["w"], np.full(numel, -k * world_size))
        return opt.world.log.elements_sent(), opt.ledger.largest_bytes["grad"]

    psi = numel * (world_size - 1) // world_size
    sent, held = run(None)
    sent_whole, held_whole = run(False)
    assert (sent, sent_whole) == (3 * k * psi, (2 * k + 1) * psi)
    assert sent == elements_per_step(3, world_size, numel, micro_batches=k)
    assert sent_whole == elements_per_step(3, world_size, numel, micro_batches=k, no_sync=True)
    if k > 1:  # Ψ elements in float32, besides the shard that comes of them at the end
        assert held_whole >= 4 * numel > held


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("bucket", "sizes", "messages"),
    [
        (16, [16], 1),  # exactly full
        (16, [16, 16], 2),
        (16, [8, 8, 8, 8], 2),
        (16, [4, 12, 16, 0, 16], 3),
        (16, [50], 4),  # oversized: cut
        (16, [0], 0),
        (1, [2], 1),  # a bucket holds at least one element a rank
        (64, [3], 1),
    ],
)
def test_C11_an_exactly_full_bucket_is_sent_and_so_is_the_rest(
    stage, overlap, bucket, sizes, messages
):
    names = [f"p{i}" for i in range(len(sizes))]
    opt = ZeROOptimizer(
        {name: np.zeros(n, F32) for name, n in zip(names, sizes, strict=True)},
        stage=stage, world_size=2, rule=SGD(lr=1.0), reduce_bucket_size=bucket,
        overlap_comm=overlap, units={name: [name] for name in names},
    )  # fmt: skip
    opt.world.log.clear()
    grads = {n: np.arange(1, s + 1, dtype=F32) for n, s in zip(names, sizes, strict=True)}
    opt.backward({name: np.stack([grad] * 2) for name, grad in grads.items()})
    sent = [t for t in opt.world.log.transfers if t.purpose == "grad"]
    if bucket <= sum(-(-size // 2) * 2 for size in sizes):
        assert len(sent) == messages
    opt.step()
    for name, grad in grads.items():
        np.testing.assert_array_equal(opt.weights()[name], -2 * grad)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_C14_a_buffer_is_not_filled_again_before_its_reduction_has_read_it(stage, micro_batches):
    """Reduced at the latest moment a real asynchronous reduction could read it."""
    values = (1, 5, 9, 13)
    opt = ZeROOptimizer(
        {f"p{v}": np.zeros(2, F32) for v in values}, stage=stage, world_size=1,
        micro_batches=micro_batches, rule=SGD(lr=1.0), reduce_bucket_size=2, overlap_comm=True,
        units={f"p{v}": [f"p{v}"] for v in values},
    )  # fmt: skip
    opt.ledger.begin_step()
    for _ in range(micro_batches):
        mine = {f"p{v}": np.full((1, 2), v, F32) for v in values}
        opt.backward(mine)
        for grad in mine.values():
            grad[...] = 7777  # the caller's array is the caller's again
    # Two buffers of 2 elements, and never a third; beside them the unit being reduced.
    assert opt.ledger.largest_bytes["bucket"] == 3 * 2 * 4
    opt.step()
    for v in values:
        np.testing.assert_array_equal(opt.weights()[f"p{v}"], np.full(2, -v * micro_batches))


def test_C14_the_bucket_in_flight_is_really_read_late():
    """Else the test above could not fail: right after the second bucket the first has not gone."""
    opt = ZeROOptimizer(
        {"a": np.zeros(2, F32), "b": np.zeros(2, F32)}, stage=2, world_size=1,
        reduce_bucket_size=2, overlap_comm=True, units={"a": ["a"], "b": ["b"]},
    )  # fmt: skip
    buckets, (a, b) = opt.buckets, opt.units
    assert isinstance(buckets, GradientBuckets)
    buckets.reduce_scatter(a, np.full((1, 2), 1, F32))
    assert a.grad is None
    buckets.reduce_scatter(b, np.full((1, 2), 5, F32))
    np.testing.assert_array_equal(a.grad, [[1, 1]])
    assert b.grad is None
    buckets.flush()
    np.testing.assert_array_equal(a.grad, [[1, 1]])
    np.testing.assert_array_equal(b.grad, [[5, 5]])
