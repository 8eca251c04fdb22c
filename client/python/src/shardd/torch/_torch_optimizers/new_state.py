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
from torch.optim import optimizer as torchs

from shardd.torch._torch_optimizers.known_classes import makes_all_state_first


def make_state(optimizer: Optimizer, moves: Callable[[Any], bool], closure: bool, hook: Any) -> bool:
    """Makes what the step would make of its parameters that have gradients and no state, and has ``moves`` take each parameter's.

    Returns whether ``moves`` took any. Nothing is made where something may still change what the step makes: a class of the
    program's, a ``closure``, or a hook other than ``hook``, the caller. Nor with parameters on a GPU, whose state lies there.
    """
    if closure or torch.compiler.is_compiling() or not makes_all_state_first(optimizer):
        return False
    params = [(param, group) for group in optimizer.param_groups for param in group["params"]]
    if len(optimizer.state) >= len(params) or _hooked(optimizer, hook):
        return False
    if any(param.device.type != "cpu" for param, _ in params):
        return False
    init: Any = optimizer._init_group  # type: ignore[attr-defined]
    lists = -1
    moved = False
    for param, group in params:
        if param.grad is not None and not optimizer.state.get(param):
            if lists < 0:
                lists = len(inspect.signature(init).parameters) - 1  # without the group
            init({**group, "params": [param]}, *([] for _ in range(lists)))
            moved |= moves(param)
    return moved


def _hooked(optimizer: Optimizer, but_for: Any) -> bool:
    """Whether hooks before the step may change gradients or options; true where this torch does not show them."""
    own = getattr(optimizer, "_optimizer_step_pre_hooks", None)
    of_all = getattr(torchs, "_global_optimizer_pre_hooks", None)
    return own is None or of_all is None or bool(own) or any(hook is not but_for for hook in of_all.values())
