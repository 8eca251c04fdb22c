"""What users hold: types, identity, gradients, errors; and what happens around training."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from cluster import run_ranks
from sharding import face_scenarios


def test_parameters_and_gradients_are_dtensors_over_the_daemons_memory() -> None:
    for facts in run_ranks(face_scenarios.types_and_identity, 2):
        assert facts["class"] == "FSDPModel" and facts["block"] == "FSDPBlock"
        for name in (
            "subclass",
            "names",
            "dtensor",
            "plain",
            "after",
            "grads",
            "shares_state_dict",
            "reshard",
            "slice",
        ):
            assert facts[name], name
        assert facts["shape"] == (21, 10) and facts["unshard"] == (21, 10)
        assert "fully_shard" in facts["twice"]
        assert "is resharded" in facts["resharded_use"] and "layers.0" in facts["resharded_use"]


def test_what_is_refused_is_refused_by_name() -> None:
    for texts in run_ranks(face_scenarios.refusals, 4):
        assert "expects a 1D or 2D DeviceMesh" in texts["mesh"]
        assert "factor of 4" in texts["factor"]
        assert "uneven sharding on dim 1" in texts["placement"]
        assert "containers" in texts["container"]
        assert "mp_policy: param_dtype_override_fn (got <function" in texts["override"]
        later = hasattr(FSDPModule, "finalize_backward")  # torch 2.15; before, fully_shard drops the dtype
        assert ('parameter "weight" of Linear: grad_dtype (got' in texts["gradients"]) == later
        assert "set_custom_all_gather" in texts["comm"]
        assert "fully_shard was not applied" in texts["optimizer"] or "none of its parameters" in texts["optimizer"]
        assert "use one optimizer" in texts["stock"]
        assert "state dict" in texts["deepcopy"]
        assert "scalar" in texts["scalar"]


def test_gradients_behave_as_torchs() -> None:
    for facts in run_ranks(face_scenarios.gradients_as_torchs, 2):
        for name in ("adds", "same_tensor", "old_keeps_values", "replaces", "carries_over", "writes_are_stepped_with",
                     "dropped"):  # fmt: skip
            assert facts[name], name
        assert facts["hook"] == [True]
        assert facts["commits"] == 3


def test_module_used_twice_in_a_forward() -> None:
    for stock, ours in run_ranks(face_scenarios.both_used_twice, 2):
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(stock), rtol=2e-6, atol=0)


def test_state_dicts_schedulers_and_evaluation() -> None:
    for facts in run_ranks(face_scenarios.load_and_evaluate, 2):
        assert facts["moved"] and facts["loaded"] and facts["changed"] and facts["saved"]
        assert abs(facts["lr"] - 1e-2 / 3) < 1e-12
        assert facts["commits"] == 4
        assert facts["bytes"] < 8000  # one parameter's rows, not its neighbours'


def test_an_exception_of_the_program_costs_only_its_step() -> None:
    for where in ("forward", "backward"):
        for result in run_ranks(face_scenarios.exception_then_training, 2, where):
            plain, failed = result["plain"], result["failed"]
            assert failed[1] == 1
            torch.testing.assert_close(torch.tensor(failed[0]), torch.tensor(plain[0]), rtol=1e-6, atol=0)
            assert failed[2] == 2 and failed[3] == 4  # attached once by each rank; four commits


def test_dataloader_workers_by_fork_and_spawn() -> None:
    for method in ("fork", "spawn"):
        results = run_ranks(face_scenarios.dataloader_workers, 2, method, limit_s=200)
        assert results[0]["counters"]["commits"] == 13
        assert results[0]["losses"][6:] != results[0]["losses"][:6]
        assert results[0]["losses"][-1] < results[0]["losses"][0]


def test_the_same_program_on_torch_and_on_shardd() -> None:
    for stock, ours in run_ranks(face_scenarios.both_ways, 2, limit_s=180):
        assert set(stock) == set(ours)
        for name in stock:
            torch.testing.assert_close(
                torch.tensor(ours[name]),
                torch.tensor(stock[name]),
                rtol=2e-5,
                atol=0,
                msg=lambda m, n=name: f"{n}: {m}",
            )


def test_policies_select_what_torchs_do() -> None:
    blocks = ["", "layers.0", "layers.1", "layers.2"]
    linears = sorted(f"layers.{i}.{name}" for i in range(3) for name in ("up", "down"))
    found = run_ranks(face_scenarios.policies, 1)[0]
    for name in ("class", "module-wrap", "custom", "transformer", "size"):
        assert found[name] == blocks, name
    assert found["classes"] == sorted([*blocks, "embed"])
    assert found["function"] == sorted(["", "head", *linears])


def test_clipping_by_torch_by_shardd_and_in_the_daemon_agree() -> None:
    for result in run_ranks(face_scenarios.clip_in_the_daemon, 2):
        (want_norms, want), *others = result["results"]
        for norms, parameters in others:
            torch.testing.assert_close(torch.tensor(norms), torch.tensor(want_norms), rtol=1e-6, atol=0)
            for name, value in want.items():
                torch.testing.assert_close(parameters[name], value, rtol=1e-5, atol=1e-7)
        got, expected = result["infinite"]
        assert got == expected


@pytest.mark.skipif(
    not hasattr(FSDPModule, "set_reduce_scatter_unused_params"), reason="torch 2.10 has no way to declare it"
)
def test_a_block_that_one_rank_skips_fails_unless_declared_zero() -> None:
    for result in run_ranks(face_scenarios.unused_on_one_rank, 2, False):
        assert result["losses"] == [] and "layers.1" in result["error"]
    results = run_ranks(face_scenarios.unused_on_one_rank, 2, True)
    assert all(r["error"] == "" and len(r["losses"]) == 3 for r in results)
    assert torch.equal(results[0]["weight"], results[1]["weight"])


def test_memory_is_planned_before_anything_runs() -> None:
    plan = run_ranks(face_scenarios.plan_of_a_model, 1)[0]
    assert len(plan["groups"]) == 4
    assert plan["bytes"]["optimizer"] >= 2 * plan["bytes"]["shards"] - 4096 and plan["world_size"] == 8


@pytest.mark.parametrize("kind", ["adamw", "foreach", "sgd", "adagrad"])
def test_torchs_optimizers_and_edits_between_passes(kind: str) -> None:
    for stock, ours in run_ranks(face_scenarios.both_with_stock_optimizer, 2, kind):
        torch.testing.assert_close(torch.tensor(ours["losses"]), torch.tensor(stock["losses"]), rtol=1e-6, atol=0)
        assert ours["counters"]["reductions"] == 4 * 6 and ours["counters"]["aborts"] == 0
