"""One BLAS thread, so that matrix products have the same bits everywhere.

[Note: one BLAS thread]
With two threads OpenBLAS cuts most products in other pieces and adds them in another order, so
their last bits differ. Every world therefore computes with one; parallelism over ranks comes
from threads that each compute other ranks.
"""

from contextlib import contextmanager
from functools import cache

from threadpoolctl import ThreadpoolController

__all__ = ["blas_threads", "one_blas_thread"]

_depth = 0


@cache
def _controller():
    """Find the BLAS libraries once: looking them up takes milliseconds."""
    import numpy  # noqa: F401  (its BLAS must be loaded before one looks)

    return ThreadpoolController()


@contextmanager
def blas_threads(count):
    """Limit BLAS to some threads within the block; blocks may be nested, the outermost decides.

    For benchmarks that give both sides the same number of threads. With any other number than one
    nothing is claimed of bits, see [Note: one BLAS thread].

    Parameters
    ----------
    count : int
        At least 1.
    """
    global _depth
    if _depth:
        _depth += 1
        try:
            yield
        finally:
            _depth -= 1
        return
    with _controller().limit(limits=count, user_api="blas"):
        _depth = 1
        try:
            yield
        finally:
            _depth = 0


def one_blas_thread():
    """Limit BLAS to one thread within a ``with`` block; blocks may be nested."""
    return blas_threads(1)
