"""Slow, obvious twins of collectives and of whole training steps; NumPy only.

Nothing here knows of units, flat buffers, padding, shards or stages: what W computers would do
that each hold everything.
"""

import math
import threading

import numpy as np

from zero_nb.cluster.world import World
from zero_nb.core.precision import BFLOAT16, FLOAT16, FLOAT32

# --- storage formats ---------------------------------------------------------------------------


def to_float32(stored, fmt):
    """Widen stored numbers, exactly."""
    if fmt is BFLOAT16:
        return (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if fmt is FLOAT16:
        return stored.view(np.float16).astype(np.float32)
    return stored.copy()


def stored_as(x, fmt):
    """Round float32 numbers (normal ones) to nearest even, by arithmetic instead of by bits."""
    if fmt is FLOAT16:
        return x.astype(np.float16).view(np.uint16)
    if fmt is FLOAT32:
        return x.copy()
    fraction, exponent = np.frexp(x.astype(np.float64))  # fraction in [0.5, 1): 8 bits of it stay
    rounded = np.ldexp(np.rint(np.ldexp(fraction, 8)), exponent - 8).astype(np.float32)
    return (rounded.view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def rounded(x, fmt):
    """What is left of float32 numbers after storing them."""
    return to_float32(stored_as(x, fmt), fmt)


# --- collectives -------------------------------------------------------------------------------


def sum_over_ranks(rows, fmt):
    """Add the ranks' rows in float32, rank 0 first, and round once."""
    total = to_float32(rows[0], fmt)
    for row in rows[1:]:
        total = total + to_float32(row, fmt)
    return stored_as(total, fmt)


def all_reduce(rows, fmt=FLOAT32):
    """Every rank ends with the sum."""
    return np.stack([sum_over_ranks(rows, fmt) for _ in rows])


def reduce_scatter(rows, fmt=FLOAT32):
    """Rank r ends with the r-th part of the sum."""
    return np.stack(np.split(sum_over_ranks(rows, fmt), len(rows)))


def all_gather(shards):
    """Every rank ends with all shards, one after the other."""
    return np.stack([np.concatenate(list(shards)) for _ in shards])


# --- optimizers --------------------------------------------------------------------------------


class NaiveAdam:
    """Adam or AdamW on whole tensors, in float32, in PyTorch's order of operations."""

    def __init__(self, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2, decoupled=True):
        self.lr, self.betas, self.eps = lr, betas, eps
        self.weight_decay, self.decoupled = weight_decay, decoupled
        self.state, self.t = {}, 0

    def __call__(self, weights, grads, scale=1.0, factor=1.0):
        self.t += 1
        beta1, beta2 = self.betas
        lr, f = self.lr * factor, np.float32
        for name, p in weights.items():
            m, v = self.state.setdefault(name, [np.zeros_like(p), np.zeros_like(p)])
            g = grads[name] * f(scale)
            if self.decoupled:
                p *= f(1 - lr * self.weight_decay)
            else:
                g += f(self.weight_decay) * p
            m += (g - m) * f(1 - beta1)
            v[...] = v * f(beta2) + (f(1 - beta2) * g) * g
            denom = np.sqrt(v) / f(math.sqrt(1 - beta2**self.t)) + f(self.eps)
            p -= (f(lr / (1 - beta1**self.t)) * m) / denom


class NaiveSGD:
    """SGD with momentum on whole tensors, in float32."""

    def __init__(self, lr=1e-2, momentum=0.0, nesterov=False, weight_decay=0.0):
        self.lr, self.momentum, self.nesterov = lr, momentum, nesterov
        self.weight_decay, self.state = weight_decay, {}

    def __call__(self, weights, grads, scale=1.0, factor=1.0):
        f = np.float32
        for name, p in weights.items():
            g = grads[name] * f(scale) + f(self.weight_decay) * p
            if self.momentum:
                b = self.state.setdefault(name, np.zeros_like(p))
                b[...] = b * f(self.momentum) + g
                g = g + f(self.momentum) * b if self.nesterov else b
            p -= f(self.lr * factor) * g


# --- a training step of W computers that each hold everything ------------------------------------


def gradient(model, weights, inputs, targets, global_count):
    """One computer's share of the loss, and its gradient of every parameter."""
    params = {name: array[None] for name, array in weights.items()}
    grads = {name: np.empty_like(array) for name, array in params.items()}
    y, caches = model.forward(params, inputs[None])
    loss, dy = model.loss(y, targets[None], global_count)
    model.backward(params, caches, dy, grads)
    return float(loss[0]), {name: array[0] for name, array in grads.items()}


def data_parallel(model, weights, batches, world_size, update, fmt=FLOAT32):
    """Train on `world_size` computers; return the float32 weights and the losses.

    The batch size is a multiple of `world_size`. `fmt` is how parameters and gradients are
    stored; `weights` stay in float32.
    """
    weights = {name: array.copy() for name, array in weights.items()}
    losses = []
    for inputs, targets in batches:
        used = {name: rounded(array, fmt) for name, array in weights.items()}
        parts = zip(np.split(inputs, world_size), np.split(targets, world_size), strict=True)
        shares = [gradient(model, used, x, t, model.count(targets)) for x, t in parts]
        losses.append(float(sum(loss for loss, _ in shares)))
        summed = {
            name: to_float32(
                sum_over_ranks([stored_as(grads[name], fmt) for _, grads in shares], fmt), fmt
            )
            for name in weights
        }
        update(weights, summed)
    return weights, losses


# --- a world with one process (here: thread) a rank ----------------------------------------------


class ThreadWorld(World):
    """Ranks that meet at a barrier, each hosting some consecutive ranks: what MPI will look like.

    Parameters
    ----------
    size : int
    ranks : range
    board : list
        One list shared by all, for what is sent.
    barrier : threading.Barrier
        One party a process.
    """

    def __init__(self, size, ranks, board, barrier):
        super().__init__(size, ranks)
        self.board, self.barrier = board, barrier

    def _exchange(self, rows):
        """Give every rank's row to all."""
        for rank, row in zip(self.ranks, rows, strict=True):
            self.board[rank] = row.copy()
        self.barrier.wait()
        received = [row.copy() for row in self.board]
        self.barrier.wait()
        return received

    def _all_reduce(self, x_RF, fmt):
        x_RF[...] = sum_over_ranks(self._exchange(x_RF), fmt)

    def _reduce_scatter(self, x_RF, fmt, out_RS):
        out_RS[...] = reduce_scatter(self._exchange(x_RF), fmt)[list(self.ranks)]

    def _all_gather(self, x_RS, out_RF):
        out_RF[...] = np.concatenate(self._exchange(x_RS))

    def _all_gather_in_place(self, x_RF):
        x_RF[...] = np.concatenate(self._exchange(self.own_shard(x_RF)))

    def _broadcast(self, x_RN, root):
        x_RN[...] = self._exchange(x_RN)[root]

    def _all_gather_scalars(self, values_RK):
        return np.stack(self._exchange(values_RK))


def in_threads(size, hosted, work):
    """Run ``work(world)`` in size / hosted threads that host `hosted` ranks each."""
    processes = size // hosted
    board, barrier = [None] * size, threading.Barrier(processes, timeout=60)
    results, errors = [None] * processes, []

    def run(index):
        ranks = range(index * hosted, (index + 1) * hosted)
        try:
            results[index] = work(ThreadWorld(size, ranks, board, barrier))
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
