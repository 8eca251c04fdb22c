"""What ranks do in the tests of meshes whose rows span nodes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from models import Case, build, loss_of, shard
from ranks.nodes_scenarios import _job_of, _text_of
from ranks.rank_life import Death, RankLife


def facts() -> dict[str, Any]:
    """What the daemon says of the job, and full parameters by both ways, of all ranks and of each row's first."""
    from shardd.torch import finish, fully_shard, summon_full_params
    from shardd.torch.optim import AdamW

    case = Case(mesh=(2, 2))
    model = build(case)
    shard(model, case, fully_shard)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        loss_of(model, step, 0, dist.get_rank()).backward()
        optimizer.step()
        optimizer.zero_grad()
    full = {name: p.full_tensor().detach().clone() for name, p in model.named_parameters()}
    with summon_full_params(model, writeback=False):
        summoned = {name: p.detach().clone() for name, p in model.named_parameters()}
    with summon_full_params(model, writeback=False, rank0_only=True):
        of_first = {
            name for name, p in model.named_parameters() if p.shape == full[name].shape and type(p) is nn.Parameter
        }
    job = _job_of(model)
    dist.barrier()
    finish(model)
    return {"job": job, "full": full, "summoned": summoned, "of_first": of_first}


def survive(folder: str, death: Death) -> dict[str, Any]:
    """Trains with the daemon's AdamW; one rank dies in its first life, and the others go on in their processes."""
    from shardd.torch import fully_shard
    from shardd.torch.optim import AdamW

    case = Case(mesh=(2, 2))
    life = RankLife(folder, death, case.mesh)
    model = build(case)
    shard(model, case, fully_shard)
    trained = life.train(model, [AdamW(model.parameters(), lr=1e-2)], steps=8)
    shards = {name: p.to_local().detach().clone() for name, p in model.named_parameters()}
    return {**trained, "shards": shards}


def refused() -> dict[str, str]:
    """Models that are not registered, over four nodes of two ranks: each raises on all ranks of its mesh."""
    from torch.distributed.device_mesh import DeviceMesh

    from shardd.torch import fully_shard
    from shardd.torch.optim import AdamW

    def text(mesh: Any) -> str:
        if dist.get_rank() not in mesh.mesh:
            return ""
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        fully_shard(model, mesh=mesh)
        kept = AdamW(model.parameters(), lr=0.1)
        assert kept.param_groups
        return _text_of(lambda: model(torch.ones(1, 4)).sum())

    dims = ("replicate", "shard")
    return {
        "parts": text(DeviceMesh("cpu", [[0, 2, 4, 6], [1, 3, 5, 7]], mesh_dim_names=dims)),
        "halves": text(DeviceMesh("cpu", [[0, 1, 2], [3, 4, 5]], mesh_dim_names=dims)),
    }
