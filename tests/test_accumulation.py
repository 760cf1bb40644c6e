"""Gradient accumulation: what is added first, what it sends, what it holds, and whose mean it is.

Everything here goes through the engine. For a model of one's own, `test_ugly_list.py` and
`test_properties.py` compare every way of accumulating with a twin that holds everything.
"""

import numpy as np
import pytest

from tiny import (
    PRECISIONS,
    STAGES,
    STEPS,
    UNITS,
    gpt,
    gpt_batches,
    mlp,
    mlp_batches,
    own_grads,
    own_params,
)
from zero_nb.config import PRECISIONS as RECIPES
from zero_nb.config import UsageError
from zero_nb.theory.traffic import step_traffic
from zero_nb.train.engine import Engine
from zero_nb.train.optim import SGD, AdamW
from zero_nb.train.optimizer import ZeROOptimizer

WAYS = {  # stage, reduce_every_micro_batch: the stages' own ways and the two others there are
    "0": (0, None),
    "1": (1, None),
    "2": (2, None),
    "3": (3, None),
    "3 no_sync": (3, False),
    "0 each": (0, True),
}
MICRO_BATCHES_FIRST = ("0", "1", "3 no_sync")
RANKS_FIRST = ("2", "3", "0 each")

by_way = pytest.mark.parametrize("way", WAYS)
by_precision = pytest.mark.parametrize("precision", PRECISIONS)


def trained(way, batches, model=None, **settings):
    """An engine after some steps, and its reports."""
    stage, every = WAYS[way]
    engine = Engine(
        model or gpt(),
        stage=stage,
        reduce_every_micro_batch=every,
        **({"rule": SGD(lr=0.1)} | settings),
    )
    return engine, [engine.train_step(*batch) for batch in batches]


def apart(a, b):
    """Largest difference of two engines' weights."""
    theirs = b.optimizer.weights()
    return max(
        float(np.abs(array - theirs[name]).max()) for name, array in a.optimizer.weights().items()
    )


# --- what is sent --------------------------------------------------------------------------------


def volume(way, k):
    """How many times the model's elements (W - 1) / W each rank sends in one step."""
    return {"0": 2, "1": 2, "2": k + 1, "3": 3 * k, "3 no_sync": 2 * k + 1, "0 each": 2 * k}[way]


@by_way
@by_precision
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_elements_sent_in_a_step(world_size, precision, way):
    """2, 2, k + 1, 3k; 2k + 1 with no_sync; 2k reducing each: counted with padding."""
    for k in (1, 2, 5):
        engine, (report,) = trained(
            way, gpt_batches(1, size=15), world_size=world_size, precision=precision,
            micro_batches=k,
        )  # fmt: skip
        numels = [unit.layout.numel for unit in engine.optimizer.units]
        padded = sum(-(-n // world_size) * world_size for n in numels)
        assert report.elements_sent * world_size == volume(way, k) * padded * (world_size - 1)
        theory = step_traffic(
            engine.optimizer.stage.number, world_size, numels, micro_batches=k,
            no_sync=way == "3 no_sync", reduce_every_micro_batch=way == "0 each",
        )  # fmt: skip
        log = engine.world.log
        assert log.elements_sent("grad") == theory.grad_elements
        assert log.elements_sent("param") == theory.param_elements
        messages = {
            purpose: sum(t.purpose == purpose for t in log.transfers)
            for purpose in ("grad", "param")
        }
        assert messages == {"grad": theory.grad_messages, "param": theory.param_messages}


@pytest.mark.parametrize("micro_batches", [2, 4])
def test_the_loss_is_agreed_on_once_a_micro_batch(micro_batches):
    engine, _ = trained("2", gpt_batches(1), world_size=3, micro_batches=micro_batches)
    labels = [t.label for t in engine.world.log.transfers if t.purpose == "control"]
    assert labels.count("loss") == micro_batches


# --- what is held --------------------------------------------------------------------------------


@by_way
@pytest.mark.parametrize("precision", RECIPES)
def test_the_largest_gradient_bytes_show_what_each_way_costs(precision, way):
    """Whole float32 gradients, or a shard of them: no_sync makes stage 3 hold as much as stage 1.

    The sum is held (and the 16-bit gradient, in a recipe that keeps both), and beside it for a
    moment what one unit is reduced to, or what of one unit is still to be added.
    """
    world_size, k = 4, 3
    engine, reports = trained(
        way, gpt_batches(2), world_size=world_size, precision=precision, micro_batches=k
    )
    padded = [unit.layout.padded_numel for unit in engine.optimizer.units]
    whole = 4 * sum(padded)
    low = {"bf16-both-grads": 2}.get(precision, 0) * sum(padded)
    largest = reports[-1].largest_bytes["grad"]
    one = max(padded)
    if way in ("2", "3"):
        assert largest == (whole + low) // world_size
    elif way in ("0", "1"):
        assert whole + low <= largest <= whole + low + 4 * one
    else:
        assert whole <= largest <= whole + low + (4 + 2) * one
    held = reports[-1].held_bytes["grad"]
    if way == "3 no_sync":
        # At the end of the last backward pass it is sharded again, as stage 3's gradient is.
        assert held == (2 if precision in ("bf16", "fp16") else 4) * sum(padded) // world_size + (
            low // world_size
        )
    assert engine.ledger.current_bytes("grad") == 0


@by_precision
def test_no_sync_pays_for_what_it_does_not_send(precision):
    """Ψ of gradients for k - 1 reductions: more bytes held, fewer elements sent."""
    reports = {
        way: trained(way, gpt_batches(1), world_size=4, precision=precision, micro_batches=4)[1][0]
        for way in ("1", "3", "3 no_sync")
    }
    plain, no_sync = reports["3"], reports["3 no_sync"]
    assert no_sync.elements_sent * 12 == plain.elements_sent * 9
    assert no_sync.largest_bytes["grad"] >= 4 * plain.largest_bytes["grad"]
    assert no_sync.largest_bytes["grad"] >= reports["1"].largest_bytes["grad"]
    assert no_sync.peak_bytes > plain.peak_bytes


@by_way
def test_activations_are_those_of_one_micro_batch(way):
    whole = trained(way, gpt_batches(1), world_size=2)[1][0].largest_bytes["activation"]
    tokens = 8 * 12 * STEPS  # the step's token numbers stay until it is over
    for k in (2, 3, 4):
        report = trained(way, gpt_batches(1), world_size=2, micro_batches=k)[1][0]
        assert report.largest_bytes["activation"] - tokens == (whole - tokens) // k


# --- the same bits -------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [SGD(lr=0.1, momentum=0.9), AdamW(lr=1e-3)], ids=["sgd", "adamw"])
@by_precision
@pytest.mark.parametrize(("k", "world_size"), [(1, 3), (2, 1), (3, 2), (3, 8)])
def test_two_orders_of_adding_two_sets_of_bits(k, world_size, precision, rule):
    """Micro-batches first: stages 0, 1, and 3 with no_sync. Ranks first: 2, 3, and 0 reducing each.

    They add the same numbers, so in float32 weights of size 1 differ by some units in the last
    place: 3e-6 is 25 of them. Adam divides a gradient by its own size, so where that is rounding
    noise it may step by lr anywhere; SGD is compared.
    """
    runs = {
        way: trained(
            way, gpt_batches(2), world_size=world_size, precision=precision, micro_batches=k,
            rule=rule, max_grad_norm=0.5,
        )
        for way in WAYS
    }  # fmt: skip
    seen = {
        way: (engine.optimizer.weights_sha256(), *[(r.loss, r.result.grad_norm) for r in reports])
        for way, (engine, reports) in runs.items()
    }
    assert len({seen[way] for way in MICRO_BATCHES_FIRST}) == 1
    assert len({seen[way] for way in RANKS_FIRST}) == 1
    # One rank has no other order, unless each micro-batch is rounded to 16 bits to be sent.
    alike = k == 1 or (world_size == 1 and precision == "fp32")
    assert (seen["0"] == seen["2"]) == alike
    if precision == "fp32" and isinstance(rule, SGD):
        assert apart(runs["0"][0], runs["2"][0]) <= 3e-6


@by_way
@by_precision
def test_micro_batches_change_last_digits_only(way, precision):
    """k micro-batches of b samples train as one of k b samples does, and report the same loss."""
    one, one_reports = trained(way, gpt_batches(2), world_size=2, precision=precision)
    for k in (2, 12):
        many, reports = trained(
            way, gpt_batches(2), world_size=2, precision=precision, micro_batches=k
        )
        assert many.optimizer.steps_done == 2
        for a, b in zip(reports, one_reports, strict=True):
            assert a.loss == pytest.approx(b.loss, rel=1e-6 if precision == "fp32" else 1e-3)
        # A gradient in bfloat16 is off by up to 2^-8 of itself, of about 0.1 here, in each step.
        assert 0 < apart(many, one) <= (1e-6 if precision == "fp32" else 2 * 0.1 * 2**-8)


@by_way
@pytest.mark.parametrize("size", [5, 13])
def test_buckets_change_nothing_of_it(way, size):
    plain, _ = trained(way, gpt_batches(2), world_size=3, micro_batches=2, precision="bf16")
    for overlap in (False, True):
        bucketed, _ = trained(
            way, gpt_batches(2), world_size=3, micro_batches=2, precision="bf16",
            reduce_bucket_size=size * 1000, overlap_comm=overlap,
        )  # fmt: skip
        assert bucketed.optimizer.weights_sha256() == plain.optimizer.weights_sha256()


# --- whose mean it is: uneven batches, padding tokens --------------------------------------------


@by_way
@pytest.mark.parametrize(
    ("world_size", "k", "samples"), [(3, 2, 23), (2, 3, 7), (8, 3, 24 + 1), (1, 5, 7), (4, 2, 8)]
)
def test_a_last_batch_of_any_size_trains_as_on_one_rank(way, world_size, k, samples):
    """Each term of the loss counts the same, wherever it was computed.

    Float32 sums in another order: 1e-6 of weights that moved by 0.1 x gradient (0.1) a step. A mean
    of ranks' means would be off by about 1 / samples of the gradient, a hundred times as much.
    """
    for model, batches in (
        (gpt(), gpt_batches(2, size=samples)),
        (mlp(), mlp_batches(mlp(), 2, size=samples)),
    ):
        alone, one = trained("0", batches, model)
        engine, reports = trained(way, batches, model, world_size=world_size, micro_batches=k)
        for a, b in zip(reports, one, strict=True):
            assert a.loss == pytest.approx(b.loss, rel=1e-6)
        assert apart(engine, alone) <= 1e-6


def padded_batch(seed=3, samples=13):
    """Tokens whose targets are partly padding, very unevenly: -100 is PyTorch's, -1 as good."""
    ((inputs, targets),) = gpt_batches(1, size=samples, seed=seed)
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, STEPS + 1, samples)
    lengths[:2], lengths[-1] = 0, STEPS  # samples of padding alone, a full one
    padding = np.arange(STEPS) >= lengths[:, None]
    targets[padding] = rng.choice([-100, -1], padding.sum())
    assert 0 < lengths.sum() < targets.size
    return inputs, targets


def without_padding(inputs, targets, lr):
    """Loss and weights after one step of SGD, in float64, sample by sample up to its length."""
    model = gpt()
    params = {name: array[None].astype(np.float64) for name, array in model.init(0).items()}
    lengths, loss = (targets >= 0).sum(axis=1), 0.0
    total = {name: np.zeros_like(array) for name, array in params.items()}
    for x, t, length in zip(inputs, targets, lengths, strict=True):
        if length == 0:
            continue
        y, caches = model.forward(params, x[None, None, :length])
        share, dy = model.loss(y, t[None, None, :length], int(lengths.sum()))
        grads = {name: np.empty_like(array) for name, array in params.items()}
        model.backward(params, caches, dy, grads)
        loss += float(share[0])
        for name in total:
            total[name] += grads[name]
    return loss, {name: (params[name] - lr * total[name])[0] for name in params}


@by_way
@pytest.mark.parametrize(("world_size", "k"), [(1, 1), (1, 4), (2, 3), (4, 2), (6, 2)])
def test_tokens_are_weighted_by_being_there_and_padding_by_nothing(way, world_size, k):
    """The mean over the real tokens of all ranks and micro-batches, not a mean of their means.

    Float32 beside float64 that never saw padding: 1e-6 of weights that move by 0.1 x gradient.
    """
    inputs, targets = padded_batch()
    loss, weights = without_padding(inputs, targets, lr=0.1)
    engine, (report,) = trained(way, [(inputs, targets)], world_size=world_size, micro_batches=k)
    assert report.loss == pytest.approx(loss, rel=1e-6)
    start = engine.model.init(0)
    for name, array in engine.optimizer.weights().items():
        np.testing.assert_allclose(array, weights[name], rtol=0, atol=1e-6, err_msg=name)
        assert np.abs(array - start[name]).max() > 1e-5 or name.endswith("qkv.bias")
    again, _ = trained("0", [])
    assert again.evaluate(inputs, targets) == pytest.approx(loss, rel=1e-6)


def test_a_mean_of_means_would_be_another_number():
    """Which is what ranks that each divide by their own tokens would train on."""
    inputs, targets = padded_batch()
    loss, _ = without_padding(inputs, targets, lr=0.1)
    for world_size in (2, 4):
        cuts = [len(inputs) * rank // world_size for rank in range(world_size + 1)]
        means = [
            without_padding(inputs[a:b], targets[a:b], lr=0.1)[0]
            for a, b in zip(cuts[:-1], cuts[1:], strict=True)
        ]
        assert abs(np.mean(means) - loss) > 1e-4


@by_way
def test_padding_could_be_any_tokens_for_all_the_weights_know(way):
    """What stands before and under padding changes no bit, if attention cannot see it."""
    inputs, targets = padded_batch()
    other = inputs.copy()
    lengths = (targets >= 0).sum(axis=1)
    after = np.arange(STEPS) >= lengths[:, None]  # inputs from there on predict padding only
    other[after] = (other[after] + 1) % 13
    hashes = set()
    for given in (inputs, other):
        engine, _ = trained(way, [(given, targets)], world_size=2, micro_batches=2)
        weights = engine.optimizer.weights()
        hashes.add(weights["layers.1.fc1.weight"].tobytes() + weights["head.weight"].tobytes())
    assert len(hashes) == 1


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_batch_of_padding_alone_has_no_mean_and_is_refused(world_size):
    ((inputs, targets),) = gpt_batches(1, size=6)
    engine = Engine(gpt(), stage=3, world_size=world_size, micro_batches=2)
    before, held = engine.optimizer.weights_sha256(), engine.ledger.current_bytes()
    for call in (engine.train_step, engine.evaluate):
        with pytest.raises(UsageError, match="none of the 36 targets counts"):
            call(inputs, np.full_like(targets, -100))
    assert engine.optimizer.weights_sha256() == before
    assert engine.ledger.current_bytes() == held
    assert engine.train_step(inputs, targets).result.applied


def test_micro_batches_of_one_rank_that_are_padding_alone_are_fine():
    """Their share of the loss and of the gradient is 0, not 0 / 0."""
    ((inputs, targets),) = gpt_batches(1, size=8)
    targets[:4] = -100  # all that rank 0 has, both its micro-batches
    for way in WAYS:
        engine, (report,) = trained(way, [(inputs, targets)], world_size=2, micro_batches=2)
        alone, (one,) = trained("0", [(inputs[4:], targets[4:])])
        assert report.result.applied
        assert report.loss == pytest.approx(one.loss, rel=1e-6)
        assert apart(engine, alone) <= 1e-6


# --- what cannot be ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "every", "words"),
    [
        (1, True, "stage 1 cannot accumulate that way: it holds whole gradients .* reduces them "
         "once; stage 2 reduces every micro-batch"),
        (2, False, "stage 2 cannot accumulate that way: its gradients are sharded as soon as they "
         "exist, so every micro-batch is reduced and no_sync is illegal; use stage 1"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("k", [1, 3])
def test_ways_that_make_no_sense_are_refused_with_the_reason(stage, every, words, k):
    with pytest.raises(UsageError, match=words):
        Engine(mlp(), stage=stage, micro_batches=k, reduce_every_micro_batch=every)


@pytest.mark.parametrize(
    ("stage", "every"), [(0, False), (1, False), (2, True), (3, True), (0, True), (3, False)]
)
def test_a_stages_own_way_may_be_asked_for(stage, every):
    engine = Engine(mlp(), stage=stage, micro_batches=2, reduce_every_micro_batch=every)
    assert engine.optimizer.accumulation.reduces_each == every


@pytest.mark.parametrize(
    ("k", "words"),
    [
        (0, "micro_batches must be at least 1 micro-batch, got 0"),
        (-1, "micro_batches must be at least 1 micro-batch, got -1"),
        (2.0, "micro_batches must be a whole number, got 2.0"),
        (True, "micro_batches must be a whole number, got True"),
    ],
)
def test_a_number_of_micro_batches_that_is_none_is_refused(k, words):
    with pytest.raises(UsageError, match=words):
        Engine(mlp(), micro_batches=k)


def test_a_batch_with_fewer_samples_than_micro_batches_is_refused():
    engine = Engine(mlp(), world_size=2, micro_batches=3)
    words = "batch of 5 .* one sample for each of 3 micro-batches; use a batch of at least 6"
    with pytest.raises(UsageError, match=words):
        engine.train_step(*mlp_batches(engine.model, 1, size=5)[0])
    engine.evaluate(*mlp_batches(engine.model, 1, size=2)[0])  # which has no micro-batches


@by_way
def test_a_step_waits_for_all_micro_batches_and_takes_no_more(way):
    stage, every = WAYS[way]
    opt = ZeROOptimizer(
        own_params(), stage=stage, world_size=3, units=UNITS, micro_batches=3,
        reduce_every_micro_batch=every,
    )  # fmt: skip
    before = opt.weights_sha256()
    for have in range(3):
        with pytest.raises(UsageError, match=f"has the gradient of {have} of 3 micro-batches"):
            opt.step()
        opt.backward(own_grads(3, seed=have))
    held = opt.ledger.current_bytes("grad")
    with pytest.raises(UsageError, match="already holds a gradient of every micro-batch"):
        opt.backward(own_grads(3, seed=9))
    assert opt.weights_sha256() == before
    assert opt.ledger.current_bytes("grad") == held
    assert opt.step().applied
    assert opt.weights_sha256() != before


@by_way
def test_micro_batches_given_up_leave_nothing_behind(way):
    stage, every = WAYS[way]

    def optimizer():
        return ZeROOptimizer(
            own_params(), stage=stage, world_size=3, units=UNITS, micro_batches=3,
            reduce_every_micro_batch=every, rule=SGD(lr=0.1),
        )  # fmt: skip

    fresh, used = optimizer(), optimizer()
    for _ in range(2):
        used.backward(own_grads(3, seed=77))
    used.zero_grad()
    assert used.ledger.current_bytes("grad") == 0
    for opt in (fresh, used):
        for seed in range(3):
            opt.backward(own_grads(3, seed=seed))
        opt.step()
    assert used.weights_sha256() == fresh.weights_sha256()


@pytest.mark.parametrize("stage", STAGES)
def test_one_step_of_the_schedule_for_one_step_of_the_optimizer(stage):
    calls = []

    def schedule(step):
        calls.append(step)
        return 1.0 / (1 + step)

    engine = Engine(
        gpt(), stage=stage, world_size=4, micro_batches=3, schedule=schedule, rule=SGD(lr=1.0)
    )
    reports = [engine.train_step(*batch) for batch in gpt_batches(3)]
    assert calls == [0, 1, 2]
    assert [report.result.lr for report in reports] == [1.0, 0.5, pytest.approx(1 / 3)]
