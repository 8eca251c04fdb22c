"""Which elements of which parameters a rank has: the plan's own words, for checkpoints and tools of a program's own."""

from __future__ import annotations

import torch
from torch import nn

from shardd.torch._training.api import registered_job
from shardd.torch._units.shard_metadata import ShardMetadata, ShardPiece

__all__ = ["shard_metadata"]


def shard_metadata(module: nn.Module | None = None, rank: int | None = None) -> list[ShardMetadata]:
    """Returns the shards that a rank has, one for each flat parameter of the model, in the order of the plan.

    rank: within the node's ranks of the job; None: this one. In layout ``flat`` all shards of a flat parameter are of one
    size, and ``padding_numel`` of the elements are of no parameter; but where it has matrices of the daemon's Muon that are cut
    over nodes, each of these is whole in one shard, and sizes differ. In layout ``dim0`` they are whole rows, and nothing is
    padding. ValueError where there is no such rank. Registers the model where it was not, on all ranks together.
    """
    job = registered_job(module)
    engine = job.engine
    assert engine is not None
    place = job.ranks.local_rank if rank is None else rank
    if not 0 <= place < job.ranks.local_world:
        raise ValueError(
            f'shard_metadata of job "{job.name}": no such rank (got {place}, want 0 to {job.ranks.local_world - 1})'
        )
    facts = [engine.param_info(number) for number in range(engine.info()["param_count"])]
    shards = []
    for number in range(1 + max(info["flat_param"] for info in facts)):
        whole = engine.flat_param_info(number)
        pieces, padding = engine.shard_pieces(number, place)
        found = tuple(
            ShardPiece(
                facts[param]["fqn"],
                torch.Size(facts[param]["shape"]),
                facts[param]["numel"],
                first,
                first + numel,
                offset,
            )
            for param, first, numel, offset in pieces
        )
        numel = sum(piece.end - piece.first for piece in found) + padding
        shards.append(ShardMetadata(engine.group_name(whole["group"]), found, numel, padding))
    return shards
