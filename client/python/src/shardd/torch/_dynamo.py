"""Python that the extension calls while torch.compile may be tracing what called it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_R = TypeVar("_R")


def no_dynamo(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Keeps the function out of the tracer, without importing it into programs that do not compile."""

    @functools.wraps(function)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        return torch._dynamo.disable(function, recursive=True, reason="shardd's hooks")(*args, **kwargs)

    return wrapper
