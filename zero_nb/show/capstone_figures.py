"""Figures of notebook 11: the paper's table 1 cell by cell, and what more devices change."""

from zero_nb.show.figure import render
from zero_nb.show.style import (
    INK,
    KINDS,
    PETROFF10,
    Look,
    bytes_axis,
    format_bytes,
    label_bar,
    sheet,
    text_color,
)
from zero_nb.theory.tables import zero_table1

__all__ = ["paper_table_1", "totals_over_devices"]

_FITS, _TOO_MUCH = PETROFF10[9], "#ffffff"
_DEVICE_GB = 32  # a V100, as the paper counts it

_STATES = ("param", "grad", "optim")
_GROUPS = {
    **{KINDS[kind].label: ((kind,), KINDS[kind]) for kind in _STATES},
    "activations, logits": (("activation", "logits"), KINDS["activation"]),
    "the rest": (
        ("bucket", "unsharded", "context", "fragmentation", "padding"),
        Look("the rest", PETROFF10[7], "++"),
    ),
}


def paper_table_1():
    """Draw table 1 of the ZeRO paper, each cell recomputed and compared with what is printed.

    Returns
    -------
    Figure
        A grid of GB by data-parallel degree, model and stage. Filled cells fit in 32 GB; a cell
        that differed from the printed one would have both numbers.

    Notes
    -----
    Rajbhandari et al., arXiv:1910.02054v3, Table 1.
    """
    table = zero_table1()
    cells = {
        (row[1], row[0], row[2]): (row[3], row[4], row[5])
        for row in table.rows  # model, DP, stage, bytes, ours, printed
    }
    degrees = sorted({key[0] for key in cells})
    models = list(dict.fromkeys(key[1] for key in cells))
    same = sum(ours == printed for _, ours, printed in cells.values())
    with sheet(9.2, 1.2 + 0.42 * (len(degrees) + 2)) as (fig, ax):
        ax.set(xlim=(-1.3, 3 * len(models)), ylim=(-len(degrees) + 0.4, 2.4))
        ax.axis("off")
        ax.set_title(f"GB of model states on each device; filled cells fit in {_DEVICE_GB} GB")
        ax.text(-0.25, 1, "devices", ha="right", va="center", fontweight="bold")
        for column, model in enumerate(models):
            ax.text(3 * column + 1.5, 1.95, f"{model} parameters", ha="center", va="center",
                    fontweight="bold")  # fmt: skip
            for stage in (1, 2, 3):
                ax.text(3 * column + stage - 0.5, 1, f"stage {stage}", ha="center", va="center")
        for row, degree in enumerate(degrees):
            ax.text(-0.25, -row, str(degree), ha="right", va="center")
            for column, model in enumerate(models):
                for stage in (1, 2, 3):
                    _cell(ax, 3 * column + stage - 1, -row, *cells[degree, model, stage])
        for column in range(len(models) + 1):
            ax.plot([3 * column] * 2, [0.5, -len(degrees) + 0.5], color=INK, linewidth=1.2)
        fitting = sum(exact <= _DEVICE_GB * 10**9 for exact, *_ in cells.values())
        return render(
            fig,
            f"Table of GB of model states on each device: data-parallel degrees "
            f"{', '.join(map(str, degrees))} by models of {', '.join(models)} parameters at "
            f"stages 1 to 3. {same} of {len(cells)} recomputed cells are as printed; {fitting} "
            f"fit in {_DEVICE_GB} GB and are filled.",
            {
                f"DP {degree}": {
                    f"{model}, stage {stage}": cells[degree, model, stage][1]
                    for model in models
                    for stage in (1, 2, 3)
                }
                for degree in degrees
            },
        )


def _cell(ax, x, y, exact, ours, printed):
    """One cell: its number, filled if it fits in a device."""
    from matplotlib.patches import Rectangle

    fits = exact <= _DEVICE_GB * 10**9
    color = _FITS if fits else _TOO_MUCH
    ax.add_patch(Rectangle((x + 0.02, y - 0.46), 0.96, 0.92, facecolor=color, edgecolor="#bbbbbb"))
    text = ours if ours == printed else f"{ours} ({printed})"
    ax.text(x + 0.5, y, text, ha="center", va="center", color=text_color(color),
            fontweight="bold" if fits else "normal")  # fmt: skip


def totals_over_devices(plans):
    """Draw what the fullest device needs on more and more devices, part by part.

    Parameters
    ----------
    plans : sequence of Plan
        The same run on growing numbers of devices.

    Returns
    -------
    Figure
        Stacked bars: the three model states, activations and logits, the rest.

    Raises
    ------
    ValueError
        If there are no plans.
    """
    if not plans:
        raise ValueError("give at least one plan")
    parts = [
        {name: sum(plan.bytes[kind] for kind in kinds) for name, (kinds, _) in _GROUPS.items()}
        for plan in plans
    ]
    sizes = [plan.world_size for plan in plans]
    top = 1.1 * max(plan.total_bytes for plan in plans)
    with sheet(8.6, 4.9) as (fig, ax):
        ax.set(ylim=(0, top), xlim=(-0.55, len(plans) - 0.45))
        for x, part in enumerate(parts):
            base = 0
            for name, size in part.items():
                (bar,) = ax.bar(x, size, 0.86, bottom=base, **_GROUPS[name][1].bar)
                label_bar(ax, bar, f"{name} {size / 1e9:.1f}", smallest=0.033)
                base += size
            ax.text(x, base + 0.01 * top, format_bytes(base), ha="center", va="bottom",
                    fontweight="bold")  # fmt: skip
        ax.set_xticks(range(len(plans)), [f"{size} devices" for size in sizes])
        ax.tick_params(axis="x", length=0)
        bytes_axis(ax.yaxis)
        ax.set_ylabel("bytes on the fullest device")
        ax.set_title(f"{plans[0].model} at stage {plans[0].stage}: devices divide the states only")
        said = ", ".join(format_bytes(plan.total_bytes) for plan in plans)
        states = ", ".join(
            format_bytes(sum(part[KINDS[kind].label] for kind in _STATES)) for part in parts
        )
        return render(
            fig,
            f"Stacked bars of what the fullest device needs for {plans[0].model} at stage "
            f"{plans[0].stage} on {', '.join(map(str, sizes))} devices: {said}. Model states fall: "
            f"{states}. Activations and logits stay at "
            f"{format_bytes(parts[0]['activations, logits'])}.",
            {
                f"{size} devices": {f"{name} bytes": value for name, value in part.items()}
                for size, part in zip(sizes, parts, strict=True)
            },
        )
