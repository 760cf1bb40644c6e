"""The four ZeRO stages, side by side: what is sharded, and which collective moves it.

Shape suffixes: R ranks hosted here, F padded flat length of a unit, S = F // world_size.

Every stage has the same verbs, in the order one training step uses them. No stage inherits from
another, so a verb that is forgotten is an error and not silently the one of a lower stage (which
would train to the last bit and only waste memory). Compare two neighbours line by line:
the difference is the paper's section 5.

[Note: partial gradients]
After its backward pass a unit's gradient is partial: row r holds what rank r's own samples
contribute. The mean is already in the loss (divided by the samples of all ranks), so the
reduced gradient is the plain sum over rows.
"""

from abc import ABC, abstractmethod
from typing import ClassVar, final

from zero_nb.config import ZeROStage

__all__ = ["STAGES", "Stage", "ZeROStage0", "ZeROStage1", "ZeROStage2", "ZeROStage3"]


class Stage(ABC):
    """The verbs. A stage holds no state of its own: it moves a unit's arrays through the world.

    Parameters
    ----------
    world : World
    rule : GroupedRule
        Updates what each rank owns.
    buckets : GradientBuckets
        Reduce-scatters gradients as backward produces them, each alone or in buckets.
    """

    number: ClassVar[ZeROStage]

    def __init__(self, world, rule, buckets):
        self.world, self.rule, self.buckets = world, rule, buckets

    @abstractmethod
    def init_unit(self, unit, full_RF):
        """Place the initial float32 parameters (R, F): what each rank keeps of them."""

    @abstractmethod
    def unshard(self, unit):
        """Return the working parameters of the whole unit, (R, F), for computing."""

    @abstractmethod
    def reshard(self, unit):
        """Drop what `unshard` gathered."""

    @abstractmethod
    def post_backward(self, unit, grad_RF):
        """Take the unit's partial float32 gradient (R, F), right after its backward pass."""

    @abstractmethod
    def reduce(self, unit):
        """Finish the gradient at the end of the backward pass."""

    @abstractmethod
    def step(self, unit, grad_scale):
        """Update the parameters from the reduced gradient, and make them whole again."""


@final
class ZeROStage0(Stage):
    """Data parallelism: every rank holds and updates everything (the paper's baseline)."""

    number = ZeROStage.STAGE_0

    def init_unit(self, unit, full_RF):
        unit.param = unit.recipe.param.round(full_RF)
        unit.optim = self.rule.init(unit, full_RF)

    def unshard(self, unit):
        return unit.param

    def reshard(self, unit):
        pass  # nothing was gathered

    def post_backward(self, unit, grad_RF):
        unit.accumulate(grad_RF)  # stays partial: see [Note: partial gradients]

    def reduce(self, unit):
        wire_RF = unit.to_wire(unit.grad)
        unit.grad = self.world.all_reduce(wire_RF, fmt=unit.recipe.wire, label=unit.name)

    def step(self, unit, grad_scale):
        self.rule.update(unit, grad_scale)


@final
class ZeROStage1(Stage):
    """P_os: each rank updates only its shard, then the shards are gathered."""

    number = ZeROStage.STAGE_1

    def init_unit(self, unit, full_RF):
        unit.param = unit.recipe.param.round(full_RF)
        unit.optim = self.rule.init(unit, self.world.own_shard(full_RF))

    def unshard(self, unit):
        return unit.param

    def reshard(self, unit):
        pass  # nothing was gathered

    def post_backward(self, unit, grad_RF):
        unit.accumulate(grad_RF)  # stays partial: see [Note: partial gradients]

    def reduce(self, unit):
        wire_RF = unit.to_wire(unit.grad)
        unit.grad = self.world.reduce_scatter(wire_RF, fmt=unit.recipe.wire, label=unit.name)

    def step(self, unit, grad_scale):
        self.rule.update(unit, grad_scale)
        self.world.all_gather(
            unit.own_param, out=unit.param, fmt=unit.recipe.param, label=unit.name
        )


@final
class ZeROStage2(Stage):
    """P_os+g: each gradient is reduced to its owner as soon as backward has produced it."""

    number = ZeROStage.STAGE_2

    def init_unit(self, unit, full_RF):
        unit.param = unit.recipe.param.round(full_RF)
        unit.optim = self.rule.init(unit, self.world.own_shard(full_RF))

    def unshard(self, unit):
        return unit.param

    def reshard(self, unit):
        pass  # nothing was gathered

    def post_backward(self, unit, grad_RF):
        self.buckets.reduce_scatter(unit, grad_RF)

    def reduce(self, unit):
        pass  # already reduced to its owners

    def step(self, unit, grad_scale):
        self.rule.update(unit, grad_scale)
        self.world.all_gather(
            unit.own_param, out=unit.param, fmt=unit.recipe.param, label=unit.name
        )


@final
class ZeROStage3(Stage):
    """P_os+g+p: parameters are gathered before use and dropped after it."""

    number = ZeROStage.STAGE_3

    def init_unit(self, unit, full_RF):
        unit.param = unit.recipe.param.round(self.world.own_shard(full_RF).copy())
        unit.optim = self.rule.init(unit, self.world.own_shard(full_RF))

    def unshard(self, unit):
        if unit.unsharded is None:
            unit.unsharded = self.world.all_gather(
                unit.param, fmt=unit.recipe.param, label=unit.name
            )
        return unit.unsharded

    def reshard(self, unit):
        unit.unsharded = None

    def post_backward(self, unit, grad_RF):
        self.buckets.reduce_scatter(unit, grad_RF)

    def reduce(self, unit):
        pass  # already reduced to its owners

    def step(self, unit, grad_scale):
        self.rule.update(unit, grad_scale)


STAGES = {stage.number: stage for stage in (ZeROStage0, ZeROStage1, ZeROStage2, ZeROStage3)}
"""The class of each stage by its number."""
