"""A training loop that goes on, in the same process, when another rank dies."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from torch import nn

from shardd.errors import StepAborted, Unavailable
from shardd.torch._job.job import job_of
from shardd.torch._training import api

__all__ = ["Step", "steps"]

logger = logging.getLogger("shardd.torch")

# A collective of the program's fails the moment its peer is gone; the daemon says so a little later.
_EXPLANATION_S = 2.0
_POLL_S = 0.02
_LOST = re.compile(r"rank \d+ is lost: ")  # as the daemon says that a process ended


class Step(int):
    """The number of a step. ``with step:`` around its body ends it quietly where it was aborted."""

    resumed: bool  # the first since this process attached, or attached again, to a job that has committed steps
    state: Any  # what this rank rode with before the last committed step; None: nothing, or not the first
    _module: nn.Module | None
    _rebuilds: bool
    _aborted: BaseException | None

    def __enter__(self) -> Step:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if isinstance(error, (StepAborted, Unavailable)) or (
            self._rebuilds and isinstance(error, RuntimeError) and _job_was_aborted(self._module)
        ):
            self._aborted = error.with_traceback(None)  # its frames hold the graph of what is to be done again
        return self._aborted is not None


def _job_was_aborted(module: nn.Module | None) -> bool:
    """Whether a rank of the job has died. Waits a little: the collective that failed may have been faster."""
    engine = api.registered_job(module).engine
    assert engine is not None
    attached = engine.info()["epoch"]
    deadline = time.monotonic() + _EXPLANATION_S
    while time.monotonic() < deadline:
        try:
            if int(json.loads(engine.describe())["epoch"]) != attached:
                return True
        except Unavailable:
            return True
        time.sleep(_POLL_S)
    return False


class _Patience:
    """Ends a loop of attempts where the same thing ends each of them: that is no death, which the next attempt outlives."""

    def __init__(self) -> None:
        self._before = ""

    def try_again(self, error: StepAborted, what: str) -> None:
        """Logs that the attempt is made anew. Raises ``error`` where the one before ended in the same words."""
        text = str(error)
        if text == self._before and _LOST.search(text) is None:
            raise error
        self._before = text
        logger.warning("%s: %s", what, error)


def _begin(module: nn.Module | None, rebuild: Callable[[], None] | None) -> tuple[int, Any]:
    patience = _Patience()
    while True:
        try:
            return api.resume(module)
        except StepAborted as error:
            patience.try_again(error, "register again, because the attempt was aborted")
        if rebuild is not None:
            rebuild()


def _check_place(module: nn.Module | None, reason: BaseException) -> None:
    """Raises where committed steps are counted in another job than the one that the loop began with."""
    job = job_of(api.root_of(module))
    if job is not None and job.before is not None:
        raise RuntimeError(
            f'steps: the loop cannot go on after an abort: job "{job.name}" counts its steps anew, as the program\'s optimizers '
            f'changed behind committed step {job.before.step} of job "{job.before.names[-1]}"; let PyTorch make all steps '
            "(--stock-optimizers, install(optimizers=False)), or build all optimizers before the model's first use"
        ) from reason


def _attach_again(module: nn.Module | None) -> tuple[int, Any]:
    patience = _Patience()
    while True:
        try:
            return api.reattach(module)
        except StepAborted as error:  # one more death meanwhile
            patience.try_again(error, "attach again")


def steps(stop: int, module: nn.Module | None = None, *, rebuild: Callable[[], None] | None = None) -> Iterator[Step]:
    """Step numbers from the last committed step to ``stop``, each of which is one optimizer step.

        for step in shardd.torch.steps(1000):
            with step:
                loss = model(batch(step)); loss.backward(); optimizer.step(); optimizer.zero_grad()

    A step that is aborted in the ``with``, because a rank died or the daemon is gone, is dropped, and so is a registration
    that a death aborts: this rank attaches again, waits for the others, and goes on after the last committed step. ``step.resumed`` and ``step.state`` then say
    so, as they do in a process that was started anew.

    The program's own process groups break with a dead rank. A loop with collectives of its own gives ``rebuild``, which
    makes them anew and is called before attaching again; an error of such a collective then counts as an abort if a rank
    has died. Without ``module`` the process has one model.
    """
    number, state = _begin(module, rebuild)
    resumed = number > 0
    while number < stop:
        step = Step(number)
        step.resumed, step.state = resumed, state
        step._module, step._rebuilds, step._aborted = module, rebuild is not None, None
        yield step
        resumed, state = False, None
        if step._aborted is None:
            number += 1
            continue
        reason, step._aborted = step._aborted, None
        _check_place(module, reason)
        if rebuild is not None and not api.lost_nothing(module):
            rebuild()
        number, state = _attach_again(module)
        resumed = True
        logger.warning("step %d was aborted (%s); going on at step %d", step, reason, number)
