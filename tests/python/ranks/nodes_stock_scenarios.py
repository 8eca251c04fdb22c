"""What ranks do in the tests of torch's own optimizers over several nodes. Each function runs on every rank of every node."""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
import torch.distributed as dist

from models import Case, Model, backward_of_all_ranks, build, loss_of, shard
from optimizers.stock_scenarios import KINDS
from ranks.rank_life import Death, RankLife

STEPS = 8


def alone(kind: str, world: int, loads_at: int = -1) -> dict[str, Any]:
    """The same on one process with all ranks' batches, unsharded."""
    model = build(Case())
    optimizer = KINDS[kind](list(model.parameters()))
    losses: list[list[float]] = [[] for _ in range(world)]
    for step in range(STEPS):
        backward_of_all_ranks(model, step, losses)
        optimizer.step()
        optimizer.zero_grad()
        if step == loads_at:
            _halve(model)
    return {"losses": losses, "parameters": {n: p.detach().clone() for n, p in model.named_parameters()}}


def _halve(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            (parameter.to_local() if hasattr(parameter, "to_local") else parameter).mul_(0.5)


def _trainer(kind: str, mesh: tuple[int, ...]) -> tuple[Model, Any]:
    from torch.distributed.fsdp import FSDPModule

    from shardd.torch import fully_shard

    case = Case(mesh=mesh)
    model = build(case)
    shard(model, case, fully_shard)
    assert not isinstance(model, FSDPModule) or type(model).__mro__[1].__module__.startswith("shardd")
    return model, KINDS[kind](list(model.parameters()))


def trained(kind: str, mesh: tuple[int, ...], edits_at: int = -1, loads: bool = False) -> dict[str, Any]:
    """Trains; evaluates between steps; halves its parameters in place behind step ``edits_at``; loads a state dict of its own."""
    from shardd.torch import commit, counters, finish

    rank = dist.get_rank()
    model, optimizer = _trainer(kind, mesh)
    losses, evaluated = [], []
    for step in range(STEPS):
        loss = loss_of(model, step, 0, rank)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 3 == 2:
            with torch.no_grad():
                evaluated.append(loss_of(model, step + 1, 0, rank).item())
        if loads and step == 3:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
        if step == edits_at:
            _halve(model)
    commit(model)
    parameters = {n: p.full_tensor().detach().clone() for n, p in model.named_parameters()}
    counts = counters(model)
    dist.barrier()
    finish(model)
    return {"losses": losses, "evaluated": evaluated, "parameters": parameters, "counters": counts}


def survive(folder: str, death: Death, kind: str, mesh: tuple[int, ...]) -> dict[str, Any]:
    """One rank dies in its first life; the others, on both nodes, go on in their processes."""
    from shardd.torch import commit, counters

    life = RankLife(folder, death, mesh or (int(os.environ["WORLD_SIZE"]),))
    model, optimizer = _trainer(kind, mesh)
    trained = life.train(model, [optimizer], STEPS)
    commit(model)
    shards = {n: p.to_local().detach().clone() for n, p in model.named_parameters()}
    return {**trained, "counters": counters(model), "shards": shards}
