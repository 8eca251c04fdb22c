"""A job has a name by which restarted workers find theirs and nobody else does."""

from __future__ import annotations

import hashlib
import os
import re
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from shardd.torch._process import environment
from shardd.torch._ranks.nodes import JobRanks
from shardd.torch._ranks.pending import raise_if_they_differ
from shardd.torch._ranks.this_rank import threads_prefix

__all__ = ["Identity", "identify"]

_POLL_S = 0.01


@dataclass(frozen=True)
class Identity:
    name: str
    resumes: bool  # memory of an earlier attempt is taken over
    restarts: int = 0  # of the launcher's workers, the most of any node


def _stat(pid: int) -> list[str]:
    """Returns the fields of /proc/PID/stat from the third on: state, parent, ..."""
    with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
        return file.read().rpartition(")")[2].split()


def _is_worker_of(pid: int, run: str) -> bool:
    """Whether the process was started by torchrun for the run, as a wrapper around a worker is."""
    with open(f"/proc/{pid}/environ", "rb") as file:
        return f"{environment.RUN}={run}".encode() in file.read().split(b"\0")


def _launcher(run: str) -> str:
    """Names torchrun's own process, which lives through restarts of its workers, by its id and when it was started.

    It is the parent, or further up where workers are started through a script of the user's.
    """
    pid = os.getppid()
    try:
        while pid > 1 and _is_worker_of(pid, run):
            pid = int(_stat(pid)[1])
        return f"{pid}-{_stat(pid)[19]}"  # with its start, an id is never used again
    except OSError:
        return str(pid)


def _agree(index: str, mesh_ranks: list[int]) -> str:
    """Returns a new name, the same on all ranks. It waits for the first of them; Ctrl-C ends that."""
    if len(mesh_ranks) == 1:
        return uuid.uuid4().hex[:12]
    try:
        return _agreed(index, mesh_ranks)
    except RuntimeError as error:
        if "Not implemented" not in str(error):
            raise
        raise RuntimeError(
            f"register model: the store of these {len(mesh_ranks)} ranks keeps nothing (a FakeStore; backend "
            f'"{dist.get_backend()}"): ranks are processes that the daemon serves, and have to agree on a job; use backend '
            '"gloo" with all ranks running, or one rank'
        ) from error


def _agreed(index: str, mesh_ranks: list[int]) -> str:
    store = dist.distributed_c10d._get_default_store()
    key = f"shardd/name/{threads_prefix()}{index}"
    if dist.get_rank() == mesh_ranks[0]:
        name = uuid.uuid4().hex[:12]
        store.set(key, name)
        return name
    limit_s = environment.timeout_s()
    deadline = time.monotonic() + limit_s
    while not store.check([key]):  # not get(), which no signal interrupts
        if time.monotonic() > deadline:
            raise TimeoutError(
                f'register model "{index}" of ranks {_few(mesh_ranks)}: rank {mesh_ranks[0]} has not used it after '
                f"{limit_s:.0f} s (rank={dist.get_rank()}); these ranks make their models of one kind in the same order, and "
                "all use them"
            )
        raise_if_they_differ()
        time.sleep(_POLL_S)
    return bytes(store.get(key)).decode()


def _few(ranks: Sequence[int]) -> str:
    return str(list(ranks)) if len(ranks) <= 8 else f"[{', '.join(map(str, ranks[:7]))}, ... {ranks[-1]}]"


def identify(index: str, ranks: JobRanks) -> Identity:
    """Returns the name of the job of the model that ``index`` (``identity_of``, and which registration) tells apart.

    It may wait for the first of the ranks of its mesh.

    Under torchrun: run id, uid and the launcher's process (with several nodes the first rank's); memory is resumed after a
    restart by it. With SHARDD_JOB: that name, on request. Otherwise a name of its own for every run.
    """
    mesh_ranks = ranks.members
    suffix = f"-{index}"
    given = environment.value(environment.JOB)
    if given:
        return Identity(given + suffix, resumes=True, restarts=environment.restarts())
    run = environment.value(environment.RUN)
    if run:
        host = environment.value(environment.GROUP_RANK) or "0"
        readable = re.sub(r"[^A-Za-z0-9_-]", "_", run)[:40]
        key = hashlib.sha256(f"{run}\0{os.getuid()}\0{_launcher(run)}\0{host}".encode()).hexdigest()[:12]
        name = f"torch-{readable}-{key}{suffix}"
        restarts = environment.restarts()
        if ranks.several:
            name, restarts = ranks.agree(index, name, restarts)
        return Identity(name, resumes=restarts > 0, restarts=restarts)
    return Identity(f"torch-{_agree(index, mesh_ranks)}{suffix}", resumes=False)
