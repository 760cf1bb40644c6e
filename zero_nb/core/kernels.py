"""Every compiled kernel of the package: raw, in place, unchecked.

A kernel takes one-dimensional contiguous buffers and int64 tables and trusts them. Exactly one
public wrapper in a neighbouring module checks shape, dtype, layout, alignment, writability and
overlap before it calls; nothing outside ``zero_nb.core`` imports this module.

[Note: one file] Numba's disk cache is keyed by the file of the function that is called, so a
helper that changed in another file would silently stay stale. Kernels and the constants they read
therefore live here together.

[Note: same bits] No fastmath, float32 constants, a fixed order of addition, ``prange`` over outputs
and never over a sum. Every kernel gives the same bits with any number of threads, in its
sequential and in its parallel form, and with ``NUMBA_DISABLE_JIT=1``.

[Note: re-slice] ``d[a + i] = s[b + i]`` with signed computed indices does not vectorise (0.16 of
the speed of memcpy). Kernels slice first and run over ``range(len)``.

[Note: two forms] A kernel ends in ``first, last`` and does those units of its work (blocks, or
groups of runs). It is called as it is for little work. Its parallel form takes the same arguments
and calls it for one unit at a time. Units are cast to int64 there, or Numba would compile the
kernel again for the unsigned index of ``prange``.

[Note: addresses] Partition and gather copy between many arrays, which a kernel cannot take as a
list. They get the arrays' addresses instead; the wrapper holds the arrays while the kernel runs.

[Note: streaming] A core that writes a line of memory first reads it. Stores past the caches skip
that and save a third of a copy's traffic; but what was written is then not in the cache. So only
calls that write more than STREAM_FROM bytes, which no cache would keep anyway, store that way.

[Note: uint32] Inside njit ``uint32 op uint32`` is 64 bits wide, so each sub-expression is wrapped;
without JIT a wrapping add would warn, so the formulas below never wrap. (_nearest_bfloat16
does for some NaNs, for which it is not meant; ``launch`` keeps the warning back.)
"""

import ctypes
import os
import threading

import numba
import numpy as np
from numba import njit, prange, types
from numba.core import cgutils
from numba.extending import intrinsic

# Below this much work, in elements that are copied, the sequential form is faster than waking the
# threads. An element of other work counts as so many of them.
PARALLEL_FROM = 1 << 18
UPDATE_WORK, SQUARES_WORK, CAST_WORK, SUM_WORK = 8, 4, 4, 2

STREAM_FROM = 1 << 25  # bytes written in one call, see [Note: streaming]

COPY_BLOCK = 1 << 16  # elements of one block of a copy
CAST_BLOCK = 1 << 14  # elements of one block of a cast
RUN_BLOCK = 1 << 14  # elements of the longest run, and of a group of runs that a thread takes
SUM_BLOCK = 1 << 13  # elements of one block of a sum over rows
CACHE_BLOCK = 1 << 10  # elements of one block that is widened into a scratch in the L1 cache

# Columns of a table of runs (see zero_nb.core.flat).
ROW, TARGET, GRAD, STATE, PARAM, NUMEL, HYPER = range(7)
RUN_COLUMNS = 7
UNCHECKED = 1 << 62  # stands for the size of what a column points into, if that does not matter

# Columns of Adam's table of hyper-parameters.
ADAM_GRAD_SCALE, ADAM_DECAY, ADAM_ONE_MINUS_BETA1, ADAM_BETA2 = 0, 1, 2, 3
ADAM_ONE_MINUS_BETA2, ADAM_BIAS2_SQRT, ADAM_STEP_SIZE, ADAM_EPS = 4, 5, 6, 7
ADAM_HYPER = 8

# Columns of SGD's table of hyper-parameters.
SGD_GRAD_SCALE, SGD_WEIGHT_DECAY, SGD_MOMENTUM, SGD_LR = 0, 1, 2, 3
SGD_HYPER = 4

# How an element is stored.
CODE_FLOAT32, CODE_BFLOAT16, CODE_FLOAT16 = 0, 1, 2

# In place of the exponent of a grid for squares, of which the least is -148.
NO_GRID = -(1 << 20)

_lock = threading.Lock()
_forked = False


def _jit(parallel=False, inline=False):
    """Return the one njit decorator of the package, without a cache where none can be written."""

    def decorate(function):
        options = {"error_model": "numpy", "nogil": True, "parallel": parallel}
        if inline:
            options["inline"] = "always"
        try:
            return njit(cache=True, **options)(function)
        except RuntimeError:  # numba found no directory it may write a cache to
            return njit(**options)(function)

    return decorate


def runs_parallel(elements):
    """Whether that much work is worth waking the threads for."""
    return elements >= PARALLEL_FROM


def streams(written_bytes):
    """Whether so many bytes are written that no cache keeps them."""
    return written_bytes >= STREAM_FROM


def copy_blocks(elements):
    """Count the blocks of a copy."""
    return -(-elements // COPY_BLOCK)


def cast_blocks(elements):
    """Count the blocks of a cast."""
    return -(-elements // CAST_BLOCK)


def sum_blocks(elements):
    """Count the blocks of a row in a sum over rows."""
    return -(-elements // SUM_BLOCK)


def launch(kernel, parallel, elements, *args):
    """Call the kernel for little work, else its parallel form, one at a time.

    The lock is there for numba's workqueue layer, which aborts the process when two threads start
    parallel kernels at once; a parallel kernel uses every thread anyway, so nothing is lost with
    the other layers. Sequential kernels release the GIL and need no lock.
    """
    if numba.config.DISABLE_JIT:
        with np.errstate(all="ignore"):  # compiled code does not warn either
            return (parallel if runs_parallel(elements) else kernel)(*args)
    if _forked or not runs_parallel(elements):
        return kernel(*args)
    with _lock:
        return parallel(*args)


def _after_fork():
    """Let a forked child run every kernel in its one thread, with the same bits.

    Its parent's worker threads do not exist there: a parallel kernel would wait for them forever
    (workqueue), or end the process (GNU's OpenMP). Another thread may have held the lock.
    """
    global _lock, _forked
    _lock, _forked = threading.Lock(), True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


# ---------------------------------------------------------------------------------------------
# Bytes at addresses

_LINE = 64  # bytes of a line of the cache; _copy_lines and _stream_lines store one at a time
_LEAST_STREAM = 2048  # bytes; a shorter copy is not worth its ends
_LONG_RUN = 1 << 12  # elements; a shorter run is not worth its ends either


if numba.config.DISABLE_JIT:

    def _move(to, source, count):
        """Copy bytes from address to address."""
        ctypes.memmove(int(to), int(source), int(count))

    def _copy_lines(to, source, lines):
        """Copy whole lines from address to address."""
        ctypes.memmove(int(to), int(source), _LINE * int(lines))

    _stream_lines = _copy_lines

    def _fence():
        """Wait until streamed lines can be seen by every thread."""

    def _word(address):
        """Return the int64 at an address."""
        return ctypes.c_int64.from_address(int(address)).value

else:

    @intrinsic
    def _move(_typing, _to, _source, _count):
        """Copy bytes from address to address, by the C library's memcpy."""

        def build(context, builder, _signature, args):
            to, source = (builder.inttoptr(arg, cgutils.voidptr_t) for arg in args[:2])
            cgutils.raw_memcpy(builder, to, source, args[2], 1)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64), build

    ir = cgutils.ir  # llvmlite's, as numba has it

    def _lines_copied(aligned):
        """Return the builder of a loop that copies lines, past the caches if ``to`` is aligned."""

        def build(context, builder, _signature, args):
            line = ir.VectorType(ir.IntType(64), _LINE // 8).as_pointer()
            with cgutils.for_range(builder, args[2]) as loop:
                at = builder.mul(loop.index, ir.IntType(64)(_LINE))
                to, source = (builder.inttoptr(builder.add(arg, at), line) for arg in args[:2])
                value = builder.load(source, align=1)
                store = builder.store(value, to, align=_LINE if aligned else 1)
                if aligned:
                    mark = builder.module.add_metadata([ir.IntType(32)(1)])
                    store.set_metadata("nontemporal", mark)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64), build

    @intrinsic
    def _copy_lines(_typing, _to, _source, _lines):
        """Copy whole lines from address to address."""
        return _lines_copied(aligned=False)

    @intrinsic
    def _stream_lines(_typing, _to, _source, _lines):
        """Copy whole lines from address to address past the caches; ``to`` is aligned to one."""
        return _lines_copied(aligned=True)

    @intrinsic
    def _fence(_typing):
        """Wait until streamed lines can be seen by every thread."""

        def build(context, builder, _signature, _args):
            builder.fence("seq_cst")
            return context.get_dummy_value()

        return types.void(), build

    @intrinsic
    def _word(_typing, _address):
        """Return the int64 at an address."""

        def build(_context, builder, _signature, args):
            return builder.load(builder.inttoptr(args[0], ir.IntType(64).as_pointer()))

        return types.int64(types.int64), build


@_jit()
def _address(array, start):
    """Return the address of an element."""
    return np.int64(array.ctypes.data) + start * array.itemsize


@_jit()
def _until_line(array, start, stop):
    """Return where the first line begins in array[start:stop]: chunks from there on are aligned."""
    return min(start + (-_address(array, start) & (_LINE - 1)) // array.itemsize, stop)


@_jit()
def _before_line(array, start, stop):
    """How many elements of array[start:stop] come before its first line; none if it is short.

    A vector that lies on two lines of the cache takes two accesses, and NumPy's large arrays begin
    16 bytes after a line: an update in memory took a third longer. Arrays that belong together
    mostly begin alike, so one stands for all.
    """
    if stop - start < _LONG_RUN:
        return 0
    return _until_line(array, start, stop) - start


@_jit()
def _copy_bytes(to, source, count):
    """Copy bytes between places that do not overlap; for a few thousand memcpy takes longer."""
    if count < _LINE:
        _move(to, source, count)
        return
    _copy_lines(to, source, count // _LINE)
    rest = count - _LINE
    _copy_lines(to + rest, source + rest, 1)  # the last line, in part once more


@_jit()
def _stream(to, source, count):
    """Copy bytes from address to address past the caches; end with _fence()."""
    if count < _LEAST_STREAM:
        _copy_bytes(to, source, count)
        return
    head = -to & (_LINE - 1)
    lines = (count - head) // _LINE
    done = head + lines * _LINE
    _move(to, source, head)
    _stream_lines(to + head, source + head, lines)
    _move(to + done, source + done, count - done)


# ---------------------------------------------------------------------------------------------
# 16-bit formats


@_jit()
def _nearest_bfloat16(x):
    """Round a float32 that is not NaN to bfloat16 bits, to nearest even."""
    bits = np.float32(x).view(np.uint32)
    odd = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
    return np.uint16(np.uint32(np.uint32(np.uint32(bits + np.uint32(0x7FFF)) + odd) >> 16))


@_jit()
def _round_bfloat16(x):
    """Round a float32 to bfloat16 bits, to nearest even; NaN becomes 0x7fc0 | sign."""
    if np.isnan(x):
        bits = np.float32(x).view(np.uint32)
        sign = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(0x8000))
        return np.uint16(np.uint32(sign | np.uint32(0x7FC0)))
    return _nearest_bfloat16(x)


@_jit()
def _widen_bfloat16(half):
    """Widen bfloat16 bits to float32: 16 zeros at the end, always exact."""
    return np.uint32(np.uint32(half) << np.uint32(16)).view(np.float32)


@_jit()
def _round_float16(x):
    """Round a float32 to float16 bits, to nearest even, with subnormals.

    Too large becomes infinity; a NaN keeps its sign and the upper bits of its payload and is quiet.
    """
    bits = np.float32(x).view(np.uint32)
    sign = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(0x8000))
    size = np.uint32(bits & np.uint32(0x7FFFFFFF))
    if size >= np.uint32(0x47800000):  # 2**16 and above, infinity, NaN
        half = np.uint32(0x7C00)
        if size > np.uint32(0x7F800000):
            payload = np.uint32(np.uint32(size >> np.uint32(13)) & np.uint32(0x3FF))
            half = np.uint32(np.uint32(0x7E00) | payload)
    elif size >= np.uint32(0x38800000):  # 2**-14, the smallest normal float16
        odd = np.uint32(np.uint32(size >> np.uint32(13)) & np.uint32(1))
        moved = np.uint32(size - np.uint32(0x38000000))  # exponent bias 127 -> 15
        half = np.uint32(np.uint32(np.uint32(moved + np.uint32(0xFFF)) + odd) >> np.uint32(13))
    else:
        # A multiple of 2**-24. Adding 0.5, whose last bit is worth 2**-24, rounds to nearest even
        # in hardware and leaves the multiple in the low bits.
        half = np.float32(np.uint32(size).view(np.float32) + np.float32(0.5)).view(np.uint32)
        half = np.uint32(half - np.uint32(0x3F000000))
    return np.uint16(np.uint32(half | sign))


@_jit()
def _widen_float16(half):
    """Widen float16 bits to float32, always exact."""
    half = np.uint32(half)
    sign = np.uint32(np.uint32(half & np.uint32(0x8000)) << np.uint32(16))
    size = np.uint32(np.uint32(half & np.uint32(0x7FFF)) << np.uint32(13))
    if size >= np.uint32(0x0F800000):  # infinity and NaN
        size = np.uint32(size | np.uint32(0x7F800000))
    elif size >= np.uint32(0x00800000):  # normal
        size = np.uint32(size + np.uint32(0x38000000))  # exponent bias 15 -> 127
    else:  # zeros and subnormals: a small integer times 2**-24
        small = np.float32(np.int32(size >> np.uint32(13))) * np.float32(5.9604644775390625e-08)
        size = np.float32(small).view(np.uint32)
    return np.uint32(size | sign).view(np.float32)


@_jit()
def _wide(x, code):
    """Widen one number of any format to float32."""
    if code == CODE_FLOAT32:
        return np.float32(x)
    if code == CODE_BFLOAT16:
        return _widen_bfloat16(x)
    return _widen_float16(x)


@_jit()
def _copy(source, out):
    """Copy one block."""
    for i in range(out.size):
        out[i] = source[i]


@_jit()
def _widen(source, code, out):
    """Widen one block of any format to float32."""
    if code == CODE_FLOAT32:
        for i in range(out.size):
            out[i] = np.float32(source[i])
    elif code == CODE_BFLOAT16:
        for i in range(out.size):
            out[i] = _widen_bfloat16(source[i])
    else:
        for i in range(out.size):
            out[i] = _widen_float16(source[i])


@_jit()
def _round_numbers(source, out):
    """Round one float32 block to bfloat16 bits as if there were no NaN; return whether one is.

    To look for a NaN takes less than to choose at every element between two results.
    """
    nan = False
    for i in range(out.size):
        out[i] = _nearest_bfloat16(source[i])
        nan |= np.isnan(source[i])
    return nan


@_jit()
def _round(source, code, out):
    """Round one float32 block to any format."""
    if code == CODE_FLOAT32:
        for i in range(out.size):
            out[i] = source[i]
    elif code == CODE_BFLOAT16:
        if _round_numbers(source, out):
            for i in range(out.size):
                out[i] = _round_bfloat16(source[i])
    else:
        for i in range(out.size):
            out[i] = _round_float16(source[i])


# Not streamed: by way of a scratch in the cache it was slower, by 10 to 20 %.
@_jit()
def _widen_blocks(source, code, out, first, last):
    """Widen blocks first..last of a buffer."""
    start, stop = first * CAST_BLOCK, min(last * CAST_BLOCK, out.size)
    _widen(source[start:stop], code, out[start:stop])


@_jit(parallel=True)
def _widen_blocks_parallel(source, code, out, first, last):
    """Widen blocks first..last of a buffer."""
    for b in prange(first, last):
        _widen_blocks(source, code, out, np.int64(b), np.int64(b) + 1)


@_jit()
def _round_blocks(source, code, out, first, last):
    """Round blocks first..last of a buffer."""
    start, stop = first * CAST_BLOCK, min(last * CAST_BLOCK, out.size)
    _round(source[start:stop], code, out[start:stop])


@_jit(parallel=True)
def _round_blocks_parallel(source, code, out, first, last):
    """Round blocks first..last of a buffer."""
    for b in prange(first, last):
        _round_blocks(source, code, out, np.int64(b), np.int64(b) + 1)


# ---------------------------------------------------------------------------------------------
# The rank axis: sums over rows in row order, and copies to every row


# Inlined, so that the code of the format is a constant and each caller gets one tight loop.
@_jit(inline=True)
def _add_rows(x, rows, numel, start, code, o):
    """Add the blocks of all rows into o, left to right from row 0, four rows a pass."""
    size = o.size
    a = x[start : start + size]
    r = 1
    if rows >= 4:
        b = x[numel + start : numel + start + size]
        c = x[2 * numel + start : 2 * numel + start + size]
        d = x[3 * numel + start : 3 * numel + start + size]
        for i in range(size):
            o[i] = ((_wide(a[i], code) + _wide(b[i], code)) + _wide(c[i], code)) + _wide(d[i], code)
        r = 4
    elif rows >= 2:
        b = x[numel + start : numel + start + size]
        for i in range(size):
            o[i] = _wide(a[i], code) + _wide(b[i], code)
        r = 2
    else:
        for i in range(size):
            o[i] = _wide(a[i], code)
    while r + 4 <= rows:
        a = x[r * numel + start : r * numel + start + size]
        b = x[(r + 1) * numel + start : (r + 1) * numel + start + size]
        c = x[(r + 2) * numel + start : (r + 2) * numel + start + size]
        d = x[(r + 3) * numel + start : (r + 3) * numel + start + size]
        for i in range(size):
            total = (o[i] + _wide(a[i], code)) + _wide(b[i], code)
            o[i] = (total + _wide(c[i], code)) + _wide(d[i], code)
        r += 4
    while r < rows:
        a = x[r * numel + start : r * numel + start + size]
        for i in range(size):
            o[i] = o[i] + _wide(a[i], code)
        r += 1


@_jit()
def _add_rows_float32(x, rows, numel, start, o):
    """Add the blocks of all float32 rows into o."""
    _add_rows(x, rows, numel, start, CODE_FLOAT32, o)


@_jit()
def _sum_rows(x, rows, out, stream, first, last):
    """Blocks first..last of the sum of float32 rows."""
    numel = out.size
    if not stream:
        for start in range(first * SUM_BLOCK, min(last * SUM_BLOCK, numel), SUM_BLOCK):
            _add_rows_float32(x, rows, numel, start, out[start : min(start + SUM_BLOCK, numel)])
        return
    scratch = np.empty(2 * CACHE_BLOCK, np.float32)
    start, stop = first * SUM_BLOCK, min(last * SUM_BLOCK, numel)
    line = _until_line(out, start, stop)
    _add_rows_float32(x, rows, numel, start, out[start:line])
    for start in range(line, stop, scratch.size):
        total = scratch[: min(scratch.size, stop - start)]
        _add_rows_float32(x, rows, numel, start, total)
        _stream(_address(out, start), _address(scratch, 0), total.size * 4)
    _fence()


@_jit(parallel=True)
def _sum_rows_parallel(x, rows, out, stream, first, last):
    """Blocks first..last of the sum of float32 rows."""
    for b in prange(first, last):
        _sum_rows(x, rows, out, stream, np.int64(b), np.int64(b) + 1)


@_jit()
def _add_rows_bits(x, rows, numel, start, code, o):
    """Add the blocks of all 16-bit rows into o, which is float32."""
    if code == CODE_BFLOAT16:
        _add_rows(x, rows, numel, start, CODE_BFLOAT16, o)
    else:
        _add_rows(x, rows, numel, start, CODE_FLOAT16, o)


@_jit()
def _sum_rows_bits(x, rows, code, out, first, last):
    """Blocks first..last of the sum of 16-bit rows: added in float32 in a scratch, rounded once."""
    numel = out.size
    scratch = np.empty(SUM_BLOCK, np.float32)
    for start in range(first * SUM_BLOCK, min(last * SUM_BLOCK, numel), SUM_BLOCK):
        stop = min(start + SUM_BLOCK, numel)
        total = scratch[: stop - start]
        _add_rows_bits(x, rows, numel, start, code, total)
        _round(total, code, out[start:stop])


@_jit(parallel=True)
def _sum_rows_bits_parallel(x, rows, code, out, first, last):
    """Blocks first..last of the sum of 16-bit rows."""
    for b in prange(first, last):
        _sum_rows_bits(x, rows, code, out, np.int64(b), np.int64(b) + 1)


@_jit()
def _sum_rows_everywhere(x, rows, numel, first, last):
    """Blocks first..last of every float32 row become the sum of the rows."""
    scratch = np.empty(SUM_BLOCK, np.float32)  # a sum into row 0 would not vectorise
    for start in range(first * SUM_BLOCK, min(last * SUM_BLOCK, numel), SUM_BLOCK):
        stop = min(start + SUM_BLOCK, numel)
        total = scratch[: stop - start]
        _add_rows_float32(x, rows, numel, start, total)
        for r in range(rows):
            _copy(total, x[r * numel + start : r * numel + stop])


@_jit(parallel=True)
def _sum_rows_everywhere_parallel(x, rows, numel, first, last):
    """Blocks first..last of every float32 row become the sum of the rows."""
    for b in prange(first, last):
        _sum_rows_everywhere(x, rows, numel, np.int64(b), np.int64(b) + 1)


@_jit()
def _sum_rows_everywhere_bits(x, rows, numel, code, first, last):
    """Blocks first..last of every 16-bit row become the sum of the rows, rounded once."""
    for b in range(first, last):
        _sum_rows_bits(x, rows, code, x[:numel], b, b + 1)  # a block is read before it is written
        start, stop = b * SUM_BLOCK, min((b + 1) * SUM_BLOCK, numel)
        for r in range(1, rows):
            _copy(x[start:stop], x[r * numel + start : r * numel + stop])


@_jit(parallel=True)
def _sum_rows_everywhere_bits_parallel(x, rows, numel, code, first, last):
    """Blocks first..last of every 16-bit row become the sum of the rows, rounded once."""
    for b in prange(first, last):
        _sum_rows_everywhere_bits(x, rows, numel, code, np.int64(b), np.int64(b) + 1)


@_jit()
def _copy_to_rows(source, out, numel, rows, start, skip, stream):
    """Copy one block of a row to its place in every row but ``skip``."""
    at, count = _address(source, 0), source.size * source.itemsize
    for r in range(rows):
        if r != skip:
            to = _address(out, r * numel + start)
            if stream:
                _stream(to, at, count)
            else:
                _copy_bytes(to, at, count)


@_jit()
def _spread(source, out, rows, skip, stream, first, last):
    """Copy blocks first..last of the source to every row but ``skip``."""
    numel = source.size
    for start in range(first * SUM_BLOCK, min(last * SUM_BLOCK, numel), SUM_BLOCK):
        stop = min(start + SUM_BLOCK, numel)
        _copy_to_rows(source[start:stop], out, numel, rows, start, skip, stream)
    if stream:
        _fence()


@_jit(parallel=True)
def _spread_parallel(source, out, rows, skip, stream, first, last):
    """Copy blocks first..last of the source to every row but ``skip``."""
    for b in prange(first, last):
        _spread(source, out, rows, skip, stream, np.int64(b), np.int64(b) + 1)


@_jit()
def _spread_diagonal(x, rows, shard, stream, first, last):
    """Copy blocks first..last, counted owner by owner, from the owner's row to all other rows."""
    numel = rows * shard
    blocks = (shard + SUM_BLOCK - 1) // SUM_BLOCK
    for b in range(first, last):
        owner = b // blocks
        start = owner * shard + (b % blocks) * SUM_BLOCK
        stop = min(start + SUM_BLOCK, (owner + 1) * shard)
        source = x[owner * numel + start : owner * numel + stop]
        _copy_to_rows(source, x, numel, rows, start, owner, stream)
    if stream:
        _fence()


@_jit(parallel=True)
def _spread_diagonal_parallel(x, rows, shard, stream, first, last):
    """Copy blocks first..last from the owner's row to all other rows."""
    for b in prange(first, last):
        _spread_diagonal(x, rows, shard, stream, np.int64(b), np.int64(b) + 1)


# ---------------------------------------------------------------------------------------------
# Partition and gather: one walk over segments, either way


@_jit()
def _walk(shards, tensors, starts, segments, item, to_full, stream, first, last):
    """Copy blocks first..last of all tensors end to end to the shards that hold them, or back.

    shards and tensors are addresses, item is bytes an element. Segment k is elements
    starts[k]:starts[k + 1] of all tensors end to end; its row has rank, tensor, first element of
    the tensor, and first element of the rank's buffer.
    """
    at = first * COPY_BLOCK
    stop = min(last * COPY_BLOCK, starts[-1])
    k = np.searchsorted(starts, at, side="right") - 1
    while at < stop:
        end = min(starts[k + 1], stop)
        skip = at - starts[k]
        mine = shards[segments[k, 0]] + (segments[k, 3] + skip) * item
        other = tensors[segments[k, 1]] + (segments[k, 2] + skip) * item
        if to_full:
            mine, other = other, mine
        if stream:
            _stream(mine, other, (end - at) * item)
        else:
            _copy_bytes(mine, other, (end - at) * item)
        at = end
        k += 1
    if stream:
        _fence()


@_jit(parallel=True)
def _walk_parallel(shards, tensors, starts, segments, item, to_full, stream, first, last):
    """Copy blocks first..last of all tensors end to end to the shards that hold them, or back."""
    for b in prange(first, last):
        g = np.int64(b)
        _walk(shards, tensors, starts, segments, item, to_full, stream, g, g + 1)


@_jit()
def _look_at_arrays(objects, kind, descr, flags, dims, dims_of, addresses):
    """Write the addresses of arrays of known shapes; return the first that is not as expected.

    ``objects`` is the address of pointers to objects of which each has to be of the type ``kind``.
    An array's fields follow the 16 bytes of every object: data, number of dimensions, shape,
    strides, base, dtype, flags (PyArrayObject_fields, part of NumPy's stable C interface).
    """
    low32 = np.int64(0xFFFFFFFF)
    for i in range(addresses.size):
        array = _word(objects + 8 * i)
        if _word(array + 8) != kind or _word(array + 56) != descr:
            return i
        count = dims_of[i + 1] - dims_of[i]
        if _word(array + 24) & low32 != count or _word(array + 64) & flags != flags:
            return i
        shape = _word(array + 32)
        for d in range(count):
            if _word(shape + 8 * d) != dims[dims_of[i] + d]:
                return i
        addresses[i] = _word(array + 16)
    return addresses.size


@_jit()
def _first_overlap(lows, numels, item, starts, ends):
    """Return the first buffer lows[i] that overlaps one of the stretches, sorted and disjoint."""
    for i in range(lows.size):
        k = np.searchsorted(ends, lows[i], side="right")
        if k < starts.size and starts[k] < lows[i] + numels[i] * item and numels[i] > 0:
            return i
    return lows.size


# ---------------------------------------------------------------------------------------------
# Element-wise optimizer updates on runs


@_jit()
def _scale_block(g, scale):
    """Multiply a block by a float32."""
    for i in range(g.size):
        g[i] = g[i] * scale


@_jit()
def _add_decay(g, p, weight_decay):
    """Add the L2 term to a block of gradients."""
    for i in range(g.size):
        g[i] = g[i] + weight_decay * p[i]


# Inlined, so that the code of the format is a constant. One loop over four arrays: LLVM gives a
# loop over five up, as it would have to check too many pairs for overlap.
@_jit(inline=True)
def _adam_loop(p, grad, code, m, v, h, scale, decay):
    """One block of Adam in PyTorch's order of operations, without the L2 term.

    sqrt(v) / bias2_sqrt is taken as a float64 product with the reciprocal, which a processor does
    faster than it divides. Rounded to float32 it is the quotient, always: no quotient of float32
    numbers lies within 2**-49 of the middle between two float32 neighbours, relatively, and the
    product is within 2**-52. (Below the normal numbers it could, but no square root is as small.)
    """
    # torch.lerp: from the nearer end, m + (g - m) * w or g - (g - m) * (1 - w)
    weight = h[ADAM_ONE_MINUS_BETA1]
    from_g = weight >= np.float32(0.5)
    if from_g:
        weight = weight - np.float32(1.0)
    beta2 = h[ADAM_BETA2]
    one_minus_beta2 = h[ADAM_ONE_MINUS_BETA2]
    reciprocal = np.float64(1.0) / np.float64(h[ADAM_BIAS2_SQRT])
    step_size = h[ADAM_STEP_SIZE]
    eps = h[ADAM_EPS]
    for i in range(p.size):
        gi = _wide(grad[i], code) * scale
        mi = m[i]
        base = gi if from_g else mi
        mi = base + (gi - mi) * weight
        vi = v[i] * beta2 + (one_minus_beta2 * gi) * gi
        m[i] = mi
        v[i] = vi
        denom = np.float32(np.float64(np.sqrt(vi)) * reciprocal) + eps
        p[i] = p[i] * decay - (step_size * mi) / denom


@_jit()
def _adam_float32(p, grad, m, v, h, scale, decay):
    """One block of Adam with float32 gradients."""
    _adam_loop(p, grad, CODE_FLOAT32, m, v, h, scale, decay)


@_jit()
def _adam_bfloat16(p, grad, m, v, h, scale, decay):
    """One block of Adam with bfloat16 gradients."""
    _adam_loop(p, grad, CODE_BFLOAT16, m, v, h, scale, decay)


@_jit()
def _adam(
    target, grad, exp_avg, exp_avg_sq, param, runs, hyper, decoupled, codes, groups, first, last
):
    """Adam on groups first..last; codes are those of the gradient and the parameter (-1: none)."""
    one = np.float32(1.0)
    scratch = np.empty(CACHE_BLOCK, np.float32)
    # What needs no scratch goes in long blocks, of which the processor fetches more ahead.
    direct = decoupled and codes[0] != CODE_FLOAT16
    block = RUN_BLOCK if direct else CACHE_BLOCK
    for k in range(groups[first], groups[last]):
        h = hyper[runs[k, HYPER]]
        scale, decay = h[ADAM_GRAD_SCALE], h[ADAM_DECAY]
        numel = runs[k, NUMEL]
        before = _before_line(target, runs[k, TARGET], runs[k, TARGET] + numel)
        for begin in range(before - block if before else 0, numel, block):
            at = max(begin, 0)
            size = min(begin + block, numel) - at
            here = runs[k, GRAD] + at
            given = grad[here : here + size]
            here = runs[k, TARGET] + at
            p = target[here : here + size]
            here = runs[k, STATE] + at
            m = exp_avg[here : here + size]
            v = exp_avg_sq[here : here + size]
            if direct and codes[0] == CODE_FLOAT32:
                _adam_float32(p, given, m, v, h, scale, decay)
            elif direct:
                _adam_bfloat16(p, given, m, v, h, scale, decay)
            else:
                g = scratch[:size]
                _widen(given, codes[0], g)
                _scale_block(g, scale)
                if decoupled:
                    _adam_float32(p, g, m, v, h, one, decay)
                else:
                    _add_decay(g, p, decay)
                    _adam_float32(p, g, m, v, h, one, one)
            if codes[1] >= 0:
                here = runs[k, PARAM] + at
                _round(p, codes[1], param[here : here + size])


@_jit(parallel=True)
def _adam_parallel(
    target, grad, exp_avg, exp_avg_sq, param, runs, hyper, decoupled, codes, groups, first, last
):
    """Adam on groups first..last of runs."""
    for b in prange(first, last):
        g = np.int64(b)
        _adam(
            target,
            grad,
            exp_avg,
            exp_avg_sq,
            param,
            runs,
            hyper,
            decoupled,
            codes,
            groups,
            g,
            g + 1,
        )


@_jit()
def _sgd_block(p, g, lr):
    """One block of plain SGD."""
    for i in range(p.size):
        p[i] = p[i] - lr * g[i]


@_jit()
def _momentum_block(p, g, buf, momentum, lr, nesterov):
    """One block of SGD with momentum, with Nesterov's look-ahead if asked."""
    for i in range(p.size):
        b = buf[i] * momentum + g[i]
        buf[i] = b
        d = b
        if nesterov:
            d = g[i] + momentum * b
        p[i] = p[i] - lr * d


@_jit()
def _sgd(target, grad, momentum_buffer, param, runs, hyper, nesterov, codes, groups, first, last):
    """SGD on groups first..last, as _adam; an empty momentum_buffer means none."""
    scratch = np.empty(CACHE_BLOCK, np.float32)
    for k in range(groups[first], groups[last]):
        h = hyper[runs[k, HYPER]]
        numel = runs[k, NUMEL]
        before = _before_line(target, runs[k, TARGET], runs[k, TARGET] + numel)
        for begin in range(before - CACHE_BLOCK if before else 0, numel, CACHE_BLOCK):
            at = max(begin, 0)
            size = min(begin + CACHE_BLOCK, numel) - at
            g = scratch[:size]
            here = runs[k, GRAD] + at
            _widen(grad[here : here + size], codes[0], g)
            _scale_block(g, h[SGD_GRAD_SCALE])
            here = runs[k, TARGET] + at
            p = target[here : here + size]
            _add_decay(g, p, h[SGD_WEIGHT_DECAY])
            if momentum_buffer.size == 0:
                _sgd_block(p, g, h[SGD_LR])
            else:
                here = runs[k, STATE] + at
                buf = momentum_buffer[here : here + size]
                _momentum_block(p, g, buf, h[SGD_MOMENTUM], h[SGD_LR], nesterov)
            if codes[1] >= 0:
                here = runs[k, PARAM] + at
                _round(p, codes[1], param[here : here + size])


@_jit(parallel=True)
def _sgd_parallel(
    target, grad, momentum_buffer, param, runs, hyper, nesterov, codes, groups, first, last
):
    """SGD on groups first..last of runs."""
    for b in prange(first, last):
        g = np.int64(b)
        _sgd(target, grad, momentum_buffer, param, runs, hyper, nesterov, codes, groups, g, g + 1)


# ---------------------------------------------------------------------------------------------
# The order-free norm


@_jit()
def _largest_bits(bits, mask):
    """The largest magnitude of a run, as bits without the sign."""
    largest = np.uint32(0)
    before = _before_line(bits, 0, bits.size)
    for part in (bits[:before], bits[before:]):
        for i in range(part.size):
            largest = np.uint32(max(largest, np.uint32(np.uint32(part[i]) & mask)))
    return largest


@_jit()
def _max_bits(bits, mask, runs, of_run, groups, first, last):
    """For the runs of groups first..last the largest magnitude, as bits without the sign."""
    for r in range(groups[first], groups[last]):
        of_run[r] = _largest_bits(bits[runs[r, GRAD] : runs[r, GRAD] + runs[r, NUMEL]], mask)


@_jit(parallel=True)
def _max_bits_parallel(bits, mask, runs, of_run, groups, first, last):
    """For the runs of groups first..last the largest magnitude, as bits without the sign."""
    for b in prange(first, last):
        _max_bits(bits, mask, runs, of_run, groups, np.int64(b), np.int64(b) + 1)


@_jit()
def _magnitude(bits, code):
    """Return the float32 of bits without the sign."""
    if code == CODE_FLOAT32:
        return np.uint32(bits).view(np.float32)
    return _wide(np.uint16(bits), code)


@_jit()
def _max_of_rows(of_run, runs, code, result):
    """The largest magnitude of each row, from those of its runs; infinite if one is not finite."""
    for row in range(result.size):
        result[row] = np.float32(0.0)
    for r in range(runs.shape[0]):
        largest = _magnitude(of_run[r], code)
        row = runs[r, ROW]
        if not largest < np.float32(np.inf):
            result[row] = np.float32(np.inf)
        else:
            result[row] = max(result[row], largest)


@_jit()
def _exponent(bits, code):
    """Return frexp's exponent of a magnitude, or NO_GRID if it is zero or not finite."""
    field = np.float64(_magnitude(bits, code)).view(np.int64) >> 52
    return NO_GRID if field == 0 or field == 2047 else field - 1022


@_jit(inline=True)
def _squares_loop(x, bits, code, mask, start):
    """Sum the float64 patterns of ``start`` + square, and find the largest magnitude.

    ``start`` is the power of two whose last bit is one step of the grid, so the addition rounds
    the square (which is exact in float64) to the grid, and the pattern of the sum is that of
    ``start`` plus the number of steps. Integers add up to the same in any order, wrapped or not.
    """
    patterns = np.int64(0)
    largest = np.uint32(0)
    before = _before_line(x, 0, x.size)
    for first, last in ((0, before), (before, x.size)):
        part, same = x[first:last], bits[first:last]
        for i in range(part.size):
            wide = np.float64(_wide(part[i], code))
            patterns += np.float64(wide * wide + start).view(np.int64)
            largest = np.uint32(max(largest, np.uint32(np.uint32(same[i]) & mask)))
    return patterns, largest


@_jit()
def _squares_of_run(x, bits, code, mask, exponent, k):
    """Sum of the squares of a run in steps of 2**(2 * exponent - k); largest magnitude, as bits."""
    start_bits = np.int64(np.int64(2 * exponent - k + 52 + 1023) << 52)
    start = start_bits.view(np.float64)
    if code == CODE_FLOAT32:
        patterns, largest = _squares_loop(x, bits, CODE_FLOAT32, mask, start)
    elif code == CODE_BFLOAT16:
        patterns, largest = _squares_loop(x, bits, CODE_BFLOAT16, mask, start)
    else:
        patterns, largest = _squares_loop(x, bits, CODE_FLOAT16, mask, start)
    return np.int64(patterns - np.int64(x.size) * start_bits), largest


@_jit()
def _max_and_squares(grad, bits, mask, code, runs, guess, k, of_run, squares, groups, first, last):
    """For the runs of groups first..last the largest magnitude, and the sum of squares.

    The grid is that of the largest magnitude so far, from ``guess`` on; it stands beside the sum.
    The longer a group, the more of its runs come after a magnitude of the largest power of two.
    """
    exponent = guess
    for r in range(groups[first], groups[last]):
        stop = runs[r, GRAD] + runs[r, NUMEL]
        x, b = grad[runs[r, GRAD] : stop], bits[runs[r, GRAD] : stop]
        total, largest = np.int64(0), np.uint32(0)
        if exponent == NO_GRID:
            largest = _largest_bits(b, mask)
            exponent = _exponent(largest, code)
        if exponent != NO_GRID:  # else nothing but zeros so far, or not finite
            total, largest = _squares_of_run(x, b, code, mask, exponent, k)
            if _exponent(largest, code) > exponent:
                exponent = _exponent(largest, code)
                total, largest = _squares_of_run(x, b, code, mask, exponent, k)
        finite = _magnitude(largest, code) < np.float32(np.inf)
        of_run[r] = largest
        squares[r, 0] = total
        squares[r, 1] = exponent if finite else NO_GRID


@_jit(parallel=True)
def _max_and_squares_parallel(
    grad, bits, mask, code, runs, guess, k, of_run, squares, groups, first, last
):
    """For the runs of groups first..last the largest magnitude, and the sum of squares."""
    for b in prange(first, last):
        g = np.int64(b)
        _max_and_squares(grad, bits, mask, code, runs, guess, k, of_run, squares, groups, g, g + 1)


@_jit()
def _sum_of_rows(squares, runs, exponent, of_row):
    """Add the sums of runs to their rows; return how many are on another grid and left out."""
    others = 0
    for r in range(runs.shape[0]):
        if squares[r, 1] == exponent:
            of_row[runs[r, ROW]] += squares[r, 0]
        else:
            others += 1
    return others


# ---------------------------------------------------------------------------------------------
# Tables of runs


@_jit()
def _apart(a, b, c, d, e, f):
    """Whether six C-contiguous arrays lie apart; an empty one inside another does not."""
    starts = (
        np.int64(a.ctypes.data),
        np.int64(b.ctypes.data),
        np.int64(c.ctypes.data),
        np.int64(d.ctypes.data),
        np.int64(e.ctypes.data),
        np.int64(f.ctypes.data),
    )
    sizes = (a.nbytes, b.nbytes, c.nbytes, d.nbytes, e.nbytes, f.nbytes)
    for i in range(len(starts)):
        for j in range(i):
            if starts[i] < starts[j] + sizes[j] and starts[j] < starts[i] + sizes[i]:
                return False
    return True


@_jit()
def _runs_total(runs, sizes, once):
    """Number of elements of all runs; -1 if one is not as it has to be, or only out of order.

    ``sizes`` says for each column how many elements or rows it may point into, or UNCHECKED. In
    the columns whose bits are set in ``once`` a run may not begin before the last one ended.
    """
    total = np.int64(0)
    for k in range(runs.shape[0]):
        numel = runs[k, NUMEL]
        if numel < 0:
            return np.int64(-1)
        for c in range(RUN_COLUMNS):
            if sizes[c] < UNCHECKED:
                start = runs[k, c]
                length = numel if TARGET <= c <= PARAM else 1
                if start < 0 or start > sizes[c] - length:
                    return np.int64(-1)
                if once >> c & 1 and k > 0 and start < runs[k - 1, c] + runs[k - 1, NUMEL]:
                    return np.int64(-1)
        total += numel
    return total


@_jit()
def _run_groups(runs, piece, groups):
    """Cut the runs into groups of at least ``piece`` elements; return how many, at least one.

    groups has zeros, one more than runs and another: without runs the one group is empty.
    """
    count = 0
    held = np.int64(0)
    groups[0] = 0
    for k in range(runs.shape[0]):
        held += runs[k, NUMEL]
        if held >= piece or k == runs.shape[0] - 1:
            count += 1
            groups[count] = k + 1
            held = np.int64(0)
    return max(count, 1)
