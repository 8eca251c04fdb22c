"""State dicts of fully_shard: through torch.distributed.checkpoint, in this world and in others, with every option."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cluster import run_ranks
from state_dicts import state_dict_cases


def same(got: Any, want: Any, where: str = "", tolerance: float = 0.0) -> None:
    """Equal structures with equal values."""
    if isinstance(want, dict):
        assert sorted(map(str, got)) == sorted(map(str, want)), where
        for key, item in want.items():
            same(got[key], item, f"{where}.{key}", tolerance)
    elif isinstance(want, (list, tuple)):
        assert len(got) == len(want), where
        for index, item in enumerate(want):
            same(got[index], item, f"{where}.{index}", tolerance)
    elif torch.is_tensor(want):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, msg=lambda text: f"{where}: {text}")
    elif isinstance(want, float):
        assert got == pytest.approx(want, rel=max(tolerance, 1e-6), abs=1e-6), where
    else:
        assert got == want, where


@pytest.mark.parametrize(
    ("kind", "world", "mesh", "others"), [("adamw", 2, (), (1, 3)), ("stock-adamw", 4, (2, 2), (2,))]
)
def test_checkpoints_load_in_other_worlds_wrappings_and_implementations(
    kind: str, world: int, mesh: tuple[int, ...], others: tuple[int, ...], tmp_path: Path
) -> None:
    saved = run_ranks(state_dict_cases.save_for_others, world, str(tmp_path), kind, mesh)[0]
    assert "layers.0.up.weight" in saved["shardd"]["state"]["model"]  # no prefix of the checkpoint wrapper's
    assert "layers.2.up.weight" in saved["shardd"]["state"]["optimizer"]["state"]
    same(saved["shardd"]["state"], saved["torch"]["state"], tolerance=2e-5)
    same(saved["shardd"]["went on"], saved["torch"]["went on"], tolerance=2e-6)
    assert saved["counters"]["commits"] >= 4
    for other in others:
        for out in run_ranks(state_dict_cases.load_of_others, other, str(tmp_path), kind):
            for name in ("shardd in shardd", "torch in shardd", "shardd in torch"):
                source = name.split()[0]
                same(out[name]["state"], saved[source]["state"], f"{other}: {name}")
                same(out[name]["went on"], saved[source]["went on"], f"{other}: {name}", 2e-6)
            late = int(kind != "adamw")  # torch's last step is committed where the next pass begins
            assert out["shardd counters"]["commits"] >= 2 - late
            assert out["torch counters"]["commits"] >= 3 - late


@pytest.mark.parametrize("kind", ["adamw", "stock-adamw"])
def test_every_option_gets_what_torch_gets_and_sets_it(kind: str) -> None:
    for rank, out in enumerate(run_ranks(state_dict_cases.all_options, 2, kind, limit_s=200)):
        assert len(out["got"]) == 16
        for label, got in out["got"].items():
            for ours, theirs in zip(got["shardd"], got["torch"]):
                same(ours[0], theirs[0], f"{label}: kinds")
                same(ours[1], theirs[1], label, 2e-5)
            model = got["shardd"][0][0]
            if "full_state_dict,cpu_offload" in label and rank == 1:
                assert model == {}
            else:
                assert ("layers.1.norm.weight" in model) != ("ignore_frozen_params" in label)
        assert len(out["set"]) == 7
        for label, (state, went_on) in out["set"].items():
            same(state, out["want"][0], label, 2e-5)
            same(went_on, out["want"][1], label, 2e-6)
        assert out["counters"]["commits"] >= 1


# Also: a tensor that is saved alone takes its own bytes, and state that is not there is made to be loaded into.
def test_background_saves_are_whole_and_a_failed_load_fails_everywhere(tmp_path: Path) -> None:
    for rank, out in enumerate(run_ranks(state_dict_cases.small_promises, 2, str(tmp_path))):
        assert out["async"] and out["went on"] and out["changed"]
        size, rows = out["alone"]
        assert rows <= size < rows + 2048
        size, rows = out["all alone"]
        assert rows <= size < rows + 2048 * 40
        assert out["state made"]
        assert out["steps"] == 1  # of two, the second being committed where the next pass begins
        if rank == 1:
            assert out["failed"].startswith("ValueError") and "not a count" in out["failed"]
        else:
            assert "given up on all ranks, because rank 1 failed (ValueError" in out["failed"]
        assert out["failed in"] < 20
        same(out["after"], out["reference"], tolerance=2e-6)
