"""What each rank has by itself: counts that are alike on all ranks, and which of the process' jobs are its own.

A rank is a process, or a thread of one where PyTorch's tests put their ranks (torch.testing's threaded process groups).
"""

from __future__ import annotations

import threading
from collections import defaultdict

import torch.distributed as dist

__all__ = ["next_of", "rank_thread"]

_of_process: defaultdict[str, int] = defaultdict(int)
_of_thread = threading.local()
_lock = threading.Lock()


def _ranks_are_threads() -> bool:
    return not isinstance(dist.distributed_c10d._world, dist.distributed_c10d._World)


def rank_thread() -> int:
    """Which thread this rank is; 0 where it is the process."""
    return threading.get_ident() if _ranks_are_threads() else 0


def next_of(what: str) -> int:
    """0, 1, .. of this rank. Thread-safe."""
    counts = _of_process
    if _ranks_are_threads():
        counts = _of_thread.__dict__.setdefault("counts", defaultdict(int))
    with _lock:
        counts[what] += 1
        return counts[what] - 1
