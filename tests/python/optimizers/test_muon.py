"""The daemon's Muon beside AdamW: torch's numbers within the rounding of bf16, torch's state, and what is refused.

torch rounds each matrix between products to bf16, and so does the daemon; both sum in fp32, each in its own order, so a sum at
the edge of two numbers of bf16 (2**-8 apart) may become either. The usual coefficients make small singular values 480 times
larger in five steps, and such roundings with them. In 20 steps of lr 0.02 parameters come 0.0036 to 0.0072 from torch's on as
many ranks; torch's own on one rank and on four come 0.0096 from each other. Coefficients that magnify less give 0.00012.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cluster import run_ranks
from comparing import close
from models import PLACED
from optimizers import muon_scenarios

PARAMETERS = {"usual": 2e-2, "other": 1e-3}
LOSSES, STATE = 1e-3, 1e-3


def _is_torchs(theirs: dict[str, Any], ours: dict[str, Any], parameters: float = PARAMETERS["usual"]) -> None:
    close(ours["losses"], theirs["losses"], LOSSES)
    for got, want in zip(ours["states"], theirs["states"], strict=True):
        assert got.keys() == want.keys()
        for index, entry in want.items():
            assert list(got[index]) == list(entry)
            for name, value in entry.items():
                close(got[index][name], value, STATE)
    for name, value in theirs["parameters"].items():
        close(ours["parameters"][name], value, parameters)
    assert ours["groups"] == theirs["groups"]
    assert ours["counters"]["commits"] >= muon_scenarios.STEPS and ours["counters"]["aborts"] == 0
    assert ours["counters"]["bytes_updated"] > 0


@pytest.mark.parametrize(
    ("name", "world", "mesh"),
    [("usual", 1, ()), ("usual", 3, ()), ("other", 2, ()), ("usual", 4, (2, 2))],
    ids=["one", "uneven", "other arguments", "replicas"],
)
def test_muon_beside_adamw_has_torchs_numbers(name: str, world: int, mesh: tuple[int, ...]) -> None:
    for theirs, ours in run_ranks(muon_scenarios.both, world, name, mesh):
        _is_torchs(theirs, ours, PARAMETERS[name])


@pytest.mark.parametrize("late_momentum", [False, True], ids=["usual", "momentum that begins"])
def test_an_installed_program_with_muon_and_adamw_is_torchs(late_momentum: bool) -> None:
    for theirs, ours in run_ranks(muon_scenarios.installed, 2, late_momentum):
        _is_torchs(theirs, ours)


def test_with_stock_optimizers_the_trainers_step_and_numbers_are_torchs() -> None:
    for theirs, ours in run_ranks(muon_scenarios.installed, 2, False, False):
        assert ours["counters"]["bytes_updated"] == 0
        close(ours["losses"], theirs["losses"], 1e-5)
        for name, value in theirs["parameters"].items():
            close(ours["parameters"][name], value, 1e-4)


@pytest.mark.parametrize("layout", ["dim0", "flat"])
def test_any_number_of_ranks_gives_the_same_bits(layout: str) -> None:
    whole: dict[str, torch.Tensor] = {}
    for world in (1, 2, 4):  # over which a mean of equal gradients is exact
        for (parameters,) in run_ranks(muon_scenarios.alike, world, layout):
            whole = whole or parameters
            assert parameters.keys() == whole.keys() and len(whole) > 0
            for name, value in parameters.items():
                assert torch.equal(value, whole[name]), f"{name} of {world} ranks"


@pytest.mark.parametrize("full", [True, False], ids=["full", "sharded"])
def test_both_go_on_from_a_state_dict(full: bool) -> None:
    for outcome in run_ranks(muon_scenarios.loaded, 2, full):
        for name, value in outcome["went on"].items():
            assert torch.equal(outcome["loaded"][name], value), name
        assert outcome["names"]["layers.0.up.weight"] == ["momentum_buffer"]
        assert outcome["names"]["layers.0.up.bias"] == ["exp_avg", "exp_avg_sq", "step"]


def test_the_flat_wrapper_saves_whole_buffers() -> None:
    for rank, outcome in enumerate(run_ranks(muon_scenarios.flat_state, 3)):
        assert rank > 0 or len(outcome["saved"]) == 3
        for name, entry in outcome["saved"].items():
            assert list(entry) == ["momentum_buffer"] and entry["momentum_buffer"].shape == (21, 10)
            assert entry["momentum_buffer"].abs().max() > 0
            assert torch.equal(outcome["again"][name]["momentum_buffer"], entry["momentum_buffer"])


def test_what_muon_does_not_do_is_refused_by_name() -> None:
    for outcome in run_ranks(muon_scenarios.refusals, 2):
        assert "NotImplementedError: Muon: parameter" in outcome["vector"], outcome
        assert "dimensions (shape (" in outcome["vector"] and "give it to another optimizer" in outcome["vector"]
        assert "ns_steps=100 is not a number from 0 to 99" in outcome["steps"]
        assert "adjust_lr_fn='other' is not one of the daemon's" in outcome["adjust"]
        assert "are not three finite numbers" in outcome["coefficients"]
        assert "OPTIMIZER_KIND_MUON updates matrices alone" in outcome["alone"], outcome["alone"]
    for said in run_ranks(muon_scenarios.placed, 2, environment=PLACED):
        assert "is cut along dimension 1" in said, said


def test_an_installed_muon_without_another_optimizer_stays_torchs() -> None:
    for theirs, ours in run_ranks(muon_scenarios.alone_installed, 2):
        close(ours, theirs, 1e-5)
