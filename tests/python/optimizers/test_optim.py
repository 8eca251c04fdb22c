"""The daemon's optimizers as torch's: numbers, state, state dicts, schedulers, scaling."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cluster import run_ranks
from optimizers import optim_cases


def close(got: Any, want: Any, tolerance: float = 2e-6) -> None:
    torch.testing.assert_close(torch.as_tensor(got), torch.as_tensor(want), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", ["adam", "adamw", "sgd", "stock-adamw", "stock-sgd"])
def test_schedulers_groups_and_clipping_give_torchs_numbers(kind: str) -> None:
    for stock, ours in run_ranks(optim_cases.both, 2, "train", kind):
        close(ours["losses"], stock["losses"])
        close(ours["norms"], stock["norms"], 2e-5)
        for name, value in stock["parameters"].items():
            close(ours["parameters"][name], value, 2e-5)
        assert list(ours["state"]) == list(stock["state"])
        for index, entry in stock["state"].items():
            assert set(ours["state"][index]) == set(entry)
            for name, value in entry.items():
                close(ours["state"][index][name], value, 2e-5)
        assert ours["counters"]["commits"] == 6 and ours["counters"]["aborts"] == 0
        assert (ours["counters"]["bytes_updated"] > 0) == (not kind.startswith("stock-"))


def test_a_group_between_the_first_backward_and_the_first_step() -> None:
    for stock, ours in run_ranks(optim_cases.both, 2, "group_after_first_forward"):
        close(ours["losses"], stock["losses"])
        assert ours["counters"]["commits"] == 4


@pytest.mark.parametrize("kind", ["adamw", "stock-adamw"])
def test_grad_scaler_grows_backs_off_and_skips_as_with_torch(kind: str) -> None:
    for stock, ours in run_ranks(optim_cases.both, 2, "scaled", kind):
        assert ours["scales"] == stock["scales"] and set(stock["scales"]) == {256.0, 512.0}
        close([x for x in ours["losses"] if x < 1e9], [x for x in stock["losses"] if x < 1e9], 1e-5)
        assert {s["step"] for s in ours["state"].values()} == {6.0}
        assert ours["counters"]["commits"] == 6  # seven, of which one was skipped


def test_loss_scaling_in_the_daemon_skips_on_all_ranks() -> None:
    for ours, reference in run_ranks(optim_cases.scaled_and_reference, 2):
        assert ours["skipped"] == [False, False, False, True, False, False]
        close(ours["losses"], reference, 1e-5)
        assert ours["steps"] == {5.0} and ours["counters"]["commits"] == 6


def test_state_is_there_from_registration_and_follows_the_steps() -> None:
    for facts in run_ranks(optim_cases.state_is_there_and_follows, 2):
        assert facts.pop("before") == 0 and facts.pop("zero") == 0 and facts.pop("step") == 1
        assert facts and all(facts.values()), facts


@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_state_dicts_are_torchs_and_load_before_and_after_registration(kind: str) -> None:
    for out in run_ranks(optim_cases.save_and_load, 2, kind, limit_s=200):
        want = out["torch went on"]
        close(out["shardd went on"], want)
        for source in ("torch", "shardd"):
            for when in ("before", "after"):
                close(out[f"{source} loaded {when}"], want)
                assert out[f"{source} {when} steps"] == ({6.0} if kind == "adam" else {None})
                assert out[f"{source} {when} counters"]["commits"] == (3 if when == "before" else 5)
        close(out["shardd loaded into torch"], want)


def test_optimizers_without_a_step_have_checkpoints_by_name() -> None:
    for out in run_ranks(optim_cases.distributed_state_dict, 2):
        close(out["loaded"], out["went on"])
        assert "layers.0.up.weight" in out["keys"]
        assert out["counters"]["commits"] == 3  # no step of zeros was made to have state


def test_an_optimizer_that_is_dropped_leaves_its_parameters_to_another() -> None:
    for counts in run_ranks(optim_cases.dropped, 2):
        assert counts["commits"] == 1 and counts["aborts"] == 0
