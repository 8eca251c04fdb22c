"""``torch.optim.Adafactor``, ``Adam``, ``AdamW``, ``SGD``, ``Adagrad``, ``RMSprop`` and ``Muon`` whose steps the daemon makes where it can.

The classes stay PyTorch's own, and so do their instances, subclasses, pickles and whatever refers to them: their methods
here ask for the daemon's part of an optimizer (_daemon_optimizers/choice.py decides who has one), and go on as PyTorch's without.
A class that a program derives from them never has one, as what it overrides runs here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from shardd.torch._daemon_optimizers import choice
from shardd.torch._daemon_optimizers.daemon_state import Plain
from shardd.torch._job.job_optimizer import steps_in_daemon
from shardd.torch._process.dynamo import no_dynamo

__all__ = ["CLASSES", "put_back", "replace", "replaced"]

CLASSES: tuple[type[Optimizer], ...] = (
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.SGD,
    torch.optim.Adagrad,
    torch.optim.RMSprop,
    torch.optim.Muon,
    torch.optim.Adafactor,
)

_before: list[tuple[type, str, Any]] = []  # (class, name, what it had of its own; None: nothing)


def replaced() -> bool:
    return bool(_before)


def _unhooked(step: Callable[..., Any]) -> Callable[..., Any]:
    """PyTorch wraps ``step`` for hooks where a class makes its first optimizer; what is inside."""
    inside: Callable[..., Any] = step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]
    return inside


def _methods(kind: type[Optimizer]) -> dict[str, Any]:
    """The class's methods, with what PyTorch's do where the daemon has no part in an optimizer."""
    init, add_group = kind.__init__, kind.add_param_group
    step, state_dict, load, set_state = _unhooked(kind.step), kind.state_dict, kind.load_state_dict, kind.__setstate__

    @functools.wraps(init)
    def new_init(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if type(self) is kind:
            choice.made(self)

    @functools.wraps(step)
    def new_step(self: Any, closure: Any = None) -> Any:
        loss = None
        if closure is not None:  # its forward may be the model's first, which decides
            with torch.enable_grad():
                loss = closure()
        steps = steps_in_daemon(self) or choice.settled(self)
        if steps is None:
            step(self)
        else:
            _step_in_daemon(steps)
        return loss

    @functools.wraps(state_dict)
    def new_state_dict(self: Any) -> Any:
        steps = steps_in_daemon(self)
        return state_dict(self) if steps is None else steps.state_dict()

    @functools.wraps(load)
    def new_load(self: Any, state_dict: Any) -> None:  # torch.distributed.checkpoint gives it by name
        steps = steps_in_daemon(self)
        if steps is None:
            load(self, state_dict)
        else:
            steps.load_state_dict(state_dict)

    @functools.wraps(set_state)
    def new_set_state(self: Any, state: Any) -> None:
        steps = steps_in_daemon(self) if type(self) is kind else None  # AdamW's calls Adam's
        if steps is None:
            set_state(self, state)
        else:
            steps.set_state(state)

    @functools.wraps(add_group)
    def new_add_group(self: Any, param_group: Any) -> None:
        add_group(self, param_group)
        steps = steps_in_daemon(self)
        if steps is not None and not steps.chosen:
            steps.group_added(choice.why_not(self))

    hooked = Optimizer.profile_hook_step(new_step)
    hooked.hooked = True  # type: ignore[attr-defined]
    return {
        "__init__": new_init,
        "step": hooked,
        "state_dict": new_state_dict,
        "load_state_dict": new_load,
        "__setstate__": new_set_state,
        "add_param_group": new_add_group,
    }


@no_dynamo
def _step_in_daemon(steps: Any) -> None:
    with torch.no_grad():
        steps.step(None)


def replace() -> None:
    """The classes' optimizers may step in the daemon."""
    plain = {
        kind: Plain(_unhooked(kind.step), kind.state_dict, kind.load_state_dict, kind.__setstate__) for kind in CLASSES
    }
    new = {kind: _methods(kind) for kind in CLASSES}  # of all before any has changed: AdamW has those of Adam
    for kind, methods in new.items():
        for name, method in methods.items():
            _before.append((kind, name, vars(kind).get(name)))
            setattr(kind, name, method)
    choice.start(plain)


def put_back() -> None:
    """The classes are as they were."""
    for kind, name, own in reversed(_before):
        if own is None:
            delattr(kind, name)
        else:
            setattr(kind, name, own)
    _before.clear()
    choice.stop()
