"""What ranks do in the tests of weights that say themselves how they are gathered."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from subclasses.weights import Low, OldLow, calls, lower

WIDTH = 13  # is cut unevenly over two ranks and over four


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 10)
        self.down = nn.Linear(10, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def made(kind: type[Low], sharded: Any, **options: Any) -> nn.Sequential:
    torch.manual_seed(3)
    model = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 4))
    lower(model, kind)
    for block in model[:2]:
        sharded(block, **options)
    sharded(model, **options)
    return model


def _batch(step: int) -> torch.Tensor:
    torch.manual_seed(100 * step + dist.get_rank())
    return torch.randn(6, WIDTH)


def train(model: Any, optimizer: Any, steps: range, accumulate: int = 1) -> list[float]:
    losses = []
    for step in steps:
        for micro in range(accumulate):
            if accumulate > 1:
                model.set_requires_gradient_sync(micro == accumulate - 1)
            loss = model(_batch(step * accumulate + micro)).pow(2).mean()
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def facts(model: nn.Module) -> dict[str, Any]:
    named = dict(model.named_parameters())
    state = model.state_dict()
    return {
        "local kinds": {name: type(p._local_tensor).__name__ for name, p in named.items()},
        "state kinds": {name: type(t._local_tensor).__name__ for name, t in state.items()},
        "local": {
            name: torch.as_tensor(getattr(p._local_tensor, "_data", p._local_tensor)).clone()
            for name, p in named.items()
        },
        "whole": {name: t.full_tensor().detach().clone() for name, t in state.items()},
    }


def trained_on_both(old: bool, options: dict[str, Any], accumulate: int, optimizer: str, steps: int) -> dict[str, Any]:
    """One program on torch's fully_shard and on ours."""
    import shardd.torch
    import shardd.torch.optim

    kind, results = OldLow if old else Low, {}
    if options.get("mp_policy") == "bf16":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if "mesh" in options:
        options["mesh"] = init_device_mesh("cpu", options["mesh"], mesh_dim_names=("replicate", "shard"))
    for name, sharded in (("torch", torch_fully_shard), ("shardd", shardd.torch.fully_shard)):
        calls.clear()
        model = made(kind, sharded, **options)
        of = torch.optim if name == "torch" or optimizer == "torch" else shardd.torch.optim
        adamw: Any = of.AdamW(model.parameters(), lr=0.01)
        losses = train(model, adamw, range(steps), accumulate)
        results[name] = {"losses": losses, "calls": list(calls), **facts(model)}
    dist.barrier()
    shardd.torch.finish(model)
    return results


def loaded_again(optimizer: str, how: str = "copied") -> dict[str, Any]:
    """Values of a state dict of step 3, and of the model once they are loaded behind step 5; then three more steps."""
    import shardd.torch
    import shardd.torch.optim

    model = made(Low, shardd.torch.fully_shard)
    of: Any = torch.optim if optimizer == "torch" else shardd.torch.optim
    sgd = of.SGD(model.parameters(), lr=0.05)
    train(model, sgd, range(3))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    saved = facts(model)["whole"]
    first = train(model, sgd, range(3, 6))
    behind = facts(model)["whole"]
    torch.__future__.set_swap_module_params_on_conversion(how == "swapped")
    model.load_state_dict(state, assign=how == "assigned")
    torch.__future__.set_swap_module_params_on_conversion(False)
    loaded = facts(model)["whole"]
    again = train(model, sgd, range(3, 6))
    behind_again = facts(model)["whole"]
    dist.barrier()
    shardd.torch.finish(model)
    return {"saved": [saved, first, behind], "loaded": [loaded, again, behind_again]}
