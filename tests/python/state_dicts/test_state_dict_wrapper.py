"""State dicts of FullyShardedDataParallel: three kinds, optimizers, other wrappings and worlds, against torch's class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cluster import run_ranks
from state_dicts import wrapper_state_cases
from state_dicts.test_state_dict import same


def _check_loaded(out: dict[str, Any], want: dict[str, Any], went_on: list[float], where: str) -> None:
    same(out["model"], want["model"], f"{where} model", 2e-5)
    same(out["optimizer"]["state"], want["optimizer"]["state"], f"{where} optimizer", 2e-5)
    same(out["went on"], went_on, where, 2e-6)


@pytest.mark.parametrize(("kind", "mesh"), [("stock-adamw", False)])
def test_every_kind_is_as_torchs_and_loads_into_other_wrappings(kind: str, mesh: bool) -> None:
    results = run_ranks(wrapper_state_cases.save_all, 2, kind, mesh, limit_s=200)
    for rank, out in enumerate(results):
        ours, theirs = out["shardd"]["saved"], out["torch"]["saved"]
        same(out["shardd"]["before"], out["torch"]["before"])
        assert list(out["shardd"]["before"]) == list(out["torch"]["before"])  # the same order, too
        for name in ("full", "sharded"):
            same(ours[name]["model"], theirs[name]["model"], name, 2e-5)
            for part in ("kinds", "settings"):
                same(ours[name][part], theirs[name][part], name)
            same(ours[name]["optimizer"]["param_groups"], theirs[name]["optimizer"]["param_groups"], name)
        same(ours["layer"], theirs["layer"], tolerance=2e-5)
        same(ours["full"]["model"], out["alone"]["model"], tolerance=2e-5)
        want = out["alone"]["optimizer"]
        states = [ours["full"]["optimizer"], ours["sharded"]["optimizer"], ours["legacy full"], ours["legacy sharded"]]
        for state in [*states, ours["by name"]]:
            same(state["state"], want, tolerance=2e-5)
        same(ours["by id"]["state"], out["alone"]["by id"], tolerance=2e-5)
        same(ours["by id"]["param_groups"], theirs["by id"]["param_groups"])
        same(ours["by name"]["param_groups"], theirs["by name"]["param_groups"])
        if rank == 0:
            same(ours["rank 0"]["model"], theirs["full"]["model"], tolerance=2e-5)
            same(ours["rank 0"]["optimizer"]["state"], want, tolerance=2e-5)
        assert "layers.0.up.weight" in ours["sharded"]["model"]
        assert (ours["rank 0"]["model"] == {}) == (rank == 1) == (ours["rank 0"]["optimizer"] == {})
        same(out["shardd"]["went on"], out["torch"]["went on"], tolerance=2e-6)
        size, numbers = out["lone"]
        assert numbers <= size < numbers + 2048
        assert out["counters"]["commits"] >= 4
    saved, went_on = results[0]["shardd"]["saved"]["full"], results[0]["shardd"]["went on"]
    total = sum(v.numel() for n, v in saved["model"].items() if n != "bias")
    others = run_ranks(wrapper_state_cases.load_all, 3, kind, saved, limit_s=200)
    assert sum(out["pieces"] for out in others) == total  # each rank its own
    for rank, out in enumerate(others):
        for way in ("full", "rank 0", "sharded", "local", "legacy", "scatter"):
            _check_loaded(out[way], saved, went_on, f"{rank} {way}")
            assert out[f"{way} counters"]["commits"] >= 1
        assert "size mismatch for" in out["error"] and "norm.weight" in out["error"]
        assert out["missing"] == ["layers.1.norm.weight"]


@pytest.mark.parametrize("kind", ["stock-adamw"])
def test_checkpoints_of_the_wrapper_load_in_another_world(kind: str, tmp_path: Path) -> None:
    saved = run_ranks(wrapper_state_cases.dcp_save, 2, str(tmp_path), kind)
    for rank, out in enumerate(saved):
        ours, theirs = out["shardd"], out["torch"]
        for part in ("kinds", "went on"):
            same(ours[part], theirs[part], part, 2e-5)
        same(ours["state"]["model"], theirs["state"]["model"], tolerance=2e-5)
        same(ours["state"]["optimizer"]["state"], out["alone"]["optimizer"], tolerance=2e-5)
        if rank == 0:
            same(ours["full"][0], theirs["full"][0], tolerance=2e-5)
            same(ours["full"][1]["state"], out["alone"]["optimizer"], tolerance=2e-5)
        assert (out["shardd"]["full"][0] == {}) == (rank == 1)
    for world in (1, 3):
        for out in run_ranks(wrapper_state_cases.dcp_load, world, str(tmp_path), kind):
            for state in out["from files"]:
                same(state, saved[0]["alone"]["model"], tolerance=2e-5)
            for name in ("shardd in shardd", "torch in shardd", "shardd in torch", "shardd in shardd from rank 0"):
                where = f"{world}: {name}"
                source = saved[0]["alone"]
                same(out[name]["state"]["model"], source["model"], where, 2e-5)
                if name == "torch in shardd":
                    continue  # its optimizer state was wrong when it was saved
                if name != "shardd in torch":
                    same(out[name]["state"]["optimizer"]["state"], source["optimizer"], where, 2e-5)
                same(out[name]["went on"], source["went on"], where, 2e-6)
            assert out["shardd in shardd counters"]["commits"] >= 1


def test_the_form_without_a_wrapper_has_the_same_state_dicts(tmp_path: Path) -> None:
    for rank, out in enumerate(run_ranks(wrapper_state_cases.composable, 2, str(tmp_path), "adamw", limit_s=200)):
        want = out["alone"]
        for form, made in (("policy", "ShardedTensor"), ("by hand", "DTensor")):
            got = out[form]
            assert list(got["before"]) == list(want["model"])
            for name in ("full", "sharded"):
                same(got[name][1], want["model"], f"{form} {name}", 2e-5)
                same(got[f"{name} optimizer"]["state"], want["optimizer"], f"{form} {name}", 2e-5)
            assert got["sharded"][0]["layers.0.up.weight"] == (made, (21, 10)), "DTensors where a mesh was given"
            assert len(got["local"][0]["layers.0.up.weight"][1]) == 1, "a piece"
            assert got["rank 0"] == (len(want["model"]) if rank == 0 else 0)
            layer = {n.removeprefix("layers.2."): v for n, v in want["model"].items() if n.startswith("layers.2.")}
            same(got["layer"], layer, form, 2e-5)
            for name in ("wrapper", "other form", "dcp"):
                same(got[f"in {name}"], want["went on"], f"{form} in {name}", 2e-6)
                assert got[f"in {name} commits"] >= 2
            same(got["loss without"], want["went on"][:1], form, 2e-6)
            same(got["went on"], want["went on"], form, 2e-6)
            assert got["commits"] == 5
