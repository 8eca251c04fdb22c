"""What ranks do in the tests of gradients that are reduced in a lower dtype; each function runs on every rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from models import Case, build, loss_of, shard


def _own_gradients(case: Case) -> dict[str, torch.Tensor]:
    """This rank's, of the unsharded model: what it gives to the reduction, but for the rounding."""
    model = build(case)
    loss_of(model, 0, 0, dist.get_rank()).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def gradients_of(impl: str, case: Case) -> list[dict[str, torch.Tensor]]:
    """Whole gradients after each of ``case.accumulate`` backwards that add up."""
    if impl == "shardd":
        from shardd.torch import counters, finish, fully_shard
    else:
        from torch.distributed.fsdp import fully_shard
    model = build(case)
    shard(model, case, fully_shard)
    seen = []
    for micro in range(case.accumulate):
        loss_of(model, 0, micro, dist.get_rank()).backward()
        # full_tensor() of a 2-D mesh's gradient reads one replica's; all have the same.
        seen.append({name: p.grad.full_tensor().clone() for name, p in model.named_parameters()})
    if impl == "shardd":
        assert counters(model)["bytes_reduced"] > 0, "the daemon reduced nothing"
        dist.barrier()
        finish(model)
    return seen


def both(case: Case) -> dict[str, Any]:
    return {
        "torch": gradients_of("torch", case),
        "shardd": gradients_of("shardd", case),
        "own": _own_gradients(case),
    }
