"""Whole training scripts: each sees the same on PyTorch's sharding, on shardd's, and after a kill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cluster import run_ranks
from kept_daemon import kept_daemon
from torchrun import Run, relaunched
from training import program_scenarios
from training.programs import mixture
from training.programs.table import PROGRAMS


def _expect(got: list[Any], want: list[Any], what: str, rtol: float, atol: float) -> None:
    assert len(got) == len(want), what
    for number, (a, b) in enumerate(zip(got, want)):
        if isinstance(b, (torch.Tensor, float)):
            torch.testing.assert_close(
                a, b, rtol=rtol, atol=atol, equal_nan=True, msg=lambda text, at=number: f"{what}, value {at}: {text}"
            )
        else:
            assert a == b, (what, number)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_sees_the_same_everywhere_and_after_a_kill(name: str, tmp_path: Path) -> None:
    program = PROGRAMS[name]
    everywhere = run_ranks(program_scenarios.all_forms, 2, name)
    for result in everywhere:
        for where, (got, counts) in result.items():
            if where.startswith("shardd"):
                stock = where.replace("shardd", "torch")
                if stock in result:
                    _expect(
                        got, result[stock][0], f"{where} against {stock}", program.loose or 1e-5, program.loose or 1e-6
                    )
                if program.plain:
                    _expect(got, result["torch plain"][0], f"{where} against unsharded", 1e-3, 1e-4)
                assert any(c["reductions"] > 0 and c["commits"] > 0 for c in counts), (where, counts)
                in_daemon = where.split()[1] not in program.trainers
                assert any(c["bytes_updated"] > 0 for c in counts) == in_daemon, (where, counts)
    run = relaunched(program_scenarios.disturbed, 2, name, str(tmp_path), restarts=1, name=name, limit_s=120)
    assert run.code == 0 and len(run.of("killed")) == 1, run.log
    _expect_same(name, run, everywhere)


def test_pytorchs_optimizers_step_gradients_that_others_alone_have() -> None:
    for result in run_ranks(program_scenarios.stock_forms, 2, mixture.left_out_experts.__name__):
        for form in ("fully_shard", "wrapper"):
            got, counts = result[f"shardd {form}"]
            _expect(got, result[f"torch {form}"][0], form, 1e-5, 1e-6)
            assert all(c["bytes_updated"] == 0 and c["commits"] > 0 for c in counts), counts
            assert form == "wrapper" or all(c["gradient_questions"] > 0 for c in counts), counts


def _expect_same(name: str, run: Run, everywhere: list[dict[str, Any]] | None) -> None:
    """Bit for bit what the same program sees that nobody disturbs."""
    program = PROGRAMS[name]
    wanted = run_ranks(program_scenarios.undisturbed, 2, name) if everywhere is None or program.stock else None
    for rank in range(2):
        before = wanted[rank] if wanted else everywhere[rank][f"shardd {program.kill[0]}"]  # type: ignore[index]
        _expect(run.results[rank][0], before[0], "killed against not", 0, 0)


@pytest.mark.parametrize("name", ["nano_gpt", "vit", "unet", "gan"])
def test_a_restarted_program_goes_on_at_the_next_daemon(name: str, tmp_path: Path) -> None:
    with kept_daemon() as daemon, daemon.restarted():
        run = relaunched(program_scenarios.disturbed, 2, name, str(tmp_path), restarts=1, name=name, limit_s=120,
                         environment=daemon.environment)  # fmt: skip
        assert run.code == 0 and daemon.deaths == 1, daemon.log() + run.log
    _expect_same(name, run, None)
