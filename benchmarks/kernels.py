"""Every kernel beside NumPy's and torch's ways of doing the same, and beside memcpy, in one run.

    python benchmarks/kernels.py [--tiny] [--only WORD ...] [--json FILE]

A ratio is the median time of the other way divided by ours: above 1 we are faster. memcpy moves as
many bytes as the kernel reads and writes, with one thread and with two, of which the better one
counts. Whoever can write into memory that is there already does so, on all sides; tables, views and
indices are made beforehand, on all sides.

torch, ml_dtypes and optax take part where they are installed.
"""

import ctypes
import math
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from _timing import Others, Row, best, finish, installed, medians, parser, take_turns

from zero_nb.core.flat import FlatLayout, run_table, unflatten
from zero_nb.core.norm import fixed_to_norm, max_abs, max_and_squares, sum_squares_fixed
from zero_nb.core.partition import ceil_div_layout, gather_flat, partition
from zero_nb.core.precision import BFLOAT16, FLOAT16, FLOAT32
from zero_nb.core.rank_axis import spread, sum_rows, sum_rows_everywhere
from zero_nb.core.update import adam_hyper, adam_update

TORCH = installed("torch")
LR, BETAS, EPS, WEIGHT_DECAY = 1e-3, (0.9, 0.999), 1e-8, 0.01
MEMORY, CACHE = "in memory", "in cache"


def gpt2_shapes(vocab=50257, positions=1024, width=768, blocks=12):
    """Return the shapes of the tensors of GPT-2 from its configuration; 148 by default."""
    block = [(width,), (width,), (width, 3 * width), (3 * width,), (width, width), (width,)]
    block += [(width,), (width,), (width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    return [(vocab, width), (positions, width), *block * blocks, (width,), (width,)]


class Sizes:
    """How much is measured."""

    def __init__(self, tiny):
        self.tiny = tiny
        self.flat = 1 << 14 if tiny else 64 << 20
        self.update = 1 << 13 if tiny else 32 << 20
        self.cache = 1 << 12 if tiny else 1 << 18
        gpt2 = gpt2_shapes(97, 16, 12, 12) if tiny else gpt2_shapes()
        rng = np.random.default_rng(0)
        little = [
            (int(n),) for n in rng.integers(1, 101 if tiny else 1001, 300 if tiny else 10_000)
        ]
        self.lists = {
            "one tensor": [(self.flat,)],
            "GPT-2": gpt2,
            f"{len(little):,} tiny tensors": little,
        }
        self.worlds = (2, 8) if tiny else (2, 8, 64, 1024)
        self.rounds = 2 if tiny else 9
        self.limit_s = 0.2 if tiny else 2.0


class Memcpy:
    """The limit: moving the same bytes by memcpy, with one thread and with two."""

    def __init__(self, largest):
        self.source = np.ones(largest, np.uint8)
        self.target = np.ones(largest, np.uint8)
        self.pool = ThreadPoolExecutor(1)

    def ways(self, moved):
        """Return the two ways to read and write ``moved`` bytes altogether."""
        count = moved // 2
        if count > self.source.size:
            self.source, self.target = np.ones(count, np.uint8), np.ones(count, np.uint8)
        to, source, half = self.target.ctypes.data, self.source.ctypes.data, count // 2
        move = ctypes.memmove  # releases the GIL

        def two():
            other = self.pool.submit(move, to, source, half)
            move(to + half, source + half, count - half)
            other.result()

        return {"memcpy": lambda: move(to, source, count), "memcpy of two threads": two}


class Bench:
    """Measures cases and collects their rows."""

    def __init__(self, args):
        self.sizes = Sizes(args.tiny)
        self.only = args.only
        self.memcpy = Memcpy(1 << 16 if args.tiny else 256 << 20)
        self.rows = []

    def wants(self, what):
        """Whether this kernel was asked for."""
        return not self.only or any(word in what for word in self.only)

    def case(self, what, case, ways, moved, claims, *, memcpy=None, little=False, again=False):
        """Time ``ways``, of which "ours" is ours; one row for memcpy and one for each claim.

        ``claims`` are (against, reach, words): the best of the ways whose name begins with one of
        the words.
        """
        ways = {name: way for name, way in ways.items() if way is not None}
        timed = ways | self.memcpy.ways(moved)
        often = {}
        if not self.sizes.tiny:
            often = {"inner": 20, "warm": 2} if little else {"inner": 3, "warm": 1} if again else {}
        rounds = self.sizes.rounds * (3 if little and not self.sizes.tiny else 1)
        seconds = medians(take_turns(timed, rounds, limit_s=self.sizes.limit_s, **often))
        rate = f"{moved / seconds['ours'] / 1e9:.1f} GB/s"
        for against, reach, words in [("memcpy", memcpy, ("memcpy",)), *claims]:
            peers = [name for name in seconds if name != "ours" and name.startswith(words)]
            if peers:
                name, least = best(seconds, *peers)
                measured = least / seconds["ours"]
            else:
                name, measured = against, None
            self.rows.append(Row(what, case, name, measured, reach, seconds=seconds))
        print(f"  {what}, {case}: {seconds['ours'] * 1e3:.3f} ms, {rate}", file=sys.stderr)


def torch_way(make):
    """Return ``make(torch)`` where torch is installed, else None: nobody takes part."""
    if not TORCH:
        return None
    import torch

    return make(torch)


# ------------------------------------------------------------------------ partition and gather


def cuts(shapes, world_size):
    """Return for each rank (tensor start, first, end) of its piece of every tensor, by ceil-div."""
    numels = np.array([math.prod(shape) for shape in shapes])
    starts = np.cumsum(numels) - numels
    chunk = -(-numels // world_size)
    for rank in range(world_size):
        low, high = np.minimum(rank * chunk, numels), np.minimum((rank + 1) * chunk, numels)
        real = high > low
        yield (starts + low)[real].tolist(), (starts + high)[real].tolist()


def pieces_of(shapes, world_size, full, buffers):
    """Return for each rank views of its pieces in the full buffer and in its own."""
    there, here = [], []
    for buffer, (lows, highs) in zip(buffers, cuts(shapes, world_size), strict=True):
        there.append([full[a:b] for a, b in zip(lows, highs, strict=True)])
        ends = np.cumsum([b - a for a, b in zip(lows, highs, strict=True)]).tolist()
        here.append([buffer[a:b] for a, b in zip([0, *ends], ends, strict=False)])
    return there, here


def copy_each(pairs):
    """Copy views one by one."""
    for to, source in pairs:
        np.copyto(to, source)


def partition_ways(shapes, world_size, full, buffers, layout):
    """Return the ways to cut a full buffer, and those to put it together.

    For many tensors also the ways to cut a list of arrays of which each has memory of its own.
    """
    there, here = pieces_of(shapes, world_size, full, buffers)
    pairs = [pair for two in zip(here, there, strict=True) for pair in zip(*two, strict=True)]
    order = np.argsort([source.ctypes.data for _, source in pairs], kind="stable")
    in_order = [pairs[i][0] for i in order]
    few = len(pairs) <= 200_000

    def concatenate():
        for buffer, views in zip(buffers, there, strict=True):
            np.concatenate(views, out=buffer)

    cut = {
        "ours": lambda: partition(full, layout, out=buffers),
        "NumPy copyto": (lambda: copy_each(pairs)) if few else None,
        "NumPy concatenate": concatenate if few else None,
    }
    if len(shapes) > 200 and few:
        bounds = list(cuts(shapes, world_size))

        def cut_in_the_call():
            for buffer, (lows, highs) in zip(buffers, bounds, strict=True):
                np.concatenate([full[a:b] for a, b in zip(lows, highs, strict=True)], out=buffer)

        cut["slices made in the call"] = cut_in_the_call
    back = [(source, to) for to, source in pairs]
    join = {
        "ours": lambda: gather_flat(buffers, layout, out=full),
        "NumPy copyto": (lambda: copy_each(back)) if few else None,
        "NumPy concatenate": (lambda: np.concatenate(in_order, out=full)) if few else None,
    }
    if len(shapes) > 200:
        indices = [
            np.concatenate([np.arange(a, b) for a, b in zip(*cut_, strict=True)])
            for cut_ in cuts(shapes, world_size)
        ]

        def take():
            for buffer, index in zip(buffers, indices, strict=True):
                np.take(full, index, out=buffer, mode="clip")

        def put():
            for buffer, index in zip(buffers, indices, strict=True):
                full[index] = buffer

        cut["NumPy take"], join["NumPy put"] = take, put
    if TORCH and few:
        import torch

        wrap = torch.from_numpy
        sources = [[wrap(view) for view in views] for views in there]
        targets = [[wrap(view) for view in views] for views in here]
        outs, whole = [wrap(buffer) for buffer in buffers], wrap(full)
        every_source = [view for views in sources for view in views]
        every_target = [view for views in targets for view in views]
        joined = [wrap(view) for view in in_order]

        def cat():
            for out, views in zip(outs, sources, strict=True):
                torch.cat(views, out=out)

        cut["torch cat"] = cat
        cut["torch foreach copy"] = lambda: torch._foreach_copy_(every_target, every_source)
        join["torch cat"] = lambda: torch.cat(joined, out=whole)
        join["torch foreach copy"] = lambda: torch._foreach_copy_(every_source, every_target)
    if len(shapes) <= 200:
        return {"partition": cut, "gather": join}
    own = [view.copy() for view in unflatten(full, shapes)]
    cut_own = {"ours": lambda: partition(own, layout, out=buffers)}
    if few:
        numels = [array.size for array in own]
        chunks = [-(-n // world_size) for n in numels]
        views = [
            [a[r * c : (r + 1) * c] for a, c in zip(own, chunks, strict=True) if r * c < a.size]
            for r in range(world_size)
        ]

        def concatenate_own():
            for buffer, pieces in zip(buffers, views, strict=True):
                np.concatenate(pieces, out=buffer)

        cut_own["NumPy concatenate"] = concatenate_own
    if TORCH and few:
        pieces = [[torch.from_numpy(view) for view in one] for one in views]

        def cat_own():
            for out, one in zip(outs, pieces, strict=True):
                torch.cat(one, out=out)

        cut_own["torch cat"] = cat_own
    if "NumPy take" in cut:

        def flatten_and_take():
            np.concatenate(own, out=full)
            take()

        cut_own["NumPy concatenate, take"] = flatten_and_take
    return {"partition": cut, "gather": join, "partition a list": cut_own}


def bench_partition(bench):
    """Cut and put together each list of tensors at each world size."""
    for name, shapes in bench.sizes.lists.items():
        full = np.random.default_rng(0).random(sum(map(math.prod, shapes)), np.float32)
        tiny, one = "tiny" in name, name == "one tensor"
        for world_size in bench.sizes.worlds:
            if tiny and world_size > 64:
                continue  # fewer elements than ranks in most tensors
            layout = ceil_div_layout(shapes, world_size)
            buffers = [np.ones(numel, np.float32) for numel in layout.buffer_numels]
            ways = partition_ways(shapes, world_size, full, buffers, layout)
            reached = world_size <= (8 if tiny else 64)
            if tiny:
                claims = [("NumPy", 10.0 if reached else None, ("NumPy",))]
                if world_size <= 8:
                    claims.append(("torch", None, ("torch",)))
                limit = None
            else:
                level = 1.0 if reached and not one else None
                claims = [("NumPy", level, ("NumPy",)), ("torch", level, ("torch",))]
                limit = 0.95 if reached and not one else None
            for what, some in ways.items():
                case, moved = f"{name}, W = {world_size}", 2 * full.nbytes
                said = claims
                if "slices made in the call" in some:
                    said = [*claims, ("slices made in the call", None, ("slices",))]
                bench.case(what, case, some, moved, said, memcpy=limit)
                if tiny:  # 20 MB: over and over again it stays in a cache of 32 MB, in part
                    bench.case(what, f"{case}, repeated", some, moved, said, again=True)


# ------------------------------------------------------------------------- sums over the rank axis


def bench_reduce_scatter(bench):
    """Sum rows of one flat buffer: what a reduce-scatter computes."""
    rng = np.random.default_rng(0)
    for place, elements in ((MEMORY, bench.sizes.flat), (CACHE, bench.sizes.cache)):
        flat = rng.standard_normal(elements, np.float32)
        bits = BFLOAT16.round(flat)
        for world_size in bench.sizes.worlds:
            x_RN, out = flat.reshape(world_size, -1), np.ones(elements // world_size, np.float32)

            def add_each(x_RN=x_RN, out=out):
                np.copyto(out, x_RN[0])
                for row in x_RN[1:]:
                    np.add(out, row, out=out)

            def torch_sum(torch, x_RN=x_RN, out=out):
                x, o = torch.from_numpy(x_RN), torch.from_numpy(out)
                return lambda: torch.sum(x, 0, out=o)

            ways = {
                "ours": lambda x_RN=x_RN, out=out: sum_rows(x_RN, out=out),
                "np.add.reduce": lambda x_RN=x_RN, out=out: np.add.reduce(x_RN, 0, out=out),
                "np.add, row by row": add_each if world_size <= 64 else None,
                "torch.sum": torch_way(torch_sum),
            }
            asked = place == MEMORY and world_size <= 64
            bench.case(
                "reduce-scatter", f"fp32, W = {world_size}, {place}", ways,
                flat.nbytes + out.nbytes,
                [("np.add.reduce or torch.sum", 1.3 if asked else None, ("np.add", "torch"))],
                memcpy=0.9 if asked else None, little=place == CACHE,
            )  # fmt: skip
            half_RN, half = bits.reshape(world_size, -1), np.ones(out.size, np.uint16)

            def torch_half(torch, half_RN=half_RN, half=half):
                x = torch.from_numpy(half_RN).view(torch.bfloat16)
                o = torch.from_numpy(half).view(torch.bfloat16)
                return lambda: torch.sum(x, 0, out=o)

            ways = {
                "ours": lambda x=half_RN, o=half: sum_rows(x, BFLOAT16, out=o),
                "torch.sum": torch_way(torch_half),
            }
            bench.case(
                "reduce-scatter", f"bf16, W = {world_size}, {place}", ways,
                bits.nbytes + half.nbytes, [("torch.sum", None, ("torch",))],
                little=place == CACHE,
            )  # fmt: skip


def bench_all_gather(bench):
    """Give every rank a copy of all shards; and the sum of all rows to every row."""
    for world_size in bench.sizes.worlds:
        out_RN = np.ones((world_size, bench.sizes.flat // world_size), np.float32)
        source = np.ones(out_RN.shape[1], np.float32)

        def torch_copy(torch, out_RN=out_RN, source=source):
            out, src = torch.from_numpy(out_RN), torch.from_numpy(source)
            return lambda: out.copy_(src.expand_as(out))

        ways = {
            "ours": lambda o=out_RN, s=source: spread(s, o),
            "NumPy copyto": lambda o=out_RN, s=source: np.copyto(o, s),
            "torch copy_": torch_way(torch_copy),
        }
        moved = out_RN.nbytes + source.nbytes
        claims = [("NumPy", None, ("NumPy",)), ("torch", None, ("torch",))]
        bench.case("all-gather", f"fp32, W = {world_size}, {MEMORY}", ways, moved, claims)

        def all_reduce(x_RN=out_RN, total=source):
            np.add.reduce(x_RN, 0, out=total)
            np.copyto(x_RN, total)

        ways = {"ours": lambda x=out_RN: sum_rows_everywhere(x), "NumPy": all_reduce}
        case = f"fp32, W = {world_size}, {MEMORY}"
        out_RN[...] = 0
        bench.case("all-reduce", case, ways, 2 * out_RN.nbytes, [("NumPy", None, ("NumPy",))])


# ------------------------------------------------------------------------------------------- AdamW


def whole_run(numels):
    """Return the table of runs of tensors that lie end to end, on one rank."""
    layout = FlatLayout([str(i) for i in range(len(numels))], [(n,) for n in numels], 1)
    place = dict.fromkeys(("TARGET", "GRAD", "STATE", "PARAM"), "shard")
    return run_table(layout, range(1), placements=place, hyper_of=[0] * len(numels))


def numpy_adamw(p, g, m, v):
    """Return AdamW in NumPy without temporaries."""
    a, b = np.empty_like(p), np.empty_like(p)
    beta1, beta2 = BETAS

    def step():
        np.multiply(p, np.float32(1 - LR * WEIGHT_DECAY), out=p)
        np.multiply(m, np.float32(beta1), out=m)
        np.multiply(g, np.float32(1 - beta1), out=a)
        np.add(m, a, out=m)
        np.multiply(v, np.float32(beta2), out=v)
        np.multiply(g, g, out=a)
        np.multiply(a, np.float32(1 - beta2), out=a)
        np.add(v, a, out=v)
        np.sqrt(v, out=a)
        np.multiply(a, np.float32(1 / math.sqrt(1 - beta2)), out=a)
        np.add(a, np.float32(EPS), out=a)
        np.multiply(m, np.float32(LR / (1 - beta1)), out=b)
        np.divide(b, a, out=b)
        np.subtract(p, b, out=p)

    return step


def torch_adamw(torch, pieces, grads, **kind):
    """Return torch's AdamW on these tensors, which it owns."""
    params = [torch.nn.Parameter(piece.clone()) for piece in pieces]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    optimizer = torch.optim.AdamW(
        params, lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, **kind
    )
    optimizer.step()
    return params, optimizer


def torch_fused(numels, **kind):
    """Return torch's AdamW in float32 on tensors of these sizes."""

    def make(torch):
        pieces = [torch.rand(n) for n in numels]
        _, optimizer = torch_adamw(torch, pieces, pieces, **kind)
        return optimizer.step

    return torch_way(make)


def torch_with_master(numel):
    """Return torch's fused AdamW on a float32 master, with casts: torch has no call for both."""

    def make(torch):
        param, grad = torch.rand(2, numel).to(torch.bfloat16)
        (master,), optimizer = torch_adamw(torch, [param.float()], [grad.float()], fused=True)

        def step():
            master.grad.copy_(grad)
            optimizer.step()
            param.copy_(master.detach())

        return step

    return torch_way(make)


def optax_adamw(numel):
    """Return optax's AdamW under jit, with the old buffers given away."""
    if not installed("jax", "optax"):
        return None
    import jax
    import optax

    rule = optax.adamw(LR, *BETAS, eps=EPS, weight_decay=WEIGHT_DECAY)
    params = jax.numpy.full(numel, 0.5, "float32")
    held = [params, rule.init(params), jax.numpy.full(numel, 0.1, "float32")]

    def update(params, state, grad):
        updates, state = rule.update(grad, state, params)
        return optax.apply_updates(params, updates), state

    update = jax.jit(update, donate_argnums=(0, 1))

    def step():
        held[0], held[1] = update(*held)
        held[0].block_until_ready()

    return step


def bench_adamw(bench):
    """Update by AdamW: float32, and bfloat16 with a float32 master."""
    rng = np.random.default_rng(0)
    hyper = adam_hyper(LR, BETAS, EPS, WEIGHT_DECAY, 2)[None]
    cache = bench.sizes.cache
    places = (
        (MEMORY, bench.sizes.update, 0.95),
        (f"{CACHE} (L3: {cache:,})", cache, 2.0),
        (f"{CACHE} (L2: {cache // 16:,})", cache // 16, 2.0),
    )
    for place, numel, reach in places:
        p, g, m, v = (rng.random(numel, np.float32) for _ in range(4))
        runs, little = whole_run([numel]), place != MEMORY
        ways = {
            "ours": lambda p=p, g=g, m=m, v=v, runs=runs: adam_update(
                p, g, m, v, runs, hyper, decoupled=True
            ),
            "NumPy, with out": numpy_adamw(p.copy(), g, m.copy(), v.copy()),
            "torch fused": torch_fused([numel], fused=True),
            "torch foreach": torch_fused([numel], foreach=True),
            "optax under jit": optax_adamw(numel),
        }
        claims = [
            ("torch fused", reach, ("torch fused",)),
            ("torch foreach", None, ("torch foreach",)),
            ("optax under jit", None, ("optax",)),
            ("NumPy, with out", None, ("NumPy",)),
        ]
        bench.case("AdamW", f"fp32, {place}", ways, 28 * numel, claims, little=little)
        grad, param = BFLOAT16.round(g), BFLOAT16.round(p)
        ways = {
            "ours": lambda p=p, g=grad, m=m, v=v, runs=runs, param=param: adam_update(
                p, g, m, v, runs, hyper, decoupled=True, grad_format=BFLOAT16,
                param=param, param_format=BFLOAT16,
            ),
            "torch fused, and two casts": torch_with_master(numel),
            "torch fused on fp32, the same bytes": torch_fused([numel], fused=True),
        }  # fmt: skip
        claims = [
            ("torch fused on fp32", reach, ("torch fused on",)),
            ("torch fused, and two casts", reach, ("torch fused, and",)),
        ]
        case = f"bf16 + master, {place}"
        bench.case("AdamW", case, ways, 28 * numel, claims, little=little)
    for name, shapes in list(bench.sizes.lists.items())[1:]:
        numels = [math.prod(shape) for shape in shapes]
        p, g, m, v = (rng.random(sum(numels), np.float32) for _ in range(4))
        runs = whole_run(numels)
        ways = {
            "ours": lambda p=p, g=g, m=m, v=v, runs=runs: adam_update(
                p, g, m, v, runs, hyper, decoupled=True
            ),
            "torch fused": torch_fused(numels, fused=True),
        }
        claims = [("torch fused", None, ("torch",))]
        bench.case("AdamW", f"fp32, {name}", ways, 28 * p.size, claims)


# ------------------------------------------------------------------------------------ casts


def ml_dtypes_cast(x, bits):
    """Return the casts of ml_dtypes to bfloat16 and back."""
    if not installed("ml_dtypes"):
        return None, None
    import ml_dtypes

    half = bits.view(ml_dtypes.bfloat16)
    return (
        lambda: np.copyto(half, x, casting="unsafe"),
        lambda: np.copyto(x, half, casting="unsafe"),
    )


def bench_casts(bench):
    """Round float32 to 16 bits, and widen them."""
    for place, numel in ((MEMORY, bench.sizes.flat), (CACHE, bench.sizes.cache // 2)):
        x = np.random.default_rng(0).standard_normal(numel, np.float32)
        bits, little = BFLOAT16.round(x), place == CACHE
        to_ml, from_ml = ml_dtypes_cast(x, bits)

        def torch_pair(torch, x=x, bits=bits, dtype="bfloat16"):
            wide = torch.from_numpy(x)
            half = torch.from_numpy(bits).view(getattr(torch, dtype))
            return lambda: half.copy_(wide), lambda: wide.copy_(half)

        to_torch, from_torch = torch_way(torch_pair) or (None, None)
        ways = {
            "ours": lambda x=x, bits=bits: BFLOAT16.round(x, out=bits),
            "torch copy_": to_torch,
            "ml_dtypes": to_ml,
        }
        claims = [("torch copy_", 1.0, ("torch",)), ("ml_dtypes", 2.0, ("ml_dtypes",))]
        bench.case("fp32 to bf16", place, ways, 6 * numel, claims, little=little)
        ways = {
            "ours": lambda x=x, bits=bits: BFLOAT16.widen(bits, out=x),
            "torch copy_": from_torch,
            "ml_dtypes": from_ml,
        }
        claims = [("torch copy_", None, ("torch",)), ("ml_dtypes", None, ("ml_dtypes",))]
        bench.case("bf16 to fp32", place, ways, 6 * numel, claims, little=little)
        half = FLOAT16.round(x)
        to_torch, from_torch = torch_way(
            lambda torch, pair=torch_pair, half=half: pair(torch, bits=half, dtype="float16")
        ) or (None, None)
        for what, ours, theirs, numpy_way in (
            ("fp32 to fp16", lambda x=x, half=half: FLOAT16.round(x, out=half), to_torch,
             lambda x=x, half=half: np.copyto(half.view(np.float16), x, casting="same_kind")),
            ("fp16 to fp32", lambda x=x, half=half: FLOAT16.widen(half, out=x), from_torch,
             lambda x=x, half=half: np.copyto(x, half.view(np.float16))),
        ):  # fmt: skip
            ways = {"ours": ours, "torch copy_": theirs, "NumPy copyto": numpy_way}
            claims = [("torch copy_", None, ("torch",)), ("NumPy", None, ("NumPy",))]
            bench.case(what, place, ways, 6 * numel, claims, little=little)


# ------------------------------------------------------------------------------- norm, finite check


def bench_norm(bench):
    """Take the order-free norm, and look for what is not finite."""
    for place, numel in ((MEMORY, bench.sizes.flat), (CACHE, bench.sizes.cache)):
        x = np.random.default_rng(0).standard_normal(numel, np.float32)
        runs, seen = whole_run([numel]), np.empty(numel, bool)

        def norm(x=x, runs=runs, numel=numel):
            rows, squares = max_and_squares(x, runs, 1, FLOAT32, numel)
            largest = float(rows[0])
            total = int(sum_squares_fixed(x, runs, 1, FLOAT32, largest, numel, squares)[0])
            return str(fixed_to_norm(total, largest, numel))

        def torch_norm(torch, x=x):
            wide = torch.from_numpy(x)
            return lambda: str(torch.linalg.vector_norm(wide).item())

        def torch_finite(torch, x=x):
            wide = torch.from_numpy(x)
            return lambda: bool(torch.isfinite(wide).all())

        ways = {
            "ours": norm,
            "np.dot": lambda x=x: str(np.sqrt(np.dot(x, x))),
            "torch vector_norm": torch_way(torch_norm),
        }
        claims = [("np.dot", 1.0, ("np.dot",)), ("torch vector_norm", None, ("torch",))]
        little = place != MEMORY
        # A read that writes nothing: memcpy moves as many bytes as are read once.
        bench.case("global norm", place, ways, x.nbytes, claims, little=little)
        ways = {
            "ours": lambda x=x, runs=runs: bool(max_abs(x, runs, 1)[0] < np.inf),
            "np.isfinite": lambda x=x: bool(np.isfinite(x).all()),
            "np.isfinite, with out": lambda x=x, seen=seen: bool(np.isfinite(x, out=seen).all()),
            "torch isfinite": torch_way(torch_finite),
        }
        claims = [("np.isfinite", 2.0, ("np.isfinite",)), ("torch isfinite", None, ("torch",))]
        bench.case("finite check", place, ways, x.nbytes, claims, little=little)


PARTS = {
    "partition gather": bench_partition,
    "reduce-scatter": bench_reduce_scatter,
    "all-gather all-reduce": bench_all_gather,
    "AdamW": bench_adamw,
    "cast": bench_casts,
    "norm finite": bench_norm,
}


def main(words=None):
    """Measure what was asked for."""
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--only", nargs="+", help=f"words of: {', '.join(PARTS)}")
    args = options.parse_args(words)
    bench, others = Bench(args), Others()
    for name, part in PARTS.items():
        if bench.wants(name):
            part(bench)
    finish("kernels", bench.rows, args, others)


if __name__ == "__main__":
    main()
