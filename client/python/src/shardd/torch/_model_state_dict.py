"""State dicts of models with flat units: hooks on each unit's module, for all three kinds, and for loads of any of them.

Saving begins at the outermost unit: parameters are resharded, and if the job is open all ranks enter its full parameters
(nothing is gathered where they share a node). Each unit then replaces its own values, one tensor at a time, and the
outermost leaves. Loading needs no other rank, but where sharded values are gathered, one at a time: what is whole is cut
here.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import ShardingStrategy, StateDictType

from shardd.torch import _checkpoint_face
from shardd.torch._flat_places import FlatPlace, Uses, group_of, keys_in_order, places_of, uses_of
from shardd.torch._gather import assemble, rows_as_dtensor_of, rows_as_sharded_tensor, whole_value
from shardd.torch._names import clean_name
from shardd.torch._pieces import reshard
from shardd.torch._spec import flat_owner
from shardd.torch._state import ShardState, state_of
from shardd.torch._state_dict_type import flat_states, settings_of

__all__ = ["install_hooks"]

_WRAPPED = "_fsdp_wrapped_module."


@dataclass
class _Saving:
    """A state dict that is being made."""

    module: nn.Module  # the outermost unit's
    uses: Uses
    job: Any = None  # whose full parameters are entered
    summoned: bool = False  # the program has entered them: modules show them, perhaps edited
    ranges: dict[int, list[tuple[int, int]]] = field(default_factory=dict)  # by parameter, where there is no job
    done: dict[int, torch.Tensor] = field(default_factory=dict)  # tied parameters, once


_savings: dict[int, _Saving] = {}  # by root state


def install_hooks(module: nn.Module) -> None:
    """``module`` carries a unit with flat parameters. Called once, by who makes it."""
    _checkpoint_face.install()
    module.register_state_dict_pre_hook(_before_save)
    module._register_state_dict_hook(_after_save)
    module._register_load_state_dict_pre_hook(_before_load, with_module=True)
    module.register_load_state_dict_post_hook(_after_load)


def _state(module: nn.Module) -> ShardState:
    state = state_of(module)
    assert state is not None and state._unit is not None
    return state


def _kind(state: ShardState) -> StateDictType:
    unit: Any = state._unit
    if getattr(unit, "strategy", None) == ShardingStrategy.NO_SHARD:
        if settings_of(state).state_dict_type != StateDictType.FULL_STATE_DICT:
            warnings.warn(
                "When using ``NO_SHARD`` for ``ShardingStrategy``, full_state_dict will be returned.", stacklevel=3
            )
        return StateDictType.FULL_STATE_DICT
    return settings_of(state).state_dict_type


# Saving.


def _before_save(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    state = _state(module)
    root = state._find_root()
    saving = _savings.get(id(root))
    if saving is not None and saving.module is not module and any(m is module for m in saving.module.modules()):
        return  # inside of that
    if saving is not None:  # an exception ended it
        _end(root)
    states = flat_states(root._modules[0])
    saving = _savings[id(root)] = _Saving(module, uses_of(states))
    job = root._job
    if job is not None and job.engine is not None and job.engine.full_params:
        saving.summoned = True
        return
    reshard(root._modules[0])
    if _kind(state) == StateDictType.LOCAL_STATE_DICT:
        return
    if job is not None and job.alive and job.engine is not None:
        job.engine.enter_full_params(False)
        saving.job = job
        return
    params = list(dict.fromkeys(p for s in states if s._unit is not None for p in s._unit.fsdp_params))
    cut: list[Any] = [p for p in params if not _is_whole(p)]
    if not cut:
        return
    own = [(first, local.numel()) for first, local in (p.piece() for p in cut)]
    every: list[Any] = [None] * dist.get_world_size(group_of(cut[0]))
    dist.all_gather_object(every, own, group=group_of(cut[0]))
    for number, param in enumerate(cut):
        saving.ranges[id(param)] = [ranges[number] for ranges in every]


def _is_whole(param: Any) -> bool:
    return param.whole or dist.get_world_size(group_of(param)) == 1


def _end(root: ShardState) -> None:
    saving = _savings.pop(id(root))
    if saving.job is not None and saving.job.alive:
        saving.job.engine.leave_full_params()


def _whole(saving: _Saving, param: Any, only: int | None) -> torch.Tensor | None:
    """A copy; ``only``: for that rank of the shard group alone. Collective where there is no job."""
    if only is not None and (saving.job is not None or _is_whole(param)) and dist.get_rank(group_of(param)) != only:
        return None
    if id(param) in saving.done:
        return saving.done[id(param)]
    shape = param._orig_size
    if saving.job is not None:
        whole = torch.empty(shape, dtype=param.sharded_param.dtype)
        given = saving.job.engine.copy_full_parameter(saving.job.index_of(param), whole)
        assert given
    elif _is_whole(param):
        whole = param.local.reshape(shape).clone(memory_format=torch.contiguous_format)
    else:
        found = assemble(param.local, saving.ranges[id(param)], shape, param.sharded_param.dtype, group_of(param), only)
        if found is None:
            return None
        whole = found
    if len(param.uses) > 1:
        saving.done[id(param)] = whole
    return whole


def _strip(state_dict: dict[str, Any], prefix: str) -> None:
    old = prefix + _WRAPPED
    for key in [key for key in state_dict if key.startswith(old)]:
        state_dict[prefix + key[len(old) :]] = state_dict.pop(key)


@torch.no_grad()
def _after_save(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
    state = _state(module)
    root = state._find_root()
    saving = _savings[id(root)]
    try:
        _strip(state_dict, prefix)
        _replace(module, state, root, saving, state_dict, prefix)
    except BaseException:
        _end(root)
        raise
    if saving.module is module:
        _end(root)
        if any(param.holder is not None for param in saving.uses.values()):
            order = {prefix + key: number for number, key in enumerate(keys_in_order(module, saving.uses))}
            for key in sorted((k for k in state_dict if k in order), key=order.__getitem__):
                state_dict[key] = state_dict.pop(key)


def _replace(
    module: nn.Module, state: ShardState, root: ShardState, saving: _Saving, state_dict: dict[str, Any], prefix: str
) -> None:
    kind, settings = _kind(state), settings_of(state)
    places = places_of(module, saving.uses)
    only = (
        0
        if kind == StateDictType.FULL_STATE_DICT and getattr(settings.state_dict_config, "rank0_only", False)
        else None
    )
    for key in [k for k in state_dict if k.startswith(f"{prefix}_flat_param")]:
        del state_dict[key]
    for place in places:
        key = prefix + place.key
        if saving.summoned:
            shown = place.module._parameters.get(place.name)
            value = getattr(place.module, place.name) if shown is None else shown
            if value.shape == place.param._orig_size:  # else another rank has it
                state_dict[key] = value.detach().clone()
            continue
        if kind == StateDictType.LOCAL_STATE_DICT:
            state_dict[key] = place.param.local
            continue
        whole = _whole(saving, place.param, only)
        if whole is None:
            state_dict.pop(key, None)
        elif kind == StateDictType.FULL_STATE_DICT:
            state_dict[key] = whole
        else:
            state_dict[key] = _sharded(state, root, place, whole)
    if only is not None and dist.get_rank(state._unit.mesh_info.shard_process_group) != only:  # type: ignore[union-attr]
        for key in [k for k in state_dict if k.startswith(prefix)]:  # buffers, too
            del state_dict[key]


def _sharded(state: ShardState, root: ShardState, place: FlatPlace, whole: torch.Tensor) -> Any:
    mesh = root.__dict__.get("_given_mesh")  # units that a policy wraps are given one where the program gave none
    config: Any = settings_of(state).state_dict_config
    if mesh is None and getattr(config, "_use_dtensor", False):
        mesh = place.param.mesh_info.mesh
    if mesh is not None:
        return rows_as_dtensor_of(whole, mesh)
    return rows_as_sharded_tensor(whole, group_of(place.param))


# Loading.


@torch.no_grad()
def _before_load(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    metadata: Any,
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    state = _state(module)
    root = state._find_root()
    states = flat_states(root._modules[0])
    wraps = _WRAPPED if _WRAPPED[:-1] in module._modules else ""
    reshard(module)
    if root._job is not None and root._job.alive:
        root._job.open_write(module)
    kind = settings_of(state).state_dict_type
    clean = {clean_name(key): key for key in state_dict if key.startswith(prefix)}
    for place in places_of(module, uses_of(states)):
        key = prefix + place.key
        if key not in state_dict:  # a compiled module's prefix is there, or is not
            key = clean.get(clean_name(key), key)
            if key in state_dict:
                state_dict[prefix + place.key] = state_dict.pop(key)
                key = prefix + place.key
        if key not in state_dict:
            continue
        value = whole_value(state_dict[key])
        param = place.param
        first, local = param.piece()
        if kind == StateDictType.LOCAL_STATE_DICT and value.shape == local.shape:
            local.copy_(value)
        elif value.shape == param._orig_size:
            local.copy_(value.reshape(-1)[first : first + local.numel()])
        else:
            errors.append(
                f"size mismatch for {key}: copying a param with shape {value.shape} from checkpoint, the shape in current "
                f"model is {param._orig_size}."
            )
        if place.module._parameters.get(place.name) is None:
            del state_dict[key]  # the module has a view of the flat parameter there
        else:
            state_dict[key] = place.module._parameters[place.name]  # the very object: nothing is left to do
    for name, param in module._parameters.items():
        if param is not None and name.startswith("_flat_param"):
            state_dict[f"{prefix}{name}"] = param
    if wraps:
        for name, param in flat_owner(module)._parameters.items():
            if param is not None and name.startswith("_flat_param"):
                state_dict[f"{prefix}{name}"] = param
        for key in [k for k in state_dict if k.startswith(prefix) and not k.startswith(f"{prefix}_flat_param.")]:
            if key[len(prefix) :].split(".")[0] not in module._parameters:
                state_dict[prefix + wraps + key[len(prefix) :]] = state_dict.pop(key)


def _after_load(module: nn.Module, incompatible: Any) -> None:
    root = _state(module)._find_root()
    if root._job is not None and root._job.alive:
        root._job.commit_write(module)
    for keys in incompatible:
        keys[:] = [clean_name(key) for key in keys]
