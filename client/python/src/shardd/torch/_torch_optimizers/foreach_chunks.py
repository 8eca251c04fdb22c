"""Steps of torch's ``foreach`` implementations in chunks, so that what they compute between is small.

They apply one operation after the other to all tensors of a device and data type, and hold what lies between two for all of them:
with AdamW as much as the parameters. In chunks of some MiB it stays in the processor's caches. No number changes, because
in the steps that are cut (known_classes.py) no operation reads another parameter's tensors. All ranks cut alike, because operations
on DTensors may communicate.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

# Of parameters. With their gradients, moments and what is computed between they stay in a cache that several cores share: 42 M
# parameters of AdamW take 120 ms a step, in chunks of 8 MiB or whole 200, and smaller chunks gain nothing.
CHUNK_BYTES = 2 << 20

_of_thread = threading.local()
_torchs: Any = getattr(Optimizer, "_group_tensors_by_device_and_dtype", None)


class _Key(tuple[Any, ...]):
    """Device and data type of a chunk, which other chunks have too."""

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


def install() -> None:
    """Called once. Does nothing where this torch has no such function: then steps are whole."""
    if _torchs is not None:
        Optimizer._group_tensors_by_device_and_dtype = staticmethod(_grouped)  # type: ignore[method-assign]


def set_chunked(chunked: bool) -> None:
    """Whether this thread's steps are cut from now on."""
    _of_thread.chunked = chunked


def _grouped(tensorlistlist: Any, with_indices: bool = False) -> Any:
    groups: dict[Any, Any] = _torchs(tensorlistlist, with_indices)
    if torch.compiler.is_compiling() or not getattr(_of_thread, "chunked", False):
        return groups
    out: dict[Any, Any] = {}
    for key, (lists, indices) in groups.items():
        for begin, end in _chunks(lists[0]) if _can_be_cut(key[0], lists) else ((0, None),):
            out[_Key(key)] = ([each[begin:end] for each in lists], indices[begin:end])
    return out


def _can_be_cut(device: torch.device | None, lists: Sequence[Sequence[Any]]) -> bool:
    """Not where a parameter stands twice, which is updated twice by sums of both, or where a sparse gradient may lead all another way."""
    if device is None or device.type != "cpu" or len({id(param) for param in lists[0]}) < len(lists[0]):
        return False
    return all(tensor is None or tensor.layout == torch.strided for each in lists[:2] for tensor in each)


def _chunks(params: Sequence[Any]) -> Iterator[tuple[int, int]]:
    """Ranges of parameters that are about as large as a chunk; a larger one is alone."""
    begin = size_bytes = 0
    for index, param in enumerate(params):
        of_param = _largest_shard_bytes(param)
        if index > begin and size_bytes + of_param > CHUNK_BYTES:
            yield begin, index
            begin, size_bytes = index, 0
        size_bytes += of_param
    yield begin, len(params)


def _largest_shard_bytes(param: Any) -> int:
    """Size of the largest shard that a rank has, the same number on all ranks; of a plain tensor its own size."""
    shape = list(param.shape)
    if isinstance(param, DTensor):
        for ranks, placement in zip(param.device_mesh.shape, param.placements):
            dim = getattr(placement, "dim", None)
            if dim is not None:
                shape[dim] = -(-shape[dim] // ranks)
    return math.prod(shape) * param.element_size()
