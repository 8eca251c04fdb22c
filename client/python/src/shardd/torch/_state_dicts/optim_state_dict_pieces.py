"""What optimizers keep for the parameters of a model with flat units, told apart by parameter.

With ``use_orig_params`` an optimizer has each parameter's piece. Else it has a ``FlatParameter``, whose state is that of all
parameters in it: each has its slice of a state tensor, and the scalars are everybody's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardd.torch._job.job_optimizer import steps_in_daemon
from shardd.torch._state_dicts.flat_places import flat_params_of
from shardd.torch._units.names import clean_name

__all__ = ["FlatState", "Named", "current_names", "keys_of", "named_params", "own_entry", "state_piece"]


@dataclass
class Named:
    """A parameter of the model under its first clean name."""

    fqn: str
    param: Any  # FlatShardParam, or None where no unit has it
    held: Any  # what the optimizer has: the object that the model shows, or the FlatParameter that it is in

    @property
    def holder(self) -> Any:
        """The ``FlatHolder``; None where the optimizer has the parameter itself."""
        return None if self.param is None else self.param.holder


def named_params(model: nn.Module) -> list[Named]:
    """Returns each parameter once; those of flat units first, in the order of the modules."""
    flat = flat_params_of(model)
    found: dict[int, Named] = {}
    for fqn, param in flat.items():
        found.setdefault(id(param), Named(fqn, param, param.sharded_param))
    named = list(found.values())
    known = {id(item.held) for item in named}
    for name, held in model.named_parameters():
        fqn = clean_name(name)
        if id(held) not in known and fqn not in flat:  # an unsharded unit shows other objects under its names
            known.add(id(held))
            named.append(Named(fqn, None, held))
    return named


def current_names(model: nn.Module) -> dict[int, str]:
    """By id of what the model holds: its first name there, wrappers' components included. Named optimizers use them."""
    found: dict[int, str] = {}
    for name, held in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(held), name)
    return found


def keys_of(model: nn.Module, optim: Optimizer, state_dict: dict[str, Any]) -> dict[int, Any]:
    """By id of what the optimizer has: its key in the optimizer's state dict, which is a number or a name."""
    held = [param for group in optim.param_groups for param in group["params"]]
    if "param_groups" in state_dict:
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    else:  # numbers are the optimizer's
        named = any(isinstance(key, str) for key in state_dict["state"])
        keys = list(state_dict["state"]) if named else list(range(len(held)))
    if keys and all(isinstance(key, str) for key in keys):  # in an order of its own
        known = set(keys)
        by_name = {number: name for number, name in current_names(model).items() if name in known}
        return {id(param): by_name[id(param)] for param in held if id(param) in by_name}
    return {id(param): key for param, key in zip(held, keys)}


def state_piece(item: Named, value: Any) -> torch.Tensor | None:
    """This rank's elements of a state tensor that has the parameter's shape, one-dimensional; a view.

    ``None``: it is no such tensor (a scalar, a number), or the rank has it whole, in its shape, as the optimizer does.
    """
    if not torch.is_tensor(value) or value.dim() == 0:
        return None
    if item.holder is not None:
        if value.shape != item.holder.sharded_param.shape:
            return None
        cut = item.holder.slices[id(item.param)]
        return value[cut.start : cut.start + cut.numel]
    if item.param.whole or value.numel() != item.param.sharded_param.numel():
        return None
    return value.reshape(-1)


def own_entry(optim: Any, item: Named, entry: dict[str, Any]) -> dict[str, Any]:
    """``entry`` is what the optimizer has. The daemon's may have several counts for a ``FlatParameter``: the parameter's."""
    step = entry.get("step")
    if steps_in_daemon(optim) is None or item.holder is None or not torch.is_tensor(step) or step.dim() != 1:
        return entry
    return {**entry, "step": step[item.holder.members.index(item.param)]}


class FlatState:
    """What an optimizer loads for one ``FlatParameter``, out of the state of the parameters in it.

    As in torch a parameter without state has zeros in the tensors; scalars have to be the same for all of them, but where
    ``own_counts``: the daemon counts each parameter's updates by itself.
    """

    def __init__(self, items: list[Named], own_counts: bool) -> None:
        self.items = items  # to be complete before the first value
        self._own_counts = own_counts
        self._tensors: dict[str, torch.Tensor] = {}
        self._others: dict[str, dict[str, Any]] = {}  # by state, by parameter
        self._names: set[str] | None = None

    @property
    def _holder(self) -> Any:
        return self.items[0].holder

    def begin(self, item: Named, names: Iterable[str]) -> None:
        """``item`` has state of these names, which follows."""
        names = set(names)
        if self._names is not None and names != self._names:
            raise ValueError(
                f'load optimizer state of "{item.fqn}": its names differ from those of others of its FlatParameter (got '
                f"{sorted(names)}, want {sorted(self._names)})"
            )
        self._names = names

    def add(self, item: Named, name: str, value: Any) -> None:
        """``value``: whole, checked to be of the parameter's shape where it is a tensor."""
        if not torch.is_tensor(value) or value.dim() == 0 or value.shape != item.param._orig_size:
            self._others.setdefault(name, {})[item.fqn] = value
            return
        flat = self._tensors.get(name)
        if flat is None:
            flat = self._tensors[name] = torch.zeros(self._holder.sharded_param.shape, dtype=value.dtype)
        if flat.dtype != value.dtype:
            raise ValueError(
                f'load optimizer state "{name}" of "{item.fqn}": its dtype differs from that of others of its '
                f"FlatParameter (got {value.dtype}, want {flat.dtype})"
            )
        cut = self._holder.slices[id(item.param)]
        flat[cut.start : cut.start + cut.numel] = value.reshape(-1)[cut.first : cut.first + cut.numel]

    def made(self) -> dict[str, Any]:
        """Returns the entry; it is empty where none of the parameters has any state."""
        result: dict[str, Any] = dict(self._tensors)
        for name, values in self._others.items():
            if name in self._tensors and all(value is None for value in values.values()):
                continue
            result[name] = self._common(name, values)
        return result

    def _common(self, name: str, values: dict[str, Any]) -> Any:
        if all(value is None for value in values.values()):
            return None
        if self._own_counts and name == "step":
            counts = [float(values.get(member_fqn, 0)) for member_fqn in self._in_order()]
            return torch.tensor(counts[0] if len(set(counts)) == 1 else counts)
        plain = {fqn: value.item() if torch.is_tensor(value) else value for fqn, value in values.items()}
        first_fqn, first = next(iter(plain.items()))
        for item in self.items:
            if item.fqn not in plain or plain[item.fqn] != first:
                raise ValueError(
                    f'load optimizer state "{name}" of "{item.fqn}": it is in a FlatParameter, whose parameters have one '
                    f'value (got {plain.get(item.fqn)}, want {first}, as "{first_fqn}" has); use_orig_params=True keeps '
                    "them apart"
                )
        value = values[first_fqn]
        return value.clone() if torch.is_tensor(value) else value

    def _in_order(self) -> list[str]:
        """Names, as the daemon's parameters follow each other in the FlatParameter."""
        by_param = {id(item.param): item.fqn for item in self.items}
        return [by_param[id(member)] for member in self._holder.members if id(member) in by_param]
