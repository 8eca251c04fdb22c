"""Stores into parameters that the daemon's optimizer updates need no signal: whoever makes them, whatever handlers there are."""

from __future__ import annotations

from pathlib import Path

from cluster import run_ranks
from process import store_scenarios


def test_stores_by_threads_and_system_calls_count_beside_fault_handlers(tmp_path: Path) -> None:
    first, second = run_ranks(store_scenarios.stores, 2, str(tmp_path))
    for result in (first, second):
        assert result["report"] == "" and result["saved"] and result["filled"] and result["read"]
    assert first["loss"] == second["loss"]
