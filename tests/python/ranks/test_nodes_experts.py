"""Experts on a mesh of their own, over two nodes: two daemons on the loopback."""

from __future__ import annotations

from typing import Any

import pytest

from node_daemons import Nodes, run_on_nodes
from units.expert_scenarios import trained_on_both
from units.test_experts import compare


@pytest.mark.parametrize("kind", ["daemon clip", "torch"])
@pytest.mark.parametrize(
    "options",
    [{}, {"as_dtensors": True, "factor": 4.0, "counts": (3, 3)}, {"shape": (2, 1, 2), "by_placement": True}],
    ids=["cut", "cut-dtensors", "replicas"],
)
def test_experts_over_two_nodes_train_as_torchs(two: Nodes, options: dict[str, Any], kind: str) -> None:
    for results in run_on_nodes(two, trained_on_both, options, kind, 6, False):
        compare(results)


@pytest.mark.parametrize("options", [{}, {"shape": (2, 1, 2), "by_placement": True}], ids=["cut", "replicas"])
def test_experts_over_two_nodes_are_edited_in_place(two: Nodes, options: dict[str, Any]) -> None:
    environment = {"SHARDD_IN_PLACE_EDITS": "1"}
    for results in run_on_nodes(two, trained_on_both, options, "daemon clip", 6, True, environment=environment):
        compare(results)
