"""Programs for one rank: what is delivered, what is counted, and what stops them."""

import numpy as np
import pytest

from zero_nb.learn.ranks import Message, Receive, Send, run_ranks


def rows(world_size, numel=2):
    return [np.arange(numel) + 10 * rank for rank in range(world_size)]


def to_the_right(rank, world_size, mine):
    received = yield Send((rank + 1) % world_size, mine)
    return received


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_each_rank_receives_its_left_neighbours_row(world_size):
    run = run_ranks(to_the_right, rows(world_size))
    for rank, got in enumerate(run.results):
        assert got.tolist() == rows(world_size)[(rank - 1) % world_size].tolist()
    assert run.messages == (1,) * world_size
    assert run.elements_sent == run.elements_received == (2,) * world_size
    assert run.bytes_sent == (16,) * world_size
    assert run.problem == ""


def test_bytes_depend_on_the_dtype_and_elements_do_not():
    run = run_ranks(to_the_right, [np.zeros(3, np.float16), np.zeros(3, np.float64)])
    assert run.elements_sent == (3, 3)
    assert run.bytes_sent == (6, 24)


def test_all_to_one_has_one_busy_rank():
    def gather(rank, world_size, mine):
        if rank:
            yield Send(0, mine, wait=False)
            return None
        total = mine
        for _ in range(world_size - 1):
            received = yield Receive()
            total = total + received
        return total

    run = run_ranks(gather, rows(4))
    assert run.problem == ""
    assert run.results[0].tolist() == [60, 64]
    assert run.elements_sent == (0, 2, 2, 2)
    assert run.elements_received == (6, 0, 0, 0)
    assert run.log[0] == Message(1, 0, 2, 16)


def test_messages_to_one_rank_arrive_in_the_order_in_which_they_were_sent():
    def program(rank, world_size, mine):
        if rank == 0:
            for i in range(3):
                yield Send(1, np.array([i]), wait=False)
            return None
        got = []
        for _ in range(3):
            received = yield Receive()
            got.append(int(received[0]))
        return got

    assert run_ranks(program, rows(2)).results[1] == [0, 1, 2]


def test_a_rank_may_send_to_itself():
    def program(rank, world_size, mine):
        received = yield Send(rank, mine)
        return received

    assert [r.tolist() for r in run_ranks(program, rows(2)).results] == [[0, 1], [10, 11]]


def test_nobody_sees_anothers_arrays_and_the_rows_stay():
    given = rows(3)
    kept = []

    def program(rank, world_size, mine):
        received = yield Send((rank + 1) % world_size, mine)
        mine[:] = -1  # after it was sent
        kept.append((mine, received))
        received += 100
        yield Send((rank + 1) % world_size, mine)
        return received

    run = run_ranks(program, given)
    assert [r.tolist() for r in run.results] == [[120, 121], [100, 101], [110, 111]]
    assert [row.tolist() for row in given] == [row.tolist() for row in rows(3)]
    for mine, received in kept:
        assert not np.shares_memory(mine, received)


def test_a_run_is_the_same_every_time():
    def program(rank, world_size, mine):
        got = []
        for step in range(3):
            received = yield Send((rank + step) % world_size, mine + step)
            got.append(int(received[0]))
        return got

    runs = [run_ranks(program, rows(4)) for _ in range(3)]
    assert runs[0].problem == runs[1].problem == runs[2].problem
    assert runs[0].log == runs[1].log == runs[2].log
    assert repr(runs[0].results) == repr(runs[1].results)


# ------------------------------------------------------------------------------------ what stops


def problem(program, world_size=3):
    run = run_ranks(program, rows(world_size))
    assert repr(run) == f"stopped: {run.problem}"
    return run.problem


def test_a_deadlock_is_reported_by_rank():
    def program(rank, world_size, mine):
        if rank == 1:
            return mine
        received = yield Send(2, mine) if rank == 0 else Receive()
        if rank == 2:
            received = yield Receive()
        return received

    assert problem(program) == (
        "deadlock, every rank that is left waits for a message: rank 0 waits, 1 sent; "
        "rank 1 has finished; rank 2 waits, 0 sent"
    )


def test_a_message_that_nobody_waited_for_is_reported():
    def program(rank, world_size, mine):
        yield Send((rank + 1) % world_size, mine, wait=False)

    assert problem(program) == "rank 0 finished, but 1 message to it came later"


def not_a_generator(rank, world_size, mine):
    return mine


def raises_at_once(rank, world_size):
    yield 1


def raises_later(rank, world_size, mine):
    yield Send((rank + 1) % world_size, mine)
    raise ValueError("no")


def yields_an_array(rank, world_size, mine):
    yield mine


def yields_nothing(rank, world_size, mine):
    yield


def sends_too_far(rank, world_size, mine):
    yield Send(rank + 1, mine)


def sends_below(rank, world_size, mine):
    yield Send(rank - 1, mine)


def sends_to_a_half(rank, world_size, mine):
    yield Send(0.5, mine)


def sends_to_a_word(rank, world_size, mine):
    yield Send("next", mine)


def sends_a_list(rank, world_size, mine):
    yield Send(0, [1, 2])


def never_ends(rank, world_size, mine):
    while True:
        yield Send((rank + 1) % world_size, mine)


def never_waits(rank, world_size, mine):
    while True:
        yield Send(rank, mine, wait=False)


def will_not_go(rank, world_size, mine):
    while True:
        try:
            yield Send(9, mine)
        except GeneratorExit:
            yield 3


PROBLEMS = {
    not_a_generator: "this is no program for a rank: it has no yield",
    raises_at_once: "rank 0 raised TypeError: ",
    raises_later: "rank 1 raised ValueError: no",
    yields_an_array: "rank 0 yielded ndarray; yield Send(to, array) or Receive()",
    yields_nothing: "rank 0 yielded NoneType; ",
    sends_too_far: "rank 2 sends to rank 3, but ranks are 0 to 2",
    sends_below: "rank 0 sends to rank -1, but ranks are 0 to 2",
    sends_to_a_half: "rank 0 sends to rank 0.5, but ranks are 0 to 2",
    sends_to_a_word: "rank 0 sends to rank 'next', but ranks are 0 to 2",
    sends_a_list: "rank 0 sends a list; send an array",
    never_ends: "still sending after 20,000 messages",
    never_waits: "still sending after 20,000 messages",
    will_not_go: "rank 0 sends to rank 9, but ranks are 0 to 2",
}


@pytest.mark.parametrize("program", PROBLEMS, ids=lambda program: program.__name__)
def test_what_a_learner_may_write_is_a_problem_and_no_error(program):
    assert problem(program).startswith(PROBLEMS[program])
