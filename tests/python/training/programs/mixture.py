"""Routed experts."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from training.programs.script import Script, data
from training.programs.text import WORDS, tokens

__all__ = ["experts", "left_out_experts"]

_WIDTH = 12


class Experts(nn.Module):
    """The two best of four experts for each token. An expert that no token of this rank goes to does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(_WIDTH, 4, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(_WIDTH, 2 * _WIDTH), nn.SiLU(), nn.Linear(2 * _WIDTH, _WIDTH)) for _ in range(4)
        )
        self.norm = nn.LayerNorm(_WIDTH)
        self.idle = 0
        self.balance = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = self.norm(x).flatten(0, 1)
        chances = self.router(flat).softmax(-1)
        weights, chosen = chances.topk(2, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == number)
            if not len(rows):
                self.idle += 1
                continue
            out.index_add_(0, rows, expert(flat[rows]) * weights[rows, place, None])
        share = F.one_hot(chosen, 4).float().mean((0, 1))
        self.balance = 4 * (share * chances.mean(0)).sum()
        return x + out.view_as(x)


class Chosen(nn.Module):
    """Of three experts those that it is told to run."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor, chosen: list[int]) -> torch.Tensor:
        for number in chosen:
            x = x + torch.tanh(self.experts[number](x))
        return x


class Routed(nn.Module):
    def __init__(self) -> None:
        torch.manual_seed(6)
        super().__init__()
        self.layers = nn.ModuleList(Chosen() for _ in range(2))
        self.head = nn.Linear(_WIDTH, 5)

    def forward(self, x: torch.Tensor, chosen: list[list[int]]) -> torch.Tensor:
        for layer, numbers in zip(self.layers, chosen):
            x = layer(x, numbers)
        return self.head(x)  # type: ignore[no-any-return]


class Mixture(nn.Module):
    def __init__(self) -> None:
        torch.manual_seed(4)
        super().__init__()
        self.embed = nn.Embedding(WORDS, _WIDTH)
        self.layers = nn.ModuleList(Experts() for _ in range(2))
        self.head = nn.Linear(_WIDTH, WORDS)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.embed(text)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


def experts(script: Script) -> list[Any]:
    """Mixtral's loop over experts: on a rank some have no tokens, and so no gradients there; a loss for balance."""
    net = Mixture()
    model = script.shard(net, Experts)
    if script.form == "fully_shard":
        for layer in net.layers:
            layer.set_reduce_scatter_unused_params(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2, weight_decay=0.1)
    start, kept = script.resume(model)
    seen: list[Any] = kept or []
    for step in range(start, 6):
        # Few tokens, the same one for some ranks and steps, so that experts are left out.
        text = tokens(step, 3, 1) if step % 2 else torch.full((1, 2), step + dist.get_rank())
        loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        loss = loss + 0.01 * sum(layer.balance for layer in net.layers)
        loss.backward()
        seen.append(loss.item())
        script.ride(seen)
        optimizer.step()
        optimizer.zero_grad()
    assert sum(layer.idle for layer in net.layers) > 0
    return [*seen, *script.parameters(model)]


def left_out_experts(script: Script) -> list[Any]:
    """Each rank leaves out experts by seed, and some rank runs each. On PyTorch ranks that leave one out add zeros, and the
    wrapper hangs where a rank leaves out all of a unit."""
    net = Routed()
    model = script.shard(net, Chosen)
    if script.form == "fully_shard" and not script.swapped:
        for layer in net.layers:
            layer.set_reduce_scatter_unused_params(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    start, kept = script.resume(model)
    seen: list[Any] = kept or []
    for step in range(start, 20):
        for micro in range(2):
            seed = torch.Generator().manual_seed(10 * step + micro)
            run_by = torch.randint(0, 3, (2, 3), generator=seed)  # by layer and expert; 2: both ranks
            run_by[:, 2] = 2
            chosen = [[n for n, who in enumerate(layer) if who in (2, dist.get_rank())] for layer in run_by.tolist()]
            loss = model(data(10 * step + micro, 4, _WIDTH), chosen).square().mean()
            loss.backward()
            seen.append(loss.item())
        seen.append(script.clip(model, 0.3))
        script.ride(seen)
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, *script.parameters(model)]
