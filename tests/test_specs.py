"""Shapes of models: exact counts, presets with sources, config.json, sizes as people write them."""

import csv
import json
from pathlib import Path

import pytest

from zero_nb.config import UsageError
from zero_nb.theory.presets import DEVICES, MODELS, get_device, get_model
from zero_nb.theory.sizes import format_gb_gib, parse_count, parse_size
from zero_nb.theory.specs import (
    ModelSpec,
    gpt_like,
    llama_like,
    load_config,
    model_from_config,
    shape_for,
)

REFERENCE = Path(__file__).parent / "data" / "reference"


def rows(name):
    """Rows of a reference file, without its comment lines."""
    with open(REFERENCE / name, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


CONFIGS = rows("model_configs.csv")


def test_there_is_a_preset_for_every_row():
    assert len(CONFIGS) == len(MODELS) == 44
    assert {get_model(row["name"]).name for row in CONFIGS} == set(MODELS)


@pytest.mark.parametrize("row", CONFIGS, ids=lambda row: row["name"])
def test_preset_has_the_published_shape_and_count(row):
    spec = get_model(row["name"])
    assert spec.numel == int(row["params_exact"])
    assert sum(spec.unit_numels()) == spec.numel
    for field in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab"):
        assert getattr(spec, field) == int(row[field]), field
    if row["largest_layer_params"]:
        assert spec.largest_layer_numel == int(row["largest_layer_params"])
    if row["max_positions"]:
        assert spec.context == int(row["max_positions"].split("/")[0])


def naive_gpt2_numel(layers, h, vocab, positions):
    """Every tensor of a GPT-2 written down one by one."""
    tensors = [(vocab, h), (positions, h)]
    for _ in range(layers):
        tensors += [(h,), (h,), (h, 3 * h), (3 * h,), (h, h), (h,)]
        tensors += [(h,), (h,), (h, 4 * h), (4 * h,), (4 * h, h), (h,)]
    tensors += [(h,), (h,)]
    total = 0
    for shape in tensors:
        product = 1
        for side in shape:
            product *= side
        total += product
    return total


@pytest.mark.parametrize("shape", [(1, 8, 5, 3), (3, 20, 11, 7), (12, 768, 50257, 1024)])
def test_closed_form_equals_the_sum_over_tensors(shape):
    layers, h, vocab, positions = shape
    assert gpt_like(layers, h, 4, vocab, positions).numel == naive_gpt2_numel(*shape)


def test_every_preset_names_its_source():
    for preset in [*MODELS.values(), *DEVICES.values()]:
        assert len(preset.source) > 10, preset.name
        assert "{" not in preset.source, preset.name


def test_devices_are_found_in_any_case_and_the_largest_by_family():
    assert get_device("A100").name == "a100-80gb"
    assert get_device("a100-40gb").memory_bytes == 40 * 2**30
    assert get_device("V100").name == "v100-32gb"
    assert get_device("v100-paper").memory_bytes == 32_000_000_000
    with pytest.raises(UsageError, match="did you mean h100-80gb"):
        get_device("h100-80g")


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("LLaMA-2-70B", "llama-2-70b"),
        ("GPT-3 175B", "gpt-3-175b"),
        ("bloom (176B)", "bloom-176b"),
        ("llama-7b / llama-2-7b", "llama-7b"),
        ("gpt3", "gpt-3-175b"),
    ],
)
def test_models_are_found_by_the_names_people_use(name, wanted):
    assert get_model(name).name == wanted


def test_unknown_model_offers_the_nearest():
    with pytest.raises(UsageError, match=r"unknown model 'lama-2-70b'; did you mean llama-2-70b"):
        get_model("lama-2-70b")


def test_tensor_parallel_shard_of_a_published_log():
    """BigScience, gpt2-meg 18B: the log of TP 4, PP 4 prints 1217086464 parameters a device."""
    spec = gpt_like(40, 6144, 32, vocab=50688, seq=1024)
    assert spec.shard_numel(tp=4, pp=4, stage=0) == 1_217_086_464


@pytest.mark.parametrize("pp", [1, 2, 3, 5])
@pytest.mark.parametrize("name", ["gpt2-xl", "llama-2-70b", "opt-350m", "bloom-560m"])
def test_pipeline_shards_sum_to_the_model_and_a_copied_tied_head(name, pp):
    spec = get_model(name)
    total = sum(spec.shard_numel(1, pp, stage) for stage in range(pp))
    copied = spec.embedding_numel if spec.tied and pp > 1 else 0
    assert total == spec.numel + copied
    assert sum(spec.stage_layers(pp)) == spec.layers


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_tensor_shards_hold_everything_and_repeat_only_norms_and_row_biases(tp):
    spec = get_model("gpt2-medium")
    h = spec.hidden
    shards = tp * spec.shard_numel(tp)
    repeated = (tp - 1) * (spec.layers * 6 * h + spec.positions * h + 2 * h)
    vocab_padding = (-spec.vocab % tp) * h
    assert shards == spec.numel + repeated + vocab_padding


HF = {
    "gpt2": {
        "model_type": "gpt2", "n_layer": 48, "n_embd": 1600, "n_head": 25, "vocab_size": 50257,
        "n_positions": 1024,
    },
    "opt-1.3b": {
        "model_type": "opt", "num_hidden_layers": 24, "hidden_size": 2048, "ffn_dim": 8192,
        "num_attention_heads": 32, "vocab_size": 50272, "max_position_embeddings": 2048,
    },
    "opt-350m": {
        "model_type": "opt", "num_hidden_layers": 24, "hidden_size": 1024, "ffn_dim": 4096,
        "num_attention_heads": 16, "vocab_size": 50272, "max_position_embeddings": 2048,
        "word_embed_proj_dim": 512, "do_layer_norm_before": False,
    },
    "bloom-7b1": {
        "model_type": "bloom", "n_layer": 30, "hidden_size": 4096, "n_head": 32,
        "vocab_size": 250880,
    },
    "llama-2-70b": {
        "model_type": "llama", "num_hidden_layers": 80, "hidden_size": 8192,
        "num_attention_heads": 64, "num_key_value_heads": 8, "intermediate_size": 28672,
        "vocab_size": 32000, "max_position_embeddings": 4096, "tie_word_embeddings": False,
    },
    "t5-3b": {
        "model_type": "t5", "num_layers": 24, "d_model": 1024, "num_heads": 32, "d_kv": 128,
        "d_ff": 16384, "vocab_size": 32128, "relative_attention_num_buckets": 32,
    },
    "T0_3B": {
        "model_type": "t5", "num_layers": 24, "d_model": 2048, "num_heads": 32, "d_kv": 64,
        "d_ff": 5120, "vocab_size": 32128, "feed_forward_proj": "gated-gelu",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", HF)
def test_config_json_gives_the_presets_count(tmp_path, name):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(HF[name]), encoding="utf-8")
    wanted = get_model("gpt2-xl" if name == "gpt2" else name).numel
    assert load_config(path).numel == wanted


def test_config_json_of_other_architectures():
    qwen2 = {
        "model_type": "qwen2", "num_hidden_layers": 24, "hidden_size": 896,
        "num_attention_heads": 14, "num_key_value_heads": 2, "intermediate_size": 4864,
        "vocab_size": 151936, "tie_word_embeddings": True,
    }  # fmt: skip
    assert model_from_config(qwen2).numel == 494_032_768  # Qwen2.5-0.5B as published
    qwen3 = {
        "model_type": "qwen3", "num_hidden_layers": 28, "hidden_size": 1024, "head_dim": 128,
        "num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 3072,
        "vocab_size": 151936, "tie_word_embeddings": True,
    }  # fmt: skip
    assert model_from_config(qwen3).numel == 596_049_920  # Qwen3-0.6B as published
    pythia = {
        "model_type": "gpt_neox", "num_hidden_layers": 24, "hidden_size": 2048,
        "num_attention_heads": 16, "intermediate_size": 8192, "vocab_size": 50304,
    }  # fmt: skip
    assert model_from_config(pythia).numel == 1_414_647_808  # Pythia-1.4B as published


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[1]", "must hold one JSON object"),
        ('{"model_type": "llama", "hidden_size": 8}', "lacks num_hidden_layers, num_attention"),
        ('{"model_type": "lama"}', "did you mean llama"),
        ('{"model_type": "gpt2", "n_layer": -1, "n_embd": 8, "n_head": 2, "vocab_size": 9, '
         '"n_positions": 4}', "n_layer must be a whole number of at least 1, got -1"),
    ],
)  # fmt: skip
def test_a_bad_config_is_one_clear_line(tmp_path, content, message):
    path = tmp_path / "config.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(UsageError, match=message) as caught:
        load_config(path)
    assert "\n" not in str(caught.value)


def test_a_missing_config_is_one_clear_line(tmp_path):
    with pytest.raises(UsageError, match="cannot read"):
        load_config(tmp_path / "none.json")


@pytest.mark.parametrize(
    "call",
    [
        lambda: gpt_like(2, 10, 3),
        lambda: llama_like(2, 10, 3, 8),
        lambda: gpt_like(0, 8, 2),
        lambda: ModelSpec("x", 2, 8, 4, 10, kv_heads=3),
        lambda: get_model("gpt2").shard_numel(pp=13),
    ],
)
def test_an_impossible_shape_is_refused(call):
    with pytest.raises(UsageError):
        call()


@pytest.mark.parametrize("numel", [1, 10**6, 7_500_000_000, 10**12])
def test_a_shape_for_a_bare_count_has_about_that_count(numel):
    spec = shape_for(numel)
    assert spec.source
    if numel >= 10**9:
        assert spec.layers * 12 * spec.hidden**2 == pytest.approx(numel, rel=0.05)
    assert spec.hidden % spec.heads == 0


# --- sizes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("80GB", 80 * 10**9),
        ("80GiB", 80 * 2**30),
        ("1.5 GB", 1_500_000_000),
        ("512MiB", 2**29),
        ("7e9B", 7 * 10**9),
        ("3kB", 3000),
        ("123456789012345678B", 123456789012345678),
        (5, 5),
    ],
)
def test_sizes(text, wanted):
    assert parse_size(text) == wanted


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("80gb", r"is unclear; write 80GB \(10\^9 bytes\) or 80GiB \(2\^30 bytes\)"),
        ("80Gb", "is unclear"),
        ("80gib", "is unclear"),
        ("80", "has no unit; write 80GB"),
        ("80XB", "unknown unit"),
        ("-80GB", "must be above zero"),
        ("0GB", "must be above zero"),
        ("eighty", "is not a size"),
        ("nanGB", "is not a size"),
        ("1e400GB", "must be above zero"),
        (True, "is not a size"),
    ],
)
def test_unclear_sizes_are_refused_in_one_line(text, message):
    with pytest.raises(UsageError, match=message) as caught:
        parse_size(text, "--device-memory")
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("--device-memory")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("7.5e9", 7_500_000_000), ("7.5B", 7_500_000_000), ("1_000", 1000), ("124439808", 124439808),
     ("1T", 10**12), (3, 3), ("999999999999999999", 999999999999999999), ("0.5K", 500)],
)  # fmt: skip
def test_counts(text, wanted):
    assert parse_count(text) == wanted


@pytest.mark.parametrize("text", ["0", "-3", "1.5", "many", "1e30", "", "nan"])
def test_bad_counts(text):
    with pytest.raises(UsageError):
        parse_count(text, "--params")


def test_gb_and_gib_side_by_side():
    assert format_gb_gib(31_406_250_000) == "31.41 GB (29.25 GiB)"
