"""Programs with several optimizers of one model, for test_unseen.py: the daemon makes the steps of all of them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import lr_scheduler

from models import Case, build, loss_of
from optimizers.optim_cases import full_state, parameters_of
from optimizers.unseen_programs import KINDS, Program, backward, end, look, model_of, program

__all__ = ["Program", "end_of_two", "every_third_time", "two"]


def two(model: nn.Module, first: str = "AdamW", second: str = "SGD", **more: Any) -> tuple[Any, Any]:
    """Over what is a matrix, and over the rest, of which most ranks have nothing of some."""
    body = KINDS[first]([p for p in model.parameters() if p.ndim > 1], **more)
    return body, KINDS[second]([p for p in model.parameters() if p.ndim <= 1])


def end_of_two(model: nn.Module, body: Any, rest: Any, **facts: Any) -> dict[str, Any]:
    return end(model, body, rest=full_state(rest), **facts)


@program("several")
def two_optimizers() -> dict[str, Any]:
    """What is seen behind each of the steps, and before the other one."""
    model = model_of()
    body, rest = two(model)
    seen: list[Any] = [look(body), look(rest)]
    losses = []
    for step in range(4):
        losses.append(backward(model, step))
        for optimizer in (body, rest) if step % 2 else (rest, body):
            optimizer.step()
            seen.append([parameters_of(model), look(body), look(rest)])
            optimizer.zero_grad()
            seen.append([p.grad is None for p in model.parameters()])
    return end_of_two(model, body, rest, losses=losses, seen=seen)


@program("several")
def three_of_other_kinds() -> dict[str, Any]:
    model = model_of()
    params = list(model.parameters())
    optimizers = [
        torch.optim.AdamW([{"params": params[:3]}, {"params": params[3:6], "lr": 1e-3}], lr=1e-2),
        torch.optim.AdamW(params[6:9], lr=1e-1, betas=(0.5, 0.6), amsgrad=True),
        torch.optim.RMSprop(params[9:], lr=1e-3, centered=True, momentum=0.9, eps=1e-2),
    ]
    losses = []
    for step in range(4):
        losses.append(backward(model, step))
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    return end(model, optimizers[0], losses=losses, others=[full_state(o) for o in optimizers[1:]])


class Container(torch.optim.Optimizer):
    """Has the parameters and a list, or a dict, of the optimizers that step them, as torchtitan's does; with ``decay`` it stores beside
    them."""

    def __init__(self, optimizers: list[Any] | dict[str, Any], decay: float = 0.0) -> None:
        self.optimizers, self.decay = optimizers, decay
        super().__init__([p for o in self.each() for group in o.param_groups for p in group["params"]], {})

    def each(self) -> list[Any]:
        return list(self.optimizers.values() if isinstance(self.optimizers, dict) else self.optimizers)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for optimizer in self.each():
            optimizer.step()
        if self.decay:
            for param in self.param_groups[0]["params"]:
                param.mul_(1 - self.decay)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.each():
            optimizer.zero_grad(set_to_none)


def _contained(decay: float, named: bool = False) -> dict[str, Any]:
    model = model_of()
    body, rest = two(model)
    container, calls = Container({"body": body, "rest": rest} if named else [body, rest], decay), [0]
    container.register_step_pre_hook(lambda *_: calls.append(calls[-1] + 1))
    losses = []
    for step in range(4):
        losses.append(backward(model, step))
        container.step()
        container.zero_grad()
    return end_of_two(model, body, rest, losses=losses, calls=calls, own=len(container.state))


@program("several")
def a_container_of_optimizers() -> dict[str, Any]:
    return _contained(decay=0.0)


@program("several")
def a_container_of_named_optimizers() -> dict[str, Any]:
    return _contained(decay=0.0, named=True)


@program("edits")
def a_container_that_stores_itself() -> dict[str, Any]:
    """Behind the steps, which is an edit in place: beside several optimizers that is served on one node."""
    return _contained(decay=0.01)


def every_third_time(behind: Callable[[nn.Module], None]) -> tuple[nn.Module, Any, Any, list[float]]:
    """The second optimizer steps so, and its gradients add up meanwhile. ``behind``: what each step ends with."""
    model = model_of()
    body, rest = two(model, "SGD", "AdamW")
    losses = []
    for step in range(7):
        losses.append(backward(model, step))
        body.step()
        body.zero_grad()
        if step % 3 == 2:
            rest.step()
            rest.zero_grad()
        behind(model)
    return model, body, rest, losses


@program("several")
def one_steps_every_third_time() -> dict[str, Any]:
    """The other's parameters do not move where it has not stepped."""
    seen: list[Any] = []
    model, body, rest, losses = every_third_time(lambda model: seen.append(parameters_of(model)))
    return end_of_two(model, body, rest, losses=losses, seen=seen)


@program("several")
def gradients_are_kept_from_step_to_step() -> dict[str, Any]:
    """Nobody sets them to None, or one does it alone, or by zeros."""
    model = model_of()
    body, rest = two(model)
    losses, seen = [], []
    for step in range(6):
        losses.append(backward(model, step))
        body.step()
        if step == 2:
            rest.zero_grad(set_to_none=False)
        rest.step()
        if step == 3:
            body.zero_grad()
        seen.append(parameters_of(model))
    return end_of_two(model, body, rest, losses=losses, seen=seen)


@program("several")
def one_steps_twice_and_a_forward_between() -> dict[str, Any]:
    model = model_of()
    body, rest = two(model)
    losses = []
    for step in range(4):
        losses.append(backward(model, step))
        body.step()
        if step == 1:
            body.step()
        if step > 1:
            with torch.no_grad():
                losses.append(loss_of(model, step, 0, dist.get_rank()).item())
            model.reshard()  # type: ignore[operator]  # else PyTorch's next forward reads the root as it was here
        rest.step()
        if step == 3:
            body.step()
        body.zero_grad()
        rest.zero_grad()
    return end_of_two(model, body, rest, losses=losses)


@program("several")
def schedulers_and_state_dicts() -> dict[str, Any]:
    model = model_of()
    body, rest = two(model)
    schedulers = [lr_scheduler.StepLR(body, 1, 0.5), lr_scheduler.CosineAnnealingLR(rest, 5)]
    losses = []
    for step in range(5):
        losses.append(backward(model, step))
        body.step()
        if step == 2:  # between the two
            body.load_state_dict(copy.deepcopy(body.state_dict()))
            saved = copy.deepcopy(rest.state_dict())
        rest.step()
        for scheduler in schedulers:
            scheduler.step()
        body.zero_grad()
        rest.zero_grad()
    rest.load_state_dict(saved)
    losses.append(backward(model, 5))
    rest.step()
    body.step()
    lrs = [group["lr"] for optimizer in (body, rest) for group in optimizer.param_groups]
    return end_of_two(model, body, rest, losses=losses, lrs=lrs)


def _scaled(**more: Any) -> dict[str, Any]:
    """In a step that an infinite gradient of one's parameters skips, the other's moves them."""
    rank = dist.get_rank()
    model = model_of()
    body, rest = two(model, **more)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    losses, scales, seen = [], [], []
    for step in range(6):
        loss = loss_of(model, step, 0, rank)
        scaler.scale(loss).backward()
        spoiled = (body, rest)[step % 2] if step in (2, 3) else None
        for param in [p for group in spoiled.param_groups for p in group["params"]] if spoiled else []:
            if param.grad is not None and rank == 0:
                local = getattr(param.grad, "_local_tensor", param.grad)
                local.fill_(float("inf"))
        for optimizer in (body, rest):
            if step == 4:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 0.5)
            scaler.step(optimizer)
            seen.append(parameters_of(model))
        scaler.update()
        body.zero_grad()
        rest.zero_grad()
        losses.append(loss.item())
        scales.append(scaler.get_scale())
    return end_of_two(model, body, rest, losses=losses, scales=scales, seen=seen)


@program("several")
def grad_scaler() -> dict[str, Any]:
    return _scaled()


@program("several")
def grad_scaler_of_a_fused_optimizer() -> dict[str, Any]:
    return _scaled(fused=True)


@program("several")
def low_precision_passes() -> dict[str, Any]:
    """Passes read a cast copy, which is made when the step is committed."""
    model = model_of(Case(param_dtype="bf16", reduce_dtype="fp32"))
    body, rest = two(model)
    losses = []
    for step in range(5):
        losses.append(backward(model, step))
        (rest if step == 3 else body).step()
        if step != 3:
            rest.step()
        body.zero_grad()
        rest.zero_grad()
    return {"losses": losses, "model": model}


@program("several")
def a_second_optimizer_comes_later() -> dict[str, Any]:
    model = model_of()
    first = KINDS["AdamW"]([p for p in model.parameters() if p.ndim > 1])
    losses = []
    second: Any = None
    for step in range(5):
        if step == 2:
            second = KINDS["SGD"]([p for p in model.parameters() if p.ndim <= 1])
        losses.append(backward(model, step))
        for optimizer in filter(None, (first, second)):
            optimizer.step()
            optimizer.zero_grad()
        if second is None:
            model.zero_grad()
    return end_of_two(model, first, second, losses=losses)


@program("several")
def a_param_group_is_added() -> dict[str, Any]:
    model = model_of()
    params = list(model.parameters())
    body, rest = KINDS["AdamW"](params[:4]), KINDS["SGD"](params[6:])
    losses = []
    for step in range(6):
        if step == 3:
            body.add_param_group({"params": params[4:6], "lr": 1e-1})
        losses.append(backward(model, step))
        rest.step()
        body.step()
        model.zero_grad()
    return end_of_two(model, body, rest, losses=losses)


@program("several falls back", daemon=False)
def a_flag_that_is_set_later() -> dict[str, Any]:
    """Between the steps of the two."""
    model = model_of()
    body, rest = two(model)
    losses = []
    for step in range(5):
        losses.append(backward(model, step))
        body.step()
        if step == 2:
            rest.param_groups[0]["differentiable"] = True
        rest.step()
        body.zero_grad()
        rest.zero_grad()
    return end_of_two(model, body, rest, losses=losses)


@program("several falls back", daemon=False)
def a_hook_steps_in_backward() -> dict[str, Any]:
    model = model_of()
    optimizers = {p: KINDS["AdamW"]([p], foreach=False) for p in model.parameters()}

    def step_and_drop(param: Any) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step_and_drop)
    losses = [backward(model, step) for step in range(4)]
    return {"losses": losses, "parameters": parameters_of(model), "model": model}


@program("several")
def pieces_of_the_wrapper() -> dict[str, Any]:
    """In layout flat, which cuts parameters anywhere."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    inner = build(Case())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = FullyShardedDataParallel(
            inner,
            auto_wrap_policy=ModuleWrapPolicy({type(inner.layers[0])}),
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )
        named = dict(model.named_parameters())
        body = KINDS["AdamW"]([p for n, p in named.items() if n.endswith("weight")])
        rest = KINDS["SGD"]([p for n, p in named.items() if not n.endswith("weight")])
        losses = []
        for step in range(5):
            losses.append(backward(model, step))
            for optimizer in (body, rest) if step != 3 else (rest,):
                optimizer.step()
                optimizer.zero_grad()
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            parameters = {n: p.detach().clone() for n, p in model.named_parameters()}
    return {"losses": losses, "parameters": parameters, "model": model}
