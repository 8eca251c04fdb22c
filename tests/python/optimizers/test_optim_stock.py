"""torch's own optimizers on shards: numbers, and state in the daemon's memory that a killed trainer finds again."""

from __future__ import annotations

import re
import tempfile
from typing import Any

import pytest
import torch

from cluster import Cluster, free_port, run_ranks
from optimizers import stock_scenarios


def close(got: Any, want: Any, tolerance: float = 0.0) -> None:
    torch.testing.assert_close(torch.as_tensor(got), torch.as_tensor(want), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", sorted(stock_scenarios.KINDS))
def test_state_moves_into_the_jobs_memory_and_changes_no_number(kind: str) -> None:
    for theirs, ours in run_ranks(stock_scenarios.both, 2, kind):
        close(ours["losses"], theirs["losses"], 2e-6)
        for index, entry in theirs["state"].items():
            assert set(ours["state"][index]) == set(entry)
            for name, value in entry.items():
                close(ours["state"][index][name], value, 2e-5)
        assert ours["homes"] and all(ours["homes"]) and not any(theirs["homes"])
        assert ours["counters"]["commits"] == 6


def test_state_that_is_held_beside_keeps_its_values() -> None:
    for theirs, ours in run_ranks(stock_scenarios.both_beside, 2):
        close(ours["losses"], theirs["losses"], 2e-6)
        for got, want in zip(ours["states"], theirs["states"], strict=True):
            assert {entry["step"] for entry in got.values()} == {entry["step"] for entry in want.values()}
            for index, entry in want.items():
                for name, value in entry.items():
                    close(got[index][name], value, 2e-5)
        for name, value in theirs["parameters"].items():
            close(ours["parameters"][name], value, 2e-5)


def _environment(name: str, restarts: int, hold: str = "") -> dict[str, str]:
    return {"TORCHELASTIC_RUN_ID": name, "TORCHELASTIC_RESTART_COUNT": str(restarts), "HOLD": hold}


_STEPS = 14


def _killed(kind: str, hold: str, killed_at: int) -> tuple[list[dict[str, Any]], int]:
    """Results of the restarted ranks, and the step that they went on from."""
    name = f"{kind}-{hold.replace(' ', '-')}"
    with tempfile.TemporaryDirectory() as folder, Cluster(2, folder) as cluster:
        for rank in range(2):
            cluster.start(stock_scenarios.train_and_be_killed, rank, (kind, _STEPS), _environment(name, 0, hold))
        cluster.wait_for_event(1, 60, event="forward" if hold.startswith("forward") else "stepped", step=killed_at)
        for rank in (1, 0):  # as a launcher does
            cluster.kill(rank)
            cluster.processes[rank].wait()
        cluster.port = free_port()
        for rank in range(2):
            cluster.start(stock_scenarios.train_and_be_killed, rank, (kind, _STEPS), _environment(name, 1))
        assert set(cluster.wait(120).values()) == {0}, cluster.log(0) + cluster.log(1)
        start = [e for e in cluster.events(0) if e["event"] == "start"][1]
        assert start["known"] == start["step"] and (start["states"] > 0) == (start["step"] > 0)
        return [cluster.result(rank) for rank in range(2)], start["step"]


def _alike(results: list[dict[str, Any]], kind: str) -> None:
    """To the last bit as in a run in which nobody was killed."""
    for got, want in zip(results, run_ranks(stock_scenarios.train_and_be_killed, 2, kind, _STEPS)):
        _equal(got, want)
        assert got["counters"]["commits"] >= _STEPS and got["counters"]["aborts"] >= 1


@pytest.mark.parametrize("kind", ["adamw-foreach", "sgd", "asgd"])
def test_with_a_snapshot_per_pass_a_killed_rank_loses_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDD_KEEP_EVERY", "1")
    results, start = _killed(kind, "forward 5", 5)
    assert start == 5
    _alike(results, kind)


def test_by_default_a_killed_rank_loses_its_own_step_alone() -> None:
    for hold, killed_at in (("stepped 12", 12), ("forward 3", 3)):
        results, start = _killed("adamw-foreach", hold, killed_at)
        assert killed_at - 1 <= start <= killed_at
        _alike(results, "adamw-foreach")


@pytest.fixture(scope="module")
def undisturbed() -> list[dict[str, Any]]:
    return run_ranks(stock_scenarios.train_large_and_be_torn, 2, _TORN_STEPS)


_TORN_STEPS = 9


@pytest.mark.parametrize("step", [1, 3, 7])
def test_a_rank_killed_inside_an_optimizer_step_costs_that_step_alone(
    step: int, undisturbed: list[dict[str, Any]]
) -> None:
    with tempfile.TemporaryDirectory() as folder, Cluster(2, folder) as cluster:
        for rank in range(2):
            cluster.start(
                stock_scenarios.train_large_and_be_torn, rank, (_TORN_STEPS,), _environment("torn", 0, str(step))
            )
        cluster.wait_for_event(1, 60, event="torn", step=step)
        for rank in (1, 0):
            cluster.kill(rank)
            cluster.processes[rank].wait()
        cluster.port = free_port()
        for rank in range(2):
            cluster.start(stock_scenarios.train_large_and_be_torn, rank, (_TORN_STEPS,), _environment("torn", 1))
        assert set(cluster.wait(120).values()) == {0}, cluster.log(0) + cluster.log(1)
        results = [cluster.result(rank) for rank in range(2)]
    for got, want in zip(results, undisturbed, strict=True):
        assert got["starts"] == [step]
        _equal(got, want)


def test_a_closures_forward_waits_for_the_snapshot_that_comes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDD_KEEP_EVERY", "1")
    for out in run_ranks(stock_scenarios.waits_inside_closures, 2, 6):
        assert out["waits"] == [0] * 6  # the store comes without another call


def _equal(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert got["losses"] == want["losses"]
    for name, value in want["parameters"].items():
        assert torch.equal(got["parameters"][name], value), name
    for index, entry in want["state"].items():
        for name, value in entry.items():
            assert torch.equal(torch.as_tensor(got["state"][index][name]), torch.as_tensor(value)), (index, name)


def test_passes_without_a_step_and_local_state_match_torch() -> None:
    for theirs, ours in run_ranks(stock_scenarios.both_steps, 2):
        close(ours["losses"], theirs["losses"], 2e-6)
        for name, value in theirs["parameters"].items():
            close(ours["parameters"][name], value, 2e-5)
        assert ours["counters"]["commits"] == 3 and ours["counters"]["passes"] == 4 + 1


def test_optimizers_whose_state_cannot_be_kept_are_refused_early() -> None:
    for out in run_ranks(stock_scenarios.refused, 2):
        for name, (error, untouched) in out.items():
            assert f"step of {name}" in error and "use another optimizer" in error
            assert untouched


def test_state_loaded_before_the_first_forward_lies_in_the_job() -> None:
    for theirs, ours in run_ranks(stock_scenarios.both_loaded, 2):
        close(ours["losses"], theirs["losses"], 2e-6)
        assert ours["homes"] and all(ours["homes"])


def test_commits_carry_little_and_more_fails_with_both_sizes() -> None:
    for out in run_ranks(stock_scenarios.too_much_rides, 2):
        sizes = re.search(r"got (\d+) bytes that shardd.torch.ride was given and (\d+) of", out["error"])
        assert sizes is not None and abs(int(sizes[1]) - out["own"]) < 20
        assert 200 < int(sizes[2]) < 800 + 12 * out["parameters"]
        assert out["rode"] == (1 << 20) - 2200


def test_optimizers_are_found_without_a_look_at_every_object() -> None:
    for result in run_ranks(stock_scenarios.found_without_a_look_at_every_object, 1):
        assert all(result["found"]) and len(result["found"]) == 5, result
        assert result["looks"] == 0 and result["states"] > 0
