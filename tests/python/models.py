"""Small models with what parity has to cover, and the loop that trains them."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """Two linears with row counts that no world size of the tests divides, a norm, a parameter without a module."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width)
        self.gate = nn.Parameter(torch.ones(1))  # one row: every rank but the first has an empty shard

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor | None = None) -> torch.Tensor:
        y = self.down(torch.tanh(self.up(self.norm(x)))) * self.gate
        return x + (y if scale is None else y * scale)


class Model(nn.Module):
    def __init__(self, width: int = 10, blocks: int = 3, vocabulary: int = 13, tie: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.register_buffer("bias", torch.linspace(-1, 1, width))
        if tie:
            self.head.weight = self.embed.weight
        self.order: list[int] = list(range(blocks))
        self.checkpoint: str = ""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.bias
        for index in self.order:
            layer = self.layers[index]
            if self.checkpoint:
                from torch.utils.checkpoint import checkpoint

                x = checkpoint(layer, x, use_reentrant=self.checkpoint == "reentrant")
            else:
                x = layer(x, scale=torch.ones(()))
        return self.head(self.norm(x))


@dataclass
class Case:
    """What a parity test varies."""

    steps: int = 10
    tie: bool = False
    wrap: str = "blocks"  # "blocks", "root", "list"
    reshard: Any = None
    freeze: tuple[str, ...] = ()
    optimizer: str = "adamw"
    momentum: float = 0.9
    clip: float = 0.0
    accumulate: int = 1
    sync: bool = True  # communicate on every micro-batch
    all_reduce: bool = True  # between replicas on every micro-batch
    mesh: tuple[int, ...] = ()  # of all ranks; empty: one dimension
    stock: bool = False  # torch's own optimizer on shardd's model
    divide: float | None = None
    stored: str = ""  # the dtype of parameters
    param_dtype: str = ""
    reduce_dtype: str = ""
    mixed: dict[int, tuple[str, str]] = field(default_factory=dict)  # param_dtype and reduce_dtype of a layer
    checkpoint: str = ""
    compile: str = ""
    skip_grad: tuple[int, ...] = ()  # layers that no rank runs
    extra: dict[str, Any] = field(default_factory=dict)


def build(case: Case) -> Model:
    torch.manual_seed(7)
    model = Model(width=int(os.environ.get("SHARDD_TEST_WIDTH", "10")), tie=case.tie)
    for name, parameter in model.named_parameters():
        if any(name.startswith(prefix) for prefix in case.freeze):
            parameter.requires_grad_(False)
    if case.stored:
        model.to({"bf16": torch.bfloat16, "fp64": torch.float64}[case.stored])
    model.checkpoint = case.checkpoint
    model.order = [i for i in model.order if i not in case.skip_grad]
    return model


PLACED = {"SHARDD_TEST_PLACED": "1"}  # environment in which ``shard`` cuts other dimensions than the first


def placement(shards: int) -> Any:
    """A ``shard_placement_fn``: the last dimension where that gives shards of one size, else None."""
    from torch.distributed.tensor import Shard

    return lambda param: Shard(-1) if param.ndim > 1 and param.shape[-1] % shards == 0 else None


def mesh_of(*sizes: int) -> Any:
    """Of all ranks; of two dimensions, the first one's are replicas."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard") if len(sizes) == 2 else None)


def shard(model: Model, case: Case, fully_shard: Any) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    dtypes = {"": None, "bf16": torch.bfloat16, "fp32": torch.float32}

    def policy_of(param_dtype: str, reduce_dtype: str) -> MixedPrecisionPolicy:
        return MixedPrecisionPolicy(param_dtype=dtypes[param_dtype], reduce_dtype=dtypes[reduce_dtype])

    kwargs = {
        "mesh": mesh_of(*(case.mesh or (dist.get_world_size(),))),
        "mp_policy": policy_of(case.param_dtype, case.reduce_dtype),
        "reshard_after_forward": case.reshard,
    }
    if os.environ.get("SHARDD_TEST_PLACED"):
        kwargs["shard_placement_fn"] = placement(kwargs["mesh"].size(-1))
    if case.wrap in ("blocks", "list"):
        for index, layer in enumerate(model.layers):
            own = {"mp_policy": policy_of(*case.mixed[index])} if index in case.mixed else {}
            fully_shard(layer, **kwargs | own)
    if case.wrap == "list":
        fully_shard([model.norm, model.head], **kwargs)
    fully_shard(model, **kwargs)


def batch(step: int, micro: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1_000 * step + 10 * micro + rank)
    tokens = torch.randint(0, 13, (4, 6), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model: nn.Module, step: int, micro: int, rank: int) -> torch.Tensor:
    tokens, targets = batch(step, micro, rank)
    return F.cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten())


def train_steps(model: nn.Module, optimizer: Any, steps: range) -> list[float]:
    """Trains with this rank's batches of ``steps``; the losses."""
    losses = []
    for step in steps:
        loss = loss_of(model, step, 0, dist.get_rank())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def error_of_steps(model: nn.Module, optimizer: Any, steps: range, begin: Callable[[int], None]) -> str:
    """The RuntimeError with which training ends; "" where it does not. ``begin`` is called where a step begins."""
    try:
        for step in steps:
            begin(step)
            train_steps(model, optimizer, range(step, step + 1))
    except RuntimeError as error:
        return str(error)
    return ""


def make_optimizer(model: nn.Module, case: Case, adamw: Any, sgd: Any) -> Any:
    parameters = [p for p in model.parameters() if p.requires_grad]
    if case.optimizer == "groups":
        return adamw([{"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
                      {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0, "lr": 3e-2}], lr=1e-2)  # fmt: skip
    if case.optimizer == "adam":
        return torch.optim.Adam(parameters, lr=1e-2)
    if case.optimizer == "sgd":
        return sgd(parameters, lr=1e-1, momentum=case.momentum, weight_decay=1e-3)
    return adamw(parameters, lr=1e-2)


def train_sharded(case: Case, impl: str) -> dict[str, Any]:
    """Trains on this rank; losses, norms, parameters, and the daemon's counts for shardd."""
    rank = dist.get_rank()
    if impl == "shardd":
        from shardd.torch import fully_shard
    else:
        from torch.distributed.fsdp import fully_shard
    if impl == "shardd" and not case.stock:
        from shardd.torch.optim import SGD, AdamW
    else:
        from torch.optim import SGD, AdamW
    if impl == "torch":  # the same bits as one parameter after the other, which takes half of the reference's time
        SGD, AdamW = functools.partial(SGD, foreach=True), functools.partial(AdamW, foreach=True)
    model = build(case)
    shard(model, case, fully_shard)
    if case.divide is not None:
        for module in [*model.layers, model]:
            module.set_gradient_divide_factor(case.divide)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other way
    before = dict(model.named_parameters())
    optimizer = make_optimizer(model, case, AdamW, SGD)
    run = model
    if case.compile:
        torch._dynamo.reset()
        if case.extra.get("whole"):
            run = torch.compile(model, backend=case.compile)
        else:
            for layer in model.layers:
                layer.compile(backend=case.compile)
    losses, norms, shown = [], [], []
    for step in range(case.steps):
        for micro in range(case.accumulate):
            last = micro == case.accumulate - 1
            if not case.sync:
                model.set_requires_gradient_sync(last)
            if not case.all_reduce:
                model.set_requires_all_reduce(last)
            loss = loss_of(run, step, micro, rank) / case.accumulate
            loss.backward()
            losses.append(loss.item())
            shown.append(next(model.parameters()).grad is not None)
        if case.clip:
            norm = nn.utils.clip_grad_norm_(model.parameters(), case.clip)
            norms.append(norm.full_tensor().item() if hasattr(norm, "full_tensor") else norm.item())
        optimizer.step()
        optimizer.zero_grad()
    result: dict[str, Any] = {"losses": losses, "norms": norms, "shown": shown}
    after = dict(model.named_parameters())
    result["same_objects"] = all(after[name] is before[name] for name in before)
    state = model.state_dict()
    result["keys"] = sorted(state)
    result["parameters"] = {
        name: value.full_tensor().detach().clone() for name, value in state.items() if hasattr(value, "full_tensor")
    }
    result["placements"] = {name: str(p.placements) for name, p in after.items()}
    result["local_shapes"] = {name: tuple(p.to_local().shape) for name, p in after.items()}
    if impl == "shardd":
        result["counters"] = end_and_count(model)
    return result


def end_and_count(model: nn.Module) -> dict[str, int]:
    """Ends the model's job, once all ranks have come here; the daemon's counts of it."""
    from shardd.torch import counters, finish

    dist.barrier()
    counted = counters(model)
    dist.barrier()
    finish(model)
    return counted


def backward_of_all_ranks(model: nn.Module, step: int, losses: list[list[float]]) -> None:
    """In one process, with the mean of all ranks' gradients; adds the loss of each to its ``losses``."""
    for rank, of_rank in enumerate(losses):
        loss = loss_of(model, step, 0, rank)
        (loss / len(losses)).backward()
        of_rank.append(loss.item())


def train_alone(case: Case, world: int) -> dict[str, Any]:
    """The same on one process with all ranks' batches, unsharded, in fp32."""
    model = build(case)
    optimizer = make_optimizer(model, case, torch.optim.AdamW, torch.optim.SGD)
    losses: list[list[float]] = [[] for _ in range(world)]
    norms = []
    for step in range(case.steps):
        for micro in range(case.accumulate):
            for rank in range(world):
                loss = loss_of(model, step, micro, rank) / case.accumulate
                (loss / (case.divide or world)).backward()
                losses[rank].append(loss.item())
        if case.clip:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), case.clip).item())
        optimizer.step()
        optimizer.zero_grad()
    return {
        "losses": losses,
        "norms": norms,
        "parameters": {n: p.detach().clone() for n, p in model.named_parameters()},
    }


def compare(case: Case) -> dict[str, Any]:
    """On every rank: shardd, torch's own fully_shard, and the unsharded model."""
    stock = train_sharded(case, "torch")
    ours = train_sharded(case, "shardd")
    return {
        "torch": stock,
        "shardd": ours,
        "alone": train_alone(case, dist.get_world_size()) if dist.get_rank() == 0 else None,
    }


@contextlib.contextmanager
def quiet() -> Any:
    import logging

    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
