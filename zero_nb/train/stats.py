"""What a stage saves, in the specification's words."""

from dataclasses import dataclass
from typing import final

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
    def from_held(cls, held_bytes, units, world):
        """Compare the ledger's bytes with the same flat_params replicated on every rank.

        Parameters
        ----------
        held_bytes : dict
            ``param``, ``grad`` and ``optim`` bytes on the fullest rank, with gradients held.
        units : sequence of Unit
        world : World
            Its log holds the last training step.
        """
        replicated = {"param": 0, "grad": 0, "optim": 0}
        baseline_sent = 0
        for unit in units:
            padded, recipe = unit.layout.padded_numel, unit.recipe
            replicated["param"] += padded * recipe.param.itemsize
            replicated["grad"] += padded * recipe.grad.itemsize
            replicated["optim"] += padded * sum(
                array.itemsize for array in unit.optim.arrays().values()
            )
            # Plain data parallelism all-reduces each gradient: 2 (W-1)/W of it on a ring.
            baseline_sent += 2 * (padded // world.size) * (world.size - 1) * recipe.wire.itemsize
        sent = world.log.bytes_sent("param", "grad")
        return cls(
            optimizer_memory_saved=replicated["optim"] - held_bytes["optim"],
            gradient_memory_saved=replicated["grad"] - held_bytes["grad"],
            parameter_memory_saved=replicated["param"] - held_bytes["param"],
            communication_overhead=sent - baseline_sent if sent else 0,
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
