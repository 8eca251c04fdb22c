"""The daemon's Muon beside AdamW over two nodes: replicas, and matrices that are whole on one rank where parameters are cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cluster import run_ranks
from node_daemons import Nodes, run_on_nodes
from ranks import nodes_muon_scenarios
from ranks.deaths import run_with_a_death
from ranks.rank_life import Death

FORMS = pytest.mark.parametrize("form", ["replicas", "hybrid", "flat"])


def _same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys() and len(want) > 0
    for name, value in want.items():
        assert torch.equal(got[name], value), name


@FORMS
def test_two_nodes_have_the_bits_of_one(two: Nodes, form: str) -> None:
    """One rank a node, so that gradients are added in the same order."""
    wants = run_ranks(nodes_muon_scenarios.trained, 2, "flat" if form == "hybrid" else form)
    for got, want in zip(run_on_nodes(two, nodes_muon_scenarios.trained, form, local=1), wants):
        assert got["losses"] == want["losses"]
        _same(got["parameters"], want["parameters"])
        _same(got["buffers"], want["buffers"])


@FORMS
def test_clipped_by_the_norm_of_all_nodes(two: Nodes, form: str) -> None:
    wants = run_ranks(nodes_muon_scenarios.trained, 4, "flat" if form == "hybrid" else form, 0.1)
    for got, want in zip(run_on_nodes(two, nodes_muon_scenarios.trained, form, 0.1), wants):
        torch.testing.assert_close(torch.tensor(got["losses"]), torch.tensor(want["losses"]), rtol=1e-3, atol=1e-3)
        for name, value in want["parameters"].items():
            torch.testing.assert_close(got["parameters"][name], value, rtol=2e-2, atol=2e-2)


def test_each_matrix_is_whole_on_one_rank(two: Nodes) -> None:
    held = [result["held"] for result in run_on_nodes(two, nodes_muon_scenarios.trained, "flat")]
    for number, of_ranks in enumerate(zip(*held)):
        assert sorted(of_ranks)[:-1] == [0, 0, 0] and max(of_ranks) == 210, number
    assert all(sum(of_rank) > 0 for of_rank in held), "all ranks have some"


@FORMS
@pytest.mark.parametrize("full", [True, False], ids=["full", "sharded"])
def test_both_go_on_from_a_state_dict(two: Nodes, form: str, full: bool) -> None:
    for outcome in run_on_nodes(two, nodes_muon_scenarios.loaded, form, full):
        _same(outcome["loaded"], outcome["went on"])


@pytest.mark.parametrize("kind", ["full", "sharded", "local"])
def test_a_wrapper_resumes_before_its_first_forward(two: Nodes, kind: str) -> None:
    for outcome in run_on_nodes(two, nodes_muon_scenarios.resumed, kind):
        _same(outcome["loaded"], outcome["went on"])


@pytest.mark.parametrize("form", ["replicas", "flat"])
def test_a_killed_rank_costs_no_step(two: Nodes, form: str) -> None:
    def run(victim: int) -> list[dict[str, Any]]:
        return run_with_a_death(two, nodes_muon_scenarios.survive, Death(victim, 3, "backward"), form)

    for got, want in zip(run(3), run(-1)):
        assert got["losses"] == want["losses"]
        _same(got["held"], want["held"])


def _addresses(over: Nodes) -> str:
    return ",".join(f"127.0.0.1:{port}" for port in over.ports)


def test_frozen_rows_are_refused_when_nodes_are_known(two: Nodes) -> None:
    for text in run_on_nodes(two, nodes_muon_scenarios.built_too_early, _addresses(two)):
        assert text.startswith('NotImplementedError: register parameter "layers.') and "is a DTensor" in text, text


def test_an_unchanged_program_without_a_launcher_steps_in_trainers(two: Nodes) -> None:
    wants = run_ranks(nodes_muon_scenarios.installed, 4)
    for got, want in zip(run_on_nodes(two, nodes_muon_scenarios.installed, False, _addresses(two)), wants):
        torch.testing.assert_close(torch.tensor(got["losses"]), torch.tensor(want["losses"]), rtol=1e-3, atol=1e-3)
        assert got["updated"] == 0


def test_rows_of_nodes_are_refused_by_name(four: Nodes) -> None:
    for texts in run_on_nodes(four, nodes_muon_scenarios.refused_rows, _addresses(four), local=1):
        for layout in ("dim0", "flat"):
            assert texts[layout].startswith("NotImplementedError: Muon: parameter"), texts
        assert texts["registered"].startswith("NotImplementedError: register parameter"), texts
        assert all("is cut over the nodes of a row of its mesh" in text for text in texts.values()), texts


def test_an_unchanged_program_of_rows_steps_in_the_trainers(four: Nodes) -> None:
    arguments = (False, "", (2, 2))
    wants = run_ranks(nodes_muon_scenarios.installed, 4, *arguments)
    for got, want in zip(run_on_nodes(four, nodes_muon_scenarios.installed, *arguments, local=1), wants):
        torch.testing.assert_close(torch.tensor(got["losses"]), torch.tensor(want["losses"]), rtol=1e-3, atol=1e-3)
        assert got["updated"] == 0 and want["updated"] > 0, "on one node the daemon makes the steps"


def test_what_no_rank_can_have_whole_is_refused_by_name(two: Nodes) -> None:
    for texts in run_on_nodes(two, nodes_muon_scenarios.refused):
        assert texts["rows"].startswith("NotImplementedError: Muon: parameter"), texts
        assert 'give the mesh a row for each node (replicas), or shard with layout="flat"' in texts["rows"]
        assert texts["frozen"].replace("layers", "") == texts["rows"].replace("layers", ""), texts
        assert "pass use_orig_params=True" in texts["flat parameters"], texts
        for when in nodes_muon_scenarios.HOOKED:  # on all ranks, whatever they have; no backward waits for one
            assert "a hook leaves each rank an equal piece" in texts[f"hook {when}"], texts


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_an_unchanged_program_of_cut_rows_steps_in_the_trainers(two: Nodes, frozen: bool) -> None:
    wants = run_ranks(nodes_muon_scenarios.installed, 4, frozen)
    for got, want in zip(run_on_nodes(two, nodes_muon_scenarios.installed, frozen), wants):
        torch.testing.assert_close(torch.tensor(got["losses"]), torch.tensor(want["losses"]), rtol=1e-3, atol=1e-3)
        assert got["updated"] == 0 and want["updated"] > 0, "on one node the daemon makes the steps"
