"""What ranks do in the tests of behaviour; each function runs on every rank."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from models import Case, Model, batch, build, loss_of, shard


def _model(case: Case | None = None, lr: float = 1e-2) -> tuple[Model, Any]:
    from shardd.torch import fully_shard
    from shardd.torch.optim import AdamW

    case = case or Case()
    model = build(case)
    shard(model, case, fully_shard)
    return model, AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)


def _counters(model: nn.Module) -> dict[str, int]:
    from shardd.torch import counters

    return counters(model)


def types_and_identity() -> dict[str, Any]:
    from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
    from torch.distributed.tensor import DTensor, Shard

    from shardd.torch import FSDPModule, fully_shard

    model = build(Case())
    parameters = dict(model.named_parameters())
    shard(model, Case(), fully_shard)
    sharded = dict(model.named_parameters())
    facts: dict[str, Any] = {"class": type(model).__name__, "block": type(model.layers[0]).__name__}
    facts["subclass"] = isinstance(model, FSDPModule) and isinstance(model, TorchFSDPModule)
    facts["names"] = list(parameters) == list(sharded)
    facts["dtensor"] = all(isinstance(p, DTensor) and p.placements == (Shard(0),) for p in sharded.values())
    state_before = model.state_dict()
    seen: dict[str, Any] = {}

    def look(module: nn.Module, args: Any) -> None:
        seen["plain"] = all(type(p) is nn.Parameter and not isinstance(p, DTensor) for p in module.parameters())
        seen["shape"] = tuple(module.up.weight.shape)  # type: ignore[union-attr]

    model.layers[0].register_forward_pre_hook(look)
    loss_of(model, 0, 0, dist.get_rank()).backward()
    facts.update(seen)
    facts["after"] = all(p is sharded[n] for n, p in model.named_parameters())
    facts["grads"] = all(isinstance(p.grad, DTensor) and p.grad.placements == (Shard(0),) and p.grad.shape == p.shape
                         and p.grad.to_local().shape == p.to_local().shape for p in model.parameters())  # fmt: skip
    facts["shares_state_dict"] = all(
        state_before[n].to_local().untyped_storage().data_ptr() == p.to_local().untyped_storage().data_ptr()
        for n, p in model.named_parameters()
        if p.to_local().numel()
    )
    try:
        fully_shard(model)
        facts["twice"] = ""
    except AssertionError as error:
        facts["twice"] = str(error)
    try:
        model.layers[0].up.weight._local_tensor  # noqa: B018
        unsharded = model.layers[0]._get_fsdp_state()._unit.fsdp_params[1]._unsharded_param
        unsharded.sum()
        facts["resharded_use"] = ""
    except RuntimeError as error:
        facts["resharded_use"] = str(error)
    model.layers[0].unshard()
    facts["unshard"] = (
        tuple(model.layers[0].up.weight.shape) if not isinstance(model.layers[0].up.weight, DTensor) else ()
    )
    model.layers[0].reshard()
    facts["reshard"] = isinstance(model.layers[0].up.weight, DTensor)
    several: Any = fully_shard(nn.Sequential(*(nn.Linear(2, 2) for _ in range(3))))
    facts["slice"] = type(several[1:]) is nn.Sequential and list(several[1:]) == list(several)[1:]
    return facts


def refusals() -> dict[str, str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.tensor import Shard

    from shardd.torch import fully_shard, optim

    texts: dict[str, str] = {}

    def attempt(name: str, call: Any) -> None:
        try:
            call()
            texts[name] = ""
        except (NotImplementedError, ValueError, TypeError, AssertionError, RuntimeError) as error:
            texts[name] = f"{type(error).__name__}: {error}"

    mesh3 = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "other", "shard"))
    attempt("mesh", lambda: fully_shard(nn.Linear(4, 4), mesh=mesh3))
    attempt("factor", lambda: fully_shard(nn.Linear(4, 4), reshard_after_forward=3))
    attempt("placement", lambda: fully_shard(nn.Linear(5, 4), shard_placement_fn=lambda p: Shard(p.ndim - 1)))
    attempt("container", lambda: fully_shard(nn.ModuleList([nn.Linear(2, 2)])))
    policy: Any = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    object.__setattr__(policy, "param_dtype_override_fn", lambda p: None)  # an argument in torch 2.15
    attempt("override", lambda: fully_shard(nn.Linear(4, 4), mp_policy=policy))
    other = nn.Linear(4, 4)
    other.weight.grad_dtype = torch.bfloat16
    attempt("gradients", lambda: fully_shard(other))
    module = fully_shard(nn.Linear(4, 4))
    attempt("comm", lambda: module.set_custom_all_gather(None))
    attempt("optimizer", lambda: optim.AdamW(nn.Linear(2, 2).parameters()))
    ours = optim.AdamW(module.parameters())
    module(torch.ones(1, 4)).sum().backward()
    ours.step()
    attempt("stock", torch.optim.AdamW(module.parameters()).step)
    attempt("deepcopy", lambda: __import__("copy").deepcopy(module))
    scalar = nn.Module()
    scalar.register_parameter("s", nn.Parameter(torch.ones(())))
    attempt("scalar", lambda: fully_shard(scalar))
    return texts


def gradients_as_torchs() -> dict[str, Any]:
    model, optimizer = _model()
    rank = dist.get_rank()
    weight = model.layers[0].up.weight
    facts: dict[str, Any] = {}
    loss_of(model, 0, 0, rank).backward()
    first = weight.grad
    value = first.full_tensor().clone()
    loss_of(model, 0, 0, rank).backward()
    facts["adds"] = torch.allclose(weight.grad.full_tensor(), 2 * value, rtol=1e-6)
    facts["same_tensor"] = weight.grad is first
    optimizer.zero_grad()
    loss_of(model, 1, 0, rank).backward()
    facts["old_keeps_values"] = torch.allclose(first.full_tensor(), 2 * value, rtol=1e-6) and weight.grad is not first
    facts["replaces"] = not torch.allclose(weight.grad.full_tensor(), 3 * value, rtol=1e-2)
    calls: list[int] = []
    handle = weight.register_post_accumulate_grad_hook(lambda p: calls.append(p is weight and p.grad is not None))
    optimizer.zero_grad()
    loss_of(model, 1, 0, rank).backward()
    facts["hook"] = calls
    handle.remove()
    # Not zeroed after a step: torch goes on adding to what was stepped with.
    before = weight.grad.full_tensor().clone()
    optimizer.step()
    loss_of(model, 2, 0, rank).backward()
    added = weight.grad.full_tensor().clone()
    optimizer.zero_grad()
    loss_of(model, 2, 0, rank).backward()
    facts["carries_over"] = torch.allclose(added, before + weight.grad.full_tensor(), rtol=1e-5, atol=1e-7)
    weight.grad._local_tensor.mul_(0)
    old = weight.full_tensor().clone()
    optimizer.param_groups[0]["weight_decay"] = 0.0
    optimizer.param_groups[0]["betas"] = (0.0, 0.0)
    optimizer.step()
    facts["writes_are_stepped_with"] = torch.equal(weight.full_tensor(), old)
    optimizer.zero_grad()
    loss_of(model, 3, 0, rank).backward()
    weight.grad = None
    old = weight.full_tensor().clone()
    optimizer.step()
    facts["dropped"] = torch.equal(weight.full_tensor(), old)
    facts["commits"] = _counters(model)["commits"]
    return facts


def exception_then_training(where: str) -> dict[str, Any]:
    """The program's own exception in forward or backward, caught; then two steps. As if the failed one had not been."""
    rank = dist.get_rank()
    results = []
    for fail in (False, True):
        model, optimizer = _model()
        fired: list[int] = []
        loss_of(model, 0, 0, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
        if fail:

            class Stop(torch.autograd.Function):
                @staticmethod
                def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                    return x.clone()

                @staticmethod
                def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
                    raise ArithmeticError("mine")

            def stop(module: nn.Module, args: Any) -> Any:
                if where == "forward":
                    raise ArithmeticError("mine")
                return (Stop.apply(args[0]),)

            handle = model.layers[1].down.register_forward_pre_hook(stop)
            try:
                loss_of(model, 9, 0, rank).backward()
            except ArithmeticError:
                fired.append(1)
            handle.remove()
            optimizer.zero_grad()
        losses = []
        for step in range(1, 4):
            loss = loss_of(model, step, 0, rank)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        results.append((losses, len(fired), _counters(model)["attaches"], _counters(model)["commits"]))
    return {"plain": results[0], "failed": results[1]}


def module_used_twice(impl: str) -> list[float]:
    if impl == "shardd":
        from shardd.torch import fully_shard
        from shardd.torch.optim import AdamW
    else:
        from torch.distributed.fsdp import fully_shard
        from torch.optim import AdamW
    torch.manual_seed(3)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(6, 6)
            self.b = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(torch.tanh(self.a(torch.tanh(self.b(torch.tanh(self.a(x)))))))

    model = Twice()
    fully_shard(model.a)
    fully_shard(model.b)
    fully_shard(model)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(4):
        torch.manual_seed(10 * step + dist.get_rank())
        loss = model(torch.randn(3, 6)).pow(2).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def both_used_twice() -> tuple[list[float], list[float]]:
    return module_used_twice("torch"), module_used_twice("shardd")


def load_and_evaluate() -> dict[str, Any]:
    """state_dict, load_state_dict before and after registration, evaluation without gradients, schedulers."""
    rank = dist.get_rank()
    model, optimizer = _model()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    facts: dict[str, Any] = {}
    start = {n: v.full_tensor().clone() for n, v in model.state_dict().items() if hasattr(v, "full_tensor")}
    for step in range(2):
        loss_of(model, step, 0, rank).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    facts["lr"] = optimizer.param_groups[0]["lr"]
    kept = {n: v.clone() if torch.is_tensor(v) else v for n, v in model.state_dict().items()}
    with torch.no_grad():
        first = loss_of(model, 7, 0, 0).item()
    loss_of(model, 5, 0, rank).backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        other = loss_of(model, 7, 0, 0).item()
    model.load_state_dict(kept)
    with torch.no_grad():
        again = loss_of(model, 7, 0, 0).item()
    facts["moved"] = other != first
    facts["loaded"] = again == first
    facts["changed"] = any(
        not torch.equal(start[n], v.full_tensor()) for n, v in model.state_dict().items() if n in start
    )
    loss_of(model, 6, 0, rank).backward()
    optimizer.step()
    facts["commits"] = _counters(model)["commits"]
    saved = torch.load(_save(model), weights_only=False)
    facts["saved"] = all(
        torch.equal(saved[n].to_local(), v.to_local()) for n, v in model.state_dict().items() if n in start
    )
    facts["bytes"] = os.path.getsize(_save({"gate": model.state_dict()["layers.0.gate"]}))
    optimizer_state = optimizer.state_dict()
    optimizer.load_state_dict(optimizer_state)
    return facts


def _save(value: Any) -> str:
    path = f"/dev/shm/shardd-test-{os.getpid()}.pt"
    torch.save(value.state_dict() if isinstance(value, nn.Module) else value, path)
    return path


class _Rows(torch.utils.data.Dataset[Any]):
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        tokens, targets = batch(index, 0, self.rank)
        return tokens.clone(), targets.clone()


def dataloader_workers(method: str) -> dict[str, Any]:
    """Workers made while the model is registered; they end, and training goes on."""
    model, optimizer = _model()
    rank = dist.get_rank()
    loss_of(model, 0, 0, rank).backward()
    optimizer.step()
    optimizer.zero_grad()
    losses = []
    for _ in range(2):
        loader = torch.utils.data.DataLoader(
            _Rows(rank), batch_size=None, num_workers=2, multiprocessing_context=method
        )
        for tokens, targets in loader:
            loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return {"losses": losses, "counters": _counters(model)}


def _train(model: Any, optimizer: Any, steps: range, forward: Any = None) -> list[float]:
    losses = []
    for step in steps:
        loss = loss_of(forward or model, step, 0, dist.get_rank())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def ways_of_setting_up(impl: str) -> dict[str, list[float]]:
    """Losses of four steps for each way; the same program on torch's fully_shard and on shardd's."""
    from torch.distributed.fsdp import register_fsdp_forward_method

    if impl == "shardd":
        from shardd.torch import fully_shard
        from shardd.torch.optim import SGD
    else:
        from torch.distributed.fsdp import fully_shard
        from torch.optim import SGD
    out: dict[str, list[float]] = {}

    def sharded(**kwargs: Any) -> Model:
        model = build(Case())
        for layer in model.layers:
            fully_shard(layer, **kwargs)
        return fully_shard(model, **kwargs)

    def run(name: str, model: Any, forward: Any = None, optimizer: Any = None) -> None:
        out[name] = _train(
            model, optimizer or SGD([p for p in model.parameters() if p.requires_grad], lr=0.1), range(4), forward
        )

    # Parameters that fully_shard leaves alone keep their own optimizer.
    model = build(Case())
    ignored = {model.embed.weight}
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model, ignored_params=ignored)
    run("ignored", model, optimizer=SGD([p for p in model.parameters() if p not in ignored], lr=0.1))
    # On meta, then materialised and given values.
    values = {n: v.clone() for n, v in build(Case()).state_dict().items()}
    with torch.device("meta"):
        model = build(Case())
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device="cpu")
    from torch.distributed.tensor import distribute_tensor

    for name, parameter in model.named_parameters():
        parameter.data.copy_(distribute_tensor(values[name], parameter.device_mesh, parameter.placements))
    model.bias.copy_(values["bias"])
    run("meta", model)
    # load_state_dict(assign=True), which unties what was tied, before the first use and after it.
    model = build(Case(tie=True))
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    model.load_state_dict({n: v * 1.5 for n, v in model.state_dict().items()}, assign=True)
    run("assigned", model)
    model.load_state_dict({n: v * 1.5 for n, v in model.state_dict().items()}, assign=True)
    with torch.no_grad():
        out["assigned"].append(loss_of(model, 8, 0, 0).item())
    model.reshard()
    out["assigned"].append(sum(p.detach().full_tensor().sum().item() for p in model.parameters()))
    # First use without gradients, in inference mode (torch cannot go on from there); model.to() that changes nothing; a
    # method that is a forward.
    model = sharded()
    optimizer = SGD(model.parameters(), lr=0.1)
    with torch.inference_mode() if impl == "shardd" else torch.no_grad():
        loss_of(model, 9, 0, 0)
    run("inference", model, optimizer=optimizer)
    model.to("cpu").float()
    out["to"] = _train(model, optimizer, range(4, 6))
    model = sharded()
    model.scored = type(model).forward.__get__(model)  # type: ignore[assignment]
    register_fsdp_forward_method(model, "scored")
    run("method", model, forward=model.scored)
    # Unsharded by hand, kept after backward, resharded by hand.
    model = sharded(reshard_after_forward=False)
    model.set_reshard_after_backward(False)
    handle = model.layers[0].unshard(async_op=True)
    handle.wait()
    model.set_modules_to_forward_prefetch([model.layers[0]])
    model.set_modules_to_backward_prefetch([model.layers[1]])
    optimizer = SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(4):
        loss = loss_of(model, step, 0, dist.get_rank())
        loss.backward()
        for module in [*model.layers, model]:
            module.reshard()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        losses.append(loss.item())
    out["by-hand"] = losses
    # Loss scaling.
    model = sharded()
    optimizer = SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0, growth_interval=2)
    losses = []
    for step in range(4):
        loss = loss_of(model, step, 0, dist.get_rank())
        scaler.scale(loss * (float("inf") if step == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses += [loss.item(), scaler.get_scale()]
    out["scaler"] = losses
    return out


def both_ways() -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    return ways_of_setting_up("torch"), ways_of_setting_up("shardd")


def policies() -> dict[str, Any]:
    import functools

    from torch.distributed.fsdp.wrap import (
        CustomPolicy,
        ModuleWrapPolicy,
        size_based_auto_wrap_policy,
        transformer_auto_wrap_policy,
    )

    from models import Block
    from shardd.torch import fully_shard

    out = {}
    for name, policy in {
        "class": Block,
        "classes": {Block, nn.Embedding},
        "module-wrap": ModuleWrapPolicy({Block}),
        "custom": CustomPolicy(lambda m: isinstance(m, Block)),
        "function": lambda m: isinstance(m, nn.Linear),
        "transformer": functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
        "size": functools.partial(size_based_auto_wrap_policy, min_num_params=400),
    }.items():
        model = fully_shard(build(Case()), policy=policy)
        out[name] = sorted(n for n, m in model.named_modules() if type(m).__name__.startswith("FSDP"))
    return out


def clip_in_the_daemon() -> dict[str, Any]:
    from shardd.torch import clip_grad_norm_

    rank = dist.get_rank()
    results = []
    for way in ("torch", "ours", "daemon"):
        model, optimizer = _model()
        norms = []
        for step in range(3):
            loss_of(model, step, 0, rank).backward()
            if way == "daemon":
                optimizer.step(max_grad_norm=0.2)
                norms.append(optimizer.last_grad_norm)
            else:
                if way == "torch":
                    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.2).full_tensor()
                else:
                    norm = clip_grad_norm_(model.parameters(), 0.2)
                norms.append(norm.item())
                optimizer.step()
            optimizer.zero_grad()
        results.append((norms, {n: p.full_tensor().clone() for n, p in model.named_parameters()}))
    infinite = _model()[0]
    loss_of(infinite, 0, 0, rank).backward()
    want = max(p.grad.full_tensor().abs().max().item() for p in infinite.parameters())  # torch cannot: empty shards
    got = clip_grad_norm_(infinite.parameters(), 1e9, norm_type=float("inf")).item()
    return {"results": results, "infinite": (got, want)}


def unused_on_one_rank(declare: bool) -> dict[str, Any]:
    """Rank 1 leaves a block out of its forward; with set_reduce_scatter_unused_params that is a zero."""
    import shardd

    model, optimizer = _model()
    rank = dist.get_rank()
    model.set_reduce_scatter_unused_params(declare)
    if rank == 1:
        model.order = [0, 2]
    losses = []
    try:
        losses = _train(model, optimizer, range(3))
    except shardd.Error as error:
        return {"losses": losses, "error": str(error)}
    return {"losses": losses, "error": "", "weight": model.layers[1].up.weight.full_tensor().clone()}


def plan_of_a_model() -> dict[str, Any]:
    from shardd.torch import fully_shard, memory_plan
    from shardd.torch.optim import AdamW

    model = build(Case())
    shard(model, Case(), fully_shard)
    optimizer = AdamW(model.parameters())
    plan = memory_plan(model, 8)
    del optimizer  # the plan counts its state while it is there
    return plan


def stock_optimizer(impl: str, kind: str) -> dict[str, Any]:
    """A torch optimizer on the shards, in-place edits between passes, ranks that drift apart."""
    if impl == "shardd":
        from shardd.torch import fully_shard
    else:
        from torch.distributed.fsdp import fully_shard
    rank = dist.get_rank()
    model = build(Case())
    shard(model, Case(), fully_shard)
    optimizer = {
        "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
        "foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    }[kind](model.parameters())
    average = {n: p.detach().clone() for n, p in model.named_parameters()}
    losses = []
    for step in range(5):
        loss = loss_of(model, step, 0, rank)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if step % 2 == rank:
            time.sleep(0.05)  # one rank is late, in turn; nothing may come of it
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.clamp_(-0.9, 0.9)
                average[name].mul_(0.9).add_(parameter, alpha=0.1)
            kept = {n: p.detach().clone() for n, p in model.named_parameters()}
            for name, parameter in model.named_parameters():  # the average around an evaluation
                parameter.data.copy_(average[name])
            losses.append(loss_of(model, 50, 0, 0).item())
            model.reshard()  # torch leaves the root unsharded after a forward
            for name, parameter in model.named_parameters():
                parameter.copy_(kept[name])
        losses.append(loss.item())
    state = {n: v.clone() if torch.is_tensor(v) else v for n, v in model.state_dict().items()}
    loss_of(model, 60, 0, rank).backward()
    optimizer.step()
    optimizer.zero_grad()
    model.load_state_dict(state)
    with torch.no_grad():
        losses.append(loss_of(model, 61, 0, 0).item())
    out: dict[str, Any] = {"losses": losses}
    if impl == "shardd":
        out["counters"] = _counters(model)
    return out


def both_with_stock_optimizer(kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    return stock_optimizer("torch", kind), stock_optimizer("shardd", kind)
