"""A program whose optimizer goes from the daemon to the trainers, and which dies later. Each function runs on every rank."""

from __future__ import annotations

import logging
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from models import loss_of
from optimizers.unseen_programs import model_of
from training.resume_scenarios import attempt

STEPS = 6
_HANDED, _LAST = 2, 4  # the step whose optimizer is PyTorch's, and the one behind which rank 1 dies


def _change_state(optimizer: Any) -> None:
    """As nobody but PyTorch's optimizer takes it."""
    param, entry = next(iter(optimizer.state.items()))
    optimizer.state[param] = {**entry, "exp_avg": entry["exp_avg"].clone()}


def _lines() -> list[str]:
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardd.torch").addHandler(handler)
    return lines


def _told(model: torch.nn.Module, error: RuntimeError) -> str:
    """What this rank is told of the restart, also where the other one was told first and left while this one attached."""
    from shardd import StepAborted

    if not isinstance(error, StepAborted):
        return str(error)
    with pytest.raises(RuntimeError) as again:
        loss_of(model, 0, 0, dist.get_rank())
    return str(again.value)


def train(dies: bool, loads: bool, stays: bool) -> dict[str, Any]:
    """An unchanged program. ``loads``: its second attempt gives its parameters values of its own, those that it began with.
    ``stays``: another optimizer steps with the first one, so that the trainers make all later steps, and not one alone."""
    import shardd.torch

    shardd.torch.install()
    lines = _lines()
    model = model_of()
    if loads and attempt() == 1:
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    second: Any = None
    try:
        for step in range(STEPS):
            loss_of(model, step, 0, dist.get_rank()).backward()
            if step == _HANDED and stays:
                second = torch.optim.NAdam(model.parameters(), lr=1e-3)
            elif step == _HANDED:
                _change_state(optimizer)
            optimizer.step()
            if second is not None:
                second.step()
            optimizer.zero_grad()
            if dies and attempt() == 0 and step == _LAST:
                dist.barrier()
                if dist.get_rank() == 1:
                    os._exit(1)
    except RuntimeError as error:
        if attempt() == 0:
            raise
        return {"error": _told(model, error)}
    shardd.torch.commit(model)
    parameters = {n: p.full_tensor().detach().clone() for n, p in model.named_parameters()}
    state = [float(entry["exp_avg"].full_tensor().sum()) for entry in optimizer.state.values()]
    return {"parameters": parameters, "state": state, "lines": lines}


def loop_over_steps() -> str:
    """Rank 1 dies in a step of ``steps`` behind the hand-over; what rank 0 is told in its own process."""
    import shardd.torch

    rank = int(os.environ["RANK"])
    dist.init_process_group("fake", rank=rank, world_size=2)
    shardd.torch.install()
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    try:
        for step in shardd.torch.steps(STEPS):
            with step:
                if rank == 1 and step == _LAST:
                    os._exit(1)
                loss_of(model, step, 0, rank).backward()
                if step == _HANDED:
                    _change_state(optimizer)
                optimizer.step()
                optimizer.zero_grad()
    except RuntimeError as error:
        return str(error)
    return ""
