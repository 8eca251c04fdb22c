"""What ranks do in the tests of optimizers: the same program on torch's fully_shard and on shardd's."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from models import Case, Model, build, loss_of, shard, train_steps

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "adam": ("Adam", {"lr": 1e-2, "weight_decay": 0.1}),
    "adamw": ("AdamW", {"lr": 1e-2, "betas": (0.8, 0.95)}),
    "sgd": ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-3}),
}


def model_of(impl: str, case: Case | None = None) -> Model:
    if impl == "shardd":
        from shardd.torch import fully_shard
    else:
        from torch.distributed.fsdp import fully_shard
    model = build(case or Case())
    shard(model, case or Case(), fully_shard)
    return model


def optimizer_of(impl: str, kind: str, params: Any, **more: Any) -> Any:
    if kind.startswith("stock-"):  # torch's, on either
        name, arguments = KINDS[kind.removeprefix("stock-")]
        return getattr(torch.optim, name)(params, **{**arguments, **more})
    name, arguments = KINDS[kind]
    if impl == "shardd":
        from shardd.torch import optim
    else:
        from torch import optim  # type: ignore[no-redef]
    return getattr(optim, name)(params, **{**arguments, **more})


def dropped() -> dict[str, Any]:
    """The program builds another optimizer before the first step; the collector does not come in between."""
    gc.disable()
    model = model_of("shardd")
    optimizer = optimizer_of("shardd", "adamw", model.parameters())
    optimizer = optimizer_of("shardd", "sgd", model.parameters())
    loss_of(model, 0, 0, dist.get_rank()).backward()
    optimizer.step()
    gc.enable()
    return counts("shardd", model)


def full(value: Any) -> Any:
    return value.full_tensor().detach().clone() if hasattr(value, "full_tensor") else value


def full_state(optimizer: Any) -> dict[int, dict[str, Any]]:
    """The optimizer's state, whole, by parameter."""
    state = optimizer.state_dict()["state"]
    return {
        i: {n: float(full(v)) if n == "step" else full(v) for n, v in entry.items() if v is not None}
        for i, entry in state.items()
    }


def parameters_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: full(p) for name, p in model.named_parameters()}


def counts(impl: str, model: nn.Module) -> dict[str, int]:
    if impl != "shardd":
        return {}
    from shardd.torch import counters

    dist.barrier()
    return counters(model)


def train_all(
    model: nn.Module,
    optimizers: list[Any],
    steps: int,
    loss_at: Callable[[int], torch.Tensor],
    begin: Callable[[int], None] = lambda step: None,
    behind: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """What is seen of the training with all of ``optimizers``; in the midst their state goes through a state dict.

    ``begin`` is called where a step begins, and ``behind`` behind those of the optimizers."""
    losses = []
    for step in range(steps):
        begin(step)
        loss = loss_at(step)
        loss.backward()
        losses.append(loss.item())
        for optimizer in optimizers:
            optimizer.step()
        behind()
        if step == steps // 2:
            for optimizer in optimizers:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for optimizer in optimizers:
            optimizer.zero_grad()
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizers[0].state_dict()["param_groups"]]
    return {"losses": losses, "states": [full_state(o) for o in optimizers], "parameters": parameters_of(model),
            "groups": groups}  # fmt: skip


def _commit(impl: str, model: nn.Module) -> None:
    """The last step of torch's optimizer; nothing with the daemon's."""
    if impl == "shardd":
        from shardd.torch import commit

        commit(model)


def train(impl: str, kind: str) -> dict[str, Any]:
    """A scheduler, a group that comes before the first step, clipping by torch's function."""
    rank = dist.get_rank()
    model = model_of(impl)
    late = list(model.layers[2].parameters())
    early = [p for p in model.parameters() if not any(p is q for q in late)]
    optimizer = optimizer_of(impl, kind, early)
    optimizer.add_param_group({"params": late, "lr": 3e-2})
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)
    losses, norms = [], []
    for step in range(6):
        loss = loss_of(model, step, 0, rank)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        norms.append(full(norm).item())
    _commit(impl, model)
    return {"losses": losses, "norms": norms, "state": full_state(optimizer), "parameters": parameters_of(model),
            "counters": counts(impl, model)}  # fmt: skip


def group_after_first_forward(impl: str) -> dict[str, Any]:
    """A param group that comes between the first backward and the first step."""
    rank = dist.get_rank()
    model = model_of(impl)
    late = list(model.layers[2].parameters())
    optimizer = optimizer_of(impl, "adamw", [p for p in model.parameters() if not any(p is q for q in late)])
    losses = []
    for step in range(4):
        loss = loss_of(model, step, 0, rank)
        loss.backward()
        if step == 0:
            optimizer.add_param_group({"params": late, "lr": 3e-2})
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "counters": counts(impl, model)}


def train_scaled(
    model: nn.Module, optimizer: Any, steps: int, overflows: set[tuple[int, int]]
) -> tuple[list[float], list[float]]:
    """With a GradScaler, by whom gradients are unscaled, or by the program, which clips them; losses, and scales behind each step.

    ``overflows``: steps, and the rank whose gradients are infinite in it."""
    rank = dist.get_rank()
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    losses, scales = [], []
    for step in range(steps):
        loss = loss_of(model, step, 0, rank)
        scaler.scale(loss * (float("inf") if (step, rank) in overflows else 1.0)).backward()
        if step % 2:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
        scales.append(scaler.get_scale())
    return losses, scales


def scaled(impl: str, kind: str) -> dict[str, Any]:
    """GradScaler, with unscale_ and clipping, a step that overflows on one rank, growth and back-off."""
    model = model_of(impl)
    optimizer = optimizer_of(impl, kind, model.parameters())
    losses, scales = train_scaled(model, optimizer, 7, {(3, 0)})
    _commit(impl, model)
    return {"losses": losses, "scales": scales, "state": full_state(optimizer), "counters": counts(impl, model)}


def scaled_in_the_daemon() -> dict[str, Any]:
    rank = dist.get_rank()
    model = model_of("shardd")
    optimizer = optimizer_of("shardd", "adamw", model.parameters())
    scale, skipped, losses = 256.0, [], []
    for step in range(6):
        loss = loss_of(model, step, 0, rank)
        (loss * scale * (float("inf") if step == 3 and rank == 1 else 1.0)).backward()
        optimizer.step(loss_scale=scale, max_grad_norm=0.5)
        skipped.append(optimizer.last_step_skipped)
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "skipped": skipped, "steps": {s["step"] for s in full_state(optimizer).values()},
            "counters": counts("shardd", model)}  # fmt: skip


def unscaled_reference() -> list[float]:
    """The same without scaling, whose fourth step is left out."""
    rank = dist.get_rank()
    model = model_of("torch")
    optimizer = optimizer_of("torch", "adamw", model.parameters())
    losses = []
    for step in range(6):
        loss = loss_of(model, step, 0, rank)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        if step != 3:
            optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def scaled_and_reference() -> tuple[dict[str, Any], list[float]]:
    return scaled_in_the_daemon(), unscaled_reference()


def both(function: str, *arguments: Any) -> tuple[Any, Any]:
    call = globals()[function]
    return call("torch", *arguments), call("shardd", *arguments)


def state_is_there_and_follows() -> dict[str, Any]:
    from torch.distributed.tensor import DTensor, Shard

    rank = dist.get_rank()
    model = model_of("shardd")
    optimizer = optimizer_of("shardd", "adamw", model.parameters())
    facts: dict[str, Any] = {"before": len(optimizer.state)}
    loss_of(model, 0, 0, rank).backward()
    weight = model.layers[0].up.weight
    first = optimizer.state[weight]["exp_avg"]
    facts["zero"] = float(first.full_tensor().abs().sum())
    facts["type"] = isinstance(first, DTensor) and first.placements == (Shard(0),) and first.shape == weight.shape
    facts["rows"] = first.to_local().shape == weight.to_local().shape
    gradient = weight.grad.full_tensor().clone()
    optimizer.step()
    facts["same_object"] = optimizer.state[weight]["exp_avg"] is first
    facts["moved"] = torch.allclose(first.full_tensor(), 0.2 * gradient, rtol=1e-5)
    facts["step"] = float(optimizer.state[weight]["step"])
    facts["all"] = len(optimizer.state) == len(list(model.parameters()))
    from shardd.torch import finish

    dist.barrier()
    finish(model)
    facts["after_the_end"] = torch.allclose(first.full_tensor(), 0.2 * gradient, rtol=1e-5)
    facts["grad_after_the_end"] = torch.equal(weight.grad.full_tensor(), gradient)
    return facts


def save_and_load(kind: str) -> dict[str, Any]:
    """Goes on from a state dict: of shardd's own and of torch's, loaded before and after registration."""
    out: dict[str, Any] = {}
    saved: dict[str, Any] = {}
    for impl in ("torch", "shardd"):
        model = model_of(impl)
        optimizer = optimizer_of(impl, kind, model.parameters())
        train_steps(model, optimizer, range(3))
        state = optimizer.state_dict()
        saved[impl] = (
            {n: v.clone() if torch.is_tensor(v) else v for n, v in model.state_dict().items()},
            {"param_groups": state["param_groups"],
             "state": {i: {n: v.clone() if torch.is_tensor(v) else v for n, v in e.items()}
                       for i, e in state["state"].items()}},
        )  # fmt: skip
        out[f"{impl} went on"] = train_steps(model, optimizer, range(3, 6))
    for source in ("torch", "shardd"):
        for when in ("before", "after"):
            model = model_of("shardd")
            optimizer = optimizer_of("shardd", kind, model.parameters())
            if when == "after":
                train_steps(model, optimizer, range(7, 9))
            model.load_state_dict(saved[source][0])
            optimizer.load_state_dict(saved[source][1])
            out[f"{source} loaded {when}"] = train_steps(model, optimizer, range(3, 6))
            out[f"{source} {when} steps"] = {s.get("step") for s in full_state(optimizer).values()}
            out[f"{source} {when} counters"] = counts("shardd", model)
    model = model_of("torch")  # and back
    optimizer = optimizer_of("torch", kind, model.parameters())
    model.load_state_dict(saved["shardd"][0])
    optimizer.load_state_dict(saved["shardd"][1])
    out["shardd loaded into torch"] = train_steps(model, optimizer, range(3, 6))
    return out


def distributed_state_dict() -> dict[str, Any]:
    """torch.distributed.checkpoint.state_dict, on an optimizer that has made no step."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

    model = model_of("shardd")
    optimizer = optimizer_of("shardd", "adamw", model.parameters())
    train_steps(model, optimizer, range(3))
    options = StateDictOptions(full_state_dict=True)
    # A copy: `step` is a reference, as torch's is, and counts on.
    model_state, optimizer_state = copy.deepcopy(get_state_dict(model, optimizer, options=options))
    went_on = train_steps(model, optimizer, range(3, 6))
    fresh = model_of("shardd")
    fresh_optimizer = optimizer_of("shardd", "adamw", fresh.parameters())
    set_state_dict(
        fresh,
        fresh_optimizer,
        model_state_dict=model_state,
        optim_state_dict=optimizer_state,
        options=options,
    )
    return {"went on": went_on, "loaded": train_steps(fresh, fresh_optimizer, range(3, 6)),
            "keys": sorted(optimizer_state["state"]), "counters": counts("shardd", fresh)}  # fmt: skip
