"""Exercises of notebook 03: a ring, written for one rank."""

import numpy as np

from zero_nb.learn.exercise import RankExercise, Wrong
from zero_nb.learn.predict import Mistake, Prediction
from zero_nb.learn.ranks import Receive, Send

__all__ = ["EXERCISES", "PREDICTIONS"]


PREDICTIONS = {
    # A ring of 64 ranks: 2 * 63 / 64 messages of M a rank.
    "03-p": Prediction(
        title="Predict the traffic of 64 ranks",
        unit=" M",
        within=0.05,
        low=0.0,
        high=10_000.0,
        mistakes=(
            Mistake(
                63.0,
                "That is the array to every other rank, or the busiest link when all goes through "
                "rank 0. A sum that travels needs no copies of the whole array.",
            ),
            Mistake(
                126.0,
                "That is what all ranks send together, in units of M. Shared by 64 ranks it is "
                "far less for each.",
            ),
            Mistake(64.0, "That grows with the number of ranks; on a ring it does not."),
            Mistake(
                1.0,
                "That is half of it: a reduce-scatter. Afterwards each rank has one slice of the "
                "sum, and the slices still have to reach all others.",
            ),
            Mistake(6.0, "That is a tree of 64 leaves, log2(64) levels. A ring needs less."),
        ),
        close="Right: 2(W - 1)/W, a little below 2, and no more for a thousand ranks.",
        advice="Cut the array into 64 chunks. How many chunks does a rank pass on until all are "
        "summed, and how many until all ranks have them?",
    )
}


def _worlds(rng):
    """Worlds of 1, 2, 3 and 5 ranks, lengths that do not divide; whole numbers, exact in sums."""
    lengths = ((1, 4), (2, 5), (3, 7), (5, 12), (3, 2), (4, int(rng.integers(9, 40))))
    return [
        [row.astype(np.float32) for row in rng.integers(-99, 100, (ranks, numel))]
        for ranks, numel in lengths
    ]


def _even_worlds(rng):
    """As `_worlds`, without the world of one rank."""
    return _worlds(rng)[1:]


# --------------------------------------------------------------------------------- 03-a: one step


def _ring_step(rank, world_size, mine):
    """The solution."""
    received = yield Send((rank + 1) % world_size, mine)
    return mine + received


def _to_the_left(rank, world_size, mine):
    """Wrong: against the direction."""
    received = yield Send((rank - 1) % world_size, mine)
    return mine + received


def _only_received(rank, world_size, mine):
    """Wrong: the own row is lost."""
    return (yield Send((rank + 1) % world_size, mine))


def _off_the_end(rank, world_size, mine):
    """Wrong: the last rank has no neighbour."""
    received = yield Send(rank + 1, mine)
    return mine + received


def _all_to_0(rank, world_size, mine):
    """Wrong: a star."""
    received = yield Send(0, mine)
    return mine + received


# ------------------------------------------------------------------ 03-b, 03-c: the whole ring


def _chunks(mine, world_size):
    """A padded copy of the row, one chunk a rank."""
    return np.pad(mine, (0, -len(mine) % world_size)).reshape(world_size, -1)


def _reduce_scatter(rank, world_size, mine):
    """The solution of b: rank r sends chunk r - 1 first and ends with chunk r."""
    chunks = _chunks(mine, world_size)
    for hop in range(world_size - 1):
        outgoing = (rank - 1 - hop) % world_size
        chunks[outgoing - 1] += yield Send((rank + 1) % world_size, chunks[outgoing])
    return chunks[rank]


def _tail_lost(rank, world_size, mine):
    """Wrong: no padding."""
    whole = len(mine) // world_size * world_size
    return (yield from _reduce_scatter(rank, world_size, mine[:whole]))


def _stored(rank, world_size, mine):
    """Wrong: what arrives replaces what is there."""
    chunks = _chunks(mine, world_size)
    for hop in range(world_size - 1):
        outgoing = (rank - 1 - hop) % world_size
        chunks[outgoing - 1] = yield Send((rank + 1) % world_size, chunks[outgoing])
    return chunks[rank]


def _one_hop_short(rank, world_size, mine):
    """Wrong: W - 2 hops."""
    chunks = _chunks(mine, world_size)
    for hop in range(world_size - 2):
        outgoing = (rank - 1 - hop) % world_size
        chunks[outgoing - 1] += yield Send((rank + 1) % world_size, chunks[outgoing])
    return chunks[rank]


def _one_chunk_late(rank, world_size, mine):
    """The ring that starts with the own chunk, up to its end."""
    chunks = _chunks(mine, world_size)
    for hop in range(world_size - 1):
        outgoing = (rank - hop) % world_size
        chunks[outgoing - 1] += yield Send((rank + 1) % world_size, chunks[outgoing])
    return chunks


def _incomplete(rank, world_size, mine):
    """Wrong: starts with the own chunk, so that the own chunk is not complete."""
    chunks = yield from _one_chunk_late(rank, world_size, mine)
    return chunks[rank]


def _neighbours_chunk(rank, world_size, mine):
    """Wrong: a full sum, but of the neighbour's chunk."""
    chunks = yield from _one_chunk_late(rank, world_size, mine)
    return chunks[(rank + 1) % world_size]


def _whole_rows(rank, world_size, mine):
    """Wrong: right, but whole rows travel."""
    total, passing = _chunks(mine, world_size), mine
    for _ in range(world_size - 1):
        passing = yield Send((rank + 1) % world_size, passing)
        total += _chunks(passing, world_size)
    return total[rank]


def _scatter_through_0(rank, world_size, mine):
    """Wrong: right, but through rank 0."""
    if rank > 0:
        return (yield Send(0, mine))
    total = _chunks(mine, world_size)
    for _ in range(world_size - 1):
        total += _chunks((yield Receive()), world_size)
    for other in range(1, world_size):
        yield Send(other, total[other], wait=False)
    return total[0]


def _all_reduce(rank, world_size, mine):
    """The solution of c: a reduce-scatter, then an all-gather."""
    chunks = _chunks(mine, world_size)
    right = (rank + 1) % world_size
    for hop in range(world_size - 1):
        outgoing = (rank - 1 - hop) % world_size
        chunks[outgoing - 1] += yield Send(right, chunks[outgoing])
    for hop in range(world_size - 1):
        outgoing = (rank - hop) % world_size
        chunks[outgoing - 1] = yield Send(right, chunks[outgoing])
    return chunks.reshape(-1)[: len(mine)]


def _with_padding(rank, world_size, mine):
    """Wrong: the padding is still there."""
    padded = _chunks(mine, world_size).reshape(-1)
    return (yield from _all_reduce(rank, world_size, padded))


def _added_twice(rank, world_size, mine):
    """Wrong: the second half adds too."""
    chunks = _chunks(mine, world_size)
    right = (rank + 1) % world_size
    for hop in range(2 * (world_size - 1)):
        outgoing = (rank - 1 - hop) % world_size
        chunks[outgoing - 1] += yield Send(right, chunks[outgoing])
    return chunks.reshape(-1)[: len(mine)]


def _no_gather(rank, world_size, mine):
    """Wrong: a reduce-scatter."""
    return (yield from _reduce_scatter(rank, world_size, mine))


def _rows_around(rank, world_size, mine):
    """Wrong: right, but whole rows travel."""
    total, passing = mine.copy(), mine
    for _ in range(world_size - 1):
        passing = yield Send((rank + 1) % world_size, passing)
        total += passing
    return total


def _through_rank_0(rank, world_size, mine):
    """Wrong: right, but through rank 0."""
    if rank > 0:
        return (yield Send(0, mine))
    total = mine
    for _ in range(world_size - 1):
        total = total + (yield Receive())
    for other in range(1, world_size):
        yield Send(other, total, wait=False)
    return total


EXERCISES = {
    "03-a": RankExercise(
        title="Make one step of a ring",
        solution=_ring_step,
        cases=_even_worlds,
        wrong={
            "left": Wrong(
                _to_the_left,
                "you sent to the left; the right neighbour of rank r is rank r + 1",
            ),
            "only received": Wrong(
                _only_received,
                "you returned what you received; add your own row",
            ),
            "off the end": Wrong(
                _off_the_end,
                "the last rank has no rank behind it; the ring closes: (rank + 1) % world_size",
            ),
            "all to rank 0": Wrong(
                _all_to_0,
                "all ranks sent to rank 0, so the others wait for ever; send to the right",
            ),
        },
        hints=(
            "Who is the right neighbour of the last rank?",
            "received = yield Send(to, mine), where to is a rank from 0 to world_size - 1.",
            "The neighbour is (rank + 1) % world_size; return mine + received.",
        ),
    ),
    "03-b": RankExercise(
        title="Write a ring reduce-scatter",
        core=True,
        solution=_reduce_scatter,
        cases=_worlds,
        budget=lambda world_size, numel: (
            (world_size - 1) * -(-numel // world_size),
            world_size - 1,
        ),
        wrong={
            "tail lost": Wrong(
                _tail_lost,
                "the end of the array is lost where its length does not divide by W; pad it with "
                "zeros first",
            ),
            "stored": Wrong(
                _stored,
                "what arrives is stored in the place of your own numbers; add it to them",
            ),
            "one hop short": Wrong(
                _one_hop_short,
                "a hop is missing: a sum of W contributions needs W - 1 hops",
            ),
            "own chunk first": Wrong(
                _incomplete,
                "you send your own chunk away first, so it is never complete on your rank; send "
                "chunk rank - 1 first",
            ),
            "neighbour's chunk": Wrong(
                _neighbours_chunk,
                "each rank returns a full sum, but of its neighbour's chunk; begin one chunk "
                "earlier, with rank - 1",
            ),
            "whole rows": Wrong(
                _whole_rows,
                "the sums are right, but whole rows travel: W times as much as chunks; send one "
                "chunk a hop",
            ),
            "through rank 0": Wrong(
                _scatter_through_0,
                "the sums are right, but all goes through rank 0, which is no ring; each rank "
                "sends one chunk a hop to its right neighbour",
            ),
        },
        hints=(
            "Look at the picture: which chunk has rank 0 sent in hop 1, 2, 3, and which one has "
            "arrived there?",
            "Cut the padded row with reshape(world_size, -1). In hop h rank r sends chunk "
            "(r - 1 - h) % W and adds what arrives to chunk (r - 2 - h) % W.",
            "chunks[(rank - 2 - h) % world_size] += yield Send((rank + 1) % world_size, "
            "chunks[(rank - 1 - h) % world_size]) for h in range(world_size - 1); then return "
            "chunks[rank].",
        ),
    ),
    "03-c": RankExercise(
        title="Write a ring all-reduce within its budget",
        core=True,
        solution=_all_reduce,
        cases=_worlds,
        budget=lambda world_size, numel: (
            2 * (world_size - 1) * -(-numel // world_size),
            2 * (world_size - 1),
        ),
        wrong={
            "no gather": Wrong(
                _no_gather,
                "that is the reduce-scatter: each rank has one chunk; carry the chunks around "
                "once more",
            ),
            "padding left": Wrong(
                _with_padding,
                "the padding is still there; cut the result to the length of mine",
            ),
            "added twice": Wrong(
                _added_twice,
                "in the second half the sums are complete; store them, adding counts "
                "contributions twice",
            ),
            "whole rows": Wrong(
                _rows_around,
                "the sums are right, but whole rows travel: (W - 1) M a rank; send one chunk a hop",
            ),
            "through rank 0": Wrong(
                _through_rank_0,
                "the sums are right, but rank 0 sends (W - 1) M; share the work on a ring",
            ),
        },
        hints=(
            "The first half is the reduce-scatter. Which chunk is complete on rank r after it?",
            "In the second half rank r sends chunk r first, then what it has just received. "
            "Nothing is added any more.",
            "In hop h of the second half send chunk (rank - h) % W and store what arrives as "
            "chunk (rank - 1 - h) % W; at the end chunks.reshape(-1)[: len(mine)].",
        ),
    ),
}
"""By key, in the order of the notebook."""
