"""Stores into shards that readers must not see are noticed (write_mode.py says where), for as long as the job is attached.

A handler of SIGSEGV notices them, which Python does not know. What puts back all handlers that Python knew before, as Lightning
does after each ``fit``, sets it to the default; the next store would end the process. So the handler comes back with each call of
``signal.signal``.
"""

from __future__ import annotations

import functools
import signal
from typing import Any

from shardd.torch._job.job import TorchJob, jobs
from shardd.torch._job.leaving import after_dropped_left

__all__ = ["begin", "install"]


def _watch(job: TorchJob) -> None:
    """Stores are seen from now on, where they can be and are in somebody's way."""
    if job.engine is not None and not job.on_gpu and not job.copies:
        job.engine.watch_writes(job.passes)


def begin(job: TorchJob) -> None:
    """For a job that was just attached to."""
    assert job.engine is not None
    if job.copies:
        job.engine.use_copies()
    else:
        after_dropped_left(lambda: _watch(job))


def _keeping(previous: Any) -> Any:
    @functools.wraps(previous)
    def set_handler(signalnum: int, handler: Any, /) -> Any:
        replaced = previous(signalnum, handler)
        if signalnum == signal.SIGSEGV:
            for job in jobs():
                _watch(job)
        return replaced

    return set_handler


def install() -> None:
    """Called once."""
    signal.signal = _keeping(signal.signal)
