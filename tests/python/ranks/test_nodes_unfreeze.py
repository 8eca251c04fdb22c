"""Gradual unfreezing over two nodes: as PyTorch's FSDP2 and as one process alone, and by name where ranks differ."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from comparing import close
from node_daemons import Nodes, NodesCluster, nodes, run_on_nodes
from ranks import nodes_scenarios

_STEPS = 8
_MESHES = pytest.mark.parametrize("mesh", [(2, 2), ()], ids=["replicas", "cut"])


@_MESHES
def test_unfreezing_over_two_nodes_is_pytorchs(two: Nodes, mesh: Any) -> None:
    results = run_on_nodes(two, nodes_scenarios.unfreeze_both, _STEPS, mesh)
    for result in results:
        got, want = result["shardd"], result["torch"]
        close(got["losses"], want["losses"])
        for name, value in want["parameters"].items():
            close(got["parameters"][name], value)
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


def _await(holds: Callable[[], bool], limit_s: float = 60) -> None:
    end = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end, "what was waited for did not come"
        time.sleep(0.001)


def _miss_the_last_word(over: Nodes, gate: Path) -> None:
    """Node 0 hears that node 1 has made what trains more, and all go on with it; node 1 is cut off before it hears of that."""
    made = "it is made, and takes the job's place"
    _await(lambda: all(Path(f"{gate}.{rank}").exists() for rank in range(2)))
    over.hold(0)
    gate.touch()
    _await(lambda: made in over.log(0))  # node 1 has asked, too, and does not hear yet that it may begin
    over.hold(1)
    over.hold(0, held=False)
    _await(lambda: made in over.log(1))  # which node 0 does not hear yet
    over.hold(0)
    over.hold(1, held=False)
    _await(lambda: "it goes on with more to train" in over.log(0))
    for proxy in over.proxies:
        proxy.refuses = True
    over.proxies[0].reset_callers()
    over.proxies[1].reset_targets()
    over.hold(0, held=False)
    for proxy in over.proxies:
        proxy.refuses = False


def _train(mesh: Any, misses: bool) -> tuple[list[dict[str, Any]], str]:
    """The ranks' results, and what daemons have logged. ``misses``: node 1 misses the last word of what trains more."""
    with (
        nodes(proxied=True) as over,
        tempfile.TemporaryDirectory() as folder,
        NodesCluster(over, 1, folder) as cluster,
    ):
        gate = Path(folder, "gate")
        for rank in range(2):
            cluster.start(nodes_scenarios.unfreeze_in_steps, rank, (6, mesh, str(gate)))
        if misses:
            _miss_the_last_word(over, gate)
        else:
            gate.touch()
        assert not any(cluster.wait(120).values()), cluster.logs()
        return [cluster.result(rank) for rank in range(2)], over.log(0) + over.log(1)


@pytest.mark.parametrize("mesh", [(2, 1), ()], ids=["replicas", "cut"])
def test_a_node_that_misses_the_last_word_goes_on(mesh: Any) -> None:
    undisturbed, _ = _train(mesh, misses=False)
    results, log = _train(mesh, misses=True)
    assert "as node 0" in log, log
    for got, want in zip(results, undisturbed, strict=True):
        assert got["losses"] == want["losses"] and got["commits"] == want["commits"] == 6
        for name, value in want["parameters"].items():
            assert torch.equal(got["parameters"][name], value), name
    assert results[1]["aborted"] > 0 and undisturbed[1]["aborted"] == 0
