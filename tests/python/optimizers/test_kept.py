"""Gradients that some ranks alone have, on top of earlier ones that the program has in tensors of its own, and hooks on them."""

from __future__ import annotations

import pytest
import torch

from cluster import run_ranks
from optimizers.kept_scenarios import HALVE, Script, gradients, hooks

_ALLOWED = {"SHARDD_ALLOW_MISSING_CONTRIBUTION": "1"}
# With two ranks, rank 1 alone holds elements of a bias of the wrapper's, and rank 0 of half a weight.
_ALL, _FIRST, _LAST, _NONE = ([0, 1],) * 2, ([0, 1], [1]), ([1], [0, 1]), ([1], [1])
_THREE: list[tuple[list[int], ...]] = [([0, 1],) * 3, ([0, 1], [1], [1]), ([1], [1], [0, 1]), ([1], [0, 1], [1])]
_CASES: dict[str, tuple[str, torch.dtype, Script]] = {
    "cast": ("original", torch.bfloat16, [_ALL, _FIRST, _LAST, _FIRST]),
    "cast, of units": ("experts", torch.bfloat16, [_ALL, _FIRST, _LAST]),
    "replaced": ("original", torch.float32, [_ALL, HALVE, _FIRST, HALVE, _LAST]),
    "replaced, of units": ("experts", torch.float32, [_ALL, HALVE, _FIRST, HALVE, _LAST]),
    "given by nobody in between": ("original", torch.bfloat16, [_ALL, _NONE, _FIRST, _NONE]),
    "on three ranks": ("original", torch.bfloat16, list(_THREE)),
    "replaced on three ranks": ("original", torch.float32, [_THREE[0], HALVE, *_THREE[1:]]),
}


def _check(results: list[list[tuple[str, torch.Tensor, torch.Tensor]]], dtype: torch.dtype) -> None:
    for rank, result in enumerate(results):
        assert result
        for what, got, want in result:
            # Of a bfloat16's 8 bits, and of the parameters' own, which are less than 1.
            rounding = 0.004 if what.startswith("updated") else 0.03 * float(want.abs().max())
            scale = rounding if dtype == torch.bfloat16 else 1e-4 * float(want.abs().max())
            where = f"rank {rank}: {what}: got {got.tolist()[:4]}, want {want.tolist()[:4]}"
            torch.testing.assert_close(got, want, rtol=0, atol=scale + 1e-6, msg=where)


@pytest.mark.parametrize("name", _CASES)
def test_what_others_give_is_added_to_what_the_program_keeps_once(name: str) -> None:
    form, dtype, script = _CASES[name]
    world = len(script[0])
    _check(run_ranks(gradients, world, form, dtype, script, environment=_ALLOWED), dtype)


@pytest.mark.parametrize("last", [_NONE, _FIRST], ids=["nobody gives", "others give"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["cast", "replaced"])
def test_the_daemon_steps_with_what_the_program_keeps(dtype: torch.dtype, last: tuple[list[int], ...]) -> None:
    script: Script = [_ALL, HALVE, last]
    _check(run_ranks(gradients, 2, "original", dtype, script, True, environment=_ALLOWED), dtype)


@pytest.mark.parametrize("ran", [([3, 0, 2], [1]), ([0, 1, 2, 3], [2, 0, 3])], ids=["others", "another order"])
@pytest.mark.parametrize("form", ["experts", "root"])
def test_hooks_run_in_one_order_on_all_ranks(form: str, ran: tuple[list[int], ...]) -> None:
    results = run_ranks(hooks, 2, form, ran, environment=_ALLOWED)
    for order, sums, true in results:
        assert order == results[0][0] and len(order) > 3
        assert sums == pytest.approx(true, rel=1e-4)
