"""torch's own optimizers over two nodes: two daemons on the loopback, two ranks each; replicas, and one copy cut over both."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from comparing import close
from models import Case, compare
from node_daemons import Nodes, run_on_nodes
from ranks import nodes_stock_scenarios
from ranks.deaths import run_with_a_death
from ranks.rank_life import Death

_PLACED = pytest.mark.parametrize("mesh", [(2, 2), ()], ids=["replicas", "cut"])


@_PLACED
@pytest.mark.parametrize("more", [{}, {"accumulate": 3, "sync": False, "clip": 0.1}, {"param_dtype": "bf16", "reduce_dtype": "fp32"}],
                         ids=["each", "no-sync-clipped", "bf16"])  # fmt: skip
def test_fully_shard_trains_as_torch_does(two: Nodes, mesh: tuple[int, ...], more: dict[str, Any]) -> None:
    case = Case(mesh=mesh, steps=6, stock=True, **more)
    results = run_on_nodes(two, compare, case)
    tolerance = 5e-3 if case.param_dtype else 1e-5
    for result in results:
        close(result["shardd"]["losses"], result["torch"]["losses"], tolerance)
        close(result["shardd"]["norms"], result["torch"]["norms"], tolerance)
        assert result["shardd"]["local_shapes"] == result["torch"]["local_shapes"]
        for name, value in result["torch"]["parameters"].items():
            close(result["shardd"]["parameters"][name], value, tolerance)
            assert torch.equal(result["shardd"]["parameters"][name], results[0]["shardd"]["parameters"][name]), name
        assert (result["shardd"]["counters"]["commits"], result["shardd"]["counters"]["aborts"]) == (case.steps - 1, 0)


@_PLACED
@pytest.mark.parametrize("kind", ["adamw", "nadam", "sgd", "adagrad"])
def test_optimizers_train_as_unsharded_ones_do(two: Nodes, mesh: tuple[int, ...], kind: str) -> None:
    want = nodes_stock_scenarios.alone(kind, 4)
    for rank, result in enumerate(run_on_nodes(two, nodes_stock_scenarios.trained, kind, mesh, -1, True)):
        close(result["losses"], want["losses"][rank])
        close(result["evaluated"], [want["losses"][rank][step] for step in (3, 6)])
        for name, value in want["parameters"].items():
            close(result["parameters"][name], value)
        assert (result["counters"]["commits"], result["counters"]["aborts"]) == (nodes_stock_scenarios.STEPS, 0)


@_PLACED
def test_edits_between_steps_are_in_the_next_pass(two: Nodes, mesh: tuple[int, ...]) -> None:
    want = nodes_stock_scenarios.alone("adamw", 4, loads_at=4)
    for rank, result in enumerate(run_on_nodes(two, nodes_stock_scenarios.trained, "adamw", mesh, 4)):
        close(result["losses"], want["losses"][rank])


@_PLACED
@pytest.mark.parametrize(("victim", "moment"), [(3, "forward"), (0, "backward"), (2, "step")])
def test_a_ranks_death_costs_a_step_at_most(two: Nodes, mesh: tuple[int, ...], victim: int, moment: str) -> None:
    want = nodes_stock_scenarios.alone("nadam", 4)
    results = run_with_a_death(two, nodes_stock_scenarios.survive, Death(victim, 4, moment), "nadam", mesh)
    for rank, result in enumerate(results):
        assert result["resumed"] == [4], (rank, result["resumed"])
        close(result["losses"], want["losses"][rank])
        assert result["counters"]["commits"] >= nodes_stock_scenarios.STEPS
