"""What ranks do in tests that put the wrapper beside torch's: state dict settings, orders, hybrid strategies, the handle."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ShardingStrategy,
    StateDictSettings,
    StateDictType,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor

from state_dicts.wrapper_state_cases import face, finished, quiet

FULL, SHARDED, LOCAL = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT, StateDictType.LOCAL_STATE_DICT


class Net(nn.Module):
    """A root with parameters and a buffer of its own around one unit; names are in no alphabetical order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.into = nn.Linear(5, 8)
        self.blocks = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8, bias=False))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(torch.tanh(self.into(x))))) * self.scale


def wrapped(impl: str, orig: bool, strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD, **more: Any) -> Any:
    return face(impl)(
        Net(),
        device_id=torch.device("cpu"),
        use_orig_params=orig,
        auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}),
        sharding_strategy=strategy,
        **more,
    )


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, clip: float = 0) -> list[float]:
    seen = []
    for step in steps:
        loss = model(batch(step)).pow(2).mean()
        loss.backward()
        seen.append(loss.item())
        if clip:
            seen.append(float(model.clip_grad_norm_(clip)))
        optimizer.step()
        optimizer.zero_grad()
    return seen


def plain(value: Any) -> Any:
    """What a value is made of on this rank; keys in their order."""
    if isinstance(value, ShardedTensor):
        return ["ShardedTensor", tuple(value.size()), *((s.metadata.shard_offsets, s.tensor.clone()) for s in value.local_shards())]  # fmt: skip
    if isinstance(value, DTensor):
        return ["DTensor", tuple(value.size()), str(value.placements), tuple(value.device_mesh.shape), value.to_local().clone()]  # fmt: skip
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def told(settings: StateDictSettings) -> list[Any]:
    configs = (settings.state_dict_config, settings.optim_state_dict_config)
    return [settings.state_dict_type, *((type(c).__name__, sorted(vars(c).items())) for c in configs)]


def _unsharded(impl: str, orig: bool) -> dict[str, Any]:
    wrapper, out = face(impl), {}
    model = wrapped(impl, orig, ShardingStrategy.NO_SHARD)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, range(2))
    for rank0_only in (False, True):
        config, optim_config = (
            FullStateDictConfig(rank0_only=rank0_only),
            FullOptimStateDictConfig(rank0_only=rank0_only),
        )
        with wrapper.state_dict_type(model, FULL, config, optim_config):
            out[rank0_only] = plain([model.state_dict(), wrapper.optim_state_dict(model, optimizer)])
    with wrapper.state_dict_type(model, SHARDED):
        out["sharded"] = plain([model.state_dict(), wrapper.optim_state_dict(model, optimizer)])
    return out


def unsharded() -> list[Any]:
    """NO_SHARD, by form: torch's and ours."""
    with quiet():
        return [(orig, _unsharded("torch", orig), _unsharded("shardd", orig)) for orig in (True, False)]


def _settings(impl: str, orig: bool, mesh: bool) -> dict[str, Any]:
    wrapper, out = face(impl), {}
    more = {"device_mesh": init_device_mesh("cpu", (dist.get_world_size(),))} if mesh else {}
    model = wrapped(impl, orig, **more)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    out["at first"] = told(wrapper.get_state_dict_type(model))
    train(model, optimizer, range(2))
    for kind in (FULL, SHARDED):
        out[kind, "before"] = told(wrapper.set_state_dict_type(model, kind))
        out[kind, "asked"] = told(wrapper.get_state_dict_type(model.blocks))
        out[kind] = plain([model.state_dict(), wrapper.optim_state_dict(model, optimizer)])
        out[kind, "after"] = told(wrapper.get_state_dict_type(model))
        out[kind, "units"] = [u._state_dict_config == model._state_dict_config for u in wrapper.fsdp_modules(model)]
    wrapper.set_state_dict_type(model, FULL)  # which says nothing of DTensors until it is asked for
    out["older sharded"] = plain(wrapper.sharded_optim_state_dict(model, optimizer))
    out["older full"] = plain(wrapper.full_optim_state_dict(model, optimizer, rank0_only=False))
    wrapper.get_state_dict_type(model)
    out["older sharded, asked"] = plain(wrapper.sharded_optim_state_dict(model, optimizer))
    return out


def settings() -> list[Any]:
    """By form, with a device mesh and without: torch's and ours."""
    with quiet():
        return [
            ((orig, mesh), _settings("torch", orig, mesh), _settings("shardd", orig, mesh))
            for orig in (True, False)
            for mesh in (True, False)
        ]


def settings_that_differ() -> tuple[str, str]:
    texts = []
    with quiet():
        for impl in ("torch", "shardd"):
            wrapper, model = face(impl), wrapped(impl, True)
            wrapper.set_state_dict_type(model.blocks, FULL, FullStateDictConfig(rank0_only=True))
            try:
                wrapper.get_state_dict_type(model)
                texts.append("")
            except AssertionError as error:
                texts.append(str(error))
    return texts[0], texts[1]


def _groups() -> tuple[Any, Any]:
    """(shard, replicate) of a 2 by 2 mesh."""
    rank = dist.get_rank()
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return rows[rank // 2], columns[rank % 2]


def _hybrid(impl: str, strategy: ShardingStrategy, more: dict[str, Any], orig: bool) -> dict[str, Any]:
    wrapper, out = face(impl), {}
    model = wrapped(impl, orig, strategy, **more)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    groups = [dist.get_process_group_ranks(group) for group in (model.process_group, model._inter_node_pg)]
    out["facts"] = [
        model.rank,
        model.world_size,
        model.sharding_strategy,
        groups,
        str(model._handle._sharding_strategy),
    ]
    out["meshes"] = [unit._device_mesh is None for unit in wrapper.fsdp_modules(model)]
    out["trained"] = train(model, optimizer, range(3), clip=0.3)
    with model.no_sync():
        model(batch(7)).pow(2).mean().backward()
    model(batch(8)).pow(2).mean().backward()
    out["norm"] = float(model.clip_grad_norm_(1e9))
    with wrapper.summon_full_params(model, with_grads=orig):
        out["whole"] = {n: [p.detach().clone(), p.grad.clone() if orig else 0] for n, p in model.named_parameters()}
    optimizer.zero_grad()
    for kind in (FULL, SHARDED):
        with wrapper.state_dict_type(model, kind):
            state, optim = model.state_dict(), wrapper.optim_state_dict(model, optimizer)
            out[kind] = [told(wrapper.get_state_dict_type(model)), plain([state, optim, model.blocks.state_dict()])]
            model.load_state_dict(state)
            if kind == SHARDED:  # what torch gathers of an optimizer on CPU devices is wrong
                optimizer.load_state_dict(wrapper.optim_state_dict_to_load(model, optimizer, optim))
    out["went on"] = train(model, optimizer, range(20, 22))
    if impl == "shardd":
        finished(model)
    return out


def hybrid(strategy: ShardingStrategy) -> list[Any]:
    """On 4 ranks, by a mesh and by groups: torch's and ours."""
    with quiet():
        by = {
            "mesh": {"device_mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))},
            "groups": {"process_group": _groups()},
        }
        return [
            ((name, orig), *(_hybrid(impl, strategy, more, orig) for impl in ("torch", "shardd")))
            for name, more in by.items()
            for orig in (True, False)
        ]


def _handle(impl: str, orig: bool, strategy: ShardingStrategy) -> dict[str, Any]:
    model = wrapped(impl, orig, strategy)
    handle = model._handle
    out = {
        "strategy": [unit._handle._sharding_strategy for unit in face(impl).fsdp_modules(model)],
        "sharded": handle.uses_sharded_strategy,
        "orig": handle._use_orig_params,
        "module": handle._fully_sharded_module is model.module,
        "ranks": [handle.rank, handle.world_size, handle.process_group is model.process_group],
        "idle": handle._training_state,
        "none": face(impl)(nn.Tanh(), device_id=torch.device("cpu"))._handle,
        "unit": [model._has_params, model.compute_device, model.sharding_strategy, model.rank, model.world_size],
        "names": [type(model._fsdp_wrapped_module).__name__, type(model.module).__name__, model._use_orig_params],
    }
    model(batch(0))
    out["handles"] = [handle._fully_sharded_module is unit.module
                      for handle, unit in zip(model._all_handles, face(impl).fsdp_modules(model))]  # fmt: skip
    out["root"] = [model._is_root, model.blocks._is_root, model._sync_gradients]
    with model.no_sync():
        out["no_sync"] = model._sync_gradients
    if not orig:
        flat = handle.flat_param
        out["flat"] = [list(flat._fqns), [tuple(s) for s in flat._shapes], list(flat._numels), flat is model.params[0]]
        out["same"] = [
            p is q for p, q in zip(model.params, [p for n, p in model.named_parameters() if "blocks" not in n])
        ]
    return out


def handle() -> dict[str, Any]:
    out: dict[str, Any] = {}
    with quiet():
        for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD):
            for orig in (True, False):
                out[f"{strategy} {orig}"] = [_handle(impl, orig, strategy) for impl in ("torch", "shardd")]
        model = wrapped("shardd", True)
    for name in (
        "_handle.flat_param",
        "_handle._local_shard",
        "_exec_order_data",
        "_inter_node_pg",
        "_communication_hook",
    ):
        value: Any = model
        try:
            for part in name.split("."):
                value = getattr(value, part)
            out[name] = ""
        except AttributeError as error:
            out[name] = str(error)
    out["hasattr"] = [
        hasattr(model._handle, "flat_param"),
        hasattr(model, "_handles"),
        hasattr(model, "_inter_node_pg"),
    ]
    return out
