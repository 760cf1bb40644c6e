"""Bounds on the time of a step: arithmetic at peak speed, and an α–β model of a two-level network.

A bound says what cannot be beaten; a real step takes longer.  α is the time of a hop, β the time of
a byte.  Nodes hold several devices that talk fast inside and slower outside.
"""

from __future__ import annotations

from dataclasses import dataclass

from zero_nb.theory.checks import check_count, check_positive
from zero_nb.theory.presets import Device
from zero_nb.theory.specs import ModelSpec

__all__ = ["Network", "StepTime", "flops_per_token", "ring_seconds", "step_time"]


@dataclass(frozen=True)
class Network:
    """Two levels: devices in a node, nodes in a cluster.

    Attributes
    ----------
    per_node : int
        Devices in a node.
    link_bytes_per_s, network_bytes_per_s : float
        One device sends this much inside its node, and to other nodes, one direction.
    link_hop_s, network_hop_s : float
        Time of one hop.
    start_s : float
        Time to start a collective.
    """

    per_node: int
    link_bytes_per_s: float
    network_bytes_per_s: float
    # NVIDIA/nccl src/graph/tuning.cc, ring, "simple" protocol: NVLink, network, base latency.
    link_hop_s: float = 3.4e-6
    network_hop_s: float = 14e-6
    start_s: float = 8.4e-6

    def __post_init__(self) -> None:
        """Refuse what is not a network."""
        check_count("per_node", self.per_node, least=1)
        check_positive("link_bytes_per_s", self.link_bytes_per_s)
        check_positive("network_bytes_per_s", self.network_bytes_per_s)

    @classmethod
    def of(cls, device: Device) -> Network:
        """The network such devices usually come with."""
        return cls(device.per_node, device.link_bytes_per_s, device.network_bytes_per_s)


def ring_seconds(
    elements_bytes: float,
    world_size: int,
    network: Network,
    *,
    messages: int = 1,
    stride: int = 1,
) -> float:
    """Least time of reduce-scatters or all-gathers over `world_size` ranks.

    Parameters
    ----------
    elements_bytes : float
        Bytes of the whole (padded) data, over all messages; an all-reduce counts twice.
    world_size : int
        Ranks.
    network : Network
    messages : int
        Collectives the data is sent in.
    stride : int
        Distance of neighbouring ranks in devices: the tensor-parallel degree for a data-parallel
        group, so that fewer of its ranks share a node.

    Returns
    -------
    float
        Seconds: the slower of the two levels, plus hops as NCCL's model counts them.

    Notes
    -----
    Each rank receives (W − 1)/W of the data over its link.  Into each node comes (N − 1)/N of it,
    through the network ports of the group's ranks in that node.
    """
    world_size = check_count("world_size", world_size, least=1)
    if world_size == 1 or not elements_bytes:
        return 0.0
    inside = max(1, min(world_size, network.per_node // stride))
    nodes = -(-world_size // inside)
    over_link = elements_bytes * (world_size - 1) / world_size / network.link_bytes_per_s
    if inside == 1:
        over_link = 0.0
    over_network = 0.0
    if nodes > 1:
        ports = inside * network.network_bytes_per_s
        over_network = elements_bytes * (nodes - 1) / nodes / ports
    hops = (world_size - nodes) * network.link_hop_s + (nodes - 1) * network.network_hop_s
    return max(over_link, over_network) + messages * (network.start_s + hops)


def flops_per_token(spec: ModelSpec, seq: int, *, recompute_full: bool = False) -> float:
    """Floating-point operations of forward and backward, a token.

    Parameters
    ----------
    spec : ModelSpec
    seq : int
        s, for the attention scores.
    recompute_full : bool
        One more forward pass.

    Returns
    -------
    float
        6N + 12Lhs, times 4/3 with full recomputation; N without embedding tables but with a head.

    Notes
    -----
    Kaplan et al., arXiv:2001.08361, Table 1; Chowdhery et al. (PaLM), arXiv:2204.02311, App. B.
    """
    tables = spec.embedding_numel * (2 if spec.head_numel else 1)
    matrices = spec.numel - tables - spec.positions * spec.hidden
    matrices += spec.vocab * spec.hidden if spec.has_head else 0
    total = 6 * matrices + 12 * spec.layers * spec.attention_width * seq
    return total * 4 / 3 if recompute_full else float(total)


@dataclass(frozen=True)
class StepTime:
    """Lower bounds on one optimizer step.

    Attributes
    ----------
    compute_s : float
        Arithmetic at the device's peak, with the pipeline's bubble.
    data_parallel_s, tensor_parallel_s : float
        Communication of the two kinds, by themselves.
    """

    compute_s: float
    data_parallel_s: float
    tensor_parallel_s: float

    @property
    def bound_s(self) -> float:
        """With data-parallel traffic fully hidden, tensor-parallel traffic not."""
        return max(self.compute_s + self.tensor_parallel_s, self.data_parallel_s)

    @property
    def without_overlap_s(self) -> float:
        """Everything one after the other."""
        return self.compute_s + self.data_parallel_s + self.tensor_parallel_s

    @property
    def limit(self) -> str:
        """What the bound comes from."""
        if self.data_parallel_s > self.compute_s + self.tensor_parallel_s:
            return "data-parallel communication"
        return "arithmetic" if self.compute_s >= self.tensor_parallel_s else "tensor parallelism"


def step_time(
    *,
    flops: float,
    flops_per_s: float,
    data_parallel_bytes: float,
    data_parallel_ranks: int,
    data_parallel_messages: int,
    tensor_parallel_bytes: float,
    tp: int,
    bubble: float,
    network: Network,
) -> StepTime:
    """Bounds from amounts of work.

    Parameters
    ----------
    flops : float
        Operations of one device in one step.
    flops_per_s : float
        Its peak.
    data_parallel_bytes : float
        Whole data of all reduce-scatters and all-gathers of its group in one step.
    data_parallel_ranks, data_parallel_messages : int
    tensor_parallel_bytes : float
        What it sends for tensor parallelism.
    tp : int
    bubble : float
        Idle share of a pipeline, (p − 1)/m.
    network : Network

    Returns
    -------
    StepTime
    """
    compute = flops / check_positive("flops_per_s", flops_per_s) * (1 + bubble)
    data = ring_seconds(
        data_parallel_bytes,
        data_parallel_ranks,
        network,
        messages=data_parallel_messages,
        stride=tp,
    )
    rate = network.link_bytes_per_s if tp <= network.per_node else network.network_bytes_per_s
    return StepTime(compute, data, tensor_parallel_bytes / rate)
