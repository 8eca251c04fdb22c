"""Meshes whose rows span nodes: four daemons on the loopback, each row of two has one copy, and rows are replicas."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from comparing import close as _close
from models import PLACED, Case, compare
from node_daemons import Nodes, run_on_nodes
from ranks import nodes_cut_scenarios, nodes_rows_scenarios, nodes_stock_scenarios
from ranks.deaths import run_with_a_death
from ranks.rank_life import Death
from training.test_parity import check_results

_STEPS = 6
_MESH = (2, 2)


def _check(four: Nodes, local: int, case: Case, **more: Any) -> None:
    results = run_on_nodes(four, compare, case, local=local, **more)
    of_nodes = [result["shardd"]["counters"] for result in results[::local]]
    assert [counts["commits"] for counts in of_nodes] == [case.steps] * 4
    assert [counts["aborts"] for counts in of_nodes] == [0] * 4
    counts = {  # each daemon counts its own, and both rows update their copy
        **of_nodes[0],
        "unshards": sum(of_node["unshards"] for of_node in of_nodes),
        "bytes_reduced": sum(of_node["bytes_reduced"] for of_node in of_nodes),
        "bytes_updated": sum(of_node["bytes_updated"] for of_node in of_nodes[:2]),
    }
    for result in results:
        result["shardd"]["counters"] = counts
    check_results(case, results)
    for result in results[1:]:  # bit for bit: rows never differ
        for name, value in results[0]["shardd"]["parameters"].items():
            assert torch.equal(result["shardd"]["parameters"][name], value), name


@pytest.mark.parametrize("case", [
    Case(mesh=_MESH, steps=_STEPS, accumulate=2, clip=0.1),
    Case(mesh=_MESH, steps=_STEPS, accumulate=3, sync=False, clip=0.1),
    Case(mesh=_MESH, steps=_STEPS, reshard=False, tie=True, optimizer="groups"),
    Case(mesh=_MESH, steps=_STEPS, freeze=("layers.0.up.weight",), skip_grad=(1,)),
], ids=["each", "no-sync", "kept-tied-groups", "frozen-unused"])  # fmt: skip
def test_rows_of_two_nodes_train_as_torchs_hybrid_shard_does(four: Nodes, case: Case) -> None:
    _check(four, 1, case)


def test_rows_of_two_nodes_of_two_ranks(four: Nodes) -> None:
    _check(four, 2, Case(mesh=(2, 4), steps=_STEPS, clip=0.1))


def test_other_dimensions_than_rows(four: Nodes) -> None:
    _check(four, 1, Case(mesh=_MESH, steps=_STEPS), environment={**PLACED, "SHARDD_TEST_WIDTH": "12"})


def test_what_is_said_of_the_job(four: Nodes) -> None:
    results = run_on_nodes(four, nodes_rows_scenarios.facts, local=1)
    for rank, result in enumerate(results):
        job = result["job"]
        assert (job["config"]["strategy"], job["config"]["shard_group_size"]) == ("STRATEGY_HYBRID_SHARD", 2)
        assert (job["config"]["unshard_mode"], job["config"]["gradient_divide_factor"]) == ("UNSHARD_MODE_POOLED", 4)
        assert [node["here"] for node in job["nodes"]] == [node == rank for node in range(4)]
        for name, value in result["full"].items():
            assert torch.equal(value, results[0]["full"][name]), name
            assert torch.equal(result["summoned"][name], value), name
        assert (result["of_first"] == result["full"].keys()) == (rank % 2 == 0) and len(result["full"]) > 5


def test_checkpoints_are_torchs(four: Nodes, tmp_path: Any) -> None:
    case = Case(mesh=_MESH)
    for result in run_on_nodes(four, nodes_cut_scenarios.checkpoint, str(tmp_path), case, local=1):
        assert result["kinds"]["shardd"] == result["kinds"]["torch"]
        for losses in result["losses"].values():
            _close(losses, result["losses"]["torch"])
        for name, value in result["of torch"].items():
            _close(value, result["of shardd"][name])


def test_loads_and_edits_at_any_step(four: Nodes, tmp_path: Any) -> None:
    for result in run_on_nodes(four, nodes_cut_scenarios.changed, Case(mesh=_MESH), str(tmp_path), local=1):
        for what in ("loaded", "read", "unchanged", "edited"):
            assert all(result[what]), what
        assert result["again"] == [result["on"], result["on"]]


@pytest.mark.parametrize("more", [{}, {"accumulate": 3, "sync": False, "clip": 0.1}], ids=["each", "no-sync-clipped"])
def test_torchs_optimizers_step_in_the_trainers(four: Nodes, more: dict[str, Any]) -> None:
    case = Case(mesh=_MESH, steps=_STEPS, stock=True, **more)
    results = run_on_nodes(four, compare, case, local=1)
    for result in results:
        _close(result["shardd"]["losses"], result["torch"]["losses"])
        assert result["shardd"]["local_shapes"] == result["torch"]["local_shapes"]
        for name, value in result["torch"]["parameters"].items():
            _close(result["shardd"]["parameters"][name], value)
            assert torch.equal(result["shardd"]["parameters"][name], results[0]["shardd"]["parameters"][name]), name
        assert (result["shardd"]["counters"]["commits"], result["shardd"]["counters"]["aborts"]) == (case.steps - 1, 0)


def test_a_row_of_parts_of_nodes_is_refused_by_name(four: Nodes) -> None:
    wants = {
        "parts": "a row of its mesh crosses nodes (got ranks [0, 2, 4, 6] on 4 nodes",
        "halves": "a row of its mesh crosses nodes (got ranks [0, 1, 2] on 2 nodes",
    }
    for rank, texts in enumerate(run_on_nodes(four, nodes_rows_scenarios.refused, local=2)):
        for name, want in wants.items():
            if rank < 6 or name != "halves":  # else it is not in that mesh
                assert texts[name].startswith("NotImplementedError") and want in texts[name], (name, texts[name])


@pytest.mark.parametrize(("victim", "moment"), [(3, "forward"), (0, "backward"), (2, "step")])
def test_a_ranks_death_costs_a_step_at_most(four: Nodes, victim: int, moment: str) -> None:
    want = nodes_stock_scenarios.alone("nadam", 4)
    death = Death(victim, 4, moment)
    results = run_with_a_death(four, nodes_stock_scenarios.survive, death, "nadam", _MESH, local=1)
    for rank, result in enumerate(results):
        _close(result["losses"], want["losses"][rank])
        assert result["counters"]["aborts"] == 1
        for param, value in result["shards"].items():
            assert torch.equal(value, results[(rank + 2) % 4]["shards"][param]), param


@pytest.mark.parametrize("node", [3, 0])
def test_a_machine_that_is_lost_changes_no_bit(four: Nodes, node: int) -> None:
    """Its rank and its daemon are killed, and nobody keeps what they had: another row sends it to the next daemon."""
    nobody = Death(victim=-1, at_step=0, moment="")
    want = run_with_a_death(four, nodes_rows_scenarios.survive, nobody, local=1)
    got = run_with_a_death(
        four, nodes_rows_scenarios.survive, Death(node, 4, "forward"), local=1, behind=lambda: four.replace(node)
    )
    for rank, result in enumerate(got):
        # What rides with the steps is the sender's, too.
        before = want[(rank + 2) % 4 if rank == node else rank]["losses"][:4]
        assert result["losses"] == before + want[rank]["losses"][4:]
        assert result["resumed"] == [4], rank
        for name, value in want[rank]["shards"].items():
            assert torch.equal(result["shards"][name], value), name
