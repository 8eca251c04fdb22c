"""Clipping by the norm of all gradients, each element counted once, with a collective for each dimension of sharding."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.tensor import DTensor, Replicate

from shardd.torch._job.job import TorchJob, job_of, jobs
from shardd.torch._ranks.gather import sendable
from shardd.torch._units.placement import rows_of
from shardd.torch._units.state import ShardState

__all__ = ["clip_grad_norm_", "clip_model"]


class _Part(NamedTuple):
    """Gradients that are cut over the same groups of ranks: this rank's local tensors of them."""

    groups: tuple[dist.ProcessGroup, ...]
    tensors: list[torch.Tensor]


def _powered(tensors: list[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    """Returns the norm to the power of ``norm_type``, or the norm itself where that is infinite, in fp32 whatever they are."""
    filled = [tensor.detach() for tensor in tensors if tensor.numel()]
    if not filled:
        return torch.zeros((), device=device)
    # float64 cannot be narrowed on the way
    computed = [torch.float64 if tensor.dtype == torch.float64 else torch.float32 for tensor in filled]
    norms = torch.stack(
        [torch.linalg.vector_norm(t, norm_type, dtype=dtype).float() for t, dtype in zip(filled, computed, strict=True)]
    )
    return norms.max() if norm_type == float("inf") else norms.pow(norm_type).sum()


def _total_norm(parts: list[_Part], whole: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Returns the norm over what all ranks have of ``parts`` and over what each of them has ``whole``, in fp32.

    One collective for each group that any part is cut over, for all of its parts. All ranks have the same parts in one order.
    """
    infinite = norm_type == float("inf")
    tensors = [tensor for part in parts for tensor in part.tensors]
    device = next((tensor.device for tensor in [*tensors, *whole]), torch.device("cpu"))
    totals = [_powered(part.tensors, norm_type, device) for part in parts]
    for group in dict.fromkeys(group for part in parts for group in part.groups):
        cut = [number for number, part in enumerate(parts) if group in part.groups]
        sent = sendable(torch.stack([totals[number] for number in cut]), group)
        dist.all_reduce(sent, op=dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, group=group)
        for number, total in zip(cut, sent.to(device), strict=True):
            totals[number] = total
    total = torch.stack([*totals, _powered(whole, norm_type, device)])
    return total.max() if infinite else total.sum().pow(1.0 / norm_type)


def _scale(gradients: list[torch.Tensor], max_norm: float, norm: torch.Tensor) -> None:
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for gradient in gradients:
        by_dtype.setdefault(gradient.dtype, []).append(gradient)
    for dtype, tensors in by_dtype.items():
        torch._foreach_mul_(tensors, factor.to(dtype))


def _gradients(job: TorchJob) -> list[torch.Tensor]:
    """Returns this rank's part of every gradient that is shown, or its own whole ones where none is synchronised yet."""
    shown = [place.fsdp_param().sharded_param.grad for place in job.places.values()]
    return [g._local_tensor if isinstance(g, DTensor) else g for g in shown if g is not None]


def _groups_of_models() -> dict[int, dist.ProcessGroup]:
    """Returns, by id of the parameters that are on a smaller mesh than their model, over which ranks it is cut: each of them has
    another part of one such parameter or of another one."""
    found: dict[int, dist.ProcessGroup] = {}
    for job in jobs():
        root = job.root()
        for place in job.places.values() if job.several_meshes and root is not None else ():
            if rows_of(place.fsdp_param()) is not None:
                assert root is not None and root._unit is not None
                found[id(place.fsdp_param().sharded_param)] = root._unit.mesh_info.shard_process_group
    return found


def _parts(params: list[torch.Tensor]) -> list[_Part]:
    """Sorts gradients by the dimensions of meshes that cut them. Replicas hold the same, and add nothing to a norm."""
    parts: dict[tuple[dist.ProcessGroup, ...], _Part] = {}
    of_models = _groups_of_models()
    for param in params:
        gradient: Any = param.grad
        if any(placement.is_partial() for placement in gradient.placements):
            whole = [Replicate() if placement.is_partial() else placement for placement in gradient.placements]
            gradient = gradient.redistribute(placements=whole)
        mesh, placements = gradient.device_mesh, gradient.placements
        cut = [dim for dim, placement in enumerate(placements) if not placement.is_replicate() and mesh.size(dim) > 1]
        groups = tuple(mesh.get_group(dim) for dim in cut)
        if id(param) in of_models:
            groups = (of_models[id(param)],)
        parts.setdefault(groups, _Part(groups, [])).tensors.append(gradient._local_tensor)
    return list(parts.values())


@torch.no_grad()
def clip_model(
    module: nn.Module, root: ShardState, max_norm: float, norm_type: float, group: dist.ProcessGroup
) -> torch.Tensor:
    """Clips as ``FullyShardedDataParallel.clip_grad_norm_`` of the root ``module``. All ranks of ``group`` call it.

    Gradients of parameters that the job does not have are taken to be alike on all ranks. The norm is computed in fp32 and
    returned in the widest dtype of the gradients; fp32, with a warning, where this rank has none.
    """
    with torch.enable_grad():  # no sign that the model is only evaluated
        root._ensure_registered()
    job = job_of(root)
    assert job is not None and job.engine is not None
    if job.engine.in_forward_backward or job.engine.full_params:
        now = "SUMMON_FULL_PARAMS" if job.engine.full_params else "FORWARD_BACKWARD"
        raise ValueError(
            f'clip_grad_norm_ of job "{job.name}": expected to be in states [<TrainingState.IDLE: 1>] but current state is '
            f"TrainingState.{now}; call it between a backward and the step"
        )
    states: list[Any] = list(root._state_ctx.all_states)
    found = _gradients(job)
    # Without shards every rank has a copy of its own of all of it.
    whole = any(getattr(s._unit, "strategy", None) == ShardingStrategy.NO_SHARD for s in states)
    managed = {id(place.fsdp_param().sharded_param) for place in job.places.values()}
    rest = [p.grad for p in module.parameters() if p.grad is not None and id(p) not in managed]
    gradients = found + rest
    parts = [] if whole else [_Part((group,), found)]
    norm = _total_norm(parts, gradients if whole else rest, float(norm_type))
    _scale(gradients, float(max_norm), norm)
    if not gradients:
        warnings.warn(
            f"clip_grad_norm_ on rank {dist.get_rank(group)} with no gradients: the norm is returned in the default dtype "
            f"{norm.dtype}",
            stacklevel=3,
        )
        return norm
    return norm.to(functools.reduce(torch.promote_types, [gradient.dtype for gradient in gradients]))


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Clips as ``torch.nn.utils.clip_grad_norm_`` over sharded parameters, whichever meshes they are on, in one call.

    One collective for each dimension that cuts any of them. Returns a plain tensor: the norm over all ranks, each element
    counted once, in fp32.
    """
    params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    grads = [p.grad for p in params if p.grad is not None]
    dtensors = [g for g in grads if isinstance(g, DTensor)]
    whole = [g for g in grads if not isinstance(g, DTensor)]
    norm_type = float(norm_type)
    norm = _total_norm(_parts([p for p in params if isinstance(p.grad, DTensor)]), whole, norm_type)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(f"clip_grad_norm_: the norm of order {norm_type} is not finite (got {norm.item()})")
    _scale([g._local_tensor for g in dtensors] + whole, max_norm, norm)
    return norm
