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
from zero_nb.theory.checks import check_count, check_stage
from zero_nb.theory.memory import get_recipe

__all__ = ["StepTraffic", "bytes_per_step", "elements_per_step", "step_traffic"]


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
