"""From a module with ``fully_shard`` applied to what the daemon plans: shardd.v1.JobSpec as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    from shardd.torch._group import ShardGroup
    from shardd.torch._state import ShardState
    from shardd.torch.optim import DaemonOptimizer

_DTYPES = {
    torch.float32: "DTYPE_FLOAT32",
    torch.bfloat16: "DTYPE_BFLOAT16",
    torch.float16: "DTYPE_FLOAT16",
    torch.float64: "DTYPE_FLOAT64",
    torch.int64: "DTYPE_INT64",
    torch.int32: "DTYPE_INT32",
    torch.int16: "DTYPE_INT16",
    torch.int8: "DTYPE_INT8",
    torch.uint8: "DTYPE_UINT8",
    torch.bool: "DTYPE_BOOL",
}


def dtype_name(dtype: torch.dtype, what: str) -> str:
    if dtype not in _DTYPES:
        raise NotImplementedError(f"{what}: shardd does not store {dtype} (want one of {', '.join(map(str, _DTYPES))})")
    return _DTYPES[dtype]


@dataclass
class ParamPlace:
    """A parameter that the job manages, under its first name."""

    fsdp_param: FSDPParam
    group: ShardGroup
    fqn: str


@dataclass
class Description:
    spec: dict[str, Any]
    params: list[ParamPlace]
    states: list[ShardState]
    divide_factor: float


def _uniform(values: dict[str, Any], what: str) -> Any:
    """The one value of all groups; the daemon has one for a job."""
    first_name, first = next(iter(values.items()))
    for name, value in values.items():
        if value != first:
            raise NotImplementedError(
                f"register model: {what} differs between fully sharded modules ({first_name}: {first}, {name}: {value}); "
                "shardd has one for all modules of a model so far"
            )
    return first


def _tree(root: torch.nn.Module, states: list[ShardState]) -> tuple[dict[str, Any], list[ParamPlace]]:
    places: dict[tuple[int, str], tuple[ShardGroup, FSDPParam]] = {}
    units: dict[int, ShardGroup] = {}  # by module that fully_shard was applied to
    for state in states:
        unit = state._unit
        assert unit is not None
        for module in state._modules:
            units[id(module)] = unit
        for fsdp_param in unit.fsdp_params:
            info = fsdp_param._module_info
            places[id(info.module), info.param_name] = (unit, fsdp_param)
            for module, name in zip(info.shared_modules, info.shared_param_names):
                places[id(module), name] = (unit, fsdp_param)
    uses: dict[int, int] = {}
    for _, fsdp_param in places.values():
        uses[id(fsdp_param)] = uses.get(id(fsdp_param), 0) + 1
    tied: dict[int, int] = {}
    found: dict[int, ParamPlace] = {}
    index: dict[str, int] = {}
    modules: list[dict[str, Any]] = []
    for name, module in root.named_modules():
        index[name] = len(modules)
        parent = -1 if not name else index[name.rpartition(".")[0]]
        parameters = []
        for param_name in module._parameters:
            if (id(module), param_name) not in places:
                continue
            unit, fsdp_param = places[id(module), param_name]
            fqn = f"{name}.{param_name}" if name else param_name
            sharded = fsdp_param.sharded_param
            item: dict[str, Any] = {
                "name": param_name,
                "shape": list(fsdp_param._orig_size),
                "dtype": dtype_name(sharded.dtype, f'register parameter "{fqn}"'),
                "requiresGrad": sharded.requires_grad,
            }
            if uses[id(fsdp_param)] > 1:
                item["storageId"] = tied.setdefault(id(fsdp_param), len(tied) + 1)
            parameters.append(item)
            found.setdefault(id(fsdp_param), ParamPlace(fsdp_param, unit, fqn))
        entry: dict[str, Any] = {"name": name, "className": type(module).__name__, "parent": parent}
        if parameters:
            entry["parameters"] = parameters
        if id(module) in units:
            unit = units[id(module)]
            entry["mark"] = "MODULE_MARK_FULLY_SHARD"
            entry["reshardAfterForward"] = "OVERRIDE_YES" if unit._reshard_after_forward else "OVERRIDE_NO"
            if 1 < unit.post_forward_shard_size() < unit.mesh_info.shard_mesh_size:
                entry["postForwardShardSize"] = unit.post_forward_shard_size()
        modules.append(entry)
    return {"modules": modules}, list(found.values())


def describe(root: ShardState, name: str, world_size: int, optimizers: list[DaemonOptimizer]) -> Description:
    """Describes the model as it is now. Raises for what the daemon cannot do, by name."""
    states: list[ShardState] = list(root._state_ctx.all_states)
    tree, params = _tree(root._modules[0], states)
    if not params:
        raise ValueError("register model: no parameter is left for fully_shard; all are ignored or there are none")
    groups = {place.group._module_fqn or "(root)": place.group for place in params}
    for where, group in groups.items():
        if group.mesh_info.mesh != params[0].group.mesh_info.mesh:
            raise NotImplementedError(f'register module "{where}": its mesh differs from the other modules\'')
    param_dtype = _uniform({n: g.mp_policy.param_dtype for n, g in groups.items()}, "mp_policy.param_dtype")
    reduce_dtype = _uniform({n: g.mp_policy.reduce_dtype for n, g in groups.items()}, "mp_policy.reduce_dtype")
    mixed: dict[str, str] = {}
    if param_dtype is not None:
        mixed["paramDtype"] = dtype_name(param_dtype, "mp_policy.param_dtype")
    if reduce_dtype is not None:
        mixed["reduceDtype"] = dtype_name(reduce_dtype, "mp_policy.reduce_dtype")
    factors = {group.divide_factor() for group in groups.values()}
    divide_factor = factors.pop() if len(factors) == 1 else float(world_size)
    config: dict[str, Any] = {
        **_strategy(params[0].group.mesh_info),
        "layout": "LAYOUT_DIM0",
        "mixedPrecision": mixed,
        "optimizer": _optimizer(params, optimizers),
        "gradientDivideFactor": divide_factor,
        "trainersNeverWrite": bool(optimizers),
    }
    spec = {"name": name, "worldSize": world_size, "tree": tree, "config": config}
    return Description(spec, params, states, divide_factor)


def _strategy(mesh_info: FSDPMeshInfo) -> dict[str, Any]:
    if not isinstance(mesh_info, HSDPMeshInfo):
        return {"strategy": "STRATEGY_FULL_SHARD"}
    # The ranks of the job are the mesh row by row. Every rank clips and edits its own shards, as in PyTorch, so each
    # replica has some to write.
    return {
        "strategy": "STRATEGY_HYBRID_SHARD",
        "shardGroupSize": mesh_info.shard_mesh_size,
        "replicaCopies": mesh_info.replicate_mesh_size > 1,
    }


def _optimizer(params: list[ParamPlace], optimizers: list[DaemonOptimizer]) -> dict[str, Any]:
    if not optimizers:
        return {"kind": "OPTIMIZER_KIND_TRAINER"}  # one in the trainers, or none
    if len(optimizers) > 1:
        raise NotImplementedError(
            f"register model: several optimizers of shardd have its parameters (got {len(optimizers)}, want 1); use one "
            "with several param groups"
        )
    optimizer = optimizers[0]
    owner = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
    fqns: list[list[str]] = [[] for _ in optimizer.param_groups]
    rest: list[str] = []
    for place in params:
        sharded = place.fsdp_param.sharded_param
        if sharded.requires_grad:
            group = owner.get(id(sharded))
            (rest if group is None else fqns[group]).append(place.fqn)
    # Group 0 is whatever is in no other. What the optimizer does not have comes last and is stepped with lr 0.
    groups = [{"fqns": names} for names in fqns[1:]]
    if rest:
        groups.append({"fqns": rest})
    optimizer._has_rest_group = bool(rest)
    return {"kind": optimizer._kind, "momentum": optimizer._needs_momentum(), "groups": groups}
