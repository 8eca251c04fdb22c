"""A daemon whose jobs outlive it, as its custodian keeps them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["KeptDaemon", "kept_daemon"]


class KeptDaemon:
    """Use kept_daemon()."""

    def __init__(self, folder: str) -> None:
        self.folder, self.address = folder, f"unix:{folder}/shardd.sock"
        self.processes: list[subprocess.Popen[bytes]] = []
        self.pid_file = f"{folder}/pid"  # of the daemon that runs
        self.environment = {"SHARDD_ADDRESS": self.address, "SHARDD_TEST_DAEMON_PID": self.pid_file}
        self.deaths = 0
        binary = os.environ["SHARDD_DAEMON"]
        self._start([f"{binary}-custodian", f"--listen=unix:{folder}/custody.sock"], "custody.sock")
        self._command = [
            binary,
            f"--listen={self.address}",
            "--devices=cpu:2",
            f"--custodian=unix:{folder}/custody.sock",
        ]
        self.start()

    def _start(self, command: list[str], name: str) -> None:
        with open(f"{self.folder}/log", "ab") as log:
            self.processes.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT))
        deadline = time.monotonic() + 20
        while not os.path.exists(f"{self.folder}/{name}"):
            if self.processes[-1].poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"it did not start: {self.log()}")
            time.sleep(0.01)

    def start(self) -> None:
        self._start(self._command, "shardd.sock")
        Path(self.pid_file).write_text(str(self.processes[-1].pid))

    def end(self, number: int) -> None:
        self.processes[-1].send_signal(number)
        self.processes[-1].wait(timeout=20)
        Path(f"{self.folder}/shardd.sock").unlink(missing_ok=True)

    def log(self) -> str:
        return Path(f"{self.folder}/log").read_text(errors="replace")[-4000:]

    @contextlib.contextmanager
    def restarted(self) -> Iterator[None]:
        """Inside, it is started again whenever it has died, as systemd does."""
        done = threading.Event()

        def watch() -> None:
            while not done.wait(0.01):
                if self.processes[-1].poll() is not None:
                    self.deaths += 1
                    Path(f"{self.folder}/shardd.sock").unlink(missing_ok=True)
                    self.start()

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


@contextlib.contextmanager
def kept_daemon() -> Iterator[KeptDaemon]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="shardd-death-") as folder:
        daemon = KeptDaemon(folder)
        try:
            yield daemon
        finally:
            for process in reversed(daemon.processes):
                process.kill()
                process.wait()
