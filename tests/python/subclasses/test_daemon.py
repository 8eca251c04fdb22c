"""Daemons that end under weights that say themselves how they are gathered."""

from __future__ import annotations

import signal
import tempfile
from pathlib import Path

import pytest
import torch

from cluster import Cluster, run_ranks
from kept_daemon import kept_daemon
from subclasses.daemon_scenarios import ended_in_a_pass, trained_over


@pytest.mark.parametrize("kept", [False, True])
def test_a_plain_loop_does_not_notice_replaced_daemons(kept: bool) -> None:
    ends = [2, 4]
    with (
        kept_daemon() as daemon,
        tempfile.TemporaryDirectory() as folder,
        Cluster(2, folder, daemon.environment) as cluster,
    ):
        for rank in range(2):
            cluster.start(trained_over, rank, (folder, 6, ends, kept))
        for step in ends:
            cluster.wait_for_event(0, 120, event="waits", path=f"{folder}/{step}")
            daemon.end(signal.SIGTERM)
            daemon.start()
            Path(f"{folder}/{step}").touch()
        assert set(cluster.wait(120).values()) == {0}, "\n".join([daemon.log(), cluster.log(0), cluster.log(1)])
        disturbed = [cluster.result(rank) for rank in range(2)]
    for got, want in zip(disturbed, run_ranks(trained_over, 2, "", 6, [], kept), strict=True):
        assert got["losses"] == want["losses"]
        for name, value in want["values"].items():
            torch.testing.assert_close(got["values"][name], value, rtol=0, atol=0)


def test_a_daemon_killed_in_a_pass_is_an_error_on_all_ranks() -> None:
    with (
        kept_daemon() as daemon,
        tempfile.TemporaryDirectory() as folder,
        Cluster(2, folder, daemon.environment) as cluster,
    ):
        for rank in range(2):
            cluster.start(ended_in_a_pass, rank, (folder,))
        cluster.wait_for_event(0, 120, event="waits")
        daemon.end(signal.SIGKILL)
        daemon.start()
        Path(f"{folder}/in").touch()
        for rank in range(2):
            text = cluster.wait_for_event(rank, 30, event="said")["text"]
            # A rank that waits for another one's bytes hears of that one, which has ended.
            assert "the daemon is gone" in text or "the process group has failed" in text, text
