"""Gradients follow their parameters when pieces of flat parameters change: unfreezing changes where a unit's flat parameters are cut."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from shardd.torch._ranks.agreement import have_store
from shardd.torch._ranks.gather import assemble
from shardd.torch._units.flat_shard_param import FlatShardParam

__all__ = ["GradientMoves"]


@dataclass
class _OldPiece:
    """What this rank had of one parameter."""

    fqn: str
    param: FlatShardParam
    first: int
    numel: int
    gradient: torch.Tensor | None  # of those elements, one-dimensional


def _piece(param: FlatShardParam) -> tuple[int, int]:
    first, local = param.piece()
    return first, local.numel()


def _gradient(param: FlatShardParam) -> torch.Tensor | None:
    shown = param.sharded_param.grad
    if shown is None:
        return None
    shown = shown.detach().reshape(-1)
    if param.holder is None:
        return shown
    cut = param.holder.slices[id(param)]
    return shown[cut.start : cut.start + cut.numel]


class GradientMoves:
    """Remembers this rank's gradients before parameters are cut anew; ``place`` gives them back afterwards, on all ranks together."""

    def __init__(self, params: Iterable[tuple[str, Any]]) -> None:
        """``params`` are those of one model by name, in the same order on all ranks."""
        self._old = [
            _OldPiece(fqn, param, *_piece(param), _gradient(param))
            for fqn, param in params
            if isinstance(param, FlatShardParam) and not param.whole
        ]
        gradients = [old.fqn for old in self._old if old.gradient is not None]
        if gradients and not have_store():
            raise RuntimeError(
                f'unfreeze: parameter "{gradients[0]}" has a gradient, and in layout flat its piece on this rank changes with '
                "what is trained; without collectives between the processes call zero_grad() before"
            )

    def place(self) -> None:
        """Gives each rank the gradient of its new pieces. Only what changes its rank travels, a parameter at a time."""
        if not self._old or not have_store():
            return
        groups: dict[int, tuple[Any, list[_OldPiece]]] = {}
        for old in self._old:
            group = old.param.mesh_info.shard_process_group
            groups.setdefault(id(group), (group, []))[1].append(old)
        for group, of_group in groups.values():
            own = [
                (k.first, k.numel, *_piece(k.param), None if k.gradient is None else k.gradient.dtype) for k in of_group
            ]
            every: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(every, own, group=group)
            for number, old in enumerate(of_group):
                of_ranks = [of_rank[number] for of_rank in every]
                dtypes = [dtype for *_, dtype in of_ranks if dtype is not None]
                if not dtypes or all((first, numel) == (now, left) for first, numel, now, left, _ in of_ranks):
                    continue
                ranges = [(first, numel if dtype is not None else 0) for first, numel, _, _, dtype in of_ranks]
                whole = assemble(old.gradient, ranges, old.param._orig_size, dtypes[0], group)
                assert whole is not None
                _show(old.param, whole.view(-1))


def _show(param: FlatShardParam, whole: torch.Tensor) -> None:
    first, numel = _piece(param)
    sharded = param.sharded_param
    whole = whole.to(sharded.device)  # it came through where the ranks' messages are
    if param.holder is None:
        sharded.grad = whole[first : first + numel].clone() if numel else None  # as after a backward
        return
    if sharded.grad is None:
        sharded.grad = torch.zeros(sharded.shape, dtype=whole.dtype, device=sharded.device)
    cut = param.holder.slices[id(param)]
    sharded.grad[cut.start : cut.start + cut.numel] = whole[first : first + numel]
