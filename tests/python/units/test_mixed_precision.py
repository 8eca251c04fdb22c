"""torch's MixedPrecision on the wrapper: dtypes everywhere as torch has them, values too, and the daemon did the work."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cluster import run_ranks
from units.mixed_scenarios import KINDS, compared, compared_flat_parameters

# Reduced in bf16: of two ranks with torch's bits, of more rounded once and not with each addition.
ROUNDED = ("bf16", "kept", "reduce", "inputs", "parts")


def check(kind: str, ours: dict[str, Any], stock: dict[str, Any], world: int = 2) -> None:
    tolerance = 4e-3 if kind in ROUNDED and world > 2 else 1e-5
    for key in ("seen", "seen in eval", "seen again", "gradients", "norm dtype", "between", "kept buffers"):
        assert ours[key] == stock[key], f"{kind}: {key}"
    for key in ("losses", "norms"):
        assert ours[key] == pytest.approx(stock[key], rel=tolerance), f"{kind}: {key}"
    for key in ("eval", "saved", "summoned"):
        torch.testing.assert_close(
            ours[key],
            stock[key],
            rtol=tolerance,
            atol=tolerance,
            check_dtype=True,
            msg=lambda m, k=key: f"{kind}: {k}: {m}",
        )
    counts = ours["counters"]
    # Three steps and one backward without; committed by the passes after them.
    assert counts["commits"] == (0 if kind == "kept" else 3) and counts["aborts"] == 0, counts
    numel = sum(value.numel() for value in ours["summoned"].values())
    low = KINDS[kind][0].param_dtype is not None
    width = {"parts": 2.4}.get(kind, 2 if low else 4)
    assert width * numel * 4 * world * 0.9 < counts["bytes_reduced"], counts
    if kind not in ("parts",):
        assert counts["bytes_reduced"] < width * numel * 4 * world * 1.2, "slots are in the dtype of computation"


def test_dtypes_and_values_are_torchs() -> None:
    for results in run_ranks(compared, 2, *KINDS, limit_s=240):
        for kind, result in results.items():
            check(kind, result["shardd"], result["torch"])


def test_flat_parameters_have_the_same_dtypes() -> None:
    for results in run_ranks(compared_flat_parameters, 2, "all", "kept", "parts"):
        for kind, result in results.items():
            check(kind, result["shardd"], result["torch"])


def test_three_ranks_keep_low_precision_gradients() -> None:
    for results in run_ranks(compared, 3, "kept"):
        check("kept", results["kept"]["shardd"], results["kept"]["torch"], 3)
        assert results["kept"]["shardd"]["gradients"] == ["torch.bfloat16", "torch.float32"], "BatchNorm's stay fp32"


def test_eval_computes_in_full_precision_where_that_is_asked_for() -> None:
    environment = {"FSDP_USE_FULL_PREC_IN_EVAL": "1"}
    both = [run_ranks(f, 2, "all", "kept", environment=environment) for f in (compared, compared_flat_parameters)]
    for results in [*both[0], *both[1]]:
        for kind, result in results.items():
            check(kind, result["shardd"], result["torch"])
            seen = result["shardd"]["seen in eval"]
            assert seen["first"]["weight"] == seen["root"]["input"] == torch.float32
            assert seen["second"]["buffers"] == [torch.float64, torch.int64, torch.float32], "each its own"
            again = result["shardd"]["seen again"]
            assert again["first"]["weight"] == torch.bfloat16
