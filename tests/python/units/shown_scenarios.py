"""What modules hold when, and in which dtype: the same program with torch's ``fully_shard`` and with shardd's."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from job.life_scenarios import counters_of


class _Hidden:
    """No container that anybody looks into."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits


class _Net(nn.Module):
    """Its head is the root's own."""

    def __init__(self, hides: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6)) for _ in range(2)])
        self.head = nn.Linear(6, 6)
        self.hides = hides

    def forward(self, x: torch.Tensor) -> Any:
        logits = self.head(self.blocks(x))
        return _Hidden(logits) if self.hides else logits


def _sharded(fully_shard: Any, hides: bool = False, dtype: torch.dtype = torch.float32) -> Any:
    model = _Net(hides).to(dtype)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


def _input(step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(4, 6, generator=generator).to(dtype)


def _loss(model: Any, step: int) -> torch.Tensor:
    output = model(_input(step, next(model.parameters()).dtype))
    loss: torch.Tensor = (output.logits if isinstance(output, _Hidden) else output).float().pow(2).mean()
    return loss


def _types(model: nn.Module) -> list[str]:
    return [type(p).__name__ for p in model.parameters()]


def _whole(model: nn.Module) -> dict[str, Any]:
    return {n: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for n, p in model.named_parameters()}


def _gradients(model: nn.Module) -> list[Any]:
    return [p.grad.full_tensor().clone() for p in model.parameters()]  # type: ignore[union-attr]


def _reshard(model: Any) -> None:
    for module in (*model.blocks, model):
        module.reshard()


def _accumulated(fully_shard: Any) -> Any:
    """Unsharded from the first micro-batch to the last."""
    model = _sharded(fully_shard)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[Any] = []
    for step in range(3):
        for micro in range(3):
            last = micro == 2
            model.set_requires_gradient_sync(last)
            model.set_reshard_after_backward(last)
            loss = _loss(model, 3 * step + micro)
            loss.backward()
            seen += [_types(model), loss.item()]
        seen.append(_gradients(model))
        optimizer.step()
        optimizer.zero_grad()
    return model, seen


def _kept(fully_shard: Any) -> Any:
    """Unsharded after backward until the program says otherwise, and edited then, while ranks drift apart."""
    model = _sharded(fully_shard)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[Any] = []
    model.set_reshard_after_backward(False)
    for step in range(4):
        loss = _loss(model, step)
        loss.backward()
        seen += [_types(model), loss.item(), _whole(model)]
        if step % 2 == dist.get_rank():
            time.sleep(0.05)
        _reshard(model)
        if step % 2 != dist.get_rank():
            time.sleep(0.05)
        seen += [_types(model), _gradients(model)]
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.4, 0.4)
    return model, seen


def _one_kept(fully_shard: Any) -> Any:
    """One block alone; state dicts shard it, and evaluation goes on with what was stepped."""
    model = _sharded(fully_shard)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model.blocks[0].set_reshard_after_backward(False)
    seen: list[Any] = []
    for step in range(3):
        loss = _loss(model, step)
        loss.backward()
        seen += [_types(model), loss.item()]
        seen += [{n: v.full_tensor().clone() for n, v in model.state_dict().items()}, _types(model)]
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            seen.append(_loss(model, 9).item())
        _reshard(model)
    return model, seen


def _hidden(fully_shard: Any) -> Any:
    """The root's output is in an object of the program's own: nobody knows before it that a backward comes."""
    model = _sharded(fully_shard, hides=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    seen: list[Any] = []
    for step in range(3):
        loss = _loss(model, step)
        seen.append(_types(model))
        loss.backward()
        seen += [_types(model), loss.item(), _gradients(model)]
        optimizer.step()
        optimizer.zero_grad()
    return model, seen


def _asked_for(fully_shard: Any) -> Any:
    """``unshard(async_op=True)``, waited for, used without, given back before."""
    model = _sharded(fully_shard)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[Any] = []
    for step in range(4):
        handles = [block.unshard(async_op=True) for block in model.blocks]
        seen.append(_types(model))
        if step == 1:
            for handle in handles:
                handle.wait()
                handle.wait()
            seen += [_types(model), _whole(model.blocks[1])]
        if step == 2:
            model.blocks[1].reshard()
            handles[1].wait()
            seen.append(_types(model))
            model.blocks[1].reshard()
            seen.append(_types(model))
        loss = _loss(model, step)
        loss.backward()
        seen += [_types(model), loss.item()]
        optimizer.step()
        optimizer.zero_grad()
    return model, seen


def programs() -> dict[str, dict[str, Any]]:
    import torch.distributed.fsdp

    import shardd.torch

    found: dict[str, dict[str, Any]] = {}
    listed: tuple[Callable[..., Any], ...] = (_accumulated, _kept, _one_kept, _hidden, _asked_for)
    for program in listed:
        model, stock = program(torch.distributed.fsdp.fully_shard)
        _reshard(model)
        want = _whole(model)
        model, ours = program(shardd.torch.fully_shard)
        found[program.__name__] = {
            "torch": [*stock, want],
            "shardd": [*ours, _whole(model)],
            "counters": counters_of(model),
        }
    return found


def flat_objects() -> dict[str, Any]:
    """Layout flat, kept unsharded after backward: modules show the program's own objects all the time."""
    import shardd.torch

    model = _Net(False)
    for block in model.blocks:
        shardd.torch.fully_shard(block, layout="flat")
    shardd.torch.fully_shard(model, layout="flat")
    model.set_reshard_after_backward(False)
    given = list(model.parameters())
    same, cleared = [], []
    for step in range(2):
        _loss(model, step).backward()
        same.append(all(a is b for a, b in zip(model.parameters(), given, strict=True)))
        model.zero_grad()
        cleared.append(all(p.grad is None for p in given))
    return {"same": same, "cleared": cleared, "counters": counters_of(model)}


def resharded_to_fewer() -> dict[str, Any]:
    """Between forward and backward; torch's modules then hold DTensors over two ranks."""
    import shardd.torch

    model = _Net(False)
    for block in model.blocks:
        shardd.torch.fully_shard(block, reshard_after_forward=2)
    shardd.torch.fully_shard(model)
    given = list(model.blocks.parameters())
    loss = _loss(model, 0)
    same = all(a is b for a, b in zip(model.blocks.parameters(), given, strict=True))
    loss.backward()
    return {"same": same, "gradients": all(p.grad is not None for p in given), "counters": counters_of(model)}


def low_precision_parameters() -> dict[str, dict[str, Any]]:
    """Stored in bf16: gradients are, too, and torch's optimizers take them."""
    import torch.distributed.fsdp

    import shardd.torch

    found: dict[str, dict[str, Any]] = {}
    for kind in ("loop", "foreach", "fused", "daemon"):
        results: dict[str, Any] = {}
        for impl, package in (("torch", torch.distributed.fsdp), ("shardd", shardd.torch)):
            model = _sharded(package.fully_shard, dtype=torch.bfloat16)
            if kind == "daemon" and impl == "shardd":
                optimizer: Any = shardd.torch.optim.AdamW(model.parameters(), lr=1e-2)
            else:
                options = {} if kind == "daemon" else {"foreach": kind == "foreach", "fused": kind == "fused"}
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
            seen: list[Any] = []
            for step in range(3):
                for micro in range(2):
                    loss = _loss(model, 2 * step + micro)
                    loss.backward()
                    seen.append(loss.item())
                seen += [[str(p.grad.dtype) for p in model.parameters()], _gradients(model)]
                seen.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor())  # type: ignore[attr-defined]
                optimizer.step()
                optimizer.zero_grad()
            results[impl] = [*seen, _whole(model)]
        found[kind] = results | {"counters": counters_of(model)}
    return found
