"""Whole tensors out of the pieces that ranks hold of them, by the program's own process group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._state_dict_utils import _gather_state_dict
from torch.distributed.fsdp._shard_utils import _create_chunk_sharded_tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

__all__ = ["assemble", "rows_as_dtensor_of", "rows_as_sharded_tensor", "whole_value"]


def assemble(
    piece: torch.Tensor | None,
    ranges: Sequence[tuple[int, int]],
    shape: Sequence[int],
    dtype: torch.dtype,
    group: Any,
    only: int | None = None,
) -> torch.Tensor | None:
    """``ranges``: by rank of ``group``, first element and number of those it has. Collective: all ranks, same order.

    Elements that no rank has are zero. ``only``: that rank alone gets the whole, the others None and hold nothing.
    """
    rank = dist.get_rank(group)
    if only is not None and rank != only:
        if ranges[rank][1]:
            assert piece is not None
            dist.send(piece.detach().reshape(-1).contiguous(), group=group, group_dst=only)
        return None
    whole = torch.empty(tuple(shape), dtype=dtype)
    if sum(numel for _, numel in ranges) < whole.numel():
        whole.zero_()
    flat = whole.view(-1)
    for owner, (first, numel) in enumerate(ranges):
        if not numel:
            continue
        part = flat[first : first + numel]
        if owner == rank:
            assert piece is not None
            part.copy_(piece.detach().reshape(-1))
        if only is None:
            dist.broadcast(part, group=group, group_src=owner)
        elif owner != rank:
            dist.recv(part, group=group, group_src=owner)
    return whole


def whole_value(value: Any) -> Any:
    """A DTensor or ShardedTensor gathered on all ranks (collective); anything else as it is."""
    if isinstance(value, DTensor):
        return value.full_tensor()
    if isinstance(value, ShardedTensor):
        return _gather_state_dict({"value": value}, pg=value._process_group, device=torch.device("cpu"))["value"]
    return value


def rows_as_dtensor_of(whole: torch.Tensor, mesh: Any) -> DTensor:
    """This rank's rows of it, on the last dimension of ``mesh``, as torch.chunk cuts; replicated on the others."""
    replicated = [Replicate()] * (mesh.ndim - 1)
    if whole.dim() == 0:
        return DTensor.from_local(whole, mesh, [*replicated, Replicate()], run_check=False)
    chunks = whole.chunk(mesh.size(mesh.ndim - 1), dim=0)
    rank = mesh.get_local_rank(mesh.ndim - 1)
    rows = chunks[rank].clone() if rank < len(chunks) else whole.new_empty((0, *whole.shape[1:]))
    return DTensor.from_local(
        rows, mesh, [*replicated, Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
    )


def rows_as_sharded_tensor(whole: torch.Tensor, group: Any) -> Any:
    """The same as what torch's wrapper gives where it was made without a device mesh; scalars stay as they are."""
    if whole.dim() == 0:
        return whole
    size = dist.get_world_size(group)
    return _create_chunk_sharded_tensor(whole, dist.get_rank(group), size, size, group)
