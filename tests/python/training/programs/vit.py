"""A vision transformer with what recipes add to it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, apply_activation_checkpointing
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper as wrapper
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from training.programs.script import Script, data

__all__ = ["vit"]


class DropPath(nn.Module):
    """Leaves out a residual branch for some samples."""

    def __init__(self, chance: float) -> None:
        super().__init__()
        self.chance = chance

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training or not self.chance:
            return x
        kept = x.new_empty(x.shape[0], 1, 1).bernoulli_(1 - self.chance)
        return x * kept / (1 - self.chance)


class Layer(nn.Module):
    def __init__(self, width: int, drop_path: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.MultiheadAttention(width, 2, dropout=0.1, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * width, width))
        self.scale = nn.Parameter(torch.full((width,), 0.5))
        self.drop_path = DropPath(drop_path)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        x = x + self.drop_path(self.scale * self.attn(y, y, y, need_weights=False)[0])
        return x + self.drop_path(self.mlp(self.norm2(x)))


class ViT(nn.Module):
    def __init__(self, classes: int = 5, width: int = 10, depth: int = 3) -> None:
        torch.manual_seed(5)
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.cls = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.positions = nn.Parameter(torch.randn(1, 5, width) * 0.02)
        self.drop = nn.Dropout(0.1)
        self.layers = nn.Sequential(*(Layer(width, 0.2 * i / depth) for i in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)
        nn.init.zeros_(self.head.weight)

    def no_weight_decay(self) -> set[str]:
        return {"cls", "positions"}

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.positions
        x = self.layers(self.drop(x))
        return self.head(self.norm(x)[:, 0])  # type: ignore[no-any-return]


def _groups(model: Any, skip: set[str], decay: float) -> list[dict[str, Any]]:
    """timm's ``param_groups_weight_decay``."""
    with_decay, without = [], []
    for name, p in model.named_parameters():
        plain = p.ndim <= 1 or name.endswith(".bias") or any(name.endswith(n) for n in skip)
        (without if plain else with_decay).append(p)
    return [{"params": without, "weight_decay": 0.0}, {"params": with_decay, "weight_decay": decay}]


def vit(script: Script) -> list[Any]:
    """bf16 parameters, layers checkpointed, mixup and smoothed labels, a warmup before a cosine, the order of timm."""
    net = ViT()
    apply_activation_checkpointing(
        net,
        checkpoint_wrapper_fn=lambda m: wrapper(m, checkpoint_impl=CheckpointImpl.NO_REENTRANT),
        check_fn=lambda m: isinstance(m, Layer),
    )
    skip = net.no_weight_decay()
    model = script.shard(net, Layer, precision=(torch.bfloat16, torch.float32))
    # Without original shapes nobody sees which is a vector; this form shows flat pieces.
    groups = _groups(model, skip, 0.05) if script.form == "fully_shard" else model.parameters()
    optimizer = torch.optim.AdamW(groups, lr=2e-2)
    schedule = SequentialLR(
        optimizer,
        [LinearLR(optimizer, 0.1, total_iters=2), CosineAnnealingLR(optimizer, 6, 1e-4)],
        milestones=[2],
    )
    start, kept = script.resume(model)
    seen: list[Any] = kept or []
    for _ in range(start):
        schedule.step()
    for step in range(start, 6):
        torch.manual_seed(100 * step + dist.get_rank())
        images, labels = data(step, 4, 3, 8, 8), torch.arange(4) % 5
        part = torch.distributions.Beta(0.8, 0.8).sample().item()
        images = part * images + (1 - part) * images.flip(0)
        logits = model(images).float()
        loss = part * F.cross_entropy(logits, labels, label_smoothing=0.1)
        loss = loss + (1 - part) * F.cross_entropy(logits, labels.flip(0), label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        seen += [loss.item(), script.clip(model, 1.0), optimizer.param_groups[0]["lr"]]
        script.ride(seen)
        optimizer.step()
        schedule.step()
    return [*seen, *script.parameters(model)]
