"""Element-wise optimizer updates on runs, with PyTorch's definitions and order of operations.

A table of runs (:func:`zero_nb.core.flat.run_table`) says which elements of which buffers belong
together. What no run covers (padding, parameters that were not used) is neither read nor written.

Arithmetic is float32; gradient and parameter may be stored in 16 bits. Hyper-parameters are
computed in float64 and enter as float32 rows of a table, so each run may have its own.
"""

import math

import numpy as np

from zero_nb.core.checks import check_array, check_no_overlap, check_runs, run_groups
from zero_nb.core.kernels import (
    ADAM_HYPER,
    GRAD,
    PARAM,
    SGD_HYPER,
    SGD_MOMENTUM,
    STATE,
    TARGET,
    UPDATE_WORK,
    _adam,
    _adam_parallel,
    _apart,
    _sgd,
    _sgd_parallel,
    launch,
)
from zero_nb.core.precision import FLOAT32

_NO_BITS = np.empty(0, np.uint16)
_NO_FLOATS = np.empty(0, np.float32)


def adam_hyper(lr, betas, eps, weight_decay, step, grad_scale=1.0, decoupled=True):
    """Compute one row of Adam's table of hyper-parameters, in float64, rounded once to float32.

    Parameters
    ----------
    lr : float
        Learning rate of this step.
    betas : (float, float)
        Decay rates of the two moments, each in [0, 1).
    eps : float
        Added to the denominator.
    weight_decay : float
        Coefficient of the decay.
    step : int
        How many updates the parameter will have had after this one: 1 for the first.
    grad_scale : float
        Multiplies the gradient before anything else (clipping, loss scale).
    decoupled : bool
        True for AdamW (``p *= 1 - lr * weight_decay``), False for Adam
        (``g += weight_decay * p``).

    Returns
    -------
    numpy.ndarray
        float32, shape (8,): grad_scale, decay, 1 - beta1, beta2, 1 - beta2,
        ``sqrt(1 - beta2**step)``, ``lr / (1 - beta1**step)``, eps.

    Raises
    ------
    ValueError
        step below 1 or a beta outside [0, 1).
    """
    beta1, beta2 = betas
    if step < 1:
        raise ValueError(f"step counts this update, so it is at least 1, got {step}")
    if not (0.0 <= beta1 < 1.0 and 0.0 <= beta2 < 1.0):
        raise ValueError(f"betas must lie in [0, 1), got {betas}")
    row = (
        grad_scale,
        1.0 - lr * weight_decay if decoupled else weight_decay,
        1.0 - beta1,
        beta2,
        1.0 - beta2,
        math.sqrt(1.0 - beta2**step),
        lr / (1.0 - beta1**step),
        eps,
    )
    return np.array(row, np.float32)


def sgd_hyper(lr, momentum=0.0, weight_decay=0.0, grad_scale=1.0):
    """Compute one row of SGD's table of hyper-parameters.

    Parameters
    ----------
    lr : float
        Learning rate of this step.
    momentum : float
        Factor of the momentum buffer.
    weight_decay : float
        Coefficient of the L2 term (g += weight_decay * p).
    grad_scale : float
        Multiplies the gradient before anything else (clipping, loss scale).

    Returns
    -------
    numpy.ndarray
        float32, shape (4,): grad_scale, weight_decay, momentum, lr.
    """
    return np.array((grad_scale, weight_decay, momentum, lr), np.float32)


def _prepare(buffers, grad, grad_format, param, param_format, runs, hyper, columns):
    """Check everything an update touches; return flat arrays, codes, groups of runs, work.

    ``buffers`` are the float32 arrays that are written, at most three: (name, column, array). The
    flat arrays are these three (an empty one for each that is missing), the gradient, the
    parameter.
    """
    for name, _, array in buffers:
        check_array(name, array, dtype=FLOAT32.dtype, writable=True)
    check_array("grad", grad, dtype=grad_format.dtype)
    if (param is None) != (param_format is None):
        raise ValueError("param and param_format belong together; give both or neither")
    if param is not None:
        check_array("param", param, dtype=param_format.dtype, writable=True)
    check_array("hyper", hyper, dtype=FLOAT32.dtype, shape=(None, columns))
    flat = [array.ravel() for _, _, array in buffers]  # views, as all are C-contiguous
    flat += [_NO_FLOATS] * (3 - len(flat))
    flat += [grad.ravel(), _NO_BITS if param is None else param.ravel()]
    if not _apart(*flat, hyper):
        named = {name: array for name, _, array in buffers}
        check_no_overlap(**named, grad=grad, param=param, hyper=hyper)
    written = [(name, column, array.size) for name, column, array in buffers]
    if param is not None:
        written.append(("param", PARAM, param.size))
    total = check_runs(runs, [("grad", GRAD, grad.size)], written, hyper_rows=len(hyper))
    codes = (grad_format.code, -1 if param is None else param_format.code)
    work = total * UPDATE_WORK
    return flat, codes, run_groups(runs, work), work


def adam_update(
    target,
    grad,
    exp_avg,
    exp_avg_sq,
    runs,
    hyper,
    *,
    decoupled,
    grad_format=FLOAT32,
    param=None,
    param_format=None,
):
    """Update in place by Adam (Kingma and Ba, 2015) or AdamW (Loshchilov and Hutter, 2019).

    For each element of a run, in PyTorch's order: ``g *= grad_scale``; AdamW ``p *= 1 - lr * wd``,
    Adam ``g += wd * p``; ``m += (g - m) * (1 - beta1)``; ``v = v * beta2 + (1 - beta2) * g * g``;
    ``p -= step_size * m / (sqrt(v) / sqrt(1 - beta2**t) + eps)``.

    Parameters
    ----------
    target : numpy.ndarray
        float32, C-contiguous: the parameters themselves or their fp32 master. Offsets in ``runs``
        count elements of the flattened array; this holds for all buffers.
    grad : numpy.ndarray
        Gradients in ``grad_format``.
    exp_avg, exp_avg_sq : numpy.ndarray
        float32 moments.
    runs : numpy.ndarray
        int64, shape (n, 7), see :func:`zero_nb.core.flat.run_table`.
    hyper : numpy.ndarray
        float32, shape (h, 8), rows from :func:`adam_hyper`.
    decoupled : bool
        True for AdamW, False for Adam; the rows of ``hyper`` must have been made for the same.
    grad_format : Format
        How the gradient is stored.
    param : numpy.ndarray, optional
        Where the rounded target goes (column PARAM), in ``param_format``.
    param_format : Format, optional
        How ``param`` is stored.

    Raises
    ------
    TypeError, ValueError
        An array of another dtype or layout, read-only or overlapping another; a run outside a
        buffer or writing an element twice. Nothing is written then.
    """
    buffers = (
        ("target", TARGET, target),
        ("exp_avg", STATE, exp_avg),
        ("exp_avg_sq", STATE, exp_avg_sq),
    )
    flat, codes, groups, work = _prepare(
        buffers, grad, grad_format, param, param_format, runs, hyper, ADAM_HYPER
    )
    target, exp_avg, exp_avg_sq, grad, param = flat
    launch(
        _adam,
        _adam_parallel,
        work,
        target,
        grad,
        exp_avg,
        exp_avg_sq,
        param,
        runs,
        hyper,
        bool(decoupled),
        codes,
        groups,
        0,
        len(groups) - 1,
    )


def sgd_update(
    target,
    grad,
    momentum_buffer,
    runs,
    hyper,
    *,
    nesterov=False,
    grad_format=FLOAT32,
    param=None,
    param_format=None,
):
    """Update in place by SGD, with momentum and Nesterov's look-ahead if asked.

    For each element of a run, in PyTorch's order: ``g *= grad_scale``; ``g += wd * p``;
    ``b = b * momentum + g``; ``p -= lr * b``, or with Nesterov ``p -= lr * (g + momentum * b)``.
    A momentum buffer starts at zero, which is PyTorch's first step (dampening is 0).

    Parameters
    ----------
    target : numpy.ndarray
        float32, C-contiguous: the parameters themselves or their fp32 master. Offsets in ``runs``
        count elements of the flattened array; this holds for all buffers.
    grad : numpy.ndarray
        Gradients in ``grad_format``.
    momentum_buffer : numpy.ndarray or None
        float32; None for plain SGD, where the momentum of ``hyper`` must be 0.
    runs : numpy.ndarray
        int64, shape (n, 7), see :func:`zero_nb.core.flat.run_table`.
    hyper : numpy.ndarray
        float32, shape (h, 4), rows from :func:`sgd_hyper`.
    nesterov : bool
        Look ahead along the momentum; needs a momentum buffer.
    grad_format : Format
        How the gradient is stored.
    param : numpy.ndarray, optional
        Where the rounded target goes (column PARAM), in ``param_format``.
    param_format : Format, optional
        How ``param`` is stored.

    Raises
    ------
    TypeError, ValueError
        An array of another dtype or layout, read-only or overlapping another; a run outside a
        buffer or writing an element twice; momentum or Nesterov without a buffer. Nothing is
        written then.
    """
    buffers = [("target", TARGET, target)]
    if momentum_buffer is not None:
        buffers.append(("momentum_buffer", STATE, momentum_buffer))
    flat, codes, groups, work = _prepare(
        buffers, grad, grad_format, param, param_format, runs, hyper, SGD_HYPER
    )
    if momentum_buffer is None and (nesterov or np.any(hyper[:, SGD_MOMENTUM])):
        raise ValueError("momentum and nesterov need a momentum_buffer; give one of zeros")
    target, momentum_buffer, _, grad, param = flat
    launch(
        _sgd,
        _sgd_parallel,
        work,
        target,
        grad,
        momentum_buffer,
        param,
        runs,
        hyper,
        bool(nesterov),
        codes,
        groups,
        0,
        len(groups) - 1,
    )
