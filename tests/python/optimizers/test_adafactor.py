"""The daemon's Adafactor: torch's numbers within rounding, torch's state, the same bits on any number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cluster import run_ranks
from models import PLACED
from optimizers import adafactor_scenarios

PARAMETERS = 1e-6  # relative to the largest element of each parameter
LOSSES = STATE = 1e-5


def _close(got: Any, want: Any, tolerance: float, what: str) -> None:
    got, want = torch.as_tensor(got).detach(), torch.as_tensor(want).detach()
    assert got.shape == want.shape, what
    scale = max(1.0, float(want.abs().max()))
    assert float((got - want).abs().max()) <= tolerance * scale, f"{what}: {float((got - want).abs().max())} of {scale}"


def _is_torchs(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    _close(ours["losses"], theirs["losses"], LOSSES, "losses")
    for got, want in zip(ours["states"], theirs["states"], strict=True):
        assert got.keys() == want.keys()
        for index, entry in want.items():
            assert list(got[index]) == list(entry)
            for name, value in entry.items():
                _close(got[index][name], value, STATE, f"{name} of {index}")
    for name, value in theirs["parameters"].items():
        _close(ours["parameters"][name], value, PARAMETERS, name)
    assert ours["groups"] == theirs["groups"]
    assert ours["counters"]["commits"] >= adafactor_scenarios.STEPS and ours["counters"]["aborts"] == 0
    assert ours["counters"]["bytes_updated"] > 0


@pytest.mark.parametrize(
    ("name", "world", "mesh", "beside"),
    [
        ("usual", 1, (), False),
        ("usual", 2, (), True),
        ("other", 3, (), False),
        ("usual", 4, (2, 2), False),
        ("unclipped", 1, (), False),
    ],
    ids=["one", "beside AdamW", "other arguments, uneven", "replicas", "unclipped"],
)
def test_adafactor_has_torchs_numbers(name: str, world: int, mesh: tuple[int, ...], beside: bool) -> None:
    for theirs, ours in run_ranks(adafactor_scenarios.both, world, name, mesh, beside):
        _is_torchs(theirs, ours)


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside AdamW"])
def test_an_installed_program_with_adafactor_has_torchs_numbers(beside: bool) -> None:
    for theirs, ours in run_ranks(adafactor_scenarios.installed, 2, beside):
        _is_torchs(theirs, ours)


def test_any_number_of_ranks_gives_the_same_bits() -> None:
    whole: dict[str, torch.Tensor] = {}
    for world in (1, 2, 4):  # over which a mean of equal gradients is exact
        for parameters in run_ranks(adafactor_scenarios.alike, world):
            whole = whole or parameters
            assert parameters.keys() == whole.keys() and len(whole) > 0
            for name, value in parameters.items():
                assert torch.equal(value, whole[name]), f"{name} of {world} ranks"


@pytest.mark.parametrize("full", [True, False], ids=["full", "sharded"])
def test_it_goes_on_from_a_state_dict(full: bool) -> None:
    for outcome in run_ranks(adafactor_scenarios.loaded, 2, full):
        for name, value in outcome["went on"].items():
            assert torch.equal(outcome["loaded"][name], value), name
        shapes = outcome["shapes"]
        assert shapes["body.layers.0.up.weight"] == {"step": (), "row_var": (21, 1), "col_var": (1, 10)}
        assert shapes["body.layers.0.up.bias"] == {"step": (), "variance": (21,)}
        assert shapes["kernel"] == {"step": (), "row_var": (3, 2, 2, 1), "col_var": (3, 2, 1, 5)}
        for name, value in outcome.get("alone", {}).items():
            _close(value, outcome["went on"][name], PARAMETERS, name)


def test_it_goes_on_from_torchs_state_of_one_process() -> None:
    for outcome in run_ranks(adafactor_scenarios.from_one_process, 2):
        for name, value in outcome["theirs"].items():
            _close(outcome["ours"][name], value, PARAMETERS, name)


def test_a_scaled_loss_is_divided_out_and_infinities_skip() -> None:
    for outcome in run_ranks(adafactor_scenarios.scaled, 2):
        assert outcome["skipped"]
        for name, value in outcome["0.0"].items():
            assert torch.equal(outcome["1024.0"][name], value), name
            assert torch.equal(outcome["after"][name], value), name


def test_what_adafactor_does_not_do_is_refused_by_name() -> None:
    for outcome in run_ranks(adafactor_scenarios.refusals, 2):
        for how in ("flat", "wrapped"):
            assert "NotImplementedError: Adafactor: parameter" in outcome[how], outcome
            assert "is a plain tensor of layout flat" in outcome[how] and 'its layout "dim0"' in outcome[how], outcome
        assert 'load optimizer state "row_var" of' in outcome["shape"], outcome
        assert "wrong shape (got (2, 2), want (3, 2, 2, 1))" in outcome["shape"], outcome
        assert "lr is not finite (got inf)" in outcome["lr"], outcome
    for said in run_ranks(adafactor_scenarios.placed, 2, environment=PLACED):
        assert "is cut along dimension 1" in said, said
