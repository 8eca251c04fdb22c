"""Parameters that no optimizer had at first are unfrozen while the model trains: as PyTorch's FSDP, and through crashes."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch

from cluster import Cluster, run_ranks
from job import unfreeze_scenarios
from kept_daemon import kept_daemon
from torchrun import Run, relaunched, torchrun
from training import resume_scenarios

_STEPS = 7


def _close(got: Any, want: Any, what: str) -> None:
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6, msg=lambda m: f"{what}: {m}")


@pytest.mark.parametrize("world", [1, 2])
def test_gradual_unfreezing_is_pytorchs_and_costs_nothing_before(world: int) -> None:
    for result in run_ranks(unfreeze_scenarios.compare, world, _STEPS, world):
        want = result.pop("torch")
        for impl, got in result.items():
            _close(torch.tensor(got["losses"]), torch.tensor(want["losses"]), impl)
            assert got["groups"] == want["groups"] and got["keys"] == want["keys"]
            assert set(got["state"]) == set(want["state"])
            for name, value in want["parameters"].items():
                _close(got["parameters"][name], value, f"{impl} {name}")
            for name, state in want["state"].items():
                assert set(got["state"][name]) == set(state)
                for key, value in state.items():
                    _close(got["state"][name][key], value, f"{impl} {key} of {name}")
            counts = got["counters"]
            assert counts["commits"] == _STEPS and counts["aborts"] == 0, counts
            # Memory for gradients and optimizer state is that of what is trained, before and after.
            sizes = {name: value.numel() for name, value in want["parameters"].items()}
            at_first = sum(size for name, size in sizes.items() if name.startswith(("norm", "head", "layers.none")))
            at_last = sum(size for name, size in sizes.items() if name in want["state"])
            before, after = got["memory"]
            for purpose, per_element in (("gradients", 4), ("optimizer", 8)):
                slack = 16 * 64 * per_element // 4  # between parameters and flat parameters
                assert at_first * per_element <= before[purpose] <= at_first * per_element + slack
                assert at_last * per_element <= after[purpose] <= at_last * per_element + slack


def _nothing_lost(run: Run, impl: str, kills: resume_scenarios.Kills) -> list[int]:
    want = run_ranks(unfreeze_scenarios.train, 2, impl, _STEPS)
    assert run.code == 0, run.log[-6000:]
    assert len(run.of("killed")) == len(kills)
    assert all(event["known"] == event["step"] * unfreeze_scenarios.MICROS for event in run.of("start"))
    for rank, expected in enumerate(want):
        got = run.results[rank]
        assert got["losses"] == expected["losses"]
        for name, value in expected["parameters"].items():
            assert torch.equal(got["parameters"][name], value), name
        for name, state in expected["state"].items():
            for key, value in state.items():
                assert torch.equal(torch.as_tensor(got["state"][name][key]), torch.as_tensor(value)), (name, key)
        assert got["memory"][-1] == expected["memory"][-1]
        assert got["counters"]["commits"] >= _STEPS
    return [event["step"] for event in run.of("start", rank=0)]


def test_a_worker_killed_around_the_unfreezing_costs_nothing() -> None:
    # While it asks to unfreeze and the other rank does not yet; in the first forward after it; before the first commit
    # with it, between two stages of one step; and when the restarted program has described the model frozen.
    kills = ((1, 2, "waiting"), (0, 2, "forward"), (1, 4, "before"), (0, 5, "before"), (1, 6, "forward"))
    run = relaunched(unfreeze_scenarios.train, 2, "daemon", _STEPS, kills, restarts=len(kills))
    assert _nothing_lost(run, "daemon", kills) == [0, 2, 2, 4, 5, 6]
    assert run.results[0]["counters"]["commits"] == _STEPS


def test_torchrun_restarts_an_unfrozen_model_with_an_optimizer_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDD_KEEP_EVERY", "1")
    kills = ((1, 2, "forward"), (0, 4, "before"))
    run = torchrun(unfreeze_scenarios.train, 2, "stock", _STEPS, kills, restarts=len(kills))
    assert _nothing_lost(run, "stock", kills) == [0, 2, 4]


@pytest.mark.parametrize("impl", ["daemon", "fixed", "stock"])
def test_a_rank_that_unfreezes_alone_is_named_on_all(impl: str) -> None:
    for error in run_ranks(unfreeze_scenarios.alone, 2, impl):
        assert 'rank 0 trains parameter "layers.2.' in error and "rank=1" in error, error


@pytest.mark.parametrize("impl", ["daemon", "stock"])
def test_a_job_closed_while_it_is_unfrozen_does_not_begin_anew(impl: str) -> None:
    errors = run_ranks(unfreeze_scenarios.closed_in_between, 2, impl)
    gone = [error for error in errors if "had committed values and is gone" in error]
    # A rank that still attaches is told that the one who knows has left.
    assert gone and all(error in gone or "the rank detached" in error for error in errors), errors


@pytest.mark.parametrize("deaths", [1, 2])
def test_a_daemon_that_dies_inside_an_unfreezing_costs_nothing(deaths: int) -> None:
    with (
        kept_daemon() as daemon,
        daemon.restarted(),
        tempfile.TemporaryDirectory() as folder,
        Cluster(2, folder, daemon.environment) as cluster,
    ):
        for rank in range(2):
            cluster.start(unfreeze_scenarios.through_deaths, rank, (5, deaths))
        codes = cluster.wait(180)
        assert not any(codes.values()), "\n".join([daemon.log(), *(cluster.log(rank) for rank in range(2))])
        results = [cluster.result(rank) for rank in range(2)]
    want = run_ranks(unfreeze_scenarios.through_deaths, 2, 5, 0)
    for got, undisturbed in zip(results, want, strict=True):
        assert got["left"] == 0
        assert got["losses"] == undisturbed["losses"]
        for name, value in undisturbed["parameters"].items():
            assert torch.equal(got["parameters"][name], value), name
