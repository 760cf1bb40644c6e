"""Failure kinds H: saving, loading, resuming; see test_snapshot.py and test_checkpoint.py too."""

import numpy as np
import pytest

from naive_training import in_threads
from own_model import fill_padding, full_state, same_bits
from tiny import STAGES
from zero_nb.train import checkpoint
from zero_nb.train.checkpoint import LAYOUTS
from zero_nb.train.optim import AdamW
from zero_nb.train.optimizer import ZeROOptimizer

F32 = np.float32
by_stage = pytest.mark.parametrize("stage", STAGES)
by_layout = pytest.mark.parametrize("layout", LAYOUTS)


@by_layout
@by_stage
def test_H1_later_steps_are_equal_on_another_number_of_ranks(stage, layout, tmp_path):
    """Ten values on 4 ranks, loaded on 5: the same state, and the same steps from it.

    Fed the reduced gradient: another number of ranks adds in another order.
    """
    saved = ZeROOptimizer({"w": np.arange(10, dtype=F32)}, stage=3, world_size=4, rule=AdamW(0.1))
    fill_padding(saved, 7777)
    rng = np.random.default_rng(4)
    grads = rng.normal(size=(5, 10)).astype(F32)

    def step(opt, grad):
        opt.set_gradients({"w": grad})
        opt.step()

    for grad in grads[:2]:
        step(saved, grad)
    checkpoint.save(saved, tmp_path, layout=layout)
    opt = ZeROOptimizer({"w": np.zeros(10, F32)}, stage=stage, world_size=5, rule=AdamW(0.1))
    checkpoint.load(opt, tmp_path)
    assert opt.units[0].layout.shard_numel == 2
    same_bits(opt.weights(), saved.weights())
    same_bits(full_state(opt), full_state(saved))
    for grad in grads[2:]:
        step(saved, grad)
        step(opt, grad)
        same_bits(opt.weights(), saved.weights())
        same_bits(full_state(opt), full_state(saved))


@by_layout
@by_stage
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_H4_a_tied_weight_is_tied_to_what_it_was_tied_to(stage, precision, layout, tmp_path):
    """ln, emb, head: all of one shape, so that a wrong match would not show in the sizes."""
    rng = np.random.default_rng(6)

    def made(world_size, tied=True):
        arrays = {name: rng.normal(size=(2, 3)).astype(F32) for name in ("ln", "emb", "last")}
        params = {**arrays, "head": arrays["emb"] if tied else arrays["emb"].copy()}
        del arrays  # the optimizer keeps nothing of the caller's: addresses may be used again
        return ZeROOptimizer(params, stage=stage, world_size=world_size, precision=precision)

    saved = made(4)
    for _ in range(2):
        grads = {name: rng.normal(size=(4, 2, 3)).astype(F32) for name in saved.names}
        saved.backward(grads)
        saved.step()
    weights = saved.weights()
    np.testing.assert_array_equal(weights["head"], weights["emb"])
    assert np.all(weights["head"] != weights["ln"])
    checkpoint.save(saved, tmp_path, layout=layout)
    opt = made(3)
    checkpoint.load(opt, tmp_path)
    same_bits(opt.weights(), weights)
    with opt.gathered_parameters() as used:
        np.testing.assert_array_equal(used["head"], used["emb"])
        assert np.all(used["head"] != used["ln"])
    one, many = made(1), checkpoint.read_weights(tmp_path)
    assert set(many) == set(one.names)
    np.testing.assert_array_equal(many["head"], weights["emb"])


@by_layout
@by_stage
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_H6_all_ranks_have_the_same_weights_before_the_first_step(
    stage, precision, layout, tmp_path
):
    """Each rank in a thread of its own: what a rank computes with came from its owners."""
    start = {"a": np.arange(7, dtype=F32) / 3, "b": np.ones((2, 3), F32) / 7}
    saved = ZeROOptimizer(start, stage=3, world_size=2, precision=precision)
    saved.backward({name: np.ones((2, *array.shape), F32) for name, array in start.items()})
    saved.step()
    checkpoint.save(saved, tmp_path, layout=layout)
    with saved.gathered_parameters() as used:
        want = {name: array[0].tobytes() for name, array in used.items()}

    def work(world):
        other = {name: array * 0 for name, array in start.items()}
        opt = ZeROOptimizer(other, stage=stage, world=world, precision=precision)
        checkpoint.load(opt, tmp_path)
        with opt.gathered_parameters() as used:
            return opt.weights_sha256(), {name: array[0].tobytes() for name, array in used.items()}

    for weights, used in in_threads(3, 1, work):
        assert weights == saved.weights_sha256()
        assert used == want
