"""What ranks do in the tests of loads into optimizers: what is refused, what is committed, what a killed rank finds."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from models import loss_of, train_steps
from optimizers.optim_cases import counts, full, full_state, model_of, optimizer_of, parameters_of
from rank_main import report


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    return {
        "param_groups": copy.deepcopy(state["param_groups"]),
        "state": {
            i: {n: v.clone() if torch.is_tensor(v) else v for n, v in e.items()} for i, e in state["state"].items()
        },
    }


def asked_for_state(momentum: float) -> dict[str, Any]:
    """``get_optimizer_state_dict``, for which torch makes a step where it finds no state."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model = model_of("shardd")
    optimizer = optimizer_of("shardd", "sgd", model.parameters(), momentum=momentum, nesterov=False)
    commits, entries = [], []
    for steps in (0, 1, 0, 1):
        train_steps(model, optimizer, range(steps))
        entries.append(len(get_optimizer_state_dict(model, optimizer)["state"]))
        commits.append(counts("shardd", model)["commits"])
    return {"commits": commits, "entries": entries, "parameters": len(list(model.parameters()))}


def two_models(impl: str) -> dict[str, Any]:
    """One optimizer over two models; loaded before, between and after their registrations."""

    def start() -> tuple[Any, Any, Any]:
        models = [model_of(impl), model_of(impl)]
        return *models, optimizer_of(impl, "adamw", [p for model in models for p in model.parameters()])

    def train(one: Any, other: Any, optimizer: Any, steps: range) -> list[float]:
        losses = []
        for step in steps:
            for number, model in enumerate((one, other)):
                loss = loss_of(model, 2 * step + number, 0, dist.get_rank())
                loss.backward()
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        return losses

    one, other, optimizer = start()
    train(one, other, optimizer, range(2))
    values = [{n: v.clone() for n, v in m.state_dict().items()} for m in (one, other)]
    state = _copied(optimizer.state_dict())
    missing = _copied(optimizer.state_dict())
    count = len(list(one.parameters()))
    for index in (0, count):
        del missing["state"][index]  # of both models
    out: dict[str, Any] = {"went on": train(one, other, optimizer, range(2, 4))}
    for when, used in (("before", ()), ("between", (0,)), ("after", (0, 1))):
        for what, saved in (("all", state), ("missing", missing)):
            one, other, optimizer = start()
            for number in used:
                loss_of((one, other)[number], 0, 0, dist.get_rank()).backward()
            if len(used) == 2:
                optimizer.step()  # moments that the load replaces, by zeros where it has none
            optimizer.zero_grad()
            optimizer.load_state_dict(_copied(saved))  # torch goes on with the tensors that it is given
            for model, loaded in zip((one, other), values):
                model.load_state_dict(loaded)
            if (when, what, impl) == ("between", "all", "shardd"):
                out["kept"] = sorted(optimizer.state_dict()["state"]) == sorted(state["state"])
            out[f"{when} {what}"] = train(one, other, optimizer, range(2, 4))
    return out


def both_two_models() -> tuple[dict[str, Any], dict[str, Any]]:
    return two_models("torch"), two_models("shardd")


def failing_loads(registered: bool) -> dict[str, Any]:
    """Loads that raise, each in another way; training goes on as if nothing had been."""
    out: dict[str, Any] = {"errors": {}, "changed": []}
    source = model_of("torch")
    theirs = optimizer_of("torch", "adamw", source.parameters())
    train_steps(source, theirs, range(3))
    good = _copied(theirs.state_dict())
    last = max(good["state"])

    def broken(change: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        state = _copied(good)
        state["param_groups"][0]["lr"] = 5.0
        change(state)
        return state

    def set_state(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
        return lambda state: state["state"][last].__setitem__(name, value)

    def set_group(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
        return lambda state: state["param_groups"][0].__setitem__(name, value)

    cases = {
        "shape": broken(set_state("exp_avg_sq", torch.zeros(3, 5, 7))),
        "step": broken(set_state("step", float("nan"))),
        "type": broken(set_state("exp_avg", "moment")),
        "amsgrad": broken(set_group("amsgrad", True)),
        "differentiable": broken(set_group("differentiable", True)),
        "kind": broken(set_group("decoupled_weight_decay", False)),
        "groups": broken(lambda state: state["param_groups"].append(copy.deepcopy(state["param_groups"][0]))),
    }
    model = model_of("shardd")
    optimizer = optimizer_of("shardd", "adamw", model.parameters())
    if registered:
        train_steps(model, optimizer, range(3))
    before = full_state(optimizer)
    for name, state in cases.items():
        try:
            optimizer.load_state_dict(state)
            if not registered and name in ("shape", "step", "type"):
                model.unshard()  # raises where the job is made
        except (ValueError, NotImplementedError) as error:
            out["errors"][name] = f"{type(error).__name__}: {error}"
        if registered:
            after = full_state(optimizer)
            same = all(
                torch.equal(torch.as_tensor(after[i][n]), torch.as_tensor(v))
                for i in before
                for n, v in before[i].items()
            )
            if not same or optimizer.param_groups[0]["lr"] != 1e-2 or list(after) != list(before):
                out["changed"].append(name)
    if registered:
        out["went on"] = train_steps(model, optimizer, range(3, 6))
        out["reference"] = train_steps(source, theirs, range(3, 6))
        out["counters"] = counts("shardd", model)
    return out


def _noting_step(seen: list[int]) -> Callable[[Any], None]:
    return lambda optimizer: seen.append(int(optimizer.state_dict()["state"][0]["step"]))


def hooked_load() -> dict[str, Any]:
    """A pre-hook returns another state dict, before registration and after it."""
    source = model_of("torch")
    theirs = optimizer_of("torch", "adamw", source.parameters())
    train_steps(source, theirs, range(3))
    saved = _copied(theirs.state_dict())
    doubled = {**saved, "state": {i: {**e, "exp_avg": e["exp_avg"] * 2} for i, e in saved["state"].items()}}
    out: dict[str, Any] = {}
    for when in ("before", "after"):
        model = model_of("shardd")
        optimizer = optimizer_of("shardd", "adamw", model.parameters())
        if when == "after":
            train_steps(model, optimizer, range(1))
        seen = out[f"{when} seen by a hook"] = []
        optimizer.register_load_state_dict_pre_hook(lambda _, state: doubled)
        optimizer.register_load_state_dict_post_hook(_noting_step(seen))
        optimizer.load_state_dict(saved)
        if when == "before":  # a checkpoint that is saved now has what was loaded
            kept = optimizer.state_dict()["state"]
            out["kept"] = all(
                torch.equal(full(kept[i]["exp_avg"]), full(e["exp_avg"])) for i, e in doubled["state"].items()
            )
            model.unshard()
            model.reshard()
        state = full_state(optimizer)
        out[when] = all(torch.equal(state[i]["exp_avg"], full(e["exp_avg"])) for i, e in doubled["state"].items())
        out[f"{when} steps"] = {e["step"] for e in state.values()}
    return out


def refused_flags() -> dict[str, str]:
    from shardd.torch import fully_shard, optim

    model = model_of("shardd")
    params = list(model.parameters())
    errors: dict[str, str] = {}

    def attempt(name: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except NotImplementedError as error:
            errors[name] = str(error)

    attempt("constructor", lambda: optim.Adam(params, differentiable=True))
    attempt("constructor's group", lambda: optim.AdamW([{"params": params, "differentiable": True}]))
    attempt("kind", lambda: optim.Adam([{"params": params, "decoupled_weight_decay": True}]))
    beside = torch.nn.Linear(3, 2)
    attempt("not sharded", lambda: optim.Adam([*params, beside.weight]))
    wide = fully_shard(torch.nn.Linear(3, 2).double())
    attempt("float64", lambda: optim.Adam(wide.parameters()))
    optimizer = optim.SGD(params[:-1], lr=0.1)
    attempt("not sharded, added", lambda: optimizer.add_param_group({"params": beside.parameters()}))
    attempt("added group", lambda: optimizer.add_param_group({"params": params[-1:], "differentiable": True}))
    errors["groups"] = str(len(optimizer.param_groups))
    loss_of(model, 0, 0, dist.get_rank()).backward()
    optimizer.param_groups[0]["differentiable"] = True
    attempt("changed group", optimizer.step)
    errors["commits"] = str(counts("shardd", model)["commits"])
    return errors


def first_momentum(impl: str, source: dict[str, Any] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """SGD with dampening, saved before its first step and loaded: the first update is the gradient, not part of it."""
    out: dict[str, Any] = {}
    model = model_of(impl)
    optimizer = optimizer_of(impl, "sgd", model.parameters(), dampening=0.5, nesterov=False)
    weight = model.layers[0].up.weight
    loss_of(model, 0, 0, dist.get_rank()).backward()
    saved = _copied(optimizer.state_dict())
    out["entries"] = len(saved["state"])
    if source is not None:
        optimizer.load_state_dict(source)
    for step in range(3):
        if step:
            loss_of(model, step, 0, dist.get_rank()).backward()
        if step == 1:
            weight.grad = None
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            out["first"] = {i: e["momentum_buffer"] for i, e in full_state(optimizer).items()}
    out["parameters"] = parameters_of(model)
    return out, saved


def first_momentum_both_ways() -> dict[str, dict[str, Any]]:
    theirs, of_theirs = first_momentum("torch", None)
    ours, of_ours = first_momentum("shardd", None)
    return {
        "torch": theirs,
        "shardd": ours,
        "torch's in shardd": first_momentum("shardd", of_theirs)[0],
        "shardd's in torch": first_momentum("torch", of_ours)[0],
    }


def written_by_the_system(kind: str) -> dict[str, Any]:
    """Weights that a collective broadcasts in place and a file is read into."""
    from shardd.torch import hand_in_edits

    rank = dist.get_rank()
    model = model_of("shardd")
    if kind == "daemon":
        optimizer = optimizer_of("shardd", "adamw", model.parameters())
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train_steps(model, optimizer, range(1))
    weight, other = model.layers[0].up.weight, model.layers[1].down.weight
    even = model.layers[0].norm.weight.detach().to_local()  # the same number of rows on both ranks
    want = even.clone()
    dist.broadcast(want, 0)
    path = f"/proc/self/fd/{os.memfd_create('rows')}"
    rows = torch.full_like(other.detach().to_local(), 0.25)
    with open(path, "wb") as file:
        file.write(rows.numpy().tobytes())
    local = other.detach().to_local()
    hand_in_edits(model)
    dist.broadcast(even, 0)
    with open(path, "rb", buffering=0) as file:
        read = file.readinto(local.numpy())
    seen = {}

    def look(name: str) -> Any:
        return lambda module, args: seen.__setitem__(name, (module.norm.weight.clone(), module.down.weight.clone()))

    model.layers[0].register_forward_pre_hook(look("first"))
    model.layers[1].register_forward_pre_hook(look("second"))
    loss_of(model, 1, 0, rank).backward()
    return {"sent": want, "seen": seen["first"][0], "read": read == local.nbytes, "rows": bool((seen["second"][1] == 0.25).all()),
            "untouched": weight.shape[0], "counters": counts("shardd", model)}  # fmt: skip


# Killed ranks.


def _hold(moment: str) -> None:
    """Rank 1 waits here for the test to kill it, if this is the moment."""
    if os.environ.get("HOLD") == moment and dist.get_rank() == 1:
        report(event="holding", moment=moment)
        time.sleep(600)


def _locals(model: nn.Module, optimizer: Any) -> Any:
    """This rank's rows of everything, to be stored in a file."""

    def rows(value: Any) -> Any:
        return value.to_local().clone() if isinstance(value, DTensor) else copy.deepcopy(value)

    state = optimizer.state_dict()
    return (
        {n: rows(v.detach()) for n, v in model.state_dict().items()},
        {
            "param_groups": copy.deepcopy(state["param_groups"]),
            "state": {i: {n: rows(v) for n, v in e.items()} for i, e in state["state"].items()},
        },
    )


def _from_locals(model: nn.Module, stored: Any) -> Any:
    params = list(model.parameters())
    named = dict(model.named_parameters())

    def whole(param: Any, value: Any) -> Any:
        if not torch.is_tensor(value) or value.shape != param.to_local().shape:
            return value
        return DTensor.from_local(
            value, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
        )

    values, state = stored
    values = {n: whole(named[n], v) if n in named else v for n, v in values.items()}
    entries = {
        i: {n: v if n == "step" else whole(params[i], v) for n, v in e.items()} for i, e in state["state"].items()
    }
    return values, {"param_groups": state["param_groups"], "state": entries}


def edit_and_load(kind: str, folder: str, steps: int) -> dict[str, Any]:
    """Saves before step 2, edits before step 3, loads before step 5, and goes on where the job is."""
    from shardd.torch import commit, resume, ride

    rank = dist.get_rank()
    model = model_of("shardd")
    if kind == "daemon":
        optimizer = optimizer_of("shardd", "adamw", model.parameters())
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    start, state = resume(model)
    state = state or {"losses": [], "loaded": False}
    report(event="start", step=start, known=len(state["losses"]), loaded=state["loaded"])
    path = f"{folder}/{rank}.pt"
    for step in range(start, steps):
        if step == 2:
            torch.save(_locals(model, optimizer), path)
        if step == 3:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.9)
            _hold("edited 3")
        if step == 5 and not state["loaded"]:
            if kind != "daemon":
                commit(model)  # the step before; what follows is not part of any
            state = {**state, "loaded": True}
            ride(state)
            values, moments = _from_locals(model, torch.load(path, weights_only=False))
            model.load_state_dict(values)
            _hold("load 5")
            optimizer.load_state_dict(moments)
            _hold("loaded 5")
        loss = loss_of(model, step, 0, rank)
        _hold(f"forward {step}")
        loss.backward()
        state = {**state, "losses": [*state["losses"], loss.item()]}
        ride(state)
        optimizer.step()
        optimizer.zero_grad()
    if kind != "daemon":
        commit(model)
    return {"losses": state["losses"], "state": full_state(optimizer), "parameters": parameters_of(model),
            "counters": counts("shardd", model)}  # fmt: skip
