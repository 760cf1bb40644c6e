"""Threads of the kernels that fall asleep when they have nothing to do.

[Note: threads that wait asleep]
Between two parallel kernels ranks compute in threads of their own (matrix products, on every
core). GNU's OpenMP lets its threads spin for milliseconds after each parallel kernel, in case
there is more to do: on two cores that takes one of them away from the ranks, and a training step
of stage 3, which runs the most kernels, took up to half as long again. OpenMP reads how to wait
when it is loaded, and at no other time.
"""

import os
from functools import cache

import numba

__all__ = ["start_threads"]

# Spinning a little (some 40 microseconds) is kept: one kernel often follows another.
_WAITING = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "2000"}


@cache
def start_threads():
    """Start the threads of parallel kernels, once, such that they wait asleep.

    What the environment says about waiting already is left as it is; it is as before afterwards,
    so that other libraries and child processes see nothing of it. Numba's other threading layers
    do not spin for long.
    """
    if numba.config.DISABLE_JIT or any(name in os.environ for name in _WAITING):
        return
    os.environ.update(_WAITING)
    try:
        numba.get_num_threads()  # loads the threading layer
    finally:
        for name in _WAITING:
            del os.environ[name]
