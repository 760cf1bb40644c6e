"""Freed memory stays at hand; kernel threads wait asleep. Each in a process of its own."""

import os
import platform
import subprocess
import sys

import pytest

PAGES = """
import resource, sys
import numpy as np
from zero_nb import MLP, Engine, MLPConfig
engine = Engine(MLP(MLPConfig((512, 512, 512, 512, 512))), stage=3, world_size=4)
x = np.ones((256, 512), np.float32)
for _ in range(3):
    engine.train_step(x, x)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    engine.train_step(x, x)
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 4)
"""


def _run(program, **environment):
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True,
        env=os.environ | environment,
    )  # fmt: skip
    return done.stdout.strip()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_a_later_step_asks_the_system_for_fewer_pages():
    # As glibc does by itself: a limit in the environment is left as it is.
    asked = int(_run(PAGES, MALLOC_TRIM_THRESHOLD_="131072"))
    assert int(_run(PAGES)) < asked / 4


def test_the_environment_is_as_before_once_the_threads_run():
    program = (
        "import os; before = dict(os.environ)\n"
        "from zero_nb import SimulatedWorld; SimulatedWorld(2)\n"
        "assert dict(os.environ) == before; print('same')"
    )
    assert _run(program) == "same"
