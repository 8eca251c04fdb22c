"""PyTorch's own tests put their ranks into threads of one process (FSDPTestMultiThread): so may programs like them."""

from __future__ import annotations

import pytest
import torch

from cluster import run_ranks
from ranks import thread_scenarios


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


@pytest.mark.parametrize("keeps", [True, False], ids=["kept", "dropped"])
@pytest.mark.parametrize("where", ["forward", "backward", "before"])
def test_a_thread_that_ends_early_is_named_to_the_others(where: str, keeps: bool) -> None:
    (found,) = run_ranks(thread_scenarios.left, 1, where, keeps, 3, environment={"SHARDD_TEST_NO_GROUP": "1"})
    assert found[1][:2] == ("Broken", "of rank 1")
    for kind, text, seconds in (found[0], found[2]):
        told = "the rank finished while others were in a step (rank=1" in text
        if where != "backward":  # and who comes to the pass, or to its backward, when the rank has left
            told = told or "rank 1 has finished and takes part in nothing any more" in text
        assert kind == "StepAborted" and told, text
        assert seconds < 20  # of 60, which is what calls wait for


def test_later_threads_over_one_store_have_their_own_jobs() -> None:
    (found,) = run_ranks(
        thread_scenarios.groups_over_one_store,
        1,
        3,
        environment={"SHARDD_TEST_NO_GROUP": "1", "SHARDD_TIMEOUT_MS": "20000"},
    )
    assert found == [[2.0] * 3] * 2
