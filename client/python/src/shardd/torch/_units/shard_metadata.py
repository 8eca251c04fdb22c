"""What a shard of a flat parameter is made of, in public."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["ShardMetadata", "ShardPiece", "cut_pieces"]


@dataclass(frozen=True)
class ShardPiece:
    """Elements [first, end) of a parameter that has ``numel`` in all; they begin at element ``offset`` of its flat parameter."""

    name: str
    shape: torch.Size
    numel: int
    first: int
    end: int
    offset: int


@dataclass(frozen=True)
class ShardMetadata:
    """A shard of a flat parameter: which elements of which parameters it has, in the order in which they lie there.

    module: the fully sharded module that has the parameters, "(root)" for the root.
    numel: elements of the shard, those of padding included, which are zero and stay zero.
    """

    module: str
    pieces: tuple[ShardPiece, ...]
    numel: int
    padding_numel: int


def cut_pieces(
    names: Sequence[str], shapes: Sequence[torch.Size], offsets: Sequence[int], first: int, end: int
) -> tuple[ShardPiece, ...]:
    """Returns what elements [first, end) of a flat parameter are, whose parameters begin at ``offsets``."""
    pieces = []
    for name, shape, offset in zip(names, shapes, offsets, strict=True):
        numel = shape.numel()
        begin, stop = min(max(first - offset, 0), numel), min(max(end - offset, 0), numel)
        if stop > begin:
            pieces.append(ShardPiece(name, shape, numel, begin, stop, offset + begin))
    return tuple(pieces)
