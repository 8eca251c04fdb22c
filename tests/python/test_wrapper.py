"""FullyShardedDataParallel trains as torch's own does, and as the unsharded model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cluster import run_ranks
from wrapper_scenarios import WrapperCase, compare


def check(case: WrapperCase, world: int, tolerance: float = 1e-6, torch_too: bool = True) -> list[dict[str, Any]]:
    results = run_ranks(compare, world, case, limit_s=120)
    for rank, result in enumerate(results):
        ours, stock = result["shardd"], result["torch"]
        reference = results[0]["alone"]
        torch.testing.assert_close(
            torch.tensor(ours["losses"]), torch.tensor(stock["losses"]), rtol=tolerance, atol=tolerance
        )
        torch.testing.assert_close(
            torch.tensor(ours["losses"]), torch.tensor(reference["losses"][rank]), rtol=5 * tolerance, atol=0
        )
        assert ours["same_objects"]
        assert ours["names"] == stock["names"]
        assert set(ours["parameters"]) == set(stock["parameters"])
        for name, value in ours["parameters"].items():
            torch.testing.assert_close(value, stock["parameters"][name], rtol=10 * tolerance, atol=10 * tolerance)
            torch.testing.assert_close(value, reference["parameters"][name], rtol=10 * tolerance, atol=10 * tolerance)
    counts = results[0]["shardd"]["counters"]
    assert counts["commits"] == case.steps, counts  # with a forward after the last step also of torch's optimizer
    trainable = [v for n, v in reference["parameters"].items() if not any(n.startswith(p) for p in case.freeze)]
    numel = sum(v.numel() for v in trainable)
    assert counts["bytes_updated"] == (0 if case.stock else 4 * numel * case.steps), counts
    assert counts["bytes_reduced"] >= 4 * numel * case.steps * world, counts
    assert counts["unshards"] >= world * case.steps and counts["aborts"] == 0
    return results


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_the_wrapper_trains_as_torchs_does(world: int) -> None:
    check(WrapperCase(), world)
