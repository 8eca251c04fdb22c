"""Whether a model goes on from what its job has committed, and what becomes of a restart that does not find that."""

from __future__ import annotations

import contextlib
import contextvars
import json
import logging
from collections.abc import Iterator

from shardd.torch._job import committed_jobs
from shardd.torch._job.job import TorchJob
from shardd.torch._process import environment

__all__ = ["asks_for_committed", "resuming", "starts_over", "tell_lost"]

logger = logging.getLogger("shardd.torch")

# Of this rank, which may be a thread.
_starts_over = contextvars.ContextVar("starts_over", default=False)
_resumes = contextvars.ContextVar("resumes", default=False)


@contextlib.contextmanager
def resuming(start_over: bool) -> Iterator[None]:
    """Models that are registered inside it go on from what their jobs have committed, whatever the program has loaded before; and
    so do those that are registered later: one model is not taken back while another goes on.

    ``start_over``: they start from the program's values where a restart finds their jobs lost.
    """
    _resumes.set(True)
    token = _starts_over.set(start_over)
    try:
        yield
    finally:
        _starts_over.reset(token)


def asks_for_committed() -> bool:
    """Whether the program has asked for committed values, of whatever model."""
    return _resumes.get()


def starts_over() -> bool:
    """Whether the program, or its user, says that it goes on from values of its own where committed ones are lost."""
    return _starts_over.get() or environment.number(environment.START_OVER, 1) == 1


def tell_lost(job: TorchJob, restarts: int, program_loaded: bool) -> None:
    """Warns that the job has no parameters, or raises RuntimeError where a restart by torchrun was to go on with those that are lost.

    A program that has loaded values of its own goes on from those.
    """
    assert job.engine is not None
    lost = json.loads(job.engine.describe()).get("lost")
    if lost is not None:
        text = lost["text"]
    elif restarts > 0 and (noted := committed_jobs.noted(job.name)) is not None:
        text = noted or "the daemon that had its committed steps is gone, and what it had in memory with it"
    elif restarts > 0 and (other := committed_jobs.other_of_run(job.notes.index, job.name)):
        text = (
            f'what this run has committed is in job "{other}", of another process of torchrun, or of a node with another '
            f"number; {environment.JOB}={other.removesuffix('-' + job.notes.index)} resumes that, where daemons still have it"
        )
    elif restarts > 0:
        logger.warning(
            'job "%s" was not found after a restart; starting from the values that the program gave', job.name
        )
        return
    else:
        committed_jobs.begin_run(job.notes.index)
        return
    if restarts == 0 or program_loaded or starts_over():
        logger.warning('job "%s" starts from the values that the program gave: %s', job.name, text)
    else:
        raise RuntimeError(
            f'register model: job "{job.name}" cannot be resumed by restart {restarts}: {text}. A program that '
            "loads a checkpoint of its own then says so with shardd.torch.resume(model, start_over=True), or "
            f"{environment.START_OVER}=1"
        )
