"""Ranks with different numbers of batches: those that have run out take part without a contribution."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import Any, Generic, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo

from shardd.torch._job.job import job_of
from shardd.torch._ranks.mesh import members_of
from shardd.torch._training.api import root_of
from shardd.torch._units.state import ShardState, state_of

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

    Gradients of rounds that do not synchronise (``no_sync``) are divided where they are synchronised, so as many ranks must have a batch
    in all rounds of an accumulation: else it raises. ``mean_over="all"`` has no such condition.

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
        if any(tuple(members_of(p.mesh_info).ranks) not in ranks for unit in self._units for p in unit.fsdp_params) or (
            len(ranks) != 1 and len(roots) == 1
        ):
            raise NotImplementedError(
                "join_uneven: the model has parameters on several meshes, and experts of a rank that has run out have gradients of "
                "other ranks' tokens, which would be dropped; run what is left on all ranks with a loss multiplied by zero"
            )
        if len(ranks) != 1:
            raise ValueError(f"join_uneven: the models have different ranks (got {sorted(ranks)}, want the same)")
        self._states = [state for state in states if isinstance(state, ShardState)]
        self._world = self._contributing = len(ranks.pop())
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
                contributing, without = self._count(has_data, last is None, number, lengths)
                if contributing == 0:
                    return
                if without:  # on all ranks, which would otherwise wait for that one
                    raise ValueError(
                        "join_uneven: a rank has no batch at all, and nothing to run in the place of one; pass filler= (got "
                        f"None on {without} of {self._world} ranks, want a batch; rank={self._rank})"
                    )
                if has_data:
                    last = batch
                self._check_synchronised(contributing)
                self._let_contribute(has_data, contributing)
                yield last
                number += 1
        finally:
            self._let_contribute(True, self._world)

    def _check_synchronised(self, contributing: int) -> None:
        """Raises, on all ranks, where gradients of earlier rounds would be divided as those of this one, which has other ranks."""
        before, self._contributing = self._contributing, contributing
        if contributing == before or self._mean_over == "all":
            return
        jobs = dict.fromkeys(job for state in self._states if (job := job_of(state)) is not None)
        for place in (place for job in jobs for place in job.places.values()):
            if any(unit._has_own_gradient(index) for unit in self._units for index in place.indices()):
                raise RuntimeError(
                    f'join_uneven: another number of ranks has a batch while the gradient of "{place.fqn}" is not synchronised '
                    f"(got {contributing}, want {before} in all rounds of an accumulation; rank={self._rank}); synchronise "
                    'before a rank runs out, or pass mean_over="all"'
                )

    def _let_contribute(self, contributes: bool, contributing: int) -> None:
        self.has_data = contributes
        part = contributing / self._world if self._mean_over == "contributing" else 1.0
        for unit in self._units:
            unit.let_contribute(contributes, part)

    def _lengths(self, batches: Iterable[_Batch]) -> list[tuple[int, bool]] | None:
        """Returns how many batches each rank has, where all know it, and whether it has a filler."""
        told: list[Any] = [(len(batches), self._filler is not None) if isinstance(batches, Sized) else None]
        for group in self._groups:
            every: list[Any] = [None] * group.size()
            dist.all_gather_object(every, told, group=group)
            told = [length for of_rank in every for length in of_rank]
        return None if None in told else told

    def _count(
        self, has_data: bool, has_nothing: bool, number: int, lengths: list[tuple[int, bool]] | None
    ) -> tuple[int, int]:
        """Returns how many ranks have a batch in this round, and how many have nothing to run in the place of one."""
        if lengths is None:
            counts = torch.tensor([int(has_data), int(has_nothing and not has_data)], device=self._units[0].device)
            for group in self._groups:
                dist.all_reduce(counts, group=group)
            return int(counts[0].item()), int(counts[1].item())
        own, _ = lengths[self._rank]
        if has_data != (number < own):
            raise RuntimeError(
                f"join_uneven: the loader has another number of batches than its len() says (got {number if not has_data else 'more'}, "
                f"want {own}; rank={self._rank}); pass iter(loader), which has no length"
            )
        return (
            sum(number < length for length, _ in lengths),
            sum(length == 0 and not has_filler for length, has_filler in lengths),
        )
