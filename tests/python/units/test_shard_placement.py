"""``fully_shard(shard_placement_fn=...)`` that cuts other dimensions than the first: as torch's own, everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cluster import run_ranks
from full_params import full_param_scenarios
from job import edit_scenarios
from models import PLACED, Case
from state_dicts import safetensors_cases, state_dict_cases
from state_dicts.test_state_dict import same
from state_dicts.test_state_dict_safetensors import read
from torchrun import relaunched
from training import resume_scenarios
from training.test_parity import check_results
from units import placement_scenarios

_CASES: dict[int, list[Case]] = {
    2: [
        Case(steps=5, clip=0.1),
        Case(steps=5, accumulate=3, sync=False, reshard=False, stock=True),
        Case(steps=5, tie=True, reshard=True),
        Case(steps=5, freeze=("layers.0.up.weight",), skip_grad=(1,), wrap="list"),
        Case(steps=5, checkpoint="reentrant", divide=3.0),
        Case(steps=5, param_dtype="bf16", reduce_dtype="fp32", mixed={0: ("", "bf16")}, stock=True),
    ],
    4: [
        Case(steps=5, mesh=(2, 2), accumulate=3, all_reduce=False, clip=0.1),
        Case(steps=5, mesh=(4, 1), stock=True),
    ],
}


@pytest.mark.parametrize("world", [2, 4])
def test_training_is_torchs(world: int) -> None:
    results = run_ranks(placement_scenarios.several, world, _CASES[world], limit_s=240, environment=PLACED)
    for number, case in enumerate(_CASES[world]):
        tolerance = 1e-2 if case.param_dtype else 2e-6
        own = [result[number] for result in results]
        ours = check_results(case, own, tolerance, alone=not case.param_dtype)[0]["shardd"]
        assert "Shard(dim=1)" in ours["placements"]["layers.2.up.weight"]
        assert "Shard(dim=0)" in ours["placements"]["layers.2.down.weight"] or world == 4


@pytest.mark.parametrize(
    ("world", "kind", "mesh", "reshard"),
    [(2, "adamw", (2,), True), (2, "stock-adam", (2,), False), (4, "stock-sgd", (2, 2), 2)],
    ids=["daemon", "torch", "hybrid"],
)
def test_parameters_gradients_and_states_of_any_shape_are_torchs(
    world: int, kind: str, mesh: tuple[int, ...], reshard: Any
) -> None:
    for rank, (stock, ours) in enumerate(run_ranks(placement_scenarios.both, world, kind, mesh, reshard)):
        for name in ("contiguous", "seen", "same objects", "full kinds", "sharded kinds"):
            assert ours[name] == stock[name], (rank, name)
        assert all(c for step in ours["contiguous"] for p in step for x in p for c in x[:2])
        assert {str(p[0][3][-1]) for p in ours["contiguous"][0]} == {"S(0)", "S(1)"}
        for name in ("losses", "norms", "gradients", "unsharded", "full", "sharded", "second", "parameters"):
            same(ours[name], stock[name], f"{rank} {name}", 2e-5)
        same(ours["unsharded"], ours["full"][0]["project.weight"])
        late = int(kind != "adamw")
        first, second = ours["counters"]
        assert first["commits"] >= 4 - late and second["commits"] >= 2 - late
        assert first["bytes_reduced"] >= 4 * world * 4 * sum(v.numel() for v in ours["full"][0].values())


def test_checkpoints_load_in_other_worlds_and_in_torch(tmp_path: Path) -> None:
    kind = "stock-adamw"
    saved = run_ranks(state_dict_cases.save_for_others, 2, str(tmp_path), kind, (), environment=PLACED)[0]
    same(saved["shardd"]["state"], saved["torch"]["state"], tolerance=2e-5)
    assert saved["counters"]["commits"] >= 4
    for environment in (PLACED, {}):  # other dimensions are cut, or rows
        for out in run_ranks(state_dict_cases.load_of_others, 3, str(tmp_path), kind, environment=environment):
            for name in ("shardd in shardd", "torch in shardd", "shardd in torch"):
                same(out[name]["state"], saved[name.split()[0]]["state"], name)
                same(out[name]["went on"], saved[name.split()[0]]["went on"], name, 2e-6)


def test_full_parameters_and_gradients_are_read_and_written_back() -> None:
    for results in run_ranks(placement_scenarios.summoned, 2):
        for facts in results:  # with in-place edits, and without
            assert facts["read"] and facts["gradients"] and facts["stepped"]
            assert facts["counters"]["commits"] == 1  # the step


def test_full_parameters_in_training_are_torchs() -> None:
    stock = run_ranks(full_param_scenarios.summoned, 2, "torch")
    for ours, theirs in zip(run_ranks(full_param_scenarios.summoned, 2, "fully_shard", environment=PLACED), stock):
        for name in ("read", "gradients", "stepped", "between", "final"):
            want = {n.replace("_fsdp_wrapped_module.", ""): v for n, v in theirs[name].items()}
            same(ours[name], want, name, 1e-6)
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-6)
        assert ours["counters"]["commits"] == 5


def test_edits_between_passes_are_those_of_torch(tmp_path: Path) -> None:
    for stock, ours in run_ranks(
        edit_scenarios.both_edited, 2, "adamw", str(tmp_path), limit_s=200, environment=PLACED
    ):
        same(ours["losses"], stock["losses"], "losses", 1e-6)
        same(ours["parameters"], stock["parameters"], "parameters", 1e-5)
        assert ours["counters"]["commits"] == 7


@pytest.mark.parametrize("kind", ["daemon", "stock"])
def test_killed_workers_go_on_where_they_were(kind: str) -> None:
    kills = ((1, 2, "backward"), (0, 4, "step"))
    arguments = (6, kind)
    run = relaunched(resume_scenarios.train, 2, *arguments, kills, restarts=len(kills), environment=PLACED)
    assert run.code == 0, run.log[-6000:]
    assert [(e["rank"], e["step"], e["moment"]) for e in run.of("killed")] == list(kills)
    for rank, want in enumerate(run_ranks(resume_scenarios.train, 2, *arguments, (), environment=PLACED)):
        got = run.results[rank]
        assert got["losses"] == want["losses"]
        for name, value in want["parameters"].items():
            assert torch.equal(got["parameters"][name], value), name
        again = 0 if kind == "daemon" else 10  # what a kill costs, for each snapshot's age
        assert 0 <= got["counters"]["commits"] - want["counters"]["commits"] <= again


def test_safetensors_of_shards_on_any_dimension(tmp_path: Path) -> None:
    saved = run_ranks(safetensors_cases.save, 4, str(tmp_path), environment=PLACED)[0]
    found: dict[str, torch.Tensor] = {}
    for path in sorted((tmp_path / "fp32").glob("*.safetensors")):
        found.update(read(path)[0])
    same(found, {n: v for n, v in saved["state"].items() if n != "head.weight"})
    halves, _ = read(tmp_path / "bf16/model-00001-of-00001.safetensors")
    same(halves, {n: v.bfloat16() for n, v in found.items()})
    for edited in (True, False):
        for out in run_ranks(safetensors_cases.load_only, 2, str(tmp_path), edited, environment=PLACED):
            same(out["state"], saved["state"])
            same(out["bf16"], {n: v.bfloat16().float() for n, v in saved["state"].items()})
            assert out["counters"]["commits"] >= 1


def test_what_cannot_be_is_said_as_torch_says_it() -> None:
    results = run_ranks(placement_scenarios.errors, 2)
    for texts in results:
        for name in ("uneven", "dimension", "negative", "kind"):
            assert texts[f"{name} shardd"] == texts[f"{name} torch"]
        assert 'write parameter "project.weight": it was written while it was unsharded' in texts["write"]
        assert texts["loss 0"] == texts["loss 1"] == "same"
    assert any("weight" in texts.get("ranks", "") for texts in results), results
