"""The zero-nb command: what it prints, in which shape, and one clear line for what is wrong.

`plan` and `tables` are in `test_cli_plan.py`, --save and --resume in `test_checkpoint.py`,
``--engine mpi`` in `test_mpi.py`.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import typer
from typer.testing import CliRunner

from tiny_task import gpt_task, mlp_task
from zero_nb import cli, compare
from zero_nb.config import UsageError
from zero_nb.show import gallery
from zero_nb.train.scaling import LossScaleError

COMMANDS = tuple(typer.main.get_command(cli.app).commands)

STAGE_KEYS = {
    "stage": int, "losses": list, "held_out_loss": float, "weights_sha256": str,
    "held_bytes": dict, "formula_bytes": dict, "padding_bytes": dict, "peak_bytes": int,
    "elements_sent": int, "formula_elements": int, "step_seconds": float,
}  # fmt: skip


@pytest.fixture
def zero_nb(monkeypatch, capsys, tmp_path):
    """Call the command as a shell would, in an empty folder; see `call`."""
    monkeypatch.chdir(tmp_path)

    def call(*words):
        """Return the exit status and what was printed on stdout and stderr."""
        monkeypatch.setattr(sys, "argv", ["zero-nb", *map(str, words)])
        status = 0
        try:
            cli.main()
        except SystemExit as stop:
            status = stop.code
        out, err = capsys.readouterr()
        return status, out, err

    return call


def check_run(told, stage, steps):
    """The object of one stage, as documented: its keys in order, their types, kinds of bytes."""
    assert [(key, type(value)) for key, value in list(told.items())[: len(STAGE_KEYS)]] == list(
        STAGE_KEYS.items()
    )
    assert told["stage"] == stage
    assert [type(loss) for loss in told["losses"]] == [float] * steps
    for part in ("held_bytes", "formula_bytes", "padding_bytes"):
        assert {kind: type(size) for kind, size in told[part].items()} == {
            "param": int, "grad": int, "optim": int,
        }  # fmt: skip
    for kind, held in told["held_bytes"].items():
        assert held == told["formula_bytes"][kind] + told["padding_bytes"][kind]
    assert told["elements_sent"] == told["formula_elements"]
    assert re.fullmatch("[0-9a-f]{64}", told["weights_sha256"])


# --- compare -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("world_size", "precision"), [(4, "bf16"), (3, "fp32")])
def test_compare_prints_json_with_the_documented_keys(zero_nb, tmp_path, world_size, precision):
    words = () if precision == "bf16" else ("--precision", precision, "--world-size", world_size)
    status, out, err = zero_nb("compare", "--steps", 1, *words, "--json")
    assert (status, err) == (0, "")
    told = json.loads(out)
    assert [(key, type(value)) for key, value in told.items()] == [
        ("world_size", int), ("precision", str), ("numel", int), ("steps", int), ("stages", list),
    ]  # fmt: skip
    assert (told["world_size"], told["precision"], told["numel"], told["steps"]) == (
        world_size, precision, 62_304, 1,
    )  # fmt: skip
    assert len(told["stages"]) == 4
    for stage, run in enumerate(told["stages"]):
        check_run(run, stage, 1)
        assert list(run) == list(STAGE_KEYS)
    assert len({run["weights_sha256"] for run in told["stages"]}) == 1
    assert list(tmp_path.iterdir()) == []  # it writes no file


def test_compare_prints_a_table_whose_rows_are_not_broken(zero_nb, monkeypatch):
    monkeypatch.setattr(compare, "digits_task", gpt_task)
    status, out, err = zero_nb("compare", "--steps", 1, "--world-size", 8)
    assert (status, err) == (0, "")
    assert "8 ranks, bf16, 16,500 parameters, 1 steps" in out
    rows = [line for line in out.splitlines() if re.match(r"[│┃]\s+\d", line)]
    assert [row.split()[1] for row in rows] == ["0", "1", "2", "3"]
    assert "The four stages end with the same weights, to the bit." in out


def test_compare_says_so_if_the_stages_part(zero_nb, monkeypatch):
    real = compare.compare_stages

    def wrong(*args, **settings):
        found = real(*args, **settings)
        last = replace(found.stages[3], weights_sha256="0" * 64)
        return replace(found, stages=(*found.stages[:3], last))

    monkeypatch.setattr(compare, "digits_task", mlp_task)
    monkeypatch.setattr(compare, "compare_stages", wrong)
    _, out, _ = zero_nb("compare", "--steps", 1)
    assert "DIFFERENT weights" in out
    assert "same weights" not in out


# --- train ---------------------------------------------------------------------------------------


def test_train_on_a_text_file_prints_one_stage_and_what_it_writes(zero_nb, project, tmp_path):
    status, out, err = zero_nb(
        "train", "--data", project / "README.md", "--stage", 2, "--world-size", 3, "--steps", 5,
        "--json",
    )  # fmt: skip
    assert (status, err) == (0, "")
    told = json.loads(out)
    check_run(told, 2, 5)
    assert list(told) == [*STAGE_KEYS, "samples"]
    assert told["losses"][-1] < told["losses"][0] < 6  # ln 256 is 5.5
    assert len(told["samples"]) == 2
    for sample in told["samples"]:
        assert {key: type(value) for key, value in sample.items()} == {"prompt": str, "text": str}
        assert sample["prompt"] == "\n"
    assert list(tmp_path.iterdir()) == []


def test_train_draws_one_digit_a_class_the_same_at_every_stage(zero_nb):
    samples, hashes = [], set()
    for stage in range(4):
        status, out, err = zero_nb(
            "train", "--stage", stage, "--steps", 2, "--world-size", 2, "--json"
        )
        assert (status, err) == (0, "")
        told = json.loads(out)
        check_run(told, stage, 2)
        hashes.add(told["weights_sha256"])
        samples.append(told["samples"])
    assert len(hashes) == 1
    assert samples[1:] == samples[:-1]
    assert [sample["prompt"] for sample in samples[0]] == list("0123456789")
    for sample in samples[0]:
        assert list(sample) == ["prompt", "levels"]
        levels = sample["levels"]
        assert [len(row) for row in levels] == [8] * 8
        assert all(type(level) is int and 0 <= level <= 16 for row in levels for level in row)


def test_train_prints_a_table_and_three_samples(zero_nb):
    status, out, err = zero_nb("train", "--steps", 1, "--precision", "fp32")
    assert (status, err) == (0, "")
    assert "Stage 3, 4 ranks, fp32: per rank" in out
    for word in ("param", "grad", "optim", "peak", "elements sent a step", "held out", "weights "):
        assert word in out
    pictures = out[out.index("'0':") :].splitlines()
    drawn = [line for line in pictures if len(line) == 16 and set(line) <= set(" .:-=+*#%@")]
    assert len(drawn) == 3 * 8


OPTIONS = {
    "optimizer": ("sgd", "adam", "momentum"),
    "micro-batches": (2,),
    "reduce-dtype": ("bf16",),
    "reduce-bucket-size": (1000,),
    "precision": ("fp16", "bf16-both-grads"),
}


@pytest.mark.parametrize(
    ("option", "value"), [(option, value) for option, given in OPTIONS.items() for value in given]
)
def test_settings_reach_the_training(zero_nb, monkeypatch, option, value):
    seen = {}
    real = compare.train_stage

    def spy(stage, **settings):
        seen.update(settings)
        return real(stage, **(settings | {"task": gpt_task()}))

    monkeypatch.setattr(compare, "train_stage", spy)
    monkeypatch.setattr(cli, "_samples", lambda engine, task: [])
    status, out, err = zero_nb("train", "--steps", 1, "--json", f"--{option}", value)
    assert (status, err) == (0, "")
    assert seen[option.replace("-", "_")] == value
    assert json.loads(out)["samples"] == []


# --- progress ------------------------------------------------------------------------------------


@pytest.mark.parametrize("terminal", [True, False])
def test_a_bar_on_a_terminal_and_nothing_elsewhere(zero_nb, monkeypatch, terminal):
    """A file or a pipe that takes stdout wants no bar in it, nor beside it."""
    monkeypatch.setattr(compare, "digits_task", mlp_task)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    status, out, err = zero_nb("compare", "--steps", 2, "--json")
    assert status == 0
    assert ("stages 0-3" in err) == terminal
    assert json.loads(out)["steps"] == 2


# --- help ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example_that_can_be_typed(command):
    result = CliRunner().invoke(cli.app, [command, "--help"], env={"COLUMNS": "300"})
    assert result.exit_code == 0
    text = " ".join(result.output.split())
    assert f"Example: zero-nb {command}" in text
    # Every option in it exists.
    example = re.sub(r"[│╭╰─╮╯]", " ", text[text.index("Example:") :])
    for option in re.findall(r"--[a-z-]+", example):
        assert f"{option} " in text[: text.index("Example:")], option


def test_help_lists_every_command():
    assert {"compare", "train", "figures", "run", "lab", "plan", "tables"} <= set(COMMANDS)
    result = CliRunner().invoke(cli.app, ["--help"])
    assert result.exit_code == 0
    for command in COMMANDS:
        assert re.search(rf"\b{command}\b", result.output)
    assert CliRunner().invoke(cli.app, ["-h"]).output == result.output


def test_without_a_command_there_is_help_and_no_error_line(zero_nb):
    status, out, err = zero_nb()
    assert status != 0  # a script that meant something did not get it
    assert "Usage: zero-nb" in out + err
    assert not err.startswith("zero-nb:")


# --- what is wrong -------------------------------------------------------------------------------


def refused(call, words, message, tmp_path):
    """One line on stderr, a status that is not 0, nothing on stdout and nothing written."""
    before = sorted(path.name for path in tmp_path.iterdir())
    status, out, err = call(*words)
    assert status not in (0, None)
    assert out == ""
    assert err.startswith("zero-nb: ")
    assert err.count("\n") == 1
    assert err.endswith("\n")
    assert re.search(message, err), err
    assert "Traceback" not in err
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("train --stage 4", "there is no ZeRO stage '4'; choose 0, 1, 2 or 3"),
        ("train --stage -1", "there is no ZeRO stage '-1'"),
        ("train --stage two", "there is no ZeRO stage 'two'"),
        ("train --world-size 0", "world_size must be at least 1 rank, got 0"),
        ("train --world-size=-2", "world_size must be at least 1 rank, got -2"),
        ("train --world-size two", "--world-size.*two|--world-size.*integer"),
        ("train --world-size 100", "batch of 32 leaves ranks of 100 without a sample"),
        ("train --steps 0", "steps must be at least 1, got 0"),
        ("train --steps 1.5", "--steps"),
        ("train --precision fp8", "unknown precision 'fp8'; choose one of fp32, bf16"),
        ("train --precision", "--precision.*requires an argument"),
        ("train --optimizer adamax", "unknown optimizer 'adamax'; choose one of adamw, adam, sgd"),
        ("train --optimizer lamb", "lamb needs the norms of each layer's weights and update, but "
         "a ZeRO rank sees only its own slice.*use an element-wise rule such as AdamW"),
        ("train --optimizer shampoo", "needs the left and right preconditioner matrices"),
        ("train --optimizer muon", "needs the orthogonalised update matrix"),
        ("train --optimizer adafactor", "needs row and column means"),
        ("train --micro-batches 0", "micro_batches must be at least 1 micro-batch, got 0"),
        ("train --micro-batches 9", "without one sample for each of 9 micro-batches"),
        ("train --reduce-dtype fp32", "float32 does not fit gradients held in bfloat16"),
        ("train --reduce-dtype int8", "unknown precision 'int8'; choose one of float32"),
        ("train --precision bf16-both-grads --reduce-dtype fp32", "no 16-bit gradient to keep"),
        ("train --reduce-bucket-size 0", "reduce_bucket_size must be at least 1 element, got 0"),
        ("train --engine gpu", "unknown engine 'gpu'; choose simulated or mpi"),
        ("train --data nowhere.txt", "there is no file nowhere.txt"),
        ("train --data empty.txt", "empty.txt is empty"),
        ("train --data short.txt", "short.txt has 129 bytes, but two sequences of 65 are needed"),
        ("train --data .", r"\. is a directory; give a file"),
        ("train --data", "--data.*requires an argument"),
        ("train --layout zip --save here", "unknown layout 'zip'; choose sharded or consolidated"),
        ("train --save-every 5", "save_every 5 needs a directory to save to"),
        ("train --resume nowhere", "nowhere"),
        ("train digits", "[Uu]nexpected extra argument.*digits"),
        ("train --stages 2", "[Nn]o such option.*--stages"),
        ("compare --world-size 0", "world_size must be at least 1 rank, got 0"),
        ("compare --world-size 64", "batch of 32 leaves ranks of 64"),
        ("compare --steps -1", "steps must be at least 1, got -1"),
        ("compare --precision float32", "unknown precision 'float32'; choose one of fp32"),
        ("figures --out short.txt", "--out short.txt is a file; give a folder"),
        ("figures --out short.txt/here", "would lie in .*short.txt, which is a file"),
        ("train --data little.txt", "little.txt holds out 1 of its samples, too few for 4 ranks"),
        ("run --out empty.txt", "--out empty.txt is a file; give a folder"),
        ("train --json --stage 4", "there is no ZeRO stage"),
        ("draw", "[Nn]o such command.*draw"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_nothing_is_written(zero_nb, tmp_path, words, message):
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "short.txt").write_bytes(b"x" * 129)
    (tmp_path / "little.txt").write_bytes(b"x" * 200)
    refused(zero_nb, words.split(), message, tmp_path)


@pytest.mark.skipif(
    os.name == "nt" or not hasattr(os, "geteuid") or os.geteuid() == 0,
    reason="root may write anywhere",
)
def test_a_folder_that_cannot_be_written_to_is_refused_first(zero_nb, tmp_path):
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    refused(zero_nb, ["figures", "--out", locked / "here"], "cannot be written to", tmp_path)


def test_a_folder_for_figures_may_be_missing(zero_nb, monkeypatch, tmp_path):
    """Only the place is checked; whoever writes makes it."""
    monkeypatch.setattr(gallery, "draw_all", lambda out, progress: [out.name])
    assert zero_nb("figures", "--out", "new/er")[:2] == (
        0,
        f"{os.path.join('new', 'er', 'er.png')}\n",
    )
    assert list(tmp_path.iterdir()) == []


def test_gradients_that_overflow_for_good_are_one_line_too(zero_nb, monkeypatch, tmp_path):
    def ends(*args, **settings):
        raise LossScaleError("the gradients overflow at the smallest loss scale, 1;\nlower it")

    monkeypatch.setattr(compare, "train_stage", ends)
    refused(zero_nb, ["train"], "zero-nb: the gradients overflow at .*; lower it", tmp_path)


def test_a_bug_of_ones_own_keeps_its_traceback(zero_nb, monkeypatch):
    def breaks(*args, **settings):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(compare, "train_stage", breaks)
    with pytest.raises(ZeroDivisionError):
        zero_nb("train")


def test_an_interruption_is_no_traceback(zero_nb, monkeypatch):
    def stops(*args, **settings):
        raise KeyboardInterrupt

    monkeypatch.setattr(compare, "train_stage", stops)
    assert zero_nb("train") == (130, "", "")


# --- lab -----------------------------------------------------------------------------------------


def test_lab_without_jupyterlab_says_how_to_get_it(zero_nb, monkeypatch, tmp_path):
    monkeypatch.setattr(cli, "find_spec", lambda name: None)
    refused(
        zero_nb,
        ["lab"],
        r"JupyterLab is not installed; run: pip install 'zero-nb\[lab\]'",
        tmp_path,
    )


def test_lab_opens_jupyterlab_at_the_notebooks(zero_nb, monkeypatch, project, tmp_path):
    calls = []
    monkeypatch.setattr(cli, "find_spec", lambda name: importlib.util.find_spec("json"))
    monkeypatch.setattr(cli.subprocess, "call", lambda words, cwd: calls.append((words, cwd)) or 3)
    assert zero_nb("lab") == (3, "", "")  # its status is ours
    (tmp_path / "notebooks").mkdir()
    assert zero_nb("lab")[0] == 3
    words = [sys.executable, "-m", "jupyterlab", cli.START_PAGE]
    assert calls == [(words, project / "notebooks"), (words, tmp_path / "notebooks")]


def test_lab_without_notebooks_is_refused(zero_nb, monkeypatch, tmp_path):
    monkeypatch.setattr(cli, "find_spec", lambda name: importlib.util.find_spec("json"))
    monkeypatch.setattr(cli, "__file__", str(tmp_path / "a" / "zero_nb" / "cli.py"))
    refused(zero_nb, ["lab"], "no notebooks folder here", tmp_path)


# --- as a process --------------------------------------------------------------------------------


def process(*words, cwd, **settings):
    """Run the module as a shell would."""
    return subprocess.run(
        [sys.executable, "-m", "zero_nb", *words], cwd=cwd, capture_output=True, text=True,
        encoding="utf-8", timeout=300, **settings,
    )  # fmt: skip


def test_a_process_trains_on_this_projects_readme(project):
    words = "--data README.md --stage 2 --world-size 3 --steps 5 --json"
    done = process("train", *words.split(), cwd=project)
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    check_run(told, 2, 5)
    assert len(told["samples"]) == 2


def test_a_process_that_is_refused_prints_one_line(tmp_path):
    done = process("train", "--stage", "4", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "zero-nb: there is no ZeRO stage '4'; choose 0, 1, 2 or 3\n"
    assert list(tmp_path.iterdir()) == []


def test_usage_errors_are_values_that_are_wrong():
    """So that who calls the library can catch ValueError."""
    assert issubclass(UsageError, ValueError)
