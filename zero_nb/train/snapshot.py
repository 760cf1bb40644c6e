"""What a run's state is, whatever its stage, world size, units and precision.

Shape suffixes: R ranks hosted here, F padded flat length of a unit, S = F // world_size, X either.

[Note: pieces]
A piece is a stretch of one parameter, flattened in C order: (kind, name, start, values). The kind
is ``"weight"`` (the float32 values the optimizer updates, that is the master where there is one;
the stored bits of a frozen 16-bit parameter) or ``"optim/exp_avg"`` and the like. Pieces know
nothing of ranks, padding and flat_params, so what one arrangement wrote any other can read:
padding is never stored, and working 16-bit parameters are rounded anew from the weights.
"""

import math
from dataclasses import dataclass, replace
from typing import final

import numpy as np

from zero_nb.config import UsageError
from zero_nb.core.precision import FLOAT32, get_format

__all__ = [
    "WEIGHT",
    "Fit",
    "Incoming",
    "check_at_rest",
    "check_fits",
    "describe",
    "kinds_of",
    "load_state_dict",
    "owned_parts",
    "owned_pieces",
    "state_dict",
    "together",
    "whole_tensors",
]

WEIGHT = "weight"
_OPTIM = "optim/"
_FOR_ALL_GROUPS = ("nesterov",)  # options of a rule that no group can set
_SHOWN = 5  # differences an error lists before it counts the rest


# --- what there is -----------------------------------------------------------------------------


def describe(optimizer):
    """Return everything of a run's state but its tensors, as JSON can hold it.

    Parameters
    ----------
    optimizer : ZeROOptimizer

    Returns
    -------
    dict
        Where it was trained (``stage``, ``world_size``, ``precision``, ``units``), the ``rule``
        and its ``groups`` with all their options, ``lr``, ``steps_done``, ``skipped_steps``,
        ``loss_scale``, and ``parameters``: name to shape, dtype of the stored weight, whether it
        is trained, the number of its updates, and the other names tied to it.
    """
    rule, scaler = optimizer.rule, optimizer.scaler
    unit_of = {name: unit for unit in optimizer.units for name in unit.layout.names}
    moments = next((list(unit.optim.moments) for unit in optimizer.trainable_units), [])
    return {
        "stage": int(optimizer.stage.number),
        "world_size": optimizer.world.size,
        "precision": optimizer.recipe.name,
        "rule": {
            "name": type(rule.rule).__name__,
            "moments": moments,
            "options": _plain(rule.rule.options),
        },
        "groups": [
            {"names": list(group.names), "options": _group_options(rule, group)}
            for group in rule.groups
        ],
        "lr": float(optimizer.lr) if rule.groups else None,
        "lr_factor": float(rule.lr_factor),
        "steps_done": optimizer.steps_done,
        "skipped_steps": optimizer.skipped_steps,
        "loss_scale": None if scaler is None else scaler.state_dict(),
        "parameters": {
            name: _describe_parameter(optimizer, unit_of[name], name)
            for name in optimizer.names
            if name not in optimizer.aliases
        },
        "units": [
            {
                "name": unit.name,
                "parameters": list(unit.layout.names),
                "format": unit.recipe.param.name,
                "padded_numel": unit.layout.padded_numel,
            }
            for unit in optimizer.units
        ],
    }


def _describe_parameter(optimizer, unit, name):
    """Describe one parameter; see `describe`."""
    return {
        "shape": list(unit.layout.shapes[unit.layout.names.index(name)]),
        "dtype": _stored_weight(unit)[1].name,
        "trainable": unit.trainable,
        "updates": optimizer.rule.steps.get(name, 0),
        "tied": [alias for alias, first in optimizer.aliases.items() if first == name],
    }


def _group_options(rule, group):
    """Return a group's options, the rule's own filled in, without the schedule's factor."""
    merged = rule.rule.options | group.options
    return _plain({key: value for key, value in merged.items() if key not in _FOR_ALL_GROUPS})


def _plain(options):
    """Return options as JSON gives them back: NumPy's numbers as Python's, tuples as lists."""

    def plain(value):
        if isinstance(value, np.generic):
            return value.item()
        return [plain(part) for part in value] if isinstance(value, tuple | list) else value

    return {name: plain(value) for name, value in options.items()}


def kinds_of(described):
    """Return the kinds of pieces a trained parameter has; a frozen one has the first only."""
    return (WEIGHT, *(_OPTIM + moment for moment in described["rule"]["moments"]))


def check_at_rest(optimizer):
    """Refuse to take a run's state between a backward pass and its step."""
    batches_held = optimizer.accumulation.batches_held
    if any(unit.grad is not None or batches_held(unit) for unit in optimizer.trainable_units):
        raise UsageError(
            "gradients are held, and they are no part of the saved state; save after step(), or "
            "drop them with zero_grad() first"
        )


def _stored_weight(unit):
    """Return each rank's own slice of the weights as they are stored, (R, S), and its format."""
    if unit.optim.master is not None:
        return unit.own(unit.optim.master), FLOAT32
    return unit.own_param, unit.recipe.param


def _stored(unit):
    """Yield (kind, own slices (R, S), format) of everything to be kept of a unit."""
    yield WEIGHT, *_stored_weight(unit)
    for moment, array_RX in unit.optim.moments.items():
        yield _OPTIM + moment, unit.own(array_RX), FLOAT32


# --- out ---------------------------------------------------------------------------------------


def owned_parts(optimizer, rank):
    """Return what a rank owns: a `ParameterPartition` for each parameter it has a part of."""
    return [part for unit in optimizer.units for part in unit.partitions(rank) if part.length]


def owned_pieces(optimizer, row):
    """Yield the pieces that hosted rank number `row` owns, see [Note: pieces].

    Yields
    ------
    kind, name : str
    values : ndarray, 1-D
        A view: float32, or the bits of a frozen 16-bit parameter.
    fmt : Format
    """
    stored = {unit.name: list(_stored(unit)) for unit in optimizer.units}
    for part in owned_parts(optimizer, optimizer.world.ranks[row]):
        for kind, own_RS, fmt in stored[part.unit.name]:
            yield kind, part.name, part.of(own_RS), fmt


def whole_tensors(optimizer):
    """Yield the whole tensors, gathered from their owners and booked as purpose ``"other"``.

    Yields
    ------
    kind, name : str
    tensor : ndarray
        A copy in the parameter's shape, the same on every rank.
    fmt : Format
    """
    for unit in optimizer.units:
        for kind, own_RS, fmt in _stored(unit):
            full_RF = optimizer.world.all_gather(
                np.ascontiguousarray(own_RS), purpose="other", fmt=fmt, label=unit.name
            )
            for name in unit.layout.names:
                yield kind, name, unit.layout.view(full_RF[0], name).copy(), fmt


def state_dict(optimizer):
    """Return a run's state with whole tensors; see `ZeROOptimizer.state_dict`."""
    check_at_rest(optimizer)
    state = describe(optimizer) | {"weights": {}, "moments": {}}
    for kind, name, tensor, _ in whole_tensors(optimizer):
        if kind == WEIGHT:
            state["weights"][name] = tensor
        else:
            state["moments"].setdefault(kind.removeprefix(_OPTIM), {})[name] = tensor
    return state


# --- does it fit -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fit:
    """How a described state becomes that of an optimizer.

    Attributes
    ----------
    described : dict
        From `describe`.
    name_of : dict of str to str
        A parameter's name there to its name here: of tied names another may come first.
    options : tuple of dict
        Of each group here.
    """

    described: dict
    name_of: dict
    options: tuple


def check_fits(optimizer, described):
    """Check that a state can become an optimizer's, before anything is changed.

    Stage, world size, units and the order of parameters and groups may differ. So may the
    precision: weights are stored in float32; only a frozen parameter's bits are no other 16-bit
    format's.

    Parameters
    ----------
    optimizer : ZeROOptimizer
    described : dict
        From `describe`.

    Returns
    -------
    Fit

    Raises
    ------
    UsageError
        Listing what differs: names, ties, shapes, what is trained, the rule, its groups.
    """
    try:
        return _check_fits(optimizer, described)
    except (AttributeError, KeyError, TypeError) as error:
        raise UsageError(
            f"this is not the state of a ZeROOptimizer: {type(error).__name__} {error}"
        ) from error


def _check_fits(optimizer, theirs):
    """See `check_fits`; a malformed description raises what it raises."""
    ours = describe(optimizer)
    name_of, wrong = _match_names(ours["parameters"], theirs["parameters"])
    for there, here in name_of.items():
        wrong += _compare_parameter(optimizer, here, theirs["parameters"][there])
    wrong += _compare_rule(ours["rule"], theirs["rule"])
    options = ()
    if not wrong:
        options, wrong = _match_groups(optimizer.rule, theirs["groups"], name_of)
    if wrong:
        more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise UsageError(
            f"the saved state does not fit this optimizer: {'; '.join(wrong[:_SHOWN])}{more}"
        )
    _check_counts(theirs)
    return Fit(theirs, name_of, options)


def _match_names(ours, theirs):
    """Map their names to ours by the whole sets of tied names; return what has no counterpart."""

    def tied_sets(parameters):
        return {frozenset((name, *p["tied"])): name for name, p in parameters.items()}

    here, there = tied_sets(ours), tied_sets(theirs)
    names_here, names_there = (frozenset().union(*sets) for sets in (here, there))
    wrong = [f"{name!r} is not in the saved state" for name in sorted(names_here - names_there)]
    wrong += [f"there is no {name!r} here" for name in sorted(names_there - names_here)]
    if not wrong:
        wrong = [
            f"{' = '.join(sorted(names))} is one parameter here, tied otherwise when it was saved"
            for names in here
            if names not in there
        ]
    return {name: here[names] for names, name in there.items() if names in here}, wrong


def _compare_parameter(optimizer, name, saved):
    """Return how a parameter differs from its counterpart in the saved state."""
    unit = next(unit for unit in optimizer.units if name in unit.layout.names)
    shape, fmt = unit.layout.shapes[unit.layout.names.index(name)], unit.recipe.param
    if tuple(saved["shape"]) != tuple(shape):
        return [f"{name!r} has shape {tuple(shape)} here, {tuple(saved['shape'])} there"]
    if saved["trainable"] != unit.trainable:
        states = {True: "trained", False: "frozen"}
        return [f"{name!r} is {states[unit.trainable]} here, {states[saved['trainable']]} there"]
    plain = FLOAT32.name
    if saved["dtype"] != plain and (unit.trainable or fmt.name not in (plain, saved["dtype"])):
        return [f"{name!r} is stored as {fmt.name} here, {saved['dtype']} there"]
    return []


def _compare_rule(ours, theirs):
    """Return how the rules differ in what a saved state cannot bring along."""
    if sorted(ours["moments"]) != sorted(theirs["moments"]) or ours["name"] != theirs["name"]:
        mine, saved = (
            f"{rule['name']} ({', '.join(rule['moments']) or 'no state'})"
            for rule in (ours, theirs)
        )
        return [f"the rule is {mine} here, {saved} there"]
    return [
        f"{name} is {ours['options'][name]} here, {theirs['options'][name]} there"
        for name in _FOR_ALL_GROUPS
        if name in ours["options"] and ours["options"][name] != theirs["options"][name]
    ]


def _match_groups(rule, saved_groups, name_of):
    """Return the saved options of each group here, looked up by name, and what is wrong.

    Groups may come in another order or be cut in more groups; what had different options when
    it was saved cannot be one group here.
    """
    saved = {}
    for group in saved_groups:
        for name in group["names"]:
            saved[name_of.get(name, name)] = group["options"]
    options, wrong = [], []
    for index, group in enumerate(rule.groups):
        found = [saved[name] for name in group.names if name in saved]
        if any(other != found[0] for other in found[1:]):
            wrong.append(f"group {index} joins parameters that had different options")
        chosen = found[0] if found else _group_options(rule, group)
        defaults = rule.rule.options
        if chosen.keys() - defaults.keys():
            wrong.append(f"group {index} has options that {type(rule.rule).__name__} has not")
            continue
        options.append(
            {
                name: tuple(value) if isinstance(defaults[name], tuple) else value
                for name, value in chosen.items()
            }
        )
        replace(rule.rule, **options[-1])  # checks the values
    return tuple(options), wrong


def _check_counts(described):
    """Refuse counts that are none."""
    counts = {name: described[name] for name in ("steps_done", "skipped_steps")}
    counts |= {f"updates of {n}": p["updates"] for n, p in described["parameters"].items()}
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise UsageError(f"{name} must be a whole number of at least 0, got {value!r}")
    scale = described["loss_scale"]
    if scale is not None and not (math.isfinite(scale["scale"]) and scale["scale"] > 0):
        raise UsageError(f"a loss scale must be finite and above 0, got {scale['scale']!r}")
    if not math.isfinite(described["lr_factor"]):
        raise UsageError(f"lr_factor must be finite, got {described['lr_factor']!r}")


# --- in ----------------------------------------------------------------------------------------


@final
class Incoming:
    """Pieces on their way in: laid out for the hosted ranks, put in place all at once.

    Parameters
    ----------
    optimizer : ZeROOptimizer
    fit : Fit
    """

    def __init__(self, optimizer, fit):
        self._optimizer, self._fit = optimizer, fit
        self._where = {
            name: (unit, unit.layout.offsets[index])
            for unit in optimizer.units
            for index, name in enumerate(unit.layout.names)
        }
        self._arrays, self._missing = {}, {}
        for unit in optimizer.units:
            spans = [span for rank in optimizer.world.ranks for span in unit.layout.spans(rank)]
            owned = sum(stop - start for start, stop, _ in spans)
            for kind, own_RS, _ in _stored(unit):
                self._arrays[unit.name, kind] = np.zeros(own_RS.shape, own_RS.dtype)
                self._missing[unit.name, kind] = owned

    def _overlap(self, name, start, stop):
        """Return the unit, and the flat positions of a stretch that the hosted ranks own."""
        unit, offset = self._where[self._fit.name_of[name]]
        ranks, shard = self._optimizer.world.ranks, unit.layout.shard_numel
        # Hosted ranks are consecutive: their shards are one stretch of the flat_param.
        base = ranks[0] * shard
        low, high = max(offset + start, base), min(offset + stop, base + len(ranks) * shard)
        return unit, offset, base, low, high

    def wants(self, name, start, stop):
        """Whether a hosted rank owns some of elements start ... stop of a saved parameter."""
        *_, low, high = self._overlap(name, start, stop)
        return low < high

    def put(self, kind, name, start, values, fmt):
        """Take what the hosted ranks own of a piece.

        Parameters
        ----------
        kind, name : str
            The name when it was saved.
        start : int
            Where the piece starts within the parameter.
        values : ndarray, 1-D
        fmt : Format
            Of `values`.
        """
        unit, offset, base, low, high = self._overlap(name, start, start + values.size)
        if low >= high:
            return
        part = values[low - offset - start : high - offset - start]
        flat = self._arrays[unit.name, kind].reshape(-1)
        flat[low - base : high - base] = _convert(part, fmt, unit, kind)
        self._missing[unit.name, kind] -= high - low

    @property
    def complete(self):
        """Whether every element that the hosted ranks own has come, once (bool)."""
        return not any(self._missing.values())

    def commit(self):
        """Make it the optimizer's state, on all ranks; gradients held are dropped."""
        optimizer, described = self._optimizer, self._fit.described
        optimizer.zero_grad()
        for unit in optimizer.units:
            optimizer.reshard(unit)  # what was gathered is of yesterday
            self._place(unit)
        rule = optimizer.rule
        for there, here in self._fit.name_of.items():
            if here in rule.steps:
                rule.steps[here] = described["parameters"][there]["updates"]
        for group, options in zip(rule.groups, self._fit.options, strict=True):
            group.options.clear()
            group.options.update(options)
        rule.lr_factor = described["lr_factor"]
        optimizer.steps_done = described["steps_done"]
        optimizer.skipped_steps = described["skipped_steps"]
        if optimizer.scaler is not None and described["loss_scale"] is not None:
            optimizer.scaler.load_state_dict(described["loss_scale"])

    def _place(self, unit):
        """Fill a unit's own slices, and from them whatever is replicated."""
        weight_RS = self._arrays[unit.name, WEIGHT]
        param_RS = weight_RS
        if unit.optim.master is not None:
            self._spread(unit, unit.optim.master, weight_RS, FLOAT32)
            param_RS = unit.recipe.param.round(weight_RS)
        self._spread(unit, unit.param, param_RS, unit.recipe.param)
        for moment, array_RX in unit.optim.moments.items():
            self._spread(unit, array_RX, self._arrays[unit.name, _OPTIM + moment], FLOAT32)

    def _spread(self, unit, array_RX, own_RS, fmt):
        """Write own slices, not their padding; of a replicated array every rank gets all."""
        own = unit.own(array_RX)
        for row, rank in enumerate(self._optimizer.world.ranks):
            real = slice(0, max(0, unit.layout.numel - rank * unit.layout.shard_numel))
            own[row, real] = own_RS[row, real]
        if array_RX.shape[1] != unit.layout.shard_numel:
            self._optimizer.world.all_gather(
                own, out=array_RX, purpose="other", fmt=fmt, label=unit.name
            )


def _convert(values, fmt, unit, kind):
    """Return stored values as the unit keeps them: a frozen 16-bit weight as bits."""
    wanted = _stored_weight(unit)[1] if kind == WEIGHT else FLOAT32
    if fmt is wanted:
        return values
    return wanted.round(values) if fmt is FLOAT32 else fmt.widen(values)


def together(world, what, work):
    """Do some work in every process; if it fails in one, it fails in all.

    Parameters
    ----------
    world : World
    what : str
        For the error of those whose own work went well.
    work : callable
        Without collectives.

    Returns
    -------
    object
        What `work` returned here.

    Raises
    ------
    Exception
        What `work` raised here.
    UsageError
        If it failed in another process.
    """
    result = error = None
    try:
        result = work()
    except Exception as caught:
        error = caught
    failed_R1 = np.full((world.hosted, 1), error is not None, np.int64)
    failed_W = world.all_gather_scalars(failed_R1, purpose="other", label="agree")[:, 0]
    if error is not None:
        raise error
    if failed_W.any():
        raise UsageError(
            f"{what} failed in the process of rank {int(failed_W.argmax())}, which says why; "
            "no rank has changed anything"
        )
    return result


def load_state_dict(optimizer, state):
    """Make a run's state an optimizer's; see `ZeROOptimizer.load_state_dict`."""
    together(optimizer.world, "loading", lambda: _take(optimizer, state)).commit()


def _take(optimizer, state):
    """Check whole tensors and lay them out, changing nothing."""
    fit = check_fits(optimizer, state)
    incoming = Incoming(optimizer, fit)
    for kind in kinds_of(state):
        source = state["weights"]
        if kind != WEIGHT:
            source = state["moments"].get(kind.removeprefix(_OPTIM), {})
        for name, saved in state["parameters"].items():
            if kind == WEIGHT or saved["trainable"]:
                fmt = get_format(saved["dtype"]) if kind == WEIGHT else FLOAT32
                values = _check_tensor(kind, name, source.get(name), saved["shape"], fmt)
                incoming.put(kind, name, 0, values, fmt)
    assert incoming.complete
    return incoming


def _check_tensor(kind, name, tensor, shape, fmt):
    """Return a tensor flattened in C order, or say how it is not what it should be."""
    dtype, got = getattr(tensor, "dtype", type(tensor).__name__), np.shape(tensor)
    if dtype != fmt.dtype or got != tuple(shape):
        raise UsageError(
            f"{kind} of {name!r} must be {fmt.dtype} {tuple(shape)}, got {dtype} {got}"
        )
    return np.ascontiguousarray(tensor).reshape(-1)
