"""Exercises of notebook 06: gather, use, drop; size of a unit; what stage 3 is not; keeping."""

import numpy as np

from zero_nb.cluster.simulated import SimulatedWorld
from zero_nb.learn.exercise import FunctionExercise, ValueExercise, Wrong
from zero_nb.learn.limits import NotYet
from zero_nb.learn.predict import Mistake, Prediction

__all__ = ["EXERCISES", "PREDICTIONS", "LoneUnit", "lone_units"]


PREDICTIONS = {
    # An MLP with one layer of more than half of all parameters: 285,860 of 1,009,024 bytes.
    "06-p": Prediction(
        title="Predict the peak on 32 ranks",
        unit=" %",
        within=5.0,
        low=0.0,
        high=100.0,
        mistakes=(
            Mistake(
                3.125,
                "That is 1/32: what is held between the steps. To compute with its largest layer, "
                "a rank needs all of that layer, however many ranks there are.",
            ),
            Mistake(
                50.0,
                "The layer is half of the parameters, but not half of the bytes: its optimizer "
                "states stay sharded while it is gathered.",
            ),
            Mistake(
                12.5,
                "You counted the gathered parameters of the large layer. Its gradient is whole, "
                "too, until it is reduced.",
            ),
        ),
        close="Close: one gathered layer and its gradient are there, however many ranks share.",
        advice="What has to be whole at the moment when the largest layer computes backward?",
    )
}


# ------------------------------------------------------------------ 06-a: gather, use, drop


class LoneUnit:
    """A layer whose parameters are sharded: multiplies its input, element by element.

    Parameters
    ----------
    number : int
    world : World
    param_F : ndarray, (F,) float32
    count : dict
        Shared by all units of a model: how many are gathered now, and at most.

    Attributes
    ----------
    shard : ndarray (R, S)
        Each rank's own part of the parameters, the only copy there is.
    full : ndarray (R, F) or None
        The gathered parameters.
    grad : ndarray (R, S) or None
        Each rank's part of the summed gradient.
    """

    def __init__(self, number, world, param_F, count):
        self._number, self._count = number, count
        full_RF = np.repeat(param_F[None], world.size, axis=0)
        self._shard = world.own_shard(full_RF).copy()
        self._full = self._x = self.grad = None

    @property
    def shard(self):
        """The ranks' own parts."""
        if self._shard is None:
            raise NotYet(
                f"the shard of unit {self._number} was given away; it was the only copy of these "
                "parameters"
            )
        return self._shard

    @shard.setter
    def shard(self, array):
        self._shard = array

    @property
    def full(self):
        """The gathered parameters, or None."""
        return self._full

    @full.setter
    def full(self, array):
        self._count["now"] += (array is not None) - (self._full is not None)
        self._count["most"] = max(self._count["most"], self._count["now"])
        self._full = array

    def _gathered(self, when):
        """The gathered parameters; a sentence if there are none."""
        size = self._shard.shape if self._shard is not None else None
        if self._full is None:
            raise NotYet(
                f"unit {self._number} computes {when} without its parameters; gather them into "
                "unit.full first"
            )
        if size and np.shape(self._full) != (size[0], size[0] * size[1]):
            raise NotYet(
                f"unit.full of unit {self._number} has shape {np.shape(self._full)}; gathered "
                f"parameters have shape {(size[0], size[0] * size[1])}"
            )
        return self._full

    def forward(self, x_RF):
        """Return the layer's output, (R, F), and keep its input for backward."""
        self._x = x_RF
        return x_RF * self._gathered("forward")

    def backward(self, dy_RF):
        """Return the gradients of the input and of the parameters, both (R, F)."""
        if self._x is None:
            raise NotYet(f"unit {self._number} goes backward before it went forward")
        return dy_RF * self._gathered("backward"), dy_RF * self._x


def lone_units(world, params):
    """Return one `LoneUnit` for each array, and the count that they share.

    Parameters
    ----------
    world : World
    params : sequence of ndarray, each (F,)

    Returns
    -------
    units : list of LoneUnit
    count : dict
        ``now`` and ``most``: units gathered.
    """
    count = {"now": 0, "most": 0}
    return [LoneUnit(i, world, param, count) for i, param in enumerate(params)], count


def _pass(units, x, world):
    """The solution."""
    for unit in units:
        unit.full = world.all_gather(unit.shard)
        x = unit.forward(x)
        unit.full = None
    dy = x
    for unit in reversed(units):
        unit.full = world.all_gather(unit.shard)
        dy, grad = unit.backward(dy)
        unit.full = None
        unit.grad = world.reduce_scatter(grad)
    return dy


def _variant(*, drop=True, gather_again=True, drop_last=True, lose_shard=False, reduce=True):
    """A pass in which something is left out."""

    def stage_3_pass(units, x, world):
        for unit in units:
            unit.full = world.all_gather(unit.shard)
            x = unit.forward(x)
            if drop:
                unit.full = None
            if lose_shard:
                unit.shard = None
        dy = x
        for unit in reversed(units):
            if gather_again:
                unit.full = world.all_gather(unit.shard)
            dy, grad = unit.backward(dy)
            if drop_last:
                unit.full = None
            unit.grad = world.reduce_scatter(grad) if reduce else world.all_reduce(grad)
        return dy

    return stage_3_pass


class _Case:
    """A world size, parameters of some units, and an input."""

    def __init__(self, world_size, params, x_RF):
        self.world_size, self.params, self.x_RF = world_size, params, x_RF


def _try_pass(function, case):
    """Run one pass; say what came out, what was gathered at one time, and what was sent."""
    world = SimulatedWorld(case.world_size)
    units, count = lone_units(world, case.params)
    dy = function(units, case.x_RF.copy(), world)
    if dy is None:
        raise NotYet("the pass returned None; return the gradient of the input, the last dy")
    if any(unit.grad is None for unit in units):
        raise NotYet("not every unit has a gradient; put each rank's shard of the sum in unit.grad")
    return {
        "the gradient of the input": dy,
        **{f"the gradient of unit {i}": unit.grad for i, unit in enumerate(units)},
        "the number of units gathered at one time": count["most"],
        "the number of units left gathered": count["now"],
        "the number of elements sent": world.log.elements_sent(),
    }


def _pass_cases(rng):
    """Small whole numbers, so that every product and sum is exact."""
    cases = []
    for size, shard, units in ((3, 2, 3), (4, 1, 2), (1, 3, 3), (2, int(rng.integers(1, 4)), 4)):
        numel = size * shard
        params = [rng.integers(-3, 4, numel).astype(np.float32) for _ in range(units)]
        cases.append((_Case(size, params, rng.integers(-3, 4, (size, numel)).astype(np.float32)),))
    return cases


PASS = FunctionExercise(
    title="Gather, use, drop: one pass of stage 3",
    core=True,
    solution=_pass,
    cases=_pass_cases,
    trial=_try_pass,
    wrong={
        "kept after forward": Wrong(
            _variant(drop=False),
            "You kept the gathered parameters after forward: at the turn all units are there, the "
            "whole model. Drop each one after its use, and gather it again for backward.",
        ),
        "kept, not gathered again": Wrong(
            _variant(drop=False, gather_again=False),
            "You kept what forward gathered and used it again. That sends less, but the whole "
            "model is there at the turn: it is exercise 06-d, not stage 3.",
        ),
        "no gather in backward": Wrong(
            _variant(gather_again=False),
            "You dropped the parameters after forward and did not gather them again. Backward "
            "needs them, too: the gradient of a layer's input depends on its weights.",
        ),
        "not dropped in backward": Wrong(
            _variant(drop_last=False),
            "You did not drop the parameters after backward. At the end of the pass the whole "
            "model is gathered, and after the update it is out of date.",
        ),
        "own shard freed": Wrong(
            _variant(lose_shard=True),
            "You gave the own shard away. unit.full is a borrowed copy and may go; unit.shard is "
            "the only copy of its part anywhere.",
        ),
        "gradient kept whole": Wrong(
            _variant(reduce=False),
            "Every rank keeps the whole gradient. Stage 3 is stage 2 as well: the owner gets its "
            "shard, by world.reduce_scatter(grad).",
        ),
    },
    hints=(
        "Two loops: forward over units, backward over reversed(units). In each, a unit is "
        "gathered, used and dropped before the next one comes.",
        "Gather with unit.full = world.all_gather(unit.shard), drop with unit.full = None. "
        "Backward begins with dy = x, the output.",
        "In the second loop: gather, dy, grad = unit.backward(dy), drop, and then "
        "unit.grad = world.reduce_scatter(grad). Return dy.",
    ),
)


# -------------------------------------------------------------------------- 06-b: size of a unit


def _largest_unit(numel, world_size, budget):
    """The solution: what is left beside the shards, at eight bytes an element."""
    left = budget - 16 * numel // world_size
    return max(0, min(numel, left // 8))


def _forward_only(numel, world_size, budget):
    """Wrong: the gathered unit without its gradient."""
    return max(0, min(numel, (budget - 16 * numel // world_size) // 4))


def _no_states(numel, world_size, budget):
    """Wrong: nothing but the unit."""
    return max(0, min(numel, budget // 8))


def _unsharded_states(numel, world_size, budget):
    """Wrong: states counted as if they were whole."""
    return max(0, min(numel, (budget - 16 * numel) // 8))


def _negative(numel, world_size, budget):
    """Wrong: below zero where nothing fits."""
    return min(numel, (budget - 16 * numel // world_size) // 8)


def _beyond_model(numel, world_size, budget):
    """Wrong: larger than the model."""
    return max(0, (budget - 16 * numel // world_size) // 8)


UNIT = FunctionExercise(
    title="Choose the size of a unit under a budget",
    core=True,
    solution=_largest_unit,
    cases=lambda rng: [
        (1000, 4, 6000),
        (1000, 4, 4800),
        (1000, 4, 3000),
        (1000, 10, 50_000),
        (64 * int(rng.integers(20, 90)), 8, 20_000),
        (64 * int(rng.integers(20, 90)), 16, 7000),
    ],
    wrong={
        "without the gradient": Wrong(
            _forward_only,
            "That is enough for forward. In backward the unit's gradient is whole, too, until it "
            "is reduced: 4 bytes more an element.",
        ),
        "without the states": Wrong(
            _no_states,
            "You spent the whole budget on the unit. The rank also holds its shard of all model "
            "states, 16Ψ/W bytes.",
        ),
        "whole states": Wrong(
            _unsharded_states,
            "At stage 3 all states are sharded: they take 16Ψ/W bytes, not 16Ψ.",
        ),
        "below zero": Wrong(
            _negative,
            "Where not even the shards fit, no unit fits: return 0, not a number below it.",
        ),
        "beyond the model": Wrong(
            _beyond_model,
            "A unit cannot be larger than the model: at most numel.",
        ),
    },
    hints=(
        "Take the shards off the budget first. How many bytes a parameter, for a rank?",
        "16 * numel // world_size bytes are held. What is left goes to one unit and its gradient.",
        "An element of the unit takes 4 + 4 bytes: left // 8, within 0 and numel.",
    ),
)


# --------------------------------------------------------------------- 06-c: what stage 3 is not

_CARDS = {
    "A": "stage 3",
    "B": "tensor",
    "C": "stage 3",
    "D": "tensor",
    "E": "tensor",
    "F": "stage 3",
}


def _turned(letters="ABCDEF"):
    """The cards, some of them put on the other pile."""
    other = {"stage 3": "tensor", "tensor": "stage 3"}
    return {card: other[pile] if card in letters else pile for card, pile in _CARDS.items()}


CARDS = ValueExercise(
    title="Tell stage 3 from tensor parallelism",
    solution=_CARDS,
    options=("stage 3", "tensor"),
    wrong={
        "turned round": Wrong(
            _turned(),
            "All six are on the other pile. Stage 3 shards what is *kept*; tensor parallelism "
            "splits what is *computed*.",
        ),
        "all stage 3": Wrong(
            dict.fromkeys(_CARDS, "stage 3"),
            "Some of the six cannot be true of data parallelism, and stage 3 is data parallelism.",
        ),
        "what travels": Wrong(
            _turned("CD"),
            "Only what travels is turned round. At stage 3 parameters come to the samples; in "
            "tensor parallelism activations go to the weights.",
        ),
    },
    hints=(
        "Ask for each card: would it be true of plain data parallelism, where all is whole?",
        "At stage 3 a rank computes whole layers on its own samples, with borrowed parameters.",
        "Three cards belong to each pile. C, what travels are parameters, is stage 3.",
    ),
)


# ---------------------------------------------------------------------- 06-d: keep what you have

KEEP = ValueExercise(
    title="Predict what keeping costs and saves",
    solution={"sent": 2, "gathered": 1},
    within=0.05,
    wrong={
        "nothing saved": Wrong(
            {"sent": 3, "gathered": 1},
            "Count the gathers again: parameters that were kept are not gathered for backward.",
        ),
        "nothing kept": Wrong(
            {"sent": 2, "gathered": 0.125},
            "The traffic is right. But at the turn, after the last forward and before the first "
            "backward, which units are gathered?",
        ),
        "stage 3 as it is": Wrong(
            {"sent": 3, "gathered": 0.125},
            "That is stage 3 as it was. What is different when each unit stays after its forward?",
        ),
        "a shard": Wrong(
            {"sent": 2, "gathered": 0.25},
            "A quarter is the rank's own shard. The question is what is gathered at the turn.",
        ),
    },
    hints=(
        "Without keeping: a gather for forward, a gather for backward, a reduction. Which one is "
        "not needed now?",
        "At the turn every unit has been gathered by its forward, and none has been dropped.",
        "One gather and one reduction are sent. At the turn the whole model is gathered.",
    ),
)


EXERCISES = {"06-a": PASS, "06-b": UNIT, "06-c": CARDS, "06-d": KEEP}
"""By key: the notebook's number and a letter."""
