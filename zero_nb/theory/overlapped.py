"""Data parallelism that reduces while it computes, as PyTorch's DDP runs it.

The engine of this package reduces at stage 0 when backward is over. That is the plainest way to
say what stage 0 means, but a comparison of step times owes data parallelism the same overlap that
stage 3 is given: Li et al., *PyTorch Distributed*, arXiv:2006.15704, Section 3.2.3.
"""

from __future__ import annotations

from dataclasses import replace

from zero_nb.config import UsageError
from zero_nb.theory.schedule import Compute, Schedule, Send, StepOptions, StepWork, Wait, schedule

__all__ = ["overlapped_data_parallel"]


def overlapped_data_parallel(work: StepWork, options: StepOptions) -> Schedule:
    """Write a stage-0 step in which each gradient is sent as soon as backward has made it.

    Parameters
    ----------
    work : StepWork
    options : StepOptions
        Of stage 0.

    Returns
    -------
    Schedule
        The instructions of `zero_nb.theory.schedule.schedule`, each all-reduce moved to the place
        where the last backward pass over its unit ends. All of them are waited for before the
        update. With several micro-batches only the last one's gradients, the sums, travel.

    Raises
    ------
    UsageError
        At another stage: stages 2 and 3 have ``overlap_comm`` for this.
    """
    if options.stage != 0:
        raise UsageError(
            f"this is data parallelism, stage 0, got stage {options.stage}; for stages 2 and 3 "
            "give schedule an option with overlap_comm=True"
        )
    plain = schedule(work, options)
    sends = {send.name: replace(send, phase="backward") for send in plain.sends}
    waits = [each for each in plain.instructions if isinstance(each, Wait)]
    ends = _where_backward_ends(work, plain)
    instructions, waited = [], False
    for place, each in enumerate(plain.instructions):
        if isinstance(each, Send | Wait):
            continue
        if each.phase == "step" and not waited:
            instructions += waits
            waited = True
        instructions.append(each)
        instructions += [sends[name] for name in ends.get(place, ()) if name in sends]
    return replace(plain, instructions=tuple(instructions))


def _where_backward_ends(work: StepWork, plain: Schedule) -> dict[int, list[str]]:
    """Places at which the gradients of units are complete, after the last micro-batch."""
    last = {
        each.name: place
        for place, each in enumerate(plain.instructions)
        if isinstance(each, Compute) and each.phase == "backward"
    }
    ends: dict[int, list[str]] = {}
    for unit in work.units:
        first_user = next(layer.name for layer in work.layers if unit.name in layer.units)
        ends.setdefault(last[first_user], []).append(unit.name)
    return ends
