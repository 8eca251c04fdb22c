"""2-D meshes (replicate, shard) and integer reshard_after_forward, against torch's own and against the unsharded model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cluster import run_ranks
from models import Case
from training.test_parity import check
from units.hybrid_scenarios import (
    a_mesh_in_no_order,
    a_step_without_all_reduce,
    hybrid_facts,
    replicas_edit,
    two_models_on_half_the_world_each,
)

SPLITS = pytest.mark.parametrize("mesh", [(2, 2), (1, 4), (4, 1)], ids=["2x2", "1x4", "4x1"])


@SPLITS
def test_every_split_trains_as_torch_does(mesh: tuple[int, ...]) -> None:
    check(Case(mesh=mesh, clip=0.1), 4)


@SPLITS
def test_an_optimizer_of_torch_steps_every_replica_once(mesh: tuple[int, ...]) -> None:
    check(Case(mesh=mesh, stock=True, clip=0.1), 4)


@pytest.mark.parametrize("case", [
    Case(mesh=(2, 2), reshard=False),
    Case(mesh=(2, 2), accumulate=3),
    Case(mesh=(2, 2), accumulate=3, all_reduce=False),
    Case(mesh=(2, 2), accumulate=3, sync=False),
    Case(mesh=(2, 2), tie=True, optimizer="groups"),
    Case(mesh=(2, 2), freeze=("layers.0.up.weight",), skip_grad=(1,)),
    Case(mesh=(2, 2), divide=3.0, optimizer="sgd", momentum=0.0),
], ids=["zero2", "each", "reduce-scatter-each", "no-sync", "tied-groups", "frozen-unused", "divide"])  # fmt: skip
def test_hybrid_cases(case: Case) -> None:
    check(case, 4)


def test_bf16_on_a_hybrid_mesh() -> None:
    check(Case(mesh=(2, 2), param_dtype="bf16", reduce_dtype="fp32"), 4, tolerance=5e-3, alone=False)


@pytest.mark.parametrize("mesh", [(4,), (1, 4)], ids=["1-D", "2-D"])
def test_integer_reshard_after_forward(mesh: tuple[int, ...]) -> None:
    check(Case(mesh=mesh, reshard=2), 4)


def test_the_job_is_the_mesh_and_integers_reach_the_plan() -> None:
    for facts in run_ranks(hybrid_facts, 4):
        assert facts["strategy"] == "STRATEGY_HYBRID_SHARD"
        assert facts["groups"] == [[0, 1], [2, 3]]
        assert facts["divide"] == 4
        assert facts["norm"] == pytest.approx(facts["torch_norm"], rel=1e-6)
        assert facts["reshard"] == ["OVERRIDE_YES", "OVERRIDE_NO", "OVERRIDE_YES"]
        assert facts["post_forward"] == [2, None, None], "1 keeps the parameters, the world size reshards them"
        assert "factor of 2, not 4" in facts["factor"], "of the shard group"


def test_meshes_over_part_of_the_world_have_their_own_jobs() -> None:
    for rank, facts in enumerate(run_ranks(two_models_on_half_the_world_each, 4)):
        assert facts["gradient"] == (1.5 if rank < 2 else 3.5)
        assert facts["commits"] == 1


def test_replicas_of_a_mesh_may_come_in_any_order() -> None:
    after = torch.arange(9.0).view(3, 3) - 1.5
    for rank, facts in enumerate(run_ranks(a_mesh_in_no_order, 4)):
        assert "(got [3, 2, 1, 0], want [0, 1, 2, 3])" in facts["row"]
        assert "(got [2, 0], want [0, 2])" in facts["rows"]
        assert torch.equal(facts["whole"], after)
        assert torch.equal(facts["rows_held"], after[:2] if rank < 2 else after[2:])


def test_edits_of_every_replica_count_once() -> None:
    results: list[dict[str, Any]] = run_ranks(replicas_edit, 4)
    for result in results:
        half = pytest.approx([value * 0.5 for value in result["before"]])
        assert result["after_edit"] == half
        assert result["seen_in_forward"] == half
        assert result["gradient"] == pytest.approx([value * 0.25 for value in result["gradient_before"]])


def test_a_step_without_all_reduce_says_what_to_set() -> None:
    for said in run_ranks(a_step_without_all_reduce, 4):
        assert "is not synchronised" in said
        assert "set_requires_all_reduce(True)" in said
