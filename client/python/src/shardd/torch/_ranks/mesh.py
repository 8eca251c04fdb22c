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
    """ValueError, alike on all ranks: DTensors would have a rank's shard in another place than its group has it."""
    group = dist.get_process_group_ranks(mesh_info.shard_process_group)
    rows: list[list[int]] = mesh_info.mesh.mesh.reshape(-1, mesh_info.shard_mesh_size).tolist()
    crossed = [row for row in rows if row != sorted(row)]
    if crossed and group == sorted(group):
        raise ValueError(
            f"fully_shard: the ranks along the sharded dimension of its mesh do not ascend (got {crossed[0]}, want "
            f"{sorted(crossed[0])}); their group numbers them in ascending order, and DTensors by their place in the mesh, so that "
            "checkpoints would have shards in each other's places"
        )
    if not isinstance(mesh_info, HSDPMeshInfo):
        return Members(group, mesh_info.shard_mesh_rank)
    ranks = [rank for row in rows for rank in row]
    return Members(ranks, ranks.index(dist.get_rank()))
