"""The largest moment of a step: lines against a slow twin, and what each option does."""

import pytest

from zero_nb.config import UsageError
from zero_nb.theory.activations import LOSSES, korthikanti_layer_bytes
from zero_nb.theory.frameworks import (
    CONTEXT_BYTES,
    FRAMEWORKS,
    RESERVED_LOGS,
    RESERVED_OVER_ALLOCATED,
    get_framework,
)
from zero_nb.theory.memory import get_recipe, model_state_bytes
from zero_nb.theory.peak import (
    KINDS,
    LINES,
    MOMENTS,
    Run,
    device_model,
    moment_lines,
    peak_of_stage,
    pipeline_peaks,
)
from zero_nb.theory.presets import get_model
from zero_nb.theory.specs import gpt_like

SPEC = gpt_like(3, 96, 4, vocab=1003, seq=64)


def run(**options):
    """A small run with awkward numbers."""
    return Run(**({"world_size": 5, "seq": 48, "micro_batch": 3} | options))


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("world_size", [1, 2, 5, 7])
def test_states_are_the_papers_formula_and_padding_is_apart(stage, world_size):
    lines = moment_lines(device_model(SPEC, run()), run(stage=stage, world_size=world_size))
    step = lines["optimizer step"]
    wanted = model_state_bytes(stage, world_size, SPEC.numel)
    assert step["parameters"] == wanted.param
    assert step["gradients"] == wanted.grad
    assert step["optimizer states"] == wanted.optim
    units = SPEC.unit_numels()
    root = units[0] + units[-1]
    padded = sum(-(-n // world_size) * world_size for n in [root, *units[1:-1]])
    whole = model_state_bytes(stage, world_size, padded).total
    assert step["padding"] == (0 if stage == 0 else whole - wanted.total)


def test_every_line_has_a_kind_and_every_moment_only_such_lines():
    for stage in range(4):
        for moment, lines in moment_lines(device_model(SPEC, run()), run(stage=stage)).items():
            assert moment in MOMENTS
            assert set(lines) <= set(LINES)
    assert set(LINES.values()) == set(KINDS)


def test_the_peak_is_the_largest_moment_and_its_lines_add_up():
    for stage in range(4):
        peak = peak_of_stage(SPEC, run(stage=stage))
        assert peak.allocated == max(peak.moments.values()) == peak.moments[peak.moment]
        assert sum(peak.by_kind().values()) == peak.allocated


def test_activations_of_a_gpt_are_korthikantis_and_a_little_at_the_ends():
    s, b, h = 48, 3, SPEC.hidden
    options = {"flash": False, "dropout": True, "framework": get_framework("megatron")}
    lines = moment_lines(device_model(SPEC, run(**options)), run(**options))
    layers = SPEC.layers * korthikanti_layer_bytes(s, b, h, SPEC.heads)
    dropout_mask, norm_in_and_out = s * b * h, 2 * 2 * s * b * h
    got = lines["end of forward"]["saved activations"]
    assert got == layers + dropout_mask + norm_in_and_out


@pytest.mark.parametrize("loss", LOSSES)
def test_logits_by_how_the_loss_is_computed(loss):
    lines = moment_lines(device_model(SPEC, run(loss=loss)), run(loss=loss))
    assert lines["loss"]["logits and loss"] == 3 * 48 * 1003 * LOSSES[loss][0]
    assert "logits and loss" not in lines["start of backward"]


def test_gradients_stand_in_forward_only_where_they_persist():
    once = run(framework=get_framework("fsdp2"))
    assert "gradients" not in moment_lines(device_model(SPEC, once), once)["loss"]
    again = run(framework=get_framework("fsdp2"), micro_batches=2)
    assert "gradients" in moment_lines(device_model(SPEC, again), again)["loss"]
    standing = run(framework=get_framework("megatron"))
    assert "gradients" in moment_lines(device_model(SPEC, standing), standing)["loss"]


def test_stage_3_gathers_two_layers_and_the_root_or_up_to_a_limit():
    units = run(stage=3)
    model = device_model(SPEC, units)
    got = moment_lines(model, units)["loss"]["gathered units"]
    assert got == 2 * (model.root_numel + 2 * model.block_numel)
    live = run(stage=3, framework=get_framework("deepspeed"), max_live=1000)
    assert moment_lines(model, live)["loss"]["gathered units"] == 2 * 1000
    unlimited = run(stage=3, framework=get_framework("deepspeed"))
    assert moment_lines(model, unlimited)["loss"]["gathered units"] == 2 * SPEC.numel
    assert "gathered units" not in moment_lines(model, live)["optimizer step"]


def test_persistent_small_parameters():
    options = run(stage=3, persist_below=100)
    model = device_model(SPEC, options)
    # Two norms of 2h, and the two biases of h; 3h and 4h biases are above the threshold.
    assert model.small_numel == SPEC.layers * 6 * SPEC.hidden
    small = moment_lines(model, options)["optimizer step"]["persistent small parameters"]
    assert small == 2 * model.small_numel


def test_buckets_by_size_overlap_and_model():
    plain = run(stage=2, reduce_bucket=1000)
    model = device_model(SPEC, plain)
    assert moment_lines(model, plain)["start of backward"]["reduce bucket"] == 2000
    double = run(stage=2, reduce_bucket=1000, overlap=True)
    assert moment_lines(model, double)["start of backward"]["reduce bucket"] == 4000
    capped = run(stage=2)
    assert moment_lines(model, capped)["loss"]["reduce bucket"] == 2 * SPEC.numel
    whole = run(stage=2, framework=get_framework("deepspeed"))
    assert moment_lines(model, whole)["loss"]["reduce bucket"] == 10**9
    alone = run(stage=2, world_size=1)
    assert moment_lines(device_model(SPEC, alone), alone)["loss"]["reduce bucket"] == 0


def test_float32_gradient_copy_at_the_step():
    deepspeed = get_framework("deepspeed")
    for stage, owned in ((0, SPEC.numel), (1, SPEC.numel // 5), (3, SPEC.numel // 5)):
        options = run(stage=stage, framework=deepspeed)
        step = moment_lines(device_model(SPEC, options), options)["optimizer step"]
        assert step["fp32 gradient copy"] == 4 * owned


def test_offload_takes_states_off_the_device():
    kept = run(stage=3)
    peak = moment_lines(device_model(SPEC, kept), run(stage=3, offload={"optimizer"}))
    assert peak["optimizer step"]["optimizer states"] == 0
    assert peak["optimizer step"]["gradients"] == 0
    assert peak["optimizer step"]["parameters"] > 0
    peak = moment_lines(device_model(SPEC, kept), run(stage=3, offload={"optimizer", "param"}))
    assert peak["optimizer step"]["parameters"] == 0
    with pytest.raises(UsageError, match="offload of param is for stage 3, got stage 1"):
        run(stage=1, offload={"param"})


def test_zero_shards_over_the_data_parallel_group_not_over_all_devices():
    spec = get_model("gpt2-medium")
    options = Run(world_size=16, tp=2, pp=2, stage=3, seq=1024)
    assert options.dp == 4
    model = device_model(spec, options, 0)
    got = moment_lines(model, options)["optimizer step"]["parameters"]
    assert got == 2 * spec.shard_numel(2, 2, 0) // 4


def test_sequence_parallel_ranks_share_the_sharding():
    options = Run(world_size=8, sp=4, stage=2, seq=1024)
    assert options.dp == 8
    whole = moment_lines(device_model(SPEC, options), options)["loss"]["saved activations"]
    alone = moment_lines(device_model(SPEC, options), Run(world_size=8, stage=2, seq=256))
    assert whole == alone["loss"]["saved activations"]


def test_pipeline_first_stage_holds_more_micro_batches_last_one_the_logits():
    spec = get_model("gpt2-medium")
    options = Run(world_size=4, pp=4, stage=0, seq=1024, micro_batches=8)
    models = [device_model(spec, options, stage) for stage in range(4)]
    assert [model.passes for model in models] == [4, 3, 2, 1]
    peaks = pipeline_peaks(spec, options)
    assert [peak.pipeline_stage for peak in peaks] == [0, 1, 2, 3]
    lines = moment_lines(models[0], options)["loss"]
    assert lines["logits and loss"] == 0
    assert moment_lines(models[3], options)["loss"]["logits and loss"] > 0


def test_a_published_log_of_parameters_gradients_and_states():
    """BigScience, gpt2-meg 18B, TP 4 PP 4: 23215.09 MiB after a step, 20 B each."""
    spec = gpt_like(40, 6144, 32, vocab=50688, seq=1024)
    options = Run(
        world_size=16, tp=4, pp=4, stage=0, seq=1024, framework=get_framework("megatron-2021"),
        recipe=get_recipe("fp16-both-grads"),
    )  # fmt: skip
    assert f"{peak_of_stage(spec, options).after_step / 2**20:.1f}" == "23214.1"


def test_every_framework_names_its_source_and_valid_choices():
    for framework in FRAMEWORKS.values():
        assert len(framework.source) > 10
        assert framework.loss in LOSSES
        assert get_recipe(framework.precision)


def test_constants_outside_tensors_come_from_logs_with_a_source():
    assert all(len(source) > 10 for source, _, _ in RESERVED_LOGS)
    ratios = sorted(reserved / allocated for _, allocated, reserved in RESERVED_LOGS)
    assert min(ratios) >= 1
    low, middle, high = RESERVED_OVER_ALLOCATED
    assert middle == round(ratios[len(ratios) // 2], 2)
    assert 1 <= low < middle < high
    for low, middle, high, source in CONTEXT_BYTES.values():
        assert low < middle < high
        assert source


def test_the_range_goes_from_allocated_to_the_device():
    peak = peak_of_stage(SPEC, run())
    low, middle, high = peak.reserved()
    assert peak.allocated < low < middle < high
    assert peak.device()[1] == middle + CONTEXT_BYTES["connected"][1]
    static = peak_of_stage(SPEC, run(framework=get_framework("llm.c")))
    assert static.reserved() == (static.allocated,) * 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"world_size": 0}, "world_size must be"),
        ({"tp": 2}, "tp 2 does not divide world_size 5"),
        ({"world_size": 8, "tp": 2, "pp": 3}, r"tp x pp 6 does not divide world_size 8"),
        ({"world_size": 5, "sp": 5}, "sp 5 does not divide seq 48"),
        ({"recompute": "ful"}, "did you mean full"),
        ({"loss": "chunky"}, "did you mean chunked"),
        ({"offload": {"optimiser"}}, "did you mean optimizer"),
        ({"stage": 4}, "stage must be"),
        ({"micro_batch": 0}, "micro_batch must be"),
    ],
)
def test_bad_settings_are_one_clear_line(options, message):
    with pytest.raises(UsageError, match=message) as caught:
        run(**options)
    assert "\n" not in str(caught.value)
