"""Ranks that register different models as one wait for each other; while they do, they find out."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch.distributed as dist

from shardd.torch._process.extension import _C
from shardd.torch._ranks.agreement import have_store
from shardd.torch._ranks.this_rank import rank_thread, threads_prefix

__all__ = ["Pending", "raise_if_they_differ"]

_PATIENCE_S = 1.0  # of two ranks that wait under different identities; it is no matter of one being a little ahead
_POLL_S = 0.25
_NAMES_S = 2.0  # for the other rank to say what its parameters are called
_KEPT = 64  # identities that a rank says it has registered

_pending: list[Pending] = []  # of this process, the newest last
_registered: list[str] = []


class Pending:
    """``with Pending(index, members, rank, names):`` around the registration of a model by all ``members``.

    The rank says in the store of the default group what it registers, and looks at what its neighbours among ``members``
    do. Where one of them has registered another model for a second, over the same ranks, and neither has registered the
    other's, they wait for each other: waits of this process end, and ``difference`` says how the models differ. ``names``
    returns the names of the parameters, and is asked in that case alone.

    Nothing happens where ranks have no store or are threads of one process.
    """

    def __init__(self, index: str, members: Sequence[int], rank: int, names: Callable[[], list[str]]) -> None:
        self.index = index
        self.difference = ""
        self._own = members[rank]
        self._others = list(dict.fromkeys(members[(rank + by) % len(members)] for by in (1, -1)))
        self._among = hashlib.sha256(",".join(map(str, members)).encode()).hexdigest()[:12]
        self._names = names
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        if len(members) > 1 and rank_thread() == 0 and have_store():
            self._thread = threading.Thread(target=self._watch, name="shardd registration", daemon=True)

    def __enter__(self) -> Pending:
        if self._thread is not None:
            _pending.append(self)
            self._say(self.index)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._thread is None:
            return
        self._over.set()
        self._thread.join()
        _pending.remove(self)
        if kind is None:
            _registered.append(self.index)
            del _registered[:-_KEPT]
        if not self.difference:  # else it stays, for the other rank to find
            self._say("")

    def _say(self, index: str) -> None:
        _put(_key("now", self._own), {"index": index, "among": self._among, "done": _registered})

    def _watch(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone, and its other users say so
            self._look()

    def _look(self) -> None:
        since: dict[int, tuple[str, float]] = {}
        while not self._over.wait(_POLL_S):
            for other in self._others:
                index = self._registers_another(other)
                before, begin = since.get(other, ("", 0.0))
                if index != before:
                    since[other] = (index, time.monotonic())
                elif index and time.monotonic() - begin >= _PATIENCE_S:
                    self.difference = self._describe(other, index)
                    _C.end_waits()
                    return

    def _registers_another(self, other: int) -> str:
        """Returns what ``other`` registers and waits for this rank in, while this rank waits for it; empty: nothing."""
        said = _get(_key("now", other))
        if not said or said["among"] != self._among or said["index"] in ("", self.index):
            return ""
        return "" if self.index in said["done"] or said["index"] in _registered else str(said["index"])

    def _describe(self, other: int, index: str) -> str:
        names = self._names()
        _put(_key("names", self._own), {"index": self.index, "names": names})
        deadline = time.monotonic() + _NAMES_S
        theirs = None
        while theirs is None and time.monotonic() < deadline:
            said = _get(_key("names", other))
            if said and said["index"] == index:
                theirs = said["names"]
            else:
                time.sleep(_POLL_S / 5)
        return (
            f'register model "{self.index}" (rank={self._own}): rank {other} registers another one, "{index}"'
            f"{'' if theirs is None else _first_difference(names, theirs, other)}; all ranks make the same model"
        )


def _first_difference(names: Sequence[str], theirs: Sequence[str], other: int) -> str:
    for number in range(max(len(names), len(theirs))):
        here, there = (each[number] if number < len(each) else None for each in (names, theirs))
        if here != there:
            return f", whose parameters differ first at index {number}: {_called(here)} here, {_called(there)} on rank {other}"
    return ", of other classes or in another order"


def _called(name: str | None) -> str:
    return "none" if name is None else f'"{name}"'


def raise_if_they_differ() -> None:
    """RuntimeError where a model that this process registers was found to be another one than another rank's."""
    for pending in _pending:
        if pending.difference:
            raise RuntimeError(pending.difference)


def _key(what: str, rank: int) -> str:
    return f"shardd/pending/{what}/{threads_prefix()}{rank}"


def _put(key: str, value: dict[str, Any]) -> None:
    dist.distributed_c10d._get_default_store().set(key, json.dumps(value))


def _get(key: str) -> dict[str, Any] | None:
    store = dist.distributed_c10d._get_default_store()
    return json.loads(bytes(store.get(key)).decode()) if store.check([key]) else None
