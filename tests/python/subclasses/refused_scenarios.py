"""What ranks do in the tests of refusals: the program's model is as it was, and goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from raised import text_of
from shardd.torch._process.torch_versions import PLACES_ON_MESHES, ShardPlacementResult, fsdp_init
from subclasses.weights import Low, lower

WIDTH = 12


def raised(call: Callable[[], Any]) -> str:
    return text_of(call, "nothing raised")


def _looks(model: nn.Module) -> dict[str, Any]:
    """All that fully_shard changes of a model."""
    return {
        "classes": {name: type(module) for name, module in model.named_modules()},
        "marks": {name: sorted(vars(module)) for name, module in model.named_modules()},
        "hooks": {name: len(module._forward_pre_hooks) for name, module in model.named_modules()},
        "parameters": {name: (type(p), p.data_ptr() if type(p) is nn.Parameter else id(p)) for name, p in model.named_parameters()},
    }  # fmt: skip


class Block(nn.Module):
    """A plain layer, which comes first, and one whose weight is low."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.experts = nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, 4))
        lower(self.experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(self.first(x))  # type: ignore[no-any-return]


def _is_low(param: nn.Parameter) -> bool:
    return isinstance(param, Low)


def _trains(model: Any) -> bool:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        loss = model(torch.ones(2, WIDTH)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses[0] > losses[1] > losses[2]


def another_dimension() -> dict[str, Any]:
    """Refused where the low weight's module would be the second one that is sharded; then the program cuts its rows."""
    from shardd.torch import finish, fully_shard

    torch.manual_seed(2)
    model = Block()
    before, asked = _looks(model), []

    def columns(param: nn.Parameter) -> Any:
        return Shard(param.ndim - 1) if _is_low(param) else None

    def rows(param: nn.Parameter) -> None:
        asked.append(param)

    found: dict[str, Any] = {
        "said": raised(lambda: fully_shard(model, policy=nn.Linear, shard_placement_fn=columns)),
        "as it was": _looks(model) == before,
    }
    count = len(list(model.parameters()))
    fully_shard(model, policy=nn.Linear, shard_placement_fn=rows)
    found.update({"asked once": len(asked) == count, "trains": _trains(model)})
    dist.barrier()
    finish(model)
    return found


def smaller_meshes() -> dict[str, Any]:
    from shardd.torch import finish, fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_mod_ep", "ep"))
    dp, small = mesh["dp_mod_ep", "ep"]._flatten("dp"), mesh["dp_mod_ep"]
    of_experts = fsdp_init._get_mesh_info(small, None)
    found: dict[str, Any] = {}

    torch.manual_seed(2)
    model: Any = Block()
    before = _looks(model)

    def placed(param: nn.Parameter) -> Any:
        return ShardPlacementResult(Shard(0), of_experts) if _is_low(param) else None

    found["by placement"] = raised(lambda: fully_shard(model, mesh=dp, shard_placement_fn=placed))
    found["as it was"] = _looks(model) == before

    # Which mesh is the model's, a call for a module below it cannot know.
    fully_shard(model.experts, mesh=small)
    before = _looks(model)
    found["by module"] = raised(lambda: fully_shard(model, mesh=dp))
    found["around as it was"] = _looks(model) == before

    # The outer module first.
    model = Block()
    fully_shard(model, mesh=dp, ignored_params=set(model.experts.parameters()))
    fully_shard(model.experts, mesh=small)
    found["behind the model"] = raised(lambda: model(torch.ones(2, WIDTH)))

    # All of a model is on it, so that it is the model's; meshes are equal by their ranks.
    if PLACES_ON_MESHES:
        model = Block()

        def same_ranks(param: nn.Parameter) -> Any:
            other = init_device_mesh("cpu", (4,), mesh_dim_names=("other",))
            return ShardPlacementResult(Shard(0), fsdp_init._get_mesh_info(other, None))

        fully_shard(model, mesh=dp, shard_placement_fn=same_ranks)
        found["same ranks train"] = _trains(model)
        dist.barrier()
        finish(model)
    model = Block()
    fully_shard(model.experts, mesh=small)
    fully_shard(model, mesh=small)
    found["all of it trains"] = _trains(model)
    dist.barrier()
    finish(model)
    return found


class OnlyMethods(torch.Tensor):
    """Has the methods, and no dispatch of its own."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self,), None

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None) -> Any:
        return outputs[0], outputs


def methods_alone() -> dict[str, Any]:
    from shardd.torch import fully_shard

    linear = nn.Linear(4, 4)
    linear.weight = nn.Parameter(torch.ones(4, 4).as_subclass(OnlyMethods))
    before = _looks(linear)
    return {"said": raised(lambda: fully_shard(linear)), "as it was": _looks(linear) == before}
