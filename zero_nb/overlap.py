"""How much communication is hidden: measured on an emulated link, beside the timeline's answer.

Like `zero_nb.compare` this imports both towers: it tells the theory how large an engine's units
are and how long its layers take, and nothing of when they are gathered or what that costs.
"""

from zero_nb.theory.own_engine import gpt_kept_bytes
from zero_nb.theory.schedule import LayerWork, StepOptions, StepWork, UnitSize, schedule
from zero_nb.train.trace import COMM_LANE, COMPUTE_LANE, chrome_trace

__all__ = ["chrome_of", "predicted_step", "step_work"]


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
        Samples of the global batch.
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
