"""One training step, event by event: which bytes each rank holds at each moment.

The moments are those of a real step, read from its ledger. The arrow keys step through them.
"""

from collections import defaultdict
from dataclasses import dataclass
from itertools import groupby, product

from zero_nb.config import UsageError
from zero_nb.show.figure import render
from zero_nb.show.slider import still_slider
from zero_nb.show.style import (
    INK,
    KINDS,
    PAPER,
    Look,
    bytes_axis,
    format_bytes,
    sheet,
    text_color,
)

__all__ = ["Moment", "moments_of", "step_view"]

_ROWS = ("param", "grad", "optim")
_EMPTY = Look("not held", "#f4f4f4")
_MOST_PICTURES = 80


@dataclass(frozen=True)
class Moment:
    """What one rank holds after something has happened.

    Attributes
    ----------
    phase : str
        ``"before"``, ``"forward"``, ``"backward"``, ``"reduce"`` or ``"step"``.
    text : str
        What has happened.
    held : dict of (str, str) to int
        Bytes by unit and kind; activations of all layers under no unit.
    """

    phase: str
    text: str
    held: dict

    @property
    def total(self):
        """Bytes of everything (int)."""
        return sum(self.held.values())


def moments_of(engine, batch):
    """Run a training step and read what happened in it, in order.

    Parameters
    ----------
    engine : Engine
        In float32, without buckets: nothing is widened or copied.
    batch : tuple of ndarray
        Inputs and targets of the global batch.

    Returns
    -------
    list of Moment
        The first is before the step.

    Raises
    ------
    UsageError
        If the engine does not train in float32.
    """
    if engine.optimizer.recipe.name != "fp32":
        raise UsageError(
            f"a step is shown in fp32, where nothing is widened; got {engine.optimizer.recipe.name}"
        )
    held = {}
    for unit in engine.optimizer.units:
        held[unit.name, "param"] = unit.param[0].nbytes
        held[unit.name, "optim"] = sum(array[0].nbytes for array in unit.optim.arrays().values())
    moments = [Moment("before", "before the step", dict(held))]
    engine.train_step(*batch)
    for (phase, *_), events in groupby(engine.ledger.events, key=_same_moment):
        text = ""
        for event in events:
            _book(held, event)
            text = _text(event, engine.optimizer.stage.number) or text
        if text:
            phase = {"outside": "forward" if len(moments) < 4 else "step"}.get(phase, phase)
            moments.append(Moment(phase, text, {k: n for k, n in held.items() if n}))
    return moments


def _book(held, event):
    """Add an event to what is held by unit and kind; activations together."""
    if event.kind == "activation":  # booked rank by rank, where ranks compute in threads
        held["", "activation"] = event.total_bytes["activation"]
    else:
        key = (event.label, event.kind)
        held[key] = held.get(key, 0) + event.delta_bytes


def _same_moment(event):
    """What events of one moment have in common: several arrays a layer keeps, or frees."""
    kind = event.kind if event.kind in ("activation", "unsharded") else "gradient"
    return event.phase, event.label, (kind, kind == "unsharded" and event.delta_bytes > 0)


def _text(event, stage):
    """Say what an event means."""
    made, unit = event.delta_bytes > 0, event.label
    if event.kind == "unsharded":
        return f"{unit} is gathered" if made else f"{unit} is dropped"
    if event.kind == "activation":
        if made:
            return {"batch": "the batch comes in", "output": "the loss is computed"}.get(
                unit, f"{unit} computes and keeps its activations"
            )
        return {"output": "", "batch": ""}.get(unit, f"{unit} is differentiated")
    if event.kind == "bucket":
        return f"backward writes the gradient of {unit}" if made else ""
    if event.kind == "grad" and made:
        if event.phase == "backward" and stage < 2:
            return f"each rank keeps its own gradient of {unit}"
        return f"the gradient of {unit} is reduced to its owners"
    updated = event.kind == "grad" and event.phase == "step"
    return f"{unit} is updated: its gradient goes" if updated else ""


def step_view(stage=3, world_size=4, **settings):
    """Step through one training step, event by event, with the arrow keys.

    Parameters
    ----------
    stage : int
    world_size : int
    **settings
        For `zero_nb.train.engine.Engine`, such as ``prefetch_bucket_size=1``.

    Returns
    -------
    StillSlider
        A picture a moment: what each rank holds of every unit, and the memory so far.

    Raises
    ------
    UsageError
        If the step has more moments than one would look at.
    """
    from zero_nb.train.engine import Engine
    from zero_nb.train.model import GPT, GPTConfig

    config = GPTConfig(vocab_size=27, seq_len=16, width=32, heads=4, blocks=2)
    engine = Engine(GPT(config), stage=stage, world_size=world_size, **settings)
    batch = _tokens(config, world_size * engine.optimizer.micro_batches)
    engine.train_step(*batch)  # the order of units is known from here on
    moments = moments_of(engine, batch)
    if len(moments) > _MOST_PICTURES:
        raise UsageError(
            f"the step has {len(moments)} moments, more than {_MOST_PICTURES}; use larger units "
            "or fewer micro-batches"
        )
    units = {unit.name: unit.layout.padded_numel for unit in engine.optimizer.units}
    figures = [_picture(i, moments, units, stage, world_size) for i in range(len(moments))]
    names = [f"{i}: {moment.text}" for i, moment in enumerate(moments)]
    return still_slider(figures, names, f"moment of a stage-{stage} step")


def _tokens(config, samples):
    """Tokens and the tokens that follow them; which ones does not matter."""
    import numpy as np

    shape = (samples, config.seq_len + 1)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, shape)
    return tokens[:, :-1].copy(), tokens[:, 1:].copy()


def _picture(number, moments, units, stage, world_size):
    """Draw one moment."""
    moment = moments[number]
    with sheet(9.0, 1.5 + 0.62 * world_size, nrows=2, height_ratios=(world_size, 1.4)) as (
        fig, (ranks, curve),
    ):  # fmt: skip
        fig.set_layout_engine("none")
        ranks.set_position((0.09, 0.40, 0.89, 0.46))
        curve.set_position((0.09, 0.11, 0.89, 0.19))
        _draw_ranks(ranks, moment, units, world_size)
        _draw_curve(curve, number, moments)
        _name_looks(fig)
        fig.text(0.09, 0.967, f"{moment.phase}: {moment.text}", fontweight="bold", va="center")
        return render(
            fig, _alt(moment, units, stage, world_size),
            {
                "bytes of one rank": moment.total,
                **{f"{unit} {kind} bytes".strip(): n for (unit, kind), n in moment.held.items()},
            },
            dpi=80,
        )  # fmt: skip


def _draw_ranks(ax, moment, units, world_size):
    """For every rank and unit: parameters, gradient and optimizer states, whole or a slice."""
    ax.grid(visible=False)
    total, gap = sum(units.values()), 0.012
    ax.set_xlim(-gap, 1 + gap * len(units))
    ax.set_ylim(world_size, 0)
    left, boxes, centres = 0.0, defaultdict(list), {}
    for unit, numel in units.items():
        width = numel / total
        if width > 0.03:
            centres[unit] = left + width / 2
        for rank, (row, kind) in product(range(world_size), enumerate(_ROWS)):
            y = rank + 0.1 + row * 0.27
            boxes[_EMPTY].append((left, y, width))
            for look, start, part in _parts(moment.held, unit, kind, numel, rank, world_size):
                boxes[look].append((left + start * width, y, part * width))
        left += width + gap
    # What is gathered lies under the own slice, so that this stays in view.
    order = [_EMPTY, *(KINDS[kind] for kind in ("unsharded", "bucket", *_ROWS))]
    for look in order:
        _draw_boxes(ax, boxes[look], look)
    ax.set_xticks(list(centres.values()), list(centres))
    ax.set_yticks([rank + 0.5 for rank in range(world_size)],
                  [f"rank {rank}" for rank in range(world_size)])  # fmt: skip
    ax.tick_params(length=0)
    for side in ("left", "bottom"):
        ax.spines[side].set_visible(False)


def _draw_boxes(ax, boxes, look):
    """Draw all boxes of one look at once: (left, top, width)."""
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    patches = [Rectangle((left, top), width, 0.25) for left, top, width in boxes]
    style = look.bar | ({"edgecolor": "#bbbbbb", "linewidth": 0.5} if look is _EMPTY else {})
    ax.add_collection(PatchCollection(patches, **style), autolim=False)


def _parts(held, unit, kind, numel, rank, world_size):
    """What is held of a unit: looks, and where in the unit from 0 to 1 (start, length)."""
    whole, own = (0.0, 1.0), (rank / world_size, 1 / world_size)
    parts = []
    extra = {"param": "unsharded", "grad": "bucket"}.get(kind)
    if extra and held.get((unit, extra)):
        parts.append((KINDS[extra], *whole))
    nbytes = held.get((unit, kind), 0)
    if nbytes:
        each = 8 if kind == "optim" else 4
        parts.append((KINDS[kind], *(whole if nbytes >= each * numel else own)))
    return parts


def _draw_curve(ax, number, moments):
    """The memory of one rank over the step, and where we are."""
    totals = [moment.total for moment in moments]
    ax.step(range(len(totals)), totals, where="post", color="#888888", linewidth=1.4)
    ax.plot([number], [totals[number]], "o", color=INK, markersize=7)
    ax.annotate(
        format_bytes(totals[number]), (number, totals[number]), xytext=(0, 7),
        textcoords="offset points", ha="left" if number < len(totals) / 2 else "right",
        fontsize="small",
        bbox={"boxstyle": "round,pad=0.1", "facecolor": PAPER, "edgecolor": "none"},
    )  # fmt: skip
    ax.set_ylim(0, 1.35 * max(totals))
    ax.set_xlim(0, len(totals) - 0.5)
    ax.set_xticks([])
    ax.locator_params(axis="y", nbins=2)
    bytes_axis(ax.yaxis)
    ax.set_xlabel(f"moment {number} of {len(totals) - 1}; bytes on one rank, activations too")


def _name_looks(fig):
    """What each colour is, in a line under the title; parameters, gradients, states by row."""
    x = 0.09
    for kind in ("param", "unsharded", "grad", "bucket", "optim"):
        look = KINDS[kind]
        fig.text(
            x, 0.905, look.label, fontsize="small", va="center", color=text_color(look.color),
            bbox={"boxstyle": "round,pad=0.15", "facecolor": look.color, "edgecolor": "none"},
        )  # fmt: skip
        x += 0.025 + 0.0105 * len(look.label)


def _alt(moment, units, stage, world_size):
    """Say the moment in words."""
    gathered = [unit for unit in units if (unit, "unsharded") in moment.held]
    writing = [unit for unit in units if (unit, "bucket") in moment.held]
    said = [f"Stage {stage}, {moment.phase}: {moment.text}."]
    said.append(f"Each of {world_size} ranks holds {format_bytes(moment.total)}.")
    if gathered:
        said.append(f"Gathered on every rank: {', '.join(gathered)}.")
    if writing:
        said.append(f"Whole gradients being written: {', '.join(writing)}.")
    return " ".join(said)
