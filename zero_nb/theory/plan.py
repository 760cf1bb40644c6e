"""One answer to one question: does this model fit on these devices, what does it cost, and why.

`plan` answers for one setting; `plan_grid` for a grid of them at once, with the same arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from zero_nb.config import UsageError
from zero_nb.theory.advice import advise
from zero_nb.theory.checks import check_stage
from zero_nb.theory.grid import PlanGrid, plan_grid
from zero_nb.theory.memory import recipe_state_bytes
from zero_nb.theory.network import StepTime, flops_per_token, step_time
from zero_nb.theory.peak import LARGEST_BYTES, Peak, Run, bytes_per_sample
from zero_nb.theory.setting import (
    BYTE_KINDS,
    ClusterSpec,
    Question,
    device_totals,
    make_run,
    meaningful_options,
    resolve_model,
)
from zero_nb.theory.specs import ModelSpec
from zero_nb.theory.traffic import StepTraffic, step_traffic, tensor_parallel_elements

__all__ = ["ClusterSpec", "Plan", "PlanGrid", "make_run", "plan", "plan_grid", "resolve_model"]

LARGEST_WORLD = 2**16
"""How many data-parallel ranks are tried for the smallest world size that fits."""
LARGEST_BATCH = 2**16

LEFT_OUT = (
    "kernel workspaces inside the framework's allocator",
    "data loading and evaluation",
    "activations outside transformer layers other than the head's",
)
"""What no line of a plan counts."""


@dataclass(frozen=True)
class Plan:
    """What one device of a setting needs, whether that fits, and what to try.

    Attributes
    ----------
    model : str
    numel : int
        Parameters of the whole model.
    world_size, stage : int
    precision, framework : str
    bytes : mapping of str to int
        By kind, at the largest moment of the fullest device; sums to `total_bytes`.
    total_bytes : int
        What nvidia-smi would show, the middle of `range_bytes`; model states only if so asked.
    device_bytes : int or None
    fits : bool or None
        None without a device.
    moment : str
        Which moment is the largest.
    moments : mapping of str to int
        Allocated bytes at each moment.
    lines : mapping of str to int
        Every line of the largest moment.
    range_bytes : mapping of str to tuple of int
        ``allocated``, ``reserved``, ``device``: low, middle, high.
    stages : tuple of mapping
        ``stage``, ``total_bytes``, ``fits`` and ``bytes`` for each of the four stages.
    pipeline : tuple of mapping
        Total and largest moment on each pipeline stage.
    smallest_stage, smallest_world_size : int or None
        That fit; None if none does, or without a device.
    largest_numel, largest_micro_batch : int or None
        That fit, everything else as it is; the model grows in the same proportions.
    elements_sent : int
        By the fullest device in one optimizer step, for parameters and gradients.
    time : StepTime or None
        Without a known device there is none.
    advice : tuple of str
        In plain words: what decides, and what to try next.
    states_only : bool
    """

    model: str
    numel: int
    world_size: int
    stage: int
    precision: str
    framework: str
    bytes: Mapping[str, int]
    total_bytes: int
    device_bytes: int | None
    fits: bool | None
    moment: str
    moments: Mapping[str, int]
    lines: Mapping[str, int]
    range_bytes: Mapping[str, tuple[int, int, int]]
    stages: tuple[Mapping[str, object], ...]
    pipeline: tuple[Mapping[str, object], ...]
    smallest_stage: int | None
    smallest_world_size: int | None
    largest_numel: int | None
    largest_micro_batch: int | None
    elements_sent: int
    time: StepTime | None
    advice: tuple[str, ...]
    states_only: bool = False

    @property
    def left_bytes(self) -> int | None:
        """Device memory left; negative where it does not fit."""
        return None if self.device_bytes is None else self.device_bytes - self.total_bytes

    @property
    def step_seconds_bound(self) -> float | None:
        """Lower bound on the time of a step, seconds."""
        return self.time.bound_s if self.time else None

    def to_json(self) -> dict[str, object]:
        """The plan as JSON can hold it; bytes and elements are those of the fullest device."""
        answer = {
            "model": self.model,
            "numel": self.numel,
            "world_size": self.world_size,
            "stage": self.stage,
            "precision": self.precision,
            "bytes": dict(self.bytes),
            "total_bytes": self.total_bytes,
            "device_bytes": self.device_bytes,
            "fits": self.fits,
            "smallest_stage": self.smallest_stage,
            "smallest_world_size": self.smallest_world_size,
            "largest_numel": self.largest_numel,
            "elements_sent": self.elements_sent,
            "step_seconds_bound": self.step_seconds_bound,
            "advice": list(self.advice),
            "stages": [{key: _plain(value) for key, value in row.items()} for row in self.stages],
        }
        if self.states_only:
            return answer
        return answer | {
            "framework": self.framework,
            "largest_micro_batch": self.largest_micro_batch,
            "left_bytes": self.left_bytes,
            "moment": self.moment,
            "moments": dict(self.moments),
            "lines": dict(self.lines),
            "range_bytes": {key: list(value) for key, value in self.range_bytes.items()},
            "pipeline": [dict(row) for row in self.pipeline],
            "left_out": list(LEFT_OUT),
        }


def _plain(value: object) -> object:
    """A mapping as a dict; anything else as it is."""
    return dict(value) if isinstance(value, Mapping) else value


# --- the question --------------------------------------------------------------------------------


def plan(
    model: ModelSpec | str | int,
    cluster: ClusterSpec | int,
    *,
    stage: int | str = "auto",
    seq: int | None = None,
    states_only: bool = False,
    **options: object,
) -> Plan:
    """Plan one setting.

    Parameters
    ----------
    model : ModelSpec, str or int
        A shape, a preset's name, or a bare number of parameters.
    cluster : ClusterSpec or int
        Devices; an int is just how many.
    stage : int or "auto"
        ``"auto"`` is the smallest stage that fits, or 3 if none does.
    seq : int, optional
        Sequence length; the model's context, up to 8192, by default.
    states_only : bool
        The paper's accounting: parameters, gradients and optimizer states, nothing else.
    **options
        See `make_run` and `Run`: framework, precision, optimizer, micro_batch, micro_batches,
        tp, pp, sp, recompute, execution, loss, flash, dropout, sequence_parallel, offload, …

    Returns
    -------
    Plan

    Raises
    ------
    UsageError
        For whatever cannot be, in one line.

    Examples
    --------
    >>> plan(7_500_000_000, 64, stage=1, states_only=True).total_bytes
    31406250000
    """
    cluster = ClusterSpec(cluster) if isinstance(cluster, int) else cluster
    spec, numel = resolve_model(model, seq)
    options = {"seq": seq or min(spec.context, 8192)} | options
    runs = [make_run(cluster, each, **meaningful_options(each, options)) for each in range(4)]
    question = Question(spec, numel, cluster, states_only)
    totals = [question.total(run) for run in runs]
    fitting = [each for each, total in enumerate(totals) if question.fits(total)]
    smallest = fitting[0] if fitting else None
    if stage == "auto":
        stage = 3 if smallest is None else smallest
    stage = check_stage(stage)
    run = make_run(cluster, stage, **options)
    return _answer(question, run, runs, totals, smallest)


def _answer(
    question: Question, run: Run, runs: list[Run], totals: list[int], smallest: int | None
) -> Plan:
    """Put the plan together."""
    spec, cluster = question.spec, question.cluster
    peaks = question.peaks(run)
    peak = max(peaks, key=lambda each: each.device()[1])
    known = cluster.device_bytes is not None
    states = question.states(run)
    total = sum(states.values()) if question.states_only else peak.device()[1]
    traffic = _traffic(question, run, peak.pipeline_stage)
    answer = Plan(
        model=spec.name,
        numel=question.numel,
        world_size=cluster.world_size,
        stage=run.stage,
        precision=run.recipe.name,
        framework=run.framework.name,
        bytes=MappingProxyType(states if question.states_only else _by_kind(peak)),
        total_bytes=total,
        device_bytes=cluster.device_bytes,
        fits=question.fits(total) if known else None,
        moment="" if question.states_only else peak.moment,
        moments=MappingProxyType(peak.moments),
        lines=MappingProxyType(peak.lines),
        range_bytes=MappingProxyType(
            {
                "allocated": (peak.allocated,) * 3,
                "reserved": peak.reserved(),
                "device": peak.device(),
            }
        ),
        stages=tuple(
            MappingProxyType(_stage_row(question, each, value, known))
            for each, value in zip(runs, totals, strict=True)
        ),
        pipeline=tuple(
            MappingProxyType(
                {
                    "stage": each.pipeline_stage,
                    "total_bytes": each.device()[1],
                    "moment": each.moment,
                    "numel": each.numel,
                }
            )
            for each in peaks
        ),
        smallest_stage=smallest if known else None,
        smallest_world_size=_smallest_world(question, run) if known else None,
        largest_numel=_largest_numel(question, run) if known else None,
        largest_micro_batch=_largest_batch(question, run) if known else None,
        elements_sent=traffic.elements,
        time=_time(spec, run, traffic, cluster, peak),
        advice=(),
        states_only=question.states_only,
    )
    return replace(answer, advice=tuple(advise(answer, question, run, peak)))


def _by_kind(peak: Peak) -> dict[str, int]:
    """Kinds of the largest moment with what lies outside tensors; sums to the device's total."""
    kinds = dict.fromkeys(BYTE_KINDS, 0) | peak.by_kind()
    kinds["context"] = peak.context[1]
    kinds["fragmentation"] = peak.reserved()[1] - peak.allocated
    return {kind: kinds[kind] for kind in BYTE_KINDS}


def _stage_row(question: Question, run: Run, total: int, known: bool) -> dict[str, object]:
    """One stage of the comparison."""
    if question.states_only:
        kinds = question.states(run)
    else:
        kinds = _by_kind(max(question.peaks(run), key=lambda each: each.device()[1]))
    return {
        "stage": run.stage,
        "bytes": MappingProxyType(kinds),
        "total_bytes": total,
        "fits": question.fits(total) if known else None,
    }


# --- traffic and time ----------------------------------------------------------------------------


def _traffic(question: Question, run: Run, pipeline_stage: int) -> StepTraffic:
    """What the device sends for data parallelism."""
    model = question.models(run)[pipeline_stage]
    units = [model.block_numel] * model.blocks
    units += [model.root_numel] if model.root_numel else []
    if question.numel != question.spec.numel:  # a bare number has no units to pad
        units = [model.numel]
    return step_traffic(run.stage, run.dp, units, micro_batches=run.micro_batches)


def _time(
    spec: ModelSpec, run: Run, traffic: StepTraffic, cluster: ClusterSpec, peak: Peak
) -> StepTime | None:
    """Bounds on the step, where the device is known."""
    if cluster.network is None or cluster.flops_per_s is None:
        return None
    tokens = run.micro_batch * run.micro_batches * run.seq // run.sp
    flops = flops_per_token(spec, run.seq, recompute_full=run.recompute == "full") * tokens
    recipe = run.recipe
    wire = 4 if recipe.grad_bytes == 4 else 2
    sent = traffic.grad_elements * wire + traffic.param_elements * recipe.compute_bytes
    whole = sent * run.dp / (run.dp - 1) if run.dp > 1 else 0
    layers = spec.stage_layers(run.pp)[peak.pipeline_stage]
    tensor = tensor_parallel_elements(
        layers,
        run.seq // run.sp,
        run.micro_batch,
        spec.hidden,
        run.tp,
        recompute=run.recompute == "full",
    )
    return step_time(
        flops=flops / (run.tp * run.pp),
        flops_per_s=cluster.flops_per_s,
        data_parallel_bytes=whole,
        data_parallel_ranks=run.dp,
        data_parallel_messages=traffic.grad_messages + traffic.param_messages,
        tensor_parallel_bytes=tensor * recipe.compute_bytes * run.micro_batches,
        tp=run.tp,
        bubble=(run.pp - 1) / max(run.micro_batches, run.pp),
        network=cluster.network,
    )


# --- what would fit ----------------------------------------------------------------------------


def _first(fits: Callable[[np.ndarray], np.ndarray], candidates: np.ndarray) -> int | None:
    """The first candidate that fits."""
    found = np.flatnonzero(fits(candidates))
    return int(candidates[found[0]]) if found.size else None


def _smallest_world(question: Question, run: Run) -> int | None:
    """The smallest number of devices on which the stage fits, in steps of tp·pp·sp."""
    limit, step = question.cluster.device_bytes, run.sp
    candidates = np.arange(step, LARGEST_WORLD + 1, step, dtype=np.int64)
    if question.states_only:
        recipe, numel = run.recipe, max(1, question.states(replace(run, stage=0))["param"])
        numel //= recipe.param_bytes
        cut = [run.stage >= first for first in (3, 2, 1)]
        kinds = (recipe.param_bytes, recipe.grad_bytes, recipe.optim_bytes)

        def states(dp: np.ndarray) -> np.ndarray:
            parts = [
                each * numel // (dp if share else 1) for each, share in zip(kinds, cut, strict=True)
            ]
            return sum(parts) <= limit

        found = _first(states, candidates)
    else:
        models = question.models(run)

        def fits(dp: np.ndarray) -> np.ndarray:
            each = [device_totals(model, run, dp, run.micro_batch)[0] for model in models]
            return np.maximum.reduce(each) <= limit

        found = _first(fits, candidates)
    return None if found is None else found * run.tp * run.pp


def _largest_batch(question: Question, run: Run) -> int | None:
    """The largest micro-batch that fits, or None."""
    if question.states_only:
        return None
    models = question.models(run)
    most = LARGEST_BYTES // max(bytes_per_sample(model, run) for model in models)
    candidates = np.arange(1, max(1, min(LARGEST_BATCH, most)) + 1, dtype=np.int64)
    each = [device_totals(model, run, np.int64(run.dp), candidates)[0] for model in models]
    too_much = np.flatnonzero(np.maximum.reduce(each) > question.cluster.device_bytes)
    fitting = int(too_much[0]) if too_much.size else candidates.size
    return fitting or None


def _largest_numel(question: Question, run: Run) -> int | None:
    """The largest model of these proportions that fits, or None."""
    if question.states_only:
        return _largest_by_states(question, run)
    low, high = 0.0, 1.0

    def grown(factor: float) -> ModelSpec:
        return _scaled(question.spec, factor)

    def fits(factor: float) -> bool:
        try:
            larger = replace(question, spec=grown(factor), numel=grown(factor).numel)
            return question.fits(larger.total(run))
        except UsageError:  # a shape that cannot be, or fewer layers than pipeline stages
            return False

    while fits(high) and high < 2**20:
        low, high = high, high * 2
    if low == 0:
        low = 0.5
        while not fits(low):
            low, high = low / 2, low
            if low < 2.0**-20:
                return None
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return grown(low).numel


def _largest_by_states(question: Question, run: Run) -> int:
    """The largest Ψ whose model states fit, by bisection on whole numbers."""
    mp = run.tp * run.pp

    def fits(numel: int) -> bool:
        share = -(-numel // mp)
        return question.fits(recipe_state_bytes(run.stage, run.dp, share, run.recipe).total)

    low, high = 0, 1
    while fits(high):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _scaled(spec: ModelSpec, factor: float) -> ModelSpec:
    """A model of the same proportions with about `factor` times the parameters in its layers."""
    side = factor ** (1 / 3)
    layers = max(1, round(spec.layers * side))
    width = (factor * spec.layers / layers) ** 0.5
    head = spec.attention_width // spec.heads
    kv_ratio = spec.heads // spec.kv_heads
    heads = max(1, round(spec.heads * width / kv_ratio)) * kv_ratio
    hidden = max(1, round(spec.hidden * heads / spec.heads))
    return replace(
        spec,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads // kv_ratio,
        head_dim=head,
        ffn=max(1, round(spec.ffn * heads / spec.heads)),
        embed_dim=0,
        cross_layers=layers // 2 if spec.cross_layers else 0,
    )
