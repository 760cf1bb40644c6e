"""Slow, obvious twins of collectives and of whole training steps; NumPy only.

Nothing here knows of units, flat buffers, padding, shards or stages: what W computers would do
that each hold everything.
"""

import math
import threading

import numpy as np

import naive
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


# --- a model of one's own, as practitioners train it ---------------------------------------------


class NaiveOptimizer:
    """W computers that each hold everything of a model of one's own: `ZeROOptimizer`'s twin.

    Bit equality can be asked for, because the order of all additions is written down: gradients
    of tied names first, then micro-batches and then ranks, or (`ranks_first`) ranks and then
    micro-batches; float32 throughout, rounded to the format of the wire before ranks are added
    and once after it.

    Parameters
    ----------
    params : dict of str to float32 array
        Tied names left out.
    world_size, micro_batches : int
    ranks_first : bool
    kind : {"adamw", "adam", "sgd"}
    options : dict
        Every hyper-parameter.
    groups : list of (names, options), optional
        Options that differ.
    tied : dict of str to str
        Alias to the name in `params`.
    frozen, keep_fp32 : collection of str
    fmt : Format
        How parameters are stored.
    wire : Format, optional
        How gradients travel, `fmt` by default.
    rounds_each : bool
        Whether each micro-batch's gradient is kept in the wire's format beside the sum.
    max_grad_norm : float, optional
    rounded_start : bool
    """

    def __init__(
        self, params, *, world_size, micro_batches=1, ranks_first=False, kind="adamw", options,
        groups=None, tied=None, frozen=(), keep_fp32=(), fmt=FLOAT32, wire=None,
        rounds_each=False, max_grad_norm=None, rounded_start=False,
    ):  # fmt: skip
        self.world_size, self.micro_batches = world_size, micro_batches
        self.ranks_first, self.rounds_each = ranks_first, rounds_each
        self.kind, self.max_grad_norm = kind, max_grad_norm
        self.names_of = {name: [name] for name in params}
        for alias, name in (tied or {}).items():
            self.names_of[name].append(alias)
        self.trainable = [name for name in params if name not in frozen]
        self.fmt = {name: FLOAT32 if name in keep_fp32 else fmt for name in params}
        wire = fmt if wire is None else wire
        self.wire = {name: FLOAT32 if name in keep_fp32 else wire for name in params}
        groups = [(self.trainable, {})] if groups is None else groups
        self.options = {name: options | own for names, own in groups for name in names}
        # One group with momentum, be it empty, and every parameter has a buffer.
        self.has_buffer = any((options | own).get("momentum") for _, own in groups)
        self.weights = {name: np.array(array, order="C") for name, array in params.items()}
        for name, array in self.weights.items():
            if name in frozen or rounded_start:
                array[...] = rounded(array, self.fmt[name])
        self.state = {
            name: [np.zeros_like(self.weights[name]), np.zeros_like(self.weights[name])]
            for name in self.trainable
        }
        self.steps = dict.fromkeys(self.trainable, 0)

    def used(self):
        """What the computers compute with."""
        return {name: rounded(array, self.fmt[name]) for name, array in self.weights.items()}

    def step(self, micro_grads, loss_scale=1.0, factor=1.0):
        """Take one step; return whether it was applied, and the norm before clipping.

        `micro_grads` has a dict for each micro-batch: name -> (W, *shape), or a list with None for
        ranks that did not use it, or None if no rank did.
        """
        with np.errstate(all="ignore"):
            grads = {
                name: self._reduced(name, micro_grads)
                for name in self.trainable
                if any(_row(g[n], r) is not None for g in micro_grads for n in self.names_of[name]
                       for r in range(self.world_size))
            }  # fmt: skip
        flat = np.concatenate([np.zeros(0, np.float32), *(g.reshape(-1) for g in grads.values())])
        if not np.all(np.isfinite(flat)):
            return False, math.inf
        numel = sum(self.weights[name].size for name in self.trainable)
        norm = fixed_norm(flat, numel) / loss_scale
        scale = 1.0
        if self.max_grad_norm is not None and norm > self.max_grad_norm:
            scale = self.max_grad_norm / norm
        for name, g in grads.items():
            self.steps[name] += 1
            with np.errstate(all="ignore"):  # a finite gradient may still have no finite square
                self._update(name, g, scale / loss_scale, factor)
        return True, norm

    def _reduced(self, name, micro_grads):
        """One parameter's gradient of the step."""
        wire = self.wire[name]
        rows_KW = [
            [self._row(name, grads, rank) for rank in range(self.world_size)]
            for grads in micro_grads
        ]
        if self.ranks_first:
            sums = [
                to_float32(sum_over_ranks([stored_as(row, wire) for row in rows], wire), wire)
                for rows in rows_KW
            ]
            return _added(sums)
        if self.rounds_each and wire is not FLOAT32:
            rows_KW = [[rounded(row, wire) for row in rows] for rows in rows_KW]
        of_rank = [_added([rows[rank] for rows in rows_KW]) for rank in range(self.world_size)]
        return to_float32(sum_over_ranks([stored_as(row, wire) for row in of_rank], wire), wire)

    def _row(self, name, grads, rank):
        """One computer's gradient of a parameter in one micro-batch: that of all its names."""
        zeros = np.zeros_like(self.weights[name])
        parts = [_row(grads[n], rank) for n in self.names_of[name] if grads[n] is not None]
        return _added([zeros if part is None else np.asarray(part) for part in parts] or [zeros])

    def _update(self, name, g, scale, factor):
        """Update one parameter."""
        o, p = self.options[name], self.weights[name]
        lr, wd = o["lr"] * factor, o["weight_decay"]
        if self.kind == "sgd":
            hyper = (scale, wd, o["momentum"], lr)
            buffer = self.state[name][0] if self.has_buffer else None
            new, buffer = naive.sgd(p, g, buffer, hyper, o["nesterov"])
            states = () if buffer is None else (buffer,)
        else:
            (beta1, beta2), t = o["betas"], self.steps[name]
            decoupled = self.kind == "adamw"
            hyper = (
                scale, 1 - lr * wd if decoupled else wd, 1 - beta1, beta2, 1 - beta2,
                math.sqrt(1 - beta2**t), lr / (1 - beta1**t), o["eps"],
            )  # fmt: skip
            new, *states = naive.adam(p, g, *self.state[name], hyper, decoupled)
        p[...] = new
        for kept, state in zip(self.state[name], states, strict=False):
            kept[...] = state


def _row(grads, rank):
    """One rank's part of what `backward` is given for a name."""
    return None if grads is None else grads[rank]


def _added(arrays):
    """Add in the order given."""
    total = arrays[0].copy()
    for array in arrays[1:]:
        total = total + array
    return total


def fixed_norm(flat, numel):
    """The order-free norm of [Note: order-free norm], in exact arithmetic."""
    largest = float(np.max(np.abs(flat), initial=0.0))
    if largest == 0.0:
        return 0.0
    exponent, k = math.frexp(largest)[1], min(51, 61 - max(numel - 1, 0).bit_length())
    total = naive.sum_squares_fixed(flat, exponent, k)
    return math.ldexp(math.sqrt(math.ldexp(float(total), -k)), exponent)
