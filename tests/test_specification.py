"""The behaviours that the specification's own tests pin.

The specification is a module in another language; each name of it is public here and does for
real what it says. These are its tests, with its numbers.
"""

import numpy as np
import pytest

import zero_nb

# --- flat partition helpers --------------------------------------------------------------------

CUTS = pytest.mark.parametrize(
    "name",
    ["partition_optimizer_state", "partition_gradients_flat", "partition_parameters_flat"],
)


@CUTS
@pytest.mark.parametrize(
    ("numel", "world_size", "expected"),
    [(5, 4, [2, 2, 1, 0]), (7, 3, [3, 3, 1]), (8, 4, [2, 2, 2, 2]), (4, 1, [4]), (1, 3, [1, 0, 0])],
)
def test_chunks_are_ceil_div_and_trailing_shards_may_be_empty(name, numel, world_size, expected):
    values = np.arange(1, numel + 1, dtype=np.float32)
    shards = getattr(zero_nb, name)([values], world_size)
    assert [len(rank[0]) for rank in shards] == expected
    assert np.concatenate([rank[0] for rank in shards]).tolist() == values.tolist()


@CUTS
def test_each_array_is_cut_alone(name):
    shards = getattr(zero_nb, name)([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0]], 2)
    assert [[s.tolist() for s in rank] for rank in shards] == [
        [[1.0, 2.0], [5.0]],
        [[3.0, 4.0], [6.0]],
    ]


@CUTS
def test_one_rank_keeps_everything(name):
    shards = getattr(zero_nb, name)([[1.0, 2.0], [3.0]], 1)
    assert [[s.tolist() for s in rank] for rank in shards] == [[[1.0, 2.0], [3.0]]]


@CUTS
def test_no_arrays_give_empty_ranks(name):
    assert getattr(zero_nb, name)([], 3) == [[], [], []]


@CUTS
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.uint16])
def test_the_dtype_is_kept(name, dtype):
    shards = getattr(zero_nb, name)([np.ones(5, dtype)], 2)
    assert {shard.dtype for rank in shards for shard in rank} == {np.dtype(dtype)}


@CUTS
@pytest.mark.parametrize("world_size", [0, -1])
def test_a_world_without_ranks_is_refused(name, world_size):
    with pytest.raises(ValueError, match=f"world_size must be at least 1, got {world_size}"):
        getattr(zero_nb, name)([[1.0]], world_size)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_gathering_is_the_exact_inverse(world_size):
    rng = np.random.default_rng(world_size)
    given = [rng.standard_normal(n).astype(np.float32) for n in (5, 7, 1, 0, 16)]
    gathered = zero_nb.gather_parameters_flat(zero_nb.partition_parameters_flat(given, world_size))
    for before, after in zip(given, gathered, strict=True):
        assert before.dtype == after.dtype
        assert before.tolist() == after.tolist()


def test_five_vectors_of_1000_on_8_ranks():
    given = [np.full(1000, i, np.float32) + np.arange(1000) / 1024 for i in range(5)]
    shards = zero_nb.partition_parameters_flat(given, 8)
    assert [[len(shard) for shard in rank] for rank in shards] == [[125] * 5] * 8
    for before, after in zip(given, zero_nb.gather_parameters_flat(shards), strict=True):
        assert before.tolist() == after.tolist()


def test_gathering_nothing_gives_nothing():
    assert zero_nb.gather_parameters_flat([]) == []


def test_ragged_ranks_are_refused_with_rank_and_index():
    with pytest.raises(ValueError, match="rank 1 has 1 shards and rank 0 has 2: index 1"):
        zero_nb.gather_parameters_flat([[[1.0], [2.0]], [[3.0]]])
