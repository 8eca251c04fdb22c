"""What ranks do in the tests of models with experts on a mesh of their own; each function runs on all of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.tensor import DTensor

from units.expert_models import expert_model, loss_of


def facts_of(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    values, state = get_state_dict(model, optimizer)
    moments = {name: entry["exp_avg"] for name, entry in state["state"].items() if "exp_avg" in entry}
    tensors: dict[str, Any] = {**values, **{f"moment of {name}": moment for name, moment in moments.items()}}
    return {
        "placed": {n: (str(t.placements), t.device_mesh.mesh.tolist(), t.shape) for n, t in tensors.items()},
        "local": {name: t.to_local().detach().clone() for name, t in tensors.items()},
        "whole": {name: t.full_tensor().detach().clone() for name, t in tensors.items()},
    }


def clip_as_torchtitan(model: nn.Module, max_norm: float) -> float:
    """A norm for each mesh, and over expert parallel ranks where the mesh does not have them."""
    by_mesh: dict[Any, list[Any]] = {}
    for param in model.parameters():
        by_mesh.setdefault(param.device_mesh, []).append(param)  # type: ignore[attr-defined]
    total = torch.zeros(())
    for mesh, params in by_mesh.items():
        norm = nn.utils.get_total_norm([p.grad for p in params])
        squared = (norm.full_tensor() if isinstance(norm, DTensor) else norm).pow(2)
        if mesh.size() < dist.get_world_size():
            dist.all_reduce(squared)
            squared /= mesh.size()
        total += squared
    for params in by_mesh.values():
        nn.utils.clip_grads_with_norm_(params, max_norm, total.sqrt())
    return total.sqrt().item()


def trained_on_both(options: dict[str, Any], kind: str, steps: int = 10, edits: bool = True) -> dict[str, Any]:
    """Some steps of one program on torch's fully_shard and on ours, every other one of two micro-batches.

    ``kind``: "torch", "daemon", or "daemon clip", whose step clips. ``edits``: the program writes into parameters once.
    """
    from torch.distributed.fsdp import fully_shard as torch_fully_shard

    import shardd.torch
    from shardd.torch.optim import AdamW

    results = {}
    for name, fully_shard in (("torch", torch_fully_shard), ("shardd", shardd.torch.fully_shard)):
        model = expert_model(fully_shard, **options)
        ours = name == "shardd"
        optimizer: Any = (AdamW if ours and kind != "torch" else torch.optim.AdamW)(
            model.parameters(), lr=0.02, eps=1e-4
        )
        losses, norms, grads = [], [], []
        for step in range(steps):
            for micro in range(1 + step % 2):
                model.set_requires_gradient_sync(micro == step % 2)  # type: ignore[operator]
                loss = loss_of(model, 2 * step + micro)
                loss.backward()
                losses.append(loss.item())
            grads.append({n: p.grad.to_local().clone() for n, p in model.named_parameters()})  # type: ignore[union-attr]
            if ours and kind == "daemon clip":
                optimizer.step(max_grad_norm=0.2)
                norms.append(float(optimizer.last_grad_norm))
            else:
                norms.append(
                    float(shardd.torch.clip_grad_norm_(model.parameters(), 0.2))
                    if ours
                    else clip_as_torchtitan(model, 0.2)
                )
                optimizer.step()
            optimizer.zero_grad()
            if step == 3 and edits:
                with torch.no_grad():
                    for param in model.parameters():
                        param.mul_(0.9)
        results[name] = {"losses": losses, "norms": norms, "grads": grads, **facts_of(model, optimizer)}
    results["jobs"] = {"count": len(shardd.torch._job.job.jobs()), "counters": shardd.torch.counters(model)}
    dist.barrier()
    shardd.torch.finish(model)
    return results
