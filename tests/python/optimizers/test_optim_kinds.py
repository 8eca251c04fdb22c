"""The daemon's Adagrad, RMSprop and Lion: torch's numbers, within rounding, and torch's state."""

from __future__ import annotations

from typing import Any

import torch

from cluster import run_ranks
from optimizers import kind_scenarios


def close(got: Any, want: Any, tolerance: float) -> None:
    torch.testing.assert_close(torch.as_tensor(got), torch.as_tensor(want), rtol=tolerance, atol=tolerance)


def test_further_kinds_have_torchs_numbers_state_and_groups() -> None:
    for outcome in run_ranks(kind_scenarios.all_kinds, 2):
        for kind, (theirs, ours) in outcome.items():
            close(ours["losses"], theirs["losses"], 1e-5)
            assert list(ours["state"]) == list(theirs["state"]), kind
            for index, entry in theirs["state"].items():
                assert set(ours["state"][index]) == set(entry), kind
                for name, value in entry.items():
                    close(ours["state"][index][name], value, 1e-4)
            for name, value in theirs["parameters"].items():
                close(ours["parameters"][name], value, 2e-5)
            if kind != "lion":
                assert ours["groups"] == theirs["groups"], kind
            assert ours["counters"]["bytes_updated"] > 0 and ours["counters"]["aborts"] == 0


def test_an_installed_adagrad_shows_torchs_state_and_goes_back_to_it() -> None:
    for outcome in run_ranks(kind_scenarios.installed, 2):
        for theirs, ours in outcome.values():
            for want, got in zip(theirs, ours, strict=True):
                assert list(got) == list(want)
                for key, entry in want.items():
                    for name in entry if isinstance(entry, dict) else ():
                        close(got[key][name], entry[name], 1e-4)
                    if not isinstance(entry, dict):
                        close(got[key], entry, 2e-5)
