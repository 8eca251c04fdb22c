"""``steps`` tries again what a death ended, and raises what ends every attempt."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from shardd import StepAborted
from shardd.torch._training import api, steps


def _resume(monkeypatch: pytest.MonkeyPatch, outcomes: list[Any]) -> Iterator[int]:
    left = iter(outcomes)

    def resume(module: Any) -> Any:
        outcome = next(left)
        if isinstance(outcome, str):
            raise StepAborted(outcome, 10)
        return outcome

    monkeypatch.setattr(api, "resume", resume)
    return steps.steps(0)


def test_what_ends_each_attempt_in_the_same_words_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StepAborted, match="initial values differ"):
        next(_resume(monkeypatch, ["initial values differ: a.weight"] * 100))


def test_deaths_are_outlived_however_many(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = "session: rank 1 is lost: its process ended; no command yet"
    assert list(_resume(monkeypatch, [lost, lost, lost, "another thing", lost, (0, None)])) == []
