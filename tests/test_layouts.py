"""Who owns what: rules that give the bytes which PyTorch and DeepSpeed really held, exactly."""

import json
import math
from pathlib import Path

import pytest

from zero_nb.config import UsageError
from zero_nb.core.partition import flat_layout, whole_layout
from zero_nb.theory.layouts import (
    MODES,
    RULES,
    cut,
    gpt_units,
    held_state,
    measured_state,
    mlp_units,
)
from zero_nb.theory.published import read_data

UNITS = {
    "mlp": mlp_units(16, 64, 64, 4),
    "mlp_odd": mlp_units(13, 37, 29, 3),
    "gpt": gpt_units(64, 16, 32, 2),
}
ROWS = read_data("framework_state_bytes.csv")
MEASURED = sorted(
    {(r["mode"], r["model"], int(r["world"]), r["variant"] == "bf16") for r in ROWS}
)  # fmt: skip
GOLDEN = Path(__file__).parent / "data" / "golden"


def numel(units):
    return sum(math.prod(shape) for unit in units for shape in unit)


@pytest.mark.parametrize(("mode", "model", "world_size", "bf16"), MEASURED)
def test_predicted_bytes_are_those_measured(mode, model, world_size, bf16):
    if mode == "ddp":
        pytest.skip("nothing is cut")
    measured = measured_state(mode, model, world_size, bf16=bf16)
    assert held_state(mode, UNITS[model], world_size, bf16=bf16) == measured


def test_every_mode_was_measured_in_many_runs():
    assert {mode for mode, *_ in MEASURED} == {*MODES, "ddp"}
    assert len(MEASURED) >= 80


def test_the_table_says_what_the_golden_runs_say():
    held = {}
    for name in ("runs.json", "runs_deepspeed.json"):
        for run in json.loads((GOLDEN / name).read_text(encoding="utf-8"))["runs"]:
            if run["opt"] == "adamw":
                key = run["mode"], run["model"], run["world"], run["variant"]
                ranks = run["held_bytes"]
                held[key] = ranks if isinstance(ranks, list) else [ranks] * run["world"]
    for row in ROWS:
        ranks = held[row["mode"], row["model"], int(row["world"]), row["variant"]]
        rank = ranks[int(row["rank"])]
        param = rank["params"] + rank.get("ds_shards", 0)
        master = rank["masters"] if "masters" in rank else rank["fp32_master"]
        told = tuple(int(row[kind]) for kind in ("param", "master", "optim"))
        assert told == (param, master, rank["opt_state"]), row


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("model", UNITS)
def test_every_element_has_one_owner(rule, world_size, model):
    pieces = cut(rule, UNITS[model], world_size)
    ranges = sorted(piece for ranges in pieces.owned for piece in ranges)
    assert ranges[0][0] == 0
    assert ranges[-1][1] == numel(UNITS[model])
    assert all(one[1] == two[0] for one, two in zip(ranges, ranges[1:], strict=False))
    assert all(real <= kept for real, kept in zip(pieces.real, pieces.stored, strict=True))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("model", UNITS)
def test_what_this_project_cuts_too_it_cuts_the_same_way(world_size, model):
    """Two towers, two codes: `core.partition` moves arrays, `theory.layouts` counts."""
    shapes = [shape for unit in UNITS[model] for shape in unit]
    for rule, layout in (
        ("flat", flat_layout(shapes, world_size)),
        ("deepspeed-1-2", flat_layout(shapes, world_size, align=2 * world_size)),
        ("tensors", whole_layout(shapes, world_size)),
    ):
        assert cut(rule, UNITS[model], world_size).stored == tuple(layout.buffer_numels), rule
    per_unit = [flat_layout(unit, world_size).buffer_numels for unit in UNITS[model]]
    assert cut("units", UNITS[model], world_size).stored == tuple(
        map(sum, zip(*per_unit, strict=True))
    )


def test_rules_differ_as_their_words_say():
    units = mlp_units(13, 37, 29, 3)
    # Rows: 3 rows on 4 ranks leave the last one without any; 37 rows are 10, 10, 10, 7.
    rows = cut("fsdp2", units, 4)
    assert rows.real == (474, 474, 474, 288)
    assert rows.stored == (474,) * 4
    # Whole tensors: 1073, 481, 87, 37 + 29 + 3.
    assert cut("tensors", units, 4).real == (1073, 481, 87, 69)
    # 1710 real elements, padded to 1712 = 8 * 214.
    assert cut("deepspeed-1-2", units, 4).stored == (428,) * 4
    assert cut("flat", units, 4).stored == (428,) * 4
    assert cut("flat", units, 3).stored == (570,) * 3
    assert cut("deepspeed-3", units, 4).stored == (431,) * 4
    assert cut("fsdp1", units, 4).stored == (431,) * 4
    assert cut("fsdp1", units, 4, itemsize=2).stored == (433,) * 4


def test_bad_input_is_explained():
    with pytest.raises(UsageError, match="unknown rule 'fsdp3'; did you mean fsdp"):
        cut("fsdp3", UNITS["mlp"], 2)
    with pytest.raises(UsageError, match="world_size must be a whole number of at least 1, got 0"):
        cut("flat", UNITS["mlp"], 0)
    with pytest.raises(UsageError, match="sizes from 1 on"):
        cut("flat", [[(3, 0)]], 2)
    with pytest.raises(UsageError, match="unknown mode"):
        held_state("zero9", UNITS["mlp"], 2)
    with pytest.raises(UsageError, match="nothing was measured for zero1, mlp, 8, base"):
        measured_state("zero1", "mlp", 8)
