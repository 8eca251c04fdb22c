"""What ranks do in the tests of frozen weights of several tensors, and of killed trainers."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from rank_main import report
from subclasses.low_scenarios import made, train
from subclasses.weights import Low
from subclasses.weights_frozen import Adapted, Codes

WIDTH = 13
ROWS = 12  # of whole rows, as torch wants where several tensors are gathered


class Adapters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Adapted(WIDTH, ROWS), Adapted(ROWS, ROWS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def _adapters(sharded: Any, seed: int = 5) -> nn.Module:
    torch.manual_seed(seed)
    model = Adapters()
    sharded(model.second)
    return sharded(model)  # type: ignore[no-any-return]


def _adapter_facts(model: nn.Module) -> dict[str, Any]:
    found = {}
    for name, p in model.named_parameters():
        local: Any = p._local_tensor  # type: ignore[attr-defined]
        found[name] = local.values().clone() if isinstance(local, Codes) else local.detach().clone()
    return found


def adapters_on_both(optimizer: str) -> dict[str, Any]:
    import shardd.torch
    import shardd.torch.optim

    results = {}
    for name, sharded in (("torch", torch_fully_shard), ("shardd", shardd.torch.fully_shard)):
        model = _adapters(sharded)
        of: Any = torch.optim if name == "torch" or optimizer == "torch" else shardd.torch.optim
        adamw = of.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
        losses = train(model, adamw, range(20), 2)
        results[name] = {"losses": losses, "parameters": _adapter_facts(model)}
        # A state dict keeps the subclass, and is loaded into another model.
        state = {key: value.clone() for key, value in model.state_dict().items()}
        results[name]["kinds"] = {key: type(value._local_tensor).__name__ for key, value in state.items()}
        other = _adapters(sharded, seed=6)
        if name == "shardd":
            train(other, of.AdamW([p for p in other.parameters() if p.requires_grad], lr=0.01), range(1), 1)
        other.load_state_dict(state)
        results[name]["of loaded"] = _adapter_facts(other)
        with torch.no_grad():
            results[name]["loaded"] = other(torch.ones(2, WIDTH)) - model(torch.ones(2, WIDTH))
    dist.barrier()
    shardd.torch.finish(model)
    shardd.torch.finish(other)
    return results


def killed(frozen: bool, optimizer: str, steps: int, kill_at: int) -> dict[str, Any] | None:
    """A rank dies in its first attempt; the second one makes other values, and goes on with those that are committed."""
    import shardd.torch
    import shardd.torch.optim
    from shardd.torch import fully_shard, resume

    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    model = _adapters(fully_shard, 5 + restarts) if frozen else made(Low, fully_shard)
    of: Any = torch.optim if optimizer == "torch" else shardd.torch.optim
    adamw = of.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    first, _ = resume(model)
    report(event="resumed", step=first)
    losses = []
    for step in range(first, steps):
        if restarts == 0 and dist.get_rank() == 1 and step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        losses += train(model, adamw, range(step, step + 1))
    if optimizer == "torch":
        shardd.torch.commit(model)
    dist.barrier()
    found = {"first": first, "losses": losses, "parameters": _locals(model)}
    shardd.torch.finish(model)
    return found


def _locals(model: nn.Module) -> dict[str, torch.Tensor]:
    if isinstance(model, Adapters):
        return _adapter_facts(model)
    return {n: getattr(p._local_tensor, "_data", p._local_tensor).clone() for n, p in model.named_parameters()}  # type: ignore[attr-defined]
