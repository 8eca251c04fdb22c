"""What ranks do in the tests of how torch's own optimizers take less memory: state made ahead of the first step, ``foreach`` in chunks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from models import Case, build, loss_of
from optimizers.optim_cases import full_state, model_of, parameters_of
from optimizers.stock_scenarios import KINDS, in_the_jobs_memory

# By the name of the class, with options that take each way of its ``foreach`` implementation that has more state.
FOREACH: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 1e-2, "amsgrad": True},
    "Adam": {"lr": 1e-2, "maximize": True, "weight_decay": 0.1},
    "Adamax": {"lr": 1e-3},
    "Adadelta": {},
    "Adagrad": {"lr": 1e-2},  # not in chunks
    "ASGD": {"lr": 1e-2, "weight_decay": 0.1},
    "NAdam": {"lr": 1e-3},
    "RAdam": {"lr": 1e-3},
    "RMSprop": {"lr": 1e-3, "momentum": 0.9, "centered": True},
    "Rprop": {"lr": 1e-2},  # which torch does not step where parameters are DTensors
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
}


def _rows(value: Any) -> Any:
    return value.to_local() if hasattr(value, "to_local") else value


def first_step(kind: str) -> dict[str, Any]:
    """Of an optimizer's first step: how much state there is in the trainer's own memory when it computes, and in the job's."""
    model = model_of("shardd")
    optimizer = KINDS[kind](list(model.parameters()))
    own: list[bool] = []
    module = sys.modules[type(optimizer).step.__module__]
    name = module.__name__.rsplit(".", 1)[-1]
    whole = getattr(module, name)

    def look(*args: Any, **kwargs: Any) -> None:  # behind what makes the state in the step
        for param, state in optimizer.state.items():
            rows = [v.to_local() for v in state.values() if torch.is_tensor(v) and v.shape == param.shape]
            own.extend(not in_the_jobs_memory(value) for value in rows if value.numel())
        whole(*args, **kwargs)

    setattr(module, name, look)
    loss_of(model, 0, 0, dist.get_rank()).backward()
    optimizer.step()
    params = sum(p.to_local().numel() > 0 for p in model.parameters())
    return {"own": sum(own), "in_job": len(own) - sum(own), "params": params}


def between_operations(kind: str, chunk_bytes: int) -> dict[str, Any]:
    """Steps in such chunks, and the most that one operation of theirs has made for the next."""
    from shardd.torch import commit
    from shardd.torch._torch_optimizers import foreach_chunks

    foreach_chunks.CHUNK_BYTES = chunk_bytes
    model = model_of("shardd")
    params = list(model.parameters())
    optimizer = KINDS[kind](params)
    made: list[int] = []
    whole = torch._foreach_sqrt

    def watched(tensors: Any) -> Any:
        out = whole(tensors)
        made.append(sum((t.to_local() if hasattr(t, "to_local") else t).nbytes for t in out))
        return out

    torch._foreach_sqrt = watched
    try:
        for step in range(3):
            loss_of(model, step, 0, dist.get_rank()).backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        torch._foreach_sqrt = whole
    commit(model)
    local = [p.to_local().nbytes for p in params]
    return {"most": max(made), "all": sum(local), "largest": max(local), "losses": [],
            "state": full_state(optimizer), "parameters": parameters_of(model)}  # fmt: skip


class ByGroupNorm(Optimizer):
    """A program's own, which couples what torch's grouping puts together, as trust ratios and clipping by a group do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.groups = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            lists: Any = [[_rows(p) for p in params], [_rows(p.grad) for p in params]]
            found = Optimizer._group_tensors_by_device_and_dtype(lists)
            self.groups = len(found)
            for (values, grads), _ in found.values():
                norm = torch.stack(torch._foreach_norm(grads)).norm() + 1e-6  # type: ignore[arg-type]
                for value, grad in zip(values, grads):
                    value.sub_(grad / norm * group["lr"])  # type: ignore[union-attr, operator]


def _skips_one(optimizer: Any, *_: Any) -> None:
    optimizer.param_groups[0]["params"][0].grad = None


def _warms_up(optimizer: Any, *_: Any) -> None:
    optimizer.param_groups[0]["lr"] /= 8


def _takes_amsgrad(optimizer: Any, *_: Any) -> None:
    optimizer.param_groups[0]["amsgrad"] = True


_HOOKS: dict[str, Callable[..., None]] = {"skip": _skips_one, "warm-up": _warms_up, "amsgrad": _takes_amsgrad}


def beside_torch(kind: str, hook: str = "", everywhere: bool = False) -> dict[str, Any]:
    """Steps of an optimizer on this rank's shards in small chunks, and of another, whole, on plain copies with the same gradients.

    ``hook`` runs before the steps of both, as a hook of each or ``everywhere``.
    """
    from shardd.torch import FullyShardedDataParallel, commit
    from shardd.torch._torch_optimizers import foreach_chunks

    foreach_chunks.CHUNK_BYTES = 1 << 10
    model: Any = model_of("shardd")
    if kind == "Rprop":
        model = FullyShardedDataParallel(build(Case()), use_orig_params=True)
    params = list(model.parameters())
    copies = [torch.nn.Parameter(_rows(p).detach().clone()) for p in params]
    if kind == "ByGroupNorm":
        ours, theirs = (ByGroupNorm(each) for each in (params, copies))
    else:
        ours, theirs = (getattr(torch.optim, kind)(each, foreach=True, **FOREACH[kind]) for each in (params, copies))
    if hook and everywhere:
        register_optimizer_step_pre_hook(_HOOKS[hook])
    elif hook:
        for optimizer in (ours, theirs):
            optimizer.register_step_pre_hook(_HOOKS[hook])
    groups: dict[Any, int] = {ours: 0, theirs: 0}
    stepping = [ours]
    grouping = Optimizer._group_tensors_by_device_and_dtype

    def counted(*args: Any, **kwargs: Any) -> Any:
        found = grouping(*args, **kwargs)
        groups[stepping[0]] = max(groups[stepping[0]], len(found))
        return found

    Optimizer._group_tensors_by_device_and_dtype = staticmethod(counted)  # type: ignore[method-assign]
    same = []
    for step in range(3):
        loss_of(model, step, 0, dist.get_rank()).backward()
        for param, copied in zip(params, copies):
            copied.grad = None if param.grad is None else _rows(param.grad).clone()
        for optimizer in (ours, theirs):
            stepping[0] = optimizer
            optimizer.step()
        same.append(all(torch.equal(_rows(p), c) for p, c in zip(params, copies)))
        for param, copied in zip(params, copies):
            got, want = ours.state.get(param) or {}, theirs.state.get(copied) or {}
            same.append(list(got) == list(want))
            same.extend(torch.equal(_rows(got[name]), value) for name, value in want.items() if torch.is_tensor(value))
        ours.zero_grad()
    commit(model)
    return {"same": same, "ours": groups[ours], "theirs": groups[theirs]}


def groups_of_plain_tensors() -> dict[str, int]:
    """How many chunks a thread whose steps are cut makes of three tensors; and a program's step that comes then."""
    import shardd.torch  # noqa: F401
    from shardd.torch._torch_optimizers import foreach_chunks

    foreach_chunks.CHUNK_BYTES = 1
    params = [torch.nn.Parameter(torch.ones(8)) for _ in range(3)]
    grads = [torch.ones(8) for _ in params]
    foreach_chunks.set_chunked(True)
    group: Any = Optimizer._group_tensors_by_device_and_dtype
    out = {
        "three": len(group([params, grads])),
        "one of them twice": len(group([[*params, params[0]], [*grads, grads[0]]])),
        "one sparse": len(group([params, [*grads[:2], torch.ones(8).to_sparse()]])),
    }
    for param, grad in zip(params, grads):
        param.grad = grad
    optimizer = ByGroupNorm(params)
    optimizer.step()  # whatever an earlier step that raised has left
    out["a program's"] = optimizer.groups
    return out


class Numbered(torch.optim.Adagrad):
    """Its state has a number that is no tensor."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for param in self.state:
            self.state[param]["number"] = 7


def dropped_state() -> dict[str, Any]:
    """What is committed of state that the program has dropped, and of a number beside an optimizer without state."""
    model = model_of("shardd")
    params = list(model.parameters())
    optimizer, other = torch.optim.AdamW(params, lr=1e-2), torch.optim.AdamW(params, lr=1e-2)
    numbered = Numbered(params, lr=1e-2)

    def step(of: Optimizer, number: int, only: int | None = None) -> None:
        loss_of(model, number, 0, dist.get_rank()).backward()
        for param in params[:only] if only is not None else ():
            param.grad = None
        of.step()
        model.zero_grad()

    def committed(those: list[Optimizer]) -> set[int]:
        memory = model._get_fsdp_state()._job.memory
        packed = memory.pack(those)
        return set() if packed is None else set(memory._unpacked(packed))

    step(optimizer, 0)
    step(optimizer, 1)
    all_of_it = len(committed([optimizer]))
    optimizer.state.clear()
    step(optimizer, 2, only=3)
    after = len(committed([optimizer]))
    beside = len(optimizer.state)
    step(numbered, 3)
    memory = model._get_fsdp_state()._job.memory
    copied = memory.pack([other, numbered])["copied"].values()
    return {
        "dropped": all_of_it - after,
        "params": len(params),
        "all": all_of_it,
        "numbers": [entry["number"] for entry in copied],
        "others": len(other.state),
        "beside": beside,
    }
