"""Plans: the JSON, what fits, the grid that equals them one by one, and advice that was tried."""

import json
import time

import numpy as np
import pytest

from zero_nb.config import UsageError
from zero_nb.theory.frameworks import FRAMEWORKS
from zero_nb.theory.memory import get_recipe, model_state_bytes
from zero_nb.theory.peak import MOMENTS
from zero_nb.theory.plan import (
    BYTE_KINDS,
    ClusterSpec,
    make_run,
    plan,
    plan_grid,
    resolve_model,
)
from zero_nb.theory.presets import MODELS, get_model
from zero_nb.theory.specs import gpt_like, shape_for
from zero_nb.theory.traffic import elements_per_step

A100 = ClusterSpec.of("a100-80gb", 64)
KEYS = {
    "model", "numel", "world_size", "stage", "precision", "bytes", "total_bytes", "device_bytes",
    "fits", "smallest_stage", "smallest_world_size", "largest_numel", "elements_sent",
    "step_seconds_bound", "advice",
}  # fmt: skip


def test_states_only_of_the_papers_figure_1():
    wanted = [120_000_000_000, 31_406_250_000, 16_640_625_000, 1_875_000_000]
    for stage, total in enumerate(wanted):
        answer = plan(7_500_000_000, 64, stage=stage, states_only=True).to_json()
        assert answer["total_bytes"] == total
        assert set(answer["bytes"]) == {"param", "grad", "optim"}
        assert sum(answer["bytes"].values()) == total
        assert [row["total_bytes"] for row in answer["stages"]] == wanted


@pytest.mark.parametrize("stage", range(4))
def test_json_has_the_agreed_keys_and_lines_that_add_up(stage):
    answer = plan("llama-2-70b", A100, stage=stage, recompute="full").to_json()
    assert set(answer) >= KEYS
    assert tuple(answer["bytes"]) == BYTE_KINDS
    assert sum(answer["bytes"].values()) == answer["total_bytes"]
    assert answer["fits"] == (answer["total_bytes"] <= answer["device_bytes"])
    assert sum(answer["lines"].values()) == max(answer["moments"].values())
    json.dumps(answer, allow_nan=False)


def test_states_of_a_full_plan_are_the_papers_too():
    for stage in range(4):
        answer = plan("gpt2-xl", 8, stage=stage, framework="megatron", precision="bf16")
        wanted = model_state_bytes(stage, 8, 1_557_611_200).as_dict()
        got = {kind: answer.bytes[kind] for kind in ("param", "optim")}
        assert got == {kind: wanted[kind] for kind in got}


def test_auto_takes_the_smallest_stage_that_fits():
    answer = plan("llama-7b", ClusterSpec(8, 80 * 2**30), recompute="full", micro_batch=1)
    each = [row["fits"] for row in answer.stages]
    assert answer.stage == answer.smallest_stage == each.index(True)
    nothing = plan("llama-2-70b", ClusterSpec(1, 10**9))
    assert (nothing.stage, nothing.smallest_stage, nothing.fits) == (3, None, False)
    assert plan("gpt2", 4).stage == 0  # without a device there is nothing to exceed
    assert plan("gpt2", 4).fits is None


@pytest.mark.parametrize("stage", [1, 3])
def test_smallest_world_size_is_where_it_starts_to_fit(stage):
    options = {"stage": stage, "recompute": "full", "seq": 1024}
    answer = plan("opt-13b", ClusterSpec(64, 80 * 10**9), **options)
    smallest = answer.smallest_world_size
    assert smallest is not None
    assert plan("opt-13b", ClusterSpec(smallest, 80 * 10**9), **options).fits
    assert not plan("opt-13b", ClusterSpec(smallest - 1, 80 * 10**9), **options).fits


def test_smallest_world_size_keeps_the_parallel_degrees():
    cluster = ClusterSpec(64, 80 * 10**9)
    answer = plan("llama-2-70b", cluster, stage=3, tp=8, recompute="full", seq=2048)
    assert answer.smallest_world_size % 8 == 0
    smaller = ClusterSpec(answer.smallest_world_size, 80 * 10**9)
    assert plan("llama-2-70b", smaller, stage=3, tp=8, recompute="full", seq=2048).fits


def test_states_only_smallest_world_size_and_largest_model():
    device = ClusterSpec(64, 32 * 10**9)
    answer = plan(7_500_000_000, device, stage=3, states_only=True)
    assert answer.smallest_world_size == 4  # 120 GB in 32 GB devices
    assert answer.largest_numel // 64 == 128_000_000_000 // 64  # table 2
    assert plan(answer.largest_numel, device, stage=3, states_only=True).fits
    assert not plan(answer.largest_numel + 64, device, stage=3, states_only=True).fits


def test_largest_batch_and_model_are_at_the_edge():
    options = {"stage": 3, "seq": 1024, "recompute": "full"}
    cluster = ClusterSpec(16, 40 * 10**9)
    answer = plan("gpt-3-6.7b", cluster, **options)
    batch = answer.largest_micro_batch
    assert plan("gpt-3-6.7b", cluster, micro_batch=batch, **options).fits
    assert not plan("gpt-3-6.7b", cluster, micro_batch=batch + 1, **options).fits
    assert answer.largest_numel > answer.numel


def test_elements_sent_are_those_of_the_traffic_formula():
    spec = get_model("gpt2-medium")
    units = spec.unit_numels()
    for stage in range(4):
        answer = plan(spec, 6, stage=stage, micro_batches=3)
        merged = [*units[1:-1], units[0] + units[-1]]
        assert answer.elements_sent == elements_per_step(stage, 6, merged, micro_batches=3)


def test_step_time_is_a_bound_with_a_reason_and_needs_a_known_device():
    answer = plan("llama-7b", A100, stage=3, recompute="full")
    assert answer.step_seconds_bound == answer.time.bound_s > 0
    assert answer.time.limit in ("arithmetic", "data-parallel communication", "tensor parallelism")
    assert plan("llama-7b", ClusterSpec(64, 80 * 10**9), stage=3).step_seconds_bound is None
    slower = plan("llama-7b", A100, stage=3)
    assert slower.time.data_parallel_s > plan("llama-7b", A100, stage=2).time.data_parallel_s


def test_pipeline_stages_each_on_their_own():
    answer = plan("gpt-3-175b", ClusterSpec.of("a100-80gb", 512), stage=1, tp=8, pp=8, seq=2048)
    assert [row["stage"] for row in answer.pipeline] == list(range(8))
    assert answer.total_bytes == max(row["total_bytes"] for row in answer.pipeline)


def test_advice_says_what_decides_and_what_was_tried():
    answer = plan("llama-2-70b", A100, stage=2)
    assert answer.advice[0].startswith("The largest moment is the ")
    assert answer.advice[1].startswith("Does not fit: ")
    tried = [line for line in answer.advice if line.startswith("Try ")]
    assert tried
    for line in tried:
        assert line.endswith((", fits", "still too much"))
    assert any(line.startswith("Try full recomputation") or "together" in line for line in tried)
    fits = plan("gpt2", A100, stage=3)
    assert any(line.startswith("Fits, with ") for line in fits.advice)
    assert any("Stage 0 fits too" in line for line in fits.advice)


def test_a_suggestion_that_fits_really_fits():
    answer = plan("gpt-3-13b", ClusterSpec(64, 80 * 10**9), stage=1, seq=2048)
    assert not answer.fits
    line = next(line for line in answer.advice if line.startswith("Try full recomputation"))
    again = plan("gpt-3-13b", ClusterSpec(64, 80 * 10**9), stage=1, seq=2048, recompute="full")
    assert line.endswith("fits") == again.fits
    assert f"{again.total_bytes / 1e9:,.2f} GB" in line


def test_gb_and_gib_are_told_apart_where_it_matters():
    need = plan("llama-7b", 8, stage=3, seq=2048).total_bytes
    size = need // 10**9
    answer = plan("llama-7b", ClusterSpec(8, size * 10**9), stage=3, seq=2048)
    assert not answer.fits
    assert any("write GiB then" in line for line in answer.advice)


def test_live_parameters_are_warned_about():
    answer = plan("gpt-3-2.7b", ClusterSpec(64, 80 * 10**9), stage=3, framework="deepspeed",
                  recompute="full", seq=512)  # fmt: skip
    assert any("limit of live parameters" in line for line in answer.advice)


def test_a_bare_number_takes_states_from_itself_and_says_what_it_assumes():
    answer = plan(7_500_000_000, A100, stage=0)
    assert answer.bytes["param"] == 15_000_000_000
    assert any("GPT-3's proportions" in line for line in answer.advice)
    assert resolve_model(123)[1] == 123


def test_a_plan_is_frozen():
    answer = plan("gpt2", 4)
    with pytest.raises(AttributeError):
        answer.stage = 2
    with pytest.raises(TypeError):
        answer.bytes["param"] = 0


# --- grid ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("framework", ["zero", "deepspeed", "fsdp2", "megatron"])
def test_a_grid_is_the_plans_one_by_one(framework):
    models = [get_model("llama-3-8b"), gpt_like(3, 96, 4)]
    worlds, batches = [1, 3, 64], [1, 17]
    options = {"framework": framework, "seq": 512, "recompute": "full", "micro_batches": 2}
    grid = plan_grid(models, worlds, batches=batches, device_bytes=40 * 10**9, by_kind=True,
                     **options)  # fmt: skip
    for m, model in enumerate(models):
        for w, world in enumerate(worlds):
            for s, stage in enumerate(grid.stages):
                for b, batch in enumerate(batches):
                    cluster = ClusterSpec(world, 40 * 10**9)
                    one = plan(model, cluster, stage=stage, micro_batch=batch, **options)
                    where = (m, w, s, b)
                    assert grid.total_bytes[where] == one.total_bytes
                    assert grid.fits[where] == one.fits
                    assert MOMENTS[grid.moment[where]] == one.moment
                    assert grid.elements_sent[where[:3]] == one.elements_sent
                    assert {k: int(v[where]) for k, v in grid.kinds.items()} == dict(one.bytes)


def test_a_grid_over_a_pipeline_takes_the_fullest_stage():
    models = [get_model("gpt2-medium"), get_model("gpt2-large")]
    options = {"tp": 2, "pp": 3, "seq": 512}
    grid = plan_grid(models, [6, 12], stages=[1], **options)
    for m, model in enumerate(models):
        for w, world in enumerate([6, 12]):
            one = plan(model, world, stage=1, **options)
            assert grid.total_bytes[m, w, 0, 0] == one.total_bytes
            assert grid.elements_sent[m, w, 0] == one.elements_sent


def test_a_million_plans_in_under_two_seconds():
    models = [shape_for(int(1e8 * 1.1**i)) for i in range(100)]
    start = time.perf_counter()
    grid = plan_grid(models, range(8, 208, 8), batches=range(1, 101), device_bytes=80 * 2**30)
    fits = grid.fits
    seconds = time.perf_counter() - start
    assert fits.size == 1_000_000
    assert 0 < fits.mean() < 1
    assert seconds < 2
    assert (np.diff(grid.total_bytes, axis=3) >= 0).all()  # more samples never need less


def test_smallest_stage_of_a_grid():
    grid = plan_grid(["gpt2", "gpt-3-175b"], [8], device_bytes=40 * 10**9, seq=1024)
    assert grid.smallest_stage.shape == (2, 1, 1)
    assert grid.smallest_stage.ravel().tolist() == [
        plan("gpt2", ClusterSpec(8, 40 * 10**9), seq=1024).smallest_stage,
        -1,
    ]
    with pytest.raises(UsageError, match="made without device_bytes"):
        _ = plan_grid(["gpt2"], [8]).fits


# --- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plan("lama-2-70b", 8), "did you mean llama-2-70b"),
        (lambda: plan("gpt2", 0), "world_size must be"),
        (lambda: plan("gpt2", -4), "world_size must be"),
        (lambda: plan(-5, 8), "params must be"),
        (lambda: plan("gpt2", 8, tp=3), "tp 3 does not divide world_size 8"),
        (lambda: plan("gpt2", 8, stage=4), "stage must be"),
        (lambda: plan("gpt2", 8, precision="bf61"), "did you mean bf16"),
        (lambda: plan("gpt2", 8, framework="deepsped"), "did you mean deepspeed"),
        (lambda: plan("gpt2", 8, batch=3), "unknown option batch"),
        (lambda: plan("gpt2", 32, pp=16), "pp 16 is more than the 12 layers"),
        (lambda: ClusterSpec(8, -1), "device memory must be"),
        (lambda: plan_grid([], [8]), "at least one model"),
    ],
)
def test_bad_input_is_one_clear_line(call, message):
    with pytest.raises(UsageError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_make_run_takes_the_frameworks_choices_unless_told():
    run = make_run(ClusterSpec(8), 3, framework="fsdp2")
    assert (run.recipe, run.execution) == (get_recipe("fp32-bf16-compute"), "eager")
    run = make_run(ClusterSpec(8), 3, framework="fsdp2", precision="bf16", loss="chunked")
    assert (run.recipe.total_bytes, run.loss) == (16, "chunked")


def test_every_preset_framework_and_stage_can_be_planned():
    for place, model in enumerate(MODELS.values()):
        framework = list(FRAMEWORKS)[place % len(FRAMEWORKS)]
        for stage in range(4):
            answer = plan(model, A100, stage=stage, framework=framework, recompute="full")
            assert answer.total_bytes > 0
            assert sum(answer.bytes.values()) == answer.total_bytes
            json.dumps(answer.to_json(), allow_nan=False)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plan("gpt2", A100, micro_batch=10**12), "micro_batch must be at most"),
        (lambda: plan("gpt2", A100, micro_batch=2**31, seq=2**31), "more than an exabyte"),
        (lambda: plan("gpt2", 10**30), "world_size must be at most"),
        (lambda: plan(10**17, 8), "params must be at most"),
        (lambda: plan_grid(["gpt2"], [8], batches=[2**40]), "more than an exabyte"),
    ],
)
def test_absurd_numbers_are_one_clear_line_too(call, message):
    with pytest.raises(UsageError, match=message):
        call()


def test_large_but_possible_numbers_do_not_wrap_around():
    cluster = ClusterSpec(2**20, 2**40)
    options = {"seq": 131072, "flash": False, "stage": 3}
    answer = plan("llama-3.1-405b", cluster, **options)
    assert answer.largest_micro_batch is None
    assert answer.total_bytes > cluster.device_bytes
    small = plan("gpt2", ClusterSpec(8, 2**50), seq=1024)
    assert small.largest_micro_batch == 2**16
