"""How much state torch's own optimizers will have, before they have any."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

_UNKNOWN_STATES = 2


def _per_group(optimizer: Optimizer, count: Any) -> int:
    return max(count(group) for group in optimizer.param_groups)


# State tensors with the shape of the parameter, by the class that makes them.
_STATES: dict[str, Any] = {
    "Adam": lambda g: 3 if g.get("amsgrad") else 2,
    "AdamW": lambda g: 3 if g.get("amsgrad") else 2,
    "NAdam": lambda g: 2,
    "RAdam": lambda g: 2,
    "Adamax": lambda g: 2,
    "Adadelta": lambda g: 2,
    "Adagrad": lambda g: 1,
    "RMSprop": lambda g: 1 + (g.get("momentum", 0) > 0) + bool(g.get("centered")),
    "Rprop": lambda g: 2,
    "SGD": lambda g: 1 if g.get("momentum", 0) else 0,
    "ASGD": lambda g: 1,
    "Muon": lambda g: 1,
    "Adafactor": lambda g: 1,  # of a vector; rows and columns of others have other shapes
}


def planned_states(optimizers: list[Optimizer], training: bool) -> int:
    """State tensors for each parameter that the job gets memory for. Without an optimizer yet: as for AdamW."""
    if not optimizers:
        return _UNKNOWN_STATES if training else 0
    counts = []
    for optimizer in optimizers:
        known = next((_STATES[c.__name__] for c in type(optimizer).__mro__ if c.__name__ in _STATES), None)
        counts.append(_UNKNOWN_STATES if known is None else _per_group(optimizer, known))
    return max(counts)
