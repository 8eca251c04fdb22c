"""What ranks do in the tests of the daemon's further kinds: the same program with torch's optimizer and with the daemon's."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist

from models import loss_of
from optimizers.optim_cases import counts, full_state, model_of, parameters_of

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "adagrad": ("Adagrad", {"lr": 1e-2, "lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.2}),
    "adagrad-plain": ("Adagrad", {"lr": 1e-2, "maximize": True}),
    "rmsprop": ("RMSprop", {"lr": 1e-3, "alpha": 0.9, "weight_decay": 0.1}),
    "rmsprop-momentum": ("RMSprop", {"lr": 1e-3, "momentum": 0.9, "maximize": True}),
    "rmsprop-centered": ("RMSprop", {"lr": 1e-3, "centered": True}),
    "rmsprop-centered-momentum": ("RMSprop", {"lr": 1e-3, "centered": True, "momentum": 0.9, "weight_decay": 0.1}),
    "amsgrad": ("Adam", {"lr": 1e-2, "amsgrad": True, "weight_decay": 0.1, "maximize": True}),
    "adamw-amsgrad": ("AdamW", {"lr": 1e-2, "amsgrad": True, "betas": (0.5, 0.6)}),
    "lion": ("Lion", {"lr": 1e-3, "betas": (0.9, 0.98), "weight_decay": 0.1}),
}


class ReferenceLion(torch.optim.Optimizer):
    """Algorithm 2 of the paper; torch has none."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                average = self.state[param].setdefault("exp_avg", torch.zeros_like(param))
                update = (beta1 * average + (1 - beta1) * param.grad).sign()
                param.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=group["lr"])
                average.mul_(beta2).add_(param.grad, alpha=1 - beta2)


def _optimizer(impl: str, kind: str, params: Any) -> Any:
    name, arguments = KINDS[kind]
    if impl != "torch":
        from shardd.torch import optim

        return getattr(optim, name)(params, **arguments)
    return ReferenceLion(params, **arguments) if name == "Lion" else getattr(torch.optim, name)(params, **arguments)


def _train(impl: str, kind: str) -> dict[str, Any]:
    """Four steps; in their midst the state goes through a state dict."""
    rank = dist.get_rank()
    model = model_of(impl)
    optimizer = _optimizer(impl, kind, model.parameters())
    losses = []
    for step in range(4):
        loss = loss_of(model, step, 0, rank)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step == 1:
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer.load_state_dict(saved)
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.state_dict()["param_groups"]]
    return {"losses": losses, "state": full_state(optimizer), "parameters": parameters_of(model), "groups": groups,
            "counters": counts(impl, model)}  # fmt: skip


def all_kinds() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    return {kind: (_train("torch", kind), _train("shardd", kind)) for kind in KINDS}


def _adagrad(impl: str, initial: float) -> list[Any]:
    """State in torch's Adagrad at each forward's end; before the last step the program asks for what the daemon does not do."""
    model = model_of(impl)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=1e-2, initial_accumulator_value=initial)
    shown: list[Any] = []
    for step in range(4):
        if step == 3:
            optimizer.param_groups[0]["amsgrad"] = True  # which torch's does not know
        loss_of(model, step, 0, dist.get_rank()).backward()
        if step > 0 or initial == 0:
            shown.append(full_state(optimizer))
        optimizer.step()
        optimizer.zero_grad()
    return [*shown, full_state(optimizer), parameters_of(model)]


def installed() -> dict[float, tuple[list[Any], list[Any]]]:
    import shardd.torch

    theirs = {initial: _adagrad("torch", initial) for initial in (0.0, 0.2)}
    shardd.torch.install()
    ours = {initial: _adagrad("shardd", initial) for initial in theirs}
    shardd.torch.uninstall()
    return {initial: (theirs[initial], ours[initial]) for initial in theirs}
