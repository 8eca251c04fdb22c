"""What each rank counts by itself, and all ranks alike.

A rank is a process, or a thread of one where PyTorch's tests put their ranks (torch.testing's threaded process groups).
"""

from __future__ import annotations

import threading
from collections import defaultdict

import torch.distributed as dist

__all__ = ["next_of"]

_of_process: defaultdict[str, int] = defaultdict(int)
_of_thread = threading.local()
_lock = threading.Lock()


def _ranks_are_threads() -> bool:
    return not isinstance(dist.distributed_c10d._world, dist.distributed_c10d._World)


def next_of(what: str) -> int:
    """0, 1, .. of this rank. Thread-safe."""
    counts = _of_process
    if _ranks_are_threads():
        counts = _of_thread.__dict__.setdefault("counts", defaultdict(int))
    with _lock:
        counts[what] += 1
        return counts[what] - 1
