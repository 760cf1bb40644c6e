"""Exercises of notebook 08: activations, recomputing, reports, and a grid of ranks."""

import numpy as np

from zero_nb.learn.exercise import FunctionExercise, ValueExercise, Wrong
from zero_nb.learn.predict import Mistake, Prediction

__all__ = ["EXERCISES", "PREDICTIONS"]


PREDICTIONS = {
    # Measured: 17,380,672 of 20,826,624 bytes.
    "08-p": Prediction(
        title="Predict a peak with a larger batch",
        unit=" %",
        within=5.0,
        low=0.0,
        high=120.0,
        mistakes=(
            Mistake(
                25.0,
                "That is what stage 3 does to model states on four ranks. What else is there at "
                "the peak, and who shards it?",
            ),
            Mistake(
                32.0,
                "That was with one sample a rank. Model states stay as they are; activations are "
                "32 times as large.",
            ),
            Mistake(
                100.0,
                "Activations fill most of the memory, but not all: model states still are smaller "
                "at stage 3.",
            ),
        ),
        close="Close: activations fill most of the memory, and no stage makes them smaller.",
        advice="One sample keeps 1.2 bytes a parameter here. How many do 32 samples keep? Model "
        "states take at most 16.",
    )
}


# ------------------------------------------------------------------- 08-a: what one block keeps


def _kept(scores=lambda tokens, heads: heads * tokens, *, width=14, itemsize=4, tokens_count=True):
    """Make an answer from what a token keeps, and how it is counted."""

    def block_bytes(samples, tokens, width_, heads):
        each = width * width_ + scores(tokens, heads) + 2
        return itemsize * samples * (tokens if tokens_count else 1) * each

    return block_bytes


def _states(samples, tokens, width, heads):
    """Wrong: parameters of the block."""
    return 4 * (12 * width**2 + 13 * width)


BLOCK = FunctionExercise(
    title="Count the activations of a block",
    core=True,
    solution=_kept(),
    cases=lambda rng: [
        (1, 16, 64, 4),
        (8, 16, 64, 4),
        (1, 1024, 64, 4),
        (int(rng.integers(2, 9)), int(rng.integers(20, 90)), 8 * int(rng.integers(2, 9)), 2),
    ],
    wrong={
        "no scores": Wrong(
            _kept(lambda tokens, heads: 0),
            "You left the attention weights out: for each token, each head has one for every "
            "position. They grow with the square of the sequence.",
        ),
        "one score a head": Wrong(
            _kept(lambda tokens, heads: heads),
            "An attention weight is there for each head and each *pair* of positions: a token has "
            "heads * tokens of them.",
        ),
        "scores of one head": Wrong(
            _kept(lambda tokens, heads: tokens),
            "You counted the attention weights of one head. Each head has its own.",
        ),
        "elements": Wrong(
            _kept(itemsize=1),
            "These are elements. Each takes 4 bytes in float32.",
        ),
        "16 bits": Wrong(
            _kept(itemsize=2),
            "You counted 2 bytes an element; here everything is float32.",
        ),
        "one token": Wrong(
            _kept(tokens_count=False),
            "That is one token of each sample. A sample has tokens of them.",
        ),
        "parameters": Wrong(
            _states,
            "You counted parameters. Activations are what the samples leave behind.",
        ),
        "attention only": Wrong(
            lambda samples, tokens, width, heads: (
                4 * samples * tokens * (5 * width + heads * tokens + 1)
            ),
            "That is attention alone. The feed-forward layer keeps more: 9 width + 1.",
        ),
        "feed-forward only": Wrong(
            lambda samples, tokens, width, heads: 4 * samples * tokens * (9 * width + 1),
            "That is the feed-forward layer alone. Attention keeps its list, too.",
        ),
    },
    hints=(
        "Count elements for one token first: add the rows of the table.",
        "Attention keeps 5 width + heads * tokens + 1 elements a token, the feed-forward layer "
        "9 width + 1.",
        "4 * samples * tokens * (14 * width + heads * tokens + 2).",
    ),
)


# ------------------------------------------------------------------------- 08-b: recompute one


class _Squares:
    """A layer y = w x x: its gradient needs x and, as a cache, w x."""

    def __init__(self):
        self.forwards = 0

    def forward(self, params, x):
        """Return y and what backward needs."""
        self.forwards += 1
        product = params["w"] * x
        return product * x, (x, product)

    def backward(self, params, cache, dy, grads):
        """Write the gradient of w; return that of x."""
        x, product = cache
        grads["w"][...] = dy * x * x
        return 2 * dy * product


def _again(layer, params, kept, dy, grads):
    """The solution."""
    (x,) = kept
    _, cache = layer.forward(params, x)
    return layer.backward(params, cache, dy, grads)


def _no_return(layer, params, kept, dy, grads):
    """Wrong: the gradient of the input is lost."""
    _again(layer, params, kept, dy, grads)
    return dy


def _kept_as_cache(layer, params, kept, dy, grads):
    """Wrong: what was kept is handed on as if it were the cache."""
    return layer.backward(params, kept, dy, grads)


def _result_as_cache(layer, params, kept, dy, grads):
    """Wrong: the whole result of forward as a cache."""
    return layer.backward(params, layer.forward(params, kept[0]), dy, grads)


def _twice(layer, params, kept, dy, grads):
    """Wrong: forward runs twice."""
    layer.forward(params, kept[0])
    return _again(layer, params, kept, dy, grads)


def _from_gradient(layer, params, kept, dy, grads):
    """Wrong: forward is run on the gradient."""
    _, cache = layer.forward(params, dy)
    return layer.backward(params, cache, dy, grads)


class _Case:
    """Parameters, an input and a gradient."""

    def __init__(self, w, x, dy):
        self.w, self.x, self.dy = w, x, dy


def _try_again(function, case):
    """Run the learner's backward once, on a layer that kept its input only."""
    layer, grads = _Squares(), {"w": np.zeros_like(case.w)}
    dx = function(layer, {"w": case.w}, (case.x,), case.dy.copy(), grads)
    if dx is None:
        return None
    return {
        "the gradient of the input": dx,
        "the gradient of the parameters": grads["w"],
        "the number of forward passes": layer.forwards,
    }


RECOMPUTE = FunctionExercise(
    title="Recompute a layer in backward",
    solution=_again,
    cases=lambda rng: [
        (_Case(*(rng.integers(-4, 5, (2, size)).astype(np.float32) for _ in range(3))),)
        for size in (3, 1, 8)
    ],
    trial=_try_again,
    wrong={
        "nothing handed on": Wrong(
            _no_return,
            "You returned the gradient that came in. The layer below needs what layer.backward "
            "returns.",
        ),
        "kept as it was": Wrong(
            _kept_as_cache,
            "You handed on what was kept, the input alone. layer.backward needs the whole cache: "
            "run forward again to get it.",
        ),
        "result and cache": Wrong(
            _result_as_cache,
            "layer.forward returns two things, the result and the cache. Hand on the second.",
        ),
        "two forwards": Wrong(
            _twice,
            "The gradients are right, but forward ran twice. Once more is enough.",
        ),
        "of the gradient": Wrong(
            _from_gradient,
            "You ran forward on the gradient. It is the layer's input that was kept.",
        ),
    },
    hints=(
        "layer.backward wants the cache that layer.forward made. What do you need to make it anew?",
        "The input is in kept: (x,) = kept. Then layer.forward(params, x) gives a result and the "
        "cache.",
        "_, cache = layer.forward(params, x); then layer.backward(params, cache, dy, grads) is "
        "what you return.",
    ),
)


# ------------------------------------------------------------------------- 08-c: four reports

_EVIDENCE = {"1": "A", "2": "D", "3": "F", "4": "B"}


def _swapped(**other):
    """The right assignment, but for some reports."""
    return _EVIDENCE | {key.removeprefix("r"): value for key, value in other.items()}


REPORTS = ValueExercise(
    title="Choose the evidence for four reports",
    core=True,
    solution=_EVIDENCE,
    options=("A", "B", "C", "D", "E", "F"),
    wrong={
        "the loss": Wrong(
            _swapped(r1="C"),
            "C is true of report 1, and of every run: all stages compute the same. Which "
            "measurement shows what fills the memory?",
        ),
        "the context": Wrong(
            _swapped(r2="E"),
            "E is true of every run, at each stage alike. It cannot explain a difference between "
            "stages.",
        ),
        "floor and buckets": Wrong(
            _swapped(r2="B", r4="D"),
            "Reports 2 and 4 are swapped. One compares stages, the other one numbers of ranks.",
        ),
        "activations for ranks": Wrong(
            _swapped(r4="A", r1="B"),
            "Reports 1 and 4 are swapped. Which one changed the sequence, and which one the ranks?",
        ),
        "group and floor": Wrong(
            _swapped(r3="B", r4="F"),
            "Reports 3 and 4 are swapped. In which of them does ZeRO have nobody to share with?",
        ),
    },
    hints=(
        "Ask of each piece of evidence: would it look different if the suspected cause were not "
        "there?",
        "Two pieces are true of every run and prove nothing: the loss, and what the driver takes.",
        "Report 1 is about activations, 2 about buckets, 3 about the group, 4 about what more "
        "ranks do not make smaller.",
    ),
)


# ------------------------------------------------------------------------ 08-d: hybrid shard


def _holders(shard, world_size, group_size):
    """The solution: one rank in each group."""
    return list(range(shard, world_size, group_size))


def _whole_group(shard, world_size, group_size):
    """Wrong: the ranks of a group."""
    return list(range(shard * group_size, min((shard + 1) * group_size, world_size)))


def _one_rank(shard, world_size, group_size):
    """Wrong: there is one copy."""
    return [shard]


def _every_groups_first(shard, world_size, group_size):
    """Wrong: in steps of the number of groups."""
    return list(range(shard, world_size, world_size // group_size))


HOLDERS = FunctionExercise(
    title="Find who holds a shard",
    solution=_holders,
    cases=lambda rng: [
        (1, 8, 4),
        (0, 6, 2),
        (2, 12, 3),
        (int(rng.integers(0, 4)), 4 * int(rng.integers(3, 7)), 4),
    ],
    wrong={
        "a whole group": Wrong(
            _whole_group,
            "That is a whole group. Its ranks hold different shards of one copy; you want the same "
            "shard in every copy.",
        ),
        "one rank": Wrong(
            _one_rank,
            "There is a copy of the model in each group, so each group has one rank with this "
            "shard.",
        ),
        "wrong step": Wrong(
            _every_groups_first,
            "The step from copy to copy is the size of a group, not the number of groups.",
        ),
    },
    hints=(
        "Draw the ranks in rows of group_size. Where in each row is this shard?",
        "In the first group it is rank `shard`. How far is it to the next group?",
        "list(range(shard, world_size, group_size)).",
    ),
)


# ------------------------------------------------------------------ 08-e: the data-parallel degree


def _state_bytes(stage, numel, world_size, tensor):
    """The solution: a slice of the model, sharded over the data-parallel group."""
    data = world_size // tensor
    mine = numel // tensor
    divided = [data if stage >= least else 1 for least in (3, 2, 1)]
    return sum(mine * size / parts for size, parts in zip((2, 2, 12), divided, strict=True))


def _with(degree, *, sliced=True):
    """Make an answer with another degree of data parallelism."""

    def state_bytes(stage, numel, world_size, tensor):
        mine = numel // tensor if sliced else numel
        data = degree(world_size, tensor)
        divided = [data if stage >= least else 1 for least in (3, 2, 1)]
        return sum(mine * size / parts for size, parts in zip((2, 2, 12), divided, strict=True))

    return state_bytes


def _all_divided(stage, numel, world_size, tensor):
    """Wrong: every stage divides everything."""
    return 16 * numel / world_size


GRID = FunctionExercise(
    title="Count states in a grid of ranks",
    solution=_state_bytes,
    tolerance=1e-12,
    cases=lambda rng: [
        (stage, numel, world, tensor)
        for numel, world, tensor in (
            (8_000_000, 8, 4),
            (1_000_000, 64, 8),
            (640, 4, 1),
            (640, 4, 4),
            (4096 * int(rng.integers(1, 9)), 16, 2),
        )
        for stage in range(4)
    ],
    wrong={
        "all ranks": Wrong(
            _with(lambda world, tensor: world),
            "You sharded over all ranks. ZeRO shards over the data-parallel group: the ranks with "
            "the same slice. The others have other parameters.",
        ),
        "not sliced": Wrong(
            _with(lambda world, tensor: world // tensor, sliced=False),
            "The degree is right, but each rank has only its slice of the model to begin with: "
            "numel / tensor parameters.",
        ),
        "sharded over the slices": Wrong(
            _with(lambda world, tensor: tensor),
            "You sharded over the tensor-parallel group. Its ranks have different parameters, and "
            "there is nothing twice.",
        ),
        "all ranks, whole model": Wrong(
            _with(lambda world, tensor: world, sliced=False),
            "You left tensor parallelism out. It cuts the model into slices first; ZeRO shards a "
            "slice over the ranks that share it.",
        ),
        "every stage": Wrong(
            _all_divided,
            "That is right at stage 3. At the lower stages part of the states stays whole within "
            "the data-parallel group.",
        ),
    },
    hints=(
        "How many parameters has a rank's slice? How many ranks have the same slice?",
        "numel // tensor parameters, shared by world_size // tensor ranks.",
        "2, 2 and 12 bytes for parameters, gradients and optimizer states; stage 1 divides the "
        "last by world_size // tensor, stage 2 the last two, stage 3 all.",
    ),
)


EXERCISES = {
    "08-a": BLOCK,
    "08-b": RECOMPUTE,
    "08-c": REPORTS,
    "08-d": HOLDERS,
    "08-e": GRID,
}
"""By key: the notebook's number and a letter."""
