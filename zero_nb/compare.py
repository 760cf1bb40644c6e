"""Measured beside predicted: the one place that imports both towers.

A run here is a real training; its bytes come from the ledger and its elements from the transfer
log. The formulas are given the numels of the flat_params and nothing else.
"""

import statistics
from dataclasses import asdict, dataclass, field, replace

import numpy as np

from zero_nb.config import (
    UsageError,
    ZeROStage,
    check_at_least_one,
    check_precision,
    check_world_size,
)
from zero_nb.theory import memory, traffic
from zero_nb.train import checkpoint
from zero_nb.train.data import Digits, TextBytes
from zero_nb.train.engine import Engine
from zero_nb.train.ledger import HELD_KINDS
from zero_nb.train.model import GPT, GPTConfig, TrainingPreset
from zero_nb.train.optim import get_rule, warmup_cosine
from zero_nb.train.presets import PRESETS
from zero_nb.train.trace import Tracer, check_trace_path

__all__ = [
    "Comparison",
    "MemoryGrid",
    "StageRun",
    "Task",
    "compare_stages",
    "digits_task",
    "load_kernels",
    "measure_memory",
    "text_task",
    "train_stage",
]


@dataclass(frozen=True)
class Task:
    """What is learned, by which model, and how.

    Attributes
    ----------
    dataset : Dataset
    model : Model
    training : TrainingPreset
        Batch size, learning rate and the rest.
    """

    dataset: object
    model: object
    training: TrainingPreset


def digits_task(preset="digits"):
    """Return the task of drawing digits.

    Parameters
    ----------
    preset : {"digits", "lesson"}
        ``digits`` draws 8 x 8 pixels; ``lesson`` has 8 equal blocks and short sequences, to show
        memory.
    """
    if preset not in PRESETS:
        raise UsageError(f"unknown preset {preset!r}; choose one of {', '.join(PRESETS)}")
    chosen = PRESETS[preset]
    return Task(Digits(pooled=chosen.pooled), GPT(chosen.model), chosen.training)


def text_task(path, seq_len=64):
    """Return the task of continuing a text file, byte by byte.

    Parameters
    ----------
    path : path-like
    seq_len : int
        Bytes the model sees at once.

    Raises
    ------
    DataError
        If the file is missing, empty or shorter than one sequence.
    """
    dataset = TextBytes(path, seq_len)
    config = replace(PRESETS["digits"].model, vocab_size=dataset.vocab_size, seq_len=seq_len)
    return Task(dataset, GPT(config), PRESETS["digits"].training)


@dataclass(frozen=True)
class StageRun:
    """One training run of one stage, measured, with the formulas beside it.

    Bytes and elements are per rank, of the fullest rank.

    Attributes
    ----------
    stage, world_size, numel, steps : int
    precision : str
    losses : tuple of float
        Mean over the global batch, one a step, before its update.
    held_out_loss : float
    weights_sha256 : str
        Of the full float32 weights, unpadded, in parameter order.
    held_bytes, formula_bytes, padding_bytes : dict
        ``param``, ``grad`` and ``optim``: from the ledger at the last step (after backward,
        before the step); the paper's formula on the unpadded numel; what padding adds to it.
    peak_bytes : int
        Largest sum of all kinds within the last step.
    largest_bytes : dict
        Largest of each kind within the last step.
    elements_sent, formula_elements : int
        Parameters and gradients, per step.
    step_seconds, comm_seconds, exposed_seconds : float
        Medians: of a step, of the time messages were under way in it, and of the part of that in
        which nothing was computed.
    fetches : dict
        How stage 3 was served with units in the last step: gathered ahead (hits), at need
        (misses), still there (kept), ahead but in vain (wasted).
    recognition : Recognition or None
        How many drawn digits were recognised, if any were drawn.
    """

    stage: int
    world_size: int
    precision: str
    numel: int
    steps: int
    losses: tuple
    held_out_loss: float
    weights_sha256: str
    held_bytes: dict
    formula_bytes: dict
    padding_bytes: dict
    peak_bytes: int
    largest_bytes: dict
    elements_sent: int
    formula_elements: int
    step_seconds: float
    comm_seconds: float = 0.0
    exposed_seconds: float = 0.0
    fetches: dict = field(default_factory=dict)
    recognition: object = field(default=None, compare=False)

    @property
    def held_total(self):
        """Model states held by the fullest rank, in bytes."""
        return sum(self.held_bytes.values())

    def to_json(self):
        """Return the run as JSON can hold it."""
        return {
            "stage": self.stage,
            "losses": list(self.losses),
            "held_out_loss": self.held_out_loss,
            "weights_sha256": self.weights_sha256,
            "held_bytes": self.held_bytes,
            "formula_bytes": self.formula_bytes,
            "padding_bytes": self.padding_bytes,
            "peak_bytes": self.peak_bytes,
            "elements_sent": self.elements_sent,
            "formula_elements": self.formula_elements,
            "step_seconds": self.step_seconds,
        }

    def overlap_to_json(self):
        """Return how communication and computing went side by side, as JSON can hold it."""
        return {
            "comm_seconds": self.comm_seconds,
            "exposed_seconds": self.exposed_seconds,
            "fetches": self.fetches,
        }


@dataclass(frozen=True)
class Comparison:
    """The four stages on the same work.

    Attributes
    ----------
    world_size : int
    precision : str
    numel, steps : int
    stages : tuple of StageRun
    """

    world_size: int
    precision: str
    numel: int
    steps: int
    stages: tuple

    @property
    def same_weights(self):
        """Whether all stages ended with the same weights, to the bit."""
        return len({run.weights_sha256 for run in self.stages}) == 1

    def to_json(self):
        """Return the comparison as JSON can hold it."""
        return {
            "world_size": self.world_size,
            "precision": self.precision,
            "numel": self.numel,
            "steps": self.steps,
            "stages": [run.to_json() for run in self.stages],
        }

    def rows(self):
        """Return the table's header and its rows of text, one a stage."""
        header = (
            "stage",
            "param",
            "grad",
            "optim",
            "held",
            "of stage 0",
            "formula + padding",
            "peak",
            "sent/step",
            "loss",
            "weights",
        )
        first = self.stages[0].held_total
        body = [
            (
                str(run.stage),
                *(f"{run.held_bytes[kind]:,}" for kind in HELD_KINDS),
                f"{run.held_total:,}",
                f"{run.held_total / first:.1%}",
                f"{sum(run.formula_bytes.values()) + sum(run.padding_bytes.values()):,}",
                f"{run.peak_bytes:,}",
                f"{run.elements_sent:,}",
                f"{run.losses[-1]:.4f}",
                run.weights_sha256[:8],
            )
            for run in self.stages
        ]
        return header, body

    def _repr_html_(self):
        """Return the table for notebooks."""
        header, body = self.rows()
        head = "".join(f"<th scope='col'>{cell}</th>" for cell in header)
        lines = "".join(
            "<tr>" + "".join(f"<td style='text-align:right'>{cell}</td>" for cell in row) + "</tr>"
            for row in body
        )
        return (
            f"<table><caption>Bytes and elements per rank, world_size {self.world_size}, "
            f"{self.precision}, {self.numel:,} parameters</caption>"
            f"<thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>"
        )

    def __repr__(self):
        header, body = self.rows()
        widths = [max(map(len, column)) for column in zip(header, *body, strict=True)]
        return "\n".join(
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            for row in (header, *body)
        )


def train_stage(
    stage,
    *,
    world_size=4,
    steps=30,
    precision="bf16",
    task=None,
    optimizer="adamw",
    micro_batches=1,
    reduce_dtype=None,
    reduce_bucket_size=None,
    batch=None,
    seed=0,
    units="block",
    world=None,
    schedule_steps=None,
    save=None,
    save_every=None,
    layout="sharded",
    resume=None,
    trace=None,
    trace_steps=3,
    progress=None,
    **gathering,
):
    """Train at one stage and measure it.

    Parameters
    ----------
    stage : int, str or ZeROStage
    world_size : int
        Simulated ranks, unless `world` is given.
    steps : int
        Of the whole run, those before `resume` included.
    precision : str
        One of `zero_nb.config.PRECISIONS`.
    task : Task, optional
        Drawing digits by default.
    optimizer : {"adamw", "adam", "sgd", "momentum"}
    micro_batches : int
        Backward passes in one step.
    reduce_dtype : str, optional
        Format gradients travel in, if not the recipe's own.
    reduce_bucket_size : int, optional
        Elements reduced together from stage 2 on; by default each unit's gradient alone.
    batch : int, optional
        Samples of the global batch; the preset's by default.
    seed : int
        Of the initial parameters and the order of the samples.
    units : str or sequence
        What is gathered together, see `zero_nb.train.engine.group_layers`.
    world : World, optional
    schedule_steps : int, optional
        Steps of the whole learning-rate schedule, of which this run is the beginning; `steps` by
        default, and the saved one's after `resume`.
    save : path-like, optional
        Directory to save a checkpoint to after the last step, see `zero_nb.train.checkpoint`.
    save_every : int, optional
        And after each so many steps.
    layout : {"sharded", "consolidated"}
        Of the checkpoints.
    resume : path-like, optional
        Go on from a checkpoint that `save` made, at any stage and number of ranks. At the same
        number the weights are those of a run that was never interrupted, to the bit.
    trace : path-like, optional
        File to write what happened when to, as Chrome trace JSON; one for each process if there
        are several, see `zero_nb.train.trace`.
    trace_steps : int
        Steps to record, from the first one on. Stage 3 learns the order of units in the first.
    progress : callable, optional
        Called with a `StepReport` after each step.
    **gathering
        prefetch_bucket_size, max_live_parameters, max_reuse_distance, reshard_after_forward,
        param_persistence_threshold and overlap_comm, as for `zero_nb.train.engine.Engine`.

    Returns
    -------
    run : StageRun
        Of the steps trained here.
    engine : Engine
        To draw from, or go on with.

    Raises
    ------
    UsageError
        If an argument is outside its range, or what was saved is another run's; nothing is trained
        then.
    """
    stage = ZeROStage.parse(stage)
    check_precision(precision)
    if world is None:
        check_world_size(world_size)
    if steps < 1:
        raise UsageError(f"steps must be at least 1, got {steps}")
    _check_saving(save, save_every, layout, schedule_steps)
    if trace is not None:
        check_at_least_one("trace_steps", trace_steps, "step")
        check_trace_path(trace)
    task = digits_task() if task is None else task
    batch = task.training.batch if batch is None else check_at_least_one("batch", batch, "sample")
    where = {"world_size": world_size} if world is None else {"world": world}
    job = _job(task, batch, seed, schedule_steps or steps)
    first = 0
    _check_held_out(task.dataset, world_size if world is None else world.size)
    if resume is not None:
        first, job["schedule_steps"] = _check_resume(resume, job, steps, precision, schedule_steps)
    engine = _make_engine(
        task,
        job["schedule_steps"],
        optimizer,
        stage=stage,
        precision=precision,
        units=units,
        seed=seed,
        micro_batches=micro_batches,
        reduce_dtype=reduce_dtype,
        reduce_bucket_size=reduce_bucket_size,
        **gathering,
        **where,
    )
    if save is not None:
        checkpoint.prepare(engine.world, save)
    if resume is not None:
        checkpoint.load(engine.optimizer, resume)
    reports, tracer = [], None if trace is None else Tracer(engine)
    for step in range(first, steps):
        reports.append(engine.train_step(*task.dataset.batch(step, batch, seed)))
        done = step + 1
        if tracer is not None and (done == steps or len(reports) == trace_steps):
            tracer.stop()
            tracer.write(trace)
            tracer = None
        if save is not None and (done == steps or (save_every and done % save_every == 0)):
            extra = job | {"next_step": done}
            checkpoint.save(engine.optimizer, save, layout=layout, extra=extra)
        if progress is not None:
            progress(reports[-1])
    return _stage_run(engine, precision, optimizer, reports, task.dataset), engine


def _check_held_out(dataset, world_size):
    """Refuse more ranks than there are samples to evaluate on, before anything is trained."""
    samples = len(dataset.held_out()[0])
    if samples < world_size:
        raise UsageError(
            f"{dataset.name} holds out {samples} of its samples, too few for {world_size} ranks to "
            "share; use a longer file or fewer ranks"
        )


def _check_saving(save, save_every, layout, schedule_steps):
    """Refuse what cannot be meant, before anything is made."""
    for name, count in (("schedule_steps", schedule_steps), ("save_every", save_every)):
        if count is not None:
            check_at_least_one(name, count, "step")
    if save_every is not None and save is None:
        raise UsageError(f"save_every {save_every} needs a directory to save to; give save too")
    if layout not in checkpoint.LAYOUTS:
        raise UsageError(f"unknown layout {layout!r}; choose {' or '.join(checkpoint.LAYOUTS)}")


def _job(task, batch, seed, schedule_steps):
    """Return what a run has to share with the one it goes on from, as JSON can hold it."""
    data = task.dataset
    return {
        "data": {"name": data.name, "samples": data.train_samples, "seq_len": data.seq_len},
        "batch": batch,
        "seed": seed,
        "schedule_steps": schedule_steps,
    }


def _check_resume(directory, job, steps, precision, schedule_steps):
    """Return the first step to train and the steps of the schedule, if it is the same job."""
    info = checkpoint.read_info(directory)
    if not {*job, "next_step"} <= info.extra.keys():
        raise UsageError(
            f"{info.path} was not saved by a training of zero-nb; load it with "
            "zero_nb.train.checkpoint.load"
        )
    ours = {"precision": precision} | job
    theirs = {"precision": info.precision} | info.extra
    for name in ("data", "batch", "seed", "precision"):
        if ours[name] != theirs[name]:
            raise UsageError(
                f"{info.path} was trained with {name} {theirs[name]}, not {ours[name]}; "
                "resume with the same"
            )
    first = info.extra["next_step"]
    if steps <= first:
        raise UsageError(
            f"{info.path} has been trained for {first} steps already, and steps counts them; "
            f"give more than {first}"
        )
    return first, schedule_steps or info.extra["schedule_steps"]


def _make_engine(task, steps, optimizer="adamw", **settings):
    """Return an engine that learns the task as its preset says."""
    training = task.training
    # A run shorter than the preset's keeps its shape: a tenth of it is warm-up.
    warmup = min(training.warmup, max(1, steps // 10))
    return Engine(
        task.model,
        rule=get_rule(
            optimizer,
            lr=training.lr,
            betas=training.betas,
            eps=training.eps,
            weight_decay=training.weight_decay,
        ),
        max_grad_norm=training.max_grad_norm,
        schedule=lambda step: warmup_cosine(
            step, warmup=warmup, total=steps, final=training.min_lr_ratio
        ),
        **settings,
    )


def _held_precision(precision, micro_batches):
    """Return the recipe whose bytes are held: several micro-batches are added in float32."""
    widened = micro_batches > 1 and precision in ("bf16", "fp16")
    return "bf16-fp32-grads" if widened else precision


def _stage_run(engine, precision, optimizer, reports, dataset):
    """Lay the measured figures beside the formulas."""
    last, size, stage = reports[-1], engine.world.size, engine.optimizer.stage.number
    micro_batches = engine.optimizer.micro_batches
    numels = [unit.layout.numel for unit in engine.optimizer.units]
    held = _held_precision(precision, micro_batches)
    formula = memory.model_state_bytes(stage, size, sum(numels), held, optimizer)
    held_bytes, largest_bytes, peak_bytes = _on_the_fullest_rank(engine.world, last)
    return StageRun(
        stage=int(stage),
        world_size=size,
        precision=precision,
        numel=sum(numels),
        steps=len(reports),
        losses=tuple(report.loss for report in reports),
        held_out_loss=engine.evaluate(*dataset.held_out()),
        weights_sha256=engine.optimizer.weights_sha256(),
        held_bytes=held_bytes,
        formula_bytes=formula.as_dict(),
        padding_bytes=memory.padding_bytes(stage, size, numels, held, optimizer).as_dict(),
        peak_bytes=peak_bytes,
        largest_bytes=largest_bytes,
        elements_sent=last.elements_sent,
        formula_elements=traffic.elements_per_step(
            stage,
            size,
            numels,
            micro_batches=micro_batches,
            # A unit with a tied weight stays gathered from its forward to its backward use.
            gathers=[1 if unit.aliases else 2 for unit in engine.optimizer.units],
        ),
        step_seconds=statistics.median(report.seconds for report in reports),
        comm_seconds=statistics.median(report.comm_s for report in reports),
        exposed_seconds=statistics.median(report.exposed_s for report in reports),
        fetches=asdict(last.fetches),
    )


def _on_the_fullest_rank(world, report):
    """Return held, largest and peak bytes over all ranks, not those of this process only."""
    mine = (*report.held_bytes.values(), *report.largest_bytes.values(), report.peak_bytes)
    told_WK = world.all_gather_scalars(
        np.tile(np.array(mine, np.int64), (world.hosted, 1)), purpose="other", label="bytes"
    )
    *kinds, peak = told_WK.max(axis=0).tolist()
    held = dict(zip(report.held_bytes, kinds, strict=False))
    return held, dict(zip(report.largest_bytes, kinds[len(held) :], strict=True)), peak


def load_kernels(stage, *, batch=None, **settings):
    """Compile the kernels a run needs, or load them from the cache: a step of a tiny model.

    Parameters
    ----------
    stage : ZeROStage
    batch : int, optional
        Taken like the other settings, and not needed: kernels do not depend on it.
    **settings
        As for `train_stage`: precision, optimizer, micro_batches, ...
    """
    del batch
    model = GPT(GPTConfig(vocab_size=2, seq_len=2, width=2, heads=1, blocks=1))
    task = Task(None, model, PRESETS["digits"].training)
    engine = _make_engine(task, 1, stage=stage, world_size=2, **settings)
    tokens = np.zeros((2 * engine.optimizer.micro_batches, 2), np.int64)
    engine.train_step(tokens, tokens)


def compare_stages(
    world_size=4,
    steps=30,
    precision="bf16",
    *,
    task=None,
    batch=None,
    seed=0,
    units="block",
    progress=None,
):
    """Train stages 0-3 on the same samples from the same weights.

    Parameters
    ----------
    world_size, steps, precision, task, batch, seed, units, progress
        See `train_stage`.

    Returns
    -------
    Comparison
    """
    task = digits_task() if task is None else task
    runs = tuple(
        train_stage(
            stage,
            world_size=world_size,
            steps=steps,
            precision=precision,
            task=task,
            batch=batch,
            seed=seed,
            units=units,
            # The beginning of the long run, warm-up first: short runs with high rates spike.
            schedule_steps=max(steps, task.training.steps),
            progress=progress,
        )[0]
        for stage in ZeROStage
    )
    return Comparison(world_size, precision, runs[0].numel, steps, runs)


@dataclass(frozen=True)
class MemoryGrid:
    """Model states measured over stages and world sizes, with the formula beside them.

    Attributes
    ----------
    world_sizes : tuple of int
    precision : str
    numel : int
    held_bytes, formula_bytes : ndarray of int64, shape (4, len(world_sizes))
        Per rank: from the ledger, and the paper's formula without padding.
    saved_fraction : ndarray, shape (4, len(world_sizes))
        `zero_stage_memory_reduction` on the stage-0 bytes by kind.
    measured_fraction : ndarray, shape (4, len(world_sizes))
        1 - held / held at stage 0 of the same world size.
    """

    world_sizes: tuple
    precision: str
    numel: int
    held_bytes: np.ndarray
    formula_bytes: np.ndarray
    saved_fraction: np.ndarray
    measured_fraction: np.ndarray


def measure_memory(
    world_sizes=(1, 2, 4, 8, 16), precision="bf16", *, task=None, units="block", progress=None
):
    """Run one training step at every stage and world size, and read the ledger.

    Parameters
    ----------
    world_sizes : sequence of int
    precision, task, units
        See `train_stage`; the task's batch is enlarged to one sample a rank where it is smaller.
    progress : callable, optional
        Called with each step's report.

    Returns
    -------
    MemoryGrid
    """
    task = digits_task("lesson") if task is None else task
    held = np.zeros((4, len(world_sizes)), np.int64)
    formula, saved = np.zeros_like(held), np.zeros(held.shape)
    for column, size in enumerate(world_sizes):
        for stage in ZeROStage:
            engine = _make_engine(
                task, 1, stage=stage, precision=precision, units=units, world_size=size
            )
            report = engine.train_step(*task.dataset.batch(0, max(size, task.training.batch)))
            if progress is not None:
                progress(report)
            numel = engine.optimizer.numel
            held[stage, column] = sum(report.held_bytes.values())
            formula[stage, column] = memory.model_state_bytes(stage, size, numel, precision).total
            whole = memory.model_state_bytes(0, size, numel, precision)
            saved[stage, column] = memory.zero_stage_memory_reduction(
                stage, size, whole.param, whole.grad, whole.optim
            )
    return MemoryGrid(
        tuple(world_sizes), precision, task.model.numel, held, formula, saved, 1 - held / held[0]
    )
