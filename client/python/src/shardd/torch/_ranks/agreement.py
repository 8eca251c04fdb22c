"""All ranks of a model go on together, or all raise what went wrong on one of them.

A round is told from others by what all ranks know alike: of a registered model the daemon's epoch and how many sessions its
job has had, which change where a rank is replaced, and within those by a count that each rank keeps. So a process that
takes another's place counts with the ones that went on in theirs, from 0. On several nodes each daemon has its own epoch and
sessions: a round is told by all of them, as their ranks say last.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from shardd.errors import StepAborted
from shardd.torch._process.environment import timeout_s
from shardd.torch._ranks.this_rank import next_of, threads_prefix

__all__ = ["Meeting", "check_alike", "publish_attributes"]

_POLL_S = 0.005
_LOOK_S = 0.5
_LEAVE_S = 30.0  # for another rank to notice what this one has noticed
_OK, _FAILED = "o", "e"  # what a rank says begins with one of them


def _key_of(name: str, rank: int) -> str:
    return f"shardd/alike/{name}/{rank}"


def have_store() -> bool:
    """Whether the processes have a store in common. Without collectives (backend "fake") they know each other by the daemon only."""
    return dist.is_initialized() and dist.get_backend() != "fake"


def publish_attributes(name: str, rank: int, values: dict[str, Any]) -> None:
    """Publishes what ``check_alike`` compares after the ranks of job ``name`` have met. It is called before they meet."""
    if have_store():
        dist.distributed_c10d._get_default_store().set(_key_of(name, rank), json.dumps(values))


def check_alike(name: str, meeting: Meeting) -> None:
    """Compares attributes after the ranks have met. ValueError, on all ranks, where two have published different values: it names both.

    Who finds it gives the job up, so it waits for the others (a while: one may have been killed) to have left what they
    were in before; they would be told there that this rank is gone.
    """
    world_size, rank = len(meeting.members), meeting.rank
    if world_size == 1:
        return
    store = dist.distributed_c10d._get_default_store()
    told = [json.loads(bytes(store.get(_key_of(name, other))).decode()) for other in range(world_size)]
    for other in range(1, world_size):
        for attribute in sorted(told[0].keys() | told[other].keys()):
            if told[0].get(attribute) != told[other].get(attribute):
                with contextlib.suppress(Exception):
                    meeting.agree(f'leave job "{name}"', limit_s=_LEAVE_S)
                raise ValueError(
                    f'register model as job "{name}": Expects one homogeneous value for {attribute} but got '
                    f"{told[0].get(attribute)} on rank 0 and {told[other].get(attribute)} on rank {other} (rank={rank})"
                )


@dataclass
class Meeting:
    """A meeting of the ranks ``members`` (of the default group), this one being ``members[rank]``, for one purpose.

    ``key``: alike on these ranks and on no others. ``job``: the TorchJob of a registered model, or None; the loss of a rank
    of it ends the wait. Ranks meet in the store of the default group, so that a rank that fails says so and waits for
    nobody, Ctrl-C works, and who is missing is named. Not thread-safe.
    """

    key: str
    members: Sequence[int]
    rank: int
    job: Any = None

    def agree(
        self, what: str, error: BaseException | None = None, limit_s: float | None = None, part: str = ""
    ) -> None:
        """Returns when every rank has called it without an error.

        Raises RuntimeError with the rank and its text where another rank had one, or came for another ``part`` (alike on
        all ranks); StepAborted where a rank of the job has died. With an ``error`` of this rank's own it returns at once:
        the caller raises it. ``limit_s``: at most that long, then TimeoutError with the ranks that are missing; by default
        as long as calls of the daemon wait. Who comes after another rank has given up waiting raises, too.
        """
        world = len(self.members)
        if world == 1 or not dist.is_initialized():
            return
        if error is not None:
            with contextlib.suppress(Exception):  # the daemon is gone: the others get that from it
                _Round(self, self._base()).post(_FAILED + _text(error))
            return
        if limit_s is None:
            limit_s = timeout_s()
        now = self._begin(part)
        waited_for = set(range(world)) - {self.rank}
        deadline = time.monotonic() + limit_s
        looks_at = time.monotonic() + _LOOK_S
        try:
            while waited_for:
                waited_for = {rank for rank in waited_for if not self._came(now, rank, what, part)}
                clock = time.monotonic()
                if waited_for and clock > deadline:
                    raise TimeoutError(
                        f"{what}: ranks {sorted(waited_for)} have not come after {limit_s:.0f} s (rank={self.rank}); all "
                        "ranks call it together"
                    )
                if waited_for and clock > looks_at:
                    if self._base() != now.base:  # another process has come for a rank that left
                        now = self._begin(part)
                        waited_for = set(range(world)) - {self.rank}
                    looks_at = clock + _LOOK_S
                if waited_for:
                    time.sleep(_POLL_S)
        except RuntimeError:
            raise  # what another rank or the daemon has said, which all read for themselves
        except BaseException as failure:
            with contextlib.suppress(Exception):
                now.post(_FAILED + _text(failure))  # for who comes later
            raise
        now.end()

    def _begin(self, part: str) -> _Round:
        round_ = _Round(self, self._base())
        round_.post(_OK + part)
        return round_

    def _came(self, now: _Round, rank: int, what: str, part: str) -> bool:
        posted = now.posted_by(rank)
        if posted is None:
            return False
        if posted.startswith(_FAILED):
            raise RuntimeError(f"{what}: given up on all ranks, because rank {rank} failed ({posted[1:]})")
        if posted[1:] != part:
            raise RuntimeError(
                f'{what}: rank {rank} is elsewhere (got "{posted[1:]}", want "{part}"; rank={self.rank}); all ranks call it '
                "together"
            )
        return True

    def _base(self) -> str:
        """Returns what the keys of a round begin with. Raises StepAborted where a rank of the job has died."""
        engine = getattr(self.job, "engine", None)
        if engine is None:
            return f"shardd/meeting/{threads_prefix()}{self.key}"
        job = json.loads(engine.describe())
        if int(job["epoch"]) != engine.info()["epoch"]:
            raise StepAborted(f'job "{self.job.name}": a rank is gone; attach again (shardd.torch.reattach)')
        begins = f"shardd/meeting/{self.job.name}"
        return f"{begins}/{self.job.ranks.across(begins, job['epoch'] + '/' + job['counters']['attaches'])}/{self.key}"


class _Round:
    """The next round of this rank under ``base``."""

    def __init__(self, meeting: Meeting, base: str) -> None:
        self.base, self._rank = base, meeting.rank
        self._number = next_of(base)
        self._store = dist.distributed_c10d._get_default_store()

    def post(self, text: str) -> None:
        self._store.set(f"{self.base}/{self._number}/{self._rank}", text)

    def posted_by(self, rank: int) -> str | None:
        key = f"{self.base}/{self._number}/{rank}"
        return bytes(self._store.get(key)).decode() if self._store.check([key]) else None

    def end(self) -> None:
        """Deletes what was posted in the round before: all have come to this one, so nobody reads it."""
        if self._number > 0:
            self._store.delete_key(f"{self.base}/{self._number - 1}/{self._rank}")


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
