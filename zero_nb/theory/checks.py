"""Checks of what a user typed, with errors that say what to do."""

from __future__ import annotations

import difflib
import operator
from collections.abc import Iterable

from zero_nb.config import UsageError

__all__ = ["check_count", "check_divides", "check_positive", "check_stage", "name_error"]


def check_count(name: str, value: object, *, least: int = 0, most: int | None = None) -> int:
    """A whole number of at least `least`, and at most `most`, as a Python int.

    Raises
    ------
    UsageError
        With the name, the value and what was expected.
    """
    whole = int(value) if isinstance(value, float) and value.is_integer() else value
    counts = hasattr(whole, "__index__") and not isinstance(whole, bool)
    number = operator.index(whole) if counts else least - 1
    if number < least:
        raise UsageError(f"{name} must be a whole number of at least {least}, got {value!r}")
    if most is not None and number > most:
        raise UsageError(f"{name} must be at most {most:,}, got {value!r}")
    return number


def check_positive(name: str, value: object) -> float:
    """A finite number above zero.

    Raises
    ------
    UsageError
        With the name, the value and what was expected.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e30:
        raise UsageError(f"{name} must be a number above zero, got {value!r}")
    return float(value)


def check_stage(stage: object) -> int:
    """A ZeRO stage as an int 0–3; accepts an enum whose value is one.

    Raises
    ------
    UsageError
        For anything else.
    """
    number = getattr(stage, "value", stage)
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= 3:
        raise UsageError(f"stage must be 0, 1, 2 or 3, got {stage!r}")
    return int(number)


def check_divides(part_name: str, part: int, whole_name: str, whole: int) -> int:
    """`whole // part` where that is exact.

    Raises
    ------
    UsageError
        Where it is not.
    """
    if whole % part:
        raise UsageError(
            f"{part_name} {part} does not divide {whole_name} {whole}; "
            f"choose a {part_name} that does, such as {_largest_divisor(whole, part)}"
        )
    return whole // part


def _largest_divisor(whole: int, limit: int) -> int:
    """The largest divisor of `whole` that is not above `limit`."""
    return next(d for d in range(min(limit, whole), 0, -1) if whole % d == 0)


def name_error(kind: str, name: object, known: Iterable[str]) -> UsageError:
    """The error for an unknown name, offering the nearest known ones."""
    known = list(known)
    folded = {entry.casefold(): entry for entry in known}
    near = difflib.get_close_matches(str(name).casefold(), folded, n=3, cutoff=0.4)
    offer = [folded[entry] for entry in near] or known[:8]
    if near:
        return UsageError(f"unknown {kind} {str(name)!r}; did you mean {' or '.join(offer)}?")
    return UsageError(f"unknown {kind} {str(name)!r}; known are {', '.join(offer)}")
