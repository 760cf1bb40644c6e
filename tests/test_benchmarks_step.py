"""The training-step and growth benchmarks work: our side only, tiny, no figure is judged."""

import sys
from pathlib import Path

import numpy as np
import pytest

FOLDER = str(Path(__file__).resolve().parent.parent / "benchmarks")


@pytest.fixture(autouse=True)
def _benchmarks_on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    yield
    for name in ("step", "step_sides", "growth", "_timing"):
        sys.modules.pop(name, None)


def test_our_stages_take_turns_and_give_rows_with_what_they_are_compared_with():
    import step

    rows = step.rows(quick=True, only=("MLP",), world_sizes=(2,), peers={})
    assert [row.against for row in rows] == ["stage 1", "stage 2", "stage 3"]
    for row in rows:
        assert row.measured == row.seconds[row.against] / row.seconds["stage 0"] > 0


def test_sides_that_train_something_else_are_not_compared():
    import step

    ways = {("ours", "stage 0"): ("stage 0", None), ("jax", "sharded"): ("JAX, sharded", "stage 3")}
    losses = {("ours", "stage 0"): [1.0, 0.5], ("jax", "sharded"): [1.0, 0.6]}
    with pytest.raises(RuntimeError, match="JAX, sharded has losses"):
        step.check_losses(losses, ways)


def test_a_peer_that_is_not_installed_is_named_and_claims_nothing():
    import step

    rows = step.absent({}, step.MODELS)
    assert len(rows) == len(step.REACH)
    assert all(row.measured is None and row.reached is None for row in rows)


def test_the_cycle_of_the_growth_benchmark_updates_every_rank_alike():
    import growth

    cycle = growth.Cycle(4, 10)
    before = cycle.unit.param.copy()
    cycle()
    after = cycle.unit.param
    assert np.all(after[:, :10] < before[:, :10])  # the gradient is positive
    assert all(np.array_equal(row, after[0]) for row in after)
    # 4 rows of 12: read for a sum of 12; the update of 12; 12 read and written to 3 other rows.
    assert cycle.bytes_moved == 4 * (48 + 12) + 28 * 12 + 4 * (12 + 36)
    assert growth.Cycle(1, 12).bytes_moved == 4 * (12 + 12) + 28 * 12  # no other row


def test_growth_gives_a_row_for_ranks_sizes_and_plans():
    import growth

    rows = growth.rows(quick=True, only=("ranks", "parameters", "plans"))
    assert len(rows) == 1 + 2 + 2
    assert all(row.measured > 0 and row.reach is None for row in rows)
