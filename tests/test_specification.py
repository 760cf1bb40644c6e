"""The behaviours that the specification's own tests pin.

The specification is a module in another language; each name of it is public here and does for
real what it says. These are its tests, with its numbers.
"""

import numpy as np
import pytest

import zero_nb
from zero_nb.train import checkpoint

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


# --- configuration -------------------------------------------------------------------------------


def test_the_defaults_are_the_specifications():
    config = zero_nb.ZeroConfig()
    assert config.stage == zero_nb.ZeROImplementationStage.STAGE_1
    assert (config.world_size, config.overlap_comm) == (1, True)
    assert config.reduce_bucket_size == 500_000_000


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_stages_1_to_3_are_valid(stage):
    config = zero_nb.ZeROConfig(stage=stage, world_size=4)
    config.validate()
    assert int(config.stage) == stage


@pytest.mark.parametrize(("stage", "world_size"), [(0, 1), (4, 1), (1, 0)])
def test_stage_0_stage_4_and_no_rank_are_refused(stage, world_size):
    with pytest.raises(ValueError, match=r"stage|world_size"):
        zero_nb.ZeROConfig(stage=stage, world_size=world_size)


def test_stages_are_ordered():
    stages = list(zero_nb.ZeROStage)
    assert stages == sorted(stages) == [0, 1, 2, 3]
    assert zero_nb.ZeROImplementationStage is zero_nb.ZeROStage


# --- figures -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "fraction"), [(0, 0.0), (1, 0.25), (2, 0.5), (3, 0.75)])
def test_saved_fraction_of_equal_states_on_4_ranks(stage, fraction):
    assert zero_nb.zero_stage_memory_reduction(stage, 4, 1000, 1000, 1000) == fraction


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_rank_and_no_bytes_save_nothing(stage):
    assert zero_nb.zero_stage_memory_reduction(stage, 1, 1000, 1000, 1000) == 0.0
    assert zero_nb.zero_stage_memory_reduction(stage, 4, 0, 0, 0) == 0.0


@pytest.mark.parametrize(("stage", "world_size"), [(4, 4), (-1, 4), (1, 0)])
def test_no_fraction_for_what_does_not_exist(stage, world_size):
    with pytest.raises(ValueError, match=r"stage|world_size"):
        zero_nb.zero_stage_memory_reduction(stage, world_size, 1, 1, 1)


def test_totals_are_always_in_step():
    stats = zero_nb.ZeROMemoryStats(
        optimizer_memory_saved=100, gradient_memory_saved=200, parameter_memory_saved=300
    )
    assert stats.total_memory_saved == 600
    assert (stats.update_totals(), stats.update_totals()) == (600, 600)
    stats.parameter_memory_saved = 0
    assert stats.total_memory_saved == 300


# --- every name is a piece of the engine ----------------------------------------------------------

NAMES = {  # name -> a file of the engine that uses it (the overlap names live in prefetch.py)
    "partition_optimizer_state": None,
    "partition_gradients_flat": None,
    "partition_parameters_flat": None,
    "gather_parameters_flat": None,
    "zero_stage_memory_reduction": "compare.py",
    "ZeROConfig": "train/optimizer.py",
    "ZeroConfig": None,
    "ZeROStage": "config.py",
    "ZeROImplementationStage": None,
    "ZeROMemoryStats": "train/optimizer.py",
    "ZeROOptimizer": "train/engine.py",
    "ZeROStage1": "train/stages.py",
    "ZeROStage2": "train/optimizer.py",
    "ZeROStage3": "train/stages.py",
    "ZeROState": "train/units.py",
    "ParameterPartition": "train/units.py",
    "PartitionInfo": "train/units.py",
    "ParameterGroup": "train/optim.py",
    "GradientBuffer": "train/engine.py",
    "partition_parameters": "train/named.py",
    "partition_gradients": "train/optimizer.py",
    "gather_parameters": "train/optimizer.py",
    "all_gather_gradients": "train/optimizer.py",
    "reduce_scatter_gradients": "train/optimizer.py",
    "Prefetcher": "train/engine.py",
}
# The four flat helpers are the specification's own interface for lists of arrays, and two names
# are aliases; everything else has to be in use.
ALONE = {name for name, home in NAMES.items() if home is None}


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_name_is_public(name):
    assert getattr(zero_nb, name) is not None
    assert name in zero_nb.__all__


@pytest.mark.parametrize("name", sorted(NAMES.keys() - ALONE))
def test_the_engine_is_made_of_the_names(name, monkeypatch, tmp_path):
    """Training calls each name's own code: counted while a run goes on and is saved."""
    calls = _count_calls(name, monkeypatch)
    params = {"w": np.ones((5, 3), np.float32), "b": np.zeros(3, np.float32)}
    rng = np.random.default_rng(0)
    grads = {
        key: rng.normal(size=(2, *value.shape)).astype(np.float32) for key, value in params.items()
    }
    for stage in zero_nb.ZeROStage:
        config = None if stage == 0 else zero_nb.ZeROConfig(stage=stage, world_size=2)
        given = {"stage": 0, "world_size": 2} if config is None else {"config": config}
        opt = zero_nb.ZeROOptimizer(
            params, rule=zero_nb.SGD(lr=0.1), groups=[zero_nb.ParameterGroup(("w", "b"))], **given
        )
        opt.backward(grads)
        opt.gradients()
        opt.step()
        opt.set_gradients(params)
        opt.step()
        opt.weights()
        opt.memory_stats()
        checkpoint.save(opt, tmp_path)
    model = zero_nb.MLP(zero_nb.MLPConfig((3, 2)))
    engine = zero_nb.Engine(model, stage=3, world_size=2)
    engine.train_step(np.ones((2, 3), np.float32), np.ones((2, 2), np.float32))
    if name == "ZeROStage":
        assert isinstance(engine.optimizer.stage.number, zero_nb.ZeROStage)
        return  # an enum is not called
    if name == "zero_stage_memory_reduction":
        zero_nb.measure_memory((1,))
    assert calls, f"{name} is public, but training never uses it"


def _count_calls(name, monkeypatch):
    """Return a list that grows whenever the named class or function is used by training."""
    calls = []
    thing = getattr(zero_nb, name)
    if isinstance(thing, type):
        for method in ("__init__", "init_unit"):
            original = thing.__dict__.get(method)
            if original is not None:

                def counted(self, *args, _original=original, **kwargs):
                    calls.append(name)
                    return _original(self, *args, **kwargs)

                monkeypatch.setattr(thing, method, counted)
        return calls

    def counted_function(*args, **kwargs):
        calls.append(name)
        return thing(*args, **kwargs)

    home = __import__(thing.__module__, fromlist=[name])
    monkeypatch.setattr(home, name, counted_function)
    return calls
