"""Slow, obvious twins of the compiled kernels: what is meant, without blocks, bits or threads."""

import math
from fractions import Fraction

import numpy as np

F32 = np.float32


# --- storage formats ---------------------------------------------------------------------------


def bfloat16_value(bits):
    """The number a bfloat16 pattern stands for; infinity as 2**128, which rounding sees."""
    exponent, mantissa = (bits >> 7) & 0xFF, bits & 0x7F
    if exponent == 0:
        return Fraction(mantissa) / 2**133
    return Fraction(128 + mantissa) * Fraction(2) ** (exponent - 134)


def to_bfloat16(x):
    """Round one finite number to the nearer of its two neighbours, to even if both are as near."""
    sign = 0x8000 if math.copysign(1.0, x) < 0 else 0
    exact = abs(Fraction(float(x)))
    low = 0
    for step in (1 << b for b in range(14, -1, -1)):  # the largest pattern not above x
        if low + step <= 0x7F80 and bfloat16_value(low + step) <= exact:
            low += step
    if low == 0x7F80:
        return sign | low
    below, above = exact - bfloat16_value(low), bfloat16_value(low + 1) - exact
    return sign | (low if below < above or (below == above and low % 2 == 0) else low + 1)


def widen(stored, fmt):
    """Stored numbers as float32."""
    if fmt.name == "bfloat16":
        return (stored.astype(np.uint32) << np.uint32(16)).view(F32)
    if fmt.name == "float16":
        return stored.view(np.float16).astype(F32)
    return stored.copy()


def store(x, fmt):
    """Finite float32 numbers as stored ones."""
    if fmt.name == "bfloat16":
        flat = np.array([to_bfloat16(v) for v in x.ravel()], np.uint16)
        return flat.reshape(x.shape)
    if fmt.name == "float16":
        with np.errstate(over="ignore"):
            return x.astype(np.float16).view(np.uint16)
    return x.copy()


# --- the rank axis -----------------------------------------------------------------------------


def sum_rows(x, fmt):
    """Add rows one after the other in float32 and round once."""
    rows = widen(x, fmt)
    total = rows[0]
    for row in rows[1:]:
        total = total + row
    return store(total, fmt)


# --- partition ---------------------------------------------------------------------------------


def chunks_ceil(numel, world_size):
    """Lengths of ceil(n / W) chunks."""
    chunk = math.ceil(numel / world_size)
    return [max(0, min(chunk, numel - rank * chunk)) for rank in range(world_size)]


def greedy(numels, world_size):
    """Owner of each tensor: largest first, to the least loaded, lowest rank first."""
    loads, owner = [0] * world_size, {}
    for size, tensor in sorted((-n, i) for i, n in enumerate(numels)):
        rank = min(range(world_size), key=lambda r: loads[r])
        owner[tensor], loads[rank] = rank, loads[rank] - size
    return [owner[i] for i in range(len(numels))]


# --- updates -----------------------------------------------------------------------------------


def adam(p, g, m, v, h, decoupled):
    """One update of float32 arrays in PyTorch's order, an operation at a time."""
    scale, decay, w1, beta2, w2, bias2_sqrt, step_size, eps = (F32(value) for value in h)
    g = g * scale
    if decoupled:
        p = p * decay
    else:
        g = g + decay * p
    m = m + w1 * (g - m) if w1 < 0.5 else g - (g - m) * (F32(1) - w1)
    v = v * beta2 + w2 * g * g
    return p - step_size * m / (np.sqrt(v) / bias2_sqrt + eps), m, v


def sgd(p, g, b, h, nesterov):
    """One update of float32 arrays in PyTorch's order; b is None without momentum."""
    scale, decay, momentum, lr = (F32(value) for value in h)
    g = g * scale
    g = g + decay * p
    if b is None:
        return p - lr * g, None
    b = b * momentum + g
    return p - lr * (g + momentum * b if nesterov else b), b


# --- norm --------------------------------------------------------------------------------------


def norm(values):
    """L2 norm, exact up to one rounding at the end."""
    return math.sqrt(math.fsum(float(v) ** 2 for v in values))


def sum_squares_fixed(values, exponent, k):
    """Squares as multiples of 2**(2 * exponent - k), each rounded to even, added as integers."""
    unit = Fraction(2) ** (2 * exponent - k)
    return sum(round(Fraction(float(v)) ** 2 / unit) for v in values)
