"""What a call raises, as text, so that a rank can hand it to its test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def text_of(call: Callable[[], Any], otherwise: str = "") -> str:
    """The error's type and text; ``otherwise`` where nothing is raised."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return otherwise
