"""Ways in which a process ends, and with which status. Each function runs on every rank, in every attempt."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import subprocess
import sys
import time
from sys import exit as exit_from_before  # shardd is imported later
from typing import Any

import torch.distributed as dist

from job.life_scenarios import trainer
from models import Case, build, loss_of, shard, train_steps
from rank_main import report
from training.resume_scenarios import attempt

_STEPS = 2
_FREED_S = 20  # of a job that every rank has finished, on a slow machine; its grace time would be longer by far


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


def is_freed(begin: str) -> bool:
    """Whether the daemon has no job whose name begins so, or has none a moment later."""
    ctl = os.path.join(os.path.dirname(os.environ["SHARDD_DAEMON"]), "shardctl")
    deadline = time.monotonic() + _FREED_S
    while True:
        answer = subprocess.run([ctl, "--json", "jobs"], capture_output=True, text=True, check=True).stdout
        if not any(found["name"].startswith(begin) for found in json.loads(answer).get("jobs", [])):
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)


def ends_between_two_optimizers() -> dict[str, Any]:
    """Of the last step one optimizer's part is made, when the program ends well."""
    from shardd.torch import fully_shard
    from shardd.torch.optim import SGD, AdamW

    model = build(Case())
    shard(model, Case(), fully_shard)
    params = list(model.parameters())
    first, second = AdamW(params[:5], lr=1e-2), SGD(params[5:], lr=0.1)
    for step in range(_STEPS):
        loss_of(model, step, 0, dist.get_rank()).backward()
        first.step()
        if step < _STEPS - 1:
            second.step()
            model.zero_grad()
    _name_jobs()
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
    if how == "child-0":  # the launcher's end would free it as well
        report(event="freed", freed=is_freed(f"torch-{os.environ['TORCHELASTIC_RUN_ID'][:40]}"))
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
