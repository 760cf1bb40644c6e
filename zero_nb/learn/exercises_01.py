"""Exercises of notebook 01: bytes of a recipe, memory behind views, units, order of events."""

import numpy as np

from zero_nb.learn.exercise import FunctionExercise, ValueExercise, Wrong
from zero_nb.learn.predict import Mistake, Prediction

__all__ = ["EXERCISES", "PREDICTIONS"]


PREDICTIONS = {
    # Float32 weights, gradients and two moments: 4 + 4 + 8 bytes a parameter.
    "01-p": Prediction(
        title="Predict the bytes of float32 Adam",
        unit=" bytes",
        within=0.0,
        low=1.0,
        high=1000.0,
        mistakes=(
            Mistake(
                32.0,
                "You doubled everything. But most of the 16 bytes were float32 before, and one "
                "of them, the precise copy of the weight, is not needed twice.",
            ),
            Mistake(
                20.0,
                "You kept a precise copy beside the weight. A float32 weight is precise itself; "
                "no copy is needed.",
            ),
            Mistake(
                8.0,
                "That is weight and gradient, or the two moments. Add all of them.",
            ),
            Mistake(
                12.0,
                "One part is missing. Count the weight, the gradient and two moments.",
            ),
        ),
        close="Right: weight, gradient and two moments, four bytes each, and no copy.",
        advice="Count the weight, the gradient, and what Adam keeps for each weight.",
    )
}


# ------------------------------------------------------------------------ 01-a: bytes of a recipe

SIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


def _bytes_per_parameter(recipe):
    """The solution: weights, gradients, master, moments."""
    weights = SIZE[recipe["weights"]]
    gradients = sum(SIZE[name] for name in recipe["gradients"])
    return weights + gradients + 4 * recipe["master"] + 4 * recipe["moments"]


def _optimizer_only(recipe):
    """Wrong: the K of the paper."""
    return 4 * recipe["master"] + 4 * recipe["moments"]


def _moments_only(recipe):
    """Wrong: what is left of K without the master."""
    return 4 * recipe["moments"]


def _no_gradients(recipe):
    """Wrong: gradients left out."""
    return SIZE[recipe["weights"]] + _optimizer_only(recipe)


def _no_master(recipe):
    """Wrong: the precise copy left out."""
    return _bytes_per_parameter(recipe | {"master": False})


def _gradients_like_weights(recipe):
    """Wrong: one gradient, in the format of the weights."""
    return _bytes_per_parameter(recipe | {"gradients": [recipe["weights"]]})


def _first_gradient(recipe):
    """Wrong: of two gradients the first only."""
    return _bytes_per_parameter(recipe | {"gradients": recipe["gradients"][:1]})


def _moments_like_weights(recipe):
    """Wrong: optimizer states in the format of the weights."""
    size = SIZE[recipe["weights"]]
    gradients = sum(SIZE[name] for name in recipe["gradients"])
    return size + gradients + size * recipe["master"] + size * recipe["moments"]


def _recipes(rng):
    """Named recipes, and one that nobody uses."""
    drawn = {
        "weights": str(rng.choice(sorted(SIZE))),
        "gradients": [str(name) for name in rng.choice(sorted(SIZE), 3)],
        "master": True,
        "moments": int(rng.integers(3, 7)),
    }
    told = (
        ("bfloat16", ["bfloat16"], True, 2),
        ("float32", ["float32"], False, 2),
        ("bfloat16", ["float32"], True, 2),
        ("float16", ["float16", "float32"], True, 2),
        ("float32", ["float32"], False, 0),
        ("float32", ["float32"], False, 1),
    )
    names = ("weights", "gradients", "master", "moments")
    return [(dict(zip(names, recipe, strict=True)),) for recipe in told] + [(drawn,)]


# -------------------------------------------------------------------- 01-b: memory behind views


def _bytes_alive(arrays):
    """The solution: each owner once."""
    owners = {}
    for array in arrays:
        owner = array if array.base is None else array.base
        owners[id(owner)] = owner
    return sum(owner.nbytes for owner in owners.values())


def _views_again(arrays):
    """Wrong: a view counts as new memory."""
    return sum(array.nbytes for array in arrays)


def _each_name_once(arrays):
    """Wrong: told apart by the array object, not by its memory."""
    return sum(array.nbytes for array in {id(array): array for array in arrays}.values())


def _no_views(arrays):
    """Wrong: views are left out, also where nothing else holds their memory."""
    return sum({id(a): a.nbytes for a in arrays if a.base is None}.values())


def _size_of_the_view(arrays):
    """Wrong: memory once, but with the size of the last view of it."""
    return sum({id(a if a.base is None else a.base): a.nbytes for a in arrays}.values())


def _array_lists(rng):
    """Views with and without their owner in the list, one array twice, slices, other dtypes."""
    whole = np.full(30, np.float32(1e30))
    other = np.full(int(rng.integers(5, 40)), 7, np.int16)
    alone = np.full(1000, -1e300)[3:7]
    return [
        ([],),
        ([np.full(5, 3.5)],),
        ([whole, whole[:10]],),
        ([whole, other, whole.reshape(5, 6), other[::2]],),
        ([alone],),
        ([alone, whole[1:], whole[2:][1:]],),
        ([other, other, other[1:3]],),
    ]


# ----------------------------------------------------------------------------------- the table

EXERCISES = {
    "01-a": FunctionExercise(
        title="Count the bytes of any recipe",
        core=True,
        solution=_bytes_per_parameter,
        cases=_recipes,
        wrong={
            "moments only": Wrong(
                _moments_only,
                "you counted the moments only; the weights, the gradients and, where there is "
                "one, the master copy take memory too",
            ),
            "optimizer only": Wrong(
                _optimizer_only,
                "that is K, the optimizer's part (12 in 16-bit training); add the weights and "
                "the gradients",
            ),
            "no gradients": Wrong(
                _no_gradients,
                "the gradients are missing; they are held until the step",
            ),
            "no master": Wrong(
                _no_master,
                'the master copy is missing: four bytes where recipe["master"] is True',
            ),
            "gradients like weights": Wrong(
                _gradients_like_weights,
                "you took the format of the weights for the gradients; a recipe may keep its "
                "gradients in float32, or in two formats",
            ),
            "first gradient only": Wrong(
                _first_gradient,
                "some recipes keep two gradients, a 16-bit and a float32 one; you counted the "
                "first only",
            ),
            "moments like weights": Wrong(
                _moments_like_weights,
                "you took the format of the weights for master and moments; they are float32, "
                "four bytes each, in every recipe here",
            ),
        },
        hints=(
            "Four things are held: weights, gradients, a master copy, moments. Which entries of "
            "the recipe say how large they are?",
            "SIZE gives the bytes of one number. recipe['gradients'] is a list: add up its sizes. "
            "Master and moments are four bytes each.",
            "The sum is SIZE[recipe['weights']] + sum(SIZE[g] for g in recipe['gradients']) + 4 "
            "if there is a master + 4 times the moments.",
        ),
    ),
    "01-b": FunctionExercise(
        title="Count memory once, however many views there are",
        core=True,
        solution=_bytes_alive,
        cases=_array_lists,
        wrong={
            "views again": Wrong(
                _views_again,
                "a view counts again here, but it has no memory of its own",
            ),
            "each name once": Wrong(
                _each_name_once,
                "the same array twice counts once now, but a view still counts again; ask for "
                "its base",
            ),
            "no views": Wrong(
                _no_views,
                "you left views out. A list may hold a view only: it keeps all the memory behind "
                "it alive",
            ),
            "size of the view": Wrong(
                _size_of_the_view,
                "each memory counts once now, but with the size of a view; a small view keeps "
                "the whole array alive",
            ),
        },
        hints=(
            "Two arrays share memory if they have the same owner. Who owns the memory of a view?",
            "The owner is array.base, or the array itself where base is None. Collect owners, "
            "not arrays.",
            "Keep a dict from id(owner) to owner, so that each is in it once; then add up their "
            "nbytes.",
        ),
    ),
    "01-c": ValueExercise(
        title="Write the model states of 7.5 billion parameters in GB and GiB",
        solution=(120.0, 16 * 7.5e9 / 2**30),
        within=0.06,
        wrong={
            "swapped": Wrong(
                (16 * 7.5e9 / 2**30, 120.0),
                "the two are swapped: a GiB is the larger unit, so there are fewer of them",
            ),
            "GB twice": Wrong(
                (120.0, 120.0),
                "a GiB is 2**30 bytes, not 10**9",
            ),
            "multiplied": Wrong(
                (120.0, 120.0 * 2**30 / 1e9),
                "a GiB is larger than a GB, so the number of GiB is smaller: divide by 2**30",
            ),
            "weights only": Wrong(
                (15.0, 15e9 / 2**30),
                "those are the 16-bit weights alone; model states are 16 bytes a parameter",
            ),
        },
        hints=(
            "How many bytes are that in all?",
            "16 bytes times 7.5 billion. Divide by the bytes in one unit, once for each unit.",
            "The pair is (16 * 7.5e9 / 10**9, 16 * 7.5e9 / 2**30).",
        ),
    ),
    "01-d": ValueExercise(
        title="Put the events of the first step in order",
        solution=("C", "B", "D", "A"),
        options=("A", "B", "C", "D"),
        wrong={
            "eager": Wrong(
                ("C", "A", "B", "D"),
                "that is the eager optimizer; the lazy one makes its moments when its first step "
                "needs them",
            ),
            "gradients before activations": Wrong(
                ("C", "D", "B", "A"),
                "activations grow in the forward pass; gradients come in the backward pass, which "
                "uses the activations up",
            ),
            "moments before gradients": Wrong(
                ("C", "B", "A", "D"),
                "a step needs all gradients; the lazy moments are made within the step",
            ),
        },
        hints=(
            "Look at the lower panel of the picture, from left to right.",
            "Parameters are there before anything is computed. Forward comes before backward, and "
            "backward before the step.",
            "Activations are the largest at the end of forward, gradients are complete at the end "
            "of backward. What is left comes in the step.",
        ),
    ),
}
"""By key, in the order of the notebook."""
