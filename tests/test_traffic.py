"""Traffic: exact element counts against a walk over the collectives of a step."""

import csv
from pathlib import Path

import pytest

from zero_nb.config import UsageError
from zero_nb.theory.network import Network, flops_per_token, ring_seconds, step_time
from zero_nb.theory.presets import get_model
from zero_nb.theory.traffic import (
    bytes_per_step,
    deepspeed_elements_per_step,
    elements_per_step,
    mics_traffic,
    offload_bytes_per_step,
    step_traffic,
    tensor_parallel_elements,
    zeropp_volume,
)

STAGES = (0, 1, 2, 3)
NUMELS = [1296, 28272, 1, 0, 1403]


def walked(stage, world_size, numels, k, no_sync=False, every=False):
    """The slow twin: one step as a list of collectives, each counted hop by hop on a ring."""
    hops = 0
    for numel in numels:
        while numel % world_size:
            numel += 1
        shard = numel // world_size
        ring = sum(shard for _ in range(world_size - 1))
        for batch in range(k):
            last = batch == k - 1
            if stage == 3:
                hops += ring + ring  # forward and backward gathers
            reduce_now = (stage >= 2 and not no_sync) or every or last
            if reduce_now:
                hops += ring * (2 if stage == 0 else 1)
        if stage in (1, 2):
            hops += ring
    return hops


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7, 16])
@pytest.mark.parametrize("k", [1, 3])
def test_elements_per_step_equal_a_walk_over_the_ring(stage, world_size, k):
    got = elements_per_step(stage, world_size, NUMELS, micro_batches=k)
    assert got == walked(stage, world_size, NUMELS, k)


@pytest.mark.parametrize("k", [1, 2, 5])
def test_factors_of_the_paper_and_of_accumulation(k):
    psi, w = 7_500_000_000, 64
    unit = psi * (w - 1) // w
    plain = [elements_per_step(s, w, psi, micro_batches=k) / unit for s in STAGES]
    assert plain == [2, 2, k + 1, 3 * k]
    assert elements_per_step(3, w, psi, micro_batches=k, no_sync=True) == (2 * k + 1) * unit
    each = {"micro_batches": k, "reduce_every_micro_batch": True}
    assert elements_per_step(0, w, psi, **each) == 2 * k * unit
    assert elements_per_step(1, w, psi, **each) == (k + 1) * unit


def test_a_unit_that_stays_gathered_and_one_that_is_frozen():
    one = elements_per_step(3, 4, [100, 60], gathers=[1, 2])
    assert one == 75 * (1 + 1) + 45 * 3
    frozen = step_traffic(3, 4, [100, 60], trainable=[True, False])
    assert (frozen.grad_elements, frozen.param_elements) == (75, 2 * 75 + 2 * 45)
    assert elements_per_step(2, 4, [100, 60], trainable=[True, False]) == 150
    assert elements_per_step(0, 4, [100, 60], trainable=[True, False]) == 150


def test_messages_count_collectives():
    t = step_traffic(3, 4, [8, 8, 8], micro_batches=2)
    assert (t.grad_messages, t.param_messages) == (6, 12)
    t = step_traffic(1, 4, [8, 8, 8], micro_batches=2)
    assert (t.grad_messages, t.param_messages) == (3, 3)


def test_bytes_by_format():
    psi = 1000
    assert bytes_per_step(3, 4, psi, "bf16") == 2 * 2250
    assert bytes_per_step(3, 4, psi, "fp32") == 4 * 2250
    assert bytes_per_step(3, 4, psi, "bf16-fp32-grads") == 4 * 750 + 2 * 1500
    assert bytes_per_step(3, 4, psi, "bf16", reduce_itemsize=4) == 4 * 750 + 2 * 1500


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: elements_per_step(5, 2, 10), "stage must be"),
        (lambda: elements_per_step(1, 0, 10), "world_size must be"),
        (lambda: elements_per_step(1, 2, 10, micro_batches=0), "micro_batches must be"),
        (lambda: elements_per_step(2, 2, 10, no_sync=True), "no_sync is for stage 3"),
        (
            lambda: elements_per_step(3, 2, 10, reduce_every_micro_batch=True),
            "reduce_every_micro_batch is for stages 0 and 1",
        ),
        (lambda: elements_per_step(3, 2, [10], gathers=[1, 2]), "gathers has 2 entries"),
        (lambda: elements_per_step(3, 2, [10], trainable=[]), "trainable has 0 entries"),
    ],
)
def test_bad_input_says_what_to_do(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# --- variants --------------------------------------------------------------------------------

REFERENCE = Path(__file__).parent / "data" / "reference"


def volumes():
    """Rows of the reference file on communication volume."""
    with open(REFERENCE / "communication_volume.csv", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def test_totals_as_printed_in_the_papers():
    """Every total of the reference file, from the function that counts it."""
    big = 2**40  # so large a W that (W - 1)/W rounds to 1
    unit = big
    got = {
        "baseline DP": elements_per_step(0, big, unit) / unit,
        "Pos (ZeRO-1)": elements_per_step(1, big, unit) / unit,
        "early ZeRO-1 implementation (before Mar 2020)": deepspeed_elements_per_step(1, big, unit)
        / unit,
        "Pos+g (ZeRO-2)": elements_per_step(2, big, unit) / unit,
        "Pos+g+p (ZeRO-3)": elements_per_step(3, big, unit) / unit,
        "ZeRO-1": elements_per_step(1, big, unit) / unit,
        "ZeRO (stage 3) cross-node": zeropp_volume(qwz=False, hpz=False, qgz=False).total,
        "ZeRO++ cross-node": zeropp_volume().total,
        "ZeRO-Offload": offload_bytes_per_step(1000) / 1000,
        "tensor parallel": tensor_parallel_elements(1, big, 1, 1, big) / big,
        "tensor + sequence parallel": tensor_parallel_elements(1, big, 1, 1, big) / big,
        "Megatron MP + activation checkpointing": tensor_parallel_elements(
            1, big, 1, 1, big, recompute=True
        )
        / big,
    }
    seen = set()
    for row in volumes():
        printed = row["total"].rstrip("M")
        if printed and row["scheme"] in got:
            assert got[row["scheme"]] == pytest.approx(float(printed), abs=1e-6), row
            seen.add(row["scheme"])
    assert seen == set(got)


@pytest.mark.parametrize("column", ["forward_gather", "backward_gather", "grad_reduce"])
def test_zeropp_collective_by_collective(column):
    phase, collective = {
        "forward_gather": ("forward", "all-gather weights"),
        "backward_gather": ("backward", "all-gather weights"),
        "grad_reduce": ("backward", "reduce-scatter gradients"),
    }[column]
    row = next(
        r
        for r in volumes()
        if (r["scheme"], r["phase"], r["collective"]) == ("ZeRO++ cross-node", phase, collective)
    )
    assert getattr(zeropp_volume(), column) == float(row["asymptotic"])


def test_zeropp_parts_and_their_price():
    assert zeropp_volume(hpz=False).total == 0.5 + 0.5 + 0.25
    assert zeropp_volume(qgz=False, qwz=False).total == 1 + 0 + 1
    assert zeropp_volume(per_node=8).extra_bytes_per_param == 0.25
    assert zeropp_volume(hpz=False).extra_bytes_per_param == 0


@pytest.mark.parametrize("k", [1, 3])
def test_hybrid_shard_lies_between_stage_0_and_stage_3(k):
    numel = 16 * 999
    whole = mics_traffic(16, 16, numel, micro_batches=k)
    assert whole.replica_elements == 0
    assert whole.elements == elements_per_step(3, 16, numel, micro_batches=k)
    alone = mics_traffic(16, 1, numel, micro_batches=k)
    assert alone.group_elements == 0
    assert alone.elements == elements_per_step(0, 16, numel)
    four = mics_traffic(16, 4, numel, micro_batches=k)
    assert four.group_elements == 3 * k * numel * 3 // 4
    assert four.replica_elements == 2 * (numel // 4) * 3 // 4


@pytest.mark.parametrize("k", [1, 4])
def test_deepspeed_sends_half_as_much_again(k):
    n = 8 * 1000
    one = n * 7 // 8
    assert deepspeed_elements_per_step(1, 8, n, micro_batches=k) == 3 * one
    assert deepspeed_elements_per_step(2, 8, n, micro_batches=k) == (2 * k + 1) * one
    assert deepspeed_elements_per_step(3, 8, n, micro_batches=k) == 3 * k * one
    assert deepspeed_elements_per_step(0, 8, n, micro_batches=k) == 2 * one


def test_a_group_must_divide_the_world():
    with pytest.raises(UsageError, match="group_size 3 does not divide world_size 16"):
        mics_traffic(16, 3, 10)


# --- time ------------------------------------------------------------------------------------

NET = Network(per_node=8, link_bytes_per_s=300e9, network_bytes_per_s=25e9)


def test_inside_a_node_the_link_decides():
    data = 16e9
    wanted = data * 7 / 8 / 300e9 + NET.start_s + 7 * NET.link_hop_s
    assert ring_seconds(data, 8, NET) == pytest.approx(wanted, rel=1e-12)
    assert ring_seconds(data, 1, NET) == 0


def test_between_nodes_the_network_decides():
    data = 16e9
    wanted = data * 7 / 8 / (8 * 25e9) + NET.start_s + 56 * NET.link_hop_s + 7 * NET.network_hop_s
    assert ring_seconds(data, 64, NET) == pytest.approx(wanted, rel=1e-12)
    # With tensor parallelism over the node one rank a node is left, and one port.
    wanted = data * 7 / 8 / 25e9 + NET.start_s + 7 * NET.network_hop_s
    assert ring_seconds(data, 8, NET, stride=8) == pytest.approx(wanted, rel=1e-12)


def test_many_messages_pay_many_starts():
    few, many = ring_seconds(1e6, 64, NET), ring_seconds(1e6, 64, NET, messages=100)
    assert many > 50 * few


def test_flops_of_gpt_3_are_as_in_its_paper():
    """Brown et al., Table D.1: 3.14e23 for 300 billion tokens, without attention scores."""
    spec = get_model("gpt-3-175b")
    assert flops_per_token(spec, 1) * 300e9 == pytest.approx(3.14e23, rel=0.01)
    assert flops_per_token(spec, 2048, recompute_full=True) == pytest.approx(
        flops_per_token(spec, 2048) * 4 / 3
    )


def test_step_time_takes_the_larger_of_two_lanes():
    common = {
        "flops_per_s": 1e12, "data_parallel_ranks": 8, "data_parallel_messages": 1,
        "tensor_parallel_bytes": 0.0, "tp": 1, "bubble": 0.0, "network": NET,
    }  # fmt: skip
    slow = step_time(flops=1e12, data_parallel_bytes=1e9, **common)
    assert slow.limit == "arithmetic"
    assert slow.bound_s == slow.compute_s == 1.0
    fast = step_time(flops=1e9, data_parallel_bytes=1e12, **common)
    assert fast.limit == "data-parallel communication"
    assert fast.bound_s == fast.data_parallel_s
    assert fast.without_overlap_s > fast.bound_s
