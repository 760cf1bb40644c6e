"""Tables recomputed: every printed cell, read from the reference files, not the shipped ones."""

import csv
import json
from fractions import Fraction
from pathlib import Path

import pytest

from zero_nb.config import UsageError
from zero_nb.theory.published import read_data
from zero_nb.theory.tables import TABLES, make_table, paper_digits, table2_label

REFERENCE = Path(__file__).parent / "data" / "reference"


def rows(name):
    """Rows of a reference file, without its comment lines."""
    with open(REFERENCE / name, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


SHIPPED = (
    "zero_paper_table1.csv", "zero_paper_fig1.csv", "zero_paper_table2.csv",
    "deepspeed_estimates.csv", "other_estimators.csv", "activation_memory.csv",
    "measured_peaks.csv",
)  # fmt: skip


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_data_is_the_reference_data(name):
    assert read_data(name) == rows(name)


def test_all_54_cells_of_table_1():
    table = make_table("zero-table1")
    printed = rows("zero_paper_table1.csv")
    assert len(printed) == len(table.rows) == 54
    assert table.column("recomputed GB") == [row["printed_GB"] for row in printed]
    assert table.column("exact bytes") == [float(row["exact_bytes"]) for row in printed]
    assert all(table.column("same"))


def test_the_four_numbers_of_figure_1():
    table = make_table("zero-fig1")
    assert table.column("recomputed GB") == ["120", "31.4", "16.6", "1.9"]
    printed = rows("zero_paper_fig1.csv")
    assert table.column("recomputed GB") == [row["printed_GB"] for row in printed]
    assert table.column("bytes") == [int(row["exact_bytes"]) for row in printed]


def test_the_20_theoretical_values_of_table_2():
    table = make_table("zero-table2")
    printed = [r for r in rows("zero_paper_table2.csv") if r["kind"] == "theoretical"]
    assert len(printed) == len(table.rows) == 20
    assert table.column("recomputed") == [row["printed"] for row in printed]
    for got, row in zip(table.column("exact billions"), printed, strict=True):
        assert f"{got:.6f}" == row["exact_B"]


def test_all_592_runs_of_deepspeed():
    table = make_table("deepspeed")
    ran = [r for r in rows("deepspeed_estimates.csv") if r["origin"].startswith("ran deepspeed")]
    assert len(ran) == len(table.rows) == 592
    assert table.column("gpu bytes") == [int(row["gpu_bytes"]) for row in ran]
    assert table.column("cpu bytes") == [int(row["cpu_bytes"]) for row in ran]


@pytest.mark.parametrize(
    ("name", "count"), [("megatron", 24), ("eleuther", 36), ("activations", 48)]
)
def test_other_tables_agree_in_every_row(name, count):
    table = make_table(name)
    assert len(table.rows) == count
    assert all(table.column("same"))


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (Fraction(5135, 10), "513"), (Fraction(100), "100"), (Fraction(99951, 1000), "100"),
        (Fraction(9994, 100), "99.9"), (Fraction(35625, 1000), "35.6"),
        (Fraction(4125, 100), "41.3"), (Fraction(5, 1000), "0.01"),
        (Fraction(10), "10"), (Fraction(9995, 1000), "10"), (Fraction(1875, 1000), "1.88"),
        (Fraction(15, 2), "7.5"), (Fraction(2), "2"), (Fraction(0), "0"),
    ],
)  # fmt: skip
def test_the_one_rounding_rule(value, wanted):
    assert paper_digits(value) == wanted


def test_another_device_in_table_2():
    assert table2_label(1, 0, device_bytes=80 * 10**9) == "5B"
    assert table2_label(1, 3, device_bytes=80 * 10**9) == "320B"


@pytest.mark.parametrize("name", TABLES)
def test_every_table_is_rectangular_has_a_source_and_json(name):
    table = make_table(name)
    assert table.name == name
    assert table.title
    assert table.source
    assert table.rows
    assert all(len(row) == len(table.columns) for row in table.rows)
    answer = json.loads(json.dumps(table.to_json(), allow_nan=False))
    assert len(answer["rows"]) == len(table.rows)


def test_which_16():
    table = make_table("recipes")
    totals = dict(zip(table.column("recipe"), table.column("total"), strict=True))
    assert totals["bf16"] == totals["fp32"] == 16
    assert totals["bf16-fp32-grads"] == 18
    assert totals["bf16-both-grads"] == 20
    assert (totals["fp32+momentum"], totals["fp32+sgd"]) == (12, 8)


def test_reality_says_how_many_were_right():
    table = make_table("reality")
    assert table.notes[0].startswith("33 of 34 judged")


def test_unknown_table_offers_the_nearest():
    with pytest.raises(UsageError, match="did you mean zero-table1"):
        make_table("zero-tabel1")
