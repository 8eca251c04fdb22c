"""Ranks by fork from a process that has imported torch: seconds less for each than a fresh interpreter.

The server knows nothing of shardd. A rank is a process of its own: environment, log, signals and end are as those of one
that was started afresh, but what is read when a process starts or torch is imported (LD_PRELOAD, MALLOC_*, OMP_*).
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

__all__ = ["Rank", "serve", "start"]

# Modules of torch's that its fully_shard or shardd's import, the first step of an optimizer, or a compilation.
_IMPORTS = (
    "torch.distributed.fsdp",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch._inductor.pattern_matcher",
    "torch._dynamo.backends.common",
)


def serve() -> str:
    """Reads ``{"path", "log", "env"}`` lines, answers with pids, reports ends. Returns in each rank, with its path."""
    for name in _IMPORTS:
        importlib.import_module(name)
    if len(os.listdir("/proc/self/task")) != 1:
        raise RuntimeError("rank server: importing torch started a thread, which a fork would lose")
    # The collector passes over what is there now, in ranks too: else each of them copies all of torch's pages when it ends.
    gc.collect()
    gc.freeze()
    ended, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)
    selector.register(ended, selectors.EVENT_READ)
    children: set[int] = set()
    pending = b""
    while True:
        for key, _ in selector.select():
            data = os.read(key.fd, 65536)
            if key.fd == ended:
                _report_ended(children)
                continue
            if not data:
                for child in children:
                    os.kill(child, signal.SIGKILL)
                os._exit(0)
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                request = json.loads(line)
                child = os.fork()
                if child == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    selector.close()
                    os.close(ended)
                    os.close(wakeup)
                    return _become(request)
                children.add(child)
                print(json.dumps({"started": child}), flush=True)


def _report_ended(children: set[int]) -> None:
    for child in list(children):
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            children.remove(pid)
            print(json.dumps({"ended": pid, "code": os.waitstatus_to_exitcode(status)}), flush=True)


def _become(request: dict[str, Any]) -> str:
    null = os.open(os.devnull, os.O_RDONLY)
    log = os.open(request["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for new, old in ((null, 0), (log, 1), (log, 2)):
        os.dup2(new, old)
    os.close(null)
    os.close(log)
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv[1:] = [request["path"]]
    return str(request["path"])


class Rank:
    """As subprocess.Popen, of a process that the server started."""

    def __init__(self, server: _Server, pid: int) -> None:
        self.pid = pid
        self._server = server

    @property
    def returncode(self) -> int | None:
        return self._server.codes.get(self.pid)

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._server.changed:
            while self.returncode is None:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise subprocess.TimeoutExpired(f"rank, pid {self.pid}", timeout or 0)
                self._server.check()
                self._server.changed.wait(left)
            return self._server.codes[self.pid]

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended, which the server has not said yet
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


class _Server:
    def __init__(self, environment: dict[str, str]) -> None:
        self.codes: dict[int, int] = {}
        self.changed = threading.Condition()
        self._started: list[int] = []
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("rank_main.py")), "--serve"],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        atexit.register(self.close)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            event = json.loads(line)
            with self.changed:
                if "started" in event:
                    self.codes.pop(event["started"], None)  # the system gave the pid out again
                    self._started.append(event["started"])
                else:
                    self.codes[event["ended"]] = event["code"]
                self.changed.notify_all()
        with self.changed:
            self.changed.notify_all()

    def check(self) -> None:
        if not self._reader.is_alive():
            raise RuntimeError(f"the rank server ended with status {self._process.poll()}")

    def start(self, path: str, log: str, env: dict[str, str]) -> Rank:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"path": path, "log": log, "env": env}).encode() + b"\n")
        self._process.stdin.flush()
        with self.changed:
            while not self._started:
                self.check()
                self.changed.wait(1)
            return Rank(self, self._started.pop())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=20)


_server: _Server | None = None


def start(path: str, log: str, env: dict[str, str]) -> Rank:
    """A rank; the server is started with the first one, in its environment."""
    global _server
    if _server is None:
        _server = _Server(env)
    return _server.start(path, log, env)
