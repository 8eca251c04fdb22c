"""Small things that torch's wrapper does, beside torch's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster import PACKAGE, run_ranks
from sharding.small_cases import first_step_of_lbfgs, flat_parameter, printed_plan, state_dicts, unmatched


def _close(got: Any, want: Any) -> None:
    if isinstance(want, dict):
        assert sorted(got) == sorted(want)
        for key, value in want.items():
            _close(got[key], value)
    elif isinstance(want, torch.Tensor):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    else:
        assert got == want


def test_optimizer_state_without_groups_and_ignored_tensors_are_as_torchs() -> None:
    ours, stock = (run_ranks(state_dicts, 2, impl) for impl in ("shardd", "torch"))
    for a, b in zip(ours, stock):
        assert a.pop("same")
        assert a.pop("full") == ["FutureWarning: optim_input"]
        _close(a, b)
        assert a["ignored"][0].startswith("ValueError: ignored_modules expects")


def test_a_flat_parameter_is_whole_inside_full_params() -> None:
    ours, stock = (run_ranks(flat_parameter, 2, impl) for impl in ("shardd", "torch"))
    for a, b in zip(ours, stock):
        assert a["aliases"] and b["aliases"] and all(a["after"])
        for key in ("whole", "weight", "again"):
            _close(a[key], b[key])


@pytest.mark.parametrize("form", ["wrapper", "fully_shard"])
def test_policies_that_match_nothing_are_named(form: str) -> None:
    for one, none, small, good in run_ranks(unmatched, 2, form):
        assert "no module in it is a TransformerEncoderLayer" in one
        assert "no module in it is a TransformerDecoderLayer" in none
        assert "size_based_auto_wrap_policy selects no module of Sequential" in small
        assert good == ""


def test_lbfgs_is_refused_before_its_first_step() -> None:
    for texts, called in run_ranks(first_step_of_lbfgs, 2):
        assert called == 0
        assert texts and texts[0].startswith("NotImplementedError: step of LBFGS: its parameters are sharded")


def test_a_printed_plan_is_printed_once() -> None:
    for text in run_ranks(printed_plan, 2):
        assert text.count("purpose ") == 1


@pytest.mark.parametrize(
    "environment, words", [({}, "no module was given"), ({"WORLD_SIZE": "2"}, "one of 2 that ran")]
)
def test_a_program_that_sharded_nothing_is_told(tmp_path: Path, environment: dict[str, str], words: str) -> None:
    script = tmp_path / "script.py"
    script.write_text("import torch\nprint(torch.ones(2).sum().item())\n")
    done = subprocess.run(
        [sys.executable, "-m", "shardd.torch", str(script)],
        capture_output=True, text=True, timeout=120, env={"PYTHONPATH": str(PACKAGE), "PATH": "/usr/bin", **environment},
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout == "2.0\n"
    assert "nothing was sharded" in done.stderr and words in done.stderr and "process group" in done.stderr
