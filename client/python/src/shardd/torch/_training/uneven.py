"""Ranks with different numbers of batches: those that have run out take part without a contribution."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import Any, Generic, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo

from shardd.torch._ranks.mesh import members_of
from shardd.torch._training.api import root_of
from shardd.torch._units.state import state_of

__all__ = ["UnevenInputs", "join_uneven"]

_Batch = TypeVar("_Batch")
_NONE = object()


def join_uneven(
    *models: nn.Module, mean_over: Literal["contributing", "all"] = "contributing", filler: Any = None
) -> UnevenInputs[Any]:
    """Lets ranks train together that have different numbers of batches; a context, on all ranks of ``models`` together.

        with join_uneven(model) as join:
            for batch in join(loader):
                loss_of(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()

    The loop has on all ranks as many rounds as the longest loader has batches. A rank that has run out gets its last batch
    again, and zeros count in the place of its gradients, whatever that batch gives (NaNs too). So it runs what the others
    run: clipping, accumulation, steps, collectives of the program's own. ``join.has_data`` says whether the round counts on this rank.

    mean_over: "contributing": gradients are divided by the number of ranks that have a batch in the round; "all": by that of all.
    filler: what a rank gets that has no batch at all. Without it that is an error.

    Where all loaders have a length, ranks compare them once, else the round begins with a collective of their process group.
    """
    return UnevenInputs(models, mean_over, filler)


class UnevenInputs(Generic[_Batch]):
    """What ``join_uneven`` returns. It owns whether this rank's gradients count, from its entry to its exit."""

    def __init__(self, models: tuple[nn.Module, ...], mean_over: str, filler: Any) -> None:
        if mean_over not in ("contributing", "all"):
            raise ValueError(f'join_uneven: unknown mean_over (got {mean_over!r}, want "contributing" or "all")')
        roots = [root_of(model) for model in models or (None,)]
        states = [state_of(inner) for root in roots for module in root._modules for inner in module.modules()]
        self._units = list(
            dict.fromkeys(state._unit for state in states if state is not None and state._unit is not None)
        )
        ranks = {tuple(members_of(unit.mesh_info).ranks) for unit in self._units}
        if len(ranks) != 1:
            raise ValueError(f"join_uneven: the models have different ranks (got {sorted(ranks)}, want the same)")
        self._world = len(ranks.pop())
        info = self._units[0].mesh_info
        self._rank = members_of(info).rank
        self._groups = [info.shard_process_group]
        if isinstance(info, HSDPMeshInfo):
            self._groups.append(info.replicate_process_group)
        self._mean_over, self._filler = mean_over, filler
        self.has_data = True

    def __enter__(self) -> UnevenInputs[_Batch]:
        return self

    def __exit__(self, *_: object) -> None:
        self._let_contribute(True, self._world)

    def __call__(self, batches: Iterable[_Batch]) -> Iterator[_Batch]:
        """Yields a batch in each round, until no rank has one."""
        lengths = self._lengths(batches)
        source = iter(batches)
        last: Any = self._filler
        number = 0
        try:
            while True:
                batch: Any = next(source, _NONE)
                has_data = batch is not _NONE
                contributing = self._count(has_data, number, lengths)
                if contributing == 0:
                    return
                if has_data:
                    last = batch
                elif last is None:
                    raise ValueError(
                        "join_uneven: this rank has no batch at all, and nothing to run in the place of one; pass filler= (got "
                        f"None, want a batch; rank={self._rank})"
                    )
                self._let_contribute(has_data, contributing)
                yield last
                number += 1
        finally:
            self._let_contribute(True, self._world)

    def _let_contribute(self, contributes: bool, contributing: int) -> None:
        self.has_data = contributes
        part = contributing / self._world if self._mean_over == "contributing" else 1.0
        for unit in self._units:
            unit.let_contribute(contributes, part)

    def _lengths(self, batches: Iterable[_Batch]) -> list[int] | None:
        """Returns how many batches each rank has, where all know it."""
        told: list[Any] = [len(batches) if isinstance(batches, Sized) else None]
        for group in self._groups:
            every: list[Any] = [None] * group.size()
            dist.all_gather_object(every, told, group=group)
            told = [length for of_rank in every for length in of_rank]
        return None if None in told else told

    def _count(self, has_data: bool, number: int, lengths: list[int] | None) -> int:
        """Returns how many ranks have a batch in this round."""
        if lengths is None:
            count = torch.tensor([int(has_data)], device=self._units[0].device)
            for group in self._groups:
                dist.all_reduce(count, group=group)
            return int(count.item())
        own = lengths[self._rank]
        if has_data != (number < own):
            raise RuntimeError(
                f"join_uneven: the loader has another number of batches than its len() says (got {number if not has_data else 'more'}, "
                f"want {own}; rank={self._rank}); pass iter(loader), which has no length"
            )
        return sum(number < length for length in lengths)
