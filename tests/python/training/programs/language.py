"""nanoGPT: its model and its loop."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from training.programs.script import Script
from training.programs.text import WORDS, tokens

__all__ = ["nano_gpt"]

_LENGTH, _WIDTH = 8, 12


class CausalSelfAttention(nn.Module):
    mask: torch.Tensor

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attend, self.project = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.drop, self.heads = nn.Dropout(dropout), heads
        self.register_buffer("mask", torch.ones(_LENGTH, _LENGTH, dtype=torch.bool).tril(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.attend(x).split(width, dim=2)
        )
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(k.shape[-1])
        scores = scores.masked_fill(~self.mask[:length, :length], float("-inf"))
        mixed = self.drop(scores.softmax(-1)) @ v
        return self.drop(self.project(mixed.transpose(1, 2).reshape(batch, length, width)))


class Block(nn.Module):
    def __init__(self, width: int = _WIDTH, dropout: float = 0.1) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(width), CausalSelfAttention(width, 2, dropout)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))  # type: ignore[no-any-return]


class GPT(nn.Module):
    def __init__(self, dropout: float = 0.1) -> None:
        torch.manual_seed(1337)
        super().__init__()
        self.transformer = nn.ModuleDict(
            dict(
                wte=nn.Embedding(WORDS, _WIDTH),
                wpe=nn.Embedding(_LENGTH, _WIDTH),
                drop=nn.Dropout(dropout),
                h=nn.ModuleList(Block(dropout=dropout) for _ in range(3)),
                ln_f=nn.LayerNorm(_WIDTH),
            )
        )
        self.lm_head = nn.Linear(_WIDTH, WORDS, bias=False)
        self.transformer.wte.weight = self.lm_head.weight
        self.apply(self._init)
        for name, p in self.named_parameters():
            if name.endswith("project.weight"):
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * 3))

    def _init(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.2)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)

    def forward(self, idx: torch.Tensor, targets: torch.Tensor | None = None) -> tuple[torch.Tensor, Any]:
        parts: Any = self.transformer
        x = parts.drop(parts.wte(idx) + parts.wpe(torch.arange(idx.shape[1])))
        for block in parts.h:
            x = block(x)
        x = parts.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, WORDS), targets.reshape(-1), ignore_index=-1)

    def configure_optimizers(self, weight_decay: float, rate: float) -> torch.optim.Optimizer:
        params = {n: p for n, p in self.named_parameters() if p.requires_grad}
        groups = [
            {"params": [p for p in params.values() if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for p in params.values() if p.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95))


def _rate(step: int, most: float = 3e-2, least: float = 3e-3, warm: int = 2, decay: int = 8) -> float:
    if step < warm:
        return most * (step + 1) / (warm + 1)
    part = min(1.0, (step - warm) / (decay - warm))
    return least + 0.5 * (1 + math.cos(math.pi * part)) * (most - least)


@torch.no_grad()
def _estimate_loss(model: Any) -> list[float]:
    model.eval()
    out = []
    for split in range(2):
        losses = torch.zeros(2)
        for k in range(2):
            text = tokens(50 + 10 * split + k)
            losses[k] = model(text[:, :-1], text[:, 1:])[1].item()
        out.append(losses.mean().item())
    model.train()
    return out


def nano_gpt(script: Script) -> list[Any]:
    """Tied head, dropout, groups with and without decay, autocast, accumulation, clipping, a rate that the loop sets."""
    gpt = GPT()
    model = script.shard(gpt, Block)
    net = model.module if script.form == "wrapper" else model
    optimizer = net.configure_optimizers(0.1, 3e-2)
    start, kept = script.resume(model)
    seen, dice = kept or ([], None)
    torch.manual_seed(42 + dist.get_rank())
    if dice is not None:
        torch.set_rng_state(dice)
    for step in range(start, 6):
        for group in optimizer.param_groups:
            group["lr"] = _rate(step)
        if step % 3 == 0:
            seen += _estimate_loss(model)
        for micro in range(3):
            text = tokens(10 * step + micro)
            with script.accumulating(model, micro == 2), torch.autocast("cpu", torch.bfloat16):
                _, loss = model(text[:, :-1], text[:, 1:])
                loss = loss / 3
                loss.backward()
            seen.append(loss.item())
        seen.append(script.clip(model, 1.0))
        script.ride((seen, torch.get_rng_state()))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    idx = torch.zeros(1, 1, dtype=torch.long)
    model.eval()
    with torch.no_grad():
        for _ in range(5):
            idx = torch.cat([idx, model(idx)[0][:, -1, :].argmax(-1, keepdim=True)], 1)
    return [*seen, idx, *script.parameters(model)]
