"""Named tensors over a world: the collectives with parameter names instead of flat buffers.

Shape suffixes: R ranks hosted here, F padded flat length, S = F // world_size.
"""

from dataclasses import dataclass

import numpy as np

from zero_nb.config import UsageError
from zero_nb.core.flat import FlatLayout
from zero_nb.core.precision import FLOAT32

__all__ = [
    "NamedShards",
    "all_gather_gradients",
    "gather_parameters",
    "partition_gradients",
    "partition_parameters",
    "reduce_scatter_gradients",
]


@dataclass(frozen=True)
class NamedShards:
    """What each hosted rank owns of some named tensors, laid end to end and padded.

    Attributes
    ----------
    layout : FlatLayout
        Names, shapes, and where each tensor lies.
    shard_RS : ndarray, shape (R, S), float32
        Row i is the slice of rank ``world.ranks[i]``.
    """

    layout: FlatLayout
    shard_RS: np.ndarray


def partition_parameters(params, world):
    """Keep each rank's slice of parameters that every rank knows. Nothing is sent.

    Parameters
    ----------
    params : mapping of str to ndarray, float32
        Full parameters, without a rank axis.
    world : World

    Returns
    -------
    NamedShards
        Copies: the parameters can be dropped.
    """
    layout = _layout(params, world, lead=0)
    full_F = np.zeros(layout.padded_numel, np.float32)
    for name in layout.names:
        layout.view(full_F, name)[...] = params[name]
    slices_WS = full_F.reshape(world.size, layout.shard_numel)
    return NamedShards(layout, slices_WS[world.ranks[0] : world.ranks[-1] + 1].copy())


def partition_gradients(grads, world):
    """Keep each rank's slice of gradients that are reduced already. Nothing is sent.

    Parameters
    ----------
    grads : mapping of str to ndarray, float32
        Full reduced gradients, without a rank axis: the same on every rank.
    world : World

    Returns
    -------
    NamedShards
    """
    return partition_parameters(grads, world)


def gather_parameters(shards, world, *, purpose="other"):
    """Join the slices of all ranks.

    Parameters
    ----------
    shards : NamedShards
    world : World
    purpose : str
        What the log books it under.

    Returns
    -------
    dict of str to ndarray, ``(R, *shape)`` float32
        Views of one new buffer.
    """
    full_RF = world.all_gather(np.ascontiguousarray(shards.shard_RS), purpose=purpose, fmt=FLOAT32)
    return {name: shards.layout.view(full_RF, name) for name in shards.layout.names}


def all_gather_gradients(shards, world, *, purpose="other"):
    """Join the slices of reduced gradients; see `gather_parameters`."""
    return gather_parameters(shards, world, purpose=purpose)


def reduce_scatter_gradients(grads, world, *, purpose="grad"):
    """Sum gradients over ranks, each rank keeping its slice.

    Parameters
    ----------
    grads : mapping of str to ndarray, ``(R, *shape)`` float32
        Row i is what rank ``world.ranks[i]`` contributes.
    world : World
    purpose : str
        What the log books it under.

    Returns
    -------
    NamedShards
    """
    layout = _layout(grads, world, lead=1)
    full_RF = np.zeros((world.hosted, layout.padded_numel), np.float32)
    for name in layout.names:
        layout.view(full_RF, name)[...] = grads[name]
    return NamedShards(layout, world.reduce_scatter(full_RF, purpose=purpose))


def _layout(arrays, world, *, lead):
    """Lay named float32 arrays out, refusing what does not fit; `lead` axes are the ranks'."""
    for name, array in arrays.items():
        dtype = getattr(array, "dtype", type(array).__name__)
        if dtype != np.float32:
            raise UsageError(f"{name!r} must be a float32 array, got {dtype}")
        if lead and array.shape[:1] != (world.hosted,):
            raise UsageError(
                f"{name!r} needs one row a hosted rank, ({world.hosted}, ...); got {array.shape}"
            )
    return FlatLayout(tuple(arrays), tuple(a.shape[lead:] for a in arrays.values()), world.size)
