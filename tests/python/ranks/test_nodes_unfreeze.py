"""Gradual unfreezing over two nodes: as PyTorch's FSDP2 and as one process alone, and by name where ranks differ."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from node_daemons import Nodes, nodes, run_on_nodes
from ranks import nodes_scenarios

_STEPS = 8
_MESHES = pytest.mark.parametrize("mesh", [(2, 2), ()], ids=["replicas", "cut"])


@pytest.fixture(scope="module")
def two() -> Iterator[Nodes]:
    with nodes() as made:
        yield made


def _close(got: Any, want: Any) -> None:
    torch.testing.assert_close(torch.as_tensor(got), torch.as_tensor(want), rtol=1e-5, atol=1e-5)


@_MESHES
def test_unfreezing_over_two_nodes_is_pytorchs(two: Nodes, mesh: Any) -> None:
    results = run_on_nodes(two, nodes_scenarios.unfreeze_both, _STEPS, mesh)
    for result in results:
        got, want = result["shardd"], result["torch"]
        _close(got["losses"], want["losses"])
        for name, value in want["parameters"].items():
            _close(got["parameters"][name], value)
            assert torch.equal(got["parameters"][name], results[0]["shardd"]["parameters"][name]), name
        assert got["counters"]["commits"] == _STEPS and got["counters"]["aborts"] == 0, got["counters"]


@_MESHES
@pytest.mark.parametrize("alone", ["node", "rank"])
def test_who_unfreezes_alone_is_named_on_all_nodes(two: Nodes, mesh: Any, alone: str) -> None:
    for error in run_on_nodes(two, nodes_scenarios.unfreeze_alone, mesh, alone):
        assert 'trains parameter "layers.2.' in error and "rank 0" in error and "from here on" in error, error
        if alone == "node":
            assert "rank 0 of node 0 (" in error and "rank 0 of node 1 (" in error, error


def test_what_is_not_served_over_nodes_is_refused_by_name(two: Nodes) -> None:
    for texts in run_on_nodes(two, nodes_scenarios.unfreeze_refused):
        assert "unfreeze: job " in texts["trainers"] and "with the daemon's optimizers" in texts["trainers"]
        assert "not served on several nodes beside edits in place" in texts["edits"]
        assert "between steps alone" in texts["midway"] and "optimizer.step()" in texts["midway"]
