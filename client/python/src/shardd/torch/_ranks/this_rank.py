"""A rank has counts of its own, alike on all ranks, and jobs of its own, although ranks may be threads of one process.

A rank is a process, or a thread of one where PyTorch's tests put their ranks (torch.testing's threaded process groups).
"""

from __future__ import annotations

import _thread
import contextlib
import itertools
import os
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

__all__ = ["at_end_of_thread", "next_of", "rank_thread", "threads_prefix"]

_of_process: defaultdict[str, int] = defaultdict(int)
_of_thread = threading.local()
_lock = threading.Lock()
_numbers = itertools.count(1)


def _ranks_are_threads() -> bool:
    return not isinstance(dist.distributed_c10d._world, dist.distributed_c10d._World)


def rank_thread() -> int:
    """Returns the number of the thread that is this rank, never used again; 0 where the rank is the process."""
    if not _ranks_are_threads():
        return 0
    mine = _of_thread.__dict__
    if "number" not in mine:
        mine["number"] = next(_numbers)
    return int(mine["number"])


def next_of(what: str) -> int:
    """Counts 0, 1, .. for this rank. Thread-safe."""
    counts = _of_process
    if _ranks_are_threads():
        counts = _of_thread.__dict__.setdefault("counts", defaultdict(int))
    with _lock:
        counts[what] += 1
        return counts[what] - 1


@dataclass
class _Threads:
    """The threads that are ranks of one store at the same time."""

    store: Any
    number: int
    by_rank: dict[int, threading.Thread] = field(default_factory=dict)


_groups: list[_Threads] = []


def _join(store: Any) -> _Threads:
    """Adds this rank to the threads of the store that still run and miss it, or to new ones."""
    rank = dist.get_rank()
    with _lock:
        _groups[:] = [group for group in _groups if any(thread.is_alive() for thread in group.by_rank.values())]
        for group in _groups:
            before = group.by_rank.get(rank)
            if group.store is store and (before is None or not before.is_alive()):
                break
        else:
            group = _Threads(store, next(_numbers))
            _groups.append(group)
        group.by_rank[rank] = threading.current_thread()
    return group


def threads_prefix() -> str:
    """Returns what keys in the default group's store begin with. A store may outlive threads that are ranks, and the counts of the
    next ones begin anew; processes say nothing.
    """
    if not _ranks_are_threads():
        return ""
    store = dist.distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    group = _of_thread.__dict__.get("group")
    if group is None or group.store is not store:
        group = _of_thread.group = _join(store)
    return f"threads-{group.number}/"


class _End:
    """Calls what was registered when the thread that has it ends."""

    def __init__(self) -> None:
        self.calls: list[weakref.WeakMethod[Callable[[], None]]] = []
        self._process = os.getpid()

    def __del__(self) -> None:
        if os.getpid() == self._process:  # a forked child has none of its parent's threads
            with contextlib.suppress(RuntimeError):  # the interpreter ends, which ends the jobs as well
                _thread.start_new_thread(_call_all, (self.calls,))


def _call_all(calls: list[weakref.WeakMethod[Callable[[], None]]]) -> None:
    for call in calls:
        method = call()
        if method is not None:
            with contextlib.suppress(Exception):  # nobody is left to be told
                method()


def at_end_of_thread(method: Callable[[], None]) -> None:
    """`method`, of an object that is not kept for it, runs beside the program once this rank's thread has ended. Never where
    the rank is the process.
    """
    if _ranks_are_threads():
        mine = _of_thread.__dict__
        if "end" not in mine:
            mine["end"] = _End()
        mine["end"].calls.append(weakref.WeakMethod(method))
