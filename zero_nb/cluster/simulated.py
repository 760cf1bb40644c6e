"""All ranks in this process, each owning its own row of every array."""

from typing import final

from zero_nb.cluster.world import World
from zero_nb.config import check_world_size
from zero_nb.core import rank_axis

__all__ = ["SimulatedWorld"]


@final
class SimulatedWorld(World):
    """A world whose ranks are the rows of this process's arrays.

    Every rank really owns its bytes: a collective copies and adds, no row is a view of
    another rank's row. A slice goes straight to its owner, and is added there in rank order;
    bytes are counted as on a ring, which moves as many.

    Parameters
    ----------
    size : int
        Number of ranks.
    """

    def __init__(self, size):
        super().__init__(size, range(check_world_size(size)))

    def _all_reduce(self, x_RF, fmt):
        rank_axis.sum_rows_everywhere(x_RF, fmt)

    def _reduce_scatter(self, x_RF, fmt, out_RS):
        # Slice r of the sum is row r of the output, so with all ranks here the flat sum over
        # rows is the whole answer.
        rank_axis.sum_rows(x_RF, fmt, out=out_RS.reshape(-1))

    def _all_gather(self, x_RS, out_RF):
        rank_axis.spread(x_RS.reshape(-1), out_RF)

    def _all_gather_in_place(self, x_RF):
        rank_axis.spread_diagonal(x_RF)

    def _broadcast(self, x_RN, root):
        if self.size > 1:
            rank_axis.spread(x_RN[root].copy(), x_RN)

    def _all_gather_scalars(self, values_RK):
        return values_RK.copy()
