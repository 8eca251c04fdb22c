"""Python that the extension calls while torch.compile may be tracing what called it, and what compilers may not do."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

_eval_frame: Any = torch._C._dynamo.eval_frame
_P = ParamSpec("_P")
_R = TypeVar("_R")


def no_dynamo(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Keeps the function out of the tracer, without importing it into programs that do not compile."""

    @functools.wraps(function)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        return torch._dynamo.disable(function, recursive=True, reason="shardd's hooks")(*args, **kwargs)

    return skip_frame(wrapper)


def skip_frame(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Neither the function's own frame nor those of what it calls are looked at, when it is run and not inlined."""
    skip = _eval_frame._FrameAction.SKIP
    _eval_frame.set_code_exec_strategy(function.__code__, _eval_frame._FrameExecStrategy(skip, skip))
    return function


@skip_frame
def check_compilers() -> None:
    """Called before a forward without gradients, the only one that inductor freezes, and one that runs uncompiled alike:
    whether what is traced now or later ends in frozen constants cannot be told from here."""
    config = sys.modules.get("torch._inductor.config")
    if config is not None and config.freezing:
        raise NotImplementedError(
            "run a fully sharded module without gradients: torch._inductor.config.freezing (TORCHINDUCTOR_FREEZING) makes "
            "constants of parameters, which are the daemon's and change with each step; turn it off for this model"
        )
