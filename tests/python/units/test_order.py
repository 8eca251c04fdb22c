"""Ranks whose blocks run in another order, twice or not at all: right, or an error that names them; never silence."""

from __future__ import annotations

import pytest
import torch

from cluster import run_ranks
from units import order_scenarios

_STEPS, _BAD_STEP = 6, 3
_GROUPS = 5  # four blocks and the root


@pytest.mark.parametrize("stock", [False, True], ids=["daemon", "stock"])
@pytest.mark.parametrize("kind", ["swap", "reverse", "twice"])
def test_equal_blocks_in_another_order_on_one_rank_train_right(kind: str, stock: bool) -> None:
    results = run_ranks(order_scenarios.train, 2, kind, _BAD_STEP, _STEPS, stock)
    for result, losses in zip(results, order_scenarios.alone(kind, _BAD_STEP, _STEPS), strict=True):
        assert result["error"] == ""
        torch.testing.assert_close(torch.tensor(result["losses"]), torch.tensor(losses), rtol=1e-6, atol=0)
    counts = results[0]["counters"]
    assert counts["reductions"] >= _STEPS * _GROUPS and counts["unshards"] >= 2 * _STEPS * _GROUPS
    assert counts["departures"] > 0 and counts["aborts"] == 0


def test_another_order_from_the_first_step_on_is_right_too() -> None:
    results = run_ranks(order_scenarios.train, 2, "swap", 0, _STEPS)
    for result, losses in zip(results, order_scenarios.alone("swap", 0, _STEPS), strict=True):
        torch.testing.assert_close(torch.tensor(result["losses"]), torch.tensor(losses), rtol=1e-6, atol=0)
    assert results[0]["counters"]["commits"] == _STEPS


@pytest.mark.parametrize("bad_step", [0, _BAD_STEP])
def test_a_skipped_block_fails_everywhere_naming_rank_and_block(bad_step: int) -> None:
    for result in run_ranks(order_scenarios.train, 2, "skip", bad_step, _STEPS):
        assert len(result["losses"]) == bad_step
        assert "rank 1" in result["error"] and '"layers.2"' in result["error"], result["error"]
        # With registration in it, which waits for processes to start, the first step is not the rank's own time.
        assert bad_step == 0 or result["seconds"] < 1


def test_branches_in_another_order_give_the_same_gradients() -> None:
    one, other = run_ranks(order_scenarios.gradient_order, 2)
    torch.testing.assert_close(torch.tensor(one["losses"]), torch.tensor(other["losses"]), rtol=1e-6, atol=0)
    assert one["counters"]["commits"] == 4
