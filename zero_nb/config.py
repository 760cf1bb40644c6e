"""What a run is configured by. Standard library only: every room may import this one."""

from dataclasses import dataclass
from enum import IntEnum

__all__ = [
    "PRECISIONS",
    "UsageError",
    "ZeROConfig",
    "ZeROImplementationStage",
    "ZeROStage",
    "ZeroConfig",
]

PRECISIONS = ("fp32", "bf16", "bf16-fp32-grads", "bf16-both-grads", "fp16")
"""Precision recipes a training run can name."""


class UsageError(ValueError):
    """A request that cannot be met as given; its text says what to do instead.

    The command line prints it as one line and exits with status 2.
    """


class ZeROStage(IntEnum):
    """How much is sharded; each stage includes the ones below it.

    Notes
    -----
    Rajbhandari et al., "ZeRO", arXiv:1910.02054, section 5: P_os, P_os+g, P_os+g+p.
    Stage 0 is plain data parallelism, the baseline.
    """

    STAGE_0 = 0
    """Nothing is sharded: every rank holds parameters, gradients and optimizer states."""
    STAGE_1 = 1
    """P_os: optimizer states are sharded."""
    STAGE_2 = 2
    """P_os+g: gradients too."""
    STAGE_3 = 3
    """P_os+g+p: parameters too."""

    @classmethod
    def parse(cls, value):
        """Return the stage for an int, a digit, a name such as ``"stage_2"``, or a stage.

        Parameters
        ----------
        value : int, str or ZeROStage

        Raises
        ------
        UsageError
            If `value` names no stage.
        """
        text = str(int(value)) if isinstance(value, int) else str(value).strip().lower()
        if text.startswith("stage"):
            text = text.removeprefix("stage").lstrip("_- ")
        if text not in ("0", "1", "2", "3") or isinstance(value, bool):
            raise UsageError(f"there is no ZeRO stage {value!r}; choose 0, 1, 2 or 3")
        return cls(int(text))


ZeROImplementationStage = ZeROStage


def check_world_size(world_size):
    """Return `world_size` as an int, or say what is wrong with it."""
    if isinstance(world_size, bool) or not hasattr(world_size, "__index__"):
        raise UsageError(f"world_size must be a whole number of ranks, got {world_size!r}")
    size = int(world_size)
    if size < 1:
        raise UsageError(f"world_size must be at least 1 rank, got {size}")
    return size


def check_at_least_one(name, value, what):
    """Return `value` as an int of at least 1, or say what is wrong with it."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise UsageError(f"{name} must be a whole number, got {value!r}")
    if int(value) < 1:
        raise UsageError(f"{name} must be at least 1 {what}, got {value}")
    return int(value)


def check_precision(precision, choices=PRECISIONS):
    """Return `precision` if it is one of `choices`, or name them."""
    if precision not in choices:
        raise UsageError(f"unknown precision {precision!r}; choose one of {', '.join(choices)}")
    return precision


@dataclass(frozen=True)
class ZeROConfig:
    """Settings of one sharded run; checked when constructed.

    Parameters
    ----------
    stage : int, str or ZeROStage, default 1
        1, 2 or 3. Stage 0 is refused here as in the specification; the baseline is
        ``ZeROOptimizer(stage=ZeROStage.STAGE_0)``.
    world_size : int, default 1
        Number of ranks.
    overlap_comm : bool, default True
        Gather and reduce while computing. The simulated world computes and communicates in
        turn; there it means two gradient buckets, one filled while the other is reduced.
    reduce_bucket_size : int, default 500_000_000
        Elements of gradients reduced together from stage 2 on. The default is a whole small
        model, and stage 2 then peaks above stage 1: see `zero_nb.train.buckets`.
    precision : str, default "fp32"
        One of `PRECISIONS`, for example fp32 without a master copy, or bf16 with fp32 masters.
    micro_batches : int, default 1
        Gradient accumulation: backward passes in one step.

    Raises
    ------
    UsageError
        If a field is outside its range.
    """

    stage: ZeROStage = ZeROStage.STAGE_1
    world_size: int = 1
    overlap_comm: bool = True
    reduce_bucket_size: int = 500_000_000
    precision: str = "fp32"
    micro_batches: int = 1

    def __post_init__(self):
        """Check every field, so that no invalid configuration exists."""
        self.validate()

    def validate(self):
        """Raise `UsageError` if a field is outside its range."""
        stage = ZeROStage.parse(self.stage)
        if stage == ZeROStage.STAGE_0:
            raise UsageError(
                "a ZeROConfig needs stage 1, 2 or 3, got 0; for the unsharded baseline use "
                "ZeROOptimizer(stage=ZeROStage.STAGE_0) or `zero-nb train --stage 0`"
            )
        object.__setattr__(self, "stage", stage)
        check_world_size(self.world_size)
        check_at_least_one("reduce_bucket_size", self.reduce_bucket_size, "element")
        check_at_least_one("micro_batches", self.micro_batches, "micro-batch")
        check_precision(self.precision)


ZeroConfig = ZeROConfig
