"""Numbers from PyTorch and DeepSpeed, laid out in data/README.md, as arrays and rows."""

import functools
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from zero_nb.train.model import GPT, MLP, GPTConfig, MLPConfig

DATA = Path(__file__).resolve().parent / "data" / "golden"

MODELS = {
    "mlp": MLP(MLPConfig((16, 64, 64, 4))),
    "mlp_odd": MLP(MLPConfig((13, 37, 29, 3))),
    "gpt": GPT(GPTConfig(vocab_size=64, seq_len=16, width=32, heads=2, blocks=2)),
}
OPTIMIZERS = ("adamw", "sgd")
VARIANTS = ("base", "clip", "accum2", "bf16")

STEPS, BATCH = 20, 16
ADAMW = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
SGD = {"lr": 1e-2, "momentum": 0.9}
MAX_GRAD_NORM = 1.0
"""Of the variant `clip`."""


@functools.cache
def _arrays(model):
    """Everything in a model's file; read-only, because it is shared by all tests."""
    with np.load(DATA / f"{model}.npz") as file:
        arrays = {key: file[key] for key in file.files}
    for array in arrays.values():
        array.flags.writeable = False
    return arrays


def _named(model, flat):
    """Cut a flat array into parameters by name."""
    out, start = {}, 0
    for name, shape in MODELS[model].shapes.items():
        numel = int(np.prod(shape))
        out[name] = flat[start : start + numel].reshape(shape)
        start += numel
    assert start == flat.size
    return out


def init(model):
    """Initial parameters: name to float32, no rank axis."""
    return _named(model, _arrays(model)["init"])


def batch(model, step):
    """Inputs and targets of a step, (16, ...): int64 tokens, or float32."""
    arrays = _arrays(model)
    x, t = arrays["x"][step], arrays["t"][step]
    return (x, t) if x.dtype == np.float32 else (x.astype(np.int64), t.astype(np.int64))


def grad0(model):
    """Gradient of the first step's loss at the initial parameters: name to float32."""
    return _named(model, _arrays(model)["grad0"])


def final(model, optimizer, variant="base", mode="single", world=1):
    """Parameters after 20 steps (masters for bf16): name to float32.

    Of a single process; for `mlp_odd` in bf16 also of modes ddp and fsdp2, worlds 2 and 4.
    """
    base = _arrays(model)[f"{optimizer}-base"]
    if variant != "base":
        # Stored as the difference of the bits: small numbers, which compress well.
        suffix = "" if mode == "single" else f"-{mode}-w{world}"
        moved = base.view(np.int32) + _arrays(model)[f"{optimizer}-{variant}{suffix}"]
        base = moved.view(np.float32)
    return _named(model, base)


@dataclass(frozen=True)
class Run:
    """One training of 20 steps, as it went in PyTorch or DeepSpeed.

    `held_bytes` has a dict a rank.
    """

    model: str
    opt: str
    variant: str
    mode: str
    world: int
    loss: tuple[float, ...]
    grad_norm: tuple[float, ...]
    final_sha256_16: str
    max_abs_diff_vs_single_without_k_bias: float
    held_bytes: tuple[dict[str, int], ...]


@functools.cache
def runs(file="runs"):
    """All runs of ``runs`` (PyTorch, 312) or ``runs_deepspeed`` (48)."""
    content = json.loads((DATA / f"{file}.json").read_text(encoding="utf-8"))
    out = []
    for row in content["runs"]:
        held = row["held_bytes"]
        values = {name: row[name] for name in Run.__dataclass_fields__}
        values["loss"] = tuple(content["losses"][row["loss"]])
        values["grad_norm"] = tuple(content["grad_norms"][row["grad_norm"]])
        values["held_bytes"] = tuple(held if isinstance(held, list) else [held] * row["world"])
        out.append(Run(**values))
    return tuple(out)


def run(model, opt, variant="base", mode="single", world=1, file="runs"):
    """The one run with this description."""
    wanted = (model, opt, variant, mode, world)
    (found,) = (r for r in runs(file) if (r.model, r.opt, r.variant, r.mode, r.world) == wanted)
    return found


def without_key_bias(name, array):
    """Leave the K third of ``qkv.bias`` out of a parameter; returns the others as they are.

    A shift of all keys moves all scores of a query alike, which softmax does not see. The true
    gradient is 0, so AdamW, which divides by the gradient's size, follows rounding noise there.
    """
    if not name.endswith("qkv.bias"):
        return array
    q, _, v = np.split(np.asarray(array), 3, axis=-1)
    return np.concatenate([q, v], axis=-1)
