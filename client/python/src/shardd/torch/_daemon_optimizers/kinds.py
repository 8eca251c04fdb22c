"""What the daemon's optimizers are to torch's: which names their state has, and what a step takes from a param group."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = [
    "ADAFACTOR",
    "ADAGRAD",
    "ADAM",
    "ADAMW",
    "ADAMW_AMSGRAD",
    "ADAM_AMSGRAD",
    "CENTERED_RMSPROP",
    "LION",
    "MUON",
    "RMSPROP",
    "SGD",
    "Kind",
    "adam_kind",
    "foreign_state",
    "kind_of",
    "out_of_adafactors_range",
    "refusal",
    "whole_states",
]


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


def _adagrad(group: Mapping[str, Any]) -> dict[str, float]:
    return {
        "lr": float(group["lr"]),
        "weight_decay": float(group["weight_decay"]),
        "lr_decay": float(group["lr_decay"]),
        "initial_accumulator_value": float(group["initial_accumulator_value"]),
        "eps": float(group["eps"]),
    }


def _rmsprop(group: Mapping[str, Any]) -> dict[str, float]:
    return {
        "lr": float(group["lr"]),
        "weight_decay": float(group["weight_decay"]),
        "alpha": float(group["alpha"]),
        "eps": float(group["eps"]),
        "momentum": float(group["momentum"]),
    }


def _lion(group: Mapping[str, Any]) -> dict[str, float]:
    return {
        "lr": float(group["lr"]),
        "weight_decay": float(group["weight_decay"]),
        "beta1": float(group["betas"][0]),
        "beta2": float(group["betas"][1]),
    }


def _muon(group: Mapping[str, Any]) -> dict[str, float]:
    a, b, c = group["ns_coefficients"]
    return {
        "lr": float(group["lr"]),
        "weight_decay": float(group["weight_decay"]),
        "momentum": float(group["momentum"]),
        "nesterov": float(group["nesterov"]),
        "eps": float(group["eps"]),
        "ns_a": float(a),
        "ns_b": float(b),
        "ns_c": float(c),
        "ns_steps": float(group["ns_steps"]),
        "adjust_lr": float(group["adjust_lr_fn"] == "match_rms_adamw"),
    }


def _adafactor(group: Mapping[str, Any]) -> dict[str, float]:
    eps1, eps2 = group["eps"]
    return {
        "lr": float(group["lr"]),
        "weight_decay": float(group["weight_decay"]),
        "beta2_decay": float(group["beta2_decay"]),
        "eps": -1.0 if eps1 is None else float(eps1),  # below 0: the machine epsilon of a parameter's dtype
        "eps2": float(eps2),
        "d": min(float(group["d"]), sys.float_info.max),  # infinite: nothing is scaled down, and not with this, either
    }


@dataclass(frozen=True)
class Kind:
    """One optimizer of the daemon: a row of common/plan/optimizer_kinds.cc, with what a param group of torch's is to it."""

    name: str  # shardd.v1.OptimizerKind
    state_names: tuple[str, ...]  # of the state that has a parameter's shape, in the job's order
    momentum_state: str  # one more where a param group has momentum; empty: the kind has none
    counts_updates: bool  # "step" is part of a parameter's state
    hyperparameters: Callable[[Mapping[str, Any]], dict[str, float]]  # of a param group, for a step
    shown_order: tuple[str, ...] = ()  # of torch's state, where it is not the job's
    starts_with_state: bool = False  # torch's has state as soon as it is built, and does not step without
    whole: str = ""  # what it updates whole, on CPUs: matrices, or any parameters (whole_params.py); empty: elements

    @property
    def updates_whole(self) -> bool:
        return bool(self.whole)

    @property
    def title(self) -> str:
        """The name of torch's class; of the kinds that update whole parameters."""
        return self.name.removeprefix("OPTIMIZER_KIND_").capitalize()


ADAM = Kind("OPTIMIZER_KIND_ADAM", ("exp_avg", "exp_avg_sq"), "", True, _adam)
ADAMW = Kind("OPTIMIZER_KIND_ADAMW", ("exp_avg", "exp_avg_sq"), "", True, _adam)
SGD = Kind("OPTIMIZER_KIND_SGD", (), "momentum_buffer", False, _sgd)
ADAGRAD = Kind("OPTIMIZER_KIND_ADAGRAD", ("sum",), "", True, _adagrad, starts_with_state=True)
RMSPROP = Kind("OPTIMIZER_KIND_RMSPROP", ("square_avg",), "momentum_buffer", True, _rmsprop)
CENTERED_RMSPROP = Kind(
    "OPTIMIZER_KIND_CENTERED_RMSPROP",
    ("square_avg", "grad_avg"),
    "momentum_buffer",
    True,
    _rmsprop,
    shown_order=("step", "square_avg", "momentum_buffer", "grad_avg"),
)
ADAM_AMSGRAD = Kind("OPTIMIZER_KIND_ADAM_AMSGRAD", ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), "", True, _adam)
ADAMW_AMSGRAD = Kind("OPTIMIZER_KIND_ADAMW_AMSGRAD", ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), "", True, _adam)
LION = Kind("OPTIMIZER_KIND_LION", ("exp_avg",), "", False, _lion)
MUON = Kind("OPTIMIZER_KIND_MUON", ("momentum_buffer",), "", False, _muon, whole="matrix")
# Of a parameter's rows and columns: ``whole_states`` has what torch's state is.
ADAFACTOR = Kind("OPTIMIZER_KIND_ADAFACTOR", ("row_var", "col_var"), "", True, _adafactor, whole="parameter")


def foreign_state(kind: Kind, group: Mapping[str, Any], entry: Any) -> str:
    """Names what in a parameter's state the kind has not, in the parameter's group; empty where it has all. None is nothing."""
    known = {*kind.state_names, *(("variance",) if kind is ADAFACTOR else ())}
    if kind.counts_updates:
        known.add("step")
    if kind.momentum_state and group.get("momentum", 0) > 0:
        known.add(kind.momentum_state)
    items = entry.items() if isinstance(entry, Mapping) else ()
    return ", ".join(str(name) for name, value in items if value is not None and name not in known)


def whole_states(kind: Kind, size: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Returns the state that a parameter of ``size`` has whole for every rank, with its shape, in the job's order.

    It is empty of kinds whose state has the parameter's shape, of which each rank has what it has of the parameter.
    """
    if kind is not ADAFACTOR:
        return {}
    size = tuple(size)
    if len(size) < 2:
        return {"variance": size}
    return {"row_var": (*size[:-1], 1), "col_var": (*size[:-2], 1, size[-1])}


def kind_of(optimizer_class: type, groups: Sequence[Mapping[str, Any]]) -> Kind:
    """Returns the daemon's counterpart of a class of torch's. Its Adam is either, as the param groups say."""
    if issubclass(optimizer_class, torch.optim.SGD):
        return SGD
    if issubclass(optimizer_class, torch.optim.Adagrad):
        return ADAGRAD
    if issubclass(optimizer_class, torch.optim.Muon):
        return MUON
    if issubclass(optimizer_class, torch.optim.Adafactor):
        return ADAFACTOR
    if issubclass(optimizer_class, torch.optim.RMSprop):
        return CENTERED_RMSPROP if groups[0].get("centered") else RMSPROP
    return adam_kind(bool(groups[0].get("decoupled_weight_decay")), bool(groups[0].get("amsgrad")))


def adam_kind(decoupled: bool, amsgrad: bool) -> Kind:
    """Returns which of the four ``torch.optim.Adam`` and ``AdamW`` are."""
    if amsgrad:
        return ADAMW_AMSGRAD if decoupled else ADAM_AMSGRAD
    return ADAMW if decoupled else ADAM


def refusal(kind: Kind, group: Mapping[str, Any]) -> str:
    """Says what in a param group the daemon's optimizer does not do; empty where it does all."""
    if group.get("differentiable"):
        return "differentiable=True is not served by the daemon's optimizer"
    if kind is MUON:
        return _refusal_of_muon(group)
    if kind is ADAFACTOR:
        return _refusal_of_adafactor(group)
    if kind in (RMSPROP, CENTERED_RMSPROP):
        return _refusal_of_rmsprop(kind is CENTERED_RMSPROP, group)
    if kind not in (ADAM, ADAMW, ADAM_AMSGRAD, ADAMW_AMSGRAD):
        return ""
    amsgrad = kind in (ADAM_AMSGRAD, ADAMW_AMSGRAD)
    if bool(group.get("amsgrad", amsgrad)) != amsgrad:
        return (
            f"amsgrad of a param group differs from the optimizer's (got {not amsgrad}, want {amsgrad}); "
            "the daemon has one for all groups"
        )
    decoupled = kind in (ADAMW, ADAMW_AMSGRAD)
    if bool(group.get("decoupled_weight_decay", decoupled)) != decoupled:
        return (
            f"decoupled_weight_decay of a param group differs from the optimizer's (got {not decoupled}, want {decoupled}); "
            "the daemon has one for all groups"
        )
    return ""


def _refusal_of_rmsprop(centered: bool, group: Mapping[str, Any]) -> str:
    if bool(group.get("centered", centered)) != centered:
        return (
            f"centered of a param group differs from the optimizer's (got {not centered}, want {centered}); "
            "the daemon has one for all groups"
        )
    if not 0 <= group.get("alpha", 0) < 1:
        return f"alpha={group['alpha']} is not below 1, as the daemon's optimizer wants it"
    return ""


def _refusal_of_muon(group: Mapping[str, Any]) -> str:
    adjust, coefficients, steps = (
        group.get("adjust_lr_fn"),
        group.get("ns_coefficients", (0, 0, 0)),
        group.get("ns_steps", 0),
    )
    if adjust not in (None, "original", "match_rms_adamw"):
        return f"adjust_lr_fn={adjust!r} is not one of the daemon's (original, match_rms_adamw)"
    if len(coefficients) != 3 or not all(math.isfinite(float(c)) for c in coefficients):
        return f"ns_coefficients={coefficients} are not three finite numbers"
    if steps != int(steps) or not 0 <= steps < 100:
        return f"ns_steps={steps} is not a number from 0 to 99"
    return ""


def out_of_adafactors_range(group: Mapping[str, Any]) -> str:
    """Says which value PyTorch's constructor does not take, as it does; empty where it takes all."""
    (eps1, eps2), lr = group.get("eps", (None, 0.0)), group.get("lr", 0.0)
    if isinstance(lr, torch.Tensor) and lr.numel() != 1:
        return "Tensor lr must be 1-element"
    if not lr >= 0:
        return f"Learning rate should be >= 0 but is: {lr}"
    if not (beta2_decay := group.get("beta2_decay", 0.0)) <= 0:
        return f"beta2_decay should be <= 0 but is: {beta2_decay}"
    if eps1 is not None and not eps1 >= 0:
        return f"epsilon1 should be >= 0 but is: {eps1}"
    if not eps2 >= 0:
        return f"epsilon2 should be >= 0 but is: {eps2}"
    if not (d := group.get("d", 1.0)) >= 1:
        return f"Clipping threshold d should be >= 1 but is: {d}"
    if not (weight_decay := group.get("weight_decay", 0.0)) >= 0:
        return f"weight_decay should be >= 0 but is: {weight_decay}"
    return ""


def _refusal_of_adafactor(group: Mapping[str, Any]) -> str:
    if why := out_of_adafactors_range(group):
        return why
    eps1, eps2 = group.get("eps", (None, 0.0))
    finite = {
        "lr": group.get("lr", 0.0),
        "beta2_decay": group.get("beta2_decay", 0.0),
        "eps": (0.0 if eps1 is None else eps1) + eps2,
        "weight_decay": group.get("weight_decay", 0.0),
    }
    for name, value in finite.items():
        if not math.isfinite(float(value)):
            return f"{name} is not finite (got {group[name]})"
    return ""
