"""A job whose update takes seconds is completed by the next daemon, which meanwhile serves others."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
import torch

from cluster import Cluster, run_ranks
from job import take_up_scenarios
from kept_daemon import KeptDaemon, kept_daemon

COUNT = 2
# Rows of the matrix: on a machine on which one is updated too fast to be seen, the next.
SIZES = (1536, 3072, 6144)
COMPLETES, TAKEN_UP = "completes the update of step", "job large-Linear-0 is taken up"
LIMIT_S = 600  # of a machine that has much else to do


def _is_committing(daemon: KeptDaemon) -> bool:
    ctl = os.path.join(os.path.dirname(os.environ["SHARDD_DAEMON"]), "shardctl")
    command = [ctl, "--json", "--address", daemon.address, "jobs"]
    jobs = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout).get("jobs", [])
    return any(job["name"].startswith("large") and job.get("state", "").endswith("COMMITTING") for job in jobs)


def _kill_inside_the_update(daemon: KeptDaemon, large: Cluster) -> bool:
    """The next daemon listens and completes it."""
    large.wait_for_event(0, LIMIT_S, event="steps", step=0)
    deadline = time.monotonic() + LIMIT_S
    while not _is_committing(daemon):
        assert time.monotonic() < deadline, daemon.log()
        if large.processes[0].poll() is not None:
            return False
    daemon.end(signal.SIGKILL)
    before = len(Path(f"{daemon.folder}/log").read_bytes())
    daemon.start()
    log = Path(f"{daemon.folder}/log").read_bytes()[before:].decode()
    return COMPLETES in log and TAKEN_UP not in log


@functools.cache
def _undisturbed(size: int) -> torch.Tensor:
    (values,) = run_ranks(take_up_scenarios.train_large_matrix, 1, size, COUNT)
    assert isinstance(values, torch.Tensor)
    return values


def _others_train_beside(size: int, ends: tuple[int, ...]) -> bool:
    """False: this machine completes such an update before anybody sees it."""
    patient = {"SHARDD_JOB": "large", "SHARDD_TIMEOUT_MS": str(1000 * LIMIT_S)}
    with (
        kept_daemon() as daemon,
        tempfile.TemporaryDirectory() as large_folder,
        tempfile.TemporaryDirectory() as small_folder,
        Cluster(1, large_folder, {**daemon.environment, **patient}) as large,
        Cluster(1, small_folder, {**daemon.environment, "SHARDD_JOB": "small"}) as small,
    ):
        end = f"{small_folder}/end"
        small.start(take_up_scenarios.train_until, 0, (end,))
        small.wait_for_event(0, LIMIT_S, event="trained")
        large.start(take_up_scenarios.train_large_matrix, 0, (size, COUNT))
        if not _kill_inside_the_update(daemon, large):
            return False
        for number in ends:  # of the daemon that completes it
            daemon.end(number)
            daemon.start()
        last = small.events(0)[-1]["step"]
        small.wait_for_event(0, LIMIT_S, event="trained", step=last + 5)
        Path(f"{end}.thaw").touch()
        time.sleep(0.2)  # it asks for more to train, which waits for the other's memory to be known
        beside = TAKEN_UP not in daemon.log().split(COMPLETES)[-1]
        codes = large.wait(LIMIT_S)
        assert not any(codes.values()), "\n".join([daemon.log(), large.log(0)])
        assert TAKEN_UP in daemon.log().split(COMPLETES)[-1]
        last = small.events(0)[-1]["step"]
        small.wait_for_event(0, 60, event="trained", step=last + 2)
        Path(end).touch()
        codes = small.wait(LIMIT_S)
        assert not any(codes.values()), small.log(0)
        assert small.result(0), "it trained on, and no bias"
        got = large.result(0)
    assert torch.equal(got, _undisturbed(size))
    return beside


@pytest.mark.parametrize("ends", [(), (signal.SIGTERM, signal.SIGKILL)], ids=["once", "again-and-again"])
def test_others_train_while_a_long_update_is_completed(ends: tuple[int, ...]) -> None:
    assert any(_others_train_beside(size, ends) for size in SIZES)
