"""What ranks do in test_adafactor_programs.py."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import nn

from optimizers.adafactor_scenarios import USUAL, _loss, sharded, whole_model
from optimizers.optim_cases import parameters_of
from raised import text_of


def _steps(model: Any, optimizer: Any, numbers: range) -> None:
    for step in numbers:
        _loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def _steps_with_closure(model: Any, optimizer: Any) -> list[float]:
    losses = []
    for step in range(3):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = _loss(model, step)
            loss.backward()
            return loss

        losses.append(float(optimizer.step(closure)))
    return losses


def first_use(how: str) -> dict[str, Any]:
    """An installed program whose model is used first by what loads or saves its optimizer's state, or by a closure's forward."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        get_state_dict,
        set_model_state_dict,
        set_optimizer_state_dict,
        set_state_dict,
    )

    import shardd.torch

    if how == "closure":
        alone = whole_model()
        losses = _steps_with_closure(alone, torch.optim.Adafactor(alone.parameters(), **USUAL))
        shardd.torch.install()
        model = sharded()
        ours = _steps_with_closure(model, torch.optim.Adafactor(model.parameters(), **USUAL))
        shardd.torch.uninstall()
        theirs = {name: p.detach().clone() for name, p in alone.named_parameters()}
        return {"losses": (ours, losses), "theirs": theirs, "ours": parameters_of(model)}
    options = StateDictOptions(full_state_dict=how != "get")
    shardd.torch.install()
    first = sharded()
    optimizer = torch.optim.Adafactor(first.parameters(), **USUAL)
    _steps(first, optimizer, range(3))
    values, state = copy.deepcopy(get_state_dict(first, optimizer, options=options))
    _steps(first, optimizer, range(3, 6))
    second = sharded()
    other = torch.optim.Adafactor(second.parameters(), **USUAL)
    shapes = {}
    if how == "get":  # as torch.distributed.checkpoint does, which loads into what it gets
        got = get_optimizer_state_dict(second, other, options=options)
        shapes = {name: {n: tuple(v.shape) for n, v in entry.items()} for name, entry in got["state"].items()}
        set_optimizer_state_dict(second, other, state, options=options)
        set_model_state_dict(second, values, options=options)
    else:
        set_state_dict(second, other, model_state_dict=values, optim_state_dict=state, options=options)
    lr = other.param_groups[0]["lr"]
    _steps(second, other, range(3, 6))
    shardd.torch.uninstall()
    wanted = {name: {n: tuple(v.shape) for n, v in entry.items()} for name, entry in state["state"].items()}
    return {"theirs": parameters_of(first), "ours": parameters_of(second), "lr": lr, "shapes": (shapes, wanted)}


def taken_back() -> dict[str, Any]:
    """An installed program asks for what the daemon does not do, is told so, and takes it back."""
    import shardd.torch
    from shardd.torch import counters

    shardd.torch.install()
    out: dict[str, Any] = {}
    for disturbed in (False, True):
        model = sharded()
        beside = nn.Parameter(torch.ones(2), requires_grad=False)
        optimizer = torch.optim.Adafactor([*model.parameters(), beside], **USUAL)
        _steps(model, optimizer, range(2))
        group, state = optimizer.param_groups[0], optimizer.state
        if disturbed:
            _loss(model, 2).backward()
            saved = optimizer.state_dict()
            for name in ("lr", "d"):
                group[name] = float("inf") if name == "lr" else 0.0
                out[name] = text_of(optimizer.step)
                group[name] = USUAL["lr"] if name == "lr" else 1.0
            beside.requires_grad_(True).grad = torch.ones(2)
            out["beside"] = text_of(optimizer.step)
            beside.requires_grad_(False).grad = None
            other = copy.deepcopy(saved)
            other["param_groups"][0]["lr"] = float("inf")
            out["load"] = text_of(functools.partial(optimizer.load_state_dict, other))
            param = next(p for p in state if "row_var" in state[p])
            state[param]["row_var"] = state[param]["row_var"] + 1
            out["state"] = text_of(optimizer.step)
            optimizer.load_state_dict(saved)
            optimizer.step()
            optimizer.zero_grad()
        else:
            _steps(model, optimizer, range(2, 3))
        _steps(model, optimizer, range(3, 5))
        out["parameters", disturbed] = parameters_of(model)
        out["updated", disturbed] = counters(model)["bytes_updated"]
    shardd.torch.uninstall()
    return out


def not_settled() -> str:
    """A model that the daemon cannot step at all: its first step says why, and that PyTorch's cannot."""
    import shardd.torch

    shardd.torch.install()
    model = sharded()
    optimizer = torch.optim.Adafactor([*model.parameters(), nn.Parameter(torch.ones(2))], **USUAL)
    _loss(model, 0).backward()
    said = text_of(optimizer.step)
    shardd.torch.uninstall()
    return said


RANGES: list[dict[str, Any]] = [
    {"lr": -1.0},
    {"lr": torch.ones(2)},
    {"beta2_decay": 0.1},
    {"eps": (-1.0, 1e-3)},
    {"eps": (None, -1.0)},
    {"d": 0},
    {"d": 0.5},
    {"d": float("nan")},
    {"weight_decay": -0.1},
]


def ranges() -> list[tuple[str, str]]:
    from shardd.torch import optim

    model = sharded()
    alone = [nn.Parameter(torch.ones(2))]
    return [(text_of(lambda a=arguments: optim.Adafactor(model.parameters(), **a)),
             text_of(lambda a=arguments: torch.optim.Adafactor(alone, **a))) for arguments in RANGES]  # fmt: skip
