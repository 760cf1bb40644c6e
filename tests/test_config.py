"""Configuration: what is accepted, and that nothing invalid can exist."""

import dataclasses

import numpy as np
import pytest

from zero_nb import config
from zero_nb.config import UsageError, ZeROConfig, ZeROStage


@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_a_stage_is_found_by_number_digit_and_name(number):
    wanted = ZeROStage(number)
    spelled = [number, np.int64(number), str(number), f"stage_{number}", f"STAGE_{number}"]
    spelled += [f"stage{number}", f"stage-{number}", f" Stage {number} ", wanted]
    assert [ZeROStage.parse(value) for value in spelled] == [wanted] * len(spelled)
    assert all(type(ZeROStage.parse(value)) is ZeROStage for value in spelled)


@pytest.mark.parametrize(
    "value", [4, -1, "-2", True, False, 2.0, "two", "", "stage", "02", None, [1]]
)
def test_what_names_no_stage_is_refused_by_what_was_given(value):
    with pytest.raises(UsageError, match=r"no ZeRO stage .*choose 0, 1, 2 or 3") as error:
        ZeROStage.parse(value)
    assert repr(value) in str(error.value)


def test_stages_are_ordered_and_each_contains_the_ones_below():
    assert list(ZeROStage) == sorted(ZeROStage) == [0, 1, 2, 3]
    assert ZeROStage.STAGE_2 < ZeROStage.STAGE_3


def test_defaults_are_those_of_the_specification():
    made = ZeROConfig()
    assert (made.stage, made.world_size) == (ZeROStage.STAGE_1, 1)
    assert (made.overlap_comm, made.reduce_bucket_size) == (True, 500_000_000)


@pytest.mark.parametrize("stage", [1, 2, 3, "2", "stage_3", ZeROStage.STAGE_1])
def test_a_valid_configuration_holds_a_stage_and_may_be_checked_again(stage):
    made = ZeROConfig(stage=stage, world_size=3, precision="bf16")
    assert made.stage is ZeROStage.parse(stage)
    assert made.validate() is None
    assert made.stage is ZeROStage.parse(stage)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("stage", 0, "stage 1, 2 or 3, got 0.*baseline.*STAGE_0"),
        ("stage", "stage_0", "got 0"),
        ("stage", 4, "no ZeRO stage 4"),
        ("world_size", 0, "world_size must be at least 1 rank, got 0"),
        ("world_size", -3, "world_size must be at least 1 rank, got -3"),
        ("world_size", 2.0, "world_size must be a whole number of ranks, got 2.0"),
        ("world_size", True, "world_size must be a whole number of ranks, got True"),
        ("world_size", "4", "world_size must be a whole number of ranks, got '4'"),
        ("reduce_bucket_size", 0, "reduce_bucket_size must be at least 1 element, got 0"),
        ("reduce_bucket_size", 2.5, "reduce_bucket_size must be a whole number, got 2.5"),
        ("micro_batches", 0, "micro_batches must be at least 1 micro-batch, got 0"),
        ("micro_batches", True, "micro_batches must be a whole number, got True"),
        ("precision", "fp64", "unknown precision 'fp64'; choose one of .*fp32.*bf16"),
        ("precision", None, "unknown precision None"),
    ],
)
def test_an_invalid_field_is_refused_at_construction(field, value, words):
    with pytest.raises(UsageError, match=words):
        ZeROConfig(**{field: value})


def test_a_configuration_cannot_be_changed_into_an_invalid_one():
    made = ZeROConfig(stage=2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.world_size = 0
    with pytest.raises(UsageError, match="world_size"):
        dataclasses.replace(made, world_size=0)


def test_the_specifications_names_are_the_same_classes():
    assert config.ZeroConfig is ZeROConfig
    assert config.ZeROImplementationStage is ZeROStage
    assert issubclass(UsageError, ValueError)


def test_a_world_size_that_is_an_index_becomes_an_int():
    assert type(config.check_world_size(np.int64(3))) is int
