"""What a restarted program loads before it uses its model counts, unless it asks for what its job has committed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from torchrun import relaunched
from training import loaded_scenarios


@pytest.mark.parametrize(
    ("form", "optimizer", "loads", "asks"),
    [
        ("fully_shard", "daemon", "all", False),
        ("fully_shard", "torch", "all", False),
        ("wrapper", "daemon", "all", False),
        ("wrapper", "torch", "model", False),
        ("fully_shard", "daemon", "model", False),
        ("fully_shard", "daemon", "safetensors", False),
        ("fully_shard", "daemon", "all", True),
        ("wrapper", "torch", "all", True),
    ],
)
def test_what_is_loaded_counts_unless_committed_steps_are_asked_for(
    form: str, optimizer: str, loads: str, asks: bool, tmp_path: Path
) -> None:
    run = relaunched(
        loaded_scenarios.restarted, 2, form, optimizer, loads, asks, str(tmp_path), restarts=1, name=str(tmp_path)
    )
    assert run.code == 0, run.log
    for rank, result in run.results.items():
        first = torch.load(tmp_path / f"{rank}-0.result", weights_only=False)
        same = [torch.equal(a, b) for a, b in zip(result["parameters"], first["parameters"], strict=True)]
        assert result["counters"]["commits"] >= 3
        if asks:
            assert result["said"] >= 2 and result["losses"][0] != first["losses"][1]
            continue
        assert result["losses"][0] == first["losses"][1]
        # A fresh optimizer, where none was loaded, has counted two steps.
        assert result["counted"] == ([3.0] if loads == "all" else [2.0])
        assert all(same) == (loads == "all")


def test_resume_behind_a_first_use_that_replaced_steps_is_an_error(tmp_path: Path) -> None:
    run = relaunched(loaded_scenarios.asks_late, 2, str(tmp_path), restarts=1, name=str(tmp_path))
    for result in run.results.values():
        assert "has replaced committed step 1 of job" in result["said"]
