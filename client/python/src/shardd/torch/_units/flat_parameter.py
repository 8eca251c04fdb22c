"""``use_orig_params=False``: one ``FlatParameter`` for the parameters of a unit with the same dtype and requires_grad."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import nn

__all__ = ["FlatHolder", "Slice"]

_Member = TypeVar("_Member")

NAME = "_flat_param"  # torch's FLAT_PARAM


@dataclass(frozen=True)
class Slice:
    """Elements [first, first + numel) of a parameter, which lie at ``start`` of this rank's shard."""

    first: int
    numel: int
    start: int


class FlatHolder(Generic[_Member]):
    """A ``FlatParameter``: this rank's shard of a flat parameter, contiguous, padding included.

    ``members`` are the parameters in it, which modules have as tensors while the unit is unsharded, and not as
    parameters.
    """

    def __init__(self, module: nn.Module, requires_grad: bool, dtype: torch.dtype, device: torch.device) -> None:
        taken = sum(name == NAME or name.startswith(NAME + "_") for name in module._parameters)
        self.name = NAME if not taken else f"{NAME}_{taken}"
        flat: Any = nn.Parameter(torch.empty(0, dtype=dtype, device=device), requires_grad=requires_grad)
        flat._is_flat_param = True  # isinstance of torch's FlatParameter
        self.sharded_param = flat
        self.members: list[_Member] = []
        self.slices: dict[int, Slice] = {}  # by id of the member
        self.full: torch.Tensor | None = None  # all of it, while full parameters are shown
        self._piece: torch.Tensor | None = None  # what it shows otherwise, then
        self._piece_grad: torch.Tensor | None = None
        module.register_parameter(self.name, self.sharded_param)

    @property
    def local(self) -> torch.Tensor:
        return self.sharded_param.detach() if self._piece is None else self._piece

    def values_of(self, member: _Member) -> tuple[int, torch.Tensor]:
        """Returns the first element and the values that this rank has of a member."""
        cut = self.slices[id(member)]
        return cut.first, self.local[cut.start : cut.start + cut.numel]

    def lay_out(self, slices: dict[int, Slice], numel: int) -> None:
        """Makes the shard anew, empty of values."""
        self.slices = slices
        self.sharded_param.grad = None
        flat = self.sharded_param
        flat.data = torch.zeros(numel, dtype=flat.dtype, device=flat.device)

    def show_full(self) -> None:
        """Shows the whole flat parameter, once for all members."""
        if self._piece is None and self.full is not None:
            self._piece, self._piece_grad = self.sharded_param.data, self.sharded_param.grad
            self.sharded_param.grad = None
            self.sharded_param.data = self.full

    def hide_full(self) -> None:
        if self._piece is not None:
            self.sharded_param.data = self._piece
            self.sharded_param.grad = self._piece_grad
            self._piece = self._piece_grad = self.full = None

    def padding(self) -> list[tuple[int, int]]:
        """Ranges [first, end) of the shard that are no member's."""
        gaps = []
        reached = 0
        for cut in sorted(self.slices.values(), key=lambda cut: cut.start):
            if cut.numel == 0:
                continue
            if cut.start > reached:
                gaps.append((reached, cut.start))
            reached = cut.start + cut.numel
        numel = self.sharded_param.numel()
        return [*gaps, (reached, numel)] if reached < numel else gaps
