"""Figures of formulas: what the papers say, drawn from `zero_nb.theory` and nothing else.

Each function returns a `Figure`: the picture, the sentence that says what it shows, and its
numbers. GB is 10⁹ bytes, as in the ZeRO paper; GiB is written out.
"""

import numpy as np

from zero_nb.config import UsageError
from zero_nb.show.figure import render
from zero_nb.show.style import (
    INK,
    KINDS,
    PETROFF10,
    STAGES,
    Look,
    bytes_axis,
    format_bytes,
    label_bar,
    label_line,
    sheet,
    spread,
    text_color,
)
from zero_nb.theory.memory import get_recipe, model_state_bytes, zero_stage_memory_reduction
from zero_nb.theory.plan import BYTE_KINDS, ClusterSpec, plan, plan_grid
from zero_nb.theory.presets import get_device, get_model
from zero_nb.theory.published import BAND, heldout_rows, judge, published_rows
from zero_nb.theory.tables import exact_state_bytes, make_table
from zero_nb.theory.traffic import deepspeed_elements_per_step, step_traffic

__all__ = [
    "THEORY_FIGURES",
    "activations_over_batch",
    "largest_model",
    "memory_per_device",
    "paper_figure_1",
    "plan_bars",
    "predicted_over_measured",
    "saving_heat_map",
    "traffic_by_stage",
    "which_16",
]

STATES = ("param", "grad", "optim")
STAGE_NAMES = ("baseline", "P_os", "P_os+g", "P_os+g+p")
_STAGE_MATH = ("baseline", "$P_{os}$", "$P_{os+g}$", "$P_{os+g+p}$")
PLAN_KINDS = {
    "param": KINDS["param"],
    "grad": KINDS["grad"],
    "optim": KINDS["optim"],
    "activation": KINDS["activation"],
    "logits": Look("logits and loss", PETROFF10[4], "++"),
    "bucket": Look("buckets, gradient copies", PETROFF10[5], "\\\\"),
    "unsharded": Look("gathered units", PETROFF10[9], "--"),
    "outside": Look("context, fragmentation", PETROFF10[8], "||"),
}
"""How the lines of a plan are drawn; padding is drawn with the optimizer states."""


# --- the paper's figure 1 ------------------------------------------------------------------------


def paper_figure_1():
    """Draw figure 1 of the ZeRO paper from its formulas.

    Returns
    -------
    Figure
        Model states per device for 7.5 billion parameters on 64 devices, baseline and the three
        stages, each with the figure the paper prints.
    """
    numel, world_size = 7_500_000_000, 64
    printed = make_table("zero-fig1").column("printed GB")
    states = [model_state_bytes(stage, world_size, numel).as_dict() for stage in range(4)]
    with sheet(8.6, 3.6) as (fig, ax):
        ax.grid(axis="y", visible=False)
        ax.grid(axis="x", visible=True)
        ax.set_xlim(0, 146)
        ax.set_ylim(3.6, -0.75)
        for stage, kinds in enumerate(states):
            left = 0.0
            for kind in STATES:
                size = kinds[kind] / 1e9
                ax.barh(stage, size, left=left, height=0.62, **KINDS[kind].bar)
                if size > 9:
                    _inside(ax, left + size / 2, stage, f"{size:.3g}", KINDS[kind].color)
                if stage == 0:
                    ax.text(left + size / 2, -0.4, KINDS[kind].label, ha="center", va="bottom",
                            fontsize="small")  # fmt: skip
                left += size
            total = f" {printed[stage]} GB"
            ax.text(left + 0.6, stage, total, va="center", ha="left", fontweight="bold")
        ax.set_yticks(range(4), [f"{_STAGE_MATH[i]}\n(stage {i})" for i in range(4)])
        ax.tick_params(axis="y", length=0)
        ax.set_xlabel("GB per device; 2 + 2 + K bytes a parameter, K = 12")
        ax.set_title("Model states of 7.5 billion parameters on 64 devices (ZeRO, figure 1)")
        return render(
            fig,
            "Horizontal bars of model states per device for 7.5 billion parameters on 64 devices: "
            "120 GB without ZeRO, 31.4 GB with optimizer states sharded, 16.6 GB with gradients "
            "too, 1.9 GB with parameters too.",
            {STAGE_NAMES[i]: {f"{k} bytes": states[i][k] for k in STATES} for i in range(4)},
        )


def _inside(ax, x, y, text, fill):
    """Write a number on a bar, on a patch of the bar's colour so that no hatch crosses it."""
    ax.text(
        x, y, text, ha="center", va="center", color=text_color(fill), fontsize="small",
        bbox={"boxstyle": "round,pad=0.15", "facecolor": fill, "edgecolor": "none"},
    )  # fmt: skip


# --- over the world size -------------------------------------------------------------------------


def _device_line(ax, size, label, x0, x1, *, at_right=False, below=False):
    """A dashed line at a device's memory, named at one of its ends."""
    ax.plot([x0, x1], [size, size], color=INK, linewidth=0.9, linestyle=(0, (6, 3)), zorder=4)
    ax.annotate(
        label,
        (x1 if at_right else x0, size),
        xytext=(-3 if at_right else 3, -3 if below else 3),
        textcoords="offset points",
        va="top" if below else "bottom",
        ha="right" if at_right else "left",
        fontsize="small",
    )


def _stage_labels(ax, x, ends, log=True, gap=0.16):
    """Name each stage at the end of its line, labels kept apart."""
    values = np.log10(ends) if log else np.asarray(ends)
    places = spread(list(values), gap)
    for stage, place in enumerate(places):
        y = 10**place if log else place
        label_line(ax, x, y, STAGES[stage].label, STAGES[stage].color)


def memory_per_device(numel=7_500_000_000, world_sizes=None, devices=("v100-32gb", "h100-80gb")):
    """Draw model states per device over the number of devices, a line a stage.

    Parameters
    ----------
    numel : int
        Parameters.
    world_sizes : sequence of int, optional
        1 to 1024 by default.
    devices : sequence of str
        Presets whose memory is drawn as a line.

    Returns
    -------
    Figure
        Log-log: stage 3 falls as 1/W for ever, stages 1 and 2 level off at what they do not shard.
    """
    worlds = [2**i for i in range(11)] if world_sizes is None else list(world_sizes)
    totals = [
        [model_state_bytes(stage, world, numel).total for world in worlds] for stage in range(4)
    ]
    found = [get_device(name) for name in devices]
    with sheet(8.6, 4.8) as (fig, ax):
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.grid(visible=True, which="major", axis="both")
        for stage, line in enumerate(totals):
            ax.plot(worlds, line, **STAGES[stage].line)
        ax.set_xlim(worlds[0], worlds[-1] * 1.9)
        ends = [line[-1] for line in totals]
        for device in found:
            size = device.memory_bytes
            text = f"{device.name}: {format_bytes(size, binary=True)}"
            above = min((end / size for end in ends if end > size), default=np.inf)
            under = min((size / end for end in ends if end < size), default=np.inf)
            _device_line(ax, size, text, worlds[0], worlds[-1], at_right=True, below=under > above)
        _stage_labels(ax, worlds[-1], ends)
        _world_axis(ax, worlds)
        bytes_axis(ax.yaxis)
        ax.set_ylabel("bytes per device")
        ax.set_title(
            f"Model states per device, {numel / 1e9:g} billion parameters, mixed precision"
        )
        last = totals[3][-1]
        return render(
            fig,
            f"Lines of model-state bytes per device from {worlds[0]} to {worlds[-1]} devices. "
            f"Stage 0 stays at {format_bytes(totals[0][0])}; stages 1 and 2 level off at "
            f"{format_bytes(totals[1][-1])} and {format_bytes(totals[2][-1])}; stage 3 falls with "
            f"the number of devices to {format_bytes(last)}.",
            {
                "world size": worlds,
                **{f"stage {i} bytes": totals[i] for i in range(4)},
                "devices": {device.name: device.memory_bytes for device in found},
            },
        )


def _world_axis(ax, worlds):
    """Write every other world size below the axis."""
    from matplotlib.ticker import FixedLocator, NullLocator

    step = 2 if len(worlds) > 7 else 1
    ax.xaxis.set_major_locator(FixedLocator(worlds[::step]))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xticklabels([f"{world:,}" for world in worlds[::step]])
    ax.set_xlabel("devices (data-parallel)")


def saving_heat_map(world_sizes=None, precision="bf16"):
    """Draw the saved fraction of model states for each stage and number of devices.

    Parameters
    ----------
    world_sizes : sequence of int, optional
        1 to 1024 by default.
    precision : str
        Recipe whose bytes are sharded.

    Returns
    -------
    Figure
        A labelled grid: each stage has a ceiling, reached at a few dozen devices.
    """
    worlds = [2**i for i in range(11)] if world_sizes is None else list(world_sizes)
    recipe = get_recipe(precision)
    kinds = (recipe.param_bytes, recipe.grad_bytes, recipe.optim_bytes)
    saved = np.array(
        [[zero_stage_memory_reduction(stage, world, *kinds) for world in worlds]
         for stage in range(4)]
    )  # fmt: skip
    with sheet(9.2, 3.3) as (fig, ax):
        import matplotlib

        ax.grid(visible=False)
        shades = matplotlib.colormaps["Blues"]
        ax.imshow(saved, cmap=shades, vmin=0, vmax=1.25, aspect="auto")
        for (stage, column), value in np.ndenumerate(saved):
            fill = matplotlib.colors.to_hex(shades(value / 1.25))
            text = "0" if value == 0 else f"{100 * value:.1f}"
            ax.text(column, stage, text, ha="center", va="center", color=text_color(fill))
        ax.set_xticks(range(len(worlds)), [f"{world:,}" for world in worlds])
        ax.set_yticks(range(4), [look.label for look in STAGES])
        ax.tick_params(length=0)
        for side in ("left", "bottom"):
            ax.spines[side].set_visible(False)
        ax.set_xlabel("devices (data-parallel)")
        ceilings = [100 * zero_stage_memory_reduction(i, 2**40, *kinds) for i in (1, 2, 3)]
        ax.set_title(
            f"Saved of a device's model states, % ({precision}, {recipe.total_bytes} bytes a "
            f"parameter; ceilings {ceilings[0]:.3g}, {ceilings[1]:.3g}, {ceilings[2]:.3g} %)"
        )
        return render(
            fig,
            f"A grid of stages 0 to 3 by {worlds[0]} to {worlds[-1]} devices with the saved "
            f"percentage in each cell. Stage 1 comes close to {ceilings[0]:.3g} %, stage 2 to "
            f"{ceilings[1]:.3g} %, stage 3 to {ceilings[2]:.3g} %; stage 0 and one device save "
            "nothing.",
            {
                "world size": worlds,
                **{f"stage {i} saved fraction": saved[i] for i in range(4)},
            },
        )


def largest_model(device_bytes=32 * 10**9, world_sizes=None):
    """Draw the largest model whose states fit, over the number of devices.

    Parameters
    ----------
    device_bytes : int
        Memory of a device; 32 GB as in table 2 of the paper by default.
    world_sizes : sequence of int, optional
        1 to 1024 by default.

    Returns
    -------
    Figure
    """
    worlds = [2**i for i in range(11)] if world_sizes is None else list(world_sizes)
    sizes = [
        [float(device_bytes / exact_state_bytes(stage, world, 1)) for world in worlds]
        for stage in range(4)
    ]
    with sheet(8.6, 4.6) as (fig, ax):
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.grid(visible=True, which="major", axis="both")
        for stage, line in enumerate(sizes):
            ax.plot(worlds, line, **STAGES[stage].line)
        ax.set_xlim(worlds[0], worlds[-1] * 3.2)
        ends = [line[-1] for line in sizes]
        places = spread(list(np.log10(ends)), 0.17)
        for stage, place in enumerate(places):
            text = f"{STAGES[stage].label}: {_short(ends[stage])}"
            label_line(ax, worlds[-1], 10**place, text, STAGES[stage].color)
        _world_axis(ax, worlds)
        ax.yaxis.set_major_formatter(lambda value, _: _short(value))
        ax.set_ylabel("parameters")
        ax.set_title(f"Largest model whose states fit in devices of {device_bytes / 1e9:.4g} GB")
        at64 = [_short(line[worlds.index(64)]) for line in sizes] if 64 in worlds else None
        at = f" On 64 devices: {', '.join(at64)} for stages 0 to 3." if at64 else ""
        return render(
            fig,
            f"Lines of the largest number of parameters that fit in {device_bytes / 1e9:.4g} GB "
            f"a device. Stage 0 does not grow with devices, stages 1 and 2 reach a ceiling of "
            f"{_short(ends[1])} and {_short(ends[2])}, stage 3 grows in proportion to "
            f"{_short(ends[3])} on {worlds[-1]:,}.{at}",
            {"world size": worlds, **{f"stage {i} parameters": sizes[i] for i in range(4)}},
        )


def _short(count):
    """A number of parameters in short: 7.64B, 128B, 2.05T."""
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if count >= 0.9995 * scale:
            return f"{count / scale:.3g}{unit}"
    return f"{count:.3g}"


# --- more than states ----------------------------------------------------------------------------


def _plan_kinds(kinds):
    """Bytes by the looks of `PLAN_KINDS` from a plan's bytes by kind."""
    drawn = {name: kinds[name] for name in PLAN_KINDS if name in kinds}
    drawn["optim"] = kinds["optim"] + kinds["padding"]
    drawn["outside"] = kinds["context"] + kinds["fragmentation"]
    return drawn


def activations_over_batch(
    model="gpt2-xl", world_size=8, stage=2, batches=(1, 2, 4, 8, 16), device="a100-40gb", **options
):
    """Draw what a device needs as the micro-batch grows: states stay, activations do not.

    Parameters
    ----------
    model : str or ModelSpec
    world_size, stage : int
    batches : sequence of int
        Micro-batches.
    device : str
        Preset whose memory is drawn as a line.
    **options
        As for `zero_nb.theory.plan.plan_grid`; seq is 1024 unless given.

    Returns
    -------
    Figure
        Stacked bars at the largest moment of each plan.
    """
    spec, device = get_model(model) if isinstance(model, str) else model, get_device(device)
    options = {"seq": 1024} | options
    grid = plan_grid([spec], [world_size], [stage], batches, by_kind=True, **options)
    kinds = {kind: grid.kinds[kind][0, 0, 0] for kind in BYTE_KINDS}
    columns = [_plan_kinds({k: int(v[i]) for k, v in kinds.items()}) for i in range(len(batches))]
    tops = [sum(column.values()) for column in columns]
    with sheet(8.6, 5.0) as (fig, ax):
        ax.set_ylim(0, 1.06 * max(*tops, device.memory_bytes))
        ax.set_xlim(-0.5, len(batches) - 0.5 + 1.9)
        for place, column in enumerate(columns):
            bottom = 0.0
            for kind, size in column.items():
                (bar,) = ax.bar(place, size, bottom=bottom, width=0.66, **PLAN_KINDS[kind].bar)
                label_bar(ax, bar, format_bytes(size), smallest=0.045)
                bottom += size
        _name_parts(ax, columns[-1], len(batches) - 1 + 0.33)
        text = f"{device.name}: {format_bytes(device.memory_bytes, binary=True)}"
        _device_line(ax, device.memory_bytes, text, -0.5, len(batches) - 0.5)
        ax.set_xticks(range(len(batches)), [f"{batch}" for batch in batches])
        ax.tick_params(axis="x", length=0)
        ax.set_xlabel("micro-batch of one device")
        bytes_axis(ax.yaxis)
        ax.set_ylabel("bytes on the device")
        ax.set_title(
            f"{spec.name}, stage {stage} on {world_size} devices, sequence {options['seq']:,}"
        )
        shares = [column["activation"] / top for column, top in zip(columns, tops, strict=True)]
        return render(
            fig,
            f"Stacked bars of bytes on one device for {spec.name} at stage {stage} on {world_size} "
            f"devices, for micro-batches {', '.join(map(str, batches))}. Model states stay the "
            f"same while activations grow from {shares[0]:.0%} to {shares[-1]:.0%} of the bar; the "
            f"device has {format_bytes(device.memory_bytes, binary=True)}.",
            {
                "micro-batch": list(batches),
                **{
                    f"{PLAN_KINDS[kind].label} bytes": [column[kind] for column in columns]
                    for kind in PLAN_KINDS
                },
                "device bytes": device.memory_bytes,
            },
        )


def _name_parts(ax, column, x):
    """Name the parts of the last bar beside it, labels kept apart."""
    low, high = ax.get_ylim()
    shown = {kind: size for kind, size in column.items() if size > 0.003 * (high - low)}
    middles, bottom = [], 0.0
    for kind, size in column.items():
        if kind in shown:
            middles.append(bottom + size / 2)
        bottom += size
    gap = 0.052 * (high - low)
    # Half a label above the axis at least, so that none lies on it.
    wanted = [max(middle, low + (0.6 + i) * gap) for i, middle in enumerate(middles)]
    for kind, place, middle in zip(shown, spread(wanted, gap), middles, strict=True):
        ax.annotate(
            PLAN_KINDS[kind].label, (x, middle), xytext=(x + 0.16, place), va="center", ha="left",
            fontsize="small", annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": "#888888", "linewidth": 0.6, "shrinkA": 0,
                        "shrinkB": 0, "relpos": (0, 0.5)},
        )  # fmt: skip


def plan_bars(model="llama-7b", cluster=None, **options):
    """Draw a plan: the largest moment of each stage, by kind, and the device's memory.

    The stage of the plan (the smallest that fits, unless one is given) has its name in bold.

    Parameters
    ----------
    model : str, int or ModelSpec
    cluster : ClusterSpec, optional
        8 H100s by default.
    **options
        As for `zero_nb.theory.plan.plan`.

    Returns
    -------
    Figure
    """
    cluster = ClusterSpec.of("h100-80gb", 8) if cluster is None else cluster
    answer = plan(model, cluster, **options)
    columns = [_plan_kinds(row["bytes"]) for row in answer.stages]
    tops = [sum(column.values()) for column in columns]
    limit = cluster.device_bytes
    fits = [row["fits"] for row in answer.stages]
    with sheet(8.6, 4.6) as (fig, ax):
        ax.set_ylim(0, 1.1 * max(tops + ([limit] if limit else [])))
        ax.set_xlim(-0.5, 3.5)
        for stage, column in enumerate(columns):
            bottom = 0.0
            for kind, size in column.items():
                (bar,) = ax.bar(stage, size, bottom=bottom, width=0.66, **PLAN_KINDS[kind].bar)
                label_bar(ax, bar, format_bytes(size), smallest=0.05)
                bottom += size
            verdict = "" if fits[stage] is None else (", fits" if fits[stage] else "")
            ax.text(stage, bottom, f"{format_bytes(bottom)}{verdict}", ha="center", va="bottom",
                    fontweight="bold" if fits[stage] else "normal")  # fmt: skip
        if limit:
            name = f"{cluster.name}: " if cluster.name else "device: "
            _limit(ax, limit, name + format_bytes(limit, binary=True), tops)
        _legend(fig, columns)
        ax.set_xticks(range(4), [look.label for look in STAGES])
        ax.get_xticklabels()[answer.stage].set_fontweight("bold")
        ax.tick_params(axis="x", length=0)
        bytes_axis(ax.yaxis)
        ax.set_ylabel("bytes on the fullest device")
        ax.set_title(f"{answer.model} on {cluster.world_size} devices, {answer.precision}")
        which = "no stage fits" if answer.smallest_stage is None else (
            f"stage {answer.smallest_stage} is the smallest that fits"
        )  # fmt: skip
        verdict = "" if limit is None else f"; {which} in {format_bytes(limit, binary=True)}"
        sizes = ", ".join(format_bytes(top) for top in tops)
        return render(
            fig,
            f"Stacked bars of what the fullest device needs at stages 0 to 3 for {answer.model} on "
            f"{cluster.world_size} devices: {sizes}{verdict}.",
            {
                **{
                    f"stage {stage}": {
                        f"{PLAN_KINDS[kind].label} bytes": size for kind, size in column.items()
                    }
                    for stage, column in enumerate(columns)
                },
                "device bytes": limit,
            },
        )


def _limit(ax, limit, text, tops):
    """The device's memory, named over the lowest bar, or inside the highest if none is below."""
    ax.axhline(limit, color=INK, linewidth=0.9, linestyle=(0, (6, 3)), zorder=4)
    if min(tops) < limit:
        room = [limit - top for top in tops]
        text += f"\n= {format_bytes(limit)}"  # as on the axis
    else:
        room = tops
    ax.annotate(
        text, (room.index(max(room)), limit), xytext=(0, 4), textcoords="offset points",
        ha="center", va="bottom", fontsize="small", zorder=5,
        bbox={"boxstyle": "round,pad=0.1", "facecolor": "white", "edgecolor": "none"},
    )  # fmt: skip


def _legend(fig, columns):
    """What each part is, outside the axes: bars of four heights leave no place for labels."""
    from matplotlib.patches import Patch

    shown = [kind for kind in PLAN_KINDS if any(column[kind] for column in columns)]
    handles = [Patch(label=PLAN_KINDS[kind].label, **PLAN_KINDS[kind].bar) for kind in shown]
    fig.legend(
        handles=handles[::-1], loc="outside right center", fontsize="small", handleheight=1.2
    )


# --- traffic -------------------------------------------------------------------------------------


def traffic_by_stage(world_size=64, accumulations=(1, 4)):
    """Draw elements sent per step by stage, without and with gradient accumulation.

    Parameters
    ----------
    world_size : int
        W.
    accumulations : sequence of int
        Micro-batches of a step, one panel each.

    Returns
    -------
    Figure
        In units of the model; gradients and parameters apart, and DeepSpeed's all-reduced buckets.
    """
    if len(accumulations) < 1:
        raise UsageError("give at least one number of micro-batches")
    unit = world_size * 1000
    panels, data = [], {}
    for k in accumulations:
        bars = _traffic_rows(world_size, unit, k)
        panels.append(bars)
        data[f"{k} micro-batches"] = {name: round(sum(parts), 6) for name, parts in bars.items()}
    names = list(panels[0])
    with sheet(9.4, 4.0, ncols=len(accumulations), sharey=True, squeeze=False) as (fig, grid):
        for ax, bars, k in zip(grid[0], panels, accumulations, strict=True):
            ax.grid(axis="y", visible=False)
            ax.grid(axis="x", visible=True)
            widest = max(sum(parts) for parts in bars.values())
            ax.set_xlim(0, 1.2 * widest)
            for place, parts in enumerate(bars.values()):
                left = 0.0
                for kind, size in zip(("grad", "param"), parts, strict=True):
                    ax.barh(place, size, left=left, height=0.62, **KINDS[kind].bar)
                    if place == 3:
                        _inside(ax, left + size / 2, place, KINDS[kind].label, KINDS[kind].color)
                    left += size
                factor = round(left * world_size / (world_size - 1))
                ax.text(left + 0.015 * widest, place, f"{factor} Ψ", va="center", fontweight="bold")
            ax.set_yticks(range(len(names)), names)
            ax.tick_params(axis="y", length=0)
            ax.set_ylim(len(names) - 0.5, -0.6)
            plural = "" if k == 1 else "es"
            ax.set_title(f"{k} micro-batch{plural} a step")
            ax.set_xlabel(f"elements sent ÷ Ψ, one of {world_size} ranks")
        told = "; ".join(
            f"with {k}: "
            + ", ".join(
                f"{name} {round(sum(parts) * world_size / (world_size - 1))}"
                for name, parts in bars.items()
            )
            for k, bars in zip(accumulations, panels, strict=True)
        )
        return render(
            fig,
            "Bars of elements each rank sends in a step, gradients and parameters, in units of the "
            f"model times (W−1)/W, by micro-batches a step: {told}.",
            data,
        )


def _traffic_rows(world_size, unit, k):
    """Gradient and parameter elements of each scheme, in units of the model."""
    rows = {}
    for stage in range(4):
        sent = step_traffic(stage, world_size, unit, micro_batches=k)
        rows[f"stage {stage}"] = (sent.grad_elements / unit, sent.param_elements / unit)
    sent = step_traffic(3, world_size, unit, micro_batches=k, no_sync=True)
    rows["stage 3,\nno_sync"] = (sent.grad_elements / unit, sent.param_elements / unit)
    real = deepspeed_elements_per_step(2, world_size, unit, micro_batches=k)
    gathered = step_traffic(2, world_size, unit, micro_batches=k).param_elements
    rows["stage 2, all-\nreduced buckets"] = ((real - gathered) / unit, gathered / unit)
    return rows


# --- which 16? -----------------------------------------------------------------------------------

_WHICH = (
    ("fp32", "sgd", "fp32, SGD"),
    ("fp32", "momentum", "fp32, momentum"),
    ("fp32", "adamw", "fp32, Adam"),
    ("bf16", "adamw", "16-bit + fp32\nmaster, Adam"),
    ("bf16-fp32-grads", "adamw", "and fp32\ngradients"),
    ("bf16-both-grads", "adamw", "and both\ngradients"),
)
_PARTS = (
    ("weights", KINDS["param"]),
    ("gradients", KINDS["grad"]),
    ("master copy", Look("master copy", PETROFF10[6], "++")),
    ("moments", KINDS["optim"]),
)


def which_16():
    """Draw the bytes per parameter of common recipes as labelled blocks.

    Returns
    -------
    Figure
        Two different 16s, and why 8, 12, 18 and 20 are said too; K = 12 is the optimizer's part.
    """
    recipes = [get_recipe(precision, optimizer) for precision, optimizer, _ in _WHICH]
    parts = [(r.param_bytes, r.grad_bytes, r.master_bytes, r.state_bytes) for r in recipes]
    with sheet(9.2, 4.8) as (fig, ax):
        ax.set_ylim(0, 23)
        ax.set_xlim(-0.55, len(parts) - 0.4)
        ax.set_yticks(range(0, 21, 4))
        for place, sizes in enumerate(parts):
            bottom = 0
            for (name, look), size in zip(_PARTS, sizes, strict=True):
                if not size:
                    continue
                (bar,) = ax.bar(place, size, bottom=bottom, width=0.7, **look.bar)
                label_bar(ax, bar, f"{name} {size}", smallest=0.05)
                bottom += size
            ax.text(place, bottom + 0.25, f"{bottom} bytes", ha="center", va="bottom",
                    fontweight="bold")  # fmt: skip
        k = recipes[3].optim_bytes
        arrow = {"arrowstyle": "<->", "color": INK, "linewidth": 1.0, "shrinkA": 0, "shrinkB": 0}
        ax.annotate("", (3.42, 16), xytext=(3.42, 16 - k), arrowprops=arrow)
        ax.text(3.53, 16 - k / 2, f"K = {k}", ha="center", va="center", rotation=90)
        ax.set_xticks(range(len(parts)), [name for _, _, name in _WHICH])
        ax.tick_params(axis="x", length=0)
        ax.set_ylabel("bytes per parameter")
        ax.set_title("Which 16? Model states of one parameter, without ZeRO")
        totals = [sum(sizes) for sizes in parts]
        return render(
            fig,
            "Stacked blocks of bytes per parameter: "
            + ", ".join(
                f"{name.replace(chr(10), ' ')} {total}"
                for (_, _, name), total in zip(_WHICH, totals, strict=True)
            )
            + ". Float32 Adam and mixed-precision Adam both need 16, of which K = 12 are the "
            "optimizer's part in mixed precision and 8 in float32.",
            {
                name.replace("\n", " "): {
                    part: size for (part, _), size in zip(_PARTS, sizes, strict=True)
                }
                for (_, _, name), sizes in zip(_WHICH, parts, strict=True)
            },
        )


# --- reality -------------------------------------------------------------------------------------


def predicted_over_measured():
    """Draw planned over measured memory for published runs.

    Returns
    -------
    Figure
        Log-log; the band is ±15 %. Rows outside it are named.
    """
    groups = {
        "judged": [judge(row) for row in published_rows()],
        "collected later": [judge(row) for row in heldout_rows()],
    }
    looks = {
        "judged": {"marker": "o", "color": PETROFF10[0], "s": 42},
        "collected later": {"marker": "^", "color": PETROFF10[6], "s": 30},
    }
    with sheet(7.6, 6.4) as (fig, ax):
        low, high = 1.0e9, 1.5e11
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.set_xlim(low, high)
        ax.set_ylim(low, high)
        ax.grid(visible=True, which="major", axis="both")
        edge = np.array([low, high])
        ax.fill_between(edge, edge * (1 - BAND), edge * (1 + BAND), color="#e8e8e8", zorder=0)
        ax.plot(edge, edge, color="#888888", linewidth=0.8, zorder=1)
        for name, judged in groups.items():
            right = sum(each.right for each in judged)
            ax.scatter(
                [each.measured for each in judged], [each.predicted for each in judged],
                edgecolor=INK, linewidth=0.6, zorder=3,
                label=f"{name}: {right} of {len(judged)} within 15 %", **looks[name],
            )  # fmt: skip
        _name_misses(ax, [each for judged in groups.values() for each in judged if not each.right])
        ax.legend(loc="upper left")
        bytes_axis(ax.xaxis)
        bytes_axis(ax.yaxis)
        ax.set_xlabel("measured, published (allocated, reserved or nvidia-smi)")
        ax.set_ylabel("planned, of the same measure")
        ax.set_title("Planned over measured memory of one device")
        counts = [
            f"{sum(each.right for each in judged)} of {len(judged)} {name}"
            for name, judged in groups.items()
        ]
        return render(
            fig,
            "Points of planned over measured bytes on one device for published training runs from "
            f"1 to 512 devices. Within 15 percent are {' and '.join(counts)} runs.",
            {
                name: {
                    "row": [each.row for each in judged],
                    "measured bytes": [each.measured for each in judged],
                    "planned bytes": [each.predicted for each in judged],
                }
                for name, judged in groups.items()
            },
        )


def _name_misses(ax, misses):
    """Name the points outside the band, each on the side it is on, labels kept apart."""
    for above in (True, False):
        side = [each for each in misses if (each.ratio > 1) == above]
        places = spread([float(np.log10(each.predicted)) for each in side], 0.055)
        for each, place in zip(side, places, strict=True):
            shift = 0.84 if above else 1.2
            ax.annotate(
                each.row, (each.measured, each.predicted),
                xytext=(each.measured * shift, 10**place), fontsize="small", va="center",
                ha="right" if above else "left",
                arrowprops={"arrowstyle": "-", "color": "#888888", "linewidth": 0.6,
                            "shrinkA": 0, "shrinkB": 3},
            )  # fmt: skip


THEORY_FIGURES = {
    "paper_figure_1": paper_figure_1,
    "memory_per_device": memory_per_device,
    "saving_heat_map": saving_heat_map,
    "largest_model": largest_model,
    "activations_over_batch": activations_over_batch,
    "plan_bars": plan_bars,
    "traffic_by_stage": traffic_by_stage,
    "which_16": which_16,
    "predicted_over_measured": predicted_over_measured,
}
"""Figures of formulas by the name they are saved under; each needs no arguments."""
