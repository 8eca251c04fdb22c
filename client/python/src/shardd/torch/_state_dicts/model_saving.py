"""One state dict of a model with flat units, while it is made.

It begins at the outermost unit: parameters are resharded, and if the job is open all ranks enter its full parameters (nothing
is gathered where they share a node). Each unit then replaces its own values, one tensor at a time, and the outermost leaves.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import StateDictType

from shardd.torch._job.job import job_of
from shardd.torch._ranks.gather import assemble, row_cuts, rows_as_dtensor_of, rows_as_sharded_tensor
from shardd.torch._state_dicts.flat_places import Uses, group_of, places_of, uses_of
from shardd.torch._state_dicts.flat_units import (
    is_unsharded,
    is_whole,
    kind_of,
    mark,
    ranges_of,
    shows_full_params,
    states_below,
)
from shardd.torch._state_dicts.pieces import reshard
from shardd.torch._state_dicts.state_dict_type import settings_of
from shardd.torch._units.state import ShardState

__all__ = ["Saving"]


@dataclass
class Saving:
    """A state dict that is being made, from its outermost unit's ``begin`` to its ``end``; ``replace`` is each unit's.

    It owns what was gathered for it, and whether full parameters of the job are entered.
    """

    module: nn.Module  # the outermost unit's
    uses: Uses
    job: Any = None  # whose full parameters are entered
    shows_full: bool = False  # the program has entered them: modules show them, perhaps edited
    ranges: dict[int, list[tuple[int, int]]] = field(default_factory=dict)  # by parameter, where there is no job
    done: dict[int, torch.Tensor] = field(default_factory=dict)  # tied parameters, once

    @classmethod
    def begin(cls, module: nn.Module, state: ShardState) -> Saving:
        """``module`` is the outermost unit's and ``state`` its state. All ranks call it together."""
        root = state._find_root()
        states = states_below(root)
        mark(states)
        saving = cls(module, uses_of(states))
        job = job_of(root)
        if shows_full_params(root):
            saving.shows_full = True
            return saving
        for outermost in root._modules:
            reshard(outermost)
        if kind_of(state) == StateDictType.LOCAL_STATE_DICT:
            return saving
        if job is not None and job.alive and job.engine is not None:
            if not job.ranks.cut:
                job.engine.enter_full_params(False)
                saving.job = job
                return saving
            job.engine.wait_for_commit()
        params = list(dict.fromkeys(p for s in states if s._unit is not None for p in s._unit.fsdp_params))
        saving.ranges = ranges_of(params)
        return saving

    def end(self) -> None:
        if self.job is not None and self.job.alive:
            self.job.engine.leave_full_params()

    def replace(self, module: nn.Module, state: ShardState, state_dict: dict[str, Any], prefix: str) -> None:
        """Puts the values of the unit of ``module`` into its state dict."""
        kind, settings = kind_of(state), settings_of(state)
        places = places_of(module, self.uses)
        only = (
            0
            if kind == StateDictType.FULL_STATE_DICT
            and not is_unsharded(state)  # as torch: each rank has all
            and getattr(settings.state_dict_config, "rank0_only", False)
            else None
        )
        for key in [k for k in state_dict if k.startswith(f"{prefix}_flat_param")]:
            del state_dict[key]
        for place in places:
            key = prefix + place.key
            if self.shows_full:
                shown = place.module._parameters.get(place.name)
                value = getattr(place.module, place.name) if shown is None else shown
                if value.shape == place.param._orig_size:  # else another rank has it
                    state_dict[key] = value.detach().clone()
                continue
            if kind == StateDictType.LOCAL_STATE_DICT:
                state_dict[key] = self._local(state, place.param)
                continue
            if kind != StateDictType.FULL_STATE_DICT:
                state_dict[key] = self._sharded(state, place.param)
                continue
            whole = self._whole(place.param, only, bool(getattr(settings.state_dict_config, "offload_to_cpu", False)))
            if whole is None:
                state_dict.pop(key, None)
            else:
                state_dict[key] = whole
        if only is not None and dist.get_rank(state._unit.mesh_info.shard_process_group) != only:  # type: ignore[union-attr]
            for key in [k for k in state_dict if k.startswith(prefix)]:  # buffers, too
                del state_dict[key]

    @staticmethod
    def _local(state: ShardState, param: Any) -> torch.Tensor:
        """Returns the piece that this rank has, in its memory: a copy where that is the job's and trainers never write."""
        job = job_of(state)
        state.given_out = job is None
        local: torch.Tensor = param.local
        return local if job is None or job.passes else local.clone()

    def _sharded(self, state: ShardState, param: Any) -> Any:
        """Returns the value of a sharded state dict; on a GPU the rows alone are taken there."""
        mesh = state.__dict__.get("_given_mesh")
        config: Any = settings_of(state).state_dict_config
        if mesh is None and getattr(config, "_use_dtensor", False):
            mesh = param.mesh_info.mesh
        if self.job is None or not param._orig_size:
            whole = self._whole(param, None)
            assert whole is not None
        else:
            dim = None if mesh is None else mesh.ndim - 1
            rank = dist.get_rank(group_of(param)) if mesh is None else mesh.get_local_rank(dim)
            whole = _with_rows(
                self.job, param, rank, dist.get_world_size(group_of(param)) if mesh is None else mesh.size(dim)
            )
        if mesh is None:
            return rows_as_sharded_tensor(whole, group_of(param))
        rows = rows_as_dtensor_of(whole, mesh)
        return rows.to("cpu") if getattr(config, "offload_to_cpu", False) and rows.is_cuda else rows

    def _whole(self, param: Any, only: int | None, on_host: bool = False) -> torch.Tensor | None:
        """Returns a copy of the whole, where the parameter is or in host memory; collective where there is no job.

        ``only``: for that rank of the shard group alone.
        """
        if only is not None and (self.job is not None or is_whole(param)) and dist.get_rank(group_of(param)) != only:
            return None
        if id(param) in self.done:
            return self.done[id(param)]
        shape = param._orig_size
        device = torch.device("cpu") if on_host else param.sharded_param.device
        if self.job is not None:
            whole = torch.empty(shape, dtype=param.sharded_param.dtype, device=device)
            given = self.job.engine.copy_full_parameter(self.job.index_of(param), whole)
            assert given
        elif is_whole(param):
            whole = param.local.reshape(shape).to(device, memory_format=torch.contiguous_format, copy=True)
        else:
            found = assemble(
                param.local, self.ranges[id(param)], shape, param.sharded_param.dtype, group_of(param), only
            )
            if found is None:
                return None
            whole = found.to(device)
        if len(param.uses) > 1:
            self.done[id(param)] = whole
        return whole


def _with_rows(job: Any, param: Any, rank: int, world: int) -> torch.Tensor:
    """Returns a whole of which only the rows of this rank have values, and take memory."""
    whole = torch.empty(param._orig_size, dtype=param.sharded_param.dtype)
    first, end = row_cuts(whole.shape[0], world)[rank : rank + 2]
    given = job.engine.copy_stored(job.index_of(param), first * whole[:1].numel(), whole[first:end].view(-1))
    assert given
    return whole
