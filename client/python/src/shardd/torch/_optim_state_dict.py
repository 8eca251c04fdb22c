"""Optimizer state dicts of models with flat units, keyed by clean names, with the parameters' shapes.

``optim_state_dict`` takes what an optimizer's ``state_dict`` gives (state of pieces, keyed by number) and makes state of
whole parameters, or of their rows; ``optim_state_dict_to_load`` takes either back to pieces of this world. One tensor is
whole at a time. State of parameters that no unit has stays as it is.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import StateDictType
from torch.optim import Optimizer

from shardd.torch._flat_places import flat_params_of, group_of
from shardd.torch._gather import assemble, rows_as_dtensor_of, rows_as_sharded_tensor
from shardd.torch._names import clean_name
from shardd.torch._state_dict_type import flat_states, get_state_dict_type

__all__ = ["Named", "named_params", "optim_state_dict"]

_Tensor = tuple[tuple[int, ...], torch.dtype]


@dataclass
class Named:
    """A parameter of the model under its first clean name."""

    fqn: str
    param: Any  # FlatShardParam, or None where no unit has it
    held: Any  # what the optimizer has: the object that the model shows


@dataclass
class _Said:
    """What a rank says of its state of one parameter."""

    first: int = 0
    numel: int = 0
    tensors: dict[str, torch.dtype] = field(default_factory=dict)  # of the piece's shape
    others: dict[str, Any] = field(default_factory=dict)  # scalars, numbers


def named_params(model: nn.Module) -> list[Named]:
    flat = flat_params_of(model)
    for fqn, param in flat.items():
        if param.holder is not None:
            raise NotImplementedError(
                f'optimizer state dict of "{fqn}": it is in a FlatParameter, whose state is not told apart by parameter; '
                "wrap with use_orig_params=True"
            )
    found: dict[int, Named] = {}
    for fqn, param in flat.items():
        found.setdefault(id(param.sharded_param), Named(fqn, param, param.sharded_param))
    for name, held in model.named_parameters():
        found.setdefault(id(held), Named(clean_name(name), None, held))
    return list(found.values())


def _keys_of(optim: Optimizer, state_dict: dict[str, Any]) -> dict[int, Any]:
    """By id of the optimizer's parameters: their keys in its state dict."""
    held = [param for group in optim.param_groups for param in group["params"]]
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    return {id(param): key for param, key in zip(held, keys)}


def _is_cut(value: Any, param: Any) -> bool:
    return (
        torch.is_tensor(value) and value.dim() > 0 and value.numel() == param.sharded_param.numel() and not param.whole
    )


def _say(param: Any, entry: dict[str, Any]) -> _Said:
    said = _Said(param.first, param.sharded_param.numel())
    for name, value in () if param.whole else entry.items():
        if _is_cut(value, param):
            said.tensors[name] = value.dtype
        else:
            said.others[name] = value.detach().clone() if torch.is_tensor(value) else value
    return said


def optim_state_dict(
    model: nn.Module,
    optim: Optimizer,
    optim_state_dict: dict[str, Any] | None = None,
    group: Any = None,
    *,
    kind: StateDictType | None = None,
    rank0_only: bool | None = None,
) -> dict[str, Any]:
    """Collective. Keyed by clean names, as full tensors or as rows, as ``state_dict_type`` says (or ``kind``).

    ``optim_state_dict``: what ``optim.state_dict()`` gave; by default it is asked. With rank0_only the other ranks get {}.
    """
    settings = get_state_dict_type(model)
    config: Any = settings.optim_state_dict_config
    full = (kind or settings.state_dict_type) == StateDictType.FULL_STATE_DICT
    if rank0_only is None:
        rank0_only = full and getattr(config, "rank0_only", False)
    state_dict = optim.state_dict() if optim_state_dict is None else optim_state_dict
    keys = _keys_of(optim, state_dict)
    state: dict[str, Any] = {}
    names: dict[Any, str] = {}
    named = named_params(model)
    for item in named:
        if id(item.held) in keys:
            names[keys[id(item.held)]] = item.fqn
    flat = [item for item in named if item.param is not None and id(item.held) in keys]
    entries = {item.fqn: state_dict["state"].get(keys[id(item.held)], {}) for item in flat}
    every = _exchange(flat, entries)
    writes = True
    for item in named:
        if id(item.held) not in keys:
            continue
        if item.param is None:
            entry = state_dict["state"].get(keys[id(item.held)])
            if entry is not None:
                state[item.fqn] = copy.copy(entry)
            continue
        only = 0 if rank0_only else None
        writes = only is None or dist.get_rank(group_of(item.param)) == only
        made = _whole_entry(model, item, entries[item.fqn], [said[item.fqn] for said in every], full, only, config)
        if made is not None and made:
            state[item.fqn] = made
    if not writes:
        return {}
    for key, entry in state_dict["state"].items():
        if key not in names and isinstance(key, str):  # a program's own
            state[key] = entry
    groups = []
    for saved in state_dict["param_groups"]:
        groups.append({**copy.deepcopy({k: v for k, v in saved.items() if k != "params"}),
                       "params": [names[key] for key in saved["params"] if key in names]})  # fmt: skip
    return {"state": state, "param_groups": groups}


def _exchange(flat: list[Named], entries: dict[str, dict[str, Any]]) -> list[dict[str, _Said]]:
    own = {item.fqn: _say(item.param, entries[item.fqn]) for item in flat}
    if not flat:
        return [own]
    group = group_of(flat[0].param)
    every: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, own, group=group)
    return every


def _whole_entry(
    model: nn.Module,
    item: Named,
    entry: dict[str, Any],
    said: list[_Said],
    full: bool,
    only: int | None,
    config: Any,
) -> dict[str, Any] | None:
    param = item.param
    if param.whole:
        kept = only is None or dist.get_rank(group_of(param)) == only
        return {n: v.detach().clone() if torch.is_tensor(v) else v for n, v in entry.items()} if kept else None
    tensors: dict[str, torch.dtype] = {}
    others: dict[str, Any] = {}
    for rank in said:
        if rank.numel:
            tensors.update(rank.tensors)
            for name, value in rank.others.items():
                others.setdefault(name, value)
    made: dict[str, Any] = {}
    whole: Any
    for name in sorted({*tensors, *others}):
        if name not in tensors:
            whole = others[name]
            if torch.is_tensor(whole) and whole.dim() > 0 and not full:
                whole = _rows(model, param, whole, config)
            made[name] = whole
            continue
        ranges = [(rank.first, rank.numel if name in rank.tensors else 0) for rank in said]
        whole = assemble(entry.get(name), ranges, param._orig_size, tensors[name], group_of(param), only)
        if whole is not None:
            made[name] = whole if full else _rows(model, param, whole, config)
    return made if only is None or dist.get_rank(group_of(param)) == only else None


def _rows(model: nn.Module, param: Any, whole: torch.Tensor, config: Any) -> Any:
    given = next((m for s in flat_states(model) if (m := s.__dict__.get("_given_mesh")) is not None), None)
    if given is None and getattr(config, "_use_dtensor", False):
        given = param.mesh_info.mesh
    return rows_as_dtensor_of(whole, given) if given is not None else rows_as_sharded_tensor(whole, group_of(param))
