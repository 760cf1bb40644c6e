"""The guard over the notebooks, and the guard's own tests.

That a notebook's cells give the stored outputs is nbval's work (`pytest notebooks`). It compares
nothing in a notebook that was never run, so all that it takes for granted is asked for here.
"""

import copy
import json
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

import nbtools

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"

SOURCES = [
    "00_see_the_saving_first.ipynb",
    "01_where_the_bytes_go.ipynb",
    "02_data_parallel_and_its_redundancy.ipynb",
    "03_collectives_you_can_count.ipynb",
    "04_stage_1_shard_the_optimizer.ipynb",
    "05_stage_2_shard_the_gradients.ipynb",
    "06_stage_3_shard_the_parameters.ipynb",
    "07_what_it_costs_to_talk.ipynb",
    "08_what_zero_does_not_shard.ipynb",
    "09_bug_hunt.ipynb",
    "10_real_processes.ipynb",
    "11_plan_a_run.ipynb",
    "12_to_deepspeed_and_fsdp.ipynb",
    "A_numba_in_15_minutes.ipynb",
]
WITHOUT_EXERCISES = ["B_glossary.ipynb", "index.ipynb"]
EXPECTED = sorted(SOURCES + WITHOUT_EXERCISES + [f"learner/{name}" for name in SOURCES])

FOUND = sorted(
    path.relative_to(NOTEBOOKS).as_posix()
    for path in NOTEBOOKS.rglob("*.ipynb")
    if ".ipynb_checkpoints" not in path.parts
)


def test_the_expected_notebooks_are_there():
    assert FOUND == EXPECTED


@pytest.mark.parametrize("name", FOUND)
def test_a_notebook_is_run_complete_and_in_normal_form(name):
    assert nbtools.problems((NOTEBOOKS / name).read_text(encoding="utf-8")) == []


# ---------------------------------------------------------------------- the guard sees each fault

PICTURE = '<figure><img alt="Two bars, the second is lower." src="data:image/png;base64,/home/a1=">'


def code(count, source, *outputs, **more):
    """A code cell in normal form."""
    return {
        "cell_type": "code",
        "execution_count": count,
        "id": f"cell-{count}",
        "metadata": {},
        "outputs": list(outputs),
        "source": source.splitlines(keepends=True),
        **more,
    }


def stream(text, name="stdout"):
    return {"name": name, "output_type": "stream", "text": text.splitlines(keepends=True)}


def shown(**data):
    return {
        "data": {kind.replace("_", "/"): content for kind, content in data.items()},
        "metadata": {},
        "output_type": "display_data",
    }


@pytest.fixture
def good():
    """A small notebook without a fault."""
    return {
        "cells": [
            {"cell_type": "markdown", "id": "title", "metadata": {}, "source": ["# Title\n", "x;"]},
            code(
                1, "import zero_nb\nprint(1)  # see /docs", stream("1\nhttps://example.org/home/\n")
            ),
            code(2, "draw()", shown(text_html=[PICTURE], text_plain=["Two bars."])),
            code(3, "'a;b'", metadata={"tags": ["exercise"]}),
        ],
        "metadata": {
            "kernelspec": {
                "display_name": "Python 3 (ipykernel)",
                "language": "python",
                "name": "python3",
            },
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def test_the_guard_passes_a_good_notebook(good):
    assert nbtools.problems(nbtools.to_text(good)) == []


def never_run(notebook):
    for cell in notebook["cells"][1:]:
        cell.update(execution_count=None, outputs=[])


def run_in_part(notebook):
    notebook["cells"][3]["execution_count"] = None


def run_twice(notebook):
    notebook["cells"][3]["execution_count"] = 4


def run_out_of_order(notebook):
    cells = notebook["cells"]
    cells[1]["execution_count"], cells[2]["execution_count"] = 2, 1


def writes_to_stderr(notebook):
    notebook["cells"][1]["outputs"].append(stream("careful\n", "stderr"))


def raises(notebook):
    notebook["cells"][3]["outputs"].append(
        {"ename": "ValueError", "evalue": "no", "output_type": "error", "traceback": ["no"]}
    )


def semicolon(notebook):
    notebook["cells"][3]["source"] = ["ax.plot(x); \n", "1"]


def empty_cell(notebook):
    notebook["cells"].append(code(4, " \n"))


def no_code(notebook):
    del notebook["cells"][1:]


def bare_picture(notebook):
    notebook["cells"][2]["outputs"] = [shown(image_png="iVBORw0KGgo=", text_plain=["<Figure>"])]


def no_alt(notebook):
    notebook["cells"][2]["outputs"] = [shown(text_html=['<img src="data:image/png;base64,aa">'])]


def short_alt(notebook):
    notebook["cells"][2]["outputs"] = [shown(text_html=[PICTURE.replace("Two bars, ", "")[:36]])]
    notebook["cells"][2]["outputs"] = [shown(text_html=['<p>x</p><img alt="bars" src="x">'])]


def address(notebook):
    notebook["cells"][1]["outputs"] = [stream("<Figure at 0x7f3a5c01d2e0>\n")]


def path(notebook):
    notebook["cells"][1]["outputs"] = [stream("saved\n/home/ada/figure.png\n")]


def windows_path(notebook):
    notebook["cells"][1]["outputs"] = [stream("saved C:\\Users\\ada\\figure.png\n")]


def timings(notebook):
    notebook["cells"][1]["metadata"]["execution"] = {"iopub.execute_input": "2024-01-01"}


def other_kernel(notebook):
    notebook["metadata"]["kernelspec"]["name"] = "conda-base"


def no_id(notebook):
    del notebook["cells"][0]["id"]


def two_streams(notebook):
    notebook["cells"][1]["outputs"].append(stream("2\n"))


def not_in_the_schema(notebook):
    notebook["cells"][1]["outputs"] = [stream("1\n", name=1)]


FAULTS = {
    never_run: "cell 1: has execution count None, expected 1",
    run_in_part: "cell 3: has execution count None, expected 3",
    run_twice: "cell 3: has execution count 4, expected 3",
    run_out_of_order: "cell 1: has execution count 2, expected 1",
    writes_to_stderr: "cell 1: writes to stderr: 'careful'",
    raises: "cell 3: ends in ValueError: no",
    semicolon: "cell 3: a line ends with ';' ('ax.plot(x);')",
    empty_cell: "cell 4: empty",
    no_code: "has no code cell",
    bare_picture: "cell 2: shows a bare image/png",
    no_alt: "cell 2: shows a picture without a sentence (alt is None)",
    short_alt: "cell 2: shows a picture without a sentence (alt is 'bars')",
    address: "cell 1: shows a memory address: '0x7f3a5c01d2e0'",
    path: "cell 1: shows a path of one machine: '/home/ada'",
    windows_path: "cell 1: shows a path of one machine: 'C:\\\\Users'",
    timings: "not in normal form",
    other_kernel: "not in normal form",
    no_id: "not in normal form",
    not_in_the_schema: "not a valid notebook: NotebookValidationError",
    two_streams: "not in normal form",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_guard_sees(fault, good):
    fault(good)
    found = nbtools.problems(nbtools.to_text(good))
    assert any(problem.startswith(FAULTS[fault]) for problem in found), found
    if fault not in (never_run, run_out_of_order, no_alt):
        assert len(found) == 1, found


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"nbformat": 3, "cells": []}', "no json"])
def test_the_guard_refuses_what_is_no_notebook(text):
    assert nbtools.problems(text)[0].startswith("not a valid notebook: ")


def test_an_error_that_is_the_lesson_is_tagged(good):
    raises(good)
    good["cells"][3]["metadata"]["tags"] = ["raises-exception"]
    assert nbtools.problems(nbtools.to_text(good)) == []


# ---------------------------------------------------------------------------------- normal form


@pytest.fixture
def saved(good):
    """The good notebook as JupyterLab might save it after "Run All"."""
    saved = copy.deepcopy(good)
    saved["nbformat_minor"] = 4
    saved["metadata"]["language_info"].update(version="3.12.1", codemirror_mode={"name": "ipython"})
    saved["metadata"]["widgets"] = {"application/vnd.jupyter.widget-state+json": {"state": {}}}
    saved["metadata"]["kernelspec"]["display_name"] = "my kernel"
    title, first, second, third = saved["cells"]
    title.update(attachments={}, source="# Title\nx;")
    first["metadata"] = {"trusted": True, "execution": {"shell.execute_reply": "2024"}}
    first["outputs"] = [stream("1\nhttps://"), stream("example.org/home/\n"), stream("")]
    second["outputs"][0]["metadata"] = {"needs_background": "light"}
    second["outputs"][0]["data"][nbtools.WIDGET_VIEW] = {"model_id": "5f1e"}
    second["source"] = "draw()"
    third["metadata"].update(collapsed=False, scrolled=True)
    return saved


def test_what_jupyterlab_saves_becomes_the_same_bytes(good, saved):
    assert nbtools.to_text(nbtools.normalise(saved)) == nbtools.to_text(good)


def test_normalising_twice_changes_nothing_and_never_the_argument(saved):
    before = copy.deepcopy(saved)
    once = nbtools.normalise(saved)
    assert saved == before
    assert nbtools.normalise(once) == once


def test_the_normal_form_is_what_nbformat_writes(good):
    text = nbtools.to_text(good)
    assert nbformat.writes(nbformat.reads(text, as_version=4)) + "\n" == text


def test_ids_are_kept_and_missing_ones_are_always_the_same(good):
    del good["cells"][0]["id"]
    good["cells"][2]["id"] = "cell-1"  # copied in an editor: no longer unique
    good["cells"][3]["id"] = "not valid!"
    ids = [cell["id"] for cell in nbtools.normalise(good)["cells"]]
    assert ids[1] == "cell-1"
    assert len(set(ids)) == 4
    assert ids == [cell["id"] for cell in nbtools.normalise(good)["cells"]]
    nbformat.validate(nbtools.normalise(good))


def test_text_between_pictures_stays_between_them(good):
    picture = good["cells"][2]["outputs"][0]
    good["cells"][2]["outputs"] = [stream("a\n"), picture, stream("b\n"), stream("c\n")]
    outputs = nbtools.normalise(good)["cells"][2]["outputs"]
    assert [output["output_type"] for output in outputs] == ["stream", "display_data", "stream"]
    assert outputs[2]["text"] == ["b\n", "c\n"]


def test_only_version_4_can_be_normalised():
    with pytest.raises(ValueError, match="expected a notebook with nbformat 4, got 3"):
        nbtools.normalise({"nbformat": 3, "worksheets": []})


# ------------------------------------------------------------------------------------ the command


def test_an_unrun_notebook_is_run_and_then_passes(good, tmp_path, capsys):
    figure = "from zero_nb.show.figure import Figure"
    good["cells"][1]["source"] = ["print('a')\n", "print('b')"]
    good["cells"][2]["source"] = [f"{figure}\nFigure(b'x', '', 'Two bars, one lower.', {{'n': 3}})"]
    never_run(good)
    file = tmp_path / "notebook.ipynb"
    file.write_text(nbtools.to_text(good), encoding="utf-8")
    assert nbtools.main(["check", str(file)]) == 1
    assert nbtools.main(["run", str(file)]) == 0
    notebook = json.loads(file.read_text(encoding="utf-8"))
    assert notebook["cells"][1]["outputs"] == [stream("a\nb\n")]
    shown = notebook["cells"][2]["outputs"][0]["data"]
    assert shown["text/plain"] == ["Two bars, one lower."]
    assert 'alt="Two bars, one lower."' in shown["text/html"][0]
    assert capsys.readouterr().out.splitlines()[-1] == "notebook.ipynb: fine"


def test_a_failing_notebook_stays_as_it_was(good, tmp_path, capsys):
    file = tmp_path / "notebook.ipynb"
    file.write_text(nbtools.to_text(good), encoding="utf-8")
    before = file.read_bytes()
    assert nbtools.main(["run", str(file)]) == 1
    assert file.read_bytes() == before
    assert "name 'draw' is not defined" in capsys.readouterr().err


def test_normalise_rewrites_the_file_and_still_tells_what_is_wrong(saved, tmp_path, capsys):
    run_in_part(saved)
    file = tmp_path / "notebook.ipynb"
    file.write_text(json.dumps(saved), encoding="utf-8")
    assert nbtools.main(["normalise", str(file)]) == 1
    assert file.read_text(encoding="utf-8") == nbtools.to_text(nbtools.normalise(saved))
    assert "cell 3: has execution count None, expected 3" in capsys.readouterr().err


def test_the_runner_compares_sentences_and_integers_but_no_pixels_and_no_last_digits(tmp_path):
    setup = (
        "from zero_nb.show.figure import Figure\n"
        "def show(alt='Two bars, one lower.', png=b'x', n=3, x=0.5):\n"
        "    return Figure(png, '', alt, {'n': n, 'x': x})"
    )
    drawn = ["show()", "show()", "show()", "show()", "show()"]
    cells = [code(None, source) for source in [setup, *drawn]]
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    notebook = nbtools.execute(
        nbtools.to_text({"cells": cells, "nbformat": 4, "nbformat_minor": 5, "metadata": {}}),
        tmp_path,
    )
    changes = ["", "png=b'y'", "x=0.25", "n=4", "alt='Two bars, one higher.'"]
    for cell, change in zip(notebook["cells"][1:], changes, strict=True):
        cell["source"] = [f"show({change})"]
    file = tmp_path / "changed.ipynb"
    file.write_text(nbtools.to_text(notebook), encoding="utf-8")
    done = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider",
            f"--rootdir={tmp_path}", "--nbval", "--nbval-current-env", "--nbval-cell-timeout=60",
            f"--nbval-sanitize-with={NOTEBOOKS.parent / 'nbval.cfg'}", file.name,
        ],
        cwd=tmp_path, capture_output=True, text=True, check=False, encoding="utf-8",
    )  # fmt: skip
    outcome = dict(
        reversed(line.partition(" - ")[0].split(" ", 1))
        for line in done.stdout.splitlines()
        if line.startswith(("PASSED", "FAILED"))
    )
    assert outcome == {
        "changed.ipynb::Cell 0": "PASSED",
        "changed.ipynb::Cell 1": "PASSED",
        "changed.ipynb::Cell 2": "PASSED",
        "changed.ipynb::Cell 3": "PASSED",
        "changed.ipynb::Cell 4": "FAILED",
        "changed.ipynb::Cell 5": "FAILED",
    }, done.stdout
