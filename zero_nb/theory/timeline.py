"""A schedule laid over time: two streams, computing and communicating, and memory under them.

The program issues messages and computes; messages go over one link, one after the other, each for
a time of α + β·bytes. Whoever waits for a message stands still: that communication is *exposed*,
the rest is *hidden*. Nothing here runs or imports the training side.

Limits
------
Without overlap the step takes the sum of both streams. With perfect overlap and more to compute
than to send, it takes the computing, the gather before it and the reduction after it; with more
to send than to compute, the sending and the computing that cannot begin before the last gather.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from zero_nb.config import UsageError
from zero_nb.theory.checks import check_count, check_positive
from zero_nb.theory.network import Network, ring_seconds
from zero_nb.theory.schedule import (
    Compute,
    Free,
    Hold,
    LayerWork,
    Schedule,
    Send,
    StepOptions,
    StepWork,
    UnitSize,
    Wait,
    schedule,
)
from zero_nb.theory.specs import ModelSpec

__all__ = ["Link", "Span", "Timeline", "lay_out", "timeline", "transformer_work"]


@dataclass(frozen=True)
class Link:
    """A network of one level.

    Attributes
    ----------
    bytes_per_s : float
        What one rank sends, one direction: 1/β.
    latency_s : float
        Start-up time of a message: α.
    """

    bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what is no link."""
        check_positive("bytes_per_s", self.bytes_per_s)
        if not (math.isfinite(self.latency_s) and self.latency_s >= 0):
            raise UsageError(
                f"latency_s must be a number of seconds of at least 0, got {self.latency_s!r}"
            )

    def seconds(self, send: Send) -> float:
        """How long a message takes; one rank alone sends nothing."""
        if send.world_size == 1:
            return 0.0
        return self.latency_s + send.bytes_sent / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class Span:
    """Something that takes time.

    Attributes
    ----------
    lane : str
        ``"compute"``, ``"communication"``, or ``"wait"`` where the program stands still.
    name, phase : str
    start_s, stop_s : float
        From the beginning of the step.
    bytes_sent : int
        Of a message, by one rank.
    """

    lane: str
    name: str
    phase: str
    start_s: float
    stop_s: float
    bytes_sent: int = 0


@dataclass(frozen=True)
class Timeline:
    """One step over time.

    Attributes
    ----------
    schedule : Schedule
    spans : tuple of Span
    memory : tuple of (float, dict)
        Bytes of one rank by kind, from that second on.
    compute_s, comm_s, exposed_s, step_s : float
        Computing, messages under way, standing still for them, and the whole step.
    """

    schedule: Schedule
    spans: tuple[Span, ...]
    memory: tuple[tuple[float, dict[str, int]], ...]
    compute_s: float
    comm_s: float
    exposed_s: float
    step_s: float

    @property
    def hidden_s(self) -> float:
        """Seconds of communication behind which was computed."""
        return self.comm_s - self.exposed_s

    @property
    def efficiency(self) -> float:
        """Share of the step in which is computed, 0 to 1."""
        return self.compute_s / self.step_s if self.step_s else 1.0


def timeline(work: StepWork, options: StepOptions, network: Link | Network) -> Timeline:
    """Write a step's schedule and lay it over time.

    Parameters
    ----------
    work : StepWork
    options : StepOptions
    network : Link or Network
        Of one level or of two.

    Returns
    -------
    Timeline
    """
    return lay_out(schedule(work, options), network)


def lay_out(step: Schedule, network: Link | Network) -> Timeline:
    """Lay a schedule over time.

    Parameters
    ----------
    step : Schedule
    network : Link or Network

    Returns
    -------
    Timeline
    """
    now = link_free = computed = sent_s = exposed = 0.0
    arrival: dict[int, float] = {}
    held = dict(step.start_bytes)
    spans, memory = [], [(0.0, dict(held))]
    for each in step.instructions:
        if isinstance(each, Compute):
            if each.seconds:
                spans.append(Span("compute", each.name, each.phase, now, now + each.seconds))
            now += each.seconds
            computed += each.seconds
        elif isinstance(each, Send):
            seconds = _seconds(each, network)
            start = max(now, link_free)
            arrival[each.message] = link_free = start + seconds
            name = f"{each.collective} {each.name}"
            spans.append(Span("communication", name, each.phase, start, link_free, each.bytes_sent))
            sent_s += seconds
        elif isinstance(each, Wait):
            if arrival[each.message] > now:
                spans.append(Span("wait", each.name, each.phase, now, arrival[each.message]))
                exposed += arrival[each.message] - now
                now = arrival[each.message]
        elif isinstance(each, Hold | Free):
            held[each.kind] += each.nbytes if isinstance(each, Hold) else -each.nbytes
            memory.append((now, dict(held)))
    return Timeline(step, tuple(spans), tuple(memory), computed, sent_s, exposed, now)


def _seconds(send: Send, network: Link | Network) -> float:
    """How long one message takes."""
    if isinstance(network, Link):
        return network.seconds(send)
    passes = 2 if send.collective == "all_reduce" else 1
    return ring_seconds(passes * send.numel * send.itemsize, send.world_size, network)


def transformer_work(
    spec: ModelSpec,
    tokens: int,
    seq: int,
    *,
    flops_per_s: float,
    memory_bytes_per_s: float | None = None,
    state_bytes: int = 28,
    kept_bytes: int = 0,
) -> StepWork:
    """What one rank computes for a transformer, from operations ÷ rate.

    Parameters
    ----------
    spec : ModelSpec
    tokens : int
        Of one micro-batch on one rank.
    seq : int
        Length of a sequence, for the attention scores.
    flops_per_s : float
        What the device sustains; its peak gives a bound.
    memory_bytes_per_s : float, optional
        For the update; without it updates take no time.
    state_bytes : int
        Bytes read and written for the update of a parameter; mixed-precision Adam reads master,
        two moments and a gradient, and writes master, moments and a parameter.
    kept_bytes : int
        Activations that one layer keeps, such as `zero_nb.theory.activations` gives.

    Returns
    -------
    StepWork
        A unit for the embedding, each layer, and the head.

    Notes
    -----
    Operations of a token: 2 a parameter of a matrix forward and 4 backward, 4·s·h and 8·s·h for
    the scores of a layer (Kaplan et al., arXiv:2001.08361, Table 1). A tied head is computed last,
    from the embedding's unit, which stays gathered over the turn.
    """
    check_count("tokens", tokens, least=1)
    check_count("seq", seq, least=1)
    rate = check_positive("flops_per_s", flops_per_s)
    first, *blocks = spec.unit_numels()
    numels = {"embed": first}
    numels |= {f"layer {i}": numel for i, numel in enumerate(blocks[: spec.layers])}
    numels |= {"head": blocks[spec.layers]} if len(blocks) > spec.layers else {}
    layers = [LayerWork("embed", ("embed",))]
    for name, numel in list(numels.items())[1 : 1 + spec.layers]:
        each = tokens * (2 * numel + 4 * spec.attention_width * seq) / rate
        layers.append(LayerWork(name, (name,), each, 2 * each, kept_bytes))
    tied = bool(spec.has_head and spec.tied)
    if spec.has_head or "head" in numels:
        uses = (*(["embed"] if tied else []), *(["head"] if "head" in numels else []))
        logits = tokens * 2 * spec.vocab * spec.embed_dim / rate if spec.has_head else 0.0
        layers.append(LayerWork("head", uses, logits, 2 * logits))
    each_s = state_bytes / memory_bytes_per_s if memory_bytes_per_s else 0.0
    units = tuple(
        UnitSize(name, numel, tied=tied and name == "embed", update_s=numel * each_s)
        for name, numel in numels.items()
    )
    return StepWork(units, tuple(layers))
