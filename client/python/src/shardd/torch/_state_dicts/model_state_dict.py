"""State dicts of models with flat units: hooks on each unit's module, for all three kinds, and for loads of any of them.

Saving begins at the outermost unit: parameters are resharded, and if the job is open all ranks enter its full parameters
(nothing is gathered where they share a node). Each unit then replaces its own values, one tensor at a time, and the
outermost leaves. Loading needs no other rank, but where values are sharded, of which each rank gets its piece, one at a
time: what is whole is cut here.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_PREFIX, ActivationWrapper
from torch.distributed.fsdp import ShardingStrategy, StateDictType
from torch.distributed.tensor import DTensor

from shardd.torch._job.job import job_of
from shardd.torch._ranks.gather import (
    assemble,
    piece_of_rows,
    row_cuts,
    rows_as_dtensor_of,
    rows_as_sharded_tensor,
    whole_value,
)
from shardd.torch._state_dicts import checkpoint_face
from shardd.torch._state_dicts.flat_places import FlatPlace, Uses, group_of, keys_in_order, places_of, uses_of
from shardd.torch._state_dicts.pieces import reshard
from shardd.torch._state_dicts.state_dict_type import flat_states, mark_dtensors, settings_of
from shardd.torch._units.names import clean_name, flat_owner
from shardd.torch._units.state import ShardState, state_of

__all__ = ["install_hooks"]

_WRAPPED = "_fsdp_wrapped_module."


@dataclass
class _Saving:
    """A state dict that is being made."""

    module: nn.Module  # the outermost unit's
    uses: Uses
    job: Any = None  # whose full parameters are entered
    shows_full: bool = False  # the program has entered them: modules show them, perhaps edited
    ranges: dict[int, list[tuple[int, int]]] = field(default_factory=dict)  # by parameter, where there is no job
    done: dict[int, torch.Tensor] = field(default_factory=dict)  # tied parameters, once


_savings: dict[int, _Saving] = {}  # by root state


def install_hooks(module: nn.Module) -> None:
    """``module`` carries a unit with flat parameters. Called once, by who makes it."""
    checkpoint_face.install()
    module.register_state_dict_pre_hook(_before_save)
    module._register_state_dict_hook(_after_save)
    module._register_load_state_dict_pre_hook(_before_load, with_module=True)
    module.register_load_state_dict_post_hook(_after_load)


def _state(module: nn.Module) -> ShardState:
    state = state_of(module)
    assert state is not None and state._unit is not None
    return state


def _shows_full_params(root: ShardState) -> bool:
    """Whether the program is inside ``summon_full_params``."""
    job = job_of(root)
    return job is not None and job.engine is not None and job.engine.full_params


def _states_below(root: ShardState) -> list[ShardState]:
    return list(dict.fromkeys(state for module in root._modules for state in flat_states(module)))


def _is_unsharded(state: ShardState) -> bool:
    return getattr(state._unit, "strategy", None) == ShardingStrategy.NO_SHARD


def _kind(state: ShardState) -> StateDictType:
    if _is_unsharded(state):
        if settings_of(state).state_dict_type != StateDictType.FULL_STATE_DICT:
            warnings.warn(
                "When using ``NO_SHARD`` for ``ShardingStrategy``, full_state_dict will be returned.", stacklevel=3
            )
        return StateDictType.FULL_STATE_DICT
    return settings_of(state).state_dict_type


def _mark(states: list[ShardState]) -> None:
    for state in states:
        if not _is_unsharded(state):
            mark_dtensors(state, settings_of(state).state_dict_config)


# Saving.


def _before_save(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    state = _state(module)
    root = state._find_root()
    saving = _savings.get(id(root))
    if saving is not None and saving.module is not module and any(m is module for m in saving.module.modules()):
        return  # inside of that
    if saving is not None:  # an exception ended it
        _end(root)
    states = _states_below(root)
    _mark(states)
    saving = _savings[id(root)] = _Saving(module, uses_of(states))
    job = job_of(root)
    if _shows_full_params(root):
        saving.shows_full = True
        return
    for outermost in root._modules:
        reshard(outermost)
    if _kind(state) == StateDictType.LOCAL_STATE_DICT:
        return
    if job is not None and job.alive and job.engine is not None:
        if not job.ranks.cut:
            job.engine.enter_full_params(False)
            saving.job = job
            return
        job.engine.wait_for_commit()
    params = list(dict.fromkeys(p for s in states if s._unit is not None for p in s._unit.fsdp_params))
    saving.ranges = _ranges_of(params)


def _ranges_of(params: list[Any]) -> dict[int, list[tuple[int, int]]]:
    """Returns by parameter and rank the first element and their number. Collective where a parameter is cut."""
    cut = [p for p in dict.fromkeys(params) if not _is_whole(p)]
    if not cut:
        return {}
    own = [(first, local.numel()) for first, local in (p.piece() for p in cut)]
    every: list[Any] = [None] * dist.get_world_size(group_of(cut[0]))
    dist.all_gather_object(every, own, group=group_of(cut[0]))
    return {id(param): [ranges[number] for ranges in every] for number, param in enumerate(cut)}


def _is_whole(param: Any) -> bool:
    return param.whole or dist.get_world_size(group_of(param)) == 1


def _end(root: ShardState) -> None:
    saving = _savings.pop(id(root))
    if saving.job is not None and saving.job.alive:
        saving.job.engine.leave_full_params()


def _whole(saving: _Saving, param: Any, only: int | None, on_host: bool = False) -> torch.Tensor | None:
    """Returns a copy of the whole, where the parameter is or in host memory; collective where there is no job.

    ``only``: for that rank of the shard group alone.
    """
    if only is not None and (saving.job is not None or _is_whole(param)) and dist.get_rank(group_of(param)) != only:
        return None
    if id(param) in saving.done:
        return saving.done[id(param)]
    shape = param._orig_size
    device = torch.device("cpu") if on_host else param.sharded_param.device
    if saving.job is not None:
        whole = torch.empty(shape, dtype=param.sharded_param.dtype, device=device)
        given = saving.job.engine.copy_full_parameter(saving.job.index_of(param), whole)
        assert given
    elif _is_whole(param):
        whole = param.local.reshape(shape).to(device, memory_format=torch.contiguous_format, copy=True)
    else:
        found = assemble(param.local, saving.ranges[id(param)], shape, param.sharded_param.dtype, group_of(param), only)
        if found is None:
            return None
        whole = found.to(device)
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
        _replace(module, state, saving, state_dict, prefix)
    except BaseException:
        _end(root)
        raise
    if saving.module is module:
        _end(root)
        if any(param.holder is not None for param in saving.uses.values()):
            order = {prefix + key: number for number, key in enumerate(keys_in_order(module, saving.uses))}
            for key in sorted((k for k in state_dict if k in order), key=order.__getitem__):
                state_dict[key] = state_dict.pop(key)


def _replace(module: nn.Module, state: ShardState, saving: _Saving, state_dict: dict[str, Any], prefix: str) -> None:
    kind, settings = _kind(state), settings_of(state)
    places = places_of(module, saving.uses)
    only = (
        0
        if kind == StateDictType.FULL_STATE_DICT
        and not _is_unsharded(state)  # as torch: each rank has all
        and getattr(settings.state_dict_config, "rank0_only", False)
        else None
    )
    for key in [k for k in state_dict if k.startswith(f"{prefix}_flat_param")]:
        del state_dict[key]
    for place in places:
        key = prefix + place.key
        if saving.shows_full:
            shown = place.module._parameters.get(place.name)
            value = getattr(place.module, place.name) if shown is None else shown
            if value.shape == place.param._orig_size:  # else another rank has it
                state_dict[key] = value.detach().clone()
            continue
        if kind == StateDictType.LOCAL_STATE_DICT:
            state_dict[key] = place.param.local
            continue
        if kind != StateDictType.FULL_STATE_DICT:
            state_dict[key] = _sharded(state, saving, place.param)
            continue
        whole = _whole(saving, place.param, only, bool(getattr(settings.state_dict_config, "offload_to_cpu", False)))
        if whole is None:
            state_dict.pop(key, None)
        else:
            state_dict[key] = whole
    if only is not None and dist.get_rank(state._unit.mesh_info.shard_process_group) != only:  # type: ignore[union-attr]
        for key in [k for k in state_dict if k.startswith(prefix)]:  # buffers, too
            del state_dict[key]


def _sharded(state: ShardState, saving: _Saving, param: Any) -> Any:
    """Returns the value of a sharded state dict; on a GPU the rows alone are taken there."""
    mesh = state.__dict__.get("_given_mesh")
    config: Any = settings_of(state).state_dict_config
    if mesh is None and getattr(config, "_use_dtensor", False):
        mesh = param.mesh_info.mesh
    if saving.job is None or not param._orig_size:
        whole = _whole(saving, param, None)
        assert whole is not None
    else:
        dim = None if mesh is None else mesh.ndim - 1
        rank = dist.get_rank(group_of(param)) if mesh is None else mesh.get_local_rank(dim)
        whole = _with_rows(
            saving.job, param, rank, dist.get_world_size(group_of(param)) if mesh is None else mesh.size(dim)
        )
    if mesh is None:
        return rows_as_sharded_tensor(whole, group_of(param))
    rows = rows_as_dtensor_of(whole, mesh)
    return rows.to("cpu") if getattr(config, "offload_to_cpu", False) and rows.is_cuda else rows


def _with_rows(job: Any, param: Any, rank: int, world: int) -> torch.Tensor:
    """Returns a whole of which only the rows of this rank have values, and take memory."""
    whole = torch.empty(param._orig_size, dtype=param.sharded_param.dtype)
    first, end = row_cuts(whole.shape[0], world)[rank : rank + 2]
    given = job.engine.copy_stored(job.index_of(param), first * whole[:1].numel(), whole[first:end].view(-1))
    assert given
    return whole


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
    states = _states_below(root)
    _mark([state])
    wraps = _WRAPPED if _WRAPPED[:-1] in module._modules else ""
    shows_full = _shows_full_params(root)
    if not shows_full:
        reshard(module)
        if (job := job_of(root)) is not None and job.alive:
            job.open_write(module)
    kind = settings_of(state).state_dict_type
    # A checkpoint wrapper that is a unit itself has given its part of the names to all keys already.
    below = prefix + (_CHECKPOINT_PREFIX if isinstance(module, ActivationWrapper) else "")
    clean = {clean_name(key): key for key in state_dict if key.startswith(prefix)}
    places = places_of(module, uses_of(states))
    ranges: dict[int, list[tuple[int, int]]] | None = None
    for place in places:
        key = below + place.key
        if key not in state_dict:  # a compiled module's prefix is there, or is not
            given = clean.get(clean_name(key), key)
            if given in state_dict:
                state_dict[key] = state_dict.pop(given)
        if key not in state_dict:
            if place.module._parameters.get(place.name) is None:  # in a FlatParameter, of which torch asks nothing
                missing.append(key)
            continue
        value = state_dict[key]
        param = place.param
        if value is param.sharded_param and not shows_full and not (param.whole and param.holder is None):
            # torch's set_model_state_dict puts the model's own where nothing was given.
            missing.append(key)
            _loaded(state_dict, key, place)
            continue
        if shows_full:
            _load_shown(module, place, key, value, errors)
            _loaded(state_dict, key, place)
            continue
        first, local = param.piece()
        if isinstance(value, DTensor | ShardedTensor):
            rows = None
            if value.size() == param._orig_size and not _is_whole(param):
                if ranges is None:
                    ranges = _ranges_of([p.param for p in places])
                rows = piece_of_rows(value, ranges[id(param)], group_of(param))
            if rows is None:
                value = whole_value(value)
            else:
                local.copy_(rows)
                _loaded(state_dict, key, place)
                continue
        if kind == StateDictType.LOCAL_STATE_DICT and value.shape == local.shape:
            local.copy_(value)
        elif value.shape == param._orig_size:
            local.copy_(value.reshape(-1)[first : first + local.numel()])
        else:
            errors.append(_size_mismatch(key, value, param))
        _loaded(state_dict, key, place)
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


def _load_shown(module: nn.Module, place: FlatPlace, key: str, value: Any, errors: list[str]) -> None:
    """Loads into what ``summon_full_params`` shows, which is written back with the context's other edits."""
    value = whole_value(value) if isinstance(value, DTensor | ShardedTensor) else value
    shown = place.module._parameters.get(place.name)
    if "_shows_full_params" not in module.__dict__:
        errors.append(f"load {key}: full parameters of other modules are summoned; summon these too, or load outside.")
    elif value.shape != place.param._orig_size:
        errors.append(_size_mismatch(key, value, place.param))
    elif shown is not None and module.__dict__["_shows_full_params"]:  # else rank 0 has it
        shown.copy_(value)


def _size_mismatch(key: str, value: torch.Tensor, param: Any) -> str:
    return (
        f"size mismatch for {key}: copying a param with shape {value.shape} from checkpoint, the shape in current model "
        f"is {param._orig_size}."
    )


def _loaded(state_dict: dict[str, Any], key: str, place: FlatPlace) -> None:
    if place.module._parameters.get(place.name) is None:
        del state_dict[key]  # the module has a view of the flat parameter there
    else:
        state_dict[key] = place.module._parameters[place.name]  # the very object: nothing is left to do


def _after_load(module: nn.Module, incompatible: Any) -> None:
    root = _state(module)._find_root()
    if (job := job_of(root)) is not None and job.alive and not _shows_full_params(root):
        job.commit_write(module)
    for keys in incompatible:
        keys[:] = [clean_name(key) for key in keys]
