"""Exercises of notebook 10: what all ranks must call, a run that ends, one file, whose files."""

from zero_nb.learn.exercise import FunctionExercise, ValueExercise, Wrong
from zero_nb.learn.limits import NotYet
from zero_nb.learn.predict import Mistake, Prediction

__all__ = ["EXERCISES", "PREDICTIONS"]


PREDICTIONS = {
    # 16Ψ/W + 8u with 4 equal layers on 4 ranks: 25 MB, less what is not reduced yet.
    "10-p": Prediction(
        title="Predict the peak of one process at stage 3",
        unit=" MB",
        within=2.0,
        low=0.0,
        high=500.0,
        mistakes=(
            Mistake(
                16.8,
                "That is what is held: 16 bytes for a quarter of the parameters. To compute, a "
                "layer has to be whole, and its gradient too.",
            ),
            Mistake(
                67.2,
                "That is stage 0: 16 bytes for every parameter. Stage 3 divides all of it by 4.",
            ),
            Mistake(
                12.6,
                "You left the gradients out: 12 bytes a parameter, and what is borrowed comes on "
                "top.",
            ),
            Mistake(
                21.0,
                "You added the gathered layer. In backward its whole gradient is there as well.",
            ),
        ),
        close="Close: all shards, one gathered layer, and its gradient.",
        advice="Add what is held, one gathered layer, and the gradient of that layer.",
    )
}
TRUTH = {"10-p": 24.165376}


# ------------------------------------------------------------------- 10-b: calls of every rank


class _Case:
    """A world size, a loss to be found, and the best one so far."""

    def __init__(self, world_size, loss, best):
        self.world_size, self.loss, self.best = world_size, loss, best


def _finish(rank, best, evaluate, save, say):
    """The solution: what talks to other ranks is called by every rank."""
    loss = evaluate()
    if loss < best:
        save()
    if rank == 0:
        say(loss)


def _evaluate_alone(rank, best, evaluate, save, say):
    """Wrong: rank 0 does everything."""
    if rank == 0:
        loss = evaluate()
        if loss < best:
            save()
        say(loss)


def _save_alone(rank, best, evaluate, save, say):
    """Wrong: rank 0 saves."""
    loss = evaluate()
    if rank == 0:
        if loss < best:
            save()
        say(loss)


def _all_say(rank, best, evaluate, save, say):
    """Wrong: every rank says the same."""
    loss = evaluate()
    if loss < best:
        save()
    say(loss)


def _always_save(rank, best, evaluate, save, say):
    """Wrong: saves whatever the loss is."""
    loss = evaluate()
    save()
    if rank == 0:
        say(loss)


def _try_finish(function, case):
    """Call the function as every rank in turn; write down what each one did."""
    calls, said = {}, []
    for rank in range(case.world_size):
        mine = calls[f"collectives of rank {rank}"] = []

        def evaluate(mine=mine):
            mine.append("evaluate")
            if len(mine) > 100:
                raise NotYet("evaluate is called again and again")
            return case.loss

        function(
            rank,
            case.best,
            evaluate,
            lambda mine=mine: mine.append("save"),
            lambda *words, rank=rank: said.append([rank, *map(str, words)]),
        )
    return calls | {"said, by rank": said}


FINISH = FunctionExercise(
    title="Evaluate and save where all ranks take part",
    core=True,
    solution=_finish,
    cases=lambda rng: [
        (_Case(world_size, loss, best),)
        for world_size in (1, 3, 4)
        for loss, best in ((0.5, 0.75), (0.75, 0.5), (float(rng.integers(1, 9)), 5.0))
    ],
    trial=_try_finish,
    wrong={
        "rank 0 does it all": Wrong(
            _evaluate_alone,
            "Only rank 0 calls evaluate and save. Both talk to all ranks: with stage 3 the others "
            "own most of the parameters, and they are not there to send them.",
        ),
        "rank 0 saves": Wrong(
            _save_alone,
            "Only rank 0 calls save. Each rank has to write its own shard, or send it; who writes "
            "is decided inside save.",
        ),
        "all say it": Wrong(
            _all_say,
            "The calls are right, and the loss is said once by every rank. Saying talks to nobody: "
            "let rank 0 do it.",
        ),
        "always saved": Wrong(
            _always_save,
            "You save even when the loss is not below best.",
        ),
    },
    hints=(
        "Two of the three functions talk to other ranks. Which one does not?",
        "What talks to others stands outside of `if rank == 0`.",
        "loss = evaluate(); if loss < best: save(); if rank == 0: say(loss).",
    ),
)


# ------------------------------------------------------------- 10-a: rank 0 evaluates alone

ALONE = ValueExercise(
    title="Predict what happens when rank 0 evaluates alone",
    core=True,
    solution={"rank 0": "gather", "other ranks": "end", "printed": "nothing"},
    options=("gather", "reduce", "compute", "end", "the loss", "a wrong loss", "nothing"),
    wrong={
        "it works": Wrong(
            {"rank 0": "compute", "other ranks": "end", "printed": "the loss"},
            "Rank 0 has a quarter of every layer. Before it can compute the first one, it needs "
            "the rest of it: who has that?",
        ),
        "all gather": Wrong(
            {"rank 0": "gather", "other ranks": "gather", "printed": "the loss"},
            "Read the condition again. Ranks 1 to 3 jump over the call; what is next for them?",
        ),
        "a quarter": Wrong(
            {"rank 0": "compute", "other ranks": "end", "printed": "a wrong loss"},
            "A layer of which three quarters are missing cannot compute at all. What does rank 0 "
            "do first?",
        ),
        "averaging": Wrong(
            {"rank 0": "reduce", "other ranks": "end", "printed": "nothing"},
            "The mean of losses comes at the end of an evaluation. What does stage 3 need before "
            "the first layer?",
        ),
    },
    hints=(
        "The condition is true on one rank only. Follow one of the others first.",
        "The others skip the call and come to the end of the program. Rank 0 begins with layer 0.",
        "Rank 0 waits in the gather of layer 0, so nothing is printed.",
    ),
)


# ------------------------------------------------------------------------------ 10-c: one file

ONE_FILE = ValueExercise(
    title="Count what one file costs one rank",
    solution=90.0,
    within=1.0,
    wrong={
        "a shard": Wrong(
            1.40625,
            "That is what a rank holds of them: 12Ψ/64. One file needs the shards of all ranks in "
            "one place.",
        ),
        "weights only": Wrong(
            30.0,
            "That is the weights: 4 bytes a parameter. The two moments are to be saved as well.",
        ),
        "with gradients": Wrong(
            120.0,
            "You counted the gradients too. They are not part of a checkpoint: after the step "
            "they are gone.",
        ),
        "moments only": Wrong(
            60.0,
            "Those are the two moments. The weights are to be saved as well.",
        ),
    },
    hints=(
        "What has to be saved to go on training? Count bytes a parameter, in float32.",
        "A weight and Adam's two moments, 4 bytes each. And rank 0 has all of it, not a shard.",
        "12 bytes times 7.5 billion, in GB.",
    ),
)


# -------------------------------------------------------------------------- 10-d: whose files


def _files(numel, saved, loading, rank):
    """The solution: where the new shard begins and ends, in old shards."""
    old, new = -(-numel // saved), -(-numel // loading)
    start, stop = rank * new, min((rank + 1) * new, numel)
    return [i for i in range(saved) if max(start, i * old) < min(stop, (i + 1) * old)]


def _same_number(numel, saved, loading, rank):
    """Wrong: the file with one's own number."""
    return [rank]


def _all_files(numel, saved, loading, rank):
    """Wrong: everything."""
    return list(range(saved))


def _one_too_many(numel, saved, loading, rank):
    """Wrong: a shard that only touches counts."""
    old, new = -(-numel // saved), -(-numel // loading)
    start, stop = rank * new, min((rank + 1) * new, numel)
    return [i for i in range(saved) if max(start, i * old) <= min(stop, (i + 1) * old)]


def _without_padding(numel, saved, loading, rank):
    """Wrong: shard sizes rounded down."""
    old, new = max(1, numel // saved), max(1, numel // loading)
    start, stop = rank * new, min((rank + 1) * new, numel)
    return [i for i in range(saved) if max(start, i * old) < min(stop, (i + 1) * old)]


FILES = FunctionExercise(
    title="Find whose files a rank must read",
    solution=_files,
    cases=lambda rng: [
        (numel, saved, loading, rank)
        for numel, saved, loading in (
            (12, 4, 3),
            (10, 4, 3),
            (5, 3, 4),
            (7, 1, 3),
            (int(rng.integers(30, 90)), 4, 3),
            (int(rng.integers(30, 90)), int(rng.integers(2, 7)), int(rng.integers(2, 7))),
        )
        for rank in range(loading)
    ],
    wrong={
        "same number": Wrong(
            _same_number,
            "You read the file with the rank's own number. With another number of ranks, shards "
            "begin and end elsewhere.",
        ),
        "all files": Wrong(
            _all_files,
            "You read everything. It works, but a rank only needs the shards that overlap its own.",
        ),
        "one too many": Wrong(
            _one_too_many,
            "A shard that ends where yours begins has nothing for you. Compare with <, not <=.",
        ),
        "rounded down": Wrong(
            _without_padding,
            "You rounded numel / W down. Shards are rounded up, and the last one has padding.",
        ),
    },
    hints=(
        "Write down the first and the last element of the new shard. In which old shards are they?",
        "Old shards have ceil(numel / saved) elements, new ones ceil(numel / loading); the last "
        "real element is numel - 1.",
        "File i is needed if max(start, i * old) < min(stop, (i + 1) * old).",
    ),
)

EXERCISES = {"10-a": ALONE, "10-b": FINISH, "10-c": ONE_FILE, "10-d": FILES}
"""By key: the notebook's number and a letter."""
