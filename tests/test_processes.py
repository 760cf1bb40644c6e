"""Notebook 10: the programs its processes run, how they are started, and what if they cannot be."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import nbtools
from zero_nb.cluster.simulated import SimulatedWorld
from zero_nb.config import UsageError
from zero_nb.learn import processes, real_ranks
from zero_nb.learn.processes import ProcessRun
from zero_nb.show import process_figures as figures

NOTEBOOK = "10_real_processes.ipynb"

DIVERGED = (
    "the ranks have diverged: rank 0 at all_gather of 'layers.0' (other, 12 elements, 48 bytes, "
    "collective 416); ranks 1, 2, 3 at 'the end of the run'. All must make the same calls in the "
    "same order"
)
PLACES = {0: "all_gather of 'layers.0'"} | dict.fromkeys((1, 2, 3), "'the end of the run'")


# ---------------------------------------------------------------------------- where MPI is missing

HIDE = """
import sys

class _Without:
    \"\"\"One of Python's finders, blind for mpi4py.\"\"\"

    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        return None if name == "mpi4py" else self.finder.find_spec(name, path, target)

sys.meta_path[:] = [_Without(finder) for finder in sys.meta_path]
"""

RUN = """
import sys
from pathlib import Path

import nbtools

path = Path(sys.argv[1])
ran = nbtools.execute(path.read_text(encoding="utf-8"), Path(sys.argv[2]))
Path(sys.argv[3]).write_text(nbtools.to_text(ran), encoding="utf-8")
"""


@pytest.mark.parametrize("edition", ["", "learner"])
def test_without_mpi_the_notebook_says_so_and_skips_itself(tmp_path, project, edition):
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text(HIDE, encoding="utf-8")
    path = project / "notebooks" / edition / NOTEBOOK
    paths = [str(hidden), str(project / "tools"), str(project)]
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(path), str(tmp_path), str(tmp_path / "ran.ipynb")],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    ran = json.loads((tmp_path / "ran.ipynb").read_text(encoding="utf-8"))
    cells = [cell for cell in ran["cells"] if cell["cell_type"] == "code"]
    first, *others = [cell["outputs"] for cell in cells]
    (line,) = first[0]["data"]["text/plain"]
    assert line.startswith("MPI is not installed; run: pip install 'zero-nb[mpi]'. ")
    assert "skips all cells below" in line
    assert len(others) > 20
    assert others == [[] for _ in others]
    assert nbtools.problems(nbtools.to_text(ran)) == []


def test_windows_is_told_where_it_runs(monkeypatch):
    monkeypatch.setattr(processes.sys, "platform", "win32")
    assert processes.why_no_mpi().endswith("on Windows use WSL")
    assert repr(processes.Skipped(processes.why_no_mpi())).startswith(
        "Processes of MPI are started"
    )


def test_where_mpi_is_nothing_is_skipped(monkeypatch):
    monkeypatch.setattr(processes.launch, "find_mpiexec", lambda: "mpiexec")
    if sys.platform != "win32":
        assert processes.why_no_mpi() == ""
        assert processes.skip_without_mpi() is None


# ------------------------------------------------------------------------- the program, in parts


def test_a_part_is_shown_as_it_is_run_without_its_docstring():
    shown = repr(processes.show_part("evaluate_alone"))
    assert "def evaluate_alone(world, folder):\n    engine = " in shown
    assert '"""' not in shown
    assert "noqa" not in shown
    assert "<pre" in processes.show_part("evaluate_alone")._repr_html_()
    for name in real_ranks.PARTS:
        assert len(repr(processes.show_part(name)).splitlines()) < 30, name


def test_an_unknown_part_is_refused_before_anything_starts(tmp_path):
    for call in (processes.show_part, lambda name: processes.start_ranks(4, [name], tmp_path)):
        with pytest.raises(UsageError, match="there is no part 'nothing'; there are train_alike"):
            call("nothing")
    assert list(tmp_path.iterdir()) == []


def test_all_ranks_evaluate_alike():
    alone, three = (real_ranks.evaluate_together(SimulatedWorld(size), None) for size in (1, 3))
    assert alone == pytest.approx(three, rel=1e-6)  # the same terms, added in another order


def test_evaluating_alone_prints_where_nobody_else_is_needed(capsys):
    real_ranks.evaluate_alone(SimulatedWorld(1), None)
    assert float(capsys.readouterr().out) == real_ranks.evaluate_together(SimulatedWorld(1), None)


def test_resident_bytes_are_told_without_proc_too(monkeypatch):
    if sys.platform == "win32":
        pytest.skip("processes are started on Linux and macOS only")
    here = real_ranks.resident_bytes()
    assert here > 10_000_000

    def missing(*_, **__):
        raise FileNotFoundError

    told = subprocess.CompletedProcess([], 0, stdout=f" {here // 1024}\n")
    monkeypatch.setattr(real_ranks.Path, "read_text", missing)
    monkeypatch.setattr(real_ranks.subprocess, "run", lambda *_, **__: told)
    assert real_ranks.resident_bytes() == here // 1024 * 1024


def test_answers_are_kept_whole(tmp_path):
    real_ranks._tell(SimulatedWorld(2), tmp_path, "memory", {"held": [1, 2]})
    assert [path.name for path in tmp_path.iterdir()] == ["memory.json"]
    assert json.loads((tmp_path / "memory.json").read_text()) == {"held": [1, 2]}


def test_a_folder_is_new_each_time():
    one, other = processes.new_folder(), processes.new_folder()
    assert one != other
    assert one.is_dir()


# -------------------------------------------------------------------------------- how a run ended


def test_places_are_read_from_the_launchers_message():
    assert ProcessRun({}, DIVERGED).places == PLACES
    for other in ("", "rank 1: killed by SIGKILL after all_gather of 'head' (by hand)"):
        assert ProcessRun({}, other).places == {}


# ------------------------------------------------------------------------------------- figures

LEDGER = [[40, 40, 80, 165], [40, 40, 20, 101], [40, 10, 20, 75], [10, 10, 20, 48]]


def in_megabytes(rows, more=0):
    """The same numbers, times a million."""
    return [[number * 10**6 + more for number in row] for row in rows]


def test_memory_of_processes_keeps_counts_and_says_nothing_that_varies():
    grown = [[160, 161], [100, 99], [70, 70], [40, 41]]
    figure = figures.memory_of_processes(in_megabytes(LEDGER), in_megabytes(grown))
    assert "160, 100, 70, 40 MB" in figure.alt
    assert "165, 101, 75, 48 MB" in figure.alt
    assert figure.data["stage 3"]["held"] == 40_000_000
    other = figures.memory_of_processes(in_megabytes(LEDGER), in_megabytes(grown, more=5))
    assert figure.alt == other.alt


def test_where_ranks_wait_says_each_place():
    figure = figures.where_ranks_wait(PLACES)
    assert "rank 0 in all_gather of 'layers.0'; rank 1 in 'the end of the run'" in figure.alt
    assert len(figure.data) == 4
    with pytest.raises(ValueError, match="did the ranks diverge"):
        figures.where_ranks_wait({})


def test_saving_bars_are_in_bytes_per_parameter():
    figure = figures.saving_bars(100, 300, [301, 300], [2_004, 101])
    assert "one file a rank 3, 3; one file, by rank 0 20, 1." in figure.alt
    assert figure.data["one file, by rank 0"]["rank 0"] == 20.0


@pytest.mark.parametrize(
    ("numel", "saved", "loading", "reads"),
    [
        (12, 4, 3, {"rank 0": "0 1", "rank 1": "1 2", "rank 2": "2 3"}),
        (5, 3, 4, {"rank 0": "0", "rank 1": "1", "rank 2": "2"}),  # rank 3 owns nothing
        (7, 1, 2, {"rank 0": "0", "rank 1": "0"}),
    ],
)
def test_shards_read_names_the_files(numel, saved, loading, reads):
    assert figures.shards_read(numel, saved, loading).data == reads


def test_the_notebook_shows_no_process_id_and_no_seconds(project):
    notebook = json.loads(Path(project / "notebooks" / NOTEBOOK).read_text(encoding="utf-8"))
    said = "\n".join(
        text
        for cell in notebook["cells"]
        for output in cell.get("outputs", [])
        for text in nbtools._strings({k: v for k, v in output.items() if k != "execution_count"})
    )
    assert not re.search(r"\bpid\b|\b\d+(\.\d+)? s\b", nbtools._EMBEDDED.sub("", said))
