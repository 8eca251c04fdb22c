"""summon_full_params against torch's own FSDP, and what torch refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cluster import run_ranks
from full_param_scenarios import loads_inside, rank0_edits, refused, summoned

FORMS = pytest.mark.parametrize("impl", ["fully_shard"])
_torch: dict[Any, Any] = {}


def of_torch(function: Any, world: int) -> list[dict[str, Any]]:
    """Once for all forms."""
    key = (function, world)
    if key not in _torch:
        _torch[key] = run_ranks(function, world, "torch")
    return _torch[key]  # type: ignore[no-any-return]


def close(got: Any, want: Any, what: str) -> None:
    if isinstance(want, dict):
        assert {n.replace("_fsdp_wrapped_module.", "") for n in want} == set(got), what
        for name, value in want.items():
            close(got[name.replace("_fsdp_wrapped_module.", "")], value, f"{what}: {name}")
    elif torch.is_tensor(want):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7, msg=lambda m: f"{what}: {m}")
    else:
        assert got == want, what


@FORMS
@pytest.mark.parametrize("world", [1, 2, 3])
def test_full_parameters_and_gradients_are_torchs(impl: str, world: int) -> None:
    for rank, (ours, stock) in enumerate(zip(run_ranks(summoned, world, impl), of_torch(summoned, world))):
        for key in stock:
            if key not in ("losses", "below", "root alone", "other whole", "same objects", "rank 0 only"):
                close(ours[key], stock[key], f"rank {rank}, {key}")
        assert ours["losses"] == pytest.approx(stock["losses"], rel=1e-6)
        close(ours["read again"], ours["read"], "edits are dropped")
        close(ours["gradients again"], ours["gradients"], "edits of gradients are dropped")
        assert ours["same objects"] and ours["requires_grad"]
        assert not ours["below"]
        if rank == 0:
            close(ours["rank 0 only"], stock["rank 0 only"], "given to rank 0")
        else:
            assert ours["rank 0 only"] == [], "the other ranks hold shards"
        assert ours["root alone"] == ["embed.weight", "head.weight", "norm.bias", "norm.weight"]
        # Four contexts write back; the daemon made a version of each beside those of the steps.
        counts = ours["counters"]
        assert counts["commits"] == 5 and counts["aborts"] == 0, counts
        assert ours["version"] == 1 + counts["windows"] + 4, (ours["version"], counts)


@FORMS
@pytest.mark.parametrize("kind", ["stock", "daemon", "locked"])
def test_what_rank_0_alone_writes_back_is_everybodys(impl: str, kind: str) -> None:
    results = run_ranks(rank0_edits, 3 if kind == "stock" else 2, impl, kind)
    for facts in results:
        assert facts["versions"] == 1
        assert facts["parameters"] == 0
        assert facts["gradients"] < 1e-6
        assert facts["step"] < 1e-6
        assert facts["loss"] == pytest.approx(results[0]["loss"], rel=1e-6)


@FORMS
def test_contexts_do_not_nest_nor_open_inside_a_pass(impl: str) -> None:
    for ours, stock in zip(run_ranks(refused, 2, impl), of_torch(refused, 2)):
        for key, text in (("forward", "during forward/backward"), ("backward", "during forward/backward"),
                          ("nested", "when already unsharding"), ("nested module", "when already unsharding")):  # fmt: skip
            assert text in stock[key] and stock[key].startswith("AssertionError")
            assert text in ours[key] and ours[key].startswith("AssertionError")
        assert "entered" not in ours
        assert "leave the summon_full_params context" in ours["run inside"]
        assert "leave the summon_full_params context" in ours["layer inside"]
        assert "layers.0.up.bias" in ours["shape"] and "want (21,)" in ours["shape"]
        for key in ("loss", "loss after", "loss after that"):
            assert ours[key] == pytest.approx(stock[key], rel=1e-6)


@FORMS
def test_a_whole_state_dict_loads_inside(impl: str) -> None:
    for ours, stock in zip(run_ranks(loads_inside, 2, impl), of_torch(loads_inside, 2)):
        assert ours == {**stock, "loss": pytest.approx(stock["loss"], rel=1e-6)}
        assert ours["loaded"]
