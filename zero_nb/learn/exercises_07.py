"""Exercises of notebook 07: volume, time on a link, two lanes, a bandwidth, small messages."""

from zero_nb.learn.exercise import FunctionExercise, ValueExercise, Wrong
from zero_nb.learn.limits import NotYet
from zero_nb.learn.predict import Mistake, Prediction

__all__ = ["EXERCISES", "PREDICTIONS"]


PREDICTIONS = {
    # The timeline model: 287.7 ms over 279.8 ms, see notebook 07.
    "07-p": Prediction(
        title="Predict how much longer a step of stage 3 takes",
        unit=" %",
        within=4.0,
        low=50.0,
        high=400.0,
        origin="modelled",
        mistakes=(
            Mistake(
                150.0,
                "That is the ratio of what is sent. It would be the ratio of times if nothing "
                "were computed meanwhile, or nothing but the link mattered.",
            ),
            Mistake(
                116.0,
                "That is without overlap: computing and sending one after the other. Here messages "
                "travel while something is computed.",
            ),
            Mistake(
                124.0,
                "You added the 63 ms that stage 3 sends more. In which pass does it send them, and "
                "what does the link of data parallelism do in that pass?",
            ),
            Mistake(
                67.0,
                "Turned round: that would be data parallelism in percent of stage 3. And is it the "
                "traffic that decides?",
            ),
        ),
        close="Close: stage 3 sends more, at a time when the link had nothing to do.",
        advice="For each pass, compare what it computes with what travels in it.",
    )
}


# ------------------------------------------------------------------------------ 07-a: the volume


def _volume(rule=None, *, padded=True, shares=lambda world_size: world_size - 1):
    """Make an answer from what each stage does, and how sizes are counted."""
    rule = rule or [(2, 0), (1, 1), (1, 1), (1, 2)]

    def elements_sent(stage, units, world_size):
        shards = [-(-numel // world_size) if padded else numel / world_size for numel in units]
        reductions, gathers = rule[stage]
        once = shares(world_size) * sum(shards)
        return reductions * once, gathers * once

    return elements_sent


def _padded_once(stage, units, world_size):
    """Wrong: all units as one flat array."""
    return _volume()(stage, [sum(units)], world_size)


VOLUME = FunctionExercise(
    title="Count what each stage sends",
    core=True,
    solution=_volume(),
    cases=lambda rng: [
        (stage, units, size)
        for size, units in (
            (4, [8, 16, 4]),
            (3, [7, 10]),
            (1, [5]),
            (2, [int(each) for each in rng.integers(3, 60, 4)]),
            (8, [int(each) for each in rng.integers(3, 60, 3)]),
        )
        for stage in range(4)
    ],
    wrong={
        "stage 1 reduces to all": Wrong(
            _volume([(2, 0), (2, 1), (1, 1), (1, 2)]),
            "You let stage 1 all-reduce and then gather: 3. An owner needs the sum of its shard "
            "only, so a reduce-scatter is enough.",
        ),
        "stages 1 and 2 reduce to all": Wrong(
            _volume([(2, 0), (2, 1), (2, 1), (1, 2)]),
            "You let stages 1 and 2 all-reduce and then gather. An owner needs the sum of its "
            "shard only, so a reduce-scatter is enough.",
        ),
        "stage 3 gathers once": Wrong(
            _volume([(2, 0), (1, 1), (1, 1), (1, 1)]),
            "You gathered parameters once at stage 3. They are dropped after forward, and backward "
            "gathers them again.",
        ),
        "an all-reduce counts as one": Wrong(
            _volume([(1, 0), (1, 1), (1, 1), (1, 2)]),
            "You counted an all-reduce once. It is a reduce-scatter and an all-gather.",
        ),
        "the whole of it": Wrong(
            _volume(shares=lambda world_size: world_size),
            "You counted whole units. A rank does not send its own shard to itself: of W shards it "
            "sends W - 1.",
        ),
        "all ranks together": Wrong(
            _volume(shares=lambda world_size: world_size * (world_size - 1)),
            "That is what all ranks send together. The question is about one of them.",
        ),
        "no padding": Wrong(
            _volume(padded=False),
            "The factors are right, but sizes that W does not divide are padded first: a shard is "
            "the unit over W, rounded up.",
        ),
        "padded once": Wrong(
            _padded_once,
            "You put all units together and padded once. Each unit is padded by itself.",
        ),
    },
    hints=(
        "Two questions for each unit: how large is a shard, and how many shards does a rank send "
        "in one collective?",
        "A shard is -(-numel // world_size) elements; a reduce-scatter or an all-gather sends "
        "world_size - 1 of them, an all-reduce twice as many.",
        "With once as the sum over units: (2 once, 0), (once, once), (once, once), and at stage 3 "
        "one reduction and two gathers.",
    ),
)


# -------------------------------------------------------------------------- 07-b: time on a link


def _message(bits=8, *, itemsize_counts=True, giga=1e9, latency=1.0):
    """Make an answer from a factor, what is counted, and how latency enters."""

    def message_seconds(elements, itemsize, gigabits, latency_s):
        size = elements * (itemsize if itemsize_counts else 1)
        return latency * latency_s + bits * size / (gigabits * giga)

    return message_seconds


def _each_element(elements, itemsize, gigabits, latency_s):
    """Wrong: latency for every element."""
    return elements * (latency_s + 8 * itemsize / (gigabits * 1e9))


MESSAGE = FunctionExercise(
    title="Turn elements into seconds on a link",
    core=True,
    solution=_message(),
    tolerance=1e-12,
    cases=lambda rng: [
        (50_000_000, 2, 400, 20e-6),
        (1_000_000_000, 4, 100, 5e-6),
        (0, 2, 100, 1e-3),
        (int(rng.integers(10**8, 10**9)), 2, 25, 0.0),
        (int(rng.integers(10**8, 10**9)), 4, 200, 1e-3),
    ],
    wrong={
        "bits as bytes": Wrong(
            _message(1),
            "Eight times too fast: the link is given in gigabits, the message in bytes of 8 bits.",
        ),
        "the eight on the wrong side": Wrong(
            _message(1 / 8),
            "You divided by 8 on the wrong side, so it is 64 times too fast. A byte has 8 bits: "
            "there are more bits to send than bytes.",
        ),
        "elements for bytes": Wrong(
            _message(itemsize_counts=False),
            "You sent elements of one byte each. How many bytes does an element take?",
        ),
        "elements for bits": Wrong(
            _message(1, itemsize_counts=False),
            "You sent one bit for each element. An element has itemsize bytes, a byte has 8 bits.",
        ),
        "without latency": Wrong(
            _message(latency=0.0),
            "You left the latency out. A message takes it however short it is.",
        ),
        "latency for each element": Wrong(
            _each_element,
            "You paid the latency for each element. All of them travel in one message.",
        ),
        "2 to the 30th": Wrong(
            _message(giga=2**30),
            "A gigabit is 10**9 bits; only memory is counted in powers of two.",
        ),
    },
    hints=(
        "Two terms: one that is there for every message, and one that grows with its size.",
        "Bytes are elements * itemsize, bits are 8 times as many; a link of 1 Gb/s sends 1e9 bits "
        "in a second.",
        "latency_s + 8 * elements * itemsize / (gigabits * 1e9).",
    ),
)


# ------------------------------------------------------------------------------ 07-c: two lanes


def _lanes(program, *, serial=True, waits_for_all=False, overlap=True):
    """Go through a program with a clock for each lane."""
    now, link_free, arrival = 0.0, 0.0, {}
    for what, name, seconds in program:
        if what == "compute":
            now += seconds
        elif what == "send":
            start = max(now, link_free) if serial else now
            arrival[name] = link_free = start + seconds
            now = now if overlap else link_free
        else:
            now = max(now, link_free if waits_for_all else arrival[name])
    return now


def _two_lanes(program):
    """The solution: a message begins when it is sent and the link is free."""
    return _lanes(program)


def _all_added(program):
    """Wrong: one after the other."""
    return sum(seconds for _, _, seconds in program)


def _larger_of_two(program):
    """Wrong: as if everything could overlap."""
    return max(
        sum(seconds for what, _, seconds in program if what == kind) for kind in ("compute", "send")
    )


def _all_at_once(program):
    """Wrong: every message has a link of its own."""
    return _lanes(program, serial=False)


def _wait_for_all(program):
    """Wrong: waits until the link is free."""
    return _lanes(program, waits_for_all=True)


def _queue(program):
    """Wrong: a message begins when the one before it ends, even if it was not sent yet."""
    now, link_free, arrival = 0.0, 0.0, {}
    for what, name, seconds in program:
        if what == "compute":
            now += seconds
        elif what == "send":
            arrival[name] = link_free = link_free + seconds
        else:
            now = max(now, arrival[name])
    return now


def _try_lanes(function, program):
    """Run it; a program is a list of tuples."""
    seconds = function([tuple(each) for each in program])
    if seconds is not None and (isinstance(seconds, bool) or not isinstance(seconds, int | float)):
        raise NotYet(f"two_lanes returned a {type(seconds).__name__}; return a number of seconds")
    return seconds


def _lane_cases(rng):
    """Whole numbers of seconds, exact in any order."""
    a, b, c = (int(each) for each in rng.integers(1, 9, 3))
    return [
        ([("send", "g1", 3), ("compute", "f0", 5), ("wait", "g1", 0), ("compute", "f1", 2)],),
        ([("send", "g1", 9), ("compute", "f0", 5), ("wait", "g1", 0), ("compute", "f1", 2)],),
        ([("send", "a", 4), ("send", "b", 4), ("wait", "a", 0), ("compute", "f", 2),
          ("wait", "b", 0), ("compute", "g", 1)],),
        ([("compute", "b2", 4), ("send", "r2", 2), ("compute", "b1", 4), ("send", "r1", 2),
          ("wait", "r2", 0), ("wait", "r1", 0)],),
        ([("send", "a", 1), ("send", "b", 10), ("wait", "a", 0), ("compute", "f", 3)],),
        ([("compute", "x", a), ("send", "s", b), ("compute", "y", c), ("wait", "s", 0)],),
    ]  # fmt: skip


LANES = FunctionExercise(
    title="Lay a program over two lanes",
    solution=_two_lanes,
    cases=_lane_cases,
    trial=_try_lanes,
    wrong={
        "one after the other": Wrong(
            _all_added,
            "You added everything up. While a message travels the program goes on, until it waits.",
        ),
        "the larger of two": Wrong(
            _larger_of_two,
            "You took the longer lane. But a message cannot start before it is sent, and what "
            "waits for it cannot start before it is there.",
        ),
        "messages side by side": Wrong(
            _all_at_once,
            "You let messages travel side by side. There is one link: the next one starts when the "
            "link is free.",
        ),
        "waits for all": Wrong(
            _wait_for_all,
            "At a wait you waited for everything that was sent. Only the named message is needed.",
        ),
        "sent before it is there": Wrong(
            _queue,
            "A message started when the one before it had ended, even if the program had not come "
            "to its send yet.",
        ),
    },
    hints=(
        "Keep two clocks: the program's own time, and the time at which the link is free.",
        "At a send, the message starts at max(now, free) and arrives that many seconds later; "
        "note the arrival by name, and let the program go on.",
        "At a wait: now = max(now, arrival[name]). At a compute: now += seconds. Return now.",
    ),
)


# -------------------------------------------------------------------------- 07-d: the bandwidth


def _needed(factor=1.0, *, ring=True, bits=8):
    """Make an answer from what is compared with what."""

    def gigabits_needed(tokens, flops_per_s, world_size):
        share = (world_size - 1) / world_size if ring else 1
        return factor * bits * share * flops_per_s / tokens / 1e9

    return gigabits_needed


BANDWIDTH = FunctionExercise(
    title="Find the bandwidth from which stage 3 is free",
    solution=_needed(),
    tolerance=1e-9,
    cases=lambda rng: [
        (4096, 150e12, 64),
        (2048, 400e12, 8),
        (1000, 1e12, 2),
        (512 * int(rng.integers(1, 40)), 1e14, 16),
    ],
    wrong={
        "in GB/s": Wrong(
            _needed(bits=1),
            "That is in GB/s. A byte has 8 bits, so it is 8 times as many Gb/s.",
        ),
        "not on a ring": Wrong(
            _needed(ring=False),
            "Nearly. On a ring a rank sends (W - 1)/W of a layer, not all of it.",
        ),
        "elements for bytes": Wrong(
            _needed(0.5),
            "You sent one byte for each parameter. In bf16 it takes two.",
        ),
        "one operation": Wrong(
            _needed(2.0),
            "You counted one operation for each parameter and token. It is a multiplication and an "
            "addition: two.",
        ),
        "the whole step": Wrong(
            _needed(1 / 3),
            "You gave one gather the time of the whole step. In forward it has the forward pass, a "
            "third of it.",
        ),
        "what data parallelism sends": Wrong(
            _needed(2 / 3),
            "You compared two messages with the whole step. Stage 3 sends one in forward, where "
            "two operations are computed, and two in backward, where there are four.",
        ),
        "all three in forward": Wrong(
            _needed(3.0),
            "You put all three messages in the forward pass. Two of them travel in backward, which "
            "computes twice as long.",
        ),
    },
    hints=(
        "Take one layer of n parameters in the forward pass. How long is it computed, and how long "
        "does its gather take? Backward has twice of both.",
        "Computing takes 2 * n * tokens / flops_per_s seconds, the gather sends 2 * n * (W - 1)/W "
        "bytes. Set both times equal; n drops out.",
        "(W - 1)/W * flops_per_s / tokens is in bytes per second; times 8 / 1e9 it is in Gb/s.",
    ),
)


# ---------------------------------------------------------------------- 07-e: many small messages

SMALL = ValueExercise(
    title="Find the message that is half latency",
    solution=1000.0,
    within=1.0,
    unit=" kB",
    wrong={
        "bits as bytes": Wrong(
            8000.0,
            "You read Gb/s as GB/s: eight times too large. How many bytes pass in 20 microseconds?",
        ),
        "eight twice": Wrong(
            125.0,
            "You divided by 8 once too often. 400 Gb/s are 50 GB/s.",
        ),
        "in MB": Wrong(1.0, "The size is right in MB. The question is for kB."),
        "in bytes": Wrong(1e6, "The size is right in bytes. The question is for kB."),
        "in elements": Wrong(
            500.0,
            "These are elements of bf16, in thousands. How many bytes are they?",
        ),
    },
    hints=(
        "Half of the time is latency, so the other half, for the bytes, is as long: 20 µs.",
        "400 Gb/s are 50 GB/s. How many bytes pass in 20 µs?",
        "50e9 bytes a second times 20e-6 seconds, in kB.",
    ),
)


EXERCISES = {
    "07-a": VOLUME,
    "07-b": MESSAGE,
    "07-c": LANES,
    "07-d": BANDWIDTH,
    "07-e": SMALL,
}
"""By key: the notebook's number and a letter."""
