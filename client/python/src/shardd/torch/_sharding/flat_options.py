"""``fully_shard`` in layout ``flat``, and its older family of keywords."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
)
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

from shardd.torch._job.registration import attach
from shardd.torch._sharding.device import check_offload, device_of
from shardd.torch._sharding.ignored import find_ignored
from shardd.torch._sharding.wrapper_arguments import make_mesh, mixed_policy, place, strategy_of, sync
from shardd.torch._state_dicts.model_state_dict import install_hooks
from shardd.torch._units import precision_hooks
from shardd.torch._units.flat_group import RESHARDS, FlatGroup, place_alike
from shardd.torch._units.precision import UnitPrecision, full_precision_in_eval
from shardd.torch._units.state import ShardState

__all__ = ["FlatOptions", "OlderKeywords", "newer_options", "older_options"]


@dataclass
class FlatOptions:
    """What ``fully_shard`` needs to know of a module in layout flat, whichever keywords said it."""

    mesh_info: FSDPMeshInfo
    strategy: ShardingStrategy
    reshard_after_forward: bool
    automatic: bool  # the root is not resharded after forward
    mp_policy: MixedPrecisionPolicy
    mixed_precision: MixedPrecision | None = None  # of the older keywords, beside mp_policy, which is made of it
    offload_policy: OffloadPolicy = field(default_factory=OffloadPolicy)
    ignored_modules: Iterable[nn.Module] | None = None
    ignored_states: Any = None
    device_id: int | torch.device | None = None
    param_init_fn: Callable[[nn.Module], Any] | None = None
    sync_module_states: bool = False
    synced: set[int] = field(default_factory=set)  # ids of tensors, over all modules of one call
    given_mesh: DeviceMesh | None = None  # sharded state dicts are then of DTensors

    def apply(self, state: ShardState, modules: tuple[nn.Module, ...]) -> None:
        """Shards what is left in ``modules``, whose original parameter objects stay, as pieces of flat parameters."""
        ignored = [find_ignored(module, self.ignored_modules, self.ignored_states) for module in modules]
        on_mesh = self.mesh_info.mesh if self.given_mesh is None else self.given_mesh
        device = device_of(modules, ignored[0], self.device_id, on_mesh)
        check_offload(isinstance(self.offload_policy, CPUOffloadPolicy), device)
        for module, of in zip(modules, ignored):
            place(module, of, device, self.param_init_fn)
            if self.sync_module_states:
                sync(module, of, self.mesh_info, self.synced)
        state.ignored = ignored[0]
        state.init(modules, device, self.mp_policy, self.automatic)
        state.attributes = {"_use_orig_params": True, "_use_full_prec_in_eval": full_precision_in_eval()}
        attach(
            state,
            FlatGroup(
                modules,
                modules,
                self.mesh_info,
                self.strategy,
                True,
                self.reshard_after_forward,
                device,
                self.mp_policy,
                self.offload_policy,
                {m for of in ignored for m in of.modules},
                {p for of in ignored for p in of.params},
            ),
        )
        place_alike(modules)
        state.__dict__["_given_mesh"] = self.given_mesh
        for module in modules:
            install_hooks(module)
        if self.mixed_precision is not None:
            precision_hooks.install(UnitPrecision(modules[0], self.mixed_precision, ignored[0].modules), state)


@dataclass
class OlderKeywords:
    """Named as in the ``fully_shard`` that took a ``policy``; ``None`` and ``False`` count as not passed."""

    process_group: Any = None
    strategy: ShardingStrategy | None = None
    mixed_precision: MixedPrecision | None = None
    cpu_offload: CPUOffload | None = None
    ignored_modules: Iterable[nn.Module] | None = None
    ignored_states: Any = None
    device_id: int | torch.device | None = None
    param_init_fn: Callable[[nn.Module], Any] | None = None
    sync_module_states: bool = False

    def passed(self) -> list[str]:
        """Returns the names of those that the program has passed."""
        return [name for name, value in vars(self).items() if value is not None and value is not False]


def older_options(keywords: OlderKeywords, modules: tuple[nn.Module, ...], may_choose: bool) -> FlatOptions:
    """Returns the options of the older keywords.

    ``may_choose``: hybrid strategies need no groups, as a policy gives all modules the same.
    """
    ignored = find_ignored(modules[0], keywords.ignored_modules, keywords.ignored_states)
    device = device_of(modules, ignored, keywords.device_id, None)
    offloads = keywords.cpu_offload is not None and keywords.cpu_offload.offload_params
    check_offload(offloads, device)
    mesh_info = make_mesh(keywords.process_group, None, keywords.strategy, may_choose, device.type)
    strategy = strategy_of(keywords.strategy, mesh_info.mesh.size())
    return FlatOptions(
        mesh_info,
        strategy,
        strategy in RESHARDS,
        strategy in RESHARDS,
        mixed_policy(keywords.mixed_precision),
        keywords.mixed_precision,
        ignored_modules=keywords.ignored_modules,
        ignored_states=keywords.ignored_states,
        device_id=keywords.device_id,
        param_init_fn=keywords.param_init_fn,
        sync_module_states=keywords.sync_module_states,
    )


def newer_options(
    mesh_info: FSDPMeshInfo,
    given_mesh: DeviceMesh | None,
    reshard_after_forward: bool | int | None,
    mp_policy: MixedPrecisionPolicy,
    offload_policy: OffloadPolicy,
    ignored_params: set[nn.Parameter] | None,
) -> FlatOptions:
    """Returns the options of ``fully_shard(..., layout="flat")`` with torch's own keywords."""
    if reshard_after_forward is not None and not isinstance(reshard_after_forward, bool):
        raise NotImplementedError(
            f"fully_shard: reshard_after_forward={reshard_after_forward} with layout flat: pieces are cut over the shard "
            "group only; pass True or False, or use layout dim0"
        )
    return FlatOptions(
        mesh_info,
        ShardingStrategy.HYBRID_SHARD if mesh_info.mesh.ndim == 2 else ShardingStrategy.FULL_SHARD,
        reshard_after_forward is not False,
        reshard_after_forward is None,
        mp_policy,
        offload_policy=offload_policy,
        ignored_states=list(ignored_params) if ignored_params else None,
        given_mesh=given_mesh,
    )
