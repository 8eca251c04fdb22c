"""What torch 2.15 has and 2.13 has not, and shardd does not serve: refused by name, where it would else do nothing without a word."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

__all__ = ["refuse_grad_dtypes", "refuse_overrides", "refusing_methods"]

_INSTEAD = {
    "finalize_backward": "a backward ends by itself; leave it out",
    "set_keep_unsharded_storage": "the daemon owns the unsharded parameters; set_reshard_after_forward(False) keeps them in place",
    "set_manual_backward_finalization": "a backward ends by itself; set_requires_gradient_sync(False) leaves a reduction out",
}


def _refusing(name: str, instead: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"FSDPModule.{name} of a {type(self).__name__}: shardd does not serve it (got torch {torch.__version__}, want what torch "
            f"2.13 has); {instead}"
        )

    method.__name__ = name
    return method


def refusing_methods() -> dict[str, Callable[..., Any]]:
    """Returns those that this torch has, by name."""
    return {name: _refusing(name, instead) for name, instead in _INSTEAD.items() if hasattr(FSDPModule, name)}


def refuse_overrides(mp_policy: MixedPrecisionPolicy) -> None:
    """Raises where parameters of one unit are to be gathered in several dtypes."""
    override = getattr(mp_policy, "param_dtype_override_fn", None)
    if override is not None:
        raise NotImplementedError(
            f"fully_shard: mp_policy: param_dtype_override_fn (got {override!r}, want None): a unit's parameters have one dtype; "
            "apply fully_shard to modules of their own with another MixedPrecisionPolicy"
        )


def refuse_grad_dtypes(modules: tuple[nn.Module, ...], ignored: Collection[nn.Parameter] | None) -> None:
    """Raises where the program has set the dtype of a parameter's gradients, which ``fully_shard`` of torch 2.15 follows."""
    for module in modules:
        for name, param in module.named_parameters():
            # Earlier ones have no such attribute, and their fully_shard drops the dtype.
            if not getattr(param, "_has_grad_dtype_override", False) or param in (ignored or ()):
                continue
            if param.grad_dtype != param.dtype:
                raise NotImplementedError(
                    f'fully_shard: parameter "{name}" of {type(module).__name__}: grad_dtype (got {param.grad_dtype}, want '
                    f"{param.dtype}): gradients have the dtype of their parameter; leave grad_dtype alone, or add gradients in "
                    "another dtype with MixedPrecisionPolicy.reduce_dtype"
                )
