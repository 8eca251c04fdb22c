"""Passes read copies (with torch's optimizers always, with the daemon's by SHARDD_PASS_COPIES=1): shards are stored into at any time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cluster import run_ranks
from full_params import full_param_scenarios
from job import copies_scenarios, edit_scenarios, test_unfreeze
from optimizers import stock_scenarios, test_optim_stock
from sharding import test_wrapper_writeback


@pytest.fixture(autouse=True)
def _copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDD_PASS_COPIES", "1")


def close(got: Any, want: Any, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(torch.as_tensor(got), torch.as_tensor(want), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", ["adamw", "daemon"])
def test_the_system_may_store_too(kind: str) -> None:
    for found in run_ranks(copies_scenarios.stores_of_the_system, 2, kind):
        assert found["copies"]
        assert not found["bias"].any()


@pytest.mark.parametrize("kind", ["adamw", "daemon"])
def test_a_store_inside_a_pass_is_in_the_next_one(kind: str) -> None:
    for found in run_ranks(copies_scenarios.store_inside_a_pass, 2, kind):
        for name, want in found["want"].items():
            assert torch.equal(found["got"][name], want), name
        assert all(torch.equal(seen, found["before"]) for seen in found["seen"])
        for name, value in found["parameters"].items():
            assert torch.equal(value, 1.5 * found["all before"][name]), name
        close(*found["losses"])


@pytest.mark.parametrize("kind", ["daemon", "adamw-foreach", "sgd"])
def test_edits_are_those_of_torch_while_ranks_drift(kind: str, tmp_path: Path) -> None:
    for theirs, ours in run_ranks(edit_scenarios.both_edited, 2, kind, str(tmp_path), limit_s=200):
        close(ours["losses"], theirs["losses"])
        for name, value in theirs["parameters"].items():
            torch.testing.assert_close(ours["parameters"][name], value, rtol=1e-5, atol=1e-6)
        assert ours["counters"]["commits"] == 7 and ours["counters"]["aborts"] == 0


def test_a_forward_that_failed_is_tried_again() -> None:
    for theirs, ours in run_ranks(copies_scenarios.both, 2, "tried_again"):
        close(ours["losses"], theirs["losses"])
        for name, value in theirs["parameters"].items():
            close(ours["parameters"][name], value)
        assert ours["counters"]["aborts"] == 0


def test_several_forwards_for_a_backward_and_parts_by_themselves() -> None:
    for theirs, ours in run_ranks(copies_scenarios.both, 2, "forwards_and_parts"):
        close(ours["losses"], theirs["losses"])
        for name, value in theirs["parameters"].items():
            close(ours["parameters"][name], value, 1e-5)


@pytest.mark.parametrize("gradients", [False, True])
def test_nobody_overwrites_full_precision_values_before_all_have_read_them(gradients: bool) -> None:
    environment = {"FSDP_USE_FULL_PREC_IN_EVAL": "1"}
    for of_rank in run_ranks(copies_scenarios.stores_after_full_precision, 2, gradients, environment=environment):
        assert of_rank["copies"] and of_rank["dtype"] == torch.float32
        assert torch.equal(of_rank["got"], of_rank["want"])
        assert not torch.equal(of_rank["after"], of_rank["want"])
        assert of_rank["apart"] < 1e-2  # gradients are reduced in bfloat16


def test_nobody_overwrites_summoned_values_before_all_have_read_them() -> None:
    for of_rank in run_ranks(copies_scenarios.summoned_while_others_store, 2):
        for name, value in of_rank["before"].items():
            assert torch.equal(of_rank["read"][name], value), name


@pytest.mark.parametrize("kind", ["adamw-foreach", "asgd"])
def test_state_of_torchs_optimizers_lies_in_the_job(kind: str) -> None:
    for theirs, ours in run_ranks(stock_scenarios.both, 2, kind):
        close(ours["losses"], theirs["losses"], 2e-6)
        for index, entry in theirs["state"].items():
            for name, value in entry.items():
                close(ours["state"][index][name], value, 2e-5)
        assert ours["homes"] and all(ours["homes"])


@pytest.mark.parametrize("hold", ["forward 5", "stepped 5"])
def test_killed_ranks_resume_from_the_snapshot_of_the_last_pass(hold: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDD_KEEP_EVERY", "1")
    results, start = test_optim_stock._killed("adamw-foreach", hold, 5)
    assert start in (4, 5), start  # the last commit, which the pass that is running has made
    test_optim_stock._alike(results, "adamw-foreach")


def test_a_killed_rank_costs_ten_passes_at_most() -> None:
    results, start = test_optim_stock._killed("adamw", "forward 12", 12)
    assert 2 <= start <= 12
    test_optim_stock._alike(results, "adamw")


def test_full_parameters_state_dicts_and_replaced_storages_are_as_without() -> None:
    results = run_ranks(full_param_scenarios.rank0_edits, 3, "shardd", "stock")
    for facts in results:
        assert facts["versions"] > 1  # each pass has made one, too
        assert facts["parameters"] == 0 and facts["gradients"] < 1e-6 and facts["step"] < 1e-6
        assert facts["loss"] == pytest.approx(results[0]["loss"], rel=1e-6)
    test_wrapper_writeback.test_replaced_storages_objects_and_gradients_count_as_in_torch(2)
    test_wrapper_writeback.test_flat_and_tied_parameters_write_back_and_closed_jobs_refuse()


def test_unfreezing_goes_on_with_copies() -> None:
    test_unfreeze.test_gradual_unfreezing_is_pytorchs_and_costs_nothing_before(2)


def test_an_evaluated_or_frozen_model_has_one_editable_copy() -> None:
    for of_rank in run_ranks(copies_scenarios.edited_and_evaluated, 2):
        for name, found in of_rank.items():
            plan = found["plan"].purposes()
            assert found["copies"] and plan["parameters"] == plan["shards"] > 0, (name, plan)
            assert not any(plan[purpose] for purpose in ("optimizer", "snapshot")), (name, plan)
            for got, want in zip(found["losses"], found["want"]):
                close(got, want)


def test_a_model_that_is_only_evaluated_has_its_shards_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDD_IN_PLACE_EDITS", "0")
    for of_rank in run_ranks(copies_scenarios.evaluated, 2):
        for found in of_rank.values():
            assert not found["copies"]
            plan = found["plan"].purposes()
            assert plan["shards"] and not any(plan[name] for name in ("parameters", "optimizer", "snapshot")), plan
            for got, want in zip(found["losses"], found["want"]):
                close(got, want)
            assert "registered for evaluation alone" in found["refused"]
