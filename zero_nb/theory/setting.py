"""What a plan is asked about: a model, devices, and how to train; and the bytes of many at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from zero_nb.config import UsageError
from zero_nb.theory.checks import check_count
from zero_nb.theory.frameworks import (
    CONTEXT_BYTES,
    RESERVED_OVER_ALLOCATED,
    Framework,
    get_framework,
)
from zero_nb.theory.memory import get_recipe, recipe_state_bytes
from zero_nb.theory.network import Network
from zero_nb.theory.peak import (
    MOMENTS,
    DeviceModel,
    Peak,
    Run,
    device_model,
    moment_lines,
    pipeline_peaks,
)
from zero_nb.theory.presets import Device, get_device, get_model
from zero_nb.theory.specs import ModelSpec, shape_for

__all__ = [
    "BYTE_KINDS",
    "ClusterSpec",
    "Question",
    "device_totals",
    "make_run",
    "meaningful_options",
    "resolve_model",
]

BYTE_KINDS = (
    "param", "grad", "optim", "activation", "logits", "bucket", "unsharded", "context",
    "fragmentation", "padding",
)  # fmt: skip
"""Kinds of a plan's bytes: those of tensors, and what lies outside them."""


@dataclass(frozen=True)
class ClusterSpec:
    """The devices of a plan.

    Attributes
    ----------
    world_size : int
        All of them.
    device_bytes : int, optional
        Memory of one; without it nothing can fit or not fit.
    network : Network, optional
        How they talk.
    flops_per_s : float, optional
        Peak of one, dense 16-bit.
    name : str
        What they are called.
    """

    world_size: int
    device_bytes: int | None = None
    network: Network | None = None
    flops_per_s: float | None = None
    name: str = ""

    def __post_init__(self) -> None:
        """Refuse impossible counts."""
        check_count("world_size", self.world_size, least=1)
        if self.device_bytes is not None:
            check_count("device memory", self.device_bytes, least=1)

    @classmethod
    def of(
        cls, device: str | Device, world_size: int, device_bytes: int | None = None
    ) -> ClusterSpec:
        """`world_size` devices of a preset, with other memory where given."""
        device = get_device(device) if isinstance(device, str) else device
        return cls(
            world_size,
            device_bytes or device.memory_bytes,
            Network.of(device),
            device.flops_per_s,
            device.name,
        )


def resolve_model(model: ModelSpec | str | int, seq: int | None = None) -> tuple[ModelSpec, int]:
    """The shape and the parameter count of a model given in any of three ways.

    Parameters
    ----------
    model : ModelSpec, str or int
        A shape, a preset's name, or a bare number of parameters.
    seq : int, optional
        Positions of the shape made for a bare number.

    Returns
    -------
    spec : ModelSpec
    numel : int
    """
    if isinstance(model, ModelSpec):
        return model, model.numel
    if isinstance(model, str):
        spec = get_model(model)
        return spec, spec.numel
    numel = check_count("params", model, least=1, most=10**15)
    return shape_for(numel, seq=seq or 2048), numel


def make_run(
    cluster: ClusterSpec,
    stage: int,
    *,
    framework: str | Framework = "zero",
    precision: str | None = None,
    optimizer: str = "adamw",
    seq: int = 2048,
    loss: str | None = None,
    execution: str | None = None,
    **options: object,
) -> Run:
    """A `Run` from names, with the framework's own choices where none is made.

    Parameters
    ----------
    cluster : ClusterSpec
    stage : int
    framework, precision, optimizer, loss, execution : str
        Names, see `FRAMEWORKS`, `PRECISIONS`, `OPTIMIZERS`, `LOSSES`, `EXECUTIONS`.
    seq : int
    **options
        Any other field of `Run`.

    Returns
    -------
    Run
    """
    framework = get_framework(framework) if isinstance(framework, str) else framework
    unknown = set(options) - set(Run.__dataclass_fields__)
    if unknown:
        raise UsageError(f"unknown option {', '.join(sorted(unknown))} of a plan")
    options = {name: value for name, value in options.items() if value is not None}
    return Run(
        world_size=cluster.world_size,
        stage=stage,
        framework=framework,
        recipe=get_recipe(precision or framework.precision, optimizer),
        seq=seq,
        loss=loss or framework.loss,
        execution=execution or framework.execution,
        **options,
    )


def meaningful_options(stage: int, options: dict[str, object]) -> dict[str, object]:
    """The options as far as they have a meaning at a stage."""
    offload = frozenset(options.get("offload") or ())
    if stage < 3 and "param" in offload:
        return options | {"offload": offload - {"param"}}
    return options


@dataclass(frozen=True)
class Question:
    """A model on a cluster, and which accounting."""

    spec: ModelSpec
    numel: int
    cluster: ClusterSpec
    states_only: bool

    def peaks(self, run: Run) -> list[Peak]:
        """One for each pipeline stage."""
        return pipeline_peaks(self.spec, run, self.numel)

    def models(self, run: Run) -> list[DeviceModel]:
        """What the device of each pipeline stage computes."""
        return [device_model(self.spec, run, each, self.numel) for each in range(run.pp)]

    def states(self, run: Run) -> dict[str, int]:
        """The paper's three kinds, on the device of the fullest pipeline stage."""
        largest = max(model.numel for model in self.models(run))
        return recipe_state_bytes(run.stage, run.dp, largest, run.recipe).as_dict()

    def total(self, run: Run) -> int:
        """Bytes on the fullest device."""
        if self.states_only:
            return sum(self.states(run).values())
        return max(peak.device()[1] for peak in self.peaks(run))

    def fits(self, total: int) -> bool:
        """Whether that many bytes fit; without a device everything does."""
        return self.cluster.device_bytes is None or total <= self.cluster.device_bytes


def device_totals(model: DeviceModel, run: Run, dp, micro_batch) -> np.ndarray:
    """Middle device bytes over arrays of `dp` and `micro_batch`, and the moment's index."""
    lines = moment_lines(model, run, dp, micro_batch)
    totals = [sum(lines[moment].values()) for moment in MOMENTS]
    allocated, index = totals[0], 0
    for number, total in enumerate(totals[1:], start=1):
        larger = total > allocated
        index = np.where(larger, number, index)
        allocated = np.maximum(allocated, total)
    ratio = RESERVED_OVER_ALLOCATED[1] if run.framework.caching else 1.0
    reserved = np.rint(allocated * ratio).astype(np.int64)
    if run.context_bytes is not None:
        context = run.context_bytes
    else:
        alone, several = CONTEXT_BYTES["alone"][1], CONTEXT_BYTES["connected"][1]
        context = np.where(dp * run.tp * run.pp > 1, several, alone)
    return reserved + context, index
