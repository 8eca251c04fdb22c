"""Jobs of models that nobody has any more end beside the program, which does not wait for what they still owe to other ranks.

The garbage collector finds such a model on one rank long before another, anywhere in the program. What was written last becomes
a version with all ranks, so waiting there would hold this rank up in front of a collective that the others are in.
"""

from __future__ import annotations

import _thread
import gc
import logging
import os
from collections.abc import Callable
from typing import TypeVar

from shardd import errors
from shardd.torch._process.extension import _C

__all__ = ["after_dropped_left", "leave_beside", "wait_for_leaving"]

_Result = TypeVar("_Result")

_RESOURCE_EXHAUSTED = 8
_DROPPED_S = 10  # for jobs of dropped models, where there are too many and all ranks drop theirs

_TOGETHER_S = 0.05  # where all ranks drop the model at once it is over by then

logger = logging.getLogger("shardd.torch")

_leaving: list[_thread.LockType] = []  # held until the job is over


def leave_beside(engine: _C.Engine) -> None:
    """Leaves a job that this rank needs no more. The model's tensors have memory of their own when this returns; it raises nothing."""
    over = _thread.allocate_lock()
    over.acquire()

    def detach() -> None:
        try:
            engine.finish_apart()
        finally:
            if over in _leaving:
                _leaving.remove(over)
            over.release()

    _leaving.append(over)
    try:
        engine.release()
    except RuntimeError as error:  # in a collector nobody would see it; the others are told all the same
        logger.debug("leave a job: %s", error)
    try:
        # threading takes locks, which what the collector has interrupted may hold.
        _thread.start_new_thread(detach, ())
    except RuntimeError:  # no more threads, as where the interpreter ends
        detach()
    if over.acquire(timeout=_TOGETHER_S):
        over.release()


def wait_for_leaving(limit_s: float = -1) -> None:
    """Waits until those jobs are over, ``limit_s`` for each; a negative limit means as long as the jobs' own waits last."""
    for over in list(_leaving):
        if over.acquire(timeout=limit_s):
            over.release()


def after_dropped_left(call: Callable[[], _Result]) -> _Result:
    """Returns ``call()``, after a second try where the daemon refuses it because something is used up.

    Before that, models that nobody has give up their jobs: the garbage collector may not have found them yet.
    """
    try:
        return call()
    except errors.Error as error:
        if error.code != _RESOURCE_EXHAUSTED:
            raise
    gc.collect()
    wait_for_leaving(_DROPPED_S)
    return call()


os.register_at_fork(after_in_child=_leaving.clear)
