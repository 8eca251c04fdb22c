"""A job that was opened with a secret is resumed by those who give it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from cluster import Cluster
from job import secret_scenarios

_NAMED = {"SHARDD_JOB": "with-a-secret", "TORCHELASTIC_RESTART_COUNT": "0"}


def _run(folder: Path, environment: dict[str, str], dies: bool = False) -> list[Any]:
    folder.mkdir()
    with Cluster(2, str(folder), {**_NAMED, **environment}) as cluster:
        for rank in range(2):
            cluster.start(secret_scenarios.resumes, rank, (3, dies))
        codes = cluster.wait(120)
        assert set(codes.values()) == {7 if dies else 0}, [cluster.log(rank) for rank in range(2)]
        return [] if dies else [cluster.result(rank) for rank in range(2)]


def test_a_job_with_a_secret_is_resumed_only_with_it(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("0123456789abcdef\n")
    file.chmod(0o600)
    _run(tmp_path / "first", {"SHARDD_JOB_SECRET_FILE": str(file)}, dies=True)
    for name, secret in ("none", ""), ("other", "0123456789abcdeF"):
        for start, text in _run(tmp_path / name, {"SHARDD_JOB_SECRET": secret}):
            assert start == -1 and "SHARDD_JOB_SECRET" in text, text
            assert "0123456789" not in text
    file.chmod(0o644)
    for start, text in _run(tmp_path / "open", {"SHARDD_JOB_SECRET_FILE": str(file)}):
        assert start == -1 and str(file) in text and "others may read" in text, text
    assert _run(tmp_path / "right", {"SHARDD_JOB_SECRET": "0123456789abcdef"}) == [(3, "")] * 2
    assert (
        "0123456789abcdef" not in Path(os.environ["SHARDD_ADDRESS"].removeprefix("unix:")).with_name("log").read_text()
    )
