"""Killed workers under torchrun; values of a resumed job; loops that go on in the surviving process."""

from __future__ import annotations

import difflib
import re
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

import node_daemons
from cluster import Cluster, run_ranks
from models import Case, train_alone
from torchrun import Run, relaunched, torchrun
from training import resume_scenarios

_STEPS = 8
_EXAMPLE = Path(__file__).resolve().parents[3] / "client" / "examples" / "torch"
_SMALL = ("--steps=12", "--width=32", "--layers=2")


def _finished(run: Run) -> list[dict[str, Any]]:
    assert run.code == 0, run.log[-6000:]
    return [run.results[rank] for rank in sorted(run.results)]


def _same(results: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Bit for bit: the daemon adds gradients in the order of ranks, whatever happened in between."""
    for result, want in zip(results, expected, strict=True):
        assert result["losses"] == want["losses"]
        assert result["lr"] == want["lr"]
        for name, value in want["parameters"].items():
            assert torch.equal(result["parameters"][name], value), name


def _nothing_lost(run: Run, kills: resume_scenarios.Kills, kind: str) -> list[dict[str, Any]]:
    results = _finished(run)
    killed = [(e["rank"], e["step"], e["moment"]) for e in run.of("killed")]
    assert killed == list(kills), run.log[-12000:]  # an attempt may have ended by itself
    for number in range(1, len(kills) + 1):
        # What any rank saw committed is there, and its own state with it.
        seen = max([e["step"] for e in run.of("step") if e["attempt"] < number], default=0)
        starts = run.of("start", attempt=number)
        assert len(starts) == 2 and starts[0]["step"] == starts[1]["step"] >= seen, starts
        assert all(e["known"] == e["step"] for e in starts)
    _same(results, run_ranks(resume_scenarios.train, 2, _STEPS, kind, ()))
    counts = results[0]["counters"]
    assert counts["commits"] == _STEPS  # each step once, over all attempts
    in_a_step = sum(moment in ("forward", "backward", "waiting") for _, _, moment in kills)
    assert counts["attaches"] >= 2 * len(kills) and counts["aborts"] >= in_a_step
    return results


def test_a_worker_killed_at_any_moment_costs_nothing() -> None:
    kills = (
        (1, -1, "register"), (0, 1, "forward"), (1, 2, "backward"), (0, 3, "waiting"), (1, 4, "before"), (0, 5, "step"),
        (1, 6, "after"),
    )  # fmt: skip
    run = relaunched(resume_scenarios.train, 2, _STEPS, "daemon", kills, restarts=len(kills))
    _nothing_lost(run, kills, "daemon")


def test_a_worker_killed_between_two_optimizers_costs_nothing() -> None:
    kills = ((1, 1, "between"), (0, 2, "backward"), (1, 3, "before"), (0, 4, "between"), (1, 5, "after"))
    run = relaunched(resume_scenarios.train, 2, _STEPS, "several", kills, restarts=len(kills))
    _nothing_lost(run, kills, "several")


def test_torchrun_restarts_killed_workers_into_their_job() -> None:
    kills = ((1, 2, "backward"), (0, 4, "step"))
    run = torchrun(resume_scenarios.train, 2, _STEPS, "daemon", kills, restarts=len(kills))
    _nothing_lost(run, kills, "daemon")


def _losses(run: Run) -> list[tuple[int, float]]:
    assert run.code == 0, run.log[-6000:]
    return [(int(step), float(loss)) for step, loss in re.findall(r"step +(\d+)  loss ([0-9.]+)", run.log)]


def test_the_example_changes_one_line_of_pytorchs_and_trains_alike() -> None:
    stock, ours = ((_EXAMPLE / name).read_text().splitlines() for name in ("train_pytorch.py", "train.py"))
    changed = [line for line in difflib.ndiff(stock, ours) if line[0] in "+-"]
    assert changed == [
        "- from torch.distributed.fsdp import fully_shard",
        "+ from shardd.torch import fully_shard",
    ]
    runs = [torchrun(None, 2, program=(str(_EXAMPLE / name), *_SMALL))
            for name in ("train_pytorch.py", "train.py")]  # fmt: skip
    assert _losses(runs[0]) == _losses(runs[1]) != []


def test_the_example_survives_a_kill_and_says_the_cost() -> None:
    program = (str(_EXAMPLE / "resume.py"), *_SMALL, "--kill-at=5")
    run = torchrun(None, 2, program=program, restarts=2, own_daemon=True)
    assert [step for step, _ in _losses(run)] == [0, 10, 11]
    characters = 5 * 8 * 64
    for rank in range(2):
        assert f"rank {rank}: resumed at step 5, after {characters} characters" in run.log
    said = re.search(r"SIGKILL to next finished step: ([0-9.]+) s; ([0-9.]+) s of it", run.log)
    assert said is not None and 0 < float(said[2]) < float(said[1])


@pytest.mark.parametrize("collectives", [False, True], ids=["none", "rebuilt"])
def test_a_loop_over_steps_goes_on_in_the_surviving_process(collectives: bool) -> None:
    expected = train_alone(Case(steps=_STEPS), 2)["losses"]

    def environment(restarts: int) -> dict[str, str]:
        return {"TORCHELASTIC_RUN_ID": f"steps-{collectives}", "TORCHELASTIC_RESTART_COUNT": str(restarts)}

    with tempfile.TemporaryDirectory() as folder, Cluster(2, folder, {"SHARDD_TEST_NO_GROUP": "1"}) as cluster:
        for rank in range(2):
            cluster.start(resume_scenarios.survive, rank, (_STEPS, folder, collectives), environment(0))
        assert cluster.wait(300, [1]) == {1: -signal.SIGKILL}, cluster.log(1)
        cluster.start(resume_scenarios.survive, 1, (_STEPS, folder, collectives), environment(1))
        assert set(cluster.wait(300).values()) == {0}, cluster.log(0) + cluster.log(1)
        results = [cluster.result(rank) for rank in range(2)]
        assert len({e["pid"] for e in cluster.events(0) if e["event"] == "begins"}) == 1
    assert results[0]["resumed"] == results[1]["resumed"] and results[0]["resumed"][0] >= 3
    for rank in range(2):
        torch.testing.assert_close(
            torch.tensor(results[rank]["losses"]), torch.tensor(expected[rank]), rtol=1e-5, atol=0
        )
    assert results[0]["counters"]["commits"] == _STEPS and results[0]["counters"]["aborts"] == 1


def test_a_programs_error_in_a_step_stays_its_own() -> None:
    assert run_ranks(resume_scenarios.error_in_a_step, 2) == ["mine", "mine"]


def test_a_restart_takes_committed_values_unless_others_are_loaded() -> None:
    run = relaunched(resume_scenarios.values_win, 2, restarts=1, name="values")
    for result in _finished(run):
        # sys.exit with a status, on all ranks, is no end of the job.
        assert result["step"] == 2 and result["value"] == run.of("first")[0]["value"]
        assert result["loaded"] == [0.5]
        lines = result["lines"]
        assert any("resumed at committed step 2; its parameters replace" in line for line in lines), lines
        assert any("loaded replace the parameters of committed step 2" in line for line in lines), lines
        assert result["counters"]["attaches"] == 4 and result["counters"]["reductions"] >= 12


def test_progress_is_shown_on_a_terminal_and_nowhere_else() -> None:
    shown = run_ranks(resume_scenarios.progress_on_a_terminal, 2, True)[0]
    assert "shardd: job" in shown and "waiting for the other ranks" in shown and shown.endswith("\r"), shown
    assert run_ranks(resume_scenarios.progress_on_a_terminal, 2, False)[0] == ""


def test_ctrl_c_ends_the_wait_for_a_missing_rank() -> None:
    with tempfile.TemporaryDirectory() as folder, Cluster(2, folder) as cluster:
        for rank in range(2):
            cluster.start(resume_scenarios.stays_away, rank, ())
        cluster.wait_for_event(1, 300, event="waiting")
        cluster.kill(1, signal.SIGINT)
        cluster.wait_for_event(1, 5, event="interrupted")
        cluster.kill(0)


def test_a_kill_costs_a_stock_optimizer_its_own_step_alone() -> None:
    kills = ((1, 3, "backward"), (0, 5, "after"))
    run = relaunched(resume_scenarios.train, 2, _STEPS, "stock-sgd", kills, restarts=len(kills), name="stock")
    results = _finished(run)
    first, second = (max(e["step"] for e in run.of("step") if e["attempt"] < number) for number in (1, 2))
    for attempt, reached in ((1, first), (2, second)):
        starts = {e["step"] for e in run.of("start", attempt=attempt)}
        assert len(starts) == 1 and reached - 1 <= starts.pop() <= reached
    _same(results, run_ranks(resume_scenarios.train, 2, _STEPS, "stock-sgd", ()))
    assert results[0]["counters"]["commits"] >= _STEPS - 1


def test_another_run_does_not_take_over_a_job() -> None:
    with tempfile.TemporaryDirectory() as folder, Cluster(1, folder) as cluster:
        for name in ("first", "second"):
            restarts = "0" if name == "first" else "1"
            environment = {"TORCHELASTIC_RUN_ID": name, "TORCHELASTIC_RESTART_COUNT": restarts}
            cluster.start(resume_scenarios.train, 0, (4, "daemon", ((0, 2, "before"),)), environment)
            assert cluster.wait(300) == {0: -signal.SIGKILL if name == "first" else 0}, cluster.log(0)
        assert [e["step"] for e in cluster.events(0) if e["event"] == "start"] == [0, 0]
        assert cluster.result(0)["counters"]["commits"] == 4


@pytest.mark.parametrize("start_over", [False, True], ids=["error", "start-over"])
def test_who_is_restarted_too_late_is_told_what_was_lost(start_over: bool) -> None:
    with node_daemons.nodes(1, peers=False) as daemon:
        environment = {"SHARDD_ADDRESS": daemon.address(0), "SHARDD_GRACE_MS": "300"}
        run = relaunched(resume_scenarios.too_late, 2, start_over, restarts=1, name="late", environment=environment)
    for result in _finished(run):
        if start_over:
            assert result == {"begins": 0}
        else:
            for part in "3 committed steps", "300ms", "SHARDD_GRACE_MS", "start_over=True", "restart 1":
                assert part in result["error"], (part, result)
    assert not start_over or "starts from the values that the program gave: the job of this name had 3" in run.log


def test_a_loop_over_steps_outlives_a_death_while_it_registers() -> None:
    expected = train_alone(Case(steps=3), 2)["losses"]

    def environment(restarts: int) -> dict[str, str]:
        return {"TORCHELASTIC_RUN_ID": "registers", "TORCHELASTIC_RESTART_COUNT": str(restarts)}

    with tempfile.TemporaryDirectory() as folder, Cluster(2, folder, {"SHARDD_TEST_NO_GROUP": "1"}) as cluster:
        for rank in range(2):
            cluster.start(resume_scenarios.survive_registration, rank, (folder,), environment(0))
        assert cluster.wait(300, [1]) == {1: -signal.SIGKILL}, cluster.log(1)
        cluster.start(resume_scenarios.survive_registration, 1, (folder,), environment(1))
        assert set(cluster.wait(300).values()) == {0}, cluster.log(0) + cluster.log(1)
        for rank in range(2):
            torch.testing.assert_close(
                torch.tensor(cluster.result(rank)), torch.tensor(expected[rank]), rtol=1e-5, atol=0
            )


def test_agreements_match_after_a_rank_died_or_was_replaced() -> None:
    expected = train_alone(Case(steps=_STEPS), 2)["losses"]
    environment = {"SHARDD_TEST_NO_GROUP": "1", "TORCHELASTIC_RUN_ID": "agreements"}
    with tempfile.TemporaryDirectory() as folder, Cluster(2, folder, environment) as cluster:
        for rank in range(2):
            cluster.start(resume_scenarios.survive_agreements, rank, (_STEPS, folder))
        assert cluster.wait(300, [1]) == {1: -signal.SIGKILL}, cluster.log(1)
        lives = []
        for life in 1, 2:
            restarts = {"TORCHELASTIC_RESTART_COUNT": str(life)}
            cluster.start(resume_scenarios.survive_agreements, 1, (_STEPS, folder), restarts)
            assert cluster.wait(300, [1]) == {1: 0}, cluster.log(0) + cluster.log(1)
            lives.append(cluster.result(1))
        assert cluster.wait(300) == {0: 0, 1: 0}, cluster.log(0)
        survivor = cluster.result(0)
    assert survivor["begins"] == lives[0]["begins"] == [4] and lives[1]["begins"] == []
    last = range(4, _STEPS - 1)
    for rank, losses in (0, survivor["losses"]), (1, lives[0]["losses"]), (1, lives[1]["losses"]):
        for step, loss in losses.items():
            assert abs(loss - expected[rank][step]) <= 1e-5 * abs(expected[rank][step]), (rank, step)
    assert [*lives[0]["losses"]] == [*last] and [*lives[1]["losses"]] == [_STEPS - 1]
    assert [*survivor["losses"]] == [*range(_STEPS)]
    counts = survivor["counters"]
    # The one who finished ended nothing: its place was taken in the same epoch. The death is an abort only where the step
    # had begun.
    assert counts["commits"] == _STEPS and counts["aborts"] <= 1 and counts["attaches"] == 5
