"""How the parameters of a model are tied to a job in the daemon, in both layouts."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_common import _from_local_no_grad

from shardd.torch._job.description import Description
from shardd.torch._process.extension import _C
from shardd.torch._process.torch_versions import unsharded_spec
from shardd.torch._units.extension import Extension
from shardd.torch._units.flat_parameter import FlatHolder
from shardd.torch._units.flat_shard_param import FlatShardParam, cut_flat
from shardd.torch._units.names import unwrapped
from shardd.torch._units.place import Place
from shardd.torch._units.placement import first_element, rows_of, shard_dim, tensor_parallel
from shardd.torch._units.shard_group import calls_weakly
from shardd.torch._units.subclasses import inner_of, lay_in_row, row_bytes, stored_of

__all__ = ["bind", "own_uses", "weakly"]


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that calls ``method``, and keeps nothing alive for it: without its object it returns its last argument."""
    bound = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        alive = bound()
        return alive(*args) if alive is not None else args[-1] if args else None

    return call


def _leave_to_state_dicts(params: list[Any]) -> None:
    """Gives sharded parameters other memory, so that what state dicts have of them stays the program's, which loads into them."""
    flat = [param.holder or param for param in params if isinstance(param, FlatShardParam)]
    for holder in {id(holder): holder for holder in flat}.values():
        piece = holder.sharded_param
        piece.data = piece.detach().clone(memory_format=torch.contiguous_format)
    for param in params:
        if not isinstance(param, FlatShardParam) and row_bytes(param) is None:  # rows are laid anew anyway
            _set_local(param, stored_of(param))


def _set_local(fsdp_param: Any, values: torch.Tensor) -> torch.Tensor:
    """Returns the sharded parameter's local tensor, which is a copy of ``values`` from now on."""
    local = values.detach().clone(memory_format=torch.contiguous_format)
    if inner := inner_of(fsdp_param):
        # The subclass's object stays, with what the program has put on it.
        setattr(fsdp_param.sharded_param._local_tensor, inner.names[0], local)
        return local
    fsdp_param.sharded_param._local_tensor = local
    fsdp_param._sharded_param_data = local.view(-1)
    return local


def _own_storage(fsdp_param: Any) -> torch.Tensor:
    """Returns the sharded parameter's local tensor, alone in its storage, so that the job's memory can take that storage's place."""
    if row_bytes(fsdp_param) is not None:
        return lay_in_row(fsdp_param)
    local = stored_of(fsdp_param)
    padded = fsdp_param.padded_sharded_param_size.numel() * local.element_size()
    if local.storage_offset() != 0 or not local.is_contiguous() or local.untyped_storage().nbytes() > padded:
        local = _set_local(fsdp_param, local)
    return local.detach() if local.requires_grad else local


def _gradient_maker(fsdp_param: Any) -> Any:
    """Wraps a local tensor as the parameter's DTensor. Holds nothing but the spec: the extension keeps it."""
    spec = fsdp_param._sharding_spec
    return lambda local: _from_local_no_grad(local, spec)


def _grad_dtype(unit: Any, stored: torch.dtype) -> torch.dtype:
    """Returns the dtype of ``.grad``. Gradient shards are fp32 in the job, so ``.grad`` is a copy where it is to be another dtype."""
    return stored if unit.precision is None else unit.precision.gradient_dtype(stored)


def _shard_over_job(
    engine: _C.Engine, unit: Any, fsdp_param: Any, index: int, info: dict[str, Any]
) -> tuple[_C.HeldShard, Place]:
    """Puts what the user has of the parameter over the job's memory."""
    sharded = fsdp_param.sharded_param
    maker = None
    if isinstance(fsdp_param, FlatShardParam):
        owned = engine.shard_range(index)
        first = owned["first"]
        local = fsdp_param.take_range(first, owned["numel"])
    else:
        first, local, maker = first_element(fsdp_param), _own_storage(fsdp_param), _gradient_maker(fsdp_param)
    grad_dtype = _grad_dtype(unit, fsdp_param.orig_dtype)
    if info["requires_grad"] and fsdp_param.orig_dtype != grad_dtype:
        sharded.grad_dtype = grad_dtype
    options = {
        "fqn": info["fqn"],
        "daemon_param": index,
        "first_element": first,
        "trainable": info["requires_grad"],
        "gradient_dtype": grad_dtype,
        "whole": getattr(fsdp_param, "whole", False),
    }
    place = Place(index, info["fqn"], weakref.ref(fsdp_param), first, info["requires_grad"])
    return _C.HeldShard(options, sharded, local, maker), place


def _places(uses: list[tuple[nn.Module, str]]) -> list[tuple[Any, str, Any]]:
    places = []
    for module, name in uses:
        overrides = getattr(module.__setattr__, "__func__", None) is not nn.Module.__setattr__
        places.append((module._parameters, name, weakref.ref(module) if overrides else None))
    return places


def own_uses(unit: Any, fsdp_param: Any) -> list[tuple[nn.Module, str]]:
    """Returns the places where the unit's modules have the parameter."""
    if isinstance(fsdp_param, FlatShardParam):
        if fsdp_param.holder is not None:
            return []  # modules have the tensor all the time
        return [(use.module, use.name) for use in fsdp_param.uses_in(unit)]
    info = fsdp_param._module_info
    return list(zip([info.module, *info.shared_modules], [info.param_name, *info.shared_param_names]))


def _flat_parameter_over_job(
    engine: _C.Engine, holder: FlatHolder[FlatShardParam], facts: dict[int, tuple[int, dict[str, Any]]]
) -> tuple[_C.HeldShard, Place]:
    """Puts a FlatParameter over the job's memory, laid out as the job has it."""
    holder.members.sort(key=lambda member: facts[id(member)][1]["offset"])
    members = holder.members
    infos = [facts[id(member)] for member in members]
    first_index, first_info = infos[0]
    unit = members[0].home
    kind = members[0]
    cut = cut_flat([m._orig_size.numel() for m in members], kind.orig_dtype, kind.param_dtype, *unit.shard_of())
    wrong = [info["fqn"] for (_, info), offset in zip(infos, cut.offsets)
             if info["offset"] != offset or info["flat_param"] != first_info["flat_param"]]  # fmt: skip
    if wrong:
        raise NotImplementedError(
            f'register "{holder.name}" of module "{unit._module_fqn}": its parameter "{wrong[0]}" would share a flat '
            "parameter with another FlatParameter's, because dtype or requires_grad of one was changed since; pass "
            "use_orig_params=True"
        )
    slices = {id(member): cut.slice(i, member._orig_size.numel()) for i, member in enumerate(members)}
    if slices != holder.slices or holder.sharded_param.numel() != cut.piece:
        for member in members:
            member.save_values()
        holder.lay_out(slices, cut.piece)
    grad_dtype = _grad_dtype(unit, kind.orig_dtype)
    if first_info["requires_grad"] and kind.orig_dtype != grad_dtype:
        holder.sharded_param.grad_dtype = grad_dtype
    options = {
        "fqn": first_info["fqn"],
        "daemon_param": first_index,
        "first_element": cut.start,
        "trainable": first_info["requires_grad"],
        "padding": holder.padding(),
        "gradient_dtype": grad_dtype,
        "whole": kind.whole,
        # As PyTorch's, without what fills up the last rank's piece.
        "own_numel": cut.piece if kind.whole else cut.offsets[-1] + members[-1]._orig_size.numel(),
    }
    parts = tuple((index, slices[id(member)]) for member, (index, _) in zip(members, infos))
    place = Place(first_index, first_info["fqn"], weakref.ref(holder), cut.start, first_info["requires_grad"], parts)
    return _C.HeldShard(options, holder.sharded_param, holder.local, None), place


def _leaf(fsdp_param: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Makes what modules compute with: a parameter, or a tensor where they have a FlatParameter."""
    empty = torch.empty((), dtype=dtype, device=device).expand(fsdp_param._orig_size)
    requires_grad = fsdp_param.sharded_param.requires_grad
    if tensor_parallel(fsdp_param):
        whole = _from_local_no_grad(empty, unsharded_spec(fsdp_param))
        return nn.Parameter(whole, requires_grad=requires_grad)
    if getattr(fsdp_param, "holder", None) is None:
        return nn.Parameter(empty, requires_grad=requires_grad)
    return empty.requires_grad_(requires_grad)


class _Binder:
    def __init__(self, engine: _C.Engine, description: Description) -> None:
        self.engine = engine
        self.description = description
        self.facts: dict[int, tuple[int, dict[str, Any]]] = {}
        self.places: dict[int, Place] = {}  # by id of the sharded parameter
        self._flat: dict[int, _C.HeldShard] = {}
        for param in description.params:
            index = engine.find_param(param.fqn)
            if index < 0:
                raise RuntimeError(f'register parameter "{param.fqn}": the plan does not have it')
            self.facts[id(param.fsdp_param)] = (index, engine.param_info(index))

    def add_units(self) -> None:
        for state in self.description.states:
            unit = state._unit
            assert unit is not None
            groups = {self.facts[id(p)][1]["group"] for p in unit.fsdp_params}
            # A unit that only uses parameters of others has a group, too: it has theirs unsharded.
            names = [self.description.names.get(id(unwrapped(module)), "?") for module in state._modules]
            groups.update(group for name in names if (group := self.engine.find_group(name)) >= 0)
            unit._bind(self.engine, sorted(groups))
            unit.held.clear()
            unit._update_gradient_scale(self.description.divide_factor)
            if state.given_out and self.description.spec["config"]["trainersNeverWrite"]:
                _leave_to_state_dicts(unit.fsdp_params)
            state.given_out = False
            for fsdp_param in unit.fsdp_params:
                self._add_param(unit, fsdp_param, sorted(groups))
            self._extend(unit)

    def _extend(self, unit: Any) -> None:
        """Lets parameters be gathered that say themselves how."""
        own = [(*self.facts[id(p)], p) for p in unit.fsdp_params if inner_of(p) is not None]
        unit.extension = Extension(unit, [(index, info["fqn"], p) for index, info, p in own]) if own else None
        if own:
            unit._set_extension(calls_weakly(unit.extension.call))

    def _shard(self, unit: Any, fsdp_param: Any) -> _C.HeldShard:
        holder = getattr(fsdp_param, "holder", None)
        if holder is None:
            shard, place = _shard_over_job(self.engine, unit, fsdp_param, *self.facts[id(fsdp_param)])
        elif id(holder) in self._flat:
            return self._flat[id(holder)]
        else:
            shard, place = _flat_parameter_over_job(self.engine, holder, self.facts)
            self._flat[id(holder)] = shard
        self.places[id(fsdp_param.sharded_param)] = place
        unit.held[place.index] = fsdp_param if holder is None else holder
        return shard

    def _add_param(self, unit: Any, fsdp_param: Any, groups: list[int]) -> None:
        index, info = self.facts[id(fsdp_param)]
        inner = inner_of(fsdp_param) is not None
        computed = fsdp_param.param_dtype or fsdp_param.orig_dtype
        unsharded = _leaf(fsdp_param, computed, unit.device)
        if getattr(fsdp_param, "holder", None) is not None:
            fsdp_param.show(unsharded)
        fsdp_param._unsharded_param = unsharded
        options = {
            "fqn": info["fqn"],
            "daemon_param": index,
            "unit_group": groups.index(info["group"]),
            "index_in_group": info["index_in_group"],
            "trainable": info["requires_grad"],
            "own_first": info["offset"] if getattr(fsdp_param, "holder", None) is not None else 0,
            # Else PyTorch adds up in another tensor; what the job adds up of a DTensor is its local tensor.
            "shows_unsharded": fsdp_param.reduce_dtype in (None, computed)
            and not tensor_parallel(fsdp_param)
            and not inner,
            "gathers_itself": inner,
        }
        rows = rows_of(fsdp_param)
        if rows is not None:
            options.update(rows_in_job=(rows.rows, rows.numel, rows.first, rows.step))
        if (own := fsdp_param.mesh_info.mesh.size()) != (of_unit := unit.mesh_info.mesh.size()):
            options["mesh_scale"] = of_unit / own
        if shard_dim(fsdp_param) or rows is not None:
            options.update(shard_dim=shard_dim(fsdp_param), shard_parts=fsdp_param.mesh_info.shard_mesh_size)
        shard = self._shard(unit, fsdp_param)
        # Torch's own says which part of a gradient over the other ranks is to be reduced over these.
        local_gradient = fsdp_param._get_grad_inner_tensor if tensor_parallel(fsdp_param) else None
        unit._add_param(options, shard, unsharded, _places(own_uses(unit, fsdp_param)), local_gradient)
        if unit.precision is not None and unit.precision.full_in_eval:
            fsdp_param._stored_param = _leaf(fsdp_param, fsdp_param.orig_dtype, unit.device)
            unit._add_stored(options, shard, fsdp_param._stored_param)

    def borrow(self) -> None:
        for param in self.description.params:
            fsdp_param = param.fsdp_param
            if not isinstance(fsdp_param, FlatShardParam):
                continue
            home = fsdp_param.home
            for unit in {id(u): u for use in fsdp_param.uses if (u := use.unit()) is not None}.values():
                if unit is not home:
                    unit._borrow_param(home, self.facts[id(fsdp_param)][0], _places(own_uses(unit, fsdp_param)))


def bind(engine: _C.Engine, description: Description) -> dict[int, Place]:
    """Binds every unit and parameter. The result is by id of the sharded parameter, which lives as long as the job."""
    binder = _Binder(engine, description)
    binder.add_units()
    binder.borrow()
    return binder.places
