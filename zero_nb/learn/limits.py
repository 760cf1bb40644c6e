"""Run what a learner wrote: for a limited time, with its memory measured, whatever it does."""

import ctypes
import threading
import tracemalloc
import warnings

__all__ = ["SECONDS", "NotYet", "TooSlow", "run_limited", "traced_peak"]

SECONDS = 5.0
"""After this time a check stops waiting for the learner's code."""

_GRACE = 2.0


class NotYet(Exception):
    """A judgement in words: raised by a trial that has seen what is wrong.

    Parameters
    ----------
    text : str
        What was seen and what to think about, for the learner.
    """


class TooSlow(NotYet):
    """The time limit was reached."""


class _Stop(BaseException):
    """Thrown into the learner's code; no ``except Exception`` in it catches this."""


def run_limited(call, seconds=None):
    """Return ``call()``, but stop it after some seconds.

    Parameters
    ----------
    call : callable
        Without arguments. It runs in a thread of its own: only there can Python stop it on every
        platform. Its warnings are not shown.
    seconds : float, optional
        The limit; `SECONDS` if not given.

    Returns
    -------
    object
        What `call` returned.

    Raises
    ------
    TooSlow
        If the time is up, or the user interrupted.
    Exception
        What `call` raised; `SystemExit` and its like become a `NotYet`.
    """
    seconds = SECONDS if seconds is None else seconds
    box = {}

    def work():
        try:
            box["value"] = call()
        except BaseException as error:  # also SystemExit and _Stop: nothing may end the kernel
            box["error"] = error

    thread = threading.Thread(target=work, daemon=True, name="learner")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        thread.start()
        try:
            thread.join(seconds)
            reason = f"it was not finished after {seconds:g} seconds; does a loop never end?"
        except KeyboardInterrupt:
            reason = "it was interrupted"
        if thread.is_alive():
            _stop(thread)
            raise TooSlow(reason)
    error = box.get("error")
    if error is None:
        return box["value"]
    if not isinstance(error, Exception):
        raise NotYet(f"it ended with {type(error).__name__}; a function should return instead")
    raise error


def _stop(thread):
    """Throw `_Stop` into a thread until it ends, or until waiting longer is of no use."""
    for _ in range(4):
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident), ctypes.py_object(_Stop)
        )
        thread.join(_GRACE / 4)
        if not thread.is_alive():
            return


def traced_peak(call):
    """Return what `call` returns, and the bytes that lived at its fullest moment.

    Parameters
    ----------
    call : callable
        Without arguments. Call it once before, so that imports and caches are not counted.

    Returns
    -------
    result : object
    peak_bytes : int
        Largest number of bytes allocated during the call and alive at one time, as tracemalloc
        counts them: NumPy arrays are in it. What existed before is not.
    """
    began = not tracemalloc.is_tracing()
    if began:
        tracemalloc.start()
    try:
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        result = call()
        _, peak = tracemalloc.get_traced_memory()
        return result, peak - before
    finally:
        if began:
            tracemalloc.stop()
