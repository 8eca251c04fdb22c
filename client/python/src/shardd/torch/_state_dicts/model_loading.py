"""State dicts of any kind are loaded into a model with flat units.

Loading needs no other rank, but where values are sharded, of which each rank gets its piece, one at a time: what is whole is
cut here. LOCAL_STATE_DICT waits for the others where the load has to register the model first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_PREFIX, ActivationWrapper
from torch.distributed.fsdp import StateDictType
from torch.distributed.tensor import DTensor

from shardd.torch._job.job import job_of
from shardd.torch._job.whole_params import register_whole
from shardd.torch._ranks.gather import piece_of_rows, whole_value
from shardd.torch._state_dicts.flat_places import FlatPlace, group_of, places_of, uses_of
from shardd.torch._state_dicts.flat_units import (
    WRAPPED,
    flat_state_of,
    is_whole,
    mark,
    ranges_of,
    shows_full_params,
    states_below,
)
from shardd.torch._state_dicts.pieces import reshard
from shardd.torch._state_dicts.state_dict_type import settings_of
from shardd.torch._units.names import clean_name, flat_owner

__all__ = ["load"]

_LOCAL = (
    " LOCAL_STATE_DICT is for a model that is cut as the one that was saved, with the same optimizers: Muon of the daemon's, which "
    "is built before the load, has whole matrices over nodes; or use SHARDED_STATE_DICT."
)


@torch.no_grad()
def load(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    metadata: Any,
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """Copies the values of the unit of ``module``; leaves in ``state_dict`` what torch has nothing left to do with."""
    state = flat_state_of(module)
    root = state._find_root()
    states = states_below(root)
    mark([state])
    kind = settings_of(state).state_dict_type
    if kind == StateDictType.LOCAL_STATE_DICT and not shows_full_params(root):
        register_whole(root)  # each rank has saved the piece that the job gives it
    wraps = WRAPPED if WRAPPED[:-1] in module._modules else ""
    shows_full = shows_full_params(root)
    if not shows_full:
        reshard(module)
        job = job_of(root)
        if job is None:
            state.loaded = True
        elif job.alive:
            job.open_write(module)
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
            if value.size() == param._orig_size and not is_whole(param):
                if ranges is None:
                    ranges = ranges_of([p.param for p in places])
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
            errors.append(
                _size_mismatch(key, value, param) + (_LOCAL if kind == StateDictType.LOCAL_STATE_DICT else "")
            )
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
