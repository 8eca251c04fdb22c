"""What the daemon's optimizers are to torch's: which names their state has, and what a step takes from a param group."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["ADAM", "ADAMW", "SGD", "Kind", "kind_of", "refusal"]


def _adam(group: Mapping[str, Any]) -> dict[str, float]:
    return {
        "lr": float(group["lr"]),
        "weight_decay": float(group["weight_decay"]),
        "beta1": float(group["betas"][0]),
        "beta2": float(group["betas"][1]),
        "eps": float(group["eps"]),
    }


def _sgd(group: Mapping[str, Any]) -> dict[str, float]:
    return {
        "lr": float(group["lr"]),
        "weight_decay": float(group["weight_decay"]),
        "momentum": float(group["momentum"]),
        "dampening": float(group["dampening"]),
        "nesterov": float(group["nesterov"]),
    }


@dataclass(frozen=True)
class Kind:
    """One optimizer of the daemon."""

    name: str  # shardd.v1.OptimizerKind
    state_names: tuple[str, ...]  # of the state that has a parameter's shape, in the job's order
    counts_updates: bool  # "step" is part of a parameter's state
    hyperparameters: Callable[[Mapping[str, Any]], dict[str, float]]  # of a param group, for a step


ADAM = Kind("OPTIMIZER_KIND_ADAM", ("exp_avg", "exp_avg_sq"), True, _adam)
ADAMW = Kind("OPTIMIZER_KIND_ADAMW", ("exp_avg", "exp_avg_sq"), True, _adam)
SGD = Kind("OPTIMIZER_KIND_SGD", ("momentum_buffer",), False, _sgd)


def kind_of(optimizer_class: type, groups: Sequence[Mapping[str, Any]]) -> Kind:
    """Returns the daemon's counterpart of a class of torch's. Its Adam is either, as the param groups say."""
    if issubclass(optimizer_class, torch.optim.SGD):
        return SGD
    return ADAMW if groups[0].get("decoupled_weight_decay") else ADAM


def refusal(kind: Kind, group: Mapping[str, Any]) -> str:
    """Says what in a param group the daemon's optimizer does not do; empty where it does all."""
    for flag in ("amsgrad", "differentiable"):
        if group.get(flag):
            return f"{flag}=True is not served by the daemon's optimizer"
    if kind is SGD:
        return ""
    decoupled = kind is ADAMW
    if bool(group.get("decoupled_weight_decay", decoupled)) != decoupled:
        return (
            f"decoupled_weight_decay of a param group differs from the optimizer's (got {not decoupled}, want {decoupled}); "
            "the daemon has one for all groups"
        )
    return ""
