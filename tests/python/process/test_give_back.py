"""Memory that goes back to the system while a step does not need it: where it is, and that all values stay PyTorch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cluster import run_ranks
from optimizers import gradient_scenarios
from process import give_back_scenarios
from torchrun import relaunched
from training import resume_scenarios

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients that are worth giving back: 2.2 MiB, of which each rank has half."""
    monkeypatch.setenv("SHARDD_GIVE_BACK", "1")
    monkeypatch.setenv("SHARDD_TEST_WIDTH", "220")


def _close(got: Any, want: Any, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(torch.as_tensor(got), torch.as_tensor(want), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", ["daemon", "stock"])
def test_gradients_are_in_memory_from_backward_to_zero_grad_alone(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    results = run_ranks(give_back_scenarios.through_steps, 2, kind)
    for facts in results:
        assert all(facts["kept"]), ".grad shows its values until zero_grad"
        assert min(facts["stepped"]) > MIB and min(facts["evaluated"]) > MIB, facts
        assert max(facts["in_forward"]) < min(facts["stepped"]) / 2, facts
        assert facts["counters"]["commits"] == 4 and facts["counters"]["aborts"] == 0
    monkeypatch.setenv("SHARDD_GIVE_BACK", "0")
    for facts, kept in zip(results, run_ranks(give_back_scenarios.through_steps, 2, kind)):
        assert min(kept["in_forward"]) > MIB, kept
        assert facts["losses"] == kept["losses"], "bit by bit"


@pytest.mark.parametrize("kind", ["daemon", "stock"])
def test_gradients_dropped_assigned_kept_and_frozen_are_as_without_it(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = run_ranks(gradient_scenarios.situations, 2, "shardd", kind, limit_s=240)
    monkeypatch.setenv("SHARDD_GIVE_BACK", "0")
    for ours, kept in zip(results, run_ranks(gradient_scenarios.situations, 2, "shardd", kind, limit_s=240)):
        for name, want in kept.items():  # bit by bit: test_optim_gradients.py holds these against PyTorch's
            assert ours[name]["losses"] == want["losses"], name
            for parameter, value in want["parameters"].items():
                assert torch.equal(ours[name]["parameters"][parameter], value), f"{name}, {parameter}"
            assert ours[name]["counters"]["aborts"] == 0, name


def test_old_references_keep_their_values() -> None:
    for stock, ours in run_ranks(gradient_scenarios.both_references, 2):
        assert all(ours["kept"]) and ours["different"] == 3
        for got, want in zip(ours["values"], stock["values"]):
            _close(got, want)


def test_what_is_added_up_without_synchronisation_stays() -> None:
    for stock, ours in run_ranks(give_back_scenarios.both_unsynchronised, 2):
        _close(ours["losses"], stock["losses"])
        _close(ours["norms"], stock["norms"])
        for name, value in stock["parameters"].items():
            _close(ours["parameters"][name], value, 2e-4)
        assert ours["counters"]["commits"] == 4 and ours["counters"]["aborts"] == 0


def test_killed_workers_lose_nothing() -> None:
    kills = ((1, 2, "backward"), (0, 3, "stepped"), (1, 4, "forward"))
    run = relaunched(resume_scenarios.train, 2, 6, "daemon", kills, restarts=len(kills))
    assert run.code == 0, run.log
    expected = run_ranks(resume_scenarios.train, 2, 6, "daemon", ())
    for rank, want in enumerate(expected):
        _close(run.results[rank]["losses"], want["losses"], 1e-6)
    assert run.of("killed"), "somebody was"


def test_pool_tensors_keep_their_values_and_idle_pages_go() -> None:
    facts = run_ranks(give_back_scenarios.pool, 1)[0]
    if not facts["used"]:
        pytest.skip("the system gives no huge pages (transparent_hugepage/enabled)")
    assert facts["again"] and facts["empty"]["used_bytes"] == 0 and facts["small"] == 0
    assert facts["held"]["used_bytes"] == 160 * MIB == facts["held"]["resident_bytes"]
    assert facts["right"] and facts["child"] == 0 and facts["resized"] and facts["failures"] == []
    assert facts["halved"]["resident_bytes"] <= 100 * MIB, "each freed tensor is two pages"
    assert facts["end"]["used_bytes"] == 0 and facts["end"]["resident_bytes"] <= 16 * MIB, facts["end"]
