"""What ranks do in the tests of shard_placement_fn: one model on torch's fully_shard and on shardd's."""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from models import Case, compare
from optimizers.optim_cases import counts, full, optimizer_of
from state_dicts.state_dict_cases import kinds_of, whole


class Net(nn.Module):
    """Parameters of one to four dimensions, one of whose gradients is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 6, 3)
        self.project = nn.Linear(54, 8)
        self.experts = nn.Parameter(torch.randn(3, 8, 10) / 8)
        self.last = nn.Parameter(torch.randn(12, 10) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(checkpoint(self.project, self.conv(x).flatten(1), use_reentrant=False))
        return torch.einsum("bi,eio->beo", y, self.experts).sum(1) @ self.last.t()


def place(param: nn.Parameter) -> Any:
    return {1: None, 2: Shard(-1), 3: Shard(-2), 4: Shard(1)}[param.ndim]


def net(impl: str, mesh: tuple[int, ...], seed: int = 3, **more: Any) -> Net:
    if impl == "shardd":
        from shardd.torch import fully_shard
    else:
        from torch.distributed.fsdp import fully_shard
    torch.manual_seed(seed)
    model = Net()
    names = ("replicate", "shard")[2 - len(mesh) :]
    more = {"mesh": init_device_mesh("cpu", mesh, mesh_dim_names=names), "shard_placement_fn": place, **more}
    for module in (model.conv, model.project, model):
        fully_shard(module, **more)
    return model


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(5, 4, 5, 5, generator=generator)
    return F.cross_entropy(model(x), torch.randint(0, 12, (5,), generator=generator))


def _contiguous(tensor: Any) -> tuple[bool, bool, tuple[int, ...], Any]:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return tensor.is_contiguous(), local.is_contiguous(), tuple(local.shape), getattr(tensor, "placements", None)


def trained(impl: str, kind: str, mesh: tuple[int, ...], reshard: Any) -> dict[str, Any]:
    """Accumulation without communication, clipping, edits, unshard by hand; state dicts into a second model."""
    rank = dist.get_rank()
    model = net(impl, mesh, reshard_after_forward=reshard)
    optimizer = optimizer_of(impl, kind, model.parameters())
    out: dict[str, Any] = {"losses": [], "norms": [], "gradients": [], "contiguous": []}
    objects = list(model.parameters())
    seen: list[Any] = []
    hook = model.project.register_forward_pre_hook(
        lambda m, _: seen.append([(type(p), *_contiguous(p)) for p in m.parameters()])
    )
    for step in range(4):
        for micro in range(2):
            model.set_requires_gradient_sync(step % 2 == 0 or micro == 1)
            model.set_reshard_after_backward(micro == 1)
            loss = loss_of(model, 2 * step + micro, rank)
            loss.backward()
            out["losses"].append(loss.item())
        out["gradients"].append({n: full(p.grad) for n, p in model.named_parameters()})
        out["contiguous"].append([(_contiguous(p), _contiguous(p.grad)) for p in model.parameters()])
        out["norms"].append(full(nn.utils.clip_grad_norm_(model.parameters(), 0.3)).item())
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-0.3, 0.3)
    hook.remove()
    out["seen"] = seen
    model.project.unshard()
    out["unsharded"] = model.project.weight.detach().clone()
    model.project.reshard()
    out["same objects"] = all(p is q for p, q in zip(model.parameters(), objects))
    for options in (StateDictOptions(), StateDictOptions(full_state_dict=True)):
        states = (
            get_model_state_dict(model, options=options),
            get_optimizer_state_dict(model, optimizer, options=options),
        )
        name = "full" if options.full_state_dict else "sharded"
        out[name] = [whole(state) for state in states]
        out[f"{name} kinds"] = [kinds_of(state) for state in states]
    second = net(impl, mesh, seed=4)
    other = optimizer_of(impl, kind, second.parameters())
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    given = copy.deepcopy(out["full"]) if rank == 0 else [{}, {}]  # torch goes on with what it loads
    set_model_state_dict(second, given[0], options=options)
    set_optimizer_state_dict(second, other, given[1], options=options)
    out["second"] = []
    for step in (8, 9):
        loss = loss_of(second, step, rank)
        loss.backward()
        other.step()
        other.zero_grad()
        out["second"].append(loss.item())
    out["parameters"] = whole(second.state_dict())
    out["counters"] = [counts(impl, m) for m in (model, second)]
    return out


def both(kind: str, mesh: tuple[int, ...], reshard: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    return trained("torch", kind, mesh, reshard), trained("shardd", kind, mesh, reshard)


def several(cases: list[Case]) -> list[dict[str, Any]]:
    return [compare(case) for case in cases]


def errors() -> dict[str, str]:
    """What cannot be: torch's texts, a write into a copy, ranks that place otherwise."""
    from torch.distributed.fsdp import fully_shard as of_torch

    import shardd
    from shardd.torch import fully_shard

    rank = dist.get_rank()
    texts: dict[str, str] = {}
    for impl, function in (("shardd", fully_shard), ("torch", of_torch)):
        for name, shape, result in (
            ("uneven", (4, 5), Shard(1)), ("dimension", (4,), Shard(1)), ("negative", (4, 3), Shard(-1)), ("kind", (4, 4), 1),
        ):  # fmt: skip
            module = nn.Module()
            module.weight = nn.Parameter(torch.zeros(shape))
            try:
                function(module, shard_placement_fn=lambda p, result=result: result)
            except (NotImplementedError, AssertionError, ValueError) as error:
                texts[f"{name} {impl}"] = f"{type(error).__name__}: {error}"
    model = net("shardd", (dist.get_world_size(),))
    optimizer = optimizer_of("shardd", "sgd", model.parameters())
    handle = model.project.register_forward_pre_hook(lambda m, _: m.weight.detach().mul_(2))
    try:
        loss_of(model, 0, rank)
    except shardd.Error as error:
        texts["write"] = str(error)
    handle.remove()
    stock = net("torch", (dist.get_world_size(),))
    stock_optimizer = optimizer_of("torch", "sgd", stock.parameters())
    for step in range(2):
        losses = []
        for trains, steps in ((model, optimizer), (stock, stock_optimizer)):
            loss = loss_of(trains, step, rank)
            loss.backward()
            steps.step()
            steps.zero_grad()
            losses.append(loss.item())
        texts[f"loss {step}"] = "same" if abs(losses[0] - losses[1]) < 1e-5 else str(losses)

    # (2, 8) cut on dimension 1 is 2 x 8 elements in the job, too.
    other = fully_shard(nn.Linear(8, 2, bias=False), shard_placement_fn=lambda p: Shard(rank))
    os.environ["SHARDD_TIMEOUT_MS"] = "10000"
    try:
        other(torch.zeros(1, 8))
    except shardd.Error as error:
        texts["ranks"] = str(error)
    return texts


def summoned() -> list[dict[str, Any]]:
    return [_summoned(locked) for locked in (False, True)]


def _summoned(locked: bool) -> dict[str, Any]:
    """Full parameters and gradients, read and written back, by all ranks and by rank 0 alone."""
    from shardd.torch import summon_full_params
    from shardd.torch.optim import SGD

    model = net("shardd", (dist.get_world_size(),))
    optimizer = SGD(model.parameters(), lr=0.5, in_place_edits=not locked)
    loss_of(model, 0, dist.get_rank()).backward()
    before = {n: full(p) for n, p in model.named_parameters()}
    grads = {n: full(p.grad) for n, p in model.named_parameters()}
    facts: dict[str, Any] = {}
    with summon_full_params(model, with_grads=True), torch.no_grad():
        facts["read"] = all(torch.equal(p, before[n]) for n, p in model.named_parameters())
        facts["gradients"] = all(torch.equal(p.grad, grads[n]) for n, p in model.named_parameters())  # type: ignore[arg-type]
        for p in model.parameters():
            numbers = torch.arange(p.numel(), dtype=torch.float32).view(p.shape)
            p.copy_(numbers)
            p.grad = -numbers
    with summon_full_params(model, with_grads=True, rank0_only=True), torch.no_grad():
        if dist.get_rank() == 0:
            for p in model.parameters():
                p.add_(1)
                p.grad.mul_(2)  # type: ignore[union-attr]
    optimizer.step()
    facts["counters"] = counts("shardd", model)
    facts["stepped"] = all(
        torch.equal(full(p), 1 + 2 * torch.arange(p.numel(), dtype=torch.float32).view(p.shape))
        for p in model.parameters()
    )
    return facts
