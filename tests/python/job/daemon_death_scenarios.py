"""What ranks do whose daemon dies, in a program that knows nothing of it but ``steps``."""

from __future__ import annotations

import os
import time
from typing import Any

import torch

from models import Case, build, loss_of, shard
from rank_main import report


def _result(model: torch.nn.Module, optimizer: torch.optim.Optimizer, **more: Any) -> dict[str, Any]:
    """All parameters, and what the rank has of the optimizer's state."""

    def local(value: Any) -> Any:
        value = value.to_local() if hasattr(value, "to_local") else value
        return value.detach().clone() if isinstance(value, torch.Tensor) else value

    states = optimizer.state_dict()["state"]
    return {
        "parameters": {n: p.full_tensor().detach().clone() for n, p in model.named_parameters()},
        "states": {f"{name} of {i}": local(value) for i, entry in states.items() for name, value in entry.items()},
        **more,
    }


def train_plainly(count: int, stock: str, edits: bool, zeroes: int, ends: list[int]) -> dict[str, Any]:
    """A loop that knows of no abort. ``stock``: as of ``train``. ``zeroes``: every how many steps gradients are dropped.

    ``ends``: steps in which the daemon stops, each once."""
    from shardd.torch import fully_shard
    from shardd.torch.optim import AdamW

    rank = int(os.environ["RANK"])
    model = build(Case())
    shard(model, Case(), fully_shard)
    optimizer = (getattr(torch.optim, stock) if stock else AdamW)(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
    losses: list[float] = []
    for step in range(count):
        for part in range(2):  # gradients of both are added
            loss = loss_of(model, 2 * step + part, 0, rank)
            if rank == 0 and part == 0 and step in ends:
                report(event="midway", step=step)
            loss.backward()
        optimizer.step()
        if step % zeroes == zeroes - 1:
            optimizer.zero_grad()
        schedule.step()
        if edits:
            with torch.no_grad():
                model.layers[1].up.weight.mul_(0.99)
        losses.append(loss.item())
    return _result(model, optimizer, losses=losses)


def train(count: int, edits: bool, stock: str, ends: list[int]) -> dict[str, Any]:
    """``stock``: class of torch's optimizer; "": the daemon's. ``ends``: steps in which the daemon ends, each once."""
    import shardd.torch
    from shardd.torch import fully_shard, ride
    from shardd.torch.optim import AdamW

    rank = int(os.environ["RANK"])
    model = build(Case())
    shard(model, Case(), fully_shard)
    optimizer = (getattr(torch.optim, stock) if stock else AdamW)(model.parameters(), lr=1e-2)
    losses: list[float] = []
    resumed = []
    for step in shardd.torch.steps(count):
        with step:
            if step.resumed:
                resumed.append(int(step))
                losses = step.state or []
            loss = loss_of(model, step, 0, rank)  # edits of the step before are handed in
            if rank == 0 and int(step) in ends:
                ends.remove(int(step))
                report(event="midway", step=int(step))
                time.sleep(0.5)
            loss.backward()
            ride([*losses, loss.item()])
            optimizer.step()
            optimizer.zero_grad()
            if edits:
                with torch.no_grad():
                    model.layers[1].up.weight.clamp_(-0.2, 0.2)
            losses = [*losses, loss.item()]
    return _result(model, optimizer, losses=losses, resumed=resumed)
