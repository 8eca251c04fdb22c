"""How a unit's parameters are gathered that say so themselves: with ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``.

Both are called by torch's own ``FSDPParam``, with torch's arguments, so once in each unshard. What the first returns goes to the other ranks
of the shard group as bytes, all of a unit's in one collective of the program's process group: the daemon has no part in it,
but for the parameters as stored and for when they may be read. Before the bytes go their layout: ranks that are about to exchange
different things, or one whose method has raised, are an error on all of them instead of wrong values.
"""

from __future__ import annotations

import hashlib
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from shardd.torch._process.torch_versions import all_gather_single

__all__ = ["Extension"]

_ALIGNMENT = 16  # of a tensor in what is sent
_FAILED, _READY = 0, 1


def _digest(layout: Any) -> list[int]:
    code = hashlib.blake2b(repr(layout).encode(), digest_size=16).digest()
    return [int.from_bytes(code[i : i + 8], "little", signed=True) for i in (0, 8)]


class Extension:
    """Of one unit, for the life of one job. ``params``: (number in the job, name, torch's FSDPParam)."""

    def __init__(self, unit: Any, params: list[tuple[int, str, Any]]) -> None:
        self._unit = weakref.ref(unit)
        self._params = params
        for _, _, fsdp_param in params:
            # A new job's first gather makes them anew: it may be with another dtype or frozen.
            fsdp_param.all_gather_outputs, fsdp_param._unsharded_inner_tensors = [], []
            vars(fsdp_param).pop("_unsharded_param", None)

    def call(self, gather: bool) -> None:
        """What the unit calls when the daemon has unsharded it, and when it is resharded."""
        if gather:
            # What is made here outlives this forward, so it is made as outside of inference.
            with torch.inference_mode(False), torch.no_grad():
                self._gather()
        else:
            for _, _, fsdp_param in self._params:
                fsdp_param.free_unsharded_param()

    def _gather(self) -> None:
        group = self._params[0][2].mesh_info.shard_process_group
        inputs: list[list[torch.Tensor]] = []
        error: BaseException | None = None
        try:
            inputs = [fsdp_param.all_gather_inputs for _, _, fsdp_param in self._params]
        except Exception as raised:
            error = raised
        layout = [
            (fqn, [(str(tensor.dtype), tensor.numel()) for tensor in tensors])
            for (_, fqn, _), tensors in zip(self._params, inputs)
        ]
        self._compare(layout, error, group)
        gathered = _gathered(inputs, group)
        unit = self._unit()
        assert unit is not None
        for (index, _, fsdp_param), tensors, of_ranks in zip(self._params, inputs, gathered):
            first = not hasattr(fsdp_param, "_unsharded_param")
            numels, dtypes = [t.numel() for t in tensors], [t.dtype for t in tensors]
            fsdp_param.init_all_gather_outputs(numels, dtypes, group.size(), fsdp_param.device)
            fsdp_param.alloc_all_gather_outputs()
            outputs = fsdp_param.all_gather_outputs
            # Autograd may have saved them in a forward, and they have the same values again.
            with _unsafe_preserve_version_counter(tuple(outputs)):
                for output, values in zip(outputs, of_ranks):
                    if output.numel():
                        output.view(group.size(), -1).view(torch.uint8).copy_(values)
            fsdp_param.init_unsharded_param()
            if first:
                unit._set_unsharded(index, fsdp_param._unsharded_param)

    def _compare(self, layout: Any, error: BaseException | None, group: Any) -> None:
        """Raises on all ranks where one has something else to send, or nothing."""
        own = torch.tensor([_FAILED if error is not None else _READY, *_digest(layout)])
        of_ranks = torch.empty(group.size() * own.numel(), dtype=own.dtype)
        all_gather_single(of_ranks, own, group=group)
        if error is not None:
            raise error
        ranks = dist.get_process_group_ranks(group)
        rows = of_ranks.view(-1, own.numel())
        names = ", ".join(f'"{fqn}"' for _, fqn, _ in self._params)
        failed = [rank for rank, row in zip(ranks, rows) if int(row[0]) == _FAILED]
        if failed:
            raise RuntimeError(f"unshard {names}: fsdp_pre_all_gather has raised on rank {failed[0]}; see its error")
        other = [rank for rank, row in zip(ranks, rows) if not torch.equal(row, own)]
        if other:
            raise RuntimeError(
                f"unshard {names}: rank {other[0]} sends something else (got another layout, want that of this rank: {layout}); "
                "all ranks run these modules in one order, and fsdp_pre_all_gather returns tensors of the same shapes on all, of "
                "parameters that are cut unevenly too"
            )


def _gathered(inputs: list[list[torch.Tensor]], group: Any) -> list[list[torch.Tensor]]:
    """Returns for each tensor the bytes of all ranks', one rank in each row."""
    tensors = [tensor for of_param in inputs for tensor in of_param]
    firsts, end = [], 0
    for tensor in tensors:
        firsts.append(end)
        end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    sent = torch.empty(end, dtype=torch.uint8)
    for tensor, first in zip(tensors, firsts):
        if tensor.numel():
            sent[first : first + tensor.nbytes].copy_(tensor.view(torch.uint8))
    received = torch.empty(group.size() * end, dtype=torch.uint8)
    if end:
        all_gather_single(received, sent, group=group)
    rows = received.view(group.size(), end)
    places = iter(zip(tensors, firsts))
    return [[rows[:, first : first + t.nbytes] for t, first in (next(places) for _ in of_param)] for of_param in inputs]
