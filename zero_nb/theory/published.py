"""Published measured peaks, and what this planner says for the same run.

``data/measured_peaks.csv`` holds facts: what was run, what was measured, and where it was printed.
`settings` turns a row into a model shape and a `Run` by rules on its columns, the same rules for
every row of a source; no rule and no constant is made for a single row.  Other rows in the same
columns can be judged with `judge`.

What is known of the software of a source is in `_SOFTWARE`: which framework it is, how its loss is
computed.  Those are facts of code, not of the measured numbers.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from importlib import resources

from zero_nb.config import UsageError
from zero_nb.theory.frameworks import get_framework
from zero_nb.theory.memory import get_recipe, recipe_state_bytes
from zero_nb.theory.peak import Peak, Run, pipeline_peaks
from zero_nb.theory.specs import ModelSpec, llama_like

__all__ = [
    "BAND",
    "Judgement",
    "heldout_rows",
    "judge",
    "load_rows",
    "published_rows",
    "read_data",
    "settings",
]

BAND = 0.15
"""A prediction counts as right within this fraction of the measured value."""


@dataclass(frozen=True)
class Judgement:
    """A published run beside its prediction.

    Attributes
    ----------
    row : str
        Its id.
    source, model : str
    measure : {"allocated", "reserved", "device", "after step"}
        What was measured.
    measured : int
        Bytes.
    predicted, low, high : int
        Bytes of the same measure: the planned figure and its range.
    peak : Peak or None
        The moment and lines behind it; None where only states can be planned.
    """

    row: str
    source: str
    model: str
    measure: str
    measured: int
    predicted: int
    low: int
    high: int
    peak: Peak | None

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted / self.measured

    @property
    def right(self) -> bool:
        """Within `BAND` of the measured value."""
        return abs(self.ratio - 1) <= BAND

    @property
    def moment(self) -> str:
        """The moment that decides."""
        return self.peak.moment if self.peak else "after the step"


def load_rows(lines: Iterable[str]) -> list[dict[str, str]]:
    """Rows of a CSV with comment lines."""
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def published_rows() -> list[dict[str, str]]:
    """The 34 published runs that the planner is judged on."""
    return read_data("measured_peaks.csv")


def heldout_rows() -> list[dict[str, str]]:
    """Further published runs, collected after the rules of this module were written."""
    return read_data("heldout_peaks.csv")


def read_data(name: str) -> list[dict[str, str]]:
    """Rows of a data file of this package, by its file name."""
    data = resources.files("zero_nb.theory").joinpath("data", name)
    return load_rows(data.read_text(encoding="utf-8").splitlines())


def judge(row: Mapping[str, str], run: Run | None = None) -> Judgement:
    """Predict a published run and lay it beside what was measured.

    Parameters
    ----------
    row : mapping of str to str
        Columns as in ``data/measured_peaks.csv``.
    run : Run, optional
        In place of the one that `settings` reads from the row.

    Returns
    -------
    Judgement
    """
    measure, measured = _measure(row), _bytes(row["measured_value"], row["measured_unit"])
    known = {
        "row": row["id"],
        "source": row["source"],
        "model": row["model"],
        "measure": measure,
        "measured": measured,
    }
    if not row["layers"]:
        states = _states_after_step(row)
        return Judgement(**known, predicted=states, low=states, high=states, peak=None)
    spec, described = settings(row)
    run = run or described
    # "Fullest device", unless the source says which end of the pipeline its log shows.
    peaks = pipeline_peaks(spec, run)
    shown = row["measured_what"]
    if "rank 0" in shown:
        peaks = peaks[:1]
    elif "last rank" in shown:
        peaks = peaks[-1:]
    which = {"allocated": lambda p: (p.allocated,) * 3, "after step": lambda p: (p.after_step,) * 3}
    which |= {"reserved": Peak.reserved, "device": Peak.device}
    peak = max(peaks, key=lambda p: which[measure](p)[1])
    low, predicted, high = which[measure](peak)
    return Judgement(**known, predicted=predicted, low=low, high=high, peak=peak)


# --- what was measured -------------------------------------------------------------------------

_UNITS = {"B": 1, "MiB": 2**20, "GiB": 2**30, "GB": 10**9, "MB": 10**6}


def _bytes(value: str, unit: str) -> int:
    """Bytes of a printed value; the first word of the unit is our reading of it."""
    return round(float(value) * _UNITS[unit.split()[0]])


def _measure(row: Mapping[str, str]) -> str:
    """Which of four quantities a row measured."""
    what = row["measured_what"].casefold()
    if "after step" in what:
        return "after step"
    if "reserved" in what:
        return "reserved"
    if "allocated" in what or "active" in what:
        return "allocated"
    return "device"  # nvidia-smi, NVML, cudaMemGetInfo, or not stated


# --- which software ----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Software:
    """Facts of the code a source ran."""

    framework: str
    loss: str | None = None  # in eager mode; None is the framework's own
    compiled_loss: str = "eager"  # when the row says "compile"
    dropout: bool = False
    sequence_parallel: bool = False
    execution: str | None = None
    accumulates: bool = False


# First match wins; the pattern is searched in "<source> | <flags>".
_SOFTWARE: tuple[tuple[str, _Software], ...] = (
    # At the commit of that file torchtitan compiles layers but runs the loss eagerly in float32.
    (r"torchtitan.*llama3_h100_202412", _Software("fsdp2", sequence_parallel=True)),
    # torchtitan 0.0.2, between two commits that turn compilation of the loss off and on.
    (r"pytorch/(ao|torchtitan).*compile blocks", _Software("fsdp2", sequence_parallel=True)),
    (r"pytorch/(ao|torchtitan)", _Software("fsdp2", None, "compiled", sequence_parallel=True)),
    (r"pytorch/torchtune", _Software("torch")),
    (r"Lightning-AI/litgpt", _Software("torch")),
    (r"huggingface/transformers", _Software("hf-trainer", "none", "none", dropout=True)),
    (r"QwenLM/", _Software("deepspeed", accumulates=True)),
    (r"Megatron-LM.*fsdp", _Software("megatron-fsdp", None, "megatron", dropout=True)),
    (r"Megatron-LM", _Software("megatron", None, "megatron", dropout=True)),
    (r"meg_ds_zero", _Software("megatron-deepspeed", None, "eager", dropout=True)),
    (r"gpt2-meg/meg_gpt2", _Software("megatron-2021", None, "eager", dropout=True)),
    (r"bigscience", _Software("megatron-deepspeed", dropout=True, accumulates=True)),
    (r"llm\.c", _Software("llm.c", "in-place", "in-place")),
    (r"huggingface/nanotron", _Software("nanotron")),
    # Megatron-DeepSpeed's sample script, and bing_bert; layers run as Megatron writes them.
    (r"deepspeedai/DeepSpeed.*sample script", _Software("deepspeed", "megatron", dropout=True,
                                                        execution="fused")),
    (r"deepspeedai/DeepSpeed", _Software("deepspeed", "none", dropout=True, execution="fused")),
    (r"ColossalAI", _Software("gemini")),
)  # fmt: skip


def _software(row: Mapping[str, str]) -> _Software:
    """The first entry of the table that fits."""
    text = f"{row['source']} | {row['bucket_or_flags']}"
    for pattern, software in _SOFTWARE:
        if re.search(pattern, text, re.IGNORECASE):
            return software
    raise UsageError(
        f"row {row['id']}: no framework is known for source {row['source']!r}; "
        "add what its code does to zero_nb.theory.published"
    )


def settings(row: Mapping[str, str]) -> tuple[ModelSpec, Run]:
    """The model shape and the run that a row describes.

    Parameters
    ----------
    row : mapping of str to str

    Returns
    -------
    spec : ModelSpec
    run : Run

    Raises
    ------
    UsageError
        For a source whose software is not known here.
    """
    software, flags = _software(row), row["bucket_or_flags"]
    framework = get_framework(software.framework)
    if "casts" in row["weights_dtype"]:
        framework = replace(framework, cast_bytes=2)
    compiled = bool(re.search(r"\bcompile\b", flags))
    execution = software.execution or framework.execution
    if compiled and execution == "eager":
        execution = "compiled"
    tp, pp = int(row["tp"]), int(row["pp"])
    recompute = row["recompute"]
    return _spec(row), Run(
        world_size=int(row["gpus"]),
        stage=_stage(row["stage"]),
        tp=tp,
        pp=pp,
        sp=int(re.search(r"\d+", row["cp_sp"] or "1").group()),
        framework=framework,
        recipe=_recipe(row),
        micro_batch=int(row["micro_batch"]),
        seq=int(row["seq"]),
        micro_batches=_micro_batches(row, software),
        recompute=_recompute(recompute, framework.name),
        execution=execution,
        loss=_loss(software, framework.loss, flags, compiled, tp),
        flash=row["flash"].startswith("yes"),
        dropout=software.dropout and "no dropout" not in flags,
        sequence_parallel=tp > 1 and (software.sequence_parallel or "sequence parallel" in flags),
        offload=frozenset({"activation"} if "CPU checkpoints" in recompute else ()),
        reduce_bucket=_number(r"(?:reduce|default)[^;]*?bucket[^;]*?([\d.]+e\d+)", flags),
        overlap="overlap_comm true" in flags,
        max_live=_number(r"max_live_parameters ([\d.]+e\d+)", flags),
        context_bytes=_context(flags),
    )


def _recompute(text: str, framework: str) -> str:
    """One of `RECOMPUTES` for a row's words."""
    if framework == "llm.c":
        return "none"  # its list of tensors already leaves GELU out
    if "per-op" in text:
        return "per-op"
    return next((word for word in ("full", "selective") if text.startswith(word)), "none")


def _loss(software: _Software, own: str, flags: str, compiled: bool, tp: int) -> str:
    """How the loss is computed."""
    if "chunked" in flags:
        return "chunked"
    loss = software.compiled_loss if compiled else (software.loss or own)
    return "loss-parallel" if loss == "eager" and tp > 1 else loss


def _micro_batches(row: Mapping[str, str], software: _Software) -> int:
    """Micro-batches of a step, as far as it matters: whether there is more than one."""
    stated = re.search(r"gradient accumulation (\d+)", row["bucket_or_flags"])
    if stated:
        return int(stated.group(1))
    return 2 if software.accumulates else 1


def _stage(text: str) -> int:
    """ZeRO stage of a row."""
    return 0 if text.startswith("none") else int(text[0])


def _number(pattern: str, flags: str) -> int | None:
    """A number such as 5e8 from the flags."""
    found = re.search(pattern, flags)
    return int(float(found.group(1))) if found else None


def _context(flags: str) -> int | None:
    """A context that the source measured by itself."""
    found = re.search(r"context measured at (\d+) MiB", flags)
    return int(found.group(1)) * 2**20 if found else None


def _recipe(row: Mapping[str, str]):
    """Bytes a parameter, from the dtypes of weights, gradients and states."""
    weights, grads, optimizer = row["weights_dtype"], row["grad_dtype"], row["optimizer"]
    if weights.startswith("fp32"):
        mixed = "compute" in weights or "casts" in weights
        return get_recipe("fp32-bf16-compute" if mixed else "fp32")
    if "bf16 states" in optimizer:
        return get_recipe("bf16-pure")
    if "main grad" in grads:
        return get_recipe("bf16-both-grads")
    if grads.startswith("fp32 accumulation"):
        return get_recipe("bf16-both-grads")
    return get_recipe("bf16-fp32-grads" if grads == "fp32" else "bf16")


def _spec(row: Mapping[str, str]) -> ModelSpec:
    """The shape of a row's model."""
    sizes = {
        field: int(row[field])
        for field in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")
    }
    shape = sizes | {"name": row["model"], "source": row["source"], "context": int(row["seq"])}
    tied = row["tied"].startswith("yes")
    if re.search(r"llama|qwen", row["model"], re.IGNORECASE):
        qwen3 = row["model"].startswith("Qwen3")
        qkv_bias = row["model"].startswith("Qwen") and not qwen3
        head_dim = 128 if qwen3 else 0
        return llama_like(**shape, tied=tied, qkv_bias=qkv_bias, qk_norm=qwen3, head_dim=head_dim)
    if row["tied"].startswith("n/a"):  # BERT: token types, a pooler, a norm after the embedding
        h = sizes["hidden"]
        extra = {"extra_numel": 2 * h + h * h + h, "embed_norm": True, "final_norm": False}
        return ModelSpec(**shape, positions=512, has_head=False, **extra)
    return ModelSpec(**shape, positions=int(row["seq"]), tied=tied)


def _states_after_step(row: Mapping[str, str]) -> int:
    """States that stay after a step, for a row that gives a size and no shape."""
    framework = get_framework(_software(row).framework)
    numel = round(float(re.search(r"([\d.]+)B", row["model"]).group(1)) * 1e9)
    stage = _stage(row["stage"])
    states = recipe_state_bytes(stage, int(row["dp"]), numel, _recipe(row))
    kept = states.grad if framework.grads_persist else 0
    return states.param + states.optim + kept
