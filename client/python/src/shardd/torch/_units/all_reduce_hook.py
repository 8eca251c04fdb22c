"""``set_all_reduce_hook``: the program's function of what the daemon has reduced, before ``.grad`` shows it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.fsdp._fully_shard._fsdp_collectives import _get_gradient_divide_factors
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo

__all__ = ["apply"]


def _reduce_dtype(unit: Any, params: list[Any]) -> torch.dtype:
    if unit.mp_policy.reduce_dtype is not None:
        return unit.mp_policy.reduce_dtype
    computed = {p.param_dtype or p.orig_dtype for p in params}
    return computed.pop() if len(computed) == 1 else torch.float32


def _divided_afterwards(unit: Any, dtype: torch.dtype) -> float:
    """Returns the factor that PyTorch divides by behind the hook; what it has divided by before, the daemon has too."""
    info = unit.mesh_info
    replicas = info.replicate_process_group if isinstance(info, HSDPMeshInfo) else None
    _, factor, _, _ = _get_gradient_divide_factors(
        info.shard_process_group, replicas, dtype, unit.device.type, unit.gradient_divide_factor,
        unit.force_sum_reduction_for_comms,
    )  # fmt: skip
    return factor or 1.0


def _padded_numel(fsdp_param: Any, shard: torch.Tensor) -> int:
    """Returns the length of its part in PyTorch's buffer, where every rank has as many rows as the first."""
    padded = getattr(fsdp_param, "padded_sharded_param_size", None)
    return shard.numel() if padded is None else int(padded.numel())


@torch.no_grad()
def apply(
    unit: Any, hook: Callable[[torch.Tensor], None], stream: Any, gradients: list[tuple[Any, torch.Tensor]]
) -> None:
    """Calls ``hook`` with one flat tensor of this rank's shards, in the dtype of the reduction, and takes what it leaves there.

    gradients: parameters (or ``FlatParameter``s), each with the job's memory of its gradient shard, fp32.
    """
    members = [m for held, _ in gradients for m in getattr(held, "members", [held])]
    dtype = _reduce_dtype(unit, members)
    lengths = [_padded_numel(held, shard) for held, shard in gradients]
    flat = torch.zeros(sum(lengths), dtype=dtype, device=unit.device)
    parts = [part[: shard.numel()] for part, (_, shard) in zip(flat.split(lengths), gradients)]
    for part, (_, shard) in zip(parts, gradients):
        part.copy_(shard.reshape(-1))
    factor = _divided_afterwards(unit, dtype)
    if factor != 1:
        flat.mul_(factor)
    with _beside(stream, unit.device):
        hook(flat)
    if factor != 1:
        flat.div_(factor)
    for part, (_, shard) in zip(parts, gradients):
        shard.copy_(part.view(shard.shape))


@contextlib.contextmanager
def _beside(stream: Any, device: torch.device) -> Any:
    """Runs what is inside it in ``stream``, behind what is enqueued and before what will be."""
    if stream is None or device.type == "cpu":
        yield
        return
    current = torch.cuda.current_stream(device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)
