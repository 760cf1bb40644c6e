"""The largest moment of a training step on one device, line by line.

A step is not one sum: logits and the float32 gradient copy never exist together.  So the lines are
laid out for each moment, and the largest total decides.

Everything here is arithmetic on whole numbers that works alike on Python ints and on NumPy int64
arrays that broadcast, which is how a grid of a million plans takes a second or two.

Letters: W data-parallel ranks that shard, t tensor-parallel degree, e bytes of an activation.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import numpy as np

from zero_nb.config import UsageError
from zero_nb.theory.activations import (
    EXECUTIONS,
    LOSSES,
    RECOMPUTES,
    SavedPerToken,
    saved_per_token,
)
from zero_nb.theory.checks import check_count, check_divides, check_stage, name_error
from zero_nb.theory.frameworks import (
    CONTEXT_BYTES,
    RESERVED_OVER_ALLOCATED,
    Framework,
    get_framework,
)
from zero_nb.theory.memory import Recipe, get_recipe
from zero_nb.theory.specs import ModelSpec

__all__ = [
    "KINDS",
    "LARGEST_BYTES",
    "LINES",
    "MOMENTS",
    "OFFLOADS",
    "DeviceModel",
    "Peak",
    "Run",
    "bytes_per_sample",
    "device_model",
    "moment_lines",
    "peak_of_stage",
    "pipeline_peaks",
]

KINDS = ("param", "grad", "optim", "activation", "logits", "bucket", "unsharded", "padding")
"""Kinds of allocated memory; a plan adds context and fragmentation."""

LINES: dict[str, str] = {
    "parameters": "param",
    "gradients": "grad",
    "optimizer states": "optim",
    "padding": "padding",
    "saved activations": "activation",
    "recomputed layer": "activation",
    "activation gradients": "activation",
    "logits and loss": "logits",
    "reduce bucket": "bucket",
    "flat gradient copy": "bucket",
    "fp32 gradient copy": "bucket",
    "all-gather bucket": "bucket",
    "gradient of one unit": "bucket",
    "gathered units": "unsharded",
    "persistent small parameters": "unsharded",
    "cast weights": "unsharded",
}
"""Every line, and the kind it is counted as."""

MOMENTS = (
    "end of forward",
    "loss",
    "start of backward",
    "end of backward",
    "gradient reduction",
    "optimizer step",
)

LARGEST_COUNT = 2**31
"""No plan is made for more devices, sequences or tokens than this."""

LARGEST_BYTES = 2**60
"""Nor for more bytes: arithmetic on arrays is in 64-bit integers."""

OFFLOADS: dict[str, str] = {
    "optimizer": "gradients, master copy and moments on the host (ZeRO-Offload, arXiv:2101.06840)",
    "param": "parameter shards on the host too (ZeRO-Infinity, arXiv:2104.07857); stage 3 only",
    "activation": "saved activations on the host (ZeRO-R P_a+cpu, arXiv:1910.02054 Sec. 6.1)",
}


@dataclass(frozen=True)
class Run:
    """How a model is trained, beside its shape.

    Attributes
    ----------
    world_size : int
        All devices.
    stage : int
        ZeRO stage.
    tp, pp, sp : int
        Tensor-, pipeline- and sequence- (context- or Ulysses-) parallel degrees.
    framework : Framework
        What is kept beside the states.
    recipe : Recipe
        Bytes a parameter.
    micro_batch, seq : int
        Sequences of one forward pass on one device; their length.
    micro_batches : int
        Forward passes of one step: gradient accumulation, or what fills a pipeline.
    recompute, execution, loss : str
        See `zero_nb.theory.activations`.
    flash, dropout, sequence_parallel : bool
        Attention without stored scores; dropout in training; activations outside tensor-parallel
        regions cut too.
    offload : frozenset of str
        Any of `OFFLOADS`.
    reduce_bucket : int, optional
        Elements, in place of the framework's.
    overlap : bool
        Two reduce buckets, one filling while one travels.
    max_live : int, optional
        Gathered parameters at stage 3, in place of the framework's.
    persist_below : int
        Stage 3: tensors of fewer elements stay gathered (DeepSpeed's persistence threshold).
    context_bytes : int, optional
        Measured bytes outside the allocator, in place of `CONTEXT_BYTES`.
    """

    world_size: int = 1
    stage: int = 1
    tp: int = 1
    pp: int = 1
    sp: int = 1
    framework: Framework = field(default_factory=lambda: get_framework("zero"))
    recipe: Recipe = field(default_factory=get_recipe)
    micro_batch: int = 1
    seq: int = 2048
    micro_batches: int = 1
    recompute: str = "none"
    execution: str = "fused"
    loss: str = "eager"
    flash: bool = True
    dropout: bool = False
    sequence_parallel: bool = False
    offload: frozenset[str] = frozenset()
    reduce_bucket: int | None = None
    overlap: bool = False
    max_live: int | None = None
    persist_below: int = 0
    context_bytes: int | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be run."""
        object.__setattr__(self, "stage", check_stage(self.stage))
        for name in ("world_size", "tp", "pp", "sp", "micro_batch", "seq", "micro_batches"):
            check_count(name, getattr(self, name), least=1, most=LARGEST_COUNT)
        _check_parallel(self)
        for name, known in (("recompute", RECOMPUTES), ("execution", EXECUTIONS), ("loss", LOSSES)):
            if getattr(self, name) not in known:
                raise name_error(name, getattr(self, name), known)
        object.__setattr__(self, "offload", frozenset(self.offload))
        for name in self.offload:
            if name not in OFFLOADS:
                raise name_error("offload", name, OFFLOADS)
        if "param" in self.offload and self.stage < 3:
            raise UsageError(
                f"offload of param is for stage 3, got stage {self.stage}: lower stages compute "
                "with whole parameters on the device"
            )

    @property
    def dp(self) -> int:
        """Ranks that ZeRO shards over: all devices but those of tensor and pipeline parallelism.

        Sequence-parallel ranks hold the same weights and share the sharding.
        """
        return self.world_size // (self.tp * self.pp)

    @property
    def keeps_grads(self) -> bool:
        """Whether gradients stand in memory during a forward pass."""
        return self.framework.grads_persist or self.micro_batches > 1


def _check_parallel(run: Run) -> None:
    """Parallel degrees must divide the devices."""
    names = [name for name in ("tp", "pp", "sp") if getattr(run, name) > 1]
    parts = run.tp * run.pp * run.sp
    check_divides(" x ".join(names) or "tp", parts, "world_size", run.world_size)
    check_divides("sp", run.sp, "seq", run.seq)


@dataclass(frozen=True)
class DeviceModel:
    """What one device computes: numbers, or int64 arrays that broadcast, one entry a model.

    Attributes
    ----------
    numel : int
        Parameters on the device.
    blocks, block_numel : int
        Layers here and parameters of one.
    root_numel : int
        Parameters outside layers.
    small_numel : int
        Parameters in tensors that stay gathered.
    hidden, ffn, vocab : int
        `ffn` and `vocab` cut by the tensor-parallel degree.
    gates : int
        Feed-forward products side by side: 2 if gated.
    saved, full_layer : int
        Bytes a token that one layer keeps, and would keep without recomputation.
    passes : int
        Micro-batches whose activations are held at once.
    first, last : bool
        Whether the embedding, and whether the head is here.
    """

    numel: int
    blocks: int
    block_numel: int
    root_numel: int
    small_numel: int
    hidden: int
    ffn: int
    vocab: int
    gates: int
    saved: int
    full_layer: int
    passes: int = 1
    first: bool = True
    last: bool = True

    @classmethod
    def stack(cls, models: list[DeviceModel]) -> DeviceModel:
        """Many models as one whose fields are arrays of shape (models, 1, 1).

        `passes`, `first` and `last` must be the same for all.
        """
        columns = {}
        for entry in fields(cls):
            values = [getattr(model, entry.name) for model in models]
            if entry.name in ("passes", "first", "last"):
                columns[entry.name] = values[0]
            else:
                columns[entry.name] = np.array(values, np.int64).reshape(-1, 1, 1)
        return cls(**columns)


def bytes_per_sample(model: DeviceModel, run: Run) -> int:
    """An upper bound on what one more sequence of a micro-batch adds, bytes."""
    e = run.recipe.compute_bytes
    layers = max(model.saved, model.full_layer) * (model.blocks * model.passes + 1)
    ends = model.hidden * (16 + 4 * e + e * run.framework.scratch) + 2 * e * model.gates * model.ffn
    return run.seq * (layers + ends + model.vocab * LOSSES[run.loss][0])


def device_model(spec: ModelSpec, run: Run, pipeline_stage: int = 0, numel: int = 0) -> DeviceModel:
    """What the device of one pipeline stage holds and computes.

    Parameters
    ----------
    spec : ModelSpec
    run : Run
    pipeline_stage : int
        0 to pp − 1.
    numel : int
        Parameters of the whole model where they are known better than by `spec`.

    Returns
    -------
    DeviceModel
    """
    blocks = spec.stage_layers(run.pp)[pipeline_stage]
    here = spec.shard_numel(run.tp, run.pp, pipeline_stage)
    block = spec.block_shard_numel(run.tp)
    if numel and numel != spec.numel:  # the same share of another total, in the same proportions
        here, block = here * numel // spec.numel, block * numel // spec.numel
        if run.tp * run.pp == 1:
            here = numel
    options = {
        "itemsize": run.recipe.compute_bytes,
        "execution": run.execution,
        "flash": run.flash,
        "dropout": run.dropout,
    }

    def a_token(saved: SavedPerToken) -> int:
        return saved.bytes(run.seq, run.tp, run.sequence_parallel)

    return DeviceModel(
        numel=here,
        blocks=blocks,
        block_numel=block,
        root_numel=here - blocks * block,
        small_numel=_small_numel(spec, run, blocks),
        hidden=spec.hidden,
        ffn=spec.ffn // run.tp,
        vocab=-(-spec.vocab // run.tp) if spec.has_head else 0,
        gates=2 if spec.gated else 1,
        saved=a_token(saved_per_token(spec, recompute=run.recompute, **options)),
        full_layer=a_token(saved_per_token(spec, **options)),
        passes=run.pp - pipeline_stage,  # one-forward-one-backward, a full pipeline
        first=pipeline_stage == 0,
        last=pipeline_stage == run.pp - 1,
    )


def _small_numel(spec: ModelSpec, run: Run, blocks: int) -> int:
    """Elements of norms and biases whose tensors are below the persistence threshold."""
    sizes = [spec.hidden] * (2 * spec.norm_numel // spec.hidden)
    if spec.bias:
        sizes += [(spec.attention_width + 2 * spec.kv_width) // run.tp, spec.ffn // run.tp]
        sizes += [spec.hidden] * 2
    return blocks * sum(size for size in sizes if size < run.persist_below)


# --- the lines ---------------------------------------------------------------------------------


def _least(a, b):
    """The smaller, of numbers or arrays."""
    return np.minimum(a, b) if isinstance(a, np.ndarray) or isinstance(b, np.ndarray) else min(a, b)


def _states(model: DeviceModel, run: Run, dp) -> dict[str, object]:
    """Parameters, gradients, optimizer states and what padding adds to them."""
    stage, recipe = run.stage, run.recipe
    per_param = {
        "parameters": (recipe.param_bytes, stage >= 3),
        "gradients": (recipe.grad_bytes, stage >= 2),
        "optimizer states": (recipe.optim_bytes, stage >= 1),
    }
    absent = set()
    if "optimizer" in run.offload:
        absent |= {"gradients", "optimizer states"}
    if "param" in run.offload:
        absent |= {"parameters"}
    lines, cut_bytes, whole_bytes = {}, 0, 0
    for line, (each, cut) in per_param.items():
        if line in absent:
            lines[line] = 0
            continue
        lines[line] = each * model.numel // dp if cut else each * model.numel
        cut_bytes, whole_bytes = cut_bytes + each * cut, whole_bytes + each * (not cut)
    if run.stage == 0:  # plain data parallelism keeps tensors as they are
        return lines | {"padding": 0}
    # Each layer and the root is one flat parameter, rounded up to a multiple of W.
    padding = -model.block_numel % dp * model.blocks + -model.root_numel % dp
    padded = (model.numel + padding) // dp * cut_bytes + padding * whole_bytes
    unpadded = sum(
        each * model.numel // dp for line, (each, cut) in per_param.items()
        if cut and line not in absent
    )  # fmt: skip
    return lines | {"padding": padded - unpadded}


def _activations(model: DeviceModel, run: Run, micro_batch) -> dict[str, object]:
    """Saved activations, one layer computed again, and gradients of activations."""
    e, tokens = run.recipe.compute_bytes, micro_batch * (run.seq // run.sp)
    cut = run.tp if run.sequence_parallel else 1
    saved = tokens * model.saved
    ends = e * tokens * model.hidden * run.framework.scratch
    if model.first and run.dropout:
        ends = ends + tokens * model.hidden // cut * model.passes
    if model.last:  # the final norm's input and output, gathered for the head
        ends = ends + 2 * e * tokens * model.hidden // cut
        ends = ends + (e * tokens * model.hidden if cut > 1 else 0)
    total = saved * model.blocks * model.passes + ends
    if "activation" in run.offload:
        total = e * tokens * model.hidden  # the layer on its way in or out
    again = 0
    if run.recompute != "none":
        again = tokens * (model.full_layer - model.saved)
        again = again + (e * tokens * model.hidden if cut > 1 else 0)
    gradients = e * tokens * (2 * model.hidden // cut + model.gates * model.ffn)
    return {"all": total, "one": saved + 0 * total, "again": again, "gradients": gradients}


def _transient(model: DeviceModel, run: Run, dp) -> dict[str, object]:
    """Buckets, gathered units and copies, at the size they have when they exist."""
    framework, stage = run.framework, run.stage
    compute = run.recipe.compute_bytes
    wanted = framework.reduce_bucket if run.reduce_bucket is None else run.reduce_bucket
    bucket = _least(wanted, model.numel) if framework.bucket_capped else wanted
    several = _least(dp - 1, 1)  # nothing is reduced or gathered on one rank
    lines = {
        "reduce bucket": bucket * compute * (2 if run.overlap else 1) * several
        if stage >= 1
        else 0 * model.numel,
        "flat gradient copy": framework.flat_copy_bytes * model.numel,
        "cast weights": framework.cast_bytes * model.numel,
        "gathered units": 0,
        "persistent small parameters": 0,
        "gradient of one unit": 0,
        "all-gather bucket": 0,
    }
    owned = model.numel // dp if stage >= 1 else model.numel
    group = framework.step_group if stage == 3 and framework.step_group else None
    copied = owned if group is None else _least(owned, group)
    lines["fp32 gradient copy"] = framework.step_copy_bytes * copied
    if "optimizer" in run.offload:
        lines["fp32 gradient copy"] = 0 * owned
    if stage in (1, 2):
        gathered = _least(framework.gather_bucket, model.numel)
        lines["all-gather bucket"] = gathered * run.recipe.param_bytes * several
    if stage >= 2:
        lines["gradient of one unit"] = framework.unit_grad_bytes * model.block_numel
    if stage == 3:
        lines |= _gathered(model, run, compute)
    return lines


def _gathered(model: DeviceModel, run: Run, compute: int) -> dict[str, object]:
    """Stage 3: what is whole while it is computed with."""
    framework = run.framework
    if run.pp > 1 and framework.pipeline_keeps_whole:
        return {
            "gathered units": compute * model.numel,
            "gradient of one unit": 4 * model.numel,
        }
    limit = framework.max_live if run.max_live is None else run.max_live
    if framework.gathers == "live" or run.max_live is not None:
        gathered = _least(model.numel, limit)
    else:
        gathered = model.root_numel + _least(2, model.blocks) * model.block_numel
    return {
        "gathered units": compute * gathered,
        "persistent small parameters": compute * model.small_numel,
    }


def moment_lines(model: DeviceModel, run: Run, dp=None, micro_batch=None) -> dict[str, dict]:
    """Every line at every moment.

    Parameters
    ----------
    model : DeviceModel
    run : Run
    dp, micro_batch : int or ndarray of int64, optional
        In place of the run's: arrays give a grid.

    Returns
    -------
    dict of str to dict of str to int or ndarray
        Moment, line, bytes.
    """
    dp = run.dp if dp is None else dp
    micro_batch = run.micro_batch if micro_batch is None else micro_batch
    states, extra = _states(model, run, dp), _transient(model, run, dp)
    acts = _activations(model, run, micro_batch)
    tokens = micro_batch * (run.seq // run.sp)
    logits = tokens * model.vocab * LOSSES[run.loss][0] if model.last else 0
    standing = {line: states[line] for line in ("parameters", "optimizer states", "padding")}
    before = standing | ({"gradients": states["gradients"]} if run.keeps_grads else {})
    after = standing | {"gradients": states["gradients"]}
    whole = {
        line: extra[line]
        for line in ("gathered units", "persistent small parameters", "cast weights",
                     "reduce bucket")
    }  # fmt: skip
    computing = {
        "recomputed layer": acts["again"],
        "activation gradients": acts["gradients"],
        "gradient of one unit": extra["gradient of one unit"],
    }
    small = {
        line: extra[line] for line in ("persistent small parameters", "reduce bucket")
    }  # fmt: skip
    return {
        "end of forward": before | whole | {"saved activations": acts["all"]},
        "loss": before | whole | {"saved activations": acts["all"], "logits and loss": logits},
        "start of backward": before | whole | computing | {"saved activations": acts["all"]},
        "end of backward": after | whole | computing | {"saved activations": acts["one"]},
        "gradient reduction": after | small | {"flat gradient copy": extra["flat gradient copy"]},
        "optimizer step": after
        | small
        | {line: extra[line] for line in ("fp32 gradient copy", "all-gather bucket")},
    }


# --- the largest moment ------------------------------------------------------------------------


@dataclass(frozen=True)
class Peak:
    """The fullest moment of one device, and the others beside it.

    Attributes
    ----------
    moment : str
        One of `MOMENTS`.
    lines : dict of str to int
        Bytes of each line at that moment; sums to `allocated`.
    moments : dict of str to int
        Total of each moment.
    after_step : int
        What stays when a step is over: parameters, optimizer states, standing gradients, padding.
    pipeline_stage : int
        Which stage of the pipeline this device is.
    numel : int
        Parameters on it.
    caching : bool
        Whether the allocator reserves more than it hands out.
    context : tuple of int
        Low, middle, high bytes outside the allocator.
    """

    moment: str
    lines: dict[str, int]
    moments: dict[str, int]
    after_step: int
    pipeline_stage: int
    numel: int
    caching: bool
    context: tuple[int, int, int]

    @property
    def allocated(self) -> int:
        """Bytes handed out to tensors at the largest moment."""
        return sum(self.lines.values())

    def reserved(self) -> tuple[int, int, int]:
        """Low, middle and high bytes the allocator reserves for that."""
        ratios = RESERVED_OVER_ALLOCATED if self.caching else (1.0, 1.0, 1.0)
        low, middle, high = (round(self.allocated * ratio) for ratio in ratios)
        return low, middle, high

    def device(self) -> tuple[int, int, int]:
        """Low, middle and high bytes that nvidia-smi would show."""
        low, middle, high = (
            kept + out for kept, out in zip(self.reserved(), self.context, strict=True)
        )
        return low, middle, high

    def by_kind(self) -> dict[str, int]:
        """Bytes of each of `KINDS` at the largest moment."""
        totals = dict.fromkeys(KINDS, 0)
        for line, count in self.lines.items():
            totals[LINES[line]] += count
        return totals


def context_bytes(run: Run) -> tuple[int, int, int]:
    """Low, middle and high bytes outside the allocator."""
    if run.context_bytes is not None:
        return (run.context_bytes,) * 3
    low, middle, high, _ = CONTEXT_BYTES["connected" if run.world_size > 1 else "alone"]
    return low, middle, high


def peak_of_stage(spec: ModelSpec, run: Run, pipeline_stage: int = 0, numel: int = 0) -> Peak:
    """The largest moment on one device of a pipeline stage.

    Parameters
    ----------
    spec : ModelSpec
    run : Run
    pipeline_stage : int
    numel : int
        Parameters of the model where they are known better than by `spec`.

    Returns
    -------
    Peak
    """
    model = device_model(spec, run, pipeline_stage, numel)
    lines = moment_lines(model, run)
    totals = {moment: sum(lines[moment].values()) for moment in MOMENTS}
    if max(totals.values()) > LARGEST_BYTES:
        raise UsageError(
            f"a micro-batch of {run.micro_batch:,} sequences of {run.seq:,} tokens on a model of "
            f"{model.numel:,} parameters needs more than an exabyte; give smaller numbers"
        )
    largest = max(totals, key=totals.__getitem__)
    states = _states(model, run, run.dp)
    kept = run.framework.grads_persist
    after = states["parameters"] + states["optimizer states"] + states["padding"]
    return Peak(
        moment=largest,
        lines={line: count for line, count in lines[largest].items() if count},
        moments=totals,
        after_step=after + (states["gradients"] if kept else 0),
        pipeline_stage=pipeline_stage,
        numel=model.numel,
        caching=run.framework.caching,
        context=context_bytes(run),
    )


def pipeline_peaks(spec: ModelSpec, run: Run, numel: int = 0) -> list[Peak]:
    """The largest moment on each pipeline stage, first to last.

    Parameters
    ----------
    spec : ModelSpec
    run : Run
    numel : int
        See `peak_of_stage`.

    Returns
    -------
    list of Peak
    """
    return [peak_of_stage(spec, run, stage, numel) for stage in range(run.pp)]
