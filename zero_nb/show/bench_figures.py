"""The figure of the benchmarks: kernels beside memcpy and beside NumPy's and torch's best ways."""

from zero_nb.show.figure import render
from zero_nb.show.style import INK, PETROFF10, sheet

__all__ = ["kernel_ratios"]

# (first words of what is compared with, name, colour, marker)
_AGAINST = (
    (("memcpy",), "memcpy of the same bytes", PETROFF10[8], "D"),
    (("NumPy", "np."), "NumPy's best way", PETROFF10[0], "o"),
    (("torch",), "torch's best way", PETROFF10[2], "s"),
)


def _ratios(document):
    """Return for each case with something to reach (or all) its ratios by peer, and their reach."""
    rows = [row for row in document["rows"] if row["measured"] is not None]
    asked = {(row["what"], row["case"]) for row in rows if row["reach"] is not None}
    cases, reach = {}, {}
    for row in rows:
        key = row["what"], row["case"]
        if asked and key not in asked:
            continue
        case = " · ".join(key)
        for words, name, _, _ in _AGAINST:
            if row["against"].startswith(words):
                ratios = cases.setdefault(case, {})
                ratios[name] = min(ratios.get(name, row["measured"]), row["measured"])
                if row["reach"] is not None:
                    reach.setdefault(case, {})[name] = row["reach"]
    return cases, {case: reach.get(case, {}) for case in cases}


def kernel_ratios(document):
    """Draw how many times faster than memcpy and than its peers each kernel is.

    Parameters
    ----------
    document : dict
        What ``benchmarks/kernels.py --json`` writes: ``rows`` and ``machine``.

    Returns
    -------
    Figure
        One line a case, a mark for each peer, on a logarithmic axis.

    Raises
    ------
    ValueError
        No row was measured.
    """
    cases, reach = _ratios(document)
    if not cases:
        raise ValueError("the document has no measured row; run benchmarks/kernels.py --json first")
    machine = document["machine"]
    with sheet(10.0, 1.9 + 0.235 * len(cases)) as (fig, ax):
        places = range(len(cases), 0, -1)
        for _, name, color, marker in _AGAINST:
            points = [
                (r[name], y) for r, y in zip(cases.values(), places, strict=True) if name in r
            ]
            if points:
                ax.plot(*zip(*points, strict=True), marker, color=color, label=name, markersize=6)
                asked = [(reach[case][name], y) for case, y in zip(cases, places, strict=True)
                         if name in reach[case]]  # fmt: skip
                for at, y in asked:
                    ax.plot([at, at], [y - 0.4, y + 0.4], color=color, linewidth=1.5)
        ax.axvline(1.0, color=INK, linewidth=1.2)
        ax.set_xscale("log", base=2)
        low, high = ax.get_xlim()
        ax.set_xlim(min(low, 0.45), max(high, 2.2))
        ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        ax.set_yticks(list(places), list(cases))
        ax.set_ylim(0.4, len(cases) + 0.6)
        ax.grid(axis="x")
        fig.supxlabel(
            "median time of the other ÷ ours: right of the line we are faster; bar: to be reached\n"
            "memcpy: as many bytes as are read and written, in the same run, on one thread or two",
            fontsize="medium",
        )
        fig.suptitle(
            f"Kernels on {machine['processor']}, {machine['cores']} cores", fontweight="bold"
        )
        ax.legend(loc="upper right", fontsize="small")
        return render(
            fig, _words(cases, machine), {"cases": cases, "reach": reach, "machine": machine}
        )


def _words(cases, machine):
    """Say what the figure shows."""
    told = [f"Speed of {len(cases)} kernel cases on {machine['processor']}."]
    for _, name, _, _ in _AGAINST:
        ratios = {case: r[name] for case, r in cases.items() if name in r}
        if ratios:
            ahead = sum(ratio >= 1 for ratio in ratios.values())
            worst, best = min(ratios, key=ratios.get), max(ratios, key=ratios.get)
            told.append(
                f"Against {name} {ahead} of {len(ratios)} are at least as fast: from "
                f"{ratios[worst]:.2f} ({worst}) to {ratios[best]:.1f} times ({best})."
            )
    return " ".join(told)
