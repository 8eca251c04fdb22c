"""``FullyShardedDataParallel.register_comm_hook``: the program's function in the place of the daemon's reduction.

What PyTorch's own hooks do the daemon does. With another one, backward leaves a unit's gradients in memory of the trainer;
when it has ended the hook gets them as one flat tensor, and what it makes of them is ``.grad``. The daemon reduces nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms._comm_hooks import LOW_PRECISION_HOOKS
from torch.distributed.algorithms._comm_hooks import default_hooks as torchs
from torch.distributed.fsdp import ShardingStrategy

from shardd.torch._job.job import job_of
from shardd.torch._job.whole_params import refuse_hook
from shardd.torch._units.flat_shard_param import Cut, FlatShardParam, cut_flat
from shardd.torch._units.shard_group import calls_weakly

__all__ = ["register"]

_HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
_COMPRESSED = {torchs.fp16_compress_hook: torch.float16, torchs.bf16_compress_hook: torch.bfloat16}


def register(wrappers: list[Any], state: Any, hook: Callable[..., Any]) -> None:
    """Registers ``hook`` for the units of these wrappers, which are all of a model. Raises what PyTorch's does."""
    units = [wrapper._unit for wrapper in wrappers]
    for unit in units:
        if unit.strategy in _HYBRID:
            raise AssertionError(f"Communication hook is not supported for hybrid strategies: {unit.strategy}")
        if unit.comm_hook is not None:
            raise AssertionError("A communication hook is already registered")
    if not callable(hook):
        raise ValueError(f"The communication hook must be callable but got {hook}")
    replaces = [bool(unit.fsdp_params) and not _served(unit, state, hook) for unit in units]
    refuse_hook(wrappers[0]._state, [unit for unit, own in zip(units, replaces) if own])
    compressed = _COMPRESSED.get(hook)
    if compressed is not None and any(unit.fsdp_params and not own for unit, own in zip(units, replaces)):
        wrappers[0]._state._register_again()  # the dtype of the reduction is in the job's plan
    for wrapper, unit, own in zip(wrappers, units, replaces):
        unit.comm_hook = CommHook(wrapper, state, hook, own)
        if own:
            unit._set_gradient_hook(calls_weakly(unit.comm_hook.reduce), replaces=True)
        elif compressed is not None and unit.fsdp_params:
            unit.mp_policy = dataclasses.replace(unit.mp_policy, reduce_dtype=compressed)


def _served(unit: Any, state: Any, hook: Callable[..., Any]) -> bool:
    """Whether the daemon does what PyTorch's hook does with this state: the mean over the unit's ranks."""
    fits = (torchs.allreduce_hook,) if _is_whole(unit) else (torchs.reduce_scatter_hook,)
    if hook not in (*fits, *_COMPRESSED) or not isinstance(state, torchs.DefaultState):
        return False
    ranks = dist.get_process_group_ranks(state.process_group)
    factor = state.gradient_predivide_factor * state.gradient_postdivide_factor
    if ranks != unit.mesh_info.mesh.mesh.flatten().tolist() or factor != len(ranks):
        return False
    stored = {param.orig_dtype for param in unit.fsdp_params}
    return hook not in _COMPRESSED or stored == {getattr(state, "parameter_type", None)}


def _is_whole(unit: Any) -> bool:
    return bool(unit.strategy == ShardingStrategy.NO_SHARD)


class CommHook:
    """A hook of one unit. The unit owns it; it finds the model's job through the wrapper.

    ``replaces``: it is called in the place of the daemon's reduction, which otherwise does the same.
    """

    def __init__(self, wrapper: Any, state: Any, hook: Callable[..., Any], replaces: bool) -> None:
        self.state, self.hook, self.replaces = state, hook, replaces
        self._wrapper = wrapper

    def reduce(self, gradients: list[tuple[int, torch.Tensor]]) -> list[tuple[int, torch.Tensor]]:
        """Returns this rank's shards of what the hook makes of its own gradients, both by the job's numbers."""
        unit = self._wrapper._unit
        own = {
            id(member): piece for number, gradient in gradients for member, piece in _by_member(unit, number, gradient)
        }
        given: list[tuple[int, torch.Tensor]] = []
        for members, cut in self._flat_params(unit):
            if any(id(member) in own for member in members):
                given += self._reduce_flat(unit, members, cut, own)
        return given

    def _flat_params(self, unit: Any) -> list[tuple[list[FlatShardParam], Cut]]:
        """Returns the flat parameters as the job has them cut, in its order."""
        job = job_of(self._wrapper._state)
        assert job is not None and job.engine is not None
        found: dict[Any, list[tuple[int, FlatShardParam]]] = {}
        for param in unit.fsdp_params:
            info = job.engine.param_info(job.index_of(param))
            if info["requires_grad"]:
                found.setdefault((info["group"], info["flat_param"]), []).append((info["offset"], param))
        parts = []
        for key in sorted(found):
            members = [param for _, param in sorted(found[key], key=lambda entry: entry[0])]
            first = members[0]
            sizes = [member._orig_size.numel() for member in members]
            cut = cut_flat(sizes, first.orig_dtype, first.param_dtype, *unit.shard_of())
            parts.append((members, cut))
        return parts

    def _reduce_flat(
        self, unit: Any, members: list[FlatShardParam], cut: Cut, own: dict[int, torch.Tensor]
    ) -> list[tuple[int, torch.Tensor]]:
        dtype = next(own[id(member)].dtype for member in members if id(member) in own)
        _, shards = unit.shard_of()
        whole = torch.zeros(cut.piece * shards, dtype=dtype, device=unit.device)
        for member, offset in zip(members, cut.offsets):
            if (gradient := own.pop(id(member), None)) is not None:
                whole[offset : offset + gradient.numel()] = gradient.reshape(-1)
        if unit.mp_policy.reduce_dtype is not None and self.hook not in LOW_PRECISION_HOOKS:
            whole = whole.to(unit.mp_policy.reduce_dtype)
        if unit.contributing != 1:
            whole /= unit.contributing  # the hook divides by the number of ranks
        with torch.no_grad():
            if _is_whole(unit):
                self.hook(self.state, whole)
                piece = whole
                _check_alike(unit, members[0], piece)
            else:
                piece = torch.empty(cut.piece, dtype=whole.dtype, device=whole.device)
                self.hook(self.state, whole, piece)
            stored = members[0].orig_dtype
            piece = piece.to(stored if unit.precision is None else unit.precision.gradient_dtype(stored))
        return self._shards(unit, members, cut, piece)

    def _shards(
        self, unit: Any, members: list[FlatShardParam], cut: Cut, piece: torch.Tensor
    ) -> list[tuple[int, torch.Tensor]]:
        numbers = {id(held): number for number, held in unit.held.items()}
        holder = members[0].holder
        if holder is not None:
            for first, end in holder.padding():
                piece[first:end] = 0
            return [(numbers[id(holder)], piece)]
        given = []
        for number, member in enumerate(members):
            part = cut.slice(number, member._orig_size.numel())
            shard = piece[part.start : part.start + part.numel]
            given.append((numbers[id(member)], shard.view(member._orig_size) if member.whole else shard))
        return given


def _by_member(unit: Any, number: int, gradient: torch.Tensor) -> list[tuple[FlatShardParam, torch.Tensor]]:
    """Returns the parameters of which it is this rank's own gradient, each with its part."""
    held = unit.held[number]
    if isinstance(held, FlatShardParam):
        return [(held, gradient)]
    found = []
    kind = held.members[0]
    sizes = [member._orig_size.numel() for member in held.members]
    offsets = cut_flat(sizes, kind.orig_dtype, kind.param_dtype, *unit.shard_of()).offsets
    for member, offset, numel in zip(held.members, offsets, sizes):
        found.append((member, gradient[offset : offset + numel]))
    return found


def _check_alike(unit: Any, param: FlatShardParam, gradient: torch.Tensor) -> None:
    """RuntimeError where ranks of NO_SHARD would step apart, which the daemon keeps alike."""
    group = unit.mesh_info.shard_process_group
    if group.size() == 1:
        return
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[gradient.element_size()]
    digest = gradient.view(bits).sum(dtype=torch.int64).reshape(1)
    every = torch.empty(group.size(), dtype=torch.int64, device=gradient.device)
    dist.all_gather_into_tensor(every, digest, group=group)
    if len(differing := set(every.tolist())) > 1:
        raise RuntimeError(
            f'register_comm_hook: the hook gave ranks different gradients of "{param._param_fqn or param._name()}" (got '
            f"{len(differing)} kinds, want 1; rank={group.rank()}), and the ranks' copies of a NO_SHARD model stay alike; "
            "reduce over all ranks in the hook, or use one optimizer and model for each group of ranks"
        )
