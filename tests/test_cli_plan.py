"""The plan and tables commands: what is typed, what is printed, and one line for what is wrong."""

import json
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from zero_nb.cli_plan import plan_command, register, tables_command
from zero_nb.config import UsageError
from zero_nb.theory.tables import TABLES

app = typer.Typer()
register(app)


def run(*words):
    """What the command prints; an error of use comes out as such."""
    result = CliRunner().invoke(app, list(words))
    if isinstance(result.exception, UsageError):
        raise result.exception
    return result


def answer(*words):
    """The command's JSON."""
    result = run(*words, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def test_states_only_of_7_5_billion_on_64_devices():
    wanted = [120_000_000_000, 31_406_250_000, 16_640_625_000, 1_875_000_000]
    words = ("plan", "--params", "7.5e9", "--world-size", "64", "--states-only")
    for stage, total in enumerate(wanted):
        got = answer(*words, "--stage", str(stage))
        assert got["total_bytes"] == total
        assert got["numel"] == 7_500_000_000
        assert set(got["bytes"]) == {"param", "grad", "optim"}
    assert [row["total_bytes"] for row in answer(*words)["stages"]] == wanted


def test_elements_of_a_bare_number_are_the_papers():
    words = ("plan", "--params", "7.5e9", "--world-size", "64", "--states-only", "--stage", "3")
    assert answer(*words)["elements_sent"] == 3 * 7_500_000_000 * 63 // 64


def test_the_example_of_the_help():
    got = answer(
        "plan", "--model", "llama-2-70b", "--world-size", "64", "--device-memory", "80GB",
        "--stage", "auto", "--batch", "2", "--seq", "2048", "--precision", "bf16", "--tp", "8",
        "--recompute", "full",
    )  # fmt: skip
    assert got["model"] == "llama-2-70b"
    assert got["device_bytes"] == 80_000_000_000
    assert got["fits"] is True
    assert got["stage"] == got["smallest_stage"]
    assert sum(got["bytes"].values()) == got["total_bytes"]


def test_gb_and_gib_are_told_apart():
    words = ("plan", "--model", "gpt2", "--world-size", "2", "--device-memory")
    assert answer(*words, "80GB")["device_bytes"] == 80 * 10**9
    assert answer(*words, "80GiB")["device_bytes"] == 80 * 2**30


def test_a_config_json(tmp_path):
    path = tmp_path / "tiny" / "config.json"
    path.parent.mkdir()
    path.write_text(
        json.dumps({"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12,
                    "vocab_size": 50257, "n_positions": 1024}),
        encoding="utf-8",
    )  # fmt: skip
    got = answer("plan", "--config", str(path), "--world-size", "4", "--device", "a100")
    assert (got["model"], got["numel"]) == ("tiny", 124_439_808)
    assert got["step_seconds_bound"] > 0


def test_a_shape_by_its_numbers():
    got = answer("plan", "--layers", "48", "--hidden", "1600", "--heads", "25", "--seq", "1024")
    assert got["numel"] == 1_557_611_200
    words = ("--layers", "32", "--hidden", "4096", "--heads", "32", "--kv-heads", "8", "--ffn",
             "14336", "--vocab", "128256", "--llama")  # fmt: skip
    assert answer("plan", *words)["numel"] == 8_030_261_248


def test_text_shows_every_line_in_gb_and_gib():
    text = run("plan", "--model", "gpt2-xl", "--world-size", "8", "--device", "v100").output
    assert "gpt2-xl: 1,557,611,200 parameters, 8 devices" in text
    for word in (
        "parameters",
        "gradients",
        "optimizer states",
        "saved activations",
        "fragmentation",
        "CUDA context",
        "GiB",
        "smallest stage",
        "elements sent",
    ):
        assert word in text
    assert text.count("- ") >= 2  # advice


@pytest.mark.parametrize("name", TABLES)
def test_every_table_prints_as_text_and_json(name):
    text = run("tables", name)
    assert text.exit_code == 0
    assert "Source: " in text.output
    got = answer("tables", name)
    assert len(got["rows"]) == len(tables_command(name).rows)


def test_the_summary_counts_agreeing_rows():
    assert "54 of 54 rows agree" in run("tables", "zero-table1").output
    assert "592 of 592 rows agree" in run("tables", "deepspeed").output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("plan --world-size 8", "give exactly one of --model, --params, --config and --layers"),
        ("plan --model gpt2 --params 7e9", "got --model and --params"),
        ("plan --model lama-2-70b", "did you mean llama-2-70b"),
        ("plan --params -7e9", "--params must be a whole number of at least 1"),
        ("plan --params many", "--params 'many' is not a number"),
        ("plan --model gpt2 --world-size 0", "world_size must be a whole number of at least 1"),
        ("plan --model gpt2 --world-size -8", "world_size must be"),
        ("plan --model gpt2 --device-memory 80gb", r"is unclear; write 80GB \(10\^9 bytes\)"),
        ("plan --model gpt2 --device-memory 80", "has no unit"),
        ("plan --model gpt2 --device-memory -80GB", "must be above zero"),
        ("plan --model gpt2 --device a101", "did you mean a10"),
        ("plan --model gpt2 --stage 4", "--stage must be auto, 0, 1, 2 or 3, got '4'"),
        ("plan --model gpt2 --world-size 6 --tp 4", "tp 4 does not divide world_size 6"),
        ("plan --model gpt2 --batch 0", "micro_batch must be"),
        ("plan --model gpt2 --seq -1", "seq must be"),
        ("plan --model gpt2 --precision fp12", "unknown precision 'fp12'"),
        ("plan --model gpt2 --framework torchtitan", "unknown framework"),
        ("plan --model gpt2 --offload disk", "unknown offload"),
        ("plan --config /nowhere/config.json", "cannot read"),
        ("plan --hidden 8", "a shape by its numbers also needs --layers, --heads"),
        ("plan --layers 2 --hidden 10 --heads 3", "heads 3 does not divide hidden 10"),
        ("plan --layers 0 --hidden 8 --heads 2", "layers must be"),
        ("tables zero-table3", "did you mean zero-table"),
    ],
)
def test_bad_input_is_one_clear_line(words, message):
    with pytest.raises(UsageError, match=message) as caught:
        run(*words.split())
    assert "\n" not in str(caught.value)


def test_a_number_that_is_none_is_refused_by_the_parser():
    result = CliRunner().invoke(app, ["plan", "--model", "gpt2", "--tp", "two"])
    assert result.exit_code != 0
    assert "--tp" in result.output


def test_plan_command_without_a_terminal():
    plan = plan_command(params="7.5B", world_size=64, stage="2", states_only=True)
    assert plan.total_bytes == 16_640_625_000


def test_planning_needs_neither_numba_nor_matplotlib():
    code = (
        "import sys, zero_nb.cli_plan as c\n"
        "c.plan_command(model='gpt2'); c.tables_command('tools')\n"
        "print(sorted({'numba', 'matplotlib', 'sklearn'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
