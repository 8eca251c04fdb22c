"""What ranks do in tests of things that come late: a rank that notices, a parameter that is trained, a hidden output."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from sharding.wrapper_beside import Net, batch, wrapped
from state_dicts.wrapper_state_cases import face, finished, quiet


def noticed_late() -> str:
    """An attribute differs; rank 0 is slow to return from its first commit, after which both notice."""
    from shardd.torch import FullyShardedDataParallel as Wrapper
    from shardd.torch._job import opening

    rank = dist.get_rank()
    commits = opening.write_values

    def in_turn(engine: Any, values: Any, progress: Any) -> None:
        commits(engine, values, progress)
        until = time.monotonic() + 2
        while (
            rank == 0 and time.monotonic() < until
        ):  # in the commit that has come about: an abort may still be its answer
            if int(json.loads(engine.describe())["epoch"]) != engine.info()["epoch"]:
                raise RuntimeError("the other rank has left")
            time.sleep(0.01)

    opening.write_values = in_turn
    try:
        Wrapper(nn.Sequential(nn.Linear(4, 4)), limit_all_gathers=rank == 0)(torch.ones(1, 4))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _loss(model: nn.Module, step: int) -> torch.Tensor:
    return model(batch(step)).pow(2).mean()


def _frozen(model: nn.Module, names: tuple[str, ...]) -> list[nn.Parameter]:
    return [p for n, p in model.named_parameters() if n.replace("_fsdp_wrapped_module.", "").startswith(names)]


def _whole(impl: str, model: nn.Module, gradients: bool) -> dict[str, Any]:
    if impl == "alone":
        return {n: [p.detach().clone(), p.grad.clone() if gradients else 0] for n, p in model.named_parameters()}
    with face(impl).summon_full_params(model, with_grads=gradients):
        return {n: [p.detach().clone(), p.grad.clone() if gradients else 0] for n, p in model.named_parameters()}


def _unfreezes(impl: str, orig: bool, names: tuple[str, ...], own: bool) -> dict[str, Any]:
    """A backward, then ``names`` are unfrozen with its gradients there, another backward, a step; and one more."""
    bare = Net()
    for param in _frozen(bare, names):
        param.requires_grad_(False)
    if impl == "alone":
        model: Any = bare
    else:
        model = _wrap(impl, bare, orig)
    from torch.optim import AdamW

    if own and impl == "shardd":
        from shardd.torch.optim import AdamW  # type: ignore[assignment]
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)

    def backward(step: int) -> float:
        loss = _loss(model, step)
        loss.backward()
        if impl == "alone":
            for param in model.parameters():
                if param.grad is not None:
                    before = param.__dict__.get("reduced", torch.zeros_like(param))
                    new = param.grad - before
                    dist.all_reduce(new)
                    param.grad = before + new / dist.get_world_size()
                    param.__dict__["reduced"] = param.grad.clone()
        return loss.item()

    losses = [backward(0)]
    added = _frozen(model, names) if orig or impl == "alone" else list(model.blocks.parameters())
    for param in added:
        param.requires_grad_(True)
    optimizer.add_param_group({"params": added})
    losses.append(backward(1))
    out = {"gradients": _whole(impl, model, orig)}
    optimizer.step()
    optimizer.zero_grad()
    for param in model.parameters():
        param.__dict__.pop("reduced", None)
    losses.append(backward(2))
    optimizer.step()
    out |= {"losses": losses, "after": _whole(impl, model, False)}
    if impl == "shardd":
        finished(model)
    return out


def _wrap(impl: str, bare: nn.Module, orig: bool) -> Any:
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    return face(impl)(bare, device_id=torch.device("cpu"), use_orig_params=orig,
                      auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}))  # fmt: skip


def unfrozen_with_gradients() -> dict[str, Any]:
    """A whole unit in both forms, and parts of units, whose pieces change: beside the unsharded model and torch's wrapper."""
    out = {}
    with quiet():
        for name, orig, names in (("FlatParameter", False, ("blocks",)), ("unit", True, ("blocks",)),
                                  ("parts", True, ("into.weight", "blocks.0.weight", "head.bias"))):  # fmt: skip
            out[name] = {"alone": _unfreezes("alone", True, names, False)}
            for own in (True, False):
                out[name]["daemon" if own else "stock"] = _unfreezes("shardd", orig, names, own)
    return out


class _Hidden:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class Hides(nn.Module):
    """Its output is no structure of tensors."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.how = how

    def forward(self, x: torch.Tensor) -> Any:
        value = self.last(torch.tanh(self.first(x)))
        if self.how == "object":
            return _Hidden(value)
        if self.how == "generator":
            return (item for item in (value,))
        return (lambda: value) if self.how == "function" else value


def _value(output: Any) -> torch.Tensor:
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, _Hidden):
        return output.value
    found: torch.Tensor = next(output) if isinstance(output, Iterator) else output()
    return found


def _steps(make: Callable[[nn.Module], Any], how: str) -> list[Any]:
    model = make(Hides(how))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    seen: list[Any] = []
    for step in range(3):
        loss = _value(model(batch(step)[:, :4])).pow(2).mean()
        loss.backward()
        seen.append(loss.item())
        seen.append(
            [None if p.grad is None else getattr(p.grad, "_local_tensor", p.grad).clone() for p in model.parameters()]
        )
        optimizer.step()
        optimizer.zero_grad()
    return seen


def hidden_outputs() -> dict[str, dict[str, list[Any]]]:
    """By face, by kind of output: losses and gradients of some steps of a lone root."""
    from shardd.torch import FullyShardedDataParallel as Wrapper
    from shardd.torch import fully_shard

    faces = {
        "fully_shard": fully_shard,
        "reshards": lambda module: fully_shard(module, reshard_after_forward=True),
        "flat": lambda module: Wrapper(module, device_id=torch.device("cpu")),
        "orig": lambda module: Wrapper(module, device_id=torch.device("cpu"), use_orig_params=True),
    }
    out: dict[str, dict[str, list[Any]]] = {}
    with quiet():
        for name, make in faces.items():
            out[name] = {}
            for how in ("tensor", "object", "generator", "function"):
                try:
                    out[name][how] = _steps(make, how)
                except RuntimeError as error:
                    out[name][how] = [str(error)]
    return out


def stand_ins() -> dict[str, str]:
    """Process groups without processes behind them."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from shardd.torch import FullyShardedDataParallel as Wrapper
    from shardd.torch import fully_shard

    class Stub(dist.ProcessGroup):
        def size(self) -> int:
            return 1

    class Mock:
        def rank(self) -> int:
            return 0

    def attempt(use: Callable[[], Any]) -> str:
        try:
            use()
        except (ValueError, RuntimeError) as error:
            return str(error)
        return ""

    texts = {
        "mock": attempt(lambda: Wrapper(nn.Linear(2, 2), process_group=Mock())),
        "stub": attempt(lambda: Wrapper(nn.Linear(2, 2), process_group=Stub(0, 1))),
    }
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    texts["fake wrapper"] = attempt(lambda: Wrapper(nn.Linear(2, 2))(torch.ones(1, 2)))
    texts["fake"] = attempt(lambda: fully_shard(nn.Linear(2, 2))(torch.ones(1, 2)))
    dist.destroy_process_group()
    return texts


def stored_beside_full_parameters() -> str:
    """Rank 0 has the full parameters; another stores into its piece meanwhile."""
    from shardd.torch.optim import SGD

    model = wrapped("shardd", True)
    _optimizer = SGD(model.parameters(), lr=0.1)  # the daemon's: what is stored is found
    _loss(model, 0).backward()
    try:
        with face("shardd").summon_full_params(model, rank0_only=True, writeback=False), torch.no_grad():
            for param in model.parameters() if dist.get_rank() == 1 else ():
                if param.numel():
                    param.add_(1)
                    break
        model.state_dict()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def ignored_beside_a_flat_parameter() -> list[list[str]]:
    """Names of a full state dict where some parameters of modules are ignored: torch's and ours."""
    names = []
    with quiet():
        for impl in ("torch", "shardd"):
            bare = Net()
            kept = [bare.norm.weight, bare.head.bias]
            names.append(list(face(impl)(bare, device_id=torch.device("cpu"), ignored_states=kept).state_dict()))
    return names
