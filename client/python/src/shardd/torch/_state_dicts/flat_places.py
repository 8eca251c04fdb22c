"""Where the parameters of flat units are in a model, and what state dicts call them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn

from shardd.torch._state_dicts.state_dict_type import flat_states
from shardd.torch._units.names import clean_name
from shardd.torch._units.state import ShardState, state_of

__all__ = ["FlatPlace", "Ranges", "flat_params_of", "group_of", "keys_in_order", "names_in", "places_of", "uses_of"]

# Of the names in a wrapper's state dict; compile's and DDP's components stay in it, as in torch's.
_STRIPPED = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module")

Uses = dict[tuple[int, str], Any]  # by module and name: the FlatShardParam
Ranges = list[dict[int, tuple[int, int]]]  # by rank, by number of the parameter: first element, number of elements


@dataclass
class FlatPlace:
    """One use of a parameter by a unit."""

    key: str  # in the unit's state dict, without its prefix
    module: nn.Module
    name: str
    param: Any  # FlatShardParam


def uses_of(states: list[ShardState]) -> Uses:
    """Returns who uses what where, of all units of a model, ties included."""
    found: Uses = {}
    for state in states:
        assert state._unit is not None
        for param in state._unit.fsdp_params:
            for use in param.uses:
                found[id(use.module), use.name] = param
    return found


def _modules(module: nn.Module, path: str, root: bool) -> Iterator[tuple[str, nn.Module]]:
    if not root and state_of(module) is not None:
        return  # its own hooks do that
    yield path, module
    for name, child in module._modules.items():  # a module that is there twice has both names
        if child is None:
            continue
        yield from _modules(child, path if name in _STRIPPED else f"{path}{name}.", False)


def places_of(module: nn.Module, uses: Uses) -> list[FlatPlace]:
    """Returns what the unit of ``module`` uses, in the order of the modules."""
    by_module: dict[int, list[tuple[str, Any]]] = {}
    for (number, name), param in uses.items():
        by_module.setdefault(number, []).append((name, param))
    return [
        FlatPlace(path + name, inner, name, param)
        for path, inner in _modules(module, "", True)
        for name, param in by_module.get(id(inner), ())
    ]


def keys_in_order(module: nn.Module, uses: Uses) -> list[str]:
    """Returns the keys of ``module``'s state dict module by module, as the bare one's are; ``FlatParameter``s do not keep that order."""
    by_module: dict[int, list[str]] = {}
    for number, name in uses:
        by_module.setdefault(number, []).append(name)

    def visit(inner: nn.Module, path: str) -> Iterator[str]:
        # As torch's: what a FlatParameter has comes after what the module has kept, which is ignored.
        names = [*inner._parameters, *by_module.get(id(inner), ()), *inner._buffers, "_extra_state"]
        yield from (path + name for name in names)
        for name, child in inner._modules.items():
            if child is not None:
                yield from visit(child, path if name in _STRIPPED else f"{path}{name}.")

    return list(dict.fromkeys(visit(module, "")))


def names_in(module: nn.Module, flat_param: Any) -> list[str]:
    """Returns the names that its state dict has for the parameters in a ``FlatParameter`` of ``module``'s unit; tied ones have one name."""
    state = state_of(module)
    assert state is not None
    found: dict[int, str] = {}
    for place in places_of(module, uses_of([state])):
        if place.param.holder is not None and place.param.sharded_param is flat_param:
            found.setdefault(id(place.param), place.key)
    return list(found.values())


def flat_params_of(model: nn.Module) -> dict[str, Any]:
    """Returns all flat parameters below ``model`` by clean name, in the order of its modules; tied ones under each name."""
    states = flat_states(model)
    roots = {id(root): root for state in states for root in (state._find_root(),)}
    uses = uses_of([state for root in roots.values() for state in flat_states(root._modules[0])])
    by_module: dict[int, list[tuple[str, Any]]] = {}
    for (number, name), param in uses.items():
        by_module.setdefault(number, []).append((name, param))
    found: dict[str, Any] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, param in by_module.get(id(module), ()):
            found.setdefault(clean_name(f"{path}.{name}" if path else name), param)
    return found


def group_of(param: Any) -> dist.ProcessGroup:
    """Returns the ranks that have the parameter between them."""
    return param.mesh_info.shard_process_group
