"""What ranks do in the tests of clipping: torch's FullyShardedDataParallel and shardd's, side by side."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import ShardingStrategy

from full_params.full_param_scenarios import error_of, layer, sharded
from models import Block, Case, build, loss_of
from units.mixed_scenarios import _class_of

NORMS = (1, 2.0, 3, float("inf"))


def clipped(impl: str, strategy: str) -> dict[str, Any]:
    """Every norm, clipping and not, with gradients as torch's SGD then takes them."""
    rank = dist.get_rank()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, summon = sharded(impl, sharding_strategy=ShardingStrategy[strategy])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    result: dict[str, Any] = {"norms": [], "losses": []}
    step = 0
    for norm_type in NORMS:
        for max_norm in (0.05, 1e6):
            loss = loss_of(model, step, 0, rank)
            loss.backward()
            norm = model.clip_grad_norm_(max_norm, norm_type)  # type: ignore[operator]
            result["norms"].append(norm.item())
            result["losses"].append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
            step += 1
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result["none"] = model.clip_grad_norm_(1.0).item()  # type: ignore[operator]
    result["warned"] = any("no gradients" in str(w.message) for w in caught)
    result["inner"] = error_of(lambda: layer(model, 0).clip_grad_norm_(1.0))  # type: ignore[operator]
    inside: list[str] = []
    handle = layer(model, 1).register_forward_pre_hook(
        lambda *_: inside.append(error_of(lambda: model.clip_grad_norm_(1.0)))  # type: ignore[operator]
    )
    loss_of(model, 50, 0, rank).backward()
    handle.remove()
    result["inside"] = inside[0]
    optimizer.zero_grad()
    with summon(model, writeback=False):
        result["parameters"] = {n: p.detach().clone() for n, p in model.named_parameters()}
    return result


def under_no_sync(impl: str) -> dict[str, Any]:
    """Clipping what is added up so far; then the last micro-batch, synchronised, and a step."""
    rank = dist.get_rank()
    model: Any
    model, summon = sharded(impl)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.no_sync():
        loss_of(model, 0, 0, rank).backward()
        first = model.clip_grad_norm_(0.05).item()
        again = model.clip_grad_norm_(0.05).item()
        loss_of(model, 0, 1, rank).backward()
    loss_of(model, 0, 2, rank).backward()
    total = model.clip_grad_norm_(1e6).item()
    optimizer.step()
    with summon(model, writeback=False):
        values = {n: p.detach().clone() for n, p in model.named_parameters()}
    return {"first": first, "again": again, "total": total, "parameters": values}


def unmanaged(impl: str) -> dict[str, Any]:
    """A part that is ignored, whose gradients all ranks have alike, counts once."""
    rank = dist.get_rank()
    model = build(Case())
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    wrapped: Any = _class_of(impl)(
        model,
        use_orig_params=True,
        device_id=torch.device("cpu"),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        ignored_modules=[model.head],
    )
    loss_of(wrapped, 0, 0, rank).backward()
    dist.all_reduce(model.head.weight.grad)
    model.head.weight.grad /= dist.get_world_size()
    norms = [wrapped.clip_grad_norm_(1e6, kind).item() for kind in NORMS]
    clip = wrapped.clip_grad_norm_(0.01).item()
    return {"norms": norms, "clip": clip, "after": wrapped.clip_grad_norm_(1.0).item(), "head": model.head.weight.grad}


def doubles() -> dict[str, Any]:
    """float64 gradients, on which PyTorch's own wrapper raises."""
    from shardd.torch import FullyShardedDataParallel as Fsdp

    torch.manual_seed(3)
    alone = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 1)).double()
    model = Fsdp(copy.deepcopy(alone), device_id=torch.device("cpu"))
    data = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    model(data[dist.get_rank()]).square().sum().backward()
    for rows in data:
        (alone(rows).square().sum() / 2).backward()
    got = model.clip_grad_norm_(0.1)
    return {"got": got, "want": nn.utils.clip_grad_norm_(alone.parameters(), 0.1)}
