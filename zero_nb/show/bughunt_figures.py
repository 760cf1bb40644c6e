"""Figures of notebook 09: loss curves of faulty trainers, and which check catches which of them."""

import math

from zero_nb.show.figure import render
from zero_nb.show.style import INK, PAPER, PETROFF10, Look, sheet, text_color

__all__ = ["catch_matrix", "caught_over_world_size", "faulty_losses"]

_NAMED = Look("caught by the check made for it", PETROFF10[0])
_TOO = Look("caught by another check, too", PETROFF10[9], "--")
_MISSED = Look("not caught", "#f4f4f4")


def _cell(ax, x, y, look, words, **more):
    """Draw one cell of a table, its words on a patch of its own colour."""
    from matplotlib.patches import Rectangle

    ax.add_patch(Rectangle((x + 0.03, y + 0.05), 0.94, 0.9, **look.bar))
    ax.text(
        x + 0.5, y + 0.5, words, ha="center", va="center", color=text_color(look.color),
        bbox={"boxstyle": "round,pad=0.12", "facecolor": look.color, "edgecolor": "none"}, **more,
    )  # fmt: skip


def _legend(fig, looks):
    """Name the kinds of cells above the table."""
    from matplotlib.patches import Patch

    handles = [
        Patch(label=look.label, **look.bar | {"edgecolor": "#888888" if look is _MISSED else PAPER})
        for look in looks
    ]
    fig.legend(handles=handles, loc="outside upper left", ncols=len(looks), fontsize="small")


def _short(moment):
    """A moment in the room of a cell: ``after step 2`` becomes ``after 2``."""
    return moment.replace("when ", "").replace("step ", "")


def catch_matrix(caught, invariants, named):
    """Draw which invariant catches which faulty trainer, and when.

    Parameters
    ----------
    caught : mapping of str to mapping of str to str
        By faulty trainer, then by invariant: the moment, such as ``"after step 2"``. An invariant
        that caught nothing is left out.
    invariants : sequence of str
        The columns.
    named : mapping of str to str
        By faulty trainer: the invariant that was made for it.

    Returns
    -------
    Figure
        A row for each trainer, a column for each invariant. A catch has its moment written in it;
        a dot is none. Numbers at the right and below count the catches.
    """
    trainers, columns = list(caught), list(invariants)
    counts = {name: sum(name in row for row in caught.values()) for name in columns}
    with sheet(9.6, 0.42 * len(trainers) + 2.3) as (fig, ax):
        ax.set(xlim=(-2.3, len(columns) + 0.9), ylim=(-1.0, len(trainers) + 2.05))
        ax.axis("off")
        for y, trainer in enumerate(reversed(trainers)):
            ax.text(-0.1, y + 0.5, trainer, ha="right", va="center")
            for x, name in enumerate(columns):
                moment = caught[trainer].get(name)
                if moment is None:
                    _cell(ax, x, y, _MISSED, "·")
                elif named[trainer] == name:
                    _cell(ax, x, y, _NAMED, _short(moment), fontsize=8, fontweight="bold")
                else:
                    _cell(ax, x, y, _TOO, _short(moment), fontsize=8)
            ax.text(len(columns) + 0.45, y + 0.5, len(caught[trainer]), ha="center", va="center")
        for x, name in enumerate(columns):
            ax.text(
                x + 0.35, len(trainers) + 0.12, name, rotation=38, ha="left", va="bottom",
                rotation_mode="anchor",
            )  # fmt: skip
            ax.text(x + 0.5, -0.45, counts[name], ha="center", va="center")
        ax.text(-0.1, -0.45, f"catches of {len(trainers)}", ha="right", va="center")
        ax.text(len(columns) + 0.45, len(trainers) + 0.2, "checks", ha="center", va="bottom")
        _legend(fig, (_NAMED, _TOO, _MISSED))
        rows = {
            trainer: {name: caught[trainer].get(name, "not caught") for name in columns}
            for trainer in trainers
        }
        return render(fig, _matrix_alt(caught, counts, named), rows)


def _matrix_alt(caught, counts, named):
    """Say who is caught by what, and how many the best check catches."""
    said = []
    for trainer, row in caught.items():
        by = ", ".join(f"{name} ({moment})" for name, moment in row.items())
        said.append(f"{trainer} by {by or 'nothing'}")
    most = max(counts.values())
    best = [name for name, count in counts.items() if count == most]
    own = sum(named[trainer] in row for trainer, row in caught.items())
    return (
        f"A table of {len(caught)} faulty trainers and {len(counts)} checks. Caught: "
        f"{'; '.join(said)}. {own} of {len(caught)} are caught by the check made for them; no "
        f"check catches more than {most} ({', '.join(best)})."
    )


def faulty_losses(right, faulty):
    """Draw the loss of each faulty trainer beside that of the right one.

    Parameters
    ----------
    right : sequence of float
        Loss at each step.
    faulty : mapping of str to sequence of float
        The same of each faulty trainer, at most nine.

    Returns
    -------
    Figure
        A small panel for each; the right trainer is the wide grey line in all of them.
    """
    with sheet(9.4, 6.0, nrows=3, ncols=3, sharex=True, sharey=True) as (fig, axes):
        steps = range(1, len(right) + 1)
        falls = {}
        for ax, (name, losses) in zip(axes.flat, faulty.items(), strict=False):
            ax.plot(steps, right, color="#b5b9bf", linewidth=5)
            ax.plot(steps, losses, color=PETROFF10[2], linewidth=1.7)
            falls[name] = _fall(losses)
            ax.set_title(name, fontsize="medium")
            ax.text(
                0.97, 0.92, f"falls by over {falls[name]} %", ha="right", va="top",
                transform=ax.transAxes, fontsize="small",
            )  # fmt: skip
        first = axes.flat[0]
        first.text(
            0.05, 0.16, "wide: the right trainer\nthin: the faulty one", ha="left", va="center",
            transform=first.transAxes, fontsize="small",
        )  # fmt: skip
        for ax in axes.flat[len(faulty) :]:
            ax.axis("off")
        fig.supxlabel("step", fontsize="medium", color=INK)
        fig.supylabel("loss", fontsize="medium", color=INK)
        said = ", ".join(f"{name} {fall} %" for name, fall in falls.items())
        return render(
            fig,
            f"Loss over {len(right)} steps, a panel for each of {len(faulty)} faulty trainers "
            f"beside the right one. The right one falls by over {_fall(right)} %, the "
            f"faulty ones by over: {said}.",
            {"right": [round(loss, 2) for loss in right]}
            | {name: [round(loss, 2) for loss in losses] for name, losses in faulty.items()},
        )


def _fall(losses):
    """By how many percent a loss falls, first value to mean of the last three, in whole fives.

    Rounded down: training lets last digits grow, and these numbers are compared.
    """
    fall = 1 - sum(losses[-3:]) / 3 / losses[0]
    return math.floor(round(20 * fall, 9)) * 5


def caught_over_world_size(caught):
    """Draw at which numbers of ranks each faulty trainer is caught at all.

    Parameters
    ----------
    caught : mapping of int to mapping of str to int
        By world size, then by trainer: how many checks catch it.

    Returns
    -------
    Figure
        A row for each trainer, a column for each world size; 0 is written ``hidden``.
    """
    sizes = list(caught)
    trainers = list(caught[sizes[0]])
    with sheet(6.0, 0.4 * len(trainers) + 0.9) as (fig, ax):
        ax.set(xlim=(-1.6, len(sizes)), ylim=(0, len(trainers) + 0.9))
        ax.axis("off")
        for y, trainer in enumerate(reversed(trainers)):
            ax.text(-0.1, y + 0.5, trainer, ha="right", va="center")
            for x, size in enumerate(sizes):
                count = caught[size][trainer]
                if count:
                    words = "1 check" if count == 1 else f"{count} checks"
                    _cell(ax, x, y, _NAMED, words, fontsize="small")
                else:
                    _cell(ax, x, y, _MISSED, "hidden", fontsize="small")
        for x, size in enumerate(sizes):
            ax.text(x + 0.5, len(trainers) + 0.4, f"W = {size}", ha="center", va="center")
        hidden = [
            f"W = {size}: {', '.join(t for t in trainers if not caught[size][t]) or 'none'}"
            for size in sizes
        ]
        return render(
            fig,
            f"A table of {len(trainers)} faulty trainers at {len(sizes)} world sizes W, and how "
            f"many checks catch each. Hidden from all checks at {'; '.join(hidden)}.",
            {f"W = {size}": dict(caught[size]) for size in sizes},
        )
