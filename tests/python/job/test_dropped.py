"""Models and gradients that the program drops while something of them is in use."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster import run_ranks
from job import dropped_scenarios


@pytest.mark.parametrize("wait", ["backward", "step"])
def test_a_model_is_not_collected_by_another_thread_mid_call(wait: str, tmp_path: Path) -> None:
    first, second = run_ranks(dropped_scenarios.collected_while_it_waits, 2, str(tmp_path), wait, limit_s=120)
    assert first == {"kept": True, "gone": True, "same": True}
    assert second == {"same": True}


def test_gradient_views_keep_their_values_when_their_storage_is_replaced() -> None:
    for out in run_ranks(dropped_scenarios.views_of_gradients, 2):
        assert out["as it was"] and out["new"] and out["after the end"]
        assert out["counters"]["reductions"] >= 2


def test_gradients_that_were_put_aside_keep_their_values() -> None:
    for out in run_ranks(dropped_scenarios.gradients_put_aside, 2):
        assert out["as it was"] and out["added"] and out["again"]
        assert out["counters"]["reductions"] >= 2
