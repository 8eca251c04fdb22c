"""Which modules carry hooks, and what a unit does with keyword arguments. Each function runs on every rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from models import Block, Case, build, loss_of


class _Keywords(nn.Module):
    """Takes tensors by name only, one of them in a container, and gives a dict."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.linear = nn.Linear(6, 6)
        self.seen: list[torch.dtype] = []

    def forward(self, *, inputs: dict[str, torch.Tensor], scale: torch.Tensor) -> dict[str, torch.Tensor]:
        self.seen = [inputs["x"].dtype, scale.dtype]
        return {"out": torch.tanh(self.linear(inputs["x"])) * scale}


class _Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = _Keywords()
        self.first = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(inputs={"x": self.first(x)}, scale=x.exp())["out"]


def _carriers(model: nn.Module) -> list[str]:
    hooks = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sorted(name for name, m in model.named_modules() if any(getattr(m, kind) for kind in hooks))


def hooks() -> dict[str, Any]:
    from shardd.torch import counters, fully_shard

    rank, facts = dist.get_rank(), {}
    model: Any = fully_shard(build(Case()), policy={Block}, layout="flat")
    facts["before"] = _carriers(model)
    loss_of(model, 0, 0, rank).backward()
    facts["after"] = _carriers(model)
    lists: Any = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 4))
    fully_shard([lists[1], lists[1][0]], layout="flat")
    fully_shard([lists[0], lists[2]], layout="flat")
    facts["lists"] = _carriers(lists)

    alone = _Around()
    for low in (False, True):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if low else None, cast_forward_inputs=True)
        around: Any = _Around()
        fully_shard(around.inner, layout="flat", mp_policy=policy)
        fully_shard(around, layout="flat")
        x = torch.randn(3, 6, generator=torch.Generator().manual_seed(rank))
        around(x).float().pow(2).sum().backward()
        facts[f"seen {low}"] = around.inner.seen
        facts[f"resharded {low}"] = fully_shard.state(around.inner)._unit.is_sharded  # type: ignore[attr-defined]
        facts[f"counters {low}"] = counters(around)
        facts[f"grads {low}"] = {n: p.grad for n, p in around.named_parameters()}
    for other in range(dist.get_world_size()):
        x = torch.randn(3, 6, generator=torch.Generator().manual_seed(other))
        (alone(x).pow(2).sum() / dist.get_world_size()).backward()
    facts["wanted"] = {n: p.grad for n, p in alone.named_parameters()}
    return facts
