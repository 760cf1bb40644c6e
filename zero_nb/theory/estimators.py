"""How other tools count memory, reproduced, so that a user sees why the numbers differ.

Each function does what the named tool does, including what it leaves out or counts its own way;
`DIFFERENCES` says in words where they part.  None of this is what `zero_nb.theory.plan` uses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from zero_nb.config import UsageError
from zero_nb.theory.checks import check_count, check_divides, check_stage
from zero_nb.theory.specs import ModelSpec

__all__ = [
    "DIFFERENCES",
    "DeepSpeedEstimate",
    "EleutherEstimate",
    "MegatronEstimate",
    "accelerate_estimate",
    "deepspeed_padding",
    "deepspeed_zero2",
    "deepspeed_zero3",
    "eleuther",
    "llm_analysis_states",
    "megatron",
    "megatron_bytes_per_param",
    "zero_offload_bytes",
]

_MIB, _GIB = 2**20, 2**30

DIFFERENCES: dict[str, str] = {
    "paper": "(2 + 2 + 12) bytes a parameter, model states only, in GB of 10^9 bytes",
    "deepspeed-zero2": "20 bytes a parameter: gradients are counted in 16 and in 32 bits; 2 stay "
    "whole and 18 are divided by all devices; GiB printed as GB",
    "deepspeed-zero3": "18 bytes a parameter divided by all devices, plus 4 bytes a parameter of "
    "the largest layer; GiB printed as GB",
    "megatron": "18 bytes a parameter, or 6 + 12/dp; the fullest pipeline stage; activations by "
    "Korthikanti; MiB printed as MB",
    "eleuther": "gradients of 4 bytes are not cut by tensor parallelism and states are divided by "
    "all devices, not by the data-parallel ones; embeddings counted twice; GiB",
    "accelerate": "the checkpoint's size times 4 for Adam, whatever the precision; MiB and GiB "
    "printed as MB and GB; one device",
    "llm-analysis": "no biases, positions or untied head, SwiGLU as 8h²; gradients of 4 bytes",
}
"""Where each tool's accounting parts from the paper's."""


# --- DeepSpeed -------------------------------------------------------------------------------


@dataclass(frozen=True)
class DeepSpeedEstimate:
    """What DeepSpeed's estimators return.

    Attributes
    ----------
    cpu_bytes, gpu_bytes : int
        Host memory of a node, memory of a device, for model states.
    """

    cpu_bytes: int
    gpu_bytes: int


def deepspeed_zero2(
    total_params: int,
    gpus_per_node: int = 1,
    nodes: int = 1,
    *,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
    before_2024_06: bool = False,
) -> DeepSpeedEstimate:
    """DeepSpeed's ``estimate_zero2_model_states_mem_needs`` (stage_1_and_2.py, 0.19).

    Parameters
    ----------
    total_params : int
    gpus_per_node, nodes : int
    cpu_offload : bool
        Gradients, master copy and moments on the host.
    additional_buffer_factor : float
        Slack on the host.
    before_2024_06 : bool
        The formula before pull request 5099: gradients of 2 bytes counted whole, as its
        documentation still prints.

    Returns
    -------
    DeepSpeedEstimate

    Notes
    -----
    On the device 2 bytes a parameter (weights) and, without offload, 18 divided by all devices:
    2 and 4 for gradients in 16 and 32 bits, 4 for weights, 8 for two moments.
    """
    gpus = _devices(total_params, gpus_per_node, nodes)
    if cpu_offload:
        gpu = 2 * total_params
        cpu = total_params * max(4 * gpus, 16) * additional_buffer_factor
    else:
        kept, cut = (4, 16) if before_2024_06 else (2, 18)
        gpu = kept * total_params + int(cut * total_params / gpus)
        cpu = total_params * 4 * gpus_per_node * additional_buffer_factor
    return DeepSpeedEstimate(int(cpu), int(gpu))


def deepspeed_zero3(
    total_params: int,
    largest_layer_params: int,
    gpus_per_node: int = 1,
    nodes: int = 1,
    *,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> DeepSpeedEstimate:
    """DeepSpeed's ``estimate_zero3_model_states_mem_needs`` (stage3.py, 0.19), all branches.

    Parameters
    ----------
    total_params, largest_layer_params : int
        See `zero_nb.theory.specs.ModelSpec.largest_layer_numel`.
    gpus_per_node, nodes : int
    cpu_offload, cpu_offload_params : bool
        Optimizer states on the host; parameters too.
    zero_init : bool
        The model is built sharded and never whole on the host.
    additional_buffer_factor : float
        Slack on the host.

    Returns
    -------
    DeepSpeedEstimate

    Notes
    -----
    On the device 4 bytes a parameter of the largest layer and, divided by all devices, nothing,
    2 bytes (optimizer offloaded) or 18 bytes (2 weights, 4 fp32 gradients, 12 optimizer).
    """
    gpus = _devices(total_params, gpus_per_node, nodes)
    check_count("largest_layer_params", largest_layer_params, least=0)
    share = 1 / nodes  # a float as in the tool: the last byte depends on it
    largest = 4 * largest_layer_params
    whole = 4 * gpus_per_node  # every process of a node builds the whole model first
    if cpu_offload:
        on_host = 18 if cpu_offload_params else 16
        gpu = largest if cpu_offload_params else largest + int(2 * total_params / gpus)
        if zero_init:
            cpu = total_params * on_host * share * additional_buffer_factor
        else:
            cpu = total_params * max(whole, on_host * share) * additional_buffer_factor
    else:
        gpu = largest + int(18 * total_params / gpus)
        built = largest_layer_params if zero_init else total_params
        cpu = built * 4 * gpus_per_node * additional_buffer_factor
    return DeepSpeedEstimate(int(cpu), int(gpu))


def deepspeed_padding(group_numel: int, world_size: int) -> tuple[int, int, int]:
    """How DeepSpeed's stages 1 and 2 pad a group of parameters (stage_1_and_2.py).

    Parameters
    ----------
    group_numel : int
        Elements of one flattened parameter group.
    world_size : int

    Returns
    -------
    aligned_numel, per_rank, ranks_with_padding : int
        The group rounded up to a multiple of 2·W (NCCL wants 4-byte starts of 16-bit data), one
        rank's partition, and how many ranks hold padding.
    """
    world_size = check_count("world_size", world_size, least=1)
    alignment = 2 * world_size
    aligned = -(-check_count("group_numel", group_numel, least=1) // alignment) * alignment
    per_rank = aligned // world_size
    return aligned, per_rank, -(-(aligned - group_numel) // per_rank)


def _devices(total_params: int, gpus_per_node: int, nodes: int) -> int:
    """All devices, after checking the counts."""
    check_count("total_params", total_params, least=0)
    gpus_per_node = check_count("gpus_per_node", gpus_per_node, least=1)
    return gpus_per_node * check_count("nodes", nodes, least=1)


def zero_offload_bytes(numel: int, *, grads: bool, optimizer: bool) -> int:
    """Device bytes left by ZeRO-Offload's cuts (Ren et al., arXiv:2101.06840, Table 1).

    Parameters
    ----------
    numel : int
        M of the paper.
    grads, optimizer : bool
        Whether 16-bit gradients, and the fp32 states with their update, live on the host.

    Returns
    -------
    int
        16M, 14M, 4M or 2M.
    """
    numel = check_count("numel", numel, least=0)
    return numel * (2 + (0 if grads else 2) + (0 if optimizer else 12))


# --- Megatron-LM -----------------------------------------------------------------------------


@dataclass(frozen=True)
class MegatronEstimate:
    """What Megatron-LM's theoretical memory report prints, in bytes of the fullest device.

    Attributes
    ----------
    weight_and_optimizer, activation : float
    """

    weight_and_optimizer: float
    activation: float

    @property
    def total(self) -> float:
        """Both together."""
        return self.weight_and_optimizer + self.activation


def megatron(
    spec: ModelSpec,
    *,
    micro_batch: int,
    seq: int,
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    interleave: int = 1,
    micro_batches: int | None = None,
    distributed_optimizer: bool = True,
    sequence_parallel: bool = True,
) -> MegatronEstimate:
    """Megatron-LM's ``report_theoretical_memory``.

    Parameters
    ----------
    spec : ModelSpec
        Vocabulary already padded.
    micro_batch, seq : int
        b, s.
    tp, pp, dp : int
        Parallel degrees.
    interleave : int
        Virtual pipeline stages a device; 1 is the plain schedule.
    micro_batches : int, optional
        Micro-batches of a step; fewer than `pp` fill the pipeline less.
    distributed_optimizer : bool
        6 + 12/dp bytes a parameter, else 18.
    sequence_parallel : bool
        With selective recomputation (the tool's condition); else its report without, which adds
        5 % for temporaries.

    Returns
    -------
    MegatronEstimate

    Notes
    -----
    It counts no biases and one embedding on the fullest stage.
    Source: megatron/training/theoretical_memory_usage.py; activations by arXiv:2205.05198 Table 2.
    """
    sizes = {"tp": tp, "pp": pp, "dp": dp, "interleave": interleave}
    for name, value in (sizes | {"micro_batch": micro_batch, "seq": seq}).items():
        check_count(name, value, least=1)
    per_param = megatron_bytes_per_param("bf16", dp if distributed_optimizer else None)
    states = _megatron_shard(spec, tp, pp) * per_param
    tokens = micro_batch * seq
    if sequence_parallel:
        layer = tokens * spec.hidden * (18 + 4 * spec.ffn / spec.hidden)
    else:
        layer = tokens * spec.hidden * (10 + 24 / tp)
    activation = layer * spec.layers + (8 + spec.hidden) * tokens * pp
    if interleave > 1:
        activation *= 1 + (pp - 1) / (pp * interleave)
    elif micro_batches is not None and pp > 1:
        activation *= min(1, micro_batches / pp)
    if sequence_parallel:
        if pp == 1:
            activation += tokens * spec.hidden * 4 * (1 + spec.vocab / spec.hidden)
        return MegatronEstimate(states, activation / tp)
    if pp == 1:
        activation += 2 * (tokens * spec.vocab / tp + tokens * spec.hidden)
    return MegatronEstimate(states, 1.05 * activation)


def _megatron_shard(spec: ModelSpec, tp: int, pp: int) -> float:
    """Parameters on the fullest device as the tool counts them, without biases."""
    h = spec.hidden
    norms = 1 if spec.rms_norm else 2
    gated = 3 / 2 if spec.gated else 1
    attention = 2 * h * h * (1 + spec.kv_heads / spec.heads) * spec.attention_width / h
    matrices = (2 * h * spec.ffn * gated + attention) * spec.layers
    replicated = norms * h * (2 * spec.layers + 1)  # norms are on every tensor-parallel device
    embedding = h * spec.vocab
    shard = (matrices / pp + embedding) / tp + replicated / pp
    return shard if spec.tied or pp > 1 else shard + embedding / tp


def megatron_bytes_per_param(precision: str = "bf16", dp: int | None = None) -> float:
    """Bytes a parameter with Megatron's optimizers (docs, dist_optimizer.md).

    Parameters
    ----------
    precision : {"fp16", "bf16", "fp32"}
        fp16 weights with fp16 gradients, bf16 with fp32 gradients, fp32 with fp32.
    dp : int, optional
        Ranks of the distributed optimizer; None without it.

    Returns
    -------
    float
        20 or 4 + 16/dp; 18 or 6 + 12/dp; 16 or 8 + 8/dp.
    """
    table = {"fp16": (4, 16), "bf16": (6, 12), "fp32": (8, 8)}
    if precision not in table:
        raise UsageError(f"precision must be one of {', '.join(table)}, got {precision!r}")
    kept, cut = table[precision]
    return kept + cut / (1 if dp is None else check_count("dp", dp, least=1))


# --- EleutherAI ------------------------------------------------------------------------------


@dataclass(frozen=True)
class EleutherEstimate:
    """What EleutherAI's calculator prints per device, in bytes.

    Attributes
    ----------
    activation, model, grad, optim, communication : float
    """

    activation: float
    model: float
    grad: float
    optim: float
    communication: float

    @property
    def total(self) -> float:
        """All lines together."""
        return self.activation + self.model + self.grad + self.optim + self.communication


def eleuther(
    layers: int,
    hidden: int,
    heads: int,
    *,
    seq: int = 2048,
    micro_batch: int = 1,
    vocab: int = 51200,
    gpus: int = 1,
    tp: int = 1,
    pp: int = 1,
    stage: int = 1,
    checkpoint_activations: bool = False,
    partition_activations: bool = False,
    ffn_factor: float = 4.0,
) -> EleutherEstimate:
    """EleutherAI's cookbook, ``calc_transformer_mem.py``, for training in mixed precision.

    Parameters
    ----------
    layers, hidden, heads, seq, micro_batch, vocab : int
    gpus, tp, pp : int
        All devices; tensor and pipeline degrees.
    stage : int
        ZeRO stage.
    checkpoint_activations : bool
        Recompute the part that grows with s² (the tool's Megatron-style checkpointing).
    partition_activations : bool
        Cut activations by `tp` (ZeRO-R's P_a).
    ffn_factor : float
        ffn / hidden.

    Returns
    -------
    EleutherEstimate

    Notes
    -----
    Two matrices in the feed-forward layer, a token table counted twice, an all-gather bucket of
    5·10⁸ elements from stage 1, 10⁹ live parameters at stage 3.
    """
    stage = check_stage(stage)
    check_divides("tp x pp", tp * pp, "gpus", gpus)
    attention = 4 * layers * hidden * hidden
    mlp = 2 * layers * hidden * ffn_factor * hidden
    numel = 2 * vocab * hidden + hidden * seq + 8 * hidden * layers + 2 * hidden + attention + mlp
    model = numel * 2 / (tp * pp)
    grad, optim = numel * 4, numel * 12
    if stage >= 1:
        optim /= gpus
    if stage >= 2:
        grad /= gpus
    if stage == 3:
        model /= gpus
    communication = 0.0
    if gpus > 1 and stage >= 1:
        communication = 2 * 5e8 + (2 * 1e9 if stage == 3 else 0)
    per_token = 34 if checkpoint_activations else 34 + 5 * heads * seq / hidden
    activation = seq * micro_batch * hidden * layers * per_token
    if partition_activations:
        activation /= tp
    return EleutherEstimate(activation, model, grad, optim, communication)


# --- accelerate, llm-analysis -----------------------------------------------------------------


def accelerate_estimate(numel: int, bits: int = 32) -> tuple[float, float]:
    """Accelerate's ``estimate-memory``: size of the weights, and "training using Adam".

    Parameters
    ----------
    numel : int
        Parameters, with the buffers that are saved.
    bits : int
        Bits of one parameter: 32, 16, 8 or 4.

    Returns
    -------
    total, training : float
        Bytes; training is four times the weights, which leaves out that moments stay fp32.
    """
    if bits not in (32, 16, 8, 4):
        raise UsageError(f"bits must be 32, 16, 8 or 4, got {bits!r}")
    total = check_count("numel", numel, least=0) * bits / 8
    return total, 4 * total


def llm_analysis_states(spec: ModelSpec, stage: int, dp: int) -> dict[str, int]:
    """llm-analysis: weights, gradients and optimizer states of one device.

    Parameters
    ----------
    spec : ModelSpec
    stage : int
    dp : int

    Returns
    -------
    dict of str to int
        ``numel``, ``weight``, ``gradient``, ``optimizer_state``: bytes, except `numel`.

    Notes
    -----
    It counts L(12h² + 2h) + h + Vh parameters for every shape: no biases, no positions, no untied
    head, and SwiGLU as if it had 8h² parameters.  Gradients take 4 bytes.
    """
    stage = check_stage(stage)
    h = spec.hidden
    numel = spec.layers * (12 * h * h + 2 * h) + h + spec.vocab * h
    cut = [dp if stage >= first else 1 for first in (3, 2, 1)]
    return {
        "numel": numel,
        "weight": math.ceil(2 * numel / cut[0]),
        "gradient": math.ceil(4 * numel / cut[1]),
        "optimizer_state": math.ceil(12 * numel / cut[2]),
    }
