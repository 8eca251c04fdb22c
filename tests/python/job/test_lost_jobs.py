"""What a restart by the launcher does where the daemon knows nothing of the job: a daemon that died had perhaps committed steps."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardd.torch._job import committed_jobs, resuming
from shardd.torch._units.state import GivenUp


def _job(lost: dict[str, Any] | None = None) -> Any:
    described = {} if lost is None else {"lost": lost}
    engine = SimpleNamespace(describe=lambda: json.dumps(described))
    return SimpleNamespace(name="torch-run-0", engine=engine, notes=SimpleNamespace(index="0"))


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("SHARDD_START_OVER", raising=False)


def test_a_restart_fails_when_its_steps_died_with_the_daemon() -> None:
    committed_jobs.note("torch-run-0")
    resuming.tell_lost(_job(), 0, program_loaded=False)  # a first start
    with pytest.raises(
        RuntimeError, match="cannot be resumed by restart 2: the daemon that had its committed steps is gone"
    ):
        resuming.tell_lost(_job(), 2, program_loaded=False)
    resuming.tell_lost(_job(), 2, program_loaded=True)  # a checkpoint of its own
    with resuming.resuming(True):
        resuming.tell_lost(_job(), 2, program_loaded=False)


def test_a_job_that_had_committed_nothing_begins_anew() -> None:
    committed_jobs.note("torch-run-1")
    resuming.tell_lost(_job(), 2, program_loaded=False)
    committed_jobs.note("torch-run-0")
    committed_jobs.forget("torch-run-0")  # it ended well
    resuming.tell_lost(_job(), 2, program_loaded=False)


def test_a_restart_is_told_where_another_job_went_on() -> None:
    notes = committed_jobs.Notes("torch-run-0", None, writes=True)
    notes.committed()
    first = GivenUp(("torch-run-0",), 3)
    notes.pass_on(first)
    notes.forget()  # its end, where the other one has its values
    others = committed_jobs.Notes("torch-run-0-2", first, writes=True)
    others.committed()
    with pytest.raises(RuntimeError, match="by restart 1: behind committed step 3 the program's optimizers changed"):
        resuming.tell_lost(_job(), 1, program_loaded=False)
    others.forget()
    resuming.tell_lost(_job(), 1, program_loaded=False)
    assert committed_jobs.noted("torch-run-0-2") is None


def test_a_restart_by_another_agent_is_told_of_its_runs_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    notes = committed_jobs.Notes("torch-before-0", None, writes=True)
    notes.index = "0"
    notes.committed()
    with pytest.raises(
        RuntimeError, match=r'in job "torch-before-0", of another process.*SHARDD_JOB=torch-before resumes'
    ):
        resuming.tell_lost(_job(), 1, program_loaded=False)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another")
    resuming.tell_lost(_job(), 1, program_loaded=False)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    resuming.tell_lost(_job(), 0, program_loaded=False)  # a launch of its own, under the same name
    resuming.tell_lost(_job(), 1, program_loaded=False)
    notes.committed()
    notes.forget()  # it ended well
    resuming.tell_lost(_job(), 1, program_loaded=False)


def test_the_folders_of_such_notes_are_closed_to_other_users(tmp_path: Path) -> None:
    umask = os.umask(0o022)
    try:
        committed_jobs.note("torch-run-0")
    finally:
        os.umask(umask)
    for folder in (tmp_path / "shardd", tmp_path / "shardd" / "committed"):  # else no daemon starts beside them
        assert folder.stat().st_mode & 0o777 == 0o700
