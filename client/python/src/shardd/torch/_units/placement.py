"""Parameters that ``shard_placement_fn`` shards on another dimension than their first.

The daemon cuts rows and knows of no dimensions. It is told of a parameter whose rows are the shards: the shape is
``(ranks of the shard group, *shape of a shard)``, so that each rank's row is its shard, contiguous, and is held as every
other shard. torch wants such shards to be of equal size. Only where the whole parameter is looked at (unsharded, shown as a full parameter,
its gradient on the way into the job) does the order matter: there it is copied, and the others are not.

Parameters on a smaller mesh than the model's (experts, of which each expert parallel rank has its own) are one parameter for the daemon,
too: ``(ranks of the model's shard group, elements of a shard)``. Each rank's row is its shard of what its own mesh has under that name, and
its gradient is zero in the rows of ranks that are not on its mesh. So sums, norms, steps and commits are right as they are, in one job.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.tensor import Shard

from shardd.torch._process.torch_versions import PLACES_ON_MESHES, ShardPlacementResult
from shardd.torch._units.subclasses import row_bytes

__all__ = [
    "Rows",
    "checked",
    "first_element",
    "from_job_order",
    "in_job_order",
    "is_planned_as_trained",
    "rows_of",
    "shape_in_job",
    "shard_dim",
    "tensor_parallel",
    "why_not_on_one_rank",
]


@dataclass(frozen=True)
class Rows:
    """Which rows of the daemon's parameter are the shards of one that is on a smaller mesh than the model."""

    rows: int  # of the daemon's parameter: ranks of the model's shard group
    numel: int  # of each: the largest shard of any rank, whose own may be smaller
    first: int  # row of the mesh's first rank
    step: int  # to the row of the next one


def rows_of(fsdp_param: Any) -> Rows | None:
    """Returns them; None where the parameter is on the model's mesh."""
    return getattr(fsdp_param, "_shardd_rows", None)


def checked(shard_placement_fn: Callable[..., Any] | None, mesh_info: FSDPMeshInfo) -> Callable[..., Any] | None:
    """Returns what torch's ``FSDPParam`` asks for a placement, and checks it."""
    if shard_placement_fn is None:
        return None

    def placement(param: nn.Parameter) -> Any:
        result = given = shard_placement_fn(param)
        if isinstance(given, ShardPlacementResult):
            result = given.placement
            if given.mesh_info.mesh == mesh_info.mesh:
                given = result
            elif not PLACES_ON_MESHES:
                raise NotImplementedError(
                    f"fully_shard: shard_placement_fn gave another mesh for a parameter of shape {tuple(param.shape)} than the "
                    f"module has, which needs a later torch (got {torch.__version__}); shard a module of its own on that mesh"
                )
        if isinstance(result, Shard) and not -param.ndim <= result.dim < max(param.ndim, 1):
            raise AssertionError(f"Shard dim {result.dim} is invalid for {param.ndim}D tensor: {param.shape}")
        return given

    return placement


def tensor_parallel(fsdp_param: Any) -> bool:
    """Whether the parameter was a DTensor before it was sharded: the job has this rank's local tensor of it, and the job of each
    rank beside this one along the other mesh has another one."""
    return bool(getattr(fsdp_param, "is_dtensor", False))


def shard_dim(fsdp_param: Any) -> int:
    """Returns the dimension that is cut; 0 for parameters in layout flat."""
    placement = getattr(fsdp_param, "fsdp_placement", None)
    return 0 if placement is None else int(placement.dim)


def why_not_on_one_rank(fsdp_param: Any, in_rows: bool, optimizer: str) -> str:
    """Says why no rank can hold all of a parameter that is cut over nodes, which the daemon's Muon and Adafactor ask for; empty
    where one can.

    ``in_rows``: the mesh has several rows of nodes, each with a copy. ``optimizer`` is which of them.
    """
    if in_rows:
        return (
            f"is cut over the nodes of a row of its mesh, other rows have copies, and the daemon's {optimizer} is not served there; give "
            "the mesh a row for each node (replicas)"
            + (', or one over the ranks of all nodes with layout="flat"' if optimizer == "Muon" else "")
        )
    if getattr(fsdp_param, "fsdp_placement", None) is not None:
        return (
            f"is a DTensor of which ranks of all nodes have rows, and the daemon's {optimizer} updates what is whole on one of them; give "
            "the mesh a row for each node (replicas)" + (', or shard with layout="flat"' if optimizer == "Muon" else "")
        )
    if getattr(fsdp_param, "holder", None) is not None:
        return (
            f"is in a FlatParameter of which ranks of all nodes have equal pieces, and the daemon's {optimizer} updates what is whole on "
            "one of them; pass use_orig_params=True, or use HYBRID_SHARD"
        )
    uses = getattr(fsdp_param, "uses", [])
    if any(getattr(getattr(use.unit(), "comm_hook", None), "replaces", False) for use in uses):
        return (
            f"is in a module with a communication hook, and a hook leaves each rank an equal piece where the daemon's {optimizer} over "
            "several nodes updates what is whole on one rank; leave the hook out"
        )
    return ""


def is_planned_as_trained(fsdp_param: Any, held: bool) -> bool:
    """Whether a job plans gradients and optimizer state for a parameter. ``held``: an optimizer has it, so that it may be
    unfrozen at any time."""
    param = fsdp_param.sharded_param
    if param.requires_grad or not held:
        return bool(param.requires_grad)
    return param.is_floating_point() and not hasattr(param, "_is_flat_param") and row_bytes(fsdp_param) is None


def shape_in_job(fsdp_param: Any, shard_size: int) -> list[int]:
    """Returns the shape that the daemon knows, with a shard group of ``shard_size`` ranks."""
    if (row := row_bytes(fsdp_param)) is not None:
        return [shard_size, row]
    shape, dim = list(fsdp_param._orig_size), shard_dim(fsdp_param)
    rows = rows_of(fsdp_param)
    if rows is not None:
        return [rows.rows, rows.numel]
    if dim == 0:
        return shape
    if shape[dim] % shard_size:
        raise NotImplementedError(
            f"FSDP does not support uneven sharding on dim {dim}: {fsdp_param._orig_size} (world size: {shard_size})"
        )
    return [shard_size, *shape[:dim], shape[dim] // shard_size, *shape[dim + 1 :]]


def first_element(fsdp_param: Any) -> int:
    """Returns where this rank's shard begins in the daemon's parameter."""
    mesh_info, size, rows = fsdp_param.mesh_info, fsdp_param._orig_size, rows_of(fsdp_param)
    if rows is not None:
        return int(rows.first + mesh_info.shard_mesh_rank * rows.step) * rows.numel
    rank, ranks = mesh_info.shard_mesh_rank, mesh_info.shard_mesh_size
    if (row := row_bytes(fsdp_param)) is not None:
        return int(rank * row)
    if shard_dim(fsdp_param):
        return int(rank * (size.numel() // ranks))
    chunk = -(-size[0] // ranks)  # as torch.chunk cuts
    return int(min(rank * chunk, size[0]) * (size.numel() // size[0])) if size[0] else 0


def in_job_order(fsdp_param: Any, whole: torch.Tensor) -> torch.Tensor:
    """Returns the elements of a tensor of the parameter's shape in the job's order; 1-D."""
    dim = shard_dim(fsdp_param)
    assert rows_of(fsdp_param) is None, "it has no elements for the other rows"
    if dim == 0:
        return whole.reshape(-1)
    ranks = fsdp_param.mesh_info.shard_mesh_size
    return whole.unflatten(dim, (ranks, whole.shape[dim] // ranks)).movedim(dim, 0).reshape(-1)


def from_job_order(fsdp_param: Any, whole: torch.Tensor) -> torch.Tensor:
    """Makes the parameter of the job's elements: contiguous, without a copy where their order is the parameter's."""
    dim = shard_dim(fsdp_param)
    assert rows_of(fsdp_param) is None, "others have elements there"
    if dim == 0:
        return whole.view(fsdp_param._orig_size)
    shape = shape_in_job(fsdp_param, fsdp_param.mesh_info.shard_mesh_size)
    return whole.view(shape).movedim(0, dim).flatten(dim, dim + 1).contiguous()
