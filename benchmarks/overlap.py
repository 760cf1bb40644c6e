"""What prefetch hides on an emulated link, and what the timeline model says of the same steps.

    python benchmarks/overlap.py [--rounds N] [--json FILE]

Layers are timed without a link; the timeline is told these times and the link, and nothing of the
measured steps. The link is emulated: a communication thread sleeps bytes / bandwidth, then copies.
Its bandwidth is chosen so that at stage 3 messages take as long as all computing, half of a step
in which nothing overlaps. A row is the median over rounds of the median step. Run it on a quiet
machine: with other work on the cores, layers take longer in one run than in the other.
"""

import argparse
import json
import os
import statistics

import numpy as np

from zero_nb.cluster.simulated import EmulatedLink, SimulatedWorld
from zero_nb.overlap import measure_costs, measure_overlap
from zero_nb.train.engine import Engine
from zero_nb.train.model import MLP, MLPConfig

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


def balanced_link(model, batch, world_size, costs):
    """Return the link on which stage 3's messages take as long as all computing."""
    sent = Engine(model, world_size=world_size, stage=3).train_step(*batch).bytes_sent
    messages = 3 * len(model.layers)
    computing = sum(
        s / world_size if kind == "update" else s for (kind, _), s in turned(costs).items()
    )
    each_byte_s = (computing - messages * (LATENCY_S + costs.oversleep_s)) / sent
    return EmulatedLink(1 / (each_byte_s - costs.copy_s_per_byte), LATENCY_S)


def turned(costs):
    """Return costs by (kind, name): updates have the kind first, layers the name."""
    return {
        (key if key[0] in ("update", "loss", "rest") else key[::-1]): s
        for key, s in costs.seconds.items()
    }


def one_round(args, model, batch, seen):
    """Time the layers, then train every row; add what was measured to `seen`."""
    costs = measure_costs(model, batch, world_size=args.world_size)
    link = balanced_link(model, batch, args.world_size, costs)
    for name, settings in ROWS.items():
        got = measure_overlap(
            model, batch, link, costs, world_size=args.world_size, steps=args.steps, **settings
        )
        assert got.report.largest_bytes == got.line.schedule.largest_bytes
        assert got.report.elements_sent == got.line.schedule.elements_sent()
        seen.setdefault(name, []).append(got)
    return link


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
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--samples", type=int, default=1024, help="of the global batch")
    parser.add_argument("--json", help="file to write the rows to")
    args = parser.parse_args()
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    print(f"{os.cpu_count()} cores{load}; {args.world_size} ranks, {args.layers} layers of width "
          f"{args.width}, {args.samples} samples")  # fmt: skip
    model, batch = work(args.width, args.layers, args.samples)
    seen, links = {}, []
    for _ in range(args.rounds):
        links.append(one_round(args, model, batch, seen))
    speeds = ", ".join(f"{link.bytes_per_s / 1e6:.0f}" for link in links)
    print(f"emulated link of {speeds} MB/s in the {args.rounds} rounds, {LATENCY_S * 1e3:g} ms")
    rows = [row(name, rounds) for name, rounds in seen.items()]
    for told in rows:
        print(as_text(told))
    print(without_link(args, model, batch))
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"settings": vars(args), "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
