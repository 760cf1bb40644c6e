"""Figures of real runs: what each stage held, and that all of them learned the same."""

import numpy as np

from zero_nb.show.figure import render
from zero_nb.show.style import (
    KINDS,
    STAGES,
    bytes_axis,
    format_bytes,
    label_bar,
    label_line,
    sheet,
    spread,
)
from zero_nb.train.ledger import HELD_KINDS

__all__ = ["drawn_digits", "loss_curves", "memory_over_world_size", "stage_bars"]


def stage_bars(comparison, up_to=3):
    """Draw the bytes each stage held beside the paper's formula.

    Parameters
    ----------
    comparison : Comparison
    up_to : int
        The last stage to show; the places of the others stay empty, to be predicted.

    Returns
    -------
    Figure
        Stacked bars of measured model states, a black line where formula and padding put the top
        of each, and a thin bar of activations, which ZeRO does not shard.

    Raises
    ------
    ValueError
        If `up_to` is no stage.
    """
    if up_to not in range(len(comparison.stages)):
        raise ValueError(f"up_to must be a stage from 0 to 3, got {up_to!r}")
    shown, hidden = comparison.stages[: up_to + 1], comparison.stages[up_to + 1 :]
    data = {
        f"stage {run.stage}": {
            **{f"held {kind} bytes": run.held_bytes[kind] for kind in HELD_KINDS},
            "formula and padding bytes": _formula_bytes(run),
            "activation bytes": run.largest_bytes["activation"],
        }
        for run in shown
    }
    first = shown[0].held_total
    with sheet(8.6, 4.6) as (fig, ax):
        ax.set_ylim(0, 1.12 * first)
        ax.set_xlim(-0.5, 4.15)
        for run in shown:
            _stack(ax, run, first)
            _activations(ax, run, first)
        for run in hidden:
            _empty_place(ax, run.stage, first)
        _label_activations(ax, shown, hidden, first)
        ax.set_xticks(range(4), [f"stage {run.stage}" for run in comparison.stages])
        ax.tick_params(axis="x", length=0)
        bytes_axis(ax.yaxis)
        ax.set_ylabel("bytes per rank")
        ax.set_title(
            f"Held by each of {comparison.world_size} ranks, measured "
            f"({comparison.numel:,} parameters, {comparison.precision})"
        )
        fig.supxlabel(_caption(shown), fontsize="small")
        return render(fig, _bars_alt(comparison.world_size, shown, hidden), data)


def _formula_bytes(run):
    """What the paper's formula and the padding put on one rank, in bytes."""
    return sum(run.formula_bytes.values()) + sum(run.padding_bytes.values())


def _caption(shown):
    """Name the black lines and the thin bars."""
    padded = any(sum(run.padding_bytes.values()) for run in shown)
    formula = "the paper's formula" + (" with padding" if padded else "")
    return f"black lines: {formula}; thin grey bars: activations, which no stage shards"


def _bars_alt(world_size, shown, hidden):
    """Say what the bars show, from their numbers."""
    first = shown[0]
    kinds = ", ".join(
        f"{KINDS[kind].label} {format_bytes(first.held_bytes[kind])}" for kind in HELD_KINDS
    )
    said = [
        f"Stacked bars of the model states that one of {world_size} ranks holds.",
        f"Stage 0 holds {format_bytes(first.held_total)}: {kinds}.",
    ]
    if shown[1:]:
        shares = ", ".join(
            f"stage {run.stage} {run.held_total / first.held_total:.1%}" for run in shown[1:]
        )
        said.append(f"Of these bytes there remain: {shares}.")
    if hidden:
        names = ", ".join(str(run.stage) for run in hidden)
        said.append(f"Empty places with question marks wait for the bars of stages {names}.")
    touching = all(run.held_total == _formula_bytes(run) for run in shown)
    said.append(
        "A black line, the paper's formula, "
        + ("lies on the top of each bar." if touching else "misses the top of some bar.")
    )
    sizes = {run.largest_bytes["activation"] for run in shown}
    bar = f"A thin bar beside each stage shows activations, {format_bytes(max(sizes))}"
    said.append(f"{bar} at every stage." if len(sizes) == 1 else f"{bar} at most.")
    return " ".join(said)


def _stack(ax, run, first):
    """Draw one stage's held bytes, its total above, and the formula's line."""
    base = 0
    for kind in HELD_KINDS:
        (bar,) = ax.bar(run.stage, run.held_bytes[kind], 0.68, bottom=base, **KINDS[kind].bar)
        label_bar(
            ax, bar, f"{KINDS[kind].label}\n{format_bytes(run.held_bytes[kind])}", smallest=0.085
        )
        base += run.held_bytes[kind]
    formula = _formula_bytes(run)
    ax.plot([run.stage - 0.37, run.stage + 0.37], [formula, formula], **_FORMULA)
    share = "" if run.stage == 0 else f"  ({run.held_total / first:.0%})"
    ax.text(
        run.stage,
        max(base, formula) + 0.02 * first,
        f"{format_bytes(base)}{share}",
        ha="center",
        va="bottom",
        fontweight="bold",
    )


_FORMULA = {"color": "#000000", "linewidth": 1.6, "solid_capstyle": "butt"}


def _empty_place(ax, stage, first):
    """Leave a dashed place for a bar that is to be predicted."""
    ax.bar(
        stage,
        first,
        0.68,
        facecolor="none",
        edgecolor="#888888",
        linewidth=1.0,
        linestyle=(0, (4, 4)),
    )
    ax.text(stage, first / 2, "?", ha="center", va="center", fontsize=28, color="#666666")


_ACTIVATIONS_AT = 0.42
_ACTIVATIONS_CUT = 1.06


def _activations(ax, run, first):
    """Draw the thin bar of activations, cut where it is taller than the picture."""
    height = min(run.largest_bytes["activation"], _ACTIVATIONS_CUT * first)
    ax.bar(run.stage + _ACTIVATIONS_AT, height, 0.08, **KINDS["activation"].bar)


def _label_activations(ax, shown, hidden, first):
    """Name the thin bars beside the last one shown."""
    sizes = {run.largest_bytes["activation"] for run in shown}
    cut = " (bar cut)" if max(sizes) > _ACTIVATIONS_CUT * first else ""
    words = ["activations", format_bytes(max(sizes)) + cut]
    if len(shown) > 1:
        words += ["the same at", "every stage"] if len(sizes) == 1 else ["at most"]
    # Between two bars there is room for a line that runs upwards.
    separator, rotation = (" ", 90) if hidden else ("\n", 0)
    ax.annotate(
        separator.join(words),
        (shown[-1].stage + _ACTIVATIONS_AT + 0.04, 0.0),
        xytext=(4, 4),
        textcoords="offset points",
        va="bottom",
        rotation=rotation,
        fontsize="small",
    )


def memory_over_world_size(grid):
    """Draw measured model states over world size and stage, and the fraction saved.

    Parameters
    ----------
    grid : MemoryGrid

    Returns
    -------
    Figure
        Left: bytes per rank, markers measured, lines the paper's formula. Right: the saved
        fraction, markers measured, lines ``zero_stage_memory_reduction``.
    """
    sizes = np.array(grid.world_sizes)
    with sheet(10.0, 4.4, ncols=2) as (fig, (left, right)):
        for ax in (left, right):
            ax.set_xscale("log", base=2)
            ax.set_xticks(sizes, [str(size) for size in sizes])
            ax.minorticks_off()
            ax.set_xlabel("world size (ranks)")
            ax.set_xlim(sizes[0] * 0.85, sizes[-1] * 1.9)
        _grid_lines(left, sizes, grid.formula_bytes, grid.held_bytes, 0.07 * grid.held_bytes.max())
        _grid_lines(right, sizes, grid.saved_fraction, grid.measured_fraction, 0.07)
        left.set_ylim(0, 1.08 * grid.held_bytes.max())
        right.set_ylim(-0.04, 1.02)
        bytes_axis(left.yaxis)
        right.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        left.set_title("Model states per rank")
        right.set_title("Saved against stage 0")
        fig.supxlabel(
            f"markers: measured by the ledger; lines: the paper's formula "
            f"({grid.numel:,} parameters, {grid.precision})",
            fontsize="small",
        )
        last = {s: grid.held_bytes[s, -1] / grid.held_bytes[0, -1] for s in (1, 2, 3)}
        exact = np.array_equal(grid.held_bytes, grid.formula_bytes)
        return render(
            fig,
            f"Two panels over world sizes {', '.join(map(str, sizes))}. Left: measured bytes of "
            f"model states per rank; with {sizes[-1]} ranks stage 1 holds {last[1]:.1%}, stage 2 "
            f"{last[2]:.1%} and stage 3 {last[3]:.1%} of stage 0. Right: the saved fraction. "
            + (
                "Every measured marker lies on the formula's line."
                if exact
                else "Not every measured marker lies on the formula's line."
            ),
            {
                "world sizes": sizes,
                **{f"stage {s} held bytes": grid.held_bytes[s] for s in range(4)},
                **{f"stage {s} formula bytes": grid.formula_bytes[s] for s in range(4)},
                **{f"stage {s} saved fraction": grid.saved_fraction[s] for s in range(4)},
            },
        )


def _grid_lines(ax, sizes, lines, markers, gap):
    """Draw the formula as lines and measurements as markers, labelled at the right end."""
    ends = spread([float(line[-1]) for line in lines], gap)
    for stage, look in enumerate(STAGES):
        ax.plot(sizes, lines[stage], **(look.line | {"linewidth": 1.8}))
        ax.plot(
            sizes,
            markers[stage],
            linestyle="none",
            marker="osD^"[stage],
            markersize=7,
            markerfacecolor=look.color,
            markeredgecolor="white",
            clip_on=False,
            zorder=3,
        )
        label_line(ax, sizes[-1] * 1.12, ends[stage], look.label, look.color)


def loss_curves(comparison):
    """Draw the loss of each stage over steps: four curves on one another.

    Parameters
    ----------
    comparison : Comparison

    Returns
    -------
    Figure
    """
    steps = np.arange(1, comparison.steps + 1)
    with sheet(8.0, 4.0) as (fig, ax):
        for run in comparison.stages:
            ax.plot(steps, run.losses, **STAGES[run.stage].line, label=STAGES[run.stage].label)
        ax.legend(loc="upper right", handlelength=3.5)
        ax.set_xlabel("step")
        ax.set_ylabel("loss (nats per token)")
        ax.set_xlim(1, max(2, comparison.steps))
        equal = len({run.losses for run in comparison.stages}) == 1
        ax.set_title(
            f"Loss of stages 0-3 on {comparison.world_size} ranks: "
            + ("the same numbers" if equal else "different numbers")
        )
        first = comparison.stages[0].losses
        return render(
            fig,
            f"Training loss over {comparison.steps} steps for stages 0 to 3: it falls from "
            f"{first[0]:.1f} to {first[-1]:.1f} nats per token, and the four curves lie "
            + ("exactly on one another." if equal else "apart."),
            {"step": steps} | {f"stage {r.stage} loss": r.losses for r in comparison.stages},
        )


def drawn_digits(drawing, recognition, per_class=6):
    """Show digits that a model drew, one column a class.

    Parameters
    ----------
    drawing : Drawing
    recognition : Recognition
    per_class : int
        How many of each class to show, the first ones drawn.

    Returns
    -------
    Figure
    """
    side = drawing.images.shape[1]
    classes, counts = np.unique(drawing.labels, return_counts=True)
    rows = min(per_class, int(counts.min()))
    canvas = np.zeros((rows * (side + 1) - 1, len(classes) * (side + 1) - 1))
    for column, digit in enumerate(classes):
        for row, image in enumerate(drawing.images[drawing.labels == digit][:rows]):
            y, x = row * (side + 1), column * (side + 1)
            canvas[y : y + side, x : x + side] = image
    with sheet(8.0, 8.0 * rows / len(classes) + 0.7) as (fig, ax):
        ax.imshow(canvas, cmap="gray_r", interpolation="nearest")
        ax.set_xticks(np.arange(len(classes)) * (side + 1) + (side - 1) / 2, classes)
        ax.xaxis.tick_top()
        ax.tick_params(length=0)
        ax.set_yticks([])
        ax.grid(False)
        for spine in ax.spines.values():
            spine.set_visible(False)
        ax.set_xlabel(f"Nearest neighbour: {recognition}", labelpad=8)
        return render(
            fig,
            f"Digits drawn by the trained GPT, {rows} of each class from "
            f"{classes[0]} to {classes[-1]}. {recognition}.",
            {
                "recognised": recognition.correct,
                "drawn": recognition.total,
                "interval low": recognition.low,
                "interval high": recognition.high,
            },
        )
