"""What ranks do whose daemon dies, where one job's update takes long, in programs that know nothing of it but ``steps``."""

from __future__ import annotations

import os
import time

import torch

from rank_main import report


def train_large_matrix(size: int, count: int) -> torch.Tensor:
    """Muon of one matrix, whose update takes seconds."""
    import shardd.torch
    from shardd.torch import fully_shard
    from shardd.torch.optim import Muon

    torch.manual_seed(5)
    model = torch.nn.Linear(size, size, bias=False)
    fully_shard(model)
    optimizer = Muon(model.parameters(), lr=0.02)
    for step in shardd.torch.steps(count):
        with step:
            torch.manual_seed(int(step))
            model(torch.randn(2, size)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            report(event="steps", step=int(step))
    return model.weight.full_tensor().detach().clone()


def train_until(file: str) -> bool:
    """A small job, which trains until there is the file, and its bias as soon as there is FILE.thaw: whether it came to that."""
    import shardd.torch
    from shardd.torch import fully_shard
    from shardd.torch.optim import AdamW

    model = torch.nn.Linear(8, 8)
    fully_shard(model)
    model.bias.requires_grad_(False)
    optimizer = AdamW([model.weight], lr=1e-3)
    for step in shardd.torch.steps(1_000_000):
        with step:
            if os.path.exists(f"{file}.thaw") and not model.bias.requires_grad:
                model.bias.requires_grad_(True)
                optimizer.add_param_group({"params": [model.bias]})
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            report(event="trained", step=int(step), resumed=bool(step.resumed))
            if os.path.exists(file):
                break
            time.sleep(0.02)
    return model.bias.requires_grad
