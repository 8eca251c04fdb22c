"""What programs and libraries read of ``FullyShardedDataParallel`` beside its public names."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import OptimStateDictConfig, StateDictConfig, StateDictType
from torch.distributed.fsdp._common_utils import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo

from shardd.torch._sharding.unit_handle import UnitHandle
from shardd.torch._state_dicts.state_dict_type import flat_states, settings_of
from shardd.torch._units.state import ShardState

if TYPE_CHECKING:
    from torch import nn

__all__ = ["ABSENT", "WrapperInternals"]

# Of torch's class, what has nothing here that it could truthfully be; and what says the same.
ABSENT = {
    "_inter_node_pg": "only hybrid strategies have replicas",
    "_handles": "a unit has one `_handle`, as in torch 2.13",
    "_communication_hook": "it is `_comm_hook`, as in torch 2.13",
    "_communication_hook_state": "it is `_comm_hook_state`, as in torch 2.13",
    "_exec_order_data": "the daemon pairs units by name in any order: shardd.torch.counters(model) counts them, `shardctl trace` "
    "shows them",
    "_unshard_stream": "the daemon owns the streams: `shardctl trace` shows what overlaps",
    "_post_backward_stream": "the daemon owns the streams: `shardctl trace` shows what overlaps",
    "_pre_unshard_stream": "the daemon owns the streams: `shardctl trace` shows what overlaps",
    "_all_reduce_stream": "the daemon owns the streams: `shardctl trace` shows what overlaps",
    "_free_event_queue": "what is unsharded is the job's memory and is not freed by a trainer: shardd.torch.memory_plan(model) "
    "says how much it is",
    "_fsdp_extension": "parameters that are tensor subclasses or DTensors are refused",
    "_gradient_predivide_factor": "gradients are added in fp32 and divided once, by the number of ranks",
    "_gradient_postdivide_factor": "gradients are added in fp32 and divided once, by the number of ranks",
}


class WrapperInternals:
    """torch's names, with torch's meaning; of what is read only."""

    if TYPE_CHECKING:

        @property
        def _state(self) -> ShardState: ...
        @property
        def training_state(self) -> TrainingState: ...

    def _assert_state(self, state: TrainingState | list[TrainingState]) -> None:
        wanted = [state] if isinstance(state, TrainingState) else list(state)
        if self.training_state not in wanted:
            raise ValueError(f"expected to be in states {wanted} but current state is {self.training_state}")

    @property
    def _is_root(self) -> bool | None:
        """None where the model has not been used yet."""
        return self._state._is_root

    @property
    def _has_params(self) -> bool:
        return bool(self._unit.fsdp_params)

    @property
    def _handle(self) -> UnitHandle | None:
        """None where the unit has no parameters."""
        return UnitHandle(self._unit) if self._has_params else None

    @property
    def params(self) -> list[nn.Parameter]:
        """The unit's ``FlatParameter``s; none with ``use_orig_params``, where parameters are the modules' own."""
        return UnitHandle(self._unit).flat_params()

    @property
    def _comm_hook(self) -> Callable[..., Any] | None:
        hook = self._unit.comm_hook
        return None if hook is None else hook.hook

    @property
    def _comm_hook_state(self) -> Any:
        hook = self._unit.comm_hook
        return None if hook is None else hook.state

    @property
    def _sync_gradients(self) -> bool:
        """False under ``no_sync``."""
        return bool(self._unit.reduce_grads)

    @property
    def _ignored_modules(self) -> set[nn.Module]:
        return set(self._unit_ignored.modules)

    @property
    def _ignored_params(self) -> set[nn.Parameter]:
        return set(self._unit_ignored.params)

    @property
    def _all_handles(self) -> list[UnitHandle]:
        """The handles of all units of the model."""
        root = self._state._find_root()
        units: list[Any] = [state._unit for module in root._modules for state in flat_states(module)]
        return [UnitHandle(unit) for unit in units if unit.fsdp_params]

    @property
    def _inter_node_pg(self) -> dist.ProcessGroup:
        """The ranks that have the same shard, in hybrid strategies."""
        mesh_info = self._unit.mesh_info
        if not isinstance(mesh_info, HSDPMeshInfo):
            raise AttributeError  # ABSENT has the text
        return mesh_info.replicate_process_group

    @property
    def _state_dict_type(self) -> StateDictType:
        return settings_of(self._state).state_dict_type

    @property
    def _state_dict_config(self) -> StateDictConfig:
        return settings_of(self._state).state_dict_config

    @property
    def _optim_state_dict_config(self) -> OptimStateDictConfig:
        return settings_of(self._state).optim_state_dict_config

    @property
    def _device_mesh(self) -> DeviceMesh | None:
        """As the program gave it; sharded state dicts are then of DTensors."""
        return self._state.__dict__["_given_mesh"]

    @property
    def _unit_ignored(self) -> Any:
        return self._state.ignored

    @property
    def _unit(self) -> Any:
        unit = self._state._unit
        assert unit is not None
        return unit
