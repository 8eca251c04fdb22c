"""The compiled extension, loaded after torch, whose libraries it needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch  # before the extension, which is linked against libtorch_python
from torch.distributed.utils import _to_kwargs

from shardd import _C, errors
from shardd.torch._process.dynamo import check_compilers, no_dynamo

__all__ = ["_C"]


def _map_slow(value: Any, map_tensors: Callable[[Any], Any]) -> Any:
    """Maps tensors in containers that are not exactly tuple, list or dict; see extension/tensors.h."""
    if isinstance(value, tuple):
        items = [map_tensors(item) for item in value]
        if all(new is old for new, old in zip(items, value)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changes = {}
        for field in dataclasses.fields(value):
            old = getattr(value, field.name)
            new = map_tensors(old)
            if new is not old:
                changes[field.name] = new
        return dataclasses.replace(value, **changes) if changes else value
    if isinstance(value, dict):
        mapped = {key: map_tensors(item) for key, item in value.items()}
        if all(mapped[key] is value[key] for key in mapped):
            return value
        return type(value)(mapped)
    if isinstance(value, list):
        items = [map_tensors(item) for item in value]
        if all(new is old for new, old in zip(items, value)):
            return value
        return type(value)(items)
    return value


def _move_inputs(args: Any, kwargs: Any, device: torch.device) -> tuple[Any, Any]:
    """Moves a root's inputs to the GPU that it computes on, on the current stream, as torch's units and DistributedDataParallel do."""
    moved, moved_kwargs = _to_kwargs(args, kwargs, device, False)
    return moved[0] if moved else (), moved_kwargs[0] if moved_kwargs else {}


_C.set_error_factory(errors.from_code)
_C.set_slow_map(no_dynamo(_map_slow))
_C.set_inference_check(check_compilers)
_C.set_move_inputs(no_dynamo(_move_inputs))
