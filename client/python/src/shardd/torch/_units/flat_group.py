"""A unit in layout ``flat`` is what a wrapper, or ``fully_shard`` with ``layout="flat"``, makes of a module's parameters."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy, ShardingStrategy
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from shardd.torch._units.flat_shard_param import FlatShardParam, FlatUnit, Use, flat_param_of, lay_out, managed_uses
from shardd.torch._units.names import flat_owner, unwrapped
from shardd.torch._units.state import ShardState, state_of

__all__ = ["RESHARDS", "FlatGroup", "place_alike", "settle_ties"]

# Strategies that give parameters back between forward and backward.
RESHARDS = (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)


def _is_wrapper(module: nn.Module) -> bool:
    return unwrapped(module) is not module


class FlatGroup(FlatUnit):
    """The parameters of one unit. ``modules`` carry its hooks; its parameters are found in ``content``."""

    def __init__(
        self,
        modules: tuple[nn.Module, ...],
        content: tuple[nn.Module, ...],
        mesh_info: FSDPMeshInfo,
        strategy: ShardingStrategy,
        use_orig_params: bool,
        reshard_after_forward: bool,
        device: torch.device,
        mp_policy: MixedPrecisionPolicy,
        offload_policy: OffloadPolicy,
        ignored_modules: set[nn.Module],
        ignored_params: set[nn.Parameter],
    ) -> None:
        params: dict[FlatShardParam, None] = {}
        borrowed: list[tuple[nn.Module, str]] = []
        whole = strategy == ShardingStrategy.NO_SHARD
        ref: weakref.ref[FlatUnit] = weakref.ref(self)
        fresh = [m for m in content if m in modules or not _is_wrapper(m)]  # a wrapper around a wrapper has none
        for module, name, param in list(managed_uses(fresh, ignored_modules, ignored_params)):
            known = flat_param_of(param)
            if known is None:
                known = FlatShardParam(param, mesh_info, whole)
                params[known] = None
            elif known not in params:
                borrowed.append((module, name))
            known.uses.append(Use(ref, module, name))  # of a tied parameter of another unit too
        super().__init__(
            list(params),
            modules,
            mesh_info,
            mesh_info if reshard_after_forward else None,
            device,
            mp_policy,
            offload_policy,
        )
        self.strategy = strategy
        self.comm_hook: Any = None
        self.use_orig_params = use_orig_params
        self._shows_shards = use_orig_params and (whole or strategy in RESHARDS)  # as torch
        self.completes_gradients = use_orig_params  # of a FlatParameter the members of one alone
        owner = None if use_orig_params else flat_owner(content[0])
        self._parts = self._by_module(content)
        for part in self._parts:
            lay_out(part, *self.shard_of(), mp_policy.param_dtype, owner)
        for module, name in borrowed if not use_orig_params else ():
            original = module._parameters[name]
            tied = None if original is None else flat_param_of(original)
            assert tied is not None
            tied.show(tied.uses[0].module.__dict__[tied.uses[0].name])

    def _by_module(self, content: tuple[nn.Module, ...]) -> list[list[FlatShardParam]]:
        """Returns the parameters of each module of a list: the plan has flat parameters for each."""
        if len(content) == 1:
            return [self.fsdp_params]
        first: dict[nn.Module, int] = {}  # what several hold is the first one's
        for number, module in enumerate(content):
            for below in module.modules():
                first.setdefault(below, number)
        return [[p for p in self.fsdp_params if first[p.uses[0].module] == n] for n in range(len(content))]

    def shard_of(self) -> tuple[int, int]:
        whole = self.strategy == ShardingStrategy.NO_SHARD
        return (0, 1) if whole else (self.mesh_info.shard_mesh_rank, self.mesh_info.shard_mesh_size)

    def be_cut(self) -> None:
        """Changes from NO_SHARD to SHARD_GRAD_OP, before the model is registered."""
        self.strategy = ShardingStrategy.SHARD_GRAD_OP
        self._shows_shards = False
        for fsdp_param in self.fsdp_params:
            fsdp_param.whole = False
        if self.use_orig_params:  # a FlatParameter is laid out anew when the model is registered
            for part in self._parts:
                lay_out(part, *self.shard_of(), self.mp_policy.param_dtype, None)

    def take_over(self, fsdp_param: FlatShardParam) -> None:
        before = fsdp_param.holder
        if before is None:
            return
        fsdp_param.save_values()
        flat = before.sharded_param
        before.members.remove(fsdp_param)
        del before.slices[id(fsdp_param)]
        holders = {id(p.holder): p.holder for p in self.fsdp_params if p.holder not in (None, before)}
        alike = [h for h in holders.values() if (h.sharded_param.dtype, h.sharded_param.requires_grad) ==
                 (flat.dtype, flat.requires_grad)]  # fmt: skip
        if not alike:
            raise NotImplementedError(
                f'register parameter "{fsdp_param._param_fqn}": it is tied, its first user is an outer unit, which has no '
                "FlatParameter of its dtype and requires_grad; pass use_orig_params=True"
            )
        alike[0].members.append(fsdp_param)
        fsdp_param.holder = alike[0]
        fsdp_param.sharded_param = alike[0].sharded_param

    def lazy_init(self) -> None:
        if self._bound:
            return
        for fsdp_param in self.fsdp_params:
            fsdp_param.reset_sharded_param()
        FSDPParamGroup._validate_no_meta_params(self)  # type: ignore[arg-type]
        self.check_device()
        for fsdp_param in self.fsdp_params:
            fsdp_param.init_dtype_attrs(self.mp_policy)


def place_alike(modules: tuple[nn.Module, ...]) -> None:
    """Shards the units that are not to be sharded where others of the model are: the daemon places all units of a model alike."""
    found = [state._unit for m in modules for below in m.modules() if (state := state_of(below)) is not None]
    units = [unit for unit in dict.fromkeys(found) if isinstance(unit, FlatGroup) and unit.fsdp_params]
    whole = [unit for unit in units if unit.strategy == ShardingStrategy.NO_SHARD]
    if not whole or len(whole) == len(units):
        return
    for unit in whole:
        unit.be_cut()
    names = sorted({type(unwrapped(unit.modules[0])).__name__ for unit in whole})
    warnings.warn(
        f"NO_SHARD for some units of a model (of {', '.join(names)}): shardd places all units alike, so these are cut "
        "as with SHARD_GRAD_OP; what is computed is the same",
        stacklevel=4,
    )


def settle_ties(root: nn.Module, states: list[ShardState]) -> None:
    """Gives a tied parameter to its first user in the order of the module tree, as the daemon's plan does."""
    number = {id(module): i for i, module in enumerate(root.modules())}
    units: list[Any] = [state._unit for state in states]
    moved = False
    for unit in units:
        for fsdp_param in list(unit.fsdp_params) if isinstance(unit, FlatGroup) else ():
            if len(fsdp_param.uses) == 1:
                continue
            fsdp_param.uses.sort(key=lambda use: number.get(id(use.module), len(number)))
            home = fsdp_param.home
            if home is not unit:
                unit.fsdp_params.remove(fsdp_param)
                home.fsdp_params.append(fsdp_param)
                home.take_over(fsdp_param)
                moved = True
    if moved:
        for state in states:
            state.list_groups()
