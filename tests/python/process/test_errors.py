"""Errors of the library and the daemon, in this package's words."""

from __future__ import annotations

from shardd import StepAborted
from shardd.errors import from_code


def test_errors_name_calls_of_this_package() -> None:
    error = from_code(10, "session: rank 1 is lost; call shardd_reattach and go on after step 3")
    assert isinstance(error, StepAborted)
    assert str(error) == "session: rank 1 is lost; call shardd.torch.reattach() and go on after step 3"
