"""Exercises of notebook 04: own a shard, update it, gather; what it costs; what is owned once."""

import numpy as np

from zero_nb.cluster.simulated import SimulatedWorld
from zero_nb.learn.exercise import FunctionExercise, Wrong
from zero_nb.learn.limits import NotYet
from zero_nb.learn.predict import Mistake, Prediction

__all__ = ["EXERCISES", "PREDICTIONS", "CountingSGD"]


PREDICTIONS = {
    # Plain SGD in float32 keeps nothing beside weight and gradient: stage 1 has nothing to shard.
    "04-p": Prediction(
        title="Predict stage 1 with plain SGD",
        unit=" bytes",
        within=0.05,
        low=0.0,
        high=16.0,
        mistakes=(
            Mistake(
                2.0,
                "You divided everything by 4. Stage 1 shards the optimizer states only, and plain "
                "SGD has none.",
            ),
            Mistake(
                5.0,
                "You sharded the gradients. That is stage 2; stage 1 leaves them whole.",
            ),
            Mistake(
                3.5,
                "That is what 16-bit training with a master copy holds at stage 2. Here all is "
                "float32, and there is no master copy.",
            ),
            Mistake(
                7.0,
                "That is Adam in 16 bits. Plain SGD keeps nothing between the steps.",
            ),
        ),
        close="Right: plain SGD keeps nothing between the steps, so stage 1 has nothing to shard.",
        advice="What does plain SGD keep between the steps? Only that is sharded at stage 1.",
    )
}


# ----------------------------------------------------------------------------- 04-a: own a shard


def _shard_bounds(n, world_size, rank):
    """The solution: equal shards of a padded length, cut where the real elements end."""
    shard = -(-n // world_size)
    return min(rank * shard, n), min((rank + 1) * shard, n)


def _floor(n, world_size, rank):
    """Wrong: rounded down, so that the last elements belong to nobody."""
    shard = n // world_size
    return rank * shard, (rank + 1) * shard


def _last_takes_rest(n, world_size, rank):
    """Wrong: rounded down, and the last rank takes what is left."""
    shard = n // world_size
    return rank * shard, n if rank == world_size - 1 else (rank + 1) * shard


def _balanced(n, world_size, rank):
    """Wrong here: as equal as possible without padding."""
    small, more = divmod(n, world_size)
    start = rank * small + min(rank, more)
    return start, start + small + (rank < more)


def _beyond(n, world_size, rank):
    """Wrong: padding counted as real."""
    shard = -(-n // world_size)
    return rank * shard, (rank + 1) * shard


def _start_beyond(n, world_size, rank):
    """Wrong: only the end is cut."""
    shard = -(-n // world_size)
    return rank * shard, min((rank + 1) * shard, n)


def _bounds_cases(rng):
    """Every rank of some small worlds, the curriculum's two among them, and drawn ones."""
    worlds = [(10, 4), (5, 4), (7, 1), (12, 3), (1, 3)]
    worlds += [(int(rng.integers(20, 60)), int(rng.integers(2, 7))) for _ in range(2)]
    return [(n, size, rank) for n, size in worlds for rank in range(size)]


BOUNDS = FunctionExercise(
    title="Find the real elements of a rank's shard",
    core=True,
    solution=_shard_bounds,
    cases=_bounds_cases,
    wrong={
        "floor": Wrong(
            _floor,
            "You rounded the shard's length down: the last elements belong to nobody. Round up, "
            "and let padding fill what is missing.",
        ),
        "the last rank takes the rest": Wrong(
            _last_takes_rest,
            "You rounded down and gave the rest to the last rank, so its shard is longer. A "
            "collective needs equal shards: round up and pad.",
        ),
        "balanced": Wrong(
            _balanced,
            "You made the parts as equal as possible, such as 3, 3, 2, 2. Here all shards of the "
            "padded buffer are equally long; only the last ones hold fewer real elements.",
        ),
        "padding counted": Wrong(
            _beyond,
            "Your stop goes beyond the real elements. What lies behind n is padding.",
        ),
        "start beyond n": Wrong(
            _start_beyond,
            "Your stop is right, but a rank with padding only has a start beyond n. Cut it too: "
            "with n=5 and 4 ranks, rank 3 owns (5, 5), nothing.",
        ),
    },
    hints=(
        "All shards are equally long. How long must one be, so that four of them cover n?",
        "The length is n / world_size, rounded up: -(-n // world_size). Rank r starts at r times "
        "that.",
        "Cut both ends: min(rank * shard, n) and min((rank + 1) * shard, n).",
    ),
)


# ----------------------------------------------------- 04-b and 04-c: a step, and what it costs


class CountingSGD:
    """Plain SGD that counts what it updates.

    Parameters
    ----------
    world_size : int

    Attributes
    ----------
    updated : int
        Elements updated so far, of one rank.
    """

    def __init__(self, world_size):
        self.world_size = world_size
        self.updated = 0

    def __call__(self, param, grad):
        """Update `param` in place.

        Parameters
        ----------
        param, grad : ndarray
            Of one shape, the rank axis first.
        """
        if np.shape(param) != np.shape(grad):
            raise NotYet(
                f"update got parameters of shape {np.shape(param)} and a gradient of shape "
                f"{np.shape(grad)}; each needs the part that belongs to the other"
            )
        param -= np.float32(0.5) * grad
        self.updated += param.shape[1]


def _step(world, param_RF, grad_RF, update):
    """The solution of 04-b and 04-c: 2Ψ."""
    grad_RS = world.reduce_scatter(grad_RF)
    own_RS = world.own_shard(param_RF)
    update(own_RS, grad_RS)
    world.all_gather(own_RS, out=param_RF)


def _first_way(world, param_RF, grad_RF, update):
    """Right, but with an all-reduce: 3Ψ."""
    own_RS = world.own_shard(param_RF)
    update(own_RS, world.own_shard(world.all_reduce(grad_RF.copy())))
    world.all_gather(own_RS, out=param_RF)


def _gather_first(world, param_RF, grad_RF, update):
    """Wrong: the last two lines turned round."""
    grad_RS = world.reduce_scatter(grad_RF)
    own_RS = world.own_shard(param_RF)
    world.all_gather(own_RS, out=param_RF)
    update(own_RS, grad_RS)


def _no_gather(world, param_RF, grad_RF, update):
    """Wrong: everybody keeps the new shard."""
    update(world.own_shard(param_RF), world.reduce_scatter(grad_RF))


def _full_update(world, param_RF, grad_RF, update):
    """Wrong: everybody updates everything, after gathering the gradient."""
    update(param_RF, world.all_gather(world.reduce_scatter(grad_RF)))


def _full_update_all_reduce(world, param_RF, grad_RF, update):
    """Wrong: data parallelism."""
    update(param_RF, world.all_reduce(grad_RF.copy()))


def _partial_gradient(world, param_RF, grad_RF, update):
    """Wrong: nothing is averaged."""
    own_RS = world.own_shard(param_RF)
    update(own_RS, world.own_shard(grad_RF))
    world.all_gather(own_RS, out=param_RF)


class _World:
    """Stands for a world in the cases: each trial makes a fresh one of this size."""

    def __init__(self, size):
        self.size = size


def _try_step(function, world_size, param_F, grad_RF, *, sent=False):
    """Run one step on a world of its own; say what became of it."""
    world, update = SimulatedWorld(world_size), CountingSGD(world_size)
    param_RF = np.repeat(param_F[None], world_size, axis=0)
    function(world, param_RF, grad_RF.copy(), update)
    seen = {
        "parameters": param_RF,
        "elements updated by a rank": update.updated,
        "parameters sent by a rank": world.log.elements_sent("param"),
    }
    return seen | ({"elements sent by a rank": world.log.elements_sent()} if sent else {})


def _step_cases(rng):
    """Whole numbers in float32, so that sums are exact; a few worlds."""
    cases = []
    for size, shard in ((3, 2), (4, 3), (1, 4), (4, int(rng.integers(2, 6)))):
        numel = size * shard
        param_F = rng.integers(-50, 50, numel).astype(np.float32)
        cases.append((size, param_F, rng.integers(-9, 9, (size, numel)).astype(np.float32)))
    return cases


_FULL_TEXT = (
    "The weights are right, but each rank updated all elements, not its shard only. That needs "
    "optimizer states for all of them, which is what stage 1 saves."
)

STEP = FunctionExercise(
    title="Let the owner update, then gather",
    core=True,
    solution=_step,
    cases=lambda rng: [(_World(size), *rest) for size, *rest in _step_cases(rng)],
    trial=lambda function, world, param_F, grad_RF: _try_step(
        function, world.size, param_F, grad_RF
    ),
    wrong={
        "gather before update": Wrong(
            _gather_first,
            "You gathered before the update: what travels are the old parameters, and every rank "
            "has its own shard new and all others old. Update first.",
        ),
        "no gather": Wrong(
            _no_gather,
            "Nobody told the others: each rank has only its own shard new. Gather at the end, into "
            "param_RF.",
        ),
        "gathered gradient, full update": Wrong(_full_update, _FULL_TEXT),
        "all-reduce, full update": Wrong(
            _full_update_all_reduce, f"This is data parallelism as in notebook 02. {_FULL_TEXT}"
        ),
        "gradient not summed": Wrong(
            _partial_gradient,
            "Each rank used its own gradient, which comes from its own samples only. Sum over the "
            "ranks first: world.reduce_scatter(grad_RF).",
        ),
    },
    hints=(
        "Three collectives are on the page: reduce_scatter, own_shard (a view, nothing travels), "
        "all_gather. Which one gives the gradient of the own shard?",
        "Sum the gradient to its owners, update the own shard of the parameters with it, then "
        "send the new shards to everybody.",
        "update(world.own_shard(param_RF), world.reduce_scatter(grad_RF)), and then "
        "world.all_gather(world.own_shard(param_RF), out=param_RF).",
    ),
)


TWO_LINES = FunctionExercise(
    title="Come from 3Ψ to 2Ψ by two lines",
    solution=_step,
    cases=lambda rng: [(_World(size), *rest) for size, *rest in _step_cases(rng)],
    trial=lambda function, world, param_F, grad_RF: _try_step(
        function, world.size, param_F, grad_RF, sent=True
    ),
    wrong={
        "still all-reduce": Wrong(
            _first_way,
            "The weights are right, and it still sends 3Ψ: every rank gets the whole summed "
            "gradient, by an all-reduce or in two parts. Which part of it does the rank use?",
        ),
        "no gather": Wrong(
            _no_gather,
            "Now it sends Ψ only, because the new parameters do not travel: the replicas part.",
        ),
        "data parallel": Wrong(_full_update_all_reduce, f"It sends 2Ψ. {_FULL_TEXT}"),
    },
    hints=(
        "An all-reduce is a reduce-scatter and an all-gather. Which of the two is wasted here?",
        "world.reduce_scatter(grad_RF) returns just the part of the sum that a rank owns.",
        "Replace the first line by grad_RS = world.reduce_scatter(grad_RF), and give grad_RS to "
        "update.",
    ),
)


# ------------------------------------------------------------------------- 04-d: owned once


def _shard_numel(params, world_size):
    """The solution: each array once, then an equal shard of the padded buffer."""
    unique = {id(array): array for array in params.values()}
    return -(-sum(array.size for array in unique.values()) // world_size)


def _twice(params, world_size):
    """Wrong: by names."""
    return -(-sum(array.size for array in params.values()) // world_size)


def _by_shape(params, world_size):
    """Wrong: equal shapes taken for one array."""
    unique = {array.shape: array for array in params.values()}
    return -(-sum(array.size for array in unique.values()) // world_size)


def _once_floor(params, world_size):
    """Wrong: rounded down."""
    unique = {id(array): array for array in params.values()}
    return sum(array.size for array in unique.values()) // world_size


def _tied_cases(rng):
    """A tied head, two alike layers that are not tied, and three names for one array."""
    embed, block = np.zeros((5, 3)), np.zeros((3, 3))
    wide = np.zeros((int(rng.integers(4, 9)), 3))
    return [
        ({"embed": embed, "block": block, "head": embed}, 5),
        ({"embed": embed, "first": block, "second": block.copy(), "head": embed}, 3),
        ({"a": wide, "b": wide, "c": wide}, 2),
        ({"a": wide, "b": wide.copy()}, 1),
    ]


TIED = FunctionExercise(
    title="Count a tied weight once",
    solution=_shard_numel,
    cases=_tied_cases,
    wrong={
        "counted twice": Wrong(
            _twice,
            "You counted by names. A tied weight has two names and one memory: it is in the flat "
            "buffer once.",
        ),
        "same shape taken for tied": Wrong(
            _by_shape,
            "You took arrays of equal shape for one. Two layers of one shape are two parameters; "
            "tied means the very same array (`a is b`).",
        ),
        "floor": Wrong(
            _once_floor,
            "The count is right, but you rounded the shard's length down. Round up, as in 04-a.",
        ),
    },
    hints=(
        "Two names are tied if they stand for the very same array: params['a'] is params['b'].",
        "Collect the arrays in a dict with id(array) as the key: each array is in it once.",
        "Sum array.size over that dict's values and divide by world_size, rounded up.",
    ),
)


EXERCISES = {"04-a": BOUNDS, "04-b": STEP, "04-c": TWO_LINES, "04-d": TIED}
"""By key: the notebook's number and a letter."""
