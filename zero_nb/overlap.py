"""How much communication is hidden: measured on an emulated link, beside the timeline's answer.

Like `zero_nb.compare` this imports both towers: it tells the theory how large an engine's units
are and how long its layers take, and nothing of when they are gathered or what that costs.
"""

import statistics
import time
from collections import defaultdict
from dataclasses import dataclass

from zero_nb.cluster.simulated import EmulatedLink, SimulatedWorld
from zero_nb.theory.own_engine import gpt_kept_bytes
from zero_nb.theory.schedule import LayerWork, StepOptions, StepWork, UnitSize, schedule
from zero_nb.theory.timeline import Link, Timeline, lay_out, timeline
from zero_nb.train.engine import Engine
from zero_nb.train.trace import COMM_LANE, COMPUTE_LANE, Tracer, chrome_trace

__all__ = [
    "Costs",
    "Overlap",
    "chrome_of",
    "measure_costs",
    "measure_overlap",
    "predicted_step",
    "step_work",
]


def step_work(engine, samples, tokens=None, *, seconds=None):
    """Describe an engine's work to the theory.

    Parameters
    ----------
    engine : Engine
    samples : int
        Of one micro-batch, on the rank with the most.
    tokens : int, optional
        Length of a sequence of a GPT; the model's own by default.
    seconds : mapping, optional
        ``(layer, "forward" or "backward")`` to seconds of a micro-batch, ``("update", unit)`` to
        those in which one rank updates a whole unit, ``("loss", "")`` and ``("rest", "")``;
        what is missing takes no time.

    Returns
    -------
    StepWork
    """
    seconds = {} if seconds is None else seconds
    optimizer, model = engine.optimizer, engine.model
    kept, given = _activations(model.config, samples, tokens)
    layers = []
    for layer in model.layers:
        names = {optimizer.aliases.get(name, name) for name in layer.shapes}
        units = tuple(u.name for u in optimizer.units if names & set(u.layout.names))
        took = (seconds.get((layer.name, way), 0.0) for way in ("forward", "backward"))
        layers.append(LayerWork(layer.name, units, *took, kept.get(layer.name, 0)))
    units = tuple(
        UnitSize(
            unit.name,
            unit.layout.numel,
            trainable=unit.trainable,
            tied=bool(unit.aliases) and sum(unit.name in layer.units for layer in layers) > 1,
            update_s=seconds.get(("update", unit.name), 0.0),
        )
        for unit in optimizer.units
    )
    rest = {f"{name}_s": seconds.get((name, ""), 0.0) for name in ("loss", "rest")}
    return StepWork(units, tuple(layers), **given, **rest)


def _activations(config, samples, tokens):
    """Return bytes kept by each layer of a GPT or an MLP, and those of input and output."""
    if hasattr(config, "sizes"):
        sizes = config.sizes
        kept = {f"layers.{i}": 4 * samples * size for i, size in enumerate(sizes[1:-1])}
        return kept, {
            "input_bytes": 4 * samples * sizes[0],
            "output_bytes": 4 * samples * sizes[-1],
        }
    tokens = config.seq_len if tokens is None else tokens
    each = gpt_kept_bytes(samples, tokens, config.width, config.heads)
    kept = {"embed": each["embed"], "head": each["head"]}
    for i in range(config.blocks):
        kept |= {f"layers.{i}.attn": each["attn"], f"layers.{i}.mlp": each["mlp"]}
    places = samples * tokens
    return kept, {"input_bytes": 8 * places, "output_bytes": 4 * places * config.vocab_size}


def predicted_step(engine, batch, **settings):
    """Write the schedule of a step that an engine makes once the order of its units is known.

    Parameters
    ----------
    engine : Engine
    batch : int
        Samples of the global batch; bytes are exact if it divides among micro-batches.
    **settings
        What the engine was made with, by the names of `zero_nb.theory.schedule.StepOptions`.

    Returns
    -------
    Schedule
    """
    on_a_rank = -(-batch // engine.world.size)
    samples = -(-on_a_rank // engine.optimizer.micro_batches)
    options = StepOptions(
        int(engine.optimizer.stage.number), engine.world.size, widened=True, **settings
    )
    return schedule(step_work(engine, samples), options)


def chrome_of(line, rank=0):
    """Return a timeline as a Chrome trace, as real runs write it.

    Parameters
    ----------
    line : Timeline
    rank : int
        Which rank it is said to be of.

    Returns
    -------
    dict
        See `zero_nb.train.trace.chrome_trace`.
    """
    spans = []
    for span in line.spans:
        if span.lane == "communication":
            args = {"bytes_sent": span.bytes_sent}
            spans.append((span.name, span.phase, COMM_LANE, span.start_s, span.stop_s, args))
        elif span.lane == "wait":
            spans.append(("wait", "wait", COMPUTE_LANE, span.start_s, span.stop_s, {}))
        else:
            whole = span.phase in ("forward", "backward") and span.name != "loss"
            name = f"{span.phase} {span.name}" if whole else span.name
            category = span.phase if whole else span.name.split()[0]
            spans.append((name, category, COMPUTE_LANE, span.start_s, span.stop_s, {}))
    return chrome_trace(spans, {rank: line.memory})


# --- measured beside predicted -------------------------------------------------------------------


@dataclass(frozen=True)
class Costs:
    """What an engine's pieces take on this machine, measured where nothing overlaps.

    Attributes
    ----------
    seconds : dict
        As `step_work` takes them.
    copy_s_per_byte : float
        What carrying a message out takes in memory, for each byte that one rank sends.
    oversleep_s : float
        How much later than asked for a thread wakes up that an emulated link lets sleep.
    """

    seconds: dict
    copy_s_per_byte: float
    oversleep_s: float

    def link(self, emulated):
        """Return what the theory should know of an emulated link.

        Parameters
        ----------
        emulated : EmulatedLink

        Returns
        -------
        Link
            Messages are held up, and then copied.
        """
        each_byte_s = 1 / emulated.bytes_per_s + self.copy_s_per_byte
        return Link(1 / each_byte_s, emulated.latency_s + self.oversleep_s)


def measure_costs(model, batch, *, world_size, stage=3, link=None, steps=5, **settings):
    """Measure how long an engine's pieces take in steps in which nothing overlaps.

    Parameters
    ----------
    model : Model
    batch : tuple of ndarray
        Inputs and targets of the global batch.
    world_size, stage : int
    link : EmulatedLink, optional
        Many machines compute slower if they never pause; with the link that will be measured on,
        they pause as they will then.
    steps : int
        Over which medians are taken; two more come before, to warm up.
    **settings
        For `Engine`: precision, units, ...

    Returns
    -------
    Costs
    """
    engine = Engine(model, world=SimulatedWorld(world_size, link=link), stage=stage, **settings)
    for _ in range(2):
        engine.train_step(*batch)
    tracer = Tracer(engine)
    reports = [engine.train_step(*batch) for _ in range(steps)]
    tracer.stop()
    seen = _seconds_of_steps(engine, tracer)
    seconds = {key: statistics.median(step[key] for step in seen) for key in seen[0]}
    oversleep_s, held_up_s = _oversleep(), 0.0
    if link is not None:
        sent = [t for t in engine.world.log.transfers if t.purpose in ("param", "grad")]
        held_up_s = sum(link.seconds(transfer) + oversleep_s for transfer in sent)
    copies_s = statistics.median(report.comm_s for report in reports) - held_up_s
    return Costs(seconds, max(0.0, copies_s) / max(1, reports[-1].bytes_sent), oversleep_s)


def _seconds_of_steps(engine, tracer):
    """Return what the pieces took in each traced step, as `step_work` takes them."""
    whole = [(a, b) for _, kind, a, b in tracer.spans if kind == "training step"]
    found = []
    for start, stop in whole:
        took, passes = defaultdict(float), engine.optimizer.micro_batches
        inside = [span for span in tracer.spans if start <= span[2] and span[3] <= stop]
        for name, kind, begin, end in inside:
            if kind in ("forward", "backward"):
                took[name, kind] += (end - begin) / passes
            elif kind == "loss":
                took["loss", ""] += (end - begin) / passes
        ((update_start, update_stop),) = [(a, b) for _, kind, a, b in inside if kind == "update"]
        waits = [(a, b) for a, b in tracer.waits if start <= a and b <= stop]
        waited = sum(b - a for a, b in waits)
        update = update_stop - update_start
        update -= sum(b - a for a, b in waits if update_start <= a and b <= update_stop)
        rest = stop - start - waited - update - passes * sum(took.values())
        took["rest", ""] = max(0.0, rest)
        size = engine.world.size if engine.optimizer.stage.number else 1
        for unit in engine.optimizer.units:
            share = unit.layout.numel / engine.optimizer.numel
            took["update", unit.name] = update * share * size
        found.append(dict(took))
    return found


def _oversleep(asked_s=1e-3, times=21):
    """Return the median of how much later a sleeping thread wakes up."""
    late = []
    for _ in range(times):
        start = time.perf_counter()
        time.sleep(asked_s)
        late.append(time.perf_counter() - start - asked_s)
    return statistics.median(late)


@dataclass(frozen=True)
class Overlap:
    """Steps on an emulated link, measured, and the timeline's answer; medians, in seconds.

    Attributes
    ----------
    settings : dict
        Of the engine.
    link : EmulatedLink
    step_s, comm_s, exposed_s : float
        Measured.
    line : Timeline
        Predicted from what layers take where nothing overlaps.
    replayed : tuple of (Timeline, StepReport)
        For each step the timeline of what layers and messages took in that very step, and what
        was measured: the prediction of when messages are waited for, whatever else the machine did.
    report : StepReport
        Of the last step.
    """

    settings: dict
    link: EmulatedLink
    step_s: float
    comm_s: float
    exposed_s: float
    line: Timeline
    replayed: tuple
    report: object

    @property
    def hidden_s(self):
        """Measured seconds of communication behind which was computed."""
        return self.comm_s - self.exposed_s

    @property
    def share_of_what_can_be_hidden(self):
        """Hidden, measured over predicted; None where nothing can be."""
        return self.hidden_s / self.line.hidden_s if self.line.hidden_s > 1e-9 else None

    @property
    def error(self):
        """The timeline's step time against the measured one: 0.1 is ten per cent too long."""
        return self.line.step_s / self.step_s - 1

    @property
    def replayed_error(self):
        """The same with each step's own times, median."""
        return statistics.median(line.step_s / report.seconds - 1 for line, report in self.replayed)

    @property
    def replayed_share(self):
        """Hidden, measured over predicted, with each step's own times, median; or None."""
        shares = [
            (report.comm_s - report.exposed_s) / line.hidden_s
            for line, report in self.replayed
            if line.hidden_s > 1e-9
        ]
        return statistics.median(shares) if shares else None


def measure_overlap(model, batch, link, costs, *, world_size, steps=7, **settings):
    """Train on an emulated link and lay the timeline's answer beside it.

    Parameters
    ----------
    model, batch, world_size
        See `measure_costs`.
    link : EmulatedLink
    costs : Costs
    steps : int
        Over which medians are taken; two come before: one records the order of units.
    **settings
        For `Engine`, by names that `zero_nb.theory.schedule.StepOptions` has too.

    Returns
    -------
    Overlap
    """
    engine = Engine(model, world=SimulatedWorld(world_size, link=link), **settings)
    for _ in range(2):
        engine.train_step(*batch)
    tracer = Tracer(engine)
    reports = [engine.train_step(*batch) for _ in range(steps)]
    tracer.stop()
    samples = -(-len(batch[0]) // world_size) // engine.optimizer.micro_batches
    options = StepOptions(world_size=world_size, widened=True, **settings)
    work = step_work(engine, samples, seconds=costs.seconds)
    replayed = []
    for seconds, report in zip(_seconds_of_steps(engine, tracer), reports, strict=True):
        step = schedule(step_work(engine, samples, seconds=seconds), options)
        latency_s = link.latency_s + costs.oversleep_s
        each_byte_s = (report.comm_s - len(step.sends) * latency_s) / report.bytes_sent
        own = Link(1 / max(each_byte_s, 1 / link.bytes_per_s), latency_s)
        replayed.append((lay_out(step, own), report))
    medians = (
        statistics.median(getattr(report, name) for report in reports)
        for name in ("seconds", "comm_s", "exposed_s")
    )
    return Overlap(
        settings,
        link,
        *medians,
        timeline(work, options, costs.link(link)),
        tuple(replayed),
        reports[-1],
    )
