"""Programs that use a model between the steps of its optimizers, for test_unseen.py: the daemon has made a part of a step."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

from models import loss_of
from optimizers.optim_cases import parameters_of
from optimizers.several_programs import end_of_two, every_third_time, two
from optimizers.unseen_programs import Program, backward, model_of, program

__all__ = ["Program"]


def _clamp(model: nn.Module, bound: float = 0.05) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.clamp_(-bound, bound)


@program("several open")
def weights_are_clamped_between_the_steps_of_two() -> dict[str, Any]:
    """As a WGAN does it: a forward comes between, too."""
    model = model_of()
    body, rest = two(model)
    losses, seen = [], []
    for step in range(4):
        losses.append(backward(model, 2 * step))
        body.step()
        _clamp(model)
        model.zero_grad()
        losses.append(backward(model, 2 * step + 1))
        rest.step()
        model.zero_grad()
        seen.append(parameters_of(model))
    return end_of_two(model, body, rest, losses=losses, seen=seen)


@program("several open")
def weights_are_clamped_where_one_steps_every_third_time() -> dict[str, Any]:
    model, body, rest, losses = every_third_time(_clamp)
    return end_of_two(model, body, rest, losses=losses)


@program("several open")
def weights_are_clamped_and_saved_and_loaded() -> dict[str, Any]:
    """Behind the step of one, with no forward between."""
    model = model_of()
    body, rest = two(model)
    losses, seen = [], []
    full = StateDictOptions(full_state_dict=True)
    for step in range(4):
        losses.append(backward(model, step))
        body.step()
        _clamp(model)
        if step == 0:
            seen.append({k: v.detach().clone() for k, v in get_model_state_dict(model, options=full).items()})
        if step == 1:
            saved = {k: v.clone() for k, v in model.state_dict().items()}
            model.load_state_dict(saved)
        if step == 2:
            whole = {k: v.clone() * 0.5 for k, v in get_model_state_dict(model, options=full).items()}
            set_model_state_dict(model, whole, options=full)
        model.zero_grad()
        losses.append(backward(model, step + 10))
        rest.step()
        rest.zero_grad()
        body.zero_grad()
    return end_of_two(model, body, rest, losses=losses, seen=seen)


@program("several open")
def weights_are_clamped_at_the_end() -> dict[str, Any]:
    """Behind the step of one, which is the last that the program does with them."""
    model = model_of()
    body, rest = two(model)
    losses = [backward(model, 0)]
    body.step()
    _clamp(model)
    return end_of_two(model, body, rest, losses=losses)


@program("several open")
def a_backward_between_the_steps_of_two() -> dict[str, Any]:
    """Of a graph that is kept: no forward comes between."""
    model = model_of()
    body, rest = two(model)
    losses = []
    for step in range(4):
        loss = loss_of(model, step, 0, dist.get_rank())
        loss.backward(retain_graph=True)
        body.step()
        body.zero_grad()
        if step % 2:
            rest.zero_grad()
        (loss * 0.5).backward()
        rest.step()
        if step == 3:
            body.step()
        model.zero_grad()
        losses.append(loss.item())
    return end_of_two(model, body, rest, losses=losses)
