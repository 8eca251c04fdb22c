"""Several of the daemon's optimizers over one model: torch's numbers on uneven shards and replicas, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from cluster import run_ranks
from node_daemons import nodes, run_on_nodes
from optimizers import several_scenarios

_Run = Callable[..., list[Any]]


@pytest.fixture(scope="module", params=[2, 3], ids=["two-nodes", "three-nodes"])
def over_nodes(request: pytest.FixtureRequest) -> Iterator[_Run]:
    """Runs a function on two ranks of each node."""
    with nodes(request.param) as made:

        def run(function: Callable[..., Any], *arguments: Any, **more: Any) -> list[Any]:
            return run_on_nodes(made, function, *arguments, **more)

        run.count = made.count  # type: ignore[attr-defined]
        yield run


def _close(got: Any, want: Any) -> None:
    torch.testing.assert_close(torch.as_tensor(got), torch.as_tensor(want), rtol=2e-5, atol=2e-5)


def _check_same(outcomes: list[Any]) -> None:
    for theirs, ours in outcomes:
        _close(ours["losses"], theirs["losses"])
        for got, want in zip(ours["states"], theirs["states"], strict=True):
            assert got.keys() == want.keys()
            for index, entry in want.items():
                assert list(got[index]) == list(entry)
                for name, value in entry.items():
                    _close(got[index][name], value)
        for name, value in theirs["parameters"].items():
            _close(ours["parameters"][name], value)


def _check_both(outcomes: list[Any]) -> None:
    _check_same(outcomes)
    for theirs, ours in outcomes:
        _close(ours["norms"], theirs["norms"])
        assert ours["counters"]["commits"] == 5 and ours["counters"]["aborts"] == 0


@pytest.mark.parametrize(("world", "mesh"), [(3, ()), (4, (2, 2))], ids=["uneven", "replicas"])
def test_each_of_two_optimizers_has_its_own_norm_and_state(world: int, mesh: tuple[int, ...]) -> None:
    _check_both(run_ranks(several_scenarios.both, world, mesh))


@pytest.mark.parametrize("cut", [False, True], ids=["replicas", "cut"])
def test_each_of_two_optimizers_has_its_own_norm_over_nodes(over_nodes: _Run, cut: bool) -> None:
    count = over_nodes.count  # type: ignore[attr-defined]
    outcomes = over_nodes(several_scenarios.both, () if cut else (count, 2))
    _check_both(outcomes)
    for _, ours in outcomes:  # the nodes' copies never differ
        for name, value in outcomes[0][1]["parameters"].items():
            assert torch.equal(ours["parameters"][name], value), name
        assert ours["norms"] == outcomes[0][1]["norms"]


@pytest.mark.parametrize("cut", [False, True], ids=["replicas", "cut"])
def test_weights_that_are_clamped_behind_two_over_nodes(over_nodes: _Run, cut: bool) -> None:
    count = over_nodes.count  # type: ignore[attr-defined]
    outcomes = over_nodes(several_scenarios.both_clamped, () if cut else (count, 2))
    _check_same(outcomes)
    assert all(ours["counters"]["aborts"] == 0 for _, ours in outcomes)


@pytest.mark.parametrize("cut", [False, True], ids=["replicas", "cut"])
def test_unlike_parts_over_nodes_are_refused_by_name(over_nodes: _Run, cut: bool) -> None:
    count = over_nodes.count  # type: ignore[attr-defined]
    for said in over_nodes(several_scenarios.other_order_on_the_last_node, () if cut else (count, 2)):
        assert "left_groups (got [" in said and f"node {count - 1} (" in said, said


def test_a_part_that_a_signal_interrupts_is_committed_by_the_next_forward() -> None:
    for rank, (theirs, ours) in enumerate(run_ranks(several_scenarios.interrupted_of_both, 2)):
        assert ours["raised"] == (1 if rank == 0 else 0)
        _close(ours["losses"], theirs["losses"])
        for name, value in theirs["parameters"].items():
            _close(ours["parameters"][name], value)
        for got, want in zip(ours["states"], theirs["states"], strict=True):
            for index, entry in want.items():
                for key, value in entry.items():
                    _close(got[index][key], value)
        assert ours["counters"]["commits"] == 4 and ours["counters"]["aborts"] == 0


def test_ranks_need_not_lose_an_optimizer_at_the_same_time() -> None:
    outcomes = run_ranks(several_scenarios.one_dies, 2)
    assert [outcome["kept"] for outcome in outcomes] == [0, 1]
    assert all(outcome["counters"]["commits"] == 4 and outcome["counters"]["aborts"] == 0 for outcome in outcomes)


def test_what_parts_of_a_step_do_not_do_is_refused_by_name() -> None:
    outcomes = run_ranks(several_scenarios.refusals, 2)
    for outcome in outcomes:
        assert 'NotImplementedError: register model: parameter "' in outcome["shares"]
        assert "is in two optimizers of shardd" in outcome["shares"]
    said = " ".join(outcome["edits"] for outcome in outcomes)
    assert "parameters were edited between the steps of two optimizers of one model" in said, said
    said = " ".join(outcome["before"] for outcome in outcomes)
    assert "Error: step job" in said and "between the forward and the step of one of several optimizers" in said, said
    said = " ".join(outcome["orders"] for outcome in outcomes)
    assert "left_groups (got [" in said, said
    for said in run_ranks(several_scenarios.refusal, 2, environment={"SHARDD_PASS_COPIES": "1"}):
        assert "does not step where passes read copies of parameters (SHARDD_PASS_COPIES)" in said
    assert run_ranks(several_scenarios.refusal, 2) == ["", ""]
