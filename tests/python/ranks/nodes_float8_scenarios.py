"""What ranks do in the tests of models whose parameters cross nodes in float8, and the same training alone."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from models import Case, build, loss_of, make_optimizer, shard

_BLOCK = 128


def rounded(part: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What ranks read of a node's part of a parameter, by torch's own float8: each block of 128 elements divided by the
    smallest power of two that leaves it within 448."""
    flat = part.detach().to(dtype).float().flatten()
    for block in flat.split(_BLOCK):  # views
        mantissa, exponent = math.frexp(block.abs().max().item())
        scale = 2.0 ** max(exponent - (9 if mantissa <= 0.875 else 8), -126)
        block.copy_((block / scale).to(torch.float8_e4m3fn).float() * scale)
    return flat.view(part.shape)


def _as_read(parameter: torch.Tensor, nodes: int, local: int, dtype: torch.dtype) -> torch.Tensor:
    rows = parameter.chunk(nodes * local)  # of each rank, if it has any
    parts = [rows[node * local : (node + 1) * local] for node in range(nodes)]
    return torch.cat([rounded(torch.cat(part), dtype) for part in parts if part])


def train_alone(case: Case, nodes: int, local: int) -> dict[str, Any]:
    """One process with all ranks' batches, whose forward and backward see rounded copies of its parameters."""
    model, reads, world = build(case), build(case), nodes * local
    optimizer = make_optimizer(model, case, torch.optim.AdamW, torch.optim.SGD)
    losses: list[list[float]] = [[] for _ in range(world)]
    for step in range(case.steps):
        with torch.no_grad():
            for read, stored in zip(reads.parameters(), model.parameters()):
                read.copy_(_as_read(stored, nodes, local, torch.float32))
        for micro in range(case.accumulate):
            for rank in range(world):
                loss = loss_of(reads, step, micro, rank) / case.accumulate
                (loss / world).backward()
                losses[rank].append(loss.item())
        for read, stored in zip(reads.parameters(), model.parameters()):
            stored.grad, read.grad = read.grad, None
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "parameters": {n: p.detach().clone() for n, p in model.named_parameters()}}


def train(case: Case, layout: str = "dim0", float8: bool = True) -> dict[str, Any]:
    """On every rank: losses, the stored parameters at the end, and what this rank reads of one layer between passes."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    from shardd.torch import counters, finish, fully_shard
    from shardd.torch.optim import SGD, AdamW

    model = build(case)
    shard(model, case, functools.partial(fully_shard, float8_gathers=float8, layout=layout))
    kinds = (torch.optim.AdamW, torch.optim.SGD) if case.stock else (AdamW, SGD)  # in the trainers, or the daemons
    optimizer = make_optimizer(model, case, *kinds)
    losses = []
    for step in range(case.steps):
        for micro in range(case.accumulate):
            model.set_requires_gradient_sync(micro == case.accumulate - 1 or case.sync)
            loss = loss_of(model, step, micro, dist.get_rank()) / case.accumulate
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    stored = {}
    if layout == "dim0":
        stored = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=False))
    model.layers[1].unshard()
    read = {f"layers.1.{n}": p.detach().clone() for n, p in model.layers[1].named_parameters()}
    model.layers[1].reshard()
    aborts = counters(model)["aborts"]
    dist.barrier()
    finish(model)
    return {"losses": losses, "stored": stored, "read": read, "aborts": aborts}


def alone_on_one_node() -> str:
    """Asks for float8 where nothing is gathered over nodes; what is said of that."""
    try:
        train(Case(steps=1))
    except (NotImplementedError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


# The price of the rounding.


class _Gpt(nn.Module):
    def __init__(self, vocabulary: int, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(torch.randn(length, width) * 0.02)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        mask = torch.full((length, length), -torch.inf).triu(1)
        x = self.embed(tokens) + self.places[:length]
        for layer in self.layers:
            x = layer(x, src_mask=mask.to(x.dtype))
        return self.head(self.norm(x))


def _sentences(step: int, rank: int, vocabulary: int, length: int) -> torch.Tensor:
    """Each token follows from the two before it, but for a tenth of them: a model has to learn a table by attention."""
    generator = torch.Generator().manual_seed(977 * step + rank)
    table = torch.randint(0, vocabulary, (vocabulary, vocabulary), generator=torch.Generator().manual_seed(5))
    tokens = torch.randint(0, vocabulary, (16, length + 1), generator=generator)
    noise = torch.rand(16, length + 1, generator=generator) < 0.1
    for place in range(2, length + 1):
        follows = table[tokens[:, place - 2], tokens[:, place - 1]]
        tokens[:, place] = torch.where(noise[:, place], tokens[:, place], follows)
    return tokens


def gpt(steps: int, float8: bool, width: int = 64, layers: int = 2, seed: int = 11) -> list[float]:
    """Trains a small GPT in bf16 over all ranks; the mean loss of all ranks at each step."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from shardd.torch import finish, fully_shard
    from shardd.torch.optim import AdamW

    vocabulary, length = 24, 24
    torch.manual_seed(seed)
    model = _Gpt(vocabulary, width, layers, length)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy, float8_gathers=float8)
    fully_shard(model, mp_policy=policy, float8_gathers=float8)
    optimizer = AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    losses = []
    for step in range(steps):
        tokens = _sentences(step, dist.get_rank(), vocabulary, length)
        loss = F.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step(max_grad_norm=1.0)
        optimizer.zero_grad()
        losses.append(loss.detach())
    mean = torch.stack(losses)
    dist.all_reduce(mean)
    dist.barrier()
    finish(model)
    return (mean / dist.get_world_size()).tolist()
