"""One page: stages 0 to 3, who holds what, what is sent, and memory through a step.

Every number on it is counted in a run that `poster` makes; see Rajbhandari et al.,
arXiv:1910.02054, figure 1 and section 7, for what it should be.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from zero_nb.compare import digits_task
from zero_nb.show.figure import render
from zero_nb.show.lesson_figures_b import COLLECTIVES
from zero_nb.show.style import INK, KINDS, Look, format_bytes, sheet, text_color
from zero_nb.train.engine import Engine
from zero_nb.train.optim import get_rule

__all__ = ["POSTER_STEPS", "StagePage", "count_stages", "poster"]

POSTER_STEPS = 2
"""Training steps of each stage; the last one is shown."""

HELD = {"param": "param", "grad": "grad", "optim": "optimizer states"}
STACKED = ("optim", "param", "grad", "bucket", "unsharded", "activation", "workspace")
WORDS = (
    (
        "Plain data parallelism",
        "Every rank holds everything.\nGradients are summed over all ranks.",
    ),
    (
        "Shard the optimizer",
        "Each rank updates its shard. Then\nall ranks gather the new parameters.",
    ),
    (
        "… and the gradients",
        "A bucket of gradients goes to its\nowners as soon as backward has made it.",
    ),
    (
        "… and the parameters",
        "A unit is gathered, used and dropped,\nin forward and again in backward.",
    ),
)
SHOWN_MOMENTS = 130
"""At most so many moments of a step are drawn: the fullest of each few events."""


@dataclass(frozen=True)
class StagePage:
    """What was counted in the last step of one stage, on the fullest rank.

    Attributes
    ----------
    stage : int
    held_bytes : mapping of str to int
        Parameters, gradients and optimizer states, at the end of backward.
    sent : tuple of (str, str, int)
        In order of the first of each: collective, what it carries, elements one rank sends.
    moments : tuple of (str, mapping of str to int)
        Phase, and bytes by kind, after each event of the step.
    """

    stage: int
    held_bytes: Mapping[str, int]
    sent: tuple
    moments: tuple

    @property
    def peak_bytes(self):
        """Largest sum of all kinds within the step (int)."""
        return max(sum(total.values()) for _, total in self.moments)

    @property
    def elements_sent(self):
        """Elements one rank sends in the step (int)."""
        return sum(elements for _, _, elements in self.sent)


def count_stages(world_size=4, task=None, precision="bf16"):
    """Train `POSTER_STEPS` steps at each stage and count.

    Parameters
    ----------
    world_size : int
    task : Task, optional
        The lesson's model by default.
    precision : str

    Returns
    -------
    tuple of StagePage

    Raises
    ------
    RuntimeError
        If the stages do not end with the same weights, to the bit: then the page would be wrong.
    """
    task = digits_task("lesson") if task is None else task
    pages, weights = [], set()
    for stage in range(4):
        engine = Engine(
            task.model,
            stage=stage,
            world_size=world_size,
            rule=get_rule("adamw", lr=1e-3),
            precision=precision,
            reduce_bucket_size=max(1, task.model.numel // 8),
        )
        for step in range(POSTER_STEPS):
            report = engine.train_step(*task.dataset.batch(step, world_size))
        sent = {}
        for transfer in engine.world.log.transfers:
            if transfer.purpose in ("param", "grad"):
                key = transfer.collective.replace("_", "-"), transfer.purpose
                sent[key] = sent.get(key, 0) + transfer.elements_sent
        pages.append(
            StagePage(
                stage,
                dict(report.held_bytes),
                tuple((*key, elements) for key, elements in sent.items()),
                tuple((event.phase, dict(event.total_bytes)) for event in engine.ledger.events),
            )
        )
        with engine.optimizer.gathered_parameters() as params:
            weights.add(tuple(np.asarray(array).tobytes() for array in params.values()))
    if len(weights) != 1:
        raise RuntimeError("the stages ended with different weights; the poster says they do not")
    return tuple(pages)


def poster(world_size=4, task=None, precision="bf16"):
    """Draw the page: a column for each stage.

    Parameters
    ----------
    world_size, task, precision
        See `count_stages`.

    Returns
    -------
    Figure
        For A3, landscape. From above: what each rank holds, what one rank sends in a step, and
        its memory through the step.
    """
    task = digits_task("lesson") if task is None else task
    pages, numel = count_stages(world_size, task, precision), task.model.numel
    unit = numel * (world_size - 1) / world_size
    top = max(page.peak_bytes for page in pages)
    heights = {"height_ratios": [0.6, 2.5, 1.05, 2.4, 0.62]}
    with sheet(16.5, 11.7, nrows=5, ncols=4, gridspec_kw=heights) as (fig, rows):
        fig.suptitle(
            "ZeRO on one page: who holds what, and what is sent",
            fontsize=26,
            fontweight="bold",
            y=0.988,
        )
        fig.get_layout_engine().set(rect=(0.012, 0.015, 0.976, 0.925), wspace=0.03)
        for ax in rows[:3].flat:
            ax.axis("off")
        for ax in rows[3, 1:]:
            ax.tick_params(labelleft=False)
        for page, (head, held, sent, memory) in zip(pages, rows[:4].T, strict=True):
            _head(head, page)
            _who_holds(held, page, pages[0], world_size, numel)
            _what_is_sent(sent, page, unit)
            _through_the_step(memory, page, top)
        rows[3, 0].set_ylabel("memory of one rank through a step")
        _legend(fig, rows[4], world_size, numel, precision)
        for ax in fig.axes:  # words may stand beside their axes: they do not make these narrower
            for text in ax.texts:
                text.set_in_layout(False)
        return render(fig, _alt(pages, world_size, numel, unit), _data(pages, numel, unit))


def _head(ax, page):
    """Name a stage, and say what it does."""
    title, words = WORDS[page.stage]
    ax.text(0, 1.0, f"Stage {page.stage} · {title}", fontsize=14.5, fontweight="bold", va="top")
    ax.text(0, 0.42, words, fontsize=12, va="top", linespacing=1.25)


def _who_holds(ax, page, first, world_size, numel):
    """Draw a box for each rank and kind, as wide as its bytes, filled as far as it is held."""
    from matplotlib.patches import Rectangle

    widths = {kind: first.held_bytes[kind] / numel for kind in HELD}
    gap = 0.5
    ax.set_xlim(-2.0, sum(widths.values()) + gap * len(HELD))
    ax.set_ylim(-world_size - 0.75, 0.75)
    left = 0.0
    for kind, words in HELD.items():
        look, width = KINDS[kind], widths[kind]
        whole = page.held_bytes[kind] == first.held_bytes[kind]
        ax.text(left + width / 2, 0.1, words, ha="center", va="bottom", fontsize=10)
        for rank in range(world_size):
            frame = {"facecolor": "#ffffff", "edgecolor": "#9a9a9a", "linestyle": ":"}
            ax.add_patch(Rectangle((left, -rank - 0.86), width, 0.74, **frame))
            part = page.held_bytes[kind] / first.held_bytes[kind] * width
            start = left if whole else left + rank * width / world_size
            ax.add_patch(Rectangle((start, -rank - 0.86), part, 0.74, **look.bar))
        left += width + gap
    for rank in range(world_size):
        ax.text(-0.25, -rank - 0.49, f"rank {rank}", ha="right", va="center", fontsize=11)
    total = sum(page.held_bytes.values())
    ax.text(
        0, -world_size - 0.12,
        f"{format_bytes(total)} a rank\n= {total / numel:.3g} bytes a parameter",
        fontsize=12, va="top", fontweight="bold",
    )  # fmt: skip


def _what_is_sent(ax, page, unit):
    """Draw the collectives of a step, one behind the other, as long as what one rank sends."""
    ax.set_xlim(-0.3, 3.15)
    ax.set_ylim(-1.35, 1.0)
    left = 0.0
    for collective, purpose, elements in page.sent:
        look, width = COLLECTIVES[collective], elements / unit
        ax.barh(0, width, 1.0, left=left, **look.bar)
        carried = {"param": "parameters", "grad": "gradients"}[purpose]
        if collective == "all-gather" and round(width) > 1:
            carried += f", {width:.0f} times"
        ax.text(
            left + width / 2, 0, f"{collective}\n{carried}", ha="center", va="center",
            color=text_color(look.color), fontsize=9.5,
            bbox={"boxstyle": "round,pad=0.15", "facecolor": look.color, "edgecolor": "none"},
        )  # fmt: skip
        left += width
    ax.text(
        0, -0.68,
        f"{page.elements_sent:,} elements sent by a rank\n= {left:.3g} Ψ(W−1)/W a step",
        fontsize=12, va="top", fontweight="bold",
    )  # fmt: skip


def _through_the_step(ax, page, top):
    """Stack the bytes of each kind, event after event."""
    moments = _fullest_of_each_few(page.moments)
    layers = np.array([[total[kind] for _, total in moments] for kind in STACKED], float)
    below = np.zeros(layers.shape[1])
    steps = np.arange(layers.shape[1])
    for kind, layer in zip(STACKED, layers, strict=True):
        look = KINDS[kind]
        ax.fill_between(
            steps, below, below + layer, step="post", facecolor=look.color, hatch=look.hatch,
            edgecolor="#ffffff", linewidth=0.0,
        )  # fmt: skip
        below += layer
    ax.step(steps, below, where="post", color=INK, linewidth=0.8)
    ax.set_xlim(0, len(steps))
    ax.set_ylim(0, 1.14 * top)
    ax.set_xticks([])
    ax.yaxis.set_major_formatter(lambda value, _: format_bytes(value))
    place = int(below.argmax())
    ax.annotate(
        f"peak {format_bytes(page.peak_bytes)}", (place, below.max()), xytext=(0, 4),
        textcoords="offset points", fontsize=13, fontweight="bold",
        ha="right" if place > len(steps) / 2 else "left", va="bottom",
    )  # fmt: skip
    start = 0
    for phase, events in itertools.groupby(moments, key=lambda moment: moment[0]):
        stop = start + len(list(events))
        if phase in ("forward", "backward", "step") and stop - start > 0.06 * len(steps):
            ax.text((start + stop) / 2, -0.03 * top, phase, ha="center", va="top", fontsize=11)
            ax.axvline(stop, color="#9a9a9a", linewidth=0.8, linestyle=":")
        start = stop


def _fullest_of_each_few(moments):
    """Thin out the moments of a step: of each few neighbours within a phase, the fullest."""
    few = -(-len(moments) // SHOWN_MOMENTS)
    thinned = []
    for _, group in itertools.groupby(moments, key=lambda moment: moment[0]):
        events = list(group)
        for start in range(0, len(events), few):
            thinned.append(max(events[start : start + few], key=lambda m: sum(m[1].values())))
    return thinned


def _legend(fig, axes, world_size, numel, precision):
    """Name the fills of the memory pictures, and the run."""
    grid = axes[0].get_gridspec()
    for ax in axes:
        ax.remove()
    ax = fig.add_subplot(grid[4, :])
    ax.axis("off")
    ax.set_xlim(0, 100)
    ax.set_ylim(-1.2, 1.3)
    left = 0.0
    for kind in STACKED:
        look = KINDS[kind]
        _swatch(ax, left, look)
        ax.text(left + 2.6, 0.45, look.label, va="center", fontsize=12)
        left += 4.6 + 0.78 * len(look.label)
    ax.text(
        0, -0.35,
        f"Really run: a GPT of Ψ = {numel:,} parameters ({precision}, Adam) on W = {world_size} "
        f"ranks, one sequence each, step {POSTER_STEPS} of each stage. All four stages end with "
        "the same weights, bit for bit.\nEvery number was counted in this run. A ring sends "
        "(W−1)/W of an array. ZeRO shards model states; activations and workspace stay. "
        "Stages: Rajbhandari et al., arXiv:1910.02054.",
        va="top", fontsize=12, linespacing=1.4,
    )  # fmt: skip


def _swatch(ax, left, look: Look):
    """Draw a small field of a fill."""
    from matplotlib.patches import Rectangle

    ax.add_patch(Rectangle((left, 0.1), 2.0, 0.7, **look.bar))


def _alt(pages, world_size, numel, unit):
    """The page in words, from its numbers."""
    told = [
        f"stage {page.stage} holds {format_bytes(sum(page.held_bytes.values()))} a rank "
        f"({sum(page.held_bytes.values()) / numel:.3g} bytes a parameter), sends "
        f"{page.elements_sent / unit:.3g} times Ψ(W−1)/W and peaks at "
        f"{format_bytes(page.peak_bytes)}"
        for page in pages
    ]
    return (
        f"A page with a column for each stage of ZeRO, counted on {world_size} ranks: "
        f"{'; '.join(told)}. Stage 1 shards optimizer states, stage 2 gradients, too, stage 3 "
        "parameters, too."
    )


def _data(pages, numel, unit):
    """The numbers behind the page."""
    return {
        f"stage {page.stage}": {
            **{f"held {kind} bytes": page.held_bytes[kind] for kind in HELD},
            "bytes a parameter": sum(page.held_bytes.values()) / numel,
            **{f"{name} {what} elements": count for name, what, count in page.sent},
            "sent in Ψ(W-1)/W": page.elements_sent / unit,
            "peak bytes": page.peak_bytes,
        }
        for page in pages
    }
