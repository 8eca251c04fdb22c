"""clip_grad_norm_ of the wrapper against torch's own and against the unsharded model."""

from __future__ import annotations

import pytest
import torch

from cluster import run_ranks
from training.clip_scenarios import clipped, doubles, under_no_sync, unmanaged


@pytest.mark.parametrize(
    "strategy, world", [("FULL_SHARD", 3), ("SHARD_GRAD_OP", 2), ("NO_SHARD", 2), ("FULL_SHARD", 1)]
)
def test_every_norm_is_torchs(strategy: str, world: int) -> None:
    ours, stock = (run_ranks(clipped, world, impl, strategy) for impl in ("shardd", "torch"))
    for a, b in zip(ours, stock):
        assert a["norms"] == pytest.approx(b["norms"], rel=1e-5)
        assert a["losses"] == pytest.approx(b["losses"], rel=1e-5)
        assert a["none"] == b["none"] == 0.0
        assert a["warned"]
        assert "should only be called on the root" in a["inner"] and "should only be called on the root" in b["inner"]
        assert "TrainingState.FORWARD_BACKWARD" in a["inside"] and a["inside"].startswith("ValueError")
        for name, value in b["parameters"].items():
            torch.testing.assert_close(a["parameters"][name], value, rtol=1e-5, atol=1e-6)


def test_what_is_added_up_without_synchronisation_is_clipped() -> None:
    """The norm is of all ranks' own gradients together, as torch's."""
    ours, stock = (run_ranks(under_no_sync, 2, impl) for impl in ("shardd", "torch"))
    for a, b in zip(ours, stock):
        for key in ("first", "again", "total"):
            assert a[key] == pytest.approx(b[key], rel=1e-5)
        for name, value in b["parameters"].items():
            torch.testing.assert_close(a["parameters"][name], value, rtol=1e-5, atol=1e-6)


def test_gradients_that_the_job_does_not_have_count_once() -> None:
    ours, stock = (run_ranks(unmanaged, 3, impl) for impl in ("shardd", "torch"))
    for a, b in zip(ours, stock):
        assert a["norms"] == pytest.approx(b["norms"], rel=1e-5)
        assert a["clip"] == pytest.approx(b["clip"], rel=1e-5)
        assert a["after"] == pytest.approx(b["after"], rel=1e-5)
        torch.testing.assert_close(a["head"], b["head"], rtol=1e-5, atol=1e-7)


def test_double_precision_is_clipped() -> None:
    for result in run_ranks(doubles, 2):
        assert result["got"].dtype == torch.float64
        torch.testing.assert_close(result["got"], result["want"], rtol=1e-6, atol=0)
