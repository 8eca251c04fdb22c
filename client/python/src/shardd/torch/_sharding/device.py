"""Where the tensors of a unit in layout ``flat`` are, and what is computed on: the CPU, or this process' GPU."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardd.torch._sharding.ignored import Ignored
from shardd.torch._units.flat_shard_param import is_sharded
from shardd.torch._units.state import state_of

__all__ = ["check_offload", "check_places", "device_of", "move"]


def _asked(device_id: int | torch.device) -> torch.device:
    device = torch.device("cuda", device_id) if isinstance(device_id, int) else torch.device(device_id)
    if device.type not in ("cpu", "cuda"):
        raise NotImplementedError(f"shard a model on device_id {device_id}: shardd serves cpu and cuda devices")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(
            f"shard a model on device_id {device_id}: torch sees no GPU in this process (got torch.cuda.is_available() "
            "False); pass torch.device('cpu') or none"
        )
    return _numbered(device)


def _numbered(device: torch.device) -> torch.device:
    return (
        torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" and device.index is None else device
    )


def device_of(
    modules: Iterable[nn.Module], ignored: Ignored, device_id: int | torch.device | None, mesh: DeviceMesh | None
) -> torch.device:
    """Returns ``device_id``, else the GPU of units or parameters in the modules, else that of a mesh on cuda, else the CPU."""
    wanted = None if mesh is None else mesh.device_type
    if wanted not in (None, "cpu", "cuda"):
        raise NotImplementedError(f"shard a model on device_mesh of {wanted}: shardd serves cpu and cuda devices")
    device = torch.device(wanted or "cpu") if device_id is None else _asked(device_id)
    if device_id is None:
        found = [module for outer in modules for module in outer.modules()]
        units = (state._unit.device for m in found if (state := state_of(m)) is not None and state._unit is not None)
        params = (p.device for m in found for p in m.parameters(recurse=False) if p not in ignored.params)
        device = next((there for there in (*units, *params) if there.type == "cuda"), device)
    if wanted is not None and wanted != device.type:
        raise ValueError(
            f"shard a model on device_mesh of {wanted}: the model is on another device (got {device}, want {wanted}); make "
            f"the mesh with init_device_mesh({device.type!r}, ...), or move the model"
        )
    return _numbered(device)


def check_offload(offloads: bool, device: torch.device) -> None:
    """Refuses offloading of a GPU in layout flat; on CPUs all is in the host's memory anyway."""
    if offloads and device.type != "cpu":
        raise NotImplementedError(
            f"shard a model on {device} with CPU offload in layout flat: shardd offloads in layout dim0; use "
            "shardd.torch.fully_shard(offload_policy=CPUOffloadPolicy())"
        )


def _tensors(module: nn.Module, ignored: Ignored) -> Iterable[tuple[str, Any]]:
    yield from ((n, p) for n, p in module.named_parameters(recurse=False) if p not in ignored.params)
    yield from module.named_buffers(recurse=False)


def move(modules: Iterable[nn.Module], ignored: Ignored, device: torch.device) -> None:
    """Moves what a unit on a GPU has in host memory there; tensors stay the objects that they are."""
    if device.type == "cpu":
        return
    with torch.no_grad():
        for module in modules:
            for _, tensor in _tensors(module, ignored):
                if tensor.device.type == "cpu" and not is_sharded(tensor):
                    tensor.data = tensor.data.to(device)
                    if tensor.grad is not None:
                        tensor.grad = tensor.grad.to(device)


def check_places(modules: Iterable[nn.Module], ignored: Ignored, device: torch.device) -> None:
    """Raises where a parameter is elsewhere than it is computed with."""
    for module in modules:
        for name, param in module.named_parameters(recurse=False):
            if param not in ignored.params and not param.is_meta and param.device != device:
                raise NotImplementedError(
                    f'shard parameter "{name}" of {type(module).__name__}: it is on another device than its unit (got '
                    f"{param.device}, want {device}); pass device_id, or have the whole model on one device"
                )
