"""How seven implementations cut the same tensors among ranks.

The paper says that a rank keeps 1/W of a state; it does not say which elements.  Each rule here is
a fact of one implementation's code, and together with what is kept (`RULES`) it gives the bytes
that PyTorch and DeepSpeed really held, exactly: ``data/framework_state_bytes.csv`` has what was
measured in their storages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from zero_nb.config import UsageError
from zero_nb.theory.checks import check_count, name_error
from zero_nb.theory.published import read_data

__all__ = [
    "MODES",
    "RULES",
    "Cut",
    "HeldState",
    "Mode",
    "cut",
    "gpt_units",
    "held_state",
    "measured_state",
    "mlp_units",
]

RULES: dict[str, str] = {
    "flat": "the whole model flattened, W equal slices of ceil(n/W) (this project at stages 1, 2)",
    "units": "each unit flattened, W equal slices (this project at stage 3)",
    "deepspeed-1-2": "the whole model flattened, padded to a multiple of 2W "
    "(deepspeed/runtime/zero/stage_1_and_2.py, nccl_start_alignment_factor)",
    "deepspeed-3": "each tensor flattened and padded to a multiple of W "
    "(deepspeed/runtime/zero/partition_parameters.py)",
    "fsdp1": "each wrapped unit flattened, every tensor starting at a multiple of 16 bytes, padded "
    "to a multiple of W (torch/distributed/fsdp/_flat_param.py)",
    "fsdp2": "each tensor by its rows, as torch.chunk(dim=0) does: ceil(rows/W) to each rank while "
    "there are any; storage padded to the first one (docs of torch.distributed.fsdp.fully_shard)",
    "tensors": "whole tensors, largest first, each to the rank with the least so far "
    "(torch/distributed/optim/zero_redundancy_optimizer.py)",
}
"""Name of a rule: what it does, and where that can be read."""


@dataclass(frozen=True)
class Cut:
    """Who owns which elements.

    Attributes
    ----------
    rule : str
        One of `RULES`.
    stored : tuple of int
        Elements in each rank's storage, with padding.
    owned : tuple of tuple of (int, int)
        For each rank the ranges (start, stop) of real elements that it owns, in the model
        flattened tensor by tensor.
    """

    rule: str
    stored: tuple[int, ...]
    owned: tuple[tuple[tuple[int, int], ...], ...]

    @property
    def real(self) -> tuple[int, ...]:
        """Real elements of each rank."""
        return tuple(sum(stop - start for start, stop in ranges) for ranges in self.owned)


def mlp_units(*sizes: int) -> list[list[tuple[int, ...]]]:
    """Shapes of an MLP as PyTorch has them: a unit for each layer, weight (out, in) and bias.

    Parameters
    ----------
    *sizes : int
        Features of the input and of each layer.
    """
    return [[(out, size), (out,)] for size, out in zip(sizes, sizes[1:], strict=False)]


def gpt_units(vocab: int, seq: int, width: int, blocks: int) -> list[list[tuple[int, ...]]]:
    """Shapes of a GPT with an untied head as PyTorch has them: blocks, and then the rest (root)."""
    d = width
    block = [
        (d,), (d,), (3 * d, d), (3 * d,), (d, d), (d,),
        (d,), (d,), (4 * d, d), (4 * d,), (d, 4 * d), (d,),
    ]  # fmt: skip
    return [block] * blocks + [[(vocab, d), (seq, d), (d,), (d,), (vocab, d)]]


def cut(
    rule: str, units: Sequence[Sequence[tuple[int, ...]]], world_size: int, *, itemsize: int = 4
) -> Cut:
    """Cut a model's tensors among ranks.

    Parameters
    ----------
    rule : str
        One of `RULES`.
    units : sequence of sequence of tuple of int
        Shapes, grouped by what is wrapped together.
    world_size : int
    itemsize : int
        Bytes of an element while computing; FSDP1 aligns by it.

    Returns
    -------
    Cut

    Raises
    ------
    UsageError
        For an unknown rule, no tensors, or a size below 1.
    """
    if rule not in RULES:
        raise name_error("rule", rule, RULES)
    world_size = check_count("world_size", world_size, least=1)
    shapes = [tuple(shape) for unit in units for shape in unit]
    if not shapes or any(size < 1 for shape in shapes for size in shape):
        raise UsageError(f"units must hold shapes of sizes from 1 on, got {shapes!r:.60}")
    numels = [math.prod(shape) for shape in shapes]
    if rule == "fsdp2":
        return _by_rows(shapes, numels, world_size)
    if rule == "tensors":
        return _whole_tensors(numels, world_size)
    groups = {
        "flat": [numels],
        "deepspeed-1-2": [numels],
        "deepspeed-3": [[numel] for numel in numels],
    }.get(rule) or [[math.prod(shape) for shape in unit] for unit in units]
    align = 16 // itemsize if rule == "fsdp1" else 1
    multiple = 2 * world_size if rule == "deepspeed-1-2" else world_size
    return _flat_groups(rule, groups, world_size, align, multiple)


def _flat_groups(rule, groups, world_size, align, multiple):
    """Equal slices of each group of tensors laid end to end, every tensor aligned."""
    stored = [0] * world_size
    owned = [[] for _ in range(world_size)]
    base = 0  # of this group, in the model without padding
    for numels in groups:
        places, end, real = [], 0, base
        for numel in numels:
            begin = -(-end // align) * align
            places.append((begin, numel, real))
            end, real = begin + numel, real + numel
        shard = -(-end // multiple) * multiple // world_size
        for rank in range(world_size):
            stored[rank] += shard
            for begin, numel, real_begin in places:
                low = max(rank * shard, begin)
                high = min((rank + 1) * shard, begin + numel)
                if low < high:
                    owned[rank].append((real_begin + low - begin, real_begin + high - begin))
        base = real
    return Cut(rule, tuple(stored), tuple(tuple(ranges) for ranges in owned))


def _by_rows(shapes, numels, world_size):
    """Rows of each tensor: the first ranks get ceil(rows/W), later ones what is left."""
    stored, owned, base = 0, [[] for _ in range(world_size)], 0
    for shape, numel in zip(shapes, numels, strict=True):
        each = -(-shape[0] // world_size)
        row = numel // shape[0]
        stored += each * row
        for rank in range(world_size):
            low, high = min(rank * each, shape[0]), min((rank + 1) * each, shape[0])
            if low < high:
                owned[rank].append((base + low * row, base + high * row))
        base += numel
    return Cut("fsdp2", (stored,) * world_size, tuple(map(tuple, owned)))


def _whole_tensors(numels, world_size):
    """The largest tensor first, to the rank with the least so far."""
    starts = [sum(numels[:index]) for index in range(len(numels))]
    load, owned = [0] * world_size, [[] for _ in range(world_size)]
    for index in sorted(range(len(numels)), key=lambda i: -numels[i]):
        rank = load.index(min(load))
        load[rank] += numels[index]
        owned[rank].append((starts[index], starts[index] + numels[index]))
    return Cut("tensors", tuple(load), tuple(tuple(sorted(ranges)) for ranges in owned))


# --- what is kept between steps ------------------------------------------------------------------


@dataclass(frozen=True)
class Mode:
    """What an implementation keeps between two steps, with AdamW.

    Attributes
    ----------
    rule : str
        How it cuts, see `RULES`.
    whole_param : bool
        Every rank keeps all parameters.
    master : bool
        A float32 master is kept beside the parameters (DeepSpeed has one even in float32).
    param_itemsize : int or None
        Bytes of a parameter between steps; None is the format of computing.
    optim_padded : bool
        Optimizer states are stored with padding.
    """

    rule: str
    whole_param: bool
    master: bool
    param_itemsize: int | None
    optim_padded: bool


MODES: dict[str, Mode] = {
    "zero1": Mode("tensors", True, False, None, False),
    "fsdp1_s2": Mode("fsdp1", False, False, 4, False),
    "fsdp1": Mode("fsdp1", False, False, 4, False),
    "fsdp2_s2": Mode("fsdp2", False, False, 4, False),
    "fsdp2": Mode("fsdp2", False, False, 4, False),
    "ds1": Mode("deepspeed-1-2", True, True, None, True),
    "ds2": Mode("deepspeed-1-2", True, True, None, True),
    "ds3": Mode("deepspeed-3", False, True, None, True),
}
"""By the names of ``framework_state_bytes.csv``: torch's ZeroRedundancyOptimizer (zero1), FSDP1 and
FSDP2 (s2: SHARD_GRAD_OP, reshard_after_forward=False), and DeepSpeed's stages."""


@dataclass(frozen=True)
class HeldState:
    """Bytes of one rank between two steps.

    Attributes
    ----------
    param, master, optim : int
        Parameters, float32 master copy, and the two moments of AdamW.
    """

    param: int
    master: int
    optim: int


def held_state(
    mode: str, units: Sequence[Sequence[tuple[int, ...]]], world_size: int, *, bf16: bool = False
) -> tuple[HeldState, ...]:
    """Predict what each rank of an implementation keeps between two steps.

    Parameters
    ----------
    mode : str
        One of `MODES`.
    units : sequence of sequence of tuple of int
    world_size : int
    bf16 : bool
        Compute in bf16; otherwise in float32.

    Returns
    -------
    tuple of HeldState
        One for each rank.
    """
    if mode not in MODES:
        raise name_error("mode", mode, MODES)
    how = MODES[mode]
    compute = 2 if bf16 else 4
    pieces = cut(how.rule, units, world_size, itemsize=compute)
    whole = sum(math.prod(shape) for unit in units for shape in unit)
    if how.master and how.whole_param:
        whole = sum(pieces.stored)  # parameters live in the padded flat buffer
    optim = pieces.stored if how.optim_padded else pieces.real
    return tuple(
        HeldState(
            param=(whole if how.whole_param else stored) * (how.param_itemsize or compute),
            master=4 * stored if how.master else 0,
            optim=8 * kept,
        )
        for stored, kept in zip(pieces.stored, optim, strict=True)
    )


def measured_state(
    mode: str, model: str, world_size: int, *, bf16: bool = False
) -> tuple[HeldState, ...]:
    """What PyTorch or DeepSpeed really held, a `HeldState` for each rank.

    Parameters
    ----------
    mode : str
        One of `MODES`, or ``"ddp"``.
    model : {"mlp", "mlp_odd", "gpt"}
        MLPs 16-64-64-4 and 13-37-29-3; the GPT ``gpt_units(64, 16, 32, 2)``.
    world_size : {2, 4}
    bf16 : bool

    Raises
    ------
    UsageError
        Where nothing was measured.
    """
    wanted = (mode, model, str(world_size), "bf16" if bf16 else "base")
    found = [
        row
        for row in read_data("framework_state_bytes.csv")
        if (row["mode"], row["model"], row["world"], row["variant"]) == wanted
    ]
    if not found:
        raise UsageError(
            f"nothing was measured for {', '.join(wanted)}; see framework_state_bytes.csv"
        )
    return tuple(
        HeldState(*(int(row[kind]) for kind in ("param", "master", "optim"))) for row in found
    )
