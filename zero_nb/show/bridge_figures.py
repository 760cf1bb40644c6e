"""Figures of notebook 12: who owns what in other libraries."""

import math

import numpy as np

from zero_nb.show.figure import render
from zero_nb.show.style import INK, rank_look, sheet, text_color

__all__ = ["ownership_rows"]


def ownership_rows(cuts, units, names):
    """Draw the same model once for each rule of cutting: which rank owns which elements.

    Parameters
    ----------
    cuts : dict of str to Cut
        By the label of a row, see `zero_nb.theory.layouts.cut`.
    units : sequence of sequence of tuple of int
        Shapes of the model's tensors.
    names : sequence of str
        A name for each tensor; only wide ones are written.

    Returns
    -------
    Figure
        A row for each rule, elements from left to right, one colour and hatch for each rank, a
        line at each border of a tensor. On the right is the largest rank's share.
    """
    numels = [math.prod(shape) for unit in units for shape in unit]
    borders = [0, *np.cumsum(numels).tolist()]
    total = borders[-1]
    shares = {label: 100 * max(each.real) / total for label, each in cuts.items()}
    with sheet(9.4, 0.62 * len(cuts) + 1.0) as (fig, ax):
        ax.set(xlim=(-0.27 * total, 1.13 * total), ylim=(-len(cuts) - 0.55, 0.75))
        ax.axis("off")
        for place, (label, each) in enumerate(cuts.items()):
            y = -place - 0.86
            for rank, ranges in enumerate(each.owned):
                _draw_rank(ax, y, rank, ranges, total)
            ax.text(-0.012 * total, y + 0.36, label, ha="right", va="center", fontsize="small")
            ax.text(
                1.012 * total, y + 0.36, f"{shares[label]:.0f} %", va="center", fontsize="small"
            )
        for border in borders:
            ax.plot([border] * 2, [-len(cuts) - 0.2, 0.08], color=INK, linewidth=0.9)
        for name, start, stop in zip(names, borders, borders[1:], strict=False):
            if stop - start > 0.04 * total:
                ax.text((start + stop) / 2, 0.2, name, ha="center", va="bottom", fontsize="small")
        ax.text(1.012 * total, 0.2, "largest", va="bottom", fontsize="small")
        ax.text(
            total / 2, -len(cuts) - 0.5, f"{total:,} elements, tensor after tensor; r = rank",
            ha="center", fontsize="small",
        )  # fmt: skip
        return render(fig, _alt(cuts, shares, total), _table(cuts, shares))


def _draw_rank(ax, y, rank, ranges, total):
    """Fill what one rank owns, and write its name where there is room."""
    from matplotlib.patches import Rectangle

    look = rank_look(rank)
    for start, stop in ranges:
        ax.add_patch(Rectangle((start, y), stop - start, 0.72, **look.bar))
    wide = max(ranges, key=lambda piece: piece[1] - piece[0], default=(0, 0))
    if wide[1] - wide[0] > 0.035 * total:
        ax.text(
            sum(wide) / 2, y + 0.36, f"r{rank}", ha="center", va="center", fontsize="small",
            color=text_color(look.color),
            bbox={"boxstyle": "round,pad=0.12", "facecolor": look.color, "edgecolor": "none"},
        )  # fmt: skip


def _alt(cuts, shares, total):
    """The picture in words."""
    told = ", ".join(f"{label}: {share:.0f} %" for label, share in shares.items())
    world_size = len(next(iter(cuts.values())).owned)
    return (
        f"The same {total:,} elements cut for {world_size} ranks by {len(cuts)} rules, a strip "
        f"for each. Share of the rank with most: {told}."
    ).replace("\n", " ")


def _table(cuts, shares):
    """The numbers behind the picture."""
    flat = {label.replace("\n", " "): each for label, each in cuts.items()}
    ranks = range(len(next(iter(cuts.values())).owned))
    return {
        "rule": list(flat),
        **{f"rank {rank}": [each.real[rank] for each in flat.values()] for rank in ranks},
        "largest in %": [round(share, 1) for share in shares.values()],
    }
