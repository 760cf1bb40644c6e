"""What the benchmarks share: taking turns, medians, rows with what is to be reached, JSON, a table.

A benchmark gives `Row`s. A row says what was measured, against whom, and what it had to reach; the
table prints both side by side and marks what falls short. A row whose peer is not installed says so
and claims nothing.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("numpy", "numba", "zero-nb", "torch", "jax", "jaxlib", "optax", "ml_dtypes", "tbb")
# OpenMP's threads spin for a while after their work; let them fall asleep before the next turn.
PAUSE_S = 0.003


@dataclass
class Row:
    """One line of the table.

    Attributes
    ----------
    what : str
        What is measured, as in the first column of the table of reach.
    case : str
        Workload, world size, in cache or in memory.
    against : str
        What the ratio compares with: a limit of the machine, or the peer that was best.
    measured : float or None
        The ratio; None if the peer is not installed.
    reach : float or None
        What it has to be; None for a line that only informs.
    at_most : bool
        Whether less is better.
    seconds : dict
        Median seconds of every way that took part.
    note : str
        What a reader has to know.
    """

    what: str
    case: str
    against: str
    measured: float | None
    reach: float | None = None
    at_most: bool = False
    seconds: dict = field(default_factory=dict)
    note: str = ""

    @property
    def reached(self):
        """True, False, or None where nothing was measured or nothing has to be reached."""
        if self.measured is None or self.reach is None:
            return None
        return self.measured <= self.reach if self.at_most else self.measured >= self.reach

    @property
    def mark(self):
        """A word for the table."""
        if self.measured is None:
            return "not measured"
        return {True: "reached", False: "SHORT", None: ""}[self.reached]


def sample(way, inner=1, warm=0):
    """Return the seconds of one call of a way: the mean of ``inner`` calls after ``warm`` others.

    A way that returns a float has timed itself, in another process for instance; it is called once.
    """
    for _ in range(warm):
        way()
    start = time.perf_counter()
    told = way()
    for _ in range(inner - 1):
        way()
    seconds = (time.perf_counter() - start) / inner
    return told if isinstance(told, float) else seconds


def take_turns(ways, rounds, *, inner=1, warm=0, pause=PAUSE_S, limit_s=None):
    """Time every way once a round, so that whatever slows the machine down hits all of them.

    Parameters
    ----------
    ways : dict of str to callable
        Called without arguments. One that returns a float has timed itself.
    rounds : int
        Samples of each; the order turns by one a round. One round before them is thrown away.
    inner, warm : int
        Calls in one sample, and calls before it: for work that is to be in the cache.
    pause : float
        Seconds before a sample.
    limit_s : float, optional
        No further round is begun after that many seconds, but there are at least three.

    Returns
    -------
    dict of str to list of float
        Seconds of a call.
    """
    names = list(ways)
    times = {name: [] for name in names}
    start = time.perf_counter()
    for number in range(rounds + 1):
        if number > 3 and limit_s is not None and time.perf_counter() - start > limit_s:
            break
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            time.sleep(pause)
            seconds = sample(ways[name], inner, warm)
            if number:
                times[name].append(seconds)
    return times


def medians(times):
    """Return the median of each way's seconds."""
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def best(seconds, *names):
    """Return the fastest of these ways, those that took part, and its seconds."""
    present = [name for name in names if name in seconds]
    name = min(present, key=seconds.get)
    return name, seconds[name]


class Worker:
    """Another Python process that answers one line of JSON with one line of JSON.

    Its program reads requests from standard input until it ends and prints nothing else.
    """

    def __init__(self, command, **environment):
        """Start ``command``, a list of words, with these variables added to the environment."""
        self.process = subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | {name: str(value) for name, value in environment.items()},
        )  # fmt: skip

    def ask(self, **request):
        """Send a request; return the answer."""
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.process.args} ended with code {self.process.wait()}")
        return json.loads(line)

    def close(self):
        """Let the process end."""
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.process.stdout.close()

    def __enter__(self):
        """Return the worker."""
        return self

    def __exit__(self, *error):
        """Let the process end."""
        self.close()


def serve(answer):
    """Be a worker's program: answer every request, ``answer(**request)``, with what it returns."""
    for line in sys.stdin:
        print(json.dumps(answer(**json.loads(line))), flush=True)


def installed(*modules):
    """Whether this Python can import all of these."""
    return all(find_spec(module) is not None for module in modules)


def python_with(*modules):
    """Return a Python that can import these modules, or None.

    This one if it can; else the one that ``PEERS_PYTHON`` names; else that of ``.venv-peers``,
    which ``make bench-peers`` makes.
    """
    if installed(*modules):
        return sys.executable
    places = [ROOT / ".venv-peers" / part for part in ("bin/python", "Scripts/python.exe")]
    program = f"import {', '.join(modules)}"
    for python in [os.environ.get("PEERS_PYTHON"), *places]:
        if python and Path(python).exists():
            if subprocess.run([python, "-c", program], capture_output=True).returncode == 0:
                return str(python)
    return None


# ------------------------------------------------------------------------------------ the machine


def machine():
    """Return what a reader has to know about the machine and the packages."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "memory_bytes": memory_bytes(),
        "caches": caches(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": versions,
    }


def processor():
    """Return the processor's name."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def memory_bytes():
    """Return the bytes of main memory, or None where nobody says."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def caches():
    """Return the data caches of core 0 as Linux tells them, such as {"L2": "1024K"}."""
    found = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        try:
            kind, level, size = (
                (index / name).read_text().strip() for name in ("type", "level", "size")
            )
        except OSError:
            continue
        if kind != "Instruction":
            found[f"L{level}"] = size
    return found


def name_machine(told):
    """Return the machine in one line."""
    memory = told["memory_bytes"]
    parts = [
        f"{told['processor']}, {told['cores']} cores",
        f"{memory / 2**30:.0f} GiB" if memory else "",
        f"Python {told['python']}",
        ", ".join(f"{name} {version}" for name, version in told["packages"].items()),
    ]
    return "; ".join(part for part in parts if part)


class Others:
    """The share of the cores that other processes take between start and ``share()`` (Linux)."""

    def __init__(self):
        self.start, self.before = time.perf_counter(), self._cpu_seconds()

    @staticmethod
    def _cpu_seconds():
        """Return the CPU seconds of all processes, and those of this one and its children."""
        try:
            with open("/proc/stat", encoding="ascii") as file:
                fields = [int(number) for number in file.readline().split()[1:]]
        except (OSError, ValueError):
            return None
        busy = sum(fields[:8]) - fields[3] - fields[4]
        return busy / os.sysconf("SC_CLK_TCK"), sum(os.times()[:4])

    def share(self):
        """Return the share since the start, or None where it cannot be known."""
        after = self._cpu_seconds()
        if self.before is None or after is None:
            return None
        busy, own = (b - a for a, b in zip(self.before, after, strict=True))
        elapsed = time.perf_counter() - self.start
        return max(0.0, busy - own) / (elapsed * (os.cpu_count() or 1))


# --------------------------------------------------------------------------- what is written down


def as_json(part, rows, settings, others=None):
    """Return the results of one part as a dict that JSON can hold."""
    return {
        "part": part,
        "machine": machine(),
        "settings": settings,
        "others_share": others,
        "rows": [asdict(row) | {"reached": row.reached} for row in rows],
    }


def write_json(path, document):
    """Write a document in one step."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".tmp")
    beside.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    beside.replace(path)


def read_rows(document):
    """Return the rows of a document again."""
    return [
        Row(**{key: value for key, value in row.items() if key != "reached"})
        for row in document["rows"]
    ]


def number(value):
    """Write a ratio or a rate in about three digits."""
    if value is None:
        return "-"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 0.1 or abs(value) >= 100 else f"{value:.2f}"


def table(rows):
    """Return the rows as a table of text, reach and measured side by side."""
    head = ("what", "case", "against", "reach", "measured", "")
    lines = [head]
    for row in rows:
        sign = "<=" if row.at_most else ">="
        reach = "" if row.reach is None else f"{sign} {number(row.reach)}"
        lines.append(
            (row.what, row.case, row.against, reach, number(row.measured), row.mark)
        )  # fmt: skip
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    out = []
    for line in lines:
        cells = [
            cell.rjust(width) if i in (3, 4) else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        out.append("  ".join(cells).rstrip())
    out.insert(1, "-" * max(map(len, out)))
    notes = dict.fromkeys(f"{row.what}, {row.case}: {row.note}" for row in rows if row.note)
    return "\n".join([*out, *notes])


def summary(rows):
    """Return the lines that had to reach something, the worst case of each, as a table of text."""
    groups = {}
    for row in rows:
        if row.reach is not None:
            # The case without its sizes; the peer without the way that was its best.
            key = row.what, row.against.split()[0].split(".")[0], row.reach, row.at_most
            groups.setdefault(key, []).append(row)
    lines = []
    for group in groups.values():
        known = [row for row in group if row.measured is not None]
        if not known:
            lines.append(group[0])
            continue
        worst = max if group[0].at_most else min
        row = worst(known, key=lambda row: row.measured)
        short = sum(row.reached is False for row in known)
        case = f"worst of {len(known)}: {row.case}" if len(known) > 1 else row.case
        note = f"{short} of {len(known)} cases fall short" if short and len(known) > 1 else ""
        told = asdict(row) | {"case": case, "note": note}
        lines.append(Row(**told))
    reached = sum(row.reached is True for row in rows)
    asked = sum(row.reached is not None for row in rows)
    return f"{reached} of {asked} measured cases reach what they have to; the worst of each:\n" + (
        table(lines)
    )


def parser(description):
    """Return a parser with the options that all parts have."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--json", help="file to write the results to")
    made.add_argument("--tiny", action="store_true", help="tiny sizes: does it work, no figures")
    return made


def finish(part, rows, args, others):
    """Print the table of one part and write its JSON."""
    share = others.share()
    document = as_json(part, rows, {"tiny": args.tiny}, share)
    print(name_machine(document["machine"]))
    if share is not None:
        print(f"other processes took {share:.0%} of the cores meanwhile")
    print(table(rows))
    if args.json:
        write_json(args.json, document)
