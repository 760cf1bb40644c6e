"""How cost grows: with the number of ranks, with the model, with every question, and at the start.

    python benchmarks/growth.py [--tiny] [--only PART ...] [--json FILE]

Parts: ``ranks`` (a fixed total of bytes over 1 to 1024 simulated ranks), ``parameters``, ``plans``
a second, ``imports``, ``first`` call without and with compiled code at hand, and the ``notebooks``'
run time. Rows without a reach only inform.
"""

import os
import statistics
import subprocess
import sys
import tempfile
from importlib.util import find_spec

import numpy as np
from _timing import ROOT, Others, Row, finish, medians, memory_bytes, parser, take_turns

from zero_nb.theory.grid import plan_grid
from zero_nb.theory.plan import plan
from zero_nb.train.optim import AdamW
from zero_nb.train.optimizer import ZeROOptimizer

WORLD_SIZES = (1, 2, 4, 16, 64, 256, 1024)
NUMELS = (10_000, 100_000, 1_000_000, 10_000_000, 100_000_000)
UPDATE_BYTES = 28  # AdamW: reads gradient, parameter, two moments; writes the last three


class Cycle:
    """What stage 1 does with one flat_param after backward: reduce_scatter, update, all_gather.

    Parameters
    ----------
    world_size, numel : int
        Simulated ranks (R = world_size) and elements of the flat_param (F).
    """

    def __init__(self, world_size, numel):
        self.optimizer = ZeROOptimizer(
            {"w": np.zeros(numel, np.float32)}, stage=1, world_size=world_size, rule=AdamW()
        )
        (self.unit,) = self.optimizer.units
        shape = (world_size, self.unit.layout.padded_numel)
        self.grad_RF = np.full(shape, 1e-3, np.float32)
        summed = shape[0] * shape[1] + shape[1]  # R * F read, F written
        # Every shard stands in its owner's row already: F read, (R - 1) * F written to the others,
        # and with one rank nothing at all.
        gathered = shape[0] * shape[1] if world_size > 1 else 0
        self.bytes_moved = 4 * (summed + gathered) + UPDATE_BYTES * shape[1]

    def __call__(self):
        """Go through it once."""
        stage = self.optimizer.stage
        self.unit.grad = self.grad_RF
        stage.reduce(self.unit)
        self.optimizer.rule.begin_step()
        stage.step(self.unit, 1.0)
        self.unit.drop_gradient()


def ranks(quick):
    """Cost per byte moved, at a fixed total R * F, from one rank to many."""
    total = 1 << (16 if quick else 24)
    cycles = {size: Cycle(size, total // size) for size in WORLD_SIZES[: 3 if quick else None]}
    seconds = medians(take_turns(cycles, 2 if quick else 9, warm=1))
    cost = {size: seconds[size] / cycle.bytes_moved for size, cycle in cycles.items()}
    told = ", ".join(f"{size}: {cost[size] * 1e12:.0f}" for size in cycles)
    return [
        Row(
            what="reduce_scatter + update + all_gather, cost per byte",
            case=f"W = 1 to {max(cost)}, R·F = {total:,}",
            against="W = 1",
            measured=max(cost.values()) / cost[1],
            reach=None if quick else 1.5,
            at_most=True,
            seconds={f"W = {size}": seconds[size] for size in cycles},
            note=f"the dearest of all W; picoseconds a byte by W: {told}",
        )
    ]


def parameters(quick):
    """Time per element of the same at W = 4, from small models to large ones."""
    made, cost = [], {}
    for numel in NUMELS[: 2 if quick else None]:
        # Four ranks' parameters and gradients, the states, and room for the reduced gradient.
        if 4 * numel * (4 + 4 + 4) > 0.5 * (memory_bytes() or 8 << 30):
            made.append(Row("time per element", f"{numel:,}", "", None, note="not enough memory"))
            continue
        cycle = Cycle(4, numel)
        rounds = 3 if quick or numel > 10**7 else 7
        inner = max(1, 10**6 // numel) if not quick else 1
        (seconds,) = medians(take_turns({"cycle": cycle}, rounds, inner=inner, warm=1)).values()
        cost[numel] = seconds / numel
        made.append(
            Row(
                what="time per element, reduce_scatter + update + all_gather",
                case=f"{numel:,} parameters, W = 4",
                against=f"{min(cost):,} parameters",
                measured=cost[numel] / cost[min(cost)],
                at_most=True,
                seconds={"cycle": seconds},
                note=f"{cost[numel] * 1e9:.2f} ns an element",
            )
        )
        del cycle
    return made


def plans(quick):
    """Settings planned in a second: one by one with everything explained, and as a grid."""
    worlds = [2**i for i in range(4 if quick else 11)]
    batches = tuple(range(1, 3 if quick else 33))

    def single():
        for stage in range(4):
            plan("gpt2", 64, stage=stage)

    def grid():
        plan_grid(["gpt2"], worlds, batches=batches)

    found = medians(take_turns({"single": single, "grid": grid}, 2 if quick else 7, warm=1))
    settings = {"single": 4, "grid": len(worlds) * 4 * len(batches)}
    return [
        Row(
            what="plans a second",
            case="with its reasons" if name == "single" else f"a grid of {settings[name]:,}",
            against="-",
            measured=settings[name] / seconds,
            seconds={name: seconds},
        )
        for name, seconds in found.items()
    ]


def in_fresh_python(program, **environment):
    """Return what a program prints as a number, in a Python of its own."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True, text=True, env=os.environ | environment, cwd=ROOT,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr)
    return float(done.stdout)


def timed_program(statement, before=""):
    """Return a program that prints how long a statement took."""
    return (
        f"import time\n{before}\nstart = time.perf_counter()\n{statement}\n"
        "print(time.perf_counter() - start)"
    )


def imports(quick):
    """Import time beside numba's, which has to be imported anyway."""
    statements = {
        "import numba": "import numba",
        "import zero_nb": "import zero_nb",
        "all that trains": "from zero_nb import Engine, ZeROOptimizer, GPT, MLP, AdamW",
    }
    ways = {
        name: lambda statement=statement: in_fresh_python(timed_program(statement))
        for name, statement in statements.items()
    }
    found = medians(take_turns(ways, 2 if quick else 7))
    return [
        Row(
            what="import time",
            case=name,
            against="import numba",
            measured=found[name] / found["import numba"],
            reach=None if quick else 2.0,
            at_most=True,
            seconds={key: found[key] for key in (name, "import numba")},
            note=f"{found[name] * 1e3:.0f} ms against {found['import numba'] * 1e3:.0f} ms",
        )
        for name in list(statements)[1:]
    ]


FIRST_STEP = """
import numpy as np
from zero_nb import MLP, Engine, MLPConfig
engine = Engine(MLP(MLPConfig((384, 384, 384))), stage=3, world_size=4)
x = np.zeros((8, 384), np.float32)
"""


def first(quick):
    """The first training step of a process: compiling, compiled code at hand, and the second."""
    step = "engine.train_step(x, x)"
    rounds = 1 if quick else 3
    cold, warm = [], []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            program = timed_program(FIRST_STEP + step)
            cold.append(in_fresh_python(program, NUMBA_CACHE_DIR=folder))
            warm.append(in_fresh_python(program, NUMBA_CACHE_DIR=folder))
    again = [in_fresh_python(timed_program(step, FIRST_STEP + step)) for _ in range(rounds)]
    seconds = {
        "nothing compiled": statistics.median(cold),
        "compiled before": statistics.median(warm),
        "a later step": statistics.median(again),
    }
    return [
        Row(
            what="imports, engine and first step of a process, seconds",
            case=case,
            against="-",
            measured=seconds[case],
            seconds=seconds,
            at_most=True,
        )
        for case in ("nothing compiled", "compiled before")
    ]


def notebooks(quick):
    """The run time of every notebook, both editions, one after the other; nothing is written."""
    folders = (ROOT / "notebooks", ROOT / "notebooks" / "learner")
    paths = [path for folder in folders for path in sorted(folder.glob("[0-9A]*.ipynb"))]
    program = (
        "import sys; sys.path.insert(0, 'tools'); from pathlib import Path; import nbtools\n"
        "path = Path({path!r}); nbtools.execute(path.read_text(encoding='utf-8'), path.parent)"
    )
    told = {"what": "notebooks, seconds one after the other", "against": "-", "at_most": True}
    if not all(map(find_spec, ("nbformat", "nbclient", "ipykernel"))):
        return [Row(case=f"{len(paths)} files", measured=None, note="nbclient is missing", **told)]
    seconds = {}
    for path in paths[:1] if quick else paths:
        name = path.relative_to(ROOT / "notebooks").as_posix()
        seconds[name] = in_fresh_python(timed_program(program.format(path=str(path))))
    return [
        Row(
            case=f"{len(seconds)} files",
            measured=sum(seconds.values()),
            seconds=seconds,
            note="the slowest: " + max(seconds, key=seconds.get) if seconds else "none found",
            **told,
        )
    ]


PARTS = {part.__name__: part for part in (ranks, parameters, plans, imports, first, notebooks)}


def rows(quick=False, *, only=tuple(PARTS)):
    """Measure some parts and return their rows."""
    return [row for name in only for row in PARTS[name](quick)]


def main():
    """Measure, print the table, write it."""
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--only", nargs="+", choices=PARTS, default=tuple(PARTS))
    args = options.parse_args()
    others = Others()
    finish("growth", rows(args.tiny, only=args.only), args, others)


if __name__ == "__main__":
    main()
