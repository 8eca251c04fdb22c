"""Whole training scripts: a program sees the same on torch's sharding, on shardd's and without any."""

from __future__ import annotations

import pytest
import torch

from cluster import run_ranks
from training import whole_programs


@pytest.mark.parametrize("name", whole_programs.PROGRAMS)
def test_a_program_sees_the_same_everywhere(name: str) -> None:
    for result in run_ranks(whole_programs.all_forms, 2, name):
        want = result["plain"]
        for form, got in result.items():
            assert len(got) == len(want), form
            for number, (a, b) in enumerate(zip(got, want)):
                torch.testing.assert_close(
                    a, b, rtol=1e-3, atol=1e-4, msg=lambda text, at=(form, number): f"{at[0]}, value {at[1]}: {text}"
                )
