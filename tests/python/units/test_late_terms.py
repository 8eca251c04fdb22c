"""What autograd adds to `.grad` while gradients are on their way: nothing of it is lost, and nothing of the daemon's."""

from __future__ import annotations

import pytest
import torch

from cluster import run_ranks
from units import late_terms

PLANS = {
    "late": "s0 s1t = 0 1 t",
    "later": "s0t s1t s2t = 0 1 2 t t t",
    "kept": "s0 s1T s2T = 0 1 2 t t",
    "graph": "s0 s1tg = 0 1 t",
    "unsynchronised": "s0 n1t s2t = 0 1 2 t t",
    "after unsynchronised": "s0 n1 s2t = 0 1 2 t",
    "zeroed between": "s0t s1t zero s2t = 2 t",
    "dropped between": "s0t s1t none s2t = 2 t",
    "across a step": "s0 s1t step s2t s0 = 0 0 1 2 t t",
}
UNREDUCED = {  # what is not reduced stays, as with PyTorch's fully_shard
    "zeroed before it is reduced": "s0 n1t zero s2t = 1 2 t",
    "dropped before it is reduced": "s0 n1t none s2t = 1 2 t",
    "stepped before it is reduced": "s0 n1t step s2t = 0 1 2 t t",
    "stepped and dropped before it is reduced": "s0 n1t step none s2t = 1 2 t",
}
FAILED = {"failed": "s0 f1 s1t = 0 1 t", "failed and dropped": "s0 f1 none s1t = 1 t"}
LOOKED_AT = {
    "clipped": "s0 n1t clip s2t = 0 1 2 t t",
    "clipped and stepped": "s0 s1t clip step none s2t = 2 t",
    "summoned": "s0 s1t full s2t full = 0 1 2 t t",
}


def _check(impl: str, form: str, world: int, plans: dict[str, str]) -> None:
    for rank, found in enumerate(run_ranks(late_terms.accumulated, world, impl, form, plans)):
        assert list(found) == list(plans)
        rtol, atol = (3e-2, 5e-3) if form == "bfloat16" else (2e-6, 2e-6)
        for name, pairs in found.items():
            for got, want in pairs:
                torch.testing.assert_close(
                    got, want, rtol=rtol, atol=atol, msg=lambda text, n=name, r=rank: f"{n}, rank {r}: {text}"
                )


@pytest.mark.parametrize(("form", "world"), [("float32", 2), ("float32", 3), ("bfloat16", 2)])
@pytest.mark.parametrize("impl", ["torch", "shardd"])
def test_terms_of_sharded_parameters_are_added_in_every_order(impl: str, form: str, world: int) -> None:
    _check(impl, form, world, PLANS | UNREDUCED)


def test_a_backward_that_fails_leaves_nothing_of_its_terms() -> None:
    _check("shardd", "float32", 2, FAILED)


@pytest.mark.parametrize("form", ["orig", "flat"])
def test_terms_are_added_to_what_wrappers_show(form: str) -> None:
    _check("shardd", form, 2, PLANS | (LOOKED_AT if form == "orig" else {}))


def test_shown_gradients_stay_unchanged_until_the_backward_ends() -> None:
    for found in run_ranks(late_terms.watched, 2):
        assert found["reduced"]
        for before, inside in zip(found["before"], found["inside"], strict=True):
            torch.testing.assert_close(inside, before, rtol=0, atol=0)
