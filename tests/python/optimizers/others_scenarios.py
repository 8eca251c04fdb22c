"""What ranks do in the tests of gradients that some ranks alone have: experts without tokens on a rank."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from state_dicts.wrapper_state_cases import face, quiet

WIDTH = 5
_EXPERTS = 4


class Experts(nn.Module):
    """Runs those experts that it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(_EXPERTS))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor, chosen: list[int]) -> torch.Tensor:
        for number in chosen:
            x = x + torch.tanh(self.experts[number](x))
        return self.head(x)


@dataclass(frozen=True)
class Case:
    """``form``: "experts" (each is a unit), "root" (one unit), "original" or "flat" (the wrapper). ``sync`` false: only
    the last micro-batch of a step synchronises. ``drops``: between some steps gradients are zeroed, or kept, without a
    step, as where a scaler skips one. ``zeros``: zero_grad(set_to_none=False)."""

    form: str
    optimizer: str = "adamw"
    accumulate: int = 1
    sync: bool = True
    clip: float = 0.0
    drops: bool = False
    zeros: bool = False
    everybody: bool = False  # all ranks run the same experts
    daemon: bool = False  # the daemon makes the steps
    mesh: tuple[int, ...] = ()  # replicas, and ranks that shard; empty: all shard
    frozen: bool = False  # the head is, so that some ranks have no gradient at all
    steps: int = 24


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
}


def _chosen(case: Case, step: int, micro: int, rank: int) -> list[int]:
    """By seed; of an expert that no rank runs there is no gradient at all. The wrapper, as PyTorch's, synchronises what a rank
    has kept to itself of a unit that it runs in the backward which synchronises."""
    if case.form in ("original", "flat") and not case.sync and micro == case.accumulate - 1:
        return sorted({number for earlier in range(micro) for number in _chosen(case, step, earlier, rank)})
    seed = torch.Generator().manual_seed(1000 * step + 100 * micro + (0 if case.everybody else rank))
    return [number for number in range(_EXPERTS) if torch.rand((), generator=seed) < 0.4]


def _loss(model: Any, case: Case, step: int, micro: int) -> torch.Tensor:
    rank = dist.get_rank()
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + micro + 1000 * rank))
    x.requires_grad_(case.frozen)
    return model(x, _chosen(case, step, micro, rank)).square().mean() / case.accumulate


def _model(case: Case) -> tuple[Any, nn.Module]:
    torch.manual_seed(11)
    model = Experts()
    model.head.requires_grad_(not case.frozen)
    return sharded(model, case.form, case.mesh)


def sharded(model: Any, form: str, shape: tuple[int, ...] = ()) -> tuple[Any, nn.Module]:
    """Sharded, and whole on each rank."""
    whole = copy.deepcopy(model)
    if form in ("original", "flat"):
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        with quiet():
            model = face("shardd")(
                model,
                auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
                use_orig_params=form == "original",
                device_id=torch.device("cpu"),
            )
        return model, whole
    from shardd.torch import fully_shard

    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")) if shape else None
    if form == "experts":
        for expert in model.experts:
            fully_shard(expert, mesh=mesh)
    return fully_shard(model, mesh=mesh), whole


class Whole:
    """The same on whole models of which ranks average the gradients: those that a rank lacks and another has are zeros
    there, those that all lack stay as they are. So does torch's DistributedDataParallel with find_unused_parameters."""

    def __init__(self, model: nn.Module) -> None:
        self.params = list(model.parameters())
        self.sums: list[torch.Tensor | None] = [None] * len(self.params)

    def reduce(self) -> None:
        for number, param in enumerate(self.params):
            has = torch.tensor(float(param.grad is not None))
            dist.all_reduce(has, dist.ReduceOp.MAX)
            if has:
                gradient = torch.zeros_like(param) if param.grad is None else param.grad
                dist.all_reduce(gradient)
                gradient /= dist.get_world_size()
                before = self.sums[number]
                self.sums[number] = gradient if before is None else before + gradient
            param.grad = None

    def show(self) -> None:
        for param, gradient in zip(self.params, self.sums):
            param.grad = gradient

    def forget(self, zeros: bool) -> None:
        for number, gradient in enumerate(self.sums):
            self.sums[number] = torch.zeros_like(gradient) if zeros and gradient is not None else None
            self.params[number].grad = None


def _not_synchronised(model: Any, case: Case) -> Any:
    if case.form in ("original", "flat"):
        return model.no_sync()
    model.set_requires_gradient_sync(False)
    return contextlib.nullcontext()


def _shown(model: Any) -> list[bool]:
    return [p.grad is not None for p in model.parameters() if p.numel()]


def _full(model: Any, case: Case) -> list[torch.Tensor]:
    if case.form in ("original", "flat"):
        with model.summon_full_params(model, writeback=False):
            return [p.detach().clone().flatten() for p in model.parameters()]
    return [p.full_tensor().detach().clone().flatten() for p in model.parameters()]


def train(case: Case) -> dict[str, Any]:
    """Losses, which gradients were shown, and parameters, beside those of the whole models."""
    from shardd.torch import commit, counters
    from shardd.torch import optim as daemons

    model, whole = _model(case)
    make = OPTIMIZERS[case.optimizer]
    ours = daemons.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1) if case.daemon else make(model.parameters())
    theirs = make(whole.parameters())
    reference = Whole(whole)
    out: dict[str, Any] = {"losses": [], "shown": [], "norms": [], "lacked": 0}
    for step in range(case.steps):
        for micro in range(case.accumulate):
            syncs = case.sync or micro == case.accumulate - 1
            if syncs and case.form in ("experts", "root"):
                model.set_requires_gradient_sync(True)
            with contextlib.nullcontext() if syncs else _not_synchronised(model, case):
                loss = _loss(model, case, step, micro)
                loss.backward()
            same = _loss(whole, case, step, micro)
            same.backward()
            out["losses"].append((loss.item(), same.item()))
            if syncs:
                out["lacked"] += sum(p.grad is None for p in whole.parameters())
                reference.reduce()
                reference.show()
                if case.form in ("experts", "root"):
                    out["shown"].append((_shown(model), [p.grad is not None for p in whole.parameters()]))
                if micro < case.accumulate - 1:
                    for param in whole.parameters():
                        param.grad = None
        if case.clip:
            clip = getattr(model, "clip_grad_norm_", None) or (
                lambda most: nn.utils.clip_grad_norm_(model.parameters(), most)
            )
            norm = clip(case.clip)
            want = nn.utils.clip_grad_norm_(whole.parameters(), case.clip)
            out["norms"].append((float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm), float(want)))
        if not case.drops or step % 5 not in (1, 3):
            ours.step()
            theirs.step()
        if not case.drops or step % 5 != 3:  # else they stay, and the next step's are added
            ours.zero_grad(set_to_none=not case.zeros)
            reference.forget(case.zeros)
        else:
            for param in whole.parameters():
                param.grad = None
    commit(model)
    dist.barrier()
    out["counters"] = counters(model)
    dist.barrier()
    out["parameters"] = _full(model, case), [p.detach().flatten() for p in whole.parameters()]
    if case.form == "flat":
        out["parameters"] = tuple(torch.cat(values) for values in out["parameters"])
    return out
