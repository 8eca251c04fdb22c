"""Parameters and gradients that the program replaces, instead of storing into them, are written back as PyTorch does."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from cluster import run_ranks
from sharding.writeback_scenarios import edited_all, others, refused_all


def _whole_gradients(ranks: list[dict[str, Any]]) -> list[dict[str, torch.Tensor]]:
    """Of every backward, by name. The two cut them in different places."""
    steps = zip(*(rank["grads"] for rank in ranks), strict=True)
    return [{n: torch.cat([p[n] for p in pieces if p[n] is not None]) for n in pieces[0]} for pieces in steps]


@pytest.mark.parametrize("world", [2, 3])
def test_replaced_storages_objects_and_gradients_count_as_in_torch(world: int) -> None:
    by_rank = run_ranks(edited_all, world, limit_s=200)
    for impl in ("wrapper", "flat", "daemon"):
        stock = "torch of daemon" if impl == "daemon" else "torch"
        grads, wanted = (_whole_gradients([results[i] for results in by_rank]) for i in (impl, stock))
        for step, (ours, theirs) in enumerate(zip(grads, wanted, strict=True)):
            for name, gradient in theirs.items():
                torch.testing.assert_close(ours[name], gradient, rtol=1e-5, atol=1e-6, msg=f"{impl} {step} {name}")
        for results in by_rank:
            got, want = results[impl], results[stock]
            assert got["none"] and want["none"], "without a piece there is no .grad, nor otherwise"
            assert got["taken"], impl
            assert got["losses"] == pytest.approx(want["losses"], rel=2e-6), impl
            for name, value in want["parameters"].items():
                torch.testing.assert_close(got["parameters"][name], value, rtol=1e-5, atol=1e-6, msg=f"{impl} {name}")
            assert got["counters"]["aborts"] == 0 and got["counters"]["commits"] >= 8, impl
            assert got["counters"]["reductions"] > 0


def test_another_shape_or_a_change_before_backward_is_an_error() -> None:
    for results in run_ranks(refused_all, 2, limit_s=300):
        for what, text in results["torch"].items():
            for impl in ("wrapper", "flat"):
                ours = results[impl][what]
                if what.startswith("between"):
                    words = "FSDP does not support changing the parameters between forward and backward"
                    assert text.startswith(f"AssertionError: {words}") and ours.startswith("AssertionError")
                    assert '"layers.1.' in ours and words in ours, (impl, what)
                else:
                    assert "Cannot writeback when the parameter shape changes" in ours, (impl, what, ours)
                    assert 'parameter "' in ours and "Cannot writeback" in text, (impl, what, text)


def test_flat_and_tied_parameters_write_back_and_closed_jobs_refuse() -> None:
    for facts in run_ranks(others, 2):
        assert facts["zero"] == pytest.approx(math.log(13.0), rel=1e-6)
        assert facts["moved"] and facts["aborts"] == 0
        assert facts["summoned"]
        assert facts["tied"] and facts["tied loss"] == pytest.approx(math.log(13.0), rel=1e-6)
        assert "Changing shared parameters is not supported" in facts["untied"]
        assert "in_place_edits=False" in facts["closed"] and '"weight"' in facts["closed"]
