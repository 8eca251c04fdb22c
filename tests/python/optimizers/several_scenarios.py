"""What ranks do in test_several.py: several of the daemon's optimizers over one model, as the program says it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from models import Case, loss_of
from optimizers.optim_cases import counts, full_state, model_of, parameters_of


def _cut(model: nn.Module) -> tuple[list[Any], list[Any]]:
    params = list(model.parameters())
    return params[:6], params[6:]


def train(impl: str, mesh: tuple[int, ...]) -> dict[str, Any]:
    """Each of the two clips what it has, the daemon's in its step."""
    if impl == "shardd":
        from shardd.torch import optim
    else:
        from torch import optim  # type: ignore[no-redef]
    model = model_of(impl, Case(mesh=mesh))
    first, second = _cut(model)
    optimizers = [optim.AdamW(first, lr=1e-2, amsgrad=True), optim.SGD(second, lr=0.1, momentum=0.9, nesterov=True)]
    losses, norms = [], []
    for step in range(5):
        loss = loss_of(model, step, 0, dist.get_rank())
        loss.backward()
        losses.append(loss.item())
        for optimizer, params in zip(optimizers, (first, second), strict=True):
            if impl == "shardd":
                optimizer.step(max_grad_norm=0.3)  # type: ignore[call-arg]
                norms.append(optimizer.last_grad_norm)  # type: ignore[attr-defined]
            else:
                norm = nn.utils.clip_grad_norm_(params, 0.3)
                norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
                optimizer.step()
            optimizer.zero_grad()
    return {"losses": losses, "norms": norms, "states": [full_state(o) for o in optimizers],
            "parameters": parameters_of(model), "counters": counts(impl, model)}  # fmt: skip


def both(mesh: tuple[int, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
    return train("torch", mesh), train("shardd", mesh)


def _refused(**arguments: Any) -> str:
    """What the second step of ``act`` raises, or the registration."""
    from shardd.torch import optim

    model = model_of("shardd")
    first, second = _cut(model)
    shared = first[:1] if arguments.get("shares") else []
    optimizers = [optim.AdamW(first), optim.SGD([*second, *shared], lr=0.1)]
    if arguments.get("orders_differ") and dist.get_rank() == 1:
        optimizers.reverse()
    try:
        for step in range(2):
            loss_of(model, step, 0, dist.get_rank()).backward()
            if arguments.get("edits_before"):
                with torch.no_grad():
                    model.layers[0].up.weight.mul_(0.5)
            optimizers[0].step()
            if arguments.get("edits"):
                with torch.no_grad():
                    model.layers[0].up.weight.mul_(0.5)
            optimizers[1].step()
            model.zero_grad()
            with torch.no_grad():  # behind both
                model.layers[0].up.weight.mul_(0.5)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refusals() -> dict[str, str]:
    return {
        "shares": _refused(shares=True),
        "edits": _refused(edits=True),
        "before": _refused(edits_before=True),
        "orders": _refused(orders_differ=True),
    }


def refusal() -> str:
    return _refused()
