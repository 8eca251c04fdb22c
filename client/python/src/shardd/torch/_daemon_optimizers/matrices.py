"""What Muon asks of parameters: each is a whole matrix to it, in the memory of a node's daemon, whoever has which rows there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from shardd.torch._daemon_optimizers.sharded_params import name_of
from shardd.torch._ranks.nodes import cuts_over_nodes, planned_ranks
from shardd.torch._units.placement import (
    is_planned_as_trained,
    rows_of,
    shard_dim,
    tensor_parallel,
    why_not_on_one_rank,
)
from shardd.torch._units.state import units

__all__ = ["why_no_matrices"]


def why_no_matrices(params: Iterable[Any]) -> str:
    """Says which parameters of an optimizer the daemon does not update as matrices, and why; empty where it updates all.

    Those that are frozen now count, as the job plans what an optimizer has as trained. A ``FlatParameter`` stands for all
    that is in it.
    """
    wanted = {id(param) for param in params}
    cut: dict[Any, bool] = {}  # over nodes, by mesh
    for unit in units():
        for fsdp_param in unit.fsdp_params:
            param = fsdp_param.sharded_param
            if id(param) not in wanted or not is_planned_as_trained(fsdp_param, held=True):
                continue
            size = tuple(fsdp_param._orig_size)
            why = ""
            if len(size) != 2:
                why = f"has {len(size)} dimensions (shape {size}), and Muon updates matrices alone"
            elif unit.device.type != "cpu":
                why = f"is on {unit.device}, and the daemon's Muon works on CPUs"
            elif tensor_parallel(fsdp_param):
                why = "is a tensor parallel rank's part of a matrix, and Muon updates whole ones"
            elif rows_of(fsdp_param) is not None:
                why = "is on a smaller mesh than the model, and the daemon's Muon updates what all its ranks have of one matrix"
            elif shard_dim(fsdp_param) != 0:
                why = (
                    f"is cut along dimension {shard_dim(fsdp_param)}, and the daemon's Muon updates what is cut by rows"
                )
            else:
                mesh = unit.mesh_info.mesh
                if mesh not in cut:
                    cut[mesh] = planned_ranks(unit.mesh_info).cut
                why = why_not_on_one_rank(fsdp_param, not cuts_over_nodes(unit.mesh_info)) if cut[mesh] else ""
            if why:
                return f"parameter {name_of(param)} {why}"
    return ""
