"""The daemon's Adafactor in programs: what uses a model first, and what they ask for that it does not do."""

from __future__ import annotations

import pytest
import torch

from cluster import run_ranks
from optimizers import adafactor_programs


def _are_close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-6 * max(1.0, float(value.abs().max())))


def _are_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name


@pytest.mark.parametrize("how", ["set", "get"])
def test_state_dicts_before_the_first_forward_use_the_daemons(how: str) -> None:
    for outcome in run_ranks(adafactor_programs.first_use, 2, how):
        _are_equal(outcome["ours"], outcome["theirs"])
        assert outcome["lr"] == 0.02
        got, wanted = outcome["shapes"]
        assert got == (wanted if how == "get" else {})


def test_a_closure_may_be_the_models_first_use() -> None:
    for outcome in run_ranks(adafactor_programs.first_use, 2, "closure"):
        ours, theirs = outcome["losses"]
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-5, atol=0)
        _are_close(outcome["ours"], outcome["theirs"])


def test_what_is_not_served_changes_nothing_until_taken_back() -> None:
    for outcome in run_ranks(adafactor_programs.taken_back, 2):
        for what, why in {
            "lr": "lr is not finite (got inf)",
            "d": "Clipping threshold d should be >= 1 but is: 0.0",
            "beside": "a parameter that is not sharded has a gradient",
            "load": "a state dict with lr is not finite",
            "state": "its state was changed otherwise than by load_state_dict",
        }.items():
            said = outcome[what]
            assert said.startswith(f"NotImplementedError: Adafactor: {why}"), (what, said)
            assert "Adafactor cannot step here: its state has other shapes" in said, (what, said)
        _are_equal(outcome["parameters", True], outcome["parameters", False])
        assert outcome["updated", True] == outcome["updated", False] > 0


def test_a_first_step_that_nobody_can_make_is_refused() -> None:
    for said in run_ranks(adafactor_programs.not_settled, 2):
        assert said.startswith("NotImplementedError: step of Adafactor: its parameters are sharded"), said


def test_values_are_refused_with_torchs_words() -> None:
    for outcome in run_ranks(adafactor_programs.ranges, 1):
        for ours, theirs in outcome:
            assert ours == theirs and ours.startswith("ValueError: "), (ours, theirs)


def test_rows_of_nodes_send_only_muon_to_layout_flat() -> None:
    from shardd.torch._units.placement import why_not_on_one_rank

    assert 'layout="flat"' in why_not_on_one_rank(object(), True, "Muon")
    assert "layout" not in why_not_on_one_rank(object(), True, "Adafactor")
