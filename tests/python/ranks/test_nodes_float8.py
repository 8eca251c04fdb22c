"""Models whose parameters cross nodes in float8: two daemons on the loopback, against torch's own float8."""

from __future__ import annotations

import pytest
import torch

from cluster import run_ranks
from comparing import close
from models import Case
from node_daemons import Nodes, run_on_nodes
from ranks import nodes_float8_scenarios

_LOSS_BOUND = 0.02  # of the final loss, as nodes.md says


@pytest.mark.parametrize(
    "case",
    [
        Case(steps=6, optimizer="sgd"),
        Case(steps=4),
        Case(steps=4, accumulate=3, sync=False, optimizer="sgd"),
        Case(steps=4, optimizer="sgd", stock=True),
    ],
    ids=["sgd", "adamw", "accumulated", "in-the-trainers"],
)
def test_two_nodes_train_as_one_process_that_rounds(two: Nodes, case: Case) -> None:
    want = nodes_float8_scenarios.train_alone(case, 2, 2)
    for rank, got in enumerate(run_on_nodes(two, nodes_float8_scenarios.train, case)):
        close(got["losses"], want["losses"][rank])
        for name, value in want["parameters"].items():
            close(got["stored"][name], value)  # not rounded
        for name, value in got["read"].items():
            rounded = nodes_float8_scenarios._as_read(got["stored"][name], 2, 2, torch.float32)
            assert torch.equal(value, rounded), name
        assert got["aborts"] == 0


def test_layout_flat_reads_the_same_on_all_ranks(two: Nodes) -> None:
    results = run_on_nodes(two, nodes_float8_scenarios.train, Case(steps=4, optimizer="sgd"), "flat")
    exact = run_on_nodes(two, nodes_float8_scenarios.train, Case(steps=4, optimizer="sgd"), "flat", False)
    for got, full in zip(results, exact):
        assert all(torch.equal(got["read"][name], value) for name, value in results[0]["read"].items())
        assert got["losses"] != full["losses"]
        close(got["losses"], full["losses"], 0.05)


def test_one_node_refuses_it_by_name() -> None:
    for said in run_ranks(nodes_float8_scenarios.alone_on_one_node, 2):
        assert "float8_gathers: no parameters cross nodes" in said, said
        assert "leave float8_gathers false" in said, said


def test_a_small_gpt_learns_as_well(two: Nodes) -> None:
    steps = 150
    exact = run_on_nodes(two, nodes_float8_scenarios.gpt, steps, False, local=1)[0]
    float8 = run_on_nodes(two, nodes_float8_scenarios.gpt, steps, True, local=1)[0]
    last = [sum(losses[-20:]) / 20 for losses in (exact, float8)]
    print("final loss", last, last[1] / last[0] - 1)
    assert float8 != exact
    assert last[0] < 0.8 * exact[0], "it has learned something"
    assert abs(last[1] / last[0] - 1) <= _LOSS_BOUND
