"""``torch.optim.Adam``, ``AdamW`` and ``SGD`` that step in the daemon where they can; see ``install``."""

from __future__ import annotations

import functools
import inspect
import logging
from typing import Any

import torch

from shardd.torch import optim
from shardd.torch._daemon_optimizers.sharded_params import roots_with

logger = logging.getLogger("shardd.torch")


def _tensors(params: list[Any]) -> list[Any]:
    """Returns the tensors in what optimizers take: tensors, param groups, or pairs of a name and a tensor."""
    found: list[Any] = []
    for item in params:
        if isinstance(item, dict):
            inside = item["params"]
            found += _tensors([inside] if isinstance(inside, torch.Tensor) else list(inside))
        else:
            found.append(item[1] if isinstance(item, tuple) else item)
    return found


def _listed(params: Any) -> list[Any]:
    """Makes lists of generators, those in param groups too, so that the parameters can be gone through more than once."""
    items = [params] if isinstance(params, dict) else list(params)
    for item in items:
        if isinstance(item, dict) and not isinstance(item["params"], (torch.Tensor, set)):  # no sets, as torch says
            item["params"] = list(item["params"])
    return items


class _Chooser(type):
    """The class of a swapped optimizer class: a call makes the daemon's or PyTorch's; both are instances of it.

    A class that a program derives from it is PyTorch's: what it overrides runs here.
    """

    _pair: tuple[type, type]

    def __call__(cls, params: Any, *args: Any, **kwargs: Any) -> Any:
        if "_pair" not in vars(cls):
            return super().__call__(params, *args, **kwargs)
        stock, daemon = cls._pair
        params = _listed(params)
        if not roots_with(_tensors(params)):
            return stock(params, *args, **kwargs)
        try:
            return daemon(params, *args, **kwargs)
        except NotImplementedError as error:
            logger.warning("%s: it steps here, not in the daemon", error)
            return stock(params, *args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return cls.__subclasscheck__(type(instance))

    def __subclasscheck__(cls, subclass: type) -> bool:
        if "_pair" not in vars(cls):
            return super().__subclasscheck__(subclass)
        return any(issubclass(subclass, kind) for kind in cls._pair)


@functools.cache
def pairs() -> list[tuple[Any, Any]]:
    """PyTorch's class and the one that stands for it."""
    found: list[tuple[Any, Any]] = []
    for stock, daemon in (
        (torch.optim.Adam, optim.Adam),
        (torch.optim.AdamW, optim.AdamW),
        (torch.optim.SGD, optim.SGD),
    ):
        names = {
            "_pair": (stock, daemon),
            "__module__": stock.__module__,
            "__doc__": stock.__doc__,
            "__signature__": inspect.signature(stock),
        }
        found.append((stock, _Chooser(stock.__name__, (stock,), names)))
    return found
