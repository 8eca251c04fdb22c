"""Two ranks of a program that has nothing but the installed package; compares with the model trained unsharded."""

from __future__ import annotations

import copy
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import shardd.torch
from shardd.torch import fully_shard
from shardd.torch.optim import AdamW

STEPS = 12


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * step + rank))
    return x, x.sin().sum(1, keepdim=True)


def daemons() -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/exe"):
        try:
            found.append(os.readlink(path))
        except OSError:
            continue
    return [
        path
        for path in found
        if path.endswith("/shardd/bin/shardd") and path.startswith(str(Path(shardd.__file__).parent))
    ]


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 17), nn.Tanh(), nn.Linear(17, 1))
    reference = copy.deepcopy(model)
    for module in (model[0], model[2]):
        fully_shard(module)
    fully_shard(model)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    expected = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    for step in range(STEPS):
        x, y = batch(step, rank)
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for other in range(2):
            x, y = batch(step, other)
            wanted = (reference(x) - y).square().mean()
            (wanted / 2).backward()
            if other == rank:
                torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=0)
        expected.step()
        expected.zero_grad()
    assert shardd.torch.counters()["commits"] == STEPS
    print(f"rank {rank}: {STEPS} steps are those of the unsharded model", flush=True)
    dist.barrier()
    if rank == 0:
        print("daemon:", *daemons(), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
