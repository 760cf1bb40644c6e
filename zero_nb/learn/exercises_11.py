"""Exercises of notebook 11: the paper's table, and six cases to plan.

The answer to a case is structured: stage, W, what binds, and the GB that are left, within 2 %. The
tests ask the planner for all of them.
"""

from zero_nb.learn.exercise import FunctionExercise, ValueExercise, Wrong
from zero_nb.learn.predict import Mistake, Prediction

__all__ = ["EXERCISES", "KINDS", "PREDICTIONS"]

KINDS = (
    "param", "grad", "optim", "activation", "logits", "bucket", "unsharded", "context",
    "fragmentation",
)  # fmt: skip
"""What a term of a plan can be called."""


PREDICTIONS = {
    # llama-7b at stage 3, micro-batch 2: 28.0 of 41.4 GB.
    "11-p": Prediction(
        title="Predict what eight times the devices leave",
        unit=" %",
        within=4.0,
        low=0.0,
        high=100.0,
        origin="modelled",
        mistakes=(
            Mistake(
                12.5,
                "That is 8/64, right for the model states at stage 3. What is in a device besides "
                "them, and does it belong to the model or to the batch?",
            ),
            Mistake(
                100.0,
                "The states do become smaller. They are a part of what a device needs.",
            ),
            Mistake(
                50.0,
                "The states fall to an eighth. How much of the device is states, on 8 devices?",
            ),
        ),
        close="Close: the states fall to an eighth, and most of the device is no states.",
        advice="Which terms are divided by the number of devices, and how large are the others?",
    )
}
TRUTH = {"11-p": 67.6}


# ----------------------------------------------------------------------- 11-a: the paper's table


def _state_gb(billions, ranks, stage):
    """The solution: each kind is whole or divided."""
    param, grad, optim = 2 * billions, 2 * billions, 12 * billions
    if stage >= 1:
        optim /= ranks
    if stage >= 2:
        grad /= ranks
    if stage >= 3:
        param /= ranks
    return param + grad + optim


def _all_divided(billions, ranks, stage):
    """Wrong: every stage divides everything."""
    return 16 * billions / (ranks if stage else 1)


def _twelve_in_all(billions, ranks, stage):
    """Wrong: K = 12 is taken for the sum."""
    kinds = ((2, 3), (2, 2), (8, 1))
    return sum(size * billions / (ranks if stage >= first else 1) for size, first in kinds)


def _in_gib(billions, ranks, stage):
    """Wrong: powers of two."""
    return _state_gb(billions, ranks, stage) * 10**9 / 2**30


def _in_another_order(billions, ranks, stage):
    """Wrong: parameters first, optimizer last."""
    kinds = ((2, 1), (2, 2), (12, 3))
    return sum(size * billions / (ranks if stage >= first else 1) for size, first in kinds)


STATES = FunctionExercise(
    title="Recompute the cells of the paper's table",
    core=True,
    solution=_state_gb,
    cases=lambda rng: [
        (billions, ranks, stage)
        for billions, ranks in (
            (7.5, 64),
            (128, 1024),
            (1.5, 1),
            (float(rng.integers(2, 90)), int(rng.integers(2, 600))),
        )
        for stage in range(4)
    ],
    tolerance=1e-9,
    wrong={
        "all divided": Wrong(
            _all_divided,
            "Every stage divides all 16 bytes here. Stage 1 divides the optimizer states only, "
            "stage 2 the gradients too.",
        ),
        "12 in all": Wrong(
            _twelve_in_all,
            "You counted 2 + 2 + 8. K = 12 is the optimizer's part alone: master, mean and mean "
            "square, 4 bytes each.",
        ),
        "GiB": Wrong(
            _in_gib,
            "These are GiB. The paper's GB are 10⁹ bytes, so a billion parameters of 2 bytes are "
            "2 GB.",
        ),
        "order": Wrong(
            _in_another_order,
            "You divided the parameters first. Stage 1 is for the optimizer states, stage 2 adds "
            "the gradients, stage 3 the parameters.",
        ),
    },
    hints=(
        "Three kinds: 2, 2 and 12 bytes a parameter. Which are divided at which stage?",
        "Begin with all three whole, then divide the optimizer from stage 1 on.",
        "optim /= ranks from stage 1, grad from stage 2, param from stage 3; return the sum.",
    ),
)


# ------------------------------------------------------------------------------------- six cases


def _case(title, solution, wrong, hints, *, core=False, words=()):
    """A case: all numbers in GB or whole, right within 2 % of what is left."""
    return ValueExercise(
        title=title,
        core=core,
        solution=solution,
        within=0.02 * solution["left"],
        options=(*KINDS, *words),
        wrong=wrong,
        hints=hints,
    )


_FIND = (
    "Ask plan(...) with the numbers of the case, then read smallest_stage, smallest_world_size, "
    "bytes and left_bytes."
)
_BINDING = "What binds is the largest of plan.bytes: max(p.bytes, key=p.bytes.get)."

PLAIN = _case(
    "Plan a plain case",
    {"stage": 2, "W": 6, "binding": "param", "left": 23.86},
    {
        "stage 3": Wrong(
            {"stage": 3, "W": 4, "binding": "activation", "left": 49.49},
            "Stage 3 fits. A smaller stage fits as well, and sends less.",
        ),
        "devices of the case": Wrong(
            {"stage": 2, "W": 16, "binding": "param", "left": 23.86},
            "W is the smallest number of devices on which this stage still fits, not the number "
            "you have.",
        ),
    },
    (_FIND, _BINDING, "Stage 1 needs 89.9 GB; the next one fits."),
    core=True,
)

GIB = _case(
    "Plan for a device that is sold as 80 GB",
    {"stage": 1, "W": 11, "binding": "activation", "left": 2.91},
    {
        "80e9": Wrong(
            {"stage": 2, "W": 6, "binding": "activation", "left": 11.80},
            "That is a device of 80·10⁹ bytes. This one reports 81,559 MiB, and a MiB is 2²⁰ "
            "bytes.",
        ),
        "left in GiB": Wrong(
            {"stage": 1, "W": 11, "binding": "activation", "left": 2.71},
            "What is left is in GiB here. Give it in GB, 10⁹ bytes.",
        ),
    },
    (
        "How many bytes are 81,559 MiB?",
        "The preset knows: ClusterSpec.of('h100-80gb', 16).device_bytes.",
        _FIND,
    ),
)

TOO_MANY_SAMPLES = _case(
    "Plan a run that no number of devices saves",
    {
        "change": "micro-batch 1, four times",
        "stage": 2,
        "W": 17,
        "binding": "activation",
        "left": 6.01,
    },
    {
        "more devices": Wrong(
            {"change": "512 devices", "stage": 3, "W": 512, "binding": "activation", "left": 0.0},
            "Try it: plan it on 512 devices. What does not fit belongs to each rank's own samples.",
        ),
        "a stage that is there": Wrong(
            {
                "change": "micro-batch 1, four times",
                "stage": 3,
                "W": 7,
                "binding": "activation",
                "left": 20.64,
            },
            "The change is right. With it a smaller stage fits too.",
        ),
    },
    (
        "Look at the largest term as it is. Which of the changes makes it smaller?",
        "Activations belong to samples: fewer samples at a time, more often.",
        "plan(..., micro_batch=1, micro_batches=4, seq=8192).",
    ),
    words=("512 devices", "a fused loss", "micro-batch 1, four times"),
)

TWO_KINDS = _case(
    "Plan a model that is tensor-parallel too",
    {"stage": 2, "W": 16, "binding": "param", "left": 17.24},
    {
        "all devices": Wrong(
            {"stage": 2, "W": 64, "binding": "param", "left": 17.24},
            "64 devices in all, but 4 of them share one replica. How many hold the same quarter of "
            "the model, and so shard its states among them?",
        ),
        "without tensor parallelism": Wrong(
            {"stage": 3, "W": 64, "binding": "activation", "left": 11.62},
            "That is the plan without tensor parallelism. Give the planner tp=4 and "
            "sequence_parallel=True.",
        ),
    },
    (
        "ZeRO shards over the data-parallel group only. How many ranks are in it?",
        "W = 64 / 4; the rest is what the planner says with tp=4.",
        _BINDING,
    ),
)

SLOW = _case(
    "Plan on a slow network",
    {
        "stage": 2,
        "W": 11,
        "binding": "activation",
        "left": 17.25,
        "limit": "network",
        "stage 3 takes": "1.5 times as long",
    },
    {
        "more room": Wrong(
            {
                "stage": 3,
                "W": 5,
                "binding": "activation",
                "left": 44.27,
                "limit": "network",
                "stage 3 takes": "1.5 times as long",
            },
            "Stage 3 leaves more room. On this network, what does the room cost?",
        ),
        "arithmetic": Wrong(
            {
                "stage": 2,
                "W": 11,
                "binding": "activation",
                "left": 17.25,
                "limit": "arithmetic",
                "stage 3 takes": "as long",
            },
            "With a fast network that is so. Compare time.compute_s and time.data_parallel_s here.",
        ),
    },
    (
        "Plan stages 2 and 3 and compare their time: time.limit, time.bound_s.",
        "The network decides, so the time goes with what is sent: 2Ψ or 3Ψ.",
        _FIND,
    ),
    words=("network", "arithmetic", "as long", "1.5 times as long", "3 times as long"),
)

SMALLEST = _case(
    "Find the smallest cluster for 65 billion parameters",
    {"stage": 3, "W": 17, "binding": "optim", "left": 22.54},
    {
        "16 and a bit": Wrong(
            {"stage": 3, "W": 16, "binding": "optim", "left": 22.54},
            "16 devices miss it by 2.3 GB. W is the smallest number on which it fits.",
        ),
        "devices of the case": Wrong(
            {"stage": 3, "W": 24, "binding": "optim", "left": 22.54},
            "24 is the number you have. W is the smallest one that still fits.",
        ),
    },
    (_FIND, _BINDING, "plan(..., stage=3, recompute='full').smallest_world_size"),
)

EXERCISES = {
    "11-a": STATES,
    "11-b": PLAIN,
    "11-c": GIB,
    "11-d": TOO_MANY_SAMPLES,
    "11-e": TWO_KINDS,
    "11-f": SLOW,
    "11-g": SMALLEST,
}
"""By key: the notebook's number and a letter."""
