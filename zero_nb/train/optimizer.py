"""ZeROOptimizer: everything between "gradients are ready" and "parameters are new".

Shape suffixes: R ranks hosted here, F padded flat length of a unit, S = F // world_size.
"""

import hashlib
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

import numpy as np

from zero_nb.cluster.simulated import SimulatedWorld
from zero_nb.config import UsageError, ZeROConfig, ZeROStage
from zero_nb.core import flat
from zero_nb.core.precision import FLOAT32
from zero_nb.train.buckets import GradientBuffer
from zero_nb.train.ledger import Ledger
from zero_nb.train.optim import AdamW, GroupedRule
from zero_nb.train.recipes import get_recipe
from zero_nb.train.scaling import check_max_grad_norm, clip_factor, global_norm
from zero_nb.train.stages import STAGES
from zero_nb.train.stats import ZeROMemoryStats
from zero_nb.train.units import Unit, group_by_unit

__all__ = ["StepResult", "ZeROOptimizer"]


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did.

    Attributes
    ----------
    applied : bool
        Whether the parameters were updated.
    grad_norm : float or None
        Global 2-norm before clipping; None if no clipping was asked for.
    grad_scale : float
        What the gradients were multiplied by.
    lr : float
        Of the first group, the schedule's factor included.
    held_bytes : dict
        Bytes of param, grad and optim on the fullest rank, when the gradients were complete.
    """

    applied: bool
    grad_norm: float | None
    grad_scale: float
    lr: float
    held_bytes: dict


@final
class ZeROOptimizer:
    """An element-wise optimizer whose states, gradients and parameters are sharded over ranks.

    Parameters
    ----------
    params : mapping of str to ndarray
        Initial parameters by name, float32, without a rank axis; copied, rank 0's count.
    config : ZeROConfig, optional
        Gives stage, world_size and precision; or give them by keyword.
    stage : int, str or ZeROStage, default 1
        0 is the unsharded baseline.
    world_size : int, default 1
        Ranks of a `SimulatedWorld`.
    world : World, optional
        Instead of `world_size`.
    rule : Rule, default AdamW()
        Any element-wise rule.
    groups : sequence of ParameterGroup, optional
        Parameters with their own hyper-parameters.
    precision : {"fp32", "bf16"}
    units : mapping of str to sequence of str, optional
        Which parameters are gathered together; all in one unit by default.
    max_grad_norm : float, optional
        Clip the gradient to this global 2-norm.
    schedule : callable, optional
        From the number of steps done (0 at first) to a factor for every lr.
    ledger : Ledger, optional

    Attributes
    ----------
    units : tuple of Unit
    world : World
    ledger : Ledger
    stage : Stage
    steps_done : int

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
        units=None,
        max_grad_norm=None,
        schedule=None,
        ledger=None,
    ):
        stage, world_size, precision = _settings(config, stage, world_size, precision)
        params = _check_params(params)
        self.recipe = get_recipe(precision)
        self.world = _check_world(world, world_size)
        self.max_grad_norm = check_max_grad_norm(max_grad_norm)
        self.schedule = schedule
        self.rule = GroupedRule(AdamW() if rule is None else rule, params, groups)
        grouped = group_by_unit(tuple(params), units or {"model": tuple(params)})
        self.ledger = Ledger(self.world.hosted) if ledger is None else ledger
        self.stage = STAGES[stage](self.world, self.rule)
        self.names = tuple(params)
        self.steps_done = 0
        self.held_bytes = None
        self._gathered = {}
        self.units = tuple(
            self._make_unit(name, {member: params[member] for member in members})
            for name, members in grouped.items()
        )
        self._unit_of = {name: unit for unit in self.units for name in unit.layout.names}

    def _make_unit(self, name, arrays):
        """Lay parameters out in a flat buffer and let the stage place it."""
        layout = flat.FlatLayout(
            tuple(arrays), tuple(a.shape for a in arrays.values()), self.world.size
        )
        unit = Unit(name, layout, self.recipe, self.world, self.ledger)
        full_RF = np.zeros((self.world.hosted, layout.padded_numel), np.float32)
        for parameter, view in unit.views(full_RF).items():
            view[...] = arrays[parameter]
        self.world.broadcast(full_RF, purpose="other", label=name)
        self.stage.init_unit(unit, full_RF)
        return unit

    @property
    def numel(self):
        """Number of parameters, without padding."""
        return sum(unit.layout.numel for unit in self.units)

    @property
    def lr(self):
        """Learning rate of the first group, the schedule's factor included."""
        return self.rule.options(self.rule.groups[0])["lr"]

    # --- parameters to compute with ----------------------------------------------------------

    def unshard(self, unit):
        """Return the unit's parameters in float32, name -> (R, *shape), gathered if need be.

        They stay at hand until `reshard`. In a 16-bit recipe they are widened copies of the
        stored parameters; in fp32 they are the parameters, to be read only.
        """
        if unit.name not in self._gathered:
            flat_RF = self.stage.unshard(unit)
            if unit.recipe.param is not FLOAT32:
                widened_RF = unit.recipe.param.widen(flat_RF)
                flat_RF = self.ledger.register(widened_RF, "workspace", unit.name)
            self._gathered[unit.name] = unit.views(flat_RF)
        return self._gathered[unit.name]

    def reshard(self, unit):
        """Drop what `unshard` made."""
        self._gathered.pop(unit.name, None)
        self.stage.reshard(unit)

    @contextmanager
    def gathered_parameters(self):
        """Hold all parameters gathered within the block, outside training.

        Yields
        ------
        dict of str to ndarray, (R, *shape) float32
            Read-only.
        """
        with self.world.purpose("other"):
            gathered = {}
            for unit in self.units:
                for name, view in self.unshard(unit).items():
                    gathered[name] = view.view()
                    gathered[name].flags.writeable = False
        try:
            yield {name: gathered[name] for name in self.names}
        finally:
            gathered.clear()
            for unit in self.units:
                self.reshard(unit)

    # --- gradients in, parameters out ----------------------------------------------------------

    def backward(self, grads):
        """Take each rank's gradients of a model of your own.

        Parameters
        ----------
        grads : mapping of str to ndarray
            Every parameter's gradient with the rank axis first, (R, *shape), float32: row i is
            what rank ``world.ranks[i]``'s own samples contribute. They are summed over ranks,
            so the mean belongs into the loss.

        Raises
        ------
        UsageError
            If a gradient is missing, unknown, or of another shape or dtype; nothing is taken then.
        """
        self._check_grads(grads)
        for unit in reversed(self.units):
            buffer = GradientBuffer(unit)
            for name, view in buffer.views.items():
                view[...] = grads[name]
            self.post_backward(unit, buffer.grad_RF)

    def post_backward(self, unit, grad_RF):
        """Hand the stage a unit's float32 gradient (R, F), one row a rank."""
        self.stage.post_backward(unit, grad_RF)

    def step(self):
        """Finish the gradients, agree on one scale, and update what each rank owns.

        Returns
        -------
        StepResult

        Raises
        ------
        UsageError
            If a unit has no gradient, or a gradient is not finite; nothing is changed then.
        """
        missing = [unit.name for unit in self.units if unit.grad is None]
        if missing:
            raise UsageError(
                f"no gradient for unit {', '.join(missing)}; run a backward pass before step()"
            )
        self.held_bytes = self.ledger.held_bytes()
        self.ledger.phase = "reduce"
        for unit in reversed(self.units):
            self.stage.reduce(unit)
        grad_norm = self._grad_norm()
        grad_scale = clip_factor(grad_norm, self.max_grad_norm)
        if self.schedule is not None:
            self.rule.lr_factor = float(self.schedule(self.steps_done))
        self.ledger.phase = "step"
        self.rule.begin_step()
        for unit in self.units:
            self.stage.step(unit, grad_scale)
        self.zero_grad()
        self.steps_done += 1
        self.ledger.phase = "outside"
        return StepResult(True, grad_norm, grad_scale, self.lr, self.held_bytes)

    def _grad_norm(self):
        """Return the global norm if it is needed, refusing one that is not finite."""
        if self.max_grad_norm is None:
            return None
        grad_norm = global_norm(self.world, self.units)
        if not np.isfinite(grad_norm):
            self.ledger.phase = "outside"
            raise UsageError(
                f"the gradient of step {self.steps_done + 1} is not finite; lower the learning "
                "rate or look at the data. Parameters are unchanged; zero_grad() goes on"
            )
        return grad_norm

    def zero_grad(self):
        """Drop all gradients; their memory is free from now on."""
        for unit in self.units:
            unit.grad = None

    # --- reading it ------------------------------------------------------------------------

    def weights(self):
        """Return the full float32 weights by name, the masters where there are some.

        Gathered from the ranks that own them, booked as purpose ``"other"``.
        """
        weights = {}
        for unit in self.units:
            own_RS = np.ascontiguousarray(unit.owned_values())
            full_RF = self.world.all_gather(own_RS, purpose="other", label=unit.name)
            for name, view in unit.views(full_RF).items():
                weights[name] = view[0].copy()
        return {name: weights[name] for name in self.names}

    def weights_sha256(self):
        """Return the SHA-256 of the float32 weights, unpadded, in parameter order (hex)."""
        digest = hashlib.sha256()
        for array in self.weights().values():
            digest.update(array.astype("<f4", copy=False).tobytes())
        return digest.hexdigest()

    def partition_of(self, name, rank):
        """Return where parameter `name` lies on `rank`, a `ParameterPartition`."""
        unit = self._unit_of.get(name)
        if unit is None:
            raise UsageError(f"no parameter {name!r}; there are {', '.join(self.names)}")
        return next(part for part in unit.partitions(rank) if part.name == name)

    def memory_stats(self):
        """Return what this stage saves against the same flat_params replicated.

        Returns
        -------
        ZeROMemoryStats
            From the ledger, at the last moment gradients were complete.
        """
        held = self.held_bytes or self.ledger.held_bytes()
        return ZeROMemoryStats.from_held(held, self.units, self.world)

    def _check_grads(self, grads):
        """Refuse gradients that do not fit the parameters, before anything is taken."""
        unknown = sorted(grads.keys() - set(self.names))
        missing = [name for name in self.names if name not in grads]
        if unknown or missing:
            what = "unknown" if unknown else "missing"
            raise UsageError(f"{what} gradients: {', '.join(unknown or missing)}")
        for unit in self.units:
            if unit.grad is not None:
                raise UsageError(
                    f"unit {unit.name!r} already holds a gradient; call step() or zero_grad() first"
                )
            for name, shape in zip(unit.layout.names, unit.layout.shapes, strict=True):
                got, want = np.shape(grads[name]), (self.world.hosted, *shape)
                dtype = getattr(grads[name], "dtype", None)
                if got != want or dtype != np.float32:
                    raise UsageError(
                        f"the gradient of {name!r} must be float32 {want}, one row a rank; "
                        f"got {dtype} {got}"
                    )


def _settings(config, stage, world_size, precision):
    """Merge a config with keywords, refusing both for the same thing."""
    if config is None:
        return (
            ZeROStage.parse(1 if stage is None else stage),
            1 if world_size is None else world_size,
            precision or "fp32",
        )
    if not isinstance(config, ZeROConfig):
        raise UsageError(f"config must be a ZeROConfig, got {type(config).__name__}")
    if not (stage is None and world_size is None and precision is None):
        raise UsageError("give stage, world_size and precision by config or by keyword, not both")
    return config.stage, config.world_size, config.precision


def _check_world(world, world_size):
    """Return the world to run in."""
    if world is None:
        return SimulatedWorld(world_size)
    if world_size not in (1, world.size):
        raise UsageError(f"world_size {world_size} does not fit {world!r}; give one of the two")
    return world


def _check_params(params):
    """Return the parameters as a dict of float32 arrays, or say which one does not fit."""
    if not isinstance(params, Mapping) or not params:
        raise UsageError("params must be a non-empty mapping of name to float32 array")
    for name, array in params.items():
        if not isinstance(array, np.ndarray) or array.dtype != np.float32:
            got = getattr(array, "dtype", type(array).__name__)
            raise UsageError(f"parameter {name!r} must be a float32 array, got {got}")
    return dict(params)
