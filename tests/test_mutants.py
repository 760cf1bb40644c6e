"""Nine faulty trainers, nine invariants: who catches whom is computed by running, never written."""

from dataclasses import replace

import numpy as np
import pytest

from zero_nb.config import UsageError
from zero_nb.learn import invariants
from zero_nb.learn.exercises_09 import EXERCISES, LEAST_FALL
from zero_nb.learn.invariants import INVARIANTS, LINE_UP, Watch, hunt, kill_matrix
from zero_nb.learn.mutants import MUTANTS, Mutant
from zero_nb.train.optim import AdamW, GroupedRule
from zero_nb.train.stages import ZeROStage2

NEED_THREE = {"mean of means", "dropped tail", "stale gather"}
STEPS = 24
NEVER = STEPS + 1


@pytest.fixture(scope="module")
def matrix():
    """Every mutant under all nine invariants, three steps."""
    return kill_matrix()


@pytest.fixture(scope="module")
def right():
    """The right trainer, unwatched."""
    return hunt(steps=STEPS, first_step=NEVER)


# ------------------------------------------------------------------------------- the kill matrix


def test_there_are_nine_of_each():
    assert len(MUTANTS) == len(INVARIANTS) == 9
    assert all(kind.claim.endswith(".") for kind in INVARIANTS.values())


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_caught_by_the_invariant_named_in_its_row(name, matrix):
    assert MUTANTS[name].caught_by in matrix.caught[name]


def test_no_invariant_catches_all_and_each_catches_some(matrix):
    counts = matrix.counts()
    assert max(counts.values()) < len(MUTANTS)
    assert min(counts.values()) > 0


def test_one_run_with_all_nine_says_the_same_as_nine_runs_with_one(matrix):
    name = "stale gather"
    for invariant in INVARIANTS:
        alone = hunt(MUTANTS[name], invariants=[invariant])
        assert alone.caught.get(invariant) == matrix.caught[name].get(invariant)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_faulty_trainer_learns_and_ends_elsewhere(name, right):
    run = hunt(MUTANTS[name], steps=STEPS, first_step=NEVER)
    assert run.fall > 0.15
    assert run.sha256 != right.sha256


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-fp32-grads"])
def test_the_right_trainer_passes_all_nine(stage, precision):
    assert hunt(line_up=replace(LINE_UP, stage=stage, precision=precision)).caught == {}


@pytest.mark.parametrize("world_size", [1, 2, 4, 5])
def test_the_right_trainer_passes_with_other_numbers_of_ranks(world_size):
    for stage in (2, 3):
        line_up = replace(LINE_UP, world_size=world_size, stage=stage, max_grad_norm=None)
        assert hunt(line_up=line_up).caught == {}


@pytest.mark.parametrize("world_size", [2, 4])
def test_three_mutants_are_hidden_where_everything_divides(world_size):
    chosen = [MUTANTS[name] for name in MUTANTS]
    found = kill_matrix(chosen, replace(LINE_UP, world_size=world_size)).caught
    assert {name for name, row in found.items() if not row} == NEED_THREE


def test_a_hidden_mutant_trains_to_the_same_bits_as_the_right_trainer():
    four = replace(LINE_UP, world_size=4)
    for name in ("dropped tail", "stale gather"):
        assert hunt(MUTANTS[name], four).sha256 == hunt(line_up=four).sha256


# ------------------------------------------------------------------- the moment of looking matters


def test_a_seed_per_rank_is_caught_before_step_1_or_never():
    mutant = MUTANTS["a seed per rank"]
    assert hunt(mutant, steps=1).caught["replica equality"].moment == "before step 1"
    assert hunt(mutant, steps=5, first_step=2).caught == {}


def test_a_step_counter_of_one_is_right_at_step_1():
    mutant = MUTANTS["stuck step counter"]
    assert hunt(mutant, steps=1).caught == {}
    assert hunt(mutant, steps=2).caught["steps and moments"].moment == "after step 2"


def test_local_clipping_shows_only_while_clipping_is_active():
    mutant = MUTANTS["local clipping"]
    assert hunt(mutant, replace(LINE_UP, max_grad_norm=100.0)).caught == {}
    text = hunt(mutant, steps=1).caught["clip norm"].text
    # Each of three ranks clips to 0.5: together 0.5 √3.
    assert f"{0.5 * 3**0.5:.4f}" in text


def test_a_rounded_master_holds_small_updates_back():
    slow = replace(LINE_UP, lr=1e-3)
    with MUTANTS["16-bit master"].applied():
        engine = slow.engine()
        for step in range(5):
            engine.train_step(*slow.samples(step))
        weights = engine.optimizer.weights()
    scales = [w for name, w in weights.items() if name.endswith(("ln1.weight", "ln2.weight"))]
    assert len(scales) == 2
    assert all((scale == 1.0).all() for scale in scales)


# --------------------------------------------------------------------------------- nothing leaks


def test_watching_changes_nothing():
    for stage in range(4):
        line_up = replace(LINE_UP, stage=stage)
        assert hunt(line_up=line_up).sha256 == hunt(line_up=line_up, first_step=4).sha256


def stopped(mutant):
    """Train a faulty trainer, and leave by an error."""
    with mutant.applied():
        LINE_UP.engine().train_step(*LINE_UP.samples(0))
        raise RuntimeError("in the middle")


@pytest.mark.parametrize("name", MUTANTS)
def test_after_a_mutant_the_right_trainer_is_as_before(name):
    before = hunt(steps=2, first_step=3).sha256
    with pytest.raises(RuntimeError, match="in the middle"):
        stopped(MUTANTS[name])
    assert hunt(steps=2, first_step=3).sha256 == before


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_a_small_change_of_the_real_source(name):
    mutant = MUTANTS[name]
    changed = [
        line for line in mutant.diff().changed if line[1:].strip() not in mutant_tools(mutant)
    ]
    removed = [line for line in changed if line.startswith("-")]
    assert len(changed) <= 9
    assert all(line[2:].strip() in mutant.source() for line in removed)
    assert all(line[2:].strip() not in mutant.faulty_source() for line in removed)
    assert "real line" in repr(mutant.diff())
    assert "<ins" in mutant.diff()._repr_html_()


def mutant_tools(mutant):
    """The lines of the functions that only the faulty lines call."""
    shown = "\n".join(mutant.diff().lines)
    return {
        line[1:].strip()
        for tool in mutant.tools
        for line in shown[shown.index(f"+ def {tool.__name__}") :].split("\n")
    }


def test_a_piece_can_be_replaced_once_at_a_time():
    reset, rounded = MUTANTS["moment reset"], MUTANTS["16-bit master"]
    with (
        reset.applied(),
        pytest.raises(UsageError, match="replaced by another"),
        rounded.applied(),
    ):
        pass
    with MUTANTS["stuck step counter"].applied(), rounded.applied():
        pass
    assert GroupedRule.update is rounded.piece


# ------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"piece": "begin_step"}, "must be a function of the library"),
        ({"piece": AdamW}, "must be a function of the library"),
        ({"piece": replace}, "must be a function of the library"),
        ({"line": "self.steps[name] += 2"}, "exactly once, and has them 0 times"),
        ({"line": "steps[name]"}, "give whole lines"),
        ({"line": " \n"}, "exactly once"),
        ({"faulty": "self.steps[name] +="}, "is no Python any more"),
    ],
)
def test_a_mutant_that_cannot_be_is_refused(change, said):
    given = {
        "name": "mine",
        "piece": GroupedRule.begin_step,
        "line": "self.steps[name] += 1",
        "faulty": "self.steps[name] += 2",
    }
    assert Mutant(**given).diff().changed == (
        "-         self.steps[name] += 1",
        "+         self.steps[name] += 2",
    )
    with pytest.raises(UsageError, match=said):
        Mutant(**given | change)


def test_an_unknown_invariant_is_refused_with_the_known_ones():
    with pytest.raises(UsageError, match="no invariant 'norm'; choose among 'replica equality'"):
        Watch(LINE_UP.engine(), ["norm"])


# ------------------------------------------------------- each invariant also sees its own faults


def watched(change, *names, steps=2, **settings):
    """Let `change` spoil a trainer after its first step; return what is caught."""
    line_up = replace(LINE_UP, **settings)
    watch = Watch(line_up.engine(), names)
    watch.train_step(*line_up.samples(0))
    assert watch.caught == {}
    change(watch.engine)
    for step in range(1, steps):
        watch.train_step(*line_up.samples(step))
    return watch.caught


def test_replicas_that_differ_in_one_element_are_seen_at_every_stage():
    def spoil(engine):
        engine.optimizer.units[0].param[1, 3] += 1

    for stage in (0, 1, 2):
        assert "before step 2" in str(watched(spoil, "replica equality", stage=stage))


def test_at_stage_0_unlike_moments_are_seen():
    def spoil(engine):
        engine.optimizer.units[0].optim.moments["exp_avg"][2, 3] += 1.0

    assert "1 exp_avg are not" in str(watched(spoil, "replica equality", stage=0))


def test_at_stage_3_the_gathered_parameters_are_compared_with_the_masters():
    def spoil(engine):
        engine.optimizer.step = lambda step=engine.optimizer.step: (
            step(),
            np.copyto(engine.optimizer.units[0].param, 0),
        )[0]

    assert "rounded master" in str(watched(spoil, "param = round(master)", stage=3))


def test_an_array_more_is_over_the_byte_budget():
    def spoil(engine):
        engine.extra = engine.ledger.register(np.zeros((3, 5), np.float32), "optim")

    assert "optim takes" in str(watched(spoil, "byte budget"))


def test_an_element_more_on_the_way_is_seen():
    def spoil(engine):
        step, world = engine.optimizer.step, engine.world

        def chatty():
            world.all_gather(np.zeros((3, 1), np.float32), purpose="param")
            return step()

        engine.optimizer.step = chatty

    assert "predicted" in str(watched(spoil, "elements sent", stage=1))


def test_tied_names_that_part_are_seen(monkeypatch):
    watch = Watch(LINE_UP.engine(), ["tied once"])
    real = watch.engine.optimizer.weights
    monkeypatch.setattr(
        type(watch.engine.optimizer),
        "weights",
        lambda self: real() | {"head.weight": real()["tok.weight"] + 1},
    )
    watch.train_step(*LINE_UP.samples(0))
    assert "head.weight is not tok.weight any more" in str(watch.caught)


def test_the_setting_lets_every_fault_show():
    model = invariants._model()
    assert model.numel == 4000
    numels = [unit.layout.numel for unit in LINE_UP.engine().optimizer.units]
    assert numels == [720, 3280]
    assert all(numel % 2 == numel % 4 == 0 for numel in numels)
    assert numels[1] % 3
    assert LINE_UP.batch % 3
    assert model.tied


# ----------------------------------------------------------------------------- a learner's own one


def test_a_fault_of_ones_own_is_caught_once_and_learns():
    exercise = EXERCISES["09-j"]
    piece, line, faulty = exercise.solution()
    assert piece is ZeROStage2.step
    run = hunt(Mutant(name="own", piece=piece, line=line, faulty=faulty), steps=12)
    assert list(run.caught) == ["clip norm"]
    assert run.fall >= LEAST_FALL


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda: "a line", "Return three things"),
        (lambda: (ZeROStage2.step, 1, 2), "are text"),
        (lambda: (ZeROStage2.step, "no such line", "x"), "has them 0 times"),
        (lambda: (print, "a", "b"), "function of the library"),
        (
            lambda: (ZeROStage2.step, "self.rule.update(unit, grad_scale)", "raise ValueError"),
            "stops with ValueError",
        ),
    ],
)
def test_what_is_no_fault_at_all_is_told_in_words(answer, said):
    assert said in EXERCISES["09-j"].judge(answer)
