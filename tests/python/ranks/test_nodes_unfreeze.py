"""Gradual unfreezing over two nodes: as PyTorch's FSDP2 and as one process alone, and by name where ranks differ."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from node_daemons import Nodes, NodesCluster, nodes, run_on_nodes
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


def _until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.001)


def _miss_the_last_word(over: Nodes) -> None:
    """Node 0 stands still while it makes what trains more; node 1 has made its own, and is cut off from node 0 there."""
    asked = [Path(f"{over.folder}/{node}.log") for node in range(2)]
    _until(lambda: all("extend: parameter" in log.read_text(errors="replace") for log in asked))
    os.kill(over.processes[0].pid, signal.SIGSTOP)
    time.sleep(1)
    over.proxies[0].reset_callers()
    over.proxies[1].reset_targets()
    os.kill(over.processes[0].pid, signal.SIGCONT)


@pytest.mark.parametrize("mesh", [(2, 1), ()], ids=["replicas", "cut"])
def test_a_node_that_misses_the_last_word_goes_on(mesh: Any) -> None:
    results = {}
    for disturbed in (False, True):
        with (
            nodes(proxied=True) as over,
            tempfile.TemporaryDirectory() as folder,
            NodesCluster(over, 1, folder) as cluster,
        ):
            for rank in range(2):
                cluster.start(nodes_scenarios.unfreeze_in_steps, rank, (6, mesh))
            if disturbed:
                _miss_the_last_word(over)
            assert not any(cluster.wait(120).values()), cluster.logs()
            results[disturbed] = [cluster.result(rank) for rank in range(2)]
            log = over.log(1)
    assert "as node 0" in log, log
    for got, want in zip(results[True], results[False], strict=True):
        assert got["losses"] == want["losses"] and got["commits"] == want["commits"] == 6
        for name, value in want["parameters"].items():
            assert torch.equal(got["parameters"][name], value), name
    assert results[True][1]["aborted"] > 0 and results[False][1]["aborted"] == 0
