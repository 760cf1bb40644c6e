"""Other tools' estimators: what they returned when they ran, to the byte or the printed digit."""

import csv
from pathlib import Path

import pytest

from zero_nb.config import UsageError
from zero_nb.theory.estimators import (
    DIFFERENCES,
    accelerate_estimate,
    deepspeed_padding,
    deepspeed_zero2,
    deepspeed_zero3,
    eleuther,
    llm_analysis_states,
    megatron,
    megatron_bytes_per_param,
    zero_offload_bytes,
)
from zero_nb.theory.presets import get_model
from zero_nb.theory.specs import gpt_like, llama_like

REFERENCE = Path(__file__).parent / "data" / "reference"


def rows(name):
    """Rows of a reference file, without its comment lines."""
    with open(REFERENCE / name, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def flag(text):
    """A 0 or 1 of the reference file."""
    return {"0": False, "1": True}[text]


def deepspeed(row, **options):
    """Call the estimator a row names."""
    common = {
        "gpus_per_node": int(row["gpus_per_node"]),
        "nodes": int(row["nodes"]),
        "cpu_offload": flag(row["cpu_offload"]),
        "additional_buffer_factor": float(row["additional_buffer_factor"]),
    }
    numel = int(row["total_params"])
    if row["function"] == "estimate_zero2":
        return deepspeed_zero2(numel, **common, **options)
    return deepspeed_zero3(
        numel,
        int(row["largest_layer_params"]),
        cpu_offload_params=flag(row["cpu_offload_params"]),
        zero_init=flag(row["zero_init"]),
        **common,
    )


ESTIMATES = rows("deepspeed_estimates.csv")


def test_deepspeed_returned_the_same_bytes_in_all_592_runs():
    ran = [row for row in ESTIMATES if row["origin"].startswith("ran deepspeed")]
    assert len(ran) == 592
    for row in ran:
        got = deepspeed(row)
        assert (got.cpu_bytes, got.gpu_bytes) == (int(row["cpu_bytes"]), int(row["gpu_bytes"])), row
        assert f"{got.cpu_bytes / 2**30:.2f}" == row["cpu_GiB"]
        assert f"{got.gpu_bytes / 2**30:.2f}" == row["gpu_GiB"]


def test_deepspeed_before_june_2024():
    ran = [row for row in ESTIMATES if row["origin"].startswith("ran old code")]
    assert len(ran) == 4
    for row in ran:
        got = deepspeed(row, before_2024_06=True)
        assert (got.cpu_bytes, got.gpu_bytes) == (int(row["cpu_bytes"]), int(row["gpu_bytes"])), row


def test_deepspeed_examples_printed_in_documentation_and_issues():
    numels = {
        "2851M (t5-3b live)": (2851598336, 32899072),
        "2851000000": (2851000000, 32000000),
        "2783M (T0_3B live)": (2783959040, 65798144),
    }
    checked = stale = 0
    for row in ESTIMATES:
        if not row["origin"].startswith("docs"):
            continue
        numel, largest = numels[row["total_params"]]
        filled = row | {"total_params": numel, "largest_layer_params": largest}
        got = deepspeed(filled)
        printed = (row["cpu_GiB"], row["gpu_GiB"])
        if row["note"].startswith("STALE"):
            assert f"{got.gpu_bytes / 2**30:.2f}" != printed[1]
            got = deepspeed(filled, before_2024_06=True)
            stale += 1
        assert (f"{got.cpu_bytes / 2**30:.2f}", f"{got.gpu_bytes / 2**30:.2f}") == printed
        checked += 1
    assert (checked, stale) == (22, 2)


@pytest.mark.parametrize("row", rows("padding_examples.csv"), ids=lambda row: row["group_numel"])
def test_deepspeed_padding(row):
    got = deepspeed_padding(int(row["group_numel"]), int(row["world_size"]))
    wanted = tuple(
        int(row[name]) for name in ("aligned_numel", "per_rank_partition", "ranks_with_padding")
    )
    assert got == wanted
    assert got[0] - int(row["group_numel"]) == int(row["padding"])


# --- Megatron-LM --------------------------------------------------------------------------------

K22 = get_model("megatron-22b")
K175 = get_model("megatron-175b")
SEVEN = llama_like(32, 4096, 32, 11008)
MEGATRON = {
    "22B L48 h6144 a64 tp8 pp1 dp1 mbs4 s2048 v51200 SP selective distopt": (
        K22, {"micro_batch": 4, "seq": 2048, "tp": 8},
    ),
    "175B L96 h12288 a96 tp8 pp8 vpp3 dp1": (
        K175, {"micro_batch": 1, "seq": 2048, "tp": 8, "pp": 8, "interleave": 3},
    ),
    "175B tp8 pp8 vpp3 dp16": (
        K175, {"micro_batch": 1, "seq": 2048, "tp": 8, "pp": 8, "interleave": 3, "dp": 16},
    ),
    "llama-7b tp1 pp1 dp8 s4096 mbs1 SP selective distopt": (
        SEVEN, {"micro_batch": 1, "seq": 4096, "dp": 8},
    ),
    "llama-7b tp1 pp1 dp8 no distopt": (
        SEVEN, {"micro_batch": 1, "seq": 4096, "dp": 8, "distributed_optimizer": False},
    ),
    "llama-2-70b tp8 pp1 dp8 s4096": (
        get_model("llama-2-70b"), {"micro_batch": 1, "seq": 4096, "tp": 8, "dp": 8},
    ),
    "gpt2-345M L24 h1024 a16 s1024 v50304 dp1": (
        gpt_like(24, 1024, 16, vocab=50304), {"micro_batch": 1, "seq": 1024},
    ),
    "llama-7b tp1 dp8 without SP": (
        SEVEN, {"micro_batch": 1, "seq": 4096, "dp": 8, "sequence_parallel": False},
    ),
}  # fmt: skip


def others(tool):
    """Rows of one tool."""
    return [row for row in rows("other_estimators.csv") if row["tool"].startswith(tool)]


def test_megatron_report_to_the_printed_digit():
    checked = 0
    for row in others("Megatron-LM theoretical"):
        spec, options = MEGATRON[row["case"]]
        got = getattr(megatron(spec, **options), row["metric"])
        assert f"{got / 2**20:.2f}" == row["value"], row
        checked += 1
    assert checked == 24


@pytest.mark.parametrize("d", [1, 8, 64])
def test_megatron_bytes_per_parameter(d):
    table = {"fp16": (20, 4 + 16 / d), "bf16": (18, 6 + 12 / d), "fp32": (16, 8 + 8 / d)}
    for precision, (plain, distributed) in table.items():
        assert megatron_bytes_per_param(precision) == plain
        assert megatron_bytes_per_param(precision, d) == distributed
    printed = {row["value"] for row in others("Megatron-LM docs")}
    assert printed == {"20", "4 + 16/d", "18", "6 + 12/d", "16", "8 + 8/d"}


# --- EleutherAI, accelerate, llm-analysis -------------------------------------------------------

ELEUTHER = {
    "7B L32 h4096 a32 s2048 b8 ckpt zero1 pa tp2 gpus128 v51200": (
        (32, 4096, 32), {"micro_batch": 8, "tp": 2, "gpus": 128, "ck": 1, "pa": 1},
    ),
    "12B L36 h5120 a40 s2048 b8 ckpt zero1 pa tp4 gpus256": (
        (36, 5120, 40), {"micro_batch": 8, "tp": 4, "gpus": 256, "ck": 1, "pa": 1},
    ),
    "20B default L44 h6144 a64 s2048 b1 ckpt zero1 pa tp1 gpus1": (
        (44, 6144, 64), {"ck": 1, "pa": 1},
    ),
    "llama7B L32 h4096 a32 s4096 ff3.5 b1 zero1 tp1 gpus1": (
        (32, 4096, 32), {"seq": 4096, "ffn_factor": 3.5},
    ),
    "7B b8 ckpt zero0 tp2 gpus128": (
        (32, 4096, 32), {"micro_batch": 8, "tp": 2, "gpus": 128, "stage": 0, "ck": 1},
    ),
    "7B b1 zero3 tp1 gpus64 v50304": ((32, 4096, 32), {"gpus": 64, "stage": 3, "vocab": 50304}),
}  # fmt: skip
LINES = {
    "per_gpu_act": "activation",
    "per_gpu_model": "model",
    "per_gpu_grad": "grad",
    "per_gpu_opt": "optim",
    "per_gpu_comm": "communication",
    "per_gpu_total": "total",
}


def test_eleuther_calculator_to_the_printed_digit():
    checked = 0
    for row in others("EleutherAI"):
        shape, options = ELEUTHER[row["case"]]
        options = dict(options)
        got = eleuther(
            *shape,
            checkpoint_activations=bool(options.pop("ck", 0)),
            partition_activations=bool(options.pop("pa", 0)),
            **options,
        )
        assert f"{getattr(got, LINES[row['metric']]) / 2**30:.2f}" == row["value"], row
        checked += 1
    assert checked == 36


def test_accelerate_estimate():
    """The documentation's float32 size gives the count; the other sizes must follow from it.

    Printed sizes have two decimals, so a quarter of one in int8 is known to 0.0025, and four times
    one to 0.02.
    """
    table = {row["case"].split()[-1] + row["metric"]: row["value"] for row in others("accelerate")}
    numel = round(float(table["float32total_size"].split()[0]) * 2**20 / 4)
    for case, bits in {"float32": 32, "float16": 16, "int8": 8, "int4": 4}.items():
        for metric, got, within in zip(
            ("total_size", "training_adam"),
            accelerate_estimate(numel, bits),
            (0.01, 0.025),
            strict=True,
        ):
            number, unit = table[case + metric].split()
            scaled = got / 2 ** {"MB": 20, "GB": 30}[unit]
            assert scaled == pytest.approx(float(number), abs=within), (case, metric)


def test_llm_analysis_states():
    llama, opt = get_model("llama-2-7b"), get_model("opt-175b")
    checked = 0
    for row in others("llm-analysis"):
        if row["metric"] == "num_params_total":
            spec = opt if "opt" in row["case"] else llama
            assert llm_analysis_states(spec, 0, 1)["numel"] == int(row["value"])
        elif row["metric"] != "estimated_peak":
            stage = int(row["case"].split("zero")[1][0])
            assert llm_analysis_states(llama, stage, 8)[row["metric"]] == int(row["value"]), row
        else:
            continue
        checked += 1
    assert checked == 14


def test_zero_offload_table_1():
    wanted = {"16M": (False, False), "14M": (True, False), "4M": (False, True), "2M": (True, True)}
    printed = [row for row in rows("offload_numbers.csv") if "Table 1 row" in row["quantity"]]
    assert {row["value"] for row in printed} == set(wanted)
    for text, (grads, optimizer) in wanted.items():
        got = zero_offload_bytes(1000, grads=grads, optimizer=optimizer)
        assert got == 1000 * int(text.rstrip("M"))


def test_differences_name_every_tool():
    assert {"paper", "deepspeed-zero2", "deepspeed-zero3", "megatron"} <= set(DIFFERENCES)
    assert all(len(text) > 20 for text in DIFFERENCES.values())


@pytest.mark.parametrize(
    "call",
    [
        lambda: deepspeed_zero2(-1),
        lambda: deepspeed_zero3(1, 1, gpus_per_node=0),
        lambda: megatron(K22, micro_batch=0, seq=1),
        lambda: megatron_bytes_per_param("fp8"),
        lambda: eleuther(2, 8, 2, tp=3, gpus=4),
        lambda: eleuther(2, 8, 2, stage=4),
        lambda: accelerate_estimate(10, 6),
        lambda: deepspeed_padding(10, 0),
    ],
)
def test_bad_input_is_refused(call):
    with pytest.raises(UsageError):
        call()
