"""The timeline model beside real training: what it says is held, sent and served is measured.

Both are given the same options and know nothing of each other: the schedule is written from sizes.
"""

import itertools
import random
from functools import cache

import pytest

from tiny import PRECISIONS, STEPS, VOCAB, gpt, gpt_batches, mlp, mlp_batches
from zero_nb.cluster.simulated import EmulatedLink, SimulatedWorld
from zero_nb.config import UsageError
from zero_nb.overlap import step_work
from zero_nb.theory.network import Network
from zero_nb.theory.presets import get_device, get_model
from zero_nb.theory.schedule import (
    Compute,
    Free,
    Hold,
    LayerWork,
    Send,
    StepOptions,
    StepWork,
    UnitSize,
    Wait,
    schedule,
)
from zero_nb.theory.timeline import Link, lay_out, timeline, transformer_work
from zero_nb.theory.traffic import elements_per_step
from zero_nb.train.engine import Engine
from zero_nb.train.model import GPT, GPTConfig
from zero_nb.train.optim import AdamW

ALL_PRECISIONS = ("fp32", "bf16", "bf16-fp32-grads", "bf16-both-grads", "fp16")


def compared(model, batch, samples, *, units="block", frozen=(), world=None, **options):
    """Run two steps, and write their schedules; return what is measured, what is predicted."""
    if world is None:
        world = SimulatedWorld(options.pop("world_size", 4))
    engine = Engine(model, units=units, frozen=frozen, world=world, rule=AdamW(0.01), **options)
    measured, predicted = [], []
    for recording in (True, False):
        report = engine.train_step(*batch)
        measured.append(
            {
                "held": report.held_bytes,
                "largest": report.largest_bytes,
                "peak": report.peak_bytes,
                "elements": report.elements_sent,
                "bytes": report.bytes_sent,
                "served": (report.fetches.hits, report.fetches.misses, report.fetches.kept),
            }
        )
        step = schedule(
            step_work(engine, samples),
            StepOptions(world_size=world.size, recording=recording, widened=True, **options),
        )
        predicted.append(
            {
                "held": step.held_bytes,
                "largest": step.largest_bytes,
                "peak": step.peak_bytes,
                "elements": step.elements_sent(),
                "bytes": step.bytes_sent(),
                "served": (step.hits, step.misses, step.kept),
            }
        )
    return measured, predicted, engine


# --- prediction = measured -------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ALL_PRECISIONS)
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_every_byte_and_element_of_a_step_is_predicted(stage, precision, micro_batches):
    """Each kind at its largest, the peak of their sum, and what is sent; buckets or not."""
    batch = gpt_batches(1, size=8 * micro_batches)[0]
    ways = itertools.product((None, 1000, 10**6), (False, True)) if stage > 1 else [(1000, True)]
    for bucket, overlap in ways:
        measured, predicted, _ = compared(
            gpt(), batch, 2, stage=stage, precision=precision, micro_batches=micro_batches,
            reduce_bucket_size=bucket, overlap_comm=overlap,
        )  # fmt: skip
        assert measured == predicted, (bucket, overlap)


SPANNING = (
    ("embed", "layers.0.attn"),
    ("layers.0.mlp",),
    ("layers.1.attn", "layers.1.mlp", "head"),
)


def drawn_options(rng):
    """A model, how its layers are grouped, and any options of stage 3."""
    tied = rng.random() < 0.5
    config = GPTConfig(vocab_size=VOCAB, seq_len=STEPS, width=25, heads=5, blocks=2, tied=tied)
    units = rng.choice(["block", "sublayer", "model", *([] if tied else [SPANNING])])
    frozen = rng.choice([(), ("layers.0.fc1.weight",), ("layers.0.ln1.weight", "tok.weight")])
    engine = Engine(GPT(config), units=units, frozen=frozen, stage=3)
    names = [unit.name for unit in engine.optimizer.units]
    return GPT(config), {
        "units": units,
        "frozen": frozen,
        "stage": 3,
        "world_size": rng.choice([1, 2, 3, 8]),
        "precision": rng.choice(ALL_PRECISIONS),
        "micro_batches": rng.choice([1, 2, 3]),
        "prefetch_bucket_size": rng.choice([0, 1, 400, 5000, 8000, 10**6]),
        "max_live_parameters": rng.choice([None, 0, 5000, 8500, 16000, 20000]),
        "max_reuse_distance": rng.choice([0, 1, 500, 8000, 20000]),
        "param_persistence_threshold": rng.choice([0, 380, 500, 8000, 10**6]),
        "reshard_after_forward": rng.choice(
            [True, False, rng.sample(names, rng.randrange(len(names) + 1))]
        ),
        "reduce_bucket_size": rng.choice([None, None, 1000, 10000]),
        "overlap_comm": rng.choice([False, True]),
    }


@pytest.mark.parametrize("seed", range(5))
def test_stage_3_with_any_options_tied_frozen_and_mixed_units_is_predicted(seed):
    rng = random.Random(seed)
    for _ in range(10):
        model, options = drawn_options(rng)
        batch = gpt_batches(1, size=2 * options["world_size"] * options["micro_batches"])[0]
        measured, predicted, _ = compared(model, batch, 2, **options)
        assert measured == predicted, options


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_mlp_and_ranks_with_unequal_batches_are_predicted(stage):
    model = mlp()
    measured, predicted, _ = compared(
        model, mlp_batches(model, 1, size=11)[0], 3, stage=stage, prefetch_bucket_size=20
    )
    assert measured == predicted


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_bytes_do_not_depend_on_when_messages_arrive(stage, precision):
    """A communication thread fills in results; memory is taken and given in program order."""
    options = {"stage": stage, "precision": precision, "overlap_comm": True}
    options |= {"prefetch_bucket_size": 8000, "reduce_bucket_size": 1000}
    for speed in (1e8, 1e10):
        world = SimulatedWorld(4, link=EmulatedLink(speed, 1e-5))
        measured, predicted, _ = compared(
            gpt(), gpt_batches(1, size=8)[0], 2, world=world, **options
        )
        assert measured == predicted


# --- a schedule is data ----------------------------------------------------------------------


def chain(layers=4, numel=12, forward_s=1.0, backward_s=2.0, **unit):
    """Equal layers, each a unit of its own."""
    names = [f"unit {i}" for i in range(layers)]
    return StepWork(
        tuple(UnitSize(name, numel, **unit) for name in names),
        tuple(LayerWork(name, (name,), forward_s, backward_s) for name in names),
    )


def gathered(step):
    """The units that are gathered, in order."""
    return [send.name for send in step.sends if send.collective == "all_gather"]


def test_a_schedule_can_be_read():
    step = schedule(chain(layers=2), StepOptions(stage=3, world_size=2, prefetch_bucket_size=1))
    lines = str(step).splitlines()
    assert lines[:6] == [
        "forward   send    all_gather of unit 0, 12 elements",
        "          hold    48 bytes of unsharded for unit 0",
        "          wait    for unit 0",
        "          send    all_gather of unit 1, 12 elements",
        "          hold    48 bytes of unsharded for unit 1",
        "          compute unit 0",
    ]
    assert sum(line.startswith(("backward", "step")) for line in lines) == 2
    assert {type(each) for each in step.instructions} == {Compute, Send, Wait, Hold, Free}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("overlap", [False, True])
def test_every_message_is_waited_for_once_and_all_memory_is_given_back(stage, overlap):
    step = schedule(
        chain(),
        StepOptions(stage, 3, "bf16", micro_batches=2, prefetch_bucket_size=30,
                    reduce_bucket_size=7, overlap_comm=overlap, widened=True),
    )  # fmt: skip
    sent = [each.message for each in step.instructions if isinstance(each, Send)]
    waited = [each.message for each in step.instructions if isinstance(each, Wait)]
    assert sorted(waited) == sent == list(range(1, len(sent) + 1))
    *_, (_, last) = step.memory()
    assert last == step.start_bytes


def test_the_bucket_of_prefetches_overshoots_by_the_last_unit_and_is_counted():
    step = schedule(
        chain(layers=5, numel=10), StepOptions(stage=3, world_size=1, prefetch_bucket_size=15)
    )
    # 10 are under way, fewer than 15, so a second unit is sent for: 20. With the one that
    # computes, three units are gathered.
    assert step.largest_bytes["unsharded"] == 3 * 40


def test_a_live_limit_holds_but_for_the_unit_that_is_needed():
    for limit, live in ((0, 1), (10, 1), (19, 1), (20, 2), (39, 3), (10**6, 5)):
        step = schedule(
            chain(layers=5, numel=10),
            StepOptions(
                stage=3, world_size=1, prefetch_bucket_size=10**6, max_live_parameters=limit
            ),
        )
        assert step.largest_bytes["unsharded"] == live * 40, limit


def test_each_way_of_keeping_saves_gathers():
    plain = {"stage": 3, "world_size": 4}
    assert gathered(schedule(chain(), StepOptions(**plain))) == [
        f"unit {i}" for i in (0, 1, 2, 3, 3, 2, 1, 0)
    ]
    kept = schedule(chain(), StepOptions(**plain, reshard_after_forward=False))
    assert gathered(kept) == [f"unit {i}" for i in range(4)]
    root = schedule(chain(), StepOptions(**plain, reshard_after_forward=["unit 0", "unit 1"]))
    assert gathered(root) == [f"unit {i}" for i in (0, 1, 2, 3, 1, 0)]
    # The last unit of the forward pass is the first of the backward pass: no unit is between.
    turn = schedule(chain(), StepOptions(**plain, max_reuse_distance=1))
    assert gathered(turn) == [f"unit {i}" for i in (0, 1, 2, 3, 2, 1, 0)]
    near = schedule(chain(), StepOptions(**plain, max_reuse_distance=24))
    assert gathered(near) == [f"unit {i}" for i in (0, 1, 2, 3, 1, 0)]
    for_ever = schedule(chain(), StepOptions(**plain, param_persistence_threshold=12))
    assert gathered(for_ever) == [f"unit {i}" for i in range(4)]
    assert {send.phase for send in for_ever.sends if send.collective == "all_gather"} == {"step"}
    learning = StepOptions(**plain, max_reuse_distance=99, recording=True, prefetch_bucket_size=99)
    assert gathered(schedule(chain(), learning)) == gathered(
        schedule(chain(), StepOptions(**plain))
    )


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_a_schedule_sends_what_the_paper_counts(stage, micro_batches):
    step = schedule(chain(numel=10), StepOptions(stage, 3, micro_batches=micro_batches))
    assert step.elements_sent() == elements_per_step(
        stage, 3, [10] * 4, micro_batches=micro_batches
    )


# --- over time -------------------------------------------------------------------------------

FAST, SLOW = Link(48.0 / 0.5), Link(48.0 / 5)  # half a second, and five, for a unit of 12 at W = oo


def times(work, network, **options):
    """The timeline of a step at stage 3 of many ranks, unless told otherwise."""
    return timeline(work, StepOptions(**({"stage": 3, "world_size": 12} | options)), network)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("link", [FAST, SLOW, Link(10.0, 0.25)])
def test_no_overlap_is_the_sum(stage, link):
    line = times(chain(update_s=6.0), link, stage=stage, micro_batches=2)
    updates = 4 * 6.0 / (12 if stage else 1)
    assert line.compute_s == pytest.approx(2 * 4 * 3.0 + updates)
    assert line.comm_s == pytest.approx(sum(link.seconds(s) for s in line.schedule.sends))
    assert line.step_s == pytest.approx(line.compute_s + line.comm_s)
    assert line.exposed_s == pytest.approx(line.comm_s)
    assert line.hidden_s == pytest.approx(0)


def test_perfect_overlap_is_the_larger_plus_what_nothing_can_hide():
    """With more to compute: the first gather, and for what is trained the last reduction."""
    each = FAST.latency_s + 44 / FAST.bytes_per_s
    ideal = {"prefetch_bucket_size": 10**6, "overlap_comm": True, "max_reuse_distance": 1}
    frozen = times(chain(trainable=False), FAST, **ideal)
    assert frozen.step_s == pytest.approx(frozen.compute_s + each)
    trained = times(chain(), FAST, **ideal)
    assert trained.step_s == pytest.approx(trained.compute_s + 2 * each)


def test_perfect_overlap_with_more_to_send_is_the_sending_and_the_last_computing():
    line = times(chain(trainable=False), SLOW, prefetch_bucket_size=1, max_reuse_distance=1)
    assert line.comm_s > line.compute_s
    assert line.step_s == pytest.approx(line.comm_s + 2.0)  # backward of the unit that comes last


def test_a_prefetch_that_looks_far_ahead_may_fetch_what_is_needed_last_first():
    """Units of the forward pass are gathered for the backward pass as soon as they are dropped."""
    near, far = (
        times(chain(trainable=False), SLOW, prefetch_bucket_size=n, max_reuse_distance=1)
        for n in (1, 10**6)
    )
    assert gathered(near.schedule)[4:] == ["unit 2", "unit 1", "unit 0"]
    assert gathered(far.schedule)[4:] == ["unit 0", "unit 1", "unit 2"]
    assert far.step_s == pytest.approx(near.step_s + 2 * 2.0)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_is_never_faster_than_either_stream_and_efficiency_is_a_share(stage):
    rng = random.Random(stage)
    for _ in range(60):
        work = chain(rng.randint(1, 6), rng.randint(0, 50), rng.random(), rng.random(),
                     update_s=rng.random())  # fmt: skip
        line = times(
            work, Link(10 ** rng.uniform(0, 4), rng.choice([0, 0.1])), stage=stage,
            world_size=rng.randint(1, 9), prefetch_bucket_size=rng.choice([0, 1, 40, 10**6]),
            overlap_comm=rng.choice([False, True]), micro_batches=rng.randint(1, 3),
            reduce_bucket_size=rng.choice([None, 13]), max_reuse_distance=rng.choice([0, 1, 60]),
        )  # fmt: skip
        assert max(line.compute_s, line.comm_s) <= line.step_s * (1 + 1e-12)
        assert line.step_s <= (line.compute_s + line.comm_s) * (1 + 1e-12)
        assert line.step_s == pytest.approx(line.compute_s + line.exposed_s)
        assert 0 <= line.efficiency <= 1
        assert -1e-9 <= line.hidden_s <= line.comm_s + 1e-9


def test_more_prefetch_never_costs_time_here_and_costs_memory():
    lines = [times(chain(8), FAST, prefetch_bucket_size=n) for n in (0, 1, 13, 25, 10**6)]
    for shallow, deep in zip(lines, lines[1:], strict=False):
        assert deep.step_s <= shallow.step_s
        assert (
            deep.schedule.largest_bytes["unsharded"] >= shallow.schedule.largest_bytes["unsharded"]
        )
        assert deep.schedule.elements_sent() == shallow.schedule.elements_sent()
    assert lines[1].step_s < lines[0].step_s


def test_a_message_waits_for_the_link_and_the_program_for_the_message():
    """By hand: two units, 1 s a message, 1 s forward, 2 s backward, everything gathered ahead."""
    line = times(
        chain(2, 12), Link(44.0), prefetch_bucket_size=10**6, overlap_comm=True,
        max_reuse_distance=10**6,
    )  # fmt: skip
    spans = [(s.lane, s.name, s.start_s, s.stop_s) for s in line.spans]
    assert spans == [
        ("communication", "all_gather unit 0", 0, 1),
        ("communication", "all_gather unit 1", 1, 2),
        ("wait", "unit 0", 0, 1),
        ("compute", "unit 0", 1, 2),
        ("compute", "unit 1", 2, 3),
        ("compute", "unit 1", 3, 5),
        ("communication", "reduce_scatter unit 1", 5, 6),
        ("compute", "unit 0", 5, 7),
        ("communication", "reduce_scatter unit 0", 7, 8),
        ("wait", "gradient of unit 0", 7, 8),
    ]
    assert (line.step_s, line.compute_s, line.comm_s, line.exposed_s) == (8, 6, 4, 2)
    assert line.hidden_s == 2
    assert [at for at, _ in line.memory] == sorted(at for at, _ in line.memory)


def test_two_levels_of_network_take_the_time_of_the_ring():
    work = transformer_work(get_model("gpt2"), 4096, 1024, flops_per_s=100e12)
    network = Network.of(get_device("a100-40gb"))
    inside = timeline(work, StepOptions(3, 8, "bf16"), network)
    across = timeline(work, StepOptions(3, 64, "bf16"), network)
    assert inside.compute_s == across.compute_s
    assert across.comm_s > 2 * inside.comm_s  # the network between nodes is the slower one
    assert timeline(work, StepOptions(3, 1, "bf16"), network).comm_s == 0


def test_the_work_of_a_transformer_is_operations_over_rate():
    spec = get_model("gpt2-xl")
    work = transformer_work(spec, 2048, 1024, flops_per_s=1e14, memory_bytes_per_s=1e12)
    matrices = spec.layers * spec.block_numel + spec.vocab * spec.hidden
    wanted = 2048 * (6 * matrices + 12 * spec.layers * spec.hidden * 1024) / 1e14
    assert work.compute_s == pytest.approx(wanted)
    assert sum(unit.numel for unit in work.units) == spec.numel
    assert sum(unit.update_s for unit in work.units) == pytest.approx(28 * spec.numel / 1e12)
    # The tied root is gathered once a step, all others twice.
    step = schedule(work, StepOptions(stage=3, world_size=8))
    assert [gathered(step).count(unit.name) for unit in work.units] == [1] + [2] * 48 + [2]


def test_a_tied_head_costs_two_times_its_size_and_not_three():
    for tied, times_sent in ((True, 2), (False, 3)):
        work = StepWork(
            (UnitSize("root", 12, tied=tied), UnitSize("middle", 8)),
            tuple(
                LayerWork(name, (unit,), 1, 2)
                for name, unit in (("embed", "root"), ("middle", "middle"), ("head", "root"))
            ),
        )
        step = schedule(work, StepOptions(stage=3, world_size=4))
        assert step.elements_sent() == times_sent * 9 + 3 * 6


# --- what is refused -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stage": 4}, "stage must be 0, 1, 2 or 3"),
        ({"world_size": 0}, "world_size must be a whole number of at least 1"),
        ({"prefetch_bucket_size": -1}, "prefetch_bucket_size must be a whole number"),
        ({"max_live_parameters": -1}, "max_live_parameters must be a whole number"),
        ({"reduce_bucket_size": 0}, "reduce_bucket_size must be a whole number of at least 1"),
        ({"precision": "fp8"}, "precision must be one of fp32, bf16"),
        ({"optimizer": "adams"}, "did you mean adam"),
    ],
)
def test_options_that_mean_nothing_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        StepOptions(**({"stage": 3} | options))


def test_work_that_does_not_fit_together_is_refused():
    with pytest.raises(UsageError, match=r"unknown: b; unused: a"):
        StepWork((UnitSize("a", 1),), (LayerWork("a", ("b",)),))
    with pytest.raises(UsageError, match="every unit needs a name of its own; twice: a"):
        StepWork((UnitSize("a", 1), UnitSize("a", 1)), (LayerWork("a", ("a",)),))
    with pytest.raises(UsageError, match="reshard_after_forward must be True, False, or names"):
        schedule(chain(), StepOptions(stage=3, reshard_after_forward=["unit 9"]))
    for given in ({"bytes_per_s": 0}, {"bytes_per_s": 1.0, "latency_s": -1}):
        with pytest.raises(UsageError, match="must be a number"):
            Link(**given)


@cache
def one_line():
    """A timeline to look at."""
    return lay_out(schedule(chain(), StepOptions(stage=3, world_size=2)), SLOW)


def test_nothing_overlaps_in_a_lane():
    for lane in ("compute", "communication", "wait"):
        spans = [span for span in one_line().spans if span.lane == lane]
        for before, after in zip(spans, spans[1:], strict=False):
            assert before.stop_s <= after.start_s
