"""What modules hold between calls is what PyTorch's have there: unsharded where that was asked for, and in its dtypes."""

from __future__ import annotations

from typing import Any

import torch

from cluster import run_ranks
from units import shown_scenarios


def _same(got: Any, want: Any, tolerance: float, where: str) -> None:
    if torch.is_tensor(want):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, msg=lambda m: f"{where}: {m}")
    elif isinstance(want, float):
        _same(torch.tensor(got), torch.tensor(want), tolerance, where)
    elif isinstance(want, (list, dict)):
        assert len(got) == len(want), where
        for key, value in want.items() if isinstance(want, dict) else enumerate(want):
            _same(got[key], value, tolerance, f"{where}, {key}")
    else:
        assert got == want, where


def test_modules_hold_what_torchs_do() -> None:
    for results in run_ranks(shown_scenarios.programs, 2, limit_s=180):
        assert len(results) == 5
        for name, result in results.items():
            _same(result["shardd"], result["torch"], 2e-6, name)
            counts = result["counters"]
            assert counts["reductions"] >= 3 * 3 and counts["unshards"] >= 3 * 3 and counts["aborts"] == 0, (
                name,
                counts,
            )


def test_flat_layout_objects_are_shown_while_kept_unsharded() -> None:
    for facts in run_ranks(shown_scenarios.flat_objects, 2):
        assert facts["same"] == [True, True] and facts["cleared"] == [True, True]
        assert facts["counters"]["reductions"] == 2 * 3


def test_resharding_to_fewer_ranks_shows_the_sharded_parameters() -> None:
    for facts in run_ranks(shown_scenarios.resharded_to_fewer, 4):
        assert facts["same"] and facts["gradients"] and facts["counters"]["reductions"] == 3


def test_gradients_of_low_precision_parameters_are_in_their_dtype() -> None:
    for results in run_ranks(shown_scenarios.low_precision_parameters, 2, limit_s=180):
        for kind, result in results.items():
            _same(result["shardd"], result["torch"], 3e-2, kind)
            counts = result["counters"]
            assert counts["reductions"] == 3 * 2 * 3 and counts["aborts"] == 0, (kind, counts)
