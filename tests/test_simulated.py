"""Collectives of the simulated world against the slow twins, and who owns which bytes."""

import time
import weakref
from concurrent.futures import Future

import numpy as np
import pytest

import naive_training as naive
from zero_nb.cluster.simulated import EmulatedLink, SimulatedWorld
from zero_nb.config import UsageError
from zero_nb.core.kernels import PARALLEL_FROM
from zero_nb.core.precision import BFLOAT16, FLOAT16, FLOAT32

WORLD_SIZES = (1, 2, 3, 4, 5, 8, 16)
FORMATS = (FLOAT32, BFLOAT16, FLOAT16)
by_name = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)


def rows(world_size, numel, fmt, seed=0):
    """One row a rank of numbers far apart in size, so that another order has other sums."""
    rng = np.random.default_rng([seed, world_size, numel])
    x = rng.normal(size=(world_size, numel)) * 10.0 ** rng.integers(-3, 4, (world_size, numel))
    return naive.stored_as(x.astype(np.float32), fmt)


def same(got, want):
    """Equal to the last bit (-0.0 is not 0.0), and of the same dtype and shape."""
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    assert got.tobytes() == want.tobytes()


@by_name
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("shard", [1, 7, 1031])
def test_collectives_equal_their_slow_twins(world_size, shard, fmt):
    world, numel = SimulatedWorld(world_size), shard * world_size
    x = rows(world_size, numel, fmt)

    kept = x.copy()
    got = world.reduce_scatter(x, fmt=fmt)
    same(got, naive.reduce_scatter(x, fmt))
    same(x, kept)
    assert not np.shares_memory(got, x)

    summed = x.copy()
    assert world.all_reduce(summed, fmt=fmt) is summed
    same(summed, naive.all_reduce(x, fmt))

    shards = x[:, :shard].copy()
    same(world.all_gather(shards, fmt=fmt), naive.all_gather(shards))
    out = np.full((world_size, numel), 77, fmt.dtype)
    assert world.all_gather(shards, out=out, fmt=fmt) is out
    same(out, naive.all_gather(shards))

    for root in {0, world_size // 2, world_size - 1}:
        copied = x.copy()
        assert world.broadcast(copied, root=root, fmt=fmt) is copied
        same(copied, np.stack([x[root]] * world_size))


@by_name
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_all_gather_in_place_keeps_each_ranks_own_slice_and_replaces_the_others(world_size, fmt):
    world = SimulatedWorld(world_size)
    x = rows(world_size, 7 * world_size, fmt)
    want = naive.all_gather(world.own_shard(x).copy())
    assert world.all_gather(world.own_shard(x), out=x, fmt=fmt) is x
    same(x, want)


@pytest.mark.parametrize("world_size", [2, 3])
@by_name
def test_large_collectives_run_in_parallel_with_the_same_bits(world_size, fmt):
    shard = PARALLEL_FROM // world_size**2 + 1001
    world, x = SimulatedWorld(world_size), rows(world_size, shard * world_size, fmt)
    assert x.size > PARALLEL_FROM
    same(world.reduce_scatter(x, fmt=fmt), naive.reduce_scatter(x, fmt))
    summed = world.all_reduce(x.copy(), fmt=fmt)
    same(summed, naive.all_reduce(x, fmt))
    same(world.all_gather(x[:, :shard].copy(), fmt=fmt), naive.all_gather(x[:, :shard]))
    want = naive.all_gather(world.own_shard(x).copy())
    same(world.all_gather(world.own_shard(x), out=x, fmt=fmt), want)


def test_sums_go_in_rank_order_and_not_pairwise_or_backwards():
    world = SimulatedWorld(4)
    column = np.array([[1e8], [1], [-1e8], [1]], np.float32)
    # ((1e8 + 1) - 1e8) + 1: the first 1 is lost, the last one stays. Backwards: 1 + 0 = 0 or 2.
    x = np.repeat(column, 4, axis=1)
    assert world.reduce_scatter(x).tolist() == [[1.0]] * 4
    assert world.all_reduce(x).tolist() == [[1.0] * 4] * 4
    swapped = np.repeat(column[[0, 2, 1, 3]], 4, axis=1)
    assert world.reduce_scatter(swapped).tolist() == [[2.0]] * 4


def test_a_16_bit_sum_is_rounded_once_at_the_end():
    world = SimulatedWorld(3)
    # In bfloat16, 256 + 1 rounds back to 256; 256 + 1 + 1 = 258 is a bfloat16 number.
    bits = naive.stored_as(np.repeat(np.float32([[256], [1], [1]]), 3, axis=1), BFLOAT16)
    got = naive.to_float32(world.reduce_scatter(bits, fmt=BFLOAT16), BFLOAT16)
    assert got.tolist() == [[258.0]] * 3
    got = naive.to_float32(world.all_reduce(bits, fmt=BFLOAT16), BFLOAT16)
    assert got.tolist() == [[258.0] * 3] * 3


def test_a_sum_that_is_not_finite_reaches_every_rank():
    world = SimulatedWorld(2)
    x = np.float32([[1, np.inf, 3, 3e38], [1, -np.inf, np.nan, 3e38]])
    got = world.all_reduce(x.copy())
    np.testing.assert_array_equal(got, [[2, np.nan, np.nan, np.inf]] * 2)
    np.testing.assert_array_equal(world.reduce_scatter(x).reshape(-1), got[0])


def test_one_rank_keeps_its_bits():
    world, x = SimulatedWorld(1), np.float32([[-0.0, 1e-42, np.inf, 3]])
    same(world.reduce_scatter(x), x)
    same(world.all_reduce(x.copy()), x)
    same(world.all_gather(x.copy()), x)
    same(world.all_gather(x, out=x), x)


@by_name
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_each_rank_owns_its_bytes(world_size, fmt):
    world = SimulatedWorld(world_size)
    x = rows(world_size, 5 * world_size, fmt)
    shards = x[:, :5].copy()
    results = {
        "reduce_scatter": world.reduce_scatter(x, fmt=fmt),
        "all_gather": world.all_gather(shards, fmt=fmt),
        "all_gather in place": world.all_gather(world.own_shard(x), out=x, fmt=fmt),
        "all_reduce": world.all_reduce(x.copy(), fmt=fmt),
        "broadcast": world.broadcast(x.copy(), fmt=fmt),
    }
    for name, result in results.items():
        # As many bytes as ranks hold, and none in two rows: a change of one is seen by nobody.
        assert result.nbytes == world_size * result.shape[1] * fmt.itemsize, name
        assert all(stride > 0 for stride in result.strides), name
        for rank in range(world_size):
            before = result.copy()
            result[rank] = 99
            before[rank] = 99
            same(result, before)
        assert not np.shares_memory(result, shards), name


def test_shards_that_are_strided_are_gathered_too():
    world = SimulatedWorld(3)
    wide = np.arange(18, dtype=np.float32).reshape(3, 6)
    shards = wide[:, ::3]
    same(world.all_gather(shards), naive.all_gather(shards))


def test_an_empty_unit_is_gathered_and_reduced_to_nothing():
    world = SimulatedWorld(3)
    nothing = np.empty((3, 0), np.float32)
    assert world.reduce_scatter(nothing).shape == (3, 0)
    assert world.all_reduce(nothing).shape == (3, 0)
    assert world.all_gather(nothing).shape == (3, 0)
    assert world.broadcast(nothing).shape == (3, 0)
    assert world.log.elements_sent("param", "grad", "other") == 0


@pytest.mark.parametrize("dtype", [np.int64, np.float64])
@pytest.mark.parametrize("world_size", [1, 3])
def test_numbers_of_each_rank_are_known_to_all_and_are_copies(world_size, dtype):
    world = SimulatedWorld(world_size)
    values = np.arange(2 * world_size, dtype=dtype).reshape(world_size, 2)
    got = world.all_gather_scalars(values)
    same(got, values)
    got[0, 0] = -1
    assert values[0, 0] == 0


# --- messages that go on while the caller computes -----------------------------------------------


def test_a_deferred_result_is_allocated_and_logged_at_once_and_filled_when_waited_for():
    world = SimulatedWorld(2)
    x = np.float32([[1, 2], [3, 4]])
    with world.deferred() as pending:
        total = world.reduce_scatter(x, label="late")
        shape = total.shape
    assert (shape, [t.label for t in world.log.transfers]) == ((2, 1), ["late"])
    x += 10  # too early: without a link, too, it is read as late as allowed
    pending.wait()
    assert total.tolist() == [[24.0], [26.0]]
    pending.wait()  # once more is no harm
    assert total.tolist() == [[24.0], [26.0]]


def test_arguments_of_a_deferred_message_are_checked_at_once():
    world = SimulatedWorld(2)
    with pytest.raises(UsageError, match="not a multiple"), world.deferred():
        world.reduce_scatter(np.zeros((2, 3), np.float32))
    with world.deferred() as pending:
        pass
    pending.wait()
    assert len(world.log) == 0


def test_scalars_are_not_deferred():
    world = SimulatedWorld(2, link=EmulatedLink(1.0))
    with world.deferred():
        assert world.all_gather_scalars(np.array([[1], [2]])).tolist() == [[1], [2]]


def test_an_emulated_link_takes_latency_and_bytes_over_bandwidth():
    link = EmulatedLink(1e6, 0.01)
    world = SimulatedWorld(4, link=link)
    world.all_gather(np.zeros((4, 1000), np.float32))
    (transfer,) = world.log.transfers
    assert link.seconds(transfer) == 0.01 + 12_000 / 1e6
    assert world.clock.comm_s >= 0.022
    assert world.clock.exposed_s >= world.clock.comm_s  # nobody computed meanwhile
    before = world.clock.comm_s
    world.broadcast(np.zeros((4, 10**6), np.float32))  # purpose "other" is not held up
    assert world.clock.comm_s == before


def test_on_a_link_messages_follow_one_another_while_the_caller_goes_on():
    world = SimulatedWorld(2, link=EmulatedLink(1e9, 0.05))
    world.clock.spans, world.clock.waits = [], []
    shards = [np.full((2, 3), i, np.float32) for i in range(3)]
    pendings, results = [], []
    for i, shard in enumerate(shards):
        with world.deferred() as pending:
            results.append(world.all_gather(shard, label=f"message {i}"))
        pendings.append(pending)
    time.sleep(0.1)  # what the caller computes
    for pending in pendings:
        pending.wait()
    assert [result[0, 0] for result in results] == [0, 1, 2]
    spans = world.clock.spans
    assert [t.label for t, _, _ in spans] == ["message 0", "message 1", "message 2"]
    for (_, _, stop), (_, begin, _) in zip(spans, spans[1:], strict=False):
        assert stop <= begin
    assert world.clock.comm_s >= 0.15
    # Two messages were under way meanwhile; less of them if the thread started late.
    assert world.clock.exposed_s <= world.clock.comm_s - 0.03
    assert len(world.clock.waits) == 3


def test_C14_a_buffer_filled_again_too_early_shows_in_the_result():
    world = SimulatedWorld(2, link=EmulatedLink(1e9, 0.05))
    buffer = np.ones((2, 2), np.float32)
    with world.deferred() as pending:
        total = world.reduce_scatter(buffer)
    buffer[...] = 5
    pending.wait()
    assert total.tolist() == [[10.0], [10.0]]


class Keeping:
    """A thread that does a job at once and never lets go of what it was given."""

    def __init__(self):
        self.given = []

    def submit(self, function, *args):
        self.given.append((function, args))
        future = Future()
        future.set_result(function(*args))
        return future


def test_a_message_that_has_arrived_keeps_no_array_alive():
    """Threads do for a moment; memory would then depend on timing."""
    world = SimulatedWorld(2, link=EmulatedLink(1e9))
    world._thread = Keeping()
    shards = np.ones((2, 4), np.float32)
    with world.deferred() as pending:
        gathered = world.all_gather(shards)
    pending.wait()
    alive = [weakref.ref(array) for array in (gathered, shards)]
    assert world._thread.given
    del gathered, shards
    assert [reference() for reference in alive] == [None, None]


def test_an_error_on_the_way_reaches_who_waits(monkeypatch):
    world = SimulatedWorld(2, link=EmulatedLink(1e9))
    monkeypatch.setattr(world, "_all_gather", lambda *_: 1 / 0)
    with world.deferred() as pending:
        world.all_gather(np.ones((2, 4), np.float32))
    with pytest.raises(ZeroDivisionError):
        pending.wait()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((0,), "bytes_per_s must be a finite number above 0"),
        ((float("inf"),), "bytes_per_s must be a finite number above 0"),
        ((1.0, -1.0), "latency_s must be a finite number of at least 0"),
        ((1.0, float("nan")), "latency_s must be a finite number of at least 0"),
    ],
)
def test_a_link_that_cannot_be_is_refused(given, message):
    with pytest.raises(UsageError, match=message):
        EmulatedLink(*given)
    with pytest.raises(UsageError, match="link must be an EmulatedLink, got float"):
        SimulatedWorld(2, link=1e9)
