"""Figures of notebooks 07 and 08: what it costs to talk, and what ZeRO does not shard."""

from dataclasses import dataclass, replace

import numpy as np

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
    rank_look,
    sheet,
    spread,
    text_color,
)
from zero_nb.show.timeline_figures import SPANS

__all__ = [
    "TimeCurve",
    "activation_curves",
    "cheapest_stage_map",
    "kinds_over_batch",
    "lanes_side_by_side",
    "rank_grid",
    "step_time_over_bandwidth",
    "time_ratio_map",
]


# ------------------------------------------------------------------ notebook 07: time on a link

_LANE_LOOKS = {name: SPANS[name] for name in ("forward", "backward", "wait")} | {
    "param": replace(SPANS["param"], label="parameters travel"),
    "grad": replace(SPANS["grad"], label="gradients travel"),
}


def lanes_side_by_side(lines, title):
    """Draw steps of the timeline model under one another, two lanes each, on one time axis.

    Parameters
    ----------
    lines : mapping of str to Timeline
        By name.
    title : str

    Returns
    -------
    Figure
        For each step what is computed, with the time in which it stands still, and what travels.
    """
    longest = max(line.step_s for line in lines.values()) * 1e3
    with sheet(9.4, 0.9 + 1.25 * len(lines)) as (fig, ax):
        ax.grid(axis="y", visible=False)
        ax.grid(axis="x", visible=True)
        ax.set_xlim(0, 1.12 * longest)
        ax.set_ylim(2.4 * len(lines) - 0.25, -0.6)
        ticks = {}
        for row, (name, line) in enumerate(lines.items()):
            top = 2.4 * row
            for span in line.spans:
                _lane_box(ax, span, top)
            ticks |= {top + 0.4: "computes", top + 1.3: "travels"}
            ax.annotate(
                f"{name}: {line.step_s * 1e3:.0f} ms", (0, top - 0.1), xytext=(3, 0),
                textcoords="offset points", va="bottom", fontweight="bold",
            )  # fmt: skip
            ax.plot([line.step_s * 1e3] * 2, [top - 0.05, top + 1.75], color=INK, linewidth=1.4)
        ax.set_yticks(list(ticks), list(ticks.values()))
        ax.tick_params(axis="y", length=0)
        ax.set_xlabel("milliseconds, modelled")
        ax.set_title(title)
        fig.legend(
            handles=[_lane_patch(look) for look in _LANE_LOOKS.values()],
            loc="outside lower center", ncols=len(_LANE_LOOKS), fontsize="small", handleheight=1.2,
        )  # fmt: skip
        told = "; ".join(
            f"{name} takes {line.step_s * 1e3:.0f} ms, of which it computes "
            f"{line.compute_s * 1e3:.0f} and stands still {line.exposed_s * 1e3:.0f}"
            for name, line in lines.items()
        )
        return render(
            fig,
            f"Two lanes for each step, what is computed and what travels, modelled. {title}: "
            f"{told}.",
            {
                name: {
                    "step ms": line.step_s * 1e3,
                    "computes ms": line.compute_s * 1e3,
                    "messages under way ms": line.comm_s * 1e3,
                    "stands still ms": line.exposed_s * 1e3,
                }
                for name, line in lines.items()
            },
        )


def _lane_box(ax, span, top):
    """Draw one span: computing and waiting above, messages below."""
    from matplotlib.patches import Rectangle

    if span.lane == "communication":
        kind = "param" if span.name.startswith("all_gather") else "grad"
    else:
        kind = "wait" if span.lane == "wait" else span.phase
    look = _LANE_LOOKS.get(kind)
    if look is None:
        return  # updates are too short to be seen
    left, width = span.start_s * 1e3, (span.stop_s - span.start_s) * 1e3
    style = look.bar | ({"edgecolor": "#999999"} if kind == "wait" else {})
    ax.add_patch(Rectangle((left, top + 0.9 * (span.lane == "communication")), width, 0.8, **style))
    number = span.name.split()[-1]
    low, high = ax.get_xlim()
    if kind != "wait" and width > 0.018 * (high - low) * (1 + 0.4 * len(number)):
        ax.text(
            left + width / 2, top + 0.4 + 0.9 * (span.lane == "communication"), number,
            ha="center", va="center", fontsize="x-small", color=text_color(look.color),
            bbox={"boxstyle": "round,pad=0.1", "facecolor": look.color, "edgecolor": "none"},
        )  # fmt: skip


def _lane_patch(look):
    """A patch for the legend."""
    from matplotlib.patches import Patch

    style = look.bar | ({"edgecolor": "#999999"} if look.color == PAPER else {})
    return Patch(label=look.label, **style)


@dataclass(frozen=True)
class TimeCurve:
    """A line of `step_time_over_bandwidth`.

    Attributes
    ----------
    stage : int
        Gives it its colour.
    overlap : bool
        Solid if messages travel while something is computed, dashed if not.
    seconds : sequence of float
        One for each bandwidth.
    """

    stage: int
    overlap: bool
    seconds: tuple


def step_time_over_bandwidth(gigabits, curves, compute_s, crossing):
    """Draw modelled step times over the bandwidth of the link.

    Parameters
    ----------
    gigabits : sequence of float
        Bandwidths in Gb/s; GB/s are written on a second axis.
    curves : mapping of str to TimeCurve
        By name.
    compute_s : float
        What the step takes without any message.
    crossing : float
        The bandwidth in Gb/s from which messages can be hidden.

    Returns
    -------
    Figure
        Milliseconds on logarithmic axes.
    """
    with sheet(9.4, 5.0) as (fig, ax):
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.grid(visible=True, which="major", axis="both")
        ax.set_xlim(gigabits[0], gigabits[-1] * 4.2)
        for curve in curves.values():
            look = STAGES[curve.stage]
            dash = "-" if curve.overlap else (0, (4, 2))
            width = 3.2 if curve.stage == 0 and curve.overlap else 2.0
            ax.plot(gigabits, np.array(curve.seconds) * 1e3, color=look.color, linestyle=dash,
                    linewidth=width)  # fmt: skip
        ax.plot([gigabits[0], gigabits[-1]], [compute_s * 1e3] * 2, color=INK, linewidth=1.0,
                linestyle=(0, (1, 2)))  # fmt: skip
        longest = max(max(curve.seconds) for curve in curves.values()) * 1e3
        ax.set_ylim(0.6 * compute_s * 1e3, 1.15 * longest)
        ends = [curve.seconds[-1] * 1e3 for curve in curves.values()]
        names = [*curves, "computing alone"]
        looks = [STAGES[curve.stage].color for curve in curves.values()] + [INK]
        low, high = np.log10(ax.get_ylim())
        places = spread(list(np.log10([*ends, compute_s * 1e3])), 0.052 * (high - low))
        for name, place, color in zip(names, places, looks, strict=True):
            label_line(ax, gigabits[-1], 10**place, name, color)
        ax.axvline(crossing, color="#888888", linewidth=1.0, linestyle=(0, (6, 3)))
        ax.annotate(
            f"{crossing:.0f} Gb/s: from here on\nmessages can be hidden", (crossing, 0.98),
            xycoords=("data", "axes fraction"), xytext=(5, 0), textcoords="offset points",
            va="top", fontsize="small",
        )  # fmt: skip
        _two_scales(ax, gigabits)
        steps = [power * digit for power in (1, 10, 100, 1000, 10_000) for digit in (1, 2, 5)]
        low, high = ax.get_ylim()
        steps = [step for step in steps if low <= step <= high]
        ax.set_yticks(steps, [f"{step:,}" for step in steps])
        ax.set_ylabel("ms for a step, modelled")
        told = "; ".join(
            f"{name} from {curve.seconds[0] * 1e3:.0f} ms to {curve.seconds[-1] * 1e3:.0f} ms"
            for name, curve in curves.items()
        )
        return render(
            fig,
            f"Modelled step times over the bandwidth, {gigabits[0]:g} to {gigabits[-1]:g} Gb/s, on "
            f"logarithmic axes: {told}. Computing alone takes {compute_s * 1e3:.0f} ms. A line at "
            f"{crossing:.0f} Gb/s marks from where on messages can be hidden.",
            {"Gb/s": list(gigabits), "GB/s": [speed / 8 for speed in gigabits]}
            | {f"{name} ms": [s * 1e3 for s in curve.seconds] for name, curve in curves.items()}
            | {"computing alone ms": compute_s * 1e3, "crossing Gb/s": crossing},
        )


def _two_scales(ax, gigabits):
    """Write Gb/s below and GB/s above the same axis."""
    ticks = [speed for speed in (25, 50, 100, 200, 400, 800, 1600) if speed <= gigabits[-1]]
    ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.set_xlabel("Gb/s that one rank sends")
    above = ax.secondary_xaxis("top", functions=(lambda x: x / 8, lambda x: x * 8))
    above.set_xticks([tick / 8 for tick in ticks], [f"{tick / 8:g}" for tick in ticks])
    for each in (ax, above):
        each.minorticks_off()
    above.set_xlabel("the same in GB/s")


def time_ratio_map(tokens, gigabits, ratios):
    """Draw how much longer stage 3 takes than data parallelism, over tokens and bandwidth.

    Parameters
    ----------
    tokens : sequence of int
        Of each rank in a step, a row each.
    gigabits : sequence of float
        Bandwidths in Gb/s, a column each.
    ratios : array_like, shape (len(tokens), len(gigabits))
        Modelled step time of stage 3 over that of data parallelism.

    Returns
    -------
    Figure
        A cell with its number for each pair, in three named classes.
    """
    ratios = np.asarray(ratios, float)
    kinds = np.digitize(ratios, [limit for limit, _ in _RATIO_CLASSES[1:]])
    with sheet(8.8, 0.9 + 0.5 * len(tokens)) as (fig, ax):
        ax.grid(visible=False)
        ax.set_xlim(0, len(gigabits))
        ax.set_ylim(0, len(tokens))
        for row, column in np.ndindex(ratios.shape):
            look = _RATIO_CLASSES[kinds[row, column]][1]
            _map_cell(ax, column, row, look, f"{ratios[row, column]:.2f}")
        ax.set_xticks(np.arange(len(gigabits)) + 0.5, [f"{speed:g}" for speed in gigabits])
        ax.set_yticks(np.arange(len(tokens)) + 0.5, [f"{count:,}" for count in tokens])
        ax.tick_params(length=0)
        ax.set_xlabel("Gb/s that one rank sends")
        ax.set_ylabel("tokens of a rank in a step")
        ax.set_title("Step of stage 3 over step of data parallelism, both with overlap, modelled")
        fig.legend(
            handles=[_lane_patch(look) for _, look in _RATIO_CLASSES],
            loc="outside lower center", ncols=len(_RATIO_CLASSES), fontsize="small",
            handleheight=1.2,
        )  # fmt: skip
        counts = np.bincount(kinds.ravel(), minlength=len(_RATIO_CLASSES))
        told = ", ".join(
            f"{look.label} in {count}"
            for (_, look), count in zip(_RATIO_CLASSES, counts, strict=True)
        )
        places = [np.unravel_index(at, ratios.shape) for at in (ratios.argmax(), ratios.argmin())]
        most, least = (
            f"{ratios[row, column]:.2f}, with {tokens[row]:,} tokens at {gigabits[column]:g} Gb/s"
            for row, column in places
        )
        return render(
            fig,
            f"A grid of {len(tokens)} numbers of tokens by {len(gigabits)} bandwidths with the "
            f"step time of stage 3 over that of data parallelism, modelled: {told} cells. The "
            f"largest ratio is {most}; the smallest {least}.",
            {"Gb/s": list(gigabits)}
            | {f"{count:,} tokens": row for count, row in zip(tokens, ratios, strict=True)},
        )


_RATIO_CLASSES = (
    (0.0, Look("the same, within 5 %", "#dff1f3", "")),
    (1.05, Look("up to 1.3 times", KINDS["unsharded"].color, "--")),
    (1.3, Look("1.3 to 1.5 times", PETROFF10[8], "//")),
)
"""From which ratio on, and how it is drawn; darker is slower."""


def _map_cell(ax, x, y, look, text):
    """Draw a cell of a map with its text on a patch of its own colour."""
    from matplotlib.patches import Rectangle

    ax.add_patch(Rectangle((x, y), 1, 1, **look.bar))
    ax.text(
        x + 0.5, y + 0.5, text, ha="center", va="center", color=text_color(look.color),
        bbox={"boxstyle": "round,pad=0.3", "facecolor": look.color, "edgecolor": "none"},
    )  # fmt: skip


# -------------------------------------------------------------- notebook 08: what is not sharded

_STACK = ("param", "optim", "grad", "unsharded", "bucket", "activation")
"""From the bottom up; activations on top, since they grow."""


def kinds_over_batch(batches, stages):
    """Draw the fullest moment of a step by kind over the batch, a panel a stage.

    Parameters
    ----------
    batches : sequence of int
        Samples of a rank.
    stages : mapping of str to sequence of mapping
        By stage the bytes by kind at the fullest moment, one mapping for each batch.

    Returns
    -------
    Figure
        Stacked areas with one scale.
    """
    with sheet(9.4, 4.2, ncols=len(stages), sharey=True, squeeze=False) as (fig, grid):
        data, said = {"samples a rank": list(batches)}, []
        for ax, (name, moments) in zip(grid[0], stages.items(), strict=True):
            base = np.zeros(len(batches))
            for kind in _STACK:
                height = np.array([moment[kind] for moment in moments], float)
                look = KINDS[kind]
                ax.fill_between(batches, base, base + height, **look.bar | {"linewidth": 0})
                base += height
                data[f"{name} {look.label} bytes"] = height.astype(int)
            ax.plot(batches, base, color=INK, linewidth=1.2)
            ax.set_xlim(batches[0], batches[-1])
            ax.set_xticks(batches)
            ax.set_xlabel("samples of a rank")
            ax.set_title(name)
            shares = [moment["activation"] / top for moment, top in zip(moments, base, strict=True)]
            said.append(
                f"{name} from {format_bytes(base[0])}, {shares[0]:.0%} of it activations, to "
                f"{format_bytes(base[-1])}, {shares[-1]:.0%} of it activations"
            )
        grid[0][0].set_ylim(0, None)
        bytes_axis(grid[0][0].yaxis)
        grid[0][0].set_ylabel("bytes of a rank at the peak")
        fig.legend(
            handles=[_lane_patch(KINDS[kind]) for kind in _STACK[::-1]], loc="outside right upper",
            fontsize="small", handleheight=1.2,
        )  # fmt: skip
        return render(
            fig,
            f"Stacked areas of one rank's bytes at its fullest moment over {batches[0]} to "
            f"{batches[-1]} samples a rank: {'; '.join(said)}.",
            data,
        )


def cheapest_stage_map(numels, batches, peaks):
    """Draw which stage has the lowest measured peak, over the size of the model and the batch.

    Parameters
    ----------
    numels : sequence of int
        Parameters of the models, a column each.
    batches : sequence of int
        Samples of a rank, a row each.
    peaks : array_like of int, shape (4, len(numels), len(batches))
        Measured, in bytes.

    Returns
    -------
    Figure
        A cell for each pair with its stage, and how much higher stage 3 peaks, or stage 1 where
        stage 3 is the lowest.
    """
    peaks = np.asarray(peaks)
    best, lowest = peaks.argmin(axis=0), peaks.min(axis=0)
    with sheet(1.4 + 1.35 * len(numels), 1.3 + 0.85 * len(batches)) as (fig, ax):
        ax.grid(visible=False)
        ax.set_xlim(0, len(numels))
        ax.set_ylim(0, len(batches))
        for column, row in np.ndindex(best.shape):
            stage = int(best[column, row])
            other = 3 if stage < 3 else 1
            more = 100 * (peaks[other, column, row] / lowest[column, row] - 1)
            text = f"stage {stage}\nstage {other}: +{more:.1f} %"
            _map_cell(ax, column, row, STAGES[stage], text)
        ax.set_xticks(np.arange(len(numels)) + 0.5, [f"{numel:,}" for numel in numels])
        ax.set_yticks(np.arange(len(batches)) + 0.5, [f"{batch}" for batch in batches])
        ax.tick_params(length=0)
        ax.set_xlabel("parameters of the model")
        ax.set_ylabel("samples of a rank")
        ax.set_title("The stage with the lowest peak, measured, and how much higher another one is")
        places = {stage: np.argwhere(best == stage) for stage in range(4)}
        said = "; ".join(
            f"stage {stage} in {len(at)}, from {numels[at[:, 0].min()]:,} to "
            f"{numels[at[:, 0].max()]:,} parameters"
            for stage, at in places.items()
            if len(at)
        )
        return render(
            fig,
            f"A grid of {len(numels)} model sizes by {len(batches)} batches with the stage whose "
            f"measured peak is lowest: {said}.",
            {
                f"stage {stage} peak bytes, {batch} a rank": peaks[stage, :, row]
                for stage in range(4)
                for row, batch in enumerate(batches)
            }
            | {"parameters": list(numels)},
        )


def activation_curves(passes):
    """Draw the activations that a rank keeps through a forward and a backward pass.

    Parameters
    ----------
    passes : mapping of str to Passes
        By name, at most four.

    Returns
    -------
    Figure
        Bytes over the part of both passes that is done, counted in arrays kept or dropped.

    Raises
    ------
    ValueError
        If there are no passes, or more than four.
    """
    if not 1 <= len(passes) <= len(_CURVES):
        raise ValueError(f"give 1 to {len(_CURVES)} passes, got {len(passes)}")
    highest = max(each.peak_bytes for each in passes.values())
    with sheet(9.0, 3.9) as (fig, ax):
        ax.set(xlim=(0, 1.45), ylim=(0, 1.1 * highest))
        wishes = [0.93 * each.peak_bytes for each in passes.values()]
        places = spread(wishes, 0.16 * highest)
        for look, (name, each), place in zip(_CURVES, passes.items(), places, strict=False):
            done = np.linspace(0, 1, len(each.activation_bytes))
            ax.plot(done, each.activation_bytes, drawstyle="steps-post", **look.line)
            text = f"{name}:\n{format_bytes(each.peak_bytes)}, {each.forwards} forward passes"
            label_line(ax, 1.0, place, text, look.color)
        bytes_axis(ax.yaxis)
        ax.set_xticks([0, 1], ["start", "end"])
        ax.set_xlabel("arrays made and freed, in order: forward, then backward")
        ax.set_ylabel("activations of a rank")
        ax.set_title("What is kept for backward, measured")
        said = "; ".join(
            f"{name} at most {format_bytes(each.peak_bytes)} with {each.forwards} forward passes "
            "of layers"
            for name, each in passes.items()
        )
        return render(
            fig,
            f"Curves of the activations one rank keeps through forward and backward: {said}.",
            {
                name: {"peak bytes": each.peak_bytes, "forward passes of layers": each.forwards}
                for name, each in passes.items()
            },
        )


_CURVES = (
    Look("", PETROFF10[2], "", "-", 2.2),
    Look("", PETROFF10[4], "", (0, (5, 2)), 2.2),
    Look("", PETROFF10[0], "", "-", 2.6),
    Look("", PETROFF10[8], "", (0, (1, 1.2)), 2.2),
)


def rank_grid(data, tensor):
    """Draw ranks as a grid: a row computes one batch together, a column shares states.

    Parameters
    ----------
    data, tensor : int
        Degrees of data and tensor parallelism.

    Returns
    -------
    Figure
        For each rank the slice of every layer that it computes with, and the shard of that
        slice's states that it holds.
    """
    with sheet(2.2 + 1.75 * tensor, 0.9 + 1.0 * data) as (fig, ax):
        ax.axis("off")
        ax.set(xlim=(-1.35, tensor), ylim=(data + 0.05, -0.55))
        rows = {}
        for row in range(data):
            ax.text(-0.08, row + 0.5, f"samples {row}:\ntensor group", ha="right", va="center")
            for column in range(tensor):
                rank, look = row * tensor + column, rank_look(column)
                text = f"rank {rank}\nslice {column}, shard {row}"
                _map_cell(ax, column, row, look, text)
                rows[f"rank {rank}"] = f"slice {column}, shard {row} of {data}"
        for column in range(tensor):
            ax.text(column + 0.5, -0.1, f"data group {column}", ha="center", va="bottom")
        return render(
            fig,
            f"A grid of {data * tensor} ranks: {data} rows of {tensor} ranks that compute the same "
            f"samples, each with its slice of every layer; {tensor} columns of {data} ranks that "
            f"have the same slice and share its states, each holding one of {data} shards.",
            rows,
        )
