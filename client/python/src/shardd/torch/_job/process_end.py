"""The end of this process, or of one of its threads: what becomes of its jobs.

A process whose exit status is 0 needs its jobs no more; any other leaves them to the one that is started in its place. What
Python knows of the status here is a part: ``SystemExit`` passes no hook, and programs replace hooks. So the jobs of a process that
has not failed for certain end in ``exit()``, which is told the status (``Engine.leave_to_exit``).
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

_failed = False  # an exception has ended the main thread: jobs are to be kept
_exits_badly = False  # sys.exit was called with another status than 0, and the program may have caught that


def failed() -> bool:
    """The process ends with an exception or another status than 0, as far as Python has seen."""
    return _failed or _exits_badly


def watch_end(job: TorchJob) -> None:
    """For a job that was just attached to, in a thread that is a rank or a child of multiprocessing's, too."""
    at_end_of_thread(job.drop)  # the other ranks do not wait for one that is gone
    if multiprocessing.parent_process() is not None:
        multiprocessing.util.Finalize(None, _at_exit_of_child, exitpriority=0)


def _note_exception(previous: Any) -> Any:
    def hook(kind: Any, value: Any, traceback: Any) -> None:
        global _failed
        ends = threading.current_thread() is threading.main_thread() and not _is_caught(traceback)
        _failed = _failed or (ends and not hasattr(sys, "ps1"))
        previous(kind, value, traceback)
        if ends:
            _leave_if_process_stays()

    return hook


def _is_caught(traceback: Any) -> bool:
    """Whether the frame that the exception came to still runs: a program that shows it by the hook and goes on."""
    frame: Any = sys._getframe(1)
    while frame is not None and traceback is not None:
        if frame is traceback.tb_frame:
            return True
        frame = frame.f_back
    return False


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
    for job in list(attached.attached):
        with contextlib.suppress(RuntimeError):  # logged
            if _failed:
                job.close(finished=False)
            else:
                job.leave_to_exit(awaits_commit=not _exits_badly)
    if not failed():
        wait_for_leaving()


def _note_exit(previous: Any) -> Any:
    def exit(status: Any = None, /) -> Any:
        global _exits_badly
        _exits_badly = _exits_badly or status not in (None, 0)
        previous(status)

    return exit


def _at_exit_of_child() -> None:
    """multiprocessing ends its children without atexit and exit(); what it makes their status of is still on its way here."""
    if attached.attached and not _C.end_waits():
        return
    error = sys.exc_info()[1]
    status = error.code if isinstance(error, SystemExit) else error
    finished = not _failed and (status is None or (isinstance(status, int) and status == 0))
    names = [job.name for job in attached.attached]
    for job in list(attached.attached):
        if finished and names.count(job.name) > 1:
            job.drop()  # its ranks are threads of this process: none may wait here for another
        else:
            with contextlib.suppress(RuntimeError):
                job.close(finished)
    if finished:
        wait_for_leaving()


sys.excepthook = _note_exception(sys.excepthook)
sys.exit = _note_exit(sys.exit)
os.register_at_fork(after_in_child=attached.lose_all)
atexit.register(_at_exit)
