"""The same collectives one ring hop at a time, to be watched.

Each rank talks to its right neighbour only. A message is cut in W chunks; in every hop each rank
sends one chunk and receives one, so all links are busy all the time and a rank sends W - 1
chunks, M (W-1)/W bytes of a message of M bytes, whatever W is.

[Note: a ring adds in another order]
Chunk c starts at rank c + 1 and collects each rank on its way round to rank c, so its sum is
((x[c+1] + x[c+2]) + ...) + x[c]: rotated rank order, another order for each chunk. And what
travels is a partial sum, rounded to the wire format at each of its W - 1 hops, where
`SimulatedWorld` rounds once. So a ring equals it up to rounding: at most W - 1 roundings of half
a unit in the last place of the largest partial sum. All ranks agree with each other to the bit,
since each finished chunk is computed on one rank and then only copied.
"""

from dataclasses import dataclass

import numpy as np

from zero_nb.config import UsageError
from zero_nb.core.precision import FLOAT32

__all__ = [
    "Hop",
    "RingRun",
    "ring_all_gather",
    "ring_all_reduce",
    "ring_broadcast",
    "ring_reduce_scatter",
]


@dataclass(frozen=True, slots=True)
class Hop:
    """One chunk going from one rank to its right neighbour.

    Attributes
    ----------
    step : int
        Hops of one step happen at the same time.
    sender, receiver : int
        Ranks.
    chunk : int
        Which of the W chunks travels.
    elements, bytes_sent : int
    adds : bool
        Whether the receiver adds it (reduce) or stores it (gather).
    """

    step: int
    sender: int
    receiver: int
    chunk: int
    elements: int
    bytes_sent: int
    adds: bool


@dataclass(frozen=True)
class RingRun:
    """What a ring collective left on every rank, and how it got there.

    Attributes
    ----------
    rows : ndarray
        (W, F) for all_reduce, all_gather and broadcast, (W, S) for reduce_scatter.
    hops : tuple of Hop
        In the order they happened.
    """

    rows: np.ndarray
    hops: tuple

    def elements_sent(self, rank):
        """Elements `rank` sent."""
        return sum(hop.elements for hop in self.hops if hop.sender == rank)

    def bytes_sent(self, rank):
        """Bytes `rank` sent."""
        return sum(hop.bytes_sent for hop in self.hops if hop.sender == rank)

    def messages_sent(self, rank):
        """Messages `rank` sent."""
        return sum(hop.sender == rank for hop in self.hops)


def ring_reduce_scatter(x_WF, fmt=FLOAT32):
    """Sum over ranks along the ring; rank r ends with chunk r of the sum.

    Parameters
    ----------
    x_WF : ndarray, shape (W, F), dtype of `fmt`
        Row r is rank r's contribution, F a multiple of W; left as it is.
    fmt : Format
        The wire format; partial sums are rounded to it at each hop.

    Returns
    -------
    RingRun
        ``rows`` is (W, S). W - 1 steps; each rank sends F (W-1)/W elements.

    Raises
    ------
    UsageError
        If `x_WF` is not 2-D, of another dtype, or F is not a multiple of W.

    Notes
    -----
    Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", 2009. See
    [Note: a ring adds in another order].
    """
    chunks, hops = _own_chunks(x_WF, fmt), []
    _reduce_scatter(chunks, fmt, hops)
    return RingRun(np.stack([chunks[rank][rank] for rank in range(len(chunks))]), tuple(hops))


def ring_all_gather(x_WS, fmt=FLOAT32):
    """Pass every rank's chunk along the ring until all have all.

    Parameters
    ----------
    x_WS : ndarray, shape (W, S), dtype of `fmt`

    Returns
    -------
    RingRun
        ``rows`` is (W, W*S). W - 1 steps; each rank sends S (W-1) elements.
    """
    x_WS = _checked(x_WS, fmt)
    world_size, shard = x_WS.shape
    chunks = [np.empty((world_size, shard), fmt.dtype) for _ in range(world_size)]
    for rank in range(world_size):
        chunks[rank][rank] = x_WS[rank]
    hops = []
    _all_gather(chunks, fmt, hops)
    return RingRun(np.stack([chunk.reshape(-1) for chunk in chunks]), tuple(hops))


def ring_all_reduce(x_WF, fmt=FLOAT32):
    """Reduce-scatter, then all-gather: each rank sends 2 F (W-1)/W elements.

    Parameters
    ----------
    x_WF : ndarray, shape (W, F), dtype of `fmt`

    Returns
    -------
    RingRun
        ``rows`` is (W, F), all rows equal to the bit.
    """
    chunks, hops = _own_chunks(x_WF, fmt), []
    _reduce_scatter(chunks, fmt, hops)
    _all_gather(chunks, fmt, hops)
    return RingRun(np.stack([chunk.reshape(-1) for chunk in chunks]), tuple(hops))


def ring_broadcast(x_WN, root=0, fmt=FLOAT32):
    """Pass the root's row along the ring; every rank but the last sends it once.

    Parameters
    ----------
    x_WN : ndarray, shape (W, N), dtype of `fmt`
    root : int

    Returns
    -------
    RingRun
        ``rows`` is (W, N), all rows equal to row `root`.
    """
    x_WN = _checked(x_WN, fmt)
    world_size, numel = x_WN.shape
    if not 0 <= root < world_size:
        raise UsageError(f"broadcast root must be within 0..{world_size - 1}, got {root}")
    rows, hops = x_WN.copy(), []
    for step in range(world_size - 1):
        sender, receiver = (root + step) % world_size, (root + step + 1) % world_size
        rows[receiver] = rows[sender]
        hops.append(Hop(step, sender, receiver, 0, numel, numel * fmt.itemsize, False))
    return RingRun(rows, tuple(hops))


def _reduce_scatter(chunks, fmt, hops):
    """Leave the sum of chunk r on rank r; `chunks[rank]` is (W, S)."""
    world_size = len(chunks)
    for step in range(world_size - 1):
        # Rank r's last receive, in step W-2, is chunk r: so in step k it sends chunk r-1-k.
        sent = [(rank, (rank - 1 - step) % world_size) for rank in range(world_size)]
        _hop(chunks, sent, step, fmt, hops, adds=True)


def _all_gather(chunks, fmt, hops):
    """Copy chunk r from rank r to all; `chunks[rank]` is (W, S)."""
    world_size = len(chunks)
    first = hops[-1].step + 1 if hops else 0
    for step in range(world_size - 1):
        sent = [(rank, (rank - step) % world_size) for rank in range(world_size)]
        _hop(chunks, sent, first + step, fmt, hops, adds=False)


def _hop(chunks, sent, step, fmt, hops, *, adds):
    """Let every rank send one chunk to its right neighbour at the same time."""
    messages = [(rank, chunk, chunks[rank][chunk].copy()) for rank, chunk in sent]
    for sender, chunk, message in messages:
        receiver = (sender + 1) % len(chunks)
        if adds:
            total = fmt.widen(message) + fmt.widen(chunks[receiver][chunk])
            chunks[receiver][chunk] = fmt.round(total)
        else:
            chunks[receiver][chunk] = message
        hops.append(Hop(step, sender, receiver, chunk, message.size, message.nbytes, adds))


def _own_chunks(x_WF, fmt):
    """Give each rank its own copy of its row, cut in W chunks."""
    x_WF = _checked(x_WF, fmt)
    world_size, full = x_WF.shape
    if full % world_size:
        raise UsageError(
            f"{full} elements cannot be cut in {world_size} equal chunks; pad them with "
            "zero_nb.core.flat.pad first"
        )
    return [row.copy().reshape(world_size, full // world_size) for row in x_WF]


def _checked(x, fmt):
    """Refuse what is not one row a rank in the wire format."""
    if not isinstance(x, np.ndarray) or x.ndim != 2 or x.shape[0] < 1 or x.dtype != fmt.dtype:
        got = f"{x.shape} {x.dtype}" if isinstance(x, np.ndarray) else type(x).__name__
        raise UsageError(f"a ring takes one {fmt.dtype} row a rank, (W, N); got {got}")
    return x
