"""What ranks do in the tests of copies for passes: stores that nobody sees, at any time."""

from __future__ import annotations

import copy
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import distribute_tensor

from job.edit_scenarios import _optimizer
from models import loss_of
from optimizers.optim_cases import counts, full, model_of, parameters_of


def has_copies(model: nn.Module) -> bool:
    from shardd.torch._training.api import registered_job

    job = registered_job(model)
    return job.copies


def stores_of_the_system(kind: str) -> dict[str, Any]:
    rank = dist.get_rank()
    model = model_of("shardd")
    optimizer = _optimizer("shardd", kind, model)
    loss_of(model, 0, 0, rank).backward()
    optimizer.step()
    with torch.no_grad():
        model.norm.weight.mul_(2)
        local = model.norm.bias.detach().to_local()
        if local.numel():
            with open("/dev/zero", "rb") as file:
                read = file.readinto(local.numpy().view("uint8"))  # type: ignore[attr-defined]
            assert read == local.numel() * 4
    loss_of(model, 1, 0, rank).backward()
    return {"copies": has_copies(model), "bias": full(model.norm.bias)}


def store_inside_a_pass(kind: str) -> dict[str, Any]:
    """Rank 0 stores while rank 1 reads, and every rank between a forward and its backward; gradients do not see it."""
    rank = dist.get_rank()
    store = dist.distributed_c10d._get_default_store()
    model = model_of("shardd")
    optimizer = _optimizer("shardd", kind, model)
    loss_of(model, 0, 0, rank).backward()
    optimizer.step()
    optimizer.zero_grad()
    sharded = dict(model.named_parameters())  # the root shows others after its forward
    before = parameters_of(model)
    loss_of(model, 1, 0, rank).backward()
    want = {name: full(param.grad) for name, param in model.named_parameters()}
    optimizer.zero_grad()
    seen: list[torch.Tensor] = []

    def write(module: nn.Module, args: Any) -> None:
        if rank == 0:
            with torch.no_grad():
                sharded["layers.2.up.weight"].mul_(1.5)
            store.set("written", "")

    def look(module: nn.Module, args: Any) -> None:
        if rank == 1:
            store.wait(["written"])
            seen.append(model.layers[2].up.weight.detach().clone())

    hooks = [model.layers[0].register_forward_pre_hook(write), model.layers[2].register_forward_pre_hook(look)]
    loss = loss_of(model, 1, 0, rank)
    with torch.no_grad():
        for name, param in sharded.items():
            if rank != 0 or name != "layers.2.up.weight":
                param.mul_(1.5)
    loss.backward()
    for hook in hooks:
        hook.remove()
    got = {name: full(param.grad) for name, param in model.named_parameters()}
    optimizer.zero_grad()
    with torch.no_grad():
        after = loss_of(model, 2, 0, 0).item()
        model.reshard()
    theirs = model_of("torch")
    with torch.no_grad():
        for name, param in theirs.named_parameters():
            param.copy_(distribute_tensor(before[name] * 1.5, param.device_mesh, param.placements))
        wanted = loss_of(theirs, 2, 0, 0).item()
    return {"want": want, "got": got, "seen": seen, "before": before["layers.2.up.weight"], "losses": (after, wanted),
            "parameters": parameters_of(model), "all before": before}  # fmt: skip


def tried_again(impl: str) -> dict[str, Any]:
    """An exception ends rank 0's forward, and its second try; then those of both ranks."""
    rank = dist.get_rank()
    model = model_of(impl)
    optimizer = _optimizer(impl, "adamw", model)
    fails = [0]

    def fail(module: nn.Module, args: Any) -> None:
        if fails[0]:
            fails[0] -= 1
            raise ArithmeticError("mine")

    if impl == "shardd":
        model.layers[1].register_forward_pre_hook(fail)
    losses = []
    for step in range(4):
        fails[0] = {1: 2 if rank == 0 else 0, 2: 1}.get(step, 0)
        while True:
            try:
                loss = loss_of(model, step, 0, rank)
                break
            except ArithmeticError:
                continue
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "counters": counts(impl, model), "parameters": parameters_of(model)}


def forwards_and_parts(impl: str) -> dict[str, Any]:
    """Two forwards for one backward, and parts that run by themselves around steps."""
    rank = dist.get_rank()
    model = model_of(impl)
    optimizer = _optimizer(impl, "adamw", model)
    losses = []
    for step in range(3):
        loss = loss_of(model, step, 0, rank) + loss_of(model, step, 1, rank)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    for step in range(3):
        part = model.layers[step % 2]
        x = torch.linspace(-1, 1, 20).reshape(2, 10) + step + rank
        losses.append(part(x).square().mean().item())  # no backward follows
        optimizer.step()  # of no gradients
        loss = part(part(x)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "parameters": parameters_of(model)}


def both(function: str, *arguments: Any) -> tuple[Any, Any]:
    of = globals()[function]
    return of("torch", *arguments), of("shardd", *arguments)


def stores_after_full_precision(gradients: bool) -> dict[str, Any]:
    """In eval all ranks read what is stored; rank 0 is through and stores while rank 1 still computes. ``gradients``: with
    autograd's graph, of which one forward has a backward and one has none."""
    from torch.distributed.fsdp import MixedPrecision

    from shardd.torch import FullyShardedDataParallel

    rank = dist.get_rank()
    torch.manual_seed(1)
    inner = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    plain = copy.deepcopy(inner)
    low = MixedPrecision(param_dtype=torch.bfloat16)
    inner[1] = FullyShardedDataParallel(inner[1], use_orig_params=True, mixed_precision=low)
    model = FullyShardedDataParallel(inner, use_orig_params=True, mixed_precision=low)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x = torch.ones(1, 8)
    model(x).float().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        want = model(x)
    apart = 0.0
    if gradients:
        model(x).sum().backward()
        plain(x).sum().backward()
        square = sum((p.grad.square().sum() for p in model.parameters() if p.grad is not None), torch.zeros(()))
        dist.all_reduce(square)
        theirs = sum(p.grad.square().sum().item() for p in plain.parameters() if p.grad is not None)
        apart = abs(square.item() / theirs - 1)
    slow = rank == 1
    inner[1].register_forward_pre_hook(lambda module, args: time.sleep(0.5) if slow else None)
    with torch.set_grad_enabled(gradients):
        got = model(x).detach()
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(3.0)
        dist.barrier()
        after = model(x)
    return {"want": want, "got": got, "after": after, "dtype": want.dtype, "copies": has_copies(model), "apart": apart}


def summoned_while_others_store() -> dict[str, Any]:
    """Rank 0 is out of the context, and stores, while rank 1 has just begun to copy."""
    from shardd.torch import summon_full_params
    from shardd.torch._full_params import forms

    rank = dist.get_rank()
    model = model_of("shardd")
    optimizer = _optimizer("shardd", "sgd", model)
    loss_of(model, 0, 0, rank).backward()
    optimizer.step()
    before = parameters_of(model)
    show = forms.ShardedFullParam.show

    def late(self: Any, value: torch.Tensor, grad: torch.Tensor | None) -> None:
        time.sleep(0.02 * rank)
        show(self, value, grad)

    forms.ShardedFullParam.show = late  # type: ignore[method-assign]
    try:
        with summon_full_params(model, writeback=False):
            read = {name: param.detach().clone() for name, param in model.named_parameters()}
    finally:
        forms.ShardedFullParam.show = show  # type: ignore[method-assign]
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    return {"read": read, "before": before}


def evaluated() -> dict[str, Any]:
    """A model without an optimizer, used without gradients; and one whose parameters want none, with them."""
    from shardd.torch import memory_plan

    facts: dict[str, Any] = {}
    for name in ("no_grad", "frozen"):
        model = model_of("shardd").requires_grad_(name == "no_grad")
        with torch.set_grad_enabled(name == "frozen"):
            before = loss_of(model, 0, 0, 0).item()
            model.reshard()
            model.load_state_dict({n: 2 * p.detach() for n, p in model.state_dict().items()})
            after = loss_of(model, 0, 0, 0).item()
            model.reshard()
        theirs = model_of("torch")
        with torch.no_grad():
            want = loss_of(theirs, 0, 0, 0).item()
            theirs.load_state_dict({n: 2 * p.detach() for n, p in theirs.state_dict().items()})
            wanted = loss_of(theirs, 0, 0, 0).item()
        plan = memory_plan(model)
        try:
            model.norm.weight.requires_grad_(True)
            model.norm.weight.grad = torch.ones_like(model.norm.weight)
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            refused = ""
        except RuntimeError as error:
            refused = str(error)
        facts[name] = {"losses": (before, after), "want": (want, wanted), "copies": has_copies(model), "refused": refused,
                       "plan": plan}  # fmt: skip
    return facts


def edited_and_evaluated() -> dict[str, Any]:
    """Models that nothing trains, stored into between and inside passes; what they cost."""
    from shardd.torch import memory_plan

    facts: dict[str, Any] = {}
    for name in ("no_grad", "frozen"):
        model, theirs = model_of("shardd").requires_grad_(name == "no_grad"), model_of("torch")
        losses, want = [], []
        for scale in (1.0, 2.0, 0.5):
            with torch.no_grad():
                for param in (*model.parameters(), *theirs.parameters()):
                    param.mul_(scale)
                want.append(loss_of(theirs, 0, 0, 0).item())
            with torch.set_grad_enabled(name == "frozen"):
                losses.append(loss_of(model, 0, 0, 0).item())
                model.reshard()
        facts[name] = {"losses": losses, "want": want, "copies": has_copies(model), "plan": memory_plan(model)}
    return facts
