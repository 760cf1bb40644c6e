"""The one gradient scale of a step: global norm, clipping, loss scale, the finite check.

Everything here is agreed on by all ranks before anything is changed: each rank looks at its own
slice of every unit (padding and unused parameters left out), partial results are made known to
all, and every rank computes the same scale and the same decision to apply or skip.

[Note: one scale, one decision]
``grad_scale`` = clip factor / loss scale, one float32 for the whole model, multiplies each
gradient inside the rule after widening. If any element on any rank is not finite, no rank updates
anything: a rank that skipped alone would train another model from then on.
"""

import math
from dataclasses import dataclass
from numbers import Real
from typing import final

import numpy as np

from zero_nb.config import UsageError, check_at_least_one
from zero_nb.core import norm

__all__ = [
    "DynamicLossScale",
    "LossScaleError",
    "check_max_grad_norm",
    "check_norm_type",
    "clip_factor",
    "global_norm",
]


SMALLEST_NORM_TYPE = 0.1


def global_norm(world, units, left_out=(), *, p=2.0):
    """Return the p-norm of the reduced gradient of all `units`; the finite check too.

    Parameters
    ----------
    world : World
    units : sequence of Unit
        Trainable, after `reduce`: each rank's own slice of `grad` is final.
    left_out : collection of str
        Parameters that no rank used.
    p : float, default 2
        Above 0; ``inf`` is the largest magnitude, which takes least time.

    Returns
    -------
    float
        ``inf`` if any element on any rank is not finite. A rank that owns only padding
        contributes 0 and takes part.

    Notes
    -----
    The norm of one rank's shard is not the norm. The sums are order-free (see
    [Note: order-free norm]), so every stage, unit and thread count gives the same bits for the
    same reduced gradient. Each parameter counts once: shards do not overlap, and tied names are
    one parameter.
    """
    check_norm_type(p)
    numel = sum(unit.layout.numel for unit in units)
    largest_R, jobs = np.zeros(world.hosted, np.float64), []
    for unit, runs in _jobs(units, left_out):
        job = unit.grad.reshape(-1), runs, world.hosted, unit.grad_format
        squares = None
        if p == 2:
            so_far = largest_R.max() if np.isfinite(largest_R).all() else 0.0
            partial_R, squares = norm.max_and_squares(*job, numel, so_far)
        else:
            partial_R = norm.max_abs(*job)
        largest_R = np.maximum(largest_R, partial_R)
        jobs.append((job, squares))
    largest = float(world.all_gather_scalars(largest_R[:, None], label="max").max())
    if largest == 0.0 or not math.isfinite(largest) or math.isinf(p):
        return largest
    sums_R = np.zeros(world.hosted, np.int64)
    for job, squares in jobs:
        if p == 2:
            sums_R += norm.sum_squares_fixed(*job, largest, numel, squares)
        else:
            sums_R += norm.sum_powers_fixed(*job, largest, numel, p)
    total = sum(world.all_gather_scalars(sums_R[:, None], label="norm")[:, 0].tolist())
    if p == 2:
        return norm.fixed_to_norm(total, largest, numel)
    return norm.fixed_to_power_norm(total, largest, numel, p)


def _jobs(units, left_out):
    """Pair each unit with the runs of each rank's own slice, whatever the stage."""
    for unit in units:
        hyper_of = tuple(-1 if name in left_out else 0 for name in unit.layout.names)
        yield unit, unit.runs(hyper_of, every_replica=False)


def clip_factor(total_norm, max_norm):
    """Return min(1, max_norm / total_norm): 1 leaves the gradient as it is.

    Parameters
    ----------
    total_norm : float
        Finite; of the unscaled gradient.
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
    number = isinstance(max_grad_norm, Real) and not isinstance(max_grad_norm, bool)
    if not (number and math.isfinite(max_grad_norm) and max_grad_norm > 0):
        raise UsageError(
            f"max_grad_norm must be a finite number above 0, or None for no clipping; "
            f"got {max_grad_norm!r}"
        )
    return float(max_grad_norm)


def check_norm_type(p):
    """Return `p` as a float if it names a norm, or say what is wrong with it."""
    if not (isinstance(p, Real) and p > 0):
        raise UsageError(f"norm_type must be above 0 (2, 1, inf, ...), got {p!r}")
    if p < SMALLEST_NORM_TYPE:
        raise UsageError(
            f"norm_type must be at least {SMALLEST_NORM_TYPE}, got {p!r}: the norm of n elements "
            "grows like n to the power of 1 / norm_type and would overflow"
        )
    return float(p)


class LossScaleError(RuntimeError):
    """Gradients overflow at the smallest loss scale: lowering it further would loop for ever."""


@final
@dataclass
class DynamicLossScale:
    """A loss scale that falls at overflows and rises after quiet times.

    Parameters
    ----------
    scale : float, default 65536
        What the loss is multiplied by; powers of two lose no bits.
    growth_factor, backoff_factor : float
    growth_interval : int
        Steps without overflow before the scale rises.
    hysteresis : int
        Overflows in a row before the scale falls: the first ``hysteresis - 1`` are forgiven.
    floor : float
        The scale never falls below it.

    Notes
    -----
    Micikevicius et al., "Mixed Precision Training", 2018, section 3.2; hysteresis as in Megatron
    and DeepSpeed.
    """

    scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 2
    floor: float = 1.0
    quiet_steps: int = 0
    forgiven: int = 0

    def __post_init__(self):
        """Check every field."""
        if not (math.isfinite(self.scale) and self.scale >= self.floor > 0):
            raise UsageError(
                f"a loss scale must be finite and at least its floor, which is above 0; got scale "
                f"{self.scale}, floor {self.floor}"
            )
        if not (self.growth_factor > 1 > self.backoff_factor > 0):
            raise UsageError(
                "growth_factor must be above 1 and backoff_factor between 0 and 1, got "
                f"{self.growth_factor} and {self.backoff_factor}"
            )
        check_at_least_one("growth_interval", self.growth_interval, "step")
        check_at_least_one("hysteresis", self.hysteresis, "overflow")

    def overflow(self):
        """Take note of a skipped step.

        Raises
        ------
        LossScaleError
            If the scale is at its floor already.
        """
        self.quiet_steps = 0
        if self.forgiven < self.hysteresis - 1:
            self.forgiven += 1
            return
        if self.scale <= self.floor:
            raise LossScaleError(
                f"the gradients overflow at the smallest loss scale, {self.floor:g}; lower the "
                "learning rate, clip, or train in bf16"
            )
        self.scale = max(self.floor, self.scale * self.backoff_factor)

    def success(self):
        """Take note of an applied step."""
        self.quiet_steps += 1
        if self.quiet_steps >= self.growth_interval:
            self.scale *= self.growth_factor
            self.quiet_steps = self.forgiven = 0

    def state_dict(self):
        """Return what changes while training."""
        return {
            "scale": self.scale,
            "quiet_steps": self.quiet_steps,
            "forgiven": self.forgiven,
        }

    def load_state_dict(self, state):
        """Go on from `state_dict`."""
        self.scale = float(state["scale"])
        self.quiet_steps, self.forgiven = int(state["quiet_steps"]), int(state["forgiven"])
