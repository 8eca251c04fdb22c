"""Killed trainers, waits that are interrupted: with real processes and real signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import scenarios
from cluster import PACKAGE, Cluster, free_port
from models import Case, train_alone

_STEPS = 8


def _reference() -> list[list[float]]:
    return train_alone(Case(steps=_STEPS), 2)["losses"]


def _environment(name: str, restarts: int) -> dict[str, str]:
    return {"TORCHELASTIC_RUN_ID": name, "TORCHELASTIC_RESTART_COUNT": str(restarts)}


def test_restarted_workers_go_on_where_the_job_is() -> None:
    with tempfile.TemporaryDirectory() as folder, Cluster(2, folder) as cluster:
        for rank in range(2):
            cluster.start(scenarios.train_and_be_killed, rank, (_STEPS, folder), _environment("killed", 0))
        cluster.wait_for_event(1, 60, event="before", step=4)
        cluster.kill(1)
        cluster.processes[1].wait()
        # What a launcher does: the survivor is ended too, then both are started again.
        cluster.kill(0, signal.SIGTERM)
        cluster.processes[0].wait()
        committed = [e["step"] for e in cluster.events(0) if e["event"] == "step"]
        cluster.port = free_port()
        for rank in range(2):
            cluster.start(scenarios.train_and_be_killed, rank, (_STEPS, folder), _environment("killed", 1))
        assert set(cluster.wait(120).values()) == {0}, cluster.log(0) + cluster.log(1)
        start = [e for e in cluster.events(0) if e["event"] == "start"][1]
        assert start["step"] >= len(committed)  # nothing that a rank saw committed is lost
        assert start["known"] == start["step"]
        results = [cluster.result(rank) for rank in range(2)]
    for rank, losses in enumerate(_reference()):
        torch.testing.assert_close(torch.tensor(results[rank]["losses"]), torch.tensor(losses), rtol=1e-5, atol=0)
    assert results[0]["counters"]["commits"] == _STEPS
    assert results[0]["counters"]["aborts"] >= 1 and results[0]["counters"]["attaches"] == 4


def test_another_run_does_not_take_over_a_job() -> None:
    with tempfile.TemporaryDirectory() as folder, Cluster(1, folder) as cluster:
        cluster.start(scenarios.train_and_be_killed, 0, (3, folder), _environment("first", 0))
        cluster.wait_for_event(0, 60, event="step", step=1)
        cluster.kill(0)
        cluster.processes[0].wait()
        cluster.start(scenarios.train_and_be_killed, 0, (3, folder), _environment("second", 1))
        assert cluster.wait(60) == {0: 0}, cluster.log(0)
        starts = [e["step"] for e in cluster.events(0) if e["event"] == "start"]
        assert starts == [0, 0]


def test_a_survivor_goes_on_with_the_replacement() -> None:
    with tempfile.TemporaryDirectory() as folder, Cluster(2, folder, {"SHARDD_TEST_NO_GROUP": "1"}) as cluster:
        for rank in range(2):
            cluster.start(scenarios.survive_a_death, rank, (_STEPS,), _environment("survive", 0))
        cluster.wait_for_event(1, 60, event="step", step=3)
        killed = time.monotonic()
        cluster.kill(1)
        cluster.processes[1].wait()
        event = cluster.wait_for_event(0, 10, event="aborted")
        assert time.monotonic() - killed < 2
        assert "rank 1" in event["message"]
        cluster.start(scenarios.survive_a_death, 1, (_STEPS,), _environment("survive", 1))
        assert set(cluster.wait(120).values()) == {0}, cluster.log(0) + cluster.log(1)
        results = [cluster.result(rank) for rank in range(2)]
        assert len({e["pid"] for e in cluster.events(0) if e["event"] == "start"}) == 1
    assert results[0]["aborted"] == 1
    for rank, losses in enumerate(_reference()):
        torch.testing.assert_close(torch.tensor(results[rank]["losses"]), torch.tensor(losses), rtol=1e-5, atol=0)


def test_ctrl_c_in_a_wait_raises_at_once() -> None:
    with tempfile.TemporaryDirectory() as folder, Cluster(2, folder) as cluster:
        for rank in range(2):
            cluster.start(scenarios.wait_for_ever, rank, ())
        cluster.wait_for_event(1, 60, event="sleeping")
        cluster.wait_for_event(0, 60, event="waiting")
        time.sleep(0.5)  # into the wait; sooner would be right as well, and show less
        sent = time.monotonic()
        cluster.kill(0, signal.SIGINT)
        cluster.wait_for_event(0, 5, event="interrupted")
        assert time.monotonic() - sent < 1
        cluster.kill(1, signal.SIGUSR1)
        assert set(cluster.wait(60).values()) == {0}, cluster.log(0) + cluster.log(1)


def test_torchrun_restarts_a_killed_worker_into_its_job() -> None:
    example = Path(PACKAGE).parents[1] / "examples" / "torch" / "train.py"
    with tempfile.TemporaryDirectory() as folder:
        environment = dict(
            os.environ, PYTHONPATH=str(PACKAGE), TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1", OMP_NUM_THREADS="1"
        )
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=2",
                   str(example), "--steps=12", "--width=32", "--layers=2", "--kill-at=5"]  # fmt: skip
        with open(f"{folder}/log", "w") as log:
            code = subprocess.run(
                command, env=environment, stdout=log, stderr=subprocess.STDOUT, timeout=150, check=False
            ).returncode
        text = Path(f"{folder}/log").read_text()
        assert code == 0, text[-4000:]
        assert "resumed at step 5" in text and "step   11 " in text, text[-4000:]
        assert "SIGKILL to next finished step" in text
