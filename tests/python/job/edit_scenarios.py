"""What ranks do in the tests of in-place edits: programs that write parameters between passes, while ranks drift apart."""

from __future__ import annotations

import faulthandler
import os
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from models import Case, build, loss_of
from optimizers.optim_cases import counts, full, model_of, optimizer_of, parameters_of


def _optimizer(impl: str, kind: str, model: nn.Module) -> Any:
    if kind == "daemon":
        return optimizer_of(impl, "adamw", model.parameters())
    name, _, form = kind.partition("-")
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=form == "foreach", fused=form == "fused")


def _late(rank: int, who: int) -> None:
    """One rank is late; nothing may come of it."""
    if rank == who:
        time.sleep(0.03)


def edited(impl: str, kind: str, folder: str) -> dict[str, Any]:
    """Clamping, an average around an evaluation, initialisation, loads, stores past torch: between all passes."""
    import torch.distributed.checkpoint as dcp

    rank = dist.get_rank()
    model = model_of(impl)
    optimizer = _optimizer(impl, kind, model)
    with torch.no_grad():
        model.layers[0].norm.bias.add_(0.1)  # before there is a job
    average = {n: p.detach().clone() for n, p in model.named_parameters()}
    losses = []
    for step in range(6):
        loss = loss_of(model, step, 0, rank)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if step == 3:
            with torch.no_grad():
                model.layers[0].down.weight.mul_(0.5)  # between backward and step
        _late(rank, step % 2)
        optimizer.step()
        optimizer.zero_grad()
        _late(rank, 1 - step % 2)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.clamp_(-0.9, 0.9)
                average[name].mul_(0.9).add_(parameter, alpha=0.1)
            _late(rank, 0)
            kept = {n: p.detach().clone() for n, p in model.named_parameters()}
            for name, parameter in model.named_parameters():
                parameter.data.copy_(average[name])
            losses.append(loss_of(model, 50, 0, 0).item())
            model.reshard()  # torch leaves the root unsharded after a forward
            _late(rank, 1)
            for name, parameter in model.named_parameters():
                parameter.copy_(kept[name])
        if step == 1:
            nn.init.constant_(model.layers[0].down.bias, 0.01)
            nn.init.zeros_(model.layers[1].norm.bias)
            dcp.save(model.state_dict(), checkpoint_id=f"{folder}/{impl}")
        if step == 2:
            local = model.layers[1].up.weight.detach().to_local()
            if local.numel():
                local.numpy()[:] *= 0.9
        if step == 4:
            state = model.state_dict()
            dcp.load(state, checkpoint_id=f"{folder}/{impl}")
            _late(rank, 1)
            model.load_state_dict(state)
        losses.append(loss.item())
    state = {n: v.clone() if torch.is_tensor(v) else v for n, v in model.state_dict().items()}
    loss_of(model, 60, 0, rank).backward()
    optimizer.step()
    optimizer.zero_grad()
    _late(rank, 0)
    model.load_state_dict(state)
    with torch.no_grad():
        losses.append(loss_of(model, 61, 0, 0).item())
        model.reshard()
    return {"losses": losses, "parameters": parameters_of(model), "counters": counts(impl, model)}


def both_edited(kind: str, folder: str) -> tuple[dict[str, Any], dict[str, Any]]:
    return edited("torch", kind, folder), edited("shardd", kind, folder)


def write_inside_a_pass() -> dict[str, Any]:
    """Rank 0 writes a block's shard while another block runs."""
    import shardd

    rank = dist.get_rank()
    store = dist.distributed_c10d._get_default_store()
    model = model_of("shardd")
    optimizer = _optimizer("shardd", "daemon", model)
    loss_of(model, 0, 0, rank).backward()
    optimizer.step()
    optimizer.zero_grad()
    before = full(model.layers[2].up.weight)
    seen: list[torch.Tensor] = []

    def write(module: nn.Module, args: Any) -> None:
        if rank == 0:
            model.layers[2].up.weight.detach().to_local().fill_(9.0)
            store.set("written", "")

    def look(module: nn.Module, args: Any) -> None:
        if rank == 1:
            store.wait(["written"])
            seen.append(model.layers[2].up.weight.detach().clone())  # whole, with the rows of rank 0

    model.layers[0].register_forward_pre_hook(write)
    model.layers[2].register_forward_pre_hook(look)
    error = ""
    try:
        loss_of(model, 1, 0, rank).backward()
    except shardd.Error as caught:
        error = str(caught)
        os.environ["SHARDD_TEST_FAILED"] = "1"
    return {"error": error, "before": before, "seen": seen}


def store_where_edits_are_off(handler: str) -> dict[str, Any]:
    """Rank 1 stores into its shard, which ends it; ``handler``: of the program, enabled before or after the library's."""
    rank = dist.get_rank()
    if handler == "before":
        faulthandler.enable()
    model = model_of("shardd")
    optimizer = optimizer_of("shardd", "adamw", model.parameters(), in_place_edits=False)
    for step in range(2):
        loss_of(model, step, 0, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    counters = counts("shardd", model)
    state = {n: v.clone() if torch.is_tensor(v) else v for n, v in model.state_dict().items()}
    model.load_state_dict(state)
    dist.barrier()
    if handler == "after":
        faulthandler.enable()
    if rank == 1:
        thread = threading.Thread(target=lambda: model.layers[1].down.bias.detach().to_local().zero_())
        thread.start()
        thread.join()
    os.environ["SHARDD_TEST_FAILED"] = "1"  # the other rank is gone
    return {"counters": counters}


def _wrapped(use_orig_params: bool) -> nn.Module:
    from shardd.torch import FullyShardedDataParallel

    return FullyShardedDataParallel(build(Case()), use_orig_params=use_orig_params)


def dicts_where_edits_are_off(form: str) -> dict[str, Any]:
    """Stores into state dicts from before and after the first step, and loads them, as ``dcp.load`` does."""
    from shardd.torch import FullyShardedDataParallel, StateDictType

    rank = dist.get_rank()
    model = model_of("shardd") if form == "fully_shard" else _wrapped(form == "wrapper")
    optimizer = optimizer_of("shardd", "adamw", model.parameters(), in_place_edits=False)

    buffers = {name.removeprefix("_fsdp_wrapped_module.") for name, _ in model.named_buffers()}

    def pieces(state: dict[str, Any] | None = None) -> dict[str, torch.Tensor]:
        state = model.state_dict() if state is None else state
        params = {name: value for name, value in state.items() if name not in buffers}
        return {name: value.to_local() if isinstance(value, DTensor) else value for name, value in params.items()}

    with FullyShardedDataParallel.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        before = model.state_dict()
        at_first = {name: value.clone() for name, value in pieces(before).items()}
        loss_of(model, 0, 0, rank).backward()
        optimizer.step()
        unmoved = all(torch.equal(value, at_first[name]) for name, value in pieces(before).items())
        after = model.state_dict()
        trained = {name: value.clone() for name, value in pieces(after).items()}
        with torch.no_grad():
            for value in (*pieces(before).values(), *pieces(after).values()):
                value.fill_(7.0)
        untouched = all(torch.equal(value, trained[name]) for name, value in pieces().items())
        model.load_state_dict(before)
        loaded = all(bool((value == 7.0).all()) for value in pieces().values())
    return {"unmoved": unmoved, "untouched": untouched, "loaded": loaded}


def plain_training(edits: bool) -> dict[str, Any]:
    """No edits at all: what passes alone change."""
    rank = dist.get_rank()
    model = model_of("shardd")
    optimizer = optimizer_of("shardd", "adamw", model.parameters(), in_place_edits=edits)
    losses = []
    for step in range(5):
        loss = loss_of(model, step, 0, rank)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "counters": counts("shardd", model)}
