"""What ranks do in the tests of passes that end without a backward, or with an exception."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from models import Case, loss_of
from optimizers.optim_cases import counts, full, model_of, optimizer_of, parameters_of


def _optimizer(impl: str, kind: str, model: nn.Module) -> Any:
    if kind == "daemon":
        return optimizer_of(impl, "adamw", model.parameters())
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def _train(model: nn.Module, optimizer: Any, step: int) -> float:
    loss = loss_of(model, step, 0, dist.get_rank())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.item())


def edit_before_the_backward(wrap: str) -> str:
    """Between a forward and its backward, whose units have stayed unsharded."""
    import shardd

    model = model_of("shardd", Case(wrap=wrap, reshard=False if wrap == "blocks" else None))
    optimizer = _optimizer("shardd", "daemon", model)
    _train(model, optimizer, 0)
    loss = loss_of(model, 1, 0, dist.get_rank())
    with torch.no_grad():
        model.layers[1].up.weight.clamp_(-0.1, 0.1)
    try:
        loss.backward()
    except shardd.Error as error:
        os.environ["SHARDD_TEST_FAILED"] = "1"
        return str(error)
    return ""


def skipped_backward(impl: str, kind: str, meet: bool) -> dict[str, Any]:
    """A batch is left out after its forward, and a parameter of which rank 0 has all rows is edited."""
    rank = dist.get_rank()
    model = model_of(impl)
    optimizer = _optimizer(impl, kind, model)
    losses = []
    for step in range(4):
        losses.append(_train(model, optimizer, 2 * step))
        left_out = loss_of(model, 2 * step + 1, 0, rank)
        losses.append(left_out.item())
        with torch.no_grad():
            model.layers[1].gate.clamp_(max=0.9 - 0.1 * step)
        if meet:
            dist.barrier()
    losses.append(_train(model, optimizer, 9))
    return {"losses": losses, "parameters": parameters_of(model), "counters": counts(impl, model)}


def both_skip(kind: str, meet: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    return skipped_backward("torch", kind, meet), skipped_backward("shardd", kind, meet)


def state_dict_after_edits() -> dict[str, Any]:
    """Rank 0 alone edits after a forward that gets no backward, and all take a whole state dict."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    model = model_of("shardd")
    optimizer = _optimizer("shardd", "daemon", model)
    _train(model, optimizer, 0)
    loss_of(model, 1, 0, dist.get_rank())
    if dist.get_rank() == 0:
        with torch.no_grad():
            model.layers[1].up.weight.to_local().fill_(0.25)
    want = full(model.layers[1].up.weight)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    seen = []
    model.layers[1].register_forward_pre_hook(lambda module, args: seen.append(module.up.weight.detach().clone()))
    _train(model, optimizer, 2)
    return {
        "whole": torch.equal(state["layers.1.up.weight"], want) and bool((want == 0.25).any()),
        "next": torch.equal(seen[0], want),
        "aborts": counts("shardd", model)["aborts"],
    }


def load_of_one_rank() -> dict[str, Any]:
    """Rank 0 edits and loads after a forward that gets no backward, while the other rank waits for it elsewhere."""
    rank = dist.get_rank()
    model = model_of("shardd")
    optimizer = _optimizer("shardd", "daemon", model)
    _train(model, optimizer, 0)
    name = "layers.0.down.weight"
    state = {n: v.clone() if torch.is_tensor(v) else v for n, v in model.state_dict().items()}
    loss_of(model, 1, 0, rank)
    if rank == 0:
        state[name] = state[name] * 0.5
        with torch.no_grad():
            model.layers[1].up.weight.to_local().fill_(0.25)
        model.load_state_dict({**state, "layers.1.up.weight": model.state_dict()["layers.1.up.weight"]})
    dist.barrier()
    seen = []
    model.layers[0].register_forward_pre_hook(lambda module, args: seen.append(module.down.weight.detach().clone()))
    _train(model, optimizer, 2)
    return {"loaded": torch.equal(seen[0], full(state[name])), "aborts": counts("shardd", model)["aborts"]}


class Broken(Exception):
    pass


def failed(impl: str, kind: str, where: str) -> dict[str, Any]:
    """User code raises on every rank; parameters are edited, and loaded, before the next forward."""
    rank = dist.get_rank()
    model = model_of(impl)
    optimizer = _optimizer(impl, kind, model)
    losses = [_train(model, optimizer, 0)]

    def fail(*_: Any) -> None:
        if where == "backward":  # which all have begun: what is written before another's is an error there
            dist.barrier()
        raise Broken

    try:
        if where == "forward":
            handle = model.layers[1].up.register_forward_hook(fail)
            loss_of(model, 1, 0, rank)
        else:
            handle = model.layers[1].up.register_full_backward_hook(fail)
            loss_of(model, 1, 0, rank).backward()
    except Broken:
        pass
    handle.remove()
    if impl == "torch":
        for module in model.modules():  # torch leaves them unsharded
            if hasattr(module, "reshard"):
                module.reshard()
    if where == "backward":
        optimizer.zero_grad()
        state = {n: v.clone() if torch.is_tensor(v) else v for n, v in model.state_dict().items()}
        model.load_state_dict({n: v * 0.5 if n.endswith("weight") else v for n, v in state.items()})
    else:
        with torch.no_grad():
            model.layers[0].down.weight.mul_(0.5)
    losses += [_train(model, optimizer, step) for step in (2, 3)]
    return {"losses": losses, "parameters": parameters_of(model), "counters": counts(impl, model)}


def both_fail(kind: str, where: str) -> tuple[dict[str, Any], dict[str, Any]]:
    if where == "backward":  # PyTorch cannot go on after it: its groups keep what the backward began
        return failed("shardd", kind, where), failed("shardd", kind, where)
    return failed("torch", kind, where), failed("shardd", kind, where)
