"""The daemon is killed, or stopped, under ranks that train with ``steps``; the next one goes on with their job."""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import socket
import struct
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster import Cluster, RankFailed, run_ranks
from job import daemon_death_scenarios
from kept_daemon import KeptDaemon, kept_daemon
from optimizers import stock_scenarios


class _Embedded:
    """The daemon that the first rank starts, with a custodian that it starts itself. Ranks start the next one."""

    def __init__(self, folder: str) -> None:
        self.socket = f"{folder}/shardd/shardd.sock"
        self.environment = {"XDG_RUNTIME_DIR": folder, "SHARDD_ADDRESS": ""}

    def end(self, number: int) -> None:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(self.socket)
            size = struct.calcsize("3i")
            pid, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
        daemon = os.pidfd_open(pid)
        os.kill(pid, number)
        select.select([daemon], [], [], 20)
        os.close(daemon)

    def start(self) -> None:
        pass

    def log(self) -> str:
        return Path(f"{os.path.dirname(self.socket)}/shardd.log").read_text(errors="replace")[-4000:]


@contextlib.contextmanager
def _daemon(embedded: bool) -> Iterator[KeptDaemon | _Embedded]:
    if embedded:
        with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="shardd-death-") as folder:
            daemon = _Embedded(folder)
            yield daemon
            deadline = time.monotonic() + 20  # after its last job it ends, and its custodian with it
            while time.monotonic() < deadline and os.path.exists(daemon.socket.replace(".sock", "-custody.sock")):
                time.sleep(0.05)
            assert sorted(os.listdir(os.path.dirname(daemon.socket))) == ["autostart.lock", "shardd.log"]
        return
    with kept_daemon() as daemon:
        yield daemon


def _expect_same(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert got["losses"] == want["losses"]
    for what in ("parameters", "states"):
        assert got[what].keys() == want[what].keys()
        for name, value in want[what].items():
            torch.testing.assert_close(
                got[what][name], value, rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}"
            )


def _disturbed(count: int, edits: bool, stock: str, embedded: bool, ends: dict[int, int]) -> list[dict[str, Any]]:
    """Ends the daemon in the middle of a step, with that step's signal."""
    with (
        _daemon(embedded) as daemon,
        tempfile.TemporaryDirectory() as folder,
        Cluster(2, folder, daemon.environment) as cluster,
    ):
        for rank in range(2):
            cluster.start(daemon_death_scenarios.train, rank, (count, edits, stock, list(ends)))
        for step, number in ends.items():
            cluster.wait_for_event(0, 120, event="midway", step=step)
            daemon.end(number)
            daemon.start()
        codes = cluster.wait(180)
        assert not any(codes.values()), "\n".join([daemon.log(), *(cluster.log(rank) for rank in range(2))])
        return [cluster.result(rank) for rank in range(2)]


@pytest.mark.parametrize(
    ("edits", "stock", "embedded"),
    [
        (False, "", False),
        (True, "", False),
        (False, "AdamW", False),
        (False, "SGD", False),  # without state: the copy that passes read is the snapshot
        (False, "AdamW", True),
        (True, "", True),
    ],
)
def test_training_goes_on_bit_for_bit_at_the_next_daemon(edits: bool, stock: str, embedded: bool) -> None:
    ends = {3: signal.SIGKILL, 7: signal.SIGTERM, 11: signal.SIGKILL}
    disturbed = _disturbed(14, edits, stock, embedded, ends)
    undisturbed = run_ranks(daemon_death_scenarios.train, 2, 14, edits, stock, [])
    for got, want in zip(disturbed, undisturbed, strict=True):
        _expect_same(got, want)
        assert bool(want["states"]) == (stock != "SGD")
        # Of a daemon that is stopped behind a step nobody hears.
        assert len(got["resumed"]) >= 2


@pytest.mark.parametrize("step", [1, 3, 7])
def test_a_daemon_killed_inside_an_optimizer_step_loses_that_step_alone(step: int) -> None:
    count = 9
    with (
        _daemon(embedded=False) as daemon,
        tempfile.TemporaryDirectory() as folder,
        Cluster(2, folder, {**daemon.environment, "HOLD": str(step)}) as cluster,
    ):
        for rank in range(2):
            cluster.start(stock_scenarios.train_large_and_be_torn, rank, (count, 0.3))
        cluster.wait_for_event(1, 120, event="torn", step=step)
        daemon.end(signal.SIGKILL)
        daemon.start()
        codes = cluster.wait(180)
        assert not any(codes.values()), "\n".join([daemon.log(), *(cluster.log(rank) for rank in range(2))])
        disturbed = [cluster.result(rank) for rank in range(2)]
    for got, want in zip(disturbed, run_ranks(stock_scenarios.train_large_and_be_torn, 2, count), strict=True):
        assert got["starts"] == [step]
        assert got["losses"] == want["losses"]
        for name, value in want["parameters"].items():
            assert torch.equal(got["parameters"][name], value), name


@pytest.mark.parametrize("stock", ["", "AdamW"])
def test_kills_at_any_moment_lose_nothing(stock: str) -> None:
    kills = int(os.environ.get("SHARDD_DEATHS", "6"))  # a long run: 250
    count = 30 * kills
    random_ = random.Random(int(os.environ.get("SHARDD_DEATH_SEED", "43")))
    with (
        _daemon(embedded=False) as daemon,
        tempfile.TemporaryDirectory() as folder,
        Cluster(2, folder, daemon.environment) as cluster,
    ):
        for rank in range(2):
            cluster.start(daemon_death_scenarios.train, rank, (count, False, stock, [2]))
        cluster.wait_for_event(0, 120, event="midway", step=2)
        killed = 0
        while killed < kills and cluster.processes[0].poll() is None:
            time.sleep(random_.uniform(0, 0.3))
            daemon.end(signal.SIGKILL)
            daemon.start()
            killed += 1
        codes = cluster.wait(600)
        assert not any(codes.values()), "\n".join([daemon.log(), *(cluster.log(rank) for rank in range(2))])
        disturbed = [cluster.result(rank) for rank in range(2)]
    assert killed >= kills // 2, "the ranks were too fast"
    undisturbed = run_ranks(daemon_death_scenarios.train, 2, count, False, stock, [])
    for got, want in zip(disturbed, undisturbed, strict=True):
        _expect_same(got, want)
        assert want["states"] and got["resumed"]


@pytest.mark.parametrize(
    ("stock", "edits", "copies", "zeroes"),
    [
        ("", False, False, 1),
        ("", True, False, 1),
        ("", True, True, 3),  # so gradients of other steps are added to
        ("AdamW", False, False, 3),
        ("SGD", False, False, 1),  # without state: the copy that passes read is the snapshot
    ],
)
def test_a_plain_loop_does_not_notice_daemons_that_are_replaced(
    stock: str, edits: bool, copies: bool, zeroes: int
) -> None:
    count, ends = 24, [3, 4, 9, 14, 20]
    environment = {"SHARDD_PASS_COPIES": "1"} if copies else {}
    arguments = (count, stock, edits, zeroes)
    with (
        _daemon(embedded=False) as daemon,
        tempfile.TemporaryDirectory() as folder,
        Cluster(2, folder, {**daemon.environment, **environment}) as cluster,
    ):
        for rank in range(2):
            cluster.start(daemon_death_scenarios.train_plainly, rank, (*arguments, ends))
        for step in ends:
            try:
                cluster.wait_for_event(0, 120, event="midway", step=step)
            except RankFailed as error:
                raise RankFailed("\n".join([str(error), daemon.log(), cluster.log(1)])) from None
            daemon.end(signal.SIGTERM)
            daemon.start()
        codes = cluster.wait(180)
        assert not any(codes.values()), "\n".join([daemon.log(), *(cluster.log(rank) for rank in range(2))])
        disturbed = [cluster.result(rank) for rank in range(2)]
    undisturbed = run_ranks(daemon_death_scenarios.train_plainly, 2, *arguments, [], environment=environment)
    for got, want in zip(disturbed, undisturbed, strict=True):
        _expect_same(got, want)
