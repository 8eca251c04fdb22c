"""Ranks with different numbers of batches train as one process with those batches does."""

from __future__ import annotations

import torch

from cluster import run_ranks
from training import uneven_scenarios


def test_ranks_that_ran_out_count_as_nothing() -> None:
    """One rank has no batch at all, and runs NaNs."""
    for result in run_ranks(uneven_scenarios.uneven, 3):
        for form, rounds, values, want in result:
            assert rounds == max(uneven_scenarios.LENGTHS)
            torch.testing.assert_close(
                values, want, rtol=1e-3, atol=1e-5, msg=lambda text, form=form: f"{form}: {text}"
            )


def test_what_cannot_be_joined_is_named() -> None:
    first, second = run_ranks(uneven_scenarios.refused, 2)
    assert 'unknown mean_over (got \'most\', want "contributing" or "all")' in first[0] and first[0] == second[0]
    assert "another number of batches than its len() says (got 1, want 2; rank=0)" in first[1] and second[1] == ""
    assert "no batch at all" in first[2] and "got None on 1 of 2 ranks" in second[2]
    assert all('another number of ranks has a batch while the gradient of "' in texts[3] for texts in (first, second))
