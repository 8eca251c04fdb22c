"""Parameters that are no plain tensors: tensor subclasses that say themselves, with ``fsdp_pre_all_gather`` and
``fsdp_post_all_gather``, how they are gathered, as torchao's float8 and NF4 weights do.

The daemon knows plain tensors. Of such a parameter it has this rank's inner tensor where there is one, of the parameter's own shape
and dtype, which is trained as any other; or else the bytes of all inner tensors, one behind the other, as one row for each rank,
which are kept and not trained. The inner tensors lie in the job's memory; the subclass around them stays the program's object.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

__all__ = [
    "Inner",
    "check_subclass",
    "gathers_itself",
    "inner_of",
    "lay_in_row",
    "refuse_subclass",
    "row_bytes",
    "stored_of",
]

_ALIGNMENT = 64  # of an inner tensor in its row, whatever its dtype
_METHODS = ("fsdp_pre_all_gather", "fsdp_post_all_gather")


def is_subclass(tensor: torch.Tensor) -> bool:
    """Whether it computes with a dispatch of its own."""
    return type(tensor).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl


def refuse_subclass(param: torch.Tensor, what: str, also: bool = False) -> None:
    """Raises NotImplementedError where ``param`` computes with a dispatch of its own: there are no bytes that could be shared.

    also: raises in any case. what: the operation and the object, for the text.
    """
    if is_subclass(param) or also:
        raise NotImplementedError(
            f"{what}: it is a {type(param).__name__}, a tensor subclass with its own dispatch (fsdp_pre_all_gather, "
            "quantized weights), and here plain tensors are served; fully_shard, in its own layout, on CPUs, takes those with "
            "fsdp_pre_all_gather; or ignore it"
        )


def gathers_itself(param: torch.Tensor) -> bool:
    """Whether it has one of the two methods; ``check_subclass`` says whether it is served."""
    return any(hasattr(param, method) for method in _METHODS)


def check_subclass(param: torch.Tensor, what: str, device: torch.device) -> None:
    """Raises where ``param`` is a subclass that layout ``dim0`` does not shard on ``device``.

    NotImplementedError, or AssertionError where torch raises that: one of the two methods alone.
    """
    name = type(param).__name__
    methods = [method for method in _METHODS if hasattr(param, method)]
    if not is_subclass(param) and not methods:
        return
    if not methods:
        raise NotImplementedError(
            f"{what}: it is a {name}, a tensor subclass with its own dispatch and without fsdp_pre_all_gather and "
            "fsdp_post_all_gather, which would say how it is gathered; give it these, or ignore it"
        )
    if len(methods) == 1:
        raise AssertionError(
            "Both fsdp_pre_all_gather and fsdp_post_all_gather should be defined if using all-gather extensions: "
            f"{what}: {name} has {methods[0]} alone"
        )
    if not hasattr(param, "__tensor_flatten__"):
        raise NotImplementedError(
            f"{what}: {name} has fsdp_pre_all_gather and no __tensor_flatten__, which would say which tensors it is made of; "
            "give it that, or ignore it"
        )
    nested = next((n for n in param.__tensor_flatten__()[0] if is_subclass(getattr(param, n))), None)
    if nested is not None:
        raise NotImplementedError(
            f'{what}: it is a {name}, and its tensor "{nested}" is a subclass itself ({type(getattr(param, nested)).__name__}); '
            "shardd takes those that are made of plain tensors"
        )
    if device.type != "cpu":
        raise NotImplementedError(
            f"{what}: it is a {name}, with fsdp_pre_all_gather, on a GPU, where that is not served (got {device.type}, want "
            "cpu); train on CPUs, or ignore it"
        )


@dataclass(frozen=True)
class Inner:
    """Which tensors a parameter's subclass is made of."""

    kind: type
    names: tuple[str, ...]
    row: bool  # the job has their bytes as a row; else it has the only one, as the parameter


def _inner_tensors(local: Any, names: tuple[str, ...]) -> list[torch.Tensor]:
    return [getattr(local, name) for name in names]


def inner_of(fsdp_param: Any) -> Inner | None:
    """Returns what a parameter that gathers itself is made of; None: a plain tensor, or in layout flat.

    That is settled when it is asked first: later some subclasses have more inner tensors, which are no state (float8's scale, computed
    ahead of the next forward).
    """
    local = getattr(fsdp_param.sharded_param, "_local_tensor", None)
    if local is None or not hasattr(local, "fsdp_pre_all_gather"):
        return None
    known: Inner | None = getattr(fsdp_param, "_inner", None)
    if known is None or known.kind is not type(local):
        names = tuple(local.__tensor_flatten__()[0])
        tensors = _inner_tensors(local, names)
        only = tensors[0] if len(tensors) == 1 else None
        row = only is None or only.shape != local.shape or only.dtype != local.dtype
        known = fsdp_param._inner = Inner(type(local), names, row)
    return known


def _places(tensors: list[torch.Tensor]) -> tuple[list[int], int]:
    """Returns where in a row of bytes each tensor begins, and how long the row is."""
    firsts, end = [], 0
    for tensor in tensors:
        firsts.append(end)
        end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    return firsts, end


def row_bytes(fsdp_param: Any) -> int | None:
    """Returns how many bytes the job has of each rank's inner tensors; None: it has the parameter's elements."""
    inner = inner_of(fsdp_param)
    if inner is None or not inner.row:
        return None
    return _places(_inner_tensors(fsdp_param.sharded_param._local_tensor, inner.names))[1]


def lay_in_row(fsdp_param: Any) -> torch.Tensor:
    """Moves the inner tensors into one row of bytes, alone in its storage, and returns that. REQUIRES: row_bytes."""
    inner = inner_of(fsdp_param)
    assert inner is not None
    tensors = _inner_tensors(fsdp_param.sharded_param._local_tensor, inner.names)
    firsts, end = _places(tensors)
    row = torch.zeros(end, dtype=torch.uint8, device=fsdp_param.sharded_param.device)
    with torch.no_grad():
        for name, tensor, first in zip(inner.names, tensors, firsts):
            there = row[first : first + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            there.copy_(tensor)
            setattr(fsdp_param.sharded_param._local_tensor, name, there)  # a state dict keeps the others
    fsdp_param._inner_row = row
    return row


def stored_of(fsdp_param: Any) -> torch.Tensor:
    """Returns this rank's part as the job has it: a plain tensor. Of a row: REQUIRES lay_in_row."""
    inner, local = inner_of(fsdp_param), fsdp_param.sharded_param._local_tensor
    if inner is None:
        return local
    return fsdp_param._inner_row if inner.row else getattr(local, inner.names[0])
