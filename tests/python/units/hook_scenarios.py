"""What ranks do in the tests of hooks on gradients; the same on torch's forms and on shardd's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy, ShardingStrategy

from state_dicts.wrapper_state_cases import face, quiet


def _net() -> nn.Sequential:
    """Every piece is aligned as torch's, so that flat parameters are alike."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16))


def _loss(model: Any, step: int) -> torch.Tensor:
    seed = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return model(torch.randn(3, 8, generator=seed)).float().square().mean()  # type: ignore[no-any-return]


# The second is the first's name in torch 2.10.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _shown(params: Any) -> list[Any]:
    return [
        None if p.grad is None else (p.grad.dtype, getattr(p.grad, "_local_tensor", p.grad).clone()) for p in params
    ]


def _sum_and_clamp(state: list[Any], gradient: torch.Tensor, output: torch.Tensor | None = None) -> None:
    """A hook as programs write them: counts, reduces, and does something that no mean is."""
    state.append((gradient.dtype, gradient.numel(), None if output is None else (output.dtype, output.numel())))
    if output is None:
        dist.all_reduce(gradient)
        output = gradient
    else:
        _reduce_scatter(output, gradient)
    output.div_(dist.get_world_size()).clamp_(-0.05, 0.05)


def _own(state: list[Any], gradient: torch.Tensor, output: torch.Tensor | None = None) -> None:
    (gradient if output is None else output).fill_(float(dist.get_rank()))


def _cast(state: Any, grad: torch.Tensor) -> None:
    """torch's on CPUs ends with an error: it asks for the tensor's stream."""
    grad.data = grad.data.to(state.parameter_type)


_MIXED = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def _hook(kind: str, strategy: str) -> tuple[Any, Callable[..., None]]:
    group = dist.distributed_c10d._get_default_group()
    if kind in ("clamp", "clamp-mixed"):
        return [], _sum_and_clamp
    if kind == "default":
        default = default_hooks.allreduce_hook if strategy == "NO_SHARD" else default_hooks.reduce_scatter_hook
        return default_hooks.DefaultState(group), default
    hook = default_hooks.fp16_compress_hook if kind == "fp16" else default_hooks.bf16_compress_hook
    return default_hooks.LowPrecisionState(group), hook


def comm_hooks(impl: str, cases: list[tuple[str, str, bool]]) -> list[Any]:
    """By case of (hook, strategy, use_orig_params): calls, gradients after each backward, and parameters after each step."""
    outcome = []
    for kind, strategy, orig in cases:
        out: list[Any] = []
        with quiet(), mock.patch.object(default_hooks, "_decompress", _cast):
            model = face(impl)(
                _net(),
                sharding_strategy=ShardingStrategy[strategy],
                use_orig_params=orig,
                auto_wrap_policy=lambda module, recurse, nonwrapped_numel: recurse or isinstance(module, nn.Linear),
                device_id=torch.device("cpu"),
                mixed_precision=_MIXED if kind == "clamp-mixed" else None,
            )
            state, hook = _hook(kind, strategy)
            model.register_comm_hook(state, hook)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            for step in range(3):
                with model.no_sync():
                    _loss(model, 3 * step).backward()
                _loss(model, 3 * step + 1).backward()
                out.append(_shown(model.parameters()))
                if step and strategy != "NO_SHARD":  # which torch reduces again
                    _loss(model, 3 * step + 2).backward()
                    out.append(_shown(model.parameters()))
                optimizer.step()
                optimizer.zero_grad()
                out.append([p.detach().clone() for p in model.parameters()])
            if kind.startswith("clamp"):
                out.append(state)
        outcome.append(out)
    return outcome


def daemon_steps() -> dict[str, Any]:
    """The daemon's optimizer steps with what a hook has made; what is refused; what the daemon has reduced."""
    from shardd.torch import counters
    from shardd.torch.optim import SGD

    result: dict[str, Any] = {}
    with quiet():
        for orig in (True, False):
            model: Any = face("shardd")(_net(), use_orig_params=orig, device_id=torch.device("cpu"))
            model.register_comm_hook([], _own)
            before = [p.detach().clone() for p in model.parameters()]
            optimizer = SGD(model.parameters(), lr=0.5)
            _loss(model, 0).backward()
            norm = float(model.clip_grad_norm_(1e9))
            optimizer.step()
            moved = [float((b - p.detach()).max()) if p.numel() else 0.0 for b, p in zip(before, model.parameters())]
            result[f"moved {orig}"] = (max(moved), norm, counters(model)["bytes_reduced"])
        model = face("shardd")(
            _net(), use_orig_params=True, device_id=torch.device("cpu"), sharding_strategy=ShardingStrategy.NO_SHARD
        )
        model.register_comm_hook([], _own)
        with _text(result, "apart"):
            _loss(model, 0).backward()
        for name, wrong in (("twice", _own), ("callable", 3)):
            other: Any = face("shardd")(_net(), use_orig_params=True, device_id=torch.device("cpu"))
            with _text(result, name):
                other.register_comm_hook([], wrong)
                other.register_comm_hook([], wrong)
    return result


@contextlib.contextmanager
def _text(result: dict[str, Any], name: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, AssertionError, ValueError) as error:
        result[name] = f"{type(error).__name__}: {error}"


def all_reduce_hooks(impl: str) -> list[Any]:
    """``set_all_reduce_hook`` on one dimension and on two, with micro-batches, mixed precision and forced sums."""
    import shardd.torch

    fully_shard: Any = shardd.torch.fully_shard if impl == "shardd" else torch.distributed.fsdp.fully_shard
    outcome: list[Any] = []
    for shape, reduce_dtype, sums in (((2,), None, False), ((2,), torch.bfloat16, True), ((2, 1), None, False)):
        torch.manual_seed(3)
        model: Any = nn.Sequential(nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3))
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
        for module in (model[0], model[2], model):
            fully_shard(module, mesh=mesh, mp_policy=policy)
        seen: list[Any] = []

        def hook(output: torch.Tensor, seen: list[Any] = seen) -> None:
            seen.append((output.dtype, output.clone()))
            output.clamp_(-0.03, 0.03)

        for module in (model[0], model[2]):
            module.set_all_reduce_hook(hook)
            module.set_force_sum_reduction_for_comms(sums)
        after: list[bool] = []
        model[0].weight.register_post_accumulate_grad_hook(
            lambda p, after=after: after.append(bool((p.grad.to_local().abs() <= 0.09).all()))
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            for micro in range(2):
                if shape == (2, 1):
                    model.set_requires_all_reduce(step == 0 or micro == 1)
                _loss(model, 2 * step + micro).backward()
                outcome.append(_shown(model.parameters()))
            optimizer.step()
            optimizer.zero_grad()
        outcome += [[(d, v) for d, v in seen], after, [p.full_tensor().detach() for p in model.parameters()]]
    return outcome
