"""Bytes of model states per rank, from the formulas of the ZeRO paper.

Paper: Rajbhandari et al., *ZeRO: Memory Optimizations Toward Training Trillion Parameter Models*,
arXiv:1910.02054v3, Sections 3.1 and 5, Figure 1, Table 1.  Ψ is the number of parameters, W the
number of data-parallel ranks, K the optimizer's bytes per parameter (12 for mixed-precision Adam).

==========  ==================  =========================================
stage       per rank            what is cut
==========  ==================  =========================================
0           (2 + 2 + K)Ψ        nothing (plain data parallelism)
1 P_os      2Ψ + 2Ψ + KΨ/W      optimizer states
2 P_os+g    2Ψ + (2 + K)Ψ/W     and gradients
3 P_os+g+p  (2 + 2 + K)Ψ/W      and parameters
==========  ==================  =========================================

The training side is never imported: these numbers are compared with measured bytes, and only two
independent ways to the same number make that comparison a test.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from zero_nb.config import UsageError
from zero_nb.theory.checks import check_count, check_stage, name_error

__all__ = [
    "OPTIMIZERS",
    "PRECISIONS",
    "ModelStateBytes",
    "Recipe",
    "get_recipe",
    "model_state_bytes",
    "padded_numel",
    "padding_bytes",
    "recipe_state_bytes",
    "zero_stage_memory_reduction",
]


@dataclass(frozen=True)
class Recipe:
    """Bytes kept per parameter by one way of training.

    Attributes
    ----------
    name : str
        ``"bf16"`` or, with an optimizer that is not Adam, ``"bf16+sgd"``.
    param_bytes : int
        The weights the model computes with.
    grad_bytes : int
        Gradients; 6 where a 16-bit and a float32 gradient are both kept.
    master_bytes : int
        The float32 copy of the weights the optimizer updates; 0 where there is none.
    state_bytes : int
        Moments: 8 for Adam in float32, 4 for momentum, 0 for plain SGD.
    compute_bytes : int
        Weights as they are gathered and computed with, and activations.
    source : str
        Where this way of counting is written down.
    """

    name: str
    param_bytes: int
    grad_bytes: int
    master_bytes: int
    state_bytes: int
    compute_bytes: int = 2
    source: str = ""

    @property
    def optim_bytes(self) -> int:
        """The paper's K: master copy and moments, bytes per parameter."""
        return self.master_bytes + self.state_bytes

    @property
    def total_bytes(self) -> int:
        """All model states, bytes per parameter: 16, 18, 20, 12."""
        return self.param_bytes + self.grad_bytes + self.optim_bytes


@dataclass(frozen=True)
class _Precision:
    """Bytes of weight, gradient and master copy, and where that is written down."""

    param_bytes: int
    grad_bytes: int
    master_bytes: int
    source: str
    compute_bytes: int = 2


PRECISIONS: dict[str, _Precision] = {
    "fp32": _Precision(4, 4, 0, "arXiv:1910.02054 Sec. 3.1, without mixed precision", 4),
    "fp32-bf16-compute": _Precision(
        4, 4, 0, "PyTorch FSDP2 MixedPrecisionPolicy: fp32 shards, gathered and computed in bf16"
    ),
    "bf16": _Precision(2, 2, 4, "arXiv:1910.02054 Sec. 3.1: 2 + 2 + K, K = 12"),
    "fp16": _Precision(2, 2, 4, "arXiv:1910.02054 Sec. 3.1: 2 + 2 + K, K = 12"),
    "bf16-fp32-grads": _Precision(
        2, 4, 4, "Megatron-LM docs, dist_optimizer.md: bf16 params, fp32 grads, 18 bytes"
    ),
    "bf16-both-grads": _Precision(
        2, 6, 4, "Hugging Face ultrascale playbook: bf16 with fp32 gradient accumulation, 20 bytes"
    ),
    "fp16-both-grads": _Precision(
        2, 6, 4, "Megatron-LM docs, dist_optimizer.md: fp16 params, fp16 grads, 20 bytes"
    ),
    "bf16-pure": _Precision(2, 2, 0, "torchtune README: weights and moments all in bfloat16"),
}
"""Precision recipes by name."""

OPTIMIZERS: dict[str, tuple[int, str]] = {
    "sgd": (0, "no state"),
    "momentum": (4, "one float32 buffer"),
    "adam": (8, "Kingma & Ba, arXiv:1412.6980, Algorithm 1: two moments, float32"),
    "adamw": (8, "Loshchilov & Hutter, arXiv:1711.05101: the moments of Adam"),
    "adam-16bit": (4, "two moments stored in 16 bits, as torchtune's bf16 AdamW"),
    "adam-8bit": (
        2,
        "Dettmers et al., arXiv:2110.02861: two moments in 8 bits (block scales left out)",
    ),
}
"""Optimizer state: bytes per parameter and source."""


def get_recipe(precision: str = "bf16", optimizer: str = "adamw") -> Recipe:
    """Bytes per parameter for a precision and an optimizer.

    Parameters
    ----------
    precision : str
        One of `PRECISIONS`.  ``"bf16-pure"`` stores Adam's moments in 16 bits too.
    optimizer : str
        One of `OPTIMIZERS`.

    Returns
    -------
    Recipe

    Raises
    ------
    UsageError
        For an unknown name, with the nearest ones.

    Examples
    --------
    >>> get_recipe("bf16").total_bytes, get_recipe("fp32", "momentum").total_bytes
    (16, 12)
    """
    if precision not in PRECISIONS:
        raise name_error("precision", precision, PRECISIONS)
    if optimizer not in OPTIMIZERS:
        raise name_error("optimizer", optimizer, OPTIMIZERS)
    kept = PRECISIONS[precision]
    state_bytes, state_source = OPTIMIZERS[optimizer]
    if precision == "bf16-pure" and optimizer != "adam-8bit":
        state_bytes //= 2
    adam = optimizer in ("adam", "adamw")
    return Recipe(
        name=precision if adam else f"{precision}+{optimizer}",
        param_bytes=kept.param_bytes,
        grad_bytes=kept.grad_bytes,
        master_bytes=kept.master_bytes,
        state_bytes=state_bytes,
        compute_bytes=kept.compute_bytes,
        source=f"{kept.source}; {state_source}",
    )


@dataclass(frozen=True)
class ModelStateBytes:
    """Model states one rank holds, in whole bytes.

    Attributes
    ----------
    param, grad, optim : int
        Bytes by kind; `optim` is master copy and moments together.
    """

    param: int
    grad: int
    optim: int

    @property
    def total(self) -> int:
        """All three kinds, bytes."""
        return self.param + self.grad + self.optim

    def as_dict(self) -> dict[str, int]:
        """The three kinds by name, for JSON and tables."""
        return {"param": self.param, "grad": self.grad, "optim": self.optim}


def recipe_state_bytes(stage: int, world_size: int, numel: int, recipe: Recipe) -> ModelStateBytes:
    """`model_state_bytes` for a `Recipe` of one's own.

    Parameters
    ----------
    stage : int or ZeROStage
        0–3.
    world_size : int
        Data-parallel ranks, W.  With tensor or pipeline parallelism this is the size of the
        data-parallel group, not the number of devices.
    numel : int
        Parameters of the model (of this rank's model-parallel part), Ψ, without padding.
    recipe : Recipe
        Bytes per parameter.

    Returns
    -------
    ModelStateBytes
        Each kind rounded down to whole bytes.

    Notes
    -----
    Source: arXiv:1910.02054 Section 5 and Figure 1.
    """
    stage = check_stage(stage)
    world_size = check_count("world_size", world_size, least=1)
    numel = check_count("numel", numel, least=0)
    cut = [world_size if stage >= first else 1 for first in (3, 2, 1)]
    kinds = (recipe.param_bytes, recipe.grad_bytes, recipe.optim_bytes)
    return ModelStateBytes(
        *(per_param * numel // parts for per_param, parts in zip(kinds, cut, strict=True))
    )


def model_state_bytes(
    stage: int,
    world_size: int,
    numel: int,
    precision: str = "bf16",
    optimizer: str = "adamw",
) -> ModelStateBytes:
    """The paper's formula for one rank's parameters, gradients and optimizer states.

    Parameters
    ----------
    stage : int or ZeROStage
        0 keeps everything; 1 cuts optimizer states by `world_size`; 2 gradients too; 3 parameters
        too.
    world_size : int
        Data-parallel ranks, at least 1.
    numel : int
        Parameters, without padding.
    precision, optimizer : str
        See `get_recipe`.

    Returns
    -------
    ModelStateBytes
        Each kind rounded down to whole bytes.

    Raises
    ------
    UsageError
        For a stage outside 0–3, fewer than one rank, or a negative `numel`.

    Notes
    -----
    Source: arXiv:1910.02054 Section 5 and Figure 1.

    Examples
    --------
    >>> model_state_bytes(1, 64, 7_500_000_000).total
    31406250000
    """
    return recipe_state_bytes(stage, world_size, numel, get_recipe(precision, optimizer))


def padded_numel(numels: int | Iterable[int], world_size: int) -> int:
    """Elements after every flat parameter is rounded up to a multiple of `world_size`.

    Parameters
    ----------
    numels : int or iterable of int
        Elements of each flat parameter (an int is one).
    world_size : int
        W, at least 1.

    Returns
    -------
    int
        Σ ⌈n / W⌉ · W.

    Examples
    --------
    >>> padded_numel([5, 7], 4)
    16
    """
    world_size = check_count("world_size", world_size, least=1)
    return sum(-(-numel // world_size) * world_size for numel in _numel_list(numels))


def padding_bytes(
    stage: int,
    world_size: int,
    numels: int | Sequence[int],
    precision: str = "bf16",
    optimizer: str = "adamw",
) -> ModelStateBytes:
    """What padding adds to one rank: the formula with padding minus the formula without.

    Parameters
    ----------
    stage, world_size, precision, optimizer
        See `model_state_bytes`.
    numels : int or sequence of int
        Elements of each flat parameter, unpadded.

    Returns
    -------
    ModelStateBytes
        So that held = formula + padding, kind by kind.
    """
    numels = _numel_list(numels)
    whole = padded_numel(numels, world_size)
    padded = model_state_bytes(stage, world_size, whole, precision, optimizer)
    bare = model_state_bytes(stage, world_size, sum(numels), precision, optimizer)
    return ModelStateBytes(
        padded.param - bare.param, padded.grad - bare.grad, padded.optim - bare.optim
    )


def zero_stage_memory_reduction(
    stage: int, world_size: int, param_bytes: float, grad_bytes: float, opt_bytes: float
) -> float:
    """Fraction of a rank's model states that a stage saves against plain data parallelism.

    Parameters
    ----------
    stage : int or ZeROStage
        0–3.
    world_size : int
        W, at least 1.
    param_bytes, grad_bytes, opt_bytes : float
        P, G and O: bytes of the whole model, on one rank, without ZeRO.

    Returns
    -------
    float
        O, O + G or O + G + P for stages 1, 2, 3, times (W − 1)/W, over P + G + O.  0.0 for stage 0,
        for one rank, and where there are no bytes.

    Raises
    ------
    UsageError
        For a stage outside 0–3, a `world_size` below 1 or negative bytes.

    Notes
    -----
    Source: arXiv:1910.02054 Section 5, as saved ÷ baseline.

    Examples
    --------
    >>> [zero_stage_memory_reduction(stage, 4, 1000, 1000, 1000) for stage in (1, 2, 3)]
    [0.25, 0.5, 0.75]
    """
    stage = check_stage(stage)
    world_size = check_count("world_size", world_size, least=1)
    given = {"param_bytes": param_bytes, "grad_bytes": grad_bytes, "opt_bytes": opt_bytes}
    for name, value in given.items():
        if not value >= 0:
            raise UsageError(f"{name} must be zero or more bytes, got {value}")
    baseline = param_bytes + grad_bytes + opt_bytes
    if stage == 0 or world_size == 1 or baseline == 0:
        return 0.0
    cut = opt_bytes + (grad_bytes if stage >= 2 else 0) + (param_bytes if stage >= 3 else 0)
    return cut * (world_size - 1) / (world_size * baseline)


def _numel_list(numels: int | Iterable[int]) -> list[int]:
    """One int or many, as checked ints."""
    if not isinstance(numels, Iterable):
        numels = [numels]
    return [check_count("numel", numel, least=0) for numel in numels]
