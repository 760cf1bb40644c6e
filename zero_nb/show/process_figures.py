"""Figures of notebook 10: what real processes hold, where they wait, what they save and load."""

from zero_nb.show.figure import render
from zero_nb.show.style import (
    INK,
    KINDS,
    PAPER,
    PETROFF10,
    bytes_axis,
    label_bar,
    rank_look,
    sheet,
    text_color,
)

__all__ = ["memory_of_processes", "saving_bars", "shards_read", "where_ranks_wait"]

HELD = ("param", "grad", "optim")


def memory_of_processes(ledger, grown):
    """Draw what each process holds at stages 0 to 3 by its ledger, and by the operating system.

    Parameters
    ----------
    ledger : sequence of (int, int, int, int)
        By stage the bytes of param, grad and optim that are held, and the peak of a step.
    grown : sequence of sequence of int
        By stage, for each process how much its resident set grew, in bytes.

    Returns
    -------
    Figure
        Stacked bars, what a step needs on top of them, and a diamond for each process.
    """
    held = [sum(row[:3]) for row in ledger]
    peaks = [row[3] for row in ledger]
    top = 1.16 * max(*peaks, *map(max, grown))
    with sheet(8.6, 4.4) as (fig, ax):
        ax.set(ylim=(0, top), xlim=(-0.6, len(ledger) - 0.2))
        for stage, row in enumerate(ledger):
            base = 0
            for kind, size in zip(HELD, row, strict=False):
                (bar,) = ax.bar(stage, size, 0.74, bottom=base, **KINDS[kind].bar)
                label_bar(ax, bar, f"{KINDS[kind].label} {size / 1e6:.0f}", smallest=0.045)
                base += size
            _peak_mark(ax, stage, base, row[3], top)
            places = [stage + 0.42 + 0.045 * i for i in range(len(grown[stage]))]
            ax.plot(places, grown[stage], "D", color=INK, markersize=5, markeredgecolor=PAPER)
        ax.text(0.66, max(grown[0]), "resident set:\none diamond a process", va="center")
        ax.text(len(ledger) - 1 + 0.42, 0.5 * (held[-1] + peaks[-1]) + 0.02 * top, "peak",
                va="center", fontsize="small")  # fmt: skip
        ax.set_xticks(range(len(ledger)), [f"stage {stage}" for stage in range(len(ledger))])
        ax.tick_params(axis="x", length=0)
        bytes_axis(ax.yaxis)
        ax.set_ylabel("bytes of one process")
        ax.set_title(f"{len(grown[0])} real processes: counted arrays, and what the system sees")
        said = ", ".join(f"{value / 1e6:.0f}" for value in held)
        return render(
            fig,
            f"Stacked bars of what one process holds at stages 0 to {len(ledger) - 1}, by its "
            f"ledger: {said} MB. Thin outlines mark the peak of a step: "
            f"{', '.join(f'{value / 1e6:.0f}' for value in peaks)} MB. A diamond for each of "
            f"{len(grown[0])} processes shows how much its resident set grew.",
            {
                f"stage {stage}": {
                    "param": row[0],
                    "grad": row[1],
                    "optim": row[2],
                    "held": sum(row[:3]),
                    "peak": row[3],
                    "resident ÷ held": max(grown[stage]) / sum(row[:3]),
                }
                for stage, row in enumerate(ledger)
            },
        )


def _peak_mark(ax, x, held, peak, top):
    """Outline what a step needs above what is held; write both."""
    if peak - held > 0.01 * top:
        ax.bar(x, peak - held, 0.74, bottom=held, fill=False, edgecolor=INK, linestyle=(0, (2, 2)))
    ax.text(
        x, max(held, peak) + 0.015 * top, f"{held / 1e6:.0f} MB held", ha="center", va="bottom",
        fontweight="bold",
    )  # fmt: skip


def where_ranks_wait(places):
    """Draw where each rank is when the run is ended because the ranks had diverged.

    Parameters
    ----------
    places : mapping of int to str
        By rank, what it is waiting in: `zero_nb.learn.processes.ProcessRun.places`.

    Returns
    -------
    Figure
        A lane for each rank.

    Raises
    ------
    ValueError
        If there are no places: the ranks had not diverged.
    """
    if not places:
        raise ValueError("no places were given; did the ranks diverge?")
    with sheet(8.6, 0.9 + 0.55 * len(places)) as (fig, ax):
        ax.set(xlim=(0, 10), ylim=(-len(places) + 0.4, 1.05))
        ax.axis("off")
        counts = {place: list(places.values()).count(place) for place in places.values()}
        rare = min(counts, key=counts.get)
        parting = 4.2
        for row, (rank, place) in enumerate(places.items()):
            look = rank_look(rank)
            # Whoever is in another place than most stops earlier, or later: never in one line.
            stop = parting if place == rare and len(counts) > 1 else 6.4
            ax.barh(-row, stop - 1.0, 0.6, left=1.0, **look.bar)
            ax.text(0.85, -row, f"rank {rank}", ha="right", va="center")
            ax.text(
                1.2, -row, "same calls", va="center", color=text_color(look.color),
                bbox={"boxstyle": "round,pad=0.15", "facecolor": look.color, "edgecolor": "none"},
            )  # fmt: skip
            ax.text(stop + 0.15, -row, f"waits: {place}", va="center", fontweight="bold")
        if len(counts) > 1:
            ax.plot([parting] * 2, [-len(places) + 0.5, 0.5], color=INK, linewidth=1.0,
                    linestyle=(0, (2, 2)))  # fmt: skip
            ax.text(parting, 0.6, "here they differ", ha="center", va="bottom", fontsize="small")
        said = "; ".join(f"rank {rank} in {place}" for rank, place in places.items())
        return render(
            fig,
            f"A lane for each of {len(places)} ranks, up to where it waits. {said}.",
            {f"rank {rank}": place for rank, place in places.items()},
        )


def saving_bars(numel, held, sharded, consolidated):
    """Draw what saving allocates on each rank: a file a rank, and one file for all.

    Parameters
    ----------
    numel : int
        Parameters, Ψ.
    held : int
        Bytes of weights and moments that a rank holds.
    sharded, consolidated : sequence of int
        By rank the most bytes that were allocated while saving.

    Returns
    -------
    Figure
        Two groups of bars, in bytes per parameter.
    """
    groups = {"one file a rank": sharded, "one file, by rank 0": consolidated}
    rows = {name: [round(size / numel, 1) for size in sizes] for name, sizes in groups.items()}
    top = 1.2 * max(map(max, rows.values()))
    with sheet(8.6, 4.0) as (fig, ax):
        ax.set(ylim=(0, top))
        ticks = []
        for group, (name, sizes) in enumerate(rows.items()):
            for rank, size in enumerate(sizes):
                x = group * (len(sizes) + 1) + rank
                ticks.append((x, f"rank {rank}"))
                ax.bar(x, size, 0.8, **rank_look(rank).bar)
                crossed = size < held / numel < size + 0.08 * top  # by the dashed line
                y = (held / numel if crossed else size) + 0.015 * top
                ax.text(x, y, f"{size:g}", ha="center", va="bottom", fontweight="bold")
            ax.text(group * (len(sizes) + 1) + (len(sizes) - 1) / 2, -0.13 * top, name,
                    ha="center", va="top", fontweight="bold", clip_on=False)  # fmt: skip
        ax.axhline(held / numel, color=PETROFF10[2], linestyle=(0, (6, 3)), linewidth=1.6)
        ax.text(len(sizes) - 0.02, held / numel + 0.02 * top, f"held: {held / numel:.1f}",
                ha="center", va="bottom")  # fmt: skip
        ax.set_xticks([x for x, _ in ticks], [text for _, text in ticks])
        ax.tick_params(axis="x", length=0)
        ax.set_ylabel("bytes per parameter")
        ax.set_title("Memory that saving takes, beside what is held")
        said = "; ".join(f"{name} {', '.join(f'{s:g}' for s in r)}" for name, r in rows.items())
        return render(
            fig,
            f"Bars of the bytes per parameter that saving allocates on ranks 0 to "
            f"{len(sharded) - 1}. {said}. A dashed line marks what a rank holds, "
            f"{held / numel:.1f}.",
            {name: {f"rank {r}": size for r, size in enumerate(sizes)}
             for name, sizes in rows.items()} | {"held": round(held / numel, 1)},
        )  # fmt: skip


def shards_read(numel, saved, loading):
    """Draw the shards of a saved flat array above those of a run with another number of ranks.

    Parameters
    ----------
    numel : int
        Elements of the array.
    saved, loading : int
        World sizes.

    Returns
    -------
    Figure
        Two strips; each new shard says whose files it reads.
    """
    old, new = -(-numel // saved), -(-numel // loading)
    with sheet(8.6, 2.7) as (fig, ax):
        ax.set(xlim=(-0.02 * numel, 1.02 * numel), ylim=(-0.75, 3.2))
        ax.axis("off")
        reads = {}
        for row, (shard, count) in enumerate(((old, saved), (new, loading))):
            y = 2.0 - 1.6 * row
            for rank in range(count):
                start, stop = min(rank * shard, numel), min((rank + 1) * shard, numel)
                if start == stop:
                    continue
                look = rank_look(rank)
                ax.barh(y, stop - start, 0.8, left=start, **look.bar)
                middle = (start + stop) / 2
                if row:  # written below: the borders of the old shards go through the strip
                    files = [i for i in range(saved) if i * old < stop and (i + 1) * old > start]
                    reads[f"rank {rank}"] = " ".join(map(str, files))
                    text = f"rank {rank} reads {' and '.join(map(str, files))}"
                    ax.text(middle, y - 0.5, text, ha="center", va="top", fontsize="small")
                else:
                    ax.text(
                        middle, y, f"rank {rank}", ha="center", va="center",
                        color=text_color(look.color), fontsize="small",
                        bbox={"boxstyle": "round,pad=0.15", "facecolor": look.color,
                              "edgecolor": "none"},
                    )  # fmt: skip
            word = "loaded by" if row else "saved by"
            ax.text(0, y + 0.5, f"{word} {count} ranks", va="bottom", fontweight="bold")
        for rank in range(1, saved):
            if rank * old < numel:
                ax.plot([rank * old] * 2, [-0.05, 2.45], color=INK, linewidth=1.0,
                        linestyle=(0, (2, 2)))  # fmt: skip
        said = "; ".join(
            f"{rank} reads {files.replace(' ', ' and ')}" for rank, files in reads.items()
        )
        return render(
            fig,
            f"A strip of {numel} elements in {saved} shards as saved, above the same in {loading} "
            f"shards as loaded. {said}.",
            reads,
        )
