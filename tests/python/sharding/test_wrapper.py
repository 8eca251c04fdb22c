"""FullyShardedDataParallel trains as torch's own does, and as the unsharded model."""

from __future__ import annotations

from typing import Any

import pytest

from cluster import run_ranks
from comparing import close
from sharding.wrapper_scenarios import WrapperCase, compare_all, several_dtypes


def _check(case: WrapperCase, results: list[dict[str, Any]], tolerance: float = 1e-6) -> None:
    world = len(results)
    reference = results[0]["alone"]
    for rank, result in enumerate(results):
        ours, stock = result["shardd"], result["torch"]
        close(ours["losses"], reference["losses"][rank], 5 * tolerance)
        assert ours["same_objects"]
        for name, value in ours["parameters"].items():
            want = reference["parameters"].get(name, reference["parameters"].get(case.extra.get(name)))
            close(value, want, 10 * tolerance)
        if stock is not None:
            close(ours["losses"], stock["losses"], tolerance)
            assert case.extra.get("composable") or ours["names"] == stock["names"]
            assert set(ours["parameters"]) == set(stock["parameters"])
    counts = results[0]["shardd"]["counters"]
    assert counts["commits"] == case.steps, counts  # with a forward after the last step also of torch's optimizer
    names = [n for n in reference["parameters"] if not any(n.startswith(p) for p in case.freeze)]
    numel = sum(reference["parameters"][n].numel() for n in names)
    assert counts["bytes_updated"] == (0 if case.stock else 4 * numel * case.steps), counts
    assert counts["bytes_reduced"] >= 4 * numel * case.steps * world, counts
    assert counts["unshards"] >= world * case.steps * case.accumulate and counts["aborts"] == 0


def check(cases: list[WrapperCase], world: int) -> list[list[dict[str, Any]]]:
    """Results by case and rank."""
    by_rank = run_ranks(compare_all, world, cases, limit_s=200)
    by_case = [[by_rank[rank][i] for rank in range(world)] for i in range(len(cases))]
    for case, results in zip(cases, by_case, strict=True):
        _check(case, results)
    return by_case


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_both_forms_of_parameters_train_as_torchs_do(world: int) -> None:
    _, flat = check([WrapperCase(), WrapperCase(orig=False)], world)
    for result in flat:
        assert [name.rpartition(".")[2] for name in result["shardd"]["names"]] == ["_flat_param"] * 4


def test_strategies_and_policies() -> None:
    check(
        [
            WrapperCase(strategy="SHARD_GRAD_OP", policy="transformer"),
            WrapperCase(strategy="NO_SHARD", policy="lambda"),
            WrapperCase(strategy="NO_SHARD", orig=False, policy="none"),
            WrapperCase(policy="custom"),
            WrapperCase(policy="mixed", stock=True),
            WrapperCase(policy="mixed", strategy="SHARD_GRAD_OP", orig=False),
            WrapperCase(policy="size", orig=False),
        ],
        2,
    )


def test_hybrid_strategies() -> None:
    check(
        [
            WrapperCase(strategy="HYBRID_SHARD", mesh=(2, 2)),
            WrapperCase(strategy="_HYBRID_SHARD_ZERO2", mesh=(2, 2), orig=False, stock=True),
        ],
        4,
    )


def test_optimizers_of_torch_and_of_the_daemon_on_pieces() -> None:
    check(
        [
            WrapperCase(stock=True, optimizer="groups"),
            WrapperCase(stock=True, orig=False),
            WrapperCase(optimizer="groups", accumulate=2, sync=False),
            WrapperCase(optimizer="sgd", orig=False, accumulate=2, sync=False),
        ],
        2,
    )


def test_tied_and_frozen_parameters() -> None:
    check(
        [
            WrapperCase(tie=True, extra={"head.weight": "embed.weight"}),
            WrapperCase(tie=True, orig=False, extra={"head.weight": "embed.weight"}),
            WrapperCase(freeze=("layers.1", "embed")),
            WrapperCase(freeze=("layers.0.up.weight", "norm")),
            # torch refuses mixed requires_grad in one FlatParameter; here there are two.
            WrapperCase(freeze=("layers.0.up.weight",), orig=False, extra={"not_torch": True}),
        ],
        2,
    )


def test_the_composable_form() -> None:
    check([WrapperCase(extra={"composable": True}), WrapperCase(extra={"composable": True}, stock=True)], 2)


@pytest.mark.parametrize("orig", [True, False])
def test_parameters_of_several_dtypes_in_one_unit(orig: bool) -> None:
    for facts in run_ranks(several_dtypes, 2, orig):
        for losses in facts["losses"].values():
            assert losses == pytest.approx(facts["losses"]["alone"], rel=1e-5)
        assert len(facts["alike"]) == 6 and all(facts["alike"].values()), facts["alike"]
        assert len(facts["dtypes"]) == (6 if orig else 4), "one for each dtype and requires_grad"
        counts = facts["counters"]
        assert counts["commits"] == 3 and counts["unshards"] == 2 * 3, ("one unit: all of it is there at once", counts)
        assert counts["bytes_reduced"] == 2 * 3 * (35 * 4 + 40 * 2 + 18 * 2), counts
