"""Errors of the library and the daemon, in this package's words."""

from __future__ import annotations

import pytest

from shardd import StepAborted
from shardd.errors import from_code


def test_errors_name_calls_of_this_package() -> None:
    error = from_code(10, "session: rank 1 is lost; call shardd_reattach and go on after step 3")
    assert isinstance(error, StepAborted)
    assert str(error) == "session: rank 1 is lost; call shardd.torch.reattach() and go on after step 3"


@pytest.mark.parametrize(
    "said, here",
    [
        (
            "call shardd_hand_in_edits before writing instead",
            "call shardd.torch.hand_in_edits() before writing instead",
        ),
        ("call shardd_leave_pass first", "finish the backward, or the forward without gradients, first"),
        ("call shardd_leave_full_params first", "leave summon_full_params first"),
        ("call shardd_commit_parameters first", "call shardd.torch.commit() first"),
        ("call shardd_unshard first", "call module.unshard() first"),
        ("call shardd_step first", "call optimizer.step() first"),
        ("call shardd_backward_done first", "finish the backward first"),
    ],
)
def test_what_to_call_is_of_this_package(said: str, here: str) -> None:
    assert str(from_code(9, f"the rank is elsewhere; {said}")) == f"the rank is elsewhere; {here}"


def test_a_missing_contribution_says_what_a_python_program_sets() -> None:
    text = (
        'rank 1 closed backward 0 without SubmitGradients for group "a", which rank 0 submitted; submit it (with an empty '
        "presence mask if there is no gradient), or set allow_missing_contribution"
    )
    said = str(from_code(9, text))
    assert (
        "SHARDD_ALLOW_MISSING_CONTRIBUTION=1" in said and "presence mask" not in said and "SubmitGradients" not in said
    )
