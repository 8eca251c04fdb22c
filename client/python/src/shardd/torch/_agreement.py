"""All ranks of a model go on together, or all raise what went wrong on one of them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from shardd.errors import StepAborted

__all__ = ["Meeting"]

_POLL_S = 0.005
_LOOK_S = 0.5
_rounds: dict[str, int] = {}


@dataclass
class Meeting:
    """Of the ranks ``members`` (of the default group), this one being ``members[rank]``, for one purpose.

    ``key``: alike on these ranks and on no others; its rounds are counted. ``job``: a TorchJob whose loss of a rank ends
    the wait, or None. It speaks through the store of the default group, so that a rank that fails says so and waits for
    nobody, Ctrl-C works, and who is missing is named. Not thread-safe.
    """

    key: str
    members: Sequence[int]
    rank: int
    job: Any = None

    def agree(self, what: str, error: BaseException | None = None, limit_s: float | None = None) -> None:
        """Returns when every rank has called it without an error.

        Raises RuntimeError with the rank and its text where another rank had one. With an ``error`` of this rank's own it
        returns at once: the caller raises it. ``limit_s``: at most that long, then TimeoutError with the ranks that are
        missing; by default as long as calls of the daemon wait.
        """
        world = len(self.members)
        if world == 1 or not dist.is_initialized():
            return
        store = dist.distributed_c10d._get_default_store()
        base = f"shardd/meeting/{self.key}"
        number = _rounds.get(base, 0)
        _rounds[base] = number + 1
        said = "" if error is None else f"{type(error).__name__}: {error}"
        store.set(f"{base}/{number}/{self.rank}", "e" + said if error is not None else "o")
        if number > 1:  # everybody has seen it before they came to the round after it
            store.delete_key(f"{base}/{number - 2}/{self.rank}")
        if error is not None:
            return
        if limit_s is None:
            limit_s = int(os.environ.get("SHARDD_TIMEOUT_MS", "0")) / 1000 or 300.0
        waited_for = set(range(world)) - {self.rank}
        deadline = time.monotonic() + limit_s
        looks_at = time.monotonic() + _LOOK_S
        while waited_for:
            for rank in sorted(waited_for):
                key = f"{base}/{number}/{rank}"
                if not store.check([key]):
                    continue
                answer = bytes(store.get(key)).decode()
                if answer != "o":
                    raise RuntimeError(f"{what}: given up on all ranks, because rank {rank} failed ({answer[1:]})")
                waited_for.remove(rank)
            now = time.monotonic()
            if waited_for and now > deadline:
                raise TimeoutError(
                    f"{what}: ranks {sorted(waited_for)} have not come after {limit_s:.0f} s (rank={self.rank}); all ranks "
                    "call it together"
                )
            if waited_for and now > looks_at:
                self._look()
                looks_at = now + _LOOK_S
            if waited_for:
                time.sleep(_POLL_S)

    def _look(self) -> None:
        """Raises where a rank of the job has died."""
        engine = getattr(self.job, "engine", None)
        if engine is None:
            return
        now = int(json.loads(engine.describe())["epoch"])
        if now != engine.info()["epoch"]:
            raise StepAborted(f'job "{self.job.name}": a rank is gone; attach again (shardd.torch.reattach)')
