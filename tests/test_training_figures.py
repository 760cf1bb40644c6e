"""The figures of real runs: the numbers behind each, and the sentence computed from them."""

import json
from dataclasses import replace

import numpy as np
import pytest

from zero_nb.compare import compare_stages, digits_task, measure_memory
from zero_nb.config import ZeROStage
from zero_nb.show import gallery
from zero_nb.show.concept_figures import data_parallel
from zero_nb.show.style import format_bytes
from zero_nb.show.training_figures import (
    drawn_digits,
    loss_curves,
    memory_over_world_size,
    stage_bars,
)
from zero_nb.train.data import Recognition
from zero_nb.train.model import GPT, GPTConfig
from zero_nb.train.sampling import Drawing

KINDS = ("param", "grad", "optim")


def small_task(**config):
    """The lesson's data with a model that does not divide by 3: its shards are padded."""
    task = digits_task("lesson")
    sizes = {"vocab_size": 27, "seq_len": 16, "width": 10, "heads": 2, "blocks": 1}
    return replace(task, model=GPT(GPTConfig(**(sizes | config))))


@pytest.fixture(scope="module")
def comparison():
    """Two steps on three ranks: held bytes with padding."""
    return compare_stages(3, 2, task=small_task())


@pytest.fixture(scope="module")
def grid():
    return measure_memory((1, 2, 3), task=small_task())


def changed(comparison, stage, **fields):
    """The comparison with one stage's figures changed."""
    runs = list(comparison.stages)
    runs[stage] = replace(runs[stage], **fields)
    return replace(comparison, stages=tuple(runs))


# ------------------------------------------------------------------------------------ stage bars


def test_behind_the_stage_bars_are_the_comparisons_numbers(comparison):
    assert any(sum(run.padding_bytes.values()) for run in comparison.stages)  # the test can fail
    data = stage_bars(comparison).data
    assert list(data) == [f"stage {stage}" for stage in range(4)]
    for run in comparison.stages:
        numbers = data[f"stage {run.stage}"]
        assert [numbers[f"held {kind} bytes"] for kind in KINDS] == [
            run.held_bytes[kind] for kind in KINDS
        ]
        assert numbers["formula and padding bytes"] == sum(run.held_bytes.values())
        assert numbers["activation bytes"] == run.largest_bytes["activation"] > 0


def test_the_bars_sentence_is_computed(comparison):
    first, *others = comparison.stages
    alt = stage_bars(comparison).alt
    assert f"one of {comparison.world_size} ranks" in alt
    assert f"Stage 0 holds {format_bytes(first.held_total)}: parameters " in alt
    for run in others:
        assert f"stage {run.stage} {run.held_total / first.held_total:.1%}" in alt
    assert "lies on the top of each bar" in alt
    assert format_bytes(first.largest_bytes["activation"]) + " at every stage" in alt


def test_the_bars_sentence_does_not_claim_what_is_not_so(comparison):
    run = comparison.stages[2]
    more = {kind: held + 1 for kind, held in run.held_bytes.items()}
    assert "misses the top of some bar" in stage_bars(changed(comparison, 2, held_bytes=more)).alt
    alt = stage_bars(changed(comparison, 3, largest_bytes={"activation": 1})).alt
    assert "at every stage" not in alt
    assert "at most." in alt


@pytest.mark.parametrize("up_to", range(4))
def test_bars_that_are_to_be_predicted_are_nowhere(comparison, up_to):
    figure = stage_bars(comparison, up_to=up_to)
    assert list(figure.data) == [f"stage {stage}" for stage in range(up_to + 1)]
    assert ("question marks" in figure.alt) == (up_to < 3)
    for run in comparison.stages[up_to + 1 :]:
        assert f"{run.held_total / comparison.stages[0].held_total:.1%}" not in figure.alt


@pytest.mark.parametrize("up_to", [-1, 4, None, "1"])
def test_only_stages_can_be_shown(comparison, up_to):
    with pytest.raises(ValueError, match="up_to must be a stage from 0 to 3"):
        stage_bars(comparison, up_to=up_to)


@pytest.mark.parametrize("up_to", [0, 3])
@pytest.mark.parametrize("activation_share", [0.05, 0.9, 40.0])
def test_no_label_of_the_bars_lies_on_another(comparison, monkeypatch, up_to, activation_share):
    held = comparison.stages[0].held_total
    for stage in range(4):
        sizes = {"activation": int(activation_share * held)}
        comparison = changed(comparison, stage, largest_bytes=sizes)
    boxes = texts_drawn(monkeypatch, lambda: stage_bars(comparison, up_to=up_to))
    assert len(boxes) > 10
    for name, box in boxes:
        for other, place in boxes:
            assert name is other or not box.overlaps(place), (name.get_text(), other.get_text())


def texts_drawn(monkeypatch, draw):
    """Each text of a figure with its place, as it was when it was rendered."""
    from matplotlib.text import Text

    import zero_nb.show.training_figures as module

    found = []

    def render(fig, *arguments):
        fig.canvas.draw()
        found.extend(
            (text, text.get_window_extent())
            for text in fig.findobj(Text)
            if text.get_visible() and text.get_text().strip()
        )

    monkeypatch.setattr(module, "render", render)
    draw()
    return found


# ------------------------------------------------------------------------- memory over world size


def test_behind_the_memory_figure_is_the_grid(grid):
    data = memory_over_world_size(grid).data
    assert data["world sizes"] == grid.world_sizes
    for stage in range(4):
        assert data[f"stage {stage} held bytes"] == tuple(grid.held_bytes[stage])
        assert data[f"stage {stage} formula bytes"] == tuple(grid.formula_bytes[stage])
        assert data[f"stage {stage} saved fraction"] == tuple(grid.saved_fraction[stage])


def test_the_memory_figures_sentence_is_computed(grid):
    assert not np.array_equal(grid.held_bytes, grid.formula_bytes)  # three ranks: padded
    alt = memory_over_world_size(grid).alt
    assert "Not every measured marker lies on the formula's line." in alt
    for stage in (1, 2, 3):
        assert f"{grid.held_bytes[stage, -1] / grid.held_bytes[0, -1]:.1%}" in alt
    exact = replace(grid, held_bytes=grid.formula_bytes)
    assert "Every measured marker lies on" in memory_over_world_size(exact).alt


# ---------------------------------------------------------------------------- losses and drawings


def test_behind_the_loss_curves_are_the_losses(comparison):
    figure = loss_curves(comparison)
    assert figure.data["step"] == (1, 2)
    for run in comparison.stages:
        assert figure.data[f"stage {run.stage} loss"] == run.losses
    first, last = comparison.stages[0].losses
    assert f"from {first:.1f} to {last:.1f} nats" in figure.alt
    assert "exactly on one another" in figure.alt


def test_curves_that_part_are_said_to_part(comparison):
    losses = comparison.stages[0].losses
    parted = changed(comparison, 3, losses=(losses[0], np.nextafter(losses[1], 0)))
    assert "the four curves lie apart" in loss_curves(parted).alt


def test_behind_the_drawn_digits_is_what_was_recognised():
    images = np.arange(6 * 64).reshape(6, 8, 8) % 17
    recognition = Recognition(4, 6, 0.25, 0.875)
    figure = drawn_digits(Drawing(images, np.array([3, 3, 3, 7, 7, 7])), recognition, per_class=2)
    assert dict(figure.data) == {
        "recognised": 4,
        "drawn": 6,
        "interval low": 0.25,
        "interval high": 0.875,
    }
    assert "2 of each class from 3 to 7" in figure.alt
    assert str(recognition) in figure.alt


# ----------------------------------------------------------------------------------- data parallel


def test_the_picture_of_data_parallelism_says_who_has_what():
    figure = data_parallel(np.zeros((3, 8, 8)), np.array([5, 0, 5]))
    assert figure.data["rank"] == (0, 1, 2)
    assert figure.data["digit of the sample"] == (5, 0, 5)
    assert "on 3 ranks" in figure.alt
    assert "digits: 5, 0, 5" in figure.alt


@pytest.mark.parametrize(
    ("images", "labels"), [((3, 8, 8), 2), ((0, 8, 8), 0), ((8, 8), 8), ((2, 8, 8), (2, 1))]
)
def test_data_parallelism_needs_a_sample_for_each_rank(images, labels):
    with pytest.raises(ValueError, match="images must be"):
        data_parallel(np.zeros(images), np.zeros(labels, int))


# -------------------------------------------------------------------------------------- the gallery


@pytest.fixture
def quick(monkeypatch):
    """The gallery's job, all of it, with a model that learns nothing in two steps."""
    task = small_task(seq_len=64)
    task = replace(
        task, dataset=digits_task().dataset, training=replace(task.training, steps=2, batch=4)
    )
    seen = []

    def compared(*arguments, **options):
        seen.append(compare_stages(*arguments, task=task, **options))
        return seen[-1]

    def measured(*arguments, **options):
        seen.append(measure_memory(*arguments, task=task, **options))
        return seen[-1]

    monkeypatch.setattr(gallery, "compare_stages", compared)
    monkeypatch.setattr(gallery, "measure_memory", measured)
    monkeypatch.setattr(gallery, "digits_task", lambda: task)
    monkeypatch.setattr(gallery, "COMPARED_STEPS", 1)
    monkeypatch.setattr(gallery, "WORLD_SIZES", (1, 2))
    monkeypatch.setattr(gallery, "DRAWN_PER_CLASS", 1)
    return seen


def test_the_gallery_writes_every_figure_and_a_manifest_of_its_numbers(quick, tmp_path):
    ticks = []
    names = gallery.draw_all(tmp_path / "new" / "folder", progress=ticks.append)
    comparison, grid = quick
    assert len(ticks) == 4 * 1 + 4 * 2 + 2
    folder = tmp_path / "new" / "folder"
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        ["manifest.json", *(f"{name}.{ending}" for name in names for ending in ("png", "svg"))]
    )
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    assert sorted(manifest) == sorted(names)
    for run in comparison.stages:
        numbers = manifest["stage_bars"]["data"][f"stage {run.stage}"]
        assert [numbers[f"held {kind} bytes"] for kind in KINDS] == list(run.held_bytes.values())
        losses = manifest["loss_curves"]["data"][f"stage {run.stage} loss"]
        assert losses == list(run.losses)
    for stage in ZeROStage:
        held = manifest["memory_over_world_size"]["data"][f"stage {int(stage)} held bytes"]
        assert held == grid.held_bytes[stage].tolist()
    assert manifest["drawn_digits"]["data"]["drawn"] == 10
    for name in names:
        assert (folder / manifest[name]["png"]).read_bytes().startswith(b"\x89PNG")
        assert manifest[name]["alt"]


def test_the_progress_bar_of_all_figures_has_as_many_steps_as_are_taken():
    compared, grid = 4 * gallery.COMPARED_STEPS, 4 * len(gallery.WORLD_SIZES)
    assert compared + grid + digits_task().training.steps == gallery.STEPS
