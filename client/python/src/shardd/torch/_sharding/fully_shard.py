"""``fully_shard`` and ``FSDPModule``, with the arguments and methods of torch 2.13's."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed._composable.contract import contract
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffload, MixedPrecision, MixedPrecisionPolicy, OffloadPolicy, ShardingStrategy
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.fsdp.wrap import _Policy
from torch.distributed.tensor import DTensor
from torch.distributed.utils import _get_root_modules
from torch.utils.weak import WeakIdKeyDictionary

from shardd.torch._job.job import job_of
from shardd.torch._job.registration import attach
from shardd.torch._process.torch_versions import fsdp_init as _fsdp_init
from shardd.torch._process.torch_versions import new_of_original
from shardd.torch._sharding.auto_wrap import warn_unmatched
from shardd.torch._sharding.flat_options import FlatOptions, OlderKeywords, newer_options, older_options
from shardd.torch._sharding.ignored import find_ignored
from shardd.torch._sharding.later_torch import refuse_grad_dtypes, refuse_overrides, refusing_methods
from shardd.torch._sharding.subclass_refusals import asked_once, refuse_subclasses
from shardd.torch._state_dicts import checkpoint_face
from shardd.torch._state_dicts.full_state_dict import shares_memory
from shardd.torch._units.place import local_of
from shardd.torch._units.placement import checked
from shardd.torch._units.rows_param import rows_params
from shardd.torch._units.shard_group import ShardGroup
from shardd.torch._units.state import ShardState, state_of
from shardd.torch._units.subclasses import inner_of, stored_of

__all__ = ["FSDPModule", "fully_shard"]

_cls_to_sharded_cls: dict[type, type] = {}


def _addresses(state: ShardState) -> list[Any]:
    assert state._unit is not None
    return [(p.sharded_param.dtype, _address(p)) for p in state._unit.fsdp_params]


def _address(fsdp_param: Any) -> int:
    stored = stored_of(fsdp_param) if inner_of(fsdp_param) else local_of(fsdp_param.sharded_param)
    return stored.untyped_storage().data_ptr()


def apply_and_watch(state: ShardState, apply: Callable[[], Any]) -> Any:
    """Calls ``module._apply``. Most calls change nothing (model.to of where it is). What moves a shard out of the job is a new
    plan."""
    if state._job is None or state._unit is None:
        return apply()
    before = _addresses(state)
    result = apply()
    if before != _addresses(state):
        state._register_again()
    return result


class FSDPModule(TorchFSDPModule):
    """What ``fully_shard`` makes of a module's class; a subclass of torch's."""

    # FSDP<Name>, FSDPModule of shardd, FSDPModule of torch, <Name>
    _orig_cls_mro_index = 3
    __new__ = new_of_original

    def set_post_optim_event(self, event: Any) -> None:
        """Nothing to do: the next unshard waits for the optimizer's commit anyway."""

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Nothing to do: gradients of every backward are added up where they stay."""
        self._get_fsdp_state()._state_ctx.is_last_backward = is_last_backward

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        state = self._get_fsdp_state()
        parent = super()._apply
        if not isinstance(state, ShardState):
            return parent(*args, **kwargs)
        return apply_and_watch(state, lambda: parent(*args, **kwargs))


for _name, _method in refusing_methods().items():
    setattr(FSDPModule, _name, _method)


def _refuse_deepcopy(*args: Any, **kwargs: Any) -> NoReturn:
    raise AssertionError("deepcopy of a fully sharded module: FSDP does not support deepcopy; use its state dict")


def _modules_of_policy(policy: Any, root: nn.Module) -> list[nn.Module]:
    """Returns the modules below ``root`` that the policy selects, children first."""
    if isinstance(policy, _Policy):
        selected = policy._run_policy(root, ignored_modules=set(), root_kwargs={})
        chosen = {id(module) for module in selected}
        return [m for m in reversed(list(root.modules())) if id(m) in chosen and m is not root]
    if callable(policy) and not isinstance(policy, type):
        parameters = inspect.signature(policy).parameters
        if "recurse" in parameters:
            return _modules_of_function(policy, root)
        return [m for m in reversed(list(root.modules())) if m is not root and policy(m)]
    classes = (policy,) if isinstance(policy, type) else tuple(policy)
    if not classes or not all(isinstance(c, type) and issubclass(c, nn.Module) for c in classes):
        raise TypeError(
            f"fully_shard: policy is of an unknown kind (got {policy!r}); give module classes, one of torch's "
            "wrap policies or a function of a module"
        )
    return [m for m in reversed(list(root.modules())) if m is not root and isinstance(m, classes)]


def _modules_of_function(policy: Callable[..., bool], root: nn.Module) -> list[nn.Module]:
    """Asks one of torch's wrap policy functions whether to go on below a module, then whether to take it."""
    chosen: list[nn.Module] = []

    def visit(module: nn.Module) -> int:
        numel = sum(p.numel() for p in module.parameters())
        if not policy(module=module, recurse=True, nonwrapped_numel=numel):
            return 0
        taken = sum(visit(child) for child in module.children())
        remaining = numel - taken
        if module is not root and policy(module=module, recurse=False, nonwrapped_numel=remaining):
            chosen.append(module)
            return numel
        return taken

    visit(root)
    return chosen


def _check_arguments(mesh: DeviceMesh, dp_mesh_dims: Any) -> None:
    if dp_mesh_dims is not None and dp_mesh_dims.shard is None and dp_mesh_dims.replicate is not None:
        raise NotImplementedError(
            "fully_shard: dp_mesh_dims without shard: it replicates alone; name a dimension of shards"
        )
    if mesh.device_type not in ("cpu", "cuda"):
        raise NotImplementedError(f"fully_shard: mesh is on {mesh.device_type}; shardd serves cpu and cuda devices")
    _fsdp_init._validate_mesh(mesh, dp_mesh_dims)  # 1-D, or 2-D with names


def _apply(
    module: Any,
    *,
    mesh: DeviceMesh | None,
    reshard_after_forward: bool | int | None,
    shard_placement_fn: Callable[..., Any] | None,
    mp_policy: MixedPrecisionPolicy,
    offload_policy: OffloadPolicy,
    ignored_params: set[nn.Parameter] | None,
    dp_mesh_dims: Any,
    layout: str,
    older: FlatOptions | None,
    float8_gathers: bool,
) -> Any:
    _fsdp_init._validate_module(module, "fully_shard")
    if older is not None:
        return _apply_flat(module, older, float8_gathers)
    given_mesh, mesh = mesh, mesh or _fsdp_init._init_default_mesh()
    _check_arguments(mesh, dp_mesh_dims)
    if dp_mesh_dims is not None and layout == "flat":
        raise TypeError(
            "fully_shard: dp_mesh_dims with layout flat, which takes no DTensors; pass the sub-mesh as mesh"
        )
    mesh_info = _fsdp_init._get_mesh_info(mesh, dp_mesh_dims)
    assert isinstance(mesh_info, FSDPMeshInfo)
    device = _fsdp_init._get_device_from_mesh(mesh)
    if layout == "flat":
        if shard_placement_fn is not None:
            raise TypeError("fully_shard: shard_placement_fn with layout flat: pieces are cut wherever the cut falls")
        options = newer_options(mesh_info, given_mesh, reshard_after_forward, mp_policy, offload_policy, ignored_params)
        return _apply_flat(module, options, float8_gathers)
    automatic = reshard_after_forward is None
    post_forward_mesh_info = _fsdp_init._get_post_forward_mesh_info(
        True if reshard_after_forward is None else reshard_after_forward, mesh_info
    )
    argument, modules, managed_modules, params, _ = _fsdp_init._get_modules_and_states(module, device, ignored_params)
    state = _apply_fully_shard.state(modules[0])
    state.init(modules, device, mp_policy, automatic)
    common = (mesh_info, post_forward_mesh_info, device, mp_policy, offload_policy)
    placement = checked(shard_placement_fn, mesh_info)
    group = ShardGroup(list(rows_params(params, modules, *common, placement)), modules, *common)
    group.float8_gathers = float8_gathers
    attach(state, group)
    _finish(managed_modules, modules, state)
    return argument


def _apply_flat(module: Any, options: FlatOptions, float8_gathers: bool) -> Any:
    modules = (module,) if isinstance(module, nn.Module) else tuple(_get_root_modules(list(module)))
    managed = _fsdp_init._get_managed_modules(modules)
    state = _apply_fully_shard.state(modules[0])
    options.apply(state, modules)
    assert state._unit is not None
    state._unit.float8_gathers = float8_gathers
    _finish([m for m in managed if m not in modules], modules, state)  # of those the state dict hooks see loads
    return module


def _finish(managed_modules: list[nn.Module], modules: tuple[nn.Module, ...], state: ShardState) -> None:
    for managed in dict.fromkeys([*modules, *managed_modules]):
        managed._is_fsdp_managed_module = True  # type: ignore[assignment]  # for torch.compile
        managed._fsdp_use_orig_params = True  # type: ignore[assignment]
    for managed in managed_modules:
        watch_loads(managed, state)
    _fsdp_init._apply_to_module(modules, _cls_to_sharded_cls, FSDPModule, "FSDP", _refuse_deepcopy)


# The registry of composable APIs goes by the function's name: torch's fully_shard and this one exclude each other.
_apply.__name__ = "fully_shard"
_apply_fully_shard: Any = contract(state_cls=ShardState)(_apply)


# The last copy of each parameter that a state dict was given, and under which key. Not by the identity of a state dict or of a storage:
# what a program keeps of a state dict outlives it, and the storage of a subclass is made anew for each look.
_copies: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _copy_in(state_dict: dict[str, Any], key: str, param: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Returns the copy of a parameter that this state dict has under another key, as tied parameters stay one tensor, or makes one."""
    other, last = _copies.get(param, (key, lambda: None))
    held: torch.Tensor | None = state_dict.get(other)
    # A dict that is filled again has this call's view under its key by now, and not the copy of before.
    if held is not None and held is last():
        return held
    with torch.no_grad():
        made = value.detach().clone()
    _copies[param] = key, weakref.ref(made)
    return made


def watch_loads(module: nn.Module, state: ShardState) -> None:
    """Makes load_state_dict into a registered model a write that all ranks make together."""

    def before(*args: Any) -> None:
        job = job_of(state)
        if job is None:
            state.loaded = True
        else:
            job.open_write(module)
            # On several nodes the job may have been given up for the load.
            if state._job is not None and state._unit is not None and state._unit.layout == "dim0":
                state._unit.before_load(module)

    def after(*args: Any) -> None:
        job = job_of(state)
        if job is not None:
            if state._unit is not None:
                state._unit.after_load(module)
            job.commit_write(module)

    def copy_out(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
        job = job_of(state)
        if job is None:
            state.given_out = True
            return
        if not job.alive or shares_memory(job):
            return
        assert job.engine is not None
        job.engine.wait_for_commit()  # its values are those of the last step, or this raises
        for name in module._parameters:
            value: Any = state_dict.get(prefix + name)
            param = module._parameters[name]
            if isinstance(value, DTensor) and param is not None and value is not param:  # keep_vars
                state_dict[prefix + name] = _copy_in(state_dict, prefix + name, param, value)

    module._register_load_state_dict_pre_hook(before)
    module.register_load_state_dict_post_hook(after)
    module._register_state_dict_hook(copy_out)


def _check_families(newer: dict[str, Any], older: OlderKeywords, layout: str | None) -> str:
    """Returns the layout. The two families of keywords say the same things in different words, so only one may be used at a time."""
    default = {"mp_policy": _MP_POLICY, "offload_policy": _OFFLOAD_POLICY}
    new, old = [name for name, value in newer.items() if value is not default.get(name)], older.passed()
    if new and old:
        raise TypeError(
            f"fully_shard: {new[0]} and {old[0]} are of two families of keywords; use {', '.join(newer)}, or "
            f"{', '.join(vars(older))}"
        )
    if layout not in (None, "flat", "dim0"):
        raise ValueError(f"fully_shard: unknown layout (got {layout!r}, want 'dim0' or 'flat')")
    if old and layout == "dim0":
        raise TypeError(f'fully_shard: {old[0]} and layout="dim0": that keyword is for layout="flat"')
    return layout or ("flat" if old else "dim0")


_MP_POLICY = MixedPrecisionPolicy()
_OFFLOAD_POLICY = OffloadPolicy()


def fully_shard(
    module: nn.Module | list[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = _MP_POLICY,
    offload_policy: OffloadPolicy = _OFFLOAD_POLICY,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
    policy: Any = None,
    layout: str | None = None,
    process_group: Any = None,
    strategy: ShardingStrategy | None = None,
    mixed_precision: MixedPrecision | None = None,
    cpu_offload: CPUOffload | None = None,
    ignored_modules: Iterable[nn.Module] | None = None,
    ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
    device_id: int | torch.device | None = None,
    param_init_fn: Callable[[nn.Module], Any] | None = None,
    sync_module_states: bool = False,
    float8_gathers: bool = False,
) -> Any:
    """Shards a module's parameters, gradients and optimizer state; the daemon owns them from the first forward on.

    Arguments up to ``dp_mesh_dims``, and the result, are those of ``torch.distributed.fsdp.fully_shard``. ``policy``
    applies it to every selected submodule first, with the same arguments: module classes, one of torch's wrap policies,
    or a function of a module.

    layout: "dim0" (default): parameters are DTensors over this rank's rows, or over the part of them that
        ``shard_placement_fn`` says. "flat": they are the objects that the user
        gave, each this rank's piece of it: a plain one-dimensional tensor, possibly empty.
    process_group and those after it: of the ``fully_shard`` that first had ``policy``, with the meaning that they have for
        ``FullyShardedDataParallel``. They imply layout flat. TypeError where one is given together with one of the others.
    float8_gathers: parameters that are cut over nodes cross them in float8 (e4m3fn) with a scale for each 128 elements, half the
        bytes of bfloat16, and every rank computes with the values so rounded, in ``param_dtype``. Shards, gradients and optimizer
        state keep their precision. On CPUs; NotImplementedError at the first forward where nothing is cut over nodes.
    """
    arguments: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": reshard_after_forward,
        "shard_placement_fn": shard_placement_fn,
        "mp_policy": mp_policy,
        "offload_policy": offload_policy,
        "ignored_params": ignored_params,
        "dp_mesh_dims": dp_mesh_dims,
    }
    keywords = OlderKeywords(
        process_group,
        strategy,
        mixed_precision,
        cpu_offload,
        list(ignored_modules) if ignored_modules is not None else None,
        list(ignored_states) if ignored_states is not None else None,
        device_id,
        param_init_fn,
        sync_module_states,
    )
    layout = _check_families(arguments, keywords, layout)
    refuse_overrides(mp_policy)
    checkpoint_face.install()
    modules = (module,) if isinstance(module, nn.Module) else tuple(module)
    older = older_options(keywords, modules, policy is not None) if keywords.passed() else None
    arguments.update(layout=layout, older=older, float8_gathers=float8_gathers)
    if layout == "dim0":
        refuse_grad_dtypes(modules, ignored_params)
        arguments["shard_placement_fn"] = placement = asked_once(shard_placement_fn)
        refuse_subclasses(modules, mesh, placement, ignored_params, dp_mesh_dims)
    if policy is not None:
        if not isinstance(module, nn.Module):
            raise TypeError("fully_shard: policy needs a single module (got a list)")
        out = (
            set() if older is None else find_ignored(module, keywords.ignored_modules, keywords.ignored_states).modules
        )
        for submodule in _modules_of_policy(policy, module):
            if state_of(submodule) is None and submodule not in out:
                _apply_fully_shard(submodule, **arguments)
        warn_unmatched(policy, module, any(state_of(below) is not None for below in module.modules()))
    return _apply_fully_shard(module, **arguments)


fully_shard.state = _apply_fully_shard.state  # type: ignore[attr-defined]
