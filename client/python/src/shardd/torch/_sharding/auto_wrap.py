"""torch's wrap policies, which decide the submodules that become units of their own."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.distributed.fsdp import wrap
from torch.distributed.fsdp._common_utils import _override_module_mixed_precision
from torch.distributed.fsdp._wrap_utils import _warn_on_overridden_mixed_precision

from shardd.torch._units.names import WRAPPED_MODULE
from shardd.torch._units.state import state_of

__all__ = ["auto_wrap", "warn_unmatched"]


def auto_wrap(
    root: nn.Module,
    policy: Any,
    ignored_modules: set[nn.Module],
    ignored_params: set[nn.Parameter],
    kwargs: dict[str, Any],
    wrapper: Callable[..., Any],
) -> None:
    """Applies ``wrapper(submodule, **kwargs)`` below ``root``, children first. ``policy``: any kind that torch takes."""
    for name, module in root.named_modules():
        if state_of(module) is not None:
            raise ValueError(
                f"FSDP auto wrapping requires modules to not already have FSDP applied but found {name} in\n{root}"
            )
    _wrap_below(root, policy, ignored_modules, ignored_params, kwargs, wrapper)
    _put_under_all_names(root)
    warn_unmatched(policy, root, any(state_of(module) is not None for module in root.modules()))


def _wrap_below(
    root: nn.Module,
    policy: Any,
    ignored_modules: set[nn.Module],
    ignored_params: set[nn.Parameter],
    kwargs: dict[str, Any],
    wrapper: Callable[..., Any],
) -> None:
    mixed_precision = kwargs["mixed_precision"]
    apart = () if mixed_precision is None else mixed_precision._module_classes_to_ignore  # BatchNorm: full precision
    if apart:  # their inputs are cast to fp32, and their outputs back
        _warn_on_overridden_mixed_precision(_override_module_mixed_precision(root, apart))
    if isinstance(policy, wrap._Policy):
        targets = policy._run_policy(root, ignored_modules, {**kwargs, "auto_wrap_policy": None})
        if apart:
            targets = wrap._run_mixed_precision_override_policy(root, apart, ignored_modules, kwargs, targets)
        wrap._post_order_apply(root, wrap._construct_wrap_fn(root, targets, wrapper))
        return
    if apart:
        alone = functools.partial(wrap._wrap_module_cls_individually, module_classes=apart)
        policy = functools.partial(wrap._or_policy, policies=[policy, alone])
    wrap._recursive_wrap(
        module=root,
        auto_wrap_policy=policy,
        wrapper_cls=wrapper,
        ignored_modules=ignored_modules,
        ignored_params=ignored_params,
        only_wrap_children=True,
        **kwargs,
    )


def _put_under_all_names(root: nn.Module) -> None:
    """A module that the model has under several names is wrapped under one by torch's policies, which go through children once."""
    wrapped = {
        id(inner): module
        for module in root.modules()
        if state_of(module) is not None and (inner := module._modules.get(WRAPPED_MODULE)) is not None
    }
    for module in list(root.modules()):
        for name, child in module._modules.items():
            unit = wrapped.get(id(child))
            if unit is not None and unit is not module:
                setattr(module, name, unit)


def warn_unmatched(policy: Any, root: nn.Module, found: bool) -> None:
    """Warns where a policy that was applied below ``root`` names classes that no module has, or has ``found`` no module."""
    of_root = type(root).__name__
    classes = _classes_of(policy)
    missing = [c.__name__ for c in classes if not any(isinstance(module, c) for module in root.modules())]
    if missing:
        warnings.warn(
            f"wrap policy of {of_root}: no module in it is a {' or a '.join(sorted(missing))}, so nothing is made a unit "
            "of its own by that name; look for the class in print(model)",
            stacklevel=4,
        )
    elif not classes and not found:
        named = policy.func if isinstance(policy, functools.partial) else policy
        warnings.warn(
            f"wrap policy {getattr(named, '__name__', type(named).__name__)} selects no module of {of_root}: all of it is "
            "one unit, which is unsharded at once",
            stacklevel=4,
        )


def _classes_of(policy: Any) -> tuple[type, ...]:
    """Returns the module classes that a policy names; none where it decides otherwise."""
    if isinstance(policy, functools.partial):
        named = policy.keywords.get("transformer_layer_cls") or policy.keywords.get("module_classes") or ()
    else:
        named = getattr(policy, "_module_classes", policy)
    if isinstance(named, type):
        return (named,)
    return tuple(c for c in named if isinstance(c, type)) if isinstance(named, Iterable) else ()
