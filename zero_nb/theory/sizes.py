"""Sizes as people write them, read without guessing; and bytes as people read them.

GB is 10⁹ bytes (the ZeRO paper's unit), GiB is 2³⁰.  A device sold as "80 GB" has 80 GiB: 7 % more
than 80 GB.  So a size must say which one it means, and ``80gb`` is refused.
"""

from __future__ import annotations

import re

from zero_nb.config import UsageError

__all__ = ["format_gb_gib", "parse_count", "parse_size"]

_DECIMAL = {"kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15}
_BINARY = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50}
_UNITS = {"B": 1} | _DECIMAL | _BINARY
_COUNTS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_NUMBER = r"([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)"


def parse_size(text: str | int, name: str = "size") -> int:
    """Bytes of a size such as ``80GB``, ``80GiB`` or ``1.5e9B``.

    Parameters
    ----------
    text : str or int
        A number with a unit; an int is bytes already.
    name : str
        What is being read, for the error.

    Returns
    -------
    int
        Whole bytes, rounded down.

    Raises
    ------
    UsageError
        Without a unit, with one in the wrong letters (``80gb`` could be meant as either), or for
        a size that is not above zero.

    Examples
    --------
    >>> parse_size("80GB"), parse_size("80GiB")
    (80000000000, 85899345920)
    """
    if isinstance(text, int) and not isinstance(text, bool):
        text = f"{text}B"
    match = re.fullmatch(_NUMBER + r"\s*([A-Za-z]*)", str(text).strip())
    if match is None:
        raise UsageError(f"{name} {text!r} is not a size; write a number and a unit, such as 80GB")
    number, unit = match.groups()
    if unit not in _UNITS:
        raise UsageError(f"{name} {text!r} {_unit_advice(number, unit)}")
    size = float(number) * _UNITS[unit]
    if not 0 < size < 1e24:
        raise UsageError(f"{name} must be above zero, got {text!r}")
    return int(number) * _UNITS[unit] if number.isdigit() else int(size)


def _unit_advice(number: str, unit: str) -> str:
    """What to write for a unit that is missing or unclear."""
    if not unit:
        return f"has no unit; write {number}GB (10^9 bytes) or {number}GiB (2^30 bytes)"
    letter = unit[0].upper()
    if unit.casefold() in {known.casefold() for known in _UNITS} and f"{letter}iB" in _BINARY:
        prefix = {"K": ("kB", 3, 10), "M": ("MB", 6, 20), "G": ("GB", 9, 30)}.get(
            letter, (f"{letter}B", 12 if letter == "T" else 15, 40 if letter == "T" else 50)
        )
        decimal, power, shift = prefix
        return (
            f"is unclear; write {number}{decimal} (10^{power} bytes) "
            f"or {number}{letter}iB (2^{shift} bytes)"
        )
    return f"has an unknown unit {unit!r}; units are {', '.join(_UNITS)}"


def parse_count(text: str | float, name: str = "count") -> int:
    """A whole number such as ``7.5e9``, ``7.5B`` (10⁹) or ``1_000``.

    Parameters
    ----------
    text : str, int or float
        A number; K, M, B and T stand for 10³, 10⁶, 10⁹ and 10¹².
    name : str
        What is being read, for the error.

    Returns
    -------
    int

    Raises
    ------
    UsageError
        For anything that is not a whole number of at least 1.
    """
    match = re.fullmatch(_NUMBER + r"\s*([KMBT]?)", str(text).strip().replace("_", ""))
    if match is None:
        raise UsageError(
            f"{name} {text!r} is not a number; write it like 7500000000, 7.5e9 or 7.5B"
        )
    number, suffix = match.groups()
    scale = _COUNTS[suffix]
    value = (
        int(number) * scale if number.lstrip("+-").isdigit() else round(float(number) * scale, 6)
    )
    if not 1 <= value < 1e18 or value != int(value):
        raise UsageError(f"{name} must be a whole number of at least 1, got {text!r}")
    return int(value)


def format_gb_gib(count: float) -> str:
    """Bytes in GB and GiB side by side, such as ``"31.41 GB (29.25 GiB)"``."""
    return f"{count / 1e9:,.2f} GB ({count / 2**30:,.2f} GiB)"
