"""Pictures of an idea, drawn before anything is measured."""

import numpy as np

from zero_nb.show.figure import render
from zero_nb.show.style import INK, KINDS, label_bar, sheet

__all__ = ["data_parallel"]

_BOX_WIDTH, _BOX_HEIGHT, _COLUMN, _LEFT = 1.5, 0.5, 1.72, 1.75
_ROWS = {"samples": 3.72, "model": 2.84, "gradient": 2.06, "average": 1.28, "update": 0.5}
_WORDS = {
    "samples": "different: samples",
    "model": "the same: parameters",
    "gradient": "different: gradients",
    "average": "the same: gradient",
    "update": "the same: optimizer states",
}


def data_parallel(images, labels):
    """Draw one step of data parallelism: what differs between ranks, and what is the same.

    Parameters
    ----------
    images : ndarray, shape (W, side, side)
        A sample for each rank, grey levels.
    labels : ndarray of int, shape (W,)
        Their classes.

    Returns
    -------
    Figure
        One column a rank: its sample, its replica of the model, its gradient; then the average
        of all gradients, and the update that every rank makes.

    Raises
    ------
    ValueError
        If there are no images, or another number of labels.
    """
    images, labels = np.asarray(images), np.asarray(labels)
    if images.ndim != 3 or len(images) == 0 or labels.shape != images.shape[:1]:
        raise ValueError(
            f"images must be (W, side, side) with W labels, got {images.shape} and {labels.shape}"
        )
    ranks = len(images)
    right = _LEFT + ranks * _COLUMN
    with sheet(right + 0.1, 4.5) as (fig, ax):
        ax.set(xlim=(0, right), ylim=(0.4, 4.75), aspect="equal")
        ax.axis("off")
        for rank, image in enumerate(images):
            _column(ax, rank, image)
        _box(ax, _LEFT, "average", right - _LEFT - 0.22, KINDS["grad"], "average of all gradients")
        for row, said in _WORDS.items():
            state, what = said.split(": ")
            y = _ROWS[row] + _BOX_HEIGHT / 2
            ax.text(_LEFT - 0.2, y + 0.03, state, ha="right", va="bottom", fontweight="bold")
            ax.text(_LEFT - 0.2, y - 0.03, what, ha="right", va="top", fontsize="small")
        digits = ", ".join(str(int(label)) for label in labels)
        return render(
            fig,
            f"One step of data parallelism on {ranks} ranks, side by side. Each rank has another "
            f"sample (handwritten digits: {digits}), the same model, and so another gradient. One "
            "box across all ranks averages the gradients. From the average every rank makes the "
            "same update, so the models stay the same.",
            {"rank": range(ranks), "digit of the sample": labels},
        )


def _column(ax, rank, image):
    """Draw what one rank has and does, and the arrows from one to the next."""
    x = _LEFT + rank * _COLUMN
    middle = x + _BOX_WIDTH / 2
    ax.text(middle, 4.55, f"rank {rank}", ha="center", va="center", fontweight="bold")
    half, bottom = 0.33, _ROWS["samples"]
    ax.imshow(
        image,
        extent=(middle - half, middle + half, bottom, bottom + 2 * half),
        cmap="gray_r",
        interpolation="nearest",
        zorder=2,
    )
    _frame(ax, middle - half, bottom, 2 * half)
    _box(ax, x, "model", _BOX_WIDTH, KINDS["param"], "replica")
    _box(ax, x, "gradient", _BOX_WIDTH, KINDS["grad"], f"gradient {rank}")
    _box(ax, x, "update", _BOX_WIDTH, KINDS["optim"], "update")
    for above, below in zip(_ROWS, list(_ROWS)[1:], strict=False):
        ax.annotate(
            "",
            (middle, _ROWS[below] + _BOX_HEIGHT + 0.02),
            xytext=(middle, _ROWS[above] - 0.02),
            arrowprops={"arrowstyle": "-|>", "color": INK, "linewidth": 1.2},
        )


def _box(ax, x, row, width, look, text):
    """Draw one labelled box in the row's place."""
    from matplotlib.patches import Rectangle

    box = ax.add_patch(Rectangle((x, _ROWS[row]), width, _BOX_HEIGHT, **look.bar))
    label_bar(ax, box, text)


def _frame(ax, x, y, size):
    """Draw a thin frame around a sample."""
    from matplotlib.patches import Rectangle

    ax.add_patch(
        Rectangle((x, y), size, size, fill=False, edgecolor="#888888", linewidth=0.8, zorder=3)
    )
