"""Optimizer state dicts of FullyShardedDataParallel, of the daemon's optimizers and torch's, over original parameters and
FlatParameters, against torch's class and against one process without a wrapper."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cluster import run_ranks
from state_dicts import optim_state_cases, world_state_cases
from state_dicts.optim_state_cases import Saved
from state_dicts.test_state_dict import same

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
    assert ours["broadcasts"] == 0  # it is read where it lies
    assert len(ours["alike"]) == 8 and all(ours["alike"].values()), f"{case}: {ours['alike']}"
    same(ours["full"][1]["state"], out["alone"]["optimizer"], str(case), 2e-5)
    for name in ("full", "sharded") if out["torch"] is not None else ():
        for mine, theirs in zip(ours[name], out["torch"]["functions"][name]):
            same(mine, theirs, f"{case} {name}", 2e-5)


def test_every_optimizer_saves_as_torchs_and_loads_every_way() -> None:
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
            if label.startswith("sharded "):  # a FlatParameter is made of whole values; else rows go where they belong
                assert (loaded["gathered"] == 0) == CASES[int(label.rsplit(" ", 1)[1])].orig, label
        assert any(CASES[int(k.rsplit(" ", 1)[1])].orig for k in out["loaded"] if k.startswith("sharded "))
        errors = out["refused"]
        assert '"exp_avg" of "layers.1.up.weight": wrong shape (got (3, 2), want (21, 10))' in errors["shape"]
        assert "(got torch.float64, want torch.float32)" in errors["dtype"]
        assert "its names differ" in errors["names"]
        assert '"step" of "layers.1.up.' in errors["step"] and "use_orig_params=True" in errors["step"]
        assert "no `state`" in errors["nothing"]
        assert "are in one FlatParameter" in errors["rekey"]
        assert all(out["local"])


def test_checkpoints_of_every_form_load_in_other_worlds_and_forms(tmp_path: Path) -> None:
    saved_as = [Saved("adamw", orig=False), Saved("stock-adamw", orig=True), Saved("sgd", orig=True, tie=True)]
    # DTensors: of a ShardedTensor that a rank has no row of torch's reader loses the name, with torch's class too.
    into = [
        Saved("adamw", orig=True, mesh=True),
        Saved("stock-adamw", orig=False, mesh=True),
        Saved("sgd", orig=False, mesh=True, tie=True),
    ]
    saved = run_ranks(world_state_cases.dcp_save, 2, str(tmp_path), saved_as)[0]
    for case, out in zip(saved_as, saved):
        same(out["state"]["optimizer"]["state"], out["alone"]["optimizer"], str(case), 2e-5)
        assert out["counters"]["commits"] >= 2
    for world in (1, 3):
        for results in run_ranks(world_state_cases.dcp_load, world, str(tmp_path), saved_as, into):
            assert len(results) == len(saved_as) * (2 if world == 1 else 1)
            for out in results:
                want, where = saved[out["number"]]["alone"], f"{world}: {saved_as[out['number']]}"
                same(out["state"]["model"], want["model"], where, 2e-5)
                same(out["state"]["optimizer"]["state"], want["optimizer"], where, 2e-5)
                same(out["went on"], want["went on"], where, 2e-5)
                assert not out["counters"] or out["counters"]["commits"] >= 1


def test_replicas_save_as_torch_does_and_load_on_fewer_ranks(tmp_path: Path) -> None:
    results = run_ranks(world_state_cases.replicas, 4, str(tmp_path), "adamw", limit_s=250)
    pieces: dict[tuple[str, int], int] = {}
    for rank, out in enumerate(results):
        want = out["alone"]
        for strategy, orig in world_state_cases.REPLICATED:
            where = f"rank {rank}: {strategy} {orig}"
            ours, theirs = out[f"{strategy} {orig} shardd"], out[f"{strategy} {orig} torch"]
            for kind in ("full", "sharded"):
                same(ours[kind]["kinds"], theirs[kind]["kinds"], f"{where} {kind}")
                same(ours[kind]["model"], want["model"], f"{where} {kind}", 2e-5)
                same(ours[kind]["optimizer"]["state"], want["optimizer"], f"{where} {kind}", 2e-5)
                same(ours[kind]["optimizer"]["param_groups"], theirs[kind]["optimizer"]["param_groups"], where)
            same(ours["local again"], want["model"], where, 2e-5)
            if strategy == "NO_SHARD":
                same(ours["local"]["model"], want["model"], where, 2e-5)
            else:
                numel = sum(v.numel() for n, v in ours["local"]["model"].items() if n != "bias")
                pieces[f"{strategy} {orig}", rank // 2] = pieces.get((f"{strategy} {orig}", rank // 2), 0) + numel
            model, optimizer = ours["rank 0"]
            first = strategy == "NO_SHARD" or rank % 2 == 0  # of each group that shards, as torch's
            assert (model != {}) == first and (optimizer != {}) == (rank == 0), where
            if rank == 0:
                same([model, optimizer["state"]], [want["model"], want["optimizer"]], where, 2e-5)
            same(ours["went on"], want["went on"], where, 2e-5)
            assert ours["counters"]["commits"] >= 4
    total = sum(v.numel() for n, v in results[0]["alone"]["model"].items() if n != "bias")
    assert pieces == {(f"HYBRID_SHARD {orig}", half): total for orig in (True, False) for half in (0, 1)}

    saved_as = [Saved("adamw", orig=orig) for _, orig in world_state_cases.REPLICATED]
    into = [Saved("adamw", orig=not case.orig, mesh=True) for case in saved_as]
    want = results[0]["alone"]
    for loaded in run_ranks(world_state_cases.dcp_load, 2, str(tmp_path), saved_as, into):
        for out in loaded:
            where = str(world_state_cases.REPLICATED[out["number"]])
            same(out["state"]["model"], want["model"], where, 2e-5)
            same(out["state"]["optimizer"]["state"], want["optimizer"], where, 2e-5)
            same(out["went on"], want["went on"], where, 2e-5)
            assert out["counters"]["commits"] >= 1
