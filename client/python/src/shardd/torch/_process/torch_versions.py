"""What differs in Python between the versions of torch that are served: what the oldest ones lack, as later ones have it, and
what the newest ones do otherwise.

| name | torch |
|---|---|
| ``DataParallelMeshDims`` | not in 2.10 |
| ``ShardPlacementResult`` | not in 2.10, where ``shard_placement_fn`` returns a placement or None (``PLACES_ON_MESHES``) |
| ``fsdp_init``: steps of ``fully_shard`` in ``_fsdp_init`` | 2.10 has half of them in ``fully_shard`` itself |
| ``FSDPState._fsdp_param_groups`` | one, ``_fsdp_param_group``, in 2.10 |
| ``FSDPParam._unsharded_dtensor_spec`` | ``_tp_spec`` in 2.10 |
| ``checkpoint.state_dict._get_fsdp_process_group`` | not in 2.10, which asks for no group there |
| ``FSDPModule``: ``reset_iter_state``, ``set_reduce_scatter_unused_params`` and three others | not in 2.10, and so not here with it |
| ``dist.all_gather_single`` | ``all_gather_into_tensor`` where there is none; later versions warn of that name |
| ``ProcessGroup.all_gather_single`` | ``_allgather_base`` in 2.10 |
| ``FSDPModule.__new__``, as when a sharded ``Sequential`` is sliced: ``_orig_cls_mro_index`` | 2.10 takes the third class |
| ``FSDPState._lazy_init`` lists a state once | 2.10 lists that of a list of modules for each of them |
| gradients of ``MixedPrecisionPolicy(param_dtype)`` without ``reduce_dtype`` | added in ``param_dtype`` up to 2.14, from 2.15 on in the parameters' own dtype |

In C++ it is ``client/torch/torch_versions.h``.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard import _fsdp_common, _fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_init as _torchs_init
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.utils import _get_root_modules

__all__ = [
    "PLACES_ON_MESHES",
    "DataParallelMeshDims",
    "ShardPlacementResult",
    "all_gather_of_group",
    "all_gather_single",
    "find_states",
    "fsdp_init",
    "new_of_original",
    "reduction_policy",
    "set_param_groups",
    "unsharded_spec",
]

if TYPE_CHECKING:
    from torch.distributed.fsdp import DataParallelMeshDims
    from torch.distributed.fsdp._fully_shard._fsdp_common import ShardPlacementResult
else:
    try:
        from torch.distributed.fsdp import DataParallelMeshDims
    except ImportError:

        @dataclasses.dataclass(frozen=True)
        class DataParallelMeshDims:
            """Which dimensions of a mesh are data parallel: names, or tuples of names."""

            shard: str | tuple[str, ...] | None = None
            replicate: str | tuple[str, ...] | None = None

            def __post_init__(self) -> None:
                if self.shard is None and self.replicate is None:
                    raise ValueError("At least one of shard or replicate must be set in DataParallelMeshDims")

            @property
            def shard_names(self) -> tuple[str, ...]:
                return _names(self.shard)

            @property
            def replicate_names(self) -> tuple[str, ...]:
                return _names(self.replicate)

    try:
        from torch.distributed.fsdp._fully_shard._fsdp_common import ShardPlacementResult
    except ImportError:

        @dataclasses.dataclass
        class ShardPlacementResult:
            """A placement, and the mesh that it is on."""

            placement: Any
            mesh_info: Any


PLACES_ON_MESHES = hasattr(_fsdp_common, "ShardPlacementResult")


def _names(dims: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (dims,) if isinstance(dims, str) else tuple(dims or ())


class _Init:
    """What ``_fsdp_init`` has in later versions, by the same names."""

    @staticmethod
    def _validate_module(module: Any, name: str) -> None:
        if isinstance(module, nn.ModuleList | nn.ModuleDict) and type(module).forward is nn.Module.forward:
            raise ValueError(f"{name} does not support containers that do not implement forward: {module}")

    @staticmethod
    def _validate_mesh(mesh: DeviceMesh, dp_mesh_dims: Any = None) -> None:
        if dp_mesh_dims is not None:
            raise NotImplementedError(
                f"fully_shard: dp_mesh_dims needs a later torch (got {torch.__version__}); pass the sub-mesh as mesh"
            )
        if mesh.ndim not in (1, 2):
            raise ValueError(f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}")
        if mesh.ndim == 2 and mesh.mesh_dim_names is None:
            raise AssertionError("Please init the 2D mesh for HSDP with mesh_dim_names specified")

    @staticmethod
    def _init_default_mesh() -> DeviceMesh:
        if not dist.is_initialized():
            dist.init_process_group()
        return init_device_mesh(torch._C._get_accelerator().type, (dist.get_world_size(),))

    @staticmethod
    def _get_mesh_info(mesh: DeviceMesh, dp_mesh_dims: Any = None) -> FSDPMeshInfo:
        if mesh.ndim == 1:
            return FSDPMeshInfo(mesh, shard_mesh_dim=0)
        return HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)

    @staticmethod
    def _get_modules_and_states(module: Any, device: torch.device, ignored: Any) -> tuple[Any, ...]:
        modules = (module,) if isinstance(module, nn.Module) else tuple(_get_root_modules(module))
        managed = _torchs_init._get_managed_modules(modules, ignored)
        params, buffers = _torchs_init._get_managed_states(managed, ignored)
        _torchs_init._move_states_to_device(params, buffers, device)
        return module, modules, managed, params, buffers

    @staticmethod
    def _apply_to_module(
        modules: tuple[nn.Module, ...], known: dict[type, type], base: type, prefix: str, deepcopy: Callable[..., Any]
    ) -> None:
        for module in modules:
            cls = type(module)
            if cls not in known:
                known[cls] = type(f"{prefix}{cls.__name__}", (base, cls), {"__deepcopy__": deepcopy})
            module.__class__ = known[cls]


fsdp_init: Any = (
    _torchs_init
    if hasattr(_torchs_init, "_get_modules_and_states")
    else types.SimpleNamespace(
        **{n: getattr(_Init, n) for n in dir(_Init) if not n.startswith("__")}, **vars(_torchs_init)
    )
)


def _new_of_original(cls: type[Any], *args: Any, **kwargs: Any) -> Any:
    original = cls.__mro__[cls._orig_cls_mro_index]
    made = original.__new__(original, *args, **kwargs)
    if _fully_shard._enable_fsdp_module_new_init:
        made.__init__(*args, **kwargs)
    return made


new_of_original: Any = FSDPModule.__new__ if hasattr(FSDPModule, "_orig_cls_mro_index") else _new_of_original


all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def all_gather_of_group(group: Any, output: torch.Tensor, own: torch.Tensor, options: Any) -> Any:
    """Returns the work of what ``all_gather_single`` does, with ``options``."""
    call = group.all_gather_single if hasattr(group, "all_gather_single") else group._allgather_base
    return call(output, own, options)


def find_states(root: FSDPState) -> None:
    """Makes ``root`` the root of its model, and lists the states of all its modules, each once, in what they share."""
    FSDPState._lazy_init(root)
    root._state_ctx.all_states[:] = dict.fromkeys(root._state_ctx.all_states)


def set_param_groups(state: Any, groups: list[Any]) -> None:
    """``groups``, one at most, are what ``FSDPModule``'s methods go through."""
    if hasattr(state, "_fsdp_param_groups"):
        state._fsdp_param_groups[:] = groups
    else:
        state._fsdp_param_group = groups[0] if groups else None


def unsharded_spec(fsdp_param: Any) -> Any:
    """Returns what a parameter that was a DTensor before it was sharded is when it is unsharded."""
    return fsdp_param._tp_spec if hasattr(fsdp_param, "_tp_spec") else fsdp_param._unsharded_dtensor_spec


_REDUCES_AS_STORED = hasattr(FSDPParam, "unsharded_grad_dtype")


def reduction_policy(asked: MixedPrecisionPolicy, stored: list[torch.dtype]) -> MixedPrecisionPolicy:
    """Returns ``asked`` with the dtype in which this torch adds the gradients of a unit whose parameters are in ``stored``."""
    if not _REDUCES_AS_STORED or asked.reduce_dtype is not None or asked.param_dtype is None:
        return asked
    dtypes = [dtype for dtype in stored if dtype.is_floating_point]
    if not dtypes:
        return asked
    return dataclasses.replace(asked, reduce_dtype=functools.reduce(torch.promote_types, dtypes))
