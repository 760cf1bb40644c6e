"""bfloat16 and float16 as bits: how numbers are stored, rounded and widened.

NumPy has no bfloat16 and Numba no float16 on the CPU, so both are kept as ``uint16`` bits and
called ``*_bits``. Computation is always in float32; storage rounds to nearest even.
"""

from dataclasses import dataclass

import numpy as np

from zero_nb.core.checks import check_array, check_no_overlap
from zero_nb.core.kernels import (
    CAST_WORK,
    CODE_BFLOAT16,
    CODE_FLOAT16,
    CODE_FLOAT32,
    _round_blocks,
    _round_blocks_parallel,
    _widen_blocks,
    _widen_blocks_parallel,
    cast_blocks,
    launch,
)


@dataclass(frozen=True)
class Format:
    """How numbers are stored.

    Attributes
    ----------
    name : str
        ``"float32"``, ``"bfloat16"`` or ``"float16"``.
    dtype : numpy.dtype
        dtype of the array that holds them: float32, or uint16 for the bits of the others.
    code : int
        The switch inside kernels.
    """

    name: str
    dtype: np.dtype
    code: int

    @property
    def itemsize(self):
        """Bytes of one number."""
        return self.dtype.itemsize

    def round(self, x, out=None):
        """Round float32 numbers to this format, to nearest even.

        Parameters
        ----------
        x : numpy.ndarray
            float32, any shape, C-contiguous.
        out : numpy.ndarray, optional
            Written instead of a new array: same shape, this format's dtype, no overlap with x.

        Returns
        -------
        numpy.ndarray
            ``out``, or a new array (for float32 a copy). Too large becomes infinity. A NaN stays
            a NaN with its sign: in bfloat16 always 0x7fc0 | sign, in float16 quiet.

        Raises
        ------
        TypeError, ValueError
            An array of another dtype, shape or layout, read-only or overlapping ``out``.
        """
        check_array("x", x, dtype=FLOAT32.dtype)
        out = self._output(x, out, self.dtype)
        args = (x.ravel(), self.code, out.ravel(), 0, cast_blocks(x.size))
        launch(_round_blocks, _round_blocks_parallel, x.size * CAST_WORK, *args)
        return out

    def widen(self, bits, out=None):
        """Widen stored numbers to float32, which is always exact.

        Parameters
        ----------
        bits : numpy.ndarray
            This format's dtype, any shape, C-contiguous.
        out : numpy.ndarray, optional
            Written instead of a new array: float32, same shape, no overlap with bits.

        Returns
        -------
        numpy.ndarray
            ``out``, or a new float32 array (for float32 a copy).

        Raises
        ------
        TypeError, ValueError
            An array of another dtype, shape or layout, read-only or overlapping ``out``.
        """
        check_array("bits", bits, dtype=self.dtype)
        out = self._output(bits, out, FLOAT32.dtype)
        args = (bits.ravel(), self.code, out.ravel(), 0, cast_blocks(bits.size))
        launch(_widen_blocks, _widen_blocks_parallel, bits.size * CAST_WORK, *args)
        return out

    @staticmethod
    def _output(x, out, dtype):
        """Return a new array like x, or the checked out."""
        if out is None:
            return np.empty(x.shape, dtype)
        check_array("out", out, dtype=dtype, shape=x.shape, writable=True)
        if np.may_share_memory(x, out):
            check_no_overlap(x=x, out=out)
        return out


FLOAT32 = Format("float32", np.dtype(np.float32), CODE_FLOAT32)
BFLOAT16 = Format("bfloat16", np.dtype(np.uint16), CODE_BFLOAT16)
FLOAT16 = Format("float16", np.dtype(np.uint16), CODE_FLOAT16)

_SHORT = {"fp32": FLOAT32, "bf16": BFLOAT16, "fp16": FLOAT16}


def get_format(name):
    """Return the format of that name.

    Parameters
    ----------
    name : str or Format
        ``"float32"``, ``"bfloat16"``, ``"float16"``, or short ``"fp32"``, ``"bf16"``, ``"fp16"``.

    Returns
    -------
    Format
        FLOAT32, BFLOAT16 or FLOAT16.

    Raises
    ------
    ValueError
        Another name; the message lists the known ones.
    """
    if isinstance(name, Format):
        return name
    for short, fmt in _SHORT.items():
        if name in (short, fmt.name):
            return fmt
    known = ", ".join(f"{fmt.name} ({short})" for short, fmt in _SHORT.items())
    raise ValueError(f"unknown precision {name!r}; choose one of {known}")


def float32_to_bfloat16(x, out=None):
    """Round float32 to bfloat16 bits, to nearest even; see :meth:`Format.round`.

    Parameters
    ----------
    x : numpy.ndarray
        float32, any shape, C-contiguous.
    out : numpy.ndarray, optional
        uint16, same shape.

    Returns
    -------
    numpy.ndarray
        uint16 bits. NaN becomes 0x7fc0 | sign.

    Raises
    ------
    TypeError, ValueError
        See :meth:`Format.round`.
    """
    return BFLOAT16.round(x, out)


def bfloat16_to_float32(bits, out=None):
    """Widen bfloat16 bits to float32, exactly; see :meth:`Format.widen`.

    Parameters
    ----------
    bits : numpy.ndarray
        uint16, any shape, C-contiguous.
    out : numpy.ndarray, optional
        float32, same shape.

    Returns
    -------
    numpy.ndarray
        float32.

    Raises
    ------
    TypeError, ValueError
        See :meth:`Format.widen`.
    """
    return BFLOAT16.widen(bits, out)


def float32_to_float16(x, out=None):
    """Round float32 to float16 bits, to nearest even; see :meth:`Format.round`.

    Parameters
    ----------
    x : numpy.ndarray
        float32, any shape, C-contiguous.
    out : numpy.ndarray, optional
        uint16, same shape.

    Returns
    -------
    numpy.ndarray
        uint16 bits, with subnormals; beyond 65519 infinity; NaN stays NaN.

    Raises
    ------
    TypeError, ValueError
        See :meth:`Format.round`.
    """
    return FLOAT16.round(x, out)


def float16_to_float32(bits, out=None):
    """Widen float16 bits to float32, exactly; see :meth:`Format.widen`.

    Parameters
    ----------
    bits : numpy.ndarray
        uint16, any shape, C-contiguous.
    out : numpy.ndarray, optional
        float32, same shape.

    Returns
    -------
    numpy.ndarray
        float32.

    Raises
    ------
    TypeError, ValueError
        See :meth:`Format.widen`.
    """
    return FLOAT16.widen(bits, out)
