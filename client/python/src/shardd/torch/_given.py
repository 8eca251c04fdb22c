"""The values that ranks give to a new job: each those of its own shards, as the program has made them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shardd.torch._flat_param import FlatShardParam
from shardd.torch._gather import assemble
from shardd.torch._placement import first_element

if TYPE_CHECKING:
    from shardd.torch._nodes import JobRanks
    from shardd.torch._spec import Description

__all__ = ["forget_given", "given_values"]

_Given = tuple[str, int, torch.Tensor]  # name, first element, values


def given_values(params: Iterable[tuple[str, Any]], ranks: JobRanks) -> list[_Given]:
    """Of the job's parameters, by name, those that this rank has to give to its daemon. On all ranks of a job that is cut
    over nodes, together."""
    flat: list[tuple[FlatShardParam, _Given]] = []
    found: list[_Given] = []
    for fqn, fsdp_param in params:
        if fsdp_param is None:
            continue
        if isinstance(fsdp_param, FlatShardParam):
            flat.append((fsdp_param, (fqn, *fsdp_param.given())))
            continue
        # Replicas hold the same; the first of each daemon's gives it.
        if ranks.several or getattr(fsdp_param.mesh_info, "replicate_mesh_rank", 0) == 0:
            found.append((fqn, first_element(fsdp_param), fsdp_param.sharded_param._local_tensor.detach()))
    if ranks.cut:
        found += _moved(flat)
    else:
        found += [
            given
            for fsdp_param, given in flat
            if not (fsdp_param.whole and ranks.local_rank != 0)
            and (ranks.several or getattr(fsdp_param.mesh_info, "replicate_mesh_rank", 0) == 0)
        ]
    return [given for given in found if given[2].numel()]


def _moved(flat: list[tuple[FlatShardParam, _Given]]) -> list[_Given]:
    """Pieces as the job has cut them. A daemon takes any on its own node; those of other nodes it does not have."""
    if not flat:
        return []
    group = flat[0][0].mesh_info.shard_process_group
    pieces = [fsdp_param.piece() for fsdp_param, _ in flat]
    own = [(given[1], given[2].numel(), first, now.numel()) for (_, given), (first, now) in zip(flat, pieces)]
    every: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, own, group=group)
    found: list[_Given] = []
    for number, (fsdp_param, given) in enumerate(flat):
        said = [of_rank[number] for of_rank in every]
        if all((first, numel) == (now, left) for first, numel, now, left in said):
            found.append(given)
            continue
        fqn, _, values = given
        ranges = [(first, numel) for first, numel, _, _ in said]
        whole = assemble(values, ranges, fsdp_param._orig_size, values.dtype, group)
        assert whole is not None
        first, now = pieces[number]
        found.append((fqn, first, whole.view(-1)[first : first + now.numel()].clone()))
    return found


def forget_given(description: Description) -> None:
    """The job has values already; what was kept for it is not needed."""
    for param in description.params:
        if isinstance(param.fsdp_param, FlatShardParam):
            param.fsdp_param.given()
