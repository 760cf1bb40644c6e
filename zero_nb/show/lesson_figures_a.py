"""Figures of notebooks 01 to 03: memory over a step, who holds the same, rings hop by hop."""

from itertools import groupby

import numpy as np

from zero_nb.show.figure import render
from zero_nb.show.style import (
    INK,
    KINDS,
    PETROFF10,
    Look,
    bytes_axis,
    format_bytes,
    label_line,
    rank_look,
    sheet,
    spread,
    text_color,
)

__all__ = [
    "busiest_rank",
    "differences",
    "identical_grid",
    "memory_over_steps",
    "ring_grid",
    "traffic_limits",
]

STACK = ("param", "optim", "grad", "activation", "unsharded", "bucket", "workspace")
"""From the bottom up: what is held longest lies lowest."""

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


# ------------------------------------------------------------------------ notebook 01: memory


def memory_over_steps(timelines):
    """Draw what one rank holds, allocation by allocation, from construction on.

    Parameters
    ----------
    timelines : mapping of str to sequence of LedgerEvent
        A panel each, under its name; recorded from the first array on, over one step or more.

    Returns
    -------
    Figure
        Stacked areas of the kinds of memory over the events, phases marked, the peak of each step
        labelled.

    Raises
    ------
    ValueError
        If there is no timeline, or one without events.
    """
    if not timelines or not all(timelines.values()):
        raise ValueError("give at least one timeline, each with at least one event")
    parts = {name: _phases(events) for name, events in timelines.items()}
    with sheet(9.2, 2.9 * len(parts), nrows=len(parts), sharey=True, squeeze=False) as (fig, axes):
        highest = max(_total(event) for events in timelines.values() for event in events)
        for ax, (name, events) in zip(axes[:, 0], timelines.items(), strict=True):
            ax.set_ylim(0, 1.3 * highest)
            bytes_axis(ax.yaxis)
            _areas(ax, events)
            _name_phases(ax, parts[name], events, 1.3 * highest)
            ax.set_title(name)
        axes[-1, 0].set_xlabel("arrays made or freed, in order")
        return render(fig, _memory_alt(parts), {name: _memory_rows(p) for name, p in parts.items()})


def _total(event):
    """Bytes of all kinds after an event."""
    return sum(event.total_bytes.values())


def _phases(events):
    """Cut a timeline where the phase changes: (name, first event, events), in order."""
    named, step = [], 0
    for event in events:
        phase = {"reduce": "step"}.get(event.phase, event.phase)
        if phase == "outside" and event.delta_bytes < 0 and named:
            phase = named[-1]  # the end of the phase before frees something
        elif phase == "outside":
            phase = "forward" if event.kind == "activation" else "made"  # the batch comes first
        named.append(phase)
    parts, start = [], 0
    for phase, group in groupby(named):
        count = len(list(group))
        step += phase == "forward"
        name = phase if phase == "made" else f"{phase} {step}"
        parts.append((name, start, events[start : start + count]))
        start += count
    return parts


def _areas(ax, events):
    """Stack the kinds that occur."""
    x = np.arange(len(events))
    bottom = np.zeros(len(events))
    for kind in STACK:
        height = np.array([event.total_bytes[kind] for event in events], float)
        if not height.any():
            continue
        look = KINDS[kind]
        ax.fill_between(x, bottom, bottom + height, step="post", **look.bar | {"linewidth": 0})
        widest = int(np.argmax(_run_lengths(height > 0.06 * ax.get_ylim()[1])))
        if height[widest] > 0.06 * ax.get_ylim()[1]:
            ax.text(
                widest, bottom[widest] + height[widest] / 2, look.label, ha="center", va="center",
                fontsize="small", color=text_color(look.color),
                bbox={"boxstyle": "round,pad=0.15", "facecolor": look.color, "edgecolor": "none"},
            )  # fmt: skip
        bottom += height
    ax.set_xlim(0, len(events) - 1)


def _run_lengths(mask):
    """Score each place by how far inside a run of True it lies; 0 where False."""
    left, right = np.zeros(len(mask), int), np.zeros(len(mask), int)
    for i in range(len(mask)):
        left[i] = (left[i - 1] + 1 if i else 1) if mask[i] else 0
    for i in reversed(range(len(mask))):
        right[i] = (right[i + 1] + 1 if i + 1 < len(mask) else 1) if mask[i] else 0
    return np.minimum(left, right)


def _name_phases(ax, parts, events, top):
    """Rule off the phases and write their names on top."""
    for i, (name, start, part) in enumerate(parts):
        if start:
            ax.axvline(start, color="#888888", linewidth=0.8, linestyle=(0, (3, 2)))
        # Short phases have no room beside each other: every second name goes a line lower.
        low = len(part) < 0.09 * len(events) and i % 2
        where = {"x": start + len(part) / 2, "ha": "center"}
        if i == 0:
            where = {"x": 0.004 * len(events), "ha": "left"}
        elif i == len(parts) - 1:
            where = {"x": len(events) - 1, "ha": "right"}
        ax.text(y=(0.885 if low else 0.96) * top, s=name, va="center", fontsize="small", **where)
    ax.grid(False)


def _memory_rows(parts):
    """Bytes at the end of each phase by kind, and the highest total within it."""
    return {
        name: {kind: count for kind, count in part[-1].total_bytes.items() if count}
        | {"peak": max(map(_total, part))}
        for name, _, part in parts
    }


def _memory_alt(parts):
    """Say when the optimizer states appear and how high each panel goes."""
    said = []
    for name, phases in parts.items():
        optim = [(phase, part[-1].total_bytes["optim"]) for phase, _, part in phases]
        appears = next((phase for phase, count in optim if count), None)
        peaks = [
            f"{max(map(_total, part)) / 1e6:.2f} MB in {phase}"
            for phase, _, part in phases
            if phase.startswith(("forward", "backward", "step"))
        ]
        said.append(
            f"{name}: optimizer states of {format_bytes(optim[-1][1])} "
            f"{f'appear in the phase “{appears}”' if appears else 'never appear'}; "
            f"highest totals {', '.join(peaks)}."
        )
    return "Bytes that one rank holds while it trains, stacked by kind. " + " ".join(said)


# ------------------------------------------------------- notebook 02: who holds the same as whom


def identical_grid(states):
    """Draw which ranks hold the same bits of each state.

    Parameters
    ----------
    states : mapping of str to ndarray, shape (R, ...)
        By name; row r is what rank r holds.

    Returns
    -------
    Figure
        A row for each state and a column for each rank. Equal letters, with equal colour and
        hatch, mean equal bits; letters start anew in each row.

    Raises
    ------
    ValueError
        If there are no states, or not all have the same number of ranks.
    """
    if not states or len({len(array) for array in states.values()}) != 1:
        raise ValueError("give at least one state, all with the same number of ranks")
    letters = {name: _letters(array) for name, array in states.items()}
    ranks = len(next(iter(letters.values())))
    with sheet(2.6 + 1.15 * ranks, 0.9 + 0.58 * len(letters)) as (fig, ax):
        ax.set(xlim=(-2.6, ranks + 1.75), ylim=(-len(letters) - 0.1, 0.9))
        ax.axis("off")
        for rank in range(ranks):
            ax.text(rank + 0.5, 0.4, f"rank {rank}", ha="center", va="center")
        for row, (name, said) in enumerate(letters.items()):
            y = -row - 1
            ax.text(-0.15, y + 0.5, name, ha="right", va="center")
            for rank, letter in enumerate(said):
                _cell(ax, rank, y, letter, rank_look(LETTERS.index(letter)))
            same = len(set(said)) == 1
            ax.text(ranks + 0.15, y + 0.5, "identical" if same else "different", va="center",
                    fontweight="bold" if same else "normal")  # fmt: skip
        same = [name for name, said in letters.items() if len(set(said)) == 1]
        other = [name for name in letters if name not in same]
        return render(
            fig,
            f"A grid of states and {ranks} ranks with a letter for each content. "
            f"Identical on all ranks: {', '.join(same) or 'nothing'}. "
            f"Different: {', '.join(other) or 'nothing'}.",
            {name: " ".join(said) for name, said in letters.items()},
        )


def _letters(array):
    """Name each row's content: equal letters for equal bits."""
    contents = [np.ascontiguousarray(row).tobytes() for row in array]
    order = list(dict.fromkeys(contents))
    return [LETTERS[order.index(content)] for content in contents]


def _cell(ax, x, y, text, look, *, heavy=False):
    """Draw one labelled cell of a grid."""
    from matplotlib.patches import Rectangle

    ax.add_patch(Rectangle((x + 0.04, y + 0.06), 0.92, 0.88, **look.bar))
    if heavy:
        ax.add_patch(
            Rectangle((x + 0.04, y + 0.06), 0.92, 0.88, fill=False, edgecolor=INK, linewidth=2.2)
        )
    ax.text(
        x + 0.5, y + 0.5, text, ha="center", va="center", color=text_color(look.color),
        fontsize="small",
        bbox={"boxstyle": "round,pad=0.15", "facecolor": look.color, "edgecolor": "none"},
    )  # fmt: skip


DIFFERENCE_LOOKS = (
    Look("", PETROFF10[0], "", "-", 2.2),
    Look("", PETROFF10[2], "", (0, (5, 2)), 2.2),
    Look("", PETROFF10[4], "", (0, (1, 1.2)), 2.6),
    Look("", PETROFF10[8], "", (0, (6, 2, 1, 2)), 2.2),
)


def differences(curves):
    """Draw how far two trainings are apart after each step, on a logarithmic axis.

    Parameters
    ----------
    curves : mapping of str to sequence of float
        At most four, by name: the largest difference after steps 1, 2, ... Zeros are left out.

    Returns
    -------
    Figure
        Its sentence gives powers of ten: further digits differ between processors.

    Raises
    ------
    ValueError
        If there are no curves or more than four, of unequal length, or all zero.
    """
    if not 1 <= len(curves) <= len(DIFFERENCE_LOOKS) or len(set(map(len, curves.values()))) != 1:
        raise ValueError(f"give 1 to {len(DIFFERENCE_LOOKS)} curves of equal length")
    values = {name: np.asarray(curve, float) for name, curve in curves.items()}
    if not all((curve > 0).any() for curve in values.values()):
        raise ValueError("a curve of zeros has no place on a logarithmic axis")
    steps = np.arange(1, len(next(iter(values.values()))) + 1)
    with sheet(8.6, 4.0) as (fig, ax):
        ax.set_yscale("log")
        ends = []
        for look, curve in zip(DIFFERENCE_LOOKS, values.values(), strict=False):
            shown = np.where(curve > 0, curve, np.nan)
            ax.plot(steps, shown, **look.line)
            ends.append(shown[np.isfinite(shown)][-1])
        low, high = np.log10(ax.get_ylim())
        places = spread(np.log10(ends).tolist(), 0.08 * (high - low))
        for look, name, place in zip(DIFFERENCE_LOOKS, values, places, strict=False):
            label_line(ax, steps[-1], 10**place, name, look.color)
        ax.set_xlim(1, 1.45 * steps[-1])
        ax.set_xticks([step for step in (1, 5, 10, 15, 20, 25, 30) if step <= steps[-1]])
        ax.set_xlabel("steps")
        ax.set_ylabel("largest difference of a weight")
        order = sorted(values, key=lambda name: -values[name][-1])
        return render(
            fig,
            f"Largest difference between two trainings over {len(steps)} steps, one line a group "
            f"of weights. From the top at the end: {', '.join(order)}.",
            {name: curve.tolist() for name, curve in values.items()},
        )


# ------------------------------------------------------------------ notebook 03: rings, counted


def ring_grid(run, world_size):
    """Draw a ring collective hop by hop: which contributions each chunk holds on each rank.

    Parameters
    ----------
    run : RingRun
        Of `ring_reduce_scatter` or `ring_all_reduce`.
    world_size : int
        At most 6 ranks, so that the letters can be read.

    Returns
    -------
    Figure
        A panel for the start and for each step; a row for each rank, a column for each chunk.
        Letters say whose contributions are summed; a heavy frame has just arrived; full sums are
        filled and hatched.

    Raises
    ------
    ValueError
        If `world_size` is not from 2 to 6, or the first hops do not add.
    """
    if not 2 <= world_size <= 6:
        raise ValueError(f"world_size must be from 2 to 6 to be read, got {world_size}")
    if not run.hops or not run.hops[0].adds:
        raise ValueError("give the run of ring_reduce_scatter or ring_all_reduce")
    panels = _ring_panels(run, world_size)
    columns = min(world_size, len(panels))
    rows = -(-len(panels) // columns)
    size = 0.5 * world_size + 0.45
    with sheet(columns * size, rows * (size + 0.35), rows, columns, squeeze=False) as (fig, axes):
        for ax in axes.flat[len(panels) :]:
            ax.set_visible(False)
        for ax, (title, held, arrived) in zip(axes.flat, panels, strict=False):
            _ring_panel(ax, title, held, arrived, world_size)
        return render(fig, _ring_alt(run, world_size, panels), _ring_rows(panels))


def _ring_panels(run, world_size):
    """Follow the hops: (title, what each rank holds by chunk, where something arrived)."""
    held = [[frozenset([rank])] * world_size for rank in range(world_size)]
    panels = [("start", [list(row) for row in held], set())]
    for step, hops in groupby(run.hops, key=lambda hop: hop.step):
        before, arrived = [list(row) for row in held], set()
        adds = False
        for hop in hops:
            adds = hop.adds
            sent = before[hop.sender][hop.chunk]
            kept = before[hop.receiver][hop.chunk] if hop.adds else frozenset()
            held[hop.receiver][hop.chunk] = sent | kept
            arrived.add((hop.receiver, hop.chunk))
        title = f"hop {step + 1}: {'add' if adds else 'copy'}"
        panels.append((title, [list(row) for row in held], arrived))
    return panels


def _ring_panel(ax, title, held, arrived, world_size):
    """Draw one grid of ranks and chunks."""
    ax.set(xlim=(-0.75, world_size), ylim=(-world_size, 0.55))
    ax.axis("off")
    ax.set_title(title)
    for place in range(world_size):
        ax.text(place + 0.5, 0.25, f"chunk {place}" if world_size < 4 else f"c{place}",
                ha="center", va="center", fontsize="small")  # fmt: skip
        ax.text(-0.1, -place - 0.5, f"r{place}", ha="right", va="center", fontsize="small")
    for rank, row in enumerate(held):
        for chunk, ranks in enumerate(row):
            full = len(ranks) == world_size
            shade = Look("", "#ffffff" if len(ranks) == 1 else "#e8e8e8", "")
            look = rank_look(chunk) if full else shade
            text = "".join(LETTERS[r].lower() for r in sorted(ranks))
            _cell(ax, chunk, -rank - 1, text, look, heavy=(rank, chunk) in arrived)
            if not full and (rank, chunk) not in arrived:
                _outline(ax, chunk, -rank - 1)


def _outline(ax, x, y):
    """A thin frame, so that a white cell is seen on white."""
    from matplotlib.patches import Rectangle

    ax.add_patch(
        Rectangle((x + 0.04, y + 0.06), 0.92, 0.88, fill=False, edgecolor="#999999", linewidth=0.7)
    )


def _ring_rows(panels):
    """What each rank holds after each hop, as text: chunks apart by a bar."""
    return {
        title: {
            f"rank {rank}": " | ".join(
                "".join(LETTERS[r].lower() for r in sorted(ranks)) for ranks in row
            )
            for rank, row in enumerate(held)
        }
        for title, held, _ in panels
    }


def _ring_alt(run, world_size, panels):
    """Say what travels and who has what at the end."""
    adds = sum(title.endswith("add") for title, _, _ in panels)
    copies = sum(title.endswith("copy") for title, _, _ in panels)
    full = [sum(len(ranks) == world_size for ranks in row) for row in panels[-1][1]]
    return (
        f"A ring of {world_size} ranks, {adds} hops that add"
        + (f" and {copies} that copy" if copies else "")
        + ". In each hop every rank passes one chunk to its right neighbour, the last rank to "
        f"rank 0. After the adding hops rank r alone holds the full sum of chunk r; at the end "
        f"each rank holds {full[0]} of {world_size} full sums."
    )


def busiest_rank(world_sizes, star, ring):
    """Draw what the busiest rank sends and what all send together, for two ways to all-reduce.

    Parameters
    ----------
    world_sizes : sequence of int
    star, ring : sequence of (float, float)
        For each world size: sent by the busiest rank and by all ranks, in messages of M. `star`
        sends everything to rank 0 and back.

    Returns
    -------
    Figure
    """
    star, ring = np.asarray(star, float), np.asarray(ring, float)
    looks = {"through rank 0": (star, Look("", PETROFF10[2], "", "-", 5.0)),
             "ring": (ring, Look("", PETROFF10[0], "", (0, (4, 2)), 2.5))}  # fmt: skip
    with sheet(9.2, 3.8, ncols=2) as (fig, axes):
        for ax, column, title in zip(axes, (0, 1), ("busiest rank", "all ranks"), strict=True):
            for name, (values, look) in looks.items():
                ax.plot(world_sizes, values[:, column], marker="o", markersize=4, **look.line)
                if column == 0:
                    label_line(ax, world_sizes[-1], values[-1, 0], name, look.color, dy=6)
            ax.set_xticks(_apart(world_sizes))
            ax.set_ylim(0, None)
            ax.set_xlabel("world size W")
            ax.set_title(f"sent by the {title}" if column == 0 else f"sent by {title}")
        axes[0].set_ylabel("in units of M, the message")
        axes[0].set_xlim(None, world_sizes[-1] * 1.28)
        axes[1].annotate("both lie on one another", (world_sizes[-2], ring[-2, 1]),
                         xytext=(-8, 10), textcoords="offset points", ha="right")  # fmt: skip
        same = "equal" if np.array_equal(star[:, 1], ring[:, 1]) else "different"
        return render(
            fig,
            f"Two panels over world sizes {', '.join(map(str, world_sizes))}. Busiest rank: "
            f"through rank 0 it grows to {star[-1, 0]:g} M, on the ring it stays below "
            f"{np.ceil(ring[:, 0].max()):g} M. All ranks together: {same}, up to "
            f"{ring[-1, 1]:g} M.",
            {
                "world_size": list(world_sizes),
                "busiest, through rank 0": star[:, 0],
                "busiest, ring": ring[:, 0],
                "all, through rank 0": star[:, 1],
                "all, ring": ring[:, 1],
            },
        )


def _apart(places):
    """Those of some rising places that have room for a number beside each other."""
    kept = list(places[:1])
    for place in places[1:]:
        if place - kept[-1] >= 0.05 * (places[-1] - places[0]):
            kept.append(place)
    return kept


def traffic_limits(world_sizes, sent, numel):
    """Draw elements sent per rank and step, in units of the model, over world sizes.

    Parameters
    ----------
    world_sizes : sequence of int
    sent : mapping of str to sequence of int
        Elements by name, one for each world size.
    numel : int
        Parameters of the model, Ψ.

    Returns
    -------
    Figure
        Lines that come near whole numbers, drawn as limits, from below.
    """
    ratios = {name: np.asarray(counts, float) / numel for name, counts in sent.items()}
    with sheet(8.6, 3.8) as (fig, ax):
        ax.set_xscale("log", base=2)
        for look, (name, ratio) in zip(DIFFERENCE_LOOKS, ratios.items(), strict=False):
            limit = round(ratio[-1])
            ax.axhline(limit, color="#888888", linewidth=1.0, linestyle=(0, (3, 2)))
            ax.text(world_sizes[0], limit + 0.04, f"limit {limit}", va="bottom", fontsize="small")
            ax.plot(world_sizes, ratio, marker="o", markersize=4, **look.line)
            label_line(ax, world_sizes[-1], ratio[-1], name, look.color, dy=-10)
        ax.set_xticks(world_sizes, [str(size) for size in world_sizes])
        ax.minorticks_off()
        ax.set_ylim(0, 0.5 + max(ratio.max() for ratio in ratios.values()))
        ax.set_xlim(None, world_sizes[-1] * 4)
        ax.set_xlabel("world size W")
        ax.set_ylabel("sent by a rank in a step, ÷ Ψ")
        ends = ", ".join(
            f"{name} from {ratio[0]:.2f} to {ratio[-1]:.2f} Ψ" for name, ratio in ratios.items()
        )
        return render(
            fig,
            f"Elements that one rank sends in a step over world sizes {world_sizes[0]} to "
            f"{world_sizes[-1]}: {ends}. The lines rise towards their limits and never reach them.",
            {"world_size": list(world_sizes), **{name: list(r) for name, r in ratios.items()}},
        )
