"""What Muon and Adafactor ask of parameters: each is whole to them, in the memory of a node's daemon, whoever has which rows there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from shardd.torch._daemon_optimizers.kinds import ADAFACTOR, Kind
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

__all__ = ["why_not_whole"]


def why_not_whole(kind: Kind, params: Iterable[Any]) -> str:
    """Says which parameters of an optimizer the daemon does not update whole, and why; empty where it updates all.

    Those that are frozen now count, as the job plans what an optimizer has as trained. A ``FlatParameter`` stands for all
    that is in it. It is empty of kinds that update elements.
    """
    if not kind.updates_whole:
        return ""
    wanted = {id(param) for param in params}
    cut: dict[Any, bool] = {}  # over nodes, by mesh
    for unit in units():
        for fsdp_param in unit.fsdp_params:
            param = fsdp_param.sharded_param
            if id(param) not in wanted or not is_planned_as_trained(fsdp_param, held=True):
                continue
            why = _why_not(kind, unit, fsdp_param)
            if not why:
                mesh = unit.mesh_info.mesh
                if mesh not in cut:
                    cut[mesh] = planned_ranks(unit.mesh_info).cut
                if cut[mesh]:
                    why = why_not_on_one_rank(fsdp_param, not cuts_over_nodes(unit.mesh_info), kind.title)
            if why:
                return f"parameter {name_of(param)} {why}"
    return ""


def _why_not(kind: Kind, unit: Any, fsdp_param: Any) -> str:
    """Of one node, or of nodes that are replicas."""
    size, name = tuple(fsdp_param._orig_size), kind.title
    if kind is not ADAFACTOR and len(size) != 2:
        return f"has {len(size)} dimensions (shape {size}), and {name} updates matrices alone"
    if unit.device.type != "cpu":
        return f"is on {unit.device}, and the daemon's {name} works on CPUs"
    if tensor_parallel(fsdp_param):
        return f"is a tensor parallel rank's part of a {kind.whole}, and {name} updates whole ones"
    if rows_of(fsdp_param) is not None:
        return f"is on a smaller mesh than the model, and the daemon's {name} updates what all its ranks have of one {kind.whole}"
    if shard_dim(fsdp_param) != 0:
        return f"is cut along dimension {shard_dim(fsdp_param)}, and the daemon's {name} updates what is cut by rows"
    if kind is ADAFACTOR and getattr(fsdp_param, "fsdp_placement", None) is None:
        return (
            "is a plain tensor of layout flat, of which the daemon's Adafactor has rows and columns, and torch's a piece; shard "
            'with fully_shard in its layout "dim0"'
        )
    return ""
