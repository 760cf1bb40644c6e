"""Exercises of notebook 05: gradients on their way, borders of buckets, traffic, a bug report."""

import numpy as np

from zero_nb.cluster.simulated import SimulatedWorld
from zero_nb.learn.exercise import FunctionExercise, ValueExercise, Wrong
from zero_nb.learn.limits import NotYet
from zero_nb.learn.predict import Mistake, Prediction

__all__ = ["EXERCISES", "PREDICTIONS", "GradientLedger", "run_backward"]


PREDICTIONS = {
    # Stage 1 holds 2 bytes a parameter; stage 2 with one bucket for all 2 + 2/4.
    "05-p": Prediction(
        title="Predict the gradient peak of one large bucket",
        unit=" %",
        within=3.0,
        low=0.0,
        high=400.0,
        mistakes=(
            Mistake(
                25.0,
                "That is what stage 2 holds at the end. On the way there, gradients wait in the "
                "bucket; how large is it?",
            ),
            Mistake(
                100.0,
                "The bucket alone is as large as all gradients. And when it is reduced, the "
                "shard has to be somewhere, too.",
            ),
            Mistake(
                200.0,
                "Bucket and gradients: but what is kept beside the bucket is a shard only.",
            ),
            Mistake(
                75.0,
                "That is the part that stage 2 saves once all is reduced. The question is about "
                "the fullest moment.",
            ),
        ),
        close="Close: the bucket is as large as all gradients, and the reduced shard comes on top.",
        advice="What is there when the bucket is full and being reduced?",
    )
}


# -------------------------------------------------------- 05-a: what comes is reduced and freed


class GradientLedger:
    """What one rank holds of gradients during a backward pass, counted in elements.

    Parameters
    ----------
    world_size : int

    Attributes
    ----------
    gradients : dict of int to ndarray
        Whole gradients (R, F) that were made and not freed, by unit.
    kept : dict of int to ndarray
        What `keep` was given, by unit.
    peak : int
        The largest number of elements that a rank held at one time.
    """

    def __init__(self, world_size):
        self.world = SimulatedWorld(world_size)
        self.gradients, self.kept = {}, {}
        self.peak = 0

    def held(self):
        """Elements that one rank holds now (int)."""
        arrays = [*self.gradients.values(), *self.kept.values()]
        return sum(array.shape[1] for array in arrays)

    def made(self, i, grad_RF):
        """Book the gradient of unit i; backward calls this before `on_gradient`."""
        self.gradients[i] = grad_RF
        self.peak = max(self.peak, self.held())

    def reduce_scatter(self, grad_RF):
        """Return each rank's shard of the sum over ranks, (R, S)."""
        return self.world.reduce_scatter(grad_RF)

    def all_reduce(self, grad_RF):
        """Return the whole sum on every rank, (R, F), as a new array."""
        return self.world.all_reduce(grad_RF.copy())

    def keep(self, i, array_RX):
        """Keep an array for the update of unit i.

        Parameters
        ----------
        i : int
        array_RX : ndarray
            The rank axis first.
        """
        if not isinstance(array_RX, np.ndarray) or array_RX.ndim != 2:
            raise NotYet(f"keep({i}, ...) needs an array with the rank axis first")
        self.kept[i] = array_RX
        self.peak = max(self.peak, self.held())

    def free(self, i):
        """Give the memory of unit i's whole gradient back; what is in it is lost."""
        if i not in self.gradients:
            raise NotYet(f"free({i}): there is no whole gradient of this unit to be freed")
        self.gradients.pop(i)[...] = np.nan  # others write here from now on


def run_backward(on_gradient, grads, world_size):
    """Go through a backward pass, from the last unit to the first.

    Parameters
    ----------
    on_gradient : callable
        ``on_gradient(i, grad, ledger)``, called when the gradient of unit i is there.
    grads : sequence of ndarray, each (R, F)
        By unit, in forward order; F a multiple of `world_size`.
    world_size : int

    Returns
    -------
    GradientLedger
    """
    ledger = GradientLedger(world_size)
    for i in reversed(range(len(grads))):
        grad = np.array(grads[i])
        ledger.made(i, grad)
        on_gradient(i, grad, ledger)
    return ledger


def _on_gradient(i, grad, ledger):
    """The solution: reduce, keep the shard, free the rest."""
    ledger.keep(i, ledger.reduce_scatter(grad))
    ledger.free(i)


def _free_at_the_end(i, grad, ledger):
    """Wrong: all is reduced when the pass is over."""
    if i == 0:
        for j, waiting in list(ledger.gradients.items()):
            ledger.keep(j, ledger.reduce_scatter(waiting))
            ledger.free(j)


def _never_free(i, grad, ledger):
    """Wrong: the whole gradient stays."""
    ledger.keep(i, ledger.reduce_scatter(grad))


def _free_first(i, grad, ledger):
    """Wrong: what is reduced was freed before."""
    ledger.free(i)
    ledger.keep(i, ledger.reduce_scatter(grad))


def _keep_whole(i, grad, ledger):
    """Wrong: the sum is kept whole, as in stage 0."""
    ledger.keep(i, ledger.all_reduce(grad))
    ledger.free(i)


def _not_kept(i, grad, ledger):
    """Wrong: the sum is lost."""
    ledger.reduce_scatter(grad)
    ledger.free(i)


class _Case:
    """A world size and the gradients of some units."""

    def __init__(self, world_size, grads):
        self.world_size, self.grads = world_size, grads


def _try_backward(function, case):
    """Go through a backward pass; say which shards are there, and refuse what is over budget."""
    world_size, grads = case.world_size, case.grads
    ledger = run_backward(function, grads, world_size)
    missing = [i for i in range(len(grads)) if i not in ledger.kept]
    if missing:
        raise NotYet(f"Nothing was kept of unit {missing[0]}, so it cannot be updated")
    # Kept whole is told as such, before the budget: it is another idea, not too much of the same.
    shards = [ledger.kept[i] for i in range(len(grads))]
    sizes = [grad.shape[1] for grad in grads]
    budget = sum(sizes) // world_size + max(sizes)
    right = all(
        a.shape == b.shape and np.array_equal(a, b)
        for a, b in zip(shards, _sums(grads, world_size), strict=True)
    )
    if right and ledger.peak > budget:
        raise NotYet(
            f"The shards are right, but with {world_size} ranks and units of {sizes} elements a "
            f"rank holds {ledger.peak} at one time; the budget is {budget}, all shards and one unit"
        )
    return {f"shard of unit {i}": shard for i, shard in enumerate(shards)}


def _sums(grads, world_size):
    """Each unit's summed shards, rank by rank."""
    world = SimulatedWorld(world_size)
    return [world.reduce_scatter(np.array(grad)) for grad in grads]


def _gradient_cases(rng):
    """Whole numbers in float32; units of unequal size."""
    cases = []
    for size, shards in ((4, (2, 3, 1)), (3, (4, 1, 1, 2)), (1, (3, 2)), (2, None)):
        shards = rng.integers(1, 6, 3) if shards is None else shards
        grads = [rng.integers(-9, 9, (size, size * int(s))).astype(np.float32) for s in shards]
        cases.append((_Case(size, grads),))
    return cases


ON_GRADIENT = FunctionExercise(
    title="Reduce each gradient to its owner as it comes",
    core=True,
    solution=_on_gradient,
    cases=_gradient_cases,
    trial=_try_backward,
    wrong={
        "freed at the end": Wrong(
            _free_at_the_end,
            "You waited until the pass was over. All whole gradients are there then, just as at "
            "stage 1. Reduce and free each one when it comes.",
        ),
        "never freed": Wrong(
            _never_free,
            "The shards are kept, and so are the whole gradients: nothing was freed. Who needs "
            "grad after it was reduced?",
        ),
        "freed before the reduction": Wrong(
            _free_first,
            "You freed the gradient before it was reduced, so what travelled was not the gradient "
            "any more. First reduce, then free.",
        ),
        "kept whole": Wrong(
            _keep_whole,
            "You kept the whole sum on every rank, as stage 0 does. An owner needs its shard only: "
            "reduce_scatter.",
        ),
        "not kept": Wrong(
            _not_kept,
            "You reduced and freed, and kept nothing: the owner has no gradient to update with. "
            "Give the shard to ledger.keep(i, ...).",
        ),
    },
    hints=(
        "When unit i's gradient is there, three things are to be done before the next one comes.",
        "Reduce it to the owners, keep the shard that comes back, and then free the whole one.",
        "ledger.keep(i, ledger.reduce_scatter(grad)), and then ledger.free(i).",
    ),
)


# ------------------------------------------------------------------------ 05-b: borders of buckets


def _borders(numel, bucket_numel):
    """The solution: from the back; the last bucket takes what is left."""
    return [(max(stop - bucket_numel, 0), stop) for stop in range(numel, 0, -bucket_numel)]


def _forwards(numel, bucket_numel):
    """Wrong: in the order of the forward pass."""
    return [(start, min(start + bucket_numel, numel)) for start in range(0, numel, bucket_numel)]


def _forwards_turned(numel, bucket_numel):
    """Wrong: cut from the front, then turned round."""
    return _forwards(numel, bucket_numel)[::-1]


def _dropped(numel, bucket_numel):
    """Wrong: full buckets only."""
    return _borders(numel, bucket_numel)[: numel // bucket_numel]


def _below_zero(numel, bucket_numel):
    """Wrong: the last bucket begins before the model does."""
    return [(stop - bucket_numel, stop) for stop in range(numel, 0, -bucket_numel)]


BORDERS = FunctionExercise(
    title="Find the borders of buckets",
    solution=_borders,
    cases=lambda rng: [
        (10, 4),
        (12, 4),
        (3, 5),
        (7, 7),
        (int(rng.integers(20, 40)), int(rng.integers(3, 9))),
    ],
    wrong={
        "forwards": Wrong(
            _forwards,
            "These are the borders of the forward pass. Backward produces the last elements first, "
            "so the first bucket holds the end of the model.",
        ),
        "cut from the front": Wrong(
            _forwards_turned,
            "You cut from the front and turned the list round. The buckets fill from the back: the "
            "first one is full, the last one takes what is left.",
        ),
        "rest dropped": Wrong(
            _dropped,
            "You sent full buckets only; the rest is never reduced. Flush at the end of the pass.",
        ),
        "before the beginning": Wrong(
            _below_zero,
            "Your last bucket begins before element 0. It is sent as it is, partly filled.",
        ),
    },
    hints=(
        "Backward goes from the last element to element 0. Where does the first bucket end?",
        "Stops go down from numel in steps of bucket_numel: range(numel, 0, -bucket_numel).",
        "Each bucket is (max(stop - bucket_numel, 0), stop).",
    ),
)


# ------------------------------------------------------------------------------- 05-c: traffic


def _sent(stage, micro_batches):
    """The solution, in units of Ψ(W−1)/W."""
    return {0: 2, 1: 2, 2: micro_batches + 1, 3: 3 * micro_batches}[stage]


def _each_time(stage, micro_batches):
    """Wrong: every stage does everything for every micro-batch."""
    return (3 if stage == 3 else 2) * micro_batches


def _never_more(stage, micro_batches):
    """Wrong: micro-batches are free."""
    return 3 if stage == 3 else 2


def _stage_2_twice(stage, micro_batches):
    """Wrong: stage 2 gathers parameters after every micro-batch."""
    return 2 * micro_batches if stage == 2 else _sent(stage, micro_batches)


def _stage_3_gathers_once(stage, micro_batches):
    """Wrong: stage 3 keeps parameters for all micro-batches."""
    return micro_batches + 2 if stage == 3 else _sent(stage, micro_batches)


def _stage_2_waits(stage, micro_batches):
    """Wrong: stage 2 reduces once."""
    return 2 if stage == 2 else _sent(stage, micro_batches)


SENT = FunctionExercise(
    title="Predict the traffic of m micro-batches",
    core=True,
    solution=_sent,
    cases=lambda rng: [
        (stage, m) for m in (1, 2, 4, int(rng.integers(5, 30))) for stage in range(4)
    ],
    wrong={
        "everything each time": Wrong(
            _each_time,
            "You let every stage send everything for every micro-batch. Stages 0 and 1 hold whole "
            "gradients: they add up and send once.",
        ),
        "micro-batches are free": Wrong(
            _never_more,
            "That holds for stages 0 and 1. Stage 2 has no place for a whole gradient, so it must "
            "reduce each micro-batch as it comes.",
        ),
        "stage 2 gathers each time": Wrong(
            _stage_2_twice,
            "Stage 2 reduces m times, but its parameters change once, in the step: they are "
            "gathered once.",
        ),
        "stage 3 gathers once": Wrong(
            _stage_3_gathers_once,
            "Stage 3 drops its parameters after use, so each micro-batch gathers them for forward "
            "and for backward.",
        ),
        "stage 2 waits": Wrong(
            _stage_2_waits,
            "Stage 2 cannot wait until all micro-batches are done: where would it keep the whole "
            "gradient until then?",
        ),
    },
    hints=(
        "Count reductions of gradients and gatherings of parameters apart. Each sends one unit.",
        "Stages 0 and 1 reduce once. Stage 2 reduces m times and gathers once.",
        "For each micro-batch stage 3 gathers for forward, gathers for backward, and reduces.",
    ),
)


# ------------------------------------------------------------------------------ 05-d: a report

REPORT = ValueExercise(
    title="Find the buffer in a bug report",
    solution={"kind": "bucket", "setting": "reduce_bucket_size"},
    options=(
        "param",
        "grad",
        "optim",
        "bucket",
        "activation",
        "reduce_bucket_size",
        "world_size",
        "micro_batches",
        "precision",
    ),
    wrong={
        "the optimizer": Wrong(
            {"kind": "optim", "setting": "world_size"},
            "The optimizer states are the largest, but they are the same at both stages. Look for "
            "what became larger.",
        ),
        "the gradients": Wrong(
            {"kind": "grad", "setting": "micro_batches"},
            "The gradients became smaller, as they should. What is there at stage 2 that stage 1 "
            "does not have?",
        ),
        "activations": Wrong(
            {"kind": "activation", "setting": "micro_batches"},
            "Activations are the same at both stages: compare the two columns.",
        ),
    },
    hints=(
        "Compare the two columns line by line. Which line is larger at stage 2?",
        "It is where gradients wait for others until enough are there to travel together.",
        "The kind is 'bucket'. Which setting says how many elements travel together?",
    ),
)


EXERCISES = {"05-a": ON_GRADIENT, "05-b": BORDERS, "05-c": SENT, "05-d": REPORT}
"""By key: the notebook's number and a letter."""
