"""Stage 3 as practised: when units are gathered changes time and memory, never values.

What it holds and sends is in `test_timeline.py` too, for many more options.
"""

import itertools
import random

import numpy as np
import pytest

import naive_training as naive
from test_timeline import SPANNING, compared
from tiny import PRECISIONS, STEPS, VOCAB, dirty_memory, gpt, gpt_batches, mlp, mlp_batches
from zero_nb.cluster.simulated import EmulatedLink, SimulatedWorld
from zero_nb.cluster.world import Pending, World
from zero_nb.config import UsageError
from zero_nb.core.precision import BFLOAT16, FLOAT32
from zero_nb.theory.schedule import LayerWork, StepOptions, StepWork, UnitSize, schedule
from zero_nb.train.engine import Engine
from zero_nb.train.model import GPT, GPTConfig
from zero_nb.train.optim import AdamW
from zero_nb.train.optimizer import ZeROOptimizer
from zero_nb.train.prefetch import (
    FetchCounts,
    Prefetcher,
    TraceState,
    agree_on_trace,
    check_same_trace,
)

F32 = np.float32
SIZES = {"a": 8, "b": 12, "c": 20, "d": 4}


# --- every combination -----------------------------------------------------------------------

COMBINATIONS = [
    dict(
        zip(
            (
                "prefetch_bucket_size",
                "param_persistence_threshold",
                "max_live_parameters",
                "max_reuse_distance",
            ),
            values,
            strict=True,
        )
    )
    for values in itertools.product((0, 1, 130), (0, 36, 100), (None, 120), (0, 110))
]
"""Nothing ahead, a unit, more than a unit; no unit persistent, the last, all; a limit; reuse."""


def elements_of(engine, reshard, micro_batches):
    """Sum over units of (g + 1) n (W - 1) / W; k (g + 1), and k + 1 for one that persists."""
    world_size, total = engine.world.size, 0
    for unit in engine.optimizer.units:
        gathers = 2 if reshard is True or (reshard and unit.name in reshard) else 1
        times = micro_batches + 1 if unit.persistent else micro_batches * (gathers + 1)
        total += times * unit.layout.padded_numel * (world_size - 1) // world_size
    return total


@pytest.mark.parametrize("reshard", [True, False, ("layers.0", "layers.2")])
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_combination_trains_the_same_weights_and_is_predicted(
    precision, micro_batches, reshard
):
    """Weights of stage 0 (of stage 2 with accumulation); bytes and elements to the last one."""
    model = mlp(5, 13, 7, 11, 3)  # units of 78, 98, 88 and 36
    batch = mlp_batches(model, 1, size=4 * micro_batches)[0]
    same = {"precision": precision, "micro_batches": micro_batches, "world_size": 2}
    reference = Engine(model, rule=AdamW(0.01), stage=0 if micro_batches == 1 else 2, **same)
    for _ in range(2):
        reference.train_step(*batch)
    wanted = reference.optimizer.weights_sha256()
    for options in COMBINATIONS:
        options = options | {"reshard_after_forward": reshard, "stage": 3} | same
        measured, predicted, engine = compared(model, batch, 2, **options)
        assert engine.optimizer.weights_sha256() == wanted, options
        assert measured == predicted, options
        assert engine.prefetcher.state is TraceState.COMPLETE
        if not options["max_reuse_distance"] and options["max_live_parameters"] is None:
            elements = elements_of(engine, reshard, micro_batches)
            assert measured[1]["elements"] == elements, options


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("speed", [None, 2e8])
def test_any_options_give_the_weights_of_ranks_that_hold_everything(speed, precision):
    """Bit for bit those of the slow twin, with and without a link that holds messages up."""
    model, batches = gpt(), gpt_batches(3, size=9)
    formats = {"fp32": FLOAT32, "bf16": BFLOAT16}
    weights, _ = naive.data_parallel(
        model, model.init(0), batches, 3, naive.NaiveAdam(lr=0.01), formats[precision]
    )
    rng = random.Random(3)
    link = None if speed is None else EmulatedLink(speed, 1e-5)
    for units in ("block", "sublayer", SPANNING):
        engine = Engine(
            model, rule=AdamW(0.01), world=SimulatedWorld(3, link=link), units=units, stage=3,
            precision=precision, overlap_comm=True, reduce_bucket_size=rng.choice([None, 999]),
            prefetch_bucket_size=rng.choice([1, 5000, 10**6]),
            max_reuse_distance=rng.choice([0, 9000]),
            reshard_after_forward=rng.choice([True, False]),
        )  # fmt: skip
        for batch in batches:
            engine.train_step(*batch)
        for name, array in engine.optimizer.weights().items():
            assert array.tobytes() == weights[name].tobytes(), (units, name)


@pytest.mark.parametrize("speed", [None, 1e9])
def test_memory_that_has_not_arrived_is_never_read(speed, monkeypatch):
    link = None if speed is None else EmulatedLink(speed, 1e-4)
    digests = set()
    for dirty in (False, True):
        if dirty:
            dirty_memory(monkeypatch)
        engine = Engine(
            gpt(), world=SimulatedWorld(2, link=link), stage=3, prefetch_bucket_size=9000,
            overlap_comm=True, reduce_bucket_size=1000, max_reuse_distance=9000,
        )  # fmt: skip
        for batch in gpt_batches(2, size=4):
            engine.train_step(*batch)
        digests.add(engine.optimizer.weights_sha256())
    assert len(digests) == 1


def test_a_tied_root_stays_over_the_turn_and_is_gathered_ahead():
    config = GPTConfig(vocab_size=VOCAB, seq_len=STEPS, width=25, heads=5, blocks=2, tied=True)
    batch = gpt_batches(1, size=4)[0]
    runs = []
    for options in ({"stage": 0}, {"stage": 3, "prefetch_bucket_size": 1}):
        runs.append(Engine(GPT(config), world_size=2, **options))
        reports = [runs[-1].train_step(*batch) for _ in range(3)]
    assert runs[0].optimizer.weights_sha256() == runs[1].optimizer.weights_sha256()
    assert runs[1].prefetcher.trace == ("root", "layers.0", "layers.1", "layers.1", "layers.0")
    assert reports[-1].fetches == FetchCounts(hits=4, misses=1)


# --- by hand: which gather is issued when --------------------------------------------------------


def small(world=None, **options):
    """Four units of 8, 12, 20 and 4 elements, stage 3 on two ranks, and their prefetcher."""
    policy = {
        name: options.pop(name)
        for name in (
            "prefetch_bucket_size",
            "max_live_parameters",
            "max_reuse_distance",
            "reshard_after_forward",
        )
        if name in options
    }
    opt = ZeROOptimizer(
        {name: np.arange(n, dtype=F32) for name, n in SIZES.items()},
        units={name: [name] for name in SIZES}, stage=3,
        **({"world_size": 2} if world is None else {"world": world}), **options,
    )  # fmt: skip
    return opt, Prefetcher(opt, **policy)


def walk(opt, prefetcher, order="abcd", back=None):
    """One step over units, up and down: gathers issued at each use, and what each unit was."""
    units = {unit.name: unit for unit in opt.units}
    issued, log = [], opt.world.log
    log.clear()

    def use(name, forward):
        values = prefetcher.fetch(units[name])[name]
        np.testing.assert_array_equal(values, [np.arange(SIZES[name])] * opt.world.hosted)
        labels = [t.label for t in log.transfers if t.collective == "all_gather"]
        issued.append("".join(label for label in labels if label in SIZES))
        log.clear()
        del values
        prefetcher.release(units[name], forward=forward)

    prefetcher.begin_step()
    for name in order:
        use(name, True)
    for name in reversed(order) if back is None else back:
        use(name, False)
    prefetcher.end_step()
    assert all(unit.unsharded is None for unit in opt.units)
    assert opt.ledger.current_bytes("unsharded") == 0
    return issued


def second_walk(**options):
    """Gathers of the second step, when the order is known; and how they were served."""
    opt, prefetcher = small(**options)
    assert walk(opt, prefetcher) == ["a", "b", "c", "d", "d", "c", "b", "a"] or options
    return walk(opt, prefetcher), prefetcher.counts


def test_the_order_is_recorded_in_the_first_step_and_used_from_the_second():
    opt, prefetcher = small(prefetch_bucket_size=1)
    assert prefetcher.state is TraceState.INVALID
    prefetcher.begin_step()
    assert prefetcher.state is TraceState.RECORDING
    prefetcher.end_step()
    opt, prefetcher = small(prefetch_bucket_size=1)
    assert walk(opt, prefetcher) == ["a", "b", "c", "d", "d", "c", "b", "a"]
    assert prefetcher.counts == FetchCounts(misses=8)
    assert (prefetcher.state, prefetcher.trace) == (TraceState.COMPLETE, tuple("abcddcba"))
    # Before the first use a is on its way; each use sends for the next. d, which computes at the
    # turn, cannot be sent for: c is. So d is the one miss.
    assert walk(opt, prefetcher) == ["ab", "c", "d", "c", "d", "b", "a", ""]
    assert prefetcher.counts == FetchCounts(hits=7, misses=1)


@pytest.mark.parametrize(
    ("bucket", "first"),
    [(1, "ab"), (12, "ab"), (13, "abc"), (32, "abc"), (33, "abcd"), (44, "abcd")],
)
def test_prefetch_goes_on_while_fewer_elements_are_under_way_than_asked_for(bucket, first):
    """Once a has arrived the 12 of b are under way; and the 20 of c as well, if they may be."""
    issued, _ = second_walk(prefetch_bucket_size=bucket)
    assert issued[0] == first


def test_the_unit_that_overshoots_counts_so_no_more_is_sent_for():
    opt, prefetcher = small(prefetch_bucket_size=9)
    walk(opt, prefetcher)
    opt.world.log.clear()
    prefetcher.begin_step()
    assert [t.label for t in opt.world.log.transfers] == ["a", "b"]
    assert opt.ledger.current_bytes("unsharded") == 4 * 20
    prefetcher.abandon()
    assert opt.ledger.current_bytes("unsharded") == 0


@pytest.mark.parametrize(
    ("limit", "issued"),
    [
        (0, ["a", "b", "c", "d", "d", "c", "b", "a"]),
        (20, ["ab", "", "c", "d", "d", "c", "ba", ""]),
        (24, ["ab", "", "cd", "c", "d", "", "ba", ""]),
        (10**6, ["abcd", "a", "b", "c", "d", "", "", ""]),
    ],
)
def test_no_more_is_live_than_the_limit_but_for_what_is_needed(limit, issued):
    got, counts = second_walk(prefetch_bucket_size=10**6, max_live_parameters=limit)
    assert got == issued
    assert counts.hits + counts.misses == 8


def test_a_unit_is_kept_over_a_short_way_to_its_next_use():
    assert second_walk(max_reuse_distance=1)[0] == ["a", "b", "c", "d", "", "c", "b", "a"]
    # Between the two uses of c lies d, twice: 8 elements.
    assert second_walk(max_reuse_distance=7)[0] == ["a", "b", "c", "d", "", "c", "b", "a"]
    issued, counts = second_walk(max_reuse_distance=8)
    assert issued == ["a", "b", "c", "d", "", "", "b", "a"]
    assert counts == FetchCounts(misses=6, kept=2)
    # The next step's use is no use: parameters are new then.
    assert second_walk(max_reuse_distance=10**6)[0] == ["a", "b", "c", "d", "", "", "", ""]


def test_what_stays_after_forward_is_a_choice():
    assert second_walk(reshard_after_forward=False)[0] == ["a", "b", "c", "d", "", "", "", ""]
    issued, counts = second_walk(reshard_after_forward=["a", "b"])
    assert issued == ["a", "b", "c", "d", "", "", "b", "a"]
    assert counts == FetchCounts(misses=6, kept=2)
    # Nothing is kept beyond the limit: with a and b, c is too much.
    limited = second_walk(reshard_after_forward=False, max_live_parameters=24)
    assert limited[0] == ["a", "b", "c", "d", "", "c", "", ""]


def test_a_persistent_unit_is_never_fetched():
    opt, prefetcher = small(prefetch_bucket_size=1, param_persistence_threshold=8)
    assert [unit.persistent for unit in opt.units] == [True, False, False, True]
    assert walk(opt, prefetcher) == ["", "b", "c", "", "", "c", "b", ""]
    assert prefetcher.trace == tuple("bccb")
    # Thresholds are compared with parameters, without padding.
    opt, _ = small(param_persistence_threshold=7)
    assert [unit.persistent for unit in opt.units] == [False, False, False, True]


def test_a_unit_without_elements_is_served_without_a_message():
    opt = ZeROOptimizer(
        {"a": np.ones(4, F32), "nothing": np.ones((0, 3), F32), "b": np.ones(6, F32)},
        units={"a": ["a"], "nothing": ["nothing"], "b": ["b"]}, stage=3, world_size=2,
    )  # fmt: skip
    prefetcher = Prefetcher(opt, prefetch_bucket_size=1, max_reuse_distance=1)
    for _ in range(2):
        opt.world.log.clear()
        prefetcher.begin_step()
        for unit in (*opt.units, *reversed(opt.units)):
            shapes = {name: array.shape for name, array in prefetcher.fetch(unit).items()}
            prefetcher.release(unit, forward=unit is not opt.units[0])
        prefetcher.end_step()
    assert shapes == {"a": (2, 4)}
    sent = [t.label for t in opt.world.log.transfers]
    assert sent == ["a", "b", "a"]  # the gather of b is for both passes
    work = StepWork(
        (UnitSize("a", 4), UnitSize("nothing", 0), UnitSize("b", 6)),
        tuple(LayerWork(name, (name,)) for name in ("a", "nothing", "b")),
    )
    step = schedule(work, StepOptions(3, 2, prefetch_bucket_size=1, max_reuse_distance=1))
    assert [send.name for send in step.sends if send.collective == "all_gather"] == sent
    assert (step.hits, step.misses, step.kept) == tuple(
        getattr(prefetcher.counts, name) for name in ("hits", "misses", "kept")
    )


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_below_stage_3_everything_passes_through(stage):
    opt = ZeROOptimizer(
        {name: np.arange(n, dtype=F32) for name, n in SIZES.items()},
        units={name: [name] for name in SIZES}, stage=stage, world_size=2,
    )  # fmt: skip
    prefetcher = Prefetcher(opt, prefetch_bucket_size=9, max_reuse_distance=9)
    for _ in range(2):
        assert walk(opt, prefetcher) == [""] * 8
        assert prefetcher.counts == FetchCounts()
        assert len(opt.world.log) == 0  # there is nothing to agree on


# --- when the order changes ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("order", "back", "wasted"),
    [
        ("acbd", "dbca", 2),  # c was on its way already, b and what follows are dropped
        ("abdc", "cdba", 1),
        ("bcd", "dcb", 2),  # the first unit is not there at all
        ("abc", "cba", 1),  # nor the last
        ("abcd", "dcb", 1),  # fewer than before: noticed when the step ends
        ("abcd", "dcbaa", 0),  # more than before
        ("", "", 2),
    ],
)
@pytest.mark.parametrize("slow", [False, True])
def test_a_trace_that_no_longer_fits_is_given_up_and_values_stay_right(order, back, wasted, slow):
    world = SimulatedWorld(2, link=EmulatedLink(1e9, 1e-4) if slow else None)
    opt, prefetcher = small(world, prefetch_bucket_size=9)
    walk(opt, prefetcher)
    walk(opt, prefetcher, order, back)  # checks every value
    assert prefetcher.state is TraceState.INVALID
    assert prefetcher.counts.wasted >= min(wasted, 1)
    assert sum((prefetcher.counts.hits, prefetcher.counts.misses)) == len(order) + len(back)
    walk(opt, prefetcher, order, back)
    assert prefetcher.state is TraceState.COMPLETE
    assert prefetcher.trace == tuple(order + back)
    assert prefetcher.counts.wasted == 0
    walk(opt, prefetcher, order, back)
    assert prefetcher.counts.wasted == 0
    assert prefetcher.state is TraceState.COMPLETE


def test_a_unit_kept_for_a_use_that_never_comes_is_dropped_before_its_parameters_change():
    opt, prefetcher = small(max_reuse_distance=10**6)
    walk(opt, prefetcher)
    walk(opt, prefetcher, "abcd", "dcb")  # a waits in vain; the walk checks that nothing is left
    opt, prefetcher = small(reshard_after_forward=False)
    walk(opt, prefetcher)
    walk(opt, prefetcher, "abcd", "")


def test_the_engine_records_anew_when_micro_batches_change():
    """A step of more passes than the one before is another order of units."""
    engines = [
        Engine(gpt(), stage=3, world_size=2, micro_batches=2, prefetch_bucket_size=p,
               max_reuse_distance=p)
        for p in (0, 9000)
    ]  # fmt: skip
    batch = gpt_batches(1, size=8)[0]
    for engine in engines:
        states = []
        for count in (2, 1, 1, 2):
            engine.optimizer.micro_batches = engine.optimizer.accumulation.micro_batches = count
            for unit in engine.optimizer.units:
                unit.micro_batches = count
            engine.train_step(*batch)
            states.append(engine.prefetcher.state)
    assert states == [
        TraceState.COMPLETE, TraceState.INVALID, TraceState.COMPLETE, TraceState.INVALID,
    ]  # fmt: skip
    assert engines[0].optimizer.weights_sha256() == engines[1].optimizer.weights_sha256()


# --- errors, and what happens between steps ------------------------------------------------------


class Broken(RuntimeError):
    """Raised by a layer on purpose."""


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("way", ["forward", "backward"])
def test_after_an_error_in_a_layer_nothing_stays_gathered_and_training_goes_on(
    stage, precision, way, monkeypatch
):
    settings = {"stage": stage, "precision": precision, "overlap_comm": True}
    settings |= {"prefetch_bucket_size": 9000, "reshard_after_forward": False}
    world = SimulatedWorld(2, link=EmulatedLink(1e9, 1e-4))
    engine = Engine(gpt(), world=world, **settings)
    healthy = Engine(gpt(), world_size=2, **settings)
    first, second = gpt_batches(2, size=4)
    engine.train_step(*first)
    healthy.train_step(*first)
    held = engine.ledger.current_bytes()

    def broken(*_):
        raise Broken("on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(engine.model.layers[2], way, broken)
        with pytest.raises(Broken):
            engine.train_step(*second)
    assert engine.prefetcher.state is TraceState.INVALID
    engine.optimizer.zero_grad()
    assert engine.ledger.current_bytes("unsharded") == 0
    assert engine.ledger.current_bytes("workspace") == 0
    # Parameters that change now must not be hidden behind a copy that was left at hand.
    with engine.optimizer.gathered_parameters(modify_rank=0) as params:
        params["head.weight"][0] = 0.25
    with healthy.optimizer.gathered_parameters(modify_rank=0) as params:
        params["head.weight"][0] = 0.25
    for _ in range(2):
        assert engine.train_step(*second).loss == healthy.train_step(*second).loss
    assert engine.optimizer.weights_sha256() == healthy.optimizer.weights_sha256()
    assert engine.ledger.current_bytes() == held
    assert engine.prefetcher.state is TraceState.COMPLETE


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False, "precision": "bf16"}])
def test_evaluating_between_steps_leaves_the_order_alone(options):
    batches = gpt_batches(3, size=4)
    engines = [
        Engine(gpt(), stage=3, world_size=2, prefetch_bucket_size=1, **options) for _ in range(2)
    ]
    for batch in batches:
        reports = [engine.train_step(*batch) for engine in engines]
        held = engines[0].ledger.current_bytes()
        engines[0].evaluate(*batches[0])
        assert engines[0].ledger.current_bytes() == held
        assert engines[0].ledger.current_bytes("unsharded") == 0
        assert reports[0].fetches == reports[1].fetches
    assert reports[0].fetches.misses == (0 if options else 1)
    assert engines[0].prefetcher.state is TraceState.COMPLETE
    assert engines[0].optimizer.weights_sha256() == engines[1].optimizer.weights_sha256()


def test_an_evaluation_that_fails_leaves_nothing_gathered(monkeypatch):
    engine = Engine(gpt(), stage=3, world_size=2, precision="bf16")
    inputs, targets = gpt_batches(1, size=4)[0]
    held = engine.ledger.current_bytes()
    with pytest.raises(UsageError, match="the vocabulary has 13"):
        engine.evaluate(inputs + 99, targets)
    monkeypatch.setattr(engine.model.layers[-1], "forward", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.evaluate(inputs, targets)
    monkeypatch.undo()
    assert engine.ledger.current_bytes() == held


# --- worlds of another kind ----------------------------------------------------------------------


class AtOnce(World):
    """A world that carries everything out at once, as one over MPI does."""

    def __init__(self, size):
        super().__init__(size, range(size))
        self.inner = SimulatedWorld(size)

    def _all_reduce(self, *args):
        self.inner._all_reduce(*args)

    def _reduce_scatter(self, *args):
        self.inner._reduce_scatter(*args)

    def _all_gather(self, *args):
        self.inner._all_gather(*args)

    def _all_gather_in_place(self, *args):
        self.inner._all_gather_in_place(*args)

    def _broadcast(self, *args):
        self.inner._broadcast(*args)

    def _all_gather_scalars(self, values_RK):
        return self.inner._all_gather_scalars(values_RK)


def test_a_world_without_deferred_messages_trains_the_same_and_counts_the_same():
    assert AtOnce.deferred is World.deferred
    options = {"stage": 3, "prefetch_bucket_size": 9000, "max_reuse_distance": 9000}
    options |= {"overlap_comm": True, "reduce_bucket_size": 1000, "reshard_after_forward": False}
    batch = gpt_batches(1, size=4)[0]
    seen = []
    for world in (AtOnce(2), SimulatedWorld(2)):
        engine = Engine(gpt(), world=world, **options)
        report = [engine.train_step(*batch) for _ in range(3)][-1]
        assert report.comm_s > 0
        assert report.exposed_s >= report.comm_s  # nothing can be hidden on shared memory
        seen.append(
            (
                engine.optimizer.weights_sha256(), report.largest_bytes, report.peak_bytes,
                report.elements_sent, report.fetches,
            )
        )  # fmt: skip
    assert seen[0] == seen[1]
    assert Pending().wait() is None


@pytest.mark.parametrize("link", [None, EmulatedLink(1e3, 1.0)])
def test_one_rank_alone_prefetches_and_waits_for_nobody(link):
    engine = Engine(gpt(), world=SimulatedWorld(1, link=link), stage=3, prefetch_bucket_size=9000)
    plain = Engine(gpt(), world_size=1, stage=0)
    for batch in gpt_batches(3, size=2):
        report = engine.train_step(*batch)
        plain.train_step(*batch)
    assert engine.optimizer.weights_sha256() == plain.optimizer.weights_sha256()
    assert report.elements_sent == 0
    assert report.fetches.hits
    assert report.seconds < 5.0  # each of 11 messages over that link would take a second


def test_over_a_link_prefetched_gathers_are_hidden_behind_computing():
    """Clocks say so, not constants: without a prefetch all is exposed."""
    model = mlp(64, 256, 256, 256, 64)
    batch = mlp_batches(model, 1, size=512)[0]
    share = {}
    for prefetch in (0, 1):
        world = SimulatedWorld(2, link=EmulatedLink(4e8))
        engine = Engine(model, world=world, stage=3, prefetch_bucket_size=prefetch,
                        overlap_comm=bool(prefetch))  # fmt: skip
        reports = [engine.train_step(*batch) for _ in range(4)][1:]
        share[prefetch] = min(r.exposed_s / r.comm_s for r in reports)
        assert all(r.fetches.hits == (7 if prefetch else 0) for r in reports)
    assert share[0] > 0.97
    assert share[1] < share[0]


# --- agreeing on the order -----------------------------------------------------------------------


def test_ranks_of_one_process_agree_with_themselves():
    world = SimulatedWorld(3)
    agree_on_trace(world, ["a", "b", "a"], ["a", "b"])
    assert {t.purpose for t in world.log.transfers} == {"control"}


class Disagreeing(SimulatedWorld):
    """Rank 1's numbers are what a list says, whatever rank 0 gives."""

    def __init__(self, *of_rank_1):
        super().__init__(2)
        self.of_rank_1 = list(of_rank_1)

    def _all_gather_scalars(self, values_RK):
        out = values_RK.copy()
        theirs = self.of_rank_1.pop(0)
        width = max(values_RK.shape[1], len(theirs))
        wide = np.full((2, width), -1)
        wide[0, : values_RK.shape[1]] = out[0]
        wide[1, : len(theirs)] = theirs
        return wide


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        ([[3], [0, 1, 1]], r"call 2 is nothing on rank 0 and b on rank 1 \(lengths 2 and 3\)"),
        ([[1], [0, -1]], r"call 1 is b on rank 0 and nothing on rank 1 \(lengths 2 and 1\)"),
        ([[2], [1, 0]], r"call 0 is a on rank 0 and b on rank 1 \(lengths 2 and 2\)"),
    ],
)
def test_ranks_that_differ_get_an_error_with_the_first_difference(theirs, message):
    with pytest.raises(UsageError, match=message):
        agree_on_trace(Disagreeing(*theirs), ["a", "b"], ["a", "b"])


def test_traces_are_compared_with_rank_0s():
    check_same_trace([["a", "b"]] * 4)
    check_same_trace([[], []])
    with pytest.raises(UsageError, match="call 0 is a on rank 0 and b on rank 2"):
        check_same_trace([["a"], ["a"], ["b"]])


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefetch_bucket_size": -1}, "prefetch_bucket_size must be a number of elements"),
        ({"prefetch_bucket_size": True}, "at least 0, got True"),
        ({"prefetch_bucket_size": "1"}, "at least 0, got '1'"),
        ({"max_live_parameters": -5}, "max_live_parameters must be a number of elements"),
        ({"max_reuse_distance": float("nan")}, "max_reuse_distance must be"),
        ({"reshard_after_forward": "a"}, "names of units .*; got 'a'"),
        ({"reshard_after_forward": ["a", "z"]}, r"\(a, b, c, d\); got \['a', 'z'\]"),
    ],
)
def test_a_policy_that_means_nothing_is_refused(options, message):
    with pytest.raises(UsageError, match=message):
        small(**options)
