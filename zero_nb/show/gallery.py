"""All figures of the project, each from a run made for it, and the main job that makes them."""

from zero_nb.compare import compare_stages, digits_task, measure_memory, train_stage
from zero_nb.show.figure import write_manifest
from zero_nb.show.poster import poster
from zero_nb.show.theory_figures import THEORY_FIGURES
from zero_nb.show.timeline_figures import TIMELINE_FIGURES
from zero_nb.show.training_figures import (
    drawn_digits,
    loss_curves,
    memory_over_world_size,
    stage_bars,
)
from zero_nb.train.presets import PRESETS
from zero_nb.train.sampling import draw_digits

__all__ = ["STEPS", "draw_all", "learn_to_draw", "main_job"]

COMPARED_STEPS = 30
WORLD_SIZES = (1, 2, 4, 8, 16)
DRAWN_PER_CLASS = 50
STEPS = 4 * COMPARED_STEPS + 4 * len(WORLD_SIZES) + PRESETS["digits"].training.steps
"""Training steps behind all figures, for a progress bar."""


def learn_to_draw(*, world_size=4, steps=None, precision="bf16", task=None, seed=0, progress=None):
    """Train at stage 3 until the GPT draws digits, and let a classifier look at them.

    Parameters
    ----------
    world_size, steps, precision, task, seed, progress
        See `zero_nb.compare.train_stage`; the preset's steps by default.

    Returns
    -------
    run : StageRun
    drawing : Drawing
        50 digits of each class.
    recognition : Recognition
        By nearest neighbour among the training digits.
    """
    task = digits_task() if task is None else task
    run, engine = train_stage(
        3,
        world_size=world_size,
        steps=steps or task.training.steps,
        precision=precision,
        task=task,
        seed=seed,
        progress=progress,
    )
    with engine.optimizer.gathered_parameters() as params:
        drawing = draw_digits(
            task.model,
            params,
            task.dataset,
            DRAWN_PER_CLASS,
            seed=seed,
            temperature=task.training.temperature,
        )
    return run, drawing, task.dataset.recognise(drawing.images, drawing.labels)


def draw_all(out, *, progress=None):
    """Measure, draw and write every figure, and the manifest of the numbers behind them.

    Parameters
    ----------
    out : path-like
        Folder; made if missing.
    progress : callable, optional
        Called once a training step, `STEPS` times.

    Returns
    -------
    list of str
        Names of the figures.
    """
    comparison = compare_stages(4, COMPARED_STEPS, progress=progress)
    _, drawing, recognition = learn_to_draw(progress=progress)
    return _write(out, comparison, drawing, recognition, progress)


def _write(out, comparison, drawing, recognition, progress):
    """Write the figures of a comparison and a drawing, and the grid measured here."""
    figures = {
        "stage_bars": stage_bars(comparison),
        "loss_curves": loss_curves(comparison),
        "memory_over_world_size": memory_over_world_size(
            measure_memory(WORLD_SIZES, progress=progress)
        ),
        "drawn_digits": drawn_digits(drawing, recognition),
        "poster": poster(),
    } | {name: draw() for name, draw in (THEORY_FIGURES | TIMELINE_FIGURES).items()}
    for name, figure in figures.items():
        figure.save(out, name)
    write_manifest(out, figures)
    return list(figures)


def main_job(out, *, say, show, progress):
    """Compare the stages, learn to draw, write the figures; what ``make run`` does.

    Parameters
    ----------
    out : path-like
        Folder for the figures.
    say : callable
        Takes a line of text.
    show : callable
        Takes the `Comparison`.
    progress : callable
        ``progress(total, text)`` is a context manager that yields a tick.
    """
    with progress(4 * COMPARED_STEPS, "1/3 stages 0-3 on 4 ranks") as tick:
        comparison = compare_stages(4, COMPARED_STEPS, progress=tick)
    show(comparison)
    steps = PRESETS["digits"].training.steps
    say(f"\nTraining at stage 3 on 4 ranks for {steps} steps, until the GPT draws digits ...")
    with progress(steps, "2/3 learning to draw") as tick:
        run, drawing, recognition = learn_to_draw(progress=tick)
    say(
        f"loss {run.losses[0]:.3f} -> {run.losses[-1]:.3f}, held out {run.held_out_loss:.3f} "
        f"(unigram entropy {digits_task().dataset.unigram_entropy:.3f})"
    )
    say(f"drawn digits, by nearest neighbour: {recognition}")
    with progress(4 * len(WORLD_SIZES), "3/3 memory over world sizes") as tick:
        names = _write(out, comparison, drawing, recognition, tick)
    say(f"figures: {out}/ ({', '.join(f'{name}.png' for name in names)})")
