"""How the parameters of a model are tied to a job in the daemon, in both layouts."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_common import _from_local_no_grad
from torch.distributed.tensor import DTensor

from shardd.torch._extension import _C
from shardd.torch._flat_param import FlatShardParam

if TYPE_CHECKING:
    from shardd.torch._spec import Description

__all__ = ["Place", "bind", "given_by", "local_of"]


def local_of(tensor: Any) -> torch.Tensor:
    """A DTensor's tensor on this rank; a plain tensor is its own."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


@dataclass
class Place:
    """What the job knows of a sharded parameter."""

    index: int  # the daemon's
    fqn: str
    ref: weakref.ref[Any]
    first: int  # element of the parameter where what this rank holds begins
    trainable: bool  # the job has gradient memory for it

    def fsdp_param(self) -> Any:
        found = self.ref()
        assert found is not None
        return found


def rows_before(size: int, rank: int, world_size: int) -> int:
    """Rows of the ranks before this one, as torch.chunk cuts ``size`` rows."""
    chunk = -(-size // world_size)
    return min(rank * chunk, size)


def _first_element(fsdp_param: Any) -> int:
    mesh_info, size = fsdp_param.mesh_info, fsdp_param._orig_size
    row = rows_before(size[0], mesh_info.shard_mesh_rank, mesh_info.shard_mesh_size)
    return row * (size.numel() // size[0] if size[0] else 0)


def given_by(fsdp_param: Any, rank: int) -> tuple[int, torch.Tensor] | None:
    """First element and values that this rank, ``rank`` of the job, gives to it; ``None``: another one does."""
    if isinstance(fsdp_param, FlatShardParam):
        first, rows = fsdp_param.given()
        if fsdp_param.whole and rank != 0:
            return None
    else:
        first, rows = _first_element(fsdp_param), fsdp_param.sharded_param._local_tensor.detach()
    # Replicas hold the same; the first gives it.
    if not rows.numel() or getattr(fsdp_param.mesh_info, "replicate_mesh_rank", 0) != 0:
        return None
    return first, rows


def _own_storage(fsdp_param: Any) -> torch.Tensor:
    """The sharded parameter's local tensor, alone in its storage, which the job's memory can then take the place of."""
    sharded = fsdp_param.sharded_param
    local = sharded._local_tensor
    padded = fsdp_param.padded_sharded_param_size.numel() * local.element_size()
    if local.storage_offset() != 0 or not local.is_contiguous() or local.untyped_storage().nbytes() > padded:
        local = local.detach().clone(memory_format=torch.contiguous_format)
        sharded._local_tensor = local
        fsdp_param._sharded_param_data = local.view(-1)
    return local.detach() if local.requires_grad else local


def _gradient_maker(fsdp_param: Any) -> Any:
    """Wraps a local tensor as the parameter's DTensor. Holds nothing but the spec: the extension keeps it."""
    spec = fsdp_param._sharding_spec
    return lambda local: _from_local_no_grad(local, spec)


def _hold(engine: _C.Engine, fsdp_param: Any, index: int, info: dict[str, Any]) -> tuple[_C.HeldShard, Place]:
    """What the user holds of the parameter, over the job's memory."""
    sharded = fsdp_param.sharded_param
    maker = None
    if isinstance(fsdp_param, FlatShardParam):
        owned = engine.shard_range(index)
        first = owned["first"]
        local = fsdp_param.take_range(first, owned["numel"])
    else:
        first, local, maker = _first_element(fsdp_param), _own_storage(fsdp_param), _gradient_maker(fsdp_param)
    if info["requires_grad"] and fsdp_param.orig_dtype != torch.float32:
        sharded.grad_dtype = torch.float32  # gradients are added up in fp32
    options = {
        "fqn": info["fqn"],
        "daemon_param": index,
        "first_element": first,
        "trainable": info["requires_grad"],
    }
    place = Place(index, info["fqn"], weakref.ref(fsdp_param), first, info["requires_grad"])
    return _C.HeldShard(options, sharded, local, maker), place


def _places(uses: list[tuple[nn.Module, str]]) -> list[tuple[Any, str, Any]]:
    places = []
    for module, name in uses:
        overrides = getattr(module.__setattr__, "__func__", None) is not nn.Module.__setattr__
        places.append((module._parameters, name, weakref.ref(module) if overrides else None))
    return places


def _own_uses(unit: Any, fsdp_param: Any) -> list[tuple[nn.Module, str]]:
    if isinstance(fsdp_param, FlatShardParam):
        return [(use.module, use.name) for use in fsdp_param.uses_in(unit)]
    info = fsdp_param._module_info
    return list(zip([info.module, *info.shared_modules], [info.param_name, *info.shared_param_names]))


def _add_param(
    engine: _C.Engine, unit: Any, fsdp_param: Any, groups: list[int], index: int, info: dict[str, Any]
) -> Place:
    dtype = fsdp_param.param_dtype or fsdp_param.orig_dtype
    unsharded = nn.Parameter(
        torch.empty((), dtype=dtype).expand(fsdp_param._orig_size), requires_grad=fsdp_param.sharded_param.requires_grad
    )
    fsdp_param._unsharded_param = unsharded
    shard, place = _hold(engine, fsdp_param, index, info)
    options = {
        "fqn": info["fqn"],
        "daemon_param": index,
        "unit_group": groups.index(info["group"]),
        "index_in_group": info["index_in_group"],
        "trainable": info["requires_grad"],
    }
    unit._add_param(options, shard, unsharded, _places(_own_uses(unit, fsdp_param)))
    return place


def bind(engine: _C.Engine, description: Description) -> dict[int, Place]:
    """Binds every unit and parameter. The result is by id of the sharded parameter, which lives as long as the job."""
    facts = {}
    for param in description.params:
        index = engine.find_param(param.fqn)
        if index < 0:
            raise RuntimeError(f'register parameter "{param.fqn}": the plan does not have it')
        facts[id(param.fsdp_param)] = (index, engine.param_info(index))
    places: dict[int, Place] = {}
    for state in description.states:
        unit = state._unit
        assert unit is not None
        groups = {facts[id(p)][1]["group"] for p in unit.fsdp_params}
        # A unit that only uses parameters of others has a group, too: it has theirs unsharded.
        groups.update(
            group
            for module in state._modules
            if (group := engine.find_group(description.names.get(id(module), "?"))) >= 0
        )
        unit._bind(engine, sorted(groups))
        unit._update_gradient_scale(description.divide_factor)
        for fsdp_param in unit.fsdp_params:
            place = _add_param(engine, unit, fsdp_param, sorted(groups), *facts[id(fsdp_param)])
            places[id(fsdp_param.sharded_param)] = place
    for param in description.params:
        if not isinstance(param.fsdp_param, FlatShardParam):
            continue
        home = param.fsdp_param.home
        for unit in {id(u): u for use in param.fsdp_param.uses if (u := use.unit()) is not None}.values():
            if unit is not home:
                unit._borrow_param(home, facts[id(param.fsdp_param)][0], _places(_own_uses(unit, param.fsdp_param)))
    return places
