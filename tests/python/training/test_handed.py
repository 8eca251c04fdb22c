"""A restart of a program whose optimizer went from the daemon to the trainers is never taken into the middle of its loop."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch

from cluster import Cluster, run_ranks
from torchrun import Run, relaunched
from training import handed_scenarios


def _restarted(name: str, loads: bool, stays: bool, environment: dict[str, str] | None = None) -> Run:
    run = relaunched(handed_scenarios.train, 2, True, loads, stays, restarts=1, name=name, environment=environment)
    assert run.code == 0 and len(run.results) == 2, run.log
    return run


def _same(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert got["state"] == want["state"] != []
    for name, value in want["parameters"].items():
        assert torch.equal(got["parameters"][name], value), name


@pytest.mark.parametrize("stays", [False, True], ids=["one-step", "stays"])
def test_a_restart_behind_a_change_of_optimizers_says_so(stays: bool) -> None:
    for result in _restarted(f"handed-{stays}", False, stays).results.values():
        for part in (
            "cannot be resumed by restart 1",
            "behind committed step ",
            "--stock-optimizers",
            "start_over=True",
        ):
            assert part in result["error"], result


@pytest.mark.parametrize(("loads", "stays"), [(False, False), (True, False), (True, True)])
def test_a_program_that_begins_anew_keeps_its_own_values(loads: bool, stays: bool) -> None:
    undisturbed = run_ranks(handed_scenarios.train, 2, False, False, stays)
    environment = {} if loads else {"SHARDD_START_OVER": "1"}
    run = _restarted(f"anew-{loads}-{stays}", loads, stays, environment)
    for rank, want in enumerate(undisturbed):
        got = run.results[rank]
        assert "error" not in got, got["error"]
        assert any("what the program has trained as job" in line for line in got["lines"]), got["lines"]
        _same(got, want)


def test_a_loop_over_steps_says_that_its_place_is_lost() -> None:
    environment = {"SHARDD_TEST_NO_GROUP": "1", "TORCHELASTIC_RUN_ID": "handed-loop"}
    with tempfile.TemporaryDirectory() as folder, Cluster(2, folder, environment) as cluster:
        for rank in range(2):
            cluster.start(handed_scenarios.loop_over_steps, rank, ())
        assert cluster.wait(300) == {0: 0, 1: 1}, cluster.log(0) + cluster.log(1)
        error = cluster.result(0)
    assert "counts its steps anew" in error and "behind committed step 2" in error, error
