"""Exercises of notebook 09: one for each of nine faults, and a fault of one's own."""

import numpy as np

from zero_nb.config import UsageError
from zero_nb.learn.exercise import FunctionExercise, ValueExercise, Wrong
from zero_nb.learn.invariants import hunt
from zero_nb.learn.limits import NotYet
from zero_nb.learn.mutants import MUTANTS, Mutant
from zero_nb.learn.predict import Mistake, Prediction
from zero_nb.train.optim import GroupedRule
from zero_nb.train.stages import ZeROStage2

__all__ = ["EXERCISES", "LEAST_FALL", "PREDICTIONS"]


PREDICTIONS = {
    "09-p": Prediction(
        title="Predict how many faults a loss curve shows",
        unit="",
        within=0.5,
        low=0,
        high=9,
        mistakes=(
            Mistake(
                9,
                "A fault has to make the gradient useless before the loss stays up. Which of the "
                "nine do that?",
            ),
            Mistake(8, "Think of the smallest of the nine: a few elements that are never updated."),
            Mistake(
                3,
                "Some faults do slow the training down. But with each of the nine the loss still "
                "falls, on another path.",
            ),
            Mistake(1, "One curve is clearly higher than the others. But does it fall?"),
            Mistake(2, "Two curves are clearly higher than the others. But do they fall?"),
        ),
        close="Close: a falling loss says that the steps go downhill on the whole, and no more.",
        advice="Ask of each fault: do its steps still go downhill on the whole?",
    )
}


# ------------------------------------------------------------------ 09-a: local clipping


def _clip_factor(shards, max_norm):
    """The solution: squares add up over ranks, norms do not."""
    norm = sum(float(np.sum(np.square(shard))) for shard in shards) ** 0.5
    return min(1.0, max_norm / norm) if norm else 1.0


def _norms(shards):
    """The norm of each shard alone."""
    return [float(np.linalg.norm(shard)) for shard in shards]


def _factor(norm, max_norm):
    """At most 1; a gradient of zeros stays."""
    return min(1.0, max_norm / norm) if norm else 1.0


def _above_one(shards, max_norm):
    """Wrong: a small gradient is blown up."""
    norm = sum(float(np.sum(np.square(shard))) for shard in shards) ** 0.5
    return max_norm / norm if norm else 1.0


def _no_root(shards, max_norm):
    """Wrong: the squares are taken for the norm."""
    return _factor(sum(float(np.sum(np.square(shard))) for shard in shards), max_norm)


def _shard_cases(rng):
    """Shards of unlike size and length, one of them empty, and a gradient below the limit."""
    return [
        ([np.array([3.0, 0.0]), np.array([0.0, 4.0])], 1.0),
        ([np.array([6.0, 8.0])], 1.0),
        ([np.array([1.0, 2.0]), np.array([2.0]), np.array([4.0])], 2.0),
        ([np.array([0.1, 0.2]), np.array([0.2, 0.4])], 1.0),
        ([rng.normal(size=5), 3 * rng.normal(size=5), rng.normal(size=4), np.zeros(0)], 0.5),
    ]


CLIP = FunctionExercise(
    title="Clip by the norm of the full gradient",
    core=True,
    solution=_clip_factor,
    cases=_shard_cases,
    tolerance=1e-6,
    wrong={
        "own norm": Wrong(
            lambda shards, max_norm: [_factor(norm, max_norm) for norm in _norms(shards)],
            "You gave each rank a factor of its own. Then shards are shortened by unlike factors, "
            "and the gradient points elsewhere. One number for all ranks.",
        ),
        "the largest": Wrong(
            lambda shards, max_norm: _factor(max(_norms(shards)), max_norm),
            "You took the largest norm of one rank. The full gradient is longer than any of its "
            "shards.",
        ),
        "sum of norms": Wrong(
            lambda shards, max_norm: _factor(sum(_norms(shards)), max_norm),
            "Norms do not add up: shards of norm 3 and 4 make a gradient of norm 5, not 7. What "
            "does add up?",
        ),
        "mean of norms": Wrong(
            lambda shards, max_norm: _factor(float(np.mean(_norms(shards))), max_norm),
            "You took the mean of the ranks' norms. The full gradient is longer than that; think "
            "of Pythagoras.",
        ),
        "above one": Wrong(
            _above_one,
            "Right where it clips. But a gradient below the limit is blown up: a factor is never "
            "above 1.",
        ),
        "no root": Wrong(_no_root, "These are the squares; a norm is the root of their sum."),
    },
    hints=(
        "Which quantity of two shards can be added? Think of a right-angled triangle.",
        "Each rank sums its squares. The sum over ranks, then the root, is the norm.",
        "The factor is min(1, max_norm / norm), and 1 if the norm is 0.",
    ),
)


# -------------------------------------------------------------------- 09-b: dropped tail


def _not_once(spans, numel):
    """The solution: count how often each element is covered."""
    times = np.zeros(numel, int)
    for start, stop in spans:
        times[start:stop] += 1
    return np.flatnonzero(times != 1).tolist()


def _times(spans, numel):
    """How often each element is covered."""
    times = np.zeros(numel, int)
    for start, stop in spans:
        times[start:stop] += 1
    return times


def _by_total(spans, numel):
    """Wrong: only the number of elements is compared."""
    total = sum(stop - start for start, stop in spans)
    return list(range(total, numel))


COVER = FunctionExercise(
    title="Find what is not updated exactly once",
    core=True,
    solution=_not_once,
    cases=lambda rng: [
        ([(0, 4), (4, 8), (8, 10)], 10),
        ([(0, 3), (3, 6), (6, 9)], 10),
        ([(0, 4), (3, 7), (7, 10)], 10),
        ([(0, 4), (3, 6), (7, 10)], 10),
        ([(0, 5)], 5),
        ([(0, 2), (2, 4), (4, 5), (5, 5)], 5),
        ([(0, 4), (5, 9), (7, 11)], int(rng.integers(12, 20))),
    ],
    wrong={
        "never only": Wrong(
            lambda spans, numel: np.flatnonzero(_times(spans, numel) == 0).tolist(),
            "You found the elements that nobody updates. Some are updated by two ranks; that is "
            "not once either.",
        ),
        "twice only": Wrong(
            lambda spans, numel: np.flatnonzero(_times(spans, numel) > 1).tolist(),
            "You found the elements that are updated more than once. What about those that nobody "
            "updates?",
        ),
        "by the total": Wrong(
            _by_total,
            "You compared the number of elements only. An overlap and a gap of equal length cancel "
            "out; look at each element.",
        ),
        "the tail only": Wrong(
            lambda spans, numel: list(range(max(stop for _, stop in spans), numel)),
            "You looked behind the last span only. There can be gaps and overlaps in the middle.",
        ),
    },
    hints=(
        "A counter for each element, zero at first. What does a span do to it?",
        "times = np.zeros(numel, int), and for each span times[start:stop] += 1.",
        "Return the places where times is not 1: np.flatnonzero(times != 1).tolist().",
    ),
)


# -------------------------------------------------------------------- 09-c: mean of means

MEANS = ValueExercise(
    title="Weigh a sample in a mean of means",
    solution=1.6,
    within=0.005,
    wrong={
        "turned round": Wrong(
            0.625,
            "You divided the wrong way round: on the rank with fewer samples each one counts more.",
        ),
        "equal": Wrong(
            1.0,
            "That is how it should be. In a mean of means each rank has the same weight, however "
            "many samples share it.",
        ),
        "against a fair one": Wrong(
            1.45,
            "That compares a sample of the last rank with its fair weight, 1/29. The question is "
            "about a sample of the first rank.",
        ),
    },
    hints=(
        "Each rank has the weight 1/4. How many samples share it on the first, on the last rank?",
        "A sample of the first rank weighs 1/4 · 1/8, one of the last rank 1/4 · 1/5.",
        "Divide the second weight by the first.",
    ),
)


# -------------------------------------------------------------------- 09-d: stale gather


def _missing(world_size):
    """The solution: the largest power of two that is not above W is what a rank has."""
    have = 1
    while 2 * have <= world_size:
        have *= 2
    return world_size - have


def _next_power(world_size):
    """Wrong: as if a last round brought more than there is."""
    have = 1
    while have < world_size:
        have *= 2
    return have - world_size


STALE = FunctionExercise(
    title="Count the shards that stay stale",
    solution=_missing,
    cases=lambda rng: [
        *((size,) for size in (1, 2, 3, 4, 5, 6, 7, 8, 12)),
        (int(rng.integers(17, 31)),),
    ],
    wrong={
        "odd or even": Wrong(
            lambda world_size: world_size % 2,
            "It is not about odd or even. With 6 ranks: how many shards does a rank have after one "
            "round, after two?",
        ),
        "one round": Wrong(
            lambda world_size: max(world_size - 2, 0),
            "You let only one round happen. The rounds go on while twice as many shards exist.",
        ),
        "one round more": Wrong(
            _next_power,
            "You let one round more happen than the loop does: it stops when twice the shards "
            "would be more than there are.",
        ),
        "none": Wrong(
            lambda world_size: 0,
            "That is right for powers of two only. Go through the rounds with three ranks.",
        ),
    },
    hints=(
        "A rank begins with one shard. Write down how many it has after each round, for W = 3.",
        "It has 1, 2, 4, ...: doubled while the double is not more than W.",
        "have = 1; while 2 * have <= world_size: have *= 2; then world_size - have are missing.",
    ),
)


# -------------------------------------------------------------------- 09-e: moment reset

RESET = ValueExercise(
    title="Find the line that forgets the moments",
    solution="B",
    options=("A", "B", "C", "D"),
    wrong={
        "made anew": Wrong(
            "A",
            "That line makes the moments once, when the trainer is built. Were they made there in "
            "every step, the step counters would begin anew as well.",
        ),
        "gradients": Wrong(
            "C",
            "That line drops gradients after the step. It should: the next ones come from the next "
            "batch.",
        ),
        "not counted": Wrong(
            "D", "The counters are right in this run. What is wrong are the moments themselves."
        ),
    },
    hints=(
        "The moments are zero after every step, but each step did move the weights.",
        "So the update worked with moments that were not those of the optimizer.",
        "A copy is updated, and thrown away. Which line makes a copy?",
    ),
)


# -------------------------------------------------------------------- 09-f: 16-bit master

LOST = ValueExercise(
    title="Find the weights that cannot move",
    solution=0.5,
    wrong={
        "the whole distance": Wrong(
            0.25,
            "There the distance is 0.00195, and half of it is 0.00098: an update of 0.001 is more, "
            "so the weight moves.",
        ),
        "too late": Wrong(
            1.0,
            "At 1 they cannot move, but some smaller ones cannot either. How far apart are "
            "neighbours just below 1?",
        ),
        "at once": Wrong(
            0.125, "There neighbours are less than 0.001 apart: the update moves them."
        ),
    },
    hints=(
        "An update is lost if it is less than half of the distance to the neighbour.",
        "From 2^k to 2^(k+1) neighbours are 2^(k-7) apart; half of that is 2^(k-8).",
        "2^-10 is 0.00098, 2^-9 is 0.00195. Which k makes 2^(k-8) larger than 0.001?",
    ),
)


# -------------------------------------------------------------------- 09-g: tied weight twice

TWICE = ValueExercise(
    title="Find what is held twice",
    solution={"elements": 432, "parameter": "tok.weight"},
    options=("tok.weight", "pos.weight", "lnf.weight", "layers.0.fc1.weight"),
    wrong={
        "bytes": Wrong(
            {"elements": 864, "parameter": "tok.weight"},
            "The parameter is right, but 864 is the number of bytes. An element of bf16 takes two.",
        ),
        "the position table": Wrong(
            {"elements": 256, "parameter": "pos.weight"},
            "The positions have 16 × 16 elements. That is not what is too much here.",
        ),
        "the position table, by shape": Wrong(
            {"elements": 432, "parameter": "pos.weight"},
            "432 elements is right. Which parameter has so many: 27 tokens, 16 numbers each?",
        ),
    },
    hints=(
        "Subtract what was predicted from what is held.",
        "That is in bytes; bf16 takes two bytes an element. Which parameter has so many elements?",
        "27 tokens with 16 numbers each: the embedding, which is the head's weight, too.",
    ),
)


# -------------------------------------------------------------------- 09-h: stuck step counter


def _too_large(step):
    """The solution: both moments are corrected as if they were at step 1."""
    first = (1 - 0.9**step) / (1 - 0.9)
    second = (1 - 0.999**step) / (1 - 0.999)
    return first / second**0.5


STUCK = FunctionExercise(
    title="Work out what a stuck counter does",
    solution=_too_large,
    cases=lambda rng: [(1,), (2,), (10,), (100,), (int(rng.integers(20, 60)),)],
    tolerance=1e-6,
    wrong={
        "no root": Wrong(
            lambda step: (1 - 0.9**step) / 0.1 / ((1 - 0.999**step) / 0.001),
            "Adam divides by the root of the second moment. You divided by the moment itself.",
        ),
        "first moment only": Wrong(
            lambda step: (1 - 0.9**step) / 0.1,
            "That is what happens to the first moment. The second one is corrected wrongly, too, "
            "and stands below the line, under a root.",
        ),
        "turned round": Wrong(
            lambda step: 1 / _too_large(step),
            "That is the right update divided by the wrong one; turn it round.",
        ),
        "no difference": Wrong(
            lambda step: 1.0,
            "It would be so if moments began at their final value. They begin at zero, and that is "
            "what the correction is for.",
        ),
    },
    hints=(
        "With a gradient g that never changes, exp_avg is (1 − 0.9^step) · g. And exp_avg_sq?",
        "The right correction divides by 1 − 0.9^step; the stuck one divides by 1 − 0.9.",
        "(1 − 0.9^step) / 0.1, divided by the root of (1 − 0.999^step) / 0.001.",
    ),
)


# -------------------------------------------------------------------- 09-i: a seed per rank


def _after_gather(rows):
    """The solution: slice r comes from its owner, rank r."""
    rows = np.asarray(rows)
    world_size = len(rows)
    shard = rows.shape[1] // world_size
    return np.concatenate([rows[r, r * shard : (r + 1) * shard] for r in range(world_size)])


def _turned(rows):
    """Wrong: slices in the wrong order."""
    rows = np.asarray(rows)
    shard = rows.shape[1] // len(rows)
    return np.concatenate([rows[r, :shard] for r in range(len(rows))])


def _row_cases(rng):
    """Whole numbers, so that each slice can be told."""
    return [
        (np.arange(12.0).reshape(3, 4)[:, :3],),
        (np.arange(8.0).reshape(2, 4),),
        (np.arange(5.0).reshape(1, 5),),
        (rng.integers(0, 100, (4, 12)).astype(np.float32),),
    ]


PATCHWORK = FunctionExercise(
    title="Follow unlike replicas through a gather",
    solution=_after_gather,
    cases=_row_cases,
    wrong={
        "rank 0": Wrong(
            lambda rows: np.array(rows[0]),
            "That is what a broadcast from rank 0 would do, and it is the line that is missing.",
        ),
        "the mean": Wrong(
            lambda rows: np.mean(rows, axis=0),
            "A gather adds nothing up. Each slice comes from its owner as it is.",
        ),
        "no gather": Wrong(
            lambda rows: np.array(rows),
            "These are the rows before the gather. After it every rank has the same row; give that "
            "one.",
        ),
        "first slices": Wrong(
            _turned,
            "You took the first slice of every rank. Rank r owns slice number r.",
        ),
    },
    hints=(
        "Who owns which slice of the flat array?",
        "Slice r of the result is slice r of row r.",
        "np.concatenate of rows[r, r * shard : (r + 1) * shard] for each rank r.",
    ),
)


# -------------------------------------------------------------------- 09-j: a fault of one's own

LEAST_FALL = 0.1
"""By which part the loss has to fall."""

_STEPS = 12


def _my_fault():
    """The solution: the gradient is not clipped at all."""
    return ZeROStage2.step, "self.rule.update(unit, grad_scale)", "self.rule.update(unit, 1.0)"


def _no_fault():
    """Wrong: the same in other words."""
    return (
        GroupedRule.begin_step,
        "self.steps[name] += 1",
        "self.steps[name] = self.steps[name] + 1",
    )


def _no_learning():
    """Wrong: no step has a length."""
    return (
        GroupedRule.options,
        'return merged | {"lr": merged["lr"] * self.lr_factor}',
        'return merged | {"lr": 0.0}',
    )


def _several():
    """Wrong: updates come twice and are not gathered in between."""
    return (
        ZeROStage2.step,
        "self.rule.update(unit, grad_scale)",
        "self.rule.update(unit, grad_scale)\nself.rule.update(unit, grad_scale)",
    )


def _one_of_the_nine():
    """Wrong: it is one of ours."""
    mutant = MUTANTS["stuck step counter"]
    return mutant.piece, mutant.line, mutant.faulty


def _try_fault(function):
    """Run somebody's faulty trainer; say how many invariants catch it and whether it learns."""
    given = function()
    if not isinstance(given, tuple) or len(given) != 3:
        raise NotYet(
            "Return three things: the function of the library, the line in it, and the line that "
            "stands there instead"
        )
    piece, line, faulty = given
    if not (isinstance(line, str) and isinstance(faulty, str)):
        raise NotYet("The line and the faulty line are text, in quotes")
    try:
        mutant = Mutant(name="yours", piece=piece, line=line, faulty=faulty)
        known = [other.faulty_source() for other in MUTANTS.values() if other.piece is piece]
        run = hunt(mutant, steps=_STEPS)
    except UsageError as error:
        raise NotYet(str(error)) from None
    except Exception as error:
        raise NotYet(
            f"This trainer stops with {type(error).__name__}, and everybody sees that. Find a "
            "fault that runs"
        ) from None
    return {
        "one of the nine": mutant.faulty_source() in known,
        "caught by": ("none", "one")[len(run.caught)] if len(run.caught) < 2 else "several",
        "loss falls": bool(run.fall >= LEAST_FALL),
    }


OWN = FunctionExercise(
    title="Write a faulty trainer of your own",
    solution=_my_fault,
    cases=lambda rng: [()],
    trial=_try_fault,
    wrong={
        "no fault": Wrong(
            _no_fault,
            "It learns, and no invariant catches it. Either this is no fault, or the nine have a "
            "hole: what would a tenth one have to say?",
        ),
        "does not learn": Wrong(
            _no_learning,
            "It is caught once, but its loss does not fall by a tenth: that shows on the curve.",
        ),
        "several": Wrong(
            _several,
            "It learns, but several invariants catch it. Look for a smaller fault.",
        ),
        "one of the nine": Wrong(
            _one_of_the_nine, "This is one of the nine. Write one that is not among them."
        ),
    },
    hints=(
        "Choose one invariant, and ask which line keeps it true. Read ZeROStage2.step.",
        "In ZeROStage2.step two things happen: an update, scaled for clipping, and a gather.",
        "What if the update did not get grad_scale, but 1.0?",
    ),
)


EXERCISES = {
    "09-a": CLIP,
    "09-b": COVER,
    "09-c": MEANS,
    "09-d": STALE,
    "09-e": RESET,
    "09-f": LOST,
    "09-g": TWICE,
    "09-h": STUCK,
    "09-i": PATCHWORK,
    "09-j": OWN,
}
"""By key: the notebook's number and a letter."""
