"""Optimizer state dicts of FullyShardedDataParallel, of the daemon's optimizers and torch's, over original parameters and
FlatParameters, against torch's class and against one process without a wrapper."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optim_state_cases
import world_state_cases
from cluster import run_ranks
from optim_state_cases import Saved
from test_state_dict import same

CASES = [
    Saved("adamw", orig=True),
    Saved("adamw", orig=False, mesh=True),
    Saved("adam", orig=True, tie=True),
    Saved("adam", orig=False, freeze=("layers.0.up", "head.weight")),
    Saved("sgd", orig=True),
    Saved("sgd", orig=False, tie=True),
    Saved("stock-adamw", orig=False),
]


def _check_functions(out: dict[str, Any], case: Saved) -> None:
    ours = out["shardd"]["functions"]
    assert len(ours["alike"]) == 8 and all(ours["alike"].values()), f"{case}: {ours['alike']}"
    same(ours["full"][1]["state"], out["alone"]["optimizer"], str(case), 2e-5)
    for name in ("full", "sharded") if out["torch"] is not None else ():
        for mine, theirs in zip(ours[name], out["torch"]["functions"][name]):
            same(mine, theirs, f"{case} {name}", 2e-5)


def test_every_optimizer_is_saved_as_torchs_and_loads_in_every_way() -> None:
    for out in run_ranks(optim_state_cases.run, 2, CASES, limit_s=250):
        for case, saved in zip(CASES, out["saved"]):
            _check_functions(saved, case)
            same(saved["shardd"]["model"]["full"][2], saved["alone"]["model"], str(case), 2e-5)
            for name in ("full", "sharded") if saved["torch"] is not None else ():
                for mine, theirs in zip(saved["shardd"]["model"][name], saved["torch"]["model"][name]):
                    same(mine, theirs, f"{case} {name}", 2e-5)
            same(saved["shardd"]["went on"], saved["alone"]["went on"], str(case), 2e-5)
            same(saved["shardd"]["without"], saved["alone"]["went on"], f"{case} without a wrapper", 2e-5)
            assert saved["shardd"]["counters"]["commits"] >= 4
        for label, loaded in out["loaded"].items():
            want = out["saved"][int(label.rsplit(" ", 1)[1])]["alone"]
            same(loaded["model"], want["model"], label, 2e-5)
            same(loaded["state"]["state"], want["optimizer"], label, 2e-5)
            same(loaded["went on"], want["went on"], label, 2e-5)
            assert loaded["counters"]["commits"] >= 1
        errors = out["refused"]
        assert '"exp_avg" of "layers.1.up.weight": wrong shape (got (3, 2), want (21, 10))' in errors["shape"]
        assert "(got torch.float64, want torch.float32)" in errors["dtype"]
        assert "its names differ" in errors["names"]
        assert '"step" of "layers.1.up.' in errors["step"] and "use_orig_params=True" in errors["step"]
        assert "no `state`" in errors["nothing"]
        assert "are in one FlatParameter" in errors["rekey"]
        assert all(out["local"])


def test_checkpoints_of_every_form_load_on_one_rank_in_other_forms_and_without_a_wrapper(tmp_path: Path) -> None:
    saved_as = [Saved("adamw", orig=False), Saved("stock-adamw", orig=True), Saved("sgd", orig=True, tie=True)]
    into = [Saved("adamw", orig=True), Saved("stock-adamw", orig=False, mesh=True), Saved("sgd", orig=False, tie=True)]
    saved = run_ranks(world_state_cases.dcp_save, 2, str(tmp_path), saved_as)[0]
    for case, out in zip(saved_as, saved):
        same(out["state"]["optimizer"]["state"], out["alone"]["optimizer"], str(case), 2e-5)
        assert out["counters"]["commits"] >= 2
    for results in run_ranks(world_state_cases.dcp_load, 1, str(tmp_path), saved_as, into):
        assert len(results) == 2 * len(saved_as)
        for out in results:
            want, where = saved[out["number"]]["alone"], str(saved_as[out["number"]])
            same(out["state"]["model"], want["model"], where, 2e-5)
            same(out["state"]["optimizer"]["state"], want["optimizer"], where, 2e-5)
            same(out["went on"], want["went on"], where, 2e-5)
            assert not out["counters"] or out["counters"]["commits"] >= 1
