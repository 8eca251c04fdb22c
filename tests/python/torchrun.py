"""A function of a module on every rank, restarted when a worker dies: by torchrun itself, or as torchrun does it.

The second forks ranks from a process that has imported torch, and is ten times as fast.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cluster import Cluster, free_port, rank_environment

_MAIN = str(Path(__file__).parent / "rank_main.py")


class Run:
    """What torchrun's workers of all attempts reported; ``results`` of those that came to their end."""

    def __init__(self, folder: str, code: int) -> None:
        self.code = code
        self.log = Path(f"{folder}/log").read_text(errors="replace")
        self.events: list[dict[str, Any]] = []
        self.results: dict[int, Any] = {}
        for path in Path(folder).glob("*.events"):
            lines = path.read_text().splitlines()
            self.events += [{"rank": int(path.stem), **json.loads(line)} for line in lines]
        for path in Path(folder).glob("*.result"):
            self.results[int(path.stem)] = pickle.loads(path.read_bytes())
        self.events.sort(key=lambda event: event["time"])

    def of(self, name: str, **want: Any) -> list[dict[str, Any]]:
        """Events of that name, of all ranks, in the order of time."""
        return [
            event
            for event in self.events
            if event.get("event") == name and all(event.get(key) == value for key, value in want.items())
        ]


def torchrun(
    function: Callable[..., Any] | None,
    world: int,
    *arguments: Any,
    restarts: int = 0,
    limit_s: float = 600,
    options: tuple[str, ...] = ("--standalone",),
    environment: dict[str, str] | None = None,
    program: tuple[str, ...] = (),
    own_daemon: bool = False,
) -> Run:
    """``function(*arguments)``, or a program, on every rank under torchrun. It is ended after ``limit_s``.

    With ``own_daemon`` the ranks have no address, and start a daemon as a user's would.
    """
    with tempfile.TemporaryDirectory() as folder:
        if function is not None:
            program = (_MAIN, folder)
            for rank in range(world):
                Path(f"{folder}/{rank}.args").write_bytes(
                    pickle.dumps((function.__module__, function.__qualname__, arguments))
                )
        env = rank_environment()
        env.update(
            TORCH_CPP_LOG_LEVEL="ERROR",
            TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",  # else restarted workers may find the dead ones' addresses
        )
        env.update(environment or {})
        if own_daemon:
            env.pop("SHARDD_ADDRESS", None)
            env.update(XDG_RUNTIME_DIR=folder)
        command = [sys.executable, "-m", "torch.distributed.run", *options, f"--nproc-per-node={world}",
                   f"--max-restarts={restarts}", *program]  # fmt: skip
        with open(f"{folder}/log", "wb") as log:
            agent = subprocess.Popen(
                command, env=env, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True)  # fmt: skip
            try:
                code = agent.wait(timeout=limit_s)
            except subprocess.TimeoutExpired:
                code = -signal.SIGALRM
            finally:
                if agent.poll() is None:
                    agent.send_signal(signal.SIGINT)  # it ends its workers
                    try:
                        agent.wait(timeout=10)
                    except subprocess.TimeoutExpired:
                        os.killpg(agent.pid, signal.SIGKILL)
                        agent.wait()
        return Run(folder, code)


def relaunched(
    function: Callable[..., Any],
    world: int,
    *arguments: Any,
    restarts: int = 0,
    name: str = "relaunched",
    limit_s: float = 600,
    environment: dict[str, str] | None = None,
) -> Run:
    """When a rank fails the others are ended with SIGTERM, and all are started again: torchrun without torchrun."""
    deadline = time.monotonic() + limit_s
    with tempfile.TemporaryDirectory() as folder, Cluster(world, folder, environment) as cluster:
        for attempt in range(restarts + 1):
            cluster.port = free_port()
            for rank in range(world):
                variables = {"TORCHELASTIC_RUN_ID": name, "TORCHELASTIC_RESTART_COUNT": str(attempt)}
                cluster.start(function, rank, arguments, variables)
            processes = cluster.processes.values()
            while all(process.poll() in (None, 0) for process in processes):
                if all(process.poll() == 0 for process in processes):
                    break
                if time.monotonic() > deadline:
                    raise AssertionError(f"not done after {limit_s} s\n" + "".join(map(cluster.log, range(world))))
                time.sleep(0.01)
            code = max(abs(process.poll() or 0) for process in processes)
            for process in processes:
                process.terminate()
                process.wait(timeout=20)
            if code == 0:
                break
        Path(f"{folder}/log").write_text("".join(map(cluster.log, range(world))))
        return Run(folder, code)
