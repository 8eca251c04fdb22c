"""Loads into optimizers: all or nothing, two models, what torch asks for, and what a killed rank finds afterwards."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch

from cluster import Cluster, free_port, run_ranks
from optimizers import optim_loads


def close(got: Any, want: Any, tolerance: float = 2e-6) -> None:
    torch.testing.assert_close(torch.as_tensor(got), torch.as_tensor(want), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_asking_for_state_makes_no_step(momentum: float) -> None:
    for facts in run_ranks(optim_loads.asked_for_state, 2, momentum):
        assert facts["commits"] == [0, 1, 1, 2]
        assert facts["entries"] == [facts["parameters"] if momentum else 0] * 4


def test_one_optimizer_over_two_models_loads_the_state_of_both() -> None:
    for stock, ours in run_ranks(optim_loads.both_two_models, 2, limit_s=240):
        assert ours.pop("kept") is True
        assert set(ours) == set(stock) and len(ours) == 7
        for name, losses in stock.items():
            close(ours[name], losses, 1e-5)
        close(ours["before all"], ours["went on"])
        assert abs(ours["after missing"][-1] - ours["after all"][-1]) > 1e-5


def test_a_load_that_fails_has_changed_nothing() -> None:
    for out in run_ranks(optim_loads.failing_loads, 2, True, limit_s=240):
        errors = out["errors"]
        assert set(errors) == {"shape", "step", "type", "amsgrad", "differentiable", "kind", "groups"}
        assert (
            'ValueError: load optimizer state "exp_avg_sq" of "' in errors["shape"] and "(3, 5, 7)" in errors["shape"]
        )
        assert '"step"' in errors["step"] and "nan" in errors["step"]
        assert "NotImplementedError: AdamW: amsgrad of a param group differs" in errors["amsgrad"]
        assert "decoupled_weight_decay" in errors["kind"]
        assert out["changed"] == []
        close(out["went on"], out["reference"])
        assert out["counters"]["commits"] == 6 and out["counters"]["aborts"] == 0


def test_a_load_the_model_cannot_take_fails_when_registered() -> None:
    for out in run_ranks(optim_loads.failing_loads, 2, False, limit_s=240):
        assert set(out["errors"]) == {"shape", "step", "type", "amsgrad", "differentiable", "kind", "groups"}


def test_what_a_pre_hook_returns_is_loaded_and_saved() -> None:
    for out in run_ranks(optim_loads.hooked_load, 2):
        assert out["before"] and out["after"] and out["kept"]
        assert out["before steps"] == out["after steps"] == {3.0}
        assert out["before seen by a hook"] == out["after seen by a hook"] == [3]


def test_flags_are_refused_wherever_they_come_from() -> None:
    for errors in run_ranks(optim_loads.refused_flags, 2):
        assert "differentiable=True" in errors["constructor"]
        assert (
            "differentiable=True" in errors["constructor's group"] and "differentiable=True" in errors["changed group"]
        )
        assert "differentiable=True" in errors["added group"] and errors["groups"] == "1"
        assert "(2, 3) is not sharded" in errors["not sharded"] and "is not sharded" in errors["not sharded, added"]
        assert "is float64" in errors["float64"] and "torch.optim" in errors["float64"]
        assert "decoupled_weight_decay" in errors["kind"] and errors["commits"] == "0"


def test_the_first_momentum_is_the_gradient_even_after_a_load() -> None:
    for runs in run_ranks(optim_loads.first_momentum_both_ways, 2, limit_s=240):
        want = runs["torch"]
        assert all(run["entries"] == 0 for run in runs.values())
        for run in runs.values():
            assert set(run["first"]) == set(want["first"])
            for index, value in want["first"].items():
                close(run["first"][index], value, 1e-5)
            for name, value in want["parameters"].items():
                close(run["parameters"][name], value, 1e-5)


@pytest.mark.parametrize("kind", ["daemon", "stock"])
def test_collectives_and_reads_into_shards_work_during_hand_ins(kind: str) -> None:
    results = run_ranks(optim_loads.written_by_the_system, 2, kind)
    for out in results:
        assert out["read"] and out["rows"]
        half = out["sent"].numel()
        assert torch.equal(out["seen"][:half], out["sent"]) and torch.equal(out["seen"][half:], out["sent"])
        assert out["counters"]["aborts"] == 0


_STEPS = 9


def _killed(kind: str, *holds: str) -> list[dict[str, Any]]:
    """The ranks are killed at each moment in turn and started again; how each attempt began, and the results."""
    with tempfile.TemporaryDirectory() as folder, Cluster(2, folder) as cluster:
        for attempt, hold in enumerate((*holds, "")):
            environment = {
                "TORCHELASTIC_RUN_ID": "-".join((kind, *holds)).replace(" ", "-"),
                "TORCHELASTIC_RESTART_COUNT": str(attempt),
                "HOLD": hold,
            }
            cluster.port = free_port()
            for rank in range(2):
                cluster.start(optim_loads.edit_and_load, rank, (kind, folder, _STEPS), environment)
            if hold:
                cluster.wait_for_event(1, 90, event="holding", moment=hold)
                for rank in (1, 0):  # as a launcher does
                    cluster.kill(rank)
                    cluster.processes[rank].wait()
        assert set(cluster.wait(120).values()) == {0}, cluster.log(0) + cluster.log(1)
        starts = [e for e in cluster.events(0) if e["event"] == "start"]
        assert all(e["known"] == e["step"] for e in starts)
        results = [cluster.result(rank) for rank in range(2)]
    with tempfile.TemporaryDirectory() as folder:
        for got, want in zip(results, run_ranks(optim_loads.edit_and_load, 2, kind, folder, _STEPS)):
            assert got["losses"] == want["losses"]
            for name, value in want["parameters"].items():
                assert torch.equal(got["parameters"][name], value), name
            for index, entry in want["state"].items():
                for name, value in entry.items():
                    assert torch.equal(torch.as_tensor(got["state"][index][name]), torch.as_tensor(value)), (
                        index,
                        name,
                    )
            # Who edits, or loads parameters, is in no step, and the other rank may not have begun the next one.
            assert got["counters"]["aborts"] >= sum(not hold.startswith(("edited", "load ")) for hold in holds)
    return starts[1:]


@pytest.mark.parametrize("moment", ["edited 3", "load 5", "loaded 5"])
def test_killing_a_writer_under_the_daemons_optimizer_loses_nothing(moment: str) -> None:
    (start,) = _killed("daemon", moment)
    assert start["step"] == int(moment[-1])


def test_a_rank_killed_in_the_next_forward_keeps_loaded_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SHARDD_KEEP_EVERY", "1")
    (start,) = _killed("stock", "forward 5")
    assert start["step"] == 5 and start["loaded"]  # with the parameters, before any step


@pytest.mark.parametrize("kind", ["daemon", "stock"])
def test_a_second_death_after_a_restore_loses_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDD_KEEP_EVERY", "1")  # of torch's optimizers; the daemon's keep each commit
    first, second = _killed(kind, "forward 4", "forward 7")
    assert (first["step"], second["step"]) == (4, 7)
