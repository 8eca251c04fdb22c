"""Programs that know nothing of shardd, for test_install.py: run as they are, or by ``python -m shardd.torch``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard


def build() -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    return model


def train(rank: int, out: Path) -> None:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses = []
    for step in range(4):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    kinds = [kind.__module__ for kind in type(model).__mro__]
    result = {
        "losses": losses,
        "shardd": "shardd.torch._sharding.fully_shard" in kinds,
        "is_fsdp": isinstance(model, FSDPModule),
        "optimizer": type(optimizer).__module__,
        "methods": type(optimizer).__init__.__code__.co_filename,
        "argv": sys.argv[1:],
        "main": sys.modules["__main__"].__file__ if rank == 0 else "",
    }
    (out / f"{rank}.json").write_text(json.dumps(result))


def spawned(rank: int, world: int, port: int, out: Path) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    train(rank, out)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    torch.set_num_threads(1)
    out = Path(sys.argv[1])
    if len(sys.argv) > 2:  # a port: it starts its ranks itself
        torch.multiprocessing.spawn(spawned, args=(2, int(sys.argv[2]), out), nprocs=2)
        return
    dist.init_process_group("gloo")
    train(int(os.environ["RANK"]), out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
