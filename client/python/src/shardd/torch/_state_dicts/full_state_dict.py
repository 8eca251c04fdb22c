"""Full state dicts of models with DTensors: whole parameters out of the job's memory, without a message with values.

``torch.distributed.checkpoint.state_dict`` gathers every DTensor on every rank, one after the other. Of a registered model a
rank that wants the whole copies it from memory that it has mapped; the others wait, and hold nothing.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardd.torch._job.job import TorchJob, jobs
from shardd.torch._units.placement import from_job_order
from shardd.torch._units.subclasses import inner_of

__all__ = ["gather", "shares_memory", "shown"]

_shown: contextvars.ContextVar[bool] = contextvars.ContextVar("shown", default=False)


@contextlib.contextmanager
def shown() -> Iterator[None]:
    """``state_dict`` gives the job's memory, on a GPU too, where it otherwise gives copies."""
    token = _shown.set(True)
    try:
        yield
    finally:
        _shown.reset(token)


def shares_memory(job: TorchJob) -> bool:
    """Whether ``state_dict`` gives the job's memory. Where trainers never write, as on several nodes, programs cannot write
    it, and many load into what they are given."""
    return _shown.get() or (not job.ranks.several and job.passes)


def _stored() -> dict[int, tuple[TorchJob, int, Any]]:
    """Returns (job, number, parameter) by the identity of the parameter's storage, which what ``state_dict`` gives shares."""
    found: dict[int, tuple[TorchJob, int, Any]] = {}
    for job in jobs():
        if job.engine is None or job.engine.full_params or job.ranks.several:
            continue
        for place in job.places.values():
            param = place.fsdp_param()
            if isinstance(param.sharded_param, DTensor) and inner_of(param) is None:  # torch gathers those as they say
                found[param.sharded_param._local_tensor.untyped_storage()._cdata] = job, place.index, param
    return found


def _readable(value: Any, entry: tuple[TorchJob, int, Any]) -> bool:
    """Alike on all ranks: the value is the whole of a parameter that the ranks of the job have between them."""
    job, _, param = entry
    assert job.engine is not None
    return (
        value.shape == param._orig_size
        and value.dtype == param.orig_dtype
        and value.device_mesh.ndim == 1
        and value.device_mesh.size() == job.engine.info()["world_size"]
    )


def gather(
    theirs: Callable[..., dict[str, Any]],
    state_dict: dict[str, Any],
    *,
    pg: dist.ProcessGroup | None = None,
    ranks_only: tuple[int, ...] = (),
    **options: Any,
) -> dict[str, Any]:
    """Gathers as ``theirs`` does, torch's _gather_state_dict, which gets what is not in a job. Collective; ``ranks_only`` get it all."""
    stored = _stored() if any(isinstance(value, DTensor) for value in state_dict.values()) else {}
    found = {
        key: entry
        for key, value in state_dict.items()
        if isinstance(value, DTensor)
        and (entry := stored.get(value._local_tensor.untyped_storage()._cdata)) is not None
        and _readable(value, entry)
    }
    if not found:
        return theirs(state_dict, pg=pg, ranks_only=ranks_only, **options)
    rest = {key: value for key, value in state_dict.items() if key not in found}
    others = theirs(rest, pg=pg, ranks_only=ranks_only, **options)

    def mesh_group(key: str) -> dist.ProcessGroup:
        return state_dict[key].device_mesh.get_group()

    groups = {id(g): g for g in map(mesh_group, found)}
    engines = {id(job): job.engine for job, _, _ in found.values()}

    def meet() -> None:
        for engine in filter(None, engines.values()):
            engine.synchronise()  # a barrier of hosts says nothing of streams
        for group in groups.values():
            dist.barrier(group)

    for number, (job, group) in {id(job): (job, mesh_group(key)) for key, (job, _, _) in found.items()}.items():
        # All ranks hand in if one has stored: a rank that has not may be between a forward and a backward that does not
        # come, inside of a pass, and the others wait until it has left. If no rank has stored, that backward may come.
        engine = engines[number]
        if job.hands_in and engine is not None and _any_rank(engine.has_edits(), group):
            engine.hand_in()
    meet()  # what any rank wrote before it came is there
    try:
        if ranks_only and dist.get_rank(pg) not in ranks_only:
            return {}
        on_host = bool(options.get("cpu_offload"))
        return {key: _whole(*found[key], on_host) if key in found else others[key] for key in state_dict}
    finally:
        meet()  # nobody writes while another reads


def _any_rank(said: bool, group: dist.ProcessGroup) -> bool:
    flag = torch.tensor(int(said))  # who hands in is on CPUs
    dist.all_reduce(flag, dist.ReduceOp.MAX, group=group)
    return bool(flag)


def _whole(job: TorchJob, index: int, param: Any, on_host: bool) -> torch.Tensor:
    assert job.engine is not None
    whole = torch.empty(
        param._orig_size.numel(), dtype=param.orig_dtype, device="cpu" if on_host else param.sharded_param.device
    )
    given = job.engine.copy_stored(index, 0, whole)
    assert given
    return from_job_order(param, whole)
