"""FSDP_USE_FULL_PREC_IN_EVAL=1: what is computed, and in what, is torch's in every order of modes."""

from __future__ import annotations

import pytest
import torch

from cluster import run_ranks
from units.eval_scenarios import modes


@pytest.mark.parametrize(
    "strategy, orig, per_layer",
    [
        ("FULL_SHARD", True, True),
        ("SHARD_GRAD_OP", True, True),
        ("SHARD_GRAD_OP", False, False),
        ("NO_SHARD", True, True),
    ],
)
def test_modes_follow_each_other_as_with_torch(strategy: str, orig: bool, per_layer: bool) -> None:
    ours, stock = (
        run_ranks(modes, 2, impl, strategy, orig, per_layer, environment={"FSDP_USE_FULL_PREC_IN_EVAL": "1"})
        for impl in ("shardd", "torch")
    )
    for a, b in zip(ours, stock):
        assert len(a) == 8 and len(b) == 7
        assert not torch.equal(a[7][1], a[5][1])
        del a[7]
        assert [dtype for dtype, _ in a] == [dtype for dtype, _ in b]
        for (_, got), (_, want) in zip(a, b):
            torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-3)
