"""Models with experts on a mesh of their own, against torch's own fully_shard."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from cluster import run_ranks
from shardd.torch._process.torch_versions import PLACES_ON_MESHES
from units.expert_scenarios import trained_on_both

BY_PLACEMENT = pytest.mark.skipif(not PLACES_ON_MESHES, reason="torch 2.10's shard_placement_fn gives no meshes")


def _close(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def compare(results: dict[str, Any]) -> None:
    ours, theirs = results["shardd"], results["torch"]
    assert ours["placed"] == theirs["placed"]
    for what in ("losses", "norms", "grads", "local", "whole"):
        _close(ours[what], theirs[what])
    assert results["jobs"]["count"] == 1


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"by_placement": True}, marks=BY_PLACEMENT),
        pytest.param({"by_placement": True, "as_dtensors": True, "cut": 2}, marks=BY_PLACEMENT),
        {"shape": (2, 1, 2)},
        {"counts": (3, 2)},
        {"shape": (1, 4), "counts": (1, 3, 2, 2)},
        {"reshard_after_forward": False},
    ],
    ids=["by-placement", "by-placement-dtensors", "replicas", "uneven", "each-its-own", "not-resharded"],
)
def test_forms_of_expert_meshes_train_as_torchs(options: dict[str, Any]) -> None:
    for results in run_ranks(trained_on_both, 4, options, "daemon", 6):
        compare(results)


@pytest.mark.parametrize("variable", ["SHARDD_PASS_COPIES=1", "SHARDD_IN_PLACE_EDITS=0"])
def test_experts_train_alike_however_passes_read_them(variable: str) -> None:
    environment = dict([variable.split("=")])
    options = {"counts": (3, 2), "factor": 4.0}
    for results in run_ranks(trained_on_both, 4, options, "daemon", 3, False, environment=environment):
        compare(results)


def test_experts_in_lower_precision_train_as_torchs() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for results in run_ranks(trained_on_both, 4, {"mp_policy": policy, "cut": 1}, "daemon", 6):
        ours, theirs = results["shardd"], results["torch"]
        assert ours["placed"] == theirs["placed"]
        for what in ("losses", "local"):
            torch.testing.assert_close(ours[what], theirs[what], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["torch", "daemon", "daemon clip"])
@pytest.mark.parametrize(
    "options",
    [{}, {"as_dtensors": True, "factor": 4.0}, {"cut": 1}],
    ids=["plain", "dtensors", "second-dimension"],
)
def test_experts_on_their_own_mesh_train_as_torchs(options: dict[str, Any], kind: str) -> None:
    for results in run_ranks(trained_on_both, 4, options, kind):
        compare(results)
        assert results["jobs"]["counters"]["commits"] >= 9
