"""Memory that was given back stays at hand for the next array (glibc, that is most Linux).

[Note: memory at hand]
A training step allocates and frees the same arrays again and again: activations, gathered units,
gradients. By default glibc hands freed memory back to the kernel, which has to clear every page
anew when it is asked for again: up to a third of a step. What PyTorch's caching allocator is for a
GPU, two settings are here: arrays up to 32 MiB come from the heap, and up to 256 MiB of free heap
are kept. Arrays are freed as before, so the ledger and tracemalloc count the same bytes; only what
the system shows for the process stays a little higher.
"""

import ctypes
import os
import platform
from functools import cache

__all__ = ["keep_freed_memory"]

_SETTINGS = (  # name in the environment, number in malloc.h, bytes
    ("MALLOC_TRIM_THRESHOLD_", -1, 256 << 20),
    ("MALLOC_MMAP_THRESHOLD_", -3, 32 << 20),  # the most that glibc allows
)


@cache
def keep_freed_memory():
    """Set both limits, once; see [Note: memory at hand].

    Nothing is changed where the C library is another one, or the environment has set a limit.

    Returns
    -------
    bool
        Whether they are set.
    """
    if platform.libc_ver()[0] != "glibc" or any(name in os.environ for name, *_ in _SETTINGS):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all(mallopt(number, limit) == 1 for _, number, limit in _SETTINGS)
