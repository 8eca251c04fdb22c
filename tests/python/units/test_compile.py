"""torch.compile over sharded modules: what dynamo makes of them, and that training is right."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cluster import run_ranks
from models import Case
from units import compile_scenarios

_STEPS = 4


def _check(results: list[dict[str, Any]], groups: int = 4) -> None:
    for result in results:
        torch.testing.assert_close(torch.tensor(result["losses"]), torch.tensor(result["alone"]), rtol=1e-6, atol=0)
        assert len(set(result["compilations"])) == 1, result["compilations"]  # all in the first step
        assert set(result["constants"]) == {0}, result["constants"]
        counts = result["counters"]
        assert counts["unshards"] >= 2 * groups * _STEPS and counts["reductions"] == groups * _STEPS
        assert counts["commits"] == _STEPS


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_blocks_are_one_graph_without_breaks(backend: str) -> None:
    results = run_ranks(compile_scenarios.compiled, 2, Case(steps=_STEPS), False, backend, limit_s=600)
    _check(results)
    for result in results:
        assert result["breaks"] == {}
        assert result["parameters"] == [7]  # one graph for three equal blocks; their parameters are its inputs


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_wholly_compiled_model_breaks_at_sharded_modules_alone(backend: str) -> None:
    results = run_ranks(compile_scenarios.compiled, 2, Case(steps=_STEPS), True, backend, limit_s=600)
    _check(results)
    for result in results:
        assert len(result["breaks"]) <= 1, result["breaks"]
        assert 7 in result["parameters"]


@pytest.mark.parametrize("checkpoint", ["reentrant", "non-reentrant"])
def test_compiled_blocks_under_activation_checkpointing(checkpoint: str) -> None:
    case = Case(steps=_STEPS, checkpoint=checkpoint)
    _check(run_ranks(compile_scenarios.compiled, 2, case, False, "aot_eager", limit_s=600))


def test_inductor_trains_a_small_model() -> None:
    _check(run_ranks(compile_scenarios.compiled, 2, Case(steps=_STEPS), False, "inductor", limit_s=600))


def test_compiled_autograd_and_freezing_are_refused_by_name() -> None:
    result = run_ranks(compile_scenarios.refusals, 1, limit_s=600)[0]
    assert "compiled autograd" in result["autograd"] and "turn it off" in result["autograd"]
    assert "freezing" in result["freezing"] and "turn it off" in result["freezing"]
    assert result["unsharded"] == ""  # other models may be frozen beside it
    assert result["after"] == 1  # and training goes on
