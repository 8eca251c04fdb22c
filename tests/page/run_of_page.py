"""What the page is shown: a daemon with trainers, or a recorded answer that this program serves in its place."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SOURCES = HERE.parents[1] / "server" / "metrics" / "page"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


class Daemon:
    """A daemon with its shardd-metrics and trainers of the example; ended with the test."""

    def __init__(self, programs: Path, folder: str) -> None:
        self.programs, self.folder = programs, folder
        self.address = f"unix:{folder}/shardd.sock"
        self.log = Path(folder, "log")
        self.processes: list[subprocess.Popen[bytes]] = []
        self.process = self._start(
            "shardd", f"--listen={self.address}", "--devices=cpu:4", "--metrics_listen=127.0.0.1:0",
            f"--history_dir={folder}/history")  # fmt: skip
        self.port = self._find_port()

    def _start(self, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        with open(self.log, "ab") as log:
            process = subprocess.Popen(
                [self.programs / program, *arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=log)  # fmt: skip
        self.processes.append(process)
        return process

    def _find_port(self) -> int:
        deadline = time.monotonic() + 20
        while not (found := re.search(r"serves http://127\.0\.0\.1:(\d+)", self.log.read_text())):
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.01)
        return int(found[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def rank(self, job: str, rank: int, ranks: int) -> subprocess.Popen[bytes]:
        return self._start(
            "gpt", "--layers=2", "--width=64", "--heads=2", "--steps=1000000", "--log_every=0", f"--job={job}",
            f"--rank={rank}", f"--ranks={ranks}", f"--address={self.address}")  # fmt: skip

    def end(self) -> None:
        for process in self.processes:
            process.send_signal(signal.SIGKILL)
        for process in self.processes:
            process.wait()


@contextlib.contextmanager
def daemon(programs: Path) -> Iterator[Daemon]:
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=place, prefix="shardd-page-", ignore_cleanup_errors=True) as folder:
        made = Daemon(programs, folder)
        try:
            yield made
        finally:
            made.end()


def recorded(ranks: int | None = None) -> dict[str, Any]:
    """An answer of a shardd-metrics (status.json), or one that has so many ranks in its first job, each with what the first has."""
    status = json.loads((HERE / "status.json").read_text())
    if ranks is not None:
        job, selected = status["jobs"][0], status["selected"]
        job["world_size"] = job["attached_ranks"] = ranks
        job["rank_states"] = (job["rank_states"] * ranks)[:ranks]
        selected["ranks"] = [dict(selected["ranks"][rank % len(selected["ranks"])]) for rank in range(ranks)]
    return status


class Served:
    """The page's files, with whatever ``status`` is, at a port of this process. The headers are not the real server's."""

    def __init__(self, status: dict[str, Any]) -> None:
        self.status = status
        self.asked = 0
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path = self.path.split("?")[0]
                if path == "/status.json":
                    outer.asked += 1
                    outer.status["time_unix_ms"] += 1000
                    self._answer("application/json", json.dumps(outer.status).encode())
                    return
                file = SOURCES / (path[1:] or "status.html")
                if path.count("/") != 1 or not file.is_file():
                    self.send_error(404)
                    return
                self._answer(TYPES[file.suffix], file.read_bytes())

            def _answer(self, kind: str, body: bytes) -> None:
                self.send_response(200)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/"

    def end(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
