"""One unit in layout ``flat``: what a wrapper, or ``fully_shard`` with ``layout="flat"``, makes of its parameters."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy, ShardingStrategy
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from shardd.torch._flat_param import FlatShardParam, Use, flat_param_of, lay_out, managed_uses
from shardd.torch._group import ShardGroup

if TYPE_CHECKING:
    from shardd.torch._state import ShardState

__all__ = ["RESHARDS", "FlatGroup", "settle_ties"]

# Strategies that give parameters back between forward and backward.
RESHARDS = (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)


class FlatGroup(ShardGroup):
    """Of one unit. ``modules`` is what carries its hooks, ``content`` what its parameters are looked for in."""

    layout = "flat"

    def __init__(
        self,
        state: ShardState,
        modules: tuple[nn.Module, ...],
        content: tuple[nn.Module, ...],
        mesh_info: FSDPMeshInfo,
        strategy: ShardingStrategy,
        reshard_after_forward: bool,
        mp_policy: MixedPrecisionPolicy,
        offload_policy: OffloadPolicy,
        ignored_modules: set[nn.Module],
        ignored_params: set[nn.Parameter],
    ) -> None:
        params: dict[FlatShardParam, None] = {}
        whole = strategy == ShardingStrategy.NO_SHARD
        ref = weakref.ref(self)
        for module, name, param in list(managed_uses(content, ignored_modules, ignored_params)):
            known = flat_param_of(param)
            if known is None:
                known = FlatShardParam(param, mesh_info, whole)
                params[known] = None
            known.uses.append(Use(ref, module, name))  # of a tied parameter of another unit too
        super().__init__(
            state,
            list(params),
            modules,
            mesh_info,
            mesh_info if reshard_after_forward else None,
            torch.device("cpu"),
            mp_policy,
            offload_policy,
        )
        self.strategy = strategy
        shards = 1 if whole else mesh_info.shard_mesh_size
        lay_out(self.fsdp_params, mesh_info.shard_mesh_rank if shards > 1 else 0, shards, mp_policy.param_dtype)

    def lazy_init(self) -> None:
        if self._bound:
            return
        for fsdp_param in self.fsdp_params:
            fsdp_param.reset_sharded_param()
        FSDPParamGroup._validate_no_meta_params(self)  # type: ignore[arg-type]
        for fsdp_param in self.fsdp_params:
            fsdp_param.init_dtype_attrs(self.mp_policy)


def settle_ties(root: nn.Module, states: list[ShardState]) -> None:
    """A tied parameter is its first user's, in the order of the module tree, as the daemon's plan has it."""
    number = {id(module): i for i, module in enumerate(root.modules())}
    units: list[Any] = [state._unit for state in states]
    moved = False
    for unit in units:
        for fsdp_param in list(unit.fsdp_params) if isinstance(unit, FlatGroup) else ():
            if len(fsdp_param.uses) == 1:
                continue
            fsdp_param.uses.sort(key=lambda use: number.get(id(use.module), len(number)))
            if fsdp_param.home is not unit:
                unit.fsdp_params.remove(fsdp_param)
                fsdp_param.home.fsdp_params.append(fsdp_param)
                moved = True
    if moved:
        for state in states:
            state.list_groups()
