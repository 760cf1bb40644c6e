"""The table of failure kinds in README.md says where each is tested; this keeps it true."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
NUMBERS = {
    "A": (1, 3, 4, 6, 7, 8, 11, 12, 13, 15, 17, 18),
    "B": (1, 2, 4, 7),
    "C": (1, 3, 4, 5, 7, 9, 10, 11, 14),
    "D": (1, 2, 3, 4, 6, 8, 11, 12, 13),
    "E": (1, 3, 4, 6, 7, 8, 10),
    "F": (1, 4, 5),
    "G": (1, 2, 5, 6, 7, 9, 10),
    "H": (1, 4, 6),
    "I": (2, 3, 6, 7, 10),
    "J": (1, 2, 4, 6),
}
KINDS = [f"{family}{number}" for family, numbers in NUMBERS.items() for number in numbers]
WITHOUT_TEST = ("cannot arise: ", "later: ")


def codes_of(name):
    """The codes a test function is named with: test_A1_A11_... has two."""
    found = re.match(r"test((?:_[A-J]\d+)+)_", name)
    return found.group(1)[1:].split("_") if found else []


@cache
def named_by_code():
    """For each code the files that have a test named with it."""
    where = {}
    for path in HERE.glob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                for code in codes_of(node.name):
                    where.setdefault(code, set()).add(path.name)
    return where


@cache
def table():
    """The rows of README.md: code -> what it says about where it is tested."""
    text = (HERE / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([A-J]\d+) \| ([^|]+) \| ([^|]+) \|$", text, re.MULTILINE)
    assert len(rows) == len({code for code, _, _ in rows}), "a kind has two rows"
    return {code: (kind.strip(), where.strip()) for code, kind, where in rows}


def test_the_table_lists_all_63_kinds_in_order():
    assert len(KINDS) == len(set(KINDS)) == 63
    assert list(table()) == KINDS


@pytest.mark.parametrize("code", KINDS)
def test_each_kind_has_tests_named_with_its_code_where_the_table_says_or_a_reason(code):
    _, where = table()[code]
    named, cited = named_by_code().get(code, set()), set(re.findall(r"`(test_\w+\.py)`", where))
    if where.startswith(WITHOUT_TEST):
        assert len(where.split()) >= 8, "a reason is a sentence"
        assert not named, f"there are tests of {code} by now: {sorted(named)}"
    else:
        assert cited, "no file is named"
        assert cited <= named, f"no test_{code}_... in {sorted(cited - named)}"


def test_no_test_is_named_with_a_code_that_does_not_exist():
    assert named_by_code().keys() <= set(KINDS)


def test_names_of_tests_are_read_as_they_are_meant():
    assert codes_of("test_A1_A11_padding") == ["A1", "A11"]
    assert codes_of("test_H1_saved_by_4_ranks") == ["H1"]
    assert codes_of("test_a_model") == codes_of("test_K1_x") == codes_of("test_A1") == []
