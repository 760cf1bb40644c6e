"""Programs for one rank: written as generators, run together, every message counted.

[Note: one program, W ranks]
On a cluster every rank runs the same program and differs from the others in its number and its
data only. A learner writes that program as a generator; each ``yield`` is a place where the rank
has to wait for another one. `run_ranks` starts W of them, gives each its own copy of its own row
and nothing else, and carries the messages. No rank can look into another one's arrays, so what
comes out was really sent.
"""

import contextlib
import inspect
from collections import deque
from dataclasses import dataclass
from typing import final

import numpy as np

__all__ = ["Message", "RankRun", "Receive", "Send", "run_ranks"]

MOST_MESSAGES = 20_000
"""A run that sends more than this does not come to an end by itself."""


@final
@dataclass(frozen=True, eq=False)
class Send:
    """Send an array, then wait for one: ``received = yield Send(to, array)``.

    Parameters
    ----------
    to : int
        The receiving rank.
    array : ndarray
        It is copied on its way.
    wait : bool
        With ``wait=False`` the rank goes on at once, and the ``yield`` returns None.
    """

    to: int
    array: np.ndarray
    wait: bool = True


@final
@dataclass(frozen=True)
class Receive:
    """Wait for an array without sending one: ``received = yield Receive()``."""


@final
@dataclass(frozen=True)
class Message:
    """One message that was sent.

    Attributes
    ----------
    sender, to : int
    elements, nbytes : int
    """

    sender: int
    to: int
    elements: int
    nbytes: int


@final
@dataclass(frozen=True, repr=False, eq=False)
class RankRun:
    """What came out of a run.

    Attributes
    ----------
    world_size : int
    results : tuple
        What each rank returned; None for a rank that did not come to its end.
    log : tuple of Message
        In the order in which they were sent.
    problem : str
        Why the run did not come to its end, in words; empty if it did.
    """

    world_size: int
    results: tuple
    log: tuple
    problem: str = ""

    @property
    def messages(self):
        """Number of messages sent, by rank (tuple of int)."""
        return self._sums(lambda message: 1)

    @property
    def elements_sent(self):
        """Number of elements sent, by rank (tuple of int)."""
        return self._sums(lambda message: message.elements)

    @property
    def bytes_sent(self):
        """Bytes sent, by rank (tuple of int)."""
        return self._sums(lambda message: message.nbytes)

    @property
    def elements_received(self):
        """Number of elements received, by rank (tuple of int)."""
        return self._sums(lambda message: message.elements, lambda message: message.to)

    def _sums(self, weight, end=lambda message: message.sender):
        """Sum a weight of the messages by rank."""
        sums = [0] * self.world_size
        for message in self.log:
            sums[end(message)] += weight(message)
        return tuple(sums)

    def __repr__(self):
        """Return the counts, or the problem: this is what a notebook shows."""
        if self.problem:
            return f"stopped: {self.problem}"
        return (
            f"{self.world_size} ranks finished; sent by each rank: messages {self.messages}, "
            f"elements {self.elements_sent}, bytes {self.bytes_sent}"
        )


def run_ranks(program, rows):
    """Run one program on W ranks.

    Parameters
    ----------
    program : generator function
        ``program(rank, world_size, mine)``: its number, how many there are, and a copy of its
        row. It yields `Send` and `Receive` and returns its result.
    rows : sequence of ndarray
        One for each rank; their number is the world size. They are not changed.

    Returns
    -------
    RankRun
        For anything that a learner may have written: an error in `program` is its `problem`.
        Each rank is run until it has to wait, in the order of ranks, round after round, so that
        every run is the same; messages to one rank arrive in the order in which they were sent.
    """
    rows = [np.array(row) for row in rows]
    harness = _Harness(len(rows))
    try:
        harness.start(program, rows)
        harness.run()
    except _Problem as problem:
        harness.close()
        return harness.outcome(str(problem))
    return harness.outcome(harness.left_over())


class _Problem(Exception):
    """Why a run cannot go on, in words."""


@final
class _Harness:
    """The ranks of one run: their generators, their inboxes and what they sent."""

    def __init__(self, world_size):
        self.world_size = world_size
        self.inbox = [deque() for _ in range(world_size)]
        self.results = [None] * world_size
        self.done = [False] * world_size
        self.programs = []
        self.log = []

    def outcome(self, problem):
        """What is told to the learner."""
        return RankRun(self.world_size, tuple(self.results), tuple(self.log), problem)

    def start(self, program, rows):
        """Make one generator a rank; each begins by receiving nothing."""
        for rank, row in enumerate(rows):
            try:
                running = program(rank, self.world_size, row)
            except Exception as error:
                raise _Problem(_raised(rank, error)) from error
            if not inspect.isgenerator(running):
                raise _Problem(
                    "this is no program for a rank: it has no yield, so it cannot wait for a "
                    "message; write received = yield Send(to, array)"
                )
            self.programs.append(running)
            self.inbox[rank].append(None)

    def run(self):
        """Let ranks go on while any of them can."""
        while not all(self.done):
            moved = False
            for rank in range(self.world_size):
                while not self.done[rank] and self.inbox[rank]:
                    self._advance(rank, self.inbox[rank].popleft())
                    moved = True
            if not moved:
                raise _Problem(self._deadlock())

    def _advance(self, rank, received):
        """Give a rank what it waited for and run it until it waits again."""
        while True:
            try:
                wish = self.programs[rank].send(received)
            except StopIteration as end:
                self.results[rank], self.done[rank] = end.value, True
                return
            except Exception as error:
                raise _Problem(_raised(rank, error)) from error
            if isinstance(wish, Receive):
                return
            self._send(rank, wish)
            if wish.wait:
                return
            received = None

    def _send(self, rank, wish):
        """Check one wish and put a copy into the receiver's inbox."""
        if not isinstance(wish, Send):
            raise _Problem(
                f"rank {rank} yielded {type(wish).__name__}; yield Send(to, array) or Receive()"
            )
        try:
            to = int(wish.to)
        except (TypeError, ValueError):
            to = -1
        if not 0 <= to < self.world_size or to != wish.to:
            raise _Problem(
                f"rank {rank} sends to rank {_brief(wish.to)}, but ranks are "
                f"0 to {self.world_size - 1}"
            )
        if not isinstance(wish.array, np.ndarray):
            raise _Problem(f"rank {rank} sends a {type(wish.array).__name__}; send an array")
        if len(self.log) >= MOST_MESSAGES:
            raise _Problem(f"still sending after {MOST_MESSAGES:,} messages; does a loop not end?")
        self.log.append(Message(rank, to, wish.array.size, wish.array.nbytes))
        self.inbox[to].append(wish.array.copy())

    def _deadlock(self):
        """Say what each rank does when none can go on."""
        sent = self.outcome("").messages
        said = []
        for rank in range(self.world_size):
            if self.done[rank]:
                said.append(f"rank {rank} has finished")
            else:
                said.append(f"rank {rank} waits, {sent[rank]} sent")
        return f"deadlock, every rank that is left waits for a message: {'; '.join(said)}"

    def left_over(self):
        """Say which rank was sent what it never received."""
        for rank in range(self.world_size):
            count = len(self.inbox[rank])
            if count:
                return f"rank {rank} finished, but {_count(count, 'message')} to it came later"
        return ""

    def close(self):
        """End the generators that are left; what they do about it is of no interest."""
        for program in self.programs:
            with contextlib.suppress(Exception):
                program.close()


def _raised(rank, error):
    """Say that a rank raised an error."""
    return f"rank {rank} raised {type(error).__name__}: {error}"


def _brief(value):
    """A value in a few characters, whatever it is."""
    try:
        return repr(value)[:40]
    except Exception:
        return f"a {type(value).__name__}"


def _count(number, noun):
    """A number with its noun."""
    return f"{number} {noun}{'s' if number != 1 else ''}"
