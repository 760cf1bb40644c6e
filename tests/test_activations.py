"""Activations: Korthikanti's formula to the byte, and the count of tensors that meets it."""

import csv
from fractions import Fraction
from pathlib import Path

import pytest

from zero_nb.config import UsageError
from zero_nb.theory.activations import (
    EXECUTIONS,
    LOSSES,
    RECOMPUTES,
    interleave_factor,
    korthikanti_layer_bytes,
    saved_per_token,
)
from zero_nb.theory.specs import gpt_like, llama_like

REFERENCE = Path(__file__).parent / "data" / "reference"


def rows(name):
    """Rows of a reference file, without its comment lines."""
    with open(REFERENCE / name, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def technique(text):
    """Options of a row's technique, in words of the reference file."""
    recompute = next((word for word in ("selective", "full") if word in text), "none")
    return {
        "recompute": recompute,
        "sequence_parallel": "sequence" in text,
        "parallel": "parallel" in text and "no parallelism" not in text,
    }


@pytest.mark.parametrize(
    "row", rows("activation_memory.csv"), ids=lambda row: f"{row['model']}-{row['technique']}"
)
def test_korthikanti_to_the_byte(row):
    s, b, h, a, layers, t, p, m = (int(row[name]) for name in "sbhaLtpm")
    options = technique(row["technique"])
    cut = t if options.pop("parallel") else 1
    got = korthikanti_layer_bytes(s, b, h, a, t=cut, **options)
    assert got == int(row["bytes_per_layer"])
    assert got * layers == int(row["total_first_stage_bytes"])
    factor = interleave_factor(p, m)
    assert factor == pytest.approx(float(row["interleave_factor"]), abs=1e-9)
    total = got * layers * factor / 2**30
    assert f"{total:.6f}" == row["total_with_interleave_GiB"]


def test_every_activation_row_was_read():
    assert len(rows("activation_memory.csv")) == 48


@pytest.mark.parametrize("t", [1, 2, 8])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_tensors_of_a_gpt_layer_add_up_to_korthikanti(t, recompute):
    s, b, h, a = 128, 3, 256, 8
    spec = gpt_like(2, h, a, seq=s)
    saved = saved_per_token(spec, recompute=recompute, flash=False, dropout=True)
    for sequence_parallel in (False, True):
        if recompute == "full" and sequence_parallel:
            continue  # the paper's full recomputation keeps the whole input
        got = s * b * saved.bytes(s, t, sequence_parallel)
        wanted = korthikanti_layer_bytes(
            s, b, h, a, t=t, recompute=recompute, sequence_parallel=sequence_parallel
        )
        assert got == wanted


def test_playbook_figure_uses_the_same_formula():
    """Hugging Face's ultrascale playbook: L(34sbh + 5as²b) + sbh."""
    layers, h, a = 16, 2048, 32
    for row in rows("playbook_memory_recomputation.csv"):
        s, b = int(row["seq"]), int(row["batch"])
        total = layers * korthikanti_layer_bytes(s, b, h, a) + s * b * h
        assert total / 2**30 == float(row["activations_GiB"])


@pytest.mark.parametrize(
    ("claim", "got"),
    [
        ("5as/h for GPT-3", Fraction(5 * 96 * 2048, 12288)),
        ("5as/h for MT-NLG 530B", Fraction(5 * 128 * 2048, 20480)),
    ],
)
def test_printed_ratios_of_the_paper(claim, got):
    row = next(row for row in rows("activation_claims.csv") if row["claim"] == claim)
    assert got == Fraction(row["printed"])


def test_saving_of_selective_recomputation_as_printed():
    for model, (h, a) in {"GPT-3": (12288, 96), "MT-NLG": (20480, 128)}.items():
        none = korthikanti_layer_bytes(2048, 1, h, a)
        kept = korthikanti_layer_bytes(2048, 1, h, a, recompute="selective")
        row = next(
            row
            for row in rows("activation_claims.csv")
            if "selective" in row["claim"] and model in row["claim"]
        )
        assert f"{1 - kept / none:.0%}" == row["printed"]


def test_float32_doubles_tensors_but_not_masks():
    spec = gpt_like(2, 64, 4, seq=32)
    half = saved_per_token(spec, flash=False, dropout=True)
    full = saved_per_token(spec, itemsize=4, flash=False, dropout=True)
    assert full.whole - 2 * 64 == 2 * (half.whole - 2 * 64)
    assert full.split == 2 * half.split
    assert (half.per_position, full.per_position) == (4 * 5, 4 * 9)


def naive_llama_eager(h, heads, kv, ff):
    """Every tensor autograd keeps for one LLaMA layer run operator by operator, in bytes."""
    dim = h // heads
    tensors = []
    for _ in ("attention norm", "feed-forward norm"):
        tensors += [("float32 copy", 4 * h), ("normalised", 2 * h), ("scaled", 2 * h)]
    tensors += [("query", 2 * h), ("attended", 2 * h), ("logsumexp", 4 * heads)]
    repeats = heads // kv
    tensors += [
        ("keys repeated", 2 * kv * dim * repeats),
        ("values repeated", 2 * kv * dim * repeats),
    ]
    tensors += [("gate", 2 * ff), ("silu", 2 * ff), ("up", 2 * ff), ("product", 2 * ff)]
    return sum(size for _, size in tensors)


@pytest.mark.parametrize("shape", [(64, 8, 2, 96), (128, 4, 4, 100)])
def test_tensors_of_a_llama_layer_run_one_operator_at_a_time(shape):
    h, heads, kv, ff = shape
    spec = llama_like(2, h, heads, ff, kv_heads=kv)
    saved = saved_per_token(spec, execution="eager")
    assert saved.bytes(999) == naive_llama_eager(*shape)


def test_more_recomputation_keeps_less():
    for spec in (gpt_like(2, 64, 4), llama_like(2, 64, 4, 96, kv_heads=2)):
        for execution in ("fused", "eager", "compiled"):
            kept = [
                saved_per_token(spec, recompute=mode, execution=execution, flash=False).bytes(64)
                for mode in RECOMPUTES
            ]
            assert kept == sorted(kept, reverse=True)
            assert kept[-1] == 2 * 64


def test_every_choice_says_what_it_means():
    assert all(RECOMPUTES.values())
    assert all(EXECUTIONS.values())
    assert all(source for _, source in LOSSES.values())


@pytest.mark.parametrize(
    "call",
    [
        lambda: korthikanti_layer_bytes(0, 1, 1, 1),
        lambda: korthikanti_layer_bytes(1, 1, 1, 1, recompute="some"),
        lambda: saved_per_token(gpt_like(2, 64, 4), recompute="some"),
        lambda: saved_per_token(gpt_like(2, 64, 4), execution="lazy"),
        lambda: interleave_factor(0, 1),
    ],
)
def test_bad_input_is_refused(call):
    with pytest.raises(UsageError):
        call()
