"""Jobs whose parameters are cut over the ranks of several nodes: two daemons, or three, on the loopback."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from comparing import close
from models import PLACED, Case, compare, train_alone
from node_daemons import Nodes, run_on_nodes
from ranks import nodes_cut_scenarios
from ranks.deaths import run_with_a_death
from ranks.rank_life import Death
from training.test_parity import check_results

_STEPS = 8
_ELSEWHERE = "is elsewhere (got "
_SUMMED = ("unshards", "bytes_reduced", "bytes_updated")  # each daemon counts its own


def _check(over: Nodes, local: int, case: Case, tolerance: float = 1e-6, **more: Any) -> None:
    results = run_on_nodes(over, compare, case, local=local, **more)
    of_nodes = [result["shardd"]["counters"] for result in results[::local]]
    assert [counts["commits"] for counts in of_nodes] == [case.steps] * over.count
    assert [counts["aborts"] for counts in of_nodes] == [0] * over.count
    counts = of_nodes[0] | {name: sum(of_node[name] for of_node in of_nodes) for name in _SUMMED}
    for result in results:
        result["shardd"]["counters"] = counts
    check_results(case, results, tolerance)


@pytest.mark.parametrize("case", [
    Case(steps=_STEPS, clip=0.1),
    Case(steps=_STEPS, accumulate=3, sync=False, clip=0.1, wrap="list"),
    Case(steps=_STEPS, reshard=False, tie=True, optimizer="groups"),
    Case(steps=_STEPS, freeze=("layers.0.up.weight",), skip_grad=(1,)),
    Case(steps=_STEPS, divide=3.0, optimizer="sgd"),
    Case(steps=_STEPS, mesh=(1, 4)),
], ids=["each", "no-sync-list", "kept-tied-groups", "frozen-unused", "divide", "one-row"])  # fmt: skip
def test_two_nodes_train_as_torch_does_over_all_ranks(two: Nodes, case: Case) -> None:
    _check(two, 2, case)


def test_three_nodes_of_one_rank(three: Nodes) -> None:
    _check(three, 1, Case(steps=_STEPS, accumulate=2, clip=0.1))


def test_other_dimensions_than_rows(two: Nodes) -> None:
    _check(two, 2, Case(steps=_STEPS), environment={**PLACED, "SHARDD_TEST_WIDTH": "12"})


def test_bf16_over_two_nodes(two: Nodes) -> None:
    case = Case(steps=_STEPS, param_dtype="bf16", reduce_dtype="fp32")
    for result in run_on_nodes(two, compare, case):
        close(result["shardd"]["losses"], result["torch"]["losses"], 5e-3)
        assert result["shardd"]["local_shapes"] == result["torch"]["local_shapes"]


def test_what_is_said_of_the_job(two: Nodes) -> None:
    results = run_on_nodes(two, nodes_cut_scenarios.facts, 3)
    addresses = [f"127.0.0.1:{port}" for port in two.ports]
    alone = train_alone(Case(steps=3), 4)["parameters"]
    for rank, result in enumerate(results):
        job, info = result["job"], result["job"]["info"]
        assert job["config"]["nodes"]["addresses"] == addresses
        assert job["config"]["strategy"] == "STRATEGY_FULL_SHARD"
        assert job["config"]["unshard_mode"] == "UNSHARD_MODE_POOLED"
        assert job["config"]["gradient_divide_factor"] == 4 and job["world_size"] == 2
        assert (info["rank"], info["world_size"]) == (rank % 2, 2)
        assert [node["here"] for node in job["nodes"]] == [rank < 2, rank >= 2]
        assert result["plan"]["world_size"] == 2
        for norm, daemons in result["norms"]:
            assert norm == pytest.approx(daemons, rel=1e-5)
        assert result["norms"] == results[0]["norms"]
        assert result["full"].keys() == alone.keys() | {"bias"}
        for name, value in alone.items():
            close(result["full"][name], value)
        for name, value in result["by_hand"].items():  # unshard() between passes
            assert torch.equal(value, result["full"][f"layers.1.{name}"]), name


# State dicts.


_PLACED_CASES = pytest.mark.parametrize("case", [Case(), Case(mesh=(2, 2))], ids=["cut", "replicas"])


@pytest.mark.parametrize(
    "case", [Case(), Case(optimizer="sgd", tie=True), Case(mesh=(2, 2))], ids=["cut", "cut-sgd-tied", "replicas"]
)
def test_checkpoints_are_torchs(two: Nodes, case: Case, tmp_path: Any) -> None:
    for result in run_on_nodes(two, nodes_cut_scenarios.checkpoint, str(tmp_path), case):
        assert result["kinds"]["shardd"] == result["kinds"]["torch"]
        for losses in result["losses"].values():
            close(losses, result["losses"]["torch"])
        for name, value in result["of torch"].items():
            close(value, result["of shardd"][name])


@_PLACED_CASES
def test_state_is_loaded_before_the_first_step(two: Nodes, case: Case) -> None:
    for result in run_on_nodes(two, nodes_cut_scenarios.plain_load, case):
        assert result["again"] == result["on"]


@pytest.mark.parametrize(
    "case", [Case(), Case(optimizer="sgd", tie=True), Case(mesh=(1, 4))], ids=["adamw", "sgd-tied", "one-row"]
)
def test_loads_and_edits_at_any_step(two: Nodes, case: Case, tmp_path: Any) -> None:
    for rank, result in enumerate(run_on_nodes(two, nodes_cut_scenarios.changed, case, str(tmp_path))):
        for what in ("loaded", "read", "unchanged", "edited"):
            assert all(result[what]), what
        assert result["again"] == [result["on"], result["on"]]
        assert "summon_full_params" in result["inside"], result["inside"]
        shapes = {name: shape for name, shape in result["shapes"].items() if name in result["of_first"] or rank}
        assert result["of_first"] == (shapes if rank == 0 else {}) and (rank or len(shapes) > 5)
        assert result["of_one"] and all(name.startswith("layers.0.") for name in result["of_one"])
        assert (result["aborts"], result["committed"]) == (0, 9)


def test_edits_over_other_dimensions_than_rows(two: Nodes, tmp_path: Any) -> None:
    environment = {**PLACED, "SHARDD_TEST_WIDTH": "12"}
    for result in run_on_nodes(two, nodes_cut_scenarios.changed, Case(), str(tmp_path), environment=environment):
        assert all(result["loaded"]) and all(result["read"]) and all(result["edited"])


@_PLACED_CASES
def test_safetensors(two: Nodes, case: Case, tmp_path: Any) -> None:
    for result in run_on_nodes(two, nodes_cut_scenarios.safetensors, str(tmp_path), case):
        assert all(result["same"].values()), result["same"]


# The wrapper.


@pytest.mark.parametrize("how", [
    ("FULL_SHARD", True, False), ("SHARD_GRAD_OP", True, True), ("FULL_SHARD", False, False),
    ("FULL_SHARD", True, False, ("embed",)),
], ids=["full", "grad-op-tied", "flat-parameters", "frozen-late"])  # fmt: skip
def test_the_wrapper_over_all_ranks(two: Nodes, how: tuple[Any, ...]) -> None:
    results = run_on_nodes(two, nodes_cut_scenarios.wrapped, _STEPS, *how)
    alone = results[0]["alone"]
    for rank, result in enumerate(results):
        close(result["losses"], alone["losses"][rank][1::2])
        close(result["norms"], alone["norms"])
        for name, value in alone["parameters"].items():
            close(result["parameters"][name], value)
            rows = value.chunk(4)[rank : rank + 1]
            assert result["rows"][name] == [tuple(part.shape) for part in rows], name
            assert result["moments"].get(name, tuple(value.shape)) == tuple(value.shape)
            assert torch.equal(result["doubled"][name], 2 * result["parameters"][name]), name
            if name in result["summoned"]:
                assert torch.equal(result["summoned"][name], result["parameters"][name]), name
        assert result["summoned"]


# What is refused.


def test_what_no_node_can_do_alone_is_refused_by_name(two: Nodes) -> None:
    wants = {
        "uneven": "do not follow each other node by node, as many on each (got [0] and [2, 3]",
        "no shard": "NO_SHARD over 2 nodes",
        "gradients": "cut over 2 nodes",
        "elsewhere": _ELSEWHERE,
        "other counts": _ELSEWHERE,
        "by one": "spans 2 nodes",
    }
    for rank, texts in enumerate(run_on_nodes(two, nodes_cut_scenarios.refused)):
        assert texts.pop("goes on") == "True"
        assert texts.keys() == wants.keys()
        for name, want in wants.items():
            if (rank, name) == (1, "uneven"):
                continue  # it is not in that mesh
            raised = "RuntimeError" if want == _ELSEWHERE else "NotImplementedError"
            assert texts[name].startswith(raised) and want in texts[name], (name, texts[name])


# A rank dies.


def _survive(two: Nodes, victim: int, moment: str, *more: bool) -> list[dict[str, Any]]:
    """What each rank has made of ``survive``; nobody dies where ``victim`` is none of them."""
    return run_with_a_death(two, nodes_cut_scenarios.survive, Death(victim, 5, moment), _STEPS, *more)


@pytest.mark.parametrize(("victim", "moment"), [(3, "forward"), (0, "backward"), (2, "step")])
def test_a_rank_that_dies_costs_no_step(two: Nodes, victim: int, moment: str) -> None:
    expected = train_alone(Case(steps=_STEPS), 4)
    results = _survive(two, victim, moment)
    begins = 6 if moment == "step" else 5
    for rank, result in enumerate(results):
        assert result["resumed"] == [begins], (rank, result["resumed"])
        close(result["losses"], expected["losses"][rank])
        assert result["counters"]["commits"] == _STEPS and result["counters"]["aborts"] == 1
        for param, value in expected["parameters"].items():
            rows = value.chunk(4)
            close(result["locals"][param], rows[rank] if rank < len(rows) else value[:0])


@pytest.mark.parametrize(("victim", "moment"), [(3, "load"), (0, "loaded")])
def test_a_load_in_which_a_rank_dies_is_as_undisturbed(two: Nodes, victim: int, moment: str) -> None:
    results = _survive(two, victim, moment, True)
    for result, want in zip(results, _survive(two, -1, moment, True)):
        assert (result["losses"], result["resumed"]) == (want["losses"], [5])
        for name, value in want["locals"].items():
            assert torch.equal(result["locals"][name], value), name
