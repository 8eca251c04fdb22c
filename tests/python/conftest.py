"""A daemon for the tests, so that none of this user's own is touched."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from cluster import PACKAGE, ROOT

sys.path.insert(0, str(PACKAGE))


def _daemon_binary() -> str:
    """Beside it is shardctl, which tests find through the same variable."""
    return os.environ.setdefault("SHARDD_DAEMON", str(ROOT / "build" / "dev" / "bin" / "shardd"))


@pytest.fixture(scope="session", autouse=True)
def daemon() -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="shardd-test-") as folder:
        address = f"unix:{folder}/shardd.sock"
        with open(f"{folder}/log", "wb") as log:
            process = subprocess.Popen(
                [_daemon_binary(), f"--listen={address}", "--devices=cpu:4"],
                stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)  # fmt: skip
        deadline = time.monotonic() + 20
        while not os.path.exists(f"{folder}/shardd.sock"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the daemon did not start: {Path(folder, 'log').read_text()}")
            time.sleep(0.01)
        os.environ["SHARDD_ADDRESS"] = address
        try:
            yield address
        finally:
            process.terminate()
            process.wait(timeout=20)


def _worker_scope(nodeid: str) -> str:
    """Cases of one scope are one worker's of pytest-xdist. Those of test_unseen.py share what programs of their group have seen:
    each worker that has some of them would run all of these again."""
    file, _, case = nodeid.partition("::")
    if not file.endswith("test_unseen.py"):
        return nodeid
    if "over_nodes" in case:
        return "unseen over nodes"
    return f"unseen {case.partition('[')[2].partition('-')[0] or 'falls back'}"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return _worker_scope(nodeid)

    return Scheduling(config, log)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The line that .ci/run adds up."""

    def count(*kinds: str) -> int:
        return sum(len(terminalreporter.stats.get(kind, ())) for kind in kinds)

    skipped = count("skipped", "xfailed")
    terminalreporter.ensure_newline()
    terminalreporter.write_line(
        f"{count('passed')} passed, {count('failed', 'error', 'xpassed')} failed"
        + (f", {skipped} skipped" if skipped else "")
    )
