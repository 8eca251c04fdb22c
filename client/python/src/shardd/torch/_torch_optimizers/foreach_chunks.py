"""Steps of torch's ``foreach`` implementations in chunks, so that what they compute between is small.

They apply one operation after the other to all tensors of a device and data type, and hold what lies between two for all of them:
with AdamW as much as the parameters. In chunks of some MiB it stays in the processor's caches. No number changes, because
no operation reads another parameter's tensors.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from shardd.torch._units.place import local_of

CHUNK_BYTES = 8 << 20  # of parameters

_of_thread = threading.local()
_torchs = Optimizer._group_tensors_by_device_and_dtype


class _Key(tuple[Any, ...]):
    """Device and data type of a chunk, which other chunks have too."""

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


def install() -> None:
    """Called once."""
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
        for begin, end in _chunks(lists[0]) if key[0] is not None and key[0].type == "cpu" else ((0, None),):
            out[_Key(key)] = ([each[begin:end] for each in lists], indices[begin:end])
    return out


def _chunks(params: Sequence[Any]) -> Iterator[tuple[int, int]]:
    """Ranges of parameters that are about as large as a chunk; a larger one is alone."""
    begin = size_bytes = 0
    for index, param in enumerate(params):
        of_param = local_of(param).nbytes
        if index > begin and size_bytes + of_param > CHUNK_BYTES:
            yield begin, index
            begin, size_bytes = index, 0
        size_bytes += of_param
    yield begin, len(params)
