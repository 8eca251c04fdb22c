"""FullyShardedDataParallel against torch's own and against the unsharded model. Each function runs on every rank."""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)
from torch.distributed.optim import _apply_optimizer_in_backward

from models import Block, Case, Model, build, end_and_count, loss_of, make_optimizer, train_alone


@dataclass
class WrapperCase(Case):
    """What the wrapper has beside what ``fully_shard`` has."""

    orig: bool = True
    policy: str = "module"
    strategy: str = "FULL_SHARD"
    options: dict[str, Any] = field(default_factory=dict)


def policy_of(case: WrapperCase, model: Model) -> Any:
    return {
        "none": None,
        "module": ModuleWrapPolicy({Block}),
        "custom": CustomPolicy(
            lambda m: (
                {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP} if m is model.layers[0] else type(m) is Block
            )
        ),
        "mixed": CustomPolicy(
            lambda m: {"sharding_strategy": ShardingStrategy.NO_SHARD} if m is model.layers[0] else type(m) is Block
        ),
        "transformer": functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
        "size": functools.partial(size_based_auto_wrap_policy, min_num_params=300),
        "lambda": functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda m: type(m) is Block),
    }[case.policy]


def wrap_model(case: WrapperCase, wrapper: Any) -> nn.Module:
    model = build(case)
    arguments: dict[str, Any] = {
        "auto_wrap_policy": policy_of(case, model),
        "sharding_strategy": ShardingStrategy[case.strategy],
        "use_orig_params": case.orig,
        "device_id": torch.device("cpu"),
        **case.options,
    }
    if case.mesh:
        arguments["device_mesh"] = dist.init_device_mesh("cpu", case.mesh, mesh_dim_names=("replicate", "shard"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return wrapper(model, **arguments)


def compose(case: WrapperCase) -> nn.Module:
    from shardd.torch import fully_shard

    model = build(case)
    strategy = ShardingStrategy[case.strategy]
    return fully_shard(model, policy={Block}, layout="flat", strategy=strategy, device_id=torch.device("cpu"))


def full_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Clean names and whole values, by what each module computes with: its parameters while it runs."""
    found: dict[str, torch.Tensor] = {}
    handles = []
    for name, module in model.named_modules():
        clean = ".".join(part for part in name.split(".") if part != "_fsdp_wrapped_module")

        def look(module: nn.Module, args: Any, clean: str = clean) -> None:
            for attribute in ("weight", "bias", "gate"):
                value = module.__dict__.get(attribute, module._parameters.get(attribute))
                if isinstance(value, torch.Tensor) and attribute not in module._buffers and clean:
                    found[f"{clean}.{attribute}"] = value.detach().clone()

        if not hasattr(module, "_fsdp_wrapped_module") or "_fsdp_wrapped_module" not in module._modules:
            handles.append(module.register_forward_pre_hook(look))
    with torch.no_grad():
        loss_of(model, 0, 0, dist.get_rank())
    for handle in handles:
        handle.remove()
    return found


def _optimizer(model: nn.Module, case: WrapperCase, adamw: Any, sgd: Any) -> Any:
    if case.optimizer != "groups":
        return make_optimizer(model, case, adamw, sgd)
    # As make_optimizer, by name: pieces have one dimension.
    wide, narrow = [], []
    for name, parameter in model.named_parameters():
        is_wide = name.endswith(("up.weight", "down.weight", "embed.weight", "head.weight"))
        (wide if is_wide else narrow).append(parameter)
    return adamw([{"params": wide, "weight_decay": 0.1}, {"params": narrow, "weight_decay": 0.0, "lr": 3e-2}], lr=1e-2)


def train(case: WrapperCase, impl: str) -> dict[str, Any]:
    if impl == "shardd":
        from shardd.torch import FullyShardedDataParallel as Wrapper
    else:
        Wrapper = TorchFSDP
    if impl == "shardd" and not case.stock:
        from shardd.torch.optim import SGD, AdamW
    else:
        from torch.optim import SGD, AdamW
    rank = dist.get_rank()
    model = wrap_model(case, Wrapper)
    if case.extra.get("composable") and impl == "shardd":
        model = compose(case)
    before = dict(model.named_parameters())
    optimizer = _optimizer(model, case, AdamW, SGD)
    losses, norms = [], []
    for step in range(case.steps):
        for micro in range(case.accumulate):
            last = micro == case.accumulate - 1
            with model.no_sync() if not case.sync and not last else torch.enable_grad():
                loss = loss_of(model, step, micro, rank) / case.accumulate
                loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    after = dict(model.named_parameters())
    result: dict[str, Any] = {
        "losses": losses,
        "norms": norms,
        "same_objects": all(after[name] is before[name] for name in before),
        "names": list(after),
        "numel": sum(p.numel() for p in after.values()),
        "parameters": full_parameters(model),
    }
    if impl == "shardd":
        result["counters"] = end_and_count(model)
    return result


def compare_all(cases: list[WrapperCase]) -> list[dict[str, Any]]:
    return [compare(case) for case in cases]


def compare(case: WrapperCase) -> dict[str, Any]:
    """On every rank: shardd, torch's own wrapper, and the unsharded model."""
    return {
        "torch": train(case, "torch") if not case.extra.get("not_torch") else None,
        "shardd": train(case, "shardd"),
        "alone": train_alone(case, dist.get_world_size()) if dist.get_rank() == 0 else None,
    }


def optimizer_in_backward() -> dict[str, Any]:
    """torch.distributed.optim steps each parameter within the backward; beside one optimizer after it."""
    from shardd.torch import FullyShardedDataParallel, commit, counters

    inside, after = (wrap_model(WrapperCase(orig=True), FullyShardedDataParallel) for _ in range(2))
    _apply_optimizer_in_backward(torch.optim.SGD, inside.parameters(), {"lr": 0.1})
    optimizer = torch.optim.SGD(after.parameters(), lr=0.1)
    start = [p.detach().clone() for p in inside.parameters()]
    for step in range(3):
        for model in (inside, after):
            loss_of(model, step, 0, dist.get_rank()).backward()
        optimizer.step()
        optimizer.zero_grad()
    commit(inside)
    pairs = list(zip(inside.parameters(), after.parameters()))
    return {
        "moved": all(p.numel() == 0 or not torch.equal(p, before) for p, before in zip(inside.parameters(), start)),
        "alike": all(torch.equal(p, other) for p, other in pairs),
        "dropped": all(p.grad is None for p, _ in pairs),
        "commits": counters(inside)["commits"],
    }


def flat_parameters_in_odd_places() -> dict[str, Any]:
    """What a FlatParameter has to survive: a broadcast of the model, checkpoint wrappers, wrappers around wrappers."""
    from shardd.torch import FullyShardedDataParallel as Wrapper
    from shardd.torch import counters

    facts: dict[str, Any] = {}
    torch.manual_seed(dist.get_rank())
    twice = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)))
    twice.append(twice[1])  # one module under two names
    given = {name: value.clone() for name, value in twice.state_dict().items()}
    for value in given.values():
        dist.broadcast(value, 0)
    model: Any = Wrapper(twice, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), sync_module_states=True)
    saved = model.state_dict()
    facts["synced"] = list(saved) == list(given) and all(torch.equal(saved[name], given[name]) for name in given)
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, nn.Linear))
    model.load_state_dict({name: value + 1 for name, value in given.items()})
    later = model.state_dict()
    facts["loaded"] = list(later) == list(given) and all(torch.equal(later[name], given[name] + 1) for name in given)
    before = Wrapper(checkpoint_wrapper(nn.Linear(4, 4)))
    before.load_state_dict({"weight": torch.ones(4, 4), "bias": torch.ones(4)})
    with Wrapper.summon_full_params(before):
        facts["wrapped_before"] = [float(p.sum()) for p in before.parameters()] == [16.0, 4.0]
    around: Any = Wrapper(Wrapper(nn.Linear(4, 4)))
    around(torch.ones(2, 4)).sum().backward()
    facts["around"] = [p.grad is not None for p in around.parameters()] == [True]
    facts["daemon"] = counters(around)["reductions"] == 1
    return facts


class _Dtypes(nn.Module):
    """Parameters of three dtypes, one of them frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 7)
        self.low = nn.Linear(7, 5).bfloat16()
        self.high = nn.Linear(5, 3).half()
        self.first.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.high(self.low(self.first(x).bfloat16()).half()).float()


def several_dtypes(orig: bool) -> dict[str, Any]:
    """In one unit, which torch refuses: beside the unsharded model, of which all ranks have the same batches."""
    from shardd.torch import FullyShardedDataParallel, counters
    from shardd.torch.wrap import always_wrap_policy

    alone = _Dtypes()
    reference = torch.optim.SGD([p for p in alone.parameters() if p.requires_grad], lr=0.1)
    units = {name: FullyShardedDataParallel(_Dtypes(), use_orig_params=orig, auto_wrap_policy=policy)
             for name, policy in (("one", None), ("each", always_wrap_policy))}  # fmt: skip
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in units.values()]
    losses: dict[str, list[float]] = {"alone": [], **{name: [] for name in units}}
    for step in range(3):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
        for name, model in {"alone": alone, **units}.items():
            loss = model(x).square().mean()
            loss.backward()
            losses[name].append(loss.item())
        for optimizer in (reference, *optimizers):
            optimizer.step()
            optimizer.zero_grad()
    want = alone.state_dict()
    saved = units["one"].state_dict()
    return {
        "losses": losses,
        "alike": {n: saved[n].dtype == v.dtype and torch.allclose(saved[n], v, rtol=1e-6 if v.dtype == torch.float32 else 1e-2)
                  for n, v in want.items()},
        "dtypes": [str(p.dtype) for p in units["one"].parameters()],
        "counters": counters(units["one"]),
    }  # fmt: skip
