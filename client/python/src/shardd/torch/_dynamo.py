"""Python that the extension calls while torch.compile may be tracing what called it, and what compilers may not do."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, NoReturn, ParamSpec, TypeVar

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


def _refuse_freezing(*args: Any, **kwargs: Any) -> NoReturn:
    raise NotImplementedError(
        "compile a fully sharded module: torch._inductor.config.freezing (TORCHINDUCTOR_FREEZING) makes constants of "
        "parameters, which are the daemon's and change with each step; turn it off for this model"
    )


@skip_frame
def check_compilers() -> None:
    """Called before a forward without gradients, the only one that inductor freezes.

    What it compiles after this goes through `freeze`; where the parameters are a fully sharded module's, it is refused.
    """
    config = sys.modules.get("torch._inductor.config")
    if config is None or not config.freezing:
        return
    import torch._inductor.freezing as freezing

    original = freezing.freeze
    if getattr(original, "_shardd", False):
        return

    @functools.wraps(original)
    def freeze(*args: Any, **kwargs: Any) -> Any:
        context = torch._guards.TracingContext.try_get()
        for value in (context.params_flat if context is not None else None) or ():
            if getattr(value, "_shardd_unsharded", False):
                _refuse_freezing()
        return original(*args, **kwargs)

    freeze._shardd = True  # type: ignore[attr-defined]
    freezing.freeze = freeze
