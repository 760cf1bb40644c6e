"""Figures of notebooks 04 to 06: who owns what, and what comes and goes within a step."""

import numpy as np

from zero_nb.show.figure import render, render_stills
from zero_nb.show.slider import still_slider
from zero_nb.show.style import (
    INK,
    KINDS,
    PAPER,
    PETROFF10,
    STAGES,
    Look,
    bytes_axis,
    format_bytes,
    label_bar,
    label_line,
    rank_look,
    sheet,
    spread,
    text_color,
)

__all__ = [
    "gradient_memory",
    "held_bars",
    "letter_grid",
    "ownership_strip",
    "peak_over_world_size",
    "sent_by_collective",
    "sent_over_micro_batches",
    "stage_3_lanes",
    "unit_slider",
]

HELD = ("param", "grad", "optim")

COLLECTIVES = {
    "all-reduce": Look("all-reduce", PETROFF10[8], ""),
    "reduce-scatter": Look("reduce-scatter", PETROFF10[1], "//"),
    "all-gather": Look("all-gather", PETROFF10[9], "--"),
}
"""How each collective is drawn: gradients travel in warm, parameters in cold colours."""

_PADDING = {"facecolor": "#ffffff", "hatch": "xxxx", "edgecolor": "#777777", "linewidth": 0.8}


def _box(ax, x, y, width, height, look):
    """Draw one filled rectangle."""
    from matplotlib.patches import Rectangle

    ax.add_patch(Rectangle((x, y), width, height, **look))


def _on(ax, x, y, text, color, **more):
    """Write on a patch of a filled shape's own colour."""
    ax.text(
        x, y, text, ha="center", va="center", color=text_color(color),
        bbox={"boxstyle": "round,pad=0.15", "facecolor": color, "edgecolor": "none"}, **more,
    )  # fmt: skip


# -------------------------------------------------------------------- notebook 04: who owns what


def ownership_strip(layout):
    """Draw a flat buffer as a strip: which rank owns which elements, and where layers end.

    Parameters
    ----------
    layout : FlatLayout

    Returns
    -------
    Figure
        One colour and hatch for each rank, padding crossed out, a line at each border between
        parameters; up to 40 elements have numbers.
    """
    owned = [_owned(layout, rank) for rank in range(layout.world_size)]
    borders = np.cumsum(layout.numels).tolist()
    with sheet(9.2, 2.35) as (fig, ax):
        ax.set(xlim=(0, layout.padded_numel), ylim=(-0.75, 2.15))
        ax.axis("off")
        for rank, (start, stop) in enumerate(owned):
            _box(ax, start, 0, stop - start, 1, rank_look(rank).bar)
        if layout.padding:
            _box(ax, layout.numel, 0, layout.padding, 1, _PADDING)
        _name_ranks(ax, layout, owned)
        _name_layers(ax, layout, borders)
        return render(
            fig,
            _strip_alt(layout, owned, borders),
            {
                "rank": list(range(layout.world_size)),
                "first element": [start for start, _ in owned],
                "end": [stop for _, stop in owned],
                "real elements": [stop - start for start, stop in owned],
            },
        )


def _owned(layout, rank):
    """Start and stop of a rank's real elements in the flat buffer."""
    start = rank * layout.shard_numel
    return min(start, layout.numel), min(start + layout.shard_numel, layout.numel)


def _name_ranks(ax, layout, owned):
    """Write rank names under the strip, and element numbers on a short one."""
    shard = layout.shard_numel
    if layout.padded_numel <= 40:
        for element in range(layout.padded_numel):
            if element < layout.numel:
                _on(ax, element + 0.5, 0.5, str(element), PAPER, fontsize="small")
            ax.plot([element, element], [0, 1], color="#ffffff", linewidth=1.2)
    for rank, (start, stop) in enumerate(owned):
        middle = (rank + 0.5) * shard
        ax.plot([rank * shard, (rank + 1) * shard], [-0.14, -0.14], color=INK, linewidth=1.0)
        for edge in (rank * shard, (rank + 1) * shard):
            ax.plot([edge, edge], [-0.22, -0.06], color=INK, linewidth=1.0, clip_on=False)
        ax.text(middle, -0.45, f"rank {rank}: {stop - start:,}", ha="center", va="center")
    if layout.padding and layout.padded_numel <= 40:
        middle = layout.numel + layout.padding / 2
        ax.text(middle, 1.18, "padding", ha="center", va="bottom", fontsize="small")


def _name_layers(ax, layout, borders):
    """Rule off the parameters above the strip and name those with room."""
    start, thick = 0, 2.2 if len(borders) < 6 else 1.3
    for border, name in zip(borders, layout.names, strict=True):
        ax.plot([border, border], [-0.02, 1.75], color="#000000", linewidth=thick)
        if border - start >= 0.0115 * layout.padded_numel * len(name):
            ax.text((start + border) / 2, 1.45, name, ha="center", va="bottom", fontsize="small")
            ax.annotate(
                "", (start, 1.4), (border, 1.4),
                arrowprops={"arrowstyle": "<->", "color": INK, "shrinkA": 1, "shrinkB": 1},
            )  # fmt: skip
        start = border


def _strip_alt(layout, owned, borders):
    """Say who owns how much and which borders cut a parameter."""
    counts = [stop - start for start, stop in owned]
    inside = [
        name
        for name, border, numel in zip(layout.names, borders, layout.numels, strict=True)
        if any(border - numel < rank * layout.shard_numel < border for rank in range(len(owned)))
    ]
    said = [
        f"A strip of {layout.padded_numel:,} elements in {layout.world_size} equal shards of "
        f"{layout.shard_numel:,}.",
        f"Real elements: {', '.join(f'rank {r} {count:,}' for r, count in enumerate(counts))}; "
        f"padding {layout.padding:,}.",
    ]
    if inside:
        said.append(f"Shard borders lie inside {', '.join(inside)}.")
    return " ".join(said)


def held_bars(table, numel, world_size):
    """Draw bytes per parameter that a rank holds at each stage, for several recipes.

    Parameters
    ----------
    table : mapping of str to sequence of mapping
        By recipe the four stages' ``param``, ``grad`` and ``optim`` in bytes, measured.
    numel, world_size : int

    Returns
    -------
    Figure
        A group of four stacked bars for each recipe, the total above each.
    """
    totals = {
        name: [sum(stage.values()) / numel for stage in stages] for name, stages in table.items()
    }
    highest = max(map(max, totals.values()))
    with sheet(9.4, 4.0) as (fig, ax):
        ax.set_ylim(0, 1.12 * highest)
        ticks = []
        for group, (name, stages) in enumerate(table.items()):
            for stage, held in enumerate(stages):
                x, base = 5 * group + stage, 0
                ticks.append((x, f"{stage}"))
                for kind in HELD:
                    height = held[kind] / numel
                    (bar,) = ax.bar(x, height, 0.86, bottom=base, **KINDS[kind].bar)
                    label_bar(ax, bar, f"{height:g}", smallest=0.06)
                    base += height
                ax.text(x, base + 0.01 * highest, f"{base:g}", ha="center", va="bottom",
                        fontweight="bold")  # fmt: skip
            ax.text(5 * group + 1.5, -0.13 * highest, name, ha="center", va="top",
                    fontweight="bold", clip_on=False)  # fmt: skip
        ax.set_xticks([x for x, _ in ticks], [text for _, text in ticks])
        ax.tick_params(axis="x", length=0)
        ax.set_ylabel("bytes per parameter")
        ax.set_title(f"Held by each of {world_size} ranks at stages 0 to 3, measured")
        handles = [_patch(KINDS[kind]) for kind in HELD]
        fig.legend(handles=handles, loc="outside lower center", ncols=3)
        said = "; ".join(
            f"{name} {', '.join(f'{total:g}' for total in row)}" for name, row in totals.items()
        )
        return render(
            fig,
            f"Stacked bars of bytes per parameter on one of {world_size} ranks, stages 0 to 3. "
            f"{said}.",
            {name: {f"stage {s}": total for s, total in enumerate(row)}
             for name, row in totals.items()},
        )  # fmt: skip


def _patch(look):
    """A legend's patch."""
    from matplotlib.patches import Patch

    return Patch(label=look.label, **look.bar)


def sent_by_collective(ways, numel, world_size):
    """Draw what one rank sends in a step, collective by collective, for several ways to do it.

    Parameters
    ----------
    ways : mapping of str to sequence of (str, int)
        By way the collectives, ``"all-reduce"``, ``"reduce-scatter"`` or ``"all-gather"``, with
        the elements that one rank sends in each.
    numel : int
        Parameters, Ψ.
    world_size : int

    Returns
    -------
    Figure
        Horizontal bars in units of Ψ(W−1)/W.
    """
    unit = numel * (world_size - 1) / world_size
    with sheet(8.6, 0.75 + 0.62 * len(ways)) as (fig, ax):
        for row, parts in enumerate(ways.values()):
            left = 0.0
            for collective, elements in parts:
                look, width = COLLECTIVES[collective], elements / unit
                ax.barh(-row, width, 0.7, left=left, **look.bar)
                _on(ax, left + width / 2, -row, f"{collective} {width:g}", look.color)
                left += width
            ax.text(left + 0.05, -row, f"{left:g}", va="center", fontweight="bold")
        ax.set_yticks([-row for row in range(len(ways))], list(ways))
        ax.tick_params(axis="y", length=0)
        ax.set_xlim(0, 3.3)
        ax.set_xticks(range(4))
        ax.grid(axis="x")
        ax.set_xlabel("elements sent by one rank, in units of Ψ(W−1)/W")
        said = "; ".join(
            f"{name}: {' and '.join(f'{c} {n / unit:g}' for c, n in parts)}, together "
            f"{sum(n for _, n in parts) / unit:g}"
            for name, parts in ways.items()
        )
        return render(
            fig,
            f"Elements that one of {world_size} ranks sends, in units of Ψ(W−1)/W. {said}.",
            {name: dict(parts) for name, parts in ways.items()},
        )


# ------------------------------------------------------- notebook 05: gradients on their way

_CURVES = (
    Look("", PETROFF10[8], "", "-", 4.0),
    Look("", PETROFF10[2], "", (0, (5, 2)), 2.2),
    Look("", PETROFF10[4], "", (0, (1, 1.2)), 2.6),
    Look("", PETROFF10[0], "", (0, (6, 2, 1, 2)), 2.2),
    Look("", PETROFF10[6], "", "-", 1.6),
)


def gradient_memory(timelines, numel, world_size):
    """Draw the gradients one rank holds through the backward pass: reduced or waiting.

    Parameters
    ----------
    timelines : mapping of str to sequence of LedgerEvent
        By name, at most five, each of one step with one backward pass.
    numel, world_size : int

    Returns
    -------
    Figure
        Bytes per parameter of gradients and buckets over the part of the backward pass that is
        done; a dotted line at what stage 2 holds at its end.

    Raises
    ------
    ValueError
        If there are no timelines, or more than five.
    """
    if not 1 <= len(timelines) <= len(_CURVES):
        raise ValueError(f"give 1 to {len(_CURVES)} timelines, got {len(timelines)}")
    curves = {name: _backward_curve(events) for name, events in timelines.items()}
    peaks = {name: max(y) / numel for name, (_, y) in curves.items()}
    floor = 2 / world_size
    with sheet(9.0, 4.2) as (fig, ax):
        top = 1.1 * max(peaks.values())
        ax.set(xlim=(0, 1.42), ylim=(0, top))
        # Curves that end at one height are named in the order of their peaks.
        wishes = [y[-1] / numel + 1e-6 * max(y) / numel for _, y in curves.values()]
        places = spread(wishes, 0.07 * top)
        for look, (name, (x, y)), place in zip(_CURVES, curves.items(), places, strict=False):
            ax.plot(x, np.array(y) / numel, drawstyle="steps-post", **look.line)
            label_line(ax, 1, place, f"{name}: peak {peaks[name]:.3g}", look.color)
        ax.axhline(floor, color=INK, linewidth=1.0, linestyle=(0, (1, 2)))
        ax.set_xticks([0, 0.25, 0.5, 0.75, 1], ["start", "¼", "½", "¾", "end"])
        ax.set_xlabel("part of the backward pass that is done")
        ax.set_ylabel("bytes per parameter")
        ax.set_title("Gradients on one rank: reduced, or waiting in a bucket")
        said = ", ".join(f"{name} {peak:.3g}" for name, peak in peaks.items())
        return render(
            fig,
            f"Gradient bytes per parameter on one of {world_size} ranks through a backward pass. "
            f"Peaks: {said}. A dotted line marks {floor:g}, the shard that stage 2 holds at "
            "its end.",
            {name: {"peak": peak, "end": curves[name][1][-1] / numel}
             for name, peak in peaks.items()},
        )  # fmt: skip


def _backward_curve(events):
    """Place each event of the backward pass by the units done; return positions and bytes."""
    inside = [event for event in events if event.phase == "backward"]
    starts, order = [], []
    for place, event in enumerate(inside):
        # A unit begins where the first array of its name is made.
        if event.delta_bytes > 0 and event.kind == "workspace" and event.label not in order:
            order.append(event.label)
            starts.append(place)
    starts.append(len(inside))
    x, y = [], []
    for unit, (start, stop) in enumerate(zip(starts[:-1], starts[1:], strict=True)):
        for step, event in enumerate(inside[start:stop]):
            x.append((unit + step / (stop - start)) / len(order))
            y.append(event.total_bytes["grad"] + event.total_bytes["bucket"])
    return [*x, 1.0], [*y, y[-1]]


def sent_over_micro_batches(micro_batches, sent, numel, world_size):
    """Draw what one rank sends in a step over the number of micro-batches, a line a stage.

    Parameters
    ----------
    micro_batches : sequence of int
    sent : sequence of sequence of int
        Elements by stage 0 to 3, one for each number of micro-batches.
    numel, world_size : int

    Returns
    -------
    Figure
        In units of Ψ(W−1)/W.
    """
    unit = numel * (world_size - 1) / world_size
    ratios = [[count / unit for count in row] for row in sent]
    names = _merged(ratios)
    with sheet(8.4, 4.0) as (fig, ax):
        for look, row in zip(STAGES, ratios, strict=True):
            ax.plot(micro_batches, row, marker="o", markersize=4, **look.line)
        ends = {name: ratios[stage][-1] for name, stage in names.items()}
        for (name, stage), place in zip(
            names.items(), spread(list(ends.values()), 0.6), strict=True
        ):
            label_line(ax, micro_batches[-1], place, name, STAGES[stage].color)
        ax.set_xticks(micro_batches)
        ax.set_xlim(micro_batches[0], micro_batches[-1] * 1.28)
        ax.set_ylim(0, None)
        ax.set_xlabel("micro-batches in a step, m")
        ax.set_ylabel("sent by a rank, in Ψ(W−1)/W")
        said = "; ".join(
            f"{name} {', '.join(f'{value:g}' for value in ratios[stage])}"
            for name, stage in names.items()
        )
        return render(
            fig,
            f"Elements one of {world_size} ranks sends in a step, in units of Ψ(W−1)/W, for "
            f"{', '.join(map(str, micro_batches))} micro-batches: {said}.",
            {"micro-batches": list(micro_batches)}
            | {f"stage {stage}": row for stage, row in enumerate(ratios)},
        )


def _merged(rows):
    """Names of lines, equal ones together: name -> the last stage with that line."""
    groups = {}
    for stage, row in enumerate(rows):
        groups.setdefault(tuple(row), []).append(stage)
    return {
        ("stage " if len(stages) == 1 else "stages ") + " and ".join(map(str, stages)): stages[-1]
        for stages in groups.values()
    }


# ------------------------------------------------ notebook 06: parameters that come and go


def letter_grid(layers="abc", world_size=3):
    """Draw which parameters each rank has, between the steps and while each layer computes.

    Parameters
    ----------
    layers : str
        A letter for each layer.
    world_size : int

    Returns
    -------
    Figure
        A panel for each moment; a row for each rank, a column for each layer; ``a1`` is the
        second shard of layer a. A borrowed shard is pale, the rank's own one is filled.
    """
    moments = ["between steps", *(f"layer {letter} computes" for letter in layers)]
    with sheet(2.35 * len(moments), 0.62 * world_size + 0.8, ncols=len(moments)) as (fig, axes):
        wide = 0.55 * world_size  # room for all shards of a layer
        rows = {}
        for ax, moment in zip(axes, moments, strict=True):
            widths = [wide if moment.startswith(f"layer {x} ") else 1.0 for x in layers]
            edges = [0.0, *np.cumsum(widths).tolist()]
            ax.set(xlim=(-0.75, len(layers) - 1 + wide), ylim=(-world_size, 0.5))
            ax.axis("off")
            ax.set_title(moment, fontsize="medium")
            for letter, left, width in zip(layers, edges, widths, strict=False):
                ax.text(left + width / 2, 0.22, letter, ha="center", va="center")
            rows[moment] = {}
            for rank in range(world_size):
                ax.text(-0.1, -rank - 0.5, f"r{rank}", ha="right", va="center", fontsize="small")
                has = [_shards(letter, rank, moment, world_size) for letter in layers]
                for left, width, shards in zip(edges, widths, has, strict=False):
                    _letter_cell(ax, left, -rank - 1, width, shards, rank)
                rows[moment][f"rank {rank}"] = " | ".join(" ".join(shards) for shards in has)
        return render(
            fig,
            f"Grids of {world_size} ranks and {len(layers)} layers. Between steps rank r has "
            f"shard r of every layer and nothing else. While a layer computes, every rank has all "
            f"{world_size} shards of that layer and its own shards of the others. All ranks "
            "compute every layer.",
            rows,
        )


def _shards(letter, rank, moment, world_size):
    """The shards of a layer that a rank has at a moment."""
    every = moment == f"layer {letter} computes"
    return [f"{letter}{shard}" for shard in range(world_size) if every or shard == rank]


def _letter_cell(ax, x, y, room, shards, rank):
    """Draw the shards of one layer on one rank side by side."""
    own = f"{shards[0][0]}{rank}"
    width = (room - 0.08) / len(shards)
    for place, shard in enumerate(shards):
        owner = int(shard[1:])
        look = rank_look(owner)
        left = x + 0.04 + place * width
        fill = look.bar if shard == own else {"facecolor": "#f1f1f1", "edgecolor": "#888888"}
        _box(ax, left, y + 0.08, width, 0.84, fill)
        color = look.color if shard == own else "#f1f1f1"
        _on(ax, left + width / 2, y + 0.5, shard, color, fontsize=9 if len(shards) == 1 else 8)


_GATHER, _FORWARD, _BACKWARD = "gather", "forward", "backward"
_REDUCE, _DROP, _FREE = "reduce-scatter", "drop", "free the gradient of"
_LANES = {
    _GATHER: (0, COLLECTIVES["all-gather"]),
    _REDUCE: (0, COLLECTIVES["reduce-scatter"]),
    _FORWARD: (1, Look("forward", PETROFF10[7], "")),
    _BACKWARD: (1, Look("backward", PETROFF10[5], "\\\\")),
}
_UNDER = ("param", "optim", "grad", "unsharded", "bucket")


def stage_3_lanes(events, names):
    """Draw a stage-3 step in the order in which it happened: two lanes and the memory under them.

    Parameters
    ----------
    events : sequence of LedgerEvent
        Of one step in float32 without prefetching, every layer a unit of its own.
    names : mapping of str to str
        A short name for each unit.

    Returns
    -------
    Figure
        Above, what travels and what is computed; below, the memory at the same moments, without
        activations. All boxes are equally wide: the picture shows the order, not the time.

    Raises
    ------
    ValueError
        If there is no gather among the events.
    """
    moments = _stage_3_moments(events)
    if not any(kind == _GATHER for kind, _, _ in moments):
        raise ValueError("there is no gather among the events; give those of a stage-3 step")
    edges = np.cumsum([0.0] + [1.0 if kind in _LANES else 0.22 for kind, _, _ in moments])
    with sheet(9.4, 4.9, nrows=2, sharex=True, height_ratios=(1, 2)) as (fig, (lanes, under)):
        lanes.set(ylim=(-0.1, 2.05), xlim=(0, edges[-1]))
        lanes.grid(False)
        lanes.set_yticks([0.45, 1.45], ["travels", "computes"])
        lanes.tick_params(length=0)
        for left, (kind, unit, _) in zip(edges, moments, strict=False):
            if kind in _LANES:
                lane, look = _LANES[kind]
                _box(lanes, left, lane, 1, 0.9, look.bar)
                _on(lanes, left + 0.5, lane + 0.45, names[unit], look.color)
        _memory_under(under, edges, [held for _, _, held in moments])
        under.set_xticks([])
        under.set_xlabel("one step, in the order in which things happen")
        handles = [_patch(look) for _, look in _LANES.values()]
        fig.legend(handles=handles, loc="outside upper center", ncols=4)
        order = ", ".join(f"{kind} {names[unit]}" for kind, unit, _ in moments)
        kind, unit, highest = max(moments, key=lambda moment: sum(moment[2].values()))
        return render(
            fig,
            f"One step of stage 3 in two lanes: {order}. Under it the memory of one rank, a "
            f"sawtooth: its highest point, {format_bytes(sum(highest.values()))}, is at {kind} "
            f"{names[unit]}.",
            {
                "what": [f"{kind} {names[unit]}" for kind, unit, _ in moments],
                **{name: [held[name] for _, _, held in moments] for name in _UNDER},
            },
        )


def _stage_3_moments(events):
    """Read the order of things from a ledger: (kind, unit, bytes by kind after it)."""
    moments = []
    for event in events:
        kind = _kind_of_moment(event)
        if kind is None:
            continue
        moments.append((kind, event.label, {name: event.total_bytes[name] for name in _UNDER}))
        if kind == _GATHER and event.phase == "forward":
            # Nothing is made but activations while a unit computes: the memory stays.
            moments.append((_FORWARD, *moments[-1][1:]))
    return moments


def _kind_of_moment(event):
    """What an event is a sign of; None if of nothing that is drawn."""
    if event.phase not in ("forward", "backward"):
        return None
    made = event.delta_bytes > 0
    if event.kind == "unsharded":
        return _GATHER if made else _DROP
    if event.kind == "bucket":
        return _BACKWARD if made else _FREE
    return _REDUCE if event.kind == "grad" and made else None


def _memory_under(ax, edges, memory):
    """Stack the kinds of memory under the lanes."""
    base = np.zeros(len(edges))
    for kind in _UNDER:
        height = np.array([held[kind] for held in memory] + [memory[-1][kind]], float)
        look = KINDS[kind]
        ax.fill_between(edges, base, base + height, step="post", **look.bar | {"linewidth": 0})
        left, right = _first_run(height[:-1], base)
        x = (edges[left] + edges[right]) / 2
        _on(ax, x, base[left] + height[left] / 2, look.label, look.color, fontsize="small")
        base += height
    ax.set_ylim(0, 1.1 * base.max())
    bytes_axis(ax.yaxis)
    ax.set_ylabel("bytes on one rank")


def _first_run(height, base):
    """Where the highest stretch on level ground begins and ends, the first one of several."""
    left = int(np.argmax(height))
    right = left
    while right < len(height) and (height[right], base[right]) == (height[left], base[left]):
        right += 1
    return left, right


def unit_slider(timelines, numel, world_size, stage_2_peak):
    """Draw the memory of one rank over a stage-3 step, a picture for each size of unit.

    Parameters
    ----------
    timelines : mapping of str to sequence of LedgerEvent
        By size of unit the events of one step in float32.
    numel, world_size : int
    stage_2_peak : int
        What stage 2 needs for the same step, in bytes; a line to compare with.

    Returns
    -------
    StillSlider
        Bytes per parameter, without activations. Forward takes a third of the width and backward
        two thirds: the pictures show the order, not the time.
    """
    curves = {name: _memory_of_units(events) for name, events in timelines.items()}
    peaks = {name: max(map(sum, rows)) / numel for name, (_, rows) in curves.items()}
    line = stage_2_peak / numel
    top = 1.12 * max(*peaks.values(), line)
    begin = {name: sum(rows[0]) / numel for name, (_, rows) in curves.items()}
    words = [
        (
            f"Memory of one of {world_size} ranks over a stage-3 step, in bytes per parameter. "
            f"Unit: {name}. It begins with {begin[name]:.3g} and peaks at {peak:.3g}, "
            f"{'above' if peak > line else 'below'} the peak of stage 2, {line:.3g}.",
            {"peak": peak, "begins with": begin[name], "peak of stage 2": line},
        )
        for name, peak in peaks.items()
    ]
    with sheet(9.0, 3.7) as (fig, ax):
        ax.set(xlim=(0, 3), ylim=(0, top))
        ax.set_xticks([0.5, 2], ["forward", "backward"])
        ax.tick_params(axis="x", length=0)
        ax.axvline(1, color="#888888", linewidth=0.8)
        ax.set_ylabel("bytes per parameter")
        ax.set_title("Memory of one rank over a step, without activations")
        fig.legend(handles=[_patch(KINDS[kind]) for kind in _UNDER],
                   loc="outside lower center", ncols=len(_UNDER))  # fmt: skip

        def draw(i):
            """Add the stacked areas of one size of unit, its peak, and the line of stage 2."""
            name, (x, rows) = list(curves.items())[i]
            return [*_stack_of_units(ax, x, np.array(rows) / numel), *_lines_of_units(
                ax, name, x[int(np.argmax([sum(row) for row in rows]))], peaks[name], line
            )]  # fmt: skip

        figures = render_stills(fig, words, draw, dpi=100)
    return still_slider(figures, list(timelines), "unit")


def _memory_of_units(events):
    """Where in the step each event lies, forward in 0..1, backward in 1..3; bytes by kind."""
    x, rows = [], []
    for phase, start, width in (("forward", 0, 1), ("backward", 1, 2)):
        inside = [e for e in events if e.phase == phase and e.kind in _UNDER]
        x += [start + width * (i + 0.5) / len(inside) for i in range(len(inside))]
        rows += [[event.total_bytes[kind] for kind in _UNDER] for event in inside]
    # What is there before the first gather, and after the last event.
    before = [0 if kind in ("unsharded", "bucket") else n for kind, n in
              zip(_UNDER, rows[0], strict=True)]  # fmt: skip
    return [0.0, *x, 3.0], [before, *rows, rows[-1]]


def _stack_of_units(ax, x, heights):
    """Fill the kinds of memory, one on another."""
    base, areas = np.zeros(len(x)), []
    for kind, height in zip(_UNDER, heights.T, strict=True):
        look = KINDS[kind].bar | {"linewidth": 0}
        areas.append(ax.fill_between(x, base, base + height, step="post", **look))
        base = base + height
    return areas


def _lines_of_units(ax, name, place, peak, line):
    """Name the peak, and the line to compare with."""
    plate = {"boxstyle": "round,pad=0.2", "facecolor": "#ffffff", "edgecolor": "none"}
    compared = ax.axhline(line, color=INK, linewidth=1.4, linestyle=(0, (6, 3)))
    words = ax.text(0.03, line, f"peak of stage 2: {line:.3g}", va="bottom", bbox=plate)
    (dot,) = ax.plot([place], [peak], "o", color=INK, markersize=6)
    label = ax.annotate(
        f"unit: {name}, peak {peak:.3g}", (place, peak), xytext=(0, 8), bbox=plate,
        textcoords="offset points", ha="right", fontweight="bold",  # the last one is near the edge
    )  # fmt: skip
    return [compared, words, dot, label]


def peak_over_world_size(world_sizes, peaks, share, floor):
    """Draw the measured peak over the number of ranks, beside the share and the floor.

    Parameters
    ----------
    world_sizes : sequence of int
    peaks : sequence of int
        Measured, in bytes.
    share : sequence of float
        16Ψ/W, in bytes: what one might hope for.
    floor : int
        What the largest unit takes however many ranks there are, in bytes.

    Returns
    -------
    Figure
        On logarithmic axes.
    """
    with sheet(8.6, 4.2) as (fig, ax):
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.plot(world_sizes, peaks, marker="o", **STAGES[3].line | {"linestyle": "-"})
        ax.plot(world_sizes, share, color=INK, linewidth=1.6, linestyle=(0, (1, 1.6)))
        ax.axhline(floor, color=PETROFF10[2], linewidth=1.6, linestyle=(0, (6, 3)))
        last = world_sizes[-1]
        label_line(ax, last, peaks[-1], "measured peak", STAGES[3].color, dy=8)
        label_line(ax, last, share[-1], "16Ψ/W", INK)
        label_line(ax, last, floor, "floor: the largest unit\nand its gradient", PETROFF10[2],
                   dy=-18)  # fmt: skip
        ax.set_xticks(world_sizes, [str(size) for size in world_sizes])
        ax.minorticks_off()
        ax.set_xlim(None, last * 3.2)
        bytes_axis(ax.yaxis)
        ax.set_xlabel("world size W")
        ax.set_ylabel("bytes on one rank")
        ax.set_title("The peak comes down to its floor and stays there")
        return render(
            fig,
            f"Peak bytes of a rank at stage 3 over {', '.join(map(str, world_sizes))} ranks, on "
            f"logarithmic axes: from {format_bytes(peaks[0])} to {format_bytes(peaks[-1])}. The "
            f"dotted line 16Ψ/W goes down to {format_bytes(share[-1])}; the peak stays above its "
            f"floor, {format_bytes(floor)}.",
            {
                "world_size": list(world_sizes),
                "measured peak": list(peaks),
                "16Ψ/W": list(share),
                "floor": floor,
            },
        )
