"""What a process that ends leaves: its jobs where its exit status is not 0, whoever set that, and nothing where it is."""

from __future__ import annotations

import pytest

from job import exit_scenarios
from torchrun import Run, relaunched, torchrun


def _is_freed(run: Run) -> bool:
    return exit_scenarios.is_freed(run.of("job")[-1]["name"])


# One process is all ranks: no other is ended with a signal before it has said that it needs its job no more.
@pytest.mark.parametrize("how", ["sys.exit", "imported", "builtin", "raised", "text", "exception", "hook"])
def test_a_process_that_fails_leaves_its_steps_to_the_next(how: str) -> None:
    run = relaunched(exit_scenarios.ends, 1, how, restarts=1, name=f"fails-{how}")
    assert run.code == 0, run.log
    assert run.results[0]["begin"] == 2, run.log
    assert _is_freed(run)  # by the second, which ended well


def test_torchrun_restarts_a_program_that_raised_system_exit() -> None:
    run = torchrun(exit_scenarios.ends, 2, "raised", restarts=1)
    assert run.code == 0, run.log
    assert [run.results[rank]["begin"] for rank in range(2)] == [2, 2]


def test_a_status_that_main_returned_leaves_its_steps() -> None:
    run = relaunched(exit_scenarios.ends_with_its_result, 1, 3, restarts=1, name="fails-main")
    assert run.code == 0, run.log
    assert [event["step"] for event in run.of("begin")] == [0, 2]


@pytest.mark.parametrize("how", ["end", "raised-0", "caught", "shown"])
def test_a_process_with_status_0_frees_its_job_at_once(how: str) -> None:
    run = relaunched(exit_scenarios.ends, 2, how, name=f"ends-{how}")
    assert run.code == 0, run.log
    assert _is_freed(run), run.log


def test_a_step_that_is_half_made_is_committed_at_the_end() -> None:
    run = relaunched(exit_scenarios.ends_between_two_optimizers, 2, name="half-made")
    assert run.code == 0 and "was not committed" not in run.log, run.log
    assert _is_freed(run), run.log


@pytest.mark.parametrize("how", ["child-3", "child-raises", "child-0"])
def test_a_child_of_multiprocessing_leaves_what_its_status_says(how: str) -> None:
    environment = {"SHARDD_TEST_NO_GROUP": "1"}
    # torchrun's own: a rank of relaunched's is not seen to be a worker, so its children look for no launcher behind it.
    run = torchrun(exit_scenarios.in_a_child, 1, how, restarts=1, environment=environment)
    assert run.code == 0, run.log
    assert [event["step"] for event in run.of("begin")] == ([0] if how == "child-0" else [0, 2])
    assert all(event["freed"] for event in run.of("freed")) and len(run.of("freed")) == (how == "child-0")
