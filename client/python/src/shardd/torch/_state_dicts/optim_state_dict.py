"""Optimizer state dicts of models with flat units, keyed by clean names, with the parameters' shapes.

``optim_state_dict`` takes what an optimizer's ``state_dict`` gives (state of pieces, keyed by number) and makes state of
whole parameters, or of their rows; ``optim_state_dict_to_load`` takes either back to pieces of this world. State that lies
in the job is read there, else one tensor is whole at a time. State of parameters that no unit has stays as it is.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import StateDictType
from torch.optim import Optimizer

from shardd.torch._job.job import job_of
from shardd.torch._job.job_optimizer import steps_in_daemon
from shardd.torch._ranks.gather import assemble, rows_as_dtensor_of, rows_as_sharded_tensor
from shardd.torch._state_dicts.flat_places import group_of
from shardd.torch._state_dicts.optim_state_dict_pieces import Named, keys_of, named_params, own_entry, state_piece
from shardd.torch._state_dicts.state_dict_type import current_settings, flat_states, get_state_dict_type

__all__ = ["optim_state_dict"]


@dataclass
class _Summary:
    """What a rank says of its state of one parameter."""

    first: int = 0
    numel: int = 0
    tensors: dict[str, torch.dtype] = field(default_factory=dict)  # of the piece's shape
    stored: dict[str, int] = field(default_factory=dict)  # of those, which is which state of the job
    others: dict[str, Any] = field(default_factory=dict)  # scalars, numbers


@dataclass
class _Saving:
    """What one call makes."""

    model: nn.Module
    full: bool
    config: Any
    writer: int | None  # the only rank, of the default group, that is to have it; None: all ranks

    @property
    def on_host(self) -> bool:
        """torch's default; a GPU has no place for whole state beside the model's."""
        return bool(getattr(self.config, "offload_to_cpu", True))

    def copied(self, tensor: torch.Tensor) -> torch.Tensor:
        """In memory of its own."""
        tensor = tensor.detach()
        return tensor.to("cpu", copy=True) if self.on_host else tensor.clone()

    def writes(self) -> bool:
        return self.writer is None or dist.get_rank() == self.writer

    def only(self, param: Any) -> int | None:
        """The writer among the ranks that have the parameter between them; -1: it is none of them."""
        if self.writer is None:
            return None
        ranks = dist.get_process_group_ranks(group_of(param))
        return ranks.index(self.writer) if self.writer in ranks else -1


def _copied(value: Any) -> Any:
    """Copies to host memory, as torch has scalars: ranks send it each other in a message, and may have other GPUs."""
    return value.detach().to("cpu", copy=True) if torch.is_tensor(value) else value


class _InJobs:
    """The state of parameters that lies in jobs, whole, as every rank of a node can read it."""

    def __init__(self, model: nn.Module) -> None:
        states = flat_states(model)
        root = states[0]._find_root() if states else None
        job = None if root is None else job_of(root)
        on_node = job is not None and job.alive and job.engine is not None and not job.ranks.cut
        self._job = job if on_node else None

    def settle(self) -> None:
        """What this rank's stream has written or read is done: a message between ranks says nothing of streams."""
        if self._job is not None and self._job.engine is not None:
            self._job.engine.synchronise()

    def state(self, param: Any, number: int) -> torch.Tensor | None:
        """One-dimensional, in place."""
        if self._job is None or id(param.sharded_param) not in self._job.places:
            return None
        assert self._job.engine is not None
        return self._job.engine.stored_state(self._job.index_of(param), number)

    def number(self, param: Any, first: int, piece: torch.Tensor) -> int | None:
        """Which of the parameter's states begins with ``piece`` at element ``first``."""
        number = 0
        while piece.dtype == torch.float32 and (whole := self.state(param, number)) is not None:
            if piece.is_contiguous() and whole.data_ptr() + 4 * first == piece.data_ptr():
                return number
            number += 1
        return None


def _summary_of(item: Named, entry: dict[str, Any], in_jobs: _InJobs) -> _Summary:
    first, local = item.param.piece()
    summary = _Summary(first, local.numel())
    for name, value in entry.items():
        piece = state_piece(item, value)
        if piece is not None:
            summary.tensors[name] = value.dtype
            number = in_jobs.number(item.param, first, piece)
            if number is not None:
                summary.stored[name] = number
        else:
            summary.others[name] = _copied(value)
    return summary


def optim_state_dict(
    model: nn.Module,
    optim: Optimizer,
    optim_state_dict: dict[str, Any] | None = None,
    group: Any = None,
    *,
    kind: StateDictType | None = None,
    rank0_only: bool | None = None,
) -> dict[str, Any]:
    """Collective. Keyed by clean names, as full tensors or as rows, as ``state_dict_type`` says (or ``kind``).

    ``optim_state_dict``: what ``optim.state_dict()`` gave; by default it is asked. With rank0_only the other ranks get {}.
    """
    # As torch's, the older functions take the configuration as it is: it says DTensors once it has been asked for.
    settings = get_state_dict_type(model) if kind is None else current_settings(model)
    config: Any = settings.optim_state_dict_config
    full = (kind or settings.state_dict_type) == StateDictType.FULL_STATE_DICT
    if rank0_only is None:
        rank0_only = full and getattr(config, "rank0_only", False)
    writer = (dist.get_process_group_ranks(group)[0] if group is not None else 0) if rank0_only else None
    saving = _Saving(model, full, config, writer)
    if optim_state_dict is None:  # read here, and not given to the program
        steps = steps_in_daemon(optim)
        state_dict = optim.state_dict() if steps is None else steps.shown_state_dict()
    else:
        state_dict = optim_state_dict
    keys = keys_of(model, optim, state_dict)
    named = [item for item in named_params(model) if id(item.held) in keys]
    names: dict[Any, list[str]] = {}  # of a FlatParameter several
    for item in named:
        names.setdefault(keys[id(item.held)], []).append(item.fqn)
    flat = [item for item in named if item.param is not None]
    entries = {item.fqn: own_entry(optim, item, state_dict["state"].get(keys[id(item.held)], {})) for item in flat}
    in_jobs = _InJobs(model)
    in_jobs.settle()
    summaries = _exchange(flat, entries, in_jobs)
    state: dict[str, Any] = {}
    for item in named:
        if item.param is None:
            plain = state_dict["state"].get(keys[id(item.held)])
            if plain is not None:
                state[item.fqn] = {n: v.cpu() if saving.on_host and torch.is_tensor(v) else v for n, v in plain.items()}
            continue
        made = _whole_entry(saving, item, entries[item.fqn], summaries.get(item.fqn), in_jobs)
        if made:
            state[item.fqn] = made
    in_jobs.settle()
    for shard_group in {id(g): g for item in flat if item.fqn in summaries for g in (group_of(item.param),)}.values():
        dist.barrier(shard_group)  # nobody writes while another reads
    if not saving.writes():
        return {}
    state = {item.fqn: state[item.fqn] for item in _in_torchs_order(model, named, names, keys) if item.fqn in state}
    for key, value in state_dict["state"].items():
        if key not in names and isinstance(key, str):  # a program's own
            state[key] = value
    result: dict[str, Any] = {"state": state}
    if "param_groups" in state_dict:
        result["param_groups"] = [
            {
                name: [fqn for key in value for fqn in names.get(key, ())] if name == "params" else copy.deepcopy(value)
                for name, value in saved.items()
            }
            for saved in state_dict["param_groups"]
        ]
    return result


def _in_torchs_order(
    model: nn.Module, named: list[Named], names: dict[Any, list[str]], keys: dict[int, Any]
) -> list[Named]:
    """Orders the entries as torch gives them; ranks went through them in the order of the modules.

    With ``use_orig_params``: what no unit has, then unit by unit, by name. Else as the optimizer has its parameters.
    """
    if not _original(model):
        place = {fqn: number for number, fqn in enumerate(fqn for held in names.values() for fqn in held)}
        numbers = {key: number for number, key in enumerate(keys.values())}  # in the optimizer's order
        return sorted(named, key=lambda item: (numbers[keys[id(item.held)]], place[item.fqn]))
    units: dict[int, list[Named]] = {0: []}
    for item in sorted(named, key=lambda item: item.fqn):
        units.setdefault(0 if item.param is None else id(item.param.home), []).append(item)
    return [item for of_unit in units.values() for item in of_unit]


def _original(model: nn.Module) -> bool:
    """Whether the optimizer has original parameters rather than FlatParameters."""
    states = flat_states(model)
    return not states or bool(getattr(states[0]._unit, "use_orig_params", True))


def _sorted(saving: _Saving, values: dict[str, bool | None]) -> list[str]:
    """Orders the names of one parameter's state as torch does: ``True`` are tensors, ``False`` scalar tensors, ``None`` others."""
    kinds = [None, False, True] if _original(saving.model) else [True, False, None]
    return sorted(values, key=lambda name: (kinds.index(values[name]), name))


def _kind_of(value: Any) -> bool | None:
    return None if not torch.is_tensor(value) else value.dim() > 0


def _exchange(flat: list[Named], entries: dict[str, dict[str, Any]], in_jobs: _InJobs) -> dict[str, list[_Summary]]:
    """Returns by name what each rank of the parameter's group has. Nothing is asked where each rank has all."""
    groups: dict[int, tuple[dist.ProcessGroup, list[Named]]] = {}
    for item in flat:
        if not item.param.whole:
            group = group_of(item.param)
            groups.setdefault(id(group), (group, []))[1].append(item)
    summaries: dict[str, list[_Summary]] = {}
    for group, items in groups.values():
        every: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(every, [_summary_of(item, entries[item.fqn], in_jobs) for item in items], group=group)
        for number, item in enumerate(items):
            summaries[item.fqn] = [of_rank[number] for of_rank in every]
    return summaries


def _whole_entry(
    saving: _Saving, item: Named, entry: dict[str, Any], summaries: list[_Summary] | None, in_jobs: _InJobs
) -> dict[str, Any] | None:
    """Returns the state of the whole parameter; None on ranks that do not write, which have no memory for it on the way either."""
    if summaries is None:
        return _own_entry(saving, item, entry) if saving.writes() else None
    only = saving.only(item.param)
    if only == -1:
        return None
    tensors: dict[str, torch.dtype] = {}
    others: dict[str, Any] = {}
    for of_rank in summaries:
        if of_rank.numel:
            tensors.update(of_rank.tensors)
            for name, value in of_rank.others.items():
                others.setdefault(name, value)
    made: dict[str, Any] = {}
    for name in _sorted(saving, {n: True if n in tensors else _kind_of(others.get(n)) for n in (*tensors, *others)}):
        if name not in tensors:
            whole = others[name]
        else:
            number = _stored_alike(name, summaries, item)
            if number is not None:
                if only is None or dist.get_rank(group_of(item.param)) == only:
                    stored = in_jobs.state(item.param, number)
                    assert stored is not None
                    there = stored.view(item.param._orig_size)
                    made[name] = (
                        saving.copied(there) if saving.full or not there.dim() else _rows(saving, item.param, there)
                    )
                continue
            ranges = [(of_rank.first, of_rank.numel if name in of_rank.tensors else 0) for of_rank in summaries]
            piece = state_piece(item, entry.get(name))
            whole = assemble(piece, ranges, item.param._orig_size, tensors[name], group_of(item.param), only)
            if whole is None:
                continue
            whole = whole.cpu() if saving.on_host else whole
        made[name] = whole if saving.full else _rows(saving, item.param, whole)
    return made if only is None or dist.get_rank(group_of(item.param)) == only else None


def _stored_alike(name: str, summaries: list[_Summary], item: Named) -> int | None:
    """Returns the number of the job's state that all ranks have their piece of, if they have all of it between them."""
    numbers = {of_rank.stored.get(name) for of_rank in summaries if of_rank.numel}
    covered = sum(of_rank.numel for of_rank in summaries)
    return numbers.pop() if len(numbers) == 1 and covered == item.param._orig_size.numel() else None


def _own_entry(saving: _Saving, item: Named, entry: dict[str, Any]) -> dict[str, Any]:
    """Returns the entry of a parameter that each rank has whole."""
    made = {}
    for name in entry if item.holder is None else _sorted(saving, {n: _kind_of(v) for n, v in entry.items()}):
        value = entry[name]
        piece = state_piece(item, value)  # of a FlatParameter
        whole = _copied(value) if piece is None else saving.copied(piece.detach().reshape(item.param._orig_size))
        made[name] = whole if saving.full or piece is None else _rows(saving, item.param, whole)
    return made


def _rows(saving: _Saving, param: Any, whole: Any) -> Any:
    """Returns this rank's rows of a tensor; scalars stay as they are."""
    if not torch.is_tensor(whole) or whole.dim() == 0:
        return whole
    if not getattr(saving.config, "_use_dtensor", False):
        return rows_as_sharded_tensor(whole.cpu() if saving.on_host else whole, group_of(param))
    given = flat_states(saving.model)[0].__dict__.get("_given_mesh")  # the outermost's, as for the model's
    rows = rows_as_dtensor_of(whole, param.mesh_info.mesh if given is None else given)
    return rows.cpu() if saving.on_host and rows.device.type != "cpu" else rows
