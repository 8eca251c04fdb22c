"""A disk that is full while a checkpoint is written: PyTorch's own error on all ranks, and training goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cluster import run_ranks
from job import disk_scenarios


@pytest.mark.parametrize("ranks", [[0, 1], [1]], ids=["of all", "of one"])
def test_a_save_into_a_full_disk_fails_and_training_continues(ranks: list[int], tmp_path: Path) -> None:
    for found in run_ranks(disk_scenarios.both, 2, str(tmp_path), ranks, limit_s=120):
        ours, stock = found["shardd"], found["torch"]
        assert ours["raised"] == stock["raised"] and ours["raised"].startswith("CheckpointException")
        assert len(ours["losses"]) == 3
        torch.testing.assert_close(torch.tensor(ours["losses"]), torch.tensor(stock["losses"]), rtol=1e-5, atol=0)
        for name, value in ours["parameters"].items():
            torch.testing.assert_close(value, stock["parameters"][name], rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(ours["loaded"][name], value, rtol=0, atol=0)
        assert ours["counters"]["aborts"] == 0 and ours["counters"]["commits"] >= 2


@pytest.mark.parametrize("ranks", [[0, 1], [1]], ids=["of all", "of one"])
def test_safetensors_that_do_not_fit_fail_on_all_ranks(ranks: list[int], tmp_path: Path) -> None:
    for rank, found in enumerate(run_ranks(disk_scenarios.own_format, 2, str(tmp_path), ranks, limit_s=60)):
        assert "File too large" in found["raised"], found["raised"]
        if ranks == [1]:
            assert found["raised"].startswith("OSError" if rank == 1 else "RuntimeError"), found["raised"]
        assert found["same"]
