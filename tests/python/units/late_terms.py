"""Terms of the loss that autograd adds to `.grad` while the daemon adds to the job's gradients: what is in both stays."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from state_dicts.wrapper_state_cases import face


def _sharded(impl: str, width: int, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    if impl == "shardd":
        from shardd.torch import fully_shard
    else:
        from torch.distributed.fsdp import fully_shard
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width, bias=False))
    net.to(dtype)
    for module in (net[0], net[2], net):
        fully_shard(module)
    return net


def _input(step: int, width: int) -> torch.Tensor:
    x = torch.randn(3, width, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
    return x.requires_grad_(True)  # all layers submit before autograd comes to the term


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _term(net: nn.Module, hook: Callable[[], None] | None = None) -> torch.Tensor:
    """Of this rank's shards. `hook` runs in backward, before any of it is added to `.grad`."""
    term = sum((_local(param) ** 2).sum() for param in net.parameters())
    assert isinstance(term, torch.Tensor)
    if hook is not None:
        term.register_hook(lambda _: hook())
    return term


def _shown(net: nn.Module) -> list[torch.Tensor | None]:
    return [None if param.grad is None else _local(param.grad).clone() for param in net.parameters()]


def _backward(net: nn.Module, step: int, width: int, term: torch.Tensor | None = None, **options: Any) -> None:
    loss = net(_input(step, width).to(next(net.parameters()).dtype)).square().mean()
    (loss if term is None else loss + term).backward(**options)


def watched() -> dict[str, Any]:
    """What `.grad` is before the second micro-batch, and in its backward once the daemon has added all gradients."""
    import shardd.torch

    net = _sharded("shardd", 8)
    _backward(net, 0, 8)
    found: dict[str, Any] = {"before": _shown(net)}
    want = shardd.torch.counters(net)["reductions"] + 2

    def hook() -> None:
        deadline = time.monotonic() + 20
        while shardd.torch.counters(net)["reductions"] < want and time.monotonic() < deadline:
            time.sleep(0.01)
        found["reduced"] = shardd.torch.counters(net)["reductions"] >= want
        time.sleep(0.05)  # counted where they begin
        found["inside"] = _shown(net)

    _backward(net, 1, 8, _term(net, hook))
    return found


def _wrapped(orig: bool, width: int) -> nn.Module:
    """The same in the wrapper's form."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width, bias=False))

    def wrap(module: nn.Module) -> Any:
        return face("shardd")(module, device_id=torch.device("cpu"), use_orig_params=orig)

    return wrap(nn.Sequential(wrap(net[0]), net[1], wrap(net[2])))


def _held(net: nn.Module) -> list[nn.Parameter]:
    """Of which this rank has something."""
    return [param for param in net.parameters() if _local(param).numel()]


def _parts(net: nn.Module, width: int, count: int) -> list[list[torch.Tensor]]:
    """The gradients of each micro-batch alone."""
    parts = []
    for step in range(count):
        _backward(net, step, width)
        parts.append([_local(param.grad).clone() for param in _held(net)])  # type: ignore[arg-type]
        net.zero_grad()
    return parts


def accumulated(impl: str, form: str, plans: dict[str, str]) -> dict[str, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Micro-batches as a plan says, and what `.grad` is in the end beside what it ought to be.

    A plan is words: `s0` is micro-batch 0, `n0` the same without synchronisation; then `t` with a term made before the
    forward, `T` one that is kept over the whole plan, `g` with create_graph. `f0` raises before the term is added. `step` updates by nothing, `zero` and `none`
    are zero_grad, `clip` clips by nothing, `full` looks at full gradients. After `=`: what is in `.grad`.
    """
    width = 6
    net: Any
    wraps = form in ("orig", "flat")
    net = _wrapped(form == "orig", width) if wraps else _sharded(impl, width, getattr(torch, form))
    optimizer = torch.optim.SGD(net.parameters(), lr=0)
    parts = _parts(net, width, 3)
    found: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for name, plan in plans.items():
        words, result = plan.split("=")
        net.zero_grad()
        kept = _term(net) if "T" in words else None
        for word in words.split():
            _follow(net, optimizer, word, width, kept)
        wants = [torch.zeros_like(_local(param)) for param in _held(net)]
        for word in result.split():
            for number, param in enumerate(_held(net)):
                wants[number] += 2 * _local(param).detach() if word == "t" else parts[int(word)][number]
        got = [_local(param.grad).detach().clone() for param in _held(net)]  # type: ignore[arg-type]
        found[name] = list(zip(got, [want.detach() for want in wants], strict=True))
    return found


class _Failed(Exception):
    pass


def _fail() -> None:
    raise _Failed


def _follow(net: Any, optimizer: torch.optim.Optimizer, word: str, width: int, kept: torch.Tensor | None) -> None:
    if word == "step":
        optimizer.step()
    elif word in ("zero", "none"):
        optimizer.zero_grad(set_to_none=word == "none")
    elif word == "clip":
        net.clip_grad_norm_(1e6)
    elif word == "full":
        with face("shardd").summon_full_params(net, with_grads=True):
            pass
    elif word[0] == "f":
        with contextlib.suppress(_Failed):
            _backward(net, int(word[1]), width, _term(net, _fail))
    else:
        sync = word[0] == "s"
        term = kept if "T" in word else _term(net) if "t" in word else None
        options = {"create_graph": True} if "g" in word else {"retain_graph": True} if "T" in word else {}
        if hasattr(net, "no_sync"):
            with contextlib.nullcontext() if sync else net.no_sync():
                _backward(net, int(word[1]), width, term, **options)
        else:
            net.set_requires_gradient_sync(sync)
            _backward(net, int(word[1]), width, term, **options)
            net.set_requires_gradient_sync(True)
