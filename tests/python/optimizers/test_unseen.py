"""A program under ``install()`` cannot tell that the daemon makes its optimizer's steps."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from cluster import run_ranks
from node_daemons import nodes, run_on_nodes
from optimizers import own_state_programs, several_open_programs, unseen_scenarios
from optimizers.unseen_programs import PROGRAMS

assert own_state_programs.__all__ and several_open_programs.__all__  # which adds to them


@functools.cache
def _results(group: str) -> list[dict[str, Any]]:
    return run_ranks(unseen_scenarios.both, 2, group)


@functools.cache
def _results_of_nodes(group: str) -> list[dict[str, Any]]:
    with nodes() as two:
        return run_on_nodes(two, unseen_scenarios.both, group, local=1)


def _compare(got: Any, want: Any, where: str) -> None:
    """Numbers to 1e-6 of fp32, anything else exactly."""
    if isinstance(want, torch.Tensor):
        assert isinstance(got, torch.Tensor) and got.dtype == want.dtype, where
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6, msg=lambda m: f"{where}: {m}")
    elif isinstance(want, dict):
        assert list(map(str, got)) == list(map(str, want)), where
        for key, value in want.items():
            _compare(got[key], value, f"{where}[{key!r}]")
    elif isinstance(want, list | tuple):
        assert len(got) == len(want), where
        for number, (a, b) in enumerate(zip(got, want)):
            _compare(a, b, f"{where}[{number}]")
    elif isinstance(want, float):
        assert got == pytest.approx(want, rel=1e-6, abs=1e-6, nan_ok=True), where
    else:
        assert got == want, where


def _check(results: list[dict[str, Any]], group: str, name: str) -> None:
    for result in results:
        stock, ours = dict(result["torch"][name]), dict(result["shardd"][name])
        assert "error" not in stock or "losses" in stock, stock["error"]
        assert "error" not in ours or "losses" in ours, ours["error"]
        counters = ours.pop("counters")
        _compare(ours, stock, name)
        assert (counters["bytes_updated"] > 0) == PROGRAMS[group][name][1], counters
        assert counters["commits"] > 0 and counters["aborts"] == 0, counters


@pytest.mark.parametrize(("group", "name"), [(group, name) for group, of in PROGRAMS.items() for name in of])
def test_a_program_cannot_tell_its_optimizer_from_pytorchs(group: str, name: str) -> None:
    _check(_results(group), group, name)


_GROUPS_CHANGE = {
    "a_param_group_is_added": "on several nodes optimizer groups alone do not change",
    "a_second_optimizer_comes_later": "spans 2 nodes, where it is not served",
}


@pytest.mark.parametrize("name", sorted(PROGRAMS["several"].keys() - _GROUPS_CHANGE.keys()))
def test_a_program_of_several_optimizers_cannot_tell_over_nodes(name: str) -> None:
    _check(_results_of_nodes("several"), "several", name)


@pytest.mark.parametrize(("name", "why"), _GROUPS_CHANGE.items())
def test_optimizers_that_change_over_nodes_are_refused_by_name(name: str, why: str) -> None:
    for result in _results_of_nodes("several"):
        assert why in result["shardd"][name]["error"]


def test_a_fall_back_is_said_once_with_its_reason() -> None:
    for result in _results("falls back"):
        said = result["said"]
        assert len(said) == len(set(said)) and len(said) >= 6, said
        assert any("AdamW: the parameters of one model are updated by AdamW and Own" in text for text in said), said
        assert any("Adam: amsgrad of a param group differs" in text for text in said), said
