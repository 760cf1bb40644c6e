"""What is given to an optimizer, and what does not fit: everything is refused before it is used."""

from collections import defaultdict
from collections.abc import Mapping
from itertools import combinations

import numpy as np

from zero_nb.cluster.simulated import SimulatedWorld
from zero_nb.cluster.world import World
from zero_nb.config import UsageError, ZeROConfig, ZeROStage
from zero_nb.train.ledger import owner_of

__all__ = [
    "check_grad",
    "check_grads",
    "check_kind",
    "check_params",
    "check_threshold",
    "check_world",
    "is_unused",
    "merged_settings",
]


def check_grads(units, grads, hosted=None):
    """Refuse gradients that do not fit the parameters, before anything is taken.

    Parameters
    ----------
    units : sequence of Unit
        Trainable.
    grads : mapping of str to array
    hosted : int or None
        Rows a gradient has, with tied parameters under each of their names; None for gradients
        without a rank axis, where each parameter has one name.
    """
    if not isinstance(grads, Mapping):
        raise UsageError(f"grads must be a mapping of name to array, got {type(grads).__name__}")
    wanted = {}
    for unit in units:
        shapes = dict(zip(unit.layout.names, unit.layout.shapes, strict=True))
        wanted |= shapes
        if hosted is not None:
            wanted |= {alias: shapes[name] for alias, name in unit.aliases.items()}
    unknown = sorted(grads.keys() - wanted.keys())
    missing = [name for name in wanted if name not in grads]
    if unknown or missing:
        what = "unknown or frozen gradients" if unknown else "missing gradients"
        raise UsageError(f"{what}: {', '.join(unknown or missing)}")
    for unit in units:
        unit.check_room()
    for name, shape in wanted.items():
        lead = () if hosted is None else (hosted,)
        check_grad(name, grads[name], (*lead, *shape), by_rank=hosted is not None)


def check_grad(name, grad, want, *, by_rank=True):
    """Refuse one gradient that does not fit, or one row of a list."""
    if grad is None and by_rank:
        return
    if isinstance(grad, list) and by_rank:
        if len(grad) != want[0]:
            raise UsageError(
                f"the gradient of {name!r} is a list of {len(grad)}; one entry a hosted rank is "
                f"{want[0]}"
            )
        for row in grad:
            if row is not None:
                check_grad(name, row, want[1:], by_rank=False)
        return
    dtype = getattr(grad, "dtype", None)
    if dtype != np.float32 or np.shape(grad) != want:
        got = type(grad).__name__ if dtype is None else f"{dtype} {np.shape(grad)}"
        rows = ", one row a rank" if by_rank else ", without a rank axis"
        raise UsageError(f"the gradient of {name!r} must be float32 {want}{rows}; got {got}")


def is_unused(grad):
    """Whether none of the hosted ranks used a parameter."""
    return grad is None or (isinstance(grad, list) and all(row is None for row in grad))


_DEFAULTS = {
    "stage": 1,
    "world_size": None,
    "precision": "fp32",
    "micro_batches": 1,
    "reduce_bucket_size": None,
    "overlap_comm": False,
}


def merged_settings(config, **given):
    """Merge a config with keywords, refusing both for the same thing."""
    if config is None:
        chosen = _DEFAULTS | {name: value for name, value in given.items() if value is not None}
        return chosen | {"stage": ZeROStage.parse(chosen["stage"])}
    if not isinstance(config, ZeROConfig):
        raise UsageError(f"config must be a ZeROConfig, got {type(config).__name__}")
    twice = [name for name, value in given.items() if value is not None]
    if twice:
        raise UsageError(f"{', '.join(twice)} given by config and by keyword; give one of the two")
    return {name: getattr(config, name) for name in given}


def check_kind(name, given, kind):
    """Return what was given if it is None or of its kind."""
    if given is not None and not isinstance(given, kind):
        raise UsageError(f"{name} must be a {kind.__name__} or None, got {given!r}")
    return given


def check_threshold(threshold):
    """Return a number of parameters, or say what is wrong with it."""
    if isinstance(threshold, bool) or not isinstance(threshold, int) or threshold < 0:
        raise UsageError(
            f"param_persistence_threshold must be a number of parameters of at least 0, "
            f"got {threshold!r}"
        )
    return threshold


def check_world(world, world_size):
    """Return the world to run in."""
    if check_kind("world", world, World) is None:
        return SimulatedWorld(1 if world_size is None else world_size)
    if world_size not in (None, world.size):
        raise UsageError(f"world_size {world_size} does not fit {world!r}; give one of the two")
    return world


def check_params(params):
    """Return parameters by name, and other names of tied ones; or say which does not fit."""
    if not isinstance(params, Mapping) or not params:
        raise UsageError("params must be a non-empty mapping of name to float32 array")
    own, aliases, name_of = {}, {}, {}
    for name, array in params.items():
        if not isinstance(array, np.ndarray) or array.dtype != np.float32:
            got = getattr(array, "dtype", type(array).__name__)
            raise UsageError(
                f"parameter {name!r} must be a float32 array, got {got}; convert it with "
                "astype(np.float32), and choose the stored format by precision or keep_fp32"
            )
        # Identity, taken before anything is copied: two names for one array are tied.
        first = name_of.setdefault(id(array), name)
        if first == name:
            own[name] = array
        else:
            aliases[name] = first
    _check_apart(own)
    return own, aliases


def _check_apart(params):
    """Refuse two arrays that share memory without being one array: they would train apart."""
    of_owner = defaultdict(list)
    for name, array in params.items():
        of_owner[id(owner_of(array))].append(name)
    for names in of_owner.values():
        for one, other in combinations(names, 2):
            if np.shares_memory(params[one], params[other]):
                raise UsageError(
                    f"parameters {one!r} and {other!r} share memory but are two arrays; give the "
                    "same array under both names to tie them, or a copy to train them apart"
                )
