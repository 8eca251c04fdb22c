"""State that an optimizer of torch's is about to make in its first step, made one parameter at a time.

torch makes that of all parameters at once, in the trainer: all of it there and all of it in the job is twice the state, and the
most memory that training ever takes. Here each parameter's moves into the job before the next one's is made.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

# Whose ``_init_group`` makes all the state that their steps use. (SGD makes its in the step, of gradients.)
_MAKERS = ("Adam", "NAdam", "RAdam", "Adamax", "Adadelta", "RMSprop", "Rprop", "ASGD")


def make_state(optimizer: Optimizer, moves: Callable[[Any], bool], closure: bool) -> None:
    """Makes what the step would make of its parameters that have gradients and no state, and has ``moves`` take each parameter's.

    Nothing where a class of the program's may make state otherwise, or where a ``closure`` decides in the step which gradients
    there are: then the step makes it.
    """
    kind: Any = type(optimizer)
    known = any(c.__name__ in _MAKERS and c.__module__.startswith("torch.optim.") for c in kind.__mro__)
    if not known or closure or torch.compiler.is_compiling():
        return
    if not all(f.__module__.startswith("torch.optim.") for f in (kind._init_group, kind.step)):
        return
    lists = len(inspect.signature(kind._init_group).parameters) - 2  # without ``self`` and the group
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None and not optimizer.state.get(param):
                optimizer._init_group({**group, "params": [param]}, *([] for _ in range(lists)))  # type: ignore[attr-defined]
                moves(param)
