"""A model is what it is: its ranks, its description, and how many such there were; not how many others a process has made."""

from __future__ import annotations

import pytest

from cluster import run_ranks
from ranks.identity_scenarios import models_of_some, one_layer_more, other_ignored_modules

LIMITS = {"SHARDD_TIMEOUT_MS": "15000"}


@pytest.mark.parametrize("form", ["wrapper", "fully_shard"])
def test_models_that_only_some_ranks_make_hold_nobody_up(form: str) -> None:
    ours, stock = (
        run_ranks(models_of_some, 3, impl, form, limit_s=60, environment=LIMITS) for impl in ("shardd", "torch")
    )
    for a, b in zip(ours, stock):
        assert list(a) == list(b)
        for name, losses in b.items():
            assert a[name] == pytest.approx(losses, rel=1e-5), name


def test_ranks_may_ignore_different_modules() -> None:
    ours, stock = (
        run_ranks(other_ignored_modules, 3, impl, limit_s=60, environment=LIMITS) for impl in ("shardd", "torch")
    )
    for (losses, ignored), (want, count) in zip(ours, stock):
        assert losses == pytest.approx(want, rel=1e-5)
        assert ignored == count


@pytest.mark.parametrize("launched", [True, False], ids=["torchrun", "alone"])
@pytest.mark.parametrize("form", ["wrapper", "fully_shard"])
def test_ranks_whose_models_differ_by_a_layer_are_told_soon(form: str, launched: bool) -> None:
    launcher = {"TORCHELASTIC_RUN_ID": f"layers-{form}", "TORCHELASTIC_RESTART_COUNT": "0"} if launched else {}
    for text, seconds in run_ranks(one_layer_more, 2, form, limit_s=60, environment={**LIMITS, **launcher}):
        assert "registers another one" in text and '"layers.2.' in text, text
        assert seconds < 10  # of 15


def test_a_named_jobs_edited_model_is_refused_by_name() -> None:
    environment = {**LIMITS, "SHARDD_JOB": "edited"}
    for text, seconds in run_ranks(one_layer_more, 2, "fully_shard", limit_s=60, environment=environment):
        assert "layers.2" in text, text
        assert seconds < 10
