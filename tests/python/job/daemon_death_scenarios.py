"""What ranks do whose daemon dies, in a program that knows nothing of it but ``steps``."""

from __future__ import annotations

import os
from typing import Any

from models import Case, build, loss_of, shard
from rank_main import report


def train(count: int, edits: bool) -> dict[str, Any]:
    import torch

    import shardd.torch
    from shardd.torch import fully_shard, ride
    from shardd.torch.optim import AdamW

    rank = int(os.environ["RANK"])
    model = build(Case())
    shard(model, Case(), fully_shard)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    losses: list[float] = []
    resumed = []
    for step in shardd.torch.steps(count):
        with step:
            if step.resumed:
                resumed.append(int(step))
                losses = step.state or []
            report(event="begins", step=int(step))
            loss = loss_of(model, step, 0, rank)
            loss.backward()
            ride([*losses, loss.item()])
            optimizer.step()
            optimizer.zero_grad()
            if edits:
                with torch.no_grad():
                    model.layers[1].up.weight.clamp_(-0.2, 0.2)
            losses = [*losses, loss.item()]
    return {
        "losses": losses,
        "resumed": resumed,
        "parameters": {n: p.full_tensor().detach().clone() for n, p in model.named_parameters()},
    }
