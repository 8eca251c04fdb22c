"""What test_install.py runs on ranks, in processes that it may change as a whole."""

from __future__ import annotations

import importlib
import signal
import sys
import types
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import nn

BEFORE = (  # modules of PyTorch that hold the names, loaded before install
    "torch.distributed.fsdp",
    "torch.distributed.fsdp._fully_shard",
    "torch.distributed.fsdp._fully_shard._fully_shard",
    "torch.distributed.fsdp.fully_sharded_data_parallel",
    "torch.distributed._composable.fsdp",
)
AFTER = ("torch.distributed.pipelining.stage", "torch.distributed.pipelining.schedules")
NAMES = ("fully_shard", "FSDPModule", "FullyShardedDataParallel", "FSDP")


def _bindings(modules: tuple[str, ...]) -> dict[str, Any]:
    found = {}
    for module in modules:
        held = vars(importlib.import_module(module))
        found.update({f"{module}.{name}": held[name] for name in NAMES if name in held})
    return found


def swap_and_back() -> dict[str, Any]:
    """Everything of ``_bindings`` before, while installed and after; and what is left alone."""
    assert not any(name in sys.modules for name in AFTER)
    stock = _bindings(BEFORE)
    user = types.ModuleType("a_library")  # that has imported the function under its own name, at its top
    user.shard = torch.distributed.fsdp.fully_shard
    sys.modules["a_library"] = user
    import shardd.torch

    chosen = types.ModuleType("on_purpose")
    chosen.fully_shard = shardd.torch.fully_shard
    sys.modules["on_purpose"] = chosen
    ours = {"fully_shard": shardd.torch.fully_shard, "FSDPModule": shardd.torch.FSDPModule}
    ours["FullyShardedDataParallel"] = ours["FSDP"] = shardd.torch.FullyShardedDataParallel

    listed = shardd.torch.install()
    again = shardd.torch.install()
    during = _bindings(BEFORE + AFTER)
    result = {
        "swapped": all(value is ours[name.rpartition(".")[2]] for name, value in during.items()),
        "checked": len(during),
        "listed": all(name in shardd.torch.swapped() for name in during),
        "same_again": listed == again,
        "user": user.shard is shardd.torch.fully_shard,
        "replicate": importlib.import_module(
            "torch.distributed._composable.replicate_with_fsdp"
        ).ReplicateModule.__mro__[1]
        is stock["torch.distributed.fsdp.FSDPModule"],
        "shared": shardd.torch.MixedPrecisionPolicy is torch.distributed.fsdp.MixedPrecisionPolicy,
    }
    shardd.torch.uninstall()
    after = _bindings(BEFORE + AFTER)
    result["back"] = all(after[name] is value for name, value in stock.items()) and not shardd.torch.swapped()
    result["later_back"] = all(
        value is stock[f"torch.distributed.fsdp.{name.rpartition('.')[2]}"]
        for name, value in after.items()
        if name.startswith(AFTER)
    )
    result["user_back"] = user.shard is stock["torch.distributed.fsdp.fully_shard"]
    result["purpose_kept"] = chosen.fully_shard is shardd.torch.fully_shard
    return result


def _model() -> nn.Module:
    torch.manual_seed(2)
    model = nn.Linear(6, 4)
    torch.distributed.fsdp.fully_shard(model)
    return model


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def optimizers() -> dict[str, Any]:
    """Who steps what the program builds, and what it is to the program; references taken before are the same classes."""
    kept = {"adamw": torch.optim.AdamW}
    import shardd.torch

    classes = ("Adam", "AdamW", "SGD", "Adagrad", "RMSprop")
    before = {kind: dict(vars(kind)) for kind in (getattr(torch.optim, name) for name in classes)}
    shardd.torch.install()
    from torch.optim import SGD, AdamW

    class Own(AdamW):
        pass

    def updated(make: Any, **more: Any) -> bool:
        model = _model()
        optimizer = make(model, **more)
        _step(model, optimizer)
        shardd.torch.commit(model)
        dist.barrier()
        return shardd.torch.counters(model)["bytes_updated"] > 0

    model = _model()
    adamw = AdamW([{"params": list(model.parameters()), "weight_decay": 0.1}], lr=0.5)
    _step(model, adamw)
    beside = nn.Linear(2, 2)
    plain = AdamW(beside.parameters(), lr=0.1)
    beside(torch.ones(1, 2)).sum().backward()
    plain.step()
    result = {
        "class": type(adamw) is torch.optim.AdamW is kept["adamw"] and type(AdamW) is type,
        "group": adamw.param_groups[0]["weight_decay"],
        "bias": model.bias.full_tensor().tolist(),
        "steps": shardd.torch.counters(model)["commits"],
        "plain": len(plain.state),
        "daemon": {
            "generator in a group": updated(lambda m: AdamW([{"params": m.parameters()}], lr=0.5)),
            "names": updated(lambda m: SGD(m.named_parameters(), lr=0.1)),
            "kept": updated(lambda m: kept["adamw"](m.parameters())),
            "adagrad": updated(lambda m: torch.optim.Adagrad(m.parameters(), initial_accumulator_value=0.1)),
            "rmsprop": updated(lambda m: torch.optim.RMSprop(m.parameters(), momentum=0.9)),
            "centered": updated(lambda m: torch.optim.RMSprop(m.parameters(), centered=True)),
            "three states": updated(lambda m: torch.optim.RMSprop(m.parameters(), centered=True, momentum=0.9)),
        },
        "trainers": {
            "refused": updated(
                lambda m: AdamW([{"params": [m.weight]}, {"params": [m.bias], "amsgrad": True}], lr=0.1)
            ),
            "beside": updated(lambda m: SGD([*m.parameters(), *nn.Linear(2, 2).parameters()], lr=0.1)),
            "derived": updated(lambda m: Own(m.parameters())),
        },
    }
    shardd.torch.uninstall()
    result["back"] = all(dict(vars(kind)) == was for kind, was in before.items())
    shardd.torch.install(optimizers=False)
    result["trainers"]["stock"] = updated(lambda m: AdamW(m.parameters()))
    shardd.torch.uninstall()
    return result


class Shell(torch.optim.Optimizer):
    """Stands for another optimizer and has nothing of its own, as accelerate's does."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.inner.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)


class Sharing(torch.optim.Optimizer):
    """Has all of another optimizer's attributes, as Lightning's does."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.__dict__ = {**vars(inner), "inner": inner}

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


class Copying(torch.optim.Optimizer):
    """Has a list of its own of another optimizer's groups, and nothing that PyTorch's constructor gives; it lists that one."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups = [inner], list(inner.param_groups)

    def step(self, closure: Any = None) -> Any:
        return self.inner[0].step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner[0].zero_grad(set_to_none)


def shells() -> dict[str, Any]:
    """Training through optimizers that stand for others, and what the job knows of them."""
    import shardd.torch
    from shardd.torch._torch_optimizers.live_optimizers import optimizers_of

    shardd.torch.install()
    outcome = {}
    for kind in (Shell, Sharing, Copying):
        model = _model()
        inner = torch.optim.AdamW(model.parameters(), lr=0.5)
        shell = kind(inner)
        for _ in range(2):
            _step(model, shell)
        shardd.torch.commit(model)
        found = optimizers_of(model.parameters(), but_not=lambda _: False)
        outcome[kind.__name__] = {
            "found": [optimizer is inner for optimizer in found],
            "commits": shardd.torch.counters(model)["commits"],
            "bias": model.bias.full_tensor().tolist(),
        }
    shardd.torch.uninstall()
    return outcome


def handlers_put_back() -> dict[str, Any]:
    """Signals reset as Lightning does it; then parameters are written in place, and by an optimizer."""
    import shardd.torch

    model = _model_of_shardd()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    _step(model, optimizer)
    model(torch.ones(2, 6)).sum().backward()
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    with torch.no_grad():
        model.bias.to_local().fill_(3.0)
    optimizer.zero_grad()
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    _step(model, optimizer)
    shardd.torch.commit(model)
    return {"bias": model.bias.full_tensor().tolist()}


def _model_of_shardd() -> nn.Module:
    import shardd.torch

    torch.manual_seed(2)
    model = nn.Linear(6, 4)
    shardd.torch.fully_shard(model)
    return model
