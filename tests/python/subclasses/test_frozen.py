"""Frozen weights of several tensors, whose bytes the job keeps, against torch's own fully_shard; and killed trainers."""

from __future__ import annotations

import pytest
import torch

from cluster import run_ranks
from subclasses.frozen_scenarios import adapters_on_both, killed
from torchrun import relaunched


@pytest.mark.parametrize("optimizer", ["torch", "daemon"])
def test_adapters_of_frozen_codes_train_as_torchs(optimizer: str) -> None:
    for results in run_ranks(adapters_on_both, 2, optimizer):
        ours, theirs = results["shardd"], results["torch"]
        for what in ("losses", "parameters", "of loaded"):
            torch.testing.assert_close(ours[what], theirs[what], rtol=1e-6, atol=1e-6)
        assert ours["kinds"] == theirs["kinds"] and ours["kinds"]["first.weight"] == "Codes"
        assert not ours["loaded"].any() and not theirs["loaded"].any()


@pytest.mark.parametrize(("frozen", "optimizer"), [(False, "torch"), (False, "daemon"), (True, "daemon")])
def test_a_killed_trainer_goes_on_with_what_is_committed(frozen: bool, optimizer: str) -> None:
    steps, kill_at = 6, 3
    run = relaunched(killed, 2, frozen, optimizer, steps, kill_at, restarts=1)
    assert run.code == 0, run.log[-6000:]
    whole = run_ranks(killed, 2, frozen, optimizer, steps, -1)
    for rank in range(2):
        first = run.results[rank]["first"]
        assert kill_at - (optimizer == "torch") <= first <= kill_at
        torch.testing.assert_close(run.results[rank]["losses"], whole[rank]["losses"][first:], rtol=0, atol=0)
        torch.testing.assert_close(run.results[rank]["parameters"], whole[rank]["parameters"], rtol=0, atol=0)
