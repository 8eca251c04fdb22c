"""What the units of a model leave alone: ignored modules and parameters, and ``replicate`` subtrees."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

from torch import nn

from shardd.torch._units.flat_shard_param import composable, is_sharded
from shardd.torch._units.state import state_of

__all__ = ["Ignored", "find_ignored"]


class Ignored:
    """What the units of one wrapper call leave alone."""

    def __init__(self, modules: set[nn.Module], params: set[nn.Parameter]) -> None:
        self.modules = modules
        self.params = params


def find_ignored(
    module: nn.Module,
    ignored_modules: Iterable[nn.Module] | None,
    ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None,
) -> Ignored:
    """Finds what is ignored, with everything below ignored modules, ``replicate`` subtrees, and what nested units ignore."""
    if ignored_modules is not None and ignored_states is not None:
        raise ValueError(
            "Cannot pass both ignored_modules and ignored_states at the same time. Please just pass ignored_states."
        )
    states: list[Any] = list(ignored_states) if ignored_states is not None else []
    roots: set[nn.Module] = set()
    params: set[nn.Parameter] = set()
    if states and all(isinstance(state, nn.Parameter) for state in states):
        params.update(states)
    elif all(isinstance(state, nn.Module) for state in states):
        roots.update(states)
    else:
        kinds = sorted({type(state) for state in states}, key=repr)
        raise ValueError(
            f"ignored_states expects all nn.Parameter or all nn.Module list elements but got types {kinds}"
        )
    given = list(ignored_modules) if ignored_modules is not None else []
    if not all(isinstance(item, nn.Module) for item in given):
        kinds = sorted({type(item) for item in given}, key=repr)
        raise ValueError(f"ignored_modules expects nn.Module list elements but got types {kinds}")
    roots.update(given)
    for ignored in roots:
        if state_of(ignored) is not None:
            raise ValueError("`ignored_modules` should not include FSDP modules")
    if module in roots:
        warnings.warn(
            "Trying to ignore the top-level module passed into the FSDP constructor itself will result in all parameters being "
            f"ignored and is not well-supported: {module}",
            stacklevel=4,
        )
    roots.update(m for m in module.modules() if not composable(m))
    modules = {below for root in roots for below in root.modules() if state_of(below) is None}
    params.update(p for m in modules for p in m.parameters(recurse=False) if not is_sharded(p))
    for below in module.modules():
        nested = getattr(state_of(below), "ignored", None)
        if isinstance(nested, Ignored):
            modules |= nested.modules
            params |= nested.params
    return Ignored(modules, params)
