"""A model with experts: each expert parallel rank has its own, which tokens reach by all_to_all, on torch's fully_shard or ours."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from shardd.torch._process.torch_versions import ShardPlacementResult, fsdp_init

WIDTH, HIDDEN = 8, 12


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gives: list[int], gets: list[int], group: Any) -> torch.Tensor:
        ctx.back = gets, gives, group
        out = x.new_empty(sum(gets), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), gets, gives, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return _AllToAll.apply(gradients[0], *ctx.back), None, None, None


def _local(param: Any) -> torch.Tensor:
    return param.to_local() if hasattr(param, "to_local") else param  # type: ignore[no-any-return]


class Experts(nn.Module):
    """The experts of this rank; as stacked parameters, and a scale for all of them."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(count, WIDTH, HIDDEN) / 3)
        self.down = nn.Parameter(torch.randn(count, HIDDEN, WIDTH) / 3)
        self.scale = nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor, counts: list[int]) -> torch.Tensor:
        up, down = _local(self.up), _local(self.down)
        out = [torch.relu(part @ up[i]) @ down[i] for i, part in enumerate(x.split(counts))]
        return torch.cat(out) * _local(self.scale).mean()


class Block(nn.Module):
    def __init__(self, counts: list[int], ep: Any) -> None:
        super().__init__()
        self.group, self.counts = ep.get_group(), counts
        self.norm = nn.LayerNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, sum(counts), bias=False)
        every = [Experts(count) for count in counts]
        self.experts = every[ep.get_local_rank()]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = self.norm(x)
        weight, chosen = self.gate(flat).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        of_expert = chosen.bincount(minlength=sum(self.counts))
        gives = [int(part.sum()) for part in of_expert.split(self.counts)]
        told: list[Any] = [None] * len(self.counts)
        dist.all_gather_object(told, of_expert.split(self.counts), group=self.group)
        mine = [of_rank[dist.get_rank(self.group)] for of_rank in told]  # by who gives them, of each expert
        gets = [int(part.sum()) for part in mine]
        came = _AllToAll.apply(flat[order], gives, gets, self.group)
        sources = torch.cat([torch.repeat_interleave(torch.arange(len(part)), part) for part in mine])
        by_expert = sources.argsort(stable=True)
        done = self.experts(came[by_expert], torch.stack(mine).sum(0).tolist())
        back = _AllToAll.apply(done[by_expert.argsort()], gets, gives, self.group)
        return x + back[order.argsort()] * weight[:, None]


def meshes(shape: tuple[int, ...] = (2, 2)) -> tuple[Any, Any, Any]:
    """Returns the mesh of all data parallel ranks, that of the experts of one expert parallel rank, and that over these."""
    names = ("dp_mod_ep", "ep") if len(shape) == 2 else ("replicate", "dp_mod_ep", "ep")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    shard = mesh["dp_mod_ep", "ep"]._flatten("dp")
    if len(shape) == 2:
        return shard, mesh["dp_mod_ep"], mesh["ep"]
    return mesh["replicate", "dp"], mesh["replicate", "dp_mod_ep"], mesh["ep"]


def expert_model(
    fully_shard: Any,
    shape: tuple[int, ...] = (2, 2),
    counts: tuple[int, ...] = (4, 4),
    as_dtensors: bool = False,
    cut: int = 0,
    factor: float | None = None,
    by_placement: bool = False,
    **options: Any,
) -> nn.Sequential:
    """``counts``: experts of each expert parallel rank. ``cut``: along which dimension they are cut. ``factor``: what their
    gradients are divided by. ``by_placement``: they are of their block's unit, and ``shard_placement_fn`` gives their mesh."""
    dp, dp_mod_ep, ep = meshes(shape)
    torch.manual_seed(7)
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), Block(list(counts), ep), Block(list(counts), ep), nn.Linear(WIDTH, 3)
    )
    if as_dtensors:
        for block in model[1:3]:
            for name in ("up", "down"):
                every: list[Any] = [None] * ep.size()
                dist.all_gather_object(every, getattr(block.experts, name).detach(), group=ep.get_group())
                placed = distribute_tensor(torch.cat(every), ep, [Shard(0)], src_data_rank=None)
                setattr(block.experts, name, nn.Parameter(placed))

    def place(param: nn.Parameter) -> Any:
        return Shard(cut if param.ndim > 1 else 0)

    of_experts = fsdp_init._get_mesh_info(dp_mod_ep, None)
    for block in model[1:3]:
        own = {id(param) for param in block.experts.parameters()}
        if by_placement:

            def of_block(param: nn.Parameter, own: set[int] = own) -> Any:
                return ShardPlacementResult(place(param), of_experts) if id(param) in own else None

            fully_shard(block, mesh=dp, shard_placement_fn=of_block, **options)
            continue
        fully_shard(block.experts, mesh=dp_mod_ep, shard_placement_fn=place, **options)
        if factor is not None:
            block.experts.set_force_sum_reduction_for_comms(True)
            block.experts.set_gradient_divide_factor(factor)
        fully_shard(block, mesh=dp, **options)
    fully_shard(model, mesh=dp, **options)
    return model


def loss_of(model: nn.Module, step: int, tokens: int = 6) -> torch.Tensor:
    torch.manual_seed(1000 * step + dist.get_rank())
    loss: torch.Tensor = model(torch.randn(tokens, WIDTH)).pow(2).mean()
    return loss
