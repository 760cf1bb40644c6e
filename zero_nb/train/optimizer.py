"""ZeROOptimizer: everything between "gradients are ready" and "parameters are new".

Shape suffixes: R ranks hosted here, F padded flat length of a unit, S = F // world_size.
"""

import hashlib
import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import final

import numpy as np

from zero_nb.config import UsageError, ZeROStage, check_at_least_one
from zero_nb.core import flat
from zero_nb.core.precision import FLOAT32
from zero_nb.train import given, named, snapshot
from zero_nb.train.accumulation import Accumulation
from zero_nb.train.buckets import GradientBuckets, GradientBuffer
from zero_nb.train.gathered import gathered
from zero_nb.train.ledger import Ledger
from zero_nb.train.optim import AdamW, GroupedRule, ParameterGroup
from zero_nb.train.recipes import RECIPES, get_recipe
from zero_nb.train.scaling import (
    DynamicLossScale,
    check_max_grad_norm,
    check_norm_type,
    clip_factor,
    global_norm,
)
from zero_nb.train.stages import STAGES, ZeROStage2
from zero_nb.train.stats import ZeROMemoryStats
from zero_nb.train.units import Unit, group_by_unit

__all__ = ["StepResult", "ZeROOptimizer"]

_log = logging.getLogger("zero_nb")


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did.

    Attributes
    ----------
    applied : bool
        Whether the parameters were updated; False if a gradient was not finite.
    grad_norm : float or None
        Global norm before clipping, of the unscaled gradient; None if no clipping was asked for.
        ``inf`` if the step was skipped.
    grad_scale : float
        What the gradients were multiplied by: clip factor / loss scale. 0 if skipped.
    lr : float
        Of the first group, the schedule's factor included.
    loss_scale : float
        Used in this step; 1 without loss scaling.
    held_bytes : dict
        Bytes of param, grad and optim on the fullest rank, when the gradients were complete.
    """

    applied: bool
    grad_norm: float | None
    grad_scale: float
    lr: float
    loss_scale: float
    held_bytes: dict


@final
class ZeROOptimizer:
    """An element-wise optimizer whose states, gradients and parameters are sharded over ranks.

    Parameters
    ----------
    params : mapping of str to ndarray
        Initial parameters by name, float32, without a rank axis; copied, rank 0's count. Any
        shapes: 0-d, empty, Fortran-ordered (read in C order). Two names for one array are tied:
        one parameter, whose gradients are added. (Two views of one array are refused.)
    config : ZeROConfig, optional
        Gives stage, world_size, precision, micro_batches, reduce_bucket_size and overlap_comm;
        or give them by keyword.
    stage : int, str or ZeROStage, default 1
        0 is the unsharded baseline.
    world_size : int, default 1
        Ranks of a `SimulatedWorld`.
    world : World, optional
        Instead of `world_size`.
    rule : Rule, default AdamW()
        Any element-wise rule.
    groups : sequence of ParameterGroup, optional
        Parameters with their own hyper-parameters; each trainable one in exactly one group.
    precision : str
        One of `zero_nb.config.PRECISIONS`.
    reduce_dtype : str, optional
        Format gradients travel in, if not the recipe's own; sums are in float32 anyway.
    micro_batches : int, default 1
        Backward passes in one step. Above 1 gradients are held and added in float32.
    reduce_every_micro_batch : bool, optional
        Stage 0: True reduces after each micro-batch (ranks first) instead of once. Stage 3:
        False holds whole gradients and reduces once (no_sync), at the price of their memory.
    reduce_bucket_size : int, optional
        Elements of gradients reduced together from stage 2 on; by default every unit's gradient
        travels alone.
    overlap_comm : bool, default False
        Two buckets, one filled while the other is reduced.
    units : mapping of str to sequence of str, optional
        Which parameters are gathered together; all in one unit by default.
    frozen : collection of str
        Parameters that are not trained: no gradient, no optimizer state, no master.
    keep_fp32 : collection of str
        Parameters stored in float32 within a 16-bit recipe.
    param_persistence_threshold : int, default 0
        Stage 3: a unit of at most this many parameters stays gathered; it is gathered once, after
        the step.
    rounded_start : bool, default False
        Start masters from the rounded parameters, as DeepSpeed does, not from the given ones.
    max_grad_norm : float, optional
        Clip the gradient to this global norm.
    norm_type : float, default 2
        Which norm; ``inf`` for the largest magnitude.
    loss_scale : DynamicLossScale, optional
        By default one in the fp16 recipe, none in others.
    schedule : callable, optional
        From the number of applied steps (0 at first) to a factor for every lr.
    ledger : Ledger, optional

    Attributes
    ----------
    units : tuple of Unit
    world : World
    ledger : Ledger
    stage : Stage
    steps_done, skipped_steps : int
        Applied, and left out because a gradient was not finite.

    Examples
    --------
    >>> import numpy as np
    >>> from zero_nb import SGD, ZeROOptimizer
    >>> opt = ZeROOptimizer({"w": np.zeros(3, np.float32)}, stage=2, world_size=2, rule=SGD(lr=1.0))
    >>> opt.backward({"w": np.array([[1, 0, 0], [0, 2, 0]], np.float32)})  # one row a rank
    >>> opt.step().applied
    True
    >>> opt.weights()["w"]
    array([-1., -2.,  0.], dtype=float32)
    """

    def __init__(
        self,
        params,
        config=None,
        *,
        stage=None,
        world_size=None,
        world=None,
        rule=None,
        groups=None,
        precision=None,
        reduce_dtype=None,
        micro_batches=None,
        reduce_every_micro_batch=None,
        reduce_bucket_size=None,
        overlap_comm=None,
        units=None,
        frozen=(),
        keep_fp32=(),
        param_persistence_threshold=0,
        rounded_start=False,
        max_grad_norm=None,
        norm_type=2.0,
        loss_scale=None,
        schedule=None,
        ledger=None,
    ):
        settings = given.merged_settings(
            config,
            stage=stage,
            world_size=world_size,
            precision=precision,
            micro_batches=micro_batches,
            reduce_bucket_size=reduce_bucket_size,
            overlap_comm=overlap_comm,
        )
        params, self.aliases = given.check_params(params)
        frozen, keep_fp32 = (
            self._own_names(what, chosen, params)
            for what, chosen in (("frozen", frozen), ("keep_fp32", keep_fp32))
        )
        self.recipe = get_recipe(settings["precision"], reduce_dtype)
        self.world = given.check_world(world, settings["world_size"])
        self.micro_batches = check_at_least_one(
            "micro_batches", settings["micro_batches"], "micro-batch"
        )
        self.max_grad_norm = check_max_grad_norm(max_grad_norm)
        self.norm_type = check_norm_type(norm_type)
        if loss_scale is None and self.recipe.loss_scaling:
            loss_scale = DynamicLossScale()
        self.scaler = given.check_kind("loss_scale", loss_scale, DynamicLossScale)
        self.schedule = schedule
        if schedule is not None and not callable(schedule):
            raise UsageError(f"schedule must be a function of the step or None, got {schedule!r}")
        trainable = tuple(name for name in params if name not in frozen)
        self.rule = GroupedRule(
            AdamW() if rule is None else rule, trainable, groups, rounded_start=rounded_start
        )
        grouped = group_by_unit(tuple(params), self._canonical_units(units, params))
        layouts = self._layouts(grouped, params, frozen, keep_fp32)
        self.ledger = given.check_kind("ledger", ledger, Ledger) or Ledger(self.world.hosted)
        if self.ledger.hosted != self.world.hosted:
            raise UsageError(
                f"the ledger counts {self.ledger.hosted} ranks, the world hosts {self.world.hosted}"
            )
        self.buckets = self._make_buckets(settings, [layout for _, layout, *_ in layouts])
        self.stage = STAGES[settings["stage"]](self.world, self.rule, self.buckets)
        self._persistent_stage = ZeROStage2(self.world, self.rule, self.buckets)
        self._persistence_threshold = given.check_threshold(param_persistence_threshold)
        self.accumulation = Accumulation(self.stage, self.micro_batches, reduce_every_micro_batch)
        self.names = (*params, *self.aliases)
        self.steps_done = self.skipped_steps = 0
        self.held_bytes = None
        self._sent_bytes = self._sent_before = 0
        self._note_sent()  # a world may have been used before
        self._gathered = {}
        self._used = set()
        self._reduced = False
        self.units = tuple(self._make_unit(*described, params) for described in layouts)
        self._unit_of = {name: unit for unit in self.units for name in unit.layout.names}

    # --- making the units --------------------------------------------------------------------

    def _own_names(self, what, chosen, params):
        """Return a set of parameter names, aliases resolved, refusing unknown ones."""
        if isinstance(chosen, str) or not isinstance(chosen, Iterable):
            raise UsageError(f"{what} must be a collection of parameter names, got {chosen!r}")
        names = {self.aliases.get(name, name) for name in chosen}
        unknown = sorted(names - set(params))
        if unknown:
            raise UsageError(f"{what} names no parameter: {', '.join(unknown)}")
        return names

    def _canonical_units(self, units, params):
        """Name each tied parameter once, in the first unit that has it."""
        if units is None:
            return {"model": tuple(params)}
        if not isinstance(units, Mapping) or any(isinstance(m, str) for m in units.values()):
            raise UsageError(f"units must map a unit's name to a list of names, got {units!r}")
        return {
            unit: tuple(name for name in members if name not in self.aliases)
            for unit, members in units.items()
        }

    def _layouts(self, grouped, params, frozen, keep_fp32):
        """Split each wished-for unit by format and trainability; one flat_param each."""
        plain = RECIPES["fp32"]
        described = []
        for unit, members in grouped.items():
            kinds = {}
            for name in members:
                recipe = plain if name in keep_fp32 else self.recipe
                kinds.setdefault((recipe, name not in frozen), []).append(name)
            for (recipe, trains), names in kinds.items():
                suffix = "" if recipe is self.recipe else ".fp32"
                suffix += "" if trains else ".frozen"
                layout = flat.FlatLayout(
                    tuple(names), tuple(params[name].shape for name in names), self.world.size
                )
                described.append((unit + suffix, layout, recipe, trains))
        return described

    def _make_buckets(self, settings, layouts):
        """Return the buckets, never larger than the model."""
        size = settings["reduce_bucket_size"]
        if size is not None:
            size = check_at_least_one("reduce_bucket_size", size, "element")
            size = min(size, sum(layout.padded_numel for layout in layouts))
        return GradientBuckets(self.world, self.ledger, size, overlap=settings["overlap_comm"])

    def _make_unit(self, name, layout, recipe, trainable, params):
        """Lay parameters out in a flat buffer and let the stage place it."""
        unit = Unit(
            name,
            layout,
            recipe,
            self.world,
            self.ledger,
            trainable=trainable,
            persistent=self.stage.number == ZeROStage.STAGE_3
            and layout.numel <= self._persistence_threshold,
            micro_batches=self.accumulation.unit_batches,
            aliases={a: name for a, name in self.aliases.items() if name in layout.names},
        )
        full_RF = np.zeros((self.world.hosted, layout.padded_numel), np.float32)
        for parameter in layout.names:
            layout.view(full_RF, parameter)[...] = params[parameter]
        self.world.broadcast(full_RF, purpose="other", label=name)
        self.stage_of(unit).init_unit(unit, full_RF)
        return unit

    @property
    def trainable_units(self):
        """The units that are trained."""
        return tuple(unit for unit in self.units if unit.trainable)

    @property
    def numel(self):
        """Number of parameters, without padding, frozen ones included; tied ones once."""
        return sum(unit.layout.numel for unit in self.units)

    @property
    def lr(self):
        """Learning rate of the first group, the schedule's factor included; settable.

        Setting it gives every group this learning rate.
        """
        first = self.rule.groups[0] if self.rule.groups else ParameterGroup(())
        return self.rule.options(first)["lr"]

    @lr.setter
    def lr(self, value):
        self.rule.set_lr(value)

    @property
    def groups(self):
        """The parameter groups; their options may be changed between steps."""
        return self.rule.groups

    @property
    def loss_scale(self):
        """What the loss, or its gradient, is to be multiplied by: 1 without loss scaling."""
        return 1.0 if self.scaler is None else self.scaler.scale

    # --- parameters to compute with ----------------------------------------------------------

    def unshard(self, unit):
        """Return the unit's parameters in float32, name -> ``(R, *shape)``, gathered if need be.

        They stay at hand until `reshard`. In a 16-bit recipe they are widened copies of the
        stored parameters; in fp32 they are the parameters, to be read only.
        """
        if unit.name not in self._gathered:
            flat_RF = self.stage_of(unit).unshard(unit)
            if unit.recipe.param is not FLOAT32:
                widened_RF = unit.recipe.param.widen(flat_RF)
                flat_RF = self.ledger.register(widened_RF, "workspace", unit.name)
            self._gathered[unit.name] = unit.views(flat_RF)
        return self._gathered[unit.name]

    def reshard(self, unit):
        """Drop what `unshard` made."""
        self.put_by(unit)
        self.stage_of(unit).reshard(unit)

    def put_by(self, unit):
        """Drop a unit's widened copies but leave it gathered, for its next use."""
        self._gathered.pop(unit.name, None)

    @property
    def gathered_names(self):
        """Names of the units at hand: between `unshard` and `reshard` or `put_by`."""
        return self._gathered.keys()

    def gathers(self, unit):
        """Whether a unit has to be gathered before use."""
        return self.stage_of(unit).number == ZeROStage.STAGE_3

    def stage_of(self, unit):
        """Return the stage that moves a unit: that of stage 2 for one that persists.

        A unit kept gathered all the time has whole parameters and sharded gradients and states,
        and is gathered once after the step: it is a stage-2 unit.
        """
        return self._persistent_stage if unit.persistent else self.stage

    def gathered_parameters(self, modify_rank=None):
        """Hold all parameters gathered within the block, outside training.

        Parameters
        ----------
        modify_rank : int, optional
            Whose edits count. When the block ends, the elements this rank changed are sent to
            all and written back, masters included. Without it the arrays are read-only: an edit
            that would be lost is an error at once.

        Returns
        -------
        context manager
            Of a dict, name -> ``(R, *shape)`` float32: copies of what the ranks compute with.

        Raises
        ------
        UsageError
            If another rank's copy was changed; nothing is written then.
        """
        return gathered(self, modify_rank)

    # --- gradients in ----------------------------------------------------------------------------

    def backward(self, grads):
        """Take each rank's gradients of a model of your own, for one micro-batch.

        Parameters
        ----------
        grads : mapping of str to array
            Every trainable parameter's gradient with the rank axis first, ``(R, *shape)``, float32:
            row i is what rank ``world.ranks[i]``'s own samples contribute. They are summed over
            ranks and micro-batches, so the mean belongs into the loss (and `loss_scale`).
            A parameter that was not used has None; one that only some ranks used a list with
            None for the others. What some rank used counts with zeros for the others; what no
            rank used in any micro-batch is left out of the step.

        Raises
        ------
        UsageError
            If a gradient is missing, unknown, or of another shape or dtype; nothing is taken then.
        """
        given.check_grads(self.trainable_units, grads, self.world.hosted)
        for unit in reversed(self.trainable_units):
            buffer = GradientBuffer(unit)
            for name in (*unit.layout.names, *unit.aliases):
                if not given.is_unused(grads[name]):
                    self._used.add(unit.aliases.get(name, name))
                    _write_gradient(buffer, name, grads[name])
            self.post_backward(unit, buffer)
            del buffer
        self.finish_backward()

    def post_backward(self, unit, buffer):
        """Hand the stage a unit's gradient, right after the unit's backward pass.

        Parameters
        ----------
        unit : Unit
        buffer : GradientBuffer
            Written by the layers, one row a rank.
        """
        self.accumulation.post_backward(unit, buffer.finish())

    def mark_used(self, names):
        """Take note that this micro-batch used some parameters; `backward` does it by itself."""
        self._used.update(self.aliases.get(name, name) for name in names)

    def finish_backward(self):
        """Reduce what is left in the buckets; every backward pass ends with it."""
        self.buckets.flush()

    def set_gradients(self, grads):
        """Take gradients that are reduced already: the same on every rank, nothing is sent.

        Parameters
        ----------
        grads : mapping of str to ndarray
            Every trainable parameter's full gradient, float32, without a rank axis.

        Raises
        ------
        UsageError
            If a gradient is missing, unknown, or of another shape or dtype, or if gradients are
            held already; nothing is taken then.
        """
        given.check_grads(self.trainable_units, grads)
        if any(self.accumulation.batches_held(unit) for unit in self.trainable_units):
            raise UsageError("gradients are held already; call step() or zero_grad() first")
        for unit in self.trainable_units:
            if unit.optim.width == unit.layout.padded_numel:
                buffer = GradientBuffer(unit)
                for name, target in buffer.targets(unit.layout.names).items():
                    target[...] = grads[name]
                grad_RX = buffer.finish()
            else:
                own = {name: grads[name] for name in unit.layout.names}
                grad_RX = named.partition_gradients(own, self.world).shard_RS
            unit.accumulate(grad_RX)
            unit.batches_held = unit.micro_batches
        self._used.update(name for name in grads if name not in self.aliases)
        self._reduced = True

    def gradients(self):
        """Return the reduced gradient held, in full, by name: ``(*shape)`` float32.

        For looking at; booked as purpose ``"other"``, and nothing held is changed.
        """
        full = {}
        for unit in self.trainable_units:
            if unit.grad is None:
                raise UsageError(f"unit {unit.name!r} holds no gradient; run a backward pass first")
            grad_RX = unit.grad
            if unit.grad_format is not FLOAT32:
                grad_RX = unit.grad_format.widen(grad_RX)
            partial = grad_RX.shape[1] == unit.layout.padded_numel and not self._reduced
            if partial and self.world.size > 1 and not self.accumulation.reduces_each:
                views = {name: unit.layout.view(grad_RX, name) for name in unit.layout.names}
                shards = named.reduce_scatter_gradients(views, self.world, purpose="other")
            else:
                shards = named.NamedShards(unit.layout, unit.own(grad_RX))
            gathered = named.all_gather_gradients(shards, self.world)
            full |= {name: np.array(array[0]) for name, array in gathered.items()}
        return full

    def zero_grad(self):
        """Drop all gradients; their memory is free from now on."""
        self.buckets.discard()
        self.accumulation.discard()
        for unit in self.units:
            unit.drop_gradient()
        self._used.clear()
        self._reduced = False

    # --- the step ------------------------------------------------------------------------------

    def step(self):
        """Finish the gradients, agree on one scale, and update what each rank owns.

        Returns
        -------
        StepResult
            ``applied`` is False if a gradient on any rank was not finite: then no rank changed
            anything, `skipped_steps` rose, and the schedule did not move.

        Raises
        ------
        UsageError
            If a micro-batch's gradient is missing; nothing is changed then.
        LossScaleError
            If gradients overflow at the smallest loss scale.
        """
        units = self.trainable_units
        self._check_complete(units)
        self.held_bytes = self.ledger.held_bytes()
        left_out = self._agree_left_out()
        self.ledger.phase = "reduce"
        if not self._reduced:
            for unit in reversed(units):
                self.accumulation.reduce(unit)
            self._reduced = True  # whatever fails from here on, the step can be repeated
        loss_scale = self.loss_scale
        p = math.inf if self.max_grad_norm is None else self.norm_type
        scaled_norm = global_norm(self.world, units, left_out, p=p)
        finite = math.isfinite(scaled_norm)
        grad_norm = scaled_norm / loss_scale
        self.ledger.phase = "step"
        if finite:
            grad_scale = clip_factor(grad_norm, self.max_grad_norm) / loss_scale
            self._apply(units, grad_scale, left_out)
        else:
            grad_scale = 0.0
        self.zero_grad()
        self.ledger.phase = "outside"
        self._note_sent()
        self._count(finite, loss_scale)
        return StepResult(
            applied=finite,
            grad_norm=grad_norm if self.max_grad_norm is not None else None,
            grad_scale=grad_scale,
            lr=self.lr,
            loss_scale=loss_scale,
            held_bytes=self.held_bytes,
        )

    def _check_complete(self, units):
        """Refuse a step before every micro-batch has come."""
        for unit in units:
            held = self.accumulation.batches_held(unit)
            if held < self.micro_batches:
                raise UsageError(
                    f"unit {unit.name!r} has the gradient of {held} of {self.micro_batches} "
                    "micro-batches; run the backward passes before step()"
                )

    def _agree_left_out(self):
        """Return the parameters that no rank used in any micro-batch of this step."""
        names = [name for unit in self.trainable_units for name in unit.layout.names]
        used_N = np.array([name in self._used for name in names], np.int64)
        used_RN = np.tile(used_N, (self.world.hosted, 1))
        anywhere_N = self.world.all_gather_scalars(used_RN, label="used").any(axis=0)
        return frozenset(name for name, used in zip(names, anywhere_N, strict=True) if not used)

    def _apply(self, units, grad_scale, left_out):
        """Update every trainable unit."""
        if self.schedule is not None:
            factor = self.schedule(self.steps_done)
            if not (isinstance(factor, Real) and math.isfinite(factor) and factor >= 0):
                raise UsageError(
                    f"the schedule must return a finite factor of at least 0, got {factor!r} at "
                    f"step {self.steps_done}"
                )
            self.rule.lr_factor = float(factor)
        self.rule.begin_step(left_out)
        for unit in units:
            self.stage_of(unit).step(unit, grad_scale)

    def _count(self, applied, loss_scale):
        """Count the step, and let the loss scale learn from it."""
        if applied:
            self.steps_done += 1
            if self.scaler is not None:
                self.scaler.success()
            return
        self.skipped_steps += 1
        _log.warning(
            "skipped a step on all ranks: a gradient is not finite "
            "(loss scale %g, skipped so far: %d)",
            loss_scale,
            self.skipped_steps,
        )
        if self.scaler is not None:
            self.scaler.overflow()

    # --- saving it ---------------------------------------------------------------------------

    def state_dict(self):
        """Return all that training changes, in memory; `zero_nb.train.checkpoint` uses files.

        Returns
        -------
        dict
            ``weights``: name to whole tensor, float32 (masters where there are some; a frozen
            16-bit parameter as uint16 bits). ``moments``: ``exp_avg`` and so on, each name to
            float32 tensor. Beside them what `zero_nb.train.snapshot.describe` returns: groups,
            step counts, loss scale. Copies, gathered from their owners, the same on every rank.

        Raises
        ------
        UsageError
            If gradients are held: they are no part of it.
        """
        return snapshot.state_dict(self)

    def load_state_dict(self, state):
        """Go on from `state_dict`, of any stage, world size, units and precision.

        Parameters
        ----------
        state : dict
            From an optimizer of the same parameters, ties and rule. Its group options, learning
            rate, step counts and loss scale replace those here. Gradients held are dropped.

        Raises
        ------
        UsageError
            If it does not fit; nothing is changed then.
        """
        snapshot.load_state_dict(self, state)

    # --- reading it ------------------------------------------------------------------------

    def weights(self):
        """Return the full float32 weights by name, the masters where there are some.

        Gathered from the ranks that own them, booked as purpose ``"other"``. Tied names share
        one array.
        """
        weights = {}
        for unit in self.units:
            shards = named.NamedShards(unit.layout, unit.owned_values())
            for name, view in named.gather_parameters(shards, self.world).items():
                weights[name] = np.array(view[0])  # a copy, 0-d ones too
        weights |= {alias: weights[name] for alias, name in self.aliases.items()}
        return {name: weights[name] for name in self.names}

    def weights_sha256(self):
        """Return the SHA-256 of the float32 weights, unpadded, in parameter order (hex)."""
        digest = hashlib.sha256()
        for name, array in self.weights().items():
            if name not in self.aliases:
                digest.update(array.astype("<f4", copy=False).tobytes())
        return digest.hexdigest()

    def partition_of(self, name, rank):
        """Return where parameter `name` lies on `rank`, a `ParameterPartition`."""
        unit = self._unit_of.get(self.aliases.get(name, name))
        if unit is None:
            raise UsageError(f"no parameter {name!r}; there are {', '.join(self.names)}")
        wanted = self.aliases.get(name, name)
        return next(part for part in unit.partitions(rank) if part.name == wanted)

    def memory_stats(self):
        """Return what this stage saves against the same flat_params replicated.

        Returns
        -------
        ZeROMemoryStats
            From the ledger, at the last moment gradients were complete.
        """
        held = self.held_bytes or self.ledger.held_bytes()
        return ZeROMemoryStats.from_held(
            held, self.units, sent_bytes=self._sent_bytes, micro_batches=self.micro_batches
        )

    def _note_sent(self):
        """Keep how many bytes of parameters and gradients were sent since the last step's end."""
        total = self.world.log.total_bytes["param"] + self.world.log.total_bytes["grad"]
        self._sent_bytes, self._sent_before = total - self._sent_before, total


def _write_gradient(buffer, name, grad):
    """Write or add one name's gradient; a function, so that no view of the buffer stays behind."""
    for target in buffer.targets([name]).values():
        _fill_rows(target, grad)
    buffer.add_up()


def _fill_rows(target, grad):
    """Copy a gradient, ``(R, *shape)`` or a list of rows with None for zeros."""
    if not isinstance(grad, list):
        target[...] = grad
        return
    for row, values in enumerate(grad):
        target[row] = 0.0 if values is None else values  # by index: a row of a 0-d one is a scalar
