"""summon_full_params against torch's own FSDP, and what torch refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cluster import run_ranks
from full_params.full_param_scenarios import (
    flat_parameters,
    full_state_dicts,
    loads_inside,
    rank0_edits,
    refused,
    summoned,
)
from models import Case, train_alone

FORMS = pytest.mark.parametrize("impl", ["shardd", "fully_shard"])
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


@pytest.mark.parametrize("impl, world", [("shardd", 1), ("shardd", 2), ("shardd", 3), ("fully_shard", 2)])
def test_full_parameters_and_gradients_are_torchs(impl: str, world: int) -> None:
    for rank, (ours, stock) in enumerate(zip(run_ranks(summoned, world, impl), of_torch(summoned, world))):
        for key in stock:
            if key not in ("losses", "below", "root alone", "other whole", "same objects", "rank 0 only"):
                close(ours[key], stock[key], f"rank {rank}, {key}")
        assert ours["losses"] == pytest.approx(stock["losses"], rel=1e-6)
        kept = 1 if world > 1 else 1.01
        close(ours["read again"], {n: kept * v for n, v in ours["read"].items()}, "edits are dropped")
        close(ours["gradients again"], ours["gradients"], "edits of gradients are dropped")
        assert ours["same objects"] and ours["requires_grad"]
        # In layout flat a small parameter may be whole on one rank.
        large = ("up.weight", "down.weight")
        below = [name for name in ours["below"] if impl == "fully_shard" or name.endswith(large)]
        assert world == 1 or not below
        assert ours["root alone"] == ["embed.weight", "head.weight", "norm.bias", "norm.weight"]
        # Four contexts write back; the daemon made a version of each beside those of the passes.
        counts = ours["counters"]
        assert counts["commits"] == 5 and counts["aborts"] == 0, counts
        assert ours["version"] == 1 + counts["passes"] + (4 if world > 1 else 11), (ours["version"], counts)


@pytest.mark.parametrize(
    "impl, kind", [("shardd", "stock"), ("shardd", "locked"), ("fully_shard", "daemon"), ("fully_shard", "stock")]
)
def test_what_rank_0_alone_writes_back_is_everybodys(impl: str, kind: str) -> None:
    results = run_ranks(rank0_edits, 3 if kind == "stock" else 2, impl, kind)
    for facts in results:
        assert facts["versions"] == 1 or kind == "stock"  # where each pass makes one, too
        assert facts["parameters"] == 0
        assert facts["gradients"] < 1e-6
        assert facts["step"] < 1e-6
        assert facts["loss"] == pytest.approx(results[0]["loss"], rel=1e-6)


def test_flat_parameters_show_their_originals() -> None:
    for ours, stock in zip(run_ranks(flat_parameters, 2, "shardd"), of_torch(flat_parameters, 2)):
        for key in ("inside", "one layer", "final"):
            close(ours[key], stock[key], key)
        for key in ("outside", "outside again"):
            assert ours[key] == [("_flat_param",)] * 4 and sorted(stock[key]) == ours[key]
        assert ours["losses"] == pytest.approx(stock["losses"], rel=1e-6)


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


def test_a_whole_state_dict_loads_inside() -> None:
    for ours, stock in zip(run_ranks(loads_inside, 2, "fully_shard"), of_torch(loads_inside, 2)):
        assert ours == {**stock, "loss": pytest.approx(stock["loss"], rel=1e-6)}
        assert ours["loaded"]


@pytest.mark.parametrize("edits", [True, False], ids=["edits", "no edits"])
def test_full_state_dicts_come_from_the_job_and_change_nothing(edits: bool) -> None:
    want = train_alone(Case(steps=3), 3)["losses"]
    for rank, out in enumerate(run_ranks(full_state_dicts, 3, edits)):
        assert len(out["same"]) == (18 if edits else 9) and all(out["same"])
        # Without a job values are gathered between ranks, afterwards none; buffers are plain tensors.
        assert len(out["gathered by torch"]) == 2 and all(len(names) > 20 for names in out["gathered by torch"])
        assert out["gathered"] == [[]] * (len(out["same"]) // 3 * 2 - 2)
        if not edits:
            assert out["losses"] == pytest.approx(want[rank], rel=1e-5)
        assert out["counters"]["commits"] >= 3 and out["counters"]["aborts"] == 0
