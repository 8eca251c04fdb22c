"""Life in a real trainer: workers, signals, threads, logging, the end of the interpreter, forks, odd forwards."""

from __future__ import annotations

import signal
import tempfile
import time

import pytest
import torch

from cluster import Cluster, run_ranks
from job import end_scenarios, forward_scenarios, life_scenarios
from models import Case, train_alone
from torchrun import relaunched

_STEPS = 6

both = pytest.mark.parametrize("stock", [False, True], ids=["daemon", "stock"])


def _close(got: list[float], want: list[float]) -> None:
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=1e-6, atol=0)


def _expected(steps: int = _STEPS) -> list[list[float]]:
    return train_alone(Case(steps=steps), 2)["losses"]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_dead_trainer_is_replaced_while_its_dataloader_workers_live(method: str) -> None:
    run = relaunched(life_scenarios.dies_among_workers, 2, _STEPS, method, restarts=1, name=f"workers-{method}")
    assert run.code == 0, run.log
    second = run.of("start", first=False)
    assert [e["step"] for e in second] == [_STEPS // 2 + 1] * 2
    for event in run.of("busy"):  # of both ranks' first attempt; SIGKILLed and SIGTERMed trainers end no worker
        assert event["time"] < second[0]["time"]
    assert len(run.of("busy", rank=1)) == 1
    for rank, losses in enumerate(_expected()):
        _close(run.results[rank]["losses"], losses[_STEPS // 2 + 1 :])
    assert run.results[0]["counters"]["commits"] == _STEPS


def test_ranks_are_told_when_one_raises_and_lives_on() -> None:
    with tempfile.TemporaryDirectory() as folder, Cluster(2, folder) as cluster:
        for rank in range(2):
            cluster.start(life_scenarios.raises_and_lives_on, rank, (folder,))
        assert cluster.wait(40) == {0: 0, 1: 1}, cluster.log(0) + cluster.log(1)  # silence would take two minutes


@pytest.mark.parametrize(("wait", "stock"), [
    ("register", False), ("backward", False), ("step", False), ("load", False), ("backward", True), ("step", True),
])  # fmt: skip
def test_ctrl_c_in_any_wait_raises_at_once(wait: str, stock: bool) -> None:
    edits = {"SHARDD_IN_PLACE_EDITS": "0"} if wait == "load" else {}
    with tempfile.TemporaryDirectory() as folder, Cluster(2, folder, edits) as cluster:
        for rank in range(2):
            cluster.start(life_scenarios.interrupted_in, rank, (wait, stock))
        cluster.wait_for_event(1, 300, event="sleeping")
        cluster.wait_for_event(0, 300, event="waiting")
        time.sleep(0.5)  # into the wait; sooner would be right as well, and show less
        cluster.kill(0, signal.SIGINT)
        cluster.wait_for_event(0, 5, event="interrupted")  # the waits themselves would last a minute
        cluster.kill(1, signal.SIGUSR1)
        assert set(cluster.wait(300).values()) == {0}, cluster.log(0) + cluster.log(1)


@both
def test_python_threads_run_while_a_rank_waits(stock: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        results = run_ranks(
            life_scenarios.others_run_while_waiting, 2, folder, stock, environment={"SHARDD_IN_PLACE_EDITS": "0"}
        )
    assert len(results[0]["seen"]) == (3 if stock else 4)
    assert all(ran for _, ran in results[0]["seen"]), results[0]["seen"]
    assert results[0]["counters"]["unshards"] > 0


def test_models_train_in_threads_even_two_at_once() -> None:
    expected = _expected()
    for rank, result in enumerate(run_ranks(life_scenarios.train_in_threads, 2)):
        _close(result["losses"], expected[rank])
        for losses in result["at_once"]:
            _close(losses, expected[rank])
        assert [counts["commits"] for counts in result["counters"]] == [_STEPS] * 3


def test_what_is_said_goes_through_logging_and_warnings() -> None:
    for result in run_ranks(life_scenarios.logs_and_warnings, 2):
        assert any(line.startswith("shardd.torch INFO") and "registered" in line for line in result["lines"])
        assert any("shardd.torch WARNING" in line and "replace the parameters" in line for line in result["lines"])
        assert any("returned a view" in text for text in result["warnings"])
        assert "returned a view" in result["raised"]


@pytest.mark.parametrize(("how", "status"), [
    ("unregistered", 0), ("nothing-alive", 0), ("alive", 0), ("unsharded", 0), ("backward", 0), ("thread", 0),
    ("exit-status", 3), ("exception", 1),
])  # fmt: skip
def test_the_interpreter_ends_well(how: str, status: int) -> None:
    world = 1 if status else 2  # a rank that fails aborts what the others are in
    with tempfile.TemporaryDirectory() as folder, Cluster(world, folder, {"SHARDD_TEST_WHOLE_END": "1"}) as cluster:
        for rank in range(world):
            cluster.start(end_scenarios.ends, rank, (how,))
        codes = cluster.wait(300)
        assert codes == dict.fromkeys(range(world), status), [cluster.log(rank) for rank in range(world)]
        for rank in range(world):
            assert "terminate" not in cluster.log(rank) and "Fatal" not in cluster.log(rank)
            events = {event["event"]: event for event in cluster.events(rank)}
            if how not in ("unregistered", "nothing-alive"):
                assert events["read"]["total"] == pytest.approx(events["trained"]["total"], rel=1e-6)


@both
def test_a_rank_finishes_during_the_last_forward_of_another(stock: bool) -> None:
    first, _ = run_ranks(end_scenarios.finishes_first, 2, stock, "forward")
    assert first["counters"]["aborts"] == 0
    _close([first["loss"]], [train_alone(Case(steps=3), 2)["losses"][0][2]])


@both
def test_a_rank_with_a_late_backward_is_told_who_finished(stock: bool) -> None:
    first, _ = run_ranks(end_scenarios.finishes_first, 2, stock, "backward")
    assert first["text"].startswith("StepAborted") and "rank 1 has finished" in first["text"]


@both
def test_a_forked_child_gets_errors_by_name_and_harms_nothing(stock: bool) -> None:
    expected = _expected()
    for rank, result in enumerate(run_ranks(end_scenarios.fork_while_registered, 2, stock)):
        for use, text in result["texts"].items():
            assert "fork" in text, (use, text)
        assert '"embed.weight"' in result["texts"]["parameter"]
        assert result["codes"] == (0, 0)
        _close(result["losses"], expected[rank])
        assert result["counters"]["reductions"] >= 4 * _STEPS and result["counters"]["aborts"] == 0


@both
def test_groups_may_be_used_repeatedly_out_of_order_or_never(stock: bool) -> None:
    orders = [[0, 1, 2], [0, 1, 1, 2], [2, 1, 0], [0, 2], [1, 0, 1, 0, 2], [0, 1, 2]]
    expected = forward_scenarios.alone(orders, 2)
    for rank, result in enumerate(run_ranks(forward_scenarios.uses_of_groups, 2, orders, stock)):
        _close(result["losses"], expected[rank])
        assert result["counters"]["unshards"] > 2 * 4 * len(orders) and result["counters"]["aborts"] == 0


@pytest.mark.parametrize("reshards", [True, False])
def test_a_list_item_run_by_itself_gets_gradients_at_once(reshards: bool) -> None:
    for ours, torchs, counts in run_ranks(forward_scenarios.head_in_chunks, 2, reshards):
        assert len(ours) == len(torchs) == 3 * (4 * reshards + 5)
        for mine, wanted in zip(ours, torchs):
            torch.testing.assert_close(mine, wanted, rtol=1e-6, atol=1e-8)
        assert counts["reductions"] >= 3 * (4 + 2)


def test_a_new_plan_takes_nothing_from_ranks_using_the_first() -> None:
    expected = _expected(3)
    results = run_ranks(forward_scenarios.optimizer_after_a_use_by_hand, 2, 3)
    for rank, result in enumerate(results):
        _close(result["losses"], expected[rank])
        assert result["counters"]["commits"] == 3 and result["counters"]["aborts"] == 0
    assert results[1]["total"] != 0


@both
def test_a_block_trains_alone(stock: bool) -> None:
    for result in run_ranks(forward_scenarios.block_alone, 2, stock):
        _close(result["ours"], result["alone"])
        assert result["counters"]["aborts"] == 0


@both
@pytest.mark.parametrize("ranks", [(0, 1), (1,)], ids=["all", "one"])
@pytest.mark.parametrize("where", ["between"])
def test_an_exception_of_the_program_costs_that_forward_alone(where: str, ranks: tuple[int, ...], stock: bool) -> None:
    expected = _expected(4)
    for rank, result in enumerate(run_ranks(forward_scenarios.exception_then_again, 2, where, ranks, stock)):
        assert result["caught"] == (rank in ranks)
        _close(result["losses"], expected[rank])
        assert result["counters"]["attaches"] == 2 and result["counters"]["aborts"] == 0
