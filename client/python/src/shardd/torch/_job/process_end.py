"""The end of this process, or of one of its threads: what becomes of its jobs.

A process that ends well needs its jobs no more; one that fails leaves them to the one that is started in its place.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing.util
import os
import sys
import threading
from typing import Any

from shardd.torch._job import job as attached
from shardd.torch._job.job import TorchJob, jobs
from shardd.torch._job.leaving import wait_for_leaving
from shardd.torch._process.extension import _C
from shardd.torch._ranks.this_rank import at_end_of_thread

__all__ = ["failed", "watch_end"]

_failed = False  # the process ends with an exception: its job is to be kept


def failed() -> bool:
    """The process ends with an exception, or another status than 0."""
    return _failed


def watch_end(job: TorchJob) -> None:
    """For a job that was just attached to, in a thread that is a rank or a child of multiprocessing's, too."""
    at_end_of_thread(job.drop)  # the other ranks do not wait for one that is gone
    if multiprocessing.parent_process() is not None:
        multiprocessing.util.Finalize(None, _at_exit_of_child, exitpriority=0)


def _note_exception(previous: Any) -> Any:
    def hook(kind: Any, value: Any, traceback: Any) -> None:
        global _failed
        _failed = True
        previous(kind, value, traceback)
        if threading.current_thread() is threading.main_thread():
            _leave_if_process_stays()

    return hook


def _leave_if_process_stays() -> None:
    """The main thread has ended with an exception, and other threads keep the process: ranks that wait for this one are told."""
    alive = threading.enumerate()
    if hasattr(sys, "ps1") or all(thread.daemon or thread is threading.main_thread() for thread in alive):
        return  # the program goes on, or _at_exit is next
    for job in jobs():
        with contextlib.suppress(RuntimeError):
            job.close(finished=False)


def _at_exit() -> None:
    if attached.attached and not _C.end_waits():
        return  # a thread is still in a job
    names = [job.name for job in attached.attached]
    for job in list(attached.attached):
        if names.count(job.name) > 1 and not _failed:
            job.drop()  # its ranks are threads of this process: none may wait here for another
        else:
            with contextlib.suppress(RuntimeError):  # logged
                job.close(finished=not _failed)
    if not _failed:
        wait_for_leaving()


def _note_exit(previous: Any) -> Any:
    def exit(status: Any = None, /) -> Any:
        global _failed
        _failed = _failed or status not in (None, 0)
        previous(status)

    return exit


def _at_exit_of_child() -> None:
    """multiprocessing ends its children without atexit; an exception on its way out is still seen here."""
    global _failed
    _failed = _failed or sys.exc_info()[0] is not None
    _at_exit()


sys.excepthook = _note_exception(sys.excepthook)
sys.exit = _note_exit(sys.exit)
os.register_at_fork(after_in_child=attached.lose_all)
atexit.register(_at_exit)
