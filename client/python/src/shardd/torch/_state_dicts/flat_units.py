"""What saving and loading of a model with flat units both ask of it."""

from __future__ import annotations

import warnings
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import ShardingStrategy, StateDictType

from shardd.torch._job.job import job_of
from shardd.torch._state_dicts.flat_places import group_of
from shardd.torch._state_dicts.state_dict_type import flat_states, mark_dtensors, settings_of
from shardd.torch._units.state import ShardState, state_of

__all__ = [
    "WRAPPED",
    "flat_state_of",
    "is_unsharded",
    "is_whole",
    "kind_of",
    "mark",
    "ranges_of",
    "shows_full_params",
    "states_below",
]

WRAPPED = "_fsdp_wrapped_module."


def flat_state_of(module: nn.Module) -> ShardState:
    """Returns the state of a module that carries a unit."""
    state = state_of(module)
    assert state is not None and state._unit is not None
    return state


def shows_full_params(root: ShardState) -> bool:
    """Whether the program is inside ``summon_full_params``."""
    job = job_of(root)
    return job is not None and job.engine is not None and job.engine.full_params


def states_below(root: ShardState) -> list[ShardState]:
    """Returns the states of all flat units of the model."""
    return list(dict.fromkeys(state for module in root._modules for state in flat_states(module)))


def is_unsharded(state: ShardState) -> bool:
    """Whether the unit is NO_SHARD."""
    return getattr(state._unit, "strategy", None) == ShardingStrategy.NO_SHARD


def kind_of(state: ShardState) -> StateDictType:
    """Returns the kind of the unit's next state dict, with torch's warning where it is not the one that was set."""
    if is_unsharded(state):
        if settings_of(state).state_dict_type != StateDictType.FULL_STATE_DICT:
            warnings.warn(
                "When using ``NO_SHARD`` for ``ShardingStrategy``, full_state_dict will be returned.", stacklevel=3
            )
        return StateDictType.FULL_STATE_DICT
    return settings_of(state).state_dict_type


def mark(states: list[ShardState]) -> None:
    """Says in the settings of the units whose sharded state dicts are of DTensors that they are, as torch does."""
    for state in states:
        if not is_unsharded(state):
            mark_dtensors(state, settings_of(state).state_dict_config)


def ranges_of(params: list[Any]) -> dict[int, list[tuple[int, int]]]:
    """Returns by parameter and rank the first element and their number. Collective where a parameter is cut."""
    cut = [p for p in dict.fromkeys(params) if not is_whole(p)]
    if not cut:
        return {}
    own = [(first, local.numel()) for first, local in (p.piece() for p in cut)]
    every: list[Any] = [None] * dist.get_world_size(group_of(cut[0]))
    dist.all_gather_object(every, own, group=group_of(cut[0]))
    return {id(param): [ranges[number] for ranges in every] for number, param in enumerate(cut)}


def is_whole(param: Any) -> bool:
    """Whether this rank has all of the parameter."""
    return param.whole or dist.get_world_size(group_of(param)) == 1
