"""From a module with ``fully_shard`` applied to what the daemon plans: shardd.v1.JobSpec as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo

from shardd.torch._job.description import Description, ParamPlace
from shardd.torch._job.job_optimizer import JobOptimizer, stock_optimizers_of
from shardd.torch._job.whole_params import check_whole
from shardd.torch._job.write_mode import config_of_writes, evaluates_alone, why_no_edits_on_nodes, why_not_several
from shardd.torch._process import environment
from shardd.torch._process.memory import gives_back
from shardd.torch._ranks.nodes import cuts_over_nodes
from shardd.torch._torch_optimizers.state_counts import planned_states
from shardd.torch._units.names import WRAPPED_MODULE, unwrapped
from shardd.torch._units.placement import is_planned_as_trained, rows_of, shape_in_job
from shardd.torch._units.shard_group import ShardGroup, offloads
from shardd.torch._units.state import ShardState
from shardd.torch._units.subclasses import row_bytes

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
    if dtype not in _DTYPES and dtype.itemsize == 1 and dtype.is_floating_point:
        return _DTYPES[torch.uint8]  # float8: its bytes are kept; the plan refuses to train them
    if dtype not in _DTYPES:
        raise NotImplementedError(f"{what}: shardd does not store {dtype} (want one of {', '.join(map(str, _DTYPES))})")
    return _DTYPES[dtype]


def gpu_of(root: ShardState) -> int:
    """The GPU that the model computes on, as torch numbers them; -1: it does on the CPU."""
    assert root._unit is not None
    device = root._unit.device
    return -1 if device.type == "cpu" else int(device.index)


def _precision(group: ShardGroup) -> dict[str, Any]:
    """``shardd.v1.MixedPrecision`` of the group's policy."""
    mixed: dict[str, Any] = {}
    if group.mp_policy.param_dtype is not None:
        mixed["paramDtype"] = dtype_name(group.mp_policy.param_dtype, "mp_policy.param_dtype")
    if group.mp_policy.reduce_dtype is not None:
        mixed["reduceDtype"] = dtype_name(group.mp_policy.reduce_dtype, "mp_policy.reduce_dtype")
    if group.precision is not None and group.precision.policy.keep_low_precision_grads:
        mixed["keepLowPrecisionGrads"] = True
    if group.float8_gathers:
        mixed["float8Gathers"] = True
    return mixed


def _clean(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != WRAPPED_MODULE)


def _uses(unit: Any) -> Iterator[tuple[torch.nn.Module, str, Any]]:
    for fsdp_param in unit.fsdp_params:
        info = fsdp_param._module_info
        yield info.module, info.param_name, fsdp_param
        for module, name in zip(info.shared_modules, info.shared_param_names):
            yield module, name, fsdp_param


def _tree(
    root: torch.nn.Module,
    states: list[ShardState],
    held: set[int],
    precision: dict[str, Any],
    shard_size: int,
) -> tuple[dict[str, Any], list[ParamPlace], dict[int, str]]:
    """``precision``: the job's; modules whose own differs say so. ``shard_size``: ranks of a shard group."""
    places: dict[int, dict[str, tuple[ShardGroup, Any]]] = {}
    units: dict[int, ShardGroup] = {}  # by module that is fully sharded
    uses: dict[int, int] = {}
    for state in states:
        unit = state._unit
        assert unit is not None
        for module in state._modules:
            units[id(unwrapped(module))] = unit
        for module, param_name, fsdp_param in _uses(unit):
            places.setdefault(id(module), {})[param_name] = (unit, fsdp_param)
            uses[id(fsdp_param)] = uses.get(id(fsdp_param), 0) + 1
    tied: dict[int, int] = {}
    found: dict[int, ParamPlace] = {}
    index: dict[str, int] = {}
    names: dict[int, str] = {}
    modules: list[dict[str, Any]] = []
    for raw_name, module in root.named_modules():
        if unwrapped(module) is not module:
            continue
        name = _clean(raw_name)
        index[name] = len(modules)
        parent = -1 if not name else index[name.rpartition(".")[0]]
        here = places.get(id(module), {})
        # Flat parameters have taken the place of those that are not registered any more.
        order = [n for n in module._parameters if n in here] + [n for n in here if n not in module._parameters]
        parameters = []
        for param_name in order:
            unit, fsdp_param = here[param_name]
            fqn = f"{name}.{param_name}" if name else param_name
            sharded = fsdp_param.sharded_param
            in_row = row_bytes(fsdp_param) is not None
            if in_row and sharded.requires_grad:
                raise NotImplementedError(
                    f'register parameter "{fqn}": it is a {type(sharded._local_tensor).__name__} of several tensors '
                    f"({', '.join(sharded._local_tensor.__tensor_flatten__()[0])}), whose bytes shardd keeps, and cannot be trained "
                    "(got requires_grad=True, want False); freeze it and train others (LoRA), or ignore it"
                )
            item: dict[str, Any] = {
                "name": param_name,
                "shape": shape_in_job(fsdp_param, shard_size),
                "dtype": dtype_name(torch.uint8 if in_row else sharded.dtype, f'register parameter "{fqn}"'),
                "requiresGrad": is_planned_as_trained(fsdp_param, id(sharded) in held),
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
            names[id(module)] = name
            entry["mark"] = "MODULE_MARK_FULLY_SHARD"
            if _precision(unit) != precision:
                entry["mixedPrecision"] = _precision(unit)
            entry["reshardAfterForward"] = "OVERRIDE_YES" if unit._reshard_after_forward else "OVERRIDE_NO"
            some = any(rows_of(p) is not None for p in unit.fsdp_params)  # of other ranks than the group's neighbours
            if 1 < unit.post_forward_shard_size() < unit.mesh_info.shard_mesh_size and not some:
                entry["postForwardShardSize"] = unit.post_forward_shard_size()
        modules.append(entry)
    return {"modules": modules}, list(found.values()), names


def describe(
    root: ShardState, name: str, world_size: int, optimizers: list[JobOptimizer], nodes: Sequence[str] = ()
) -> Description:
    """Describes the model as it is now. Raises for what the daemon cannot do, by name.

    ``world_size``: ranks of this node. ``nodes``: addresses of all nodes' daemons, where there are several.
    """
    states: list[ShardState] = list(root._state_ctx.all_states)
    sharded = [p.sharded_param for state in states if state._unit is not None for p in state._unit.fsdp_params]
    stock = [] if optimizers else stock_optimizers_of(sharded)
    all_groups = [group for o in optimizers for group in o.param_groups] + [g for o in stock for g in o.param_groups]
    held = {id(p) for group in all_groups for p in group["params"]}
    assert root._unit is not None
    precision = _precision(root._unit)
    mesh_info = root._unit.mesh_info
    ranks = world_size * max(1, len(nodes))
    shard_size = mesh_info.shard_mesh_size if isinstance(mesh_info, HSDPMeshInfo) else ranks
    tree, params, names = _tree(root._modules[0], states, held, precision, shard_size)
    if not params:
        raise ValueError("register model: no parameter is left for fully_shard; all are ignored or there are none")
    groups = {place.group._module_fqn or "(root)": place.group for place in params}
    for where, group in groups.items():
        if group.layout == "flat" and group.mesh_info.mesh != params[0].group.mesh_info.mesh:
            raise NotImplementedError(f'register module "{where}": its mesh differs from the other modules\'')
        if group.device != root._unit.device:
            raise NotImplementedError(
                f'register module "{where}": it is on another device than the model (got {group.device}, want '
                f"{root._unit.device}); move the whole model before it is sharded"
            )
    strategies = {w: getattr(g, "strategy", None) == ShardingStrategy.NO_SHARD for w, g in groups.items()}
    if len(set(strategies.values())) > 1:
        whole = next(where for where, no_shard in strategies.items() if no_shard)
        raise NotImplementedError(
            f'register module "{whole}": it is NO_SHARD and other modules are sharded; shardd places all modules of a '
            "model alike, use SHARD_GRAD_OP for it"
        )
    layouts = {group.layout for group in groups.values()}
    if len(layouts) > 1:
        raise NotImplementedError(
            "register model: some of its modules are in layout flat (FullyShardedDataParallel) and some in dim0 "
            "(fully_shard); use one for the whole model"
        )
    of_model = params[0].group if layouts == {"flat"} else root._unit
    factors = {group.divide_factor() for group in groups.values()}
    divide_factor = factors.pop() if len(factors) == 1 else float(ranks)
    on_gpu = gpu_of(root) >= 0
    evaluates = not optimizers and not stock and evaluates_alone(sharded, root._training, bool(nodes))
    if nodes and not evaluates:
        rows = 1 if cuts_over_nodes(mesh_info) else max(1, world_size // shard_size)  # of a node
        _check_on_nodes(optimizers, stock, on_gpu, rows)
        spans = world_size < shard_size < ranks
        if cuts_over_nodes(mesh_info) or spans:
            check_whole(params, optimizers, in_rows=spans)
        if stock and rows > 1:
            raise NotImplementedError(
                f"register model: torch.optim.{type(stock[0]).__name__} steps in the trainers, and each of {len(nodes)} nodes has "
                f"{rows} rows of its mesh, want 1; give the mesh a row for each node, or use shardd.torch.optim"
            )
        smaller = next((p for p in params if rows_of(p.fsdp_param) is not None), None)
        if smaller and (rows > 1 or spans):
            share = f"each of {len(nodes)} nodes has {rows} rows of that" if rows > 1 else "rows of that span nodes"
            raise NotImplementedError(
                f'register parameter "{smaller.fqn}": it is on a smaller mesh than the model, and {share}, want 1; give the '
                "mesh a row for each node"
            )
    config: dict[str, Any] = {
        **(_strategy(of_model) if not nodes else _strategy_on_nodes(of_model, nodes, world_size)),
        "layout": "LAYOUT_FLAT" if layouts == {"flat"} else "LAYOUT_DIM0",
        "mixedPrecision": precision,
        "optimizer": {"kind": "OPTIMIZER_KIND_NONE"}
        if evaluates
        else _optimizer(params, optimizers, stock, held, root._training),
        "gradientDivideFactor": divide_factor,
        **config_of_writes(
            never=(bool(nodes) and not stock and not _edits_on_nodes(optimizers))
            or evaluates
            or not all(optimizer.allows_edits(on_gpu) for optimizer in optimizers),
            on_gpu=on_gpu,
            daemon_updates=bool(optimizers),
        ),
    }
    if len(optimizers) > 1 and (why := why_not_several(on_gpu, config.get("passCopies", False))):
        raise NotImplementedError(f"register model: several optimizers of shardd have its parameters, {why}")
    if _offloads(groups):
        config["offload"] = "OFFLOAD_HOST"
    if on_gpu and (sums := environment.value(environment.TRAINER_SUMS)) in ("0", "1"):
        config["trainerSums"] = sums == "1"
    if environment.number(environment.ALLOW_MISSING, 1):
        config["allowMissingContribution"] = True
    trained = [place.fsdp_param for place in params if place.fsdp_param.sharded_param.requires_grad]
    if not on_gpu and gives_back(sum(math.prod(shape_in_job(param, shard_size)) for param in trained)):
        config["lateGradients"] = True
    spec = {"name": name, "worldSize": world_size, "tree": tree, "config": config}
    return Description(spec, params, states, divide_factor, names, stock)


def _strategy_on_nodes(group: ShardGroup, nodes: Sequence[str], ranks: int) -> dict[str, Any]:
    """Replicas on each node, one for each row of its ``ranks``; or copies that are cut over nodes, one over all, or one for each row."""
    if getattr(group, "strategy", None) == ShardingStrategy.NO_SHARD:
        raise NotImplementedError(
            f"register model: NO_SHARD over {len(nodes)} nodes; use HYBRID_SHARD, with which each node has all parameters"
        )
    is_cut = cuts_over_nodes(group.mesh_info)
    size = group.mesh_info.shard_mesh_size
    if (is_cut or size > ranks) and group.precision is not None and group.precision.full_in_eval:
        raise NotImplementedError(
            f"register model: FSDP_USE_FULL_PREC_IN_EVAL, and its parameters are cut over {len(nodes)} nodes, none of which "
            "has all of them as stored; leave it out, or use HYBRID_SHARD"
        )
    addresses = {"nodes": {"addresses": list(nodes)}}
    if is_cut:
        return {"strategy": "STRATEGY_FULL_SHARD", **addresses}
    rows: dict[str, Any] = {} if size == ranks else {"shardGroupSize": size}
    if size < ranks:
        rows["replicaCopies"] = True
    return {"strategy": "STRATEGY_HYBRID_SHARD", **rows, **addresses}


def _edits_on_nodes(optimizers: list[JobOptimizer]) -> bool:
    """Whether the program has said that it edits parameters, without which passes over nodes cost less."""
    return any(optimizer.in_place_edits and optimizer.edits_said for optimizer in optimizers)


def _check_on_nodes(
    optimizers: list[JobOptimizer], stock: list[torch.optim.Optimizer], on_gpu: bool, rows: int
) -> None:
    """Raises for what daemons of several nodes do not agree on: who writes the parameters, and when."""
    if not optimizers and not stock:
        raise NotImplementedError(
            "register model: it is trained on several nodes without an optimizer; build one before the first forward "
            "(shardd.torch.optim, whose steps the daemons make, or torch.optim)"
        )
    if _edits_on_nodes(optimizers) and (why := why_no_edits_on_nodes(on_gpu, rows)):
        raise NotImplementedError(
            f"register model: in_place_edits=True (or SHARDD_IN_PLACE_EDITS) on several nodes {why}; leave it out: "
            "optimizer steps and loads alone change parameters then"
        )


def _offloads(groups: dict[str, ShardGroup]) -> bool:
    offloaded = {where: offloads(group.offload_policy, group.device) for where, group in groups.items()}
    if len(set(offloaded.values())) > 1:
        kept = next(where for where, on_host in offloaded.items() if not on_host)
        raise NotImplementedError(
            f'register module "{kept}": it has no CPUOffloadPolicy and other modules have one; shardd keeps the shards of a '
            "model in one place, give all of them the same offload_policy"
        )
    return any(offloaded.values())


def _strategy(group: ShardGroup) -> dict[str, Any]:
    mesh_info = group.mesh_info
    if getattr(group, "strategy", None) == ShardingStrategy.NO_SHARD and mesh_info.mesh.size() > 1:
        return {"strategy": "STRATEGY_HYBRID_SHARD", "shardGroupSize": 1, "replicaCopies": True}
    if not isinstance(mesh_info, HSDPMeshInfo):
        return {"strategy": "STRATEGY_FULL_SHARD"}
    # The ranks of the job are the mesh row by row. Every rank clips and edits its own shards, as in PyTorch, so each
    # replica has some to write.
    return {
        "strategy": "STRATEGY_HYBRID_SHARD",
        "shardGroupSize": mesh_info.shard_mesh_size,
        "replicaCopies": mesh_info.replicate_mesh_size > 1,
    }


def _optimizer(
    params: list[ParamPlace],
    optimizers: list[JobOptimizer],
    stock: list[torch.optim.Optimizer],
    held: set[int],
    training: bool,
) -> dict[str, Any]:
    if not optimizers:  # one in the trainers, or none
        trained = any(
            p.fsdp_param.sharded_param.requires_grad or id(p.fsdp_param.sharded_param) in held for p in params
        )
        return {"kind": "OPTIMIZER_KIND_TRAINER", "trainerStates": planned_states(stock, training) if trained else 0}
    if len(optimizers) > 1:
        return _several_optimizers(params, optimizers)
    optimizer = optimizers[0]
    owner = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
    fqns: list[list[str]] = [[] for _ in optimizer.param_groups]
    for place in params:
        group = owner.get(id(place.fsdp_param.sharded_param))
        if group is not None:
            fqns[group].append(place.fqn)
    # Group 0 is whatever is in no other; what the optimizer does not have never gets a gradient in a step.
    groups = [{"fqns": names} for names in fqns[1:]]
    return {"kind": optimizer.kind, "momentum": optimizer.needs_momentum(), "groups": groups}


def _owners(params: list[ParamPlace], optimizers: list[JobOptimizer]) -> dict[str, tuple[int, int]]:
    """Returns, by the parameter's name, the number of its optimizer and of the param group there."""
    owner: dict[int, tuple[int, int]] = {}
    names = {id(place.fsdp_param.sharded_param): place.fqn for place in params}
    for number, optimizer in enumerate(optimizers):
        for i, group in enumerate(optimizer.param_groups):
            for param in group["params"]:
                if owner.setdefault(id(param), (number, i))[0] != number and id(param) in names:
                    raise NotImplementedError(
                        f'register model: parameter "{names[id(param)]}" is in two optimizers of shardd '
                        f"({optimizers[owner[id(param)][0]].name} and {optimizer.name}); give it to one, or let torch's step it"
                    )
    found = {place.fqn: owner.get(id(place.fsdp_param.sharded_param)) for place in params}
    return {fqn: its for fqn, its in found.items() if its is not None}


def _several_optimizers(params: list[ParamPlace], optimizers: list[JobOptimizer]) -> dict[str, Any]:
    """Each param group of each is a group of its own kind; group 0 is what none of them has."""
    owners = _owners(params, optimizers)
    groups = []
    for number, optimizer in enumerate(optimizers):
        for i in range(len(optimizer.param_groups)):
            fqns = [fqn for fqn, owner in owners.items() if owner == (number, i)]
            groups.append({"fqns": fqns, "kind": optimizer.kind, "momentum": optimizer.needs_momentum()})
    return {"kind": optimizers[0].kind, "groups": groups}


def owners_of(
    groups: list[dict[str, Any]], params: list[ParamPlace], optimizers: list[JobOptimizer], job: str
) -> list[tuple[int, int] | None]:
    """Returns whose each group of a job with several optimizers is now; RuntimeError where one is several param groups'."""
    owners = _owners(params, optimizers)
    result: list[tuple[int, int] | None] = []
    for number, group in enumerate(groups):
        found = {owners[fqn] for fqn in group.get("fqns", []) if fqn in owners}
        if len(found) > 1:
            raise RuntimeError(
                f'register model: job "{job}" steps the parameters of its optimizer group {number + 1} alike, and the program has '
                f"them in {len(found)} param groups; build the optimizers with the param groups of the attempt before"
            )
        result.append(found.pop() if found else None)
    return result
