"""The compiled extension, loaded after torch, whose libraries it needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch  # noqa: F401  (loads libtorch_python, which the extension is linked against)

from shardd import _C, errors
from shardd.torch._dynamo import check_compilers, no_dynamo

__all__ = ["_C"]


def _map_slow(value: Any, map_tensors: Callable[[Any], Any]) -> Any:
    """Containers that are not exactly tuple, list or dict; see extension/tensors.h."""
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


_C.set_error_factory(errors.from_code)
_C.set_slow_map(no_dynamo(_map_slow))
_C.set_inference_check(check_compilers)
