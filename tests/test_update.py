"""Optimizer updates on runs: PyTorch's order of operations to the last bit, and nothing else."""

import itertools

import numba
import numpy as np
import pytest

import naive
from zero_nb.core import checks, kernels
from zero_nb.core.flat import GRAD, HYPER, NUMEL, PARAM, STATE, TARGET, FlatLayout, run_table
from zero_nb.core.precision import BFLOAT16, FLOAT16, FLOAT32
from zero_nb.core.update import adam_hyper, adam_update, sgd_hyper, sgd_update

JIT = not numba.config.DISABLE_JIT
FORMATS = pytest.mark.parametrize("fmt", [FLOAT32, BFLOAT16, FLOAT16], ids=lambda f: f.name)
WORLDS = pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
SENTINEL = np.float32(7777)
LOUD = np.uint16(0x7ABC)
SHAPES = ((5,), (3, 4), (), (0,), (7, 3), (6,))
PLACES = {"TARGET": "full_own", "GRAD": "shard", "STATE": "shard", "PARAM": "full_own"}


@pytest.fixture(params=["sequential", "parallel"])
def form(request, monkeypatch):
    """Either form of the kernels; the parallel one in more than one piece."""
    monkeypatch.setattr(kernels, "PARALLEL_FROM", 0 if request.param == "parallel" else 1 << 60)
    monkeypatch.setattr(checks, "RUN_BLOCK", 4)
    if not JIT:
        monkeypatch.setattr(kernels, "CACHE_BLOCK", 4)
        monkeypatch.setattr(kernels, "RUN_BLOCK", 4)


def same_bits(a, b):
    return a.dtype == b.dtype and np.array_equal(a.view(f"u{a.itemsize}"), b.view(f"u{b.itemsize}"))


class Problem:
    """One unit on all ranks of a world, with a sentinel wherever no run goes."""

    def __init__(self, world_size, fmt, shapes=SHAPES, hyper_of=(0, 1, 0, 0, -1, 1)):
        rng = np.random.default_rng(world_size)
        names = tuple(f"p{i}" for i in range(len(shapes)))
        layout = FlatLayout(names, shapes, world_size)
        self.fmt = fmt
        self.runs = run_table(layout, range(world_size), placements=PLACES, hyper_of=hyper_of)
        whole, shards = (world_size, layout.padded_numel), (world_size, layout.shard_numel)
        self.target = np.full(whole, SENTINEL)
        self.grad = np.full(shards, SENTINEL if fmt is FLOAT32 else LOUD, fmt.dtype)
        self.state = [np.full(shards, SENTINEL), np.full(shards, SENTINEL)]
        self.param = np.full(whole, LOUD, np.uint16)
        for run in self.runs:
            n = run[NUMEL]
            self.part(self.target, run, TARGET)[:] = rng.standard_normal(n)
            x = rng.standard_normal(n).astype(np.float32)
            self.part(self.grad, run, GRAD)[:] = naive.store(x, fmt)
            self.part(self.state[0], run, STATE)[:] = rng.standard_normal(n)
            self.part(self.state[1], run, STATE)[:] = rng.random(n)

    @staticmethod
    def part(buffer, run, column):
        return buffer.reshape(-1)[run[column] : run[column] + run[NUMEL]]

    def naively(self, update):
        """What the buffers should be: update(p, g, m, v, hyper row) on each run, else as now."""
        target, param = self.target.copy(), self.param.copy()
        state = [s.copy() for s in self.state]
        for run in self.runs:
            p = self.part(target, run, TARGET)
            m, v = (self.part(s, run, STATE) for s in state)
            g = naive.widen(self.part(self.grad, run, GRAD).copy(), self.fmt)
            p[:], m[:], v[:] = update(p.copy(), g, m.copy(), v.copy(), run[HYPER])
            if self.fmt is not FLOAT32:
                self.part(param, run, PARAM)[:] = naive.store(p, self.fmt)
        return [target, *state, param]

    def formats(self):
        if self.fmt is FLOAT32:
            return {}
        return {"grad_format": self.fmt, "param": self.param, "param_format": self.fmt}


@pytest.mark.usefixtures("form")
@FORMATS
@WORLDS
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.5), (0.4, 0.9)])
def test_adam_has_the_bits_of_one_operation_at_a_time(fmt, world_size, decoupled, betas):
    problem = Problem(world_size, fmt)
    kinds = {"betas": betas, "eps": 1e-8, "decoupled": decoupled}
    hyper = np.stack(
        [
            adam_hyper(1e-3, weight_decay=0.1, step=3, grad_scale=0.25, **kinds),
            adam_hyper(1e-2, weight_decay=0.0, step=1, grad_scale=0.25, **kinds),
        ]
    )
    expected = problem.naively(
        lambda p, g, m, v, row: naive.adam(p, g, m, v, hyper[row], decoupled)
    )
    before = problem.grad.copy()
    adam_update(
        problem.target, problem.grad, *problem.state, problem.runs, hyper,
        decoupled=decoupled, **problem.formats(),
    )  # fmt: skip
    for got, want in zip([problem.target, *problem.state, problem.param], expected, strict=True):
        assert same_bits(got, want)  # with every sentinel
    assert same_bits(problem.grad, before)


@pytest.mark.usefixtures("form")
@FORMATS
@WORLDS
@pytest.mark.parametrize("kind", ["plain", "momentum", "nesterov"])
def test_sgd_has_the_bits_of_one_operation_at_a_time(fmt, world_size, kind):
    problem = Problem(world_size, fmt)
    momentum = 0.0 if kind == "plain" else 0.9
    hyper = np.stack([sgd_hyper(0.1, momentum, 0.01, 0.5), sgd_hyper(0.2, momentum, 0.0, 0.5)])

    def update(p, g, m, v, row):
        p, b = naive.sgd(p, g, None if kind == "plain" else m, hyper[row], kind == "nesterov")
        return p, m if b is None else b, v

    expected = problem.naively(update)
    sgd_update(
        problem.target, problem.grad, None if kind == "plain" else problem.state[0],
        problem.runs, hyper, nesterov=kind == "nesterov", **problem.formats(),
    )  # fmt: skip
    for got, want in zip([problem.target, *problem.state, problem.param], expected, strict=True):
        assert same_bits(got, want)


@pytest.mark.parametrize("begins", [0, 1, 4, 12, 15])
@pytest.mark.parametrize("rule", ["adam", "adam, L2", "sgd", "plain sgd"])
def test_a_long_run_may_begin_anywhere_in_a_line_of_the_cache(rule, begins, monkeypatch):
    numel = 20_001
    if not JIT:
        numel = 81
        for name, size in (("CACHE_BLOCK", 16), ("RUN_BLOCK", 32), ("_LONG_RUN", 40)):
            monkeypatch.setattr(kernels, name, size)
    rng = np.random.default_rng(begins)
    arrays = []
    for _ in range(4):
        array = np.full(numel + 48, SENTINEL)
        line = -(array.ctypes.data // 4) % 16
        arrays.append(array[line + begins : line + begins + numel + 2])
        arrays[-1][1:-1] = rng.random(numel)
    target, grad, m, v = arrays
    before = [array.copy() for array in arrays]
    param = np.full(numel + 2, LOUD, np.uint16)
    runs = np.array([[0, 1, 1, 1, 1, numel, 0]])
    given = {"param": param, "param_format": BFLOAT16}
    p, g, a, b = (array[1:-1].copy() for array in arrays)
    if "adam" in rule:
        decoupled = rule == "adam"
        kinds = {"weight_decay": 0.1, "step": 3, "decoupled": decoupled}
        hyper = adam_hyper(1e-3, (0.9, 0.99), 1e-8, **kinds)[None]
        p, a, b = naive.adam(p, g, a, b, hyper[0], decoupled)
        adam_update(target, grad, m, v, runs, hyper, decoupled=decoupled, **given)
    else:
        plain = rule == "plain sgd"
        hyper = sgd_hyper(0.1, 0.0 if plain else 0.9, 0.01)[None]
        p, got = naive.sgd(p, g, None if plain else a, hyper[0], False)
        a = a if plain else got
        sgd_update(target, grad, None if plain else m, runs, hyper, **given)
    for got, want, old in zip(arrays, (p, g, a, b), before, strict=True):
        assert same_bits(got[1:-1], want)
        assert same_bits(got[[0, -1]], old[[0, -1]])
    assert same_bits(param[1:-1], BFLOAT16.round(p))
    assert (param[[0, -1]] == LOUD).all()


def test_every_mix_of_storage_formats_works():
    for grad_format, param_format in itertools.product((FLOAT32, BFLOAT16, FLOAT16), repeat=2):
        master = np.array([1.0, -2.0, 0.5], np.float32)
        grad = grad_format.round(np.array([1.0, -1.0, 2.0], np.float32))
        param = np.zeros(3, param_format.dtype)
        runs = np.array([[0, 0, 0, 0, 0, 3, 0]])
        sgd_update(
            master, grad, None, runs, sgd_hyper(0.1)[None],
            grad_format=grad_format, param=param, param_format=param_format,
        )  # fmt: skip
        assert master.tolist() == pytest.approx([0.9, -1.9, 0.3])
        assert same_bits(param, param_format.round(master))


def test_the_formulas_agree_with_float64():
    rng = np.random.default_rng(3)
    p, m, v = np.zeros(50), np.zeros(50), np.zeros(50)
    target = np.zeros(50, np.float32)
    exp_avg, exp_avg_sq = np.zeros(50, np.float32), np.zeros(50, np.float32)
    runs = np.array([[0, 0, 0, 0, 0, 50, 0]])
    for step in range(1, 31):
        g = rng.standard_normal(50)
        p *= 1 - 1e-2 * 0.1
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        p -= 1e-2 * (m / (1 - 0.9**step)) / (np.sqrt(v / (1 - 0.999**step)) + 1e-8)
        hyper = adam_hyper(1e-2, (0.9, 0.999), 1e-8, 0.1, step)[None]
        adam_update(target, g.astype(np.float32), exp_avg, exp_avg_sq, runs, hyper, decoupled=True)
    np.testing.assert_allclose(target, p, atol=2e-6)  # 30 float32 steps of at most 1e-2


def test_G6_the_first_adam_step_has_the_size_of_the_learning_rate():
    target, state = np.zeros(2, np.float32), [np.zeros(2, np.float32) for _ in range(2)]
    grad = np.array([3.0, -1e-3], np.float32)
    hyper = adam_hyper(0.5, (0.9, 0.999), 1e-12, 0.0, 1)[None]
    adam_update(target, grad, *state, np.array([[0, 0, 0, 0, -1, 2, 0]]), hyper, decoupled=True)
    np.testing.assert_allclose(target, [-0.5, 0.5], rtol=1e-6)


def test_G7_the_step_counter_matters():
    def moved(step):
        target, m, v = (np.array([x], np.float32) for x in (0, 1, 1))
        hyper = adam_hyper(1.0, (0.9, 0.999), 0.0, 0.0, step)[None]
        grad = np.ones(1, np.float32)
        adam_update(target, grad, m, v, np.array([[0, 0, 0, 0, 0, 1, 0]]), hyper, decoupled=True)
        return -float(target[0])

    assert moved(1001) == pytest.approx(0.7954, abs=1e-4)
    assert moved(1) == pytest.approx(0.3162, abs=1e-4)


def test_G1_each_run_has_its_own_decay():
    target, grad = np.ones(2, np.float32), np.zeros(2, np.float32)
    state = [np.zeros(2, np.float32) for _ in range(2)]
    hyper = np.stack([adam_hyper(1.0, (0.9, 0.999), 1e-8, wd, 1) for wd in (0.1, 0.0)])
    runs = np.array([[0, 0, 0, 0, 0, 1, 0], [0, 1, 1, 1, 1, 1, 1]])
    adam_update(target, grad, *state, runs, hyper, decoupled=True)
    assert target.tolist() == pytest.approx([0.9, 1.0])


@pytest.mark.skipif(numba.config.NUMBA_NUM_THREADS < 2 or not JIT, reason="needs two threads")
@FORMATS
def test_threads_change_nothing(fmt, monkeypatch):
    monkeypatch.setattr(kernels, "PARALLEL_FROM", 0)
    monkeypatch.setattr(checks, "RUN_BLOCK", 1000)
    results = []
    for threads in (1, 2):
        before = numba.get_num_threads()
        numba.set_num_threads(threads)
        try:
            problem = Problem(3, FLOAT32, ((1700,), (1, 311), (1025,)), (0, 1, 0))
            problem.grad = problem.grad if fmt is FLOAT32 else fmt.round(problem.grad)
            problem.fmt = fmt
            hyper = np.stack([adam_hyper(1e-3, (0.9, 0.99), 1e-8, wd, 2) for wd in (0.1, 0)])
            adam_update(
                problem.target, problem.grad, *problem.state, problem.runs, hyper,
                decoupled=True, **problem.formats(),
            )  # fmt: skip
            results.append([problem.target, *problem.state, problem.param])
        finally:
            numba.set_num_threads(before)
    for one, two in zip(*results, strict=True):
        assert same_bits(one, two)


def test_A13_no_runs_or_empty_ones_change_nothing():
    x = [np.full(4, SENTINEL) for _ in range(4)]
    hyper = adam_hyper(1e-3, (0.9, 0.999), 1e-8, 0.0, 1)[None]
    for runs in (np.empty((0, 7), np.int64), np.array([[0, 4, 4, 4, 4, 0, 0]])):
        adam_update(*x, runs, hyper, decoupled=True)
    empty = [np.empty(0, np.float32)] * 4
    adam_update(*empty, np.empty((0, 7), np.int64), hyper, decoupled=True)
    assert all((array == SENTINEL).all() for array in x)


def test_hyper_parameters_that_mean_nothing_are_refused():
    with pytest.raises(ValueError, match="step counts this update"):
        adam_hyper(1e-3, (0.9, 0.999), 1e-8, 0.0, 0)
    with pytest.raises(ValueError, match="betas"):
        adam_hyper(1e-3, (0.9, 1.0), 1e-8, 0.0, 1)


def good():
    """Arguments of a small update that would work, to be spoiled one at a time."""
    arrays = {name: np.full(8, SENTINEL) for name in ("target", "grad", "exp_avg", "exp_avg_sq")}
    return arrays | {
        "runs": np.array([[0, 0, 0, 0, 0, 4, 0], [0, 4, 4, 4, 4, 4, 0]]),
        "hyper": adam_hyper(1e-3, (0.9, 0.999), 1e-8, 0.0, 1)[None],
        "param": np.full(8, LOUD, np.uint16),
        "param_format": BFLOAT16,
    }


def spoil_runs(column, row, value):
    runs = good()["runs"]
    runs[row, column] = value
    return {"runs": runs}


def read_only():
    x = np.full(8, SENTINEL)
    x.flags.writeable = False
    return x


@pytest.mark.parametrize(
    ("error", "message", "change"),
    [
        (TypeError, "target must have dtype float32", {"target": np.zeros(8)}),
        (TypeError, "exp_avg_sq must have dtype", {"exp_avg_sq": np.zeros(8, np.int32)}),
        (TypeError, "byte order", {"grad": np.zeros(8, ">f4")}),
        (TypeError, "grad must be a numpy", {"grad": [0.0] * 8}),
        (TypeError, "grad must have dtype float32", {"grad": np.zeros(8, np.uint16)}),
        (TypeError, "grad must have dtype uint16", {"grad_format": FLOAT16}),
        (TypeError, "param must have dtype", {"param": np.zeros(8, np.float32)}),
        (ValueError, "belong together", {"param": None}),
        (ValueError, "C-contiguous", {"exp_avg": np.zeros(16, np.float32)[::2]}),
        (ValueError, "read-only", {"target": read_only()}),
        (ValueError, "read-only", {"exp_avg": read_only()}),
        (ValueError, "hyper must have shape", {"hyper": np.zeros((1, 4), np.float32)}),
        (TypeError, "hyper must have dtype", {"hyper": np.zeros((1, 8))}),
        (TypeError, "runs must have dtype int64", {"runs": np.zeros((1, 7), np.int32)}),
        (ValueError, "runs must have", {"runs": np.zeros((1, 6), np.int64)}),
        (ValueError, "has 7 elements", {"grad": np.zeros(7, np.float32)}),
        (ValueError, r"exp_avg\[4:8\], but exp_avg has 7", {"exp_avg": np.zeros(7, np.float32)}),
        (ValueError, "param has 5 elements", {"param": np.zeros(5, np.uint16)}),
        (ValueError, r"run 0 covers target\[-1:3\]", spoil_runs(TARGET, 0, -1)),
        (ValueError, "negative length -1", spoil_runs(NUMEL, 0, -1)),
        (ValueError, r"two runs write target\[3\]", spoil_runs(TARGET, 1, 3)),
        (ValueError, r"two runs write exp_avg\[0\]", spoil_runs(STATE, 1, 0)),
        (ValueError, r"two runs write param\[2\]", spoil_runs(PARAM, 1, 2)),
        (ValueError, "hyper 0..1, but there are 1", spoil_runs(HYPER, 1, 1)),
        (ValueError, "hyper -1..0", spoil_runs(HYPER, 0, -1)),
    ],
)  # fmt: skip
def test_what_a_kernel_could_not_take_is_refused_before_anything_is_written(error, message, change):
    given = good() | change
    with pytest.raises(error, match=message):
        adam_update(**given, decoupled=True)
    for name, value in good().items():
        if name not in change and isinstance(value, np.ndarray):
            assert np.array_equal(given[name], value), name


@pytest.mark.parametrize(
    "pair", list(itertools.combinations(["target", "exp_avg", "exp_avg_sq", "grad"], 2))
)
def test_overlapping_buffers_are_refused(pair):
    given = good()
    both = np.full(12, SENTINEL)
    given[pair[0]], given[pair[1]] = both[:8], both[4:]
    with pytest.raises(ValueError, match=f"{pair[0]} and {pair[1]} overlap"):
        adam_update(**given, decoupled=True)
    assert (both == SENTINEL).all()


def test_arrays_of_any_shape_are_written_where_they_are():
    # Contiguous all the same: rows of one, with a stride that no step takes; no axis at all.
    flat = good()
    adam_update(**flat, decoupled=True)
    apart = {n: np.full((2, 8), SENTINEL)[::2] for n in ("target", "exp_avg", "exp_avg_sq")}
    given = good() | apart | {"param": np.full((2, 2, 2), LOUD, np.uint16)}
    adam_update(**given, decoupled=True)
    for name in ("target", "exp_avg", "exp_avg_sq", "param"):
        assert same_bits(given[name].reshape(-1), flat[name])
    scalar = np.full((), SENTINEL)
    runs = np.array([[0, 0, 0, 0, 0, 1, 0]])
    sgd_update(scalar, np.ones((), np.float32), None, runs, sgd_hyper(1.0)[None])
    assert scalar == SENTINEL - 1


def test_runs_may_come_in_any_order():
    given = good()
    given["runs"] = given["runs"][::-1].copy()
    adam_update(**given, decoupled=True)
    assert (given["target"] != SENTINEL).all()


def test_momentum_needs_a_buffer():
    x = np.full(8, SENTINEL)
    runs = good()["runs"]
    for hyper, nesterov in ((sgd_hyper(0.1, 0.9), False), (sgd_hyper(0.1), True)):
        with pytest.raises(ValueError, match="momentum_buffer"):
            sgd_update(x, np.ones(8, np.float32), None, runs, hyper[None], nesterov=nesterov)
    assert (x == SENTINEL).all()


def test_a_rounded_float64_product_with_the_reciprocal_is_the_float32_quotient():
    # What _adam_loop relies on, over every exponent a square root can have, and the hardest
    # fractions: those beside a power of two and beside a multiple of the divisor.
    rng = np.random.default_rng(0)
    exponents = np.arange(-75, 64)
    fractions = np.concatenate((1 + rng.random(3_000), [1, 1 + 2**-23, 2 - 2**-23])).astype("f4")
    square_roots = np.ldexp(fractions[:, None], exponents).astype(np.float32).reshape(-1)
    for t in (1, 2, 3, 10, 1000, 10**6):
        for beta2 in (0.0, 0.5, 0.9, 0.99, 0.999, 1 - 2**-20):
            divisor = adam_hyper(1.0, (0.9, beta2), 1e-8, 0.0, t)[kernels.ADAM_BIAS2_SQRT]
            product = square_roots.astype(np.float64) * (1.0 / np.float64(divisor))
            assert (product.astype(np.float32) == square_roots / divisor).all()
            near = (np.arange(1, 4_000, dtype=np.float32) * divisor).astype(np.float32)
            product = near.astype(np.float64) * (1.0 / np.float64(divisor))
            assert (product.astype(np.float32) == near / divisor).all()
