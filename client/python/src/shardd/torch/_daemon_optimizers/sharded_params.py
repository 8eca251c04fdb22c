"""Which parameters that an optimizer is given are sharded, and of which models."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from shardd.torch._job.binding import own_uses
from shardd.torch._units.state import ShardState, root_states, units

__all__ = ["name_of", "roots_with", "sharded_ids"]


def roots_with(params: Iterable[Any]) -> list[ShardState]:
    """Returns the roots of the models that have one of these parameters."""
    wanted = {id(p) for p in params}
    found: list[ShardState] = []
    for root in root_states():
        for module in root._modules[0].modules():
            if any(id(p) in wanted for p in module._parameters.values()):
                found.append(root)
                break
    return found


def sharded_ids() -> set[int]:
    """Returns ids of the sharded parameters of this process, and of what is in their place: the program's, or unsharded ones.

    An optimizer that is given unsharded ones leaves them alone, as with PyTorch: their gradients are elsewhere.
    """
    found: set[int] = set()
    for unit in units():
        for fsdp_param in unit.fsdp_params:
            found.add(id(fsdp_param.sharded_param))
            found.update(id(module._parameters.get(name)) for module, name in own_uses(unit, fsdp_param))
    return found


def name_of(param: Any) -> str:
    """Returns the parameter's name in its model, for messages."""
    for root in root_states():
        for name, other in root._modules[0].named_parameters():
            if other is param:
                return f'"{name}"'
    return "of no fully sharded model"
