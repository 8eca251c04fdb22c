"""That a job has committed steps, said to a later attempt of the launcher where the daemon, which would know, is gone.

An empty file for each job in the user's runtime folder; a job that ends well takes its own away. Jobs whose name no other
process forms have none.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from pathlib import Path

from shardd.torch._process import environment

__all__ = ["forget", "has_committed", "note"]

logger = logging.getLogger("shardd.torch")


def _file(name: str) -> Path:
    runtime = environment.value(environment.RUNTIME_FOLDER)
    folder = Path(runtime, "shardd") if runtime else Path(f"/tmp/shardd-{os.getuid()}")
    return folder / "committed" / hashlib.sha256(name.encode()).hexdigest()[:32]


def note(name: str) -> None:
    """Notes that the job has committed a step."""
    file = _file(name)
    try:
        for folder in (file.parent.parent, file.parent):  # each with the mode, which `parents=True` would not give
            folder.mkdir(mode=0o700, exist_ok=True)
        file.touch(mode=0o600)
    except OSError as error:
        logger.debug('job "%s": that it has committed a step cannot be noted: %s', name, error)


def has_committed(name: str) -> bool:
    file = _file(name)
    with contextlib.suppress(OSError):
        return file.stat().st_uid == os.getuid()
    return False


def forget(name: str) -> None:
    with contextlib.suppress(OSError):
        _file(name).unlink(missing_ok=True)
