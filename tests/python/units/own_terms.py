"""What a gradient is added to, hooks on gradients, and units that a second wrapper is put around: on torch's and on ours."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from optimizers.optim_cases import counts, parameters_of
from state_dicts.wrapper_state_cases import face


def _net(impl: str, **options: Any) -> nn.Sequential:
    if impl == "shardd":
        from shardd.torch import fully_shard
    else:
        from torch.distributed.fsdp import fully_shard
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5), nn.Tanh(), nn.Linear(5, 3))
    for layer in net:
        fully_shard(layer, **options)
    fully_shard(net, **options)
    return net


def _batch(step: int, width: int = 6) -> torch.Tensor:
    return torch.randn(4, width, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))


def _gradients(net: nn.Module) -> dict[str, torch.Tensor]:
    return {name: param.grad.full_tensor().clone() for name, param in net.named_parameters()}  # type: ignore[union-attr]


def _decay(net: nn.Module) -> torch.Tensor:
    """A term of the loss that is made of sharded parameters, outside of the model's forward."""
    return sum((param**2).sum() for param in net.parameters()).full_tensor()  # type: ignore[union-attr]


def decayed(impl: str) -> dict[str, Any]:
    """Autograd reaches the term's parameters last where it was made before the forward, first where after it."""
    found: dict[str, Any] = {"gradients": []}
    net = _net(impl)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)

    def backward(step: int, before: bool) -> None:
        term = _decay(net) if before else None
        loss = net(_batch(step)).square().mean()
        (loss + (_decay(net) if term is None else term)).backward()
        found["gradients"].append(_gradients(net))

    for step in range(4):  # none, zeros and gradients of earlier steps to be added to
        backward(step, before=True)
        optimizer.step()
        if step < 2:
            optimizer.zero_grad(set_to_none=step == 0)
    optimizer.zero_grad(set_to_none=False)
    for micro in range(3):
        net.set_requires_gradient_sync(micro == 2)
        backward(10 + micro, before=True)
    optimizer.step()
    optimizer.zero_grad()
    backward(20, before=False)
    optimizer.step()
    found["parameters"] = parameters_of(net)
    net(_batch(30)).sum().backward()  # the last step is committed
    found["counters"] = counts(impl, net)
    return found


def hook_order(impl: str) -> list[str]:
    net = _net(impl)
    names: list[str] = []
    for name, param in net.named_parameters():
        param.register_post_accumulate_grad_hook(lambda _, name=name: names.append(name))
    for step in range(2):
        net(_batch(step).requires_grad_(step == 1)).sum().backward()
    return names


def assigned(impl: str) -> dict[str, Any]:
    """load_state_dict(assign=True) puts other parameters in place, which have no gradients."""
    net = _net(impl)
    net(_batch(0)).sum().backward()
    state = {name: value.clone() for name, value in net.state_dict().items()}
    net.load_state_dict(state, assign=True)
    without = [param.grad is None for param in net.parameters()]
    net(_batch(1)).sum().backward()
    return {"without": without, "gradients": _gradients(net)}


def half(impl: str, reduced: torch.dtype) -> dict[str, Any]:
    """Computed in fp16 with a scaled loss, one step of which overflows."""
    policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=reduced, output_dtype=torch.float32)
    net = _net(impl, mp_policy=policy)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
    losses, scales = [], []
    for step in range(5):
        optimizer.zero_grad()
        loss = net(_batch(step)).square().mean() * (1e6 if step == 2 else 1)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
        scales.append(scaler.get_scale())
    return {"losses": losses, "scales": scales, "parameters": parameters_of(net), "counters": counts(impl, net)}


class _Inner(nn.Module):
    def __init__(self, wrap: Any) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.Sequential(wrap(nn.Linear(6, 6)), nn.Tanh(), wrap(nn.Linear(6, 3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def wrapped_again(impl: str, orig: bool) -> dict[str, Any]:
    """A second wrapper around units that have trained under a first one; both are used from there on."""

    def wrap(module: nn.Module) -> Any:
        return face(impl)(module, device_id=torch.device("cpu"), use_orig_params=orig)

    inner = _Inner(wrap)
    first = wrap(inner)
    optimizer = torch.optim.AdamW(first.parameters(), lr=0.1)
    seen = []

    def train(model: Any, step: int) -> None:
        loss = model(_batch(step)).square().mean()
        loss.backward()
        seen.append(float(model.clip_grad_norm_(0.5)))
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())

    for step in range(2):
        train(first, step)
    second = wrap(inner)
    for step in range(2, 6):
        train(second if step % 2 == 0 else first, step)
    with second.no_sync():
        second(_batch(7)).square().mean().backward()
    train(second, 8)
    with face(impl).summon_full_params(second):
        summoned = {name: param.detach().clone() for name, param in second.named_parameters()}
    state = {name: value.clone() for name, value in second.state_dict().items()}
    first.load_state_dict({name: value / 2 for name, value in state.items()})
    seen.append(second(_batch(9)).sum().item())
    roots = (first.check_is_root(), second.check_is_root())
    found: dict[str, Any] = {"seen": seen, "summoned": summoned, "state": state, "roots": roots, "counters": {}}
    if impl == "shardd":
        import shardd.torch

        found["counters"] = shardd.torch.counters(first)
        found["of second"] = shardd.torch.counters(second)["commits"]
    return found
