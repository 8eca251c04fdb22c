"""That a job has committed steps, said to a later attempt of the launcher where the daemon, which would know, is gone.

A file for each job in the user's runtime folder; a job that ends well takes its own away. It is empty, or says what has become of
what the job had committed. Jobs whose name no other process forms have none.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from pathlib import Path

from shardd.torch._process import environment
from shardd.torch._units.state import GivenUp

__all__ = ["Notes", "begin_run", "forget", "note", "noted", "other_of_run"]

logger = logging.getLogger("shardd.torch")


def _file(name: str) -> Path:
    runtime = environment.value(environment.RUNTIME_FOLDER)
    folder = Path(runtime, "shardd") if runtime else Path(f"/tmp/shardd-{os.getuid()}")
    return folder / "committed" / hashlib.sha256(name.encode()).hexdigest()[:32]


def note(name: str, text: str = "") -> None:
    """Notes that the job has committed a step, and with ``text`` why a restart does not find it."""
    file = _file(name)
    try:
        for folder in (file.parent.parent, file.parent):  # each with the mode, which `parents=True` would not give
            folder.mkdir(mode=0o700, exist_ok=True)
        file.touch(mode=0o600)
        file.write_text(text)
    except OSError as error:
        logger.debug('job "%s": that it has committed a step cannot be noted: %s', name, error)


def noted(name: str) -> str | None:
    """Returns the note's text; None: there is none."""
    file = _file(name)
    with contextlib.suppress(OSError):
        return file.read_text() if file.stat().st_uid == os.getuid() else None
    return None


def forget(name: str) -> None:
    with contextlib.suppress(OSError):
        _file(name).unlink(missing_ok=True)


def _of_run(index: str) -> str:
    """What stands for a name where the launcher's run is known, and not which of its processes, or nodes, has started this one."""
    return f"run {environment.value(environment.RUN)} {index}"


def other_of_run(index: str, name: str) -> str:
    """Returns the job of another name that has committed a step of the same model of this run; empty: there is none."""
    other = (noted(_of_run(index)) or "") if environment.of_launcher() else ""
    return other if other != name and noted(other) is not None else ""


def begin_run(index: str) -> None:
    """The launcher starts its run: what another one of that name has left is none of it."""
    if environment.of_launcher():
        forget(_of_run(index))


class Notes:
    """What one rank of a node notes of a job, and of the jobs in whose place it is. ``writes``: whether it is that rank."""

    def __init__(self, name: str, before: GivenUp | None, writes: bool) -> None:
        self._name, self._before, self._writes = name, before, writes
        self._passed_on = False
        self.index = ""  # of the model among those of its run
        self.wanted = writes  # that there is a committed step

    def committed(self) -> None:
        self.wanted = False
        note(self._name)
        if self.index and environment.of_launcher():
            note(_of_run(self.index), self._name)
        self._say_taken()

    def pass_on(self, given_up: GivenUp) -> None:
        """The program goes on in another job, whose end takes the notes away."""
        self._passed_on, self._before = True, given_up
        if given_up.step > 0:
            self._say_taken()

    def forget(self) -> None:
        """The program needs the job no more: a restart that does not find it has lost nothing."""
        for name in self._names() if not self._passed_on else []:
            forget(name)

    def files(self) -> list[str]:
        """Returns the files that are to go where the process ends well."""
        return [str(_file(name)) for name in self._names()]

    def _names(self) -> list[str]:
        before = self._before.names[:1] if self._before is not None else ()
        of_run = [_of_run(self.index)] if self.index and environment.of_launcher() else []
        return [*before, self._name, *of_run] if self._writes else []

    def _say_taken(self) -> None:
        # A restart registers the model as it was at first.
        if self._before is not None and self._writes:
            note(
                self._before.names[0],
                f"behind committed step {self._before.step} the program's optimizers changed, and what is committed since is in "
                "another job, in the middle of the program's loop; a restart goes on where all steps are PyTorch's "
                "(--stock-optimizers, install(optimizers=False)), or where optimizers are built before the model's first use",
            )
