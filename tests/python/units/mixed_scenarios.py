"""What ranks do in the tests of mixed precision: the same program on torch's FullyShardedDataParallel and on shardd's."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp._common_utils import clean_tensor_name
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

BF16 = torch.bfloat16
SEEN = ("input", "weight", "buffers", "output")


class Scaled(nn.Module):
    """Buffers of several dtypes, one of which has the name of another module's."""

    def __init__(self, width: int, first: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("scale", torch.full((width,), 1.001, dtype=first))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("hidden", torch.full((1,), 0.3, dtype=torch.float32), persistent=False)
        self.seen: dict[str, Any] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x.to(self.linear.weight.dtype)) * self.scale.to(x.dtype) + self.hidden.to(x.dtype)
        self.seen = {
            "input": x.dtype,
            "weight": self.linear.weight.dtype,
            "buffers": [b.dtype for b in (self.scale, self.count, self.hidden)],
            "output": y.dtype,
        }
        return y


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Scaled(12, torch.float32)
        self.second = Scaled(12, torch.float64)
        self.norm = nn.BatchNorm1d(12)
        self.head = nn.Linear(12, 5)
        self.register_buffer("scale", torch.full((12,), 0.5, dtype=torch.float64))
        self.seen: dict[str, Any] = {}

    def forward(self, x: torch.Tensor, *, bias: torch.Tensor | None = None) -> torch.Tensor:
        self.seen = {"input": x.dtype, "bias": None if bias is None else bias.dtype, "scale": self.scale.dtype}
        x = self.second(torch.tanh(self.first(x)))
        if isinstance(self.norm, nn.LayerNorm):
            x = x.to(self.norm.weight.dtype)
        normed = self.norm(x)
        self.seen.update(norm_in=x.dtype, norm_out=normed.dtype, norm_weight=self.norm.weight.dtype)
        y = self.head((normed * self.scale.to(normed.dtype)).to(self.head.weight.dtype))
        return y if bias is None else y + bias.to(y.dtype)


KINDS: dict[str, tuple[Any, ...]] = {
    # mixed precision of the model, and of its second part where that is wrapped by hand
    "all": (MixedPrecision(param_dtype=BF16, reduce_dtype=torch.float32, buffer_dtype=BF16),),
    "bf16": (MixedPrecision(param_dtype=BF16),),
    "kept": (MixedPrecision(param_dtype=BF16, keep_low_precision_grads=True),),
    "reduce": (MixedPrecision(reduce_dtype=BF16),),
    "buffers": (MixedPrecision(buffer_dtype=torch.float16),),
    "inputs": (MixedPrecision(param_dtype=BF16, cast_root_forward_inputs=False),),
    "parts": (
        MixedPrecision(param_dtype=BF16, cast_forward_inputs=True, buffer_dtype=BF16),
        MixedPrecision(param_dtype=torch.float32, cast_forward_inputs=True, buffer_dtype=torch.float32),
    ),
}


def _class_of(impl: str) -> Any:
    if impl == "shardd":
        from shardd.torch import FullyShardedDataParallel

        return FullyShardedDataParallel
    from torch.distributed.fsdp import FullyShardedDataParallel as of_torch

    return of_torch


def wrapped(impl: str, kind: str, orig: bool) -> nn.Module:
    torch.manual_seed(3)
    model = Mixed()
    cls = _class_of(impl)
    more = {"device_id": torch.device("cpu"), "use_orig_params": orig}
    whole, *part = KINDS[kind]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if part:
            model.norm = nn.LayerNorm(12)  # BatchNorm is left out by policies only
            model.second = cls(model.second, mixed_precision=part[0], **more)
            return cls(model, mixed_precision=whole, **more)  # type: ignore[no-any-return]
        return cls(model, mixed_precision=whole, auto_wrap_policy=ModuleWrapPolicy({Scaled}), **more)  # type: ignore[no-any-return]


def _seen(model: Any) -> dict[str, Any]:
    return {"root": dict(model.seen), "first": dict(model.first.seen), "second": dict(model.second.seen)}


def _batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(6, 12, generator=torch.Generator().manual_seed(100 * step + rank))


def trained(impl: str, kind: str, orig: bool = True) -> dict[str, Any]:
    """A few steps; what the modules saw; dtypes of gradients, checkpoints and full parameters; eval in between."""
    rank = dist.get_rank()
    model: Any = wrapped(impl, kind, orig)
    cls = _class_of(impl)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    result: dict[str, Any] = {"losses": [], "norms": []}
    for step in range(3):
        loss = model(_batch(step, rank), bias=torch.full((5,), 0.5)).float().square().mean()
        loss.backward()
        result["seen"] = _seen(model)
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        result["gradients"] = sorted({str(g.dtype) for g in grads})
        norm = model.clip_grad_norm_(0.5)
        result["norms"].append(norm.item())
        result["norm dtype"] = norm.dtype
        if kind == "kept":  # an optimizer of low precision would take them; torch's own does not
            for p in model.parameters():
                if p.grad is not None:
                    p.grad = None
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(0.99)
        else:
            optimizer.step()
        optimizer.zero_grad()
        result["losses"].append(loss.item())
    result["between"] = {n: b.dtype for n, b in model.named_buffers()}
    buffers = {clean_tensor_name(n) for n in result["between"]}
    saved = {clean_tensor_name(n): v for n, v in model.state_dict().items()}
    result["saved"] = {n: v.clone() for n, v in saved.items() if n in buffers}
    result["kept buffers"] = {n: b.dtype for n, b in model.named_buffers()} == result["between"]
    model.eval()
    with torch.no_grad():
        result["eval"] = model(_batch(9, 0)).float()
    result["seen in eval"] = _seen(model)
    model.train()
    loss = model(_batch(10, rank)).float().square().mean()
    result["seen again"] = _seen(model)
    loss.backward()
    optimizer.zero_grad()
    with cls.summon_full_params(model, writeback=False):
        result["summoned"] = {n: p.detach().clone() for n, p in model.named_parameters()}
    if impl == "shardd":
        from shardd.torch import counters

        dist.barrier()
        result["counters"] = counters(model)
        dist.barrier()
    return result


def compared(*kinds: str, orig: bool = True) -> dict[str, dict[str, Any]]:
    return {kind: {impl: trained(impl, kind, orig) for impl in ("torch", "shardd")} for kind in kinds}


def compared_flat_parameters(*kinds: str) -> dict[str, dict[str, Any]]:
    return compared(*kinds, orig=False)
