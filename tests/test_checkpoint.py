"""Checkpoints: exact, whole after a kill at any moment, and refused when a byte is wrong.

What the state is, and what fits where, is test_snapshot.py's.
"""

import errno
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import safetensors
from safetensors.numpy import load_file, save_file

import tiny
from checkpoint_killer import run as killers_run
from naive_training import in_threads
from own_model import fill_padding, same_on_every_rank
from saved_runs import FROZEN, OTHER, SHAPES, arrays, everything, make, train
from zero_nb import cli
from zero_nb.compare import Task, train_stage
from zero_nb.config import UsageError
from zero_nb.train import checkpoint, snapshot
from zero_nb.train.checkpoint import LAYOUTS, CheckpointError
from zero_nb.train.data import TextBytes
from zero_nb.train.engine import Engine
from zero_nb.train.model import GPT, GPTConfig, TrainingPreset
from zero_nb.train.optim import SGD, AdamW, Rule, warmup_cosine
from zero_nb.train.optimizer import ZeROOptimizer
from zero_nb.train.scaling import DynamicLossScale

STAGES = tiny.STAGES
by_stage = pytest.mark.parametrize("stage", STAGES)
by_layout = pytest.mark.parametrize("layout", LAYOUTS)


class Killed(BaseException):
    """The process is gone: no handler of ours runs."""


def names_in(directory):
    return sorted(path.name for path in Path(directory).iterdir())


@cache
def state_after(steps, stage=3, world_size=4, precision="bf16"):
    """What a run that nothing disturbed has become."""
    return everything(train(make(stage, world_size, precision=precision), steps))


@pytest.fixture
def saved(tmp_path):
    """A directory with a sharded checkpoint of step 2, and its folder."""
    info = checkpoint.save(train(make(3, 4, precision="bf16"), 2), tmp_path, extra={"seed": 5})
    return tmp_path, info.path


# --- the same state, anywhere (H1, H4, H6, G2, G7, G9) -----------------------------------------


@by_layout
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_H1_saved_by_4_ranks_at_stage_3_loaded_by_3_at_stage_1_and_by_8_at_stage_2(
    precision, layout, tmp_path
):
    first = train(make(3, 4, precision=precision), 5, overflow=(2,))
    want = everything(first)
    fill_padding(first, 7777.0)
    checkpoint.save(first, tmp_path / "a", layout=layout)
    second = make(1, 3, precision=precision, seed=8, **OTHER)
    checkpoint.load(second, tmp_path / "a")
    assert everything(second) == want
    checkpoint.save(second, tmp_path / "b", layout=layout)
    third = make(2, 8, precision=precision, seed=9)
    checkpoint.load(third, tmp_path / "b")
    assert everything(third) == want
    for opt in (second, third):
        same_on_every_rank(opt)


@by_layout
def test_A3_files_hold_pieces_without_padding(layout, tmp_path):
    own = {"a": np.arange(1, 6, dtype="f4"), "b": np.arange(10, 13, dtype="f4")}
    opt = ZeROOptimizer(own, stage=3, world_size=4, units={"a": ["a"], "b": ["b"]})
    fill_padding(opt, 7777.0)
    folder = checkpoint.save(opt, tmp_path, layout=layout).path
    files = {path.name: load_file(path) for path in sorted(folder.glob("*.safetensors"))}
    if layout == "consolidated":
        assert list(files) == ["model.safetensors", "optimizer.safetensors"]
        np.testing.assert_equal(files["model.safetensors"], own)
        return
    assert list(files) == [f"rank-{rank:05d}-of-00004.safetensors" for rank in range(4)]
    parts = {f"{kind}/{name}": [] for kind in ("weight", "optim/exp_avg") for name in own}
    for tensors in files.values():
        for key, values in parts.items():
            values.append(tensors.get(key, np.empty(0, "f4")))
    assert [part.size for part in parts["weight/a"]] == [2, 2, 1, 0]
    assert [part.size for part in parts["optim/exp_avg/b"]] == [1, 1, 1, 0]
    for name, array in own.items():
        np.testing.assert_array_equal(np.concatenate(parts[f"weight/{name}"]), array)


@by_layout
def test_A11_a_rank_that_owns_padding_only_has_a_file_and_is_loaded(layout, tmp_path):
    own = {"five": np.arange(5, dtype="f4")}
    checkpoint.save(ZeROOptimizer(own, stage=3, world_size=4), tmp_path, layout=layout)
    opt = ZeROOptimizer({"five": own["five"] * 0}, stage=3, world_size=4)
    checkpoint.load(opt, tmp_path)
    np.testing.assert_array_equal(opt.weights()["five"], own["five"])


def test_a_rule_without_state_and_a_frozen_model(tmp_path):
    own = {"w": np.arange(3, dtype="f4")}
    for number, settings in enumerate(({"rule": SGD()}, {"frozen": ["w"]})):
        for layout in LAYOUTS:
            directory = tmp_path / f"{number}{layout}"
            saved = ZeROOptimizer(own, world_size=2, **settings)
            info = checkpoint.save(saved, directory, layout=layout)
            assert not (info.path / "optimizer.safetensors").exists()
            opt = ZeROOptimizer({"w": own["w"] * 0}, stage=3, world_size=3, **settings)
            checkpoint.load(opt, directory)
            np.testing.assert_array_equal(opt.weights()["w"], own["w"])


# --- going on as if nothing had happened --------------------------------------------------------


@by_stage
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-both-grads", "fp16"])
def test_ten_steps_are_five_saved_loaded_and_five_more(precision, micro_batches, stage, tmp_path):
    def made():
        return make(
            stage, 3, precision=precision, micro_batches=micro_batches, reduce_bucket_size=16
        )

    # Overflows on both sides of the cut: the loss scale, its hysteresis and its quiet steps, the
    # schedule and the clipped gradients (all of them: the norm is far above 2) have to go on.
    overflow = (2, 3, 6)
    whole = train(made(), 10, overflow=overflow)
    first = train(made(), 5, overflow=overflow)
    checkpoint.save(first, tmp_path, layout=LAYOUTS[stage % 2])
    second = made()
    checkpoint.load(second, tmp_path)
    train(second, 5, overflow=overflow)
    assert everything(second) == everything(whole)
    assert (whole.steps_done, whole.skipped_steps) == (7, 3)
    if precision == "fp16":
        assert whole.scaler.state_dict() == {"scale": 128.0, "quiet_steps": 0, "forgiven": 0}


@by_stage
def test_a_model_and_its_data_go_on_where_they_were(stage, tmp_path):
    text = tmp_path / "text"
    text.write_bytes(bytes(range(256)) * 3)
    data = TextBytes(text, 6)
    model = GPT(GPTConfig(vocab_size=256, seq_len=6, width=10, heads=2, blocks=2))

    def made():
        return Engine(
            model,
            stage=stage,
            world_size=3,
            precision="bf16",
            rule=AdamW(lr=1e-2),
            max_grad_norm=0.5,
            schedule=lambda step: warmup_cosine(step, warmup=2, total=6),
        )

    def go_on(engine, steps, extra):
        for step in range(extra["data_step"], extra["data_step"] + steps):
            engine.train_step(*data.batch(step, extra["batch"], extra["seed"]))
        return extra | {"data_step": extra["data_step"] + steps}

    start = {"data_step": 0, "batch": 7, "seed": 3}
    whole, first, second = made(), made(), made()
    go_on(whole, 6, start)
    extra = go_on(first, 3, start)
    checkpoint.save(first.optimizer, tmp_path / "c", extra=extra)
    go_on(second, 1, start)  # what is loaded over leaves no trace
    info = checkpoint.load(second.optimizer, tmp_path / "c")
    assert info.extra == {"data_step": 3, "batch": 7, "seed": 3}
    go_on(second, 3, info.extra)
    assert second.optimizer.weights_sha256() == whole.optimizer.weights_sha256()
    assert everything(second.optimizer) == everything(whole.optimizer)
    assert second.evaluate(*data.held_out()) == whole.evaluate(*data.held_out())


def tiny_task(path, name="text"):
    """A byte model small enough to train in a test."""
    (path / name).write_bytes(bytes(range(256)) * 3)
    model = GPT(GPTConfig(vocab_size=256, seq_len=6, width=10, heads=2, blocks=2))
    return Task(
        TextBytes(path / name, 6), model, TrainingPreset(batch=8, steps=9, lr=1e-2, warmup=2)
    )


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_measured_run_goes_on_where_it_was(precision, tmp_path):
    settings = {"task": tiny_task(tmp_path), "precision": precision, "seed": 3}
    whole, _ = train_stage(2, world_size=3, steps=6, **settings)
    directory = tmp_path / "c"
    first, _ = train_stage(
        2, world_size=3, steps=3, schedule_steps=6, save=directory, save_every=2, **settings
    )
    info = checkpoint.read_info(directory)
    assert (info.steps_done, info.extra["next_step"]) == (3, 3)
    rest, _ = train_stage(3, world_size=3, steps=6, resume=directory, **settings)
    assert first.losses + rest.losses == whole.losses
    assert rest.weights_sha256 == whole.weights_sha256
    # Save and resume the same directory, at other stages and numbers of ranks.
    where = {"save": directory, "resume": directory}
    train_stage(0, world_size=2, steps=5, layout="consolidated", **where, **settings)
    last, _ = train_stage(1, world_size=8, steps=6, save_every=1, **where, **settings)
    assert (len(last.losses), checkpoint.read_info(directory).steps_done) == (1, 6)
    np.testing.assert_allclose(last.losses, whole.losses[-1:], rtol=1e-2)


def test_a_run_that_is_killed_can_go_on_from_its_last_save(tmp_path):
    settings = {"task": tiny_task(tmp_path), "world_size": 2, "precision": "bf16"}
    whole, _ = train_stage(3, steps=6, **settings)
    done = []

    def dies(report):
        done.append(report)
        if len(done) == 5:
            raise Killed

    with pytest.raises(Killed):
        train_stage(3, steps=6, save=tmp_path / "c", save_every=2, progress=dies, **settings)
    rest, _ = train_stage(3, steps=6, resume=tmp_path / "c", **settings)
    assert len(rest.losses) == 2
    assert rest.weights_sha256 == whole.weights_sha256


OTHER_JOBS = {
    "batch": ({"batch": 7}, "was trained with batch 8, not 7; resume with the same"),
    "seed": ({"seed": 1}, "was trained with seed 0, not 1"),
    "precision": ({"precision": "fp32"}, "was trained with precision bf16, not fp32"),
    "steps": ({"steps": 2}, "has been trained for 2 steps already"),
    "optimizer": ({"optimizer": "sgd"}, "the rule is SGD"),
    "every": ({"save_every": 2}, "save_every 2 needs a directory"),
    "no": ({"save_every": 0, "save": "x"}, "save_every must be at least 1 step"),
    "schedule": ({"schedule_steps": 0}, "schedule_steps must be at least 1 step"),
    "layout": ({"layout": "tar"}, "unknown layout 'tar'; choose sharded or consolidated"),
}


def test_another_run_does_not_go_on_from_this_ones_checkpoint(tmp_path):
    task = tiny_task(tmp_path)
    same = {"world_size": 2, "steps": 3, "task": task, "resume": tmp_path / "c"}
    train_stage(1, world_size=2, steps=2, task=task, save=tmp_path / "c")
    kept = names_in(tmp_path)
    for settings, says in OTHER_JOBS.values():
        with pytest.raises(UsageError, match=says):
            train_stage(1, **same | settings)
    with pytest.raises(UsageError, match="was trained with data"):
        train_stage(1, **same | {"task": tiny_task(tmp_path, "other")})
    train(make(1, 2), 1)
    checkpoint.save(make(1, 2), tmp_path / "d")
    with pytest.raises(UsageError, match="was not saved by a training of zero-nb"):
        train_stage(1, **same | {"resume": tmp_path / "d"})
    with pytest.raises(CheckpointError, match=r"cannot save to .*text"):
        train_stage(1, world_size=2, steps=2, task=task, save=tmp_path / "text" / "c")
    assert names_in(tmp_path) == sorted([*kept, "d", "other"])


def test_the_command_saves_and_resumes(tmp_path, monkeypatch, capsys):
    (tmp_path / "text").write_bytes(bytes(range(256)) * 12)

    def zero_nb(*options, status=None):
        always = ("--data", str(tmp_path / "text"), "--world-size", "2", "--stage", "2", "--json")
        monkeypatch.setattr(sys, "argv", ["zero-nb", "train", *always, *options])
        if status is None:
            cli.main()
            return json.loads(capsys.readouterr().out)
        with pytest.raises(SystemExit) as left:
            cli.main()
        assert left.value.code == status
        return capsys.readouterr().err

    directory = str(tmp_path / "c")
    whole = zero_nb("--steps", "2")
    first = zero_nb("--steps", "1", "--schedule-steps", "2", "--save", directory)
    assert first["checkpoint"]["path"] == str(tmp_path / "c" / "step-00000001")
    rest = zero_nb("--steps", "2", "--resume", directory, "--save", directory)
    assert rest["weights_sha256"] == whole["weights_sha256"]
    assert rest["losses"] == whole["losses"][1:]
    assert names_in(directory) == ["latest", "step-00000002"]
    said = zero_nb("--steps", "2", "--resume", directory, status=2)
    assert said.startswith("zero-nb: ")
    assert "has been trained for 2 steps already" in said


# --- what it is ----------------------------------------------------------------------------------


@by_layout
def test_what_a_checkpoint_is_can_be_read_without_its_tensors(layout, tmp_path):
    opt = train(make(3, 4, precision="fp16"), 4, overflow=(1,))
    info = checkpoint.save(opt, tmp_path, layout=layout, extra={"seed": 5, "note": "ü"})
    assert checkpoint.read_info(tmp_path) == checkpoint.read_info(info.path) == info
    assert info.path == tmp_path / "step-00000003"
    assert (info.layout, info.stage, info.world_size, info.precision) == (layout, 3, 4, "fp16")
    assert (info.steps_done, info.skipped_steps) == (3, 1)
    assert info.extra == {"seed": 5, "note": "ü"}
    tensors = [path for path in info.path.iterdir() if path.suffix == ".safetensors"]
    assert info.nbytes == sum(path.stat().st_size for path in tensors)
    record = json.loads((info.path / "checkpoint.json").read_text(encoding="utf-8"))
    assert (record["format"], record["version"]) == ("zero_nb checkpoint", 1)
    state = record["state"]
    assert state == snapshot.describe(opt)
    assert state["parameters"]["emb"] == {
        "shape": [7, 3], "dtype": "float32", "trainable": True, "updates": 3, "tied": ["head"],
    }  # fmt: skip
    assert state["parameters"]["frozen"] == {
        "shape": [5], "dtype": "float16", "trainable": False, "updates": 0, "tied": [],
    }  # fmt: skip
    assert state["loss_scale"] == opt.scaler.state_dict()
    assert [group["names"] for group in state["groups"]] == [list(g.names) for g in opt.groups]
    assert {unit["name"]: unit["parameters"] for unit in state["units"]} == {
        unit.name: list(unit.layout.names) for unit in opt.units
    }
    assert state["lr"] == opt.lr
    for file, entry in record["files"].items():
        assert hashlib.sha256((info.path / file).read_bytes()).hexdigest() == entry["sha256"]


@by_layout
def test_weights_alone_start_another_run(layout, tmp_path):
    opt = train(make(2, 4, precision="bf16"), 2)
    checkpoint.save(opt, tmp_path, layout=layout)
    weights = checkpoint.read_weights(tmp_path)
    want = opt.weights()
    assert set(weights) == set(want)
    for name, array in want.items():
        assert weights[name].dtype == np.float32
        assert weights[name].shape == array.shape
        np.testing.assert_array_equal(weights[name], array)
    fresh = ZeROOptimizer(weights, stage=1, world_size=3)  # nothing frozen now
    assert fresh.aliases == {"head": "emb"}
    assert fresh.weights_sha256() == opt.weights_sha256()


def test_a_consolidated_file_is_a_state_dict_of_whole_named_tensors(tmp_path):
    opt = train(make(3, 4), 2)
    folder = checkpoint.save(opt, tmp_path, layout="consolidated").path
    model = load_file(folder / "model.safetensors")
    weights = opt.weights()
    assert set(model) == set(weights)
    for name, array in weights.items():
        assert (model[name].shape, model[name].dtype) == (array.shape, np.float32)
        np.testing.assert_array_equal(model[name], array)
    state = load_file(folder / "optimizer.safetensors")
    moments = opt.state_dict()["moments"]
    assert set(state) == {f"optim/{m}/{name}" for m, by_name in moments.items() for name in by_name}
    np.testing.assert_array_equal(state["optim/exp_avg/mat"], moments["exp_avg"]["mat"])
    with safetensors.safe_open(folder / "model.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_consolidated_file_loads_in_pytorch(precision, tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file as load_torch

    opt = train(make(3, 4, precision=precision), 2)
    folder = checkpoint.save(opt, tmp_path, layout="consolidated").path

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            for name, shape in SHAPES.items():
                self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape)))
            self.head = self.emb

    model = Model()
    tensors = load_torch(folder / "model.safetensors")
    stored = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    for name, tensor in tensors.items():
        assert tensor.dtype == (stored[precision] if name in FROZEN else torch.float32)
    model.load_state_dict(tensors)  # strict: every name, no other
    assert model.head is model.emb
    for name, array in opt.weights().items():
        np.testing.assert_array_equal(model.state_dict()[name].numpy(), array)
    # The masters, rounded by PyTorch, are the working parameters.
    with opt.gathered_parameters() as used:
        for name, tensor in tensors.items():
            rounded = tensor.to(stored[precision]).float().numpy()
            np.testing.assert_array_equal(rounded, used[name][0])


# --- which one counts ----------------------------------------------------------------------------


@by_layout
def test_the_last_one_counts_and_older_ones_go(layout, tmp_path):
    opt = make(2, 3)
    for steps in range(1, 4):
        checkpoint.save(train(opt, 1), tmp_path, layout=layout)
        assert names_in(tmp_path) == ["latest", f"step-{steps:08d}"]


def test_as_many_are_kept_as_asked_for_and_each_can_be_loaded(tmp_path):
    opt = make(2, 3)
    for _ in range(5):
        checkpoint.save(train(opt, 1), tmp_path, keep=3)
    assert names_in(tmp_path) == ["latest", *(f"step-0000000{step}" for step in (3, 4, 5))]
    other = make(1, 2)
    assert checkpoint.load(other, tmp_path / "step-00000003").steps_done == 3
    # Gone back: what is saved now counts and stays, though its number is the lowest.
    assert checkpoint.save(other, tmp_path, keep=2).path.name == "step-00000003-2"
    assert names_in(tmp_path) == ["latest", "step-00000003-2", "step-00000005"]
    assert checkpoint.load(opt, tmp_path).steps_done == 3


def test_one_step_can_be_saved_again_and_again(tmp_path):
    opt = train(make(2, 3), 1)
    names = [checkpoint.save(opt, tmp_path, extra={"i": i}).path.name for i in range(3)]
    assert names == ["step-00000001", "step-00000001-2", "step-00000001"]
    assert names_in(tmp_path) == ["latest", "step-00000001"]
    assert checkpoint.read_info(tmp_path).extra == {"i": 2}


def test_a_directory_is_made_and_what_else_is_in_it_stays(tmp_path):
    directory = tmp_path / "a" / "b"
    opt = make(1, 2)
    checkpoint.save(opt, directory)
    (directory / "notes.txt").write_text("mine", encoding="utf-8")
    (directory / "step-1").mkdir()
    checkpoint.save(train(opt, 1), directory)
    assert names_in(directory) == ["latest", "notes.txt", "step-00000001", "step-1"]


@by_layout
def test_what_is_sent_to_save_and_load_is_no_training_traffic(layout, tmp_path):
    opt = make(2, 4)
    opt.world.log.clear()
    checkpoint.save(opt, tmp_path, layout=layout)
    sent = opt.world.log.elements_sent("other")
    assert (sent > 100) == (layout == "consolidated")  # sharded: agreements and checksums only
    checkpoint.load(opt, tmp_path)
    assert {t.purpose for t in opt.world.log.transfers} == {"other"}


# --- a kill at any moment ------------------------------------------------------------------------


CALLS = ("mkdir", "fsync", "rename", "replace", "unlink", "rmdir")


def killing(monkeypatch, at, *, after):
    """Die at the at-th change of the disk, before or after it is made; torn if it is a write."""
    count = 0

    def dies():
        nonlocal count
        count += 1
        return count == at

    def wrapped(function):
        def call(*args, **kwargs):
            dead = dies()
            if dead and not after:
                raise Killed
            try:
                return function(*args, **kwargs)
            finally:
                if dead:
                    raise Killed

        return call

    for name in CALLS:
        monkeypatch.setattr(os, name, wrapped(getattr(os, name)))
    write = checkpoint._write_file

    def torn(path, content):
        if dies():
            Path(path).write_bytes(content[: len(content) // 2 if after else 0])
            raise Killed
        write(path, content)

    monkeypatch.setattr(checkpoint, "_write_file", torn)


@pytest.mark.parametrize(
    ("layout", "after", "steps"),
    [
        ("sharded", False, 1),
        ("sharded", True, 1),
        ("sharded", True, 0),  # the same step once more
        ("consolidated", True, 1),
    ],
)
def test_killed_at_every_change_of_the_disk_in_turn(layout, after, steps, tmp_path):
    first = train(make(3, 2, precision="bf16"), 2)
    second = train(make(3, 2, precision="bf16"), 2 + steps)
    old, new = everything(first), everything(second)
    directory, at, seen = tmp_path / "run", 0, []
    while True:
        at += 1
        shutil.rmtree(directory, ignore_errors=True)
        checkpoint.save(first, directory, layout=layout, extra={"which": "old"})
        with pytest.MonkeyPatch.context() as patched:
            killing(patched, at, after=after)
            try:
                checkpoint.save(second, directory, layout=layout, extra={"which": "new"})
                break
            except Killed:
                pass
        opt = make(1, 3, precision="bf16", seed=5)
        seen.append(checkpoint.load(opt, directory).extra["which"])
        assert everything(opt) == {"old": old, "new": new}[seen[-1]]
        # The next save clears up, whatever was left.
        last = checkpoint.save(train(opt, 1), directory, layout=layout).path.name
        assert names_in(directory) == ["latest", last]
    # Nothing counts before it is complete, and then it counts for good; of the dozen changes or
    # more, the last ones remove the old checkpoint.
    assert seen == sorted(seen, reverse=True)
    assert len(seen) > 15
    assert {"old", "new"} == set(seen)


@by_layout
def test_killed_while_saving_for_the_first_time_there_is_no_checkpoint_or_a_whole_one(
    layout, tmp_path
):
    opt = train(make(3, 2), 1)
    want, at, refused = everything(opt), 0, 0
    while True:
        at += 1
        directory = tmp_path / str(at)
        with pytest.MonkeyPatch.context() as patched:
            killing(patched, at, after=True)
            try:
                checkpoint.save(opt, directory, layout=layout)
                break
            except Killed:
                pass
        other = make(1, 3, seed=5)
        if (directory / "latest").exists():
            checkpoint.load(other, directory)
            assert everything(other) == want
        else:
            refused += 1
            with pytest.raises(CheckpointError, match=r"holds no checkpoint|there is no directory"):
                checkpoint.load(other, directory)
        checkpoint.save(opt, directory, layout=layout)
        assert checkpoint.load(other, directory).steps_done == 1
        assert len(names_in(directory)) == 2
    assert at - 1 > refused > 5


@by_layout
def test_all_is_on_the_disk_before_it_counts(layout, saved, monkeypatch):
    """A power cut may lose what was not synced: files first, then names, then the pointer."""
    directory, _ = saved
    events = []

    def noted(name):
        function = getattr(os, name)

        def call(first, *args):
            done = os.fstat(first).st_ino if name == "fsync" else Path(args[0]).name
            events.append((name, done))
            return function(first, *args)

        monkeypatch.setattr(os, name, call)

    for name in ("fsync", "rename", "replace"):
        noted(name)
    info = checkpoint.save(train(make(1, 2, precision="bf16"), 3), directory, layout=layout)
    monkeypatch.undo()
    renamed = events.index(("rename", info.path.name))
    counts = events.index(("replace", "latest"))
    pruned = events.index(("rename", ".pruned-step-00000002"))
    assert renamed < counts < pruned
    files = {path.stat().st_ino for path in info.path.iterdir()}
    files.add((directory / "latest").stat().st_ino)
    synced = {number for name, number in events[:renamed] if name == "fsync"}
    assert files <= synced
    if os.name != "nt":
        assert info.path.stat().st_ino in synced
        folder = ("fsync", directory.stat().st_ino)
        assert folder in events[renamed:counts]
        assert folder in events[counts:pruned]


class Twin:
    """The killer's run, never disturbed; its state after each step."""

    def __init__(self):
        self.opt, self.states = killers_run(2, 3), []

    def state(self, steps):
        while len(self.states) <= steps:
            self.states.append(everything(self.opt))
            train(self.opt, 1)
        return self.states[steps]


def kill_savers(directory, times, rng, twin):
    """Kill saving processes one after the other; return how many died while saving."""
    program = Path(__file__).with_name("checkpoint_killer.py")
    savers = [
        subprocess.Popen(
            [sys.executable, program, directory, "2", "3"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8",
        )
        for _ in range(times)
    ]  # fmt: skip
    interrupted = 0
    try:
        for saver in savers:
            assert saver.stdout.readline() == "ready\n"
        for saver in savers:
            saver.stdin.write("\n")
            saver.stdin.flush()
            said = [saver.stdout.readline() for _ in range(rng.randint(1, 3))]
            time.sleep(rng.uniform(0.0, 0.06))
            saver.kill()  # SIGKILL, TerminateProcess on Windows
            said += saver.stdout.read().splitlines()
            saver.wait()
            assert said[-1].startswith("saved "), f"ended by itself: {saver.returncode}, {said}"
            last = int(said[-1].split()[1])
            interrupted += any(
                name.startswith((".saving", ".pruned")) for name in names_in(directory)
            )
            opt = killers_run(3, 4)
            info = checkpoint.load(opt, directory)
            # What was reported is not lost; what was not may have been completed all the same.
            assert info.steps_done in (last, last + 1)
            assert info.extra == {"step": info.steps_done}
            assert everything(opt) == twin.state(info.steps_done)
    finally:
        for saver in savers:
            saver.kill()
            saver.communicate()
    return interrupted


def test_killed_by_the_system_at_5_random_moments(tmp_path):
    kill_savers(tmp_path, 5, random.Random(1), Twin())


@pytest.mark.long
def test_killed_by_the_system_at_50_random_moments(tmp_path):
    rng, twin = random.Random(), Twin()
    assert sum(kill_savers(tmp_path, 5, rng, twin) for _ in range(10)) > 0


# --- what cannot be written ------------------------------------------------------------------


def saving_fails(opt, directory, says, **settings):
    """Saving is refused in one line, and what was saved before is whole."""
    before = names_in(directory)
    with pytest.raises(CheckpointError, match=says) as caught:
        checkpoint.save(opt, directory, **settings)
    assert "what was saved before is whole" in str(caught.value)
    assert names_in(directory) == before
    other = make(1, 3, precision="bf16", seed=5)
    checkpoint.load(other, directory)
    assert everything(other) == state_after(2)


@by_layout
@pytest.mark.parametrize("at", range(1, 8))
def test_a_full_disk_leaves_the_old_checkpoint_whole(layout, at, saved, monkeypatch):
    directory, _ = saved
    opt = train(make(1, 3, precision="bf16"), 3)
    fsync, calls = os.fsync, []

    def full(descriptor):
        calls.append(descriptor)
        if len(calls) == at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    said = "No space left on device"
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        try:
            checkpoint.save(opt, directory, layout=layout)
        except CheckpointError as error:
            said = str(error)
    assert "No space left on device" in said
    assert len(calls) >= at
    other = make(2, 2, precision="bf16")
    info = checkpoint.load(other, directory)
    assert everything(other) == (state_after(2) if info.steps_done == 2 else everything(opt))
    # Nothing half written takes the room. (The last sync fails when the new one counts already.)
    assert len(names_in(directory)) == info.steps_done


@by_layout
def test_a_file_that_cannot_grow_is_an_error_of_the_system(layout, saved):
    resource = pytest.importorskip("resource")
    opt = train(make(1, 3, precision="bf16"), 3)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, limits[1]))
        with pytest.raises(CheckpointError, match=r"cannot save to .*: File too large"):
            checkpoint.save(opt, saved[0], layout=layout)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert names_in(saved[0]) == ["latest", "step-00000002"]
    other = make(1, 3, precision="bf16")
    checkpoint.load(other, saved[0])
    assert everything(other) == state_after(2)


def test_a_directory_that_may_not_be_written_to(saved, monkeypatch):
    directory, folder = saved
    opt = train(make(1, 3, precision="bf16"), 3)

    def refused(path, *_args, **_kwargs):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    with monkeypatch.context() as patched:
        patched.setattr(os, "mkdir", refused)
        saving_fails(opt, directory, "cannot save to .*step-00000003: Permission denied")
    with pytest.raises(CheckpointError, match=r"cannot save to .*checkpoint.json: "):
        checkpoint.save(opt, folder / "checkpoint.json")
    with pytest.raises(CheckpointError, match=r"cannot save to .*checkpoint.json"):
        checkpoint.save(opt, folder / "checkpoint.json" / "below")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may do all")
def test_a_read_only_directory(saved):
    directory, _ = saved
    os.chmod(directory, 0o500)
    try:
        opt = train(make(1, 3, precision="bf16"), 3)
        saving_fails(opt, directory, "cannot save to .*: Permission denied")
    finally:
        os.chmod(directory, 0o700)


def test_a_pointer_that_cannot_be_replaced_leaves_the_old_one(saved, monkeypatch):
    def busy(source, target):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(target))

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", busy)
        opt = train(make(1, 3, precision="bf16"), 3)
        saving_fails(opt, saved[0], "cannot save to .*latest: Permission denied")


def test_an_old_checkpoint_that_cannot_be_removed_is_a_warning(saved, monkeypatch, caplog):
    directory, _ = saved
    rename = os.rename

    def busy(source, target):
        if ".pruned" in str(target):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        rename(source, target)

    monkeypatch.setattr(os, "rename", busy)
    checkpoint.save(train(make(1, 3, precision="bf16"), 3), directory)
    assert "could not remove the old checkpoint" in caplog.text
    assert names_in(directory) == ["latest", "step-00000002", "step-00000003"]
    assert checkpoint.read_info(directory).steps_done == 3


class Named(Rule):
    """An element-wise rule with an option that JSON cannot hold."""

    moment_names = ()

    @property
    def options(self):
        return {"lr": 1.0, "how": object()}

    def hyper_row(self, options, step, grad_scale):
        raise NotImplementedError

    def apply(self, target, grad, moments, runs, hyper, *, grad_format, param, param_format):
        raise NotImplementedError


BAD_SAVES = {
    "layout": ({"layout": "tar"}, "unknown layout 'tar'; choose one of sharded, consolidated"),
    "keep": ({"keep": 0}, "keep must be at least 1"),
    "list": ({"extra": [1]}, "extra must be a dict, got list"),
    "object": ({"extra": {"x": object()}}, "extra cannot be saved as JSON"),
    "nan": ({"extra": {"x": float("nan")}}, "extra cannot be saved as JSON"),
}


@pytest.mark.parametrize("bad", BAD_SAVES)
def test_what_cannot_be_saved_is_refused_before_a_file_is_touched(bad, tmp_path):
    settings, says = BAD_SAVES[bad]
    directory = tmp_path / "none"
    with pytest.raises(UsageError, match=says):
        checkpoint.save(make(1, 2), directory, **settings)
    assert not directory.exists()


def test_a_run_in_the_middle_of_a_step_is_refused(tmp_path):
    opt = make(1, 2)
    grads = {name: np.ones((2, *SHAPES[name]), "f4") for name in SHAPES if name not in FROZEN}
    opt.backward(grads | {"head": grads["emb"]})
    with pytest.raises(UsageError, match=r"gradients are held.*step\(\).*zero_grad\(\)"):
        checkpoint.save(opt, tmp_path / "none")
    assert not (tmp_path / "none").exists()


# --- what is not as it was saved -----------------------------------------------------------------


def refuses(directory, says, opt=None):
    """Loading is refused in words, and nothing is changed."""
    opt = train(make(2, 3, precision="bf16"), 1) if opt is None else opt
    before, held = everything(opt), arrays(opt)
    with pytest.raises(CheckpointError, match=says) as caught:
        checkpoint.load(opt, directory)
    assert arrays(opt) == held
    assert everything(opt) == before
    assert "\n" not in str(caught.value)
    return str(caught.value)


FILES = ("rank-00002-of-00004.safetensors", "checkpoint.json")


@pytest.mark.parametrize("kept", [0.0, 0.3, 0.99])
@pytest.mark.parametrize("file", FILES)
def test_a_truncated_file_is_named(file, kept, saved):
    directory, folder = saved
    content = (folder / file).read_bytes()
    (folder / file).write_bytes(content[: int(len(content) * kept)])
    says = "truncated"
    if file.endswith("safetensors"):
        says = rf"has {int(len(content) * kept)} bytes, {len(content)} were saved: truncated"
    refuses(directory, f"{file}.*{says}")


@pytest.mark.parametrize("file", FILES)
def test_a_longer_file_is_named(file, saved):
    directory, folder = saved
    with open(folder / file, "ab") as opened:
        opened.write(b"0")
    refuses(directory, file)


def test_every_flipped_bit_is_seen(saved):
    directory, folder = saved
    opt = make(2, 3, precision="bf16")
    before, rng = everything(opt), np.random.default_rng(4)
    for path in sorted([*folder.iterdir(), directory / "latest"]):
        content = path.read_bytes()
        for position in rng.choice(len(content), 25, replace=False):
            flipped = bytearray(content)
            flipped[position] ^= 1 << int(rng.integers(8))
            path.write_bytes(flipped)
            with pytest.raises(CheckpointError, match=path.name):
                checkpoint.load(opt, directory)
        path.write_bytes(content)
    assert everything(opt) == before
    checkpoint.load(opt, directory)
    assert everything(opt) == state_after(2)


def test_swapped_files_are_named_with_what_they_hold(saved):
    directory, folder = saved
    one, other = (folder / f"rank-0000{rank}-of-00004.safetensors" for rank in (1, 3))
    contents = one.read_bytes(), other.read_bytes()
    other.write_bytes(contents[0])
    one.write_bytes(contents[1])
    refuses(directory, "rank-00001-of-00004.safetensors holds what was saved as rank-00003-of-0")


def test_a_file_of_an_older_checkpoint_is_seen(tmp_path):
    opt = make(3, 4, precision="bf16")
    old = checkpoint.save(train(opt, 1), tmp_path, keep=2).path
    new = checkpoint.save(train(opt, 1), tmp_path, keep=2).path
    file = "rank-00000-of-00004.safetensors"
    assert (old / file).stat().st_size == (new / file).stat().st_size
    shutil.copy(old / file, new / file)
    refuses(tmp_path, f"{file} was changed after it was saved: SHA-256")
    shutil.copy(old / "checkpoint.json", new / "checkpoint.json")
    refuses(tmp_path, "latest was written for another")
    assert checkpoint.load(opt, old).steps_done == 1


def test_missing_files_are_named(saved):
    directory, folder = saved
    (folder / "rank-00001-of-00004.safetensors").unlink()
    refuses(directory, "rank-00001-of-00004.safetensors is missing; it is a part of")
    (folder / "checkpoint.json").unlink()
    refuses(directory, r"cannot read .*checkpoint.json: ")
    shutil.rmtree(folder)
    refuses(directory, "latest names step-00000002, which is missing")


def test_a_folder_instead_of_a_file(saved):
    directory, folder = saved
    path = folder / "rank-00001-of-00004.safetensors"
    path.unlink()
    path.mkdir()
    refuses(directory, "cannot read .*rank-00001-of-00004.safetensors")


def test_where_there_is_no_checkpoint(tmp_path, saved):
    directory, folder = saved
    refuses(tmp_path / "nothing", "there is no directory .*nothing; give one that a run")
    (tmp_path / "empty").mkdir()
    refuses(tmp_path / "empty", "empty holds no checkpoint: it has no file 'latest'$")
    (directory / "latest").unlink()
    refuses(directory, "no file 'latest'; its step-00000002 can be given itself")
    opt = make(1, 2, precision="bf16")
    checkpoint.load(opt, folder)
    assert everything(opt) == state_after(2)
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        checkpoint.read_info(directory)
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        checkpoint.read_weights(directory)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"checkpoint": "../x", "sha256": ""}', "\xff"])
def test_a_pointer_that_names_nothing(text, saved):
    (saved[0] / "latest").write_bytes(text.encode("latin-1"))
    refuses(saved[0], "latest was changed after it was saved")


# Changes that somebody made who then mended the sums.


def reseal(directory, edit):
    """Change checkpoint.json, and make all sums right again."""
    path = checkpoint.read_info(directory).path / "checkpoint.json"
    record = json.loads(path.read_bytes())
    edit(record)
    for file, entry in record["files"].items():
        if (path.parent / file).is_file():
            content = (path.parent / file).read_bytes()
            entry |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    record["sha256"] = "0" * 64
    text = json.dumps(record, indent=1)
    digest = hashlib.sha256(text.encode()).hexdigest()
    path.write_bytes(text.replace("0" * 64, digest, 1).encode())
    pointer = {"checkpoint": path.parent.name, "sha256": digest}
    (directory / "latest").write_text(json.dumps(pointer), encoding="utf-8")


RANK_1 = "rank-00001-of-00004.safetensors"


def retyped(tensors):
    return {name: tensor.astype(np.float64) for name, tensor in tensors.items()}


def shorter(tensors):
    return {name: tensor[:-1] for name, tensor in tensors.items()}


def without_one(tensors):
    return dict(list(tensors.items())[1:])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (retyped, r"'.*' is F64 \[\d+\], F32 \[\d+\] was saved"),
        (shorter, r"'.*' is F32 \[\d+\], F32 \[\d+\] was saved"),
        (without_one, "has no tensor '"),
    ],
)
def test_tensors_that_are_not_as_described(change, says, tmp_path):
    folder = checkpoint.save(train(make(3, 4), 2), tmp_path).path
    reseal(tmp_path, lambda record: None)
    opt = make(3, 4)
    checkpoint.load(opt, tmp_path)  # resealing alone changes nothing
    assert everything(opt) == state_after(2, precision="fp32")
    save_file(change(load_file(folder / RANK_1)), folder / RANK_1)
    reseal(tmp_path, lambda record: None)
    refuses(tmp_path, f"{RANK_1}.*{says}", make(2, 3))


def test_a_file_that_is_no_safetensors_file(saved):
    directory, folder = saved
    (folder / RANK_1).write_bytes(b"\xff" * 100)
    reseal(directory, lambda record: None)
    refuses(directory, f"{RANK_1} is no safetensors file")


def rename_a_file(record):
    record["files"]["../x.safetensors"] = record["files"].pop(RANK_1)


DESCRIBED_WRONGLY = {
    "format": (lambda r: r.update(format="other"), "describes no checkpoint of zero_nb"),
    "version": (lambda r: r.update(version=2), "is of version 2, this zero_nb reads version 1"),
    "hole": (lambda r: r["files"][RANK_1]["pieces"].pop("mat"), "weight of 'mat' is in no file"),
    "overlap": (
        lambda r: r["files"][RANK_1]["pieces"].update(mat=[0, 12]),
        "'mat' is in no file, or in two",
    ),
    "kinds": (lambda r: r["files"][RANK_1]["kinds"].pop(), "optim/exp_avg_sq of '.*' is in no"),
    "path": (rename_a_file, "names a file outside its folder: '../x.safetensors'"),
    "shape": (
        lambda r: r["state"]["parameters"]["mat"].update(shape=[4, 3]),
        r"'mat' has shape \(3, 4\) here, \(4, 3\) there",
    ),
    "lr": (
        lambda r: r["state"]["groups"][0]["options"].update(lr=-1),
        "lr must be a finite number",
    ),
    "steps": (lambda r: r["state"].update(steps_done="x"), "steps_done must be a whole number"),
}


@pytest.mark.parametrize("wrong", DESCRIBED_WRONGLY)
def test_a_description_that_cannot_be(wrong, saved):
    edit, says = DESCRIBED_WRONGLY[wrong]
    reseal(saved[0], edit)
    refuses(saved[0], says)


# --- what does not fit the optimizer (more in test_snapshot.py) -----------------------------------


def test_another_model_or_rule_is_refused_with_the_checkpoints_name(saved):
    directory, folder = saved
    own = {"w": np.ones(3, "f4")}
    said = refuses(directory, "the saved state does not fit", ZeROOptimizer(own))
    assert said.startswith(f"{folder}: ")
    assert "'w' is not in the saved state; there is no 'bias' here" in said
    refuses(directory, r"the rule is SGD \(no state\) here", make(1, 2, rule=SGD(), groups=PLAIN))
    refuses(
        directory,
        "'frozen' is stored as float16 here, bfloat16 there",
        make(1, 2, precision="fp16"),
    )


PLAIN = ((tuple(name for name in SHAPES if name not in FROZEN), {}),)


def test_a_loss_scale_of_ones_own_goes_on(tmp_path):
    scale = DynamicLossScale(scale=64.0, hysteresis=1)
    opt = train(make(1, 2, precision="fp16", loss_scale=scale), 2, overflow=(1,))
    checkpoint.save(opt, tmp_path)
    other = make(1, 2, precision="fp16", loss_scale=DynamicLossScale(scale=8.0, hysteresis=1))
    checkpoint.load(other, tmp_path)
    assert other.loss_scale == 32.0


# --- several processes --------------------------------------------------------------------------


@by_layout
@pytest.mark.parametrize("hosted", [1, 2])
def test_processes_save_and_load_together(hosted, layout, tmp_path):
    def work(world):
        opt = train(make(3, 4, precision="bf16", world=world), 2)
        info = checkpoint.save(opt, tmp_path, layout=layout, extra={"seed": 1})
        again = checkpoint.save(opt, tmp_path, layout=layout, extra={"seed": 2})
        other = make(2, 4, precision="bf16", world=world, seed=5, **OTHER)
        assert checkpoint.load(other, tmp_path) == again
        return info, again, everything(other)

    results = in_threads(4, hosted, work)
    assert len({(str(info), str(again)) for info, again, _ in results}) == 1
    assert all(state == state_after(2) for *_, state in results)
    assert names_in(tmp_path) == ["latest", "step-00000002-2"]
    opt = make(1, 3, precision="bf16", seed=5)  # and one process reads what several wrote
    assert checkpoint.load(opt, tmp_path).extra == {"seed": 2}
    assert everything(opt) == state_after(2)


def test_a_process_that_cannot_write_stops_them_all(saved, monkeypatch):
    directory, _ = saved
    write = checkpoint._write_file

    def full(path, content):
        if path.name.startswith("rank-00002"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, content)

    monkeypatch.setattr(checkpoint, "_write_file", full)

    def work(world):
        opt = train(make(3, 4, precision="bf16", world=world), 3)
        with pytest.raises(UsageError) as caught:
            checkpoint.save(opt, directory)
        return str(caught.value)

    said = in_threads(4, 1, work)
    assert "No space left on device" in said[2]
    for rank in (0, 1, 3):
        assert "saving failed in the process of rank 2, which says why" in said[rank]
    assert names_in(directory) == ["latest", "step-00000002"]
    monkeypatch.undo()
    opt = make(1, 3, precision="bf16")
    checkpoint.load(opt, directory)
    assert everything(opt) == state_after(2)


def test_a_directory_that_is_not_shared_is_noticed(tmp_path, monkeypatch):
    write = checkpoint._write_file

    def elsewhere(path, content):
        if not path.name.startswith("rank-00003"):
            write(path, content)

    monkeypatch.setattr(checkpoint, "_write_file", elsewhere)

    def work(world):
        with pytest.raises(UsageError) as caught:
            checkpoint.save(make(3, 4, world=world), tmp_path)
        return str(caught.value)

    said = in_threads(4, 2, work)
    assert "rank-00003-of-00004.safetensors as another process wrote it; save to a dir" in said[0]
    assert "saving failed in the process of rank 0" in said[1]
    assert names_in(tmp_path) == []


def test_a_process_that_finds_a_bad_file_stops_them_all(saved):
    directory, folder = saved
    path = folder / "rank-00002-of-00004.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)

    def work(world):
        opt = make(3, 4, precision="bf16", world=world, seed=5)
        before = arrays(opt)
        with pytest.raises(UsageError) as caught:
            checkpoint.load(opt, directory)
        assert arrays(opt) == before
        return str(caught.value)

    said = in_threads(4, 1, work)
    assert "rank-00002-of-00004.safetensors was changed after it was saved" in said[2]
    for rank in (0, 1, 3):
        assert "loading failed in the process of rank 2" in said[rank]


@pytest.mark.parametrize(
    ("world_size", "files"),
    [(4, [[0], [1], [2], [3]]), (2, [[0, 1, 2], [1, 2, 3]]), (1, [[0, 1, 2, 3]])],
)
def test_a_process_reads_what_its_ranks_need_and_its_share_of_the_rest(
    world_size, files, saved, monkeypatch
):
    read, opened = checkpoint._read_tensors, {}

    def noted(path, *args):
        opened.setdefault(threading.get_ident(), []).append(int(path.name[5:10]))
        return read(path, *args)

    monkeypatch.setattr(checkpoint, "_read_tensors", noted)

    def work(world):
        checkpoint.load(make(3, world_size, precision="bf16", world=world), saved[0])
        return opened[threading.get_ident()]

    assert in_threads(world_size, 1, work) == files


def test_a_file_that_no_rank_needs_is_checked_all_the_same(tmp_path):
    own = {"five": np.arange(5, dtype="f4")}
    folder = checkpoint.save(ZeROOptimizer(own, stage=3, world_size=4), tmp_path).path
    with open(folder / "rank-00003-of-00004.safetensors", "ab") as opened:  # padding only
        opened.write(b" ")

    def work(world):
        with pytest.raises(UsageError) as caught:
            checkpoint.load(ZeROOptimizer(own, stage=3, world=world), tmp_path)
        return str(caught.value)

    said = in_threads(4, 1, work)
    assert "rank-00003-of-00004.safetensors has" in said[3]
    assert all("loading failed in the process of rank 3" in text for text in said[:3])


def test_processes_that_find_different_checkpoints_stop(tmp_path):
    for seed in range(2):
        checkpoint.save(make(3, 2, seed=seed), tmp_path / str(seed))

    def work(world):
        opt = make(3, 2, world=world, seed=5)
        before = arrays(opt)
        with pytest.raises(CheckpointError, match="processes found different checkpoints"):
            checkpoint.load(opt, tmp_path / str(world.ranks[0]))
        assert arrays(opt) == before

    in_threads(2, 1, work)
