"""Exercises of notebook 02: averaging gradients, and how much data parallelism repeats."""

import numpy as np

from zero_nb.learn.exercise import FunctionExercise, Wrong
from zero_nb.learn.predict import Mistake, Prediction

__all__ = ["EXERCISES", "PREDICTIONS"]


PREDICTIONS = {
    # After backward, before averaging: all but the 2 bytes of gradient of 16.
    "02-p": Prediction(
        title="Predict what is the same on all ranks",
        unit=" %",
        within=0.6,
        low=0.0,
        high=100.0,
        mistakes=(
            Mistake(
                100.0,
                "The replicas of the model are equal, but each rank has computed the gradient of "
                "its own samples.",
            ),
            Mistake(
                75.0,
                "That is how much of equal copies is redundant on four ranks. The question is "
                "which part is equal at all.",
            ),
            Mistake(
                12.5,
                "That is the part that differs: 2 of 16 bytes.",
            ),
            Mistake(
                25.0,
                "You counted the parameters and something else. The optimizer states start equal "
                "and get the same update on every rank.",
            ),
        ),
        close="Right: everything but the gradients, 14 of 16 bytes.",
        advice="Which states come from a rank's own samples, and how many of 16 bytes are they?",
    )
}


# -------------------------------------------------------------------------------- 02-a: the mean


def _average_gradients(grad_RN):
    """The solution: the mean, on every rank."""
    return np.tile(grad_RN.mean(axis=0), (len(grad_RN), 1))


def _sum(grad_RN):
    """Wrong: no division."""
    return np.tile(grad_RN.sum(axis=0), (len(grad_RN), 1))


def _divided_twice(grad_RN):
    """Wrong: a mean, divided by W once more."""
    return _average_gradients(grad_RN) / len(grad_RN)


def _one_row(grad_RN):
    """Wrong: the mean, but not on every rank."""
    return grad_RN.mean(axis=0)


def _only_rank_0(grad_RN):
    """Wrong: rank 0 has the mean, the others their own."""
    out = grad_RN.copy()
    out[0] = grad_RN.mean(axis=0)
    return out


def _mean_over_elements(grad_RN):
    """Wrong: averaged along the wrong axis."""
    return np.tile(grad_RN.mean(axis=1, keepdims=True), (1, grad_RN.shape[1]))


def _gradient_rows(rng):
    """Worlds of 1, 3, 4 ranks and one drawn; halves, so that sums are exact."""
    drawn = int(rng.integers(2, 7))
    return [
        (rng.integers(-20, 20, (ranks, numel)) / np.float64(2),)
        for ranks, numel in ((4, 3), (3, 5), (1, 4), (2, 1), (drawn, 7))
    ]


# ------------------------------------------------------------------ 02-b: uneven numbers of samples


def _mean_over_samples(grad_RN, counts):
    """The solution: weighted by samples."""
    weights = np.asarray(counts) / np.sum(counts)
    return (weights[:, None] * grad_RN).sum(axis=0)


def _mean_of_means(grad_RN, counts):
    """Wrong: every rank counts the same."""
    return grad_RN.mean(axis=0)


def _not_divided(grad_RN, counts):
    """Wrong: weighted, but a sum."""
    return (np.asarray(counts)[:, None] * grad_RN).sum(axis=0)


def _divided_by_ranks(grad_RN, counts):
    """Wrong: weighted by samples, divided by ranks."""
    return _not_divided(grad_RN, counts) / len(counts)


def _means_as_sums(grad_RN, counts):
    """Wrong: rows taken for sums over samples."""
    return grad_RN.sum(axis=0) / np.sum(counts)


def _uneven(rng):
    """The notebook's 8, 8, 8, 5, worlds of 1 and 3 ranks, a rank without samples."""
    drawn = int(rng.integers(2, 6))
    told = (
        (4, 3, [8, 8, 8, 5]),
        (3, 4, [2, 7, 1]),
        (1, 5, [6]),
        (3, 2, [4, 0, 4]),
        (drawn, 6, [int(count) for count in rng.integers(1, 9, drawn)]),
    )
    return [(rng.integers(-20, 20, (ranks, n)) / 2, counts) for ranks, n, counts in told]


# --------------------------------------------------------------------- 02-c, 02-d: what is repeated


def _redundant_bytes(numel, world_size, state_bytes):
    """The solution: all copies but one."""
    return (world_size - 1) * state_bytes * numel


def _redundant_updates(world_size, numel, steps):
    """The solution: all ranks but one."""
    return (world_size - 1) * numel * steps


EXERCISES = {
    "02-a": FunctionExercise(
        title="Average the gradients",
        core=True,
        solution=_average_gradients,
        cases=_gradient_rows,
        tolerance=1e-6,
        wrong={
            "sum": Wrong(
                _sum,
                "this is the sum over ranks; the mean gradient is smaller by a factor of W",
            ),
            "divided twice": Wrong(
                _divided_twice,
                "this is divided by W twice; the mean needs one division",
            ),
            "one row": Wrong(
                _one_row,
                "the mean is right, but it is one row; afterwards each rank holds it, so the "
                "result has as many rows as ranks",
            ),
            "rank 0 only": Wrong(
                _only_rank_0,
                "only rank 0 has the mean; the other ranks still hold their own gradient, and "
                "their replicas would drift apart",
            ),
            "wrong axis": Wrong(
                _mean_over_elements,
                "you averaged over the elements of each row; average over ranks, the first axis",
            ),
        },
        hints=(
            "Which axis of grad_RN counts the ranks? And how many rows must the result have?",
            "The mean over the first axis is one row. Every rank gets a copy of it.",
            "np.tile(row, (number_of_ranks, 1)) repeats a row; the row is grad_RN.mean(axis=0).",
        ),
    ),
    "02-b": FunctionExercise(
        title="Weight an uneven batch by its samples",
        core=True,
        solution=_mean_over_samples,
        cases=_uneven,
        tolerance=1e-6,
        wrong={
            "mean of means": Wrong(
                _mean_of_means,
                "this is the mean of means: a sample on a rank with few of them counts more than "
                "others",
            ),
            "not divided": Wrong(
                _not_divided,
                "this is the sum over all samples; divide it by their number",
            ),
            "divided by ranks": Wrong(
                _divided_by_ranks,
                "the sum over samples is divided by the number of ranks here; divide it by the "
                "number of samples",
            ),
            "means taken for sums": Wrong(
                _means_as_sums,
                "a row is a mean already; multiply it by its rank's count before you add",
            ),
        },
        hints=(
            "A row is a mean over counts[r] samples. What is the sum over these samples?",
            "Multiply each row by its count, add the rows, divide by the number of all samples.",
            "The weight of row r is counts[r] / sum(counts); weights[:, None] * grad_RN weights "
            "the rows.",
        ),
    ),
    "02-c": FunctionExercise(
        title="Count the redundant bytes",
        solution=_redundant_bytes,
        cases=lambda rng: [
            (404_480, 4, 16),
            (10, 1, 16),
            (7, 3, 18),
            (int(rng.integers(1, 10**6)), int(rng.integers(2, 65)), 16),
        ],
        wrong={
            "all copies": Wrong(
                lambda numel, world_size, state_bytes: world_size * state_bytes * numel,
                "these are all bytes of the cluster; one copy has to stay",
            ),
            "one rank": Wrong(
                lambda numel, world_size, state_bytes: state_bytes * numel,
                "these are the bytes of one rank; W - 1 ranks hold a copy too many",
            ),
            "mean of a rank": Wrong(
                lambda numel, world_size, state_bytes: (
                    (world_size - 1) * state_bytes * numel / world_size
                ),
                "that is how much each rank could drop; the question is about the whole cluster",
            ),
            "elements": Wrong(
                lambda numel, world_size, state_bytes: (world_size - 1) * numel,
                "these are parameters; each takes state_bytes bytes",
            ),
        },
        hints=(
            "How many copies of each byte are on the cluster, and how many are needed?",
            "W copies are there and one is needed. A copy has state_bytes * numel bytes.",
            "W - 1 times the bytes of one copy.",
        ),
    ),
    "02-d": FunctionExercise(
        title="Count the repeated updates",
        solution=_redundant_updates,
        cases=lambda rng: [
            (4, 404_480, 30),
            (1, 10, 5),
            (3, 7, 2),
            (int(rng.integers(2, 65)), int(rng.integers(1, 10**6)), int(rng.integers(1, 100))),
        ],
        wrong={
            "all updates": Wrong(
                lambda world_size, numel, steps: world_size * numel * steps,
                "these are all updates; one rank's are needed, the others repeat them",
            ),
            "one rank": Wrong(
                lambda world_size, numel, steps: numel * steps,
                "these are the updates that are needed; the question is how many repeat them",
            ),
            "one step": Wrong(
                lambda world_size, numel, steps: (world_size - 1) * numel,
                "that is one step; there are `steps` of them",
            ),
        },
        hints=(
            "How many ranks make the same update of one parameter?",
            "One of the W updates is needed, for every parameter and in every step.",
            "(W - 1) times the parameters times the steps.",
        ),
    ),
}
"""By key, in the order of the notebook."""
