"""Gradual unfreezing over two nodes: as PyTorch's FSDP2 and as one process alone, and by name where ranks differ."""

from __future__ import annotations

import os
import signal
import tempfile
import time
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


def _said(over: Nodes, node: int, text: str, limit_s: float) -> bool:
    end = time.monotonic() + limit_s
    while text not in Path(f"{over.folder}/{node}.log").read_text(errors="replace"):
        if time.monotonic() > end:
            return False
        time.sleep(0.001)
    return True


def _miss_the_last_word(over: Nodes, pause_s: float) -> None:
    """Node 0 stands still while it makes what trains more; node 1 has made its own, and is cut off from node 0 there."""
    assert all(_said(over, node, "extend: parameter", 60) for node in range(2)), over.log(0)
    time.sleep(pause_s)  # both hear that the other one asks, too, and begin
    os.kill(over.processes[0].pid, signal.SIGSTOP)
    time.sleep(2)
    for proxy in over.proxies:
        proxy.refuses = True
    over.proxies[0].reset_callers()
    over.proxies[1].reset_targets()
    os.kill(over.processes[0].pid, signal.SIGCONT)
    _said(over, 0, "it goes on with more to train", 5)
    for proxy in over.proxies:
        proxy.refuses = False


def _train(mesh: Any, misses: float) -> tuple[list[dict[str, Any]], str]:
    """The ranks' results, and what daemons have logged. ``misses``: node 0 stands still so many seconds behind the question; 0: never."""
    with (
        nodes(proxied=True) as over,
        tempfile.TemporaryDirectory() as folder,
        NodesCluster(over, 1, folder) as cluster,
    ):
        for rank in range(2):
            cluster.start(nodes_scenarios.unfreeze_in_steps, rank, (6, mesh))
        if misses:
            _miss_the_last_word(over, misses)
        assert not any(cluster.wait(120).values()), cluster.logs()
        return [cluster.result(rank) for rank in range(2)], over.log(0) + over.log(1)


@pytest.mark.parametrize("mesh", [(2, 1), ()], ids=["replicas", "cut"])
def test_a_node_that_misses_the_last_word_goes_on(mesh: Any) -> None:
    undisturbed, _ = _train(mesh, misses=0)
    for pause_s in (0.02, 0.05, 0.1, 0.2, 0.03, 0.15):  # which may be too early or too late
        results, log = _train(mesh, misses=pause_s)
        if "as node 0" in log:
            break
    assert "as node 0" in log, log
    for got, want in zip(results, undisturbed, strict=True):
        assert got["losses"] == want["losses"] and got["commits"] == want["commits"] == 6
        for name, value in want["parameters"].items():
            assert torch.equal(got["parameters"][name], value), name
    assert results[1]["aborted"] > 0 and undisturbed[1]["aborted"] == 0
