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

__all__ = [
    "assemble",
    "carrier",
    "piece_of_rows",
    "row_cuts",
    "rows_as_dtensor_of",
    "rows_as_sharded_tensor",
    "sendable",
    "whole_value",
]


def carrier(group: Any) -> torch.device:
    """Returns where values are that ranks of the group send each other: host memory, if the group has a backend for it."""
    group = group or dist.distributed_c10d._get_default_group()
    types = {device.type for device in group._device_types}
    return torch.device("cpu" if "cpu" in types or not torch.cuda.is_available() else torch.cuda.current_device())


def sendable(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    """Returns the tensor where the group has a backend for it: itself, or a copy."""
    types = {device.type for device in group._device_types}
    return tensor if tensor.device.type in types else tensor.to(carrier(group))


def assemble(
    piece: torch.Tensor | None,
    ranges: Sequence[tuple[int, int]],
    shape: Sequence[int],
    dtype: torch.dtype,
    group: Any,
    only: int | None = None,
) -> torch.Tensor | None:
    """Assembles a tensor of which each rank of ``group`` has (first element, number), given by ``ranges``. It is collective.

    Elements that no rank has are zero. ``only``: that rank alone gets the whole, the others None and hold nothing. It is
    on the device that ``carrier`` says.
    """
    rank = dist.get_rank(group)
    device = carrier(group)
    if only is not None and rank != only:
        if ranges[rank][1]:
            assert piece is not None
            dist.send(piece.detach().reshape(-1).to(device).contiguous(), group=group, group_dst=only)
        return None
    whole = torch.empty(tuple(shape), dtype=dtype, device=device)
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
    """Gathers a DTensor or ShardedTensor on all ranks (collective); returns anything else as it is."""
    if isinstance(value, DTensor):
        return value.full_tensor()
    if isinstance(value, ShardedTensor):
        return _gather_state_dict({"value": value}, pg=value._process_group, device=torch.device("cpu"))["value"]
    return value


def row_cuts(rows: int, world: int) -> list[int]:
    """Returns where torch.chunk cuts: rank r has rows [cuts[r], cuts[r + 1])."""
    each = -(-rows // world)
    return [min(each * rank, rows) for rank in range(world + 1)]


def piece_of_rows(value: Any, ranges: Sequence[tuple[int, int]], group: Any) -> torch.Tensor | None:
    """Returns this rank's piece of a tensor of which each rank has rows; only what changes its rank travels. It is collective.

    ``ranges`` as in ``assemble``. ``None``, on all ranks and without a message: it does not lie in rows over ``group``.
    """
    rows = _rows_over(value, group)
    if rows is None:
        return None
    local, cuts = rows
    rank = dist.get_rank(group)
    row = _row_numel(value)
    flat = local.detach().reshape(-1).to(carrier(group))
    first, numel = ranges[rank]
    piece = torch.empty(numel, dtype=flat.dtype, device=flat.device)
    begin, end = cuts[rank] * row, cuts[rank + 1] * row
    requests: list[Any] = []
    for other, (wanted, wanted_numel) in enumerate(ranges):
        lo, hi = max(begin, wanted), min(end, wanted + wanted_numel)
        if lo >= hi:
            continue
        if other == rank:
            piece[lo - first : hi - first] = flat[lo - begin : hi - begin]
        else:
            requests.append(dist.isend(flat[lo - begin : hi - begin], group=group, group_dst=other))
    for other in range(len(ranges)):
        lo, hi = max(cuts[other] * row, first), min(cuts[other + 1] * row, first + numel)
        if other != rank and lo < hi:
            requests.append(dist.irecv(piece[lo - first : hi - first], group=group, group_src=other))
    for request in requests:
        request.wait()
    return piece


def _row_numel(value: Any) -> int:
    numel = 1
    for size in value.size()[1:]:
        numel *= size
    return numel


def _rows_over(value: Any, group: Any) -> tuple[torch.Tensor, list[int]] | None:
    """Returns the rows that this rank has, and where those of each rank of ``group`` begin and the last end."""
    if isinstance(value, DTensor):
        mesh = value.device_mesh
        last = mesh.ndim - 1
        in_rows = value.placements[last] == Shard(0) and all(isinstance(p, Replicate) for p in value.placements[:-1])
        if not in_rows or not value.dim() or value.device.type != "cpu" or not _same_ranks(mesh.get_group(last), group):
            return None
        return value._local_tensor, row_cuts(value.shape[0], mesh.size(last))
    if isinstance(value, ShardedTensor):
        if not value.size() or not _same_ranks(value._process_group, group):
            return None
        cuts = row_cuts(value.size()[0], dist.get_world_size(group))
        owners = dist.get_process_group_ranks(group)
        want = {
            (cuts[rank], cuts[rank + 1] - cuts[rank], owner)
            for rank, owner in enumerate(owners)
            if cuts[rank] < cuts[rank + 1]
        }
        parts = [(part, part.placement) for part in value.metadata().shards_metadata]
        got = {(p.shard_offsets[0], p.shard_sizes[0], place.rank()) for p, place in parts if place is not None}
        if got != want or any(list(p.shard_sizes[1:]) != list(value.size()[1:]) for p, _ in parts):
            return None
        shards = value.local_shards()
        return shards[0].tensor if shards else torch.empty(0, dtype=value.dtype), cuts
    return None


def _same_ranks(one: Any, other: Any) -> bool:
    return dist.get_process_group_ranks(one) == dist.get_process_group_ranks(other)


def rows_as_dtensor_of(whole: torch.Tensor, mesh: Any) -> DTensor:
    """This rank's rows of it, on the last dimension of ``mesh``, as torch.chunk cuts; replicated on the others. On the
    mesh's device: from_local moves them there."""
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
    """The same as what torch's wrapper gives where it was made without a device mesh, on the device that the values are
    on; scalars stay as they are."""
    if whole.dim() == 0:
        return whole
    size = dist.get_world_size(group)
    devices = torch.cuda.device_count() if whole.is_cuda else size
    return _create_chunk_sharded_tensor(whole, dist.get_rank(group), size, devices, group, whole.device)
