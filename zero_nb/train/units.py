"""Units: which parameters are gathered together, and what each rank holds of them.

Shape suffixes: R ranks hosted here, F padded flat length of a unit, S = F // world_size,
X either F or S.

[Note: a unit is one flat_param]
The parameters of a unit lie end to end in one flat buffer, padded to a multiple of world_size
(FSDP's FlatParameter, DeepSpeed's flat groups). Rank r owns columns [r*S, (r+1)*S). One buffer
has one storage format and is trained or frozen as a whole; a wish that mixes them becomes
several units that are gathered one after the other.
"""

from dataclasses import dataclass, field
from typing import final

import numpy as np

from zero_nb.config import UsageError
from zero_nb.core import flat
from zero_nb.core.partition import PartitionInfo
from zero_nb.core.precision import FLOAT32

__all__ = ["OptimState", "ParameterPartition", "Unit", "ZeROState", "group_by_unit"]


@dataclass(frozen=True)
class OptimState:
    """What the optimizer keeps for the elements that each hosted rank updates.

    Attributes
    ----------
    width : int
        Columns of every array here: F at stage 0, S from stage 1 on.
    master : ndarray (R, width) float32, or None
        The unrounded parameters; None in fp32, where the parameters are updated in place.
    moments : dict of str to ndarray (R, width) float32
        ``exp_avg`` and ``exp_avg_sq`` for Adam, ``momentum_buffer`` for SGD with momentum.
    """

    width: int
    master: np.ndarray | None
    moments: dict = field(default_factory=dict)

    @classmethod
    def like(cls, owned_RX, moment_names, *, master):
        """Start from the elements each rank updates: a copy as master, moments zero.

        Parameters
        ----------
        owned_RX : ndarray, shape (R, X), float32
        moment_names : sequence of str
        master : bool
            Whether to keep an unrounded copy.
        """
        moments = {name: np.zeros(owned_RX.shape, np.float32) for name in moment_names}
        return cls(owned_RX.shape[1], owned_RX.copy() if master else None, moments)

    def arrays(self):
        """Every array kept, by name, the master first."""
        master = {} if self.master is None else {"master": self.master}
        return master | self.moments


@final
class ZeROState:
    """What the hosted ranks hold of one flat_param; every assignment is booked in the ledger.

    Parameters
    ----------
    ledger : Ledger
    label : str
        The unit's name.

    Attributes
    ----------
    param : ndarray (R, F) or (R, S)
        The working parameters in the recipe's format; sharded at stage 3.
    grad : ndarray (R, F) or (R, S), or None
        The gradient held between backward and step; sharded from stage 2 on.
    optim : OptimState
        Sharded from stage 1 on.
    low_grad : ndarray, or None
        The 16-bit gradient of the last micro-batch, in recipes that keep both.
    unsharded : ndarray (R, F), or None
        Stage 3: the gathered parameters while the unit computes.
    """

    __slots__ = ("_grad", "_label", "_ledger", "_low_grad", "_optim", "_param", "_unsharded")

    def __init__(self, ledger, label):
        self._ledger, self._label = ledger, label
        self._param = self._grad = self._low_grad = self._optim = self._unsharded = None

    def _booked(self, array, kind):
        """Register `array` unless there is none."""
        if array is not None:
            self._ledger.register(array, kind, self._label)
        return array

    @property
    def param(self):
        """The working parameters."""
        return self._param

    @param.setter
    def param(self, array):
        self._param = self._booked(array, "param")

    @property
    def grad(self):
        """The gradient held, or None."""
        return self._grad

    @grad.setter
    def grad(self, array):
        self._grad = self._booked(array, "grad")

    @property
    def low_grad(self):
        """The 16-bit gradient kept beside the float32 one, or None."""
        return self._low_grad

    @low_grad.setter
    def low_grad(self, array):
        self._low_grad = self._booked(array, "grad")

    @property
    def unsharded(self):
        """The gathered parameters, or None."""
        return self._unsharded

    @unsharded.setter
    def unsharded(self, array):
        self._unsharded = self._booked(array, "unsharded")

    @property
    def optim(self):
        """The optimizer's arrays."""
        return self._optim

    @optim.setter
    def optim(self, state):
        for array in state.arrays().values():
            self._booked(array, "optim")
        self._optim = state


@dataclass(frozen=True)
class ParameterPartition:
    """A parameter's place in a flat_param, seen from one rank.

    Attributes
    ----------
    name : str
    shape : tuple of int
        Of the whole parameter.
    rank : int
    offset : int
        First element of this rank's part within the parameter, flattened in C order.
    length : int
        Elements of the parameter this rank owns; 0 if it owns none.
    shard_offset : int
        Where that part starts within the rank's shard.
    unit : Unit
    """

    name: str
    shape: tuple
    rank: int
    offset: int
    length: int
    shard_offset: int
    unit: "Unit"

    @property
    def stop(self):
        """One past the last element of this rank's part within the parameter."""
        return self.offset + self.length

    @property
    def padding(self):
        """Elements of the rank's shard that belong to no parameter; they come last."""
        return self.unit.info(self.rank).padding

    @property
    def dtype(self):
        """Name of the format the working parameter is stored in."""
        return self.unit.recipe.param.name

    def of(self, own_RS):
        """Return this rank's part of the own slices (R, S) of some array of the unit: a view."""
        row = self.unit.world.ranks.index(self.rank)
        return own_RS[row, self.shard_offset : self.shard_offset + self.length]

    def values(self):
        """Return this rank's part of the float32 values the optimizer updates.

        A view where the optimizer updates them; of a frozen 16-bit unit a widened copy.
        """
        return self.of(self.unit.owned_values())


@final
class Unit:
    """The parameters gathered together, and the rows each hosted rank holds of them.

    Parameters
    ----------
    name : str
    layout : FlatLayout
        Names and shapes of the parameters in the flat buffer.
    recipe : Recipe
    world : World
    ledger : Ledger
    trainable : bool, default True
        A frozen unit has parameters only: it is gathered, never reduced or updated.
    persistent : bool, default False
        At stage 3, whether the unit stays gathered.
    micro_batches : int, default 1
        Gradients that make up one step.
    aliases : mapping of str to str, optional
        Other names of tied parameters: alias to the name in `layout`.

    Attributes
    ----------
    state : ZeROState
    batches_held : int
        Micro-batches whose gradient is held.
    """

    def __init__(
        self,
        name,
        layout,
        recipe,
        world,
        ledger,
        *,
        trainable=True,
        persistent=False,
        micro_batches=1,
        aliases=None,
    ):
        self.name, self.layout, self.recipe = name, layout, recipe
        self.world, self.ledger = world, ledger
        self.trainable, self.persistent = trainable, persistent
        self.micro_batches = micro_batches
        self.aliases = dict(aliases or {})
        self.batches_held = 0
        self.state = ZeROState(ledger, name)
        self._tables = {}  # every_replica -> (what it depends on, the table last built)

    def __repr__(self):
        return (
            f"Unit({self.name!r}, numel={self.layout.numel}, padding={self.layout.padding}, "
            f"world_size={self.world.size})"
        )

    # The rows of `state`, spelled short: the stages read like the paper's symbols.

    @property
    def param(self):
        """Working parameters, (R, F) or (R, S)."""
        return self.state.param

    @param.setter
    def param(self, array):
        self.state.param = array

    @property
    def grad(self):
        """Gradient held, (R, F) or (R, S), or None."""
        return self.state.grad

    @grad.setter
    def grad(self, array):
        self.state.grad = array

    @property
    def optim(self):
        """The optimizer's arrays."""
        return self.state.optim

    @optim.setter
    def optim(self, state):
        self.state.optim = state

    @property
    def unsharded(self):
        """Gathered parameters of stage 3, (R, F), or None."""
        return self.state.unsharded

    @unsharded.setter
    def unsharded(self, array):
        self.state.unsharded = array

    # --- own slices ----------------------------------------------------------------------

    def own(self, array_RX):
        """Return each rank's own slice of `array_RX` as (R, S): a view, or the array itself."""
        if array_RX.shape[1] == self.layout.shard_numel:
            return array_RX
        return self.world.own_shard(array_RX)

    @property
    def own_param(self):
        """Each rank's own slice of the working parameters, (R, S)."""
        return self.own(self.param)

    def owned_values(self):
        """Each rank's own slice of the float32 parameters, (R, S): the master if there is one.

        A view of what the optimizer updates; a widened copy for a frozen 16-bit unit.
        """
        if self.optim.master is not None:
            return self.own(self.optim.master)
        if self.recipe.param is FLOAT32:
            return self.own_param
        return self.recipe.param.widen(self.own_param.copy())

    def fit(self, full_RF, array_RX):
        """Return the part of `full_RF` that `array_RX` holds: all of it, or own slices."""
        return full_RF if array_RX.shape[1] == full_RF.shape[1] else self.own(full_RF)

    # --- gradients -----------------------------------------------------------------------

    @property
    def held_format(self):
        """The format gradients are held in: float32 as soon as several are added."""
        return FLOAT32 if self.micro_batches > 1 else self.recipe.grad

    @property
    def grad_format(self):
        """The format of `grad` as it stands."""
        return FLOAT32 if self.grad.dtype == np.float32 else self.recipe.wire

    def to_wire(self, grad_RF):
        """Round a float32 gradient to the format it travels in; as it is if it has that."""
        if grad_RF.dtype == self.recipe.wire.dtype:
            return grad_RF
        return self.ledger.register(self.recipe.wire.round(grad_RF), "bucket", self.name)

    def accumulate(self, grad_RX):
        """Add the gradient of one micro-batch, (R, F) or (R, S), to what is held.

        Parameters
        ----------
        grad_RX : ndarray
            float32, or in the format of the wire. The first one is kept as it is where its
            format allows; no copy is made.

        Raises
        ------
        UsageError
            If the gradients of all micro-batches are held already.
        """
        self.check_room()
        first = self.batches_held == 0
        if first and not self.recipe.both_grads and grad_RX.dtype == self.held_format.dtype:
            self.grad = grad_RX
        else:
            self._add(grad_RX, slice(None), first=first)
        self.batches_held += 1

    def accumulate_columns(self, grad_Rn, start):
        """Add reduced columns start, start + 1, ... of the own shard; a bucket's part of it.

        The micro-batch counts as held once the shard's last column has come.
        """
        self.check_room()
        columns = slice(start, start + grad_Rn.shape[1])
        self._add(grad_Rn, columns, first=self.batches_held == 0)
        if columns.stop == self.layout.shard_numel:
            self.batches_held += 1

    def check_room(self):
        """Refuse a gradient more than the step is made of."""
        if self.batches_held >= self.micro_batches:
            raise UsageError(
                f"unit {self.name!r} already holds a gradient of every micro-batch of this step; "
                "call step() or zero_grad() first"
            )

    def _add(self, grad_Rn, columns, *, first):
        """Store (first micro-batch) or add some columns; allocate what is missing."""
        width = grad_Rn.shape[1] if columns == slice(None) else self.layout.shard_numel
        shape = (self.world.hosted, width)
        if self.recipe.both_grads:
            low = self.state.low_grad
            if low is None or low.shape != shape:
                self.state.low_grad = np.empty(shape, self.recipe.wire.dtype)
            grad_Rn = self._as(grad_Rn, self.recipe.wire)
            self.state.low_grad[:, columns] = grad_Rn
        if self.grad is None:
            self.grad = np.empty(shape, self.held_format.dtype)
        held = self._as(grad_Rn, self.held_format)
        if first:
            self.grad[:, columns] = held
        else:
            with np.errstate(over="ignore", invalid="ignore"):  # the finite check sees to it
                self.grad[:, columns] += held

    def _as(self, grad_Rn, fmt):
        """Return a gradient, float32 or on the wire, in a format."""
        if grad_Rn.dtype == fmt.dtype:
            return grad_Rn
        if fmt is FLOAT32:
            return self.recipe.wire.widen(grad_Rn)
        return fmt.round(grad_Rn)

    def as_added(self, grad_RF):
        """Return a micro-batch's float32 gradient as it is added to others.

        A recipe that keeps both gradients adds the 16-bit one, widened.
        """
        if not self.recipe.both_grads:
            return grad_RF
        return self.recipe.wire.widen(self.recipe.wire.round(grad_RF))

    def widen_held(self, grad_RX, fmt, micro_batches):
        """Return a reduced gradient in the format that several micro-batches are added in."""
        if fmt is FLOAT32 or micro_batches == 1:
            return grad_RX
        return fmt.widen(grad_RX)

    def drop_gradient(self):
        """Free the gradient."""
        self.grad = self.state.low_grad = None
        self.batches_held = 0

    # --- tables of runs --------------------------------------------------------------------

    def runs(self, hyper_of, *, every_replica):
        """Return the table of real elements that the optimizer or the norm visits.

        Parameters
        ----------
        hyper_of : tuple of int
            For each parameter its row of hyper-parameters, -1 to leave it out.
        every_replica : bool
            Visit all F columns of each row (what stage 0 updates), or own slices only.

        Returns
        -------
        ndarray, shape (n, 7), int64
            See `zero_nb.core.flat.run_table`. Padding is in no run.
        """
        widths = {
            "TARGET": self.param.shape[1] if self.optim.master is None else self.optim.width,
            "GRAD": self.grad.shape[1],
            "STATE": self.optim.width,
            "PARAM": self.param.shape[1],
        }
        key = (hyper_of, *widths.values())
        known_key, table = self._tables.get(every_replica, (None, None))
        if known_key != key:
            table = flat.run_table(
                self.layout,
                self.world.ranks,
                placements={
                    buffer: "full" if every_replica else self._placement(width)
                    for buffer, width in widths.items()
                },
                hyper_of=hyper_of,
                replicated=every_replica,
            )
            self._tables[every_replica] = (key, table)
        return table

    def _placement(self, width):
        """Name how a row of `width` columns holds the rank's own slice."""
        return "shard" if width == self.layout.shard_numel else "full_own"

    # --- parameters by name ----------------------------------------------------------------

    def views(self, flat_RF):
        """Return the parameters as views of a full (R, F) buffer: name -> ``(R, *shape)``.

        A tied parameter appears under each of its names.
        """
        views = {name: self.layout.view(flat_RF, name) for name in self.layout.names}
        return views | {alias: views[name] for alias, name in self.aliases.items()}

    def info(self, rank):
        """Return what `rank` owns of the flat_param, a `PartitionInfo`."""
        layout, first = self.layout, rank * self.layout.shard_numel
        pieces = tuple(
            (index, first + start - layout.offsets[index], stop - start, start)
            for start, stop, index in layout.spans(rank)
        )
        length = sum(count for _, _, count, _ in pieces)
        return PartitionInfo(rank, first, length, layout.shard_numel - length, pieces)

    def partitions(self, rank):
        """Return where each parameter's part on `rank` lies: a list of `ParameterPartition`."""
        owned = {index: place for index, *place in self.info(rank).pieces}
        return [
            ParameterPartition(name, shape, rank, *owned.get(index, (0, 0, 0)), self)
            for index, (name, shape) in enumerate(
                zip(self.layout.names, self.layout.shapes, strict=True)
            )
        ]


def group_by_unit(names, units):
    """Check a grouping of parameter names into units.

    Parameters
    ----------
    names : sequence of str
        All parameters, in parameter order.
    units : mapping of str to sequence of str
        Unit name to the parameters gathered together.

    Returns
    -------
    dict of str to tuple of str

    Raises
    ------
    UsageError
        If a parameter is missing, unknown or in two units.
    """
    grouped = {unit: tuple(members) for unit, members in units.items()}
    seen = [name for members in grouped.values() for name in members]
    unknown = sorted(set(seen) - set(names))
    missing = sorted(set(names) - set(seen))
    twice = sorted({name for name in seen if seen.count(name) > 1})
    for what, which in (("unknown", unknown), ("missing", missing), ("repeated", twice)):
        if which:
            raise UsageError(
                f"units must hold every parameter exactly once; {what}: {', '.join(which)}"
            )
    return grouped
