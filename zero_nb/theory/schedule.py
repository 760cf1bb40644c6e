"""One training step as a list of small instructions, written without running anything.

A schedule says what is computed, sent, waited for, held and freed, in the order in which a rank's
program does it: it can be printed, drawn and tested. `zero_nb.theory.timeline` lays it over time.
It is written from the description below and from sizes, and imports nothing of the training side,
so that what it predicts can be compared with what training measures, to the byte.

[Note: when stage 3 gathers]
The order in which units are used in a step is known (from the step before). When the program
needs a unit, and at the start of the step, it looks ahead: units next in the order that are not
gathered are sent for, while fewer than ``prefetch_bucket_size`` elements are under way and while
no more than ``max_live_parameters`` would be gathered. After its last use in a pass a unit is
dropped, unless no more than ``max_live_parameters`` are gathered and either it is not to be
resharded after forward, or its next use in the step is at most ``max_reuse_distance`` elements of
other units away. A tied unit stays from its first forward to its last backward use. A unit of at
most ``param_persistence_threshold`` parameters stays for ever and is gathered once, after the
update. In a step that records the order nothing is known ahead.

[Note: when gradients travel]
Stages 0 and 1 keep a unit's whole gradient and reduce once, at the end. Stages 2 and 3 send it
when its backward pass is over: alone, or copied into a bucket that is sent when it is full, and
at the end of the pass. With ``overlap_comm`` a message may be under way until the next one is
complete.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import final

from zero_nb.config import UsageError
from zero_nb.theory.checks import check_count, check_stage
from zero_nb.theory.memory import Recipe, get_recipe, padded_numel

__all__ = [
    "KINDS",
    "Compute",
    "Free",
    "Hold",
    "LayerWork",
    "Schedule",
    "Send",
    "StepOptions",
    "StepWork",
    "UnitSize",
    "Wait",
    "schedule",
]

KINDS = ("param", "grad", "optim", "unsharded", "bucket", "activation", "workspace")
"""What memory is held for; ``workspace`` are copies widened to float32 to compute with."""

HELD_KINDS = ("param", "grad", "optim")

# Bytes of a gradient element while it travels.
_WIRE = {"fp32": 4, "bf16": 2, "fp16": 2, "bf16-fp32-grads": 4, "bf16-both-grads": 2}

# Elements one rank sends on a ring, over those of the padded message.
_PASSES = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}


# --- what is given -------------------------------------------------------------------------------


@dataclass(frozen=True)
class UnitSize:
    """Parameters that are gathered together.

    Attributes
    ----------
    name : str
    numel : int
        Without padding.
    trainable : bool
    tied : bool
        Shared by a first and a last layer: stays gathered over the turn.
    update_s : float
        Seconds in which one rank updates all of it.
    """

    name: str
    numel: int
    trainable: bool = True
    tied: bool = False
    update_s: float = 0.0


@dataclass(frozen=True)
class LayerWork:
    """One piece of the forward and backward pass.

    Attributes
    ----------
    name : str
    units : tuple of str
        Names of the units whose parameters it needs.
    forward_s, backward_s : float
        Seconds for one micro-batch.
    kept_bytes : int
        Activations of one micro-batch kept for its backward pass.
    """

    name: str
    units: tuple[str, ...]
    forward_s: float = 0.0
    backward_s: float = 0.0
    kept_bytes: int = 0


@dataclass(frozen=True)
class StepWork:
    """What one rank computes in a step, and with what.

    Attributes
    ----------
    units : tuple of UnitSize
        In the order of the parameters.
    layers : tuple of LayerWork
        In forward order.
    input_bytes, output_bytes : int
        Of one micro-batch: the batch itself, kept to the end of the step, and the model's result,
        whose gradient takes its place.
    loss_s, rest_s : float
        Seconds between forward and backward, and beside passes and updates (once a step).
    """

    units: tuple[UnitSize, ...]
    layers: tuple[LayerWork, ...]
    input_bytes: int = 0
    output_bytes: int = 0
    loss_s: float = 0.0
    rest_s: float = 0.0

    def __post_init__(self) -> None:
        """Refuse layers without their units, and names given twice."""
        for what, names in (
            ("unit", [unit.name for unit in self.units]),
            ("layer", [layer.name for layer in self.layers]),
        ):
            twice = sorted(name for name, times in Counter(names).items() if times > 1)
            if twice:
                raise UsageError(f"every {what} needs a name of its own; twice: {', '.join(twice)}")
        known = {unit.name for unit in self.units}
        used = {name for layer in self.layers for name in layer.units}
        if used != known:
            raise UsageError(
                "layers must use exactly the units given; unknown: "
                f"{', '.join(sorted(used - known)) or 'none'}; unused: "
                f"{', '.join(sorted(known - used)) or 'none'}"
            )

    @property
    def compute_s(self) -> float:
        """Seconds of one micro-batch's passes, without loss, updates and the rest."""
        return sum(layer.forward_s + layer.backward_s for layer in self.layers)


@dataclass(frozen=True)
class StepOptions:
    """How a step is run; names as in the training engine.

    Attributes
    ----------
    stage : int
        0–3.
    world_size : int
        W.
    precision, optimizer : str
        See `zero_nb.theory.memory.get_recipe`.
    micro_batches : int
        k, passes in one step.
    prefetch_bucket_size : int
        Elements gathered ahead; 0 gathers at need.
    max_live_parameters : int, optional
        Elements that may be gathered at a time.
    max_reuse_distance : int
        Elements of other units over which a unit is kept for its next use.
    reshard_after_forward : bool or collection of str
        Whether units are dropped between forward and backward, or which of them.
    param_persistence_threshold : int
        Parameters up to which a unit stays gathered for ever.
    reduce_bucket_size : int, optional
        Elements reduced together; without it each unit's gradient travels alone.
    overlap_comm : bool
        One message of gradients may be under way while the next is made.
    recording : bool
        Whether this is the first step, which learns the order of units.
    widened : bool
        Whether 16-bit numbers are widened to float32 to compute, as NumPy needs it; booked as
        workspace. Devices that compute in 16 bits need no such copies.
    """

    stage: int
    world_size: int = 1
    precision: str = "fp32"
    optimizer: str = "adamw"
    micro_batches: int = 1
    prefetch_bucket_size: int = 0
    max_live_parameters: int | None = None
    max_reuse_distance: int = 0
    reshard_after_forward: bool | Collection[str] = True
    param_persistence_threshold: int = 0
    reduce_bucket_size: int | None = None
    overlap_comm: bool = False
    recording: bool = False
    widened: bool = False

    def __post_init__(self) -> None:
        """Check every figure."""
        object.__setattr__(self, "stage", check_stage(self.stage))
        for name in ("world_size", "micro_batches"):
            check_count(name, getattr(self, name), least=1)
        for name in ("prefetch_bucket_size", "max_reuse_distance", "param_persistence_threshold"):
            check_count(name, getattr(self, name))
        for name, least in (("max_live_parameters", 0), ("reduce_bucket_size", 1)):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name), least=least)
        if self.precision not in _WIRE:
            raise UsageError(f"precision must be one of {', '.join(_WIRE)}, got {self.precision!r}")
        get_recipe(self.precision, self.optimizer)

    @property
    def recipe(self) -> Recipe:
        """Bytes a parameter, gradient and optimizer state take."""
        return get_recipe(self.precision, self.optimizer)

    @property
    def wire_bytes(self) -> int:
        """Bytes of a gradient element while it travels."""
        return _WIRE[self.precision]

    @property
    def sum_bytes(self) -> int:
        """Bytes of a gradient element while it is held; several are added in float32."""
        return 4 if self.micro_batches > 1 else min(4, self.recipe.grad_bytes)

    @property
    def beside_bytes(self) -> int:
        """Bytes of the 16-bit gradient kept beside the float32 one, where both are."""
        return max(0, self.recipe.grad_bytes - 4)

    @property
    def writes_wide(self) -> bool:
        """Whether gradients are written in float32 workspace, and rounded to travel."""
        return self.widened and self.wire_bytes < 4


# --- what comes out ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Compute:
    """The program computes."""

    phase: str
    name: str
    seconds: float

    def __str__(self) -> str:
        return f"compute {self.name}"


@dataclass(frozen=True, slots=True)
class Send:
    """A collective is issued; it goes on by itself, one after the other on each link."""

    phase: str
    message: int
    collective: str
    purpose: str
    name: str
    numel: int
    itemsize: int
    world_size: int

    @property
    def elements_sent(self) -> int:
        """By one rank, on a ring."""
        each = self.numel // self.world_size * (self.world_size - 1)
        return _PASSES[self.collective] * each

    @property
    def bytes_sent(self) -> int:
        """By one rank, on a ring."""
        return self.elements_sent * self.itemsize

    def __str__(self) -> str:
        return f"send    {self.collective} of {self.name}, {self.numel:,} elements"


@dataclass(frozen=True, slots=True)
class Wait:
    """The program stands still until a message has arrived."""

    phase: str
    message: int
    name: str

    def __str__(self) -> str:
        return f"wait    for {self.name}"


@dataclass(frozen=True, slots=True)
class Hold:
    """Memory of one rank is taken."""

    phase: str
    kind: str
    name: str
    nbytes: int

    def __str__(self) -> str:
        return f"hold    {self.nbytes:,} bytes of {self.kind} for {self.name}"


@dataclass(frozen=True, slots=True)
class Free:
    """Memory of one rank is given back."""

    phase: str
    kind: str
    name: str
    nbytes: int

    def __str__(self) -> str:
        return f"free    {self.nbytes:,} bytes of {self.kind} for {self.name}"


Instruction = Compute | Send | Wait | Hold | Free


@dataclass(frozen=True)
class Schedule:
    """The instructions of one step; bytes and elements are one rank's.

    Attributes
    ----------
    options : StepOptions
    start_bytes : dict of str to int
        What is held when the step begins, by kind.
    instructions : tuple
        Of `Compute`, `Send`, `Wait`, `Hold` and `Free`, in program order.
    hits, misses, kept : int
        How needed units of stage 3 were served: gathered ahead, at need, or still there.
    held_bytes : dict of str to int
        Model states when all gradients are complete.
    """

    options: StepOptions
    start_bytes: dict[str, int]
    instructions: tuple[Instruction, ...]
    hits: int
    misses: int
    kept: int
    held_bytes: dict[str, int]

    def __str__(self) -> str:
        lines, before = [], None
        for each in self.instructions:
            lines.append(f"{each.phase if each.phase != before else '':<10}{each}")
            before = each.phase
        return "\n".join(lines)

    @property
    def sends(self) -> tuple[Send, ...]:
        """All messages, in the order they are issued."""
        return tuple(each for each in self.instructions if isinstance(each, Send))

    def elements_sent(self, purpose: str | None = None) -> int:
        """Elements one rank sends, of one purpose (``"param"``, ``"grad"``) or of both."""
        return sum(s.elements_sent for s in self.sends if purpose in (None, s.purpose))

    def bytes_sent(self, purpose: str | None = None) -> int:
        """Bytes one rank sends, of one purpose or of both."""
        return sum(s.bytes_sent for s in self.sends if purpose in (None, s.purpose))

    def memory(self) -> Iterator[tuple[int, dict[str, int]]]:
        """Yield what is held after each instruction that changes it: its place, bytes by kind."""
        held = dict(self.start_bytes)
        yield -1, dict(held)
        for place, each in enumerate(self.instructions):
            if isinstance(each, Hold | Free):
                held[each.kind] += each.nbytes if isinstance(each, Hold) else -each.nbytes
                yield place, dict(held)

    @property
    def largest_bytes(self) -> dict[str, int]:
        """The largest of each kind within the step, each at its own time."""
        largest = dict(self.start_bytes)
        for _, held in self.memory():
            largest = {kind: max(largest[kind], held[kind]) for kind in largest}
        return largest

    @property
    def peak_bytes(self) -> int:
        """The largest sum over all kinds within the step."""
        return max(sum(held.values()) for _, held in self.memory())


def schedule(work: StepWork, options: StepOptions) -> Schedule:
    """Write the instructions of one step.

    Parameters
    ----------
    work : StepWork
    options : StepOptions

    Returns
    -------
    Schedule

    Raises
    ------
    UsageError
        If `reshard_after_forward` names no unit.

    Examples
    --------
    >>> work = StepWork((UnitSize("a", 6),), (LayerWork("a", ("a",)),))
    >>> step = schedule(work, StepOptions(stage=3, world_size=2))
    >>> [str(send) for send in step.sends]  # doctest: +NORMALIZE_WHITESPACE
    ['send    all_gather of a, 6 elements', 'send    all_gather of a, 6 elements',
     'send    reduce_scatter of a, 6 elements']
    """
    return _Program(work, options).write()


# --- writing it ----------------------------------------------------------------------------------


@dataclass
class _Tape:
    """The instructions written so far, and what is held."""

    phase: str = "forward"
    instructions: list[Instruction] = field(default_factory=list)
    held: dict[tuple[str, str], int] = field(default_factory=dict)
    messages: int = 0

    def hold(self, kind: str, name: str, nbytes: int) -> None:
        """Take memory; nothing is written for no bytes."""
        assert (kind, name) not in self.held, (kind, name)
        self.held[kind, name] = nbytes
        if nbytes:
            self.instructions.append(Hold(self.phase, kind, name, nbytes))

    def free(self, kind: str, name: str) -> None:
        """Give memory back."""
        nbytes = self.held.pop((kind, name))
        if nbytes:
            self.instructions.append(Free(self.phase, kind, name, nbytes))

    def move(self, kind: str, to: str, name: str) -> None:
        """Go on holding the same memory under another kind."""
        nbytes = self.held[kind, name]
        self.free(kind, name)
        self.hold(to, name, nbytes)

    def compute(self, name: str, seconds: float) -> None:
        """Compute for some time."""
        self.instructions.append(Compute(self.phase, name, seconds))

    def total(self, kind: str) -> int:
        """Bytes held of one kind."""
        return sum(nbytes for (each, _), nbytes in self.held.items() if each == kind)


@final
class _Program:
    """Writes one step."""

    def __init__(self, work: StepWork, options: StepOptions) -> None:
        self.work, self.options, self.tape = work, options, _Tape()
        self.units = {unit.name: unit for unit in work.units}
        self.padded = {u.name: padded_numel(u.numel, options.world_size) for u in work.units}
        threshold = options.param_persistence_threshold
        self.persistent = {
            unit.name for unit in work.units if options.stage == 3 and unit.numel <= threshold
        }
        self.gathers = _Gathers(self)
        self.gradients = _Gradients(self)

    def users(self, name: str) -> list[int]:
        """The numbers of the layers that need a unit."""
        return [i for i, layer in enumerate(self.work.layers) if name in layer.units]

    def leaving(self, i: int, *, forward: bool) -> list[UnitSize]:
        """The units that no later layer of this pass needs; a tied one stays over the turn."""
        end = -1 if forward else 0
        return [
            unit
            for unit in (self.units[name] for name in self.work.layers[i].units)
            if self.users(unit.name)[end] == i and not (forward and unit.tied)
        ]

    def send(self, collective: str, purpose: str, name: str, numel: int, itemsize: int) -> int:
        """Issue a collective; return its number, or -1 where there is nothing to send."""
        if not numel:
            return -1
        tape = self.tape
        tape.messages += 1
        world_size = self.options.world_size
        sent = Send(
            tape.phase, tape.messages, collective, purpose, name, numel, itemsize, world_size
        )
        tape.instructions.append(sent)
        return tape.messages

    def wait(self, message: int, name: str) -> None:
        """Wait for a message."""
        if message > 0:
            self.tape.instructions.append(Wait(self.tape.phase, message, name))

    def shard_of(self, name: str) -> int:
        """Elements of one rank's slice of a unit."""
        return self.padded[name] // self.options.world_size

    def write(self) -> Schedule:
        """Write everything."""
        tape, work, options = self.tape, self.work, self.options
        start = dict.fromkeys(KINDS, 0) | self._states()
        self.gathers.look_ahead()
        for micro_batch in range(options.micro_batches):
            tape.phase = "forward"
            tape.hold("activation", f"batch {micro_batch}", work.input_bytes)
            self._forward()
            tape.compute("loss", work.loss_s)
            self._backward(first=micro_batch == 0)
        for micro_batch in range(options.micro_batches):
            tape.free("activation", f"batch {micro_batch}")
        held = {kind: start[kind] + tape.total(kind) for kind in HELD_KINDS}
        self._finish()
        served = self.gathers.served
        return Schedule(
            options, start, tuple(tape.instructions), served["hits"], served["misses"],
            served["kept"], held,
        )  # fmt: skip

    def _states(self) -> dict[str, int]:
        """Bytes of parameters and optimizer states, which stand all the time."""
        options, recipe = self.options, self.options.recipe
        states = {"param": 0, "optim": 0}
        for unit in self.work.units:
            whole, own = self.padded[unit.name], self.shard_of(unit.name)
            sharded = options.stage == 3 and unit.name not in self.persistent
            states["param"] += recipe.param_bytes * (own if sharded else whole)
            if unit.trainable:
                states["optim"] += recipe.optim_bytes * (own if options.stage else whole)
        return states

    def _forward(self) -> None:
        """Write one micro-batch's forward pass."""
        tape, work = self.tape, self.work
        for i, layer in enumerate(work.layers):
            for name in layer.units:
                self.gathers.fetch(self.units[name])
            tape.compute(layer.name, layer.forward_s)
            tape.hold("activation", layer.name, layer.kept_bytes)
            for unit in self.leaving(i, forward=True):
                self.gathers.release(unit, forward=True)
        tape.hold("activation", "output", work.output_bytes)

    def _backward(self, *, first: bool) -> None:
        """Write one micro-batch's backward pass."""
        tape, layers = self.tape, self.work.layers
        tape.phase = "backward"
        for i in reversed(range(len(layers))):
            for name in layers[i].units:
                self.gathers.fetch(self.units[name])
                self.gradients.open(name)
            tape.compute(layers[i].name, layers[i].backward_s)
            tape.free("activation", layers[i].name)
            if i == len(layers) - 1:
                tape.free("activation", "output")
            for unit in self.leaving(i, forward=False):
                self.gathers.release(unit, forward=False)
                self.gradients.complete(unit, first=first)
        self.gradients.flush()

    def _finish(self) -> None:
        """Write what follows the last backward pass: reductions, updates, gathers."""
        tape, work, options = self.tape, self.work, self.options
        trained = [unit for unit in work.units if unit.trainable]
        tape.phase = "reduce"
        if options.stage < 2:
            for unit in reversed(trained):
                self.gradients.reduce(unit.name)
        tape.phase = "step"
        tape.compute("rest", work.rest_s)
        for unit in trained:
            share = options.world_size if options.stage else 1
            tape.compute(f"update {unit.name}", unit.update_s / share)
            if options.stage in (1, 2) or unit.name in self.persistent:
                numel, itemsize = self.padded[unit.name], options.recipe.param_bytes
                message = self.send("all_gather", "param", unit.name, numel, itemsize)
                self.wait(message, unit.name)
        for kind, name in [key for key in tape.held if key[0] == "grad"]:
            tape.free(kind, name)


@final
class _Gathers:
    """When units are gathered and dropped: [Note: when stage 3 gathers]."""

    def __init__(self, program: _Program) -> None:
        self.program, self.options = program, program.options
        self.tape, self.padded = program.tape, program.padded
        self.served: Counter[str] = Counter()
        self.live: set[str] = set()
        self.at_hand: set[str] = set()
        self.under_way: dict[str, int] = {}  # unit -> message
        limit = self.options.max_live_parameters
        self.limit = math.inf if limit is None else limit
        every = {unit.name for unit in program.work.units}
        reshard = self.options.reshard_after_forward
        if not isinstance(reshard, bool) and (isinstance(reshard, str) or set(reshard) - every):
            raise UsageError(
                "reshard_after_forward must be True, False, or names of units "
                f"({', '.join(sorted(every))}); got {reshard!r}"
            )
        self.dropped_early = (every if reshard else set()) if isinstance(reshard, bool) else reshard
        self.coming = [] if self.options.recording else list(self._order())

    def _is_gathered(self, name: str) -> bool:
        """Whether a unit is cut into shards between its uses."""
        return self.options.stage == 3 and name not in self.program.persistent

    def _order(self) -> Iterator[str]:
        """The units a step needs, in order: each once a pass, a tied one once a micro-batch."""
        layers, there = self.program.work.layers, set()
        there_and_back = [(i, True) for i in range(len(layers))]
        there_and_back += [(i, False) for i in reversed(range(len(layers)))]
        for i, forward in there_and_back * self.options.micro_batches:
            for name in layers[i].units:
                if self._is_gathered(name) and name not in there:
                    there.add(name)
                    yield name
            there -= {unit.name for unit in self.program.leaving(i, forward=forward)}

    def _live_numel(self) -> int:
        """Elements gathered or on their way."""
        return sum(self.padded[name] for name in self.live)

    def _gather(self, name: str) -> int:
        """Issue the gather of a unit."""
        itemsize = self.options.recipe.param_bytes
        self.live.add(name)
        message = self.program.send("all_gather", "param", name, self.padded[name], itemsize)
        self.tape.hold("unsharded", name, itemsize * self.padded[name])
        return message

    def look_ahead(self) -> None:
        """Send for the units that come next."""
        on_the_way = sum(self.padded[name] for name in self.under_way)
        for name in self.coming:
            if on_the_way >= self.options.prefetch_bucket_size:
                break
            if name in self.live:
                continue
            if self._live_numel() + self.padded[name] > self.limit:
                break
            self.under_way[name] = self._gather(name)
            on_the_way += self.padded[name]

    def fetch(self, unit: UnitSize) -> None:
        """Have a unit at hand to compute with."""
        name = unit.name
        if name in self.at_hand:
            return
        if self._is_gathered(name):
            self._serve(name)
        self.at_hand.add(name)
        if self.options.widened and self.options.recipe.param_bytes < 4:
            self.tape.hold("workspace", name, 4 * self.padded[name])

    def _serve(self, name: str) -> None:
        """Gather a unit, wait for it, or find it there; then look ahead."""
        del self.coming[:1]
        if name in self.under_way:
            self.served["hits"] += 1
            self.program.wait(self.under_way.pop(name), name)
        elif name in self.live:
            self.served["kept"] += 1
        else:
            self.served["misses"] += 1
            self.program.wait(self._gather(name), name)
        self.look_ahead()

    def release(self, unit: UnitSize, *, forward: bool) -> None:
        """Let a unit go after its last use in a pass."""
        name = unit.name
        self.at_hand.discard(name)
        if ("workspace", name) in self.tape.held:
            self.tape.free("workspace", name)
        if self._is_gathered(name) and not self._keeps(name, forward):
            self.live.discard(name)
            self.tape.free("unsharded", name)

    def _keeps(self, name: str, forward: bool) -> bool:
        """Whether a unit stays until its next use."""
        if self._live_numel() > self.limit:
            return False
        if forward and name not in self.dropped_early:
            return True
        distance = self.options.max_reuse_distance
        if not distance or name not in self.coming:
            return False
        between = self.coming[: self.coming.index(name)]
        return sum(self.padded[other] for other in between) <= distance


@final
class _Gradients:
    """How gradients reach their owners: [Note: when gradients travel]."""

    def __init__(self, program: _Program) -> None:
        self.program, self.options = program, program.options
        self.tape, self.padded = program.tape, program.padded
        size, world_size = self.options.reduce_bucket_size, self.options.world_size
        self.columns = 0  # of a bucket, seen as one row an owner
        if size is not None:
            self.columns = max(1, min(size, sum(self.padded.values())) // world_size)
        self.filling: tuple[str, int, list[str]] | None = None  # buffer, columns used, units
        self.free_buffers: list[str] = []
        self.buffers = 0
        self.in_flight: tuple[int, str, list[str]] | None = None  # message, its memory, units
        self.first = True

    def _written_in(self) -> tuple[str, int]:
        """Kind of memory and bytes an element that a backward pass writes a gradient in."""
        return ("workspace", 4) if self.options.writes_wide else ("bucket", self.options.wire_bytes)

    def open(self, name: str) -> None:
        """Make room for the gradient that a backward pass is going to write."""
        kind, itemsize = self._written_in()
        key = f"gradient of {name}"
        if (kind, key) not in self.tape.held:
            self.tape.hold(kind, key, itemsize * self.padded[name])

    def complete(self, unit: UnitSize, *, first: bool) -> None:
        """Take a unit's gradient once its backward pass is over."""
        self.first = first
        if unit.trainable and self.options.stage < 2:
            self._keep_whole(unit.name)
        elif unit.trainable and self.columns and self.padded[unit.name]:
            self._fill(unit.name)
        elif unit.trainable:
            self._send_alone(unit.name)
        kind, _ = self._written_in()
        key = f"gradient of {unit.name}"
        if (kind, key) in self.tape.held and not self._is_in_flight(key):
            self.tape.free(kind, key)

    def _is_in_flight(self, key: str) -> bool:
        """Whether a message under way is read from this memory."""
        return self.in_flight is not None and self.in_flight[1] == key

    def _book(self, name: str, numel: int) -> None:
        """Hold a gradient of the first micro-batch; later ones are added to it."""
        options = self.options
        if options.beside_bytes and ("grad", f"{name} in 16 bits") not in self.tape.held:
            self.tape.hold("grad", f"{name} in 16 bits", options.beside_bytes * numel)
        if ("grad", name) not in self.tape.held:
            self.tape.hold("grad", name, options.sum_bytes * numel)

    def _keep_whole(self, name: str) -> None:
        """Stages 0 and 1: every rank keeps what it contributes."""
        kind, itemsize = self._written_in()
        key = f"gradient of {name}"
        as_written = itemsize == self.options.sum_bytes and not self.options.beside_bytes
        if self.first and as_written:
            self.tape.move(kind, "grad", key)
            self.tape.held["grad", name] = self.tape.held.pop(("grad", key))
        else:
            self._book(name, self.padded[name])

    def reduce(self, name: str) -> None:
        """Stages 0 and 1: reduce what was kept, once."""
        tape, options, numel = self.tape, self.options, self.padded[name]
        rounded = options.wire_bytes < options.sum_bytes
        if rounded:
            tape.hold("bucket", name, options.wire_bytes * numel)
        collective = "reduce_scatter" if options.stage else "all_reduce"
        message = self.program.send(collective, "grad", name, numel, options.wire_bytes)
        self.program.wait(message, name)
        if options.stage:
            tape.hold("grad", f"{name} reduced", options.wire_bytes * self.program.shard_of(name))
            tape.free("grad", name)
            if rounded:
                tape.free("bucket", name)
        elif rounded:
            whole = tape.held.pop(("grad", name))
            tape.move("bucket", "grad", name)
            tape.held["grad", f"{name} before"] = whole
            tape.free("grad", f"{name} before")

    def _send_alone(self, name: str) -> None:
        """Send one unit's gradient from where it lies."""
        key = f"gradient of {name}"
        if self.options.writes_wide:
            self.tape.hold("bucket", f"rounded {key}", self.options.wire_bytes * self.padded[name])
            key = f"rounded {key}"
        self._send(key, name, self.padded[name], [name])

    def _send(self, memory: str, name: str, numel: int, units: list[str]) -> None:
        """Send a message once the one before has arrived."""
        self._arrive()
        message = self.program.send("reduce_scatter", "grad", name, numel, self.options.wire_bytes)
        self.in_flight = (message, memory, units)
        if not self.options.overlap_comm:
            self._arrive()

    def _arrive(self) -> None:
        """Wait for the message under way: owners hold their part, its memory is free again."""
        if self.in_flight is None:
            return
        message, memory, units = self.in_flight
        self.in_flight = None
        self.program.wait(message, memory)
        for name in dict.fromkeys(units):
            self._book(name, self.program.shard_of(name))
        if memory.startswith("bucket"):
            self.free_buffers.append(memory)
        else:
            self.tape.free("bucket", memory)

    def _fill(self, name: str) -> None:
        """Copy a gradient into buckets, sending each that is full."""
        left = self.program.shard_of(name)
        while left:
            buffer, used, units = self._open_bucket()
            count = min(self.columns - used, left)
            self._round(name, count)
            self.filling = (buffer, used + count, [*units, name])
            left -= count
            if used + count == self.columns:
                self._send_bucket()

    def _open_bucket(self) -> tuple[str, int, list[str]]:
        """The bucket being filled, a free one, or a new one."""
        if self.filling is None:
            if self.free_buffers:
                buffer = self.free_buffers.pop()
            else:
                self.buffers += 1
                buffer = f"bucket {self.buffers}"
                numel = self.columns * self.options.world_size
                self.tape.hold("bucket", buffer, self.options.wire_bytes * numel)
            self.filling = (buffer, 0, [])
        return self.filling

    def _round(self, name: str, columns: int) -> None:
        """Copies made while columns of a float32 gradient are rounded into a bucket."""
        if self.options.writes_wide:
            numel = columns * self.options.world_size
            self.tape.hold("workspace", f"part of {name}", 4 * numel)
            self.tape.hold("workspace", f"rounded part of {name}", self.options.wire_bytes * numel)
            self.tape.free("workspace", f"part of {name}")
            self.tape.free("workspace", f"rounded part of {name}")

    def _send_bucket(self) -> None:
        """Send what is in the bucket."""
        buffer, used, units = self.filling
        self.filling = None
        self._send(buffer, "bucket", used * self.options.world_size, units)

    def flush(self) -> None:
        """Send what is left at the end of a backward pass and give all buffers back."""
        if self.filling is not None:
            self._send_bucket()
        self._arrive()
        while self.free_buffers:
            self.tape.free("bucket", self.free_buffers.pop())
