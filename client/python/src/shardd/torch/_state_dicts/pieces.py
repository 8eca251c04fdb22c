"""What this rank holds of a model's state: ranges of elements of named tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._flat_param import FlatParameter
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from shardd.torch._job.job import job_of
from shardd.torch._ranks.agreement import Meeting
from shardd.torch._ranks.mesh import members_of
from shardd.torch._state_dicts.flat_places import flat_params_of
from shardd.torch._units.flat_shard_param import FlatShardParam, flat_param_of
from shardd.torch._units.names import Entry, entries_of
from shardd.torch._units.placement import rows_of, tensor_parallel
from shardd.torch._units.state import ShardState, state_of
from shardd.torch._units.subclasses import inner_of

__all__ = ["Piece", "jobs_of", "meeting_of", "pieces_of", "reshard"]


@dataclass
class Piece:
    """Elements of the tensor ``fqn``, row-major: from ``first`` on those of ``local``, in one run or, of a tensor that is cut
    on another dimension than its first, in several."""

    fqn: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    local: torch.Tensor  # 1-D, contiguous; the memory itself, but where ``back`` is given
    first: int
    writes: bool  # this rank is the one that writes them; replicas hold the same
    job: Any = None  # the registered TorchJob that they are shards of, with ...
    index: int = -1  # ... the daemon's number of the parameter
    job_first: int = 0  # ... and the first element of it
    run: int = 0  # elements of each run; 0: there is one
    stride: int = 0  # from a run's beginning to the next one's, in elements of the tensor
    back: torch.Tensor | None = None  # not contiguous: what is loaded into ``local`` is copied there
    aliases: list[str] = field(default_factory=list)  # further names of the same tensor

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    def runs(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Of ``local[begin:end]``, run by run: first element in the tensor, and beginning and end within ``[0, end - begin)``."""
        if not self.run:
            yield self.first + begin, 0, end - begin
            return
        at = begin
        while at < end:
            number, inside = divmod(at, self.run)
            stop = min(end, at - inside + self.run)
            yield self.first + number * self.stride + inside, at - begin, stop - begin
            at = stop


def _states(model: nn.Module) -> list[ShardState]:
    found: dict[int, ShardState] = {}
    for module in model.modules():
        state = state_of(module)
        if state is not None:
            found.setdefault(id(state), state)
    return list(found.values())


def reshard(model: nn.Module) -> None:
    """Sharded parameters are in the modules when this returns, and what the program has made of them in the job."""
    for state in _states(model):
        if state._unit is not None and state._unit._bound:
            state._unit._to_sharded()
    for job in jobs_of(model):
        job.engine.take_changes()


def jobs_of(model: nn.Module) -> list[Any]:
    """The registered jobs that hold parameters of the model."""
    found: dict[int, Any] = {}
    for state in _states(model):
        if (job := job_of(state)) is not None and job.alive:
            found.setdefault(id(job), job)
    return list(found.values())


def meeting_of(model: nn.Module, what: str) -> Meeting:
    """Returns a meeting of all ranks that have a part of the model; its rank 0 writes what is not sharded."""
    for state in _states(model):
        root = state._find_root()
        unit = root._unit
        if unit is None:
            continue
        if any(tensor_parallel(p) for s in root._state_ctx.all_states if s._unit for p in s._unit.fsdp_params):
            raise NotImplementedError(
                f"{what}: the model is tensor parallel; use torch.distributed.checkpoint, or get_model_state_dict with "
                "full_state_dict=True"
            )
        if any(inner_of(p) for s in root._state_ctx.all_states if s._unit for p in s._unit.fsdp_params):
            raise NotImplementedError(
                f"{what}: a parameter of the model is a tensor subclass with fsdp_pre_all_gather; use torch.distributed.checkpoint, "
                "or get_model_state_dict with full_state_dict=True"
            )
        if any(rows_of(p) is not None for s in root._state_ctx.all_states if s._unit for p in s._unit.fsdp_params):
            raise NotImplementedError(
                f"{what}: some parameters are on a smaller mesh than the model, and other ranks have other ones under their names; "
                "use torch.distributed.checkpoint with names of their own"
            )
        members = members_of(unit.mesh_info)
        job = job_of(root)
        return Meeting(
            f"{what}/{root.identity}", members.ranks, members.rank, job if job is not None and job.alive else None
        )
    ranks = list(range(dist.get_world_size())) if dist.is_initialized() else [0]
    return Meeting(what, ranks, dist.get_rank() if dist.is_initialized() else 0)


def _of_dtensor(fqn: str, tensor: DTensor) -> Piece:
    mesh, placements = tensor.device_mesh, tensor.placements
    dims = {p.dim for p in placements if isinstance(p, Shard)}
    if not all(isinstance(p, (Replicate, Shard)) for p in placements) or len(dims) > 1:
        raise NotImplementedError(f'"{fqn}": placed as {placements} (want Shard of one dimension, or Replicate)')
    local = tensor._local_tensor.detach()
    if not local.is_contiguous():
        raise NotImplementedError(f'"{fqn}": its local tensor is not contiguous (got strides {local.stride()})')
    _, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    dim = dims.pop() if dims else 0
    row = tensor.shape[dim + 1 :].numel() if tensor.dim() else 1
    coordinates = mesh.get_coordinate() or [0] * mesh.ndim
    writes = all(c == 0 for c, p in zip(coordinates, placements) if isinstance(p, Replicate))
    first = int(offset[dim]) * row if tensor.dim() and local.numel() else 0
    piece = Piece(fqn, tuple(tensor.shape), tensor.dtype, local.view(-1), first, writes)
    if tensor.shape[:dim].numel() > 1:
        piece.run, piece.stride = local.shape[dim] * row, tensor.shape[dim] * row
    return piece


def _of_whole(fqn: str, tensor: torch.Tensor, writes: bool) -> Piece:
    dense = tensor.detach()
    back = None if dense.is_contiguous() else dense
    return Piece(fqn, tuple(dense.shape), dense.dtype, dense.contiguous().view(-1), 0, writes, back=back)


def _of_flat(fqn: str, param: FlatShardParam) -> Piece:
    info = param.mesh_info
    writes = getattr(info, "replicate_mesh_rank", 0) == 0 and (not param.whole or info.shard_mesh_rank == 0)
    first, local = param.piece()
    return Piece(fqn, tuple(param._orig_size), local.dtype, local, first, writes)


def _piece(entry: Entry, jobs: list[Any], is_first_rank: bool) -> Piece:
    tensor = entry.tensor()
    if tensor.is_meta:
        raise RuntimeError(
            f'"{entry.fqn}": has no memory (it is on the meta device); call to_empty or load with assign'
        )
    flat = flat_param_of(tensor) if entry.is_parameter else None
    if flat is not None:
        piece = _of_flat(entry.fqn, flat)
    elif isinstance(tensor, FlatParameter):
        raise NotImplementedError(f'"{entry.fqn}": a flat parameter of torch\'s own wrapper, of several parameters')
    elif isinstance(tensor, DTensor):
        piece = _of_dtensor(entry.fqn, tensor)
    else:
        piece = _of_whole(entry.fqn, tensor, is_first_rank)
    for job in jobs:
        place = job.places.get(id(tensor))
        if place is not None:
            piece.job, piece.index, piece.job_first = job, place.index, place.first
    return piece


def _in_flat_parameters(model: nn.Module, jobs: list[Any]) -> dict[int, list[Piece]]:
    """Returns pieces by id of the FlatParameter, which modules have in the place of parameters."""
    found: dict[int, Piece] = {}
    by_holder: dict[int, list[Piece]] = {}
    for fqn, param in flat_params_of(model).items():
        if param.holder is None:
            continue
        if id(param) in found:
            found[id(param)].aliases.append(fqn)
            continue
        piece = found[id(param)] = _of_flat(fqn, param)
        by_holder.setdefault(id(param.sharded_param), []).append(piece)
        for job in jobs:
            place = job.places.get(id(param.sharded_param))
            if place is not None:
                piece.job, piece.index = job, place.members[param.holder.members.index(param)][0]
    return by_holder


def pieces_of(model: nn.Module, is_first_rank: bool) -> list[Piece]:
    """Returns pieces in the order of the modules, each tensor once, under its first name. It reshards parameters first."""
    reshard(model)
    jobs = jobs_of(model)
    of_flat = _in_flat_parameters(model, jobs)
    found: dict[int, list[Piece]] = {}
    for entry in entries_of(model):
        number = id(entry.tensor())
        if number in of_flat:
            found[number] = of_flat[number]
        elif number not in found:
            found[number] = [_piece(entry, jobs, is_first_rank)]
        else:
            (known,) = found[number]
            if entry.fqn != known.fqn and entry.fqn not in known.aliases:
                known.aliases.append(entry.fqn)
    return [piece for pieces in found.values() for piece in pieces]
