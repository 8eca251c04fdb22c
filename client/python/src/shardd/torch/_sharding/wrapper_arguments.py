"""What ``FullyShardedDataParallel`` and ``fully_shard(layout="flat")`` make of their arguments."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import _broadcast_coalesced
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy, ShardingStrategy
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo

from shardd.torch._process import environment
from shardd.torch._sharding.device import check_places, move
from shardd.torch._sharding.ignored import Ignored
from shardd.torch._units.flat_shard_param import is_sharded
from shardd.torch._units.state import state_of

__all__ = [
    "HYBRID",
    "forget_mesh",
    "make_mesh",
    "mixed_policy",
    "place",
    "strategy_of",
    "sync",
]

HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
_SYNC_BYTES = 250 << 20  # of one broadcast

# Meshes of groups that were given as groups, so that all units of a model have the same.
_meshes: dict[tuple[Any, ...], tuple[tuple[Any, ...], DeviceMesh]] = {}


def strategy_of(strategy: ShardingStrategy | None, world_size: int) -> ShardingStrategy:
    """As torch decides: one rank has nothing to shard."""
    strategy = strategy or ShardingStrategy.FULL_SHARD
    if not isinstance(strategy, ShardingStrategy):
        raise ValueError(
            f"sharding_strategy: not a ShardingStrategy (got {strategy!r}, want one of {list(ShardingStrategy)})"
        )
    if world_size == 1 and strategy not in HYBRID:
        if strategy != ShardingStrategy.NO_SHARD:
            warnings.warn(
                f"FSDP is switching to use `NO_SHARD` instead of {strategy} since the world size is 1.", stacklevel=4
            )
        return ShardingStrategy.NO_SHARD
    return strategy


def _mesh_of_groups(groups: tuple[Any, ...], ranks: torch.Tensor, device_type: str) -> DeviceMesh:
    key = (dist.get_rank(), device_type, *(group.group_name for group in groups))  # ranks may be threads
    known = _meshes.get(key)
    if known is not None and all(a is b for a, b in zip(known[0], groups)):
        return known[1]
    if len(groups) == 1:
        mesh = DeviceMesh.from_group(groups[0], device_type)
    else:
        mesh = DeviceMesh.from_group(list(groups), device_type, mesh=ranks, mesh_dim_names=("replicate", "shard"))
    _meshes[key] = (groups, mesh)
    return mesh


def _check_group(group: Any, strategy: ShardingStrategy | None) -> None:
    """Refuses stand-ins: whose processes share a parameter is what the daemon is told."""
    known = isinstance(group, dist.ProcessGroup) and group in dist.distributed_c10d._world.pg_map
    if not known:
        wrong = "unknown group" if isinstance(group, dist.ProcessGroup) else "wrong type"
        raise ValueError(
            f"process_group: {wrong} for {strategy} (got {type(group)}, want a ProcessGroup of init_process_group or "
            'new_group); a stand-in has no ranks that the daemon could serve: use backend "gloo", with one rank too'
        )


def make_mesh(
    process_group: Any,
    device_mesh: DeviceMesh | None,
    strategy: ShardingStrategy | None,
    may_choose: bool,
    device_type: str,
) -> FSDPMeshInfo:
    """The ranks of a unit. Hybrid strategies: (shard group, replicate group), a mesh (replicate, shard), or, where
    ``may_choose``, shard groups of the ranks of a node (LOCAL_WORLD_SIZE)."""
    if process_group is not None and device_mesh is not None:
        raise ValueError(
            "Cannot pass both process_group and device_mesh at the same time. Please just pass only one of them."
        )
    if strategy not in HYBRID:
        if device_mesh is not None:
            mesh = device_mesh if device_mesh.ndim == 1 else device_mesh[(device_mesh.mesh_dim_names or ("",))[0]]
        else:
            if process_group is not None:
                _check_group(process_group, strategy)
            group = process_group or dist.distributed_c10d._get_default_group()
            mesh = _mesh_of_groups((group,), torch.empty(0), device_type)
        return FSDPMeshInfo(mesh, shard_mesh_dim=0)
    if device_mesh is not None:
        if device_mesh.ndim != 2:
            raise ValueError(f"Expected device_mesh to have ndim=2 but got {device_mesh.ndim}")
        mesh = device_mesh
    elif process_group is None:
        if not may_choose:
            raise ValueError(
                f"Manual wrapping with {strategy} requires explicit specification of process group or device_mesh."
            )
        world, local = dist.get_world_size(), environment.count(environment.LOCAL_WORLD_SIZE)
        if local < 1 or world % local:
            raise ValueError(
                f"form hybrid shard groups: LOCAL_WORLD_SIZE says no equal nodes (got {local}, world size {world}); pass "
                "process_group=(shard group, replicate group) or device_mesh"
            )
        mesh = init_device_mesh(device_type, (world // local, local), mesh_dim_names=("replicate", "shard"))
    else:
        pair = isinstance(process_group, tuple) and len(process_group) == 2
        if not pair or not all(isinstance(group, dist.ProcessGroup) for group in process_group):
            raise ValueError(
                "Expected process_group to be passed in as either None or Tuple[dist.ProcessGroup, dist.ProcessGroup] "
                f"but got {type(process_group)}"
            )
        shard, replicate = process_group
        row, column = (torch.tensor(dist.get_process_group_ranks(group)) for group in (shard, replicate))
        ranks = column[:, None] + row[None, :] - dist.get_rank()  # groups of one form, as torch makes them
        if ranks.min() < 0 or ranks.unique().numel() != ranks.numel() or ranks.max() >= dist.get_world_size():
            raise ValueError(
                f"form hybrid shard groups: ranks {row.tolist()} and {column.tolist()} are no row and column of a regular "
                "mesh; pass device_mesh"
            )
        mesh = _mesh_of_groups((replicate, shard), ranks, device_type)
    return HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)


def forget_mesh(module: nn.Module, mesh: DeviceMesh) -> None:
    """Units in ``module`` that a policy wrapped over ``mesh``, which the program has not given: their state dicts are not
    of DTensors."""
    for below in module.modules():
        state = state_of(below)
        if state is not None and state.__dict__.get("_given_mesh") is mesh:
            state.__dict__["_given_mesh"] = None


def mixed_policy(mixed_precision: MixedPrecision | None) -> MixedPrecisionPolicy:
    """What of it holds for a unit's parameters."""
    if mixed_precision is None:
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    return MixedPrecisionPolicy(
        param_dtype=mixed_precision.param_dtype,
        reduce_dtype=mixed_precision.reduce_dtype,
        cast_forward_inputs=mixed_precision.cast_forward_inputs,
    )


def own_modules(module: nn.Module, ignored: Ignored) -> Iterator[nn.Module]:
    """Breadth first, as torch materializes; not into other units."""
    queue, seen = [module], {module}
    for current in queue:
        yield current
        for child in current.children():
            if child not in seen and state_of(child) is None and child not in ignored.modules:
                seen.add(child)
                queue.append(child)


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    return itertools.chain(module.parameters(recurse=False), module.buffers(recurse=False))


def place(
    module: nn.Module,
    ignored: Ignored,
    device: torch.device,
    param_init_fn: Callable[[nn.Module], Any] | None,
) -> None:
    """What the unit is made of is on ``device``, with values."""
    materialize(module, ignored, param_init_fn, device)
    modules = list(own_modules(module, ignored))  # param_init_fn may have put others in their place
    move(modules, ignored, device)
    check_places(modules, ignored, device)


def materialize(
    module: nn.Module,
    ignored: Ignored,
    param_init_fn: Callable[[nn.Module], Any] | None,
    device: torch.device,
) -> None:
    """Gives values to what is on the meta device: ``param_init_fn`` of every module, or its ``reset_parameters``."""
    modules = list(own_modules(module, ignored))
    if not any(t.is_meta for m in modules for t in _tensors(m) if t not in ignored.params):
        return
    if param_init_fn is not None:
        if not callable(param_init_fn):
            raise ValueError(f"Expected {param_init_fn} to be callable but got {type(param_init_fn)}")
        for current in modules:
            param_init_fn(current)
        return
    with torch.no_grad():
        for current in modules:
            if not any(t.is_meta for t in _tensors(current)):
                continue
            if not callable(getattr(current, "reset_parameters", None)):
                raise AttributeError(
                    f"materialize a {type(current).__name__} from the meta device: it has no reset_parameters(); define "
                    "it, or pass param_init_fn"
                )
            current.to_empty(device=device, recurse=False)
            current.reset_parameters()  # type: ignore[operator]


def sync(module: nn.Module, ignored: Ignored, mesh_info: FSDPMeshInfo, synced: set[int]) -> None:
    """Rank 0's parameters and buffers on every rank; each tensor once, ``synced`` has the ids of those that were sent."""
    tensors = []
    for current in module.modules():
        if current in ignored.modules:
            continue
        for tensor in _tensors(current):
            ours = not isinstance(tensor, nn.Parameter) or (not is_sharded(tensor) and tensor not in ignored.params)
            if ours and id(tensor) not in synced:
                synced.add(id(tensor))
                tensors.append(tensor.detach())
    if not tensors:
        return
    if isinstance(mesh_info, HSDPMeshInfo):
        _broadcast_coalesced(mesh_info.replicate_process_group, tensors, _SYNC_BYTES, 0)
    _broadcast_coalesced(mesh_info.shard_process_group, tensors, _SYNC_BYTES, 0)
