"""What the program does to parameters and gradients otherwise than in place. Each function runs on every rank."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import ShardingStrategy

from models import loss_of
from raised import text_of
from sharding.wrapper_scenarios import WrapperCase, compose, wrap_model


def make(impl: str, **case: Any) -> nn.Module:
    if impl == "torch":
        return wrap_model(WrapperCase(**case), TorchFSDP)
    if impl == "flat":
        return compose(WrapperCase(**case))
    from shardd.torch import FullyShardedDataParallel

    return wrap_model(WrapperCase(**case), FullyShardedDataParallel)


def _whole(model: nn.Module, impl: str) -> dict[str, torch.Tensor]:
    from shardd.torch import summon_full_params

    with TorchFSDP.summon_full_params(model) if impl == "torch" else summon_full_params(model):
        return {name.replace("_fsdp_wrapped_module.", ""): p.detach().clone() for name, p in model.named_parameters()}


def _inner(model: Any, layer: int) -> Any:
    block = model.layers[layer]
    return getattr(block, "_fsdp_wrapped_module", block)


def edited(impl: str, in_daemon: bool = False, adds: bool = True) -> dict[str, Any]:
    """Trains, with storages, objects and gradients replaced between steps. ``adds``: the optimizer gets the new object."""
    if in_daemon:
        from shardd.torch.optim import AdamW
    else:
        from torch.optim import AdamW
    rank = dist.get_rank()
    model: Any = make(impl)
    # Before the first use.
    _inner(model, 2).up.weight = nn.Parameter(_inner(model, 2).up.weight.detach() * 1.5)
    optimizer: Any = AdamW(model.parameters(), lr=1e-2)
    result: dict[str, Any] = {"losses": [], "grads": []}
    number = 0

    def backward() -> None:
        nonlocal number
        loss = loss_of(model, number, 0, rank)
        loss.backward()
        number += 1
        result["losses"].append(loss.item())
        found = [(name.replace("_fsdp_wrapped_module.", ""), p) for name, p in model.named_parameters()]
        result["none"] = result.get("none", True) and all((p.grad is None) == (p.numel() == 0) for _, p in found)
        result["grads"].append({name: None if p.grad is None else p.grad.clone() for name, p in found})

    def steps(count: int) -> None:
        for _ in range(count):
            backward()
            optimizer.step()
            optimizer.zero_grad()

    steps(2)
    # Another storage.
    for p in (_inner(model, 0).up.weight, model.head.weight):
        p.data = p.data * 2
    steps(2)
    # Another object, which no optimizer has at first.
    before = _inner(model, 1).up.weight
    given = _inner(model, 1).up.weight = nn.Parameter(before.detach() * 0.5)
    with torch.no_grad():
        loss_of(model, 0, 0, rank)
    result["taken"] = given is _inner(model, 1).up.weight or not given.numel()
    steps(2)
    if adds:
        optimizer.add_param_group({"params": [given]})
        steps(2)
    # Gradients: another object, another storage, none; and what is added to them by the next backward.
    backward()
    for p, change in ((model.head.weight, 0.1), (_inner(model, 0).down.weight, 0.2)):
        if p.grad is not None:
            p.grad = torch.full_like(p, change)
    if (weight := _inner(model, 2).down.weight).grad is not None:
        weight.grad.data = torch.full_like(weight, 0.3)
    _inner(model, 2).up.weight.grad = None
    optimizer.step()
    backward()
    optimizer.step()
    optimizer.zero_grad()
    result["parameters"] = _whole(model, impl)
    if impl != "torch":
        from shardd.torch import counters, finish

        dist.barrier()
        result["counters"] = counters(model)
        dist.barrier()
        finish(model)
    return result


def edited_all() -> dict[str, dict[str, Any]]:
    return {
        "torch": edited("torch"),
        "wrapper": edited("wrapper"),
        "flat": edited("flat"),
        "torch of daemon": edited("torch", adds=False),
        "daemon": edited("wrapper", in_daemon=True, adds=False),
    }


def refused(impl: str) -> dict[str, str]:
    """By what was done: the error, of the next use or of the backward."""
    rank = dist.get_rank()
    texts: dict[str, str] = {}
    for first in (True, False):  # or after the model was used
        model: Any = make(impl)
        if not first:
            loss_of(model, 0, 0, rank).backward()
        for (
            p
        ) in model.parameters():  # all: torch does not look at pieces without elements, and the other rank would wait
            p.data = torch.zeros(p.numel() + 1)
        texts[f"storage {first}"] = text_of(lambda model=model: loss_of(model, 0, 0, rank))  # type: ignore[misc]
        dist.barrier()
        model = make(impl)
        if not first:
            loss_of(model, 0, 0, rank).backward()
        for module in list(model.modules()):
            for name, p in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(torch.zeros(p.numel() + 1)))
        texts[f"object {first}"] = text_of(lambda model=model: loss_of(model, 0, 0, rank))  # type: ignore[misc]
        dist.barrier()
    # Whole from forward to backward.
    for what in ("storage", "object"):
        model = make(impl, strategy="SHARD_GRAD_OP")
        loss = loss_of(model, 0, 0, rank)
        for linear in (_inner(model, 1).up, _inner(model, 1).down):  # each is on one rank, and torch looks there only
            if what == "storage":
                linear.weight.data = linear.weight.detach().clone()
            else:
                linear.weight = nn.Parameter(linear.weight.detach().clone())
        texts[f"between, {what}"] = text_of(loss.backward)
        dist.barrier()
    return texts


def refused_all() -> dict[str, dict[str, str]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {impl: refused(impl) for impl in ("torch", "wrapper", "flat")}


def others() -> dict[str, Any]:
    """What torch's wrapper does not do: FlatParameters, tied parameters, an optimizer that owns the shards alone."""
    from shardd.torch import FullyShardedDataParallel as Wrapper
    from shardd.torch import counters, summon_full_params
    from shardd.torch.optim import SGD

    rank = dist.get_rank()
    facts: dict[str, Any] = {}
    flat: Any = make("wrapper", orig=False)
    optimizer: Any = SGD(flat.parameters(), lr=0.1)
    loss_of(flat, 0, 0, rank).backward()
    optimizer.step()
    optimizer.zero_grad()
    for p in flat.parameters():
        p.data = torch.zeros_like(p)
    facts["zero"] = loss_of(flat, 1, 0, rank).item()
    with torch.no_grad():  # it lies in the job again, where stores are seen
        for p in flat.parameters():
            p.add_(torch.linspace(-1, 1, p.numel()))
    facts["moved"] = loss_of(flat, 1, 0, rank).item() != facts["zero"]
    facts["aborts"] = counters(flat)["aborts"]

    orig: Any = make("wrapper")
    with summon_full_params(orig):
        orig.layers[0].up.weight = nn.Parameter(torch.full_like(orig.layers[0].up.weight, 3.0))
    facts["summoned"] = orig.layers[0].up.weight.eq(3.0).all().item() and loss_of(orig, 0, 0, rank).item() > 0

    tied: Any = make("wrapper", tie=True)
    loss_of(tied, 0, 0, rank).backward()
    given = tied.embed.weight = nn.Parameter(torch.zeros_like(tied.embed.weight))
    with torch.no_grad():  # after it the root is sharded, too
        facts["tied loss"] = loss_of(tied, 1, 0, rank).item()
    facts["tied"] = tied.head.weight is given and tied.embed.weight is given
    facts["untied"] = ""
    tied.embed.weight = nn.Parameter(torch.zeros_like(given))
    tied.head.weight = nn.Parameter(torch.zeros_like(given))
    facts["untied"] = text_of(lambda: loss_of(tied, 1, 0, rank))

    closed: Any = Wrapper(nn.Linear(4, 4), use_orig_params=True, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    optimizer = SGD(closed.parameters(), lr=0.1, in_place_edits=False)
    closed(torch.ones(1, 4)).sum().backward()
    closed.module.weight.data = torch.zeros_like(closed.module.weight)
    facts["closed"] = text_of(lambda: closed(torch.ones(1, 4)))
    dist.barrier()
    return facts
