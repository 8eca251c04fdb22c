"""What ranks do in the tests of passes that end without a backward, or with an exception."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from models import Case, loss_of
from optimizers.optim_cases import counts, model_of, optimizer_of, parameters_of


def _optimizer(impl: str, kind: str, model: nn.Module) -> Any:
    if kind == "daemon":
        return optimizer_of(impl, "adamw", model.parameters())
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def _train(model: nn.Module, optimizer: Any, step: int) -> float:
    loss = loss_of(model, step, 0, dist.get_rank())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.item())


def edit_before_the_backward(wrap: str) -> str:
    """Between a forward and its backward, whose units have stayed unsharded."""
    import shardd

    model = model_of("shardd", Case(wrap=wrap, reshard=False if wrap == "blocks" else None))
    optimizer = _optimizer("shardd", "daemon", model)
    _train(model, optimizer, 0)
    loss = loss_of(model, 1, 0, dist.get_rank())
    with torch.no_grad():
        model.layers[1].up.weight.clamp_(-0.1, 0.1)
    try:
        loss.backward()
    except shardd.Error as error:
        os.environ["SHARDD_TEST_FAILED"] = "1"
        return str(error)
    return ""


def skipped_backward(impl: str, kind: str, meet: bool) -> dict[str, Any]:
    """A batch is left out after its forward, and a parameter of which rank 0 has all rows is edited."""
    rank = dist.get_rank()
    model = model_of(impl)
    optimizer = _optimizer(impl, kind, model)
    losses = []
    for step in range(4):
        losses.append(_train(model, optimizer, 2 * step))
        left_out = loss_of(model, 2 * step + 1, 0, rank)
        losses.append(left_out.item())
        with torch.no_grad():
            model.layers[1].gate.clamp_(max=0.9 - 0.1 * step)
        if meet:
            dist.barrier()
    losses.append(_train(model, optimizer, 9))
    return {"losses": losses, "parameters": parameters_of(model), "counters": counts(impl, model)}


def both_skip(kind: str, meet: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    return skipped_backward("torch", kind, meet), skipped_backward("shardd", kind, meet)


class Broken(Exception):
    pass


def failed(impl: str, kind: str, where: str) -> dict[str, Any]:
    """User code raises on every rank; parameters are edited, and loaded, before the next forward."""
    rank = dist.get_rank()
    model = model_of(impl)
    optimizer = _optimizer(impl, kind, model)
    losses = [_train(model, optimizer, 0)]

    def fail(*_: Any) -> None:
        if where == "backward":  # which all have begun: what is written before another's is an error there
            dist.barrier()
        raise Broken

    try:
        if where == "forward":
            handle = model.layers[1].up.register_forward_hook(fail)
            loss_of(model, 1, 0, rank)
        else:
            handle = model.layers[1].up.register_full_backward_hook(fail)
            loss_of(model, 1, 0, rank).backward()
    except Broken:
        pass
    handle.remove()
    if impl == "torch":
        for module in model.modules():  # torch leaves them unsharded
            if hasattr(module, "reshard"):
                module.reshard()
    if where == "backward":
        optimizer.zero_grad()
        state = {n: v.clone() if torch.is_tensor(v) else v for n, v in model.state_dict().items()}
        model.load_state_dict({n: v * 0.5 if n.endswith("weight") else v for n, v in state.items()})
    else:
        with torch.no_grad():
            model.layers[0].down.weight.mul_(0.5)
    losses += [_train(model, optimizer, step) for step in (2, 3)]
    return {"losses": losses, "parameters": parameters_of(model), "counters": counts(impl, model)}


def both_fail(kind: str, where: str) -> tuple[dict[str, Any], dict[str, Any]]:
    if where == "backward":  # PyTorch cannot go on after it: its groups keep what the backward began
        return failed("shardd", kind, where), failed("shardd", kind, where)
    return failed("torch", kind, where), failed("shardd", kind, where)
