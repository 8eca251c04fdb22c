"""Losses, norms and parameters against torch's own fully_shard and against the unsharded model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cluster import run_ranks
from comparing import close
from models import Case, compare


def _distance(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative, of the whole tensor: single elements near zero have few digits in common with any other order of sums."""
    assert got.shape == want.shape and got.dtype == want.dtype
    return float((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-12))


def check(
    case: Case, world: int, tolerance: float = 1e-6, alone: bool = True, limit_s: float = 120
) -> list[dict[str, Any]]:
    return check_results(case, run_ranks(compare, world, case, limit_s=limit_s), tolerance, alone)


def check_results(
    case: Case, results: list[dict[str, Any]], tolerance: float = 1e-6, alone: bool = True
) -> list[dict[str, Any]]:
    world = len(results)
    for rank, result in enumerate(results):
        ours, stock = result["shardd"], result["torch"]
        close(ours["losses"], stock["losses"], tolerance)
        close(ours["norms"], stock["norms"], tolerance * 5)
        assert ours["keys"] == stock["keys"]
        assert ours["local_shapes"] == stock["local_shapes"]
        assert ours["placements"] == stock["placements"]
        assert ours["shown"] == stock["shown"]
        assert ours["same_objects"]
        for name, value in stock["parameters"].items():
            assert _distance(ours["parameters"][name], value) <= tolerance, name
        if alone:
            reference = results[0]["alone"]
            close(ours["losses"], reference["losses"][rank], tolerance * 5)
    # The daemon did the work: every unshard, one commit a step, every trainable parameter's bytes reduced and updated.
    # What torch's own optimizer writes is committed where the next pass begins, which the last step has none of.
    counts = results[0]["shardd"]["counters"]
    groups = 1 if case.wrap == "root" else 6 if case.wrap == "list" else 4
    groups -= len(case.skip_grad)
    assert counts["commits"] == case.steps - case.stock, counts
    assert counts["unshards"] >= world * groups * case.steps * case.accumulate, counts
    trainable = [v for n, v in results[0]["shardd"]["parameters"].items()
                 if not any(n.startswith(p) for p in case.freeze)
                 and not any(n.startswith(f"layers.{i}.") for i in case.skip_grad)]  # fmt: skip
    numel = sum(v.numel() for v in trainable) - (13 * 10 if case.tie else 0)
    stored = {"bf16": 2, "": 4, "fp64": 8}[case.stored]
    assert counts["bytes_updated"] == (0 if case.stock else stored * numel * case.steps), counts
    width = 2 if "bf16" in (case.param_dtype, case.stored) else stored
    assert counts["bytes_reduced"] >= width * numel * case.steps * world, counts
    assert counts["aborts"] == 0
    return results


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_fully_shard_trains_as_torch_does(world: int) -> None:
    check(Case(), world)


@pytest.mark.parametrize("case", [
    Case(wrap="root"),
    Case(wrap="list"),
    Case(reshard=False),
    Case(reshard=True),
    Case(reshard=2),
    Case(freeze=("layers.1", "embed")),
    Case(freeze=("layers.0.up.weight",)),
    Case(skip_grad=(1,)),
], ids=["root", "list", "keep", "reshard", "integer", "frozen-block", "mixed-requires-grad", "unused-block"])  # fmt: skip
def test_layouts_and_strategies(case: Case) -> None:
    check(case, 2)


def test_tied_parameters_of_one_group() -> None:
    check(Case(tie=True), 2)


@pytest.mark.parametrize("case", [
    Case(optimizer="sgd"),
    Case(optimizer="sgd", momentum=0.0),
    Case(optimizer="groups"),
], ids=["sgd-momentum", "sgd", "groups"])  # fmt: skip
def test_optimizers_of_the_daemon(case: Case) -> None:
    check(case, 2)


def test_clipping_by_torch_over_the_gradient_shards() -> None:
    check(Case(clip=0.1), 2)
    check(Case(clip=0.1), 3)


@pytest.mark.parametrize("sync", [True, False], ids=["each", "last"])
def test_accumulation(sync: bool) -> None:
    check(Case(accumulate=3, sync=sync), 2)


@pytest.mark.parametrize("case", [
    Case(stored="fp64", stock=True),
    Case(stored="fp64", stock=True, optimizer="sgd", clip=0.1, reshard=False, freeze=("layers.1",)),
    Case(stored="fp64", stock=True, accumulate=3, sync=False, wrap="list"),
], ids=["adamw", "clipped", "accumulated"])  # fmt: skip
def test_double_precision_with_an_optimizer_of_torchs(case: Case) -> None:
    check(case, 2)  # gradients are kept in fp32: 1e-6 holds all the same


def test_gradient_divide_factor() -> None:
    check(Case(divide=1.0, optimizer="sgd", momentum=0.0, clip=1.0), 2)
    check(Case(divide=3.0, optimizer="sgd", momentum=0.0), 2)


@pytest.mark.parametrize("checkpoint", ["reentrant", "non-reentrant"])
def test_activation_checkpointing(checkpoint: str) -> None:
    check(Case(checkpoint=checkpoint), 2)


def test_bf16_parameters_reduced_in_fp32() -> None:
    check(Case(param_dtype="bf16", reduce_dtype="fp32"), 2, tolerance=5e-3, alone=False)


def test_bf16_parameters_reduced_in_bf16() -> None:
    check(Case(param_dtype="bf16"), 2, tolerance=1e-2, alone=False)


def test_every_group_has_the_precision_of_its_own_policy() -> None:
    mixed = {0: ("bf16", ""), 1: ("fp32", "fp32")}
    check(Case(param_dtype="bf16", reduce_dtype="fp32", mixed=mixed, stock=True), 2, tolerance=1e-2, alone=False)
    # One block's gradients are rounded to bf16, 2e-3 of its bias; the rest follows it by a fraction of that in 10 steps.
    case = Case(mixed={1: ("fp32", "bf16")}, optimizer="sgd", momentum=0.0, clip=1.0)
    result = check(case, 3, tolerance=2e-3, alone=False)[0]
    for name, value in result["torch"]["parameters"].items():
        if not name.startswith("layers.1."):
            assert _distance(result["shardd"]["parameters"][name], value) <= 1e-4, name


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("whole", [False, True], ids=["blocks", "whole"])
def test_compile(backend: str, whole: bool) -> None:
    check(Case(compile=backend, extra={"whole": whole}), 2, limit_s=240)
