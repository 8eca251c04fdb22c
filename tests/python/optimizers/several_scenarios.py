"""What ranks do in test_several.py: several of the daemon's optimizers over one model, as the program says it."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
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


def _clamped(impl: str, mesh: tuple[int, ...]) -> dict[str, Any]:
    if impl == "shardd":
        from shardd.torch import optim

        more = {"in_place_edits": True}
    else:
        from torch import optim  # type: ignore[no-redef]

        more = {}
    model = model_of(impl, Case(mesh=mesh))
    first, second = _cut(model)
    optimizers = [optim.AdamW(first, lr=1e-2, **more), optim.SGD(second, lr=0.1, momentum=0.9, **more)]
    losses = []
    for step in range(5):
        loss = loss_of(model, step, 0, dist.get_rank())
        loss.backward()
        optimizers[0].step()
        losses.append(loss.item())
        if step % 2:  # which is a step of its own then
            with torch.no_grad():
                losses.append(loss_of(model, step, 0, dist.get_rank()).item())
            model.reshard()  # type: ignore[operator]  # else PyTorch's next forward reads the root as it was here
        optimizers[1].step()
        with torch.no_grad():
            for param in model.parameters():
                param.clamp_(-0.05, 0.05)
        model.zero_grad()
    with torch.no_grad():
        losses.append(loss_of(model, 5, 0, dist.get_rank()).item())
    return {"losses": losses, "states": [full_state(o) for o in optimizers],
            "parameters": parameters_of(model), "counters": counts(impl, model)}  # fmt: skip


def both_clamped(mesh: tuple[int, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Weights are clamped behind the two, as a GAN does it, and a forward comes between the two in every other step."""
    return _clamped("torch", mesh), _clamped("shardd", mesh)


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


def interrupted(impl: str) -> dict[str, Any]:
    """Ctrl-C while a rank waits for the others to step, which do so later; the program goes on with the next batch."""
    if impl == "shardd":
        from shardd.torch import optim
    else:
        from torch import optim  # type: ignore[no-redef]
    rank = dist.get_rank()
    model = model_of(impl)
    first, second = _cut(model)
    optimizers = [optim.AdamW(first, lr=1e-2), optim.SGD(second, lr=0.1, momentum=0.9)]
    losses, raised = [], 0
    for step in range(4):
        loss = loss_of(model, step, 0, rank)
        loss.backward()
        losses.append(loss.item())
        waits = step == 1 and rank == 0 and impl == "shardd"
        if step == 1 and rank == 1:
            time.sleep(2)
        if waits:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            optimizers[0].step()
        except KeyboardInterrupt:
            raised += 1
        if step != 1:
            optimizers[1].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    return {"losses": losses, "raised": raised, "states": [full_state(o) for o in optimizers],
            "parameters": parameters_of(model), "counters": counts(impl, model)}  # fmt: skip


def interrupted_of_both() -> tuple[dict[str, Any], dict[str, Any]]:
    return interrupted("torch"), interrupted("shardd")


def one_dies() -> dict[str, Any]:
    """One of the optimizers is gone on some ranks, while on the others something refers to it still, as a cycle does."""
    from shardd.torch import optim

    model = model_of("shardd")
    first, second = _cut(model)
    body, rest = optim.AdamW(first), optim.SGD(second, lr=0.1)
    kept: list[Any] = []
    for step in range(4):
        loss_of(model, step, 0, dist.get_rank()).backward()
        body.step()
        if step == 0:
            rest.step()
            kept = [rest] if dist.get_rank() else []
            del rest
            gc.collect()
        model.zero_grad()
    loss_of(model, 4, 0, dist.get_rank())
    return {"kept": len(kept), "counters": counts("shardd", model)}


def refusals() -> dict[str, str]:
    return {
        "shares": _refused(shares=True),
        "edits": _refused(edits=True),
        "before": _refused(edits_before=True),
        "orders": _refused(orders_differ=True),
    }


def refusal() -> str:
    return _refused()


def other_order_on_the_last_node(mesh: tuple[int, ...]) -> str:
    """What the first step raises, whose parts are made in another order on one node."""
    from shardd.torch import optim

    model = model_of("shardd", Case(mesh=mesh))
    first, second = _cut(model)
    optimizers = [optim.AdamW(first), optim.SGD(second, lr=0.1)]
    loss_of(model, 0, 0, dist.get_rank()).backward()
    if int(os.environ["GROUP_RANK"]) == int(os.environ["GROUP_WORLD_SIZE"]) - 1:
        optimizers.reverse()
    try:
        for optimizer in optimizers:
            optimizer.step()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
