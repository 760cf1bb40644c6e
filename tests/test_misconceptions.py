"""Every misconception has an experiment: a cell that fails if it were true.

The codes are in cell tags only, so that nobody reads "M9" in a notebook.
"""

import json
import re

import pytest

import nbtools

# What each notebook is there to dispel.
DISPELS = {
    "00": {"M3"},
    "01": {"M4", "M5", "M12", "M13"},
    "02": {"M10", "M11"},
    "03": {"M7", "M11"},
    "04": {"M3", "M6", "M9", "M16"},
    "05": {"M1", "M8", "M17", "M27"},
    "06": {"M2", "M3", "M18", "M19"},
    "07": {"M6", "M20", "M21"},
    "08": {"M1", "M2", "M22", "M23"},
    "09": {"M10", "M11", "M24", "M25"},
    "10": {"M12", "M26"},
    "11": {"M2", "M5", "M23"},
    "12": {"M19"},
    "A": {"M14", "M15"},
}
CODE = re.compile(r"M([1-9]|1\d|2[0-7])")
NOTEBOOKS = {path.name.split("_")[0]: path for path in nbtools.solved_notebooks()}


def tagged(number):
    """The cells with a code, by code."""
    found = {}
    notebook = json.loads(NOTEBOOKS[number].read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        for tag in cell["metadata"].get("tags", []):
            if CODE.fullmatch(tag):
                found.setdefault(tag, []).append(cell)
    return found


@pytest.mark.parametrize("number", DISPELS)
def test_a_notebook_has_an_experiment_for_each_of_its_misconceptions(number):
    assert DISPELS[number] <= set(tagged(number))


def test_the_course_dispels_every_misconception_collected():
    assert set.union(*DISPELS.values()) == {f"M{number}" for number in range(1, 28)}
    assert DISPELS.keys() == NOTEBOOKS.keys() - {"B", "index.ipynb"}


@pytest.mark.parametrize("number", DISPELS)
def test_an_experiment_asserts_what_it_shows(number):
    for code, cells in tagged(number).items():
        for cell in cells:
            assert cell["cell_type"] == "code", code
        assert any("assert " in "".join(cell["source"]) for cell in cells), code


@pytest.mark.parametrize("number", NOTEBOOKS)
def test_codes_are_in_tags_only(number):
    notebook = json.loads(NOTEBOOKS[number].read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        assert not re.search(r"\bM[1-9]\d?\b", "".join(cell["source"])), cell["id"]
