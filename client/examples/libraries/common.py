"""What the programs of this folder share: a tiny language model, its data, and the record of a run. Plain PyTorch."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 64
LENGTH = 16


def parser(description: str | None) -> argparse.ArgumentParser:
    """The arguments that all programs take: where to write, and how many steps."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--out", type=Path, required=True, help="folder for losses.json and checkpoints")
    options.add_argument("--steps", type=int, default=6)
    return options


def accelerate_on_cpu() -> None:
    """accelerate shards on devices that are not CPUs only; from here on it takes this process's CPU for one."""
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    state = PartialState(cpu=True)
    state.distributed_type = DistributedType.MULTI_GPU
    state.device = torch.device("cpu")


def tiny_llama() -> Any:
    """A Llama of transformers with 2 layers and some 20 thousand parameters, the same on every rank. No download."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=False,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


class Sentences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Token sequences that follow a rule, so that there is something to learn; the same on every machine."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(3)
        start = torch.randint(VOCABULARY, (count, 1), generator=generator)
        stride = torch.randint(1, 5, (count, 1), generator=generator)
        self.tokens = (start + stride * torch.arange(LENGTH)) % VOCABULARY

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class Record:
    """Numbers by name, in the order of their making; rank 0 writes them to losses.json."""

    def __init__(self, out: Path, rank: int) -> None:
        self.out, self.rank = out, rank
        self.values: dict[str, list[float]] = {}
        out.mkdir(parents=True, exist_ok=True)

    def add(self, name: str, value: Any) -> None:
        self.values.setdefault(name, []).append(float(value))

    def write(self) -> None:
        if self.rank == 0:
            (self.out / "losses.json").write_text(json.dumps(self.values, indent=1))
