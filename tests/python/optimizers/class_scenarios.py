"""What a process does in the test of optimizers whose classes have another base, too."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer


class Tagged:
    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        made = object.__new__(cls)
        made.tag = len(args)  # type: ignore[attr-defined]
        return made


class _Made(Optimizer):
    def __init__(self, params: Any) -> None:
        Optimizer.__init__(self, params, {"lr": 0.1})


class Behind(_Made, Tagged):
    """Another base behind torch's makes it."""


class IsADict(_Made, dict):  # type: ignore[type-arg]
    __hash__ = object.__hash__


class InFront(Tagged, _Made):
    """Its instances do not pass torch's."""


class ADictInFront(dict, _Made):  # type: ignore[type-arg]
    __hash__ = object.__hash__

    def __init__(self, params: Any) -> None:
        Optimizer.__init__(self, params, {"lr": 0.1})


def _build(params: list[torch.nn.Parameter]) -> list[Any]:
    return [kind(params) for kind in (Behind, IsADict, InFront, ADictInFront)]


def other_bases() -> dict[str, Any]:
    """Before the package is imported, and after it."""
    params = [torch.nn.Parameter(torch.ones(2))]
    tags = [[getattr(each, "tag", None) for each in _build(params)]]
    import shardd.torch  # noqa: F401
    from shardd.torch._torch_optimizers.live_optimizers import optimizers_of

    optimizers_of(params, but_not=lambda _: False)  # which has looked at every object then
    late = _build(params)
    tags.append([getattr(each, "tag", None) for each in late])
    found = {id(each) for each in optimizers_of(params, but_not=lambda _: False)}
    return {"tags": tags, "found": [type(each).__name__ for each in late if id(each) in found]}
