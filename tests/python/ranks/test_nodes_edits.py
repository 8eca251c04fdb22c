"""In-place edits of parameters over two nodes beside the daemon's optimizer: replicas, and parameters cut over nodes."""

from __future__ import annotations

import os
import tempfile
import time
from typing import Any

import pytest
import torch

from comparing import close
from node_daemons import Nodes, NodesCluster, nodes, run_on_nodes
from ranks import nodes_edit_scenarios as scenarios
from ranks.deaths import run_with_a_death
from ranks.rank_life import Death

_forms = pytest.mark.parametrize("cut", [False, True], ids=["replicas", "cut"])


@_forms
def test_edits_train_as_torchs(two: Nodes, cut: bool) -> None:
    results = run_on_nodes(two, scenarios.both, cut)
    for result in results:
        ours, theirs = result["shardd"], result["torch"]
        close(ours["losses"], theirs["losses"])
        for name, value in theirs["locals"].items():
            close(ours["locals"][name], value)
        assert ours["counters"]["aborts"] == 0
    if not cut:
        for one, other in ((0, 2), (1, 3)):
            for name, value in results[one]["shardd"]["locals"].items():
                assert torch.equal(results[other]["shardd"]["locals"][name], value), name


@pytest.mark.parametrize("node", [0, 1])
@pytest.mark.parametrize("store", [True, False], ids=["another-value", "nothing"])
def test_replicas_that_edit_differently_are_named(two: Nodes, node: int, store: bool) -> None:
    for result in run_on_nodes(two, scenarios.unlike, False, node, store):
        want = '"layers.1.up.weight"' if store else "edit parameters in place, between the same"
        assert want in result["text"] and "node 1" in result["text"], result


def test_a_cut_node_may_have_nothing_to_edit(two: Nodes) -> None:
    for result in run_on_nodes(two, scenarios.unlike, True, 0, False):
        assert result["text"] == "", result


@_forms
def test_edits_before_a_step_want_a_call(two: Nodes, cut: bool) -> None:
    for result in run_on_nodes(two, scenarios.not_before_a_step, cut):
        assert "hand_in_edits" in result["text"] and "was written since the last pass" in result["text"], result


@_forms
@pytest.mark.parametrize("steps", [False, True], ids=["pass", "step"])
def test_ranks_of_a_node_in_different_calls_are_told_at_once(two: Nodes, cut: bool, steps: bool) -> None:
    for result in run_on_nodes(two, scenarios.unlike_calls, cut, 3, steps):
        assert "ranks wait for each other in different calls" in result["text"], result
        assert f"{'Step' if steps else 'EnterPass'} on rank 1" in result["text"], result
        assert result["seconds"] < 20, result


@_forms
def test_edits_behind_the_last_step_hinder_no_finish(two: Nodes, cut: bool) -> None:
    assert run_on_nodes(two, scenarios.finishes, cut) == [""] * 4


def test_what_is_not_served_is_refused_by_name(two: Nodes) -> None:
    for texts in run_on_nodes(two, scenarios.refused):
        assert "in_place_edits=True" in texts["rows"] and "got 2, want 1" in texts["rows"], texts
        assert "in_place_edits=True" in texts["copies"] and "SHARDD_PASS_COPIES" in texts["copies"], texts
        assert "may not be written" in texts["by default"] and "in_place_edits=True" in texts["by default"], texts


def _survive(two: Nodes, cut: bool, victim: int, moment: str) -> list[dict[str, Any]]:
    return run_with_a_death(two, scenarios.survive, Death(victim, 2, moment), cut, 5)


@_forms
@pytest.mark.parametrize(("victim", "moment"), [(3, "stored"), (0, "handing"), (3, "handing"), (1, "entered")])
def test_an_edit_in_which_a_rank_dies_is_as_undisturbed(two: Nodes, cut: bool, victim: int, moment: str) -> None:
    undisturbed = _survive(two, cut, -1 if moment == "entered" else -2, moment if moment == "entered" else "stored")
    for rank, result in enumerate(_survive(two, cut, victim, moment)):
        assert result["resumed"] == [2], (rank, result["resumed"])
        close(result["losses"], undisturbed[rank]["losses"])
        for name, value in undisturbed[rank]["locals"].items():
            close(result["locals"][name], value)
        assert result["counters"]["commits"] == 5
        if moment == "entered":  # it is neither lost nor made twice
            assert undisturbed[rank]["made"] == [0], undisturbed[rank]["made"]
            assert result["made"] == ([1] if rank == victim else [0, 1]), (rank, result["made"])


def test_a_daemon_that_dies_before_replicas_agree_takes_the_edit_back_everywhere(two: Nodes) -> None:
    undisturbed = _survive(two, False, -2, "stored")
    environment = {"SHARDD_TEST_NO_GROUP": "1", "SHARDD_JOB": f"nodes-edits-daemon-{os.getpid()}"}
    with (
        nodes() as own,
        tempfile.TemporaryDirectory() as folder,
        NodesCluster(own, 2, folder, environment) as cluster,
    ):
        for rank in range(4):
            cluster.start(scenarios.survive, rank, (folder, Death(5, 2, "handing"), False, 5))
        deadline = time.monotonic() + 60
        while not all(any(event["event"] == "handing" for event in cluster.events(rank)) for rank in (2, 3)):
            assert time.monotonic() < deadline, cluster.logs()
            time.sleep(0.01)
        time.sleep(0.3)  # rank 0 comes later
        own.processes[1].kill()
        own.processes[1].wait()
        own.start(1)
        assert set(cluster.wait(120).values()) == {0}, cluster.logs()
        results = [cluster.result(rank) for rank in range(4)]
    for rank, result in enumerate(results):
        assert result["resumed"] == [2], (rank, result["resumed"])
        # What rides with the ranks of the new daemon is node 0's.
        close(result["losses"][2:], undisturbed[rank]["losses"][2:])
        for name, value in undisturbed[rank]["locals"].items():
            close(result["locals"][name], value)
