"""torch's ``MixedPrecision`` of wrapped modules: what the daemon casts, what is cast here, and what checkpoints get back.

Parameters and gradients: param_dtype, reduce_dtype and keep_low_precision_grads go into the plan, each module's own; no
cast where dtypes already agree. Inputs are cast where a module's forward begins. Buffers, which the daemon does not have,
are cast once, where the root is first used, and have their own dtypes in checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp._common_utils import clean_tensor_name

from shardd.torch._process import environment

__all__ = ["BufferDtypes", "UnitPrecision", "cast_buffers", "full_precision_in_eval", "input_dtype"]


def input_dtype(policy: MixedPrecision, is_root: bool) -> torch.dtype | None:
    """Returns the dtype that floating point inputs of a module are cast to; None where they are not."""
    casts = policy.cast_forward_inputs or (is_root and policy.cast_root_forward_inputs)
    return policy.param_dtype if casts else None


def full_precision_in_eval() -> bool:
    """``FSDP_USE_FULL_PREC_IN_EVAL=1``: modules in eval mode compute with what is stored. Read where a module is wrapped."""
    return environment.value(environment.FULL_PRECISION_IN_EVAL) == "1"


@dataclass
class BufferDtypes:
    """The buffers of a wrapped module and of those inside it, by clean name, with the dtypes that they had then."""

    module: nn.Module
    compute: torch.dtype | None  # None: as they are
    ignored: frozenset[str] = frozenset()  # clean names
    original: dict[str, torch.dtype] = field(init=False)

    def __post_init__(self) -> None:
        self.original = {clean_tensor_name(name): buffer.dtype for name, buffer in self.module.named_buffers()}

    def restore(self, state_dict: dict[str, Any], prefix: str = "") -> None:
        """Gives the module's buffers in a state dict their own dtypes. Those of the model stay as they are."""
        if self.compute is None:
            return
        for key, value in state_dict.items():
            if not key.startswith(prefix) or not torch.is_tensor(value):
                continue
            name = clean_tensor_name(key[len(prefix) :])
            dtype = self.original.get(name)
            if dtype is not None and name not in self.ignored and value.dtype != dtype and dtype.is_floating_point:
                state_dict[key] = value.to(dtype)

    @torch.no_grad()
    def cast_to_original(self) -> None:
        """Casts the model's own buffers for a forward in full precision."""
        for name, buffer in self.module.named_buffers():
            dtype = self.original.get(clean_tensor_name(name))
            if dtype is not None:
                _cast(buffer, dtype)


@torch.no_grad()
def cast_buffers(parts: Iterable[BufferDtypes]) -> None:
    """Casts the buffers of a root's wrapped modules, outermost first in ``parts``: a buffer goes by the innermost module
    around it. A buffer object stays the same."""
    seen: set[int] = set()
    for part in reversed(list(parts)):
        for name, buffer in part.module.named_buffers():
            if id(buffer) in seen:
                continue
            seen.add(id(buffer))
            if part.compute is not None and clean_tensor_name(name) not in part.ignored:
                _cast(buffer, part.compute)


def _cast(buffer: torch.Tensor, dtype: torch.dtype) -> None:
    if buffer.is_floating_point() and buffer.dtype != dtype:
        buffer.data = buffer.to(dtype)


class UnitPrecision:
    """The precision of one unit in layout ``flat``; ``module`` carries its hooks and has no enclosing unit so far."""

    def __init__(self, module: nn.Module, policy: MixedPrecision | None, ignored_modules: set[nn.Module]) -> None:
        self.policy = policy or MixedPrecision()
        lower = self.policy.param_dtype is not None or self.policy.reduce_dtype is not None
        self.full_in_eval = lower and full_precision_in_eval()
        ignored = {
            clean_tensor_name(f"{name}.{buffer}" if name else buffer)
            for name, inner in module.named_modules()
            if inner in ignored_modules
            for buffer in inner._buffers
        }
        self.buffers = BufferDtypes(module, self.policy.buffer_dtype, frozenset(ignored))
        self.buffers_are_full = False

    def gradient_dtype(self, stored: torch.dtype) -> torch.dtype:
        """Returns the dtype of ``.grad`` of a parameter that is stored as ``stored``."""
        low = self.policy.param_dtype
        kept = self.policy.keep_low_precision_grads and low is not None and stored.is_floating_point
        return low if kept and low is not None else stored
