"""What ranks do in test_adafactor.py. torch's Adafactor does not step DTensors, so the yardstick is the model on one process."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from models import Case, build, loss_of
from optimizers.optim_cases import counts, full_state, model_of, parameters_of, train_all
from raised import text_of

USUAL: dict[str, Any] = {"lr": 0.02}
OTHER: dict[str, Any] = {"lr": 0.05, "beta2_decay": -0.6, "eps": (1e-6, 1e-2), "d": 1.5, "weight_decay": 0.1, "maximize": True}  # fmt: skip
ARGUMENTS = {"usual": USUAL, "other": OTHER, "unclipped": {"lr": 0.05, "d": float("inf")}}
STEPS = 20


class Whole(nn.Module):
    """Parameters of all shapes: fewer rows than ranks, a convolution's, a number, a row and a column."""

    def __init__(self) -> None:
        super().__init__()
        self.body = build(Case())
        self.kernel = nn.Parameter(torch.randn(3, 2, 2, 5) / 4)
        self.row = nn.Parameter(torch.randn(1, 6))
        self.column = nn.Parameter(torch.randn(6, 1))
        self.number = nn.Parameter(torch.ones(1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        more = self.kernel.square().sum() + (self.row @ self.column).sum() * self.number.sum()
        return self.body(tokens) * (1 + more / 8)


def whole_model() -> Whole:
    torch.manual_seed(11)
    return Whole()


def sharded(mesh: tuple[int, ...] = ()) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    from shardd.torch import fully_shard

    model: Any = whole_model()
    names = ("replicate", "shard") if len(mesh) == 2 else ("shard",)
    of = init_device_mesh("cpu", mesh or (dist.get_world_size(),), mesh_dim_names=names)
    for layer in model.body.layers:
        fully_shard(layer, mesh=of)
    fully_shard(model, mesh=of)
    return model


def _loss(model: Any, step: int) -> torch.Tensor:
    """The same batch on each rank, whose mean is exact: gradients are those of one process."""
    return loss_of(model, step, 0, 0)


def _train(model: Any, optimizers: list[Any], scheduled: bool = False) -> dict[str, Any]:
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizers[0], T_max=STEPS) if scheduled else None

    def behind() -> None:
        if scheduler is not None:
            scheduler.step()

    return train_all(model, optimizers, STEPS, lambda step: _loss(model, step), behind=behind)


def _cut(model: Any, beside: bool) -> tuple[list[Any], list[Any]]:
    named = list(model.named_parameters())
    rest = [p for name, p in named if beside and ("norm" in name or "embed" in name)]
    return [p for _, p in named if not any(p is r for r in rest)], rest


def _optimizers(optim: Any, model: Any, arguments: dict[str, Any], beside: bool) -> list[Any]:
    own, rest = _cut(model, beside)
    groups = [{"params": own[:4], "lr": 0.01}, {"params": own[4:]}]
    return [optim.Adafactor(groups, **arguments), *([optim.AdamW(rest, lr=1e-2)] if beside else [])]


def both(name: str, mesh: tuple[int, ...], beside: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    from shardd.torch import optim

    theirs_model = whole_model()
    theirs = _train(theirs_model, _optimizers(torch.optim, theirs_model, ARGUMENTS[name], beside), scheduled=True)
    model = sharded(mesh)
    ours = _train(model, _optimizers(optim, model, ARGUMENTS[name], beside), scheduled=True)
    return theirs, {**ours, "counters": counts("shardd", model)}


def installed(beside: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """The optimizer of the program is torch's."""
    import shardd.torch

    theirs_model = whole_model()
    theirs = _train(theirs_model, _optimizers(torch.optim, theirs_model, USUAL, beside))
    shardd.torch.install()
    model = sharded()
    ours = _train(model, _optimizers(torch.optim, model, USUAL, beside))
    counters = counts("shardd", model)
    shardd.torch.uninstall()
    return theirs, {**ours, "counters": counters}


def alike() -> dict[str, torch.Tensor]:
    """Parameters and states after five steps, the same on any number of ranks."""
    from shardd.torch import optim

    model = sharded()
    optimizer = optim.Adafactor(model.parameters(), lr=0.05, weight_decay=0.1)
    for step in range(5):
        _loss(model, step).backward()
        optimizer.step(max_grad_norm=0.5)
        optimizer.zero_grad()
    states = {f"{i} {n}": torch.as_tensor(v) for i, entry in full_state(optimizer).items() for n, v in entry.items()}
    return {**parameters_of(model), **states}


def loaded(full: bool) -> dict[str, Any]:
    """A model that goes on from what torch.distributed.checkpoint.state_dict has of another one, and one process that does."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

    from shardd.torch import optim

    def steps(model: Any, optimizer: Any, numbers: range) -> None:
        for step in numbers:
            _loss(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()

    options = StateDictOptions(full_state_dict=full)
    first = sharded()
    optimizer = optim.Adafactor(first.parameters(), **USUAL)
    steps(first, optimizer, range(3))
    saved = copy.deepcopy(get_state_dict(first, optimizer, options=options))
    whole = copy.deepcopy(saved)  # before torch puts DTensors into it
    steps(first, optimizer, range(3, 6))
    second = sharded()
    other = optim.Adafactor(second.parameters(), **USUAL)
    set_state_dict(second, other, model_state_dict=saved[0], optim_state_dict=saved[1], options=options)
    steps(second, other, range(3, 6))
    result = {"went on": parameters_of(first), "loaded": parameters_of(second),
              "shapes": {name: {n: tuple(v.shape) for n, v in entry.items()} for name, entry in saved[1]["state"].items()}}  # fmt: skip
    if full:
        alone = whole_model()
        theirs = torch.optim.Adafactor(alone.parameters(), **USUAL)
        set_state_dict(alone, theirs, model_state_dict=whole[0], optim_state_dict=whole[1], options=options)
        steps(alone, theirs, range(3, 6))
        result["alone"] = {name: p.detach().clone() for name, p in alone.named_parameters()}
    return result


def from_one_process() -> dict[str, dict[str, torch.Tensor]]:
    """State of torch's own optimizer, of one process, goes on in the daemon."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

    from shardd.torch import optim

    def steps(model: Any, optimizer: Any, numbers: range) -> None:
        for step in numbers:
            _loss(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()

    alone = whole_model()
    theirs = torch.optim.Adafactor(alone.parameters(), **USUAL)
    steps(alone, theirs, range(3))
    saved = copy.deepcopy(get_state_dict(alone, theirs, options=StateDictOptions(full_state_dict=True)))
    steps(alone, theirs, range(3, 6))
    model = sharded()
    optimizer = optim.Adafactor(model.parameters(), **USUAL)
    set_state_dict(model, optimizer, model_state_dict=saved[0], optim_state_dict=saved[1],
                   options=StateDictOptions(full_state_dict=True))  # fmt: skip
    steps(model, optimizer, range(3, 6))
    return {"theirs": {name: p.detach().clone() for name, p in alone.named_parameters()}, "ours": parameters_of(model)}


def scaled() -> dict[str, Any]:
    """A step whose loss is scaled, and one of gradients that are not finite, which is skipped."""
    from shardd.torch import optim

    outcome: dict[str, Any] = {}
    for scale in (0.0, 1024.0):
        model = sharded()
        optimizer = optim.Adafactor(model.parameters(), **USUAL)
        for step in range(2):
            (_loss(model, step) * (scale or 1.0)).backward()
            optimizer.step(loss_scale=scale)
            optimizer.zero_grad()
        outcome[str(scale)] = parameters_of(model)
        if scale:
            (_loss(model, 2) * float("inf")).backward()
            optimizer.step(loss_scale=scale)
            outcome["skipped"], outcome["after"] = optimizer.last_step_skipped, parameters_of(model)
    return outcome


def refusals() -> dict[str, str]:
    from shardd.torch import FullyShardedDataParallel, fully_shard, optim

    flat: Any = build(Case())
    fully_shard(flat, layout="flat")
    wrapped = FullyShardedDataParallel(build(Case()), use_orig_params=True)
    model = sharded()
    optimizer = optim.Adafactor(model.parameters())
    _loss(model, 0).backward()
    optimizer.step()
    state = optimizer.state_dict()
    state["state"][0]["row_var"] = torch.zeros(2, 2)
    return {
        "flat": text_of(lambda: optim.Adafactor(flat.parameters())),
        "wrapped": text_of(lambda: optim.Adafactor(wrapped.parameters())),
        "shape": text_of(lambda: optimizer.load_state_dict(state)),
        "lr": text_of(lambda: optim.Adafactor(model_of("shardd").parameters(), lr=float("inf"))),
    }


def placed() -> str:
    """Rows are cut along their last dimension."""
    from shardd.torch import optim

    model = model_of("shardd")
    return text_of(lambda: optim.Adafactor(model.parameters()))
