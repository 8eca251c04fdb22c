"""Stores into protected parameters are noticed by a handler of SIGSEGV, which Python does not know.

What puts back all handlers that Python knew before, as Lightning does after each ``fit``, sets it to the default; the next
store would end the process.
"""

from __future__ import annotations

import functools
import signal
from typing import Any

from shardd.torch import _job, _writes


def _keeping(previous: Any) -> Any:
    @functools.wraps(previous)
    def set_handler(signalnum: int, handler: Any, /) -> Any:
        replaced = previous(signalnum, handler)
        if signalnum == signal.SIGSEGV:
            for job in _job.jobs():
                _writes.watch(job)
        return replaced

    return set_handler


def install() -> None:
    """Called once."""
    signal.signal = _keeping(signal.signal)
