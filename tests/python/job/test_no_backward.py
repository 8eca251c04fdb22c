"""Forwards without a backward, edits before it, exceptions in it: what is written then, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cluster import run_ranks
from job import no_backward_scenarios


def _equal(stock: dict[str, Any], ours: dict[str, Any]) -> None:
    torch.testing.assert_close(torch.tensor(ours["losses"]), torch.tensor(stock["losses"]), rtol=1e-6, atol=0)
    for name, value in stock["parameters"].items():
        torch.testing.assert_close(ours["parameters"][name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("wrap", ["root", "blocks"])
def test_an_edit_between_forward_and_backward_is_named(wrap: str) -> None:
    for error in run_ranks(no_backward_scenarios.edit_before_the_backward, 2, wrap):
        assert 'parameter "layers.1.up.weight" was written after the forward' in error


@pytest.mark.parametrize("meet", [True, False])
@pytest.mark.parametrize("kind", ["daemon", "adamw"])
def test_one_rank_alone_edits_after_a_forward_without_backward(kind: str, meet: bool) -> None:
    for stock, ours in run_ranks(no_backward_scenarios.both_skip, 2, kind, meet):
        _equal(stock, ours)
        assert ours["counters"]["aborts"] == 0
        assert kind != "daemon" or ours["counters"]["hand_ins"] >= 4


def test_a_full_state_dict_has_edits_behind_a_forward_alone() -> None:
    for facts in run_ranks(no_backward_scenarios.state_dict_after_edits, 2, environment={"SHARDD_TIMEOUT_MS": "20000"}):
        assert facts == {"whole": True, "next": True, "aborts": 0}


def test_a_load_of_one_rank_waits_for_no_other() -> None:
    for facts in run_ranks(no_backward_scenarios.load_of_one_rank, 2, environment={"SHARDD_TIMEOUT_MS": "20000"}):
        assert facts == {"loaded": True, "aborts": 0}


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("kind", ["daemon", "adamw"])
def test_parameters_are_written_after_an_exception_before_the_next_forward(kind: str, where: str) -> None:
    for stock, ours in run_ranks(no_backward_scenarios.both_fail, 2, kind, where):
        _equal(stock, ours)
        assert ours["counters"]["aborts"] == 0
        assert kind != "daemon" or ours["counters"]["hand_ins"] >= 1
