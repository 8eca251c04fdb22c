"""A frozen weight of several tensors, as NF4 is: 8-bit codes and a scale for each row."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

aten = torch.ops.aten


class Codes(torch.Tensor):
    """What it stands for is ``codes * scales``."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scales: torch.Tensor, size: Any = None) -> Codes:
        return torch.Tensor._make_wrapper_subclass(cls, size or codes.size(), dtype=scales.dtype)  # type: ignore[attr-defined,no-any-return]

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor, size: Any = None) -> None:
        self.codes, self.scales = codes, scales

    @staticmethod
    def of(values: torch.Tensor) -> Codes:
        scales = values.abs().amax(1, keepdim=True) / 127
        return Codes((values / scales).round().to(torch.int8), scales)

    def values(self) -> torch.Tensor:
        return self.codes * self.scales

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scales"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], _: Any, size: Any, stride: Any) -> Codes:
        return Codes(inner["codes"], inner["scales"], size)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        it, rest = args[0], args[1:]
        if func is aten.split.Tensor:
            parts = zip(it.codes.split(rest[0]), it.scales.split(rest[0]))
            return [Codes(codes, scales) for codes, scales in parts]
        if func is aten.new_zeros.default:
            return Codes(it.codes.new_zeros(rest[0]), it.scales.new_zeros(rest[0][0], 1))
        if func is aten.slice.Tensor:
            return Codes(func(it.codes, *rest), func(it.scales, *rest))
        if func is aten.copy_.default:
            it.codes.copy_(rest[0].codes)
            it.scales.copy_(rest[0].scales)
            return it
        if func in (aten.view.default, aten.as_strided.default):
            return Codes(it.codes, it.scales, it.codes.view(rest[0]).size())
        if func in (aten.detach.default, aten.clone.default, aten.empty_like.default):
            return Codes(func(it.codes), func(it.scales), it.size())
        raise NotImplementedError(f"{func} of Codes")

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.codes, self.scales), mesh.size()

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None) -> Any:
        values = (outputs[0] * outputs[1]).to(param_dtype)
        if out is None:
            return values, (values,)
        with torch.no_grad(), _unsafe_preserve_version_counter(out):
            out.copy_(values)
        return None


class Adapted(nn.Module):
    """A frozen weight, and an adapter that is trained."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(Codes.of(torch.randn(outputs, inputs) / 3), requires_grad=False)
        self.a, self.b = nn.Linear(inputs, 3, bias=False), nn.Linear(3, outputs, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ self.weight.t() + self.b(self.a(x)))
