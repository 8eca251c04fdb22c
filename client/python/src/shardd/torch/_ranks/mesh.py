"""The ranks of a device mesh, in the order in which a job has them."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo

__all__ = ["Members", "members_of"]


@dataclass(frozen=True)
class Members:
    """The ranks of a mesh as those of a job: row by row, so that a shard group is a run of neighbours."""

    ranks: list[int]  # of the default group, by rank in the job
    rank: int  # of this process, in the job


def members_of(mesh_info: FSDPMeshInfo) -> Members:
    if not isinstance(mesh_info, HSDPMeshInfo):
        return Members(dist.get_process_group_ranks(mesh_info.shard_process_group), mesh_info.shard_mesh_rank)
    # Groups number their ranks in ascending order, whatever order a row of the mesh gives them in.
    rows = mesh_info.mesh.mesh.reshape(-1, mesh_info.shard_mesh_size).tolist()
    ranks = [rank for row in rows for rank in sorted(row)]
    return Members(ranks, ranks.index(dist.get_rank()))
