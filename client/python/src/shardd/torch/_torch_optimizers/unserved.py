"""torch's optimizers that cannot step shards in the trainers, and which of them the daemon may step instead."""

from __future__ import annotations

from collections.abc import Iterable

from torch.optim import Optimizer

from shardd.torch._units.state import units

__all__ = ["refuse_step", "settle_in_step", "settles_in_step", "why_not_in_trainers"]

# Whose state is not tensors of the parameters' shape that stay the same from step to step.
_REFUSED = {
    "LBFGS": "its state is lists of tensors, made anew by each step",
    "Adafactor": "its state has other shapes than its parameters, which torch cannot compute from shards",
}

_settling: set[type] = set()


def why_not_in_trainers(optimizer_class: type) -> str:
    """Says why an optimizer of this class cannot step shards in the trainers; empty where it can."""
    found = (_REFUSED[kind.__name__] for kind in optimizer_class.__mro__
             if kind.__name__ in _REFUSED and kind.__module__.startswith("torch.optim"))  # fmt: skip
    return next(found, "")


def refuse_step(optimizer: Optimizer) -> None:
    """Raises where the optimizer cannot step its parameters in the trainers; also of a model that is registered inside the step."""
    why = why_not_in_trainers(type(optimizer))
    if not why:
        return
    sharded = {id(p.sharded_param) for unit in units() for p in unit.fsdp_params}
    if any(id(p) in sharded for group in optimizer.param_groups for p in group["params"]):
        raise NotImplementedError(
            f"step of {type(optimizer).__name__}: its parameters are sharded, and {why}; use another optimizer"
        )


def settle_in_step(classes: Iterable[type]) -> None:
    """Optimizers of exactly these classes ask in their ``step`` whether the daemon makes it, and refuse it there where it does not."""
    _settling.clear()
    _settling.update(classes)


def settles_in_step(optimizer: Optimizer) -> bool:
    return type(optimizer) in _settling
