"""What test_names.py tries of client/python/docs/names.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed import fsdp


def _model() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def _dim0(**arguments: Any) -> Any:
    from shardd.torch import fully_shard

    model = _model()
    fully_shard(model[0], **arguments)
    return fully_shard(model, **arguments)


def _wrapped(**arguments: Any) -> Any:
    from shardd.torch import FullyShardedDataParallel

    return FullyShardedDataParallel(_model(), **{"use_orig_params": True, **arguments})


def _of_module(name: str, *arguments: Any, **keywords: Any) -> Callable[[Any], Any]:
    return lambda model: getattr(model, name)(*arguments, **keywords)


# Each on a model of its own.
REFUSED: dict[str, Callable[[], Any]] = {
    "FSDPModule.set_custom_all_gather": lambda: _dim0().set_custom_all_gather(object()),
    "FSDPModule.set_custom_reduce_scatter": lambda: _dim0().set_custom_reduce_scatter(object()),
}
if hasattr(fsdp.FSDPModule, "finalize_backward"):  # torch 2.15
    REFUSED.update(
        {
            "FSDPModule.finalize_backward": lambda: _dim0().finalize_backward(),
            "FSDPModule.set_keep_unsharded_storage": lambda: _dim0().set_keep_unsharded_storage(True),
            "FSDPModule.set_manual_backward_finalization": lambda: _dim0().set_manual_backward_finalization(True),
        }
    )

# How a model is made with it.
NO_EFFECT_ARGUMENTS: dict[str, Callable[[], Any]] = {
    "CPUOffloadPolicy": lambda: _dim0(offload_policy=fsdp.CPUOffloadPolicy()),
    "fully_shard(offload_policy)": lambda: _dim0(offload_policy=fsdp.CPUOffloadPolicy(pin_memory=False)),
    "CPUOffload": lambda: _wrapped(cpu_offload=fsdp.CPUOffload(offload_params=True)),
    "FullyShardedDataParallel(cpu_offload)": lambda: _wrapped(cpu_offload=fsdp.CPUOffload(offload_params=True)),
    "BackwardPrefetch": lambda: _wrapped(backward_prefetch=fsdp.BackwardPrefetch.BACKWARD_POST),
    "FullyShardedDataParallel(backward_prefetch)": lambda: _wrapped(backward_prefetch=None),
    "FullyShardedDataParallel(forward_prefetch)": lambda: _wrapped(forward_prefetch=True),
    "FullyShardedDataParallel(limit_all_gathers)": lambda: _wrapped(limit_all_gathers=False),
}

# What is called on a model of fully_shard.
NO_EFFECT_CALLS: dict[str, Callable[[Any], Any]] = {
    "share_comm_ctx": lambda model: fsdp.share_comm_ctx([model, _dim0()]),
    "FSDPModule.set_is_last_backward": _of_module("set_is_last_backward", False),
    "FSDPModule.set_post_optim_event": _of_module("set_post_optim_event", object()),
    "FSDPModule.set_modules_to_forward_prefetch": lambda m: m.set_modules_to_forward_prefetch([m[0]]),
    "FSDPModule.set_modules_to_backward_prefetch": lambda m: m.set_modules_to_backward_prefetch([m[0]]),
    "FSDPModule.set_force_sum_reduction_for_comms": _of_module("set_force_sum_reduction_for_comms", True),
    "FSDPModule.set_reduce_scatter_max_input_buffers": _of_module("set_reduce_scatter_max_input_buffers", 3),
    "FSDPModule.set_separate_reduce_scatter_group": _of_module("set_separate_reduce_scatter_group", True),
    "FSDPModule.set_allocate_memory_from_process_group_for_comm": _of_module(
        "set_allocate_memory_from_process_group_for_comm", True
    ),
    "FSDPModule.set_symm_mem_for_comm": _of_module("set_symm_mem_for_comm", "NCCL"),
}

WORKING_CALLS: dict[str, Callable[[Any], Any]] = {
    "FSDPModule.unshard": lambda model: (model.unshard(async_op=True).wait(), model.reshard()),
    "FSDPModule.reshard": _of_module("reshard"),
    "FSDPModule.reset_iter_state": _of_module("reset_iter_state"),
    "FSDPModule.set_requires_gradient_sync": _of_module("set_requires_gradient_sync", True),
    "FSDPModule.set_requires_all_reduce": _of_module("set_requires_all_reduce", True),
    "FSDPModule.set_reshard_after_forward": _of_module("set_reshard_after_forward", True),
    "FSDPModule.set_reshard_after_backward": _of_module("set_reshard_after_backward", True),
    "FSDPModule.set_gradient_divide_factor": _of_module("set_gradient_divide_factor", 1.0),
    "FSDPModule.set_reduce_scatter_divide_factor": _of_module("set_reduce_scatter_divide_factor", 1.0),
    "FSDPModule.set_unshard_in_backward": _of_module("set_unshard_in_backward", True),
    "FSDPModule.set_all_reduce_hook": _of_module("set_all_reduce_hook", lambda gradient: None),
    "FSDPModule.set_reduce_scatter_unused_params": _of_module("set_reduce_scatter_unused_params", False),
}


def _values(model: nn.Module) -> tuple[list[list[float]], int]:
    """Parameters after two steps, and the daemon's reductions."""
    from shardd import torch as shardd_torch

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(2):
        model(torch.full((3, 4), 1.0 + step)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    shardd_torch.commit(model)
    values = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return [v.detach().flatten().tolist() for v in values], shardd_torch.counters(model)["reductions"]


def try_all() -> dict[str, Any]:
    """By name: the refusal's text, or the values that a model with it has trained to. Without a name: those without."""
    outcome: dict[str, Any] = {"refused": {}, "no effect": {}, "works": {}}
    for name, call in REFUSED.items():
        try:
            call()
        except NotImplementedError as error:
            outcome["refused"][name] = str(error)
    outcome["plain"], outcome["reductions"] = _values(_dim0())
    outcome["plain wrapped"], _ = _values(_wrapped())
    for name, make in NO_EFFECT_ARGUMENTS.items():
        outcome["no effect"][name] = _values(make())[0]
    for kind, calls in (("no effect", NO_EFFECT_CALLS), ("works", WORKING_CALLS)):
        for name, call in calls.items():
            model = _dim0()
            call(model)
            outcome[kind][name] = _values(model)[0]
    return outcome
