"""What each process of notebook 10 runs: a program in a file, started by `processes.start_ranks`.

Every function here is called by every process, with the world that joins them. What process 0
gets back goes into a file, ``NAME.json``, so that it is kept when a later part ends the run.
"""

import gc
import json
import os
import signal
import subprocess
import sys
import tracemalloc
from functools import cache
from pathlib import Path

import numpy as np

from zero_nb.cluster import launch

__all__ = [
    "PARTS",
    "evaluate_alone",
    "evaluate_together",
    "load_and_lose_a_rank",
    "main",
    "measure_memory",
    "resident_bytes",
    "save_twice",
    "train_alike",
]

LAYERS, WIDTH, SAMPLES = 4, 1024, 12
SMALL = 512
"""Width of the model that is saved: a quarter of the bytes, so that no disk keeps us waiting."""


def train_alike(world, folder):
    """Train the GPT of notebook 00 at each stage; return each stage's weights and traffic.

    Parameters
    ----------
    world : World
    folder : Path
        With the batches, as the notebook made them (``batches.npz``).

    Returns
    -------
    list of [str, int]
        By stage the SHA-256 of the weights, and the elements one rank sent in the last step.
    """
    from zero_nb.train.engine import Engine
    from zero_nb.train.model import DIGITS, GPT
    from zero_nb.train.optim import get_rule

    rows = []
    with np.load(folder / "batches.npz") as batches:
        steps = list(zip(batches["inputs"], batches["targets"], strict=True))
    for stage in range(4):
        rule = get_rule("adamw", lr=1e-3)
        engine = Engine(GPT(DIGITS), stage=stage, world=world, rule=rule, precision="fp32")
        for inputs, targets in steps:
            report = engine.train_step(inputs, targets)
        rows.append([engine.optimizer.weights_sha256(), report.elements_sent])
    return rows


def measure_memory(world, folder):
    """Train an MLP of 4.2 million parameters at each stage; return what is held, told twice.

    Parameters
    ----------
    world : World
    folder : Path

    Returns
    -------
    dict
        ``ledger``: by stage the bytes of param, grad, optim on a rank between backward and step,
        and the peak of a step. ``grown``: by stage and rank, how much the resident set of the
        process grew. ``whole``: by stage and rank, all of it.
    """
    ledger, grown, whole = [], [], []
    _start(LAYERS, WIDTH, 0)  # drawn before anything is measured
    for layers in (1, LAYERS):  # the first round warms the process up: buffers, compiled code
        for stage in range(4):
            before = resident_bytes()
            engine = _engine(world, stage, layers)
            peak = engine.train_step(*_batch()).peak_bytes
            engine.forward_backward(*_batch())  # now all that is held is there, and touched
            now = resident_bytes()
            held = [engine.ledger.current_bytes(kind) for kind in ("param", "grad", "optim")]
            del engine
            if layers == LAYERS:
                told = np.array([[now - before, now]])
                by_rank = world.all_gather_scalars(told, label="resident")
                ledger.append([*held, peak])
                grown.append(by_rank[:, 0].tolist())
                whole.append(by_rank[:, 1].tolist())
    return {"ledger": ledger, "grown": grown, "whole": whole}


def evaluate_together(world, folder):
    """Evaluate at stage 3 as it has to be done: every rank takes part; return the loss."""
    engine = _engine(world, 3, width=SMALL)
    return engine.evaluate(*_batch(SMALL))


def save_twice(world, folder):
    """Save a run at stage 3 as one file a rank, and as whole tensors; return what that took.

    Parameters
    ----------
    world : World
    folder : Path
        Where to save.

    Returns
    -------
    dict
        ``sha256`` of the weights; ``held``: bytes a rank holds; ``sharded`` and
        ``consolidated``: by rank the most bytes that saving allocated.
    """
    from zero_nb.train import checkpoint

    engine = _engine(world, 3, width=SMALL)
    engine.train_step(*_batch(SMALL))
    told = {"numel": engine.model.numel, "sha256": engine.optimizer.weights_sha256()}
    told["held"] = engine.ledger.current_bytes("param") + engine.ledger.current_bytes("optim")
    for layout in ("sharded", "consolidated"):
        tracemalloc.start()
        checkpoint.save(engine.optimizer, folder / layout, layout=layout)
        peak = np.array([[tracemalloc.get_traced_memory()[1]]])
        tracemalloc.stop()
        told[layout] = world.all_gather_scalars(peak, label="peak")[:, 0].tolist()
    return told


def evaluate_alone(world, folder):
    """Evaluate on rank 0 only, as is done without sharding."""
    engine = _engine(world, 3, width=SMALL)
    if world.ranks[0] == 0:
        print(engine.evaluate(*_batch(SMALL)))  # noqa: T201  what many write


def load_and_lose_a_rank(world, folder):
    """Load what other ranks saved and go on; rank 1 is killed before its update.

    Parameters
    ----------
    world : World
    folder : Path
        Where it was saved.
    """
    from zero_nb.train import checkpoint

    engine = _engine(world, 3, width=SMALL, seed=1)  # other weights: they have to come from disk
    checkpoint.load(engine.optimizer, folder / "sharded")
    _tell(world, folder, "loaded", engine.optimizer.weights_sha256())
    engine.train_step(*_batch(SMALL))
    engine.forward_backward(*_batch(SMALL))
    if world.ranks[0] == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    engine.optimizer.step()


PARTS = {
    part.__name__: part
    for part in (
        train_alike,
        measure_memory,
        evaluate_together,
        save_twice,
        evaluate_alone,
        load_and_lose_a_rank,
    )
}
"""By name, in the order in which they are run."""


def resident_bytes():
    """Return the memory this process occupies now, its resident set, in bytes (int)."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:  # macOS
        told = subprocess.run(
            ["ps", "-o", "rss=", "-p", str(os.getpid())], capture_output=True, text=True, check=True
        )
        return int(told.stdout) * 1024
    return pages * os.sysconf("SC_PAGE_SIZE")


def main(folder, parts):
    """Join the others, run the parts named, and write down what each returns.

    Parameters
    ----------
    folder : str
        Where the answers go.
    parts : sequence of str
        Keys of `PARTS`.
    """
    gc.disable()  # to import and to load compiled code makes no garbage: a seventh less to start
    launch.share_cores()
    _leave_out_scipy()
    from zero_nb.cluster.joined import joined

    with joined(deadline_s=60) as world:
        for name in parts:
            told = PARTS[name](world, Path(folder))
            _tell(world, Path(folder), name, told)
            gc.enable()


def _leave_out_scipy():
    """Let Numba do without SciPy, which it loads for linear algebra: a fifth of our start."""
    sys.modules.setdefault("scipy", None)


def _tell(world, folder, name, value):
    """Let rank 0 write an answer down, in one step."""
    if world.ranks[0] == 0:
        draft = folder / f"{name}.part"
        draft.write_text(json.dumps(value), encoding="utf-8")
        draft.replace(folder / f"{name}.json")


@cache
def _start(layers, width, seed):
    """An MLP and its first parameters, drawn once a process, in float32 to be quick about it."""
    from zero_nb.train.model import MLP, MLPConfig

    model, rng = MLP(MLPConfig((width,) * (layers + 1))), np.random.default_rng(seed)
    return model, {
        name: rng.standard_normal(shape, np.float32) / np.float32(np.sqrt(width))
        for name, shape in model.shapes.items()
    }


def _batch(width=WIDTH):
    """One global batch for the MLP, the same on every rank."""
    rng = np.random.default_rng(0)
    return tuple(rng.standard_normal((SAMPLES, width), np.float32) for _ in range(2))


def _engine(world, stage, layers=LAYERS, *, width=WIDTH, seed=0):
    """An engine in float32 with AdamW: 16 bytes a parameter."""
    from zero_nb.train.engine import Engine
    from zero_nb.train.optim import get_rule

    model, params = _start(layers, width, seed)
    rule = get_rule("adamw", lr=1e-3)
    return Engine(model, stage=stage, world=world, rule=rule, precision="fp32", params=params)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
