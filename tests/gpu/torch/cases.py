"""What a rank does in each case: trains a model on the GPU beside a reference, and gives how far they are apart."""

from __future__ import annotations

import functools
import math
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as theirs
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

from shardd.torch import fully_shard, summon_full_params
from shardd.torch._job.job import jobs
from shardd.torch.optim import SGD, AdamW

STEPS = 20
WIDTH = 48

CASES: dict[str, Callable[[str], dict[str, Any]]] = {}


def case(function: Callable[[str], dict[str, Any]]) -> Callable[[str], dict[str, Any]]:
    CASES[function.__name__] = function
    return function


class Block(nn.Module):
    def __init__(self, recomputes: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)
        self.recomputes = recomputes

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.nn.functional.gelu(self.up(self.norm(x))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = checkpoint(self.body, x, use_reentrant=False) if self.recomputes else self.body(x)
        return x + out


class Model(nn.Module):
    """Tied embedding, an odd vocabulary and a scalar: uneven and empty shards."""

    def __init__(self, recomputes: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, WIDTH)
        self.blocks = nn.ModuleList(Block(recomputes) for _ in range(3))
        self.gain = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(WIDTH, 37, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.gain)


def make(device: str, recomputes: bool = False) -> Model:
    torch.manual_seed(7)
    return Model(recomputes).to(device)


def batch(step: int, rank: int, micro: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    data = torch.randint(0, 37, (4, 17), generator=generator).to(device)
    return data[:, :-1], data[:, 1:]


def loss_of(model: nn.Module, data: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    out = model(data[0]).float()
    return torch.nn.functional.cross_entropy(out.flatten(0, 1), data[1].flatten())


def reference(device: str, optimizer: Any, micros: int = 1, max_norm: float = 0.0, steps: int = STEPS) -> Any:
    """The unsharded model on every rank's data: mean losses by step, and the model."""
    model, world = make(device), dist.get_world_size()
    stepper = optimizer(model.parameters())
    losses = []
    for step in range(steps):
        total = 0.0
        for micro in range(micros):
            for rank in range(world):
                loss = loss_of(model, batch(step, rank, micro, device))
                (loss / world).backward()
                total += loss.item() / world / micros
        if max_norm:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        stepper.step()
        stepper.zero_grad()
        losses.append(total)
    return losses, model


def shard(model: Model, function: Any = fully_shard, **options: Any) -> None:
    for block in model.blocks:
        function(block, **options)
    function(model, **options)


def mesh(device: str, *shape: int) -> Any:
    names = ("replicate", "shard") if len(shape) > 1 else ("shard",)
    return init_device_mesh(device, shape or (dist.get_world_size(),), mesh_dim_names=names)


def mean_loss(loss: torch.Tensor) -> float:
    value = loss.detach().cpu().reshape(1)
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def train(
    model: nn.Module,
    stepper: Any,
    device: str,
    micros: int = 1,
    steps: int = STEPS,
    first: int = 0,
    **step_options: Any,
) -> list[float]:
    losses = []
    for step in range(first, steps):
        total = 0.0
        for micro in range(micros):
            loss = loss_of(model, batch(step, dist.get_rank(), micro, device))
            loss.backward()
            total += mean_loss(loss) / micros
        stepper.step(**step_options)
        stepper.zero_grad()
        losses.append(total)
    return losses


def apart(ours: list[float], want: list[float]) -> float:
    assert all(math.isfinite(loss) for loss in [*ours, *want]), (ours, want)
    return max(abs(a - b) / abs(b) for a, b in zip(ours, want, strict=True))


def params_apart(model: nn.Module, want: nn.Module) -> float:
    """The largest difference of an element, of all of a parameter's largest."""
    names = dict(want.named_parameters())
    with summon_full_params(model):
        full = dict(model.named_parameters())
        assert full.keys() == names.keys(), (full.keys(), names.keys())
        return max(
            ((full[name].detach() - other.detach()).abs().max() / other.detach().abs().max()).item()
            for name, other in names.items()
        )


def parity(
    device: str, ours: Any, stock: Any, micros: int = 1, max_norm: float = 0.0, **options: Any
) -> dict[str, Any]:
    want, plain = reference(device, stock, micros, max_norm)
    model = make(device, options.pop("recomputes", False))
    options.setdefault("mesh", mesh(device))
    shard(model, **options)
    stepper = ours(model.parameters())
    got = train(model, stepper, device, micros, **({"max_grad_norm": max_norm} if max_norm else {}))
    devices = {p.device.type for p in model.parameters()}
    by_stream = all(job.engine is None or job.engine.info()["stream_ordered"] for job in jobs() if job.on_gpu)
    return {
        "by_stream": by_stream,
        "losses": apart(got, want),
        "params": params_apart(model, plain),
        "devices": sorted(devices),
    }


_adamw = functools.partial(torch.optim.AdamW, lr=3e-3)
_our_adamw = functools.partial(AdamW, lr=3e-3)


@case
def adamw(device: str) -> dict[str, Any]:
    return parity(device, _our_adamw, _adamw)


@case
def sgd_momentum(device: str) -> dict[str, Any]:
    return parity(
        device, functools.partial(SGD, lr=0.01, momentum=0.9), functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9)
    )


@case
def accumulated_and_clipped(device: str) -> dict[str, Any]:
    return parity(device, _our_adamw, _adamw, micros=2, max_norm=0.3)


@case
def recomputed(device: str) -> dict[str, Any]:
    return parity(device, _our_adamw, _adamw, recomputes=True)


@case
def kept_unsharded(device: str) -> dict[str, Any]:
    return parity(device, _our_adamw, _adamw, reshard_after_forward=False)


@case
def offloaded(device: str) -> dict[str, Any]:
    return parity(device, _our_adamw, _adamw, offload_policy=CPUOffloadPolicy())


@case
def cut_on_columns(device: str) -> dict[str, Any]:
    def placement(param: nn.Parameter) -> Any:
        return Shard(1) if param.dim() == 2 and param.shape[1] % dist.get_world_size() == 0 else None

    return parity(device, _our_adamw, _adamw, shard_placement_fn=placement)


@case
def hybrid(device: str) -> dict[str, Any]:
    return parity(device, _our_adamw, _adamw, mesh=mesh(device, dist.get_world_size(), 1))


@case
def synchronised_at_the_last(device: str) -> dict[str, Any]:
    want, plain = reference(device, _adamw, micros=3)
    model = make(device)
    shard(model, mesh=mesh(device))
    stepper = _our_adamw(model.parameters())
    got = []
    for step in range(STEPS):
        total = 0.0
        for micro in range(3):
            model.set_requires_gradient_sync(micro == 2)  # type: ignore[operator]
            loss = loss_of(model, batch(step, dist.get_rank(), micro, device))
            loss.backward()
            total += mean_loss(loss) / 3
        stepper.step()
        stepper.zero_grad()
        got.append(total)
    return {"losses": apart(got, want), "params": params_apart(model, plain)}


@case
def clipped_by_torch(device: str) -> dict[str, Any]:
    """The norm and the scaling are torch's, in the trainer, on the gradients' DTensors."""
    want, plain = reference(device, _adamw, max_norm=0.3)
    model = make(device)
    shard(model, mesh=mesh(device))
    stepper = _our_adamw(model.parameters())
    got = []
    for step in range(STEPS):
        loss = loss_of(model, batch(step, dist.get_rank(), 0, device))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        stepper.step()
        stepper.zero_grad()
        got.append(mean_loss(loss))
    return {"losses": apart(got, want), "params": params_apart(model, plain)}


@contextmanager
def _on(stream: Any) -> Iterator[None]:
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield


@case
def another_stream_each_step(device: str) -> dict[str, Any]:
    want, plain = reference(device, _adamw)
    model = make(device)
    shard(model, mesh=mesh(device))
    stepper = _our_adamw(model.parameters())
    streams = [None, torch.cuda.Stream(), torch.cuda.Stream()] if device == "cuda" else [None]
    got = []
    for step in range(STEPS):
        with _on(streams[step % len(streams)]):
            loss = loss_of(model, batch(step, dist.get_rank(), 0, device))
            loss.backward()
            stepper.step()
            stepper.zero_grad()
            got.append(mean_loss(loss))
    return {"losses": apart(got, want), "params": params_apart(model, plain)}


@case
def bf16_beside_pytorch(device: str) -> dict[str, Any]:
    """Mixed precision, beside torch's fully_shard on one rank; on several, which share a GPU here, beside fp32."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if dist.get_world_size() == 1:
        beside = make(device)
        shard(beside, theirs.fully_shard, mesh=mesh(device), mp_policy=policy)
        want = train(beside, _adamw(beside.parameters(), fused=device == "cuda"), device)
    else:
        want, _ = reference(device, _adamw)
    model = make(device)
    shard(model, mesh=mesh(device), mp_policy=policy)
    return {"losses": apart(train(model, _our_adamw(model.parameters()), device), want)}


@case
def state_dicts(device: str) -> dict[str, Any]:
    model = make(device)
    shard(model, mesh=mesh(device))
    stepper = _our_adamw(model.parameters())
    train(model, stepper, device, steps=3)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    on_gpu = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    again = make(device)
    again.load_state_dict(on_gpu)
    differs = params_apart(model, again)
    for name, value in whole.items():
        differs = max(differs, (value - on_gpu[name].cpu()).abs().max().item())
    moments = stepper.state_dict()["state"][0]["exp_avg"].to_local().clone()
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    own = {"model": model.state_dict(), "optim": stepper.state_dict()}
    dcp.save(own, checkpoint_id=folder[0])
    follow = train(model, stepper, device, first=3, steps=6)
    stepper.load_state_dict(stepper.state_dict())
    own = {"model": model.state_dict(), "optim": stepper.state_dict()}
    dcp.load(own, checkpoint_id=folder[0])
    model.load_state_dict(own["model"])
    stepper.load_state_dict(own["optim"])
    restored = stepper.state_dict()["state"][0]["exp_avg"].to_local().clone()
    repeated = train(model, stepper, device, first=3, steps=6)
    return {
        "differs": differs,
        "moments": (restored - moments).abs().max().item() if moments.numel() else 0.0,
        "losses": apart(repeated, follow),
        "device": str(next(iter(on_gpu.values())).device.type) if on_gpu else "",
    }


@case
def written_back(device: str) -> dict[str, Any]:
    model = make(device)
    shard(model, mesh=mesh(device))
    stepper = _our_adamw(model.parameters())
    train(model, stepper, device, steps=2)
    with summon_full_params(model, writeback=True), torch.no_grad():
        before = model.embed.weight.detach().clone()
        model.embed.weight.mul_(2)
    with summon_full_params(model):
        differs = (model.embed.weight.detach() - 2 * before).abs().max().item()
    return {"differs": differs, "loss": train(model, stepper, device, first=2, steps=3)[0]}


@case
def killed_and_resumed(device: str) -> dict[str, Any]:
    """A process of its own, which dies at the beginning of its sixth step the first time (SIGKILL)."""
    from shardd.torch import resume

    want, plain = reference(device, _adamw, steps=10)
    model = make(device)
    shard(model, mesh=mesh(device))
    stepper = _our_adamw(model.parameters())
    first, _ = resume(model)
    got = train(model, stepper, device, first=first, steps=5 if first == 0 else 10)
    if first == 0:
        loss_of(model, batch(5, dist.get_rank(), 0, device)).backward()
        os.kill(os.getpid(), 9)
    return {"first": first, "losses": apart(got, want[first:]), "params": params_apart(model, plain)}
