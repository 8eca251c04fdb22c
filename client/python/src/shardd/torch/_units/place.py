"""Where the job has a sharded parameter."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardd.torch._units.flat_parameter import Slice

__all__ = ["Place", "local_of"]


def local_of(tensor: Any) -> torch.Tensor:
    """Returns a DTensor's tensor on this rank, and a plain tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


@dataclass
class Place:
    """What the job knows of a sharded parameter."""

    index: int  # the daemon's
    fqn: str
    ref: weakref.ref[Any]
    first: int  # element of the daemon's parameter where what this rank holds begins
    trainable: bool  # the job has gradient memory for it
    # Of a FlatParameter: the daemon's parameters in it and what it has of each. ``index`` is the first one's.
    members: tuple[tuple[int, Slice], ...] = ()

    def parts(self, values: torch.Tensor) -> list[tuple[int, int, torch.Tensor]]:
        """Cuts ``values`` of this rank's shard into (the daemon's parameter, first element, those values)."""
        if not self.members:
            return [(self.index, self.first, values)]
        return [(i, s.first, values[s.start : s.start + s.numel]) for i, s in self.members]

    def indices(self) -> list[int]:
        """Returns the numbers of the daemon's parameters in it."""
        return [index for index, _ in self.members] or [self.index]

    def fsdp_param(self) -> Any:
        found = self.ref()
        assert found is not None
        return found
