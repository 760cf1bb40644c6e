"""A whole training step: our stages beside each other, PyTorch's over gloo and JAX's, in one run.

    python benchmarks/step.py [--tiny] [--only WORD ...] [--world-sizes W ...] [--json FILE]

All train the same model from the same weights on the same global batch with AdamW in float32, on
the same number of ranks: ours simulated in one process, torch's a process each, JAX's as many CPU
devices of one process. Sides take turns, some steps each; a ratio is one of the medians of all
steps, theirs over ours: above 1 we are faster. Losses have to agree, or nothing is reported.

torch and JAX take part if an environment has them (`make bench-peers`, or PEERS_PYTHON).

Threads: with several ranks every rank computes on one, on all sides (JAX has a pool of its own
for all devices). With one rank each side may use every core, so there, and only there, our
matrix products get several threads too.
"""

import json
import os
import socket
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import step_sides
from _timing import Others, Row, Worker, finish, number, parser, python_with

SIDES = Path(step_sides.__file__)
MODELS = {
    "MLP 1 M": {"kind": "mlp", "width": 356, "layers": 8},
    "MLP 10 M": {"kind": "mlp", "width": 1120, "layers": 8},
    "GPT 1 M": {
        "kind": "gpt", "vocab_size": 32, "seq_len": 64, "width": 144, "heads": 4, "blocks": 4,
    },
}  # fmt: skip
TINY = {
    "MLP tiny": {"kind": "mlp", "width": 16, "layers": 2},
    "GPT tiny": {
        "kind": "gpt", "vocab_size": 8, "seq_len": 4, "width": 8, "heads": 2, "blocks": 1,
    },
}  # fmt: skip
WORLD_SIZES = (1, 2, 4)
OURS = ("stage 0", "stage 1", "stage 2", "stage 3")
# Which of our stages shards as much as each way of a peer.
TORCH = {
    "DDP": "stage 0",
    "ZeroRedundancyOptimizer": "stage 1",
    "FSDP2, no reshard": "stage 2",
    "FSDP2, reshard": "stage 3",
}
JAX = {"replicated": "stage 0", "sharded": "stage 3"}
ALONE = {"one process": "stage 0"}
# (model, world size, way of the peer) -> how many times faster we have to be.
REACH = {
    ("MLP 10 M", 2, "JAX, sharded"): 1.2,
    ("MLP 10 M", 4, "JAX, sharded"): 1.2,
    ("MLP 10 M", 2, "torch, FSDP2, reshard"): 2.0,
    ("MLP 10 M", 4, "torch, FSDP2, reshard"): 4.0,
    ("MLP 10 M", 1, "torch, one process"): 1.0,
    ("MLP 10 M", 1, "JAX, one process"): 1 / 1.5,
}
STAGE_REACH = {("stage 3", 4): 1.3}
TOLERANCE = 1e-3  # of the losses: sums are added in another order, and AdamW amplifies that


class Side:
    """The processes of one side: one, or one a rank."""

    def __init__(self, name, settings, python, stack):
        self.name = name
        words = [python, SIDES, name, json.dumps(settings)]
        if name == "torch":
            port = free_port()
            environments = [
                {
                    "RANK": rank, "WORLD_SIZE": settings["world_size"], "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": port, "OMP_NUM_THREADS": settings["blas_threads"],
                }
                for rank in range(settings["world_size"])
            ]  # fmt: skip
        elif name == "jax":
            flag = f"--xla_force_host_platform_device_count={settings['world_size']}"
            environments = [{"XLA_FLAGS": flag, "JAX_PLATFORMS": "cpu"}]
        else:
            # OpenBLAS lets its second thread spin for 25 ms after a product, on the core that the
            # kernels' second thread needs then; 2**16 cycles are some 20 microseconds, about what
            # our kernels' threads wait (zero_nb/core/threads.py). It is read when NumPy is loaded.
            environments = [{"OPENBLAS_THREAD_TIMEOUT": 16}]
        self.workers = [stack.enter_context(Worker(words, **env)) for env in environments]

    def run(self, way, steps):
        """Let all ranks take steps; return what the first one says."""
        request = json.dumps({"way": way, "steps": steps}) + "\n"
        for worker in self.workers:
            worker.process.stdin.write(request)
            worker.process.stdin.flush()
        lines = [worker.process.stdout.readline() for worker in self.workers]
        if not all(lines):
            raise RuntimeError(f"a process of {self.name} ended; its message stands above")
        return json.loads(lines[0])


def free_port():
    """Return a port that nobody listens to now."""
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return made.getsockname()[1]


def ways_of(world_size, torch, jax):
    """Return who takes part: (side, way) to (name, our stage it is compared with)."""
    stages = OURS if world_size > 1 else ("stage 0", "stage 3")
    ways = {("ours", stage): (stage, None) for stage in stages}
    if torch:
        for way, stage in (TORCH if world_size > 1 else ALONE).items():
            ways["torch", way] = (f"torch, {way}", stage)
    if jax:
        for way, stage in (JAX if world_size > 1 else ALONE).items():
            ways["jax", way] = (f"JAX, {way}", stage)
    return ways


def measure(model, world_size, peers, *, rounds, steps, warm):
    """Take turns; return each way's seconds a step and its first losses.

    Parameters
    ----------
    model : dict
        One of `MODELS`.
    world_size : int
    peers : dict of str to path
        ``"torch"`` and ``"jax"``, each with a Python that has it, or none.
    rounds, steps : int
        Turns of each way, and measured steps in a turn; one more step before them is not measured.
    warm : int
        Steps of each way before the first turn.
    """
    ways = ways_of(world_size, **{name: name in peers for name in ("torch", "jax")})
    threads = (os.cpu_count() or 1) if world_size == 1 else 1
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        weights = folder / "weights.npz"
        np.savez(weights, **step_sides.our_model(model).init(0))
        settings = {
            "model": model, "world_size": world_size, "blas_threads": threads,
            "weights": str(weights),
        }  # fmt: skip
        sides = {
            name: Side(name, settings, python, stack)
            for name, python in ({"ours": sys.executable} | peers).items()
        }
        losses = {key: sides[key[0]].run(key[1], warm)["losses"] for key in ways}
        seconds = {key: [] for key in ways}
        order = list(ways)
        for turn in range(rounds):
            for side, way in order[turn % len(order) :] + order[: turn % len(order)]:
                time.sleep(0.02)
                told = sides[side].run(way, steps + 1)
                seconds[side, way] += told["seconds"][1:]
    check_losses(losses, ways)
    return seconds, ways


def check_losses(losses, ways):
    """Refuse to compare sides that do not train the same."""
    own = losses["ours", "stage 0"]
    for key, theirs in losses.items():
        if not np.allclose(theirs, own, rtol=TOLERANCE):
            raise RuntimeError(f"{ways[key][0]} has losses {theirs}, stage 0 has {own}")


def rows_of(name, world_size, seconds, ways):
    """Return the rows of one model and world size."""
    median = {ways[key][0]: statistics.median(values) for key, values in seconds.items()}
    case, rows = f"{name}, W = {world_size}", []
    for stage in [stage for stage in OURS[1:] if stage in median and world_size > 1]:
        rows.append(
            Row(
                what="our step over stage 0's",
                case=case,
                against=stage,
                measured=median[stage] / median["stage 0"],
                reach=STAGE_REACH.get((stage, world_size)),
                at_most=True,
                seconds={key: median[key] for key in (stage, "stage 0")},
            )
        )
    for peer, stage in ways.values():
        if stage is not None:
            rows.append(
                Row(
                    what=f"training step, {stage}",
                    case=case,
                    against=peer,
                    measured=median[peer] / median[stage],
                    reach=REACH.get((name, world_size, peer)),
                    seconds={key: median[key] for key in (stage, peer)},
                )
            )
    return rows


def absent(peers, names):
    """Return a row for each line of reach whose peer is not installed."""
    rows = []
    for name, world_size, peer in REACH:
        side = peer.partition(",")[0].lower()
        if side not in peers and name in names:
            case = f"{name}, W = {world_size}"
            reach = REACH[name, world_size, peer]
            rows.append(Row("training step", case, peer, None, reach, note="not installed"))
    return rows


def rows(quick=False, *, only=(), world_sizes=WORLD_SIZES, peers=None):
    """Measure and return all rows.

    Parameters
    ----------
    quick : bool
        Tiny models and few steps: does it work, no figures.
    only : sequence of str
        Models whose name contains one of these words; all if empty.
    world_sizes : sequence of int
    peers : dict of str to path, optional
        Pythons that have torch and jax; looked for if not given.

    Returns
    -------
    list of Row
    """
    if peers is None:
        wanted = {"torch": ("torch",), "jax": ("jax", "optax")}
        found = {name: python_with(*modules) for name, modules in wanted.items()}
        peers = {name: python for name, python in found.items() if python}
    models = {
        name: model
        for name, model in (TINY if quick else MODELS).items()
        if not only or any(word in name for word in only)
    }
    settings = (
        {"rounds": 1, "steps": 1, "warm": 2} if quick else {"rounds": 4, "steps": 5, "warm": 4}
    )
    made = []
    for name, model in models.items():
        for world_size in world_sizes:
            seconds, ways = measure(model, world_size, peers, **settings)
            made += rows_of(name, world_size, seconds, ways)
            for row in made[-len(ways) :]:
                times = ", ".join(f"{key} {s * 1e3:.1f} ms" for key, s in row.seconds.items())
                told = f"{row.what}, {row.case}, {row.against}: {number(row.measured)} ({times})"
                print(told, file=sys.stderr, flush=True)
    return made + absent(peers, models)


def main():
    """Measure, print the table, write it."""
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--only", nargs="+", default=())
    options.add_argument("--world-sizes", nargs="+", type=int, default=WORLD_SIZES)
    args = options.parse_args()
    others = Others()
    made = rows(args.tiny, only=args.only, world_sizes=args.world_sizes)
    finish("step", made, args, others)


if __name__ == "__main__":
    main()
