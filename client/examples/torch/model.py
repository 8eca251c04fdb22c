"""A character-level GPT in plain PyTorch; knows nothing of sharding."""

from __future__ import annotations

import argparse
import glob
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY = 128


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attention.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.token(inputs) + self.position(torch.arange(inputs.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, VOCABULARY).float(), targets.reshape(-1))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8, help="per rank")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--kill-at", type=int, default=-1, help="rank 1 dies once in this step (resume.py)")
    parser.add_argument("--cut", action="store_true", help="one copy, cut over the ranks of all nodes (nodes.py)")
    parser.add_argument("--stock", action="store_true", help="torch's AdamW, not the daemon's (resume.py)")
    return parser.parse_args()


def build(args: argparse.Namespace) -> Gpt:
    torch.manual_seed(1)
    return Gpt(args.width, args.layers, args.heads, args.context)


def load_text() -> torch.Tensor:
    """The licence texts that every Debian system has, as 7-bit characters."""
    files = sorted({os.path.realpath(path) for path in glob.glob("/usr/share/common-licenses/*")})
    raw = b"".join(Path(path).read_bytes() for path in files)
    return torch.tensor([byte & 127 for byte in raw], dtype=torch.long)


def batch(text: torch.Tensor, size: int, context: int, rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A function of rank and step alone, so that a restarted trainer sees what the dead one would have seen."""
    generator = torch.Generator().manual_seed(1_000_003 * (step + 1) + rank)
    starts = torch.randint(0, len(text) - context - 1, (size,), generator=generator).tolist()
    rows = torch.stack([text[start : start + context + 1] for start in starts])
    return rows[:, :-1], rows[:, 1:]
