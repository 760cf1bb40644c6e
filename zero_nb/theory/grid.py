"""A grid of plans at once, with the arithmetic of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from zero_nb.config import UsageError
from zero_nb.theory.checks import check_count, check_stage
from zero_nb.theory.frameworks import CONTEXT_BYTES, RESERVED_OVER_ALLOCATED
from zero_nb.theory.peak import (
    LARGEST_BYTES,
    LINES,
    MOMENTS,
    DeviceModel,
    Run,
    bytes_per_sample,
    device_model,
    moment_lines,
)
from zero_nb.theory.presets import get_model
from zero_nb.theory.setting import (
    BYTE_KINDS,
    ClusterSpec,
    device_totals,
    make_run,
    meaningful_options,
)
from zero_nb.theory.specs import ModelSpec

__all__ = ["PlanGrid", "plan_grid"]


@dataclass(frozen=True)
class PlanGrid:
    """Plans over models × world sizes × stages × micro-batches.

    Attributes
    ----------
    models : tuple of ModelSpec
    world_sizes, stages, batches : tuple of int
        `batches` are sizes of a micro-batch.
    total_bytes : ndarray of int64, shape (models, world sizes, stages, micro-batches)
        Middle of the device's range, as `Plan.total_bytes`.
    moment : ndarray of int8, same shape
        Index into `MOMENTS`.
    elements_sent : ndarray of int64, shape (models, world sizes, stages)
    device_bytes : int or None
    """

    models: tuple[ModelSpec, ...]
    world_sizes: tuple[int, ...]
    stages: tuple[int, ...]
    batches: tuple[int, ...]
    total_bytes: np.ndarray
    moment: np.ndarray
    elements_sent: np.ndarray
    device_bytes: int | None = None
    kinds: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def fits(self) -> np.ndarray:
        """Whether each plan fits; shape as `total_bytes`."""
        if self.device_bytes is None:
            raise UsageError("this grid was made without device_bytes; give it to plan_grid")
        return self.total_bytes <= self.device_bytes

    @property
    def smallest_stage(self) -> np.ndarray:
        """The first stage that fits, −1 if none; shape (models, world sizes, micro-batches)."""
        fits = self.fits
        stages = np.array(self.stages)[fits.argmax(axis=2)]
        return np.where(fits.any(axis=2), stages, -1)


def plan_grid(
    models: Sequence[ModelSpec | str],
    world_sizes: Sequence[int],
    stages: Sequence[int] = (0, 1, 2, 3),
    batches: Sequence[int] = (1,),
    *,
    device_bytes: int | None = None,
    by_kind: bool = False,
    **options: object,
) -> PlanGrid:
    """Plan every combination at once.

    Parameters
    ----------
    models : sequence of ModelSpec or str
    world_sizes, stages, batches : sequence of int
        Axes of the grid; world sizes are multiples of tp·pp·sp, `batches` sizes of a micro-batch.
    device_bytes : int, optional
    by_kind : bool
        Also keep bytes by kind (`PlanGrid.kinds`), at the largest moment.
    **options
        As for `plan`; `seq` is 2048 unless given.

    Returns
    -------
    PlanGrid
        Every entry equals what `plan` says for that setting.
    """
    specs = tuple(get_model(each) if isinstance(each, str) else each for each in models)
    worlds = [check_count("world_size", each, least=1) for each in world_sizes]
    batches = [check_count("micro_batch", each, least=1) for each in batches]
    stages = [check_stage(each) for each in stages]
    if not (specs and worlds and stages and batches):
        raise UsageError("a grid needs at least one model, world size, stage and micro-batch")
    runs = [make_run(ClusterSpec(world), stages[0], **options) for world in worlds]
    dp = np.array([run.dp for run in runs], np.int64).reshape(1, -1, 1)
    batch = np.array(batches, np.int64).reshape(1, 1, -1)
    shape = (len(specs), len(worlds), len(stages), len(batches))
    total, moment = np.empty(shape, np.int64), np.empty(shape, np.int8)
    sent = np.empty(shape[:3], np.int64)
    kinds = {kind: np.zeros(shape, np.int64) for kind in BYTE_KINDS} if by_kind else {}
    for column, stage in enumerate(stages):
        run = make_run(ClusterSpec(worlds[0]), stage, **meaningful_options(stage, options))
        fullest = np.zeros((shape[0], shape[1], shape[3]), np.int64)
        for place in range(run.pp):
            here = [device_model(spec, run, place) for spec in specs]
            _check_room(here, run, max(batches))
            model = DeviceModel.stack(here)
            bytes_here, index = device_totals(model, run, dp, batch)
            larger = np.broadcast_to(bytes_here, fullest.shape) > fullest
            fullest = np.where(larger, bytes_here, fullest)
            moment[:, :, column] = np.where(larger, index, moment[:, :, column])
            elements = np.broadcast_to(_elements(model, run, dp)[..., 0], sent.shape[:2])
            sent[:, :, column] = np.where(larger[..., 0], elements, sent[:, :, column])
            if by_kind:
                _fill_kinds(kinds, column, larger, model, run, dp, batch, index)
        total[:, :, column] = fullest
    return PlanGrid(
        specs, tuple(worlds), tuple(stages), tuple(batches), total, moment, sent, device_bytes,
        MappingProxyType(kinds),
    )  # fmt: skip


def _check_room(models: list[DeviceModel], run: Run, batch: int) -> None:
    """Refuse a grid whose bytes would not fit into 64-bit integers."""
    for model in models:
        if batch * bytes_per_sample(model, run) + 64 * model.numel > LARGEST_BYTES:
            raise UsageError(
                f"micro-batches up to {batch:,} of {run.seq:,} tokens need more than an exabyte; "
                "give smaller numbers"
            )


def _elements(model: DeviceModel, run: Run, dp: np.ndarray) -> np.ndarray:
    """Elements sent, as `step_traffic` counts them, over arrays."""
    shard = -(-model.block_numel // dp) * model.blocks + -(-model.root_numel // dp)
    factor = {0: 2, 1: 2, 2: run.micro_batches + 1, 3: 3 * run.micro_batches}[run.stage]
    return shard * (dp - 1) * factor


def _fill_kinds(kinds, column, larger, model, run, dp, batch, index) -> None:
    """Write bytes by kind where this pipeline stage is the fullest."""
    lines = moment_lines(model, run, dp, batch)
    shape = larger.shape
    here = {kind: np.zeros(shape, np.int64) for kind in BYTE_KINDS}
    for number, name in enumerate(MOMENTS):
        chosen = np.broadcast_to(index == number, shape)
        for line, value in lines[name].items():
            here[LINES[line]] += np.where(chosen, value, 0)
    allocated = sum(here.values())
    ratio = RESERVED_OVER_ALLOCATED[1] if run.framework.caching else 1.0
    here["fragmentation"] = np.rint(allocated * ratio).astype(np.int64) - allocated
    alone, several = CONTEXT_BYTES["alone"][1], CONTEXT_BYTES["connected"][1]
    context = np.where(dp * run.tp * run.pp > 1, several, alone)
    here["context"] = np.broadcast_to(
        context if run.context_bytes is None else run.context_bytes, shape
    )
    for kind in BYTE_KINDS:
        kinds[kind][:, :, column] = np.where(larger, here[kind], kinds[kind][:, :, column])
