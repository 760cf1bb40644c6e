"""A process that trains and saves without end, to be killed: see test_checkpoint.py.

``python tests/checkpoint_killer.py DIR STAGE WORLD_SIZE`` says ``ready``, waits for a line, goes on
from what is in DIR, and says ``saved N`` after each checkpoint: one every step.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from saved_runs import everything, make, train
from zero_nb.train import checkpoint


def run(stage, world_size):
    """The run: the same at every stage, but for its arrangement."""
    return make(stage, world_size, precision="bf16")


def goes_on(opt, directory):
    """Whether there was a checkpoint to go on from."""
    try:
        checkpoint.load(opt, directory)
    except checkpoint.CheckpointError:
        return False
    return True


def main(directory, stage, world_size):
    opt = run(int(stage), int(world_size))
    everything(train(run(int(stage), int(world_size)), 1))  # compiled, or read from Numba's cache
    print("ready", flush=True)
    sys.stdin.readline()
    goes_on(opt, directory)
    while True:
        train(opt, 1)
        layout = checkpoint.LAYOUTS[opt.steps_done % 2]
        checkpoint.save(opt, directory, layout=layout, extra={"step": opt.steps_done})
        # One write, so that no kill comes in the middle of a line, buffered or not.
        sys.stdout.write(f"saved {opt.steps_done}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
