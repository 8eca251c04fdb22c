"""Parameters of a model that are on a smaller mesh than the model itself: experts, as a rule.

The root's mesh is the model's, and its ranks are the job's. A smaller mesh has some ranks of this rank's row of it, in even distances, as a
dimension of one mesh over all ranks has; with replicas it has one row in each of the model's.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo

from shardd.torch._ranks.agreement import have_store
from shardd.torch._ranks.mesh import members_of
from shardd.torch._ranks.nodes import JobRanks
from shardd.torch._units.placement import Rows, rows_of
from shardd.torch._units.state import ShardState
from shardd.torch._units.subclasses import inner_of

__all__ = ["agree_on_rows", "settle_rows"]


def _shape(mesh_info: FSDPMeshInfo) -> tuple[int, int]:
    replicas = mesh_info.replicate_mesh_size if isinstance(mesh_info, HSDPMeshInfo) else 1
    return replicas, mesh_info.shard_mesh_size


def _on_mesh(fsdp_param: Any, of_model: FSDPMeshInfo, where: str) -> Rows | None:
    """Returns which rows a parameter has in the job; None: all of them. NotImplementedError where its mesh is no such part."""
    own, model = members_of(fsdp_param.mesh_info), members_of(of_model)
    if _shape(fsdp_param.mesh_info) == _shape(of_model) and own.ranks == model.ranks:
        return None
    replicas, count = _shape(fsdp_param.mesh_info)
    replicas_of_model, rows = _shape(of_model)
    places = [[model.ranks.index(rank) if rank in model.ranks else -1 for rank in own.ranks[i : i + count]]
              for i in range(0, replicas * count, count)]  # fmt: skip
    first, step = places[0][0], places[0][1] - places[0][0] if count > 1 else 1
    row = first // rows
    wanted = [[(first % rows) + (row + i) * rows + j * step for j in range(count)] for i in range(replicas)]
    fits = first >= 0 and step > 0 and first % rows + (count - 1) * step < rows
    alone = replicas == replicas_of_model and (replicas == 1 or row == 0)
    if not (fits and alone and places == wanted):
        raise NotImplementedError(
            f'register parameter "{where}": its mesh is no regular part of the model\'s (got {_text(fsdp_param.mesh_info)}, want '
            f"ranks of one row, in even distances, of {_text(of_model)}, and a row for each of its rows where it has replicas); "
            "pass a dimension of one mesh over all ranks as its mesh, and to the root the mesh of all data parallel ranks"
        )
    numel = fsdp_param.padded_sharded_param_size.numel()
    return Rows(rows, numel, first % rows, step)


def _text(mesh_info: FSDPMeshInfo) -> str:
    replicas, count = _shape(mesh_info)
    ranks = members_of(mesh_info).ranks
    return " and ".join(str(ranks[i : i + count]) for i in range(0, replicas * count, count))


def settle_rows(root: ShardState) -> None:
    """Notes with each parameter of the model where it has rows of its own. Nobody is waited for."""
    assert root._unit is not None
    for state in root._state_ctx.all_states:
        assert isinstance(state, ShardState)
        unit = state._unit
        for fsdp_param in [] if unit is None or unit.layout != "dim0" else unit.fsdp_params:
            info = fsdp_param._module_info
            where = fsdp_param._param_fqn or f"{type(info.module).__name__}.{info.param_name}"
            rows = _on_mesh(fsdp_param, root._unit.mesh_info, where)
            if rows is not None and inner_of(fsdp_param) is not None:
                raise NotImplementedError(
                    f'register parameter "{where}": it is a {type(fsdp_param.sharded_param._local_tensor).__name__}, with '
                    f"fsdp_pre_all_gather, on a smaller mesh than the model (got {_text(fsdp_param.mesh_info)}, want "
                    f"{_text(root._unit.mesh_info)}), where that is not served; shard it on the model's mesh, or ignore it"
                )
            known = rows_of(fsdp_param)
            if rows is not None and known is not None:
                rows = dataclasses.replace(rows, numel=max(known.numel, rows.numel))
            fsdp_param._shardd_rows = rows


def agree_on_rows(root: ShardState, index: str, ranks: JobRanks) -> None:
    """Makes rows as long as the largest shard of any rank: experts may be of other sizes on other ranks. Waits for all ranks, once."""
    params = [p for s in root._state_ctx.all_states if s._unit for p in s._unit.fsdp_params if rows_of(p) is not None]
    if not params:
        return
    if not have_store():
        return
    own = [rows_of(p).numel for p in params]  # type: ignore[union-attr]
    for told in ranks.tell(f"rows {index}", json.dumps(own), "said how large its experts are"):
        theirs = json.loads(told)
        if len(theirs) == len(own):  # else the plans differ, which the daemon says
            own = [max(pair) for pair in zip(own, theirs, strict=True)]
    for fsdp_param, numel in zip(params, own, strict=True):
        fsdp_param._shardd_rows = dataclasses.replace(rows_of(fsdp_param), numel=numel)  # type: ignore[type-var]
