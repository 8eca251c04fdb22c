"""Which kind of state dict the wrappers of a model give: ``state_dict_type`` and its relatives."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)

from shardd.torch._units.state import ShardState, state_of

__all__ = [
    "current_settings",
    "flat_states",
    "get_state_dict_type",
    "mark_dtensors",
    "set_state_dict_type",
    "settings_of",
    "state_dict_type",
]

_CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}


def _default() -> StateDictSettings:
    kind = StateDictType.FULL_STATE_DICT
    config, optim_config = _CONFIGS[kind]
    return StateDictSettings(kind, config(), optim_config())


def flat_states(module: nn.Module) -> list[ShardState]:
    """Returns the states of the units with flat parameters in ``module``, itself included, from the outside in."""
    found: dict[int, ShardState] = {}
    for inner in module.modules():
        state = state_of(inner)
        if state is not None and getattr(state._unit, "layout", "") == "flat":
            found.setdefault(id(state), state)
    return list(found.values())


def settings_of(state: ShardState) -> StateDictSettings:
    """Returns the settings of the unit's next state dict."""
    settings = state.__dict__.get("_state_dict_settings")
    if settings is None:
        settings = state.__dict__["_state_dict_settings"] = _default()
    return settings


def _common(states: list[ShardState]) -> StateDictSettings | None:
    settings = None
    for state in states:
        own = settings_of(state)
        if settings is not None and settings.state_dict_type != own.state_dict_type:
            raise AssertionError("All FSDP module should have the same state_dict_type.")
        if settings is not None and (
            type(settings.state_dict_config) is not type(own.state_dict_config)
            or type(settings.optim_state_dict_config) is not type(own.optim_state_dict_config)
        ):
            raise AssertionError("All FSDP modules must have the same type of state_dict_config.")
        settings = settings or own
    return settings


def set_state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> StateDictSettings:
    """Sets the kind for all wrappers in ``module``; returns what was set before. The configurations have to be of the kind's classes."""
    config_class, optim_class = _CONFIGS[state_dict_type]
    config = config_class() if state_dict_config is None else state_dict_config
    optim_config = optim_class() if optim_state_dict_config is None else optim_state_dict_config
    if type(config) is not config_class:
        raise RuntimeError(f"Expected state_dict_config of type {config_class} but got {type(config)}")
    if type(optim_config) is not optim_class:
        raise RuntimeError(f"Expected optim_state_dict_config of type {optim_class} but got {type(optim_config)}")
    states = flat_states(module)
    before = _common(states)
    for state in states:
        state.__dict__["_state_dict_settings"] = StateDictSettings(state_dict_type, config, optim_config)
    return before or _default()


def current_settings(module: nn.Module) -> StateDictSettings:
    """Returns the common settings of all wrappers in ``module``, as they were set."""
    return _common(flat_states(module)) or _default()


def mark_dtensors(state: ShardState, config: StateDictConfig | OptimStateDictConfig) -> None:
    """As torch does with what is set for a unit that was given a device mesh: its sharded state dicts are of DTensors.

    Of LOCAL_STATE_DICT, which torch refuses there, it is this rank's pieces.
    """
    kind = settings_of(state).state_dict_type
    if state.__dict__.get("_given_mesh") is not None and kind != StateDictType.LOCAL_STATE_DICT:
        config._use_dtensor = True  # type: ignore[union-attr]  # the full ones have no such field, and get it


def get_state_dict_type(module: nn.Module) -> StateDictSettings:
    """Returns the common settings of all wrappers in ``module``; AssertionError where they differ."""
    states = flat_states(module)
    for state in states[1:]:
        first, own = settings_of(states[0]), settings_of(state)
        if own != first:
            raise AssertionError(f"All FSDP modules must have the same state dict settings.Got {own} and {first}.")
    for state in states:
        mark_dtensors(state, settings_of(state).optim_state_dict_config)
    return current_settings(module)


@contextlib.contextmanager
def state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> Iterator[None]:
    """As ``set_state_dict_type``, for the body."""
    before = set_state_dict_type(module, state_dict_type, state_dict_config, optim_state_dict_config)
    try:
        yield
    finally:
        set_state_dict_type(module, before.state_dict_type, before.state_dict_config, before.optim_state_dict_config)
