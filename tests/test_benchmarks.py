"""The benchmarks run at tiny sizes and say what they are for; no test looks at a time."""

import json
import os
import subprocess
import sys

import pytest


@pytest.fixture(scope="module")
def timing(project):
    """The module that the benchmarks share."""
    sys.path.insert(0, str(project / "benchmarks"))
    try:
        import _timing
    finally:
        sys.path.pop(0)
    return _timing


@pytest.fixture(scope="module")
def kernels(project, tmp_path_factory):
    """What the benchmark of kernels wrote and printed at tiny sizes."""
    path = tmp_path_factory.mktemp("bench") / "kernels.json"
    command = [sys.executable, project / "benchmarks" / "kernels.py", "--tiny", "--json", path]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=300,
        env=os.environ | {"PYTHONPATH": str(project)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text()), done.stdout


def test_every_kernel_is_measured_beside_memcpy_and_numpy(kernels):
    document, _ = kernels
    assert document["part"] == "kernels"
    assert document["settings"] == {"tiny": True}
    rows = document["rows"]
    whats = {row["what"] for row in rows}
    assert whats == {
        "partition", "partition a list", "gather", "reduce-scatter", "all-gather", "all-reduce",
        "AdamW", "fp32 to bf16", "bf16 to fp32", "fp32 to fp16", "fp16 to fp32",
        "global norm", "finite check",
    }  # fmt: skip
    for what in whats:
        mine = [row for row in rows if row["what"] == what]
        assert any(row["against"].startswith("memcpy") for row in mine), what
        assert any(row["measured"] is not None for row in mine), what
    for row in rows:
        if row["measured"] is not None:
            theirs, family = row["seconds"][row["against"]], row["against"].split()[0]
            assert row["measured"] == theirs / row["seconds"]["ours"]
            if row["what"] in ("partition", "gather"):
                best = min(t for name, t in row["seconds"].items() if name.startswith(family))
                assert theirs == best


def test_reach_is_that_of_the_table(kernels):
    rows = kernels[0]["rows"]

    def asked(what):
        return {row["reach"] for row in rows if row["what"] == what} - {None}

    assert asked("partition") == asked("gather") == {0.95, 1.0, 10.0}
    assert asked("reduce-scatter") == {0.9, 1.3}
    assert asked("AdamW") == {0.95, 2.0}
    assert asked("fp32 to bf16") == {1.0, 2.0}
    assert asked("global norm") == {1.0}
    assert asked("finite check") == {2.0}


def test_the_machine_and_the_versions_are_told(kernels):
    machine = kernels[0]["machine"]
    assert machine["cores"] >= 1
    assert machine["processor"]
    assert {"numpy", "numba"} <= set(machine["packages"])


def test_the_printed_table_has_reach_beside_measured(kernels):
    document, printed = kernels
    lines = printed.splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("what "))
    assert lines[head].split() == ["what", "case", "against", "reach", "measured"]
    assert len(lines) >= head + 2 + len(document["rows"])
    assert any("GPT-2, W = 2" in line and ">= 0.95" in line for line in lines)


def test_a_row_says_honestly_whether_it_is_reached(timing):
    def row(measured, reach, at_most=False):
        return timing.Row("it", "case", "peer", measured, reach, at_most)

    assert [row(1.0, 1.0).reached, row(0.99, 1.0).reached] == [True, False]
    assert [row(1.3, 1.3, True).reached, row(1.31, 1.3, True).reached] == [True, False]
    assert [row(None, 1.0).reached, row(2.0, None).reached] == [None, None]
    assert [row(0.5, 1).mark, row(None, 1).mark] == ["SHORT", "not measured"]
    told = timing.table([row(0.5, 1.0), row(None, 2.0)])
    assert "SHORT" in told
    assert "not measured" in told
    told = timing.summary([row(0.5, 1.0), row(2.0, 1.0), row(None, 3.0)])
    assert told.startswith("1 of 2 measured cases")
    assert "1 of 2 cases fall short" in told
    assert "worst of 2" in told


def test_ways_take_turns_and_may_time_themselves(timing):
    called = []
    ways = {"a": lambda: called.append("a"), "b": lambda: called.append("b"), "c": lambda: 7.0}
    times = timing.take_turns(ways, 3, pause=0.0)
    assert called == ["a", "b", "b", "a", "a", "b", "a", "b"]  # the first round is thrown away
    assert times["c"] == [7.0] * 3
    assert timing.medians({"x": [3.0, 1.0, 2.0]}) == {"x": 2.0}
    assert timing.best({"x": 3.0, "y": 2.0}, "x", "y", "z") == ("y", 2.0)


WORKER = """
import sys
sys.path.insert(0, {folder!r})
from _timing import serve
serve(lambda number: {{"twice": 2 * number}})
"""


def test_a_worker_answers_line_by_line(timing, project):
    program = WORKER.format(folder=str(project / "benchmarks"))
    with timing.Worker([sys.executable, "-c", program]) as worker:
        assert [worker.ask(number=n)["twice"] for n in (1, 4)] == [2, 8]
    worker = timing.Worker([sys.executable, "-c", "import sys; sys.stdin.readline()"])
    with pytest.raises(RuntimeError, match="ended with code 0"):
        worker.ask(number=1)
    worker.close()


def test_the_figure_has_every_case_with_something_to_reach(kernels):
    from zero_nb.show.bench_figures import kernel_ratios

    document, _ = kernels
    figure = kernel_ratios(document)
    asked = {
        f"{row['what']} · {row['case']}"
        for row in document["rows"]
        if row["reach"] is not None and row["measured"] is not None
    }
    assert set(figure.data["cases"]) == asked
    for row in document["rows"]:
        case = f"{row['what']} · {row['case']}"
        if case in asked and row["against"].startswith("memcpy"):
            assert figure.data["cases"][case]["memcpy of the same bytes"] == row["measured"]
    assert figure.data["reach"]["finite check · in memory"] == {"NumPy's best way": 2.0}
    assert f"{len(asked)} kernel cases" in figure.alt
    assert "memcpy of the same bytes" in figure.alt
    with pytest.raises(ValueError, match="no measured row"):
        kernel_ratios({"rows": [], "machine": document["machine"]})
