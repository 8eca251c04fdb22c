"""Corners of FullyShardedDataParallel that PyTorch's own tests reach. Each function runs on every rank."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from models import Block, Case, build, loss_of
from state_dicts.wrapper_state_cases import quiet, whole


class _Partly(nn.Module):
    """One of its modules takes no part, but where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.uses_idle = False
        torch.manual_seed(1)
        self.idle = nn.Linear(4, 5)
        self.busy = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.busy(x) + self.idle(x) if self.uses_idle else self.busy(x)


def _values(model: nn.Module, wrapper: Any) -> dict[str, torch.Tensor]:
    with wrapper.summon_full_params(model, writeback=False):
        return {n.replace("_fsdp_wrapped_module.", ""): p.detach().clone() for n, p in model.named_parameters()}


def unused_parameters() -> dict[str, Any]:
    """Of a unit of which others are used: by wrapper, form and optimizer the values after two steps of AdamW."""
    from shardd.torch import FullyShardedDataParallel, counters
    from shardd.torch.optim import AdamW

    found: dict[str, Any] = {}
    for name, wrapper, adamw in (
        ("torch", TorchFSDP, torch.optim.AdamW),
        ("stock", FullyShardedDataParallel, torch.optim.AdamW),
        ("daemon", FullyShardedDataParallel, AdamW),
    ):
        for orig in (True, False):
            model = wrapper(nn.Sequential(_Partly()), use_orig_params=orig, device_id=torch.device("cpu"))
            optimizer = adamw(model.parameters(), lr=0.1, weight_decay=0.5)
            for step in range(2):
                with model.no_sync():
                    model(torch.full((2, 4), 1.0 + step + dist.get_rank())).pow(2).sum().backward()
                model(torch.full((2, 4), 2.0 - step)).pow(2).sum().backward()
                shown = all(p.grad is not None for p in model.parameters() if p.numel())
                optimizer.step()
                optimizer.zero_grad()
            found[f"{name} {orig}"] = _values(model, wrapper), shown
            if name != "torch":
                found[f"{name} {orig} commits"] = counters(model)["commits"]
    return found


def _wrapped(orig: bool) -> Any:
    from shardd.torch import FullyShardedDataParallel

    return FullyShardedDataParallel(
        build(Case()), auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=orig, device_id=torch.device("cpu")
    )


def _version(model: Any) -> int:
    """Of the parameters, but for those that passes have made."""
    from shardd.torch import counters

    return int(model._state._job.engine.info()["version"]) - counters(model)["passes"]


def loads_inside(orig: bool) -> dict[str, Any]:
    """``load_state_dict`` inside ``summon_full_params``: of everything, of a module, by rank 0 alone."""
    facts: dict[str, Any] = {}
    model = _wrapped(orig)
    start = whole(model.state_dict())
    doubled = {n: v * 2 for n, v in start.items()}
    with model.summon_full_params(model):
        facts["nothing missing"] = str(model.load_state_dict(doubled))
        facts["shown"] = torch.equal(model.layers[0].up.weight, doubled["layers.0.up.weight"])
    before = _version(model)
    facts["everything"] = whole(model.state_dict()), doubled
    tripled = {n.removeprefix("layers.1."): v * 3 for n, v in start.items() if n.startswith("layers.1.")}
    with model.summon_full_params(model.layers[1]):
        try:
            model.load_state_dict(start)
            facts["more than summoned"] = ""
        except RuntimeError as error:
            facts["more than summoned"] = str(error)
        model.layers[1].load_state_dict(tripled)
    facts["a module"] = whole(model.layers[1].state_dict()), tripled
    facts["not the others"] = torch.equal(model.state_dict()["layers.0.up.weight"], doubled["layers.0.up.weight"])
    with model.summon_full_params(model, rank0_only=True):
        model.load_state_dict(start)
    facts["rank 0"] = whole(model.state_dict()), start
    facts["versions"] = _version(model) - before
    facts["loss"] = loss_of(model, 0, 0, 0).item(), loss_of(build(Case()), 0, 0, 0).item()
    return facts


def missing_keys(orig: bool) -> dict[str, Any]:
    model = _wrapped(orig)
    given = whole(model.state_dict())
    del given["layers.1.up.weight"], given["head.weight"]
    given["another"] = torch.ones(1)
    facts: dict[str, Any] = {}
    try:
        model.load_state_dict(given)
        facts["strict"] = ""
    except RuntimeError as error:
        facts["strict"] = str(error)
    found = model.load_state_dict({n: v + 1 for n, v in given.items()}, strict=False)
    facts["found"] = sorted(found.missing_keys), found.unexpected_keys
    after = model.state_dict()
    facts["rest"] = torch.equal(after["norm.weight"], given["norm.weight"] + 1)
    del given["another"]
    found = set_model_state_dict(
        model, {n: v + 2 for n, v in given.items()}, options=StateDictOptions(full_state_dict=True, strict=False)
    )
    facts["by torch's function"] = sorted(found.missing_keys)
    facts["rest again"] = torch.equal(model.state_dict()["norm.weight"], given["norm.weight"] + 2)
    return facts


def gradients_of_no_step() -> dict[str, Any]:
    """Dropped after torch's optimizer has stepped; the commit is where full parameters are looked at."""
    from shardd.torch import counters

    model = _wrapped(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, 0, 0, dist.get_rank()).backward()
    optimizer.step()
    optimizer.zero_grad()
    with model.summon_full_params(model, writeback=False):
        pass
    with model.summon_full_params(model, with_grads=True):
        facts: dict[str, Any] = {"none": all(p.grad is None for p in model.parameters())}
    facts["commits"] = counters(model)["commits"]
    return facts


def gradients_of_one_rank() -> dict[str, Any]:
    """Of a module that rank 0 alone uses: they count as they do where nobody looks at full parameters before the step."""
    from shardd.torch import fully_shard, summon_full_params
    from shardd.torch.optim import SGD

    values = []
    for looks in (False, True):
        model: Any = _Partly()
        fully_shard(model)
        optimizer = SGD(model.parameters(), lr=0.1)
        x = torch.ones(2, 4)
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.uses_idle = dist.get_rank() == 0
        model(x).sum().backward()
        if looks:
            with summon_full_params(model, writeback=False, with_grads=True):
                pass
        optimizer.step()
        values.append({name: p.full_tensor() for name, p in model.named_parameters()})
    start = _Partly().idle.weight
    return {"values": values, "moved": not torch.equal(values[0]["idle.weight"], start)}


def flattened_optimizer_state() -> dict[str, Any]:
    """Saved and loaded with ``flatten_optimizer_state_dict``, where ranks have no element of some parameters."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    states: list[Any] = []
    saved: Any = None
    for load in (False, True):
        model = _wrapped(True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
        loss_of(model, 5 if load else 0, 0, dist.get_rank()).backward()
        optimizer.step()
        optimizer.zero_grad()
        with quiet():
            if load:
                set_optimizer_state_dict(model, optimizer, copy.deepcopy(saved), options=options)
            saved = get_optimizer_state_dict(model, optimizer, options=options)
        states.append(whole(saved))
    return {"states": states, "empty": any(not p.numel() for p in model.parameters())}


def edges() -> dict[str, Any]:
    facts: dict[str, Any] = {"unused": unused_parameters(), "gradients": gradients_of_no_step()}
    for orig in (True, False):
        facts[f"loads {orig}"] = loads_inside(orig)
        facts[f"missing {orig}"] = missing_keys(orig)
    facts["flattened"] = flattened_optimizer_state()
    facts["of one rank"] = gradients_of_one_rank()
    return facts
