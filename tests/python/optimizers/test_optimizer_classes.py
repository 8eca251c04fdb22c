"""Optimizers of a program's own classes are built as without the package, and found."""

from __future__ import annotations

from cluster import run_ranks
from optimizers import class_scenarios


def test_optimizers_with_other_bases_are_built_and_found() -> None:
    for result in run_ranks(class_scenarios.other_bases, 1):
        before, after = result["tags"]
        assert before == after and before[0] == before[2] == 1, result
        assert result["found"] == ["Behind", "IsADict", "InFront", "ADictInFront"]
