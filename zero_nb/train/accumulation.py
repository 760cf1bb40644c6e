"""Gradient accumulation: when the gradients of a step's micro-batches are reduced.

[Note: micro-batches first, or ranks first]
Stages 0 and 1 hold a rank's whole gradient anyway, so they add up micro-batches on each rank and
reduce the sum once. Stages 2 and 3 have shards only, so each micro-batch is reduced as it comes
and the reduced shards are added. Both add the same numbers, in another order: with several
micro-batches the weights of 0 and 1 are equal to the bit, those of 2 and 3 are, and the pairs
differ in the last digits. Stage 0 can be asked to go ranks first, stage 3 micro-batches first
(no_sync in PyTorch's words; it then holds whole gradients while it accumulates).
"""

from typing import final

import numpy as np

from zero_nb.config import UsageError, ZeROStage

__all__ = ["Accumulation"]

_OWN_WAY = {  # stage -> reduces after every micro-batch; why it cannot be asked for the other way
    ZeROStage.STAGE_0: (False, None),
    ZeROStage.STAGE_1: (
        False,
        "it holds whole gradients and reduces them once; stage 2 reduces every micro-batch",
    ),
    ZeROStage.STAGE_2: (
        True,
        "its gradients are sharded as soon as they exist, so every micro-batch is reduced and "
        "no_sync is illegal; use stage 1 to reduce once",
    ),
    ZeROStage.STAGE_3: (True, None),
}


@final
class Accumulation:
    """Hands gradients to a stage in its own way of accumulating, or in the other one.

    Parameters
    ----------
    stage : Stage
    micro_batches : int
        Backward passes in one step, k.
    reduce_every_micro_batch : bool, optional
        Ranks first (True) or micro-batches first (False); the stage's own way by default.

    Attributes
    ----------
    reduces_each : bool
    unit_batches : int
        How many gradients a unit has to add up by itself: k in the stage's own way, else 1.

    Raises
    ------
    UsageError
        If the stage cannot do what is asked.
    """

    def __init__(self, stage, micro_batches, reduce_every_micro_batch=None):
        own_way, why_not = _OWN_WAY[stage.number]
        asked = own_way if reduce_every_micro_batch is None else bool(reduce_every_micro_batch)
        if asked != own_way and why_not is not None:
            raise UsageError(f"stage {int(stage.number)} cannot accumulate that way: {why_not}")
        self.stage, self.micro_batches = stage, micro_batches
        self.reduces_each = asked
        self._own_way = asked == own_way
        self.unit_batches = micro_batches if self._own_way else 1
        self._sums = {}  # unit name -> [micro-batches added, their sum]

    def post_backward(self, unit, grad_RF):
        """Take a unit's partial float32 gradient (R, F) of one micro-batch."""
        unit.check_room()
        if self._own_way:
            self.stage.post_backward(unit, grad_RF)
        elif self.reduces_each:
            self.stage.post_backward(unit, grad_RF)
            self.stage.reduce(unit)
            reduced, fmt = unit.grad, unit.grad_format
            unit.drop_gradient()
            total = self._add(unit, unit.widen_held(reduced, fmt, self.micro_batches))
            if total is not None:  # as it is: already reduced, and float32 if it is a sum
                unit.grad, unit.batches_held = total, 1
        else:
            total = self._add(unit, unit.as_added(grad_RF))
            if total is not None:
                self.stage.post_backward(unit, total)

    def _add(self, unit, grad):
        """Add one micro-batch; return the sum once it is the last one."""
        done, total = self._sums.pop(unit.name, (0, None))
        if total is None:
            total = unit.ledger.register(grad, "grad", unit.name)
        else:
            with np.errstate(over="ignore", invalid="ignore"):  # the finite check sees to it
                total += grad
        if done + 1 == self.micro_batches:
            return total
        self._sums[unit.name] = (done + 1, total)
        return None

    def reduce(self, unit):
        """Finish the gradient at the end of the last backward pass."""
        if self._own_way or not self.reduces_each:
            self.stage.reduce(unit)

    def batches_held(self, unit):
        """How many micro-batches of a unit have come (int)."""
        if unit.batches_held == unit.micro_batches:
            return self.micro_batches
        return unit.batches_held if self._own_way else self._sums.get(unit.name, (0, None))[0]

    def discard(self):
        """Forget what was added."""
        self._sums.clear()
