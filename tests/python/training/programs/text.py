"""Text for language models: tokens with some order in them."""

from __future__ import annotations

import torch
import torch.distributed as dist

__all__ = ["WORDS", "tokens"]

WORDS = 17


def tokens(step: int, length: int = 9, batch: int = 3) -> torch.Tensor:
    """This rank's of a step."""
    generator = torch.Generator().manual_seed(1_000 * step + dist.get_rank())
    first = torch.randint(0, WORDS, (batch, 1), generator=generator)
    return (first + 3 * torch.arange(length)) % WORDS
