"""The poster says what was counted in the run that its own code makes."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from zero_nb.compare import compare_stages, digits_task
from zero_nb.show import poster as module
from zero_nb.show.poster import POSTER_STEPS, count_stages, poster
from zero_nb.theory.memory import model_state_bytes
from zero_nb.theory.traffic import elements_per_step
from zero_nb.train.model import GPT, GPTConfig

FIGURES = Path(__file__).resolve().parent.parent / "figures"


def small_task():
    """Divides by 3 in no unit, so that shards are padded."""
    sizes = {"vocab_size": 27, "seq_len": 16, "width": 10, "heads": 2, "blocks": 1}
    return replace(digits_task("lesson"), model=GPT(GPTConfig(**sizes)))


@pytest.fixture(scope="module")
def pages():
    return count_stages()


def test_it_counts_what_a_comparison_of_the_stages_counts():
    """Another way through the library, with a model that is padded."""
    task = small_task()
    comparison = compare_stages(3, POSTER_STEPS, task=task, precision="bf16")
    for page, run in zip(count_stages(3, task), comparison.stages, strict=True):
        assert page.held_bytes == run.held_bytes
        assert page.elements_sent == run.elements_sent


def test_it_shows_the_papers_numbers_of_bytes_and_elements(pages):
    numel = digits_task("lesson").model.numel
    for page in pages:
        formula = model_state_bytes(page.stage, 4, numel, "bf16").as_dict()
        assert page.held_bytes == formula  # nothing is padded at W = 4
        assert page.elements_sent == elements_per_step(page.stage, 4, numel)
    assert [sum(page.held_bytes.values()) / numel for page in pages] == [16, 7, 5.5, 4]


def test_each_stage_sends_its_own_collectives(pages):
    names = [[(collective, what) for collective, what, _ in page.sent] for page in pages]
    assert names == [
        [("all-reduce", "grad")],
        [("reduce-scatter", "grad"), ("all-gather", "param")],
        [("reduce-scatter", "grad"), ("all-gather", "param")],
        [("all-gather", "param"), ("reduce-scatter", "grad")],
    ]


def test_thinning_out_keeps_the_peak_and_the_phases(pages):
    for page in pages:
        thinned = module._fullest_of_each_few(page.moments)
        assert max(sum(total.values()) for _, total in thinned) == page.peak_bytes
        assert {phase for phase, _ in thinned} == {phase for phase, _ in page.moments}
        assert len(thinned) < len(page.moments)
    peaks = [page.peak_bytes for page in pages]
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == 4


def test_what_is_written_on_it_is_what_was_counted(monkeypatch, pages):
    """Change what is counted, and words, numbers and picture change with it."""
    figure = poster()
    numel = digits_task("lesson").model.numel
    for page in pages:
        numbers = figure.data[f"stage {page.stage}"]
        assert numbers["held optim bytes"] == page.held_bytes["optim"]
        assert numbers["peak bytes"] == page.peak_bytes
        assert numbers["sent in Ψ(W-1)/W"] == page.elements_sent / (numel * 3 / 4)
    assert "stage 2 holds 2.22 MB a rank (5.5 bytes a parameter), sends 2 times" in figure.alt
    for text in ("910,080 elements", "= 5.5 bytes a parameter", "rank 3", "peak 2.51 MB"):
        assert text in figure.svg
    other = [replace(page, held_bytes=dict.fromkeys(page.held_bytes, 7)) for page in pages]
    monkeypatch.setattr(module, "count_stages", lambda *_: tuple(other))
    changed = poster()
    assert changed.data["stage 0"]["held param bytes"] == 7
    assert "21 B a rank" in changed.svg
    assert "2.22 MB a rank" not in changed.svg


def test_it_is_not_drawn_if_the_stages_differ(monkeypatch):
    """It says that all stages end with the same weights: so that has to be seen first."""
    engine = module.Engine

    def other_rule(*arguments, **options):
        if options["stage"] == 2:
            options["rule"] = module.get_rule("adamw", lr=2e-3)
        return engine(*arguments, **options)

    monkeypatch.setattr(module, "Engine", other_rule)
    with pytest.raises(RuntimeError, match="ended with different weights"):
        count_stages(2, small_task())


def test_the_stored_poster_has_the_numbers_of_a_run(pages):
    stored = json.loads((FIGURES / "manifest.json").read_text(encoding="utf-8"))["poster"]
    for page in pages:
        numbers = stored["data"][f"stage {page.stage}"]
        assert numbers["peak bytes"] == page.peak_bytes
        for kind, held in page.held_bytes.items():
            assert numbers[f"held {kind} bytes"] == held
    svg = (FIGURES / "poster.svg").read_text(encoding="utf-8")
    assert re.search(r"<title|<desc|aria-label", svg)
    assert "910,080 elements" in svg
