"""What ranks do in the tests of forwards that are no straight line. Each function runs on every rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from job.life_scenarios import counters_of, trainer
from models import Case, backward_of_all_ranks, build, loss_of, shard, train_steps


def alone(orders: list[list[int]], world: int) -> list[list[float]]:
    """Losses of all ranks by step, the blocks in the order of each step, in one unsharded process."""
    model = build(Case())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses: list[list[float]] = [[] for _ in range(world)]
    for step, order in enumerate(orders):
        model.order = order
        backward_of_all_ranks(model, step, losses)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def uses_of_groups(orders: list[list[int]], stock: bool) -> dict[str, Any]:
    """Each step its own order of blocks; modules run alone in between, with gradients that are thrown away and without."""
    model, optimizer = trainer(stock)
    losses = []
    for step, order in enumerate(orders):
        model.order = order
        losses += train_steps(model, optimizer, range(step, step + 1))
        with torch.no_grad():
            model.layers[step % 3](torch.ones(2, 10))
        model.layers[(step + 1) % 3](torch.ones(2, 10)).sum()  # no backward follows
    return {"losses": losses, "counters": counters_of(model)}


class _Chunked(nn.Module):
    """Its head is called by the program, on pieces of what the rest gives."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 24, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.embed(x))


def head_in_chunks(reshards: bool) -> tuple[Any, Any, dict[str, int]]:
    """Gradients after the backward of each chunk, and of the rest; with shardd's and with torch's."""
    import torch.distributed.fsdp

    import shardd.torch

    found: list[list[torch.Tensor]] = []
    counts: dict[str, int] = {}
    for fully_shard in (shardd.torch.fully_shard, torch.distributed.fsdp.fully_shard):
        torch.manual_seed(0)
        model = _Chunked()
        fully_shard([model.norm, model.head])
        fully_shard(nn.Identity())(torch.ones(1))  # nothing to shard: runs as it is
        fully_shard(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        seen = []
        for step in range(3):
            hidden = model(torch.full((4, 8), 0.1 * (step + dist.get_rank() + 1)))
            if not reshards:
                model.head.set_reshard_after_forward(False)
                model.head.set_reshard_after_backward(False)
            gradients = []
            for chunk in hidden.detach().chunk(4):
                piece = chunk.clone().requires_grad_(True)
                model.head(piece).pow(2).sum().backward()
                gradients.append(piece.grad)
                assert model.embed.weight.grad is None
                if reshards:  # else the module still has its unsharded parameter
                    seen.append(model.head.weight.grad.full_tensor())
            model.head.set_reshard_after_forward(True)
            model.head.set_reshard_after_backward(True)
            model.head.reshard()
            hidden.backward(torch.cat(gradients))
            seen += [parameter.grad.full_tensor() for parameter in model.parameters()]
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        found.append(seen)
        if not counts:
            counts = counters_of(model)
    return found[0], found[1], counts


def block_alone(stock: bool) -> dict[str, Any]:
    """Forward and backward of one block by itself, then of the whole; and the same in one unsharded process."""
    rank, world = dist.get_rank(), dist.get_world_size()
    results = []
    for sharded in (True, False):
        if sharded:
            model, optimizer = trainer(stock)
        else:
            model = build(Case())
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for step in range(4):
            for other in [rank] if sharded else range(world):
                x = torch.full((2, 10), 0.1 * (step + other))
                loss = model.layers[1](x).pow(2).mean() if step % 2 else loss_of(model, step, 0, other)
                (loss if sharded else loss / world).backward()
                if other == rank:
                    losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        results.append(losses)
        if sharded:
            counts = counters_of(model)
    return {"ours": results[0], "alone": results[1], "counters": counts}


class _Fail(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        raise ArithmeticError("mine")


def exception_then_again(where: str, ranks: tuple[int, ...], stock: bool) -> dict[str, Any]:
    """The program's own exception in step 1 of some ranks, between forward and backward or in backward; they go on."""
    model, optimizer = trainer(stock)
    rank = dist.get_rank()
    losses = train_steps(model, optimizer, range(1))
    caught = 0
    if rank in ranks:
        handle = model.layers[1].register_forward_pre_hook(lambda _, args: (_Fail.apply(args[0]),))
        try:
            loss = loss_of(model, 1, 0, rank)
            if where == "between":
                raise ArithmeticError(f"mine, after {loss.item()}")
            loss.backward()
        except ArithmeticError:
            caught += 1
            del loss
        handle.remove()
        optimizer.zero_grad()
    losses += train_steps(model, optimizer, range(1, 4))
    return {"losses": losses, "caught": caught, "counters": counters_of(model)}


def optimizer_after_a_use_by_hand(steps: int) -> dict[str, Any]:
    """The optimizer makes a new plan: rank 0 has given up the first job while rank 1 still computes with it."""
    from shardd.torch import fully_shard
    from shardd.torch.optim import AdamW

    model = build(Case())
    shard(model, Case(), fully_shard)
    store = dist.distributed_c10d._get_default_store()
    model.layers[0].unshard()
    if dist.get_rank() == 1:
        store.wait(["given up"])
        model.layers[1].unshard()
        total = sum(float(p.sum()) for layer in model.layers[:2] for p in layer.parameters())
    for layer in model.layers[:2]:
        layer.reshard()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    if dist.get_rank() == 0:
        store.set("given up", "1")
        total = 0.0
    losses = train_steps(model, optimizer, range(steps))
    return {"losses": losses, "total": total, "counters": counters_of(model)}
