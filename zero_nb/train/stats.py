"""What a stage saves, in the specification's words."""

from dataclasses import dataclass
from typing import final

from zero_nb.core.precision import FLOAT32

__all__ = ["ZeROMemoryStats"]


@final
@dataclass
class ZeROMemoryStats:
    """Bytes saved per rank against plain data parallelism.

    Attributes
    ----------
    optimizer_memory_saved, gradient_memory_saved, parameter_memory_saved : int
        Bytes on one rank.
    communication_overhead : int
        Bytes one rank sends per step more than plain data parallelism does.
    """

    optimizer_memory_saved: int = 0
    gradient_memory_saved: int = 0
    parameter_memory_saved: int = 0
    communication_overhead: int = 0

    @property
    def total_memory_saved(self):
        """Sum of the three; always in step with them."""
        return (
            self.optimizer_memory_saved + self.gradient_memory_saved + self.parameter_memory_saved
        )

    def update_totals(self):
        """Return the total. It cannot be stale, so calling this once or twice is the same."""
        return self.total_memory_saved

    @classmethod
    def from_held(cls, held_bytes, units, *, sent_bytes=0, micro_batches=1):
        """Compare the ledger's bytes with the same flat_params replicated on every rank.

        Parameters
        ----------
        held_bytes : dict
            ``param``, ``grad`` and ``optim`` bytes on the fullest rank, with gradients held.
        units : sequence of Unit
        sent_bytes : int
            Parameters and gradients one rank sent in the last step; 0 if there was none.
        micro_batches : int
            Several are added in float32, whatever the recipe.
        """
        replicated = {"param": 0, "grad": 0, "optim": 0}
        baseline_sent = 0
        for unit in units:
            padded, recipe = unit.layout.padded_numel, unit.recipe
            replicated["param"] += padded * recipe.param.itemsize
            replicated["optim"] += padded * sum(
                array.itemsize for array in unit.optim.arrays().values()
            )
            if not unit.trainable:
                continue
            held = FLOAT32 if micro_batches > 1 else recipe.grad
            both = recipe.wire.itemsize if recipe.both_grads else 0
            replicated["grad"] += padded * (held.itemsize + both)
            # Plain data parallelism all-reduces each gradient: 2 (W-1)/W of it on a ring.
            others = unit.layout.shard_numel * (unit.world.size - 1)
            baseline_sent += 2 * others * recipe.wire.itemsize
        return cls(
            optimizer_memory_saved=replicated["optim"] - held_bytes["optim"],
            gradient_memory_saved=replicated["grad"] - held_bytes["grad"],
            parameter_memory_saved=replicated["param"] - held_bytes["param"],
            communication_overhead=sent_bytes - baseline_sent if sent_bytes else 0,
        )

    def _repr_html_(self):
        """Return a table for notebooks."""
        rows = "".join(
            f"<tr><th scope='row'>{name}</th><td style='text-align:right'>{value:,}</td></tr>"
            for name, value in (
                ("optimizer states saved", self.optimizer_memory_saved),
                ("gradients saved", self.gradient_memory_saved),
                ("parameters saved", self.parameter_memory_saved),
                ("total saved", self.total_memory_saved),
                ("sent beyond data parallel, per step", self.communication_overhead),
            )
        )
        return f"<table><caption>Bytes per rank</caption><tbody>{rows}</tbody></table>"
