"""What a restart by the launcher does where the daemon knows nothing of the job: a daemon that died had perhaps committed steps."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardd.torch._job import committed_jobs, opening


def _job(lost: dict[str, Any] | None = None) -> Any:
    described = {} if lost is None else {"lost": lost}
    return SimpleNamespace(name="torch-run-0", engine=SimpleNamespace(describe=lambda: json.dumps(described)))


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("SHARDD_START_OVER", raising=False)


def test_a_restart_fails_when_its_steps_died_with_the_daemon() -> None:
    committed_jobs.note("torch-run-0")
    opening._tell_lost(_job(), 0, program_loaded=False)  # a first start
    with pytest.raises(
        RuntimeError, match="cannot be resumed by restart 2: the daemon that had its committed steps is gone"
    ):
        opening._tell_lost(_job(), 2, program_loaded=False)
    opening._tell_lost(_job(), 2, program_loaded=True)  # a checkpoint of its own
    with opening.resuming(True):
        opening._tell_lost(_job(), 2, program_loaded=False)


def test_a_job_that_had_committed_nothing_begins_anew() -> None:
    committed_jobs.note("torch-run-1")
    opening._tell_lost(_job(), 2, program_loaded=False)
    committed_jobs.note("torch-run-0")
    committed_jobs.forget("torch-run-0")  # it ended well
    opening._tell_lost(_job(), 2, program_loaded=False)


def test_the_folders_of_such_notes_are_closed_to_other_users(tmp_path: Path) -> None:
    umask = os.umask(0o022)
    try:
        committed_jobs.note("torch-run-0")
    finally:
        os.umask(umask)
    for folder in (tmp_path / "shardd", tmp_path / "shardd" / "committed"):  # else no daemon starts beside them
        assert folder.stat().st_mode & 0o777 == 0o700
