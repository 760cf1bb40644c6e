"""Figures of time: two lanes with the memory under them, what is exposed, where the peak ends.

Lanes are drawn from a Chrome trace, so a measured run and the timeline model look the same.
"""

from dataclasses import dataclass, replace

import numpy as np

from zero_nb.config import UsageError
from zero_nb.show.figure import render
from zero_nb.show.style import (
    INK,
    KINDS,
    PAPER,
    PETROFF10,
    STAGES,
    Look,
    bytes_axis,
    format_bytes,
    label_line,
    sheet,
    spread,
    text_color,
)
from zero_nb.theory.activations import korthikanti_layer_bytes
from zero_nb.theory.network import Network
from zero_nb.theory.presets import get_device, get_model
from zero_nb.theory.schedule import StepOptions
from zero_nb.theory.specs import gpt_like
from zero_nb.theory.timeline import Link, timeline, transformer_work
from zero_nb.train.trace import COMM_LANE, COMPUTE_LANE

__all__ = [
    "TIMELINE_FIGURES",
    "draw_trace",
    "exposed_over_bandwidth",
    "memory_through_a_step",
    "peak_over_ranks",
    "stage_timeline",
]

SPANS = {
    "forward": Look("forward", PETROFF10[7], ""),
    "backward": Look("backward", PETROFF10[5], "\\\\"),
    "update": Look("update", KINDS["optim"].color, ".."),
    "wait": Look("stands still", PAPER, "xxx"),
    "param": Look("parameters gathered", KINDS["unsharded"].color, "--"),
    "grad": Look("gradients reduced", KINDS["grad"].color, "//"),
}
"""How each thing that takes time is drawn."""

STACK = ("param", "optim", "grad", "activation", "unsharded", "bucket", "workspace")
"""From the bottom up: what is held longest lies lowest."""

_LANES = {COMPUTE_LANE: 1, COMM_LANE: 0}


# --- two lanes and the memory under them ---------------------------------------------------------


@dataclass(frozen=True)
class _Drawn:
    """A box of a lane: what it is, its name, and from when to when, in milliseconds."""

    kind: str
    name: str
    lane: int
    start: float
    stop: float


def draw_trace(trace, title, *, rank=0, step=None):
    """Draw a Chrome trace: what is computed, what travels, and the memory of one rank.

    Parameters
    ----------
    trace : dict
        From a run (`zero_nb.train.trace.Tracer.to_chrome`), the timeline model
        (`zero_nb.overlap.chrome_of`), or a file that one of them wrote.
    title : str
    rank : int
        Whose memory.
    step : int, optional
        The number of the training step to show, if the trace has several.

    Returns
    -------
    Figure

    Raises
    ------
    UsageError
        If the trace has no such step, or no memory of that rank.
    """
    events = trace["traceEvents"]
    first, last = _window(events, step)
    boxes = [box for box in map(_box_of, events) if box and first <= box.start < last]
    memory = _memory_of(events, rank, first, last)
    if not boxes or not memory:
        raise UsageError(f"the trace has nothing to draw of rank {rank}")
    boxes = [replace(box, start=box.start - first, stop=box.stop - first) for box in boxes]
    stop = max(box.stop for box in boxes)
    shares = _shares(boxes, stop)
    with sheet(9.6, 5.2, nrows=2, sharex=True, height_ratios=(1, 2)) as (fig, (lanes, under)):
        lanes.set_title(title)
        _draw_lanes(lanes, boxes, stop)
        at = [at - first for at, _ in memory] + [stop]
        largest = _draw_memory(under, at, [held for _, held in memory])
        under.set_ylabel("bytes on one rank")
        under.set_xlabel("milliseconds")
        under.set_xlim(0, stop)
        _legend(fig, boxes)
        return render(
            fig,
            f"{title}. Two lanes over {stop:.3g} ms: the program computes for "
            f"{shares['computing']:.0%} of it and stands still for {shares['standing still']:.0%}; "
            f"messages are under way for {shares['communicating']:.0%}. Under it the memory of one "
            f"rank by kind, at most {format_bytes(largest)}.",
            {
                "milliseconds": stop,
                "share of the time": shares,
                "bytes at most": {
                    kind: max(held.get(kind, 0) for _, held in memory) for kind in STACK
                }
                | {"together": largest},
            },
        )


def _window(events, step):
    """From when to when to draw, in milliseconds."""
    if step is None:
        return 0.0, float("inf")
    for event in events:
        if event["ph"] == "X" and event["name"] == f"training step {step}":
            return event["ts"] / 1e3, (event["ts"] + event["dur"]) / 1e3
    raise UsageError(f"the trace has no training step {step}")


def _box_of(event):
    """The box of an event, or None for what is not drawn."""
    if event["ph"] != "X":
        return None
    kind, name = event["cat"], event["name"]
    if event["tid"] == COMM_LANE:
        if kind not in ("param", "grad"):
            kind = "param" if name.startswith("all_gather") else "grad"
            if event["cat"] in ("control", "other"):
                return None
    elif kind not in SPANS:
        return None
    start = event["ts"] / 1e3
    return _Drawn(kind, name, event["tid"], start, start + event["dur"] / 1e3)


def _memory_of(events, rank, first, last):
    """A rank's memory from `first` on: (milliseconds, bytes by kind)."""
    series = [
        (event["ts"] / 1e3, event["args"])
        for event in events
        if event["ph"] == "C" and event["pid"] == rank
    ]
    before = [held for at, held in series if at <= first]
    inside = [(at, held) for at, held in series if first < at < last]
    return ([(first, before[-1])] if before else []) + inside


def _shares(boxes, stop):
    """Shares of the time in which is computed, stood still and communicated."""
    spent = dict.fromkeys(("computing", "standing still", "communicating"), 0.0)
    for box in boxes:
        if box.lane == COMM_LANE:
            what = "communicating"
        else:
            what = "standing still" if box.kind == "wait" else "computing"
        # An update holds the waits of its own gathers.
        inside = box.kind == "wait" and any(
            other.kind == "update" and other.start <= box.start and box.stop <= other.stop
            for other in boxes
        )
        spent[what] += (box.stop - box.start) / stop
        if inside:
            spent["computing"] -= (box.stop - box.start) / stop
    return spent


def _draw_lanes(ax, boxes, stop):
    """Draw the boxes of both lanes, named where there is room."""
    from matplotlib.patches import Rectangle

    ax.set_ylim(-0.12, 2.02)
    ax.set_yticks([0.45, 1.45], ["travels", "computes"])
    ax.tick_params(length=0)
    ax.grid(visible=False)
    for box in sorted(boxes, key=lambda box: box.kind == "wait"):
        look, y = SPANS[box.kind], _LANES[box.lane]
        style = look.bar | (
            {"edgecolor": "#999999", "linewidth": 0.4} if look.color == PAPER else {}
        )
        ax.add_patch(Rectangle((box.start, y), box.stop - box.start, 0.9, **style))
        name = _short(box.name)
        if box.kind != "wait" and (box.stop - box.start) / stop > 0.011 * len(name) + 0.006:
            ax.text(
                (box.start + box.stop) / 2, y + 0.45, name, ha="center", va="center",
                fontsize="small", color=text_color(look.color), clip_on=True,
                bbox={"boxstyle": "round,pad=0.1", "facecolor": look.color, "edgecolor": "none"},
            )  # fmt: skip


def _short(name):
    """The last word of a name: ``3`` for ``backward layer 3``, ``0.attn`` for ``layers.0.attn``."""
    return name.split()[-1].removeprefix("layers.")


def _draw_memory(ax, at, held, *, legend=True):
    """Stack the kinds over the moments `at`, one more than there are; return the largest sum."""
    base = np.zeros(len(at))
    for kind in STACK:
        height = np.array([each.get(kind, 0) for each in [*held, held[-1]]], float)
        if height.any():
            look = KINDS[kind].bar | {"linewidth": 0}
            ax.fill_between(at, base, base + height, step="post", **look)
        base += height
    ax.set_ylim(0, 1.08 * base.max())
    bytes_axis(ax.yaxis)
    if legend:
        handles = [_patch(KINDS[kind]) for kind in STACK if any(each.get(kind) for each in held)]
        ax.legend(
            handles=handles[::-1], loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small",
            handleheight=1.2,
        )  # fmt: skip
    return int(base.max())


def _legend(fig, boxes):
    """Name what is drawn in the lanes, above them."""
    shown = [kind for kind in SPANS if any(box.kind == kind for box in boxes)]
    fig.legend(
        handles=[_patch(SPANS[kind]) for kind in shown], loc="outside upper center",
        ncols=len(shown), fontsize="small", handleheight=1.2,
    )  # fmt: skip


def _patch(look):
    """A patch for a legend."""
    from matplotlib.patches import Patch

    style = look.bar | ({"edgecolor": "#999999"} if look.color == PAPER else {})
    return Patch(label=look.label, **style)


# --- the picture to remember, from the model ---------------------------------------------------

RANKS, TOKENS, SEQ = 8, 4096, 1024
FLOPS_PER_S, LINK = 50e12, Link(12.5e9, 30e-6)


def _six_units():
    """A model of six units, large enough for a device to be busy: 4 layers of width 1024."""
    spec = gpt_like(4, 1024, 16, vocab=8192, seq=SEQ, tied=False)
    kept = korthikanti_layer_bytes(
        SEQ, TOKENS // SEQ, spec.hidden, spec.heads, recompute="selective"
    )
    return transformer_work(
        spec, TOKENS, SEQ, flops_per_s=FLOPS_PER_S, memory_bytes_per_s=900e9, kept_bytes=kept
    )


def stage_timeline(stage, *, prefetch=0, overlap=False):
    """Draw one step of a stage over time, from the timeline model.

    Parameters
    ----------
    stage : int
    prefetch : int
        Elements gathered ahead at stage 3; 1 is one unit.
    overlap : bool
        Reduce gradients while the next are computed.

    Returns
    -------
    Figure
        The same model, devices and link for every stage, so that pictures can be compared.
    """
    from zero_nb.overlap import chrome_of

    options = StepOptions(stage, RANKS, "bf16", prefetch_bucket_size=prefetch, overlap_comm=overlap)
    line = timeline(_six_units(), options, LINK)
    how = ", one unit gathered ahead" if prefetch else ""
    how += ", gradients reduced meanwhile" if overlap else ""
    title = f"{STAGES[stage].label.capitalize()}{how}: a step of {line.step_s * 1e3:.1f} ms"
    return draw_trace(chrome_of(line), title)


# --- memory through a step, from the ledger ------------------------------------------------------


def memory_through_a_step(world_size=4):
    """Draw what the ledger saw in one training step of each stage.

    Parameters
    ----------
    world_size : int

    Returns
    -------
    Figure
        Four panels of the same height, in float32; forward, backward and step marked.
    """
    from zero_nb.compare import digits_task
    from zero_nb.train.engine import Engine

    task, events = digits_task("lesson"), []
    for stage in range(4):
        engine = Engine(task.model, stage=stage, world_size=world_size)
        engine.train_step(*task.dataset.batch(0, world_size))
        events.append(list(engine.ledger.events))
    peaks = [max(sum(e.total_bytes.values()) for e in of_stage) for of_stage in events]
    with sheet(9.4, 8.2, nrows=4, sharey=True) as (fig, axes):
        for ax, look, of_stage in zip(axes, STAGES, events, strict=True):
            held = [event.total_bytes for event in of_stage]
            _draw_memory(ax, np.arange(len(held) + 1), held, legend=False)
            ax.set_xlim(0, len(held))
            ax.set_xticks([])
            ax.set_title(look.label)
            _mark_phases(ax, of_stage)
        axes[0].set_ylim(0, 1.22 * max(peaks))
        axes[-1].set_xlabel("one step: arrays made and freed, in order")
        fig.supylabel("bytes on one rank", fontsize="medium")
        handles = [_patch(KINDS[kind]) for kind in STACK[:-1]]
        fig.legend(handles=handles[::-1], loc="outside right upper", fontsize="small",
                   handleheight=1.2)  # fmt: skip
        told = [
            f"stage {stage} begins with {format_bytes(sum(of_stage[0].total_bytes.values()))} and "
            f"is highest in the {_phase_of_peak(of_stage)} pass, at {format_bytes(peak)}"
            for stage, (of_stage, peak) in enumerate(zip(events, peaks, strict=True))
        ]
        return render(
            fig,
            f"What one of {world_size} ranks holds through a training step, from the ledger, four "
            f"panels: {'; '.join(told)}.",
            {
                f"stage {stage}": {
                    f"{kind} bytes": [event.total_bytes[kind] for event in of_stage]
                    for kind in STACK[:-1]
                }
                for stage, of_stage in enumerate(events)
            },
        )


def _phase_of_peak(events):
    """The phase in which the sum is largest."""
    return max(events, key=lambda event: sum(event.total_bytes.values())).phase


def _mark_phases(ax, events):
    """Rule off and name forward, backward and step."""
    phases = [{"outside": "", "reduce": "step"}.get(e.phase, e.phase) for e in events]
    for name in ("forward", "backward", "step"):
        first = phases.index(name)
        last = len(phases) - phases[::-1].index(name)
        if name != "forward":
            ax.axvline(first, color="#888888", linewidth=0.8, linestyle=(0, (3, 2)))
        wide = last - first > 0.1 * len(events)
        ax.text(
            (first + last) / 2 if wide else last, 0.95, name, ha="center" if wide else "right",
            va="top", fontsize="small", transform=ax.get_xaxis_transform(),
            bbox={"boxstyle": "round,pad=0.1", "facecolor": PAPER, "edgecolor": "none"},
        )  # fmt: skip


# --- what is exposed -----------------------------------------------------------------------------


def exposed_over_bandwidth(model="gpt2-xl", world_size=64, device="a100-40gb", tokens=4096):
    """Draw the share of a step that stands still, over bandwidth and prefetch depth.

    Parameters
    ----------
    model, device : str
        Presets.
    world_size, tokens : int
        Ranks, and tokens of each in a step.

    Returns
    -------
    Figure
        From the timeline model on a network of two levels; half of the device's peak.
    """
    spec, chip = get_model(model), get_device(device)
    work = transformer_work(
        spec, tokens, 1024, flops_per_s=chip.flops_per_s / 2,
        memory_bytes_per_s=chip.memory_bytes_per_s,
    )  # fmt: skip
    speeds = np.geomspace(1e9, 100e9, 25)
    block = spec.block_numel
    ways = {
        "nothing ahead": {},
        "1 unit ahead": {"prefetch_bucket_size": 1},
        "1 ahead, reduced meanwhile": {"prefetch_bucket_size": 1, "overlap_comm": True},
        "4 ahead, reduced meanwhile": {"prefetch_bucket_size": 4 * block, "overlap_comm": True},
    }
    shares = {name: [] for name in ways}
    least = []
    for speed in speeds:
        network = replace(Network.of(chip), network_bytes_per_s=float(speed))
        for name, options in ways.items():
            line = timeline(work, StepOptions(3, world_size, "bf16", **options), network)
            shares[name].append(line.exposed_s / line.step_s)
        longest = max(line.comm_s, line.compute_s)
        least.append(1 - line.compute_s / longest)
    with sheet(9.2, 4.6) as (fig, ax):
        ax.set_xscale("log")
        ax.set_ylim(0, 1)
        ax.set_xlim(speeds[0], speeds[-1] * 6)
        ax.grid(visible=True, which="major", axis="both")
        colors = (PETROFF10[2], PETROFF10[6], PETROFF10[4], PETROFF10[0])
        for line, color, dash in zip(
            shares.values(), colors, ("-", (0, (5, 1.5)), "-.", (0, (1, 1.2))), strict=True
        ):
            ax.plot(speeds, line, color=color, linestyle=dash, linewidth=2.2)
        ax.plot(speeds, least, color=INK, linewidth=1.0, linestyle=(0, (6, 3)))
        places = spread([line[-1] for line in [*shares.values(), least]], 0.065)
        up = max(0.0, 0.03 - min(places))
        names = [*shares, "what no schedule can hide"]
        for name, place, color in zip(names, places, (*colors, INK), strict=True):
            label_line(ax, speeds[-1], place + up, name, color)
        usual = chip.network_bytes_per_s
        ax.axvline(usual, color="#888888", linewidth=0.9, linestyle=(0, (6, 3)))
        ax.annotate(
            f"as such nodes\nare built:\n{usual / 1e9:g} GB/s", (usual, 0.97), xytext=(4, 0),
            textcoords="offset points", va="top", fontsize="small",
        )  # fmt: skip
        ax.xaxis.set_major_formatter(lambda value, _: f"{value / 1e9:g}")
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        ax.set_xlabel("GB/s that one device sends to other nodes")
        ax.set_ylabel("share of the step that stands still")
        ax.set_title(f"Stage 3, {spec.name} on {world_size} devices, {tokens:,} tokens each")
        at = int(np.abs(speeds - usual).argmin())
        told = ", ".join(f"{line[at]:.0%} with {name}" for name, line in shares.items())
        return render(
            fig,
            f"Lines of the share of a stage-3 step in which nothing is computed, over the "
            f"bandwidth between nodes. At {speeds[at] / 1e9:.3g} GB/s it is {told}, of which no "
            f"schedule can hide {least[at]:.0%}, the dashed line. Every line falls with bandwidth.",
            {
                "bytes per s": speeds,
                **{f"{name} share": line for name, line in shares.items()},
                "least share": least,
            },
        )


# --- the peak and its floor ----------------------------------------------------------------------


def peak_over_ranks(world_sizes=(1, 2, 4, 8, 16)):
    """Draw stage 3's peak over the number of ranks, measured on the schedule's lines.

    Parameters
    ----------
    world_sizes : sequence of int

    Returns
    -------
    Figure
        One sample a rank, in float32: units gathered at need, one ahead, or kept after forward.
    """
    from zero_nb.compare import digits_task
    from zero_nb.overlap import predicted_step
    from zero_nb.train.engine import Engine

    task = digits_task("lesson")
    ways = {
        "gathered at need": {},
        "one unit ahead": {"prefetch_bucket_size": 1},
        "kept after forward": {"reshard_after_forward": False},
    }
    measured = {name: [] for name in ways}
    predicted, floors = {name: [] for name in ways}, {}
    for name, options in ways.items():
        for size in world_sizes:
            engine = Engine(task.model, stage=3, world_size=size, **options)
            batch = task.dataset.batch(0, size)
            engine.train_step(*batch)
            measured[name].append(engine.train_step(*batch).peak_bytes)
            step = predicted_step(engine, size, **options)
            predicted[name].append(step.peak_bytes)
        floors[name] = _floor(step)
    return _draw_peaks(world_sizes, measured, predicted, floors, task.model.numel)


def _floor(step):
    """The largest sum of what does not become less with more ranks."""
    return max(
        sum(held[kind] for kind in ("unsharded", "bucket", "activation", "workspace"))
        for _, held in step.memory()
    )


def _draw_peaks(world_sizes, measured, predicted, floors, numel):
    """Draw lines, dots on them, and a floor under each."""
    colors = (PETROFF10[0], PETROFF10[4], PETROFF10[6])
    with sheet(8.8, 4.6) as (fig, ax):
        ax.set_xscale("log", base=2)
        ax.set_ylim(0, 1.1 * max(max(line) for line in predicted.values()))
        last = world_sizes[-1]
        ax.set_xlim(world_sizes[0] * 0.9, last * 3.4)
        places = spread([line[-1] for line in predicted.values()], 0.075 * ax.get_ylim()[1])
        for (name, line), place, color in zip(predicted.items(), places, colors, strict=True):
            ax.plot(world_sizes, line, color=color, linewidth=2.0)
            ax.plot(world_sizes, measured[name], "o", color=color, markersize=7,
                    markeredgecolor=PAPER)  # fmt: skip
            ax.plot(world_sizes, [floors[name]] * len(world_sizes), color=color, linewidth=1.2,
                    linestyle=(0, (6, 3)))  # fmt: skip
            label_line(ax, last, place, f"{name}: {format_bytes(line[-1])}", color, dx=10)
        ax.set_xticks(world_sizes, [str(size) for size in world_sizes])
        ax.minorticks_off()
        bytes_axis(ax.yaxis)
        ax.set_xlabel("ranks")
        ax.set_ylabel("largest sum on one rank in a step")
        ax.set_title(f"Stage 3's peak ({numel:,} parameters, float32) and its floor, dashed")
        exact = measured == {name: list(line) for name, line in predicted.items()}
        told = "; ".join(
            f"{name} it falls from {format_bytes(line[0])} to {format_bytes(line[-1])}, to a floor "
            f"of {format_bytes(floors[name])}"
            for name, line in predicted.items()
        )
        return render(
            fig,
            f"The peak of a stage-3 step over {world_sizes[0]} to {last} ranks, lines from the "
            f"schedule with measured dots {'exactly on' if exact else 'off'} them: {told}. The "
            "floor is the largest sum of live units, their gradient and activations, which more "
            "ranks do not make smaller.",
            {
                "world size": world_sizes,
                **{f"{name} predicted bytes": line for name, line in predicted.items()},
                **{f"{name} measured bytes": line for name, line in measured.items()},
                "floor bytes": floors,
            },
        )


TIMELINE_FIGURES = {
    "timeline_stage_0": lambda: stage_timeline(0),
    "timeline_stage_1": lambda: stage_timeline(1),
    "timeline_stage_2": lambda: stage_timeline(2),
    "timeline_stage_3": lambda: stage_timeline(3),
    "timeline_prefetch": lambda: stage_timeline(3, prefetch=1, overlap=True),
    "memory_through_a_step": memory_through_a_step,
    "exposed_over_bandwidth": exposed_over_bandwidth,
    "peak_over_ranks": peak_over_ranks,
}
"""The figures of this module that need no run of the user's own, by the name they are saved as."""
