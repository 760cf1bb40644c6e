"""Model states: the paper's formula, padding, the saved fraction."""

import csv
from fractions import Fraction
from pathlib import Path

import pytest

from zero_nb.theory.memory import (
    OPTIMIZERS,
    PRECISIONS,
    get_recipe,
    model_state_bytes,
    padded_numel,
    padding_bytes,
    zero_stage_memory_reduction,
)

REFERENCE = Path(__file__).parent / "data" / "reference"
STAGES = (0, 1, 2, 3)
WORLD_SIZES = (1, 2, 3, 4, 7, 8, 16, 64, 1024)


def rows(name):
    """Rows of a reference file, without its comment lines."""
    with open(REFERENCE / name, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


@pytest.mark.parametrize(
    "row",
    rows("zero_paper_table1.csv"),
    ids=lambda row: f"{row['model']}-{row['dp_degree']}-{row['stage']}",
)
def test_table_1_exact_bytes(row):
    stage, world_size, psi = (int(row[name]) for name in ("zero_stage", "dp_degree", "psi"))
    state = model_state_bytes(stage, world_size, psi)
    exact = Fraction(row["exact_bytes"])
    assert 0 <= exact - state.total < 2  # each kind is rounded down: halves where W is large
    if psi * 2 % world_size == 0:
        assert state.total == exact


def test_figure_1_exact_bytes():
    got = [model_state_bytes(stage, 64, 7_500_000_000) for stage in STAGES]
    wanted = rows("zero_paper_fig1.csv")
    assert [state.total for state in got] == [int(row["exact_bytes"]) for row in wanted]
    for state, row in zip(got, wanted, strict=True):
        assert state.param / 1e9 == float(row["params_GB"])
        assert state.grad / 1e9 == float(row["grads_GB"])
        assert state.optim / 1e9 == float(row["optim_GB"])


@pytest.mark.parametrize(
    ("precision", "optimizer", "total"),
    [
        ("fp32", "adamw", 16),
        ("bf16", "adamw", 16),
        ("fp16", "adam", 16),
        ("bf16-fp32-grads", "adamw", 18),
        ("bf16-both-grads", "adamw", 20),
        ("fp16-both-grads", "adamw", 20),
        ("fp32", "momentum", 12),
        ("fp32", "sgd", 8),
        ("bf16-pure", "adamw", 8),
        ("bf16", "sgd", 8),
        ("bf16", "adam-8bit", 10),
    ],
)
def test_recipes_bytes_per_parameter(precision, optimizer, total):
    recipe = get_recipe(precision, optimizer)
    assert recipe.total_bytes == total
    assert recipe.source
    assert model_state_bytes(0, 5, 1001, precision, optimizer).total == 1001 * total


def test_every_recipe_names_its_source():
    assert all(kept.source for kept in PRECISIONS.values())
    assert all(source for _, source in OPTIMIZERS.values())


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_padding_is_what_the_larger_flat_params_add(stage, world_size):
    numels = [1296, 28272, 1, 0, 1403]
    bare = model_state_bytes(stage, world_size, sum(numels))
    extra = padding_bytes(stage, world_size, numels)
    whole = sum(-(-n // world_size) * world_size for n in numels)
    cut = world_size
    assert bare.param + extra.param == 2 * whole // (cut if stage == 3 else 1)
    assert bare.grad + extra.grad == 2 * whole // (cut if stage >= 2 else 1)
    assert bare.optim + extra.optim == 12 * whole // (cut if stage >= 1 else 1)


def test_padded_numel_of_one_and_many():
    assert padded_numel(5, 4) == 8
    assert padded_numel([5, 7, 8, 0], 4) == 8 + 8 + 8 + 0
    assert padded_numel(iter([5]), 1) == 5


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_saved_fraction_is_saved_over_baseline(stage, world_size):
    p, g, o = 2 * 999, 4 * 999, 12 * 999
    got = zero_stage_memory_reduction(stage, world_size, p, g, o)
    cut = (o if stage >= 1 else 0) + (g if stage >= 2 else 0) + (p if stage >= 3 else 0)
    wanted = Fraction(cut, p + g + o) * Fraction(world_size - 1, world_size)
    assert got == pytest.approx(float(wanted), rel=1e-15, abs=0)


def test_saved_fraction_where_nothing_can_be_saved():
    assert zero_stage_memory_reduction(0, 8, 1, 1, 1) == 0.0
    assert zero_stage_memory_reduction(3, 1, 1, 1, 1) == 0.0
    assert zero_stage_memory_reduction(3, 8, 0, 0, 0) == 0.0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: model_state_bytes(4, 2, 10), "stage must be 0, 1, 2 or 3, got 4"),
        (lambda: model_state_bytes(True, 2, 10), "stage must be"),
        (lambda: model_state_bytes(1, 0, 10), "world_size must be a whole number of at least 1"),
        (lambda: model_state_bytes(1, 2.5, 10), "world_size must be"),
        (lambda: model_state_bytes(1, 2, -1), "numel must be"),
        (lambda: model_state_bytes(1, 2, 1, "bf61"), "did you mean bf16"),
        (lambda: model_state_bytes(1, 2, 1, "bf16", "adma"), "did you mean adam"),
        (lambda: zero_stage_memory_reduction(-1, 2, 1, 1, 1), "stage must be"),
        (lambda: zero_stage_memory_reduction(1, 0, 1, 1, 1), "world_size must be"),
        (lambda: zero_stage_memory_reduction(1, 2, 1, -1, 1), "grad_bytes must be"),
        (lambda: zero_stage_memory_reduction(1, 2, 1, float("nan"), 1), "grad_bytes must be"),
        (lambda: padded_numel([3, -1], 2), "numel must be"),
    ],
)
def test_bad_input_says_what_to_do(call, message):
    with pytest.raises(ValueError, match=message):
        call()
