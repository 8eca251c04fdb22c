"""What ``fully_shard`` refuses of parameters that are tensor subclasses: before it has replaced any parameter of the model, so that the
program may go on with the model as it was. Likewise, with an older torch, meshes that ``shard_placement_fn`` gives.

Where a module below was sharded by a call of its own, on a mesh that only shows to be smaller than the model's when an outer one is, that
is the outer one's call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.utils import _get_root_modules

from shardd.torch._process.torch_versions import PLACES_ON_MESHES, ShardPlacementResult
from shardd.torch._process.torch_versions import fsdp_init as _fsdp_init
from shardd.torch._units.placement import checked
from shardd.torch._units.state import state_of
from shardd.torch._units.subclasses import check_subclass, gathers_itself, inner_of, refuse_subclass

__all__ = ["asked_once", "refuse_subclasses"]


def asked_once(shard_placement_fn: Callable[[nn.Parameter], Any] | None) -> Callable[[nn.Parameter], Any] | None:
    """Returns a function that asks the program's once for each parameter, however often it is called itself."""
    if shard_placement_fn is None:
        return None
    known: dict[int, tuple[nn.Parameter, Any]] = {}  # with the parameter, whose id nobody else has meanwhile

    def placement(param: nn.Parameter) -> Any:
        if id(param) not in known:
            known[id(param)] = param, shard_placement_fn(param)
        return known[id(param)][1]

    return placement


def refuse_subclasses(
    modules: tuple[nn.Module, ...],
    mesh: DeviceMesh | None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None,
    ignored_params: set[nn.Parameter] | None,
    dp_mesh_dims: Any,
) -> None:
    """Looks at all parameters that ``fully_shard`` of ``modules``, with its policy, is going to shard, and at those that are sharded
    below them. Changes nothing."""
    roots = tuple(m for m in _get_root_modules(list(modules)) if state_of(m) is None)  # else torch's contract says so
    managed = _fsdp_init._get_managed_modules(roots, ignored_params)
    names: dict[int, str] = {}
    every, params = _fsdp_init._get_managed_states(managed, ignored_params)[0], []
    for param in every:
        what = f"fully_shard: a parameter of shape {tuple(param.shape)}"
        if isinstance(param, DTensor):
            local = param._local_tensor
            refuse_subclass(local, f"{what}, which is tensor parallel", also=gathers_itself(local))
        elif gathers_itself(param):
            params.append(param)
        else:
            check_subclass(param, what, torch.device("cpu"))
        names[id(param)] = what
    below = _sharded_below(modules)
    places = None if PLACES_ON_MESHES else shard_placement_fn  # and may give a mesh, which is not served then
    if not params and not below and places is None:
        return
    mesh = mesh or _fsdp_init._init_default_mesh()
    mesh_info = _fsdp_init._get_mesh_info(mesh, dp_mesh_dims)
    of_modules = mesh_info.mesh
    for param in params:
        check_subclass(param, names[id(param)], torch.device(mesh.device_type))
        if shard_placement_fn is not None:
            _check_placement(param, names[id(param)], shard_placement_fn(param), of_modules)
    if (check := checked(places, mesh_info)) is not None:
        for param in every:
            check(param)
    for fsdp_param in below:
        if fsdp_param.mesh_info.mesh.size() < of_modules.size():
            raise NotImplementedError(
                f"fully_shard: a parameter of shape {tuple(fsdp_param._orig_size)}, sharded before: it is a "
                f"{type(fsdp_param.sharded_param._local_tensor).__name__}, with fsdp_pre_all_gather, on a smaller mesh than the "
                f"module around it (got {fsdp_param.mesh_info.mesh}, want {of_modules}), where that is not served; shard it on the "
                "module's mesh, or ignore it"
            )


def _sharded_below(modules: tuple[nn.Module, ...]) -> list[Any]:
    states = {id(state): state for m in modules for below in m.modules() if (state := state_of(below)) is not None}
    params = [p for s in states.values() if s._unit is not None for p in s._unit.fsdp_params]
    return [fsdp_param for fsdp_param in params if inner_of(fsdp_param) is not None]


def _check_placement(param: nn.Parameter, what: str, placement: Any, of_modules: DeviceMesh) -> None:
    own = f"it is a {type(param).__name__}, with fsdp_pre_all_gather"
    if isinstance(placement, ShardPlacementResult):
        if not (mesh := placement.mesh_info.mesh).mesh.equal(of_modules.mesh):
            raise NotImplementedError(
                f"{what}: shard_placement_fn gives it a mesh of its own, and {own}, which is served on the module's mesh alone "
                f"(got {mesh}, want {of_modules}); return a placement without a mesh for it, or ignore it"
            )
        placement = placement.placement
    dim = getattr(placement, "dim", 0)
    if (dim + param.ndim if dim < 0 else dim) != 0:
        raise NotImplementedError(
            f"{what}: shard_placement_fn cuts its dimension {dim}, and {own}, which is served where rows are cut (got {placement}, "
            "want Shard(0)); return Shard(0) for it, or ignore it"
        )
