"""All benchmarks, one table, one figure: what ``make bench`` and ``make bench-peers`` run.

    python benchmarks/run.py [--tiny] [--parts PART ...] [--out FOLDER] [--figures FOLDER]

Each part runs in a process of its own and writes FOLDER/PART.json. The table has what was to be
reached beside what was measured, and says which lines fall short; lines whose peer is not installed
claim nothing. The command fails only if a benchmark does, never because of a figure.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from _timing import RESULTS, ROOT, name_machine, read_rows, summary, table

PARTS = ("kernels", "step", "growth")


def run(part, out, tiny):
    """Run one part; return what it wrote, or None if it failed."""
    path = out / f"{part}.json"
    command = [sys.executable, str(ROOT / "benchmarks" / f"{part}.py"), "--json", str(path)]
    start = time.perf_counter()
    done = subprocess.run(command + ["--tiny"] * tiny, stdout=subprocess.DEVNULL)
    took = time.perf_counter() - start
    print(f"{part}: {took:.0f} s{'' if done.returncode == 0 else ', FAILED'}", flush=True)
    return json.loads(path.read_text(encoding="utf-8")) if done.returncode == 0 else None


def draw(document, folder):
    """Draw the kernels beside memcpy and their peers."""
    from zero_nb.show.bench_figures import kernel_ratios

    return kernel_ratios(document).save(folder, "bench")


def main(words=None):
    """Run every part, then print and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="tiny sizes: does it work, no figures")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON files")
    parser.add_argument("--figures", type=Path, default=ROOT / "figures")
    args = parser.parse_args(words)
    start = time.perf_counter()
    documents = {part: run(part, args.out, args.tiny) for part in args.parts}
    told = {part: document for part, document in documents.items() if document}
    rows = [row for document in told.values() for row in read_rows(document)]
    if told:
        print(name_machine(next(iter(told.values()))["machine"]))
        for part, document in told.items():
            if document["others_share"] is not None:
                print(f"{part}: other processes took {document['others_share']:.0%} of the cores")
        print("\n" + table(rows) + "\n\n" + summary(rows))
    if "kernels" in told:
        png, _ = draw(told["kernels"], args.figures)
        print(f"\nfigure: {png}")
    print(f"\n{time.perf_counter() - start:.0f} s altogether")
    sys.exit(0 if len(told) == len(args.parts) else 1)


if __name__ == "__main__":
    main()
