"""Exercises of notebook 12: who owns a row, what is kept, what is sent, where to divide, names."""

from zero_nb.learn.exercise import FunctionExercise, ValueExercise, Wrong
from zero_nb.learn.predict import Mistake, Prediction

__all__ = ["EXERCISES", "PREDICTIONS", "TRUTH"]


TRUTH = {"12-p": 100 * 1073 / 1710}

PREDICTIONS = {
    # torch's ZeroRedundancyOptimizer on an MLP 13-37-29-3, four ranks: whole tensors.
    "12-p": Prediction(
        title="Predict the fullest share under whole tensors",
        unit=" %",
        within=1.0,
        low=0.0,
        high=100.0,
        mistakes=(
            Mistake(
                25.0,
                "That would be equal slices. Whole tensors cannot be divided, and one of them is "
                "more than half of the model.",
            ),
            Mistake(
                100 / 6,
                "Six tensors are not six equal parts: count their elements.",
            ),
            Mistake(
                100.0,
                "One rank does not get everything: the next tensor goes to the rank with the "
                "least so far.",
            ),
            Mistake(
                50.0,
                "Not even two ranks can share the largest tensor. How much of the model is it?",
            ),
        ),
        close="Right: the largest tensor alone is the fullest rank's share.",
        advice="Which tensor is the largest, and what part of all elements is it?",
    )
}


# ------------------------------------------------------------------------ 12-a: cut by rows


def _rows(rows, world_size):
    """The solution: chunks of ceil(rows / W) until there are no more."""
    each = -(-rows // world_size)
    return [max(0, min(each, rows - rank * each)) for rank in range(world_size)]


def _balanced(rows, world_size):
    """Wrong here: as equal as possible."""
    small, more = divmod(rows, world_size)
    return [small + (rank < more) for rank in range(world_size)]


def _rest_to_the_last(rows, world_size):
    """Wrong: rounded down, and the last rank takes what is left."""
    small = rows // world_size
    return [small] * (world_size - 1) + [rows - small * (world_size - 1)]


def _with_padding(rows, world_size):
    """Wrong: padding counted as rows."""
    return [-(-rows // world_size)] * world_size


def _below_zero(rows, world_size):
    """Wrong: ranks after the last row get a negative number."""
    each = -(-rows // world_size)
    return [min(each, rows - rank * each) for rank in range(world_size)]


ROWS = FunctionExercise(
    title="Cut a tensor by its rows",
    core=True,
    solution=_rows,
    cases=lambda rng: [
        (37, 4),
        (3, 4),
        (9, 4),
        (8, 4),
        (5, 1),
        (2, 7),
        (int(rng.integers(20, 60)) * 7 + 3, 7),
    ],
    wrong={
        "balanced": Wrong(
            _balanced,
            "You made the parts as equal as possible. `torch.chunk` gives the first ranks "
            "ceil(rows / W) rows each, and later ranks what is left.",
        ),
        "rest to the last": Wrong(
            _rest_to_the_last,
            "You rounded down and gave the rest to the last rank. Round up; the last ranks get "
            "less, or nothing.",
        ),
        "padding counted": Wrong(
            _with_padding,
            "You counted padding as rows. The numbers have to add up to the rows there are.",
        ),
        "below zero": Wrong(
            _below_zero,
            "A rank behind the last row has no rows: 0, not a negative number.",
        ),
    },
    hints=(
        "All ranks but the last ones get the same number of rows: rows / W, rounded up.",
        "Rank r begins at row r * each. How many rows are left from there?",
        "min(each, rows - rank * each), but never below 0, for each rank in a list.",
    ),
)


# -------------------------------------------------------------- 12-b: bytes between two steps


def _held(name, world_size):
    """The solution: bytes a parameter that a rank holds between two steps, Adam, bf16 compute."""
    whole, sharded = {
        "DeepSpeed stage 2": (2, 4 + 8),
        "DeepSpeed stage 3": (0, 2 + 4 + 8),
        "FSDP2": (0, 4 + 8),
        "SHARD_GRAD_OP": (0, 4 + 8),
    }[name]
    return whole + sharded / world_size


def _names_are_stages(name, world_size):
    """Wrong: SHARD_GRAD_OP taken for stage 2."""
    if name == "SHARD_GRAD_OP":
        return 4 + 8 / world_size
    return _held(name, world_size)


def _no_shard_beside_master(name, world_size):
    """Wrong: DeepSpeed's 16-bit shard forgotten."""
    if name == "DeepSpeed stage 3":
        return 12 / world_size
    return _held(name, world_size)


def _paper(name, world_size):
    """Wrong: the paper's 16 bytes, with gradients."""
    if name == "DeepSpeed stage 2":
        return 2 + 14 / world_size
    return 16 / world_size


def _master_beside_shard(name, world_size):
    """Wrong: FSDP given a 16-bit shard as well."""
    if name in ("FSDP2", "SHARD_GRAD_OP"):
        return 14 / world_size
    return _held(name, world_size)


_FOUR = ("DeepSpeed stage 2", "DeepSpeed stage 3", "FSDP2", "SHARD_GRAD_OP")

HELD = FunctionExercise(
    title="Count bytes between two steps",
    core=True,
    solution=_held,
    cases=lambda rng: [
        (name, world_size) for name in _FOUR for world_size in (2, 4, int(rng.integers(8, 65)))
    ],
    tolerance=1e-12,
    wrong={
        "names are stages": Wrong(
            _names_are_stages,
            "You kept the parameters whole under SHARD_GRAD_OP, as stage 2 does. FSDP shards them "
            "between the steps.",
        ),
        "no shard beside the master": Wrong(
            _no_shard_beside_master,
            "DeepSpeed's stage 3 keeps a 16-bit shard of the parameters beside the float32 master.",
        ),
        "the paper's sum": Wrong(
            _paper,
            "Those are the paper's numbers, with gradients. Between two steps there are none.",
        ),
        "FSDP with two copies": Wrong(
            _master_beside_shard,
            "FSDP keeps one copy of the parameters, in float32. It makes the 16-bit one when it "
            "gathers.",
        ),
    },
    hints=(
        "Ask for each: which copies of a parameter are there, in how many bytes, whole or cut?",
        "Adam's moments are 8 bytes and cut everywhere. DeepSpeed adds a float32 master, cut.",
        "2 + 12/W; 14/W; 12/W; 12/W.",
    ),
)


# ---------------------------------------------------------------------- 12-c: what is sent


def _sent(name, micro_batches):
    """The solution: what a rank sends in a step, in units of Ψ(W−1)/W."""
    return {
        "stage 2": micro_batches + 1,
        "DeepSpeed stage 2": 2 * micro_batches + 1,
        "SHARD_GRAD_OP": 2 * micro_batches,
        "FULL_SHARD": 3 * micro_batches,
    }[name]


def _one_gather(name, micro_batches):
    """Wrong: SHARD_GRAD_OP taken for stage 2."""
    return micro_batches + 1 if name == "SHARD_GRAD_OP" else _sent(name, micro_batches)


def _reduce_scatter(name, micro_batches):
    """Wrong: DeepSpeed's buckets thought to be reduce-scattered."""
    return micro_batches + 1 if name == "DeepSpeed stage 2" else _sent(name, micro_batches)


def _once(name, micro_batches):
    """Wrong: micro-batches left out for the FSDP modes."""
    return _sent(name, 1) if name in ("SHARD_GRAD_OP", "FULL_SHARD") else _sent(name, micro_batches)


SENT = FunctionExercise(
    title="Count what a step of m micro-batches sends",
    solution=_sent,
    cases=lambda rng: [
        (name, m)
        for name in ("stage 2", "DeepSpeed stage 2", "SHARD_GRAD_OP", "FULL_SHARD")
        for m in (1, 2, 4, int(rng.integers(5, 40)))
    ],
    wrong={
        "one gather": Wrong(
            _one_gather,
            "SHARD_GRAD_OP shards parameters after every backward. So each micro-batch gathers "
            "them again.",
        ),
        "reduce-scatter": Wrong(
            _reduce_scatter,
            "DeepSpeed's stages 1 and 2 all-reduce a bucket: twice the traffic of a "
            "reduce-scatter.",
        ),
        "once": Wrong(
            _once,
            "Each micro-batch has a forward and a backward pass of its own, with its own gathers "
            "and its own reduction.",
        ),
    },
    hints=(
        "Count the gathers and the reductions of one micro-batch, and what the step adds.",
        "An all-reduce counts 2, a reduce-scatter 1, an all-gather 1.",
        "m + 1; 2m + 1; 2m; 3m.",
    ),
)


# --------------------------------------------------------------------- 12-d: where to divide

_DIVISION = {
    "large, after": "overflow",
    "large, before": "right",
    "large, both": "right",
    "small, after": "right",
    "small, before": "underflow",
    "small, both": "right",
}


def _but(**changed):
    """The answers with some of them changed."""
    return _DIVISION | {key.replace("_", ", "): word for key, word in changed.items()}


DIVIDE = ValueExercise(
    title="Say where a mean in 16 bits goes wrong",
    solution=_DIVISION,
    options=("right", "overflow", "underflow"),
    wrong={
        "turned round": Wrong(
            _but(large_after="underflow", small_before="overflow"),
            "You have the two words turned round. Which one means too large to be written?",
        ),
        "order does not matter": Wrong(
            dict.fromkeys(_DIVISION, "right"),
            "On paper the order does not matter. In fp16 the largest number is 65,504, and the "
            "smallest above 0 is 2⁻²⁴.",
        ),
        "both is in between": Wrong(
            _but(large_both="overflow", small_both="underflow"),
            "Compute both: 8,192 / 4, added 16 times, is 32,768. And 2⁻²¹ / 4 is 2⁻²³.",
        ),
        "turned places": Wrong(
            _but(large_after="right", large_before="overflow", small_after="underflow",
                 small_before="right"),
            "Dividing before makes numbers smaller: that helps the large ones, not the small ones.",
        ),
    },
    hints=(
        "Follow one number: 8,192 on 16 ranks, added first, divided later.",
        "fp16 ends at 65,504, and knows nothing between 0 and 2⁻²⁴.",
        "Added first, 16 times 8,192 is too large; divided first, 2⁻²⁵ becomes 0.",
    ),
)  # fmt: skip


# ------------------------------------------------------------------ 12-e: names and stages

_STAGES = {"A": 2, "B": 3, "C": 1, "D": 1, "E": 3, "F": 0}

CARDS = ValueExercise(
    title="Name the stage by what is sharded between the steps",
    solution=_STAGES,
    wrong={
        "SHARD_GRAD_OP is stage 2": Wrong(
            _STAGES | {"B": 2},
            "B: gradients and optimizer states are sharded, as its name says. And what about the "
            "parameters, between the steps?",
        ),
        "keeping is stage 2": Wrong(
            _STAGES | {"B": 2, "E": 2},
            "B and E keep parameters gathered *within* a step. The question is what is sharded "
            "between the steps.",
        ),
        "Megatron is more": Wrong(
            _STAGES | {"C": 2},
            "C: Megatron's distributed optimizer shards the optimizer's part. Its float32 "
            "gradients stay whole.",
        ),
        "no stage 1 in torch": Wrong(
            _STAGES | {"D": 0},
            "D is not a part of FSDP, but it does shard the optimizer states: whole tensors of "
            "them.",
        ),
        "FSDP is always 3": Wrong(
            _STAGES | {"F": 3},
            "F: read the strategy. It shards nothing.",
        ),
    },
    hints=(
        "For each card: are parameters sharded between the steps? Then it is stage 3.",
        "If not: are gradients sharded? Then 2. Only optimizer states? Then 1.",
        "Two cards are stage 3, two are stage 1.",
    ),
)


EXERCISES = {"12-a": ROWS, "12-b": HELD, "12-c": SENT, "12-d": DIVIDE, "12-e": CARDS}
"""By key: the notebook's number and a letter."""
