"""A headless Chromium, over the DevTools protocol on a pipe: nothing but Python's own library is needed."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PROGRAMS = ("chromium-headless-shell", "chromium", "google-chrome")
PATIENCE_S = 60.0  # no wait of these tests is longer; reaching it is a failure


def program() -> str | None:
    return next((found for name in PROGRAMS if (found := shutil.which(name))), None)


class Page:
    """One page. What it writes to the console, and every error of script, network and policy, is in ``complaints``."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.complaints: list[str] = []
        # A window of its own: Chromium 156 gives a size to no other target.
        target = self.call("Target.createTarget", url="about:blank", newWindow=True, width=1280, height=900)["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive(PATIENCE_S)
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def _receive(self, limit_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + limit_s
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], max(0.0, deadline - time.monotonic()))
            some = os.read(self._from, 1 << 20) if ready else b""
            assert some, f"the browser does not answer within {limit_s} s, or has ended"
            self._buffer += some
        text, self._buffer = self._buffer.split(b"\0", 1)
        message = json.loads(text)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, method: str | None, parameters: dict[str, Any]) -> None:
        if method == "Runtime.consoleAPICalled":
            self.complaints.append(f"{parameters['type']}: {parameters['args']}")
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(parameters["exceptionDetails"]))
        elif method == "Log.entryAdded":
            self.complaints.append(f"{parameters['entry']['level']}: {parameters['entry']['text']}")
        elif method == "Page.javascriptDialogOpening":
            self.complaints.append(f"dialog: {parameters['message']}")

    def open(self, url: str, dark: bool = False, width: int = 1280, height: int = 900) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Page.navigate", url=url)
        self.wait(f"location.href.startsWith({json.dumps(url)}) && document.readyState === 'complete'")

    def value(self, expression: str) -> Any:
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, f"{expression}: {result['exceptionDetails']['exception']}"
        return result["result"].get("value")

    def text(self, selector: str) -> str:
        return str(self.value(f"document.querySelector({json.dumps(selector)})?.textContent ?? ''"))

    def wait(self, expression: str, holds: Callable[[Any], bool] = bool) -> Any:
        """The value of an expression once it is as wanted."""
        deadline = time.monotonic() + PATIENCE_S
        while not holds(value := self.value(expression)):
            assert time.monotonic() < deadline, f"{expression} is {value!r} after {PATIENCE_S} s; {self.complaints[:3]}"
            time.sleep(0.05)
        return value

    def picture(self, file: Path) -> None:
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=False)
        file.write_bytes(base64.b64decode(shot["data"]))


@contextlib.contextmanager
def browser() -> Iterator[Page]:
    found = program()
    assert found is not None, f"none of {', '.join(PROGRAMS)} is installed"
    to_read, to_write = os.pipe()
    from_read, from_write = os.pipe()

    def take_pipe() -> None:  # the browser reads 3 and writes 4
        reads, writes = os.dup(to_read), os.dup(from_write)
        os.dup2(reads, 3)
        os.dup2(writes, 4)

    with tempfile.TemporaryDirectory(prefix="shardd-browser-", ignore_cleanup_errors=True) as profile:
        # Without its sandbox, which root and containers do not have; it opens pages of this test alone.
        process = subprocess.Popen(
            [found, "--headless", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
             "--no-first-run", "--no-proxy-server", f"--user-data-dir={profile}"],
            close_fds=False, preexec_fn=take_pipe, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
        os.close(to_read)
        os.close(from_write)
        try:
            yield Page(to_write, from_read)
        finally:
            os.close(to_write)  # which ends it, with its children
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10)
            process.kill()
            process.wait()
            os.close(from_read)
