"""Published tables recomputed beside what was printed.

Each table is a function without arguments that returns a `Table`; `TABLES` lists them by the name
the command line uses.  Printed values come from the files in ``data/``, each with its source.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction

from zero_nb.theory.activations import interleave_factor, korthikanti_layer_bytes
from zero_nb.theory.checks import name_error
from zero_nb.theory.estimators import (
    DIFFERENCES,
    accelerate_estimate,
    deepspeed_zero2,
    deepspeed_zero3,
    eleuther,
    llm_analysis_states,
    megatron,
)
from zero_nb.theory.memory import OPTIMIZERS, PRECISIONS, Recipe, get_recipe
from zero_nb.theory.presets import DEVICES, MODELS, get_model
from zero_nb.theory.published import heldout_rows, judge, published_rows, read_data
from zero_nb.theory.sizes import format_gb_gib
from zero_nb.theory.specs import gpt_like, llama_like
from zero_nb.theory.traffic import (
    deepspeed_elements_per_step,
    elements_per_step,
    mics_traffic,
    zeropp_volume,
)

__all__ = ["TABLES", "Table", "exact_state_bytes", "make_table", "paper_digits", "table2_label"]


@dataclass(frozen=True)
class Table:
    """A table with its source.

    Attributes
    ----------
    name, title, source : str
    columns : tuple of str
    rows : tuple of tuple
        Plain numbers, text, booleans or None.
    notes : tuple of str
    """

    name: str
    title: str
    source: str
    columns: tuple[str, ...]
    rows: tuple[tuple[object, ...], ...]
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, object]:
        """The table as JSON can hold it: one object a row."""
        return {
            "name": self.name,
            "title": self.title,
            "source": self.source,
            "rows": [dict(zip(self.columns, row, strict=True)) for row in self.rows],
            "notes": list(self.notes),
        }

    def to_markdown(self) -> str:
        """The table as Markdown, without its title."""
        lines = [self.columns, tuple("---" for _ in self.columns), *self.rows]
        words = {True: "yes", False: "no", None: ""}
        return "\n".join(
            "| "
            + " | ".join(words[v] if v is None or isinstance(v, bool) else str(v) for v in line)
            + " |"
            for line in lines
        )

    def column(self, name: str) -> list[object]:
        """One column's values."""
        place = self.columns.index(name)
        return [row[place] for row in self.rows]


# --- the ZeRO paper ----------------------------------------------------------------------------


def exact_state_bytes(
    stage: int, world_size: int, numel: int, recipe: Recipe | None = None
) -> Fraction:
    """Model states of one rank as an exact fraction of bytes, not rounded down kind by kind.

    Parameters
    ----------
    stage, world_size, numel
        See `zero_nb.theory.memory.model_state_bytes`.
    recipe : Recipe, optional
        Mixed-precision Adam by default.

    Returns
    -------
    Fraction
    """
    recipe = recipe or get_recipe()
    kinds = (recipe.param_bytes, recipe.grad_bytes, recipe.optim_bytes)
    return sum(
        Fraction(each * numel, world_size if stage >= first else 1)
        for each, first in zip(kinds, (3, 2, 1), strict=True)
    )


def paper_digits(value: Fraction, decimals: int | None = None) -> str:
    """A number as table 1 of the paper prints it.

    Parameters
    ----------
    value : Fraction
        GB, not negative.
    decimals : int, optional
        Round half up to so many decimals; without it the one rule that gives all of table 1:
        100 and more truncated, from 10 one decimal half up, below 10 two decimals half up.

    Returns
    -------
    str
        Trailing zeros dropped.

    Examples
    --------
    >>> [paper_digits(Fraction(text)) for text in ("4187.5", "41.25", "1.875")]
    ['4187', '41.3', '1.88']
    """
    if decimals is None:
        if value >= 100:
            return str(math.floor(value))
        decimals = 1 if value >= 10 else 2
    scaled = math.floor(value * 10**decimals + Fraction(1, 2))
    whole, part = divmod(scaled, 10**decimals)
    digits = f"{part:0{decimals}d}".rstrip("0") if decimals else ""
    return f"{whole}.{digits}" if digits else str(whole)


def zero_table1() -> Table:
    """Table 1: model states per device."""
    rows = []
    for row in read_data("zero_paper_table1.csv"):
        numel, world_size, stage = (int(row[n]) for n in ("psi", "dp_degree", "zero_stage"))
        exact = exact_state_bytes(stage, world_size, numel)
        printed = row["printed_GB"]
        text = paper_digits(exact / 10**9)
        rows.append((row["model"], world_size, stage, float(exact), text, printed, text == printed))
    return Table(
        "zero-table1",
        "Model states per device, GB = 10^9 bytes, mixed-precision Adam (K = 12)",
        "Rajbhandari et al., arXiv:1910.02054v3, Table 1",
        ("model", "DP", "stage", "exact bytes", "recomputed GB", "printed GB", "same"),
        tuple(rows),
        ("100 and more truncated; 10 to 100 one decimal, below 10 two decimals, both half up",),
    )


def zero_fig1() -> Table:
    """Figure 1: 7.5 billion parameters on 64 devices."""
    rows = []
    for stage, row in enumerate(read_data("zero_paper_fig1.csv")):
        numel, world_size = int(row["psi"]), int(row["Nd"])
        exact = exact_state_bytes(stage, world_size, numel)
        text = paper_digits(exact / 10**9, decimals=1)
        printed = row["printed_GB"]
        formula = row["formula_bytes"]
        rows.append((row["config"], stage, formula, int(exact), text, printed, text == printed))
    return Table(
        "zero-fig1",
        "Model states per device for Psi = 7.5 billion, N_d = 64, K = 12",
        "Rajbhandari et al., arXiv:1910.02054v3, Figure 1",
        ("configuration", "stage", "formula", "bytes", "recomputed GB", "printed GB", "same"),
        tuple(rows),
        ("one decimal, half up: the figure rounds otherwise than table 1",),
    )


def table2_label(mp: int, stage: int, device_bytes: int = 32 * 10**9, dp: int = 64) -> str:
    """Largest model as table 2 prints it.

    Parameters
    ----------
    mp : int
        Model-parallel degree.
    stage : int
    device_bytes : int
        32 GB = 32e9 in the paper.
    dp : int

    Returns
    -------
    str
        The row of one device rounded to 0.1 billion, times `mp`; from 500 billion in trillions,
        truncated to 0.1.
    """
    bytes_per_param = exact_state_bytes(stage, dp, 1)
    one = Fraction(paper_digits(device_bytes / bytes_per_param / 10**9, decimals=1))
    billions = one * mp
    if billions >= 500:
        return paper_digits(Fraction(math.floor(billions / 100), 10), decimals=1) + "T"
    return paper_digits(billions, decimals=1) + "B"


def zero_table2() -> Table:
    """Table 2: the largest model, its theoretical half."""
    stages = {"baseline": 0, "Pos": 1, "Pos+g": 2, "Pos+g+p": 3}
    rows = []
    for row in read_data("zero_paper_table2.csv"):
        if row["kind"] != "theoretical":
            continue
        mp, stage = int(row["mp"]), stages[row["stage"]]
        exact = mp * 32 * 10**9 / exact_state_bytes(stage, int(row["dp_degree"]), 1)
        text = table2_label(mp, stage)
        same = text == row["printed"]
        rows.append((mp, int(row["gpus"]), stage, float(exact / 10**9), text, row["printed"], same))
    return Table(
        "zero-table2",
        "Largest model by model states, 32 GB devices, N_d = 64",
        "Rajbhandari et al., arXiv:1910.02054v3, Table 2 (theoretical)",
        ("MP", "devices", "stage", "exact billions", "recomputed", "printed", "same"),
        tuple(rows),
        ("the first row is rounded to 0.1 billion and multiplied by MP",),
    )


# --- other tools -------------------------------------------------------------------------------


def deepspeed() -> Table:
    """DeepSpeed's estimators: every run on file, to the byte."""
    rows = []
    for row in read_data("deepspeed_estimates.csv"):
        if not row["origin"].startswith("ran deepspeed"):
            continue
        got = _deepspeed_run(row)
        cpu, gpu = int(row["cpu_bytes"]), int(row["gpu_bytes"])
        rows.append(
            (
                row["function"].removeprefix("estimate_"), row["note"],
                int(row["gpus_per_node"]), int(row["nodes"]),
                _flags(row), got.gpu_bytes, gpu, got.cpu_bytes, cpu,
                (got.gpu_bytes, got.cpu_bytes) == (gpu, cpu),
            )
        )  # fmt: skip
    return Table(
        "deepspeed",
        "DeepSpeed's model-state estimators, bytes per device and per node",
        "deepspeed 0.19.8, runtime/zero/stage_1_and_2.py and stage3.py, as run",
        ("function", "model", "gpus/node", "nodes", "options", "gpu bytes", "returned gpu",
         "cpu bytes", "returned cpu", "same"),
        tuple(rows),
        (DIFFERENCES["deepspeed-zero2"], DIFFERENCES["deepspeed-zero3"]),
    )  # fmt: skip


def _flags(row: Mapping[str, str]) -> str:
    """Options of one run in short."""
    names = ("cpu_offload", "cpu_offload_params", "zero_init")
    given = [f"{name}={row[name]}" for name in names if row[name]]
    if row["additional_buffer_factor"] != "1.5":
        given.append(f"factor={row['additional_buffer_factor']}")
    return " ".join(given)


def _deepspeed_run(row: Mapping[str, str]):
    """Call the estimator that a row ran."""
    common = {
        "gpus_per_node": int(row["gpus_per_node"]),
        "nodes": int(row["nodes"]),
        "cpu_offload": row["cpu_offload"] == "1",
        "additional_buffer_factor": float(row["additional_buffer_factor"]),
    }
    numel = int(row["total_params"])
    if row["function"] == "estimate_zero2":
        return deepspeed_zero2(numel, **common)
    offload_params, zero_init = row["cpu_offload_params"] == "1", row["zero_init"] == "1"
    largest = int(row["largest_layer_params"])
    return deepspeed_zero3(
        numel, largest, cpu_offload_params=offload_params, zero_init=zero_init, **common
    )


_SEVEN = llama_like(32, 4096, 32, 11008)
_MEGATRON_CASES: dict[str, tuple] = {
    "22B": (get_model("megatron-22b"), {"micro_batch": 4, "seq": 2048, "tp": 8}),
    "175B L96": (
        get_model("megatron-175b"),
        {"micro_batch": 1, "seq": 2048, "tp": 8, "pp": 8, "interleave": 3},
    ),
    "175B tp8": (
        get_model("megatron-175b"),
        {"micro_batch": 1, "seq": 2048, "tp": 8, "pp": 8, "interleave": 3, "dp": 16},
    ),
    "llama-7b tp1 pp1 dp8 s4096": (_SEVEN, {"micro_batch": 1, "seq": 4096, "dp": 8}),
    "llama-7b tp1 pp1 dp8 no": (
        _SEVEN,
        {"micro_batch": 1, "seq": 4096, "dp": 8, "distributed_optimizer": False},
    ),
    "llama-7b tp1 dp8 without SP": (
        _SEVEN,
        {"micro_batch": 1, "seq": 4096, "dp": 8, "sequence_parallel": False},
    ),
    "llama-2-70b": (
        get_model("llama-2-70b"),
        {"micro_batch": 1, "seq": 4096, "tp": 8, "dp": 8},
    ),
    "gpt2-345M": (gpt_like(24, 1024, 16, vocab=50304), {"micro_batch": 1, "seq": 1024}),
}


def megatron_table() -> Table:
    """Megatron-LM's theoretical memory report."""
    rows = []
    for row in _others("Megatron-LM theoretical"):
        spec, options = next(
            case for start, case in _MEGATRON_CASES.items() if row["case"].startswith(start)
        )
        got = f"{getattr(megatron(spec, **options), row['metric']) / 2**20:.2f}"
        rows.append((row["case"], row["metric"], got, row["value"], got == row["value"]))
    return Table(
        "megatron",
        "Megatron-LM's theoretical memory of the fullest device, MiB (printed as MB)",
        "NVIDIA/Megatron-LM d98e8a6, megatron/training/theoretical_memory_usage.py, as run",
        ("case", "line", "recomputed MiB", "printed MiB", "same"),
        tuple(rows),
        (DIFFERENCES["megatron"],),
    )


def eleuther_table() -> Table:
    """EleutherAI's calculator on its own examples."""
    lines = {
        "per_gpu_act": "activation", "per_gpu_model": "model", "per_gpu_grad": "grad",
        "per_gpu_opt": "optim", "per_gpu_comm": "communication", "per_gpu_total": "total",
    }  # fmt: skip
    rows = []
    for row in _others("EleutherAI"):
        estimate = eleuther(**_eleuther_options(row["case"]))
        got = f"{getattr(estimate, lines[row['metric']]) / 2**30:.2f}"
        rows.append((row["case"], lines[row["metric"]], got, row["value"], got == row["value"]))
    return Table(
        "eleuther",
        "EleutherAI's calculator, per device, GiB",
        "EleutherAI/cookbook 827ee3b, calc/calc_transformer_mem.py, as run",
        ("case", "line", "recomputed GiB", "printed GiB", "same"),
        tuple(rows),
        (DIFFERENCES["eleuther"],),
    )


def _eleuther_options(case: str) -> dict[str, object]:
    """The calculator's arguments from the words of a case; 7B means its first example's shape."""
    words = case.split()
    numbers = {
        key: float(word[len(key) :])
        for word in words
        for key in ("zero", "gpus", "tp", "ff", "L", "h", "a", "s", "b", "v")
        if word.startswith(key) and word[len(key) :].replace(".", "", 1).isdigit()
    }
    options = {
        "layers": int(numbers.get("L", 32)),
        "hidden": int(numbers.get("h", 4096)),
        "heads": int(numbers.get("a", 32)),
        "seq": int(numbers.get("s", 2048)),
        "micro_batch": int(numbers.get("b", 1)),
        "vocab": int(numbers.get("v", 51200)),
        "gpus": int(numbers.get("gpus", 1)),
        "tp": int(numbers.get("tp", 1)),
        "stage": int(numbers.get("zero", 1)),
        "ffn_factor": numbers.get("ff", 4.0),
    }
    flags = {"checkpoint_activations": "ckpt" in words, "partition_activations": "pa" in words}
    return options | flags


def _others(tool: str) -> list[dict[str, str]]:
    """Rows of one tool."""
    return [row for row in read_data("other_estimators.csv") if row["tool"].startswith(tool)]


def tools() -> Table:
    """One model by every tool's accounting."""
    spec, world = get_model("llama-7b"), 8
    one = megatron(spec, micro_batch=1, seq=2048, dp=world)
    calculator = eleuther(32, 4096, 32, vocab=32000, gpus=world, stage=3)
    states = calculator.model + calculator.grad + calculator.optim
    counted = {
        "paper": int(exact_state_bytes(3, world, spec.numel)),
        "deepspeed-zero2": deepspeed_zero2(spec.numel, world, cpu_offload=False).gpu_bytes,
        "deepspeed-zero3": deepspeed_zero3(
            spec.numel, spec.largest_layer_numel, world, cpu_offload=False
        ).gpu_bytes,
        "megatron": round(one.weight_and_optimizer),
        "eleuther": round(states),
        "accelerate": round(accelerate_estimate(spec.numel)[1]),
        "llm-analysis": sum(llm_analysis_states(spec, 3, world).values())
        - llm_analysis_states(spec, 3, world)["numel"],
    }
    rows = tuple(
        (tool, count, format_gb_gib(count), DIFFERENCES[tool]) for tool, count in counted.items()
    )
    return Table(
        "tools",
        f"Model states of {spec.name} on one of {world} devices, as different tools count them",
        "the functions of zero_nb.theory.estimators",
        ("tool", "bytes", "GB and GiB", "why"),
        rows,
        ("stage 3 where a tool has stages, the distributed optimizer for Megatron",),
    )


# --- activations, recipes, traffic, presets ------------------------------------------------------


def activations() -> Table:
    """Activation memory by technique."""
    rows = []
    for row in read_data("activation_memory.csv"):
        s, b, h, a, layers, t, p, m = (int(row[name]) for name in "sbhaLtpm")
        technique = row["technique"]
        mode = next((word for word in ("selective", "full") if word in technique), "none")
        parallel = "parallel" in technique and technique != "no parallelism"
        got = korthikanti_layer_bytes(
            s, b, h, a, t=t if parallel else 1, recompute=mode,
            sequence_parallel="sequence" in technique,
        )  # fmt: skip
        total = got * layers * interleave_factor(p, m)
        same = got == int(row["bytes_per_layer"])
        model = row["model"]
        rows.append((model, technique, got, f"{total / 2**30:.2f}", row["bytes_per_layer"], same))
    return Table(
        "activations",
        "Activations per layer, and of the first pipeline stage with interleaving",
        "Korthikanti et al., arXiv:2205.05198, Equations 1-6 and Table 2",
        ("model", "technique", "bytes a layer", "stage GiB", "reference bytes", "same"),
        tuple(rows),
    )


def recipes() -> Table:
    """Bytes per parameter by precision and optimizer."""
    pairs = [(precision, "adamw") for precision in PRECISIONS]
    pairs += [(precision, name) for precision in ("fp32", "bf16") for name in OPTIMIZERS]
    rows = []
    for precision, optimizer in dict.fromkeys(pairs):
        each = get_recipe(precision, optimizer)
        rows.append(
            (each.name, each.param_bytes, each.grad_bytes, each.master_bytes, each.state_bytes,
             each.optim_bytes, each.total_bytes, each.source)
        )  # fmt: skip
    return Table(
        "recipes",
        "Which 16? Bytes per parameter on one device without ZeRO",
        "each row's own",
        ("recipe", "weight", "gradient", "master", "state", "K", "total", "source"),
        tuple(rows),
        ("K is the optimizer's part: 12 of the 16 bytes of mixed-precision Adam",),
    )


def traffic() -> Table:
    """Elements sent per step in units of the model, exact ring counts for 64 ranks."""
    world, unit = 64, 64 * 1000
    rows = []
    for k in (1, 4, 16):
        for stage in range(4):
            sent = elements_per_step(stage, world, unit, micro_batches=k)
            rows.append((f"stage {stage}", k, sent / unit, sent * world // (world - 1) // unit))
        sent = elements_per_step(3, world, unit, micro_batches=k, no_sync=True)
        rows.append(("stage 3, no_sync", k, sent / unit, sent * world // (world - 1) // unit))
        for stage in (1, 2):
            sent = deepspeed_elements_per_step(stage, world, unit, micro_batches=k)
            whole = sent * world // (world - 1) // unit
            rows.append((f"stage {stage}, all-reduced buckets (DeepSpeed)", k, sent / unit, whole))
        hybrid = mics_traffic(world, 8, unit, micro_batches=k)
        rows.append(
            ("hybrid shard in groups of 8 (MiCS), in the group", k, hybrid.group_elements / unit,
             3 * k)
        )  # fmt: skip
        rows.append(
            ("hybrid shard in groups of 8 (MiCS), between groups", k,
             hybrid.replica_elements / unit, 2 / 8)
        )  # fmt: skip
    plus = zeropp_volume()
    rows.append(("ZeRO++ between nodes", 1, plus.total, plus.total))
    return Table(
        "traffic",
        "Elements sent by one of 64 ranks per step, in units of the model",
        "arXiv:1910.02054 Section 7; accumulation follows from it; ZeRO++ arXiv:2306.10209",
        ("scheme", "micro-batches", "exact", "asymptotic"),
        tuple(rows),
    )


def models() -> Table:
    """Model presets."""
    rows = tuple(
        (spec.name, spec.layers, spec.hidden, spec.heads, spec.kv_heads, spec.ffn, spec.vocab,
         spec.numel, spec.largest_layer_numel, spec.source)
        for spec in MODELS.values()
    )  # fmt: skip
    return Table(
        "models",
        "Model presets; parameters by closed form from the shape",
        "each row's own",
        ("name", "layers", "hidden", "heads", "kv", "ffn", "vocab", "parameters", "largest layer",
         "source"),
        rows,
    )  # fmt: skip


def devices() -> Table:
    """Hardware presets."""
    rows = tuple(
        (each.name, each.memory_bytes, format_gb_gib(each.memory_bytes),
         each.flops_per_s / 1e12, each.link_bytes_per_s / 1e9, each.network_bytes_per_s / 1e9,
         each.per_node, each.source)
        for each in DEVICES.values()
    )  # fmt: skip
    return Table(
        "devices",
        "Hardware presets",
        "each row's own",
        ("name", "bytes", "GB and GiB", "TFLOP/s", "link GB/s", "network GB/s", "per node",
         "source"),
        rows,
    )  # fmt: skip


def reality() -> Table:
    """Predictions beside published measured peaks."""
    rows = []
    for group, data in (("judged", published_rows()), ("collected later", heldout_rows())):
        for row in data:
            each = judge(row)
            rows.append(
                (group, each.row, each.model, each.measure, f"{each.measured / 2**30:.2f}",
                 f"{each.low / 2**30:.1f}-{each.high / 2**30:.1f}",
                 f"{each.predicted / 2**30:.2f}", round(each.ratio, 3), each.moment, each.right)
            )  # fmt: skip
    right = sum(row[-1] for row in rows if row[0] == "judged")
    later = [row[-1] for row in rows if row[0] != "judged"]
    return Table(
        "reality",
        "Planned beside measured peaks, GiB per device",
        "each row's own, see data/measured_peaks.csv and data/heldout_peaks.csv",
        ("group", "row", "model", "measured what", "measured", "range", "planned", "ratio",
         "largest moment", "within 15 %"),
        tuple(rows),
        (
            f"{right} of {len(rows) - len(later)} judged and {sum(later)} of {len(later)} later "
            "rows within 15 %",
            "no constant was fitted to these rows; allocator slack and context come from other "
            "logs, tensor lists and loss bytes from code",
        ),
    )  # fmt: skip


TABLES: dict[str, Callable[[], Table]] = {
    "zero-table1": zero_table1,
    "zero-fig1": zero_fig1,
    "zero-table2": zero_table2,
    "deepspeed": deepspeed,
    "megatron": megatron_table,
    "eleuther": eleuther_table,
    "tools": tools,
    "activations": activations,
    "recipes": recipes,
    "traffic": traffic,
    "models": models,
    "devices": devices,
    "reality": reality,
}
"""Tables by name."""


def make_table(name: str) -> Table:
    """A table by name.

    Parameters
    ----------
    name : str
        One of `TABLES`.

    Returns
    -------
    Table

    Raises
    ------
    UsageError
        For an unknown name, with the nearest ones.
    """
    if name not in TABLES:
        raise name_error("table", name, TABLES)
    return TABLES[name]()
