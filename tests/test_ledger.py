"""The ledger counts storage, not names: once, until it is really freed."""

import gc
import random

import numpy as np
import pytest

from zero_nb.config import UsageError
from zero_nb.train.ledger import HELD_KINDS, KINDS, Ledger, LedgerEvent, owner_of


def floats(*shape):
    return np.ones(shape, np.float32)


# --- what is counted -----------------------------------------------------------------------------


def test_bytes_are_per_rank_and_returned_is_what_was_given():
    ledger = Ledger(3)
    array = floats(3, 7)
    assert ledger.register(array, "param", "u") is array
    assert ledger.bytes_by_rank("param") == [28, 28, 28]
    assert ledger.current_bytes("param") == ledger.current_bytes() == 28
    assert ledger.bytes_by_rank("grad") == [0, 0, 0]


def test_many_views_of_one_array_are_counted_once():
    ledger = Ledger(2)
    array = floats(2, 12)
    for view in (array, array[:, :6], array.reshape(2, 3, 4), array[:, 3:].T, array[:1][0]):
        ledger.register(view, "grad")
    assert ledger.current_bytes("grad") == 48
    assert len(ledger.events) == 1


def test_a_view_books_all_of_the_memory_it_keeps_alive():
    ledger = Ledger(2)
    ledger_view = ledger.register(floats(2, 12)[:, :1], "grad")
    assert ledger.current_bytes("grad") == 48
    assert ledger_view.shape == (2, 1)


def test_memory_counts_until_its_last_view_dies():
    ledger = Ledger(2)
    array = floats(2, 12)
    ledger.register(array, "activation")
    view = array.reshape(2, 3, 4)[:, 1:]
    deeper = view[:, :, ::2]
    del array, view
    assert ledger.current_bytes("activation") == 48
    del deeper
    assert ledger.current_bytes("activation") == ledger.current_bytes() == 0
    assert [event.delta_bytes for event in ledger.events] == [48, -48]


def test_replacing_an_array_frees_the_old_one_after_the_new_one_is_there():
    ledger = Ledger(1)
    array = ledger.register(floats(1, 10), "grad")
    array = ledger.register(floats(1, 20), "grad")
    assert ledger.current_bytes() == 80
    assert ledger.peak_bytes == 120  # for a moment both existed
    del array


def test_equal_arrays_with_memory_of_their_own_are_both_counted():
    ledger = Ledger(2)
    both = [ledger.register(floats(2, 5), "param") for _ in range(2)]
    assert ledger.current_bytes("param") == 40
    both.pop()
    assert ledger.current_bytes("param") == 20


def test_registering_again_moves_memory_to_the_new_kind():
    ledger = Ledger(2)
    array = floats(2, 4)
    ledger.register(array, "bucket", "u")
    ledger.register(array[:, :2], "grad", "u")
    assert (ledger.current_bytes("bucket"), ledger.current_bytes("grad")) == (0, 16)
    assert ledger.current_bytes() == ledger.peak_bytes == 16  # moved, never there twice
    ledger.register(array, "grad", "u")
    assert [(e.kind, e.delta_bytes) for e in ledger.events] == [
        ("bucket", 16),
        ("bucket", -16),
        ("grad", 16),
    ]
    del array
    assert ledger.current_bytes() == 0


def test_memory_of_some_ranks_is_booked_on_those_only():
    ledger = Ledger(4)
    chunk = ledger.register(floats(2, 6), "activation", rank_index=slice(1, 3))
    single = ledger.register(floats(5), "activation", rank_index=3)
    lone = ledger.register(floats(1, 7), "activation", rank_index=slice(0, 1))
    assert ledger.bytes_by_rank("activation") == [28, 24, 24, 20]
    assert ledger.current_bytes("activation") == 28
    del lone
    assert ledger.current_bytes("activation") == 24
    del chunk
    assert ledger.bytes_by_rank("activation") == [0, 0, 0, 20]
    del single
    assert ledger.bytes_by_rank("activation") == [0, 0, 0, 0]


def test_the_total_is_that_of_one_rank_and_not_the_sum_of_each_kinds_fullest():
    ledger = Ledger(2)
    held = [
        ledger.register(floats(10), "param", rank_index=0),
        ledger.register(floats(8), "grad", rank_index=1),
        ledger.register(floats(1), "optim", rank_index=1),
    ]
    assert ledger.held_bytes() == {"param": 40, "grad": 32, "optim": 4}
    assert ledger.current_bytes() == ledger.peak_bytes == 40
    del held


def test_held_bytes_are_the_model_states():
    ledger = Ledger(2)
    held = [ledger.register(floats(2, n), kind) for n, kind in enumerate(KINDS, start=1)]
    assert HELD_KINDS == ("param", "grad", "optim")
    assert ledger.held_bytes() == {"param": 4, "grad": 8, "optim": 12}
    assert ledger.current_bytes() == 4 * sum(range(1, len(KINDS) + 1))
    del held


def test_bits_of_16_are_counted_with_two_bytes():
    ledger = Ledger(2)
    array = ledger.register(np.zeros((2, 9), np.uint16), "param")
    assert ledger.current_bytes() == 18
    del array


def test_owner_is_found_through_any_chain_of_views():
    array = floats(4, 6)
    assert owner_of(array) is array
    assert owner_of(array[1:].reshape(-1)[::2].view(np.uint32)) is array
    strided = np.lib.stride_tricks.as_strided(array, (2, 2), (32, 4))
    assert np.shares_memory(owner_of(strided), array)


def test_own_slices_are_booked_as_the_buffer_they_look_into():
    from zero_nb.cluster.simulated import SimulatedWorld

    ledger, full = Ledger(3), floats(3, 12)
    ledger.register(full, "param")
    ledger.register(SimulatedWorld(3).own_shard(full), "param")
    assert ledger.current_bytes("param") == 48


def test_an_unknown_kind_is_refused_and_nothing_is_booked():
    ledger = Ledger(2)
    with pytest.raises(UsageError, match=r"unknown kind of memory 'params'; choose one of param, "):
        ledger.register(floats(2, 3), "params")
    assert (ledger.current_bytes(), ledger.events) == (0, [])


# --- peaks and the timeline ----------------------------------------------------------------------


def test_the_peak_is_the_largest_sum_and_each_kind_has_its_own_time():
    ledger = Ledger(1)
    first = ledger.register(floats(1, 10), "activation")
    del first
    second = ledger.register(floats(1, 8), "bucket")
    third = ledger.register(floats(1, 1), "grad")
    assert ledger.peak_bytes == 40
    assert ledger.largest_bytes["activation"] == 40
    assert ledger.largest_bytes["bucket"] == 32
    assert ledger.current_bytes() == 36
    assert sum(ledger.largest_bytes.values()) > ledger.peak_bytes
    del second, third


def test_a_step_starts_from_what_is_held():
    ledger = Ledger(1)
    held = ledger.register(floats(1, 3), "param")
    passing = ledger.register(floats(1, 100), "activation")
    del passing
    assert ledger.peak_bytes == 412
    ledger.begin_step()
    assert (ledger.peak_bytes, ledger.events) == (12, [])
    assert ledger.largest_bytes == dict.fromkeys(KINDS, 0) | {"param": 12}
    passing = ledger.register(floats(1, 1), "activation")
    assert ledger.peak_bytes == 16
    del held, passing


def test_what_was_read_does_not_change_later():
    ledger = Ledger(1)
    largest, held = ledger.largest_bytes, ledger.held_bytes()
    array = ledger.register(floats(1, 3), "grad")
    assert largest["grad"] == held["grad"] == 0
    del array


def test_the_timeline_tells_phase_label_kind_change_and_totals():
    ledger = Ledger(2)
    ledger.phase = "forward"
    array = ledger.register(floats(2, 3), "unsharded", "layers.0")
    ledger.phase = "backward"
    del array
    empty = dict.fromkeys(KINDS, 0)
    assert ledger.events == [
        LedgerEvent("forward", "layers.0", "unsharded", 12, empty | {"unsharded": 12}),
        LedgerEvent("backward", "layers.0", "unsharded", -12, empty),
    ]


def test_totals_in_the_timeline_are_those_of_the_fullest_rank():
    ledger = Ledger(2)
    kept = [
        ledger.register(floats(2), "param", rank_index=0),
        ledger.register(floats(5), "grad", rank_index=1),
        ledger.register(floats(9), "param", rank_index=0),
    ]
    totals = [(e.total_bytes["param"], e.total_bytes["grad"]) for e in ledger.events]
    assert totals == [(8, 0), (0, 20), (44, 0)]
    assert [e.delta_bytes for e in ledger.events] == [8, 20, 36]
    del kept


def test_without_recording_sums_and_peaks_are_the_same():
    ledger = Ledger(1, record=False)
    array = ledger.register(floats(1, 3), "grad")
    del array
    assert (ledger.events, ledger.current_bytes(), ledger.peak_bytes) == ([], 0, 12)


def test_memory_may_outlive_its_ledger():
    ledger = Ledger(1)
    array = ledger.register(floats(1, 3), "grad")
    del ledger
    gc.collect()
    del array


# --- against a slow twin -----------------------------------------------------------------------


class SlowLedger:
    """Adds everything up again from a list of what is alive."""

    def __init__(self, hosted):
        self.hosted, self.alive, self.peak = hosted, {}, 0
        self.largest = dict.fromkeys(KINDS, 0)

    def by_rank(self, kind):
        return [
            sum(n for k, ranks, n in self.alive.values() if k == kind and rank in ranks)
            for rank in range(self.hosted)
        ]

    def look(self):
        by_kind = {kind: self.by_rank(kind) for kind in KINDS}
        self.peak = max(self.peak, *(sum(c) for c in zip(*by_kind.values(), strict=True)))
        for kind, values in by_kind.items():
            self.largest[kind] = max(self.largest[kind], *values)


@pytest.mark.parametrize("seed", range(5))
def test_any_history_gives_what_adding_up_gives(seed):
    rng, hosted = random.Random(seed), 4
    ledger, slow = Ledger(hosted), SlowLedger(hosted)
    arrays = {}
    for key in range(150):
        action = rng.random()
        if action < 0.5 or not arrays:
            first = rng.randrange(hosted)
            ranks = range(first, rng.randrange(first, hosted) + 1)
            kind, numel = rng.choice(KINDS), rng.randrange(1, 50)
            view = floats(len(ranks), numel)[:, : rng.randrange(1, numel + 1)]
            ledger.register(view, kind, rank_index=slice(ranks.start, ranks.stop))
            arrays[key] = view
            slow.alive[key] = (kind, ranks, 4 * numel)
        elif action < 0.7:
            chosen, kind = rng.choice(list(arrays)), rng.choice(KINDS)
            _, ranks, size = slow.alive[chosen]
            # In between the memory is booked nowhere, which can only lower a sum.
            ledger.register(arrays[chosen], kind, rank_index=slice(ranks.start, ranks.stop))
            slow.alive[chosen] = (kind, ranks, size)
        elif action < 0.95:
            chosen = rng.choice(list(arrays))
            del arrays[chosen], slow.alive[chosen]
            view = None
        else:
            ledger.begin_step()
            slow.peak, slow.largest = 0, dict.fromkeys(KINDS, 0)
        slow.look()
        assert {kind: ledger.bytes_by_rank(kind) for kind in KINDS} == {
            kind: slow.by_rank(kind) for kind in KINDS
        }
        assert ledger.peak_bytes == slow.peak
        assert ledger.largest_bytes == slow.largest
