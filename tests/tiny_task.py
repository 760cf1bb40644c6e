"""A task that is over at once, for what trains through `zero_nb.compare`."""

from dataclasses import dataclass

from tiny import gpt, gpt_batches, mlp, mlp_batches
from zero_nb.compare import Task
from zero_nb.train.model import TrainingPreset

PRESET = TrainingPreset(steps=3, batch=12, lr=1e-3, warmup=1)


@dataclass(frozen=True)
class Samples:
    """A data set: another batch for every step, drawn by `draw` (count, size, seed)."""

    draw: object
    name: str = "samples"
    seq_len: int = 6
    train_samples: int = 1000

    def batch(self, step, size, seed=0):
        """The batch of a step."""
        (batch,) = self.draw(1, size=size, seed=[seed, step])
        return batch

    def held_out(self):
        """Samples that no batch has."""
        return self.batch(10**6, 16)


def mlp_task(*sizes):
    """An MLP; its units have 42, 24 and 4 elements by default."""
    model = mlp(*sizes)
    return Task(
        Samples(lambda count, size, seed: mlp_batches(model, count, size, seed)), model, PRESET
    )


def gpt_task():
    """The small GPT."""
    return Task(Samples(gpt_batches), gpt(), PRESET)
