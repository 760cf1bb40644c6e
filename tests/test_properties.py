"""Whatever the model, the groups, the ranks and the recipe: all stages equal the naive twin.

Hypothesis draws the case. The profile decides how many: 100 by default, 2000 in `nightly`.
"""

from dataclasses import dataclass, field, replace

import numpy as np
from hypothesis import assume, event, given, note
from hypothesis import strategies as st

from naive_training import NaiveOptimizer
from own_model import (
    bits_of_padding,
    fill_padding,
    full_state,
    given_gradients,
    held,
    same_bits,
    same_on_every_rank,
)
from zero_nb.theory import memory
from zero_nb.theory.traffic import step_traffic
from zero_nb.train.optim import SGD, Adam, AdamW, ParameterGroup
from zero_nb.train.optimizer import ZeROOptimizer
from zero_nb.train.recipes import get_recipe
from zero_nb.train.scaling import DynamicLossScale

RULES = {"sgd": SGD, "adam": Adam, "adamw": AdamW}
WAYS = [(0, None, False), (1, None, False), (3, False, False),
        (2, None, True), (3, None, True), (0, True, True)]  # fmt: skip
"""Stage, reduce_every_micro_batch, and whether that adds ranks first."""


@dataclass
class Case:
    """Everything a run depends on."""

    shapes: dict
    tied: dict
    frozen: tuple
    keep_fp32: tuple
    units: dict
    groups: list
    kind: str
    options: dict
    precision: str
    reduce_dtype: str | None
    world_size: int
    micro_batches: int
    bucket: int | None
    overlap: bool
    max_grad_norm: float | None
    seed: int
    unused: list = field(default_factory=list)  # (step, micro-batch, name, rank or None for all)

    @property
    def recipe(self):
        return get_recipe(self.precision, self.reduce_dtype)


dims = st.lists(st.integers(1, 4), max_size=3).map(tuple)
shapes = st.one_of(dims, dims, st.just(()), st.just((0,)), st.just((2, 0, 3)), st.just((13,)))
options_of = {
    "lr": st.sampled_from([1e-3, 0.03, 0.5]),
    "weight_decay": st.sampled_from([0.0, 0.1]),
    "betas": st.sampled_from([(0.9, 0.999), (0.4, 0.8), (0.0, 0.5)]),
    "momentum": st.sampled_from([0.0, 0.9]),
}
precisions = st.sampled_from(
    [("fp32", None), ("fp32", "bf16"), ("bf16", None), ("bf16-fp32-grads", None),
     ("bf16-fp32-grads", "fp16"), ("bf16-both-grads", None), ("fp16", None)]
)  # fmt: skip


def parts(names, count):
    """Deal names out to some places, each in an order of its own."""
    names = list(names)
    places = st.lists(st.integers(0, count - 1), min_size=len(names), max_size=len(names))
    return st.tuples(st.permutations(names), places).map(
        lambda drawn: [
            [name for name, place in zip(*drawn, strict=True) if place == i] for i in range(count)
        ]
    )


@st.composite
def cases(draw):
    names = [f"p{i}" for i in range(draw(st.integers(1, 6)))]
    own = {name: draw(shapes) for name in names}
    tied = {f"t{i}": draw(st.sampled_from(names)) for i in range(draw(st.integers(0, 2)))}
    subset = st.sets(st.sampled_from(names))
    frozen = tuple(sorted(draw(st.one_of(st.just(set()), subset))))
    keep_fp32 = tuple(sorted(draw(st.one_of(st.just(set()), subset))))
    trainable = [name for name in names if name not in frozen]
    kind = draw(st.sampled_from(sorted(RULES)))
    known = RULES[kind]().options.keys() & options_of.keys()
    options = {name: draw(options_of[name]) for name in sorted(known)}
    groups = None
    if draw(st.booleans()):
        some = st.fixed_dictionaries({}, optional={name: options_of[name] for name in known})
        groups = [(tuple(members), draw(some)) for members in draw(parts(trainable, 3))]
    grouped = draw(parts(names, draw(st.integers(1, 3))))
    precision, reduce_dtype = draw(precisions)
    micro_batches, world_size = draw(st.integers(1, 3)), draw(st.integers(1, 8))
    entries = st.tuples(
        st.integers(0, 1), st.integers(0, micro_batches - 1),
        st.sampled_from([*trainable, *(a for a, n in tied.items() if n in trainable)] or ["-"]),
        st.one_of(st.none(), st.integers(0, world_size - 1)),
    )  # fmt: skip
    return Case(
        shapes=own,
        tied=tied,
        frozen=frozen,
        keep_fp32=keep_fp32,
        units={f"u{i}": members for i, members in enumerate(grouped)},
        groups=groups,
        kind=kind,
        options=options,
        precision=precision,
        reduce_dtype=reduce_dtype,
        world_size=world_size,
        micro_batches=micro_batches,
        bucket=draw(st.one_of(st.none(), st.integers(1, 40), st.just(5 * 10**8))),
        overlap=draw(st.booleans()),
        max_grad_norm=draw(st.sampled_from([None, 0.5, 100.0])),
        seed=draw(st.integers(0, 2**16)),
        unused=draw(st.lists(entries, max_size=8)),
    )


def initial(case):
    rng = np.random.default_rng(case.seed)
    return {
        name: np.array(rng.normal(size=shape), np.float32, order="F")
        for name, shape in case.shapes.items()
    }


def gradients(case, step):
    """What `backward` is given for each micro-batch of a step."""
    rng = np.random.default_rng([case.seed, step])
    batches = []
    for micro in range(case.micro_batches):
        grads = given_gradients(rng, case.shapes, case.tied, case.frozen, case.world_size)
        for at, batch, name, rank in case.unused:
            if (at, batch) != (step, micro) or grads.get(name) is None:
                continue
            if rank is None:
                grads[name] = None
            else:
                grads[name] = list(grads[name])
                grads[name][rank] = None
        batches.append(grads)
    return batches


def optimizer(case, stage, every, **settings):
    own = initial(case)
    own |= {alias: own[name] for alias, name in case.tied.items()}
    groups = case.groups and [ParameterGroup(names, dict(o)) for names, o in case.groups]
    return ZeROOptimizer(
        own,
        stage=stage,
        world_size=case.world_size,
        rule=RULES[case.kind](**case.options),
        groups=groups,
        precision=case.precision,
        reduce_dtype=case.reduce_dtype,
        micro_batches=case.micro_batches,
        reduce_every_micro_batch=every,
        reduce_bucket_size=case.bucket,
        overlap_comm=case.overlap,
        units=case.units,
        frozen=case.frozen,
        keep_fp32=case.keep_fp32,
        max_grad_norm=case.max_grad_norm,
        # Gradients of size 1 would overflow in float16 at the usual scale, on purpose or not.
        loss_scale=DynamicLossScale(1.0) if case.precision == "fp16" else None,
        **settings,
    )


def twin(case, ranks_first):
    recipe = case.recipe
    defaults = RULES[case.kind](**case.options).options
    return NaiveOptimizer(
        initial(case),
        world_size=case.world_size,
        micro_batches=case.micro_batches,
        ranks_first=ranks_first,
        kind=case.kind,
        options=defaults,
        groups=case.groups,
        tied=case.tied,
        frozen=case.frozen,
        keep_fp32=case.keep_fp32,
        fmt=recipe.param,
        wire=recipe.wire,
        rounds_each=recipe.both_grads,
        max_grad_norm=case.max_grad_norm,
    )


@given(cases())
def test_every_stage_equals_the_naive_twin_whatever_is_trained(case):
    """Weights, moments, norms and step counts, to the bit, with 7777 in all padding."""
    twins = {}
    for ranks_first in (False, True):
        naive = twin(case, ranks_first)
        twins[ranks_first] = naive, [naive.step(gradients(case, step)) for step in range(2)]
    for stage, every, ranks_first in WAYS:
        naive, results = twins[ranks_first]
        note(f"stage {stage}, reduce_every_micro_batch {every}")
        opt = optimizer(case, stage, every)
        padded = fill_padding(opt, 7777)
        padding = bits_of_padding(opt)
        for step, (applied, norm) in enumerate(results):
            for grads in gradients(case, step):
                opt.backward(grads)
            result = opt.step()
            assert result.applied == applied
            assert result.grad_norm == (None if case.max_grad_norm is None else norm)
        names = naive.weights | {alias: naive.weights[n] for alias, n in case.tied.items()}
        same_bits(opt.weights(), names)
        same_bits(full_state(opt), naive.state)
        assert opt.rule.steps == naive.steps
        same_on_every_rank(opt)
        with opt.gathered_parameters() as used:
            for rank in (0, case.world_size - 1):
                same_bits({n: used[n][rank] for n in case.shapes}, naive.used())
        assert bits_of_padding(opt) == padding
        assert opt.ledger.current_bytes("grad") == opt.ledger.current_bytes("bucket") == 0
    event("padding" if padded else "no padding")


BAD = (np.inf, -np.inf, np.nan, 3.4e38)


@given(cases(), st.data())
def test_bad_numbers_anywhere_make_every_rank_skip_and_leave_every_byte(case, data):
    """Some elements of some ranks in some micro-batches; 3.4e38 overflows where it is added up."""
    batches = gradients(case, 0)
    places = [
        (micro, name) for micro, grads in enumerate(batches) for name, grad in grads.items()
        if isinstance(grad, np.ndarray) and grad.size
    ]  # fmt: skip
    assume(places)
    for _ in range(data.draw(st.integers(1, 3))):
        micro, name = data.draw(st.sampled_from(places))
        grad = batches[micro][name]
        grad.reshape(-1)[data.draw(st.integers(0, grad.size - 1))] = data.draw(st.sampled_from(BAD))
    results = set()
    for stage, every, ranks_first in WAYS:
        naive = twin(case, ranks_first)
        applied, norm = naive.step(batches)
        note(f"stage {stage}, reduce_every_micro_batch {every}")
        opt = optimizer(case, stage, every)
        fill_padding(opt, 7777)
        before = [array.tobytes() for _, array in held(opt)]
        for grads in batches:
            opt.backward(grads)
        result = opt.step()
        assert result.applied == applied
        assert result.grad_norm == (None if case.max_grad_norm is None else norm)
        if not applied:
            assert [array.tobytes() for _, array in held(opt)] == before
        same_bits(full_state(opt), naive.state)
        assert opt.rule.steps == naive.steps
        assert (opt.steps_done, opt.skipped_steps) == (applied, not applied)
        assert opt.ledger.current_bytes("grad") == opt.ledger.current_bytes("bucket") == 0
        results.add(applied)
    event(f"applied: {sorted(results)}")


@given(cases())
def test_held_bytes_and_traffic_are_what_theory_says_whatever_is_trained(case):
    """Each flat_param by the paper's formula, padded; theory shares no code with training."""
    for stage, every, _ in WAYS:
        note(f"stage {stage}, reduce_every_micro_batch {every}")
        opt = optimizer(case, stage, every)
        at_rest = opt.ledger.held_bytes()
        assert at_rest == predicted(case, opt, stage) | {"grad": 0}
        opt.world.log.clear()
        opt.ledger.begin_step()
        for grads in gradients(case, 0):
            opt.backward(grads)
        if every is None:  # else gradients are held in the other way's place while they are added
            assert opt.ledger.held_bytes() == predicted(case, opt, stage)
        elif case.micro_batches > 1:
            whole = sum(4 * unit.layout.padded_numel for unit in opt.trainable_units)
            assert opt.ledger.largest_bytes["grad"] >= whole
        opt.step()
        trained = [unit.layout.numel for unit in opt.trainable_units]
        traffic = step_traffic(
            stage, case.world_size, trained, micro_batches=case.micro_batches,
            no_sync=stage == 3 and every is False,
            reduce_every_micro_batch=stage == 0 and every is True,
            gathers=0,  # nothing is computed here, so nothing is gathered for it
        )  # fmt: skip
        assert opt.world.log.elements_sent("grad") == traffic.grad_elements
        assert opt.world.log.elements_sent("param") == traffic.param_elements
        assert opt.ledger.held_bytes() == at_rest


def predicted(case, opt, stage):
    """Bytes of a rank, by kind, from the formulas."""
    total = {"param": 0, "grad": 0, "optim": 0}
    momentum = any({**case.options, **o}.get("momentum") for _, o in case.groups or [((), {})])
    kept = "momentum" if case.kind == "sgd" and momentum else case.kind
    for unit in opt.units:
        recipe = memory.get_recipe(unit.recipe.name, kept)
        if case.micro_batches > 1:  # added up in float32, whatever the recipe
            recipe = replace(recipe, grad_bytes=max(4, recipe.grad_bytes))
        numel = memory.padded_numel(unit.layout.numel, case.world_size)
        states = memory.recipe_state_bytes(stage, case.world_size, numel, recipe)
        total["param"] += states.param
        if unit.trainable:
            total["grad"] += states.grad
            total["optim"] += states.optim
    return total
