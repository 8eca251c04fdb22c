"""Several of the daemon's optimizers over one model: torch's numbers on uneven shards and replicas, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cluster import run_ranks
from optimizers import several_scenarios


def _close(got: Any, want: Any) -> None:
    torch.testing.assert_close(torch.as_tensor(got), torch.as_tensor(want), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("world", "mesh"), [(3, ()), (4, (2, 2))], ids=["uneven", "replicas"])
def test_each_of_two_optimizers_has_its_own_norm_and_state(world: int, mesh: tuple[int, ...]) -> None:
    for theirs, ours in run_ranks(several_scenarios.both, world, mesh):
        _close(ours["losses"], theirs["losses"])
        _close(ours["norms"], theirs["norms"])
        for got, want in zip(ours["states"], theirs["states"], strict=True):
            assert got.keys() == want.keys()
            for index, entry in want.items():
                assert list(got[index]) == list(entry)
                for name, value in entry.items():
                    _close(got[index][name], value)
        for name, value in theirs["parameters"].items():
            _close(ours["parameters"][name], value)
        assert ours["counters"]["commits"] == 5 and ours["counters"]["aborts"] == 0


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
