"""Rings, hop by hop: what arrives, who sent it, and how near a sum in rank order it is.

The tolerance. A ring adds the ranks in another order (and rounds to the wire format at every
hop), so its sum and the one in rank order differ. Either takes n = W - 1 additions, and each rounds
by at most u times a partial sum, u = 2^-24 for float32, 2^-8 for bfloat16, 2^-11 for float16. So
both lie within ((1 + u)^n - 1) a <= n u (1 + n u) a of the true sum, a = |x_0| + ... + |x_{W-1}|
(Higham, "Accuracy and Stability of Numerical Algorithms", section 4.2), and within twice that of
each other, element by element.
"""

import numpy as np
import pytest

import naive_training as naive
from zero_nb.cluster.ring import (
    ring_all_gather,
    ring_all_reduce,
    ring_broadcast,
    ring_reduce_scatter,
)
from zero_nb.cluster.simulated import SimulatedWorld
from zero_nb.config import UsageError
from zero_nb.core.precision import BFLOAT16, FLOAT16, FLOAT32

WORLD_SIZES = (1, 2, 3, 4, 5, 8, 16)
FORMATS = (FLOAT32, BFLOAT16, FLOAT16)
UNIT = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}

by_world = pytest.mark.parametrize("world_size", WORLD_SIZES)
by_format = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)


def rows(world_size, numel, fmt):
    """One row of normal numbers a rank."""
    x = np.random.default_rng([world_size, numel]).normal(size=(world_size, numel))
    return naive.stored_as(x.astype(np.float32), fmt)


def all_runs(world_size, fmt, numel=None):
    """Every ring collective on the same numbers, with what a World logs for it."""
    numel = 7 * world_size if numel is None else numel
    x, world = rows(world_size, numel, fmt), SimulatedWorld(world_size)
    shards = x[:, : numel // world_size].copy()
    world.reduce_scatter(x, fmt=fmt)
    world.all_reduce(x.copy(), fmt=fmt)
    world.all_gather(shards, fmt=fmt)
    world.broadcast(x.copy(), fmt=fmt)
    runs = [
        ring_reduce_scatter(x, fmt),
        ring_all_reduce(x, fmt),
        ring_all_gather(shards, fmt),
        ring_broadcast(x, 0, fmt),
    ]
    return {t.collective: (run, t) for t, run in zip(world.log.transfers, runs, strict=True)}


@by_world
@by_format
def test_a_ring_sum_is_near_the_sum_in_rank_order(world_size, fmt):
    x = rows(world_size, 11 * world_size, fmt)
    in_order = naive.to_float32(SimulatedWorld(world_size).reduce_scatter(x, fmt=fmt), fmt)
    on_ring = naive.to_float32(ring_reduce_scatter(x, fmt).rows, fmt)
    assert on_ring.shape == in_order.shape
    magnitude = np.abs(naive.to_float32(x, fmt).astype(np.float64)).sum(axis=0)
    nu = (world_size - 1) * UNIT[fmt.name]
    bound = 2 * nu * (1 + nu) * magnitude
    difference = np.abs(on_ring.astype(np.float64) - in_order)
    assert np.all(difference <= bound.reshape(difference.shape))


@by_world
@by_format
def test_chunk_c_is_added_in_rotated_rank_order_and_rounded_at_each_hop(world_size, fmt):
    x = rows(world_size, 5 * world_size, fmt)
    got = ring_reduce_scatter(x, fmt).rows
    for chunk in range(world_size):
        columns = slice(5 * chunk, 5 * chunk + 5)
        ranks = [(chunk + 1 + i) % world_size for i in range(world_size)]
        travelling = x[ranks[0], columns]
        for rank in ranks[1:]:
            total = naive.to_float32(travelling, fmt) + naive.to_float32(x[rank, columns], fmt)
            travelling = naive.stored_as(total, fmt)
        assert got[chunk].tolist() == travelling.tolist()


@by_world
def test_sums_of_whole_numbers_are_exact_so_ring_and_rank_order_agree(world_size):
    x = np.random.default_rng(world_size).integers(-999, 999, (world_size, 3 * world_size))
    x = x.astype(np.float32)
    world = SimulatedWorld(world_size)
    np.testing.assert_array_equal(ring_reduce_scatter(x).rows, world.reduce_scatter(x))
    np.testing.assert_array_equal(ring_all_reduce(x).rows, world.all_reduce(x.copy()))


@by_world
@by_format
def test_all_ranks_agree_to_the_bit_and_with_reduce_scatter(world_size, fmt):
    x = rows(world_size, 3 * world_size, fmt)
    reduced = ring_all_reduce(x, fmt).rows
    assert len({row.tobytes() for row in reduced}) == 1
    np.testing.assert_array_equal(reduced[0], ring_reduce_scatter(x, fmt).rows.reshape(-1))


@by_world
@by_format
def test_gathers_and_broadcasts_copy_bits(world_size, fmt):
    x = rows(world_size, 6, fmt)
    x[0, 0], x[-1, -1] = (np.nan, -0.0) if fmt is FLOAT32 else (0x7FC1, 0x8000)
    gathered = ring_all_gather(x, fmt).rows
    assert gathered.tobytes() == naive.all_gather(x).tobytes()
    for root in {0, world_size - 1, world_size // 2}:
        copied = ring_broadcast(x, root, fmt).rows
        assert copied.tobytes() == np.stack([x[root]] * world_size).tobytes()


@by_world
@by_format
def test_the_world_counts_what_a_ring_sends(world_size, fmt):
    for collective, (run, transfer) in all_runs(world_size, fmt).items():
        sent = [run.elements_sent(rank) for rank in range(world_size)]
        in_bytes = [run.bytes_sent(rank) for rank in range(world_size)]
        assert in_bytes == [n * fmt.itemsize for n in sent]
        if collective == "broadcast":  # the last rank of the ring passes nothing on
            assert sent.pop() == 0
            assert in_bytes.pop() == 0
        assert set(sent) <= {transfer.elements_sent}, collective
        assert set(in_bytes) <= {transfer.bytes_sent}, collective
        if world_size == 1:
            assert run.hops == ()
            assert transfer.elements_sent == 0


@by_world
def test_every_hop_goes_to_the_right_neighbour_and_all_links_work_in_every_step(world_size):
    rounds = {"reduce_scatter": 1, "all_gather": 1, "all_reduce": 2}
    for collective, (run, _) in all_runs(world_size, FLOAT32).items():
        for hop in run.hops:
            assert hop.receiver == (hop.sender + 1) % world_size
        steps = [hop.step for hop in run.hops]
        assert steps == sorted(steps)
        if collective == "broadcast":
            assert steps == list(range(world_size - 1))
            continue
        count = rounds[collective] * (world_size - 1)
        for step in range(count):
            at_once = [hop for hop in run.hops if hop.step == step]
            assert sorted(hop.sender for hop in at_once) == list(range(world_size))
            assert sorted(hop.chunk for hop in at_once) == list(range(world_size))
        assert len(run.hops) == count * world_size
        assert all(run.messages_sent(rank) == count for rank in range(world_size))


@by_world
def test_reduce_hops_add_and_gather_hops_store(world_size):
    runs = all_runs(world_size, FLOAT32)
    assert all(hop.adds for hop in runs["reduce_scatter"][0].hops)
    assert not any(hop.adds for hop in runs["all_gather"][0].hops + runs["broadcast"][0].hops)
    adds = [hop.adds for hop in runs["all_reduce"][0].hops]
    half = world_size * (world_size - 1)
    assert adds == [True] * half + [False] * half


def test_replaying_the_hops_gives_the_rows():
    """What is recorded is what happened: a learner can redo it with chunks on paper."""
    world_size, numel = 4, 12
    x = np.random.default_rng(0).integers(0, 99, (world_size, numel)).astype(np.float32)
    run = ring_all_reduce(x)
    chunks = x.reshape(world_size, world_size, -1).copy()
    for step in range(2 * (world_size - 1)):
        now = [hop for hop in run.hops if hop.step == step]
        sent = [chunks[hop.sender, hop.chunk].copy() for hop in now]
        for hop, message in zip(now, sent, strict=True):
            if hop.adds:
                chunks[hop.receiver, hop.chunk] += message
            else:
                chunks[hop.receiver, hop.chunk] = message
    np.testing.assert_array_equal(chunks.reshape(world_size, numel), run.rows)


@by_format
def test_what_goes_in_is_left_as_it_is_and_what_comes_out_is_separate(fmt):
    x = rows(3, 6, fmt)
    kept = x.copy()
    for run in (ring_reduce_scatter, ring_all_reduce, ring_all_gather):
        result = run(x, fmt).rows
        result[...] = 1
        np.testing.assert_array_equal(x, kept)
    ring_broadcast(x, 1, fmt).rows[...] = 1
    np.testing.assert_array_equal(x, kept)


@pytest.mark.parametrize(
    "ring", [ring_reduce_scatter, ring_all_reduce, ring_all_gather, ring_broadcast]
)
@pytest.mark.parametrize(
    "given",
    [
        np.ones(4, np.float32),
        np.ones((2, 2, 2), np.float32),
        np.ones((2, 4), np.float64),
        np.ones((2, 4), np.uint16),
        np.ones((0, 4), np.float32),
        np.ones((2, 4), np.dtype(np.float32).newbyteorder()),
        [[1.0, 2.0]],
    ],
    ids=["1-D", "3-D", "float64", "bits", "no rank", "foreign", "list"],
)
def test_what_does_not_fit_is_refused(ring, given):
    with pytest.raises(UsageError, match=r"a ring takes one float32 row a rank, \(W, N\); got"):
        ring(given)


def test_chunks_that_are_not_equal_are_refused():
    for ring in (ring_reduce_scatter, ring_all_reduce):
        with pytest.raises(UsageError, match=r"7 elements .* 3 equal chunks; pad .*flat\.pad"):
            ring(np.ones((3, 7), np.float32))


@pytest.mark.parametrize("root", [-1, 3])
def test_a_broadcast_from_no_rank_is_refused(root):
    with pytest.raises(UsageError, match=r"root must be within 0\.\.2"):
        ring_broadcast(np.ones((3, 2), np.float32), root)
