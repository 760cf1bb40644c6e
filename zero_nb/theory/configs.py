"""Read a configuration of DeepSpeed, FSDP1, FSDP2 or Megatron-LM, as far as it decides memory.

Nothing is run or imported: JSON is parsed, Python is parsed into its syntax tree, flags are split.
A reading names the nearest stage of ZeRO and, in words, where that is not exact.  It says what
the configuration says; the model, the sequence length, and whether layers are recomputed are
elsewhere, so `ConfigReading.run` takes them as further options.

Sources: https://www.deepspeed.ai/docs/config-json/ and deepspeed/runtime/zero/config.py;
torch.distributed.fsdp.FullyShardedDataParallel and its ShardingStrategy (torch/distributed/fsdp);
torch.distributed.fsdp.fully_shard; Megatron-LM megatron/training/arguments.py and
docs/source/api-guide/dist_optimizer.md, custom_fsdp.md.
"""

from __future__ import annotations

import ast
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from zero_nb.config import UsageError
from zero_nb.theory.checks import check_count, name_error
from zero_nb.theory.memory import get_recipe
from zero_nb.theory.peak import Run
from zero_nb.theory.published import Judgement, judge, published_rows, settings
from zero_nb.theory.setting import ClusterSpec, make_run

__all__ = [
    "ConfigReading",
    "beside_published",
    "read_deepspeed",
    "read_fsdp1",
    "read_fsdp2",
    "read_megatron",
]

ALL_PARAMETERS = 10**15
"""A limit on gathered parameters that no model reaches."""


@dataclass(frozen=True)
class ConfigReading:
    """What a configuration says about memory.

    Attributes
    ----------
    library : str
        Such as ``"DeepSpeed"``.
    stage : int
        The nearest stage of ZeRO.
    framework : str
        See `zero_nb.theory.frameworks.FRAMEWORKS`.
    precision : str
        See `zero_nb.theory.memory.PRECISIONS`.
    options : mapping of str to object
        Further fields of `zero_nb.theory.peak.Run`.
    not_exactly : tuple of str
        Where the library differs from that stage.
    left_out : tuple of str
        Keys that change time, not memory, as this planner counts it.
    """

    library: str
    stage: int
    framework: str
    precision: str
    options: Mapping[str, object] = field(default_factory=dict)
    not_exactly: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    def run(self, world_size: int, **more: object) -> Run:
        """A `Run` of this configuration.

        Parameters
        ----------
        world_size : int
            All devices.
        **more
            What the configuration does not say: ``seq``, ``recompute``, ``loss``, …
        """
        return make_run(
            ClusterSpec(world_size),
            self.stage,
            framework=self.framework,
            precision=self.precision,
            **(dict(self.options) | more),
        )


def beside_published(reading: ConfigReading, row: str) -> Judgement:
    """Predict a published run from a configuration, and lay it beside what was measured.

    Parameters
    ----------
    reading : ConfigReading
    row : str
        Its id in ``measured_peaks.csv``, such as ``"T01"``.  The row gives what the configuration
        does not: model, devices, sequence length, recomputation, how the loss is computed.

    Returns
    -------
    Judgement
    """
    rows = {entry["id"]: entry for entry in published_rows()}
    if row not in rows:
        raise name_error("row", row, rows)
    _, run = settings(rows[row])
    from_config = {"stage": reading.stage, "recipe": get_recipe(reading.precision)}
    return judge(rows[row], replace(run, **(from_config | dict(reading.options))))


# --- DeepSpeed -----------------------------------------------------------------------------------

_DEEPSPEED_LATER = {
    "contiguous_gradients", "allgather_partitions", "reduce_scatter", "round_robin_gradients",
    "sub_group_size", "stage3_prefetch_bucket_size", "stage3_max_reuse_distance",
    "stage3_gather_16bit_weights_on_model_save", "allgather_bucket_size", "sequence_parallel_size",
    "gradient_clipping", "steps_per_print", "wall_clock_breakdown", "prescale_gradients",
    "gradient_predivide_factor", "train_batch_size", "optimizer", "scheduler",
    "zero_allow_untested_optimizer", "communication_data_type",
}  # fmt: skip
_DEEPSPEED_BLOCKS = {
    "zero_optimization", "bf16", "fp16", "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps", "activation_checkpointing",
}  # fmt: skip
_ZERO_KEYS = {
    "stage", "reduce_bucket_size", "overlap_comm", "stage3_max_live_parameters",
    "stage3_param_persistence_threshold", "offload_optimizer", "offload_param",
}  # fmt: skip


def read_deepspeed(text: str) -> ConfigReading:
    """Read a DeepSpeed configuration.

    Parameters
    ----------
    text : str
        JSON.

    Returns
    -------
    ConfigReading

    Raises
    ------
    UsageError
        For text that is no JSON object, an unknown key, or a value that is not what the key takes.
    """
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"not JSON (line {error.lineno}: {error.msg})") from error
    if not isinstance(config, dict):
        raise UsageError(f"a DeepSpeed configuration is a JSON object, got {config!r:.40}")
    zero = config.get("zero_optimization", {})
    if not isinstance(zero, dict):
        raise UsageError(f"zero_optimization must be an object with a stage, got {zero!r}")
    _check_keys(config, _DEEPSPEED_BLOCKS | _DEEPSPEED_LATER)
    _check_keys(zero, _ZERO_KEYS | _DEEPSPEED_LATER)
    stage = check_count("stage", zero.get("stage", 0), least=0, most=3)
    options = {
        name: check_count(key, value, least=least)
        for name, key, least, value in (
            ("reduce_bucket", "reduce_bucket_size", 1, zero.get("reduce_bucket_size")),
            ("max_live", "stage3_max_live_parameters", 0, zero.get("stage3_max_live_parameters")),
            (
                "persist_below", "stage3_param_persistence_threshold", 0,
                zero.get("stage3_param_persistence_threshold"),
            ),
            (
                "micro_batch", "train_micro_batch_size_per_gpu", 1,
                config.get("train_micro_batch_size_per_gpu"),
            ),
            (
                "micro_batches", "gradient_accumulation_steps", 1,
                config.get("gradient_accumulation_steps"),
            ),
        )
        if value not in (None, "auto")
    }  # fmt: skip
    if zero.get("overlap_comm") is True:
        options["overlap"] = True
    offload = {
        kind
        for key, kind in (("offload_optimizer", "optimizer"), ("offload_param", "param"))
        if _device(zero, key) not in (None, "none")
    }
    checkpoints = config.get("activation_checkpointing", {})
    if isinstance(checkpoints, dict) and checkpoints.get("cpu_checkpointing") is True:
        offload.add("activation")
    if offload:
        options["offload"] = frozenset(offload)
    auto = [f"{key} is auto: the program that reads this decides" for key in _autos(config, zero)]
    return ConfigReading(
        "DeepSpeed",
        stage,
        "deepspeed",
        _enabled(config),
        options,
        tuple(_DEEPSPEED_WORDS[stage] + auto),
        tuple(key for key in (*config, *zero) if key in _DEEPSPEED_LATER),
    )


_DEEPSPEED_WORDS = {
    0: [],
    1: [
        "buckets of gradients are all-reduced: 3Ψ, not 2Ψ, are sent",
        "a float32 copy of the owned gradients is made at the step",
    ],
    2: [
        "buckets of gradients are all-reduced in each micro-batch: 2m + 1, not m + 1",
        "a float32 copy of the owned gradients is made at the step",
    ],
    3: [
        "each tensor is cut on its own and padded, small ones stay whole",
        "a 16-bit shard is kept beside the float32 master: 14/W bytes a parameter after the step",
        "up to stage3_max_live_parameters stay gathered, not one unit",
    ],
}


def _check_keys(block, known):
    """Refuse a key that nobody knows: it may be a slip."""
    for key in block:
        if key not in known:
            raise name_error("DeepSpeed key", key, sorted(known))


def _device(zero, key):
    """Where a block of offloading sends to."""
    block = zero.get(key)
    if block is None:
        return None
    device = block.get("device") if isinstance(block, dict) else block
    if device not in ("cpu", "nvme", "none", None):
        raise UsageError(f"{key}: device must be cpu, nvme or none, got {device!r}")
    return device


def _enabled(config):
    """The precision of a DeepSpeed configuration."""
    on = {
        name
        for name in ("bf16", "fp16")
        if isinstance(config.get(name), dict) and config[name].get("enabled") is True
    }
    if len(on) == 2:
        raise UsageError("bf16 and fp16 are both enabled; choose one")
    return on.pop() if on else "fp32"


def _autos(config, zero):
    """Keys that leave their value to the program around DeepSpeed."""
    return [key for block in (config, zero) for key, value in block.items() if value == "auto"]


# --- FSDP ----------------------------------------------------------------------------------------

_FSDP1_LATER = {
    "use_orig_params", "limit_all_gathers", "forward_prefetch", "backward_prefetch", "device_id",
    "sync_module_states", "process_group", "ignored_modules", "ignored_states", "param_init_fn",
    "device_mesh",
}  # fmt: skip
_FSDP1_KEYS = {"sharding_strategy", "auto_wrap_policy", "mixed_precision", "cpu_offload"}
_FLAT = "each wrapped module is one flat array, its tensors aligned to 16 bytes and padded"
_STRATEGIES = {
    "FULL_SHARD": (3, (_FLAT,)),
    "SHARD_GRAD_OP": (
        3,
        (
            _FLAT,
            "this is not stage 2: parameters are sharded between steps",
            "parameters stay gathered from forward to backward; m micro-batches send 2m, not m + 1",
        ),
    ),
    "NO_SHARD": (0, ()),
}


def read_fsdp1(text: str) -> ConfigReading:
    """Read a call of ``FullyShardedDataParallel`` (or ``FSDP``).

    Parameters
    ----------
    text : str
        Python that has the call in it; it is parsed, never run.

    Returns
    -------
    ConfigReading

    Raises
    ------
    UsageError
        For text that is no Python or has no such call, an unknown argument or strategy.
    """
    calls = [call for call, _ in _calls(text, {"FullyShardedDataParallel", "FSDP"})]
    if not calls:
        raise UsageError("there is no call of FullyShardedDataParallel or FSDP in this text")
    arguments = _arguments(calls[-1], _FSDP1_KEYS | _FSDP1_LATER)
    strategy = _word(arguments.get("sharding_strategy")) or "FULL_SHARD"
    if strategy not in _STRATEGIES:
        hint = "; hybrid strategies shard in a group: give its size as world_size and FULL_SHARD"
        raise UsageError(
            f"sharding_strategy must be one of {', '.join(_STRATEGIES)}, got {strategy}"
            + (hint if "HYBRID" in strategy else "")
        )
    stage, words = _STRATEGIES[strategy]
    options = {}
    if strategy == "SHARD_GRAD_OP":
        options["max_live"] = ALL_PARAMETERS
    elif stage == 3 and _word(arguments.get("auto_wrap_policy")) is None:
        options["max_live"] = ALL_PARAMETERS
        words += ("no auto_wrap_policy: the whole model is one unit and gathered at once",)
    if _is_true(_inside(arguments.get("cpu_offload"), "offload_params")):
        options["offload"] = frozenset({"optimizer", "param"} if stage == 3 else {"optimizer"})
    return ConfigReading(
        "FSDP1",
        stage,
        "fsdp2",  # keeps the same things; how it cuts is in zero_nb.theory.layouts
        _compute(arguments.get("mixed_precision")),
        options,
        words,
        tuple(key for key in arguments if key in _FSDP1_LATER),
    )


_FSDP2_KEYS = {"reshard_after_forward", "mp_policy", "offload_policy"}
_FSDP2_LATER = {"mesh", "shard_placement_fn", "ignored_params"}


def read_fsdp2(text: str) -> ConfigReading:
    """Read the calls of ``fully_shard``.

    Parameters
    ----------
    text : str
        Python with one call in a loop over the blocks, and one for the root; never run.

    Returns
    -------
    ConfigReading

    Raises
    ------
    UsageError
        As in `read_fsdp1`.
    """
    calls = _calls(text, {"fully_shard"})
    if not calls:
        raise UsageError("there is no call of fully_shard in this text")
    blocks = [call for call, looped in calls if looped]
    roots = [call for call, looped in calls if not looped]
    read = [_arguments(call, _FSDP2_KEYS | _FSDP2_LATER) for call in blocks + roots]
    words = ["tensors are cut by rows, so a rank may own none of a small one"]
    options, first = {}, read[0]
    reshard = first.get("reshard_after_forward")
    if reshard is not None and _is_false(reshard):
        options["max_live"] = ALL_PARAMETERS
        words.append("parameters stay gathered from forward to backward; still sharded in between")
    elif not blocks:
        options["max_live"] = ALL_PARAMETERS
        words.append("one call: the whole model is one unit and gathered at once")
    if roots and "reshard_after_forward" not in read[len(blocks)]:
        words.append("the root unit is not resharded after forward unless you say so")
    policies = [arguments.get("mp_policy") for arguments in read]
    policy = next((each for each in policies if _word(each) is not None), None)
    if any(_word(arguments.get("offload_policy")) == "CPUOffloadPolicy" for arguments in read):
        options["offload"] = frozenset({"optimizer", "param"})
    return ConfigReading(
        "FSDP2",
        3,
        "fsdp2",
        _compute(policy),
        options,
        tuple(words),
        tuple(sorted({key for arguments in read for key in arguments if key in _FSDP2_LATER})),
    )


def _calls(text, names):
    """Calls of a function in Python text with its names filled in, and whether each is looped."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", 1)
        raise UsageError(f"not Python (line {line}: {getattr(error, 'msg', error)})") from error
    assigned = {
        node.targets[0].id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    found = []

    def visit(node, looped):
        if isinstance(node, ast.Call) and _word(node.func) in names:
            for keyword in node.keywords:
                if isinstance(keyword.value, ast.Name):
                    keyword.value = assigned.get(keyword.value.id, keyword.value)
            found.append((node, looped))
        inside = looped or isinstance(node, ast.For | ast.While | ast.ListComp)
        for child in ast.iter_child_nodes(node):
            visit(child, inside)

    visit(tree, False)
    return found


def _arguments(call, known):
    """Keyword arguments of a call by name; refuses what nobody knows."""
    found = {}
    for keyword in call.keywords:
        if keyword.arg is None:
            raise UsageError("write the arguments out: what is behind ** cannot be read")
        if keyword.arg not in known:
            raise name_error("argument", keyword.arg, sorted(known))
        found[keyword.arg] = keyword.value
    return found


def _word(node):
    """The last name of an expression: FULL_SHARD of ShardingStrategy.FULL_SHARD; None for None."""
    if isinstance(node, ast.Call):
        return _word(node.func)
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Name):
        return node.id
    return None


def _inside(node, name):
    """A keyword of a call that is an argument, such as param_dtype of MixedPrecision(...)."""
    if not isinstance(node, ast.Call):
        return None
    return next((keyword.value for keyword in node.keywords if keyword.arg == name), None)


def _is_true(node):
    """Whether an expression is the literal True."""
    return isinstance(node, ast.Constant) and node.value is True


def _is_false(node):
    """Whether an expression is the literal False."""
    return isinstance(node, ast.Constant) and node.value is False


def _compute(policy):
    """The recipe of a mixed-precision policy: shards are float32 either way."""
    if isinstance(policy, ast.Name):
        raise UsageError(
            f"what {policy.id} is cannot be read here; write {policy.id} = MixedPrecision(...) "
            "into the text as well"
        )
    dtype = _word(_inside(policy, "param_dtype"))
    if dtype in ("bfloat16", "float16", "half"):
        return "fp32-bf16-compute"
    if dtype in (None, "float32", "float"):
        return "fp32"
    raise UsageError(f"param_dtype must be bfloat16, float16 or float32, got {dtype}")


# --- Megatron-LM ---------------------------------------------------------------------------------

_MEGATRON_SWITCHES = {
    "--use-distributed-optimizer", "--use-megatron-fsdp", "--use-custom-fsdp", "--use-torch-fsdp2",
    "--bf16", "--fp16", "--sequence-parallel", "--use-flash-attn",
}  # fmt: skip
_MEGATRON_LATER = {
    "--overlap-grad-reduce", "--overlap-param-gather", "--no-gradient-accumulation-fusion",
    "--accumulate-allreduce-grads-in-fp32", "--ddp-average-in-collective", "--use-mcore-models",
}  # fmt: skip
_MEGATRON_SIZES = {
    "--tensor-model-parallel-size": "tp",
    "--pipeline-model-parallel-size": "pp",
    "--context-parallel-size": "sp",
    "--micro-batch-size": "micro_batch",
    "--seq-length": "seq",
}
_MEGATRON_WORDS = {
    "--data-parallel-sharding-strategy": {
        "no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3,
    },
    "--recompute-granularity": {"full": "full", "selective": "selective"},
}  # fmt: skip


def read_megatron(text: str) -> ConfigReading:
    """Read command-line flags of Megatron-LM.

    Parameters
    ----------
    text : str
        Flags as typed, ``--flag value`` or ``--flag=value``, over as many lines as you like.

    Returns
    -------
    ConfigReading

    Raises
    ------
    UsageError
        For an unknown flag or value, and for a strategy of sharding without Megatron's FSDP.
    """
    switches, options, chosen, later = _split_flags(text)
    strategy = chosen.get("--data-parallel-sharding-strategy")
    fsdp = bool(switches & {"--use-megatron-fsdp", "--use-custom-fsdp"})
    if strategy and not fsdp:
        raise UsageError(
            "--data-parallel-sharding-strategy works with --use-megatron-fsdp only; for stage 1 "
            "use --use-distributed-optimizer"
        )
    if "--recompute-granularity" in chosen:
        options["recompute"] = chosen["--recompute-granularity"]
    if "--sequence-parallel" in switches:
        options["sequence_parallel"] = True
    if "--use-torch-fsdp2" in switches:
        stage, framework, words = 3, "fsdp2", ["torch's fully_shard inside Megatron"]
    elif fsdp:
        stage, framework = strategy or 0, "megatron-fsdp"
        words = ["main weights and gradients are float32, gathered parameters 16-bit"]
    else:
        stage, framework = int("--use-distributed-optimizer" in switches), "megatron"
        words = ["gradients are float32 and whole: 6 + 12/W bytes a parameter, not 4 + 12/W"]
        if stage:
            words.append("one flat buffer is cut into equal parts, not one tensor at a time")
    if {"--bf16", "--fp16"} <= switches:
        raise UsageError("--bf16 and --fp16 are both given; choose one")
    precision = "bf16-fp32-grads" if "--bf16" in switches else "fp32"
    if "--fp16" in switches:
        precision = "fp16-both-grads"
    if framework == "fsdp2":
        precision = "fp32-bf16-compute" if precision != "fp32" else "fp32"
    return ConfigReading(
        "Megatron-LM", stage, framework, precision, options, tuple(words), tuple(later)
    )


def _split_flags(text):
    """Switches, sizes by field, words by flag, and flags that change no memory."""
    try:
        parts = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise UsageError(f"these flags cannot be split: {error}") from error
    known = _MEGATRON_SWITCHES | _MEGATRON_LATER | set(_MEGATRON_SIZES) | set(_MEGATRON_WORDS)
    switches, options, chosen, later = set(), {}, {}, []
    waiting = iter(parts)
    for part in waiting:
        flag, _, value = part.partition("=")
        if flag not in known:
            raise name_error("Megatron flag", flag, sorted(known))
        if flag in _MEGATRON_LATER:
            later.append(flag)
        elif flag in _MEGATRON_SWITCHES:
            switches.add(flag)
        else:
            value = value or next(waiting, "")
            if flag in _MEGATRON_SIZES:
                number = int(value) if value.isdecimal() else value
                options[_MEGATRON_SIZES[flag]] = check_count(flag, number, least=1)
            elif value in _MEGATRON_WORDS[flag]:
                chosen[flag] = _MEGATRON_WORDS[flag][value]
            else:
                raise UsageError(
                    f"{flag} must be one of {', '.join(_MEGATRON_WORDS[flag])}, got {value!r}"
                )
    return switches, options, chosen, later
