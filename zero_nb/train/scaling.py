"""The one gradient scale of a step: the global norm, and clipping by it.

The norm is taken over shards: each rank looks at its own slice of every unit, padding left out,
and the partial results are made known to all. It is a pair of order-free sums, so it has the
same bits for every stage, unit and thread count for the same reduced gradient.
"""

import math

import numpy as np

from zero_nb.config import UsageError
from zero_nb.core import norm

__all__ = ["check_max_grad_norm", "clip_factor", "global_norm"]


def global_norm(world, units, left_out=()):
    """Return the 2-norm of the reduced gradient of all `units`.

    Parameters
    ----------
    world : World
    units : sequence of Unit
        After `reduce`: each rank's own slice of `grad` is final.
    left_out : collection of str
        Parameters that no rank used.

    Returns
    -------
    float
        ``inf`` if any element is not finite.

    Notes
    -----
    Two control collectives of one scalar a rank. Pascanu et al. 2013, with the shards' squares
    summed over ranks: the norm of one rank's shard is not the norm.
    """
    jobs = [(unit, _own_runs(unit, left_out)) for unit in units]
    largest_R = np.zeros(world.hosted, np.float64)
    for unit, runs in jobs:
        partial_R = norm.max_abs(unit.grad.reshape(-1), runs, world.hosted, unit.grad_format)
        largest_R = np.maximum(largest_R, partial_R)
    largest = float(world.all_gather_scalars(largest_R[:, None], label="max").max())
    if not math.isfinite(largest):
        return math.inf
    if largest == 0.0:
        return 0.0
    numel = sum(unit.layout.numel for unit in units)
    squares_R = np.zeros(world.hosted, np.int64)
    for unit, runs in jobs:
        squares_R += norm.sum_squares_fixed(
            unit.grad.reshape(-1), runs, world.hosted, unit.grad_format, largest, numel
        )
    total = int(world.all_gather_scalars(squares_R[:, None], label="norm").sum())
    return norm.fixed_to_norm(total, largest, numel)


def _own_runs(unit, left_out):
    """Return the runs of each rank's own slice, whatever the stage."""
    hyper_of = tuple(-1 if name in left_out else 0 for name in unit.layout.names)
    return unit.runs(hyper_of, every_replica=False)


def clip_factor(total_norm, max_norm):
    """Return min(1, max_norm / total_norm): 1 leaves the gradient as it is.

    Parameters
    ----------
    total_norm : float
        Finite.
    max_norm : float or None
        None means no clipping.
    """
    if max_norm is None or total_norm <= max_norm:
        return 1.0
    return max_norm / total_norm


def check_max_grad_norm(max_grad_norm):
    """Return `max_grad_norm` as a float or None, or say what is wrong with it."""
    if max_grad_norm is None:
        return None
    if not (math.isfinite(max_grad_norm) and max_grad_norm > 0):
        raise UsageError(
            f"max_grad_norm must be a finite number above 0, or None for no clipping; "
            f"got {max_grad_norm!r}"
        )
    return float(max_grad_norm)
