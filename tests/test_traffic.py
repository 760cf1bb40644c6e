"""Traffic: exact element counts against a walk over the collectives of a step."""

import pytest

from zero_nb.theory.traffic import bytes_per_step, elements_per_step, step_traffic

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
