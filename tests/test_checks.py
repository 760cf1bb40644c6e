"""The checks that stand between a caller and a kernel, which itself checks nothing."""

from itertools import combinations

import numpy as np
import pytest

from zero_nb.core import checks, kernels
from zero_nb.core.checks import (
    check_array,
    check_no_overlap,
    check_runs,
    check_world_size,
    run_groups,
)
from zero_nb.core.kernels import (
    GRAD,
    HYPER,
    NUMEL,
    PARAM,
    ROW,
    RUN_COLUMNS,
    TARGET,
    UNCHECKED,
)


def test_a_good_array_is_handed_back():
    x = np.zeros((2, 3), np.float32)
    assert check_array("x", x, np.float32, 2, (2, None), writable=True) is x
    assert check_array("x", x[:, ::2], contiguous=False) is not None


@pytest.mark.parametrize(
    ("error", "message", "array", "wanted"),
    [
        (TypeError, "x must be a numpy.ndarray, got list; use numpy.asarray", [1.0], {}),
        (TypeError, "foreign byte order .*astype", np.zeros(2, np.dtype("f4").newbyteorder()), {}),
        (TypeError, "x must have dtype float32, got float64", np.zeros(2), {"dtype": np.float32}),
        (ValueError, r"x must have 2 dimensions, got shape \(2,\)", np.zeros(2), {"ndim": 2}),
        (ValueError, r"shape \(any, 3\), got \(3, 2\)", np.zeros((3, 2)), {"shape": (None, 3)}),
        (ValueError, r"shape \(3,\), got \(3, 1\)", np.zeros((3, 1)), {"shape": (3,)}),
        (ValueError, "C-contiguous.*ascontiguousarray", np.zeros(4)[::2], {}),
        (ValueError, "C-contiguous", np.zeros((2, 3)).T, {}),
        (ValueError, "read-only", np.broadcast_to(np.zeros(1), (1,)), {"writable": True}),
    ],
)
def test_a_bad_array_is_described(error, message, array, wanted):
    with pytest.raises(error, match=message):
        check_array("x", array, **wanted)


@pytest.mark.parametrize(
    ("error", "message", "array", "wanted"),
    [
        (TypeError, "foreign byte order", np.zeros(2, ">f8"), {}),
        (TypeError, "x must have dtype float32, got float64", np.zeros(2), {"dtype": np.float32}),
        (ValueError, r"must have 2 dimensions, got shape \(2,\)", np.zeros(2), {"ndim": 2}),
        (ValueError, r"shape \(any, 3\), got \(3, 2\)", np.zeros((3, 2)), {"shape": (None, 3)}),
        (ValueError, r"shape \(2, 1\), got \(2,\)", np.zeros(2), {"shape": (2, 1)}),
        (ValueError, "C-contiguous", np.zeros(4)[::2], {}),
        (ValueError, "read-only", np.broadcast_to(np.zeros(1), (1,)), {"writable": True}),
    ],
)
def test_the_short_way_for_an_exact_dtype_refuses_the_same(error, message, array, wanted):
    wanted = {"dtype": array.dtype} | {name: np.dtype(n) if name == "dtype" else n
                                       for name, n in wanted.items()}  # fmt: skip
    with pytest.raises(error, match=message):
        check_array("x", array, **wanted)


def test_the_long_way_takes_what_is_only_read_and_what_is_of_another_class():
    only_read = np.broadcast_to(np.zeros(1), (1,))
    assert check_array("x", only_read, only_read.dtype, shape=(1,)) is only_read
    other = np.zeros(3).view(np.recarray)
    assert check_array("x", other, np.dtype(np.float64), writable=True) is other


def test_alignment():
    raw = np.zeros(17, np.uint8)
    shifted = next(raw[i : i + 8].view(np.float64) for i in (0, 1) if raw[i:].ctypes.data % 8)
    with pytest.raises(ValueError, match="not aligned"):
        check_array("x", shifted)


def test_overlap():
    x = np.zeros(10)
    check_no_overlap(a=x[:5], b=x[5:], c=None, d=x[3:3])
    with pytest.raises(ValueError, match="a and c overlap"):
        check_no_overlap(a=x[:6], b=np.zeros(3), c=x[5:])


def test_arrays_lie_apart_where_numpy_says_so():
    x, rng, seen = np.zeros(30), np.random.default_rng(0), set()
    for attempt in range(300):
        cuts = np.sort(rng.choice(31, 12, replace=False))  # of six parts that lie apart
        if attempt % 2:
            a, b = rng.choice(12, 2, replace=False)
            cuts[[a, b]] = cuts[[b, a]]
        parts = [x[min(pair) : max(pair)] for pair in rng.permutation(cuts.reshape(6, 2))]
        shared = any(np.may_share_memory(a, b) for a, b in combinations(parts, 2))
        assert kernels._apart(*parts) is not shared
        seen.add(shared)
    assert seen == {True, False}
    assert kernels._apart(x, *[np.zeros(0, np.uint16)] * 5)


@pytest.mark.parametrize("bad", [0, -3])
def test_a_world_has_at_least_one_rank(bad):
    with pytest.raises(ValueError, match=f"world_size must be at least 1, got {bad}"):
        check_world_size(bad)


@pytest.mark.parametrize("bad", [2.0, "2", None, True, np.bool_(True)])
def test_a_number_of_ranks_is_an_integer(bad):
    with pytest.raises(TypeError, match="world_size must be an integer"):
        check_world_size(bad)


def test_numpy_integers_count():
    assert check_world_size(np.int32(3)) == 3
    assert type(check_world_size(np.int32(3))) is int


def runs_of(*rows):
    """A table with (row, start in every buffer, elements, hyper)."""
    return np.array([[r, s, s, s, s, n, h] for r, s, n, h in rows], np.int64).reshape(-1, 7)


def test_runs_that_fit():
    runs = runs_of((0, 0, 4, 0), (1, 6, 2, 1), (0, 4, 0, 0))
    assert check_runs(runs, [("g", GRAD, 8)], [("t", TARGET, 8)], hyper_rows=2, rows=2) == 6
    assert check_runs(runs_of(), [("g", GRAD, 0)], [("t", TARGET, 0)], 1, 1) == 0


def test_reading_twice_is_fine_and_writing_twice_is_not():
    runs = runs_of((0, 0, 4, 0), (0, 2, 4, 0))
    assert check_runs(runs, read=[("g", GRAD, 6)]) == 8
    with pytest.raises(ValueError, match=r"two runs write t\[2\]"):
        check_runs(runs, written=[("t", TARGET, 6)])
    # Out of order, with an empty run between: no clash, and a clash.
    assert (
        check_runs(runs_of((0, 4, 2, 0), (0, 5, 0, 0), (0, 0, 4, 0)), (), [("t", TARGET, 6)]) == 6
    )
    with pytest.raises(ValueError, match=r"two runs write t\[4\]"):
        check_runs(runs_of((0, 4, 2, 0), (0, 4, 0, 0), (0, 0, 5, 0)), (), [("t", TARGET, 6)])


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        (runs_of((0, 0, 4, 0), (0, 4, 5, 0)), r"run 1 covers g\[4:9\], but g has 8 elements"),
        (runs_of((0, -1, 4, 0)), r"run 0 covers g\[-1:3\]"),
        (runs_of((0, 3, -1, 0)), "run 0 has a negative length -1"),
        (runs_of((2, 0, 1, 0)), "rows 2..2, but there are 2"),
        (runs_of((-1, 0, 1, 0)), "rows -1..-1"),
        (runs_of((0, 0, 1, 3)), "hyper 3..3, but there are 3"),
    ],
)
def test_runs_that_do_not_fit(runs, message):
    with pytest.raises(ValueError, match=message):
        check_runs(runs, read=[("g", GRAD, 8)], hyper_rows=3, rows=2)


def test_huge_numbers_do_not_wrap():
    huge = np.iinfo(np.int64).max
    for bad in ((0, huge - 1, 4, 0), (0, 4, huge, 0), (0, huge, huge, 0)):
        for runs in (runs_of(bad), runs_of((0, 0, 4, 0), bad)):
            with pytest.raises(ValueError, match="covers g"):
                check_runs(runs, read=[("g", GRAD, 8)])


def test_the_kernel_that_looks_at_runs_passes_nothing_that_a_closer_look_refuses():
    rng, seen = np.random.default_rng(0), []
    for _ in range(1000):
        runs = rng.integers(0, 4, (rng.integers(1, 4), RUN_COLUMNS))
        runs[:, NUMEL] = rng.integers(-1 if rng.random() < 0.1 else 0, 3, len(runs))
        if rng.random() < 0.7:  # one after the other
            runs[:, TARGET] = runs[:, PARAM] = np.cumsum(runs[:, NUMEL]) - runs[:, NUMEL]
        named = [("g", GRAD, 6)], [("t", TARGET, 6), ("p", PARAM, 5), ("q", PARAM, 6)], 4, 3
        sizes = [UNCHECKED] * RUN_COLUMNS
        sizes[GRAD], sizes[TARGET], sizes[PARAM], sizes[HYPER], sizes[ROW] = 6, 6, 5, 4, 3
        total = kernels._runs_total(runs, tuple(sizes), 1 << TARGET | 1 << PARAM)
        try:
            told = checks._look_closer(runs, *named)
        except ValueError:
            told = None
            assert total == -1
        else:
            assert total in (told, -1)
            assert told == runs[:, NUMEL].sum()
            assert check_runs(runs, *named) == told
        seen.append((total == -1, told is None))
    assert {(True, True), (False, False), (True, False)} == set(seen)  # the last: out of order


@pytest.mark.parametrize("numels", [[], [1], [3, 3, 3, 3], [10, 1, 1, 1, 1, 9], [0, 0, 5], [4] * 7])
def test_pieces_follow_one_another_and_hold_about_as_much(numels, monkeypatch):
    monkeypatch.setattr(checks, "RUN_BLOCK", 4)
    monkeypatch.setattr(kernels, "PARALLEL_FROM", 4)
    runs = runs_of(*((0, 0, n, 0) for n in numels))
    assert run_groups(runs, 3).tolist() == [0, len(numels)]
    bounds = run_groups(runs, 4).tolist()
    assert bounds[0] == 0
    assert bounds[-1] == len(numels)
    assert bounds == sorted(set(bounds)) or not numels
    for start, stop in zip(bounds[:-1], bounds[1:], strict=True):
        held = runs[start:stop, NUMEL]
        assert held[:-1].sum() < 4  # it ends with the run that fills it
