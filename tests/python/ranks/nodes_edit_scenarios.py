"""What ranks do in the tests of in-place edits over several nodes, replicas (a mesh of two dimensions) and cut (of one)."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from models import Case, Model, build, loss_of, mesh_of, shard
from rank_main import report
from ranks.nodes_scenarios import _text_of
from ranks.rank_life import Death, RankLife

STEPS = 9


def _case(cut: bool) -> Case:
    return Case() if cut else Case(mesh=(2, 2))


def _trainer(cut: bool, impl: str = "shardd", **options: Any) -> tuple[Model, Any]:
    if impl == "torch":
        from torch.distributed.fsdp import fully_shard
        from torch.optim import AdamW
    else:
        from shardd.torch import fully_shard
        from shardd.torch.optim import AdamW

        options = {"in_place_edits": True, **options}
    model = build(_case(cut))
    shard(model, _case(cut), fully_shard)
    return model, AdamW(model.parameters(), lr=1e-2, **options)


def locals_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.to_local().detach().clone() for name, p in model.named_parameters()}


def _first_of_row(cut: bool) -> bool:
    return dist.get_rank() == 0 if cut else dist.get_rank() % 2 == 0


@torch.no_grad()
def _edit(model: Model, how: int, cut: bool) -> None:
    """Everywhere; of one layer through its local tensor; one element, on the first rank of each copy alone; or nothing."""
    if how == 1:
        for param in model.parameters():
            param.mul_(0.9)
    elif how == 2:
        for param in model.layers[1].parameters():
            param.to_local().clamp_(-0.05, 0.05)
    elif how == 3 and _first_of_row(cut):
        model.layers[0].up.weight.to_local().view(-1)[0] = 0.25


def edited(cut: bool, impl: str) -> dict[str, Any]:
    """Accumulates two passes a step, and edits behind steps, between the passes, and before a step."""
    from shardd.torch import counters, finish, hand_in_edits

    model, optimizer = _trainer(cut, impl)
    rank, losses = dist.get_rank(), []
    for step in range(STEPS):
        for micro in range(2):
            if micro == 1 and step % 3 == 2:
                _edit(model, 1, cut)
            loss = loss_of(model, step, micro, rank) / 2
            loss.backward()
            losses.append(loss.item())
        if step in (3, 4):  # 4: nobody has edited anything
            _edit(model, 1 if step == 3 else 0, cut)
            if impl == "shardd":
                hand_in_edits(model)
        optimizer.step()
        optimizer.zero_grad()
        _edit(model, step % 4, cut)
        if step == 6:
            state = {name: value * 1.5 for name, value in model.state_dict().items()}
            model.load_state_dict(state)
            _edit(model, 3, cut)
        if step == 7:
            with torch.no_grad():
                losses.append(loss_of(model, 99, 0, rank).item())
            model.reshard()  # torch's root stays unsharded behind a forward
            _edit(model, 1, cut)
    loss = loss_of(model, STEPS, 0, rank)
    loss.backward()
    losses.append(loss.item())
    out = {"losses": losses, "locals": locals_of(model)}
    if impl == "shardd":
        out["counters"] = counters(model)
        dist.barrier()
        finish(model)
    return out


def both(cut: bool) -> dict[str, Any]:
    return {impl: edited(cut, impl) for impl in ("torch", "shardd")}


def unlike(cut: bool, node: int, store: bool) -> dict[str, str]:
    """Ranks of one node store another value, or nothing, into what those of the other one edit."""
    model, optimizer = _trainer(cut)
    loss_of(model, 0, 0, dist.get_rank()).backward()
    optimizer.step()
    optimizer.zero_grad()
    if here := dist.get_rank() // 2 == node:
        with torch.no_grad():
            model.layers[1].up.weight.mul_(0.5)
    elif store:
        with torch.no_grad():
            model.layers[1].up.weight.mul_(0.25)
    return {"text": _text_of(lambda: loss_of(model, 1, 0, dist.get_rank()).backward()), "here": str(here)}


def not_before_a_step(cut: bool) -> dict[str, Any]:
    """An edit between a backward and its step that nobody hands in, and the same with the call."""
    from shardd.torch import finish, hand_in_edits

    model, optimizer = _trainer(cut)
    rank = dist.get_rank()
    loss_of(model, 0, 0, rank).backward()
    _edit(model, 1, cut)
    text = _text_of(optimizer.step)
    hand_in_edits(model)
    optimizer.step()
    optimizer.zero_grad()
    loss = loss_of(model, 1, 0, rank).item()
    dist.barrier()
    finish(model)
    return {"text": text, "loss": loss}


def unlike_calls(cut: bool, other: int, steps: bool) -> dict[str, Any]:
    """All ranks hand in edits but one, which steps, or enters the next pass."""
    from shardd.torch import hand_in_edits

    model, optimizer = _trainer(cut)
    rank = dist.get_rank()
    loss_of(model, 0, 0, rank).backward()
    dist.barrier()  # else a rank is told in its backward
    begin = time.monotonic()

    def alone() -> None:
        if steps:
            optimizer.step()
        loss_of(model, 1, 0, rank).backward()

    text = _text_of(alone if rank == other else lambda: hand_in_edits(model))
    return {"text": text, "seconds": time.monotonic() - begin}


def finishes(cut: bool) -> str:
    """What is stored behind the last step is nobody's, and no rank waits for another."""
    from shardd.torch import finish

    model, optimizer = _trainer(cut)
    loss_of(model, 0, 0, dist.get_rank()).backward()
    optimizer.step()
    _edit(model, 3, cut)
    return _text_of(lambda: finish(model))


def refused() -> dict[str, str]:
    from shardd.torch import fully_shard, hand_in_edits
    from shardd.torch.optim import AdamW

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model, mesh=mesh_of(4, 1))
    kept = AdamW(model.parameters(), lr=0.1, in_place_edits=True)
    assert kept.param_groups
    rows = _text_of(lambda: model(torch.ones(1, 4)).sum())
    os.environ["SHARDD_PASS_COPIES"] = "1"
    try:
        other, optimizer = _trainer(cut=True)
        assert optimizer.param_groups
        copies = _text_of(lambda: loss_of(other, 0, 0, dist.get_rank()))
    finally:
        del os.environ["SHARDD_PASS_COPIES"]
    plain, steps = _trainer(cut=False, in_place_edits=None)
    assert steps.param_groups
    return {"rows": rows, "copies": copies, "by default": _text_of(lambda: hand_in_edits(plain))}


# Somebody dies.


def survive(folder: str, death: Death, cut: bool, steps: int) -> dict[str, Any]:
    """All ranks halve every parameter where a step begins. One rank, or a node's daemon (the victim is beyond the ranks: the
    test kills it), dies before that is a version, so that it counts once; or ("entered") behind it: then ranks look at a
    parameter to which they have added one, how often they have (``made``), and do not do it again."""
    from shardd.torch import counters, hand_in_edits

    moment, victim = death.moment, death.victim
    life = RankLife(folder, death, (int(os.environ["WORLD_SIZE"]),) if cut else (2, 2))
    tries = 0
    made = []

    def rebuild() -> None:
        if victim < life.world:  # else all ranks live, and ranks of a node may be told twice
            life.rebuild()

    def edit() -> None:
        scale = model.norm.weight  # every rank has some of it, and a few steps change it by a few hundredths
        if moment == "entered":
            made.append(round(scale.to_local().mean().item() - 1))
            if made[-1] > 0:
                return
        with torch.no_grad():
            for param in model.parameters():
                param.add_(1) if moment == "entered" and param is scale else param.mul_(0.5)
        life.dies_at("stored", death.at_step)
        if moment == "handing" and life.is_first and tries == 1:
            if life.rank == (victim + 2 if victim < life.world else 0) % life.world:
                time.sleep(2.0)  # the other node's: without it nothing is agreed on
            elif life.is_victim:
                threading.Timer(0.4, life.die).start()
            report(event="handing")
            hand_in_edits(model)
        if moment == "entered" and life.is_victim:
            with torch.no_grad():
                loss_of(model, 0, 0, life.rank)
            life.die()

    def begin(step: int) -> None:
        nonlocal tries
        if step == death.at_step:
            tries += 1
            edit()

    model, optimizer = _trainer(cut)
    trained = life.train(model, [optimizer], steps, begin, rebuild)
    return {**trained, "counters": counters(model), "locals": locals_of(model), "made": made}
