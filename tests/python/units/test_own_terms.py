"""Gradients are added to what `.grad` has, by whoever; hooks run in torch's order; a second wrapper runs used units."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cluster import run_ranks
from units import own_terms


def close(got: Any, want: Any, tolerance: float = 2e-6) -> None:
    if isinstance(want, dict):
        assert list(got) == list(want)
        for name, value in want.items():
            close(got[name], value, tolerance)
        return
    torch.testing.assert_close(torch.as_tensor(got), torch.as_tensor(want), rtol=tolerance, atol=tolerance)


def both(function: Any, world: int, *arguments: Any) -> Any:
    ours, stock = (run_ranks(function, world, impl, *arguments) for impl in ("shardd", "torch"))
    return zip(ours, stock, strict=True)


@pytest.mark.parametrize("world", [2, 3])
def test_terms_of_parameters_count_wherever_autograd_reaches_them(world: int) -> None:
    for ours, stock in both(own_terms.decayed, world):
        assert len(ours["gradients"]) == len(stock["gradients"]) == 8
        for got, want in zip(ours["gradients"], stock["gradients"]):
            close(got, want, 5e-6)
        close(ours["parameters"], stock["parameters"], 5e-6)
        counters = ours["counters"]
        assert counters["commits"] == 6 and counters["aborts"] == 0
        assert counters["reductions"] == 3 * 9  # groups, backwards


def test_hooks_on_gradients_run_in_the_order_of_the_backward() -> None:
    for ours, stock in both(own_terms.hook_order, 2):
        assert ours == stock and ours[:2] == ["4.weight", "4.bias"] and len(ours) == 12


def test_parameters_that_a_load_puts_in_place_have_no_gradients() -> None:
    for ours, stock in both(own_terms.assigned, 2):
        assert ours["without"] == stock["without"] == [True] * 6
        close(ours["gradients"], stock["gradients"])


@pytest.mark.parametrize("reduced", [torch.float16, torch.float32], ids=["fp16", "fp32"])
def test_scaled_training_in_fp16_skips_and_steps_with_torch(reduced: torch.dtype) -> None:
    for ours, stock in both(own_terms.half, 2, reduced):
        assert ours["scales"] == stock["scales"] and min(ours["scales"]) < ours["scales"][1]
        close(ours["losses"], stock["losses"], 2e-3)
        close(ours["parameters"], stock["parameters"], 2e-3)
        assert ours["counters"]["reductions"] == 3 * 5 and ours["counters"]["aborts"] == 0


@pytest.mark.parametrize("orig", [True, False], ids=["original", "flat"])
def test_a_second_wrapper_around_units_that_have_trained_runs_them(orig: bool) -> None:
    for ours, stock in both(own_terms.wrapped_again, 2, orig):
        close(ours["seen"], stock["seen"], 1e-5)
        close(ours["summoned"], stock["summoned"], 1e-5)
        close(ours["state"], stock["state"], 1e-5)
        assert ours["roots"] == stock["roots"] == (True, True)
        counters = ours["counters"]
        assert ours["of second"] == counters["commits"] and counters["aborts"] == 0
        assert counters["commits"] >= 7 and counters["reductions"] == 2 * 8, counters
