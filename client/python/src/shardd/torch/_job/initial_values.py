"""The values that ranks give to a new job: each those of its own shards, as the program has made them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from shardd.torch._job.description import Description
from shardd.torch._process.extension import _C
from shardd.torch._process.progress import Progress
from shardd.torch._ranks.gather import assemble
from shardd.torch._ranks.nodes import JobRanks
from shardd.torch._units.flat_shard_param import FlatShardParam
from shardd.torch._units.placement import first_element
from shardd.torch._units.subclasses import stored_of

__all__ = ["drop_initial_values", "initial_values", "write_values"]

Values = tuple[str, int, torch.Tensor]  # of one parameter: name, first element, values


def initial_values(params: Iterable[tuple[str, Any]], ranks: JobRanks) -> list[Values]:
    """Returns the values that this rank has to give to its daemon, by parameter.

    All ranks call it together where the job is cut over nodes.
    """
    flat: list[tuple[FlatShardParam, Values]] = []
    found: list[Values] = []
    for fqn, fsdp_param in params:
        if fsdp_param is None:
            continue
        if isinstance(fsdp_param, FlatShardParam):
            flat.append((fsdp_param, (fqn, *fsdp_param.take_initial_values())))
            continue
        # Replicas hold the same; the first of each daemon's gives it.
        if ranks.row == 0:
            found.append((fqn, first_element(fsdp_param), stored_of(fsdp_param).detach()))
    if ranks.cut:
        found += _moved(flat)
    else:
        found += [
            entry for fsdp_param, entry in flat if ranks.row == 0 and not (fsdp_param.whole and ranks.local_rank != 0)
        ]
    return [entry for entry in found if entry[2].numel()]


def _moved(flat: list[tuple[FlatShardParam, Values]]) -> list[Values]:
    """Exchanges values so that each rank has those of its pieces in the job.

    A daemon takes any piece of its own node and none of another's.
    """
    if not flat:
        return []
    group = flat[0][0].mesh_info.shard_process_group
    pieces = [fsdp_param.piece() for fsdp_param, _ in flat]
    own = [(entry[1], entry[2].numel(), first, now.numel()) for (_, entry), (first, now) in zip(flat, pieces)]
    every: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, own, group=group)
    found: list[Values] = []
    for number, (fsdp_param, entry) in enumerate(flat):
        of_ranks = [of_rank[number] for of_rank in every]
        if all((first, numel) == (now, left) for first, numel, now, left in of_ranks):
            found.append(entry)
            continue
        fqn, _, values = entry
        ranges = [(first, numel) for first, numel, _, _ in of_ranks]
        whole = assemble(values, ranges, fsdp_param._orig_size, values.dtype, group)
        assert whole is not None
        first, now = pieces[number]
        found.append((fqn, first, whole.view(-1)[first : first + now.numel()].clone()))
    return found


def drop_initial_values(description: Description) -> None:
    """Forgets what was saved for the job, which has values already."""
    for param in description.params:
        if isinstance(param.fsdp_param, FlatShardParam):
            param.fsdp_param.take_initial_values()


def write_values(engine: _C.Engine, values: list[Values], progress: Progress) -> None:
    """Writes this rank's values into the job and commits them with those of all ranks."""
    total = sum(rows.nbytes for _, _, rows in values)
    done = 0
    for fqn, first, rows in values:
        progress.doing("giving the parameters", done, total)
        engine.write(engine.find_param(fqn), rows, first)
        done += rows.nbytes
    progress.doing("waiting for the other ranks' parameters")
    engine.commit()
