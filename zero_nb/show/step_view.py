"""One training step, event by event: which bytes each rank holds at each moment.

The moments are those of a real step, read from its ledger. The arrow keys step through them.
"""

from collections import defaultdict
from dataclasses import dataclass
from itertools import groupby, product

from zero_nb.config import UsageError
from zero_nb.show.figure import render_stills
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
        if text.endswith(" is dropped") and moments[-1].text == f"{event.label} is gathered":
            text = f"{event.label} computes, keeps nothing for backward, and is dropped"
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
        return f"the gradient of {unit} is written" if made else ""
    if event.kind == "grad" and made:
        if event.phase == "backward" and stage < 2:
            return f"each rank keeps its own gradient of {unit}"
        return f"the gradient of {unit} is reduced to its owners"
    updated = event.kind == "grad" and event.phase == "step"
    return f"{unit} is updated: its gradient goes" if updated else ""


def step_view(stage=3, world_size=4, *, model=None, names=None, **settings):
    """Step through one training step, event by event, with the arrow keys.

    Parameters
    ----------
    stage : int
    world_size : int
    model : GPT or MLP, optional
        A GPT of two small blocks by default.
    names : sequence of str, optional
        What to call the units, in their order; their own names by default.
    **settings
        For `zero_nb.train.engine.Engine`, such as ``prefetch_bucket_size=1``.

    Returns
    -------
    StillSlider
        A picture a moment: what each rank holds of every unit, and the memory so far.

    Raises
    ------
    UsageError
        If the step has more moments than one would look at, or `names` are not one a unit.
    """
    from zero_nb.train.engine import Engine
    from zero_nb.train.model import GPT, GPTConfig

    if model is None:
        model = GPT(GPTConfig(vocab_size=27, seq_len=16, width=32, heads=4, blocks=2))
    engine = Engine(model, stage=stage, world_size=world_size, **settings)
    own_names = [unit.name for unit in engine.optimizer.units]
    names = own_names if names is None else list(names)
    if len(names) != len(own_names):
        raise UsageError(f"{len(own_names)} units need as many names, got {len(names)}")
    batch = _samples(model, world_size * engine.optimizer.micro_batches)
    engine.train_step(*batch)  # the order of units is known from here on
    called = dict(zip(own_names, names, strict=True))
    moments = [_renamed(moment, called) for moment in moments_of(engine, batch)]
    if len(moments) > _MOST_PICTURES:
        raise UsageError(
            f"the step has {len(moments)} moments, more than {_MOST_PICTURES}; use larger units "
            "or fewer micro-batches"
        )
    units = {called[unit.name]: unit.layout.padded_numel for unit in engine.optimizer.units}
    figures = _pictures(moments, units, stage, world_size)
    said = [f"{i}: {moment.text}" for i, moment in enumerate(moments)]
    return still_slider(figures, said, f"moment of a stage-{stage} step")


def _renamed(moment, called):
    """The moment with other names of units, in its words too."""
    text = " ".join(called.get(word, word) for word in moment.text.split(" "))
    held = {(called.get(unit, unit), kind): count for (unit, kind), count in moment.held.items()}
    return Moment(moment.phase, text, held)


def _samples(model, count):
    """Inputs and targets that fit the model; which ones does not matter."""
    import numpy as np

    rng, config = np.random.default_rng(0), model.config
    if hasattr(config, "sizes"):
        ends = config.sizes[0], config.sizes[-1]
        return tuple(rng.standard_normal((count, end), np.float32) for end in ends)
    tokens = rng.integers(0, config.vocab_size, (count, config.seq_len + 1))
    return tokens[:, :-1].copy(), tokens[:, 1:].copy()


def _pictures(moments, units, stage, world_size):
    """Draw all moments on one sheet: axes, names and the grey curve stay."""
    words = [
        (
            _alt(moment, units, stage, world_size),
            {
                "bytes of one rank": moment.total,
                **{f"{unit} {kind} bytes".strip(): n for (unit, kind), n in moment.held.items()},
            },
        )
        for moment in moments
    ]
    with sheet(9.0, 1.5 + 0.62 * world_size, nrows=2, height_ratios=(world_size, 1.4)) as (
        fig, (ranks, curve),
    ):  # fmt: skip
        fig.set_layout_engine("none")
        ranks.set_position((0.09, 0.40, 0.89, 0.46))
        curve.set_position((0.09, 0.11, 0.89, 0.19))
        places = _lay_out_ranks(ranks, units, world_size)
        _lay_out_curve(curve, moments)
        _name_looks(fig)

        def draw(number):
            """Add one moment: its title, what is held, and where we are on the curve."""
            moment = moments[number]
            # "before the step" says its phase itself.
            text = moment.text if moment.phase == "before" else f"{moment.phase}: {moment.text}"
            title = fig.text(0.09, 0.967, text, fontweight="bold", va="center")
            held = _draw_held(ranks, moment, units, places, world_size)
            return [title, *held, *_draw_place(fig, curve, number, moments)]

        return render_stills(fig, words, draw, dpi=100)


def _lay_out_ranks(ax, units, world_size):
    """Name ranks and units; return where each unit begins and how wide it is."""
    ax.grid(visible=False)
    total, gap = sum(units.values()), 0.012
    ax.set_xlim(-gap, 1 + gap * len(units))
    ax.set_ylim(world_size, 0)
    left, places = 0.0, {}
    for unit, numel in units.items():
        places[unit] = left, numel / total
        left += numel / total + gap
    named = {unit: start + width / 2 for unit, (start, width) in places.items() if width > 0.03}
    ax.set_xticks(list(named.values()), list(named))
    ax.set_yticks([rank + 0.5 for rank in range(world_size)],
                  [f"rank {rank}" for rank in range(world_size)])  # fmt: skip
    ax.tick_params(length=0)
    for side in ("left", "bottom"):
        ax.spines[side].set_visible(False)
    return places


def _draw_held(ax, moment, units, places, world_size):
    """For every rank and unit: parameters, gradient and optimizer states, whole or a slice."""
    boxes = defaultdict(list)
    for unit, numel in units.items():
        left, width = places[unit]
        for rank, (row, kind) in product(range(world_size), enumerate(_ROWS)):
            y = rank + 0.1 + row * 0.27
            boxes[_EMPTY].append((left, y, width))
            for look, start, part in _parts(moment.held, unit, kind, numel, rank, world_size):
                boxes[look].append((left + start * width, y, part * width))
    # What is gathered lies under the own slice, so that this stays in view.
    order = [_EMPTY, *(KINDS[kind] for kind in ("unsharded", "bucket", *_ROWS))]
    return [_draw_boxes(ax, boxes[look], look) for look in order if boxes[look]]


def _draw_boxes(ax, boxes, look):
    """Draw all boxes of one look at once: (left, top, width)."""
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    patches = [Rectangle((left, top), width, 0.25) for left, top, width in boxes]
    style = look.bar | ({"edgecolor": "#bbbbbb", "linewidth": 0.5} if look is _EMPTY else {})
    return ax.add_collection(PatchCollection(patches, **style), autolim=False)


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


def _lay_out_curve(ax, moments):
    """The memory of one rank over the step."""
    totals = [moment.total for moment in moments]
    ax.step(range(len(totals)), totals, where="post", color="#888888", linewidth=1.4)
    ax.set_ylim(0, 1.35 * max(totals))
    ax.set_xlim(-1, len(totals) - 0.5)
    ax.set_xticks([])
    ax.locator_params(axis="y", nbins=2)
    bytes_axis(ax.yaxis)


def _draw_place(fig, ax, number, moments):
    """Mark where we are on the curve."""
    total = moments[number].total
    (dot,) = ax.plot([number], [total], "o", color=INK, markersize=7)
    size = ax.annotate(
        format_bytes(total), (number, total), xytext=(0, 7), textcoords="offset points",
        ha="left" if number < len(moments) / 2 else "right", fontsize="small",
        bbox={"boxstyle": "round,pad=0.1", "facecolor": PAPER, "edgecolor": "none"},
    )  # fmt: skip
    under = fig.text(
        0.535, 0.04, f"moment {number} of {len(moments) - 1}; bytes on one rank, activations too",
        ha="center", va="center",
    )  # fmt: skip
    return [dot, size, under]


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
