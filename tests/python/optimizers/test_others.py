"""Gradients that some ranks alone have are everybody's: each rank sees its rows of them, and every optimizer steps them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cluster import run_ranks
from node_daemons import nodes, run_on_nodes
from optimizers.others_scenarios import Case, train

_ALLOWED = {"SHARDD_ALLOW_MISSING_CONTRIBUTION": "1"}  # units that a rank does not run
_CASES = {
    "each expert a unit": Case("experts"),
    "one unit": Case("root", optimizer="sgd", clip=0.2),
    "accumulated": Case("experts", optimizer="sgd", accumulate=3, clip=0.2),
    "accumulated without synchronisation": Case("root", accumulate=3, sync=False),
    "skipped steps": Case("experts", optimizer="sgd", accumulate=2, drops=True),
    "skipped steps of one unit": Case("root", drops=True),
    "ranks without any gradient": Case("experts", frozen=True),
    "ranks without any gradient, accumulated": Case("root", frozen=True, accumulate=3, sync=False),
    "zeros": Case("experts", optimizer="sgd", zeros=True),
    "zeros and skipped steps": Case("root", zeros=True, drops=True, clip=0.2),
    "original parameters": Case("original", clip=0.2),
    "original parameters without synchronisation": Case("original", optimizer="sgd", accumulate=3, sync=False),
    "flat parameters": Case("flat", optimizer="sgd", clip=0.2),
    "flat parameters, skipped steps": Case("flat", drops=True),
    "the daemon's optimizer": Case("experts", daemon=True, accumulate=2),
    "the daemon's optimizer, clipped": Case("root", daemon=True, clip=0.2),
}


def _check(results: list[dict[str, Any]]) -> None:
    assert any(result["lacked"] > 0 for result in results), "every rank ran every expert"
    for result in results:
        for got, want in result["shown"]:
            assert got == want
        for what in ("losses", "norms"):
            for got, want in result[what]:
                assert got == pytest.approx(want, rel=2e-4, abs=1e-6), what
        torch.testing.assert_close(*result["parameters"], rtol=1e-3, atol=1e-5)
        assert result["counters"]["gradient_questions"] > 0


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", _CASES)
def test_ranks_train_as_whole_models_whose_gradients_are_averaged(name: str, world: int) -> None:
    _check(run_ranks(train, world, _CASES[name], environment=_ALLOWED))


def test_what_ranks_of_another_node_alone_have_is_shown() -> None:
    case = Case("experts", daemon=True, accumulate=2, mesh=(2, 2))
    with nodes() as two:
        _check(run_on_nodes(two, train, case, environment=_ALLOWED))


@pytest.mark.parametrize("form", ["experts", "root", "original", "flat"])
def test_nobody_asks_where_all_ranks_have_the_same_gradients(form: str) -> None:
    for result in run_ranks(train, 2, Case(form, everybody=True, steps=6)):
        assert result["counters"]["gradient_questions"] == 0
        torch.testing.assert_close(*result["parameters"], rtol=1e-3, atol=1e-5)
