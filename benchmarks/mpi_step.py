"""A training step in real processes: ours over MPI beside PyTorch's over gloo, in one run.

    python benchmarks/mpi_step.py --peer-python PATH [--json FILE]

PATH is the Python of an environment of its own that has torch (never a dependency of the
package). Both train the same MLP from the same weights on the same batches with AdamW in float32,
one thread a process, in turn; a row is the median step of the quietest round, for each side, and
the losses must agree. The peer of stage 0 is `DistributedDataParallel`, that of stage 3 is
`fully_shard` (FSDP2, which reshards after forward).

The file plays all three parts: it starts everything, is our rank (``ours``) and is torch's
(``torch``). Only the last imports torch.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

BATCH, LAYERS, WARMUP, STEPS = 32, 8, 3, 10
WIDTHS = {"1 M": 354, "10 M": 1118}
LR, BETAS, EPS, WEIGHT_DECAY = 1e-3, (0.9, 0.999), 1e-8, 0.01
STAGES = (0, 3)
FIRST = "ZERO_NB_BENCH_FIRST"


def batch(step, width):
    """Return the inputs and targets of a step, (BATCH, width) float32."""
    rng = np.random.default_rng([7, step])
    inputs, targets = rng.normal(size=(2, BATCH, width)).astype(np.float32)
    return inputs, targets


def timed(step_of):
    """Run the warm-up and the measured steps; return their losses and the median seconds."""
    losses, seconds = [], []
    for step in range(WARMUP + STEPS):
        if step == 1 and os.environ.get(FIRST):
            ahead_of_others()
        start = time.perf_counter()
        losses.append(float(step_of(step)))
        seconds.append(time.perf_counter() - start)
    return {"losses": losses, "step_s": statistics.median(seconds[WARMUP:])}


def ahead_of_others():
    """Let every thread of this process go before the rest of the machine."""
    for thread in os.listdir("/proc/self/task"):
        os.setpriority(os.PRIO_PROCESS, int(thread), -20)


# --- our rank ------------------------------------------------------------------------------


def ours(width, stage):
    """Train in the world this process was started in; process 0 prints the result."""
    from zero_nb.cluster.joined import joined
    from zero_nb.train.engine import Engine
    from zero_nb.train.model import MLP, MLPConfig
    from zero_nb.train.optim import AdamW

    model = MLP(MLPConfig((width,) * (LAYERS + 1)))
    batches = [batch(step, width) for step in range(WARMUP + STEPS)]
    with joined() as world:
        rule = AdamW(LR, BETAS, EPS, WEIGHT_DECAY)
        engine = Engine(model, stage=stage, world=world, rule=rule)
        print(json.dumps(timed(lambda step: engine.train_step(*batches[step]).loss)))


def run_ours(world_size, width, stage):
    """Start our ranks; return what process 0 printed."""
    import io

    from zero_nb.cluster.launch import run_mpi

    out = io.StringIO()
    words = ["--part", "ours", "--width", str(width), "--stage", str(stage)]
    run_mpi(words, world_size, program=(__file__,), stdout=out, time_limit_s=600)
    return json.loads(out.getvalue())


# --- torch's rank ----------------------------------------------------------------------------


def theirs(width, stage, weights):
    """Train as torch does; rank 0 prints the result."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    model = torch_model(torch, width, np.load(weights))
    if stage == 0:
        model = DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (size,))
        for layer in model:
            if isinstance(layer, torch.nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=True
    )
    part = slice(rank * BATCH // size, (rank + 1) * BATCH // size)
    batches = [
        tuple(torch.from_numpy(array[part].copy()) for array in batch(step, width))
        for step in range(WARMUP + STEPS)
    ]

    def step_of(step):
        inputs, targets = batches[step]
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / size  # we report the global loss, so they do
        dist.all_reduce(mean)
        return mean

    result = timed(step_of)
    if rank == 0:
        print(json.dumps(result), flush=True)
    dist.barrier()
    os._exit(0)  # taking the group down was seen to hang for minutes in one rank


def torch_model(torch, width, weights):
    """Return our MLP as torch modules."""
    layers = []
    for i in range(LAYERS):
        linear = torch.nn.Linear(width, width)
        with torch.no_grad():
            linear.weight.copy_(torch.from_numpy(weights[f"layers.{i}.weight"]))
            linear.bias.copy_(torch.from_numpy(weights[f"layers.{i}.bias"]))
        layers += [linear, torch.nn.Tanh()]
    return torch.nn.Sequential(*layers[:-1])


def run_theirs(python, world_size, width, stage, weights, port):
    """Start torch's ranks; return what rank 0 printed."""
    words = ["--part", "torch", "--width", str(width), "--stage", str(stage)]
    command = [python, __file__, *words, "--weights", str(weights)]
    ranks = [
        subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True,
            env=os.environ | {
                "RANK": str(rank), "WORLD_SIZE": str(world_size), "OMP_NUM_THREADS": "1",
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            },
        )
        for rank in range(world_size)
    ]  # fmt: skip
    try:
        outs = [rank.communicate(timeout=600)[0] for rank in ranks]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
    if any(rank.returncode for rank in ranks):
        sys.exit("a rank of torch failed; its message stands above")
    return json.loads(outs[0])


# --- both, in turn -----------------------------------------------------------------------------


def compare(args):
    """Measure every row and print it."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, width in WIDTHS.items():
            weights = save_weights(Path(folder) / f"{width}.npz", width)
            for world_size in args.world_sizes:
                for stage in STAGES:
                    rows.append(measure(args, name, width, world_size, stage, weights))
                    print(as_text(rows[-1]), flush=True)
    if args.json:
        machine = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
        document = {"machine": machine, "batch": BATCH, "layers": LAYERS, "rows": rows}
        Path(args.json).write_text(json.dumps(document, indent=1) + "\n")


def save_weights(path, width):
    """Write the initial weights for torch."""
    from zero_nb.train.model import MLP, MLPConfig

    np.savez(path, **MLP(MLPConfig((width,) * (LAYERS + 1))).init(0))
    return path


def measure(args, name, width, world_size, stage, weights):
    """Measure one row: rounds of ours and theirs in turn."""
    mine, peers = [], []
    for round_number in range(args.rounds):
        mine.append(run_ours(world_size, width, stage))
        port = args.port + round_number
        peers.append(run_theirs(args.peer_python, world_size, width, stage, weights, port))
    np.testing.assert_allclose(mine[0]["losses"], peers[0]["losses"], rtol=1e-4)
    seconds = [min(run["step_s"] for run in runs) for runs in (mine, peers)]
    return {
        "parameters": name,
        "world_size": world_size,
        "stage": stage,
        "peer": "DDP" if stage == 0 else "FSDP2",
        "mpi_step_s": seconds[0],
        "gloo_step_s": seconds[1],
        "times_faster": seconds[1] / seconds[0],
    }


def as_text(row):
    """Return a row as a line."""
    return (
        f"{row['parameters']:>5} parameters, W = {row['world_size']}, stage {row['stage']}: "
        f"{row['mpi_step_s'] * 1e3:7.1f} ms over MPI, {row['gloo_step_s'] * 1e3:7.1f} ms "
        f"{row['peer']} over gloo, {row['times_faster']:.2f} x"
    )


def main():
    """Choose the part to play."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=("both", "ours", "torch"), default="both")
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--port", type=int, default=29511, help="first port for torch")
    parser.add_argument("--json", help="file to write the rows to")
    parser.add_argument(
        "--first",
        action="store_true",
        help="Linux, root: measured steps of both sides go before everybody else's work (nice -20)",
    )
    parser.add_argument("--width", type=int)
    parser.add_argument("--stage", type=int)
    parser.add_argument("--weights")
    args = parser.parse_args()
    if args.part == "ours":
        ours(args.width, args.stage)
    elif args.part == "torch":
        theirs(args.width, args.stage, args.weights)
    else:
        os.environ |= {FIRST: "1"} if args.first else {}
        compare(args)


if __name__ == "__main__":
    main()
