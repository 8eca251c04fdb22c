"""Optimizer state dicts by name back to pieces of this world, and between names and numbers."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.fsdp import OptimStateKeyType, StateDictType
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardd.torch._job.job_optimizer import steps_in_daemon
from shardd.torch._job.whole_params import register_whole
from shardd.torch._ranks.gather import carrier, piece_of_rows, whole_value
from shardd.torch._state_dicts.flat_places import group_of
from shardd.torch._state_dicts.optim_state_dict_pieces import FlatState, Named, current_names, named_params
from shardd.torch._state_dicts.state_dict_type import flat_states, get_state_dict_type
from shardd.torch._units.names import clean_name

__all__ = ["optim_state_dict_to_load", "rekey_optim_state_dict"]


def optim_state_dict_to_load(
    model: nn.Module,
    optim: Optimizer,
    optim_state_dict: dict[str, Any] | None,
    is_named_optimizer: bool = False,
    load_directly: bool = False,
    group: Any = None,
    *,
    rank0_only: bool | None = None,
) -> dict[str, Any]:
    """Collective. What ``optim.load_state_dict`` takes on this rank; ``load_directly``: which is called, too.

    Values may be whole or sharded over any number of ranks, alike on all ranks. With rank0_only (as ``state_dict_type`` says) only rank 0
    gives a state dict, and values travel one by one.
    """
    settings = get_state_dict_type(model)
    if rank0_only is None:
        full = settings.state_dict_type == StateDictType.FULL_STATE_DICT
        rank0_only = full and getattr(settings.optim_state_dict_config, "rank0_only", False)
    for root in dict.fromkeys(state._find_root() for state in flat_states(model)):
        register_whole(root)
    named = named_params(model)
    source = None
    if rank0_only and dist.get_world_size(group) > 1:
        source = dist.get_process_group_ranks(group)[0] if group is not None else 0
        optim_state_dict = _from_source(optim_state_dict, source, group)
    if optim_state_dict is None or "state" not in optim_state_dict:
        raise ValueError("optim_state_dict_to_load: no `state` in the optimizer state dict (rank 0 has to give one)")
    by_name = {clean_name(key) if isinstance(key, str) else key: key for key in optim_state_dict["state"]}
    state: dict[str, Any] = {}
    flats: dict[int, FlatState] = {}
    for item in named:
        if item.holder is not None:
            flats.setdefault(id(item.holder), FlatState([], steps_in_daemon(optim) is not None)).items.append(item)
    taken = set()
    values = [v for entry in optim_state_dict["state"].values() if isinstance(entry, dict) for v in entry.values()]
    in_rows = source is None and any(isinstance(value, DTensor | ShardedTensor) for value in values)
    ranges = _ranges([i for i in named if i.param is not None and i.holder is None]) if in_rows else {}
    for item in named:
        key = by_name.get(item.fqn)
        if key is None:
            continue
        taken.add(key)
        flat = flats.get(id(item.holder))
        entry = optim_state_dict["state"][key]
        if flat is not None:
            flat.begin(item, entry)
        piece: dict[str, Any] = {}
        for name, value in entry.items():
            if (
                item.fqn in ranges
                and isinstance(value, DTensor | ShardedTensor)
                and value.size() == item.param._orig_size
            ):
                rows = piece_of_rows(value, ranges[item.fqn], group_of(item.param))
                if rows is not None:
                    piece[name] = rows
                    continue
            value = _received(value, source, group) if source is not None else whole_value(value)
            if item.param is not None:
                _check_shape(item, name, value)
            if flat is not None:
                flat.add(item, name, value)
            else:
                piece[name] = value if item.param is None else _cut(item, value)
        if flat is None:
            _put(state, item, piece, optim, is_named_optimizer)
    for flat in flats.values():
        made = flat.made()
        if made:
            state[flat.items[0].fqn] = made
    for key, entry in optim_state_dict["state"].items():
        if key not in taken:
            state[key] = entry
    keys = current_names(model) if is_named_optimizer else _numbers(optim)
    result = _rekeyed(state, optim_state_dict, {i.fqn: keys[id(i.held)] for i in named if id(i.held) in keys})
    if load_directly:
        optim.load_state_dict(result)
    return result


def _ranges(items: list[Named]) -> dict[str, list[tuple[int, int]]]:
    """Returns by name and rank of the parameter's group the first element and their number, for what is cut."""
    groups: dict[int, tuple[dist.ProcessGroup, list[Named]]] = {}
    for item in items:
        if not item.param.whole:
            shard_group = group_of(item.param)
            groups.setdefault(id(shard_group), (shard_group, []))[1].append(item)
    found: dict[str, list[tuple[int, int]]] = {}
    for shard_group, cut in groups.values():
        own = [(first, local.numel()) for first, local in (item.param.piece() for item in cut)]
        every: list[Any] = [None] * dist.get_world_size(shard_group)
        dist.all_gather_object(every, own, group=shard_group)
        found.update((item.fqn, [of_rank[number] for of_rank in every]) for number, item in enumerate(cut))
    return found


def _counts_everywhere(optim: Any) -> bool:
    steps = steps_in_daemon(optim)
    return steps is not None and steps.chosen


def _put(state: dict[str, Any], item: Named, piece: dict[str, Any], optim: Any, is_named_optimizer: bool) -> None:
    """Where a rank has no element, torch's optimizers have no state; those of shardd.torch.optim have a count of updates on each."""
    if item.param is None or item.param.sharded_param.numel() or _counts_everywhere(optim):
        state[item.fqn] = piece
    elif is_named_optimizer and item.held in optim.state:  # which want state of all
        state[item.fqn] = copy.deepcopy(optim.state[item.held])


def _from_source(state_dict: dict[str, Any] | None, source: int, group: Any) -> dict[str, Any]:
    """Returns the structure of rank ``source``'s, with (shape, dtype) in the place of tensors that are no scalars."""
    received: list[Any] = [None]
    if dist.get_rank() == source:
        assert state_dict is not None

        def described(value: Any) -> Any:
            return _Whole(tuple(value.shape), value.dtype) if torch.is_tensor(value) and value.dim() else value

        received[0] = {
            **state_dict,
            "state": {
                key: {name: described(value) for name, value in entry.items()} if isinstance(entry, dict) else entry
                for key, entry in state_dict["state"].items()
            },
        }
    dist.broadcast_object_list(received, src=source, group=group)
    result: dict[str, Any] = state_dict if dist.get_rank() == source and state_dict is not None else received[0]
    return result


@dataclass
class _Whole:
    """A tensor that rank 0 has."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def _received(value: Any, source: int, group: Any) -> Any:
    if isinstance(value, _Whole):
        value = torch.empty(value.shape, dtype=value.dtype)
    elif not torch.is_tensor(value) or not value.dim():
        return value
    value = value.detach().to(carrier(group)).contiguous()
    dist.broadcast(value, src=source, group=group)
    return value


def _check_shape(item: Named, name: str, value: Any) -> None:
    want = item.param._orig_size
    if torch.is_tensor(value) and value.dim() and value.shape != want and value.numel() != 1:
        raise ValueError(
            f'load optimizer state "{name}" of "{item.fqn}": wrong shape (got {tuple(value.shape)}, want {tuple(want)})'
        )


def _cut(item: Named, value: Any) -> Any:
    """Returns this rank's part of a whole value."""
    if not torch.is_tensor(value):
        return value
    param = item.param
    if value.dim() == 0 or value.shape != param._orig_size or param.whole:
        return value.clone()
    return value.reshape(-1)[param.first : param.first + param.sharded_param.numel()].clone()


def _numbers(optim: Any) -> dict[int, int]:
    """Returns the keys in the optimizer's state dict, by id of its parameters."""
    numbers: dict[int, int] = {}
    for held in (param for group in optim.param_groups for param in group["params"]):
        numbers.setdefault(id(held), len(numbers))
    return numbers


def _rekeyed(state: dict[str, Any], saved: dict[str, Any], keys: dict[str, Any]) -> dict[str, Any]:
    """By the optimizer's own keys, of which the parameters of a FlatParameter have one, and in its groups."""
    result: dict[str, Any] = {"state": {keys.get(key, key): entry for key, entry in state.items()}}
    if "param_groups" in saved:
        groups = []
        for group in saved["param_groups"]:
            params = sorted({keys[clean_name(name)] for name in group["params"] if clean_name(name) in keys})
            groups.append({**{k: copy.deepcopy(v) for k, v in group.items() if k != "params"}, "params": params})
        result["param_groups"] = groups
    return result


def rekey_optim_state_dict(
    optim_state_dict: dict[str, Any],
    optim_state_key_type: OptimStateKeyType,
    model: nn.Module,
    optim_input: Any = None,
    optim: Optimizer | None = None,
) -> dict[str, Any]:
    """Changes keys from numbers to names or back, for ``model``, wrapped or not, and the optimizer over its parameters."""
    if optim_state_key_type not in (OptimStateKeyType.PARAM_NAME, OptimStateKeyType.PARAM_ID):
        raise AssertionError(f"rekey_optim_state_dict: no such key type (got {optim_state_key_type})")
    to_names = optim_state_key_type == OptimStateKeyType.PARAM_NAME
    kinds = {type(key) for key in optim_state_dict["state"]}
    if len(kinds & {int, str}) > 1:
        raise ValueError(f"Invalid parameter keys: {optim_state_dict['state'].keys()}")
    if kinds == {str if to_names else int}:
        return optim_state_dict
    held = _params_in_order(model, optim_input, optim)
    names: dict[int, str] = {}
    for item in named_params(model):
        if names.setdefault(id(item.held), item.fqn) != item.fqn:
            raise RuntimeError(
                f'rekey_optim_state_dict: "{names[id(item.held)]}" and "{item.fqn}" are in one FlatParameter, which has one '
                "number; pass the model unwrapped and the optimizer over its parameters"
            )
    by_number = {number: names[id(param)] for number, param in enumerate(held) if id(param) in names}
    table: dict[Any, Any] = by_number if to_names else {name: number for number, name in by_number.items()}

    def key_of(key: Any) -> Any:
        return table[key if to_names else clean_name(key)]

    return {
        "state": {key_of(key): entry for key, entry in optim_state_dict["state"].items()},
        "param_groups": [
            {**copy.deepcopy({k: v for k, v in group.items() if k != "params"}),
             "params": sorted(key_of(key) for key in group["params"])}
            for group in optim_state_dict["param_groups"]
        ],
    }  # fmt: skip


def _params_in_order(model: nn.Module, optim_input: Any, optim: Optimizer | None) -> list[Any]:
    if optim is not None:
        return [param for group in optim.param_groups for param in group["params"]]
    if optim_input is None:
        return list(model.parameters())
    given = list(optim_input)
    return [p for item in given for p in (item["params"] if isinstance(item, dict) else [item])]
