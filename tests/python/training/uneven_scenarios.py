"""What ranks do in the tests of loops over different numbers of batches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from state_dicts.wrapper_state_cases import face, quiet

LENGTHS = (4, 2, 0)  # batches of the ranks


def _net() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def _batches(rank: int) -> list[torch.Tensor]:
    seed = torch.Generator().manual_seed(rank)
    return [torch.randn(4, 6, generator=seed) for _ in range(LENGTHS[rank])]


def alone(mean_over: str, every: int, make: Callable[..., torch.optim.Optimizer]) -> list[torch.Tensor]:
    """The same with all ranks' batches on one process."""
    model = _net()
    optimizer = make(model.parameters(), lr=0.1)
    for number in range(max(LENGTHS)):
        having = [rank for rank in range(len(LENGTHS)) if number < LENGTHS[rank]]
        for rank in having:
            loss = model(_batches(rank)[number]).square().mean()
            (loss / (len(having) if mean_over == "contributing" else len(LENGTHS))).backward()
        if (number + 1) % every == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


def _average(state: Any, gradient: torch.Tensor, shard: torch.Tensor) -> None:
    reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # torch 2.10
    reduce_scatter(shard, gradient)
    shard.div_(dist.get_world_size())


def uneven() -> list[Any]:
    """Whole parameters of models trained so, beside those of one process, and the numbers of rounds."""
    from shardd.torch import fully_shard, join_uneven, optim, summon_full_params

    forms = (
        ("dim0", "contributing", 1, torch.optim.AdamW, True),
        ("dim0", "all", 2, optim.AdamW, False),
        ("wrapper", "contributing", 2, optim.AdamW, True),
        ("hook", "contributing", 1, torch.optim.AdamW, False),
    )
    outcome = []
    for form, mean_over, every, make, sized in forms:
        model: Any = _net()
        with quiet():
            if form == "dim0":
                fully_shard(model[0])
                fully_shard(model)
            else:
                model = face("shardd")(model, use_orig_params=True, device_id=torch.device("cpu"))
            if form == "hook":
                model.register_comm_hook(None, _average)
            optimizer: Any = make(model.parameters(), lr=0.1)
            batches = _batches(dist.get_rank())
            clip = getattr(
                model, "clip_grad_norm_", lambda most, model=model: nn.utils.clip_grad_norm_(model.parameters(), most)
            )
            rounds = 0
            with join_uneven(model, mean_over=mean_over, filler=torch.full((4, 6), float("nan"))) as join:  # type: ignore[arg-type]
                for rounds, batch in enumerate(join(batches if sized else iter(batches)), start=1):
                    assert join.has_data == (rounds <= len(batches))
                    steps = rounds % every == 0
                    with contextlib.nullcontext() if steps or form == "dim0" else model.no_sync():
                        model(batch).square().mean().backward()
                    if steps:
                        clip(0.5)
                        optimizer.step()
                        optimizer.zero_grad()
            with summon_full_params(model):
                values = [p.detach().clone() for p in model.parameters()]
        outcome.append((form, rounds, values, alone(mean_over, every, torch.optim.AdamW)))
    return outcome


class Liar(list[int]):
    def __len__(self) -> int:
        return super().__len__() + 1


def refused() -> list[str]:
    from shardd.torch import FullyShardedDataParallel, fully_shard, join_uneven

    texts = []
    model = fully_shard(_net())
    for keywords, batches in ((({"mean_over": "most"}), [1]), ({}, Liar([1])), ({}, [])):
        try:
            with join_uneven(model, **keywords) as join:  # type: ignore[arg-type]
                for _ in join(batches if dist.get_rank() == 0 else [1, 2, 3]):
                    pass
            texts.append("")
        except (ValueError, RuntimeError) as error:
            texts.append(str(error))
        dist.barrier()
    # A rank runs out between a backward that does not synchronise and the one that does.
    try:
        flat = FullyShardedDataParallel(_net())
        with join_uneven(flat) as join:
            for number, _ in enumerate(join(iter(range(1 + dist.get_rank())))):
                with flat.no_sync() if number == 0 else contextlib.nullcontext():
                    flat(torch.ones(2, 6)).sum().backward()
        texts.append("")
    except RuntimeError as error:
        texts.append(str(error))
    return texts
