"""Configurations of other libraries, read without running anything, and what they predict."""

import json

import pytest

from zero_nb.config import UsageError
from zero_nb.theory.configs import (
    ALL_PARAMETERS,
    beside_published,
    read_deepspeed,
    read_fsdp1,
    read_fsdp2,
    read_megatron,
)
from zero_nb.theory.peak import peak_of_stage, pipeline_peaks
from zero_nb.theory.presets import get_model
from zero_nb.theory.published import judge, published_rows

DEEPSPEED = """
{"fp16": {"enabled": true},
 "train_micro_batch_size_per_gpu": 48,
 "zero_optimization": {"stage": 3, "reduce_bucket_size": 6.7e7,
                       "stage3_max_live_parameters": 1e9, "contiguous_gradients": true},
 "activation_checkpointing": {"cpu_checkpointing": true}}
"""
FSDP1 = """
model = FSDP(model, sharding_strategy=ShardingStrategy.FULL_SHARD, auto_wrap_policy=by_block,
             mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
"""
FSDP2 = """
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for block in model.layers:
    fully_shard(block, mp_policy=policy)
fully_shard(model, mp_policy=policy)
"""
MEGATRON = r"""
--use-distributed-optimizer --overlap-grad-reduce --bf16 \
--tensor-model-parallel-size 4 --micro-batch-size 2 --seq-length=8192
"""


@pytest.mark.parametrize(
    ("reading", "row"),
    [
        (read_deepspeed(DEEPSPEED), "B05"),
        (read_fsdp2(FSDP2), "T01"),
        (read_megatron(MEGATRON), "M01"),
    ],
)
def test_a_configuration_predicts_what_its_row_of_the_table_predicts(reading, row):
    """The configuration says the same as the row's columns, which were read by other rules."""
    described = judge(next(entry for entry in published_rows() if entry["id"] == row))
    judged = beside_published(reading, row)
    assert judged == described
    assert judged.right


def test_the_configuration_is_what_decides():
    """Another stage in the configuration changes the plan; the row does not win."""
    config = json.loads(DEEPSPEED)
    config["zero_optimization"]["stage"] = 1
    other = beside_published(read_deepspeed(json.dumps(config)), "B05")
    assert other.predicted > 2 * beside_published(read_deepspeed(DEEPSPEED), "B05").predicted


def test_deepspeed_keys_become_fields():
    reading = read_deepspeed(
        json.dumps(
            {
                "bf16": {"enabled": True},
                "train_micro_batch_size_per_gpu": 2,
                "gradient_accumulation_steps": 8,
                "gradient_clipping": 1.0,
                "zero_optimization": {
                    "stage": 3,
                    "overlap_comm": True,
                    "reduce_bucket_size": "auto",
                    "stage3_param_persistence_threshold": 1e5,
                    "offload_optimizer": {"device": "cpu"},
                    "offload_param": {"device": "none"},
                    "sub_group_size": 1e9,
                },
            }
        )
    )
    assert (reading.stage, reading.precision, reading.framework) == (3, "bf16", "deepspeed")
    assert reading.options == {
        "micro_batch": 2,
        "micro_batches": 8,
        "persist_below": 100_000,
        "overlap": True,
        "offload": frozenset({"optimizer"}),
    }
    assert reading.left_out == ("gradient_clipping", "sub_group_size")
    assert "reduce_bucket_size is auto: the program that reads this decides" in reading.not_exactly
    assert read_deepspeed("{}").stage == 0
    assert read_deepspeed("{}").precision == "fp32"


def test_stage_1_of_deepspeed_is_not_exactly_stage_1():
    words = read_deepspeed('{"zero_optimization": {"stage": 1}}').not_exactly
    assert any("3Ψ, not 2Ψ" in text for text in words)
    words = read_deepspeed('{"zero_optimization": {"stage": 2}}').not_exactly
    assert any("2m + 1, not m + 1" in text for text in words)


def test_fsdp1_strategies():
    full = read_fsdp1(FSDP1)
    assert (full.stage, full.precision, full.options) == (3, "fp32-bf16-compute", {})
    keeps = read_fsdp1(FSDP1.replace("FULL_SHARD", "SHARD_GRAD_OP"))
    assert keeps.stage == 3
    assert keeps.options == {"max_live": ALL_PARAMETERS}
    assert any("not stage 2" in text for text in keeps.not_exactly)
    assert read_fsdp1(FSDP1.replace("FULL_SHARD", "NO_SHARD")).stage == 0
    one_unit = read_fsdp1("FullyShardedDataParallel(model, use_orig_params=True)")
    assert one_unit.options == {"max_live": ALL_PARAMETERS}
    assert one_unit.precision == "fp32"
    assert one_unit.left_out == ("use_orig_params",)
    host = "FSDP(model, auto_wrap_policy=p, cpu_offload=CPUOffload(offload_params=True))"
    assert read_fsdp1(host).options == {"offload": frozenset({"optimizer", "param"})}


def test_keeping_parameters_gathered_costs_their_whole_size():
    spec = get_model("llama-7b")
    full, keeps = (
        pipeline_peaks(spec, read_fsdp1(text).run(64, seq=2048, recompute="full"))[0]
        for text in (FSDP1, FSDP1.replace("FULL_SHARD", "SHARD_GRAD_OP"))
    )
    gathered = [peak.lines["gathered units"] for peak in (full, keeps)]
    assert gathered[1] == 2 * spec.numel
    assert gathered[0] < 0.2 * gathered[1]


def test_fsdp2_calls():
    reading = read_fsdp2(FSDP2)
    assert (reading.stage, reading.precision, reading.options) == (3, "fp32-bf16-compute", {})
    assert any("root unit is not resharded" in text for text in reading.not_exactly)
    said = FSDP2.replace("(model, mp", "(model, reshard_after_forward=True, mp")
    assert not any("root unit" in text for text in read_fsdp2(said).not_exactly)
    keeps = FSDP2.replace("(block, mp", "(block, reshard_after_forward=False, mp")
    assert read_fsdp2(keeps).options == {"max_live": ALL_PARAMETERS}
    alone = read_fsdp2("fully_shard(model)")
    assert alone.options == {"max_live": ALL_PARAMETERS}
    assert any("one unit" in text for text in alone.not_exactly)
    assert alone.precision == "fp32"
    host = FSDP2.replace("(model, mp", "(model, offload_policy=CPUOffloadPolicy(), mp")
    assert read_fsdp2(host).options == {"offload": frozenset({"optimizer", "param"})}


def test_megatron_flags():
    reading = read_megatron(MEGATRON)
    assert (reading.stage, reading.framework) == (1, "megatron")
    assert reading.precision == "bf16-fp32-grads"
    assert reading.options == {"tp": 4, "micro_batch": 2, "seq": 8192}
    assert reading.left_out == ("--overlap-grad-reduce",)
    assert read_megatron("--bf16").stage == 0
    sharded = "--bf16 --use-megatron-fsdp --data-parallel-sharding-strategy "
    for word, stage in (("no_shard", 0), ("optim", 1), ("optim_grads", 2)):
        assert read_megatron(sharded + word).stage == stage
    all_of_it = read_megatron(sharded + "optim_grads_params --recompute-granularity full")
    assert (all_of_it.stage, all_of_it.framework) == (3, "megatron-fsdp")
    assert all_of_it.options == {"recompute": "full"}
    torch = read_megatron("--use-torch-fsdp2 --bf16 --sequence-parallel")
    assert (torch.stage, torch.precision) == (3, "fp32-bf16-compute")
    assert torch.options == {"sequence_parallel": True}
    assert read_megatron("--fp16").precision == "fp16-both-grads"


def test_a_reading_can_be_planned_for_any_model():
    run = read_deepspeed(DEEPSPEED).run(8, seq=512, recompute="full")
    assert (run.world_size, run.stage, run.seq, run.micro_batch) == (8, 3, 512, 48)
    assert run.recipe.param_bytes == 2
    assert peak_of_stage(get_model("gpt2-xl"), run).allocated > 0


@pytest.mark.parametrize(
    ("read", "text", "message"),
    [
        (read_deepspeed, "{", r"not JSON \(line 1"),
        (read_deepspeed, "[]", "is a JSON object"),
        (read_deepspeed, '{"zero_optimization": 2}', "an object with a stage, got 2"),
        (read_deepspeed, '{"zero_optimization": {"stages": 2}}', "did you mean stage"),
        (read_deepspeed, '{"zero_optimisation": {}}', "did you mean zero_optimization"),
        (read_deepspeed, '{"zero_optimization": {"stage": 4}}', "stage must be at most 3, got 4"),
        (read_deepspeed, '{"zero_optimization": {"stage": true}}', "stage must be a whole number"),
        (
            read_deepspeed,
            '{"zero_optimization": {"reduce_bucket_size": "big"}}',
            "reduce_bucket_size must be a whole number of at least 1, got 'big'",
        ),
        (
            read_deepspeed,
            '{"zero_optimization": {"offload_optimizer": {"device": "gpu"}}}',
            "device must be cpu, nvme or none, got 'gpu'",
        ),
        (
            read_deepspeed,
            '{"bf16": {"enabled": true}, "fp16": {"enabled": true}}',
            "choose one",
        ),
        (read_fsdp1, "FSDP(", r"not Python \(line 1"),
        (read_fsdp1, "model = wrap(model)", "no call of FullyShardedDataParallel"),
        (read_fsdp1, "FSDP(m, strategy=x)", "did you mean sharding_strategy"),
        (read_fsdp1, "FSDP(m, **options)", r"behind \*\* cannot be read"),
        (
            read_fsdp1,
            "FSDP(m, sharding_strategy=ShardingStrategy.HYBRID_SHARD)",
            "give its size as world_size",
        ),
        (read_fsdp1, "FSDP(m, mixed_precision=bf16)", "what bf16 is cannot be read here"),
        (
            read_fsdp1,
            "FSDP(m, mixed_precision=MixedPrecision(param_dtype=torch.int8))",
            "must be bfloat16, float16 or float32, got int8",
        ),
        (read_fsdp2, "x = 1", "no call of fully_shard"),
        (read_fsdp2, "fully_shard(m, reshard=True)", "did you mean .*reshard_after_forward"),
        (read_megatron, "--use-distributed-optimiser", "did you mean --use-distributed-optimizer"),
        (read_megatron, "'--bf16", "cannot be split"),
        (
            read_megatron,
            "--data-parallel-sharding-strategy optim",
            "works with --use-megatron-fsdp only",
        ),
        (
            read_megatron,
            "--use-megatron-fsdp --data-parallel-sharding-strategy all",
            "must be one of no_shard, optim",
        ),
        (read_megatron, "--micro-batch-size", "must be a whole number of at least 1, got ''"),
        (read_megatron, "--bf16 --fp16", "choose one"),
    ],
)
def test_what_cannot_be_read_is_explained(read, text, message):
    with pytest.raises(UsageError, match=message):
        read(text)


def test_an_unknown_row_is_refused():
    with pytest.raises(UsageError, match="unknown row 'T1'; did you mean T01"):
        beside_published(read_fsdp2(FSDP2), "T1")
