"""All parameters of an optimizer at hand, outside training; edits are written back, or refused.

Shape suffixes: R ranks hosted here, F padded flat length of a unit.
"""

from contextlib import contextmanager

import numpy as np

from zero_nb.config import UsageError

__all__ = ["gathered"]


@contextmanager
def gathered(optimizer, modify_rank=None):
    """Hold all parameters gathered within the block; see `ZeROOptimizer.gathered_parameters`."""
    world = optimizer.world
    if modify_rank is not None and modify_rank not in range(world.size):
        raise UsageError(f"modify_rank must be within 0..{world.size - 1}, got {modify_rank}")
    with world.purpose("other"):
        copies = {unit: _copy_of(optimizer, unit) for unit in optimizer.units}
        views = {}
        for unit, full_RF in copies.items():
            for name, view in unit.views(full_RF).items():
                view.flags.writeable = modify_rank is not None
                views[name] = view
        before = None
        if modify_rank is not None:
            before = {unit: full_RF.copy() for unit, full_RF in copies.items()}
        yield {name: views[name] for name in optimizer.names}
        if modify_rank is not None:
            _check_edits(world, before, copies, modify_rank)
            for unit, full_RF in copies.items():
                _write_back(world, unit, before[unit], full_RF, modify_rank)


def _copy_of(optimizer, unit):
    """Return a copy (R, F) of what the ranks compute with; padding is zero."""
    full_RF = np.zeros((optimizer.world.hosted, unit.layout.padded_numel), np.float32)
    optimizer.ledger.register(full_RF, "unsharded", unit.name)
    copies = unit.views(full_RF)
    for name, view in optimizer.unshard(unit).items():
        copies[name][...] = view
    optimizer.reshard(unit)
    return full_RF


def _check_edits(world, before, after, modify_rank):
    """Refuse edits by a rank whose edits do not count."""
    for unit in before:
        for row, rank in enumerate(world.ranks):
            if rank != modify_rank and _differ(before[unit][row], after[unit][row]).any():
                raise UsageError(
                    f"rank {rank} changed unit {unit.name!r}, but modify_rank is "
                    f"{modify_rank}; nothing was written back"
                )


def _write_back(world, unit, before_RF, after_RF, modify_rank):
    """Give every rank the elements that one rank changed, and keep all others as they are.

    In a 16-bit recipe an element that was not changed keeps its master's last bits, which the
    gathered copy does not have.
    """
    changed_RF = _differ(before_RF, after_RF).astype(np.float32)
    world.broadcast(changed_RF, root=modify_rank, label=unit.name)
    world.broadcast(after_RF, root=modify_rank, label=unit.name)
    where_RF = changed_RF != 0
    if unit.optim.master is not None:
        master = unit.optim.master
        np.copyto(master, unit.fit(after_RF, master), where=unit.fit(where_RF, master))
    rounded_RF = unit.recipe.param.round(after_RF)
    np.copyto(unit.param, unit.fit(rounded_RF, unit.param), where=unit.fit(where_RF, unit.param))


def _differ(a, b):
    """Return where two float32 arrays differ in their bits (NaN equals itself, -0 is not 0)."""
    return a.view(np.uint32) != b.view(np.uint32)
