"""What ranks do in test_mpi.py and test_mpi_failures.py: simulated in pytest, real under mpiexec.

As a program (``python -m mpi4py tests/mpi_cases.py LOCAL_RANKS CASE ...``) it joins the world it
is started in and prints one JSON line a case. A case is a function of a world that returns
something JSON can hold; every rank returns the same, in every kind of world.
"""

import ctypes
import hashlib
import json
import os
import signal
import sys
import time
from dataclasses import astuple
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

import saved_runs
import tiny
from zero_nb.config import UsageError
from zero_nb.core.precision import BFLOAT16, FLOAT16, FLOAT32
from zero_nb.train import checkpoint
from zero_nb.train.engine import Engine
from zero_nb.train.optim import AdamW
from zero_nb.train.scaling import DynamicLossScale

# --- cases that succeed ------------------------------------------------------------------------


def training(stage, precision, *, model=tiny.gpt, batches=None, steps=2, **settings):
    """Train a small model; report its weights, losses, and everything that was logged."""

    def case(world):
        made = model()
        data = tiny.gpt_batches(steps) if batches is None else batches(made)
        engine = Engine(
            made, stage=stage, precision=precision, world=world, rule=AdamW(lr=3e-2), **settings
        )
        reports = [engine.train_step(*batch) for batch in data]
        return {
            "losses": [report.loss for report in reports],
            "norms": [repr(report.result.grad_norm) for report in reports],
            "applied": [report.result.applied for report in reports],
            "sent": [[report.elements_sent, report.bytes_sent] for report in reports],
            "last_step": [list(astuple(transfer)) for transfer in world.log.transfers],
            "weights_sha256": engine.optimizer.weights_sha256(),
        }

    return case


def uneven_batches(made):
    """25 samples do not divide among any number of ranks tested: ranks differ by one."""
    return tiny.gpt_batches(2, size=25)


def padding_only_batches(made):
    """For an MLP whose last unit leaves most ranks with padding only."""
    return tiny.mlp_batches(made, 2)


def overflowing(stage):
    """In fp16: the first step overflows and is skipped by all ranks, the second is applied."""

    def case(world):
        scale = DynamicLossScale(2.0**40, hysteresis=1, backoff_factor=2.0**-30)
        work = training(stage, "fp16", loss_scale=scale, reduce_bucket_size=1000, overlap_comm=True)
        result = work(world)
        assert result["applied"] == [False, True]
        return result

    return case


def checkpoints(stage, layout):
    """Save, go on; then load into a fresh optimizer, go on: the same, and the same files."""

    def case(world):
        folder = Path(os.environ["TEST_FOLDER"]) / f"{layout} {stage} {world.size}"
        settings = {"precision": "bf16", "world": world}
        first = saved_runs.train(saved_runs.make(stage, None, **settings), 2)
        saved = checkpoint.save(first, folder, layout=layout)
        fresh = saved_runs.make(stage, None, seed=9, **settings)
        checkpoint.load(fresh, folder)
        hashes = {saved_runs.train(opt, 2).weights_sha256() for opt in (first, fresh)}
        assert len(hashes) == 1
        files = {path.name: path.read_bytes() for path in sorted(saved.path.iterdir())}
        return {
            "weights_sha256": hashes.pop(),
            "files": {name: hashlib.sha256(data).hexdigest() for name, data in files.items()},
        }

    return case


COLLECTIVE_FORMATS = (FLOAT32, BFLOAT16, FLOAT16)
COLLECTIVE_SHARDS = (0, 1, 3, 2503)


def broadcast_roots(size):
    """The first rank, one in the middle of its process, and the last."""
    return sorted({0, size // 2 - 1, size - 1})


def collectives(world):
    """Every collective on awkward sizes and values; a digest of every result."""
    rng = np.random.default_rng(11)
    special = np.float32([np.nan, np.inf, -np.inf, -0.0, 1e-42, 3.4e38, 1 + 2**-23])
    out = {}
    for fmt in COLLECTIVE_FORMATS:
        for shard in COLLECTIVE_SHARDS:
            full_WF = rng.normal(size=(world.size, world.size * shard)).astype(np.float32)
            scattered = full_WF.reshape(-1)[:: world.size + 1]
            scattered[: special.size] = special[: scattered.size]
            mine_RF = fmt.round(full_WF[list(world.ranks)])
            name = f"{fmt.name} {shard}"
            own_RS = world.reduce_scatter(mine_RF, fmt=fmt, label=name)
            gathered_RF = world.all_gather(own_RS, fmt=fmt, label=name)
            reduced_RF = world.all_reduce(mine_RF.copy(), fmt=fmt, label=name)
            in_place_RF = np.zeros_like(mine_RF)
            world.own_shard(in_place_RF)[...] = own_RS
            world.all_gather(
                world.own_shard(in_place_RF), out=in_place_RF, fmt=fmt, purpose="grad", label=name
            )
            for rows in (gathered_RF, reduced_RF, in_place_RF):
                assert rows.tobytes() == gathered_RF[:1].tobytes() * world.hosted
            told = [
                world.broadcast(mine_RF.copy(), root=root, fmt=fmt, label=name)[-1].tobytes()
                for root in broadcast_roots(world.size)
            ]
            digest = hashlib.sha256(gathered_RF[0].tobytes())
            for part in told:
                digest.update(part)
            out[name] = digest.hexdigest()
    values_RK = np.arange(3)[None] + 10 * np.array(world.ranks)[:, None]
    out["scalars"] = world.all_gather_scalars(values_RK).tolist()
    return out


CASES = {"collectives": collectives}
for _stage in tiny.STAGES:
    CASES[f"stage {_stage}"] = training(_stage, "bf16")
    CASES[f"stage {_stage} overflow"] = overflowing(_stage)
    for _precision in tiny.PRECISIONS:
        # An uneven batch, units that no world size divides, several micro-batches, and clipping.
        CASES[f"stage {_stage} {_precision} uneven"] = training(
            _stage, _precision, batches=uneven_batches, micro_batches=3, max_grad_norm=0.05
        )
for _stage in (1, 3):
    CASES[f"stage {_stage} padding only"] = training(
        _stage, "bf16", model=tiny.mlp, batches=padding_only_batches, units="sublayer"
    )
CASES["stage 3 with prefetch"] = training(
    3,
    "bf16",
    prefetch_bucket_size=9000,
    param_persistence_threshold=400,
    reduce_bucket_size=1000,
    overlap_comm=True,
    micro_batches=2,
)
CASES["checkpoint of stage 2"] = checkpoints(2, "sharded")
CASES["checkpoint of stage 3"] = checkpoints(3, "consolidated")


# --- cases that fail -----------------------------------------------------------------------------


def failing(act):
    """Some steps, in the third of which the ranks do something else first."""

    def case(world):
        grad_RF = np.ones((world.hosted, world.size), np.float32)
        for step in range(5):
            if step == 2:
                # Only now, so that slowly loading a kernel is not taken for a failure.
                world.deadline_s = float(os.environ.get("TEST_DEADLINE_S", world.deadline_s))
                act(world)
            world.all_gather_scalars(np.ones((world.hosted, 1)), label="loss")
            world.all_reduce(grad_RF, label="head")

    return case


def only_last(act):
    """Let the process with the last rank do `act`."""

    def on(world):
        if world.size - 1 in world.ranks:
            act(world)

    return on


def _raise(world):
    raise OSError("the disk is full")


def _kill(world):
    os.kill(os.getpid(), signal.SIGKILL)


def _stop(world):
    os.kill(os.getpid(), signal.SIGSTOP)


def _hang(world):
    while True:
        time.sleep(0.1)


def _crash(world):
    ctypes.string_at(0)


def _exit(world):
    os._exit(0)


def _detour(world):
    world.all_reduce(np.ones((world.hosted, world.size), np.float32), label="detour")


def _other_size(world):
    surplus = world.size * (1 + (world.ranks[-1] == world.size - 1))
    world.all_reduce(np.ones((world.hosted, surplus), np.float32), label="detour")


def _impossible(world):
    raise UsageError("there is no stage 7")


def leave_early(world):
    """The process with the last rank thinks that it is done."""
    for _ in range(1 if world.size - 1 in world.ranks else 2):
        world.all_gather_scalars(np.ones((world.hosted, 1)), label="loss")


def killed_while_saving(world):
    """The process with the last rank dies over its file, after an earlier checkpoint."""
    run = saved_runs.train(saved_runs.make(3, None, precision="bf16", world=world), 2)
    checkpoint.save(run, os.environ["TEST_FOLDER"])
    saved_runs.train(run, 1)
    if world.size - 1 in world.ranks:
        checkpoint._write_file = lambda *_: _kill(world)
    checkpoint.save(run, os.environ["TEST_FOLDER"])


FAILURES = {
    "killed while saving": killed_while_saving,
    "raise": failing(only_last(_raise)),
    "kill": failing(only_last(_kill)),
    "stop": failing(only_last(_stop)),
    "hang": failing(only_last(_hang)),
    "crash": failing(only_last(_crash)),
    "exit": failing(only_last(_exit)),
    "detour": failing(only_last(_detour)),
    "other size": failing(_other_size),
    "impossible": failing(_impossible),
    "leave early": leave_early,
    "sleep": failing(_hang),
}


# --- the program ---------------------------------------------------------------------------------


def main(local_ranks, names):
    """Join, run the cases named (all that succeed by default), print a line for each."""
    from zero_nb.cluster import mpi
    from zero_nb.cluster.joined import joined

    # With the first kernel Numba looks for SciPy's BLAS, which no kernel uses: a third of a start.
    sys.modules["scipy"] = None

    with joined(local_ranks, deadline_s=60) as world:
        # Two or three pieces for the largest messages here, as really large ones have.
        mpi._BLOCK_ELEMENTS = 1000 * world.size * world.hosted
        mpi._CHAIN_BYTES = 4000 * world.size
        for name in names or CASES:
            result = (CASES | FAILURES)[name](world)
            print(json.dumps({"case": name, "result": result, "agree": _agree(world, result)}))
            print(json.dumps({"case": f"figures after {name}", "result": world.process_figures()}))
            world.member.tick(case=name)


def _agree(world, result):
    """Whether all processes have the same result."""
    digest = np.frombuffer(hashlib.sha256(repr(result).encode()).digest()[:8], "<i8")
    told_WK = world.all_gather_scalars(np.tile(digest, (world.hosted, 1)), label="agree")
    return bool((told_WK == told_WK[0]).all())


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
