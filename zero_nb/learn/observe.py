"""Compare what a learner's code did with what was expected, and say the difference in words."""

import math
import numbers
from dataclasses import dataclass
from typing import final

import numpy as np

__all__ = ["Raised", "alike", "difference", "short"]

_LONGEST = 12


@final
@dataclass(frozen=True)
class Raised:
    """In the place of a result: an error.

    Attributes
    ----------
    kind : str
        The type's name.
    text : str
        The message.
    where : str
        The line in which it happened, if it is known.
    """

    kind: str
    text: str
    where: str = ""


def alike(a, b, tolerance=0.0):
    """Whether two results say the same.

    Parameters
    ----------
    a, b : object
        Numbers, strings, None, arrays, `Raised`, and sequences and mappings of them. A list, a
        tuple and an array with equal elements are alike; so are 3 and 3.0.
    tolerance : float
        Largest difference of two numbers, relative to the larger one or to 1.

    Returns
    -------
    bool
        False for anything that cannot be compared. Never raises.
    """
    try:
        return not difference(a, b, tolerance)
    except Exception:
        return False


def difference(got, expected, tolerance=0.0, where=""):
    """Say the first difference between two results.

    Parameters
    ----------
    got, expected : object
        As for `alike`.
    tolerance : float
    where : str
        Name of what is compared, put in front.

    Returns
    -------
    str
        Empty if they are alike.
    """
    at = f"{where} " if where else ""
    if isinstance(got, Raised) or isinstance(expected, Raised):
        same = type(got) is type(expected) and got.kind == expected.kind
        if same and (got.kind != "NotYet" or got.text == expected.text):
            return ""
        return f"{at}is {short(got)}, expected {short(expected)}"
    if isinstance(expected, dict):
        return _of_mappings(got, expected, tolerance, at)
    if isinstance(expected, np.ndarray) or (_is_numbers(expected) and isinstance(got, np.ndarray)):
        return _of_arrays(got, expected, tolerance, at)
    if isinstance(expected, list | tuple):
        return _of_sequences(got, expected, tolerance, at)
    if expected is None or isinstance(expected, str):
        same = type(got) is type(expected) and got == expected
    elif isinstance(expected, numbers.Number | np.generic):
        same = _is_number(got) and _close(got, expected, tolerance)
    else:
        same = bool(got == expected)
    return "" if same else f"{at}is {short(got)}, expected {short(expected)}"


def _is_number(value):
    """Whether it is one number, also as NumPy's scalar or an array without axes."""
    return isinstance(value, numbers.Number | np.bool_) or (
        isinstance(value, np.ndarray) and value.ndim == 0
    )


def _is_numbers(value):
    """Whether it is a list or tuple of numbers only."""
    return isinstance(value, list | tuple) and all(map(_is_number, value))


def _close(got, expected, tolerance):
    """Whether two numbers are equal, or as near as is asked for; two nan are."""
    if got == expected:
        return True
    a, b = complex(got), complex(expected)
    if math.isnan(a.real) or math.isnan(b.real):
        return math.isnan(a.real) and math.isnan(b.real)
    # An infinite number is near to nothing, though inf <= tolerance * inf is true.
    near = abs(a - b) <= tolerance * max(abs(a), abs(b), 1.0)
    return near and math.isfinite(abs(a - b))


def _of_mappings(got, expected, tolerance, at):
    """The first difference of two mappings."""
    if not isinstance(got, dict):
        return f"{at}is {short(got)}, expected a dict with {', '.join(map(str, expected))}"
    for key in expected:
        if key not in got:
            return f"{at}has no {key!r}"
        found = difference(got[key], expected[key], tolerance, str(key))
        if found:
            return f"{at}{found}" if at else found
    extra = [key for key in got if key not in expected]
    return f"{at}has {short(extra[0])}, which was not asked for" if extra else ""


def _of_sequences(got, expected, tolerance, at):
    """The first difference of two sequences."""
    if not isinstance(got, list | tuple | np.ndarray):
        return f"{at}is {short(got)}, expected {short(expected)}"
    if len(got) != len(expected):
        return f"{at}has {len(got)} entries, expected {len(expected)}: {short(got)}"
    for place, (a, b) in enumerate(zip(got, expected, strict=True)):
        if difference(a, b, tolerance):
            if _is_numbers(expected):
                return f"{at}is {short(got)}, expected {short(expected)}"
            return difference(a, b, tolerance, f"{at}entry {place}")
    return ""


def _of_arrays(got, expected, tolerance, at):
    """The first difference of two arrays."""
    if not isinstance(got, np.ndarray | list | tuple):
        return f"{at}is {short(got)}, expected an array of shape {np.shape(expected)}"
    try:
        a, b = np.asarray(got), np.asarray(expected)
        if a.dtype.kind not in "biufc":
            raise ValueError
    except ValueError:
        return f"{at}is {short(got)}, expected an array of numbers"
    if a.shape != b.shape:
        return f"{at}has shape {a.shape}, expected {b.shape}"
    with np.errstate(all="ignore"):
        x, y = a.astype(np.complex128), b.astype(np.complex128)
        near = np.abs(x - y) <= tolerance * np.maximum(np.maximum(np.abs(x), np.abs(y)), 1.0)
        near &= np.isfinite(x - y)
    wrong = ~((x == y) | near | (np.isnan(x) & np.isnan(y)))
    if not wrong.any():
        return ""
    if a.size <= _LONGEST:
        return f"{at}is {short(a)}, expected {short(b)}"
    place = tuple(int(i) for i in np.argwhere(wrong)[0])
    return (
        f"{at}differs in {int(wrong.sum())} of {a.size} elements; element "
        f"{list(place) if len(place) > 1 else place[0]} is {short(a[place])}, "
        f"expected {short(b[place])}"
    )


def short(value):
    """Write a value in a few words, whatever it is.

    Parameters
    ----------
    value : object

    Returns
    -------
    str
        One line of at most 120 characters. Never raises; the same on every machine.
    """
    try:
        text = _written(value)
    except Exception:
        text = f"of type {type(value).__name__}"
    text = " ".join(text.split())
    return text if len(text) <= 120 else text[:117] + "..."


def _written(value):
    """A value as one would write it, without addresses and long tails."""
    if isinstance(value, Raised):
        return f"{value.kind}: {value.text}" if value.text else value.kind
    if isinstance(value, np.ndarray):
        if value.size > _LONGEST:
            return f"an array of shape {value.shape}"
        return np.array2string(value, precision=6, separator=", ")
    if isinstance(value, bool | np.bool_):
        return str(bool(value))
    if isinstance(value, numbers.Integral):
        return str(int(value))
    if isinstance(value, numbers.Real):
        return f"{float(value):.6g}"
    if value is None or isinstance(value, str):
        return repr(value)
    if isinstance(value, list | tuple) and len(value) <= _LONGEST:
        inside = ", ".join(map(_written, value))
        if isinstance(value, list):
            return f"[{inside}]"
        return f"({inside},)" if len(value) == 1 else f"({inside})"
    if isinstance(value, dict) and len(value) <= _LONGEST:
        return "{" + ", ".join(f"{k!r}: {_written(v)}" for k, v in value.items()) + "}"
    return f"of type {type(value).__name__}"
