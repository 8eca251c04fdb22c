"""What FullyShardedDataParallel is beside its numbers. Each function runs on every rank."""

from __future__ import annotations

import json
import os
import subprocess
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.fsdp import FlatParameter, MixedPrecisionPolicy, ShardingStrategy
from torch.distributed.fsdp._common_utils import TrainingState
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.testing._internal.two_tensor import TwoTensor

from models import Block, Case, Model, build, loss_of, train_steps
from raised import text_of
from sharding.wrapper_scenarios import WrapperCase, wrap_model


def _wrapped(orig: bool = True, **options: Any) -> Any:
    from shardd.torch import FullyShardedDataParallel

    return wrap_model(WrapperCase(orig=orig, options=options), FullyShardedDataParallel)


def holds() -> dict[str, Any]:
    """What user code finds in its hands, of both forms."""
    from shardd.torch import FullyShardedDataParallel as Wrapper

    facts: dict[str, Any] = {}
    inner = build(Case())
    given = dict(inner.named_parameters())
    shapes = {name: p.shape for name, p in given.items()}
    buffer = inner.bias
    model: Any = Wrapper(inner, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True)
    clean = {n.replace("_fsdp_wrapped_module.", ""): p for n, p in model.named_parameters()}
    facts["same_objects"] = clean.keys() == given.keys() and all(clean[n] is given[n] for n in given)
    pieces = [p for p in model.parameters()]
    facts["pieces"] = all(type(p) is nn.Parameter and p.ndim == 1 for p in pieces)
    total = torch.tensor(float(sum(p.numel() for p in pieces)))
    dist.all_reduce(total)
    facts["every_element_once"] = int(total) == sum(shape.numel() for shape in shapes.values())
    facts["alone"] = all(p.untyped_storage().nbytes() == 4 * p.numel() for p in pieces)
    facts["forwards"] = model.order == [0, 1, 2] and model.layers[1].gate is clean["layers.1.gate"]
    facts["module"] = model.module is inner and model.bias is buffer
    facts["index"] = Wrapper(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), use_orig_params=True)[0].out_features
    facts["wrappers"] = len(Wrapper.fsdp_modules(model)), Wrapper.fsdp_modules(model, root_only=True) == [model]
    facts["root"] = model.check_is_root(), model.layers[0].check_is_root()
    facts["attributes"] = (model.sharding_strategy, model.layers[0].sharding_strategy, model.rank, model.world_size,
                           model.compute_device, model.cpu_offload.offload_params, model.mixed_precision.param_dtype,
                           model.process_group is dist.group.WORLD)  # fmt: skip
    seen: dict[str, Any] = {}

    def look(module: nn.Module, args: Any) -> None:
        seen["shape"] = tuple(module.up.weight.shape)  # type: ignore[union-attr]
        seen["state"] = model.layers[0].training_state

    model.layers[0].module.register_forward_pre_hook(look)
    loss_of(model, 0, 0, dist.get_rank()).backward()
    facts["in_forward"] = seen["shape"] == tuple(shapes["layers.0.up.weight"]), seen["state"]
    facts["idle"] = model.training_state
    facts["gradients"] = all(
        type(p.grad) is torch.Tensor and p.grad.shape == p.shape for p in clean.values() if p.numel()
    )
    empty = [p for p in clean.values() if not p.numel()]
    facts["empty"] = len(empty) > 0 and all(p.grad is None for p in empty)
    facts["still_same"] = all(p is clean[n.replace("_fsdp_wrapped_module.", "")] for n, p in model.named_parameters())
    grads = [None if p.grad is None else p.grad.clone() for p in clean.values()]
    loss = loss_of(model, 0, 0, dist.get_rank())
    # Between forward and backward too, where the root stays unsharded: what the program does to them is not lost.
    facts["same_between"] = [p is q for p, q in zip(model.parameters(), clean.values(), strict=True)]
    facts["root_stays"] = model._unit.is_unsharded
    model.zero_grad()
    loss.backward()
    facts["zeroed_between"] = all(g is None or torch.equal(p.grad, g) for p, g in zip(clean.values(), grads))
    facts["internals"] = (
        model._is_root,
        model.layers[0]._is_root,
        model._has_params,
        model.layers[0]._state_dict_type,
        model._assert_state(TrainingState.IDLE),
    )
    try:
        model._assert_state([TrainingState.FORWARD_BACKWARD])
        facts["another_state"] = ""
    except ValueError as error:
        facts["another_state"] = str(error)
    flat = _wrapped(orig=False)
    weight = flat.layers[0].up.weight
    loss_of(flat, 0, 0, dist.get_rank()).backward()
    params = list(flat.parameters())
    facts["flat"] = [isinstance(p, FlatParameter) and isinstance(p, nn.Parameter) for p in params]
    facts["flat_gradient"] = all(p.grad.is_contiguous() and p.grad.shape == p.shape for p in params)
    norm = torch.stack([p.grad.pow(2).sum() for p in params]).sum()
    want = torch.stack([p.grad.pow(2).sum() for p in clean.values() if p.numel()]).sum()
    dist.all_reduce(norm)
    dist.all_reduce(want)
    facts["same_norm"] = torch.allclose(norm, want)
    facts["original"] = tuple(weight.shape) == tuple(shapes["layers.0.up.weight"])
    try:
        flat.layers[0].up.weight.sum()
        facts["resharded_use"] = ""
    except RuntimeError as error:
        facts["resharded_use"] = str(error)
    return facts


class _Tied(nn.Module):
    """``early``: what is used first in the tree is the root's, and an inner unit uses it too; else the other way."""

    def __init__(self, early: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        one, other = nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.first, self.last = (one, other) if early else (other, one)
        self.middle = nn.Linear(6, 6)
        other[0].weight = one.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.middle(self.first(x))))


def ties_across_units() -> list[tuple[str, float, bool]]:
    """For every combination: how far from the unsharded model after some steps, and whether all ranks together
    hold the weight once (90 elements and some padding; twice it were 126)."""
    from shardd.torch import FullyShardedDataParallel as Wrapper
    from shardd.torch.optim import AdamW

    rank, found = dist.get_rank(), []
    for early in (True, False):
        for orig in (True, False):
            for stock in (True, False):
                model: Any = _Tied(early)
                alone = _Tied(early)
                name = "last" if early else "first"
                setattr(model, name, Wrapper(getattr(model, name), use_orig_params=orig))
                model = Wrapper(model, use_orig_params=orig)
                optimizer = (torch.optim.AdamW if stock else AdamW)(model.parameters(), lr=1e-2)
                reference = torch.optim.AdamW(alone.parameters(), lr=1e-2)
                inputs = torch.randn(5, dist.get_world_size(), 4, 6, generator=torch.Generator().manual_seed(1))
                for step in inputs:
                    loss = model(step[rank]).pow(2).mean()
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    wanted = [alone(x).pow(2).mean() for x in step]
                    torch.stack(wanted).mean().backward()
                    reference.step()
                    reference.zero_grad()
                first, last = (m[0] if isinstance(m, nn.Sequential) else m for m in
                               (alone.first, alone.last))  # fmt: skip
                assert first.weight is last.weight
                far = abs(loss.item() - wanted[rank].item()) / wanted[rank].item()
                count = torch.tensor(float(sum(p.numel() for p in model.parameters())))
                dist.all_reduce(count)
                found.append((f"early={early} orig={orig} stock={stock}", far, int(count) < 120))
    return found


def left_out() -> dict[str, Any]:
    from shardd.torch import FullyShardedDataParallel as Wrapper

    facts: dict[str, Any] = {}
    model = build(Case())
    up = model.layers[0].up
    replicate(model.layers[1].down)
    gate = model.layers[2].gate
    head = model.head.weight
    wrapped = Wrapper(model, auto_wrap_policy=ModuleWrapPolicy({Block}), ignored_modules=[up], use_orig_params=True)
    facts["ignored"] = up.weight.shape == (21, 10) and up.weight is model.layers[0].up.weight
    facts["replicated"] = model.layers[1].module.down.weight.shape == (10, 21)
    facts["sharded"] = head.ndim == 1 and gate.ndim == 1
    loss_of(wrapped, 0, 0, 0).backward()
    facts["local_gradient"] = up.weight.grad is not None and up.weight.grad.shape == up.weight.shape
    other = build(Case())
    Wrapper(other, ignored_states=[other.head.weight], use_orig_params=False)
    facts["ignored_states"] = other.head.weight.shape == (13, 10) and "weight" in other.head._parameters
    return facts


class _Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(7, 5))
        self.register_buffer("scale", torch.empty(3))

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.fill_(1.0 + dist.get_rank())
            self.scale.fill_(10.0 + dist.get_rank())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight * self.scale[0]


def initialised() -> dict[str, Any]:
    from shardd.torch import FullyShardedDataParallel as Wrapper
    from shardd.torch._sharding import wrapper_arguments

    facts: dict[str, Any] = {}
    sent: list[int] = []
    broadcast = wrapper_arguments._broadcast_coalesced

    def count(group: Any, tensors: list[torch.Tensor], size: int, root: int) -> None:
        sent.extend(t.numel() for t in tensors)
        broadcast(group, tensors, size, root)

    wrapper_arguments._broadcast_coalesced = count  # type: ignore[assignment]
    try:
        with torch.device("meta"):
            model = nn.Sequential(_Plain(), nn.Sequential(_Plain()))
        wrapped: Any = Wrapper(model, auto_wrap_policy=ModuleWrapPolicy({_Plain}), sync_module_states=True,
                               use_orig_params=True)  # fmt: skip
        facts["sent"] = sorted(sent)
    finally:
        wrapper_arguments._broadcast_coalesced = broadcast
    facts["output"] = wrapped[0](torch.ones(1, 7)).detach().flatten().tolist()
    facts["buffer"] = wrapped[1][0].scale.tolist()

    def init(module: nn.Module) -> None:
        module.to_empty(device="cpu", recurse=False)
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            nn.init.constant_(tensor, 2.0)

    with torch.device("meta"):
        inner = _Plain()
    facts["init_fn"] = Wrapper(inner, param_init_fn=init)(torch.ones(1, 7)).detach().flatten().tolist()
    try:
        with torch.device("meta"):
            Wrapper(Model())
        facts["no_reset"] = ""
    except AttributeError as error:
        facts["no_reset"] = str(error)
    return facts


def refusals() -> dict[str, str]:
    from shardd.torch import FullyShardedDataParallel as Wrapper
    from shardd.torch import MixedPrecision, fully_shard

    texts: dict[str, str] = {}

    def attempt(name: str, call: Any) -> None:
        texts[name] = text_of(call)

    def linear() -> nn.Module:
        return nn.Linear(4, 4)

    world = dist.group.WORLD
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    attempt("hook", lambda: Wrapper(nn.Sequential(Wrapper(linear())))[0].register_comm_hook(None, lambda s, g: None))
    attempt("groups", lambda: Wrapper(linear(), process_group=world, device_mesh=mesh))
    attempt("hybrid", lambda: Wrapper(linear(), sharding_strategy=ShardingStrategy.HYBRID_SHARD))
    attempt("ignored", lambda: Wrapper(linear(), ignored_modules=[], ignored_states=[]))
    attempt("ignored_kind", lambda: Wrapper(linear(), ignored_states=[linear(), nn.Parameter(torch.ones(1))]))
    attempt("device", lambda: Wrapper(linear(), device_id=torch.device("cuda", 0)))
    special = linear()
    special.weight = nn.Parameter(TwoTensor(torch.ones(4, 4), torch.ones(4, 4)))
    attempt("subclass", lambda: Wrapper(special))
    attempt("subclass2", lambda: fully_shard(special))
    attempt("nested", lambda: Wrapper(nn.Sequential(Wrapper(linear())), auto_wrap_policy=ModuleWrapPolicy({nn.Linear})))
    attempt(
        "pair",
        lambda: fully_shard(
            linear(), mp_policy=MixedPrecisionPolicy(torch.bfloat16), strategy=ShardingStrategy.FULL_SHARD
        ),
    )
    attempt("pair2", lambda: fully_shard(linear(), reshard_after_forward=True, mixed_precision=MixedPrecision()))
    attempt("layout", lambda: fully_shard(linear(), layout="dim0", sync_module_states=True))
    module = fully_shard(linear(), layout="flat")
    attempt("twice", lambda: fully_shard(module, layout="flat"))
    mixed = Wrapper(nn.Sequential(Wrapper(linear(), use_orig_params=True), linear()), use_orig_params=False)
    attempt("uniform", lambda: mixed(torch.ones(1, 4)))
    limited = Wrapper(nn.Sequential(Wrapper(linear(), limit_all_gathers=False), linear()))
    attempt("uniform2", lambda: limited(torch.ones(1, 4)))
    root: Any = Wrapper(nn.Sequential(Wrapper(linear()), linear()))
    attempt("no_sync", lambda: root[0].no_sync().__enter__())
    mixture = Wrapper(nn.Sequential(fully_shard(linear(), layout="flat"), linear()), use_orig_params=True)
    attempt("one_layout", lambda: mixture(torch.ones(1, 4)))
    return texts


def differing() -> dict[str, str]:
    """Attributes that the ranks give differently, and then alike."""
    from shardd.torch import FullyShardedDataParallel as Wrapper

    texts = {}
    for name, value in (("use_orig_params", dist.get_rank() == 1), ("limit_all_gathers", dist.get_rank() == 0)):
        model = Wrapper(nn.Sequential(nn.Linear(4, 4)), **{name: value})
        try:
            model(torch.ones(1, 4))
            texts[name] = ""
        except ValueError as error:
            texts[name] = str(error)
    again = Wrapper(nn.Sequential(nn.Linear(4, 4)), use_orig_params=True)
    again(torch.ones(1, 4)).sum().backward()
    texts["again"] = ""
    return texts


def order_of(form: str) -> dict[str, Any]:
    """The daemon's events of one whole step, by rank: which call of which group."""
    from shardd.torch import FullyShardedDataParallel as Wrapper
    from shardd.torch import counters, fully_shard
    from shardd.torch._job.job import jobs
    from shardd.torch.optim import AdamW

    torch.manual_seed(0)
    model: Any = build(Case())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if form == "wrapper":
            model = Wrapper(model, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True)
        elif form == "flat":
            model = Wrapper(model, auto_wrap_policy=ModuleWrapPolicy({Block}))
        elif form == "policy":
            fully_shard(model, policy={Block}, strategy=ShardingStrategy.FULL_SHARD)
        else:
            for layer in model.layers:
                fully_shard(layer, layout="flat")
            fully_shard(model, layout="flat")
    optimizer = AdamW(model.parameters(), lr=1e-2)
    rank = dist.get_rank()
    losses = train_steps(model, optimizer, range(3))
    path = f"/tmp/shardd-order-{os.getpid()}.json"
    job = jobs()[-1].name
    trace = None
    if rank == 0:
        shardctl = os.path.join(os.path.dirname(os.environ["SHARDD_DAEMON"]), "shardctl")
        trace = subprocess.Popen(
            [shardctl, "trace", job, "--steps", "2", "-o", path, "--address", os.environ["SHARDD_ADDRESS"]],
            stdout=subprocess.DEVNULL,
        )
    going = torch.ones(1)
    number = 3
    while going.item():
        train_steps(model, optimizer, range(number, number + 1))
        number += 1
        if trace is not None:
            going.fill_(1.0 if trace.poll() is None else 0.0)
        dist.broadcast(going, 0)
    result: dict[str, Any] = {"losses": losses, "counters": counters(model)}
    if trace is not None:
        assert trace.returncode == 0
        with open(path) as file:
            events = json.load(file)["traceEvents"]
        os.unlink(path)
        calls = sorted((e["ts"], e["pid"], e["args"]["step"], e["name"]) for e in events
                       if e["ph"] == "X" and e["pid"] >= 100 and e["pid"] < 1000 and e["tid"] == 1)  # fmt: skip
        steps = sorted({s for _, _, s, _ in calls})
        whole = steps[len(steps) // 2]
        result["order"] = {
            pid - 100: [
                n
                for _, p, s, n in calls
                if p == pid and s == whole and n.split()[0] in ("unshard", "reshard", "submit")
            ]
            for pid in sorted({p for _, p, _, _ in calls})
        }
    return result


def orders() -> dict[str, dict[str, Any]]:
    results = {}
    for form in ("wrapper", "flat", "policy", "manual"):
        results[form] = order_of(form)
        dist.barrier()
    return results
