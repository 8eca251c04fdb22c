"""Ranks as real processes: each test runs a function of a module on every rank, started as torchrun starts workers."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickle
import random
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import rank_server

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "client" / "python" / "src"


def _candidates() -> Iterator[int]:
    """Below the ports that the system gives to connections, and each worker of pytest-xdist has its own: nobody else takes one
    between the look at it and its use."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    first, count = 20_000 + worker % 6 * 2_000, 2_000
    start = random.randrange(count)  # not those of another session's
    return (first + (start + number) % count for number in itertools.count())


_ports = _candidates()


def free_port() -> int:
    for port in _ports:
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
    raise AssertionError


def rank_environment() -> dict[str, str]:
    """Of any rank, whoever launches it; its job has no name yet."""
    env = dict(
        os.environ,
        OMP_NUM_THREADS="1",
        GLOO_SOCKET_IFNAME="lo",
        PYTHONPATH=f"{PACKAGE}:{Path(__file__).parent}",
        SHARDD_TIMEOUT_MS="60000",
    )
    for name in ("TORCHELASTIC_RUN_ID", "SHARDD_JOB"):
        env.pop(name, None)
    return env


class RankFailed(AssertionError):
    """A rank ended with a status that the test did not ask for."""


class Cluster:
    """Starts ranks, each with a folder for what it reports; ends all of them with the test."""

    def __init__(self, world: int, folder: str, environment: dict[str, str] | None = None) -> None:
        self.world = world
        self.folder = folder
        self.port = free_port()
        self.environment = environment or {}
        self.processes: dict[int, rank_server.Rank] = {}

    def start(
        self,
        function: Callable[..., Any],
        rank: int,
        arguments: tuple[Any, ...],
        environment: dict[str, str] | None = None,
    ) -> None:
        with open(f"{self.folder}/{rank}.args", "wb") as file:
            pickle.dump((function.__module__, function.__qualname__, arguments), file)
        env = rank_environment()
        env.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(self.world),
            LOCAL_WORLD_SIZE=str(self.world),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(self.port),
            TORCH_CPP_LOG_LEVEL="ERROR",
        )
        env.update(self.environment)
        env.update(environment or {})
        self.processes[rank] = rank_server.start(f"{self.folder}/{rank}", f"{self.folder}/{rank}.log", env)

    def wait(self, limit_s: float, ranks: list[int] | None = None) -> dict[int, int]:
        """Exit statuses; a rank that is not done in time fails the test."""
        deadline = time.monotonic() + limit_s
        codes = {}
        for rank in ranks if ranks is not None else list(self.processes):
            try:
                codes[rank] = self.processes[rank].wait(timeout=max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise RankFailed(f"rank {rank} is not done after {limit_s} s\n{self.log(rank)}") from None
        return codes

    def result(self, rank: int) -> Any:
        with open(f"{self.folder}/{rank}.result", "rb") as file:
            return pickle.load(file)

    def log(self, rank: int) -> str:
        with open(f"{self.folder}/{rank}.log", errors="replace") as file:
            return f"--- rank {rank}\n{file.read()[-4000:]}"

    def events(self, rank: int) -> list[dict[str, Any]]:
        """What the rank wrote with ``report``."""
        path = f"{self.folder}/{rank}.events"
        if not os.path.exists(path):
            return []
        with open(path) as file:
            return [json.loads(line) for line in file if line.endswith("\n")]

    def wait_for_event(self, rank: int, limit_s: float, **want: Any) -> dict[str, Any]:
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            for event in self.events(rank):
                if all(event.get(key) == value for key, value in want.items()):
                    return event
            if self.processes[rank].poll() is not None and time.monotonic() + 1 < deadline:
                deadline = time.monotonic() + 1
            time.sleep(0.01)
        raise RankFailed(f"rank {rank} did not report {want} within {limit_s} s\n{self.log(rank)}")

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        self.processes[rank].send_signal(number)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()


def run_ranks(
    function: Callable[..., Any],
    world: int,
    *arguments: Any,
    limit_s: float = 300,
    environment: dict[str, str] | None = None,
) -> list[Any]:
    """``function(*arguments)`` on every rank, with torch.distributed over gloo; its results by rank."""
    with tempfile.TemporaryDirectory() as folder, Cluster(world, folder, environment) as cluster:
        for rank in range(world):
            cluster.start(function, rank, arguments)
        codes = cluster.wait(limit_s)
        if any(codes.values()):
            raise RankFailed(f"exit statuses {codes}\n" + "\n".join(cluster.log(rank) for rank in range(world)))
        return [cluster.result(rank) for rank in range(world)]
