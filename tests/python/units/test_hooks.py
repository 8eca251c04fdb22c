"""Hooks of the program on gradients: torch's arguments, and what torch makes of what they leave."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cluster import run_ranks
from units import hook_scenarios


def _same(got: Any, want: Any, where: str, exact: bool = False) -> None:
    if isinstance(want, torch.Tensor):
        assert got.shape == want.shape, where
        rtol, atol = (0, 0) if exact else (1e-4, 1e-6)
        torch.testing.assert_close(got, want, rtol=rtol, atol=atol, msg=lambda text: f"{where}: {text}")
    elif isinstance(want, list | tuple):
        assert len(got) == len(want), where
        for number, (a, b) in enumerate(zip(got, want)):
            _same(a, b, f"{where}.{number}", exact)
    else:
        assert got == want, where


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_comm_hooks_get_and_give_what_torchs_do(strategy: str) -> None:
    """On two ranks to the bit: the hooks of torch that compress too, which the daemon does in their place."""
    kinds = [
        ("clamp", True),
        ("clamp", False),
        ("default", True),
        ("fp16", False),
        ("bf16", True),
        ("clamp-mixed", True),
    ]
    cases = [(kind, strategy, orig) for kind, orig in kinds]
    ours, stock = (run_ranks(hook_scenarios.comm_hooks, 2, impl, cases) for impl in ("shardd", "torch"))
    for rank, (a, b) in enumerate(zip(ours, stock)):
        for case, got, want in zip(cases, a, b, strict=True):
            _same(got, want, f"rank {rank}: {case}", exact=case[0] != "fp16")  # denormals


def test_all_reduce_hooks_see_and_leave_what_torchs_do() -> None:
    ours, stock = (run_ranks(hook_scenarios.all_reduce_hooks, 2, impl) for impl in ("shardd", "torch"))
    for rank, (a, b) in enumerate(zip(ours, stock)):
        _same(a, b, f"rank {rank}: ")


def test_the_daemon_steps_with_what_a_comm_hook_made() -> None:
    for rank, result in enumerate(run_ranks(hook_scenarios.daemon_steps, 2)):
        for orig in (True, False):
            moved, norm, reduced = result[f"moved {orig}"]
            assert moved == 0.5 * rank and norm > 1 and reduced == 0
        assert f"want 1; rank={rank}), and the ranks' copies of a NO_SHARD model stay alike" in result["apart"]
        assert result["twice"] == "AssertionError: A communication hook is already registered"
        assert result["callable"].startswith("ValueError: The communication hook must be callable but got 3")
