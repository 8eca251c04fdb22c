"""``torch.distributed.checkpoint.state_dict`` on models of both layouts.

Of DTensors it gathers what is in a job's memory from there (full_state_dict.py). For flat units: that module asks ``isinstance(module, FullyShardedDataParallel)`` of torch's class and calls its static methods. In it, and
nowhere else, the name is given another class, which passes on to torch's for torch's models and answers for ours.
"""

from __future__ import annotations

import importlib
from typing import Any

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP

from shardd.torch._state_dicts import full_state_dict, optim_state_dict, optim_state_dict_load, state_dict_type
from shardd.torch._state_dicts.flat_places import names_in
from shardd.torch._units.names import clean_name
from shardd.torch._units.state import state_of

__all__ = ["install"]

_WRAPPER = "_fsdp_wrapped_module"
_FLAT = "_flat_param"
_PLAIN = "__class__"  # every module has it

target: Any = importlib.import_module("torch.distributed.checkpoint.state_dict")


class _Unit:
    """What is asked of a wrapper there, of any flat unit."""

    def __init__(self, state: Any) -> None:
        unit = state._unit
        self.sharding_strategy = unit.strategy
        self.process_group = unit.mesh_info.shard_process_group


def _is_wrapper(module: Any) -> bool:
    return isinstance(module, nn.Module) and _WRAPPER in module._modules and state_of(module) is not None


class _Either(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, TorchFSDP) or _is_wrapper(instance)


class _FSDP(metaclass=_Either):
    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[Any]:
        states = state_dict_type.flat_states(module)
        return [_Unit(state) for state in states] or list(TorchFSDP.fsdp_modules(module, root_only))

    @staticmethod
    def state_dict_type(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        ours = bool(state_dict_type.flat_states(module))
        return (state_dict_type.state_dict_type if ours else TorchFSDP.state_dict_type)(module, *args, **kwargs)

    @staticmethod
    def optim_state_dict(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        ours = bool(state_dict_type.flat_states(model))
        return (optim_state_dict.optim_state_dict if ours else TorchFSDP.optim_state_dict)(model, *args, **kwargs)

    @staticmethod
    def optim_state_dict_to_load(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        ours = bool(state_dict_type.flat_states(model))
        load = optim_state_dict_load.optim_state_dict_to_load if ours else TorchFSDP.optim_state_dict_to_load
        return load(model, *args, **kwargs)


_theirs = target._get_module_fsdp_state_if_fully_sharded_module


def _state_if_fully_sharded(module: Any) -> Any:
    return module if isinstance(module, _Unit) else _theirs(module)


def _process_group(model: Any, info: Any) -> Any:
    if _is_wrapper(model):
        model, info.fsdp_modules = None, [_Unit(state_of(model))]
    return _their_process_group(model, info)


_their_process_group: Any = getattr(target, "_get_fsdp_process_group", None)  # torch_versions.py


def _gather(state_dict: dict[str, Any], **options: Any) -> dict[str, Any]:
    return full_state_dict.gather(_their_gather, state_dict, **options)


_their_gather = target._gather_state_dict


def _model_state_dict(model: nn.Module, info: Any) -> Any:
    if not info.full_state_dict:
        return _their_model_state_dict(model, info)
    with full_state_dict.shown():  # what is gathered is in the job's memory
        return _their_model_state_dict(model, info)


_their_model_state_dict = target._get_model_state_dict


def _fqns(model: nn.Module, name: str, *args: Any, **kwargs: Any) -> Any:
    """As torch's: of a ``FlatParameter`` the names of all parameters in it. A unit may have several; torch's has one.

    A unit that is in a checkpoint wrapper is no part of the names; torch's function leaves it there, and finds nothing.
    """
    *path, last = name.split(".")
    if _WRAPPER not in path:
        return _their_fqns(model, name, *args, **kwargs)
    unit, module = None, model
    for part in ("", *path):
        module = getattr(module, part) if part else module
        unit = module if state_of(module) is not None else unit
    if unit is None:
        return _their_fqns(model, name, *args, **kwargs)
    param = module._parameters.get(last) if last.startswith(_FLAT) else None
    # Instead of a FlatParameter something plain is asked of, for the prefix, with what the options leave in it.
    asked = name if param is None else ".".join([*path, _PLAIN])
    found = {fqn.replace(f"{_WRAPPER}.", "") for fqn in _their_fqns(model, asked, *args, **kwargs)}
    if param is None:
        return found
    (prefix,) = (fqn.removesuffix(_PLAIN) for fqn in found)
    return {prefix + clean_name(fqn) for fqn in names_in(unit, param)}


_their_fqns = target._get_fqns


def _unflatten(optim: Any, state_dict: dict[str, Any], info: Any) -> Any:
    """torch's takes what this rank's optimizer has state of: a rank without an element of a parameter has none, but its
    rows of the saved tensors are in other ranks' pieces."""
    found = _their_unflatten(optim, state_dict, info)
    for fqn, entry in found["state"].items() if info.fsdp_modules else ():
        if not entry:
            prefix = f"state.{fqn}."
            entry.update({k[len(prefix) :]: value for k, value in state_dict.items() if k.startswith(prefix)})
    return found


_their_unflatten = target._unflatten_optim_state_dict


def install() -> None:
    """Puts shardd's answers in; it may be called more than once."""
    if target.FSDP is not _FSDP:
        target.FSDP = _FSDP
        target._gather_state_dict = _gather
        target._get_model_state_dict = _model_state_dict
        target._get_fqns = _fqns
        target._unflatten_optim_state_dict = _unflatten
        target._get_module_fsdp_state_if_fully_sharded_module = _state_if_fully_sharded
        if _their_process_group is not None:
            target._get_fsdp_process_group = _process_group
