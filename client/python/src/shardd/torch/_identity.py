"""How a job is known, so that restarted workers find theirs and nobody else does."""

from __future__ import annotations

import hashlib
import os
import re
import uuid
from dataclasses import dataclass

import torch.distributed as dist

__all__ = ["Identity", "identify"]


@dataclass(frozen=True)
class Identity:
    name: str
    resumes: bool  # memory of an earlier attempt is taken over


def _start_time(pid: int) -> str:
    """When the process was started, in clock ticks since boot: with its id it is never used again."""
    with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
        return file.read().rpartition(")")[2].split()[19]


def identify(index: int, mesh_ranks: list[int], group: dist.ProcessGroup) -> Identity:
    """For the process's ``index``-th model, on the ranks of its mesh. May wait for those ranks.

    Under torchrun: run id, uid and the launcher's process; memory is resumed after a restart by it. With SHARDD_JOB:
    that name, on request. Otherwise a name of its own for every run.
    """
    members = "" if len(mesh_ranks) == dist.get_world_size() else "-r" + "_".join(map(str, mesh_ranks[:1]))
    suffix = f"-{index}{members}"
    given = os.environ.get("SHARDD_JOB")
    if given:
        return Identity(given + suffix, resumes=True)
    run = os.environ.get("TORCHELASTIC_RUN_ID")
    if run is not None:
        launcher = os.getppid()
        try:
            instance = f"{launcher}-{_start_time(launcher)}"
        except OSError:
            instance = str(launcher)
        host = os.environ.get("GROUP_RANK", "0")
        readable = re.sub(r"[^A-Za-z0-9_-]", "_", run)[:40]
        key = hashlib.sha256(f"{run}\0{os.getuid()}\0{instance}\0{host}".encode()).hexdigest()[:12]
        return Identity(
            f"torch-{readable}-{key}{suffix}", resumes=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
        )
    if dist.get_world_size(group) == 1:
        return Identity(f"torch-{uuid.uuid4().hex[:12]}{suffix}", resumes=False)
    box = [uuid.uuid4().hex[:12]]
    dist.broadcast_object_list(box, src=mesh_ranks[0], group=group)
    return Identity(f"torch-{box[0]}{suffix}", resumes=False)
