"""One answer to one question: does this model fit on these devices, what does it cost, and why.

`plan` answers for one setting; `plan_grid` for a grid of them at once, with the same arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np

from zero_nb.config import UsageError
from zero_nb.theory.activations import LOSSES
from zero_nb.theory.checks import check_count, check_stage
from zero_nb.theory.frameworks import (
    CONTEXT_BYTES,
    RESERVED_OVER_ALLOCATED,
    Framework,
    get_framework,
)
from zero_nb.theory.memory import get_recipe, recipe_state_bytes
from zero_nb.theory.network import Network, StepTime, flops_per_token, step_time
from zero_nb.theory.peak import (
    LARGEST_BYTES,
    LINES,
    MOMENTS,
    DeviceModel,
    Peak,
    Run,
    bytes_per_sample,
    device_model,
    moment_lines,
    pipeline_peaks,
)
from zero_nb.theory.presets import Device, get_device, get_model
from zero_nb.theory.sizes import format_gb_gib
from zero_nb.theory.specs import ModelSpec, shape_for
from zero_nb.theory.traffic import StepTraffic, step_traffic, tensor_parallel_elements

__all__ = ["ClusterSpec", "Plan", "PlanGrid", "make_run", "plan", "plan_grid", "resolve_model"]

STATES = ("param", "grad", "optim")
BYTE_KINDS = (
    "param", "grad", "optim", "activation", "logits", "bucket", "unsharded", "context",
    "fragmentation", "padding",
)  # fmt: skip
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
    runs = [make_run(cluster, each, **_fitting(each, options)) for each in range(4)]
    question = _Question(spec, numel, cluster, states_only)
    totals = [question.total(run) for run in runs]
    fitting = [each for each, total in enumerate(totals) if question.fits(total)]
    smallest = fitting[0] if fitting else None
    if stage == "auto":
        stage = 3 if smallest is None else smallest
    stage = check_stage(stage)
    run = make_run(cluster, stage, **options)
    return _answer(question, run, runs, totals, smallest)


def _fitting(stage: int, options: dict[str, object]) -> dict[str, object]:
    """The options as far as they have a meaning at a stage."""
    offload = frozenset(options.get("offload") or ())
    if stage < 3 and "param" in offload:
        return options | {"offload": offload - {"param"}}
    return options


@dataclass(frozen=True)
class _Question:
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


def _answer(
    question: _Question, run: Run, runs: list[Run], totals: list[int], smallest: int | None
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
    return replace(answer, advice=tuple(_advice(answer, question, run, peak)))


def _by_kind(peak: Peak) -> dict[str, int]:
    """Kinds of the largest moment with what lies outside tensors; sums to the device's total."""
    kinds = dict.fromkeys(BYTE_KINDS, 0) | peak.by_kind()
    kinds["context"] = peak.context[1]
    kinds["fragmentation"] = peak.reserved()[1] - peak.allocated
    return {kind: kinds[kind] for kind in BYTE_KINDS}


def _stage_row(question: _Question, run: Run, total: int, known: bool) -> dict[str, object]:
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


def _traffic(question: _Question, run: Run, pipeline_stage: int) -> StepTraffic:
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


def _device_totals(model: DeviceModel, run: Run, dp, micro_batch) -> np.ndarray:
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


def _first(fits: Callable[[np.ndarray], np.ndarray], candidates: np.ndarray) -> int | None:
    """The first candidate that fits."""
    found = np.flatnonzero(fits(candidates))
    return int(candidates[found[0]]) if found.size else None


def _smallest_world(question: _Question, run: Run) -> int | None:
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
            each = [_device_totals(model, run, dp, run.micro_batch)[0] for model in models]
            return np.maximum.reduce(each) <= limit

        found = _first(fits, candidates)
    return None if found is None else found * run.tp * run.pp


def _largest_batch(question: _Question, run: Run) -> int | None:
    """The largest micro-batch that fits, or None."""
    if question.states_only:
        return None
    models = question.models(run)
    most = LARGEST_BYTES // max(bytes_per_sample(model, run) for model in models)
    candidates = np.arange(1, max(1, min(LARGEST_BATCH, most)) + 1, dtype=np.int64)
    each = [_device_totals(model, run, np.int64(run.dp), candidates)[0] for model in models]
    too_much = np.flatnonzero(np.maximum.reduce(each) > question.cluster.device_bytes)
    fitting = int(too_much[0]) if too_much.size else candidates.size
    return fitting or None


def _largest_numel(question: _Question, run: Run) -> int | None:
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


def _largest_by_states(question: _Question, run: Run) -> int:
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


# --- in plain words ----------------------------------------------------------------------------


def _advice(answer: Plan, question: _Question, run: Run, peak: Peak) -> Iterable[str]:
    """What decides, and what to try next."""
    if question.states_only:
        yield (
            "Model states only, as the paper counts them: activations, logits, buffers, context "
            "and fragmentation come on top"
        )
    else:
        yield _what_decides(answer, peak)
    if answer.device_bytes is None:
        yield "Give the device's memory to learn whether this fits"
        return
    left = answer.left_bytes
    if left >= 0:
        yield f"Fits, with {format_gb_gib(left)} left"
        yield from _if_it_fits(answer, question, run, peak)
    else:
        yield f"Does not fit: {format_gb_gib(-left)} too much"
        yield from _if_it_does_not(answer, question, run)
    yield from _warnings(answer, question, run, peak)


def _what_decides(answer: Plan, peak: Peak) -> str:
    """The largest moment and its largest line."""
    line, size = max(peak.lines.items(), key=lambda pair: pair[1])
    share = size / peak.allocated
    return f"The largest moment is {_article(answer.moment)}; {line} are {share:.0%} of it"


def _article(moment: str) -> str:
    """A moment with its article."""
    return f"the {moment}"


def _if_it_fits(answer: Plan, question: _Question, run: Run, peak: Peak) -> Iterable[str]:
    """What the room could be used for."""
    if answer.smallest_stage is not None and answer.smallest_stage < run.stage:
        yield (
            f"Stage {answer.smallest_stage} fits too and is simpler; a higher stage than needed "
            "only saves memory"
        )
    batch = answer.largest_micro_batch
    if batch and batch > run.micro_batch:
        yield f"The micro-batch could grow from {run.micro_batch} to {batch}"
    if not question.states_only and peak.device()[2] > answer.device_bytes:
        yield (
            f"Tight: at the upper end of the range it needs {format_gb_gib(peak.device()[2])}; "
            "expandable segments reduce fragmentation"
        )


def _if_it_does_not(answer: Plan, question: _Question, run: Run) -> Iterable[str]:
    """Changes tried one at a time, the ones that fit first."""
    tried = []
    for words, changed in _changes(question, run):
        try:
            total = question.total(changed)
        except UsageError:
            continue
        if total < 0.97 * answer.total_bytes:
            tried.append((not question.fits(total), total, words))
    tried.sort(key=lambda item: item[:2] if not item[0] else (True, item[1]))
    for misses, total, words in tried[:6]:
        verdict = "still too much" if misses else "fits"
        yield f"Try {words}: {format_gb_gib(total)}, {verdict}"
    if answer.smallest_world_size and answer.smallest_world_size > answer.world_size:
        yield f"Stage {run.stage} fits on {answer.smallest_world_size} devices or more"
    elif answer.smallest_world_size is None:
        yield (
            f"No number of devices makes stage {run.stage} fit as it is: what does not fit is not "
            "cut by data parallelism"
        )


def _changes(question: _Question, run: Run) -> Iterable[tuple[str, Run]]:
    """One change at a time that could save memory, in words and as a run."""
    for stage in range(run.stage + 1, 4):
        yield f"stage {stage}", replace(run, stage=stage)
    if question.states_only:
        yield "the optimizer on the host", replace(run, offload=run.offload | {"optimizer"})
        return
    if run.recompute != "full":
        yield "full recomputation of activations", replace(run, recompute="full")
    if not run.flash:
        yield "flash attention", replace(run, flash=True)
    if LOSSES[run.loss][0] > LOSSES["chunked"][0]:
        yield "a chunked or fused loss", replace(run, loss="chunked")
    if run.micro_batch > 1:
        yield (
            "micro-batch 1 with accumulation",
            replace(run, micro_batch=1, micro_batches=run.micro_batches * run.micro_batch),
        )
    elif run.seq > 512 and run.sp == 1:
        yield "half the sequence length", replace(run, seq=run.seq // 2)
    if "optimizer" not in run.offload:
        yield "the optimizer on the host", replace(run, offload=run.offload | {"optimizer"})
    together = {"recompute": "full", "loss": "chunked", "stage": 3, "micro_batch": 1}
    yield (
        "stage 3, full recomputation, a chunked loss and micro-batch 1 together",
        replace(run, **together),
    )
    if run.tp == 1 and run.world_size % 8 == 0 and question.spec.heads % 8 == 0:
        yield "tensor parallelism over 8 devices", replace(run, tp=8, sequence_parallel=True)


def _warnings(answer: Plan, question: _Question, run: Run, peak: Peak) -> Iterable[str]:
    """What a reader should doubt."""
    if question.states_only:
        return
    if run.framework.gathers == "live" and run.stage == 3:
        gathered = peak.lines.get("gathered units", 0)
        if gathered > 0.15 * peak.allocated:
            yield (
                "Doubt the gathered units: they are the limit of live parameters, which the "
                "framework reaches only if it prefetches that far"
            )
    if question.numel != question.spec.numel:
        shape = question.spec
        yield (
            f"Activations assume GPT-3's proportions ({shape.layers} layers of {shape.hidden}, "
            f"vocabulary {shape.vocab}); give a model or a config for its own"
        )
    if question.spec.cross_layers:
        yield "Activations of an encoder-decoder are counted as a decoder's of as many layers"
    low, high = answer.device_bytes, answer.device_bytes
    if answer.device_bytes % 10**9 == 0:
        high = answer.device_bytes // 10**9 * 2**30
    if low < answer.total_bytes <= high:
        yield (
            f"It would fit if the device has {answer.device_bytes // 10**9} GiB, as devices sold "
            f"as {answer.device_bytes // 10**9} GB do: write GiB then"
        )


# --- a grid of plans ---------------------------------------------------------------------------


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
        run = make_run(ClusterSpec(worlds[0]), stage, **_fitting(stage, options))
        fullest = np.zeros((shape[0], shape[1], shape[3]), np.int64)
        for place in range(run.pp):
            here = [device_model(spec, run, place) for spec in specs]
            _check_room(here, run, max(batches))
            model = DeviceModel.stack(here)
            bytes_here, index = _device_totals(model, run, dp, batch)
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
