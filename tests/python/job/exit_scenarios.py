"""Ways in which a process ends, and with which status. Each function runs on every rank, in every attempt."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
from sys import exit as exit_from_before  # shardd is imported later
from typing import Any

import torch.distributed as dist

from job.life_scenarios import trainer
from models import train_steps
from rank_main import report
from training.resume_scenarios import attempt

_STEPS = 2


def ends(how: str) -> dict[str, Any]:
    """The first attempt makes two steps, and ends. The second says what it goes on from."""
    from shardd.torch import resume

    model, optimizer = trainer()
    begin = resume(model)[0]
    if attempt() == 0:
        train_steps(model, optimizer, range(_STEPS))
        if dist.get_world_size() > 1:
            dist.barrier()
        _name_jobs()
        _end(how)
    return {"begin": begin}


def ends_with_its_result(status: int) -> dict[str, Any]:
    """As ``raise SystemExit(main())``: nothing of the function that has trained is there any more."""

    def main() -> int:
        from shardd.torch import resume

        model, optimizer = trainer()
        begin = resume(model)[0]
        report(event="begin", step=begin)
        train_steps(model, optimizer, range(begin, _STEPS))
        _name_jobs()
        return status if attempt() == 0 else 0

    if status_of_main := main():
        raise SystemExit(status_of_main)
    return {}


def _name_jobs() -> None:
    from shardd.torch._job.job import jobs

    report(event="job", name=jobs()[0].name)


def _end(how: str) -> None:
    if how == "sys.exit":
        sys.exit(3)
    if how == "imported":
        exit_from_before(3)
    if how == "builtin":
        exit(3)
    if how == "raised":
        raise SystemExit(3)
    if how == "text":
        raise SystemExit("no such file")
    if how == "exception":
        raise ArithmeticError("mine")
    if how == "hook":
        sys.excepthook = lambda *_: None
        raise ArithmeticError("nobody sees it")
    if how == "raised-0":
        raise SystemExit(0)
    if how == "caught":
        with contextlib.suppress(SystemExit):
            sys.exit(3)
    if how == "shown":
        try:
            raise ArithmeticError("the program shows it and goes on")
        except ArithmeticError:
            sys.excepthook(*sys.exc_info())


def in_a_child(how: str) -> dict[str, Any]:
    """The rank is a child of multiprocessing's, which ends it by _exit."""
    child_ends = "child-0" if attempt() == 1 else how
    child = multiprocessing.get_context("fork").Process(target=_train_in_child, args=(child_ends,))
    child.start()
    child.join(120)
    if child.exitcode:
        os._exit(child.exitcode)  # this process has no job
    return {}


def _train_in_child(how: str) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    from shardd.torch import resume

    model, optimizer = trainer()
    begin = resume(model)[0]
    report(event="begin", step=begin)
    train_steps(model, optimizer, range(begin, _STEPS))
    _name_jobs()
    if how == "child-3":
        sys.exit(3)
    if how == "child-raises":
        raise ArithmeticError("mine")
    if how == "child-0":
        sys.exit(0)
