"""What prefetch hides on an emulated link, and what the timeline model says of the same steps.

    python benchmarks/overlap.py [--rounds N] [--json FILE]

For each stage, layers are timed in a run of their own in which nothing overlaps; the timeline is
told these times and the link, and nothing of the measured steps. A second line gives it what layers
and messages took in the measured steps themselves: what is left is whether it knows when messages
are waited for.

The link is emulated: a communication thread sleeps bytes / bandwidth, then copies. Its bandwidth is
chosen so that at stage 3 messages take as long as all computing, half of a step in which nothing
overlaps. One thread computes, so that on two cores the other one is free to communicate, as a
device's network card is. A row is the median over rounds of the median step.

With other work on the cores, layers take longer in one run than in the next, and nothing can be
predicted from them. So every round says what share of the cores other processes took (on Linux),
and one with more than --quiet of it is thrown away and measured again, up to --tries rounds; a
round begins when the cores have been quiet for a moment, or after --patience seconds.
"""

import argparse
import json
import os
import statistics
import sys
import time
from unittest.mock import patch

import numba
import numpy as np

from zero_nb.cluster.simulated import EmulatedLink, SimulatedWorld
from zero_nb.overlap import measure_costs, measure_overlap, step_work
from zero_nb.theory.schedule import StepOptions
from zero_nb.theory.timeline import timeline
from zero_nb.train.engine import Engine
from zero_nb.train.model import MLP, MLPConfig

CORES = os.cpu_count() or 1
LATENCY_S = 2e-4
ROWS = {
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 2, overlap": {"stage": 2, "overlap_comm": True},
    "stage 3": {"stage": 3},
    "stage 3, prefetch 1": {"stage": 3, "prefetch_bucket_size": 1},
    "stage 3, prefetch 1, overlap": {
        "stage": 3, "prefetch_bucket_size": 1, "overlap_comm": True,
    },
}  # fmt: skip


def work(width, layers, samples):
    """Return a model of equal layers, and a batch."""
    inputs, targets = np.random.default_rng(0).normal(size=(2, samples, width)).astype(np.float32)
    return MLP(MLPConfig((width,) * (layers + 1))), (inputs, targets)


def balanced_link(model, batch, world_size):
    """Return the link on which stage 3's messages take as long as all computing."""
    link = EmulatedLink(1e9, LATENCY_S)
    for _ in range(2):  # how fast is computed depends on how long is waited
        costs = measure_costs(model, batch, world_size=world_size, link=link)
        engine = Engine(model, world_size=world_size, stage=3)
        sent, line = engine.train_step(*batch).bytes_sent, costs.link(link)
        computing = timeline(
            step_work(engine, len(batch[0]) // world_size, seconds=costs.seconds),
            StepOptions(3, world_size), line,
        ).compute_s  # fmt: skip
        held_up_s = computing - 3 * len(model.layers) * line.latency_s
        each_byte_s = max(held_up_s / sent - costs.copy_s_per_byte, 0.1 * computing / sent)
        link = EmulatedLink(1 / each_byte_s, LATENCY_S)
    return link


def cpu_seconds():
    """Return the CPU seconds of all processes since the start, and of this one; or None."""
    try:
        with open("/proc/stat", encoding="ascii") as file:
            fields = [int(field) for field in file.readline().split()[1:]]
    except (OSError, ValueError):
        return None
    idle = fields[3] + fields[4]
    return (sum(fields[:8]) - idle) / os.sysconf("SC_CLK_TCK"), sum(os.times()[:2])


def others_share(before, start):
    """Return the share of the cores that other processes took since, or None."""
    after = cpu_seconds()
    if before is None or after is None:
        return None
    busy, own = (b - a for a, b in zip(before, after, strict=True))
    return max(0.0, busy - own) / ((time.perf_counter() - start) * CORES)


def wait_until_quiet(args):
    """Sleep until other processes leave the cores alone, for as long as patience lasts."""
    until = time.perf_counter() + args.patience
    while time.perf_counter() < until:
        before, start = cpu_seconds(), time.perf_counter()
        time.sleep(2.0)
        share = others_share(before, start)
        if share is None or share <= args.quiet / 2:
            return


def one_round(args, model, batch):
    """Time the layers, then train every row; return what was measured, and the link."""
    seen = {}
    link = balanced_link(model, batch, args.world_size)
    costs = {
        stage: measure_costs(
            model, batch, world_size=args.world_size, stage=stage, link=link, steps=args.steps
        )
        for stage in (1, 2, 3)
    }
    for name, settings in ROWS.items():
        got = measure_overlap(
            model, batch, link, costs[settings["stage"]], world_size=args.world_size,
            steps=args.steps, **settings,
        )  # fmt: skip
        assert got.report.largest_bytes == got.line.schedule.largest_bytes
        assert got.report.elements_sent == got.line.schedule.elements_sent()
        seen[name] = got
    return seen, link


def rounds_of(args, model, batch):
    """Measure rounds until enough were quiet; return them."""
    kept = []
    for number in range(1, args.tries + 1):
        wait_until_quiet(args)
        before, start = cpu_seconds(), time.perf_counter()
        seen, link = one_round(args, model, batch)
        share = others_share(before, start)
        quiet = share is None or share <= args.quiet
        told = "unknown" if share is None else f"{share:.0%}"
        print(f"round {number}: link of {link.bytes_per_s / 1e6:.0f} MB/s, other processes took "
              f"{told} of the cores{'' if quiet else '; not kept'}", flush=True)  # fmt: skip
        if quiet:
            kept.append(seen)
        if len(kept) == args.rounds:
            break
    return kept


def row(name, rounds):
    """Return the medians of a row."""

    def median(read):
        values = [read(got) for got in rounds]
        return None if None in values else statistics.median(values)

    return {
        "name": name,
        "step_s": median(lambda got: got.step_s),
        "predicted_step_s": median(lambda got: got.line.step_s),
        "error": median(lambda got: got.error),
        "comm_s": median(lambda got: got.comm_s),
        "exposed_s": median(lambda got: got.exposed_s),
        "predicted_exposed_s": median(lambda got: got.line.exposed_s),
        "hidden_of_what_can_be": median(lambda got: got.share_of_what_can_be_hidden),
        "replayed_error": median(lambda got: got.replayed_error),
        "replayed_hidden": median(lambda got: got.replayed_share),
        "hits": rounds[-1].report.fetches.hits,
    }


def as_text(told):
    """Return a row as a line."""
    hidden = told["hidden_of_what_can_be"]
    return (
        f"{told['name']:<29} {told['step_s'] * 1e3:8.1f} ms, timeline "
        f"{told['predicted_step_s'] * 1e3:8.1f} ({told['error']:+6.1%}); messages "
        f"{told['comm_s'] * 1e3:6.1f}, exposed {told['exposed_s'] * 1e3:6.1f} "
        f"(timeline {told['predicted_exposed_s'] * 1e3:6.1f})"
        + ("" if hidden is None else f"; {hidden:.0%} of what can be hidden is")
        + f"\n{'':<29} with the times of the same steps {told['replayed_error']:+6.1%}"
        + ("" if hidden is None else f"; {told['replayed_hidden']:.0%} hidden")
    )


def without_link(args, model, batch):
    """Return a line on shared memory: nothing to hide."""
    shares = []
    for prefetch in (0, 1):
        engine = Engine(
            model, world=SimulatedWorld(args.world_size), stage=3, prefetch_bucket_size=prefetch
        )
        reports = [engine.train_step(*batch) for _ in range(2 + args.steps)][2:]
        comm, exposed, whole = (
            statistics.median(getattr(report, field) for report in reports)
            for field in ("comm_s", "exposed_s", "seconds")
        )
        shares.append(f"{comm / whole:.1%} of a step, {min(1.0, exposed / comm):.0%} of it exposed")
    return (
        f"without a link there is nothing to hide on shared memory: messages are copies and take "
        f"{shares[0]}; with prefetch {shares[1]}"
    )


def main():
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="quiet rounds to measure")
    parser.add_argument("--tries", type=int, default=40, help="rounds at most")
    parser.add_argument("--quiet", type=float, default=0.1, help="share of the cores of others")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds to wait for quiet")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--samples", type=int, default=512, help="of the global batch")
    parser.add_argument("--json", help="file to write the rows to")
    args = parser.parse_args()
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    print(f"{CORES} cores{load}; {args.world_size} ranks, {args.layers} layers of width "
          f"{args.width}, {args.samples} samples")  # fmt: skip
    model, batch = work(args.width, args.layers, args.samples)
    numba.set_num_threads(1)
    with patch("os.cpu_count", return_value=1):  # threads that compute ranks side by side
        kept = rounds_of(args, model, batch)
    if not kept:
        sys.exit("no round was quiet; try again later, or with a larger --quiet")
    rows = [row(name, [seen[name] for seen in kept]) for name in ROWS]
    print(
        f"medians of {len(kept)} rounds, on an emulated link with {LATENCY_S * 1e3:g} ms latency:"
    )
    for told in rows:
        print(as_text(told))
    print(without_link(args, model, batch))
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"settings": vars(args), "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
