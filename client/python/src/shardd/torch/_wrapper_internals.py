"""What programs and libraries read of ``FullyShardedDataParallel`` beside its public names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import OptimStateDictConfig, StateDictConfig, StateDictType
from torch.distributed.fsdp._common_utils import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo

from shardd.torch._state_dict_type import settings_of

if TYPE_CHECKING:
    from shardd.torch._state import ShardState

__all__ = ["WrapperInternals"]


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
        """None: the model has not been used yet."""
        return self._state._is_root

    @property
    def _has_params(self) -> bool:
        return bool(self._unit.fsdp_params)

    @property
    def _inter_node_pg(self) -> dist.ProcessGroup:
        """Of hybrid strategies: the ranks that hold the same shard."""
        mesh_info = self._unit.mesh_info
        if not isinstance(mesh_info, HSDPMeshInfo):
            raise AttributeError("_inter_node_pg: only hybrid strategies have replicas")
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
    def _unit(self) -> Any:
        unit = self._state._unit
        assert unit is not None
        return unit
