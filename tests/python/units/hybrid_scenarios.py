"""What ranks do in the tests of 2-D meshes; each function runs on all four of them."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from models import Case, build, loss_of, shard


def hybrid_facts() -> dict[str, Any]:
    """What the daemon says of the job of a (2, 2) mesh, and what was asked for between forward and backward."""
    from torch.distributed.device_mesh import init_device_mesh

    from shardd.torch import clip_grad_norm_, finish, fully_shard
    from shardd.torch._job.spec import describe
    from shardd.torch._units.state import state_of

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    flat = init_device_mesh("cpu", (4,))
    facts: dict[str, Any] = {}
    try:
        fully_shard(nn.Linear(4, 4), mesh=mesh, reshard_after_forward=4)
    except ValueError as error:
        facts["factor"] = str(error)
    wide = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    for layer, reshard in zip(wide, (2, 1, 4)):
        fully_shard(layer, mesh=flat, reshard_after_forward=reshard)
    fully_shard(wide, mesh=flat)
    wide(torch.ones(1, 4)).sum().backward()
    root = state_of(wide)
    assert root is not None
    modules = describe(root, "spec", 4, []).spec["tree"]["modules"]
    facts["reshard"] = [m.get("reshardAfterForward") for m in modules[1:]]
    facts["post_forward"] = [m.get("postForwardShardSize") for m in modules[1:]]

    model = build(Case())
    shard(model, Case(mesh=(2, 2)), fully_shard)
    loss_of(model, 0, 0, dist.get_rank()).backward()
    facts["norm"] = clip_grad_norm_(model.parameters(), 1e9).item()
    facts["torch_norm"] = nn.utils.get_total_norm([p.grad for p in model.parameters()]).full_tensor().item()
    state = state_of(model)
    assert state is not None and state._job is not None and state._job.engine is not None
    config = json.loads(state._job.engine.describe())["config"]
    facts["strategy"] = config["strategy"]
    facts["groups"] = [group["ranks"] for group in config["shard_groups"]]
    facts["divide"] = config["gradient_divide_factor"]
    dist.barrier()
    for each in (model, wide):
        finish(each)
    return facts


def two_models_on_half_the_world_each() -> dict[str, Any]:
    """A (2, 1) mesh beside another one: jobs of their own, although neither is the world."""
    from torch.distributed.device_mesh import init_device_mesh

    from shardd.torch import counters, finish, fully_shard
    from shardd.torch.optim import SGD

    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("half", "replicate", "shard"))["replicate", "shard"]
    torch.manual_seed(0)
    model = nn.Linear(3, 3, bias=False)
    fully_shard(model, mesh=mesh)
    optimizer = SGD(model.parameters(), lr=1.0)
    (model(torch.ones(1, 3)) * (rank + 1)).sum().backward()
    gradient = model.weight.grad.to_local()[0, 0].item()
    optimizer.step()
    facts = {"gradient": gradient, "commits": counters(model)["commits"]}
    dist.barrier()
    finish(model)
    return facts


def a_mesh_in_no_order() -> dict[str, Any]:
    """Rows whose ranks do not ascend, and columns whose ranks do not."""
    from torch.distributed.device_mesh import DeviceMesh

    from shardd.torch import finish, fully_shard
    from shardd.torch.optim import SGD

    def refused(ranks: list[Any], *names: str) -> str:
        try:
            fully_shard(nn.Linear(3, 3), mesh=DeviceMesh("cpu", ranks, mesh_dim_names=names))
        except ValueError as error:
            return str(error)
        return ""

    facts: dict[str, Any] = {
        "row": refused([3, 2, 1, 0], "shard"),
        "rows": refused([[2, 0], [1, 3]], "replicate", "shard"),
    }
    torch.manual_seed(0)
    model = nn.Linear(3, 3, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.arange(9.0).view(3, 3))
    fully_shard(model, mesh=DeviceMesh("cpu", [[1, 3], [0, 2]], mesh_dim_names=("replicate", "shard")))
    optimizer = SGD(model.parameters(), lr=1.0)
    model(torch.full((1, 3), float(dist.get_rank()))).sum().backward()
    optimizer.step()
    facts.update(rows_held=model.weight.to_local().clone(), whole=model.weight.full_tensor())
    dist.barrier()
    finish(model)
    return facts


def a_step_without_all_reduce() -> str:
    """What a step says whose last backward was not added up between replicas."""
    from shardd.torch import finish, fully_shard
    from shardd.torch.optim import SGD

    model = build(Case())
    shard(model, Case(mesh=(2, 2)), fully_shard)
    optimizer = SGD(model.parameters(), lr=1.0)
    model.set_requires_all_reduce(False)
    loss_of(model, 0, 0, dist.get_rank()).backward()
    said = ""
    try:
        optimizer.step()
    except RuntimeError as error:
        said = str(error)
    dist.barrier()
    finish(model)
    return said


def replicas_edit() -> dict[str, Any]:
    """Every rank halves its shard and quarters its gradient, which is no edit that may be done twice."""
    from shardd.torch import finish, fully_shard

    model = build(Case())
    shard(model, Case(mesh=(2, 2)), fully_shard)
    rank = dist.get_rank()
    loss_of(model, 0, 0, rank).backward()
    dist.barrier()
    weight = model.layers[0].up.weight
    facts = {
        "before": weight.to_local().detach().flatten()[:4].tolist(),
        "gradient_before": weight.grad.to_local().flatten()[:4].tolist(),
    }
    dist.barrier()
    for parameter in model.parameters():
        parameter.grad.to_local().mul_(0.25)
        parameter.data.to_local().mul_(0.5)
    dist.barrier()
    facts["gradient"] = weight.grad.to_local().flatten()[:4].tolist()
    facts["after_edit"] = weight.to_local().detach().flatten()[:4].tolist()
    seen: list[torch.Tensor] = []
    model.layers[0].up.register_forward_hook(lambda module, args, output: seen.append(module.weight.detach().clone()))
    loss_of(model, 1, 0, rank)
    rows = -(-seen[0].shape[0] // 2) if rank % 2 else 0  # as torch.chunk cuts
    facts["seen_in_forward"] = seen[0][rows:].flatten()[:4].tolist()
    model.zero_grad()
    dist.barrier()
    finish(model)
    return facts
