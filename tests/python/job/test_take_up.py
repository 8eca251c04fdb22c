"""A job whose update takes seconds is completed by the next daemon, which meanwhile serves others."""

from __future__ import annotations

import signal
import tempfile
import time
from pathlib import Path

import pytest
import torch

from cluster import Cluster, run_ranks
from job import take_up_scenarios
from kept_daemon import KeptDaemon, kept_daemon

SIZE, COUNT = 1536, 3
COMPLETES, TAKEN_UP = "completes the update of step", "job large-Linear-0 is taken up"


def _kill_inside_the_update(daemon: KeptDaemon, large: Cluster) -> str:
    """The log of the next daemon, which listens: what it has written so far."""
    for step in range(1, COUNT):
        large.wait_for_event(0, 120, event="steps", step=step)
        time.sleep(0.3)  # it is decided, and takes seconds
        daemon.end(signal.SIGKILL)
        before = len(Path(f"{daemon.folder}/log").read_bytes())
        daemon.start()
        log = Path(f"{daemon.folder}/log").read_bytes()[before:].decode()
        if COMPLETES in log:
            return log
    raise AssertionError(f"no update was under way: {daemon.log()}")


@pytest.mark.parametrize("ends", [(), (signal.SIGTERM, signal.SIGKILL)], ids=["once", "again-and-again"])
def test_others_train_while_a_long_update_is_completed(ends: tuple[int, ...]) -> None:
    with (
        kept_daemon() as daemon,
        tempfile.TemporaryDirectory() as large_folder,
        tempfile.TemporaryDirectory() as small_folder,
        Cluster(1, large_folder, {**daemon.environment, "SHARDD_JOB": "large"}) as large,
        Cluster(1, small_folder, {**daemon.environment, "SHARDD_JOB": "small"}) as small,
    ):
        end = f"{small_folder}/end"
        small.start(take_up_scenarios.train_until, 0, (end,))
        small.wait_for_event(0, 120, event="trained")
        large.start(take_up_scenarios.train_large_matrix, 0, (SIZE, COUNT))
        log = _kill_inside_the_update(daemon, large)
        assert TAKEN_UP not in log, log
        for number in ends:  # of the daemon that completes it
            daemon.end(number)
            daemon.start()
        last = small.events(0)[-1]["step"]
        small.wait_for_event(0, 60, event="trained", step=last + 5)
        Path(f"{end}.thaw").touch()
        time.sleep(0.2)  # it asks for more to train, which waits for the other's memory to be known
        assert TAKEN_UP not in daemon.log().split(COMPLETES)[-1], daemon.log()
        codes = large.wait(180)
        assert not any(codes.values()), "\n".join([daemon.log(), large.log(0)])
        assert TAKEN_UP in daemon.log().split(COMPLETES)[-1]
        last = small.events(0)[-1]["step"]
        small.wait_for_event(0, 60, event="trained", step=last + 2)
        Path(end).touch()
        codes = small.wait(60)
        assert not any(codes.values()), small.log(0)
        assert small.result(0), "it trained on, and no bias"
        got = large.result(0)
    (want,) = run_ranks(take_up_scenarios.train_large_matrix, 1, SIZE, COUNT)
    assert torch.equal(got, want)
