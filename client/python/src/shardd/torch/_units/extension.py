"""How a unit's parameters are gathered that say so themselves: with ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``.

Both are called by torch's own ``FSDPParam``, with torch's arguments, so once in each unshard. What the first returns goes to the other ranks
of the shard group as bytes, all of a unit's in one collective of the program's process group: the daemon has no part in it,
but for the parameters as stored and for when they may be read. Before the bytes go their layout: ranks that are about to exchange
different things, or one whose method has raised, are an error on all of them instead of wrong values.
"""

from __future__ import annotations

import hashlib
import json
import time
import weakref
from datetime import timedelta
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from shardd.torch._process.torch_versions import all_gather_of_group, all_gather_single
from shardd.torch._units.subclasses import is_subclass

__all__ = ["Extension"]

_ALIGNMENT = 16  # of a tensor in what is sent
_FAILED, _READY = 0, 1
PATIENCE = timedelta(seconds=20)  # of a rank whose method has raised, for the others that it tells


def _digest(layout: Any) -> list[int]:
    code = hashlib.blake2b(json.dumps(layout).encode(), digest_size=16).digest()
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
        if not gather:
            self._free()
            return
        # What is made here outlives this forward, so it is made as outside of inference.
        with torch.inference_mode(False), torch.no_grad():
            try:
                self._gather()
            except BaseException:
                self._free()  # the unit stays sharded, so nobody else does
                raise

    def _free(self) -> None:
        for _, _, fsdp_param in self._params:
            fsdp_param.free_unsharded_param()

    def _gather(self) -> None:
        group = self._params[0][2].mesh_info.shard_process_group
        inputs: list[list[torch.Tensor]] = []
        layout: list[Any] = []
        error: Exception | None = None
        try:
            for _, fqn, fsdp_param in self._params:
                tensors = fsdp_param.all_gather_inputs
                _check_inputs(fqn, fsdp_param, tensors, group.size())
                inputs.append(tensors)
                sizes = fsdp_param._extensions_data.all_gather_input_sizes
                layout.append([fqn, [[str(tensor.dtype), *size] for tensor, size in zip(tensors, sizes)]])
        except Exception as raised:
            error = raised
        names = ", ".join(f'"{fqn}"' for _, fqn, _ in self._params)
        exchange = _Exchange(f"unshard {names}", group, error)
        _agree(exchange, layout)
        gathered = _gathered(inputs, exchange)
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


class _Exchange:
    """What ranks of a shard group tell each other. ``error``: why this one has nothing to send."""

    def __init__(self, what: str, group: Any, error: Exception | None) -> None:
        self.what, self.group, self.error = what, group, error
        self.size: int = group.size()

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        """Returns what all ranks give, a one-dimensional tensor of one length, as rows."""
        of_ranks = torch.empty(self.size * own.numel(), dtype=own.dtype)
        given_up = time.monotonic() + PATIENCE.total_seconds()
        try:
            if self.error is None:
                all_gather_single(of_ranks, own, group=self.group)
            else:
                # Others may wait for this rank in a collective of the program's own method, which it has not come to. They hear of
                # it when gloo gives up, which closes the group's connections; one that goes on would keep this process from ending.
                options = AllgatherOptions()
                options.timeout = PATIENCE
                all_gather_of_group(self.group, of_ranks, own, options).wait()
        except RuntimeError as lost:
            if self.error is not None and time.monotonic() >= given_up:
                raise self.error from None
            raise RuntimeError(
                f"{self.what}: the process group has failed ({lost}); another rank has died or left; restart all ranks, as torchrun "
                "does, and call resume"
            ) from (self.error or lost)
        return of_ranks.view(self.size, own.numel())

    def tell(self, own: str) -> list[str]:
        """Returns what each rank says."""
        code = own.encode()
        lengths = self.gather(torch.tensor([len(code)])).view(-1)
        padded = torch.zeros(int(lengths.max()), dtype=torch.uint8)
        padded[: len(code)] = torch.frombuffer(bytearray(code), dtype=torch.uint8)
        rows = self.gather(padded)
        return [bytes(row[:length].tolist()).decode() for row, length in zip(rows, lengths.tolist())]


def _check_inputs(fqn: str, fsdp_param: Any, tensors: list[torch.Tensor], ranks: int) -> None:
    """Raises where a method returns what cannot be sent as bytes, or does not fit into the memory of the first unshard, which the
    unsharded parameter may be a view of."""
    what = f'unshard "{fqn}": fsdp_pre_all_gather of {type(fsdp_param.sharded_param._local_tensor).__name__}'
    for tensor in tensors:
        if is_subclass(tensor) or tensor.device != fsdp_param.device:
            raise TypeError(
                f"{what} returns a tensor that cannot be gathered (got a {type(tensor).__name__} on {tensor.device}, want a plain "
                f"tensor on {fsdp_param.device}); return the tensors that it is made of"
            )
    before = [(str(output.dtype), output.numel() // ranks) for output in fsdp_param.all_gather_outputs]
    now = [(str(tensor.dtype), tensor.numel()) for tensor in tensors]
    if before and before != now:
        raise RuntimeError(
            f"{what} returns other tensors than in the first unshard (got {now}, want {before}); return tensors of the same dtypes "
            "and sizes each time"
        )


def _agree(exchange: _Exchange, layout: list[Any]) -> None:
    """Raises on all ranks where one has something else to send than another, or nothing; there it raises the error that is why."""
    error, what = exchange.error, exchange.what
    own = torch.tensor([_READY if error is None else _FAILED, *_digest(layout)])
    rows = exchange.gather(own)
    if error is None and rows.eq(own).all():
        return
    # All ranks have the same rows before them, so that all are here.
    said = [json.loads(text) for text in exchange.tell(json.dumps(layout if error is None else repr(error)))]
    if error is not None:
        raise error
    ranks = dist.get_process_group_ranks(exchange.group)
    failed = next((number for number, row in enumerate(rows) if int(row[0]) == _FAILED), None)
    if failed is not None:
        raise RuntimeError(
            f"{what}: fsdp_pre_all_gather has raised on rank {ranks[failed]} (got {said[failed]}, want tensors to gather); see its error"
        )
    other = next(number for number, row in enumerate(rows) if not torch.equal(row, own))
    theirs, ours = next(pair for pair in zip_longest(said[other], layout) if pair[0] != pair[1])
    raise RuntimeError(
        f"{what}: rank {ranks[other]} sends something else (got {_text(theirs)}, want that of this rank: {_text(ours)}); all ranks run "
        "these modules in one order, and fsdp_pre_all_gather returns tensors of the same dtypes and shapes on all, of parameters that "
        "are cut unevenly too"
    )


def _text(of_param: Any) -> str:
    if of_param is None:
        return "nothing"
    fqn, tensors = of_param
    return f'"{fqn}": ' + (", ".join(f"{dtype} of shape {tuple(size)}" for dtype, *size in tensors) or "no tensors")


def _gathered(inputs: list[list[torch.Tensor]], exchange: _Exchange) -> list[list[torch.Tensor]]:
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
    rows = exchange.gather(sent) if end else sent.expand(exchange.size, 0)
    places = iter(zip(tensors, firsts))
    return [[rows[:, first : first + t.nbytes] for t, first in (next(places) for _ in of_param)] for of_param in inputs]
