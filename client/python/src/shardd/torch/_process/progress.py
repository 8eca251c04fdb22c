"""What a long wait says while it lasts, to a person: on a terminal and nowhere else.

Not tqdm, which torch does not bring along, and which counts what a loop does: here one call into the library waits.
"""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType

__all__ = ["Progress"]

_PATIENCE_S = 1.0
_PERIOD_S = 0.2


class Progress:
    """``with Progress("registering the model", shown=rank == 0) as progress: progress.doing("...", done, total)``.

    A line on standard error that is written over and taken away at the end, if the wait is longer than a second and
    standard error is a terminal. It is another thread that writes: waits hold no interpreter lock.
    """

    def __init__(self, what: str, shown: bool = True) -> None:
        self._what = what
        self._doing = ""
        self._bytes = (0, 0)
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        stream = sys.stderr
        if shown and stream is not None and stream.isatty():
            self._thread = threading.Thread(target=self._show, args=(stream,), name="shardd progress", daemon=True)

    def doing(self, what: str, done_bytes: int = 0, total_bytes: int = 0) -> None:
        self._doing = what
        self._bytes = (done_bytes, total_bytes)

    def _line(self, seconds: float) -> str:
        done, total = self._bytes
        part = f" {done >> 20} of {total >> 20} MiB" if total else ""
        return f"shardd: {self._what}: {self._doing}{part} ({seconds:.0f} s)"

    def _show(self, stream: object) -> None:
        started = time.monotonic()
        width = 0
        if not self._over.wait(_PATIENCE_S):
            while True:
                line = self._line(time.monotonic() - started)
                print("\r" + line.ljust(width), end="", file=stream, flush=True)  # type: ignore[call-overload]
                width = len(line)
                if self._over.wait(_PERIOD_S):
                    break
            print("\r" + " " * width + "\r", end="", file=stream, flush=True)  # type: ignore[call-overload]

    def __enter__(self) -> Progress:
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._thread is not None:
            self._over.set()
            self._thread.join()
