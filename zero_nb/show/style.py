"""How every picture looks: one colour and one hatch for each thing, direct labels, honest units.

Colours are the ten of M. A. Petroff, "Accessible Color Sequences for Data Visualization"
(arXiv:2107.02270), chosen for colour-blind readers; hatches tell the same things apart in grey.
Text is written beside what it names, so that a legend is the exception.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure as Sheet
    from matplotlib.patches import Rectangle
    from matplotlib.text import Text

__all__ = [
    "HATCHES",
    "KINDS",
    "PETROFF10",
    "STAGES",
    "Look",
    "bytes_axis",
    "format_bytes",
    "house_style",
    "label_bar",
    "label_line",
    "rank_look",
    "sheet",
    "spread",
    "text_color",
]

PETROFF10 = (
    "#3f90da",
    "#ffa90e",
    "#bd1f01",
    "#94a4a2",
    "#832db6",
    "#a96b59",
    "#e76300",
    "#b9ac70",
    "#717581",
    "#92dadd",
)
"""The ten colours, in Petroff's order."""

HATCHES = ("", "//", "..", "\\\\", "xx", "--", "++")
"""Seven hatches: coprime to ten colours, so that 70 ranks get 70 looks."""

INK = "#222222"
PAPER = "#ffffff"


@dataclass(frozen=True)
class Look:
    """How one thing is drawn, wherever it appears.

    Parameters
    ----------
    label
        Its name as written into a picture.
    color
        ``#rrggbb``.
    hatch
        Matplotlib hatch pattern; empty for a plain fill.
    dash
        Matplotlib line style, so that lines on one another stay visible.
    linewidth
        In points.
    """

    label: str
    color: str
    hatch: str = ""
    dash: Any = "-"
    linewidth: float = 2.0

    @property
    def bar(self) -> dict[str, Any]:
        """Keyword arguments for ``Axes.bar`` and other filled shapes."""
        return {
            "facecolor": self.color,
            "hatch": self.hatch,
            "edgecolor": PAPER,
            "linewidth": 0.8,
        }

    @property
    def line(self) -> dict[str, Any]:
        """Keyword arguments for ``Axes.plot``."""
        return {"color": self.color, "linestyle": self.dash, "linewidth": self.linewidth}


KINDS: Mapping[str, Look] = MappingProxyType(
    {
        "param": Look("parameters", PETROFF10[0], ""),
        "grad": Look("gradients", PETROFF10[1], "//"),
        "optim": Look("optimizer states", PETROFF10[2], ".."),
        "activation": Look("activations", PETROFF10[3], "xx"),
        "bucket": Look("bucket", PETROFF10[5], "\\\\"),
        "unsharded": Look("unsharded unit", PETROFF10[9], "--"),
        "workspace": Look("workspace", PETROFF10[7], "++"),
    }
)
"""What memory is held for. Model states first, in the order in which they are stacked."""

STAGES = (
    Look("stage 0", PETROFF10[8], "", "-", 5.0),
    Look("stage 1", PETROFF10[6], "//", "-", 2.5),
    Look("stage 2", PETROFF10[4], "..", (0, (4, 2)), 2.5),
    Look("stage 3", PETROFF10[0], "xx", (0, (1, 1.2)), 2.5),
)
"""Stages 0-3. Line widths fall and dashes open, so that four equal curves can all be seen."""


def rank_look(rank: int) -> Look:
    """Colour and hatch of one rank; neighbours differ in both, and the first 70 all differ.

    Parameters
    ----------
    rank
        Global rank, not negative.

    Returns
    -------
    Look

    Raises
    ------
    ValueError
        If `rank` is negative.
    """
    if rank < 0:
        raise ValueError(f"rank must not be negative, got {rank}")
    lap, step = divmod(rank, len(PETROFF10))
    return Look(f"rank {rank}", PETROFF10[step], HATCHES[(rank + lap) % len(HATCHES)])


def format_bytes(count: float, *, binary: bool = False) -> str:
    """Write a number of bytes with a unit and three significant digits.

    Parameters
    ----------
    count
        Bytes.
    binary
        If true, powers of 1024 with their own names (KiB, MiB, GiB, …); otherwise powers of 1000
        (kB, MB, GB, …), as in the ZeRO paper.

    Returns
    -------
    str
        Such as ``"1.62 MB"`` or ``"1.55 MiB"``; whole bytes are never rounded.
    """
    base, units = (
        (1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))
        if binary
        else (1000, ("B", "kB", "MB", "GB", "TB", "PB"))
    )
    value, power = float(count), 0
    # 999.5 would be written as 1000 of the smaller unit.
    while abs(value) >= base - 0.5 and power < len(units) - 1:
        value /= base
        power += 1
    if power == 0:
        return f"{value:.0f} B" if value == int(value) else f"{value:.3g} B"
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{digits}f} {units[power]}"


@contextmanager
def house_style() -> Iterator[None]:
    """Draw in the house style, within the ``with`` block only."""
    import matplotlib

    with matplotlib.rc_context(_RC):
        yield


@contextmanager
def sheet(
    width: float = 8.0, height: float = 4.5, nrows: int = 1, ncols: int = 1, **subplots: Any
) -> Iterator[tuple[Sheet, Any]]:
    """Lay out an empty figure in the house style.

    No pyplot and no lasting global state: the style holds inside the ``with`` block only, so the
    drawing *and* the call of `zero_nb.show.figure.render` belong inside it.

    Parameters
    ----------
    width, height
        In inches.
    nrows, ncols
        Grid of axes.
    **subplots
        Passed to ``matplotlib.figure.Figure.subplots``, such as ``sharey=True``.

    Yields
    ------
    fig : matplotlib.figure.Figure
    axes : matplotlib.axes.Axes or array of them
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Sheet

    with house_style():
        fig = Sheet(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(fig)
        yield fig, fig.subplots(nrows, ncols, **subplots)


def text_color(background: str) -> str:
    """Ink or paper, whichever stands out more on `background`.

    Parameters
    ----------
    background
        ``#rrggbb``.

    Returns
    -------
    str
        ``#rrggbb``, at a contrast of 4.5 or more (WCAG 2.1, 1.4.3) for any background.
    """
    light = _luminance(background)
    on_ink = (light + 0.05) / (_luminance(INK) + 0.05)
    on_paper = 1.05 / (light + 0.05)
    # Ink is not black: near the middle both may fall below 4.5, so take full black there.
    if max(on_ink, on_paper) < 4.5:
        return "#000000"
    return INK if on_ink >= on_paper else PAPER


def label_bar(
    ax: Axes, bar: Rectangle, text: str, *, smallest: float = 0.04, color: str | None = None
) -> Text | None:
    """Write `text` into the middle of a bar, on a patch of the bar's own colour.

    Parameters
    ----------
    ax
        The axes the bar was drawn on; set its limits first.
    bar
        A rectangle, as returned by ``Axes.bar``.
    text
        What to write.
    smallest
        Bars lower than this part of the axes get no label, for it would not fit.
    color
        Fill behind the text; the bar's own if not given.

    Returns
    -------
    matplotlib.text.Text or None
        None where the bar is too low.
    """
    from matplotlib.colors import to_hex

    low, high = ax.get_ylim()
    if abs(bar.get_height()) < smallest * abs(high - low):
        return None
    fill = color or to_hex(bar.get_facecolor())
    return ax.text(
        bar.get_x() + bar.get_width() / 2,
        bar.get_y() + bar.get_height() / 2,
        text,
        ha="center",
        va="center",
        color=text_color(fill),
        fontsize="small",
        bbox={"boxstyle": "round,pad=0.15", "facecolor": fill, "edgecolor": "none"},
    )


def label_line(
    ax: Axes, x: float, y: float, text: str, color: str, *, dx: float = 6.0, dy: float = 0.0
) -> Text:
    """Write `text` beside a point of a line, in the line's colour darkened until it can be read.

    Parameters
    ----------
    ax
        The axes of the line.
    x, y
        The point, in data coordinates; the last point of the line as a rule.
    text
        What to write.
    color
        The line's colour.
    dx, dy
        Distance from the point, in typographic points.

    Returns
    -------
    matplotlib.text.Text
    """
    return ax.annotate(
        text,
        (x, y),
        xytext=(dx, dy),
        textcoords="offset points",
        va="center",
        ha="left" if dx >= 0 else "right",
        color=_darkened(color),
        annotation_clip=False,
    )


def spread(positions: Sequence[float], gap: float) -> list[float]:
    """Move labels apart until neighbours are `gap` apart, as little as possible.

    Parameters
    ----------
    positions
        Where the labels would like to be, in any order.
    gap
        Smallest distance between two labels, in the same unit.

    Returns
    -------
    list of float
        New positions, in the order given; their order by size is kept.
    """
    order = sorted(range(len(positions)), key=lambda i: positions[i])
    # Groups of labels that touch move as one, centred on the mean of where they wanted to be.
    groups: list[list[int]] = []
    for i in order:
        groups.append([i])
        while len(groups) > 1 and _overlap(groups[-2], groups[-1], positions, gap):
            groups[-2:] = [groups[-2] + groups[-1]]
    out = list(map(float, positions))
    for group in groups:
        start = _start(group, positions, gap)
        for place, i in enumerate(group):
            out[i] = start + place * gap
    return out


def bytes_axis(axis: Axis, *, binary: bool = False) -> None:
    """Write an axis in bytes with units, and whole steps of the unit.

    Parameters
    ----------
    axis
        ``ax.xaxis`` or ``ax.yaxis``.
    binary
        As in `format_bytes`.
    """
    from matplotlib.ticker import FuncFormatter

    def tick(value: float, _position: int) -> str:
        """Drop the zeros that three significant digits leave behind."""
        if value == 0:
            return "0"
        number, unit = format_bytes(value, binary=binary).split(" ")
        return f"{float(number):g} {unit}"

    axis.set_major_formatter(FuncFormatter(tick))


_RC = {
    "axes.axisbelow": True,
    "axes.edgecolor": "#888888",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "figure.facecolor": PAPER,
    "font.family": ["DejaVu Sans"],  # ships with matplotlib: the same letters everywhere
    "font.size": 10,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "hatch.linewidth": 0.6,
    "legend.frameon": False,
    "savefig.facecolor": PAPER,
    "svg.fonttype": "path",
    "svg.hashsalt": "zero-nb",
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


def _luminance(color: str) -> float:
    """Relative luminance of ``#rrggbb`` (WCAG 2.1), from 0 (black) to 1 (white)."""
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _darkened(color: str) -> str:
    """`color`, darker step by step until text in it has a contrast of 4.5 on paper."""
    channels = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
    while 1.05 / (_luminance(color) + 0.05) < 4.5:
        channels = [int(c * 0.95) for c in channels]
        color = "#{:02x}{:02x}{:02x}".format(*channels)
    return color


def _start(group: Sequence[int], positions: Sequence[float], gap: float) -> float:
    """Position of the first label of a group that is centred on its members' wishes."""
    middle = sum(positions[i] for i in group) / len(group)
    return middle - gap * (len(group) - 1) / 2


def _overlap(
    lower: Sequence[int], upper: Sequence[int], positions: Sequence[float], gap: float
) -> bool:
    """Whether the last label of `lower` would touch the first of `upper`."""
    top = _start(lower, positions, gap) + gap * (len(lower) - 1)
    return _start(upper, positions, gap) - top < gap
