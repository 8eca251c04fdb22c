"""PyTorch's own tests put their ranks into threads of one process (FSDPTestMultiThread): so may programs like them."""

from __future__ import annotations

import pytest
import torch

import thread_scenarios
from cluster import run_ranks


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_may_be_threads_of_one_process(world: int) -> None:
    (found,) = run_ranks(
        thread_scenarios.trained,
        1,
        ["torch", "stock", "daemon"],
        world,
        limit_s=120,
        environment={"SHARDD_TEST_NO_GROUP": "1"},
    )
    for impl in "stock", "daemon":
        for rank, (models, want_models) in enumerate(zip(found[impl], found["torch"], strict=True)):
            for number, (got, want) in enumerate(zip(models, want_models, strict=True)):
                where = f"{impl}, rank {rank}, model {number}"
                assert got["inside"] == want["inside"] and got["outside"] == want["outside"] == "DTensor", where
                torch.testing.assert_close(got["losses"], want["losses"], rtol=1e-6, atol=1e-7)
                torch.testing.assert_close(got["parameters"], want["parameters"], rtol=1e-5, atol=1e-6)
                assert got["counters"]["commits"] == 4, where
                assert got["counters"]["reductions"] > 0 and got["counters"]["unshards"] > 0, where
