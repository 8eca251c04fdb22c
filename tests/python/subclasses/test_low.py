"""Weights that are stored high and gathered low, against torch's own fully_shard."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cluster import run_ranks
from subclasses.low_scenarios import loaded_again, trained_on_both


def _close(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("world", "options", "accumulate", "optimizer"),
    [
        (2, {}, 1, "torch"),
        (2, {"reshard_after_forward": False}, 2, "torch"),
        (2, {}, 2, "daemon"),
        (3, {"reshard_after_forward": True}, 1, "daemon"),
        (2, {"mp_policy": "bf16"}, 1, "torch"),
    ],
    ids=["2", "2-kept-accumulated", "2-accumulated-daemon", "3-daemon", "2-bf16"],
)
def test_a_weight_gathered_low_trains_as_torchs(
    world: int, options: dict[str, Any], accumulate: int, optimizer: str
) -> None:
    for results in run_ranks(trained_on_both, world, False, options, accumulate, optimizer, 20):
        ours, theirs = results["shardd"], results["torch"]
        for what in ("losses", "local", "whole"):
            _close(ours[what], theirs[what])
        for what in ("local kinds", "state kinds", "calls"):
            assert ours[what] == theirs[what], what
        assert ours["local kinds"]["0.up.weight"] == "Low"


@pytest.mark.parametrize("how", ["copied", "assigned", "swapped"])
@pytest.mark.parametrize("optimizer", ["torch", "daemon"])
def test_what_is_loaded_trains_as_before(optimizer: str, how: str) -> None:
    for result in run_ranks(loaded_again, 2, optimizer, how):
        torch.testing.assert_close(result["loaded"], result["saved"], rtol=0, atol=0)
