"""Ranks that run their blocks differently. Each function runs on every rank, on the same data."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from models import Case, Model, build, loss_of, shard

_BLOCKS = 4


def _blocks() -> Model:
    torch.manual_seed(7)
    return Model(blocks=_BLOCKS)


def _orders(kind: str) -> list[int]:
    return {
        "none": [0, 1, 2, 3],
        "swap": [0, 1, 3, 2],
        "reverse": [3, 2, 1, 0],
        "skip": [0, 1, 3],
        "twice": [0, 1, 2, 2, 3],
    }[kind]


def train(kind: str, bad_step: int, steps: int, stock: bool = False) -> dict[str, Any]:
    """From ``bad_step`` on rank 1 runs its blocks as ``kind`` says."""
    import shardd
    from shardd.torch import counters, fully_shard
    from shardd.torch.optim import AdamW

    model = _blocks()
    shard(model, Case(), fully_shard)
    optimizer = (torch.optim.AdamW if stock else AdamW)(model.parameters(), lr=1e-2)
    losses: list[float] = []
    started = time.monotonic()
    try:
        for step in range(steps):
            if step == bad_step and dist.get_rank() == 1:
                model.order = _orders(kind)
            started = time.monotonic()
            loss = loss_of(model, step, 0, 0)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    except shardd.StepAborted as error:
        return {"losses": losses, "error": str(error), "seconds": time.monotonic() - started}
    return {"losses": losses, "error": "", "counters": counters(model)}


def alone(kind: str, bad_step: int, steps: int) -> list[list[float]]:
    """Losses of both ranks with the right weights of each block, in one process."""
    model = _blocks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses: list[list[float]] = [[], []]
    for step in range(steps):
        for rank in range(2):
            model.order = _orders(kind if rank == 1 and step >= bad_step else "none")
            loss = loss_of(model, step, 0, 0)
            (loss / 2).backward()
            losses[rank].append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def gradient_order() -> dict[str, Any]:
    """Rank 1 runs two branches in the other order, so that their gradients come in the other order too."""
    from shardd.torch import counters, fully_shard
    from shardd.torch.optim import SGD

    rank = dist.get_rank()
    model = build(Case())
    shard(model, Case(), fully_shard)
    optimizer = SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(4):
        model.order = [0, 1, 2]
        x = torch.full((2, 10), 0.1 * step)
        branches = [model.layers[i] for i in ([0, 1] if rank == 0 else [1, 0])]
        outputs = {id(layer): layer(x) for layer in branches}
        loss = loss_of(model, step, 0, 0) + sum(outputs[id(model.layers[i])].pow(2).sum() for i in (0, 1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "counters": counters(model)}
