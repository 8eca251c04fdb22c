"""What a state dict has for the daemon's optimizers, checked and cut to this rank's rows before anything is written."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from shardd.torch._job.job import TorchJob
from shardd.torch._units.place import Place


@dataclass
class ParamState:
    """The loaded state of one parameter, for its job."""

    place: Place
    rows: list[torch.Tensor]  # this rank's, fp32, by the number of the job's state
    counts: list[int]  # updates that it has had; of the parameters in a FlatParameter, each its own
    whole: bool = False  # ``rows`` are the whole states instead, the same on all ranks


@dataclass
class Incoming:
    """A checked state dict."""

    jobs: list[tuple[TorchJob, list[ParamState]]] = field(default_factory=list)
    taken: set[Any] = field(default_factory=set)  # parameters of those jobs
    kept: dict[Any, Any] = field(default_factory=dict)  # entries of ``state`` for models that are not registered yet

    def keep(self, loaded: dict[Any, Any]) -> None:
        """Keeps copies, as the program may go on with what it loaded from."""
        for key, entry in loaded.items():
            if key not in self.taken:
                self.kept[key] = (
                    {n: v.detach().clone() if torch.is_tensor(v) else v for n, v in entry.items()}
                    if isinstance(entry, dict)
                    else entry
                )


def param_state(
    param: Any,
    place: Place,
    entry: Any,
    names: tuple[str, ...] | dict[str, tuple[int, ...]],
    counts_updates: bool,
) -> ParamState:
    """Checks and cuts the ``entry`` of one parameter in a state dict, empty for zeros. ``names`` with shapes: state that each
    rank has whole, of that shape.

    It is collective where a value is placed in another way.
    """
    if not isinstance(entry, dict):
        raise ValueError(f'load optimizer state of "{place.fqn}": not a dictionary (got {type(entry).__name__})')
    rows_of = _rows_of if isinstance(param, DTensor) else partial(_piece_of, place)
    shapes = names if isinstance(names, dict) else {}

    def rows_of_state(name: str) -> torch.Tensor:
        what = f'load optimizer state "{name}" of "{place.fqn}"'
        value = entry.get(name)
        return _whole_of(shapes[name], value, what) if shapes else rows_of(param, value, what)

    rows = [rows_of_state(name) for name in names]
    held = len(place.indices())
    if not counts_updates:
        return ParamState(place, rows, [int(any(entry.get(name) is not None for name in names))] * held)
    step = entry.get("step", 0)
    given = [float(count) for count in step.reshape(-1)] if torch.is_tensor(step) else [float(step)]
    counts = given * held if len(given) == 1 else given
    if len(counts) != held or not all(0 <= count < 2**31 for count in counts):  # not a number, either
        raise ValueError(
            f'load optimizer state "step" of "{place.fqn}": not a count (got {step}, want one number >= 0)'
        )
    return ParamState(place, rows, [int(count) for count in counts], bool(shapes))


def _whole_of(shape: tuple[int, ...], value: Any, what: str) -> torch.Tensor:
    """Returns a loaded value of a state that is whole on each rank, or zeros for None."""
    if value is None:
        return torch.zeros(shape)
    if not torch.is_tensor(value) or value.is_complex():
        got = value.dtype if torch.is_tensor(value) else type(value).__name__
        raise ValueError(f"{what}: wrong type (got {got}, want a tensor of real numbers)")
    if value.shape != shape:
        raise ValueError(f"{what}: wrong shape (got {tuple(value.shape)}, want {shape})")
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return value.detach().to(torch.float32)


def _piece_of(place: Place, param: Any, value: Any, what: str) -> torch.Tensor:
    """Returns this rank's piece of a loaded value in layout flat, which is the piece, the whole, or None for zeros."""
    if value is None:
        return torch.zeros(param.shape)
    if not torch.is_tensor(value) or value.is_complex() or isinstance(value, DTensor):
        got = value.dtype if type(value) is torch.Tensor else type(value).__name__
        raise ValueError(f"{what}: wrong type (got {got}, want a plain tensor of real numbers)")
    whole = getattr(place.fsdp_param(), "_orig_size", param.shape)  # a FlatParameter's is never in one place
    if value.shape != param.shape and value.shape == whole:
        value = value.reshape(-1)[place.first : place.first + param.numel()]
    if value.shape != param.shape:
        raise ValueError(
            f"{what}: wrong shape (got {tuple(value.shape)}, want {tuple(param.shape)}, or {tuple(whole)} for the whole)"
        )
    return value.detach().to(torch.float32)


def _rows_of(param: Any, value: Any, what: str) -> torch.Tensor:
    """Returns this rank's rows of a loaded value, which is a DTensor, the whole, or None for zeros."""
    local = param._local_tensor
    if value is None:
        return torch.zeros(local.shape)
    if not torch.is_tensor(value) or value.is_complex():
        got = value.dtype if torch.is_tensor(value) else type(value).__name__
        raise ValueError(f"{what}: wrong type (got {got}, want a tensor of real numbers)")
    if isinstance(value, DTensor):
        if value.shape != param.shape:
            raise ValueError(f"{what}: wrong shape (got {tuple(value.shape)}, want {tuple(param.shape)})")
        value = value if value.placements == param.placements else value.redistribute(placements=param.placements)
        rows = value.to_local()
    elif value.shape == param.shape:
        rows = distribute_tensor(value, param.device_mesh, param.placements, src_data_rank=None).to_local()
    else:
        rows = value
    if rows.shape != local.shape:
        raise ValueError(f"{what}: wrong shape (got {tuple(rows.shape)}, want {tuple(param.shape)})")
    return rows.detach().to(torch.float32)
