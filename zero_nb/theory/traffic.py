"""Elements and bytes each rank sends in one training step.

Paper: Rajbhandari et al., arXiv:1910.02054v3, Section 7.  The paper counts Ψ for a reduce-scatter
or an all-gather of Ψ elements and 2Ψ for an all-reduce; a ring sends exactly (W − 1)/W of that per
rank (Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of
workstations"), which is what is returned here, counted with padding, as whole numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from zero_nb.config import UsageError
from zero_nb.theory.checks import check_count, check_divides, check_stage
from zero_nb.theory.memory import get_recipe

__all__ = [
    "HybridTraffic",
    "StepTraffic",
    "ZeroPlusPlus",
    "bytes_per_step",
    "deepspeed_elements_per_step",
    "elements_per_step",
    "mics_traffic",
    "offload_bytes_per_step",
    "step_traffic",
    "tensor_parallel_elements",
    "zeropp_volume",
]


@dataclass(frozen=True)
class StepTraffic:
    """What one rank sends in one optimizer step.

    Attributes
    ----------
    grad_elements, param_elements : int
        Elements sent for gradients (all-reduce, reduce-scatter) and for parameters (all-gather).
    grad_messages, param_messages : int
        Collectives issued for each.
    """

    grad_elements: int
    param_elements: int
    grad_messages: int
    param_messages: int

    @property
    def elements(self) -> int:
        """Elements of both purposes."""
        return self.grad_elements + self.param_elements

    def bytes(self, grad_itemsize: int = 2, param_itemsize: int = 2) -> int:
        """Bytes of both purposes for the given formats on the wire."""
        return self.grad_elements * grad_itemsize + self.param_elements * param_itemsize


def step_traffic(
    stage: int,
    world_size: int,
    numels: int | Iterable[int],
    *,
    micro_batches: int = 1,
    no_sync: bool = False,
    reduce_every_micro_batch: bool = False,
    gathers: int | Sequence[int] = 2,
    trainable: Sequence[bool] | None = None,
) -> StepTraffic:
    """Elements one rank sends for one optimizer step, by purpose.

    Parameters
    ----------
    stage : int or ZeROStage
        0–3.
    world_size : int
        W.  One rank sends nothing.
    numels : int or iterable of int
        Unpadded elements of each flat parameter; each is padded to a multiple of W here.
    micro_batches : int
        Gradient accumulation k: forward and backward passes in one step.
    no_sync : bool
        Stage 3 only: keep whole gradients between micro-batches and reduce once.
    reduce_every_micro_batch : bool
        Stages 0 and 1 only: reduce after each micro-batch and not once.
    gathers : int or sequence of int
        Stage 3: times a flat parameter is gathered in each micro-batch.  2 is forward and backward;
        1 where it stays gathered in between (a root unit that is tied); 0 where it persists.
    trainable : sequence of bool, optional
        Frozen flat parameters are gathered at stage 3 and never reduced.

    Returns
    -------
    StepTraffic

    Raises
    ------
    UsageError
        For counts below 1, and where an option has no meaning at the stage.

    Notes
    -----
    Per step, times Ψ(W − 1)/W (arXiv:1910.02054 Section 7.2; accumulation follows from it):

    ===== ============ ======================= ==================
    stage one          k micro-batches         option
    ===== ============ ======================= ==================
    0     2            2                       2k reducing each
    1     2            2                       k + 1 reducing each
    2     2            k + 1
    3     3            3k                      2k + 1 no_sync
    ===== ============ ======================= ==================
    """
    stage = check_stage(stage)
    world_size = check_count("world_size", world_size, least=1)
    k = check_count("micro_batches", micro_batches, least=1)
    _check_options(stage, no_sync, reduce_every_micro_batch)
    sent = [_sent(numel, world_size) for numel in _as_list(numels)]
    counts = _per_unit("gathers", gathers, len(sent))
    learns = [True] * len(sent) if trainable is None else list(trainable)
    if len(learns) != len(sent):
        raise UsageError(
            f"trainable has {len(learns)} entries, expected {len(sent)}, one per numel"
        )

    reduces = k if stage >= 2 or reduce_every_micro_batch else 1
    if no_sync:
        reduces = 1
    passes = 2 if stage == 0 else 1  # an all-reduce is a reduce-scatter and an all-gather
    grad = reduces * passes * sum(n for n, learn in zip(sent, learns, strict=True) if learn)
    grad_messages = reduces * sum(learns)
    if stage == 0:
        return StepTraffic(grad, 0, grad_messages, 0)
    if stage < 3:
        gathered = sum(n for n, learn in zip(sent, learns, strict=True) if learn)
        return StepTraffic(grad, gathered, grad_messages, sum(learns))
    gathered = k * sum(n * count for n, count in zip(sent, counts, strict=True))
    return StepTraffic(grad, gathered, grad_messages, k * sum(counts))


def elements_per_step(
    stage: int, world_size: int, numels: int | Iterable[int], **options: object
) -> int:
    """Elements one rank sends in one step: (2, 2, 2, 3)Ψ(W − 1)/W, padded and exact.

    Parameters
    ----------
    stage, world_size, numels, **options
        See `step_traffic`.

    Returns
    -------
    int

    Examples
    --------
    >>> [elements_per_step(stage, 4, 1000) for stage in range(4)]
    [1500, 1500, 1500, 2250]
    >>> [elements_per_step(stage, 4, 1000, micro_batches=3) for stage in range(4)]
    [1500, 1500, 3000, 6750]
    """
    return step_traffic(stage, world_size, numels, **options).elements


def bytes_per_step(
    stage: int,
    world_size: int,
    numels: int | Iterable[int],
    precision: str = "bf16",
    reduce_itemsize: int | None = None,
    **options: object,
) -> int:
    """Bytes one rank sends in one step.

    Parameters
    ----------
    stage, world_size, numels, **options
        See `step_traffic`.
    precision : str
        Parameters travel as stored; gradients too unless `reduce_itemsize` says otherwise.
    reduce_itemsize : int, optional
        Bytes of one gradient element on the wire.

    Returns
    -------
    int
    """
    recipe = get_recipe(precision)
    grad_itemsize = reduce_itemsize or min(recipe.grad_bytes, 4)
    traffic = step_traffic(stage, world_size, numels, **options)
    return traffic.bytes(grad_itemsize, recipe.param_bytes)


def _check_options(stage: int, no_sync: bool, reduce_every_micro_batch: bool) -> None:
    """Refuse options that mean nothing at this stage."""
    if no_sync and stage != 3:
        raise UsageError(
            f"no_sync is for stage 3, got stage {stage}: stages 0 and 1 already reduce once, and "
            "stage 2 that keeps whole gradients is stage 1"
        )
    if reduce_every_micro_batch and stage > 1:
        raise UsageError(
            f"reduce_every_micro_batch is for stages 0 and 1, got stage {stage}, "
            "which reduces every micro-batch anyway"
        )


def _sent(numel: int, world_size: int) -> int:
    """What a ring sends per rank for one reduce-scatter or all-gather of padded `numel`."""
    shard = -(-check_count("numel", numel, least=0) // world_size)
    return shard * (world_size - 1)


def _as_list(numels: int | Iterable[int]) -> list[int]:
    """One flat parameter or many."""
    return list(numels) if isinstance(numels, Iterable) else [numels]


def _per_unit(name: str, value: int | Sequence[int], units: int) -> list[int]:
    """One number for all units, or one for each."""
    values = list(value) if isinstance(value, Iterable) else [value] * units
    if len(values) != units:
        raise UsageError(f"{name} has {len(values)} entries, expected {units}, one per numel")
    return [check_count(name, entry, least=0) for entry in values]


# --- variants --------------------------------------------------------------------------------


def deepspeed_elements_per_step(
    stage: int, world_size: int, numels: int | Iterable[int], *, micro_batches: int = 1
) -> int:
    """What DeepSpeed's stages 1 and 2 really send: buckets are all-reduced, 3Ψ(W − 1)/W.

    Parameters
    ----------
    stage : int
        1 or 2; the other stages send what `elements_per_step` says.
    world_size, numels, micro_batches
        See `step_traffic`.

    Returns
    -------
    int

    Notes
    -----
    With ``reduce_scatter`` off, or for buckets that span owners, gradients are all-reduced (2Ψ)
    and parameters gathered (Ψ): deepspeed/runtime/zero/stage_1_and_2.py; the project's post of
    2020-03-17 prints 1.5 times data parallelism for it.  Stage 2 does so every micro-batch.
    """
    plain = step_traffic(stage, world_size, numels, micro_batches=micro_batches)
    reduced_twice = stage in (1, 2)
    return plain.elements + (plain.grad_elements if reduced_twice else 0)


@dataclass(frozen=True)
class HybridTraffic:
    """What one rank sends in one step when shards are kept within groups.

    Attributes
    ----------
    group_elements : int
        Inside the sharding group.
    replica_elements : int
        Between groups that hold the same shard.
    """

    group_elements: int
    replica_elements: int

    @property
    def elements(self) -> int:
        """Both together."""
        return self.group_elements + self.replica_elements


def mics_traffic(
    world_size: int,
    group_size: int,
    numels: int | Iterable[int],
    *,
    micro_batches: int = 1,
) -> HybridTraffic:
    """Stage 3 within groups, copies between them: MiCS, FSDP's hybrid shard.

    Parameters
    ----------
    world_size : int
        W.
    group_size : int
        p ranks share one copy of the model; must divide W.
    numels : int or iterable of int
        Elements of each flat parameter, padded to a multiple of `group_size` here.
    micro_batches : int
        k.

    Returns
    -------
    HybridTraffic
        In the group 3kΨ(p − 1)/p; between groups one all-reduce of the shard, 2(Ψ/p)(g − 1)/g with
        g = W/p groups, rounded up to whole elements.

    Notes
    -----
    Zhang et al., *MiCS: Near-linear Scaling for Training Gigantic Model on Public Cloud*,
    arXiv:2205.00119, Section 3: scale-aware partitioning and 2-hop gradient synchronisation.
    """
    world_size = check_count("world_size", world_size, least=1)
    group_size = check_count("group_size", group_size, least=1)
    groups = check_divides("group_size", group_size, "world_size", world_size)
    numels = _as_list(numels)
    inside = step_traffic(3, group_size, numels, micro_batches=micro_batches).elements
    between = 2 * sum(_sent(-(-numel // group_size), groups) for numel in numels)
    return HybridTraffic(inside, between)


@dataclass(frozen=True)
class ZeroPlusPlus:
    """Cross-node volume of one stage-3 step in units of M, the model's 16-bit size.

    Attributes
    ----------
    forward_gather, backward_gather, grad_reduce : float
        Each collective's share.
    extra_bytes_per_param : float
        Device memory paid for it: hpZ keeps a second 16-bit shard within the node.
    """

    forward_gather: float
    backward_gather: float
    grad_reduce: float
    extra_bytes_per_param: float

    @property
    def total(self) -> float:
        """All three; 3 for plain stage 3, 0.75 with everything on."""
        return self.forward_gather + self.backward_gather + self.grad_reduce


def zeropp_volume(
    *, qwz: bool = True, hpz: bool = True, qgz: bool = True, per_node: int = 8
) -> ZeroPlusPlus:
    """Cross-node volume of ZeRO++.

    Parameters
    ----------
    qwz : bool
        Weights gathered as blocks of int8.
    hpz : bool
        Backward gathers stay in the node, from a second shard.
    qgz : bool
        Gradients exchanged as int4, hierarchically.
    per_node : int
        Devices that share the second shard.

    Returns
    -------
    ZeroPlusPlus

    Notes
    -----
    Wang et al., *ZeRO++: Extremely Efficient Collective Communication*, arXiv:2306.10209, Table 1.
    """
    per_node = check_count("per_node", per_node, least=1)
    gather = 0.5 if qwz else 1.0
    return ZeroPlusPlus(
        forward_gather=gather,
        backward_gather=0.0 if hpz else gather,
        grad_reduce=0.25 if qgz else 1.0,
        extra_bytes_per_param=2 / per_node if hpz else 0.0,
    )


def tensor_parallel_elements(
    layers: int, seq: int, micro_batch: int, hidden: int, tp: int, *, recompute: bool = False
) -> int:
    """Elements one device sends for tensor parallelism in one micro-batch.

    Parameters
    ----------
    layers, seq, micro_batch, hidden : int
        L, s, b, h.
    tp : int
        t.
    recompute : bool
        Full recomputation repeats the forward pass's two all-reduces.

    Returns
    -------
    int
        4 (or 6) all-reduces of sbh a layer: 8sbhL(t − 1)/t, or 12.

    Notes
    -----
    arXiv:2205.05198 Section 4.2.2; with recomputation arXiv:1910.02054 Section 8.  Sequence
    parallelism replaces each all-reduce by a reduce-scatter and an all-gather: the same volume.
    """
    tp = check_count("tp", tp, least=1)
    passes = 12 if recompute else 8
    return passes * layers * (seq * micro_batch * hidden) * (tp - 1) // tp


def offload_bytes_per_step(numel: int) -> int:
    """Bytes over the host link in a step of ZeRO-Offload: 2M of gradients down, 2M of weights up.

    Parameters
    ----------
    numel : int
        M: parameters whose optimizer runs on this host link.

    Returns
    -------
    int
        4M (Ren et al., arXiv:2101.06840, Section 3.3).
    """
    return 4 * check_count("numel", numel, least=0)
