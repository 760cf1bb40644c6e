"""Nine invariants of a sharded trainer, to be switched on while it runs; and who is caught by what.

An invariant is a sentence that is true at some moment of every step, whatever the stage. Each one
here looks at the running trainer through what it has for everybody (weights, gradients, the log of
transfers, the ledger), and changes nothing: with all nine on, the weights are the same to the bit.

Four moments: ``built``, ``before`` a step, ``ready`` (gradients are complete, nothing is updated),
``after`` the step. At each an invariant answers with what is wrong, or with nothing.
"""

import math
from abc import ABC
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import ClassVar, final

import numpy as np

from zero_nb.config import UsageError, ZeROStage
from zero_nb.core.blas import one_blas_thread
from zero_nb.core.precision import FLOAT32
from zero_nb.learn.mutants import MUTANTS
from zero_nb.theory.own_engine import engine_lines
from zero_nb.train.data import Digits
from zero_nb.train.engine import Engine
from zero_nb.train.model import GPT, GPTConfig
from zero_nb.train.optim import SGD, AdamW
from zero_nb.train.optimizer import ZeROOptimizer

__all__ = [
    "INVARIANTS",
    "LINE_UP",
    "Catch",
    "Hunt",
    "Invariant",
    "KillMatrix",
    "LineUp",
    "Watch",
    "hunt",
    "kill_matrix",
]


class Invariant(ABC):
    """What is true at some moment of every step. A method returns "" or says what is wrong.

    Attributes
    ----------
    name : str
    claim : str
        The sentence.
    """

    name: ClassVar[str]
    claim: ClassVar[str]

    def built(self, engine):
        """Look at a trainer that was just made."""
        return ""

    def before(self, engine, batch):
        """Look before a step; `batch` is the global one, (inputs, targets)."""
        return ""

    def ready(self, engine, batch):
        """Look when the gradients of a step are complete and nothing is updated yet."""
        return ""

    def after(self, engine, result):
        """Look after a step; `result` is its `StepResult`."""
        return ""


def _rows(engine, unit):
    """What each rank computes with, (R, F) in the recipe's format, real elements only."""
    stage = engine.optimizer.stage_of(unit)
    with engine.world.purpose("other"):
        full_RF = stage.unshard(unit)[:, : unit.layout.numel]
        stage.reshard(unit)
    return full_RF


def _float32(array, fmt):
    """An array in some format, in float32."""
    return array if fmt is FLOAT32 else fmt.widen(np.ascontiguousarray(array))


def _differ(rows):
    """How many elements of the rows of ranks 1, 2, ... are not those of rank 0."""
    return int(np.count_nonzero(rows != rows[:1]))


@final
class ReplicaEquality(Invariant):
    """Compares the rows of ranks: what is replicated is equal."""

    name = "replica equality"
    claim = "All ranks compute with the same parameters, before and after each step."

    def before(self, engine, batch):
        """Compare parameters; at stage 0 masters and moments, too."""
        for unit in engine.optimizer.units:
            found = {"parameters": _rows(engine, unit)}
            if engine.optimizer.stage.number == ZeROStage.STAGE_0:
                found |= unit.optim.arrays()
            for what, rows in found.items():
                count = _differ(rows)
                if count:
                    return f"unit {unit.name}: {count} {what} are not those of rank 0"
        return ""

    def after(self, engine, result):
        """The same again."""
        return self.before(engine, None)


SENTINEL = 7777.0


@final
class ShardCover(Invariant):
    """Updates a twin of the trainer that has a sentinel in each element."""

    name = "shard cover"
    claim = "Each element is updated exactly once in a step, by its owner."

    def built(self, engine):
        """Take one from each sentinel, and see which have become one less."""
        real, world_size = engine.optimizer, engine.world.size
        shapes = {
            name: shape
            for unit in real.trainable_units
            for name, shape in zip(unit.layout.names, unit.layout.shapes, strict=True)
        }
        twin = ZeROOptimizer(
            {name: np.full(shape, SENTINEL, np.float32) for name, shape in shapes.items()},
            stage=real.stage.number,
            world_size=world_size,
            rule=SGD(lr=1.0),
            units={unit.name: unit.layout.names for unit in real.trainable_units},
        )
        grads = {name: np.zeros((world_size, *shape), np.float32) for name, shape in shapes.items()}
        for grad_R in grads.values():
            grad_R[0] = 1.0  # the sum over ranks is one
        twin.backward(grads)
        twin.step()
        wrong = {
            name: int(np.count_nonzero(values != SENTINEL - 1))
            for name, values in twin.weights().items()
        }
        count = sum(wrong.values())
        if not count:
            return ""
        names = [name for name, number in wrong.items() if number]
        where = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        return f"{count} of {twin.numel} elements are not updated once: {where}"


@final
class RoundedMaster(Invariant):
    """Rounds the masters and compares them with what the ranks compute with."""

    name = "param = round(master)"
    claim = "The 16-bit parameter is the rounded master, and the master holds more than it."

    def after(self, engine, result):
        """Gather masters; nothing to compare where there are none."""
        more, masters = False, False
        for unit in engine.optimizer.trainable_units:
            if unit.optim.master is None:
                continue
            masters, fmt = True, unit.recipe.param
            own_RS = np.ascontiguousarray(unit.own(unit.optim.master))
            master_RF = engine.world.all_gather(own_RS, purpose="other")
            master_RF = np.ascontiguousarray(master_RF[:, : unit.layout.numel])
            rounded_RF = fmt.round(master_RF)
            count = int(np.count_nonzero(rounded_RF != _rows(engine, unit)))
            if count:
                return f"unit {unit.name}: {count} parameters are not the rounded master"
            more = more or not np.array_equal(fmt.widen(rounded_RF), master_RF)
        return "the master holds no bit that the parameter does not" if masters > more else ""


def _unit_numels(engine):
    """Parameters of each unit as the *model* counts them: a tied one once."""
    model = engine.model
    return {
        unit.name: sum(
            math.prod(model.shapes[name]) for name in unit.layout.names if name not in model.tied
        )
        for unit in engine.optimizer.trainable_units
    }


@final
class ByteBudget(Invariant):
    """Compares the ledger with what the formulas say."""

    name = "byte budget"
    claim = "Parameters, gradients and optimizer states take the predicted bytes."

    def ready(self, engine, batch):
        """Compare at the fullest moment of the model states."""
        real = engine.optimizer
        predicted = engine_lines(
            int(real.stage.number),
            engine.world.size,
            list(_unit_numels(engine).values()),
            real.recipe.name,
            {SGD: "sgd"}.get(type(real.rule.rule), "adamw"),
            micro_batches=real.micro_batches,
        )
        for kind, held in engine.ledger.held_bytes().items():
            budget = getattr(predicted, kind)
            if held != budget:
                return f"{kind} takes {held} bytes on a rank, predicted {budget}"
        return ""


@final
class ClipNorm(Invariant):
    """Adds up what is really applied and compares it with the clipped full gradient."""

    name = "clip norm"
    claim = "What is applied has the norm of the full gradient, clipped once for all ranks."

    def ready(self, engine, batch):
        """Take the norm of the full gradient, and listen to the update."""
        whole = engine.optimizer.gradients().values()
        self._norm = math.sqrt(sum(float(np.sum(np.square(g, dtype=np.float64))) for g in whole))
        self._squares, rule = 0.0, engine.optimizer.rule
        update = rule.update

        def listen(unit, grad_scale):
            applied = _float32(unit.own(unit.grad), unit.grad_format).astype(np.float64)
            flat = applied.reshape(-1)[: unit.layout.numel] * np.float64(grad_scale)
            self._squares += float(flat @ flat)
            update(unit, grad_scale)

        rule.update = listen
        return ""

    def after(self, engine, result):
        """Compare; gradients of 16 bits are rounded in between, float32 sums are not."""
        del engine.optimizer.rule.update
        limit = engine.optimizer.max_grad_norm
        wanted = self._norm if limit is None else min(limit, self._norm)
        applied = math.sqrt(self._squares)
        if abs(applied - wanted) > _accuracy(engine) * wanted:
            return f"applied norm {applied:.4f}, the full gradient's is {wanted:.4f} after clipping"
        return ""


def _accuracy(engine):
    """How near two gradients have to be, relative to their norm.

    In float32 a sum of some thousand terms in another order is off by about 1e-6. Each rounding to
    bfloat16 is off by at most 2^-9, and there are two: partial gradients, and their sum.
    """
    return 1e-5 if engine.optimizer.recipe.wire is FLOAT32 else 2.0**-7


@final
class StepsAndMoments(Invariant):
    """Looks at the step counters and at Adam's moments after the second step."""

    name = "steps and moments"
    claim = "After step n each parameter has had n updates, and its moments are not zero."

    def after(self, engine, result):
        """From step 2 on: at step 1 a counter that was set to 1 looks right."""
        done = engine.optimizer.steps_done
        if done < 2:
            return ""
        counts = set(engine.optimizer.rule.steps.values())
        if counts != {done}:
            return f"the step counters say {sorted(counts)}"
        for moment, arrays in engine.optimizer.state_dict()["moments"].items():
            empty = [name for name, array in arrays.items() if not array.any()]
            if empty:
                return f"{moment} is zero in {len(empty)} of {len(arrays)} tensors"
        return ""


@final
class TiedOnce(Invariant):
    """Looks whether a tied weight is one parameter."""

    name = "tied once"
    claim = "A tied weight is one parameter: counted once, equal under both names."

    def built(self, engine):
        """Compare the number of parameters with the model's."""
        found, expected = engine.optimizer.numel, engine.model.numel
        if found != expected:
            return f"{found} parameters, the model has {expected}"
        return ""

    def after(self, engine, result):
        """Compare the weights under both names."""
        weights = engine.optimizer.weights() if engine.model.tied else {}
        for alias, name in engine.model.tied.items():
            if not np.array_equal(weights[alias], weights[name]):
                return f"{alias} is not {name} any more"
        return ""


@final
class OneBatch(Invariant):
    """Computes the gradient of the whole batch on one rank."""

    name = "one batch"
    claim = "The reduced gradient is that of the whole batch: each token counts the same."

    def ready(self, engine, batch):
        """Compare relative to the norm of the gradient; see `_accuracy`."""
        model, found = engine.model, engine.optimizer.gradients()
        fmt, (inputs, targets) = engine.optimizer.recipe.param, batch
        # A rank computes with rounded parameters.
        params = {
            name: _float32(fmt.round(np.array(w, order="C")[None]), fmt)
            for name, w in engine.optimizer.weights().items()
        }
        grads = {name: np.empty_like(array) for name, array in params.items()}
        with one_blas_thread():
            outputs, caches = model.forward(params, inputs[None])
            _, outputs = model.loss(outputs, targets[None], model.count(targets))
            model.backward(params, caches, outputs, grads)
        for alias, name in model.tied.items():
            grads[name] += grads[alias]
        names = [name for name in model.shapes if name not in model.tied]
        whole = np.concatenate([grads[name].ravel() for name in names]).astype(np.float64)
        reduced = np.concatenate([found[name].ravel() for name in names])
        off = np.linalg.norm(reduced - whole) / np.linalg.norm(whole)
        if off > _accuracy(engine):
            return f"the gradient is {100 * off:.1f} % off that of the whole batch"
        return ""


@final
class ElementsSent(Invariant):
    """Compares the log of transfers with the formula."""

    name = "elements sent"
    claim = "A rank sends 2Ψ(W−1)/W elements in a step, and 3Ψ(W−1)/W at stage 3."

    def after(self, engine, result):
        """Padding travels, too; a tied unit stays gathered from forward to backward."""
        stage, size = engine.optimizer.stage.number, engine.world.size
        m = engine.optimizer.micro_batches
        predicted = 0
        for unit in engine.optimizer.trainable_units:
            messages = 2 if stage < ZeROStage.STAGE_2 else m + 1
            if stage == ZeROStage.STAGE_3:
                tied = set(engine.model.tied.values()) & set(unit.layout.names)
                messages = m * (2 if tied else 3)
            shard = -(-_unit_numels(engine)[unit.name] // size)
            predicted += messages * shard * (size - 1)
        sent = engine.world.log.elements_sent("param", "grad")
        return "" if sent == predicted else f"a rank sent {sent} elements, predicted {predicted}"


INVARIANTS = MappingProxyType(
    {
        kind.name: kind
        for kind in (
            ReplicaEquality,
            ShardCover,
            RoundedMaster,
            ByteBudget,
            ClipNorm,
            StepsAndMoments,
            TiedOnce,
            OneBatch,
            ElementsSent,
        )
    }
)
"""The nine, by name."""


# --------------------------------------------------------------------------------- switching on


@dataclass(frozen=True)
class Catch:
    """When an invariant was first broken, and how.

    Attributes
    ----------
    moment : str
        Such as ``"before step 1"``.
    text : str
        What was wrong.
    """

    moment: str
    text: str

    def __str__(self):
        """Both in one line."""
        return f"{self.moment}: {self.text}"


@final
class Watch:
    """A trainer with invariants switched on.

    Parameters
    ----------
    engine : Engine
        With a world that hosts all ranks; its model must not leave a parameter out.
    invariants : sequence of str
        Names in `INVARIANTS`; all nine by default.

    Attributes
    ----------
    caught : dict of str to Catch
        By invariant, the first time only.
    """

    def __init__(self, engine, invariants=None):
        names = tuple(INVARIANTS) if invariants is None else tuple(invariants)
        unknown = [name for name in names if name not in INVARIANTS]
        if unknown:
            raise UsageError(
                f"no invariant {unknown[0]!r}; choose among {', '.join(map(repr, INVARIANTS))}"
            )
        self.engine, self.caught = engine, {}
        self._on = [INVARIANTS[name]() for name in names]
        self._ask("when built", "built")

    def _ask(self, moment, method, *args):
        """Ask each invariant; note what is wrong for the first time."""
        for invariant in self._on:
            text = getattr(invariant, method)(self.engine, *args)
            if text and invariant.name not in self.caught:
                self.caught[invariant.name] = Catch(moment, text)

    def train_step(self, inputs, targets):
        """Do one training step as `Engine.train_step` does, and look at it.

        Parameters
        ----------
        inputs, targets : ndarray
            The global batch.

        Returns
        -------
        float
            The loss before the update.
        """
        engine, batch = self.engine, (inputs, targets)
        number = engine.optimizer.steps_done + 1
        self._ask(f"before step {number}", "before", batch)
        engine.world.log.clear()
        engine.ledger.begin_step()
        loss = engine.forward_backward(inputs, targets)
        self._ask(f"in step {number}", "ready", batch)
        result = engine.optimizer.step()
        self._ask(f"after step {number}", "after", result)
        return loss


# ------------------------------------------------------------------------------------- the hunt


@cache
def _digits():
    """The digits, pooled; read once."""
    return Digits(pooled=True)


@cache
def _model():
    """A GPT of 4,000 parameters in units of 720 and 3,280; the second does not divide by three."""
    return GPT(GPTConfig(vocab_size=27, seq_len=16, width=16, heads=2, blocks=1, tied=True))


@dataclass(frozen=True)
class LineUp:
    """The setting in which all trainers stand side by side, chosen so that every fault can show.

    Attributes
    ----------
    world_size : int
        3: neither the block nor the batch divides by it, and it is no power of two.
    stage : int
    precision : str
        With a master, and gradients in float32 so that two of them can be compared closely.
    lr : float
    max_grad_norm : float
        Below the norm of the gradients: clipping is active.
    batch : int
        Samples in the global batch; three ranks get 2, 3 and 3.
    seed : int
        Of the initial parameters.
    """

    world_size: int = 3
    stage: int = 2
    precision: str = "bf16-fp32-grads"
    lr: float = 1e-2
    max_grad_norm: float | None = 0.5
    batch: int = 8
    seed: int = 0

    def engine(self):
        """Return a new trainer."""
        return Engine(
            _model(),
            seed=self.seed,
            stage=self.stage,
            world_size=self.world_size,
            precision=self.precision,
            rule=AdamW(lr=self.lr),
            max_grad_norm=self.max_grad_norm,
        )

    def samples(self, step):
        """Return the global batch of a step, counted from 0."""
        return _digits().batch(step, self.batch)


LINE_UP = LineUp()
"""Three ranks at stage 2."""


@dataclass(frozen=True)
class Hunt:
    """What happened to one trainer.

    Attributes
    ----------
    losses : tuple of float
        Before each update.
    caught : dict of str to Catch
        By invariant.
    sha256 : str
        Of the weights at the end.
    """

    losses: tuple
    caught: dict = field(hash=False)
    sha256: str

    @property
    def fall(self):
        """By which part the loss fell from the first to the last three steps (float)."""
        return 1 - float(np.mean(self.losses[-3:])) / self.losses[0]


def hunt(mutant=None, line_up=LINE_UP, *, invariants=None, steps=3, first_step=1):
    """Train a faulty trainer, or the right one, with invariants switched on.

    Parameters
    ----------
    mutant : Mutant, optional
        None for the right trainer.
    line_up : LineUp
    invariants : sequence of str, optional
        All nine by default.
    steps : int
    first_step : int
        The step before which they are switched on; 1 by default. Above `steps`: never.

    Returns
    -------
    Hunt
    """
    with nullcontext() if mutant is None else mutant.applied():
        engine = line_up.engine()
        losses = [engine.train_step(*line_up.samples(i)).loss for i in range(first_step - 1)][
            :steps
        ]
        caught = {}
        if first_step <= steps:
            watch = Watch(engine, invariants)
            for step in range(first_step - 1, steps):
                losses.append(watch.train_step(*line_up.samples(step)))
            caught = watch.caught
        return Hunt(tuple(losses), caught, engine.optimizer.weights_sha256())


@dataclass(frozen=True)
class KillMatrix:
    """Which invariant catches which mutant: rows are mutants.

    Attributes
    ----------
    caught : dict of str to dict of str to Catch
        By mutant, then by invariant.
    invariants : tuple of str
        The columns.
    """

    caught: dict
    invariants: tuple

    def counts(self):
        """How many mutants each invariant catches (dict of str to int)."""
        return {name: sum(name in row for row in self.caught.values()) for name in self.invariants}


def kill_matrix(mutants=None, line_up=LINE_UP, *, steps=3):
    """Run every mutant under all invariants.

    Parameters
    ----------
    mutants : sequence of Mutant, optional
        The nine by default.
    line_up : LineUp
    steps : int

    Returns
    -------
    KillMatrix
    """
    chosen = MUTANTS.values() if mutants is None else mutants
    caught = {mutant.name: hunt(mutant, line_up, steps=steps).caught for mutant in chosen}
    return KillMatrix(caught, tuple(INVARIANTS))
