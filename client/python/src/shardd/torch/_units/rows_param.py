"""Parameters of layout ``dim0``: torch's own, whose sharded parameters are DTensors over this rank's shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import _get_param_module_infos
from torch.distributed.tensor import DTensor

from shardd.torch._units.shard_group import offloads
from shardd.torch._units.subclasses import gathers_itself

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

__all__ = ["rows_params"]


class _RowsParam(FSDPParam):
    """One whose local tensor is not padded, as its memory may be the job's."""

    def reset_sharded_param(self) -> None:
        """Reads again what the program has made of the parameter since, behind each load too. Torch's own method copies an uneven shard
        into a padded tensor, where it is another object's or a tensor subclass: the daemon would train what nobody reads any more."""
        param: Any = getattr(self._module_info.module, self._module_info.param_name)
        swaps = torch.__future__.get_swap_module_params_on_conversion()
        if not isinstance(param, DTensor) or (swaps and param is not self.sharded_param):
            super().reset_sharded_param()  # which raises
            return
        self.sharded_param, local = cast(nn.Parameter, param), param._local_tensor
        if local.is_meta:
            return
        if not gathers_itself(local):
            self._sharded_param_data = local.reshape(-1)
        self._sharding_spec = param._spec


def rows_params(
    params: list[nn.Parameter],
    modules: tuple[nn.Module, ...],
    mesh_info: FSDPMeshInfo,
    post_forward_mesh_info: FSDPMeshInfo | None,
    device: torch.device,
    mp_policy: MixedPrecisionPolicy,
    offload_policy: OffloadPolicy,
    placement: Callable[[nn.Parameter], Any] | None = None,
) -> list[FSDPParam]:
    """``placement``: the dimension that is cut; None, or where it gives None: rows. Raises what torch does of those that it does not
    cut."""
    infos = _get_param_module_infos(params, modules)
    # Of CPUs, shards are in the daemon's memory on the host whatever the policy. What is offloaded it has pinned.
    where = CPUOffloadPolicy(pin_memory=False) if offloads(offload_policy, device) else OffloadPolicy()
    return [
        _RowsParam(param, info, mesh_info, post_forward_mesh_info, device, placement, mp_policy, where)
        for param, info in zip(params, infos)
    ]
