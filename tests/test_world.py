"""What every world checks and logs, whoever moves the bytes."""

import numpy as np
import pytest

from zero_nb.cluster.simulated import SimulatedWorld
from zero_nb.cluster.world import PURPOSES, Transfer, TransferLog, World
from zero_nb.config import UsageError
from zero_nb.core.precision import BFLOAT16, FLOAT32

VERBS = (
    "_all_reduce",
    "_reduce_scatter",
    "_all_gather",
    "_all_gather_in_place",
    "_broadcast",
    "_all_gather_scalars",
)


class SilentWorld(World):
    """Hosts any ranks and moves nothing: for the checks and the log alone."""

    def _all_reduce(self, x_RF, fmt):
        x_RF[...] = 0

    def _reduce_scatter(self, x_RF, fmt, out_RS):
        out_RS[...] = 0

    def _all_gather(self, x_RS, out_RF):
        out_RF[...] = 0

    def _all_gather_in_place(self, x_RF):
        x_RF[...] = 0

    def _broadcast(self, x_RN, root):
        x_RN[...] = 0

    def _all_gather_scalars(self, values_RK):
        return np.zeros((self.size, values_RK.shape[1]), values_RK.dtype)


def calls(world, x, **options):
    """The collectives that take one full row a rank, as functions without arguments."""
    return {
        "all_reduce": lambda: world.all_reduce(x, **options),
        "reduce_scatter": lambda: world.reduce_scatter(x, **options),
        "broadcast": lambda: world.broadcast(x, **options),
    }


# --- ranks -------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", VERBS)
def test_a_world_that_forgets_a_collective_cannot_be_made(verb):
    kept = {name: getattr(SilentWorld, name) for name in VERBS if name != verb}
    with pytest.raises(TypeError, match=verb):
        type("Forgetful", (World,), kept)(2, range(2))


@pytest.mark.parametrize(
    ("size", "ranks"),
    [(4, (0, 2)), (4, (1, 0)), (4, (3, 4)), (4, (-1, 0)), (4, ()), (4, (2, 2)), (1, (1,))],
)
def test_hosted_ranks_are_consecutive_and_exist(size, ranks):
    with pytest.raises(UsageError, match=rf"consecutive and within 0\.\.{size - 1}, got "):
        SilentWorld(size, ranks)


@pytest.mark.parametrize("size", [0, -2, 1.0, True, "4", None])
def test_a_world_without_a_whole_number_of_ranks_is_refused(size):
    for make in (SimulatedWorld, lambda size: SilentWorld(size, range(1))):
        with pytest.raises(UsageError, match="world_size must be"):
            make(size)


def test_a_world_knows_what_it_hosts():
    world = SilentWorld(7, range(3, 5))
    assert (world.size, world.ranks, world.hosted) == (7, (3, 4), 2)
    assert repr(world) == "SilentWorld(size=7, hosted=2)"
    assert SimulatedWorld(3).ranks == (0, 1, 2)


def test_own_shard_is_the_slice_numbered_by_the_global_rank_and_a_view():
    world = SilentWorld(4, range(2, 4))
    x_RF = np.arange(24, dtype=np.float32).reshape(2, 12)
    own_RS = world.own_shard(x_RF)
    assert own_RS.tolist() == [[6, 7, 8], [21, 22, 23]]
    own_RS[1, 0] = -1
    assert x_RF[1, 9] == -1


# --- the log -----------------------------------------------------------------------------------


def sent_by_one_rank(collective, numel, world_size):
    """Count hop by hop what rank 0 of a ring sends (a broadcast: from a root to its neighbour)."""
    shard = numel // world_size
    once_round = sum(shard for _ in range(world_size - 1))
    if collective == "broadcast":
        return numel if world_size > 1 else 0
    return once_round * (2 if collective == "all_reduce" else 1)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("fmt", [FLOAT32, BFLOAT16], ids=lambda fmt: fmt.name)
def test_every_collective_is_logged_with_what_one_rank_sends(world_size, fmt):
    world, numel = SimulatedWorld(world_size), 5 * world_size
    x = np.zeros((world_size, numel), fmt.dtype)
    for purpose in PURPOSES:
        for name, call in calls(world, x, purpose=purpose, fmt=fmt, label="u").items():
            world.log.clear()
            call()
            sent = sent_by_one_rank(name, numel, world_size)
            expected = Transfer(name, purpose, sent, sent * fmt.itemsize, "u")
            assert world.log.transfers == [expected]
        world.log.clear()
        world.all_gather(x[:, :5].copy(), purpose=purpose, fmt=fmt, label="u")
        world.all_gather(world.own_shard(x), out=x, purpose=purpose, fmt=fmt, label="u")
        sent = sent_by_one_rank("all_gather", numel, world_size)
        gathered = Transfer("all_gather", purpose, sent, sent * fmt.itemsize, "u")
        assert world.log.transfers == [gathered, gathered]


def test_defaults_book_sums_as_gradients_and_gathers_as_parameters():
    world = SimulatedWorld(2)
    x = np.zeros((2, 4), np.float32)
    world.all_reduce(x)
    world.reduce_scatter(x)
    world.all_gather(x)
    world.broadcast(x)
    world.all_gather_scalars(np.zeros((2, 3)))
    booked = [(t.collective, t.purpose) for t in world.log.transfers]
    assert booked == [
        ("all_reduce", "grad"),
        ("reduce_scatter", "grad"),
        ("all_gather", "param"),
        ("broadcast", "other"),
        ("all_gather", "control"),
    ]
    last = world.log.transfers[-1]
    assert (last.elements_sent, last.bytes_sent) == (3, 24)


def test_sums_over_purposes_and_totals_that_outlive_clear():
    log = TransferLog()
    for purpose, elements in [("param", 1), ("grad", 10), ("control", 100), ("other", 1000)]:
        log.add(Transfer("all_gather", purpose, elements, 4 * elements, ""))
    assert (log.elements_sent(), log.bytes_sent()) == (11, 44)
    assert log.elements_sent("param") == 1
    assert log.bytes_sent("control", "other") == 4400
    log.clear()
    assert (len(log), log.elements_sent(*PURPOSES), log.bytes_sent(*PURPOSES)) == (0, 0, 0)
    log.add(Transfer("all_gather", "grad", 5, 10, ""))
    assert (len(log), log.elements_sent()) == (1, 5)
    assert log.total_elements == {"param": 1, "grad": 15, "control": 100, "other": 1000}
    assert log.total_bytes == {"param": 4, "grad": 50, "control": 400, "other": 4000}


def test_a_purpose_holds_within_its_block_whatever_ends_it():
    world = SimulatedWorld(2)
    x = np.zeros((2, 2), np.float32)

    def interrupted():
        with world.purpose("other"):
            world.all_reduce(x)
            with world.purpose("control"):
                world.all_reduce(x, purpose="param")
            world.all_gather(x)
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        interrupted()
    world.all_reduce(x)
    assert [t.purpose for t in world.log.transfers] == ["other", "control", "other", "grad"]


# --- refusals: nothing is written, nothing is logged --------------------------------------------


def refused(world, watched, words, call):
    """Assert that a call is refused with these words and leaves arrays and log alone."""
    before = [array.copy() for array in watched]
    with pytest.raises(ValueError, match=words):
        call()
    assert len(world.log) == 0
    assert not world.log.total_elements
    for array, kept in zip(watched, before, strict=True):
        np.testing.assert_array_equal(array, kept)


def not_fitting(size):
    """Arrays that no collective over `size` ranks takes, and what the error must say."""
    x = np.full((size, 2 * size), 3, np.float32)
    read_only = x.copy()
    read_only.flags.writeable = False
    unaligned = np.zeros(x.nbytes + 1, np.uint8)[1:].view(np.float32).reshape(x.shape)
    return {
        "one row too few": (x[1:].copy(), rf"one row a hosted rank, \({size}, N\); got"),
        "one dimension": (x[0].copy(), "one row a hosted rank"),
        "three dimensions": (x[:, :, None].copy(), "one row a hosted rank"),
        "float64": (x.astype(np.float64), "native float32 elements, got float64"),
        "16 bits": (x.astype(np.uint16), "native float32 elements, got uint16"),
        "foreign": (x.astype(x.dtype.newbyteorder()), "native float32 elements, got"),
        "columns first": (np.asfortranarray(x), "C-contiguous.*ascontiguousarray"),
        "every second": (np.full((size, 4 * size), 3, np.float32)[:, ::2], "C-contiguous"),
        "read-only": (read_only, "writable"),
        "unaligned": (unaligned, "C-contiguous, aligned, writable"),
    }


@pytest.mark.parametrize("what", not_fitting(3))
def test_arrays_that_do_not_fit_are_refused_by_every_collective(what):
    x, words = not_fitting(3)[what]
    world = SimulatedWorld(3)
    for call in calls(world, x).values():
        refused(world, [x], words, call)
    if x.ndim == 2 and x.shape[0] == 3 and x.dtype == np.float32:
        shards = np.ones((3, 2), np.float32)
        refused(world, [x, shards], words, lambda: world.all_gather(shards, out=x))


@pytest.mark.parametrize("given", [None, [[1.0, 2.0], [3.0, 4.0]], 5])
def test_what_is_no_array_is_refused_by_its_type(given):
    world = SimulatedWorld(2)
    for call in calls(world, given).values():
        refused(world, [], f"one row a hosted rank.*got {type(given).__name__}", call)
    refused(world, [], "shards, one row a hosted rank", lambda: world.all_gather(given))
    if given is not None:
        x = np.ones((2, 2), np.float32)
        refused(world, [x], "needs out of shape", lambda: world.all_gather(x, out=given))


def test_rows_that_do_not_divide_are_refused_where_they_are_cut():
    world = SimulatedWorld(3)
    x = np.full((3, 7), 2, np.float32)
    cut = calls(world, x)
    world.broadcast(x)  # is not cut
    world = SimulatedWorld(3)
    cut = calls(world, x)
    for name in ("all_reduce", "reduce_scatter"):
        words = f"{name} of 7 elements over 3 ranks: not a multiple; pad .*flat.pad first"
        refused(world, [x], words, cut[name])
    with pytest.raises(ValueError, match="7 is not a multiple of world_size 3"):
        world.own_shard(x)


@pytest.mark.parametrize(
    "shards",
    [
        np.ones((2, 4), np.float32),
        np.ones(12, np.float32),
        np.ones((3, 4), np.float64),
        np.ones((3, 4), np.uint16),
        np.ones((3, 4), np.dtype(np.float32).newbyteorder()),
    ],
    ids=["rows", "1-D", "float64", "bits", "foreign"],
)
def test_shards_that_do_not_fit_are_refused(shards):
    world = SimulatedWorld(3)
    out = np.full((3, 12), 5, np.float32)
    words = r"all_gather takes \(3, S\) float32 shards, one row a hosted rank; got"
    refused(world, [out, shards], words, lambda: world.all_gather(shards, out=out))


@pytest.mark.parametrize("shape", [(3, 11), (2, 12), (12,), (3, 13)])
def test_an_output_of_another_shape_is_refused(shape):
    world = SimulatedWorld(3)
    shards, out = np.ones((3, 4), np.float32), np.full(shape, 5, np.float32)
    words = r"needs out of shape \(3, 12\), got"
    refused(world, [out, shards], words, lambda: world.all_gather(shards, out=out))


def test_shards_that_overlap_the_output_are_refused_unless_they_stand_in_place():
    world = SimulatedWorld(2)
    out = np.arange(16, dtype=np.float32).reshape(2, 8)
    overlaps = {
        "the first half of each row": out[:, :4],
        "the second half of each row": out[:, 4:],
        "the first row, cut": out.reshape(-1)[:8].reshape(2, 4),
        "own slices but the last element of each": world.own_shard(out)[:, :4][:, ::-1],
    }
    for shards in overlaps.values():
        words = r"overlap out; pass own_shard\(out\)"
        refused(world, [out], words, lambda shards=shards: world.all_gather(shards, out=out))
    world.all_gather(world.own_shard(out), out=out)
    assert out.tolist() == [[0, 1, 2, 3, 12, 13, 14, 15]] * 2


@pytest.mark.parametrize("root", [-1, 3, 1.5, None])
def test_a_broadcast_from_no_rank_is_refused(root):
    world = SimulatedWorld(3)
    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    refused(world, [x], r"root must be within 0\.\.2", lambda: world.broadcast(x, root=root))


def test_an_unknown_purpose_is_refused_before_anything_is_summed():
    world = SimulatedWorld(2)
    x = np.ones((2, 2), np.float32)
    words = "unknown purpose 'params'; choose one of param, grad, control, other"
    for call in calls(world, x, purpose="params").values():
        refused(world, [x], words, call)
    out = np.zeros((2, 4), np.float32)
    refused(world, [out], words, lambda: world.all_gather(x, out=out, purpose="params"))
    refused(world, [], words, lambda: world.all_gather_scalars(np.ones((2, 1)), purpose="params"))

    def block():
        with world.purpose("params"):
            raise AssertionError("entered")

    refused(world, [], words, block)


def test_numbers_of_each_rank_need_one_row_a_hosted_rank():
    world = SilentWorld(4, range(1, 3))
    for values in (np.zeros((4, 1)), np.zeros(2), np.zeros((2, 1, 1))):
        words = r"takes \(2, K\) values"
        refused(world, [], words, lambda values=values: world.all_gather_scalars(values))
    assert world.all_gather_scalars(np.zeros((2, 3))).shape == (4, 3)
