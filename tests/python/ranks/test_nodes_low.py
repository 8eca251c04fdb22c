"""Weights that say themselves how they are gathered, over several nodes: cut over them, and replicas."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from node_daemons import Nodes, nodes, run_on_nodes, torchrun_on_nodes
from subclasses.frozen_scenarios import adapters_on_both, killed
from subclasses.low_scenarios import loaded_again, trained_on_both


@pytest.mark.parametrize("optimizer", ["torch", "daemon"])
@pytest.mark.parametrize(
    ("options", "accumulate"),
    [({}, 1), ({"mesh": (2, 2)}, 1), ({"mp_policy": "bf16"}, 2)],
    ids=["cut", "replicas", "bf16-accumulated"],
)
def test_weights_train_over_nodes_as_torchs(
    two: Nodes, options: dict[str, Any], accumulate: int, optimizer: str
) -> None:
    tolerance = 1e-2 if "mp_policy" in options else 1e-6
    for results in run_on_nodes(two, trained_on_both, False, options, accumulate, optimizer, 6, local=2):
        ours, theirs = results["shardd"], results["torch"]
        for what in ("losses", "local", "whole"):
            torch.testing.assert_close(ours[what], theirs[what], rtol=tolerance, atol=tolerance)
        for what in ("calls", "local kinds", "state kinds"):
            assert ours[what] == theirs[what], what


@pytest.mark.parametrize("optimizer", ["torch", "daemon"])
def test_adapters_of_frozen_codes_train_over_nodes(two: Nodes, optimizer: str) -> None:
    for results in run_on_nodes(two, adapters_on_both, optimizer, local=2):
        ours, theirs = results["shardd"], results["torch"]
        for what in ("losses", "parameters", "of loaded"):
            torch.testing.assert_close(ours[what], theirs[what], rtol=1e-6, atol=1e-6)
        assert ours["kinds"] == theirs["kinds"] and ours["kinds"]["first.weight"] == "Codes"
        assert not ours["loaded"].any() and not theirs["loaded"].any()


@pytest.mark.parametrize("optimizer", ["torch", "daemon"])
def test_a_state_dict_is_loaded_over_nodes(two: Nodes, optimizer: str) -> None:
    for result in run_on_nodes(two, loaded_again, optimizer, local=2):
        torch.testing.assert_close(result["loaded"], result["saved"], rtol=0, atol=0)


def test_a_killed_trainer_of_adapters_goes_on_over_nodes() -> None:
    steps, kill_at, frozen = 6, 3, True  # beside the frozen ones plain weights are trained
    with nodes() as over:
        results = torchrun_on_nodes(over, killed, frozen, "daemon", steps, kill_at, local=2, restarts=1)
    with nodes() as over:
        whole = run_on_nodes(over, killed, frozen, "daemon", steps, -1, local=2)
    for rank in range(4):
        assert results[rank]["first"] == kill_at
        torch.testing.assert_close(results[rank]["losses"], whole[rank]["losses"][kill_at:], rtol=0, atol=0)
        torch.testing.assert_close(results[rank]["parameters"], whole[rank]["parameters"], rtol=0, atol=0)
