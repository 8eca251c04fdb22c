"""``_handle`` of a wrapper: what programs read of torch's ``FlatParamHandle``, where it has a meaning here."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp._common_utils import HandleTrainingState
from torch.distributed.fsdp._flat_param import HandleShardingStrategy
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from shardd.torch._state_dicts.flat_places import names_in

__all__ = ["UnitHandle"]

_STRATEGIES = {
    ShardingStrategy.FULL_SHARD: HandleShardingStrategy.FULL_SHARD,
    ShardingStrategy.SHARD_GRAD_OP: HandleShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.NO_SHARD: HandleShardingStrategy.NO_SHARD,
    ShardingStrategy.HYBRID_SHARD: HandleShardingStrategy.HYBRID_SHARD,
    ShardingStrategy._HYBRID_SHARD_ZERO2: HandleShardingStrategy._HYBRID_SHARD_ZERO2,
}
_STATES = {
    TrainingState.IDLE: HandleTrainingState.IDLE,
    TrainingState.FORWARD: HandleTrainingState.FORWARD,
    TrainingState.PRE_BACKWARD: HandleTrainingState.BACKWARD_PRE,
    TrainingState.POST_BACKWARD: HandleTrainingState.BACKWARD_POST,
}


class UnitHandle:
    """The handle of one unit: it is read only, made anew at each access, and does not keep the unit."""

    def __init__(self, unit: Any) -> None:
        self._unit = unit

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UnitHandle) and other._unit is self._unit

    def __hash__(self) -> int:
        return hash(id(self._unit))

    def flat_params(self) -> list[nn.Parameter]:
        """There is one for each dtype and requires_grad, and none with ``use_orig_params``."""
        held = {id(p.holder): p.holder.sharded_param for p in self._unit.fsdp_params if p.holder is not None}
        return list(held.values())

    @property
    def _fully_sharded_module(self) -> nn.Module:
        wrapper: nn.Module = self._unit.modules[0]
        return getattr(wrapper, "_fsdp_wrapped_module", wrapper)

    @property
    def _sharding_strategy(self) -> HandleShardingStrategy:
        return _STRATEGIES[self._unit.strategy]

    @property
    def uses_sharded_strategy(self) -> bool:
        return bool(self._unit.strategy != ShardingStrategy.NO_SHARD)

    @property
    def _use_orig_params(self) -> bool:
        return bool(self._unit.use_orig_params)

    @property
    def _training_state(self) -> HandleTrainingState:
        if "_shows_full_params" in self._unit.modules[0].__dict__:
            return HandleTrainingState.SUMMON_FULL_PARAMS
        return _STATES[self._unit._training_state]

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The ranks that have the parameters between them."""
        group: dist.ProcessGroup = self._unit.mesh_info.shard_process_group
        return group

    @property
    def rank(self) -> int:
        return self.process_group.rank()

    @property
    def world_size(self) -> int:
        return self.process_group.size()

    @property
    def device(self) -> torch.device:
        device: torch.device = self._unit.device
        return device

    def __getattr__(self, name: str) -> Any:
        if name == "flat_param":
            return self._flat_param()
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"_handle.{name}: shardd has no FlatParamHandle; whole parameters are in summon_full_params(), what is unsharded and "
            "reduced in shardd.torch.counters(model), bytes in shardd.torch.memory_plan(model)"
        )

    def _flat_param(self) -> nn.Parameter:
        held = self.flat_params()
        if len(held) == 1:
            flat: Any = held[0]
            members = [p for p in self._unit.fsdp_params if p.holder is not None]
            # As torch's FlatParameter has them, of the moment.
            flat._fqns = tuple(names_in(self._unit.modules[0], flat))
            flat._shapes = tuple(member._orig_size for member in members)
            flat._numels = tuple(member._orig_size.numel() for member in members)
            return held[0]
        if self._unit.use_orig_params:
            raise AttributeError(
                "_handle.flat_param: with use_orig_params=True there is no FlatParameter; the module's own parameters are this "
                "rank's pieces (module.named_parameters())"
            )
        raise AttributeError(
            f"_handle.flat_param: the unit has {len(held)} FlatParameters, one for each dtype and requires_grad; take them from "
            "module.params"
        )
