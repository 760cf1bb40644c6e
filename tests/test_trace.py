"""Traces: the Trace Event Format, and what a run says of itself."""

import json
import os
import stat
import sys

import pytest

from tiny import gpt, gpt_batches
from tiny_task import gpt_task
from zero_nb import cli, compare
from zero_nb.cluster.simulated import EmulatedLink, SimulatedWorld
from zero_nb.overlap import chrome_of, step_work
from zero_nb.theory.schedule import StepOptions
from zero_nb.theory.timeline import Link, timeline
from zero_nb.train.engine import Engine
from zero_nb.train.ledger import KINDS
from zero_nb.train.trace import COMM_LANE, COMPUTE_LANE, Tracer, chrome_trace, write_trace

LAYERS = ["embed", "layers.0.attn", "layers.0.mlp", "layers.1.attn", "layers.1.mlp", "head"]


def check_format(trace):
    """The Trace Event Format as published (complete, counter and metadata events)."""
    trace = json.loads(json.dumps(trace, allow_nan=False))
    assert set(trace) == {"traceEvents", "displayTimeUnit"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str)
        assert event["name"]
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["args"], dict)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name")
            assert isinstance(event["args"]["name"], str)
            continue
        assert isinstance(event["ts"], int | float)
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert isinstance(event["cat"], str)
            assert event["dur"] >= 0
            assert event["tid"] in (COMPUTE_LANE, COMM_LANE)
        else:
            assert event["ph"] == "C"
            assert event["args"]
            assert all(isinstance(n, int) and n >= 0 for n in event["args"].values())
    times = [event["ts"] for event in trace["traceEvents"] if "ts" in event]
    assert times == sorted(times)
    for pid, tid in {(e["pid"], e["tid"]) for e in complete(trace)}:
        check_nesting([e for e in complete(trace) if (e["pid"], e["tid"]) == (pid, tid)])
    return trace


def check_nesting(events):
    """Events of a lane lie side by side or within one another, as viewers need it."""
    open_until = []
    for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        stop = event["ts"] + event["dur"]
        while open_until and open_until[-1] <= event["ts"] + 1e-6:
            open_until.pop()
        assert not open_until or stop <= open_until[-1] + 1e-6, event
        open_until.append(stop)


def complete(trace, *categories):
    """Complete events of some categories, or of all."""
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    return [event for event in events if not categories or event["cat"] in categories]


def counters(trace, rank):
    """Counters of a rank: a list of (ts, bytes by kind)."""
    return [
        (event["ts"], event["args"])
        for event in trace["traceEvents"]
        if event["ph"] == "C" and event["pid"] == rank
    ]


def traced(steps=2, link=None, **settings):
    """A short run, its tracer, and its last report."""
    engine = Engine(gpt(), world=SimulatedWorld(3, link=link), **settings)
    tracer = Tracer(engine)
    for batch in gpt_batches(steps, size=7):
        report = engine.train_step(*batch)
    return engine, tracer, report


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("link", [None, EmulatedLink(1e9, 1e-5)])
def test_every_run_has_a_valid_trace_of_computing_messages_and_memory(stage, link):
    engine, tracer, report = traced(stage=stage, link=link, prefetch_bucket_size=1)
    trace = check_format(tracer.to_chrome())
    computed = [(e["cat"], e["name"]) for e in complete(trace, "forward", "backward")]
    one_step = [("forward", f"forward {name}") for name in LAYERS]
    one_step += [("backward", f"backward {name}") for name in reversed(LAYERS)]
    assert computed == one_step * 2
    assert [e["name"] for e in complete(trace, "training step")] == [
        "training step 1", "training step 2",
    ]  # fmt: skip
    assert len(complete(trace, "update")) == len(complete(trace, "loss")) == 2
    sent = complete(trace, "param", "grad")
    assert {e["tid"] for e in sent} == {COMM_LANE}
    assert sum(e["args"]["elements_sent"] for e in sent) == 2 * report.elements_sent
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert names == {"computing (ranks 0 to 2)", "communicating (ranks 0 to 2)"}
    peak = max(sum(held.values()) for rank in range(3) for _, held in counters(trace, rank))
    assert peak >= report.peak_bytes
    for rank in range(3):
        held = {kind: engine.ledger.bytes_by_rank(kind)[rank] for kind in KINDS}
        assert counters(trace, rank)[-1][1] == held


def test_memory_is_each_ranks_own():
    """With 7 samples on 3 ranks the last one has more activations than the others."""
    _, tracer, report = traced(stage=2)
    largest = [
        max(held["activation"] for _, held in counters(tracer.to_chrome(), rank))
        for rank in range(3)
    ]
    assert largest[0] == largest[1] < largest[2] == report.largest_bytes["activation"]


def test_waiting_is_what_the_clock_calls_exposed():
    _, tracer, report = traced(steps=1, link=EmulatedLink(2e8, 1e-4), stage=3)
    waits = complete(tracer.to_chrome(), "wait")
    total = sum(event["dur"] for event in waits) / 1e6
    assert total == pytest.approx(report.exposed_s, rel=1e-6)
    assert len(waits) == 3 * 4  # two gathers and a reduction a unit


def test_a_tracer_stops_and_what_it_saw_stays():
    engine, tracer, _ = traced(steps=1, stage=3)
    before = tracer.to_chrome()
    tracer.stop()
    assert (engine.tracer, engine.ledger.listener) == (None, None)
    assert (engine.world.clock.spans, engine.world.clock.waits) == (None, None)
    engine.train_step(*gpt_batches(1, size=7)[0])
    assert tracer.to_chrome() == before


def test_tracing_changes_neither_bits_nor_bytes():
    engine, _, report = traced(stage=3, prefetch_bucket_size=9000)
    plain = Engine(gpt(), world_size=3, stage=3, prefetch_bucket_size=9000)
    for batch in gpt_batches(2, size=7):
        other = plain.train_step(*batch)
    assert engine.optimizer.weights_sha256() == plain.optimizer.weights_sha256()
    assert (report.largest_bytes, report.peak_bytes) == (other.largest_bytes, other.peak_bytes)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_timeline_model_has_the_same_trace(stage):
    """The same lanes and counters; each kind of memory at its most to the byte."""
    engine, _, report = traced(stage=stage, prefetch_bucket_size=1, overlap_comm=True)
    options = StepOptions(
        stage, 3, prefetch_bucket_size=1, overlap_comm=True, widened=True
    )  # fmt: skip
    seconds = {(name, way): 1e-3 for name in LAYERS for way in ("forward", "backward")}
    line = timeline(step_work(engine, 3, seconds=seconds), options, Link(1e8))
    trace = check_format(chrome_of(line))
    names = [e["name"] for e in complete(trace, "forward", "backward") if e["tid"] == COMPUTE_LANE]
    assert names == [f"forward {n}" for n in LAYERS] + [f"backward {n}" for n in LAYERS[::-1]]
    sent = [e for e in complete(trace) if e["tid"] == COMM_LANE]
    assert sum(e["args"]["bytes_sent"] for e in sent) == report.bytes_sent
    largest = {kind: max(held[kind] for _, held in counters(trace, 0)) for kind in KINDS}
    assert largest == report.largest_bytes
    assert max(sum(held.values()) for _, held in counters(trace, 0)) == report.peak_bytes


def test_a_trace_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "trace.json"
    trace = chrome_trace([("a", "forward", COMPUTE_LANE, 0.0, 1e-3, {})], {0: [(0.0, {"x": 1})]})
    write_trace(path, trace)
    assert check_format(json.loads(path.read_text())) == trace
    if os.name == "posix":
        assert stat.S_IMODE(path.stat().st_mode) == 0o644
    with pytest.raises(ValueError, match="JSON compliant"):
        write_trace(path, {"traceEvents": [float("nan")]})
    assert json.loads(path.read_text()) == trace
    assert [entry.name for entry in tmp_path.iterdir()] == ["trace.json"]
    with pytest.raises(FileNotFoundError):
        write_trace(tmp_path / "nowhere" / "trace.json", trace)


# --- zero-nb train --trace -----------------------------------------------------------------------


@pytest.fixture
def zero_nb(monkeypatch, capsys, tmp_path):
    """Call the command as a shell would, in an empty folder; return status, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compare, "digits_task", gpt_task)

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["zero-nb", *map(str, words)])
        status = 0
        try:
            cli.main()
        except SystemExit as stop:
            status = stop.code
        return status, *capsys.readouterr()

    return call


def test_train_writes_the_trace_of_its_first_steps(zero_nb, tmp_path):
    words = ("--steps", 4, "--trace", "trace.json", "--prefetch-bucket-size", 1, "--json")
    status, out, err = zero_nb("train", *words, "--trace-steps", 2)
    assert (status, err) == (0, "")
    trace = check_format(json.loads((tmp_path / "trace.json").read_text()))
    assert len(complete(trace, "training step")) == 2
    told = json.loads(out)
    assert told["overlap"]["fetches"]["hits"] == 7
    assert told["overlap"]["predicted_peak_bytes"] == told["peak_bytes"]
    assert told["overlap"]["predicted_elements"] == told["elements_sent"]


def test_train_says_what_an_emulated_link_hides_and_that_without_one_there_is_nothing(zero_nb):
    words = ("train", "--steps", 3, "--prefetch-bucket-size", 1, "--overlap")
    status, out, _ = zero_nb(*words, "--link-bandwidth", 1e8, "--link-latency", 1e-4)
    assert status == 0
    assert "on an emulated link of 100,000,000 bytes/s and 0.0001 s messages took" in out
    assert "units fetched in the last step: 7 hits, 1 misses" in out
    status, out, _ = zero_nb(*words)
    assert "without a link there is nothing to hide" in out
    _, out, _ = zero_nb("train", "--steps", 1)
    assert "to hide" not in out


@pytest.mark.parametrize(
    "words",
    [
        ("--no-reshard-after-forward", "--overlap"),
        ("--param-persistence-threshold", 500, "--prefetch-bucket-size", 1),
        ("--max-live-parameters", 8000, "--max-reuse-distance", 9000, "--overlap"),
        ("--stage", 2, "--overlap", "--reduce-bucket-size", 999, "--optimizer", "sgd"),
        ("--stage", 1, "--trace", "t.json", "--micro-batches", 2, "--precision", "fp16"),
    ],
)
def test_options_reach_the_engine_and_the_schedule_predicts_what_is_measured(zero_nb, words):
    status, out, err = zero_nb("train", "--steps", 2, "--world-size", 2, *words, "--json")
    assert (status, err) == (0, "")
    told = json.loads(out)
    assert told["overlap"]["predicted_peak_bytes"] == told["peak_bytes"]
    assert told["overlap"]["predicted_elements"] == told["elements_sent"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--trace", "nowhere/trace.json"), "there is no folder nowhere to write the trace"),
        (("--trace", "."), "is a folder; give a file"),
        (("--trace", "t.json", "--trace-steps", 0), "trace_steps must be"),
        (("--link-latency", 0.1), "--link-latency needs --link-bandwidth"),
        (("--link-bandwidth", 0), "bytes_per_s must be a finite number above 0"),
        (("--link-bandwidth", 1e9, "--engine", "mpi"), "leave it out"),
        (("--prefetch-bucket-size", -1), "prefetch_bucket_size must be a number of elements"),
    ],
)
def test_what_makes_no_sense_is_one_line_on_stderr(zero_nb, tmp_path, words, message):
    status, out, err = zero_nb("train", "--steps", 1, *words)
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
