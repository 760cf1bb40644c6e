"""Chunks of ranks side by side: every one computed, errors raised, nothing kept alive."""

import threading
import weakref

import pytest

from zero_nb.train import engine
from zero_nb.train.engine import _each


@pytest.fixture
def one_helper(monkeypatch):
    """Compute with two threads, whatever the machine has."""
    monkeypatch.setattr(engine, "_threads", lambda: 2)


@pytest.mark.parametrize("count", [1, 2, 3, 50])
def test_results_come_in_order(count):
    assert _each(lambda index: index * index, count) == [index * index for index in range(count)]


def test_the_calling_thread_and_a_helper_each_take_a_part(one_helper):
    both = threading.Barrier(2, timeout=30)  # passed only if two threads are in the function

    def meet(index):
        both.wait()
        return threading.current_thread()

    first, second = _each(meet, 2)
    assert first is not second
    assert threading.current_thread() in (first, second)


def test_nobody_waits_for_a_helper_that_has_not_begun(one_helper):
    blocked, free = threading.Event(), threading.Event()

    def hold():
        blocked.set()
        free.wait(30)

    holds = [engine._pool().submit(hold) for _ in range(engine._pool()._max_workers)]
    try:
        assert blocked.wait(30)
        caller = threading.current_thread()
        assert _each(lambda _: threading.current_thread(), 4) == [caller] * 4
    finally:
        free.set()
        for held in holds:
            held.result(30)


@pytest.mark.parametrize("where", ["caller", "helper"])
def test_an_error_of_either_thread_is_raised(one_helper, where):
    both, caller = threading.Barrier(2, timeout=30), threading.current_thread()

    def fail(_):
        both.wait()
        if (threading.current_thread() is caller) == (where == "caller"):
            raise ArithmeticError(where)

    with pytest.raises(ArithmeticError, match=where):
        _each(fail, 2)
    assert _each(lambda index: index, 3) == [0, 1, 2]  # the helper lives on


def test_no_thread_keeps_the_function_or_a_result_alive():
    class Result:
        pass

    def make(_):
        return Result()

    results = _each(make, 4)
    watched = [weakref.ref(made) for made in (make, *results)]
    del make, results
    assert [reference() for reference in watched] == [None] * 5
