"""How each training framework holds memory, as far as its code says so.

These are facts of implementations, not constants fitted to measurements; each names the code or
page it was read from.  What no code says (allocator slack, the CUDA context) is in
`RESERVED_OVER_ALLOCATED` and `CONTEXT_BYTES`, from logs that are not among the runs this planner
is judged on.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from zero_nb.theory.checks import name_error

__all__ = [
    "CONTEXT_BYTES",
    "FRAMEWORKS",
    "RESERVED_LOGS",
    "RESERVED_OVER_ALLOCATED",
    "Framework",
    "get_framework",
]


@dataclass(frozen=True)
class Framework:
    """What a framework keeps beside the model states, and when.

    Attributes
    ----------
    name, source : str
        And where its code says so.
    precision : str
        The recipe it uses by default, see `zero_nb.theory.memory.PRECISIONS`.
    grads_persist : bool
        Gradients stand in memory during the forward pass even without accumulation.
    reduce_bucket : int
        Elements of the standing buffer gradients are reduced in; 0 for none.
    bucket_capped : bool
        The buffer is not larger than the model.
    gathers : {"units", "live"}
        Stage 3: two layers and the root unit, or up to `max_live` parameters.
    max_live : int
        Elements, for ``"live"``.
    unit_grad_bytes : int
        Stages 2 and 3: bytes a parameter of the layer whose whole gradient waits to be reduced.
    pipeline_keeps_whole : bool
        Stage 3 under pipeline parallelism: gathered weights and float32 gradients stay whole
        between micro-batches.
    step_copy_bytes : int
        Bytes a parameter of gradients copied for the optimizer step, on their owner.
    step_group : int
        Elements copied at a time at stage 3; 0 for all.
    gather_bucket : int
        Stages 1 and 2: elements of the buffer updated parameters are gathered in.
    flat_copy_bytes : int
        Bytes a parameter of gradients copied flat for the all-reduce.
    cast_bytes : int
        Bytes a parameter of casts kept while computing (autocast's cache).
    scratch : int
        Elements of the hidden size that stand for each token beside what layers keep.
    execution, loss : str
        See `zero_nb.theory.activations`.
    caching : bool
        Tensors come from PyTorch's caching allocator, which reserves more than it hands out.
    """

    name: str
    source: str
    precision: str = "bf16"
    grads_persist: bool = True
    reduce_bucket: int = 0
    bucket_capped: bool = True
    gathers: str = "units"
    max_live: int = 0
    unit_grad_bytes: int = 0
    pipeline_keeps_whole: bool = False
    step_copy_bytes: int = 0
    step_group: int = 0
    gather_bucket: int = 0
    flat_copy_bytes: int = 0
    cast_bytes: int = 0
    scratch: int = 0
    execution: str = "fused"
    loss: str = "eager"
    caching: bool = True


FRAMEWORKS: dict[str, Framework] = {
    framework.name: framework
    for framework in (
        Framework(
            "zero", "the paper's states, arXiv:1910.02054 Sec. 5, with DeepSpeed's buckets",
            reduce_bucket=500_000_000, gather_bucket=500_000_000, unit_grad_bytes=2,
        ),
        Framework(
            "deepspeed",
            "deepspeed/runtime/zero/stage_1_and_2.py and stage3.py: a reduce bucket of the "
            "configured size, a float32 copy of the owned gradients at the step (one sub-group "
            "of 10^9 at stage 3), up to stage3_max_live_parameters gathered",
            grads_persist=False, reduce_bucket=500_000_000, bucket_capped=False, gathers="live",
            max_live=1_000_000_000, unit_grad_bytes=2, step_copy_bytes=4,
            step_group=1_000_000_000, execution="eager", loss="hf",
        ),
        Framework(
            "megatron-deepspeed",
            "bigscience-workshop/Megatron-DeepSpeed on DeepSpeed: buckets of the configured size, "
            "float32 copy of the owned gradients at the step, logits cloned before the loss",
            precision="fp16", grads_persist=False, reduce_bucket=500_000_000, bucket_capped=False,
            gathers="live", max_live=1_000_000_000, unit_grad_bytes=2, step_copy_bytes=4,
            step_group=1_000_000_000, loss="megatron-cloned",
        ),
        Framework(
            "fsdp2",
            "torch.distributed.fsdp.fully_shard and pytorch/torchtitan: float32 shards, bf16 "
            "gathered layers with the next one prefetched, gradients reduced in float32 from a "
            "bf16 gradient, whole between micro-batches of a pipeline",
            precision="fp32-bf16-compute", grads_persist=False, unit_grad_bytes=6,
            pipeline_keeps_whole=True, execution="eager",
        ),
        Framework(
            "torch", "one process, torch.optim, zero_grad(set_to_none=True)",
            grads_persist=False, execution="eager",
        ),
        Framework(
            "hf-trainer",
            "transformers 4.21 Trainer: zero_grad() keeps gradients allocated, AdamW parameter by "
            "parameter",
            precision="fp32", execution="eager", loss="hf",
        ),
        Framework(
            "megatron",
            "Megatron-LM core: contiguous float32 main gradients (docs, dist_optimizer.md), "
            "vocabulary-parallel loss in place",
            precision="bf16-fp32-grads", loss="megatron",
        ),
        Framework(
            "megatron-fsdp",
            "Megatron-LM, megatron_fsdp: float32 main weights, gradients and their reduction",
            precision="bf16-fp32-grads", unit_grad_bytes=4, loss="megatron",
        ),
        Framework(
            "megatron-2021",
            "Megatron-LM v2: float32 main gradients beside 16-bit ones, all 16-bit gradients "
            "copied flat for the all-reduce (megatron/model/distributed.py, local DDP)",
            precision="fp16-both-grads", flat_copy_bytes=2, loss="megatron-cloned",
        ),
        Framework(
            "nanotron", "huggingface/nanotron: float32 gradient accumulation beside bf16 gradients",
            precision="bf16-both-grads",
        ),
        Framework(
            "gemini",
            "hpcaitech/ColossalAI Gemini: gradients take the place of parameters in their chunk",
            grads_persist=False, execution="eager", loss="hf",
        ),
        Framework(
            "llm.c",
            "karpathy/llm.c train_gpt2.cu: everything allocated once with cudaMalloc; beside the "
            "layers one GELU output (4h) and scratch of 4h and h a token",
            scratch=9,
            execution="llm.c", loss="in-place", caching=False,
        ),
    )
}  # fmt: skip
"""Frameworks by name."""


def get_framework(name: str) -> Framework:
    """A framework's facts by name.

    Parameters
    ----------
    name : str

    Returns
    -------
    Framework

    Raises
    ------
    UsageError
        For an unknown name, with the nearest ones.
    """
    if name not in FRAMEWORKS:
        raise name_error("framework", name, FRAMEWORKS)
    return FRAMEWORKS[name]


RESERVED_LOGS: tuple[tuple[str, float, float], ...] = (
    ("NVIDIA/Megatron-LM issue 60", 12606.06, 17482.0),
    ("NVIDIA/Megatron-LM issue 525 (at out of memory)", 28.82, 29.97),
    ("NVIDIA/Megatron-LM pull request 5662", 5670.39, 6406.0),
    ("NVIDIA/Megatron-LM docs, fine_grained_activation_offloading.md", 65203.93, 74306.0),
    ("allenai/OLMo-core pull request 297", 74.24, 80.79),
    ("pytorch/torchtitan pull request 97, selective", 63.43, 80.45),
    ("meta-llama/llama-cookbook pull request 165", 14.93, 19.52),
    ("meta-llama/llama-cookbook issue 120", 59.0, 63.0),
    ("ecmwf/WeatherGenerator pull request 2628", 15.098, 17.354),
)
"""Published peaks that print both: source, allocated (active where printed), reserved; one unit a
row.  Training of all parameters, above 5 GB.  None is a run that the planner is judged on."""


def _spread(ratios: list[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile, to two decimals."""
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return round(low, 2), round(middle, 2), round(high, 2)


RESERVED_OVER_ALLOCATED: tuple[float, float, float] = _spread(
    [reserved / allocated for _, allocated, reserved in RESERVED_LOGS]
)
"""Low, middle and high ratio of reserved to allocated memory, from `RESERVED_LOGS`."""

_GIB = 2**30
CONTEXT_BYTES: dict[str, tuple[int, int, int, str]] = {
    "alone": (
        int(0.5 * _GIB), int(0.9 * _GIB), int(1.3 * _GIB),
        "CUDA context and library workspaces: 1008 MiB in pytorch/pytorch issue 28394, about "
        "300 MB since lazy loading (issue 107667) plus cuBLAS and cuDNN workspaces",
    ),
    "connected": (
        int(1.5 * _GIB), int(1.75 * _GIB), 2 * _GIB,
        "the same and NCCL: 544 to 688 MB a communicator in NVIDIA/nccl issue 964, 1.6 GB for "
        "one in issue 864, about 1 GiB and 0.65 GiB for each further one in "
        "Lumi-supercomputer/LUMI-AI-Guide issue 111",
    ),
}  # fmt: skip
"""Bytes outside the allocator, on one device and on several: low, middle, high, source."""
