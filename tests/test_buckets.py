"""Buckets: what travels together changes messages and memory, never a bit of the gradients."""

import numpy as np
import pytest

from tiny import PRECISIONS, SHAPES, UNITS, dirty_memory, gpt, gpt_batches, own_grads, own_params
from zero_nb.config import UsageError
from zero_nb.train.buckets import GradientBuffer
from zero_nb.train.engine import Engine
from zero_nb.train.optimizer import ZeROOptimizer

NUMELS = (36, 33)  # elements of UNITS
SIZES = (1, 2, 5, 7, 12, 30, 36, 50, 69, 72, 10**9)

by_precision = pytest.mark.parametrize("precision", PRECISIONS)
by_stage = pytest.mark.parametrize("stage", [2, 3])
by_overlap = pytest.mark.parametrize("overlap", [False, True], ids=["one", "two"])


def stepped(stage=2, world_size=3, steps=2, **settings):
    """An optimizer after some steps."""
    opt = ZeROOptimizer(
        own_params(), stage=stage, world_size=world_size, **({"units": UNITS} | settings)
    )
    for step in range(steps):
        opt.world.log.clear()
        opt.ledger.begin_step()
        opt.backward(own_grads(world_size, seed=step))
        opt.step()
    return opt


def gradients_sent(opt):
    return [t for t in opt.world.log.transfers if t.purpose == "grad"]


@by_precision
@by_stage
@by_overlap
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_weights_do_not_depend_on_the_bucket_size(world_size, overlap, stage, precision):
    alone = stepped(stage, world_size, precision=precision)
    for size in SIZES:
        opt = stepped(
            stage, world_size, precision=precision, reduce_bucket_size=size, overlap_comm=overlap
        )
        assert opt.weights_sha256() == alone.weights_sha256(), size
        assert opt.ledger.current_bytes("bucket") == 0


@by_overlap
@pytest.mark.parametrize("world_size", [2, 3, 8])
@pytest.mark.parametrize("size", SIZES)
def test_buckets_are_exactly_full_but_the_last_and_send_as_much_as_units(size, world_size, overlap):
    opt = stepped(2, world_size, reduce_bucket_size=size, overlap_comm=overlap)
    shards = [-(-numel // world_size) for numel in NUMELS]
    # A bucket takes the same columns of every owner's row, at least one, at most the model.
    columns = max(1, min(size, sum(shards) * world_size) // world_size)
    full, rest = divmod(sum(shards), columns)
    expected = [columns] * full + [rest] * (rest > 0)
    sent = [t.elements_sent for t in gradients_sent(opt)]
    assert sent == [n * (world_size - 1) for n in expected]
    whole = [t.elements_sent for t in gradients_sent(stepped(2, world_size))]
    assert sum(sent) == sum(whole)


def test_a_bucket_holds_units_in_backward_order_and_cuts_the_one_that_does_not_fit():
    opt = stepped(2, 3, reduce_bucket_size=3 * 13)  # shards of 11 (second) and 12 (first) columns
    assert [t.elements_sent for t in gradients_sent(opt)] == [2 * 13, 2 * 10]
    assert {t.label for t in gradients_sent(opt)} == {"bucket"}


@by_stage
@pytest.mark.parametrize(("overlap", "buffers"), [(False, 1), (True, 2)])
def test_the_ledger_sees_the_buffers_of_a_bucket(stage, overlap, buffers):
    for size, numel in [(3, 3), (9, 9), (11, 9), (60, 60), (10**9, 69)]:
        opt = stepped(stage, 3, precision="bf16", reduce_bucket_size=size, overlap_comm=overlap)
        # A second buffer is needed only once the first is full and there is more to come.
        needed = min(buffers, -(-69 // numel))
        assert opt.ledger.largest_bytes["bucket"] == 2 * numel * needed, size


def test_a_bucket_as_large_as_the_model_lets_stage_2_peak_above_stage_1():
    """The default bucket is a whole small model; one of a unit's size is not."""
    (batch,) = gpt_batches(1, size=4)
    settings = {"world_size": 4, "precision": "bf16", "units": "sublayer"}
    peaks = {
        key: Engine(gpt(), stage=key[0], reduce_bucket_size=key[1], **settings)
        .train_step(*batch)
        .peak_bytes
        for key in [(1, None), (2, None), (2, 500_000_000)]
    }
    assert peaks[2, None] < peaks[1, None] < peaks[2, 500_000_000]


@by_stage
def test_stages_without_buckets_ignore_their_size(stage):
    for lower in (0, 1):
        opt = stepped(lower, 3, reduce_bucket_size=5, overlap_comm=True)
        assert {t.label for t in gradients_sent(opt)} == set(UNITS)
        assert opt.weights_sha256() == stepped(stage, 3).weights_sha256()


@by_stage
@by_overlap
def test_a_backward_pass_given_up_leaves_nothing_in_the_buckets(stage, overlap):
    opt = ZeROOptimizer(
        own_params(), stage=stage, world_size=3, units=UNITS, reduce_bucket_size=5,
        overlap_comm=overlap,
    )  # fmt: skip
    buffer = GradientBuffer(opt.units[1])
    for target in buffer.targets(UNITS["second"]).values():
        target[...] = 1e6
    opt.post_backward(opt.units[1], buffer)
    del buffer, target
    opt.zero_grad()
    assert opt.ledger.current_bytes("bucket") == opt.ledger.current_bytes("grad") == 0
    opt.backward(own_grads(3, seed=0))
    opt.step()
    assert opt.weights_sha256() == stepped(stage, 3, steps=1).weights_sha256()


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (0, "reduce_bucket_size must be at least 1 element, got 0"),
        (-5, "reduce_bucket_size must be at least 1 element, got -5"),
        (2.5, "reduce_bucket_size must be a whole number, got 2.5"),
        (True, "reduce_bucket_size must be a whole number, got True"),
        ("5e8", "reduce_bucket_size must be a whole number, got '5e8'"),
    ],
)
def test_a_bucket_of_no_whole_number_of_elements_is_refused(size, words):
    with pytest.raises(UsageError, match=words):
        ZeROOptimizer(own_params(), reduce_bucket_size=size)


# --- the gradient of one unit ------------------------------------------------------------------


def buffer_of(world_size=2, **settings):
    """The buffer of a unit of its own, full of what must not survive."""
    opt = ZeROOptimizer(own_params(), stage=2, world_size=world_size, **settings)
    buffer = GradientBuffer(opt.units[0])
    return opt, buffer


@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_what_layers_write_is_the_flat_gradient_and_padding_is_zero(world_size, monkeypatch):
    dirty_memory(monkeypatch)
    opt, buffer = buffer_of(world_size)
    grads = own_grads(world_size)
    for name, target in buffer.targets(SHAPES).items():
        assert np.shares_memory(target, buffer.grad_RF) or target.size == 0
        target[...] = grads[name]
    buffer.add_up()
    flat = buffer.finish()
    layout = opt.units[0].layout
    assert flat is buffer.grad_RF
    assert flat.shape == (world_size, layout.padded_numel)
    for name, grad in grads.items():
        np.testing.assert_array_equal(layout.view(flat, name), grad)
    assert np.all(flat[:, layout.numel :] == 0)


def test_a_parameter_nothing_wrote_to_has_gradient_zero():
    opt, buffer = buffer_of()
    layout = opt.units[0].layout
    buffer.grad_RF[:, : layout.numel] = np.nan
    for target in buffer.targets(["embed", "scale", "head", "not of this unit"]).values():
        target[...] = 1
    flat = buffer.finish()
    assert np.all(layout.view(flat, "bias") == 0)
    assert np.all(layout.view(flat, "head") == 1)
    assert np.isfinite(flat).all()


def test_a_later_writer_adds_to_the_first_one():
    _, buffer = buffer_of()
    for value in (1, 10, 100):
        for target in buffer.targets(["bias"]).values():
            target[...] = value
        buffer.add_up()
    grads = buffer.unit.layout.view(buffer.grad_RF, "bias")
    assert np.all(grads == 111)


@pytest.mark.parametrize(("precision", "kind"), [("fp32", "bucket"), ("bf16", "workspace")])
def test_a_float32_gradient_is_what_travels_or_only_what_is_computed_with(precision, kind):
    opt, buffer = buffer_of(precision=precision)
    assert opt.ledger.current_bytes(kind) == 4 * 70
    del buffer
    assert opt.ledger.current_bytes(kind) == 0
