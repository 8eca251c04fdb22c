"""A weight that is stored as it is and gathered in 8 bits with a scale, as torchao's are; it notes how it is called."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

aten = torch.ops.aten
_KEPT = {
    aten.detach.default,
    aten.empty_like.default,
    aten.new_zeros.default,
    aten.slice.Tensor,
    aten.copy_.default,
    aten.view.default,
    aten.as_strided.default,
    aten._to_copy.default,
    aten.split.Tensor,
    aten.clone.default,
}
calls: list[Any] = []


class Low(torch.Tensor):
    """Its scale is of all ranks' elements, for which it asks them within ``fsdp_pre_all_gather``."""

    @staticmethod
    def __new__(cls, data: torch.Tensor) -> Low:
        return torch.Tensor._make_wrapper_subclass(
            cls, data.size(), strides=data.stride(), dtype=data.dtype, device=data.device
        )  # type: ignore[attr-defined,no-any-return]

    def __init__(self, data: torch.Tensor) -> None:
        self._data = data

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["_data"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], _: Any, size: Any, stride: Any) -> Low:
        return Low(inner["_data"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        plain = pytree.tree_map_only(Low, lambda low: low._data, (args, kwargs or {}))
        result = func(*plain[0], **plain[1])
        if func not in _KEPT:
            return result
        if func is aten.copy_.default:
            return args[0]
        return pytree.tree_map_only(torch.Tensor, cls, result)

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> Any:
        calls.append(("pre", tuple(mesh.shape), outer_size, outer_stride, type(module).__name__, mp_policy, self.shape))
        amax = self._data.abs().amax() if self._data.numel() else torch.zeros(())
        dist.all_reduce(amax, dist.ReduceOp.MAX, group=mesh.get_group())
        scale = amax.clamp(min=1e-12) / 127
        rows = -(-outer_size[0] // mesh.size())
        low = torch.zeros(rows, *outer_size[1:], dtype=torch.int8)
        low[: self.shape[0]] = (self._data / scale).round().to(torch.int8)
        return (low,), (scale,)

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None) -> Any:
        calls.append(("post", [(o.shape, o.dtype) for o in outputs], param_dtype, out is not None))
        (low,), (scale,) = outputs, metadata
        values = (low.float() * scale).to(param_dtype)
        if out is None:
            return values, (values,)
        with torch.no_grad(), _unsafe_preserve_version_counter(out):
            out.copy_(values[: out.shape[0]])
        return None


class OldLow(Low):
    """With the older signature, and in bf16."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:  # type: ignore[override]
        calls.append(("pre", tuple(mesh.shape), self.shape))
        return (self._data.bfloat16(),), None

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None) -> Any:
        return super().fsdp_post_all_gather(outputs, (1.0,), param_dtype, out=out)


def lower(model: nn.Module, kind: type[Low] = Low) -> None:
    """Makes the matrices of the model's linear layers such weights."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(kind(module.weight.detach().clone()), module.weight.requires_grad)
