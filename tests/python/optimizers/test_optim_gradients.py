"""`.grad` as PyTorch's, hooks, optimizers in backward, and what is left of a model that is dropped."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cluster import run_ranks
from optimizers import gradient_scenarios


def close(got: Any, want: Any, tolerance: float = 2e-6) -> None:
    torch.testing.assert_close(torch.as_tensor(got), torch.as_tensor(want), rtol=tolerance, atol=tolerance)


_COMMITS = {
    "dropped": 4,
    "assigned": 4,
    "stepped twice and kept": 5,
    "accumulated": 3,
    "frozen for a while": 6,
    "unfrozen": 5,
    "not in the optimizer": 4,
}


@pytest.mark.parametrize("kind", ["daemon", "stock"])
def test_gradients_dropped_assigned_kept_and_frozen_are_torchs(kind: str) -> None:
    for stock, ours in run_ranks(gradient_scenarios.both_situations, 2, kind, limit_s=240):
        for name, commits in _COMMITS.items():
            close(ours[name]["losses"], stock[name]["losses"])
            for parameter, value in stock[name]["parameters"].items():
                close(ours[name]["parameters"][parameter], value, 2e-5)
            counters = ours[name]["counters"]
            # torch's optimizers are committed where the next pass begins; two steps in one pass are one commit.
            want = commits if kind == "daemon" else commits - 1 - (name == "stepped twice and kept")
            assert counters["commits"] == want and counters["aborts"] == 0, name


def test_old_references_keep_values_and_hooks_get_the_sharded_parameter() -> None:
    for stock, ours in run_ranks(gradient_scenarios.both_references, 2):
        assert ours["calls"] == stock["calls"] == [True] * 3
        assert all(ours["kept"]) and ours["different"] == 3
        for got, want in zip(ours["values"], stock["values"]):
            close(got, want)
        assert ours["counters"]["commits"] == 3


def test_an_optimizer_for_each_parameter_that_steps_in_backward() -> None:
    for stock, ours in run_ranks(gradient_scenarios.both_in_backward, 2):
        close(ours["losses"], stock["losses"])
        for name, value in stock["parameters"].items():
            close(ours["parameters"][name], value, 2e-5)
        assert ours["counters"]["commits"] == 4  # one a pass, however many optimizers


@pytest.mark.parametrize("kind", ["daemon", "stock"])
def test_a_model_nobody_holds_is_collected_and_its_job_closed(kind: str) -> None:
    for facts in run_ranks(gradient_scenarios.dropped_model, 2, kind):
        assert facts["jobs"] == 1 and facts["gone"] and all(facts["kept"]), facts
        assert facts["commits"] == (2 if kind == "daemon" else 1) and facts["again"] == 1


def test_a_model_collected_early_on_one_rank_delays_nobody() -> None:
    results = run_ranks(gradient_scenarios.dropped_apart, 2)
    for facts in results:
        for losses in facts["losses"]:
            close(losses, facts["losses"][0])
        assert "already" in facts["twice"]
        assert facts["commits"] == 1, "of torch's optimizer the last step is committed where the next pass begins"
