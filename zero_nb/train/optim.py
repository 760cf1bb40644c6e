"""Element-wise optimizer rules, their parameter groups, and learning-rate schedules.

A rule updates runs of elements and never looks at a whole tensor: that is what lets a rank
update its own slice alone (ZeRO, section 5.1). Rules that need whole tensors cannot be sharded
this way.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields, replace
from numbers import Real
from typing import ClassVar, final

import numpy as np

from zero_nb.config import UsageError
from zero_nb.core import update
from zero_nb.train.units import OptimState

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "GroupedRule",
    "ParameterGroup",
    "Rule",
    "get_rule",
    "warmup_cosine",
]


class Rule(ABC):
    """An element-wise update. Its fields are the default hyper-parameters of every group."""

    moment_names: ClassVar[tuple[str, ...]]
    """Names of the float32 arrays kept for each element."""
    elementwise: ClassVar[bool] = True
    """Whether an element's update needs that element's gradient and state only."""

    @property
    def moments(self):
        """The moments this rule really keeps."""
        return self.moment_names

    @property
    def options(self):
        """The hyper-parameters a group may set, with their defaults."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @abstractmethod
    def hyper_row(self, options, step, grad_scale):
        """Return the hyper-parameters of one group at one step as a float32 row.

        Parameters
        ----------
        options : dict
            Those of `options`, with the group's own.
        step : int
            1 at a parameter's first update.
        grad_scale : float
            What every gradient is multiplied by after widening.
        """

    @abstractmethod
    def apply(self, target, grad, moments, runs, hyper, *, grad_format, param, param_format):
        """Update `target` in place on `runs`, and write it rounded to `param` if given.

        Parameters
        ----------
        target : ndarray, 1-D float32
            The parameters themselves (fp32), or their masters.
        grad : ndarray, 1-D in `grad_format`
        moments : dict of str to ndarray, 1-D float32
        runs : ndarray (n, 7), int64
            See `zero_nb.core.flat.run_table`.
        hyper : ndarray (h, k), float32
            Rows of `hyper_row`.
        param : ndarray or None
            The working parameters, 1-D in `param_format`.
        """


@final
@dataclass(frozen=True)
class SGD(Rule):
    """Stochastic gradient descent as in ``torch.optim.SGD`` (no dampening).

    Parameters
    ----------
    lr : float
    momentum : float
        0 keeps no state; else one ``momentum_buffer`` an element.
    nesterov : bool
        Same for all groups.
    weight_decay : float
        Added to the gradient (L2).
    """

    lr: float = 1e-2
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    moment_names: ClassVar[tuple[str, ...]] = ("momentum_buffer",)

    def __post_init__(self):
        """Check the hyper-parameters."""
        _check_options(self.options)
        if self.nesterov and not self.momentum:
            raise UsageError("nesterov needs a momentum above 0; got momentum 0")

    @property
    def moments(self):
        """No state without momentum."""
        return self.moment_names if self.momentum else ()

    def hyper_row(self, options, step, grad_scale):
        """See `Rule.hyper_row`."""
        return update.sgd_hyper(
            options["lr"], options["momentum"], options["weight_decay"], grad_scale
        )

    def apply(self, target, grad, moments, runs, hyper, *, grad_format, param, param_format):
        """See `Rule.apply`."""
        update.sgd_update(
            target,
            grad,
            moments.get("momentum_buffer"),
            runs,
            hyper,
            nesterov=self.nesterov,
            grad_format=grad_format,
            param=param,
            param_format=param_format,
        )


class _AdamRule(Rule):
    """What Adam and AdamW share: two moments, one kernel."""

    moment_names: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    _decoupled: ClassVar[bool]

    def __post_init__(self):
        """Check the hyper-parameters."""
        _check_options(self.options)

    def hyper_row(self, options, step, grad_scale):
        """See `Rule.hyper_row`."""
        return update.adam_hyper(
            options["lr"],
            options["betas"],
            options["eps"],
            options["weight_decay"],
            step,
            grad_scale,
            self._decoupled,
        )

    def apply(self, target, grad, moments, runs, hyper, *, grad_format, param, param_format):
        """See `Rule.apply`."""
        update.adam_update(
            target,
            grad,
            moments["exp_avg"],
            moments["exp_avg_sq"],
            runs,
            hyper,
            decoupled=self._decoupled,
            grad_format=grad_format,
            param=param,
            param_format=param_format,
        )


@final
@dataclass(frozen=True)
class Adam(_AdamRule):
    """Adam with L2 weight decay, as in ``torch.optim.Adam`` (Kingma and Ba, 2015)."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    _decoupled: ClassVar[bool] = False


@final
@dataclass(frozen=True)
class AdamW(_AdamRule):
    """Adam with decoupled weight decay, as in ``torch.optim.AdamW`` (Loshchilov, Hutter, 2019)."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2

    _decoupled: ClassVar[bool] = True


_WHOLE_TENSOR = {
    "adafactor": "row and column means of the squared gradient",
    "lamb": "the norms of each layer's weights and update",
    "lars": "the norms of each layer's weights and gradient",
    "muon": "the orthogonalised update matrix",
    "shampoo": "the left and right preconditioner matrices",
}


def _whole_tensor(name):
    """Say why a rule cannot be sharded element by element."""
    needs = _WHOLE_TENSOR.get(name.lower(), "whole tensors")
    return (
        f"{name} needs {needs}, but a ZeRO rank sees only its own slice of the flat_param, which "
        "cuts tensors anywhere; use an element-wise rule such as AdamW, Adam or SGD"
    )


def get_rule(name, **options):
    """Return a rule by the name the command line knows it by.

    Parameters
    ----------
    name : {"adamw", "adam", "sgd", "momentum"}
        ``momentum`` is SGD with momentum 0.9.
    **options
        Its hyper-parameters; those it does not have are left out.

    Returns
    -------
    Rule

    Raises
    ------
    UsageError
        For an unknown name; for one that needs whole tensors, with the reason.
    """
    kinds = {"adamw": AdamW, "adam": Adam, "sgd": SGD, "momentum": SGD}
    if name.lower() in _WHOLE_TENSOR:
        raise UsageError(_whole_tensor(name))
    if name not in kinds:
        raise UsageError(f"unknown optimizer {name!r}; choose one of {', '.join(kinds)}")
    kind = kinds[name]
    known = {f.name for f in fields(kind)}
    chosen = {key: value for key, value in options.items() if key in known}
    return kind(**({"momentum": 0.9} if name == "momentum" else {}) | chosen)


def _check_options(options):
    """Refuse hyper-parameters outside their range, by name."""
    for name, value in options.items():
        pair = name == "betas" and isinstance(value, tuple | list)
        numbers = value if pair else (value,)
        if not all(isinstance(number, Real) for number in numbers):
            raise UsageError(f"{name} must be a number, betas two of them; got {value!r}")
        if name in ("lr", "eps", "weight_decay") and not (math.isfinite(value) and value >= 0):
            raise UsageError(f"{name} must be a finite number of at least 0, got {value!r}")
        if name == "momentum" and not 0 <= value < 1:
            raise UsageError(f"momentum must be at least 0 and below 1, got {value!r}")
        if name == "betas" and not (len(numbers) == 2 and all(0 <= beta < 1 for beta in numbers)):
            raise UsageError(f"betas must be two numbers of at least 0 and below 1, got {value!r}")


@dataclass
class ParameterGroup:
    """Parameters that share hyper-parameters.

    Parameters
    ----------
    names : tuple of str
    options : dict
        Only what differs from the rule's own, for example ``{"weight_decay": 0.0}``.
    """

    names: tuple
    options: dict = field(default_factory=dict)


@final
class GroupedRule:
    """A rule with parameter groups and one step count a parameter; what a stage updates with.

    Parameters
    ----------
    rule : Rule
    names : sequence of str
        All trainable parameters.
    groups : sequence of ParameterGroup, optional
        Each parameter in exactly one; one group of all by default.
    rounded_start : bool, default False
        Start masters from the rounded parameters, as DeepSpeed does.

    Attributes
    ----------
    lr_factor : float
        Multiplies every group's lr; what a schedule sets.
    steps : dict of str to int
        Updates each parameter has had.
    """

    def __init__(self, rule, names, groups=None, *, rounded_start=False):
        if not isinstance(rule, Rule):
            raise UsageError(
                f"the rule must be a zero_nb Rule (SGD, Adam, AdamW or your own), got {rule!r}"
            )
        if not rule.elementwise:
            raise UsageError(_whole_tensor(type(rule).__name__))
        names = tuple(names)
        groups = [ParameterGroup(names)] if groups is None else list(groups)
        self.rule, self.groups, self.lr_factor = rule, groups, 1.0
        self.rounded_start = rounded_start
        self._group_of = _index_groups(rule, names, groups)
        # One group with momentum is enough to need its buffer.
        kept = [replace(rule, **group.options).moments for group in groups]
        self._moments = max(kept, key=len, default=rule.moments)
        self.steps = dict.fromkeys(names, 0)
        self._left_out = frozenset()

    def options(self, group):
        """The hyper-parameters of a group, the rule's defaults filled in and lr scaled."""
        merged = self.rule.options | group.options
        return merged | {"lr": merged["lr"] * self.lr_factor}

    def set_lr(self, lr):
        """Give every group this learning rate."""
        _check_options({"lr": lr})
        for group in self.groups:
            group.options["lr"] = lr
        self.lr_factor = 1.0

    def begin_step(self, left_out=()):
        """Count one update of every parameter but those in `left_out`.

        Raises
        ------
        UsageError
            If a group's options were changed to what cannot be; nothing is counted then.
        """
        for index, group in enumerate(self.groups):
            _check_group(self.rule, index, group)
            if len(replace(self.rule, **group.options).moments) > len(self._moments):
                raise UsageError(
                    f"group {index} asks for {group.options}, but no group did when the states "
                    "were made; build the optimizer with it"
                )
        self._left_out = frozenset(left_out)
        for name in self.steps.keys() - self._left_out:
            self.steps[name] += 1

    def init(self, unit, owned_RX):
        """Return the optimizer state for the float32 elements each rank updates.

        A frozen unit has none; a master starts unrounded, unless `rounded_start` is set.
        """
        if not unit.trainable:
            return OptimState(owned_RX.shape[1], None)
        if self.rounded_start:
            fmt = unit.recipe.param
            owned_RX = fmt.widen(fmt.round(owned_RX.copy()))
        return OptimState.like(owned_RX, self._moments, master=unit.recipe.master)

    def update(self, unit, grad_scale):
        """Update what each hosted rank owns of `unit` (all of it at stage 0)."""
        rows, hyper_of = {}, []
        for name in unit.layout.names:
            key = (self._group_of[name], self.steps[name])
            left_out = name in self._left_out
            hyper_of.append(-1 if left_out else rows.setdefault(key, len(rows)))
        if not rows:
            return
        hyper = np.stack(
            [
                self.rule.hyper_row(self.options(self.groups[group]), step, grad_scale)
                for group, step in rows
            ]
        )
        optim, param = unit.optim, unit.param.reshape(-1)
        replicated = optim.width == unit.layout.padded_numel
        in_place = optim.master is None
        self.rule.apply(
            param if in_place else optim.master.reshape(-1),
            unit.grad.reshape(-1),
            {name: moment.reshape(-1) for name, moment in optim.moments.items()},
            unit.runs(tuple(hyper_of), every_replica=replicated),
            hyper,
            grad_format=unit.grad_format,
            param=None if in_place else param,
            param_format=None if in_place else unit.recipe.param,
        )


def _check_group(rule, index, group):
    """Refuse options that a group of this rule cannot have."""
    unknown = sorted(group.options.keys() - rule.options.keys())
    if unknown or "nesterov" in group.options:
        raise UsageError(
            f"group {index} sets {', '.join(unknown) or 'nesterov'}; a group of "
            f"{type(rule).__name__} may set {', '.join(rule.options)} (nesterov: for all)"
        )
    replace(rule, **group.options)  # checks the values


def _index_groups(rule, names, groups):
    """Map each parameter to its group, refusing options and names that do not fit."""
    group_of = {}
    for index, group in enumerate(groups):
        if not isinstance(group, ParameterGroup) or isinstance(group.names, str):
            raise UsageError(
                f"group {index} must be a ParameterGroup of a tuple of names, got {group!r}"
            )
        _check_group(rule, index, group)
        for name in group.names:
            if name in group_of or name not in names:
                what = "is in two groups" if name in group_of else "is not a trainable parameter"
                raise UsageError(f"group {index}: {name!r} {what}")
            group_of[name] = index
    missing = [name for name in names if name not in group_of]
    if missing:
        raise UsageError(f"in no parameter group: {', '.join(missing)}")
    return group_of


def warmup_cosine(step, *, warmup, total, final=0.1):
    """Return the learning-rate factor: linear warm-up, then a cosine down to `final`.

    Parameters
    ----------
    step : int
        0 at the first update.
    warmup, total : int
        Steps.
    final : float
        Factor at the last step.

    Returns
    -------
    float
    """
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, total - 1 - warmup))
    return final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * progress))
