"""Gradients on their way: which travel together, in backward order."""

from typing import final

import numpy as np

__all__ = ["GradientBuffer"]


@final
class GradientBuffer:
    """The float32 gradient of one unit while its backward pass writes it, contiguous.

    Layers write into `views`, so that no gradient is copied before it travels.

    Parameters
    ----------
    unit : Unit

    Attributes
    ----------
    grad_RF : ndarray, shape (R, F), float32
        Padding is zero.
    views : dict of str to ndarray (R, *shape)
    """

    def __init__(self, unit):
        layout = unit.layout
        self.unit = unit
        self.grad_RF = np.empty((unit.world.hosted, layout.padded_numel), np.float32)
        self.grad_RF[:, layout.numel :] = 0.0
        # A float32 gradient is what travels; in a 16-bit recipe it is only computed with.
        kind = "bucket" if unit.recipe.wire.dtype == np.float32 else "workspace"
        unit.ledger.register(self.grad_RF, kind, unit.name)
        self.views = unit.views(self.grad_RF)
