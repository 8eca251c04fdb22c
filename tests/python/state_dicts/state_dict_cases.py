"""What ranks do in the tests of state dicts of ``fully_shard``: saved and loaded through torch's own tools."""

from __future__ import annotations

import io
import itertools
import os
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed._state_dict_utils import _gather_state_dict
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

from models import Case, build, loss_of, shard
from optimizers.optim_cases import counts, optimizer_of


def sharded(impl: str, case: Case | None = None, checkpointed: bool = False) -> Any:
    """``checkpointed``: two blocks are wrapped for activation checkpointing, which renames their parameters."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    if impl == "shardd":
        from shardd.torch import fully_shard
    else:
        from torch.distributed.fsdp import fully_shard
    case = case or Case()
    model = build(case)
    if checkpointed:
        for index in (0, 2):
            model.layers[index] = checkpoint_wrapper(model.layers[index])
    shard(model, case, fully_shard)
    return model


def train(model: nn.Module, optimizer: Any, steps: range) -> list[float]:
    """The same batch on all ranks, so that numbers do not depend on how many there are."""
    losses = []
    for step in steps:
        loss = loss_of(model, step, 0, 0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def save_checkpoint(model: Any, optimizer: Any, folder: str) -> None:
    """By torch.distributed.checkpoint; collective, as is the other one."""
    values, state = get_state_dict(model, optimizer)
    dcp.save({"model": values, "optimizer": state}, checkpoint_id=folder)


def load_checkpoint(model: Any, optimizer: Any, folder: str) -> None:
    values, state = get_state_dict(model, optimizer)
    dcp.load({"model": values, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=values, optim_state_dict=state)


def whole(value: Any) -> Any:
    """A copy, each tensor gathered."""
    if isinstance(value, ShardedTensor):
        gathered = _gather_state_dict({"value": value}, pg=value._process_group, device=torch.device("cpu"))
        return gathered["value"].clone()
    if isinstance(value, DTensor):
        return value.full_tensor().detach().clone()
    if torch.is_tensor(value):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    return [whole(item) for item in value] if isinstance(value, list) else value


def kinds_of(value: Any) -> Any:
    """The structure of a state dict: types and shapes."""
    if isinstance(value, dict):
        return {key: kinds_of(item) for key, item in value.items()}
    if isinstance(value, list):
        return [kinds_of(item) for item in value]
    return (type(value).__name__, tuple(value.shape)) if torch.is_tensor(value) else type(value).__name__


def save_for_others(folder: str, kind: str, mesh: tuple[int, ...]) -> dict[str, Any]:
    """Three steps, a checkpoint of both implementations, and how each goes on."""
    out: dict[str, Any] = {}
    for impl in ("torch", "shardd"):
        model = sharded(impl, Case(mesh=mesh), checkpointed=impl == "shardd")
        optimizer = optimizer_of(impl, kind, model.parameters())
        train(model, optimizer, range(3))
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
        dcp.save(state, checkpoint_id=f"{folder}/{impl}")
        out[impl] = {"state": whole(state), "went on": train(model, optimizer, range(3, 5))}
        if impl == "shardd":
            out["counters"] = counts(impl, model)
    return out


def load_of_others(folder: str, kind: str) -> dict[str, Any]:
    """Each checkpoint into each implementation, in this world; before the first pass and after a step."""
    out: dict[str, Any] = {}
    for source, impl, used in (("shardd", "shardd", False), ("torch", "shardd", True), ("shardd", "torch", False)):
        model = sharded(impl)
        optimizer = optimizer_of(impl, kind, model.parameters())
        if used:
            train(model, optimizer, range(7, 8))
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
        dcp.load(state, checkpoint_id=f"{folder}/{source}")
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        again = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
        out[f"{source} in {impl}"] = {"state": whole(again), "went on": train(model, optimizer, range(3, 5))}
        if impl == "shardd":
            out[f"{source} counters"] = counts(impl, model)
    return out


def _prepared(impl: str, kind: str) -> tuple[Any, Any]:
    model = sharded(impl, Case(freeze=("layers.1.norm",)), checkpointed=True)
    optimizer = optimizer_of(impl, kind, [p for p in model.parameters() if p.requires_grad])
    train(model, optimizer, range(2))
    return model, optimizer


def all_options(kind: str) -> dict[str, Any]:
    """Every combination of options, on both implementations; what was got is set in a fresh model of another wrapping."""
    sources = {impl: _prepared(impl, kind) for impl in ("torch", "shardd")}
    names = ("full_state_dict", "cpu_offload", "flatten_optimizer_state_dict", "ignore_frozen_params")
    out: dict[str, Any] = {"got": {}, "set": {}}
    for values in itertools.product((False, True), repeat=len(names)):
        given = dict(zip(names, values))
        options = StateDictOptions(**given)
        label = ",".join(name for name in names if given[name])
        got = {}
        for impl, (model, optimizer) in sources.items():
            # A compiled model has a prefix of its own.
            run = torch.compile(model, backend="eager") if values[0] else model
            got[impl] = get_state_dict(run, optimizer, options=options)
        out["got"][label] = {impl: [(kinds_of(part), whole(part)) for part in both] for impl, both in got.items()}
        if given["ignore_frozen_params"] or (given["full_state_dict"] and given["flatten_optimizer_state_dict"]):
            continue  # torch cannot set what it gets with these two
        for broadcast in (False, True) if given["full_state_dict"] else (False,):
            if given["full_state_dict"] and given["cpu_offload"] and not broadcast:
                continue  # only rank 0 has something to set
            model = sharded("shardd", Case(freeze=("layers.1.norm",)))
            optimizer = optimizer_of("shardd", kind, [p for p in model.parameters() if p.requires_grad])
            if given["flatten_optimizer_state_dict"]:
                train(model, optimizer, range(5, 6))
            empty = broadcast and dist.get_rank() != 0
            set_options = StateDictOptions(**given, broadcast_from_rank0=broadcast)
            set_model_state_dict(model, {} if empty else whole_if(given, got["shardd"][0]), options=set_options)
            set_optimizer_state_dict(
                model, optimizer, {} if empty else whole_if(given, got["shardd"][1]), options=set_options
            )
            again = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
            out["set"][f"{label},{broadcast}"] = (whole(list(again)), train(model, optimizer, range(2, 4)))
            out["counters"] = counts("shardd", model)
    model, optimizer = sources["torch"]
    out["want"] = (
        whole(list(get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True)))),
        train(model, optimizer, range(2, 4)),
    )
    return out


def whole_if(given: dict[str, bool], state: Any) -> Any:
    """torch goes on with what it is given, and pops from it: a copy."""
    return whole(state) if given["full_state_dict"] else _copied(state)


def _copied(value: Any) -> Any:
    if torch.is_tensor(value):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value


def small_promises(folder: str) -> dict[str, Any]:
    """A save in the background, tensors saved alone, state that is made to be loaded into, loads that fail on one rank."""
    rank = dist.get_rank()
    out: dict[str, Any] = {}
    model = sharded("shardd")
    stock = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, stock, range(0, 0))
    model.unshard()
    model.reshard()
    before = counts("shardd", model)
    made = get_optimizer_state_dict(model, stock)
    out["state made"] = len(made["state"]) == len(list(model.parameters()))
    values = whole(model.state_dict())
    train(model, stock, range(2))
    after = counts("shardd", model)
    out["steps"] = after["commits"] - before["commits"]
    state = {"model": get_model_state_dict(model)}
    want = whole(state)
    process_group = dist.new_group(backend="gloo")
    future = dcp.async_save(state, checkpoint_id=f"{folder}/async", process_group=process_group)
    train(model, stock, range(2, 5))
    future.result()
    loaded = {"model": {n: torch.empty_like(v) for n, v in model.state_dict().items()}}
    dcp.load(loaded, checkpoint_id=f"{folder}/async")
    got = whole(loaded)
    out["async"] = all(torch.equal(got["model"][n], v) for n, v in want["model"].items())
    out["went on"] = not all(torch.equal(v, want["model"][n]) for n, v in whole(model.state_dict()).items())
    out["changed"] = not all(torch.equal(v, want["model"][n]) for n, v in values.items())
    buffer = io.BytesIO()
    weight = model.layers[0].up.weight
    torch.save({"weight": weight.detach().to_local()}, buffer)
    out["alone"] = (buffer.tell(), weight.to_local().nbytes)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    out["all alone"] = (buffer.tell(), sum(p.to_local().nbytes for p in model.parameters()))

    daemons = sharded("shardd")
    optimizer = optimizer_of("shardd", "adamw", daemons.parameters())
    train(daemons, optimizer, range(2))
    good = optimizer.state_dict()
    good = {"param_groups": good["param_groups"], "state": {i: whole(e) for i, e in good["state"].items()}}
    bad = {**good, "state": {i: {**e, "step": torch.tensor(-1.0)} for i, e in good["state"].items()}}
    started = time.monotonic()
    try:
        optimizer.load_state_dict(bad if rank == 1 else good)
    except (ValueError, RuntimeError) as error:
        out["failed"] = f"{type(error).__name__}: {error}"
    out["failed in"] = time.monotonic() - started
    optimizer.load_state_dict(good)
    out["after"] = train(daemons, optimizer, range(2, 4))
    again = sharded("torch")
    theirs = optimizer_of("torch", "adamw", again.parameters())
    out["reference"] = train(again, theirs, range(4))[2:]
    out["counters"] = counts("shardd", daemons)
    out["files"] = sorted(os.listdir(folder))
    return out
