"""What ranks do in the tests of a job's secret. Each function runs on every rank."""

from __future__ import annotations

import os

from job.life_scenarios import trainer
from models import train_steps


def resumes(steps: int, dies: bool) -> tuple[int, str]:
    """Trains ``steps`` steps; the step from which on, and why not, if so. The job is kept where the rank ``dies``."""
    from shardd import Error
    from shardd.torch import resume

    model, optimizer = trainer()
    try:
        start, _ = resume(model)
    except Error as error:
        return -1, str(error)
    train_steps(model, optimizer, range(start, start + steps))
    if dies:
        os._exit(7)
    return start, ""
