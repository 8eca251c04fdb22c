"""What is around weights that say themselves how they are gathered: meshes, unsharding by hand, errors, refusals."""

from __future__ import annotations

import pytest
import torch

from cluster import run_ranks
from subclasses.edge_scenarios import (
    errors_on_all_ranks,
    kept_behind_backward,
    other_ways_on_both,
    refusals,
    state_dicts_are_copies_of_now,
    uneven_rows,
    unfrozen_on_both,
)


def test_other_meshes_and_ways_to_unshard_are_as_torchs() -> None:
    for results in run_ranks(other_ways_on_both, 4):
        for what in ("losses", "shown", "values"):
            torch.testing.assert_close(results["shardd"][what], results["torch"][what], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("optimizer", ["torch", "daemon"])
def test_what_stays_unsharded_over_a_step_has_its_values(optimizer: str) -> None:
    for losses in run_ranks(kept_behind_backward, 2, optimizer):
        torch.testing.assert_close(losses["kept"], losses["torch"], rtol=1e-6, atol=1e-6)
        assert all(losses["unsharded"])
        assert losses["kept"][0] - losses["kept"][-1] > 0.01  # old values would show


@pytest.mark.parametrize("optimizer", ["torch", "daemon"])
def test_weights_that_are_unfrozen_train_as_torchs(optimizer: str) -> None:
    for results in run_ranks(unfrozen_on_both, 2, optimizer):
        for what in ("losses", "values"):
            torch.testing.assert_close(results["shardd"][what], results["torch"][what], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("width", "want"),
    [
        (13, 'RuntimeError: unshard "0.weight": rank '),
        (100, 'parameter "0.weight": shape differs (got [2, 7'),
    ],
    ids=["rows-of-as-many-bytes", "rows-of-others"],
)
def test_uneven_weights_of_several_tensors_raise_on_all(width: int, want: str) -> None:
    for said in run_ranks(uneven_rows, 2, width):
        assert want in said, said


def test_what_one_rank_cannot_send_is_an_error_on_all() -> None:
    for rank, found in enumerate(run_ranks(errors_on_all_ranks, 2)):
        want = (
            "ValueError: out of luck"
            if rank == 1
            else 'RuntimeError: unshard "1.weight": fsdp_pre_all_gather has raised on rank 1'
        )
        assert found["raised"].startswith(want)
        assert found["after"] == "alike"
        assert found["uneven"].startswith(f'RuntimeError: unshard "0.weight": rank {1 - rank} sends something else'), (
            found
        )


def test_what_is_not_served_is_refused_by_name() -> None:
    want = {
        "flat": 'NotImplementedError: shard parameter "weight" of Linear: it is a Low',
        "wrapper": 'NotImplementedError: shard parameter "weight" of Linear: it is a Low',
        "one method": "AssertionError: Both fsdp_pre_all_gather and fsdp_post_all_gather should be defined",
        "nested": 'NotImplementedError: fully_shard: a parameter of shape (4, 4): it is a Low, and its tensor "_data" is a subclass',
        "gpu": "NotImplementedError: fully_shard: a parameter: it is a Low, with fsdp_pre_all_gather, on a GPU",
        "tensor parallel": "NotImplementedError: fully_shard: a parameter of shape (4, 4), which is tensor parallel: it is a Low",
        "trained rows": 'NotImplementedError: register parameter "weight": it is a Codes of several tensors (codes, scales)',
        "columns": "NotImplementedError: fully_shard: a parameter of shape (4, 12): shard_placement_fn cuts its dimension 1",
        "safetensors": "NotImplementedError: safetensors: a parameter of the model is a tensor subclass",
        "reattach": 'NotImplementedError: reattach: parameter "0.weight" is a tensor subclass with fsdp_pre_all_gather',
        "summon": 'NotImplementedError: summon_full_params: parameter "0.weight" is a tensor subclass',
    }
    for found in run_ranks(refusals, 2):
        for what, begin in want.items():
            assert found[what].startswith(begin), (what, found[what])


def test_state_dicts_have_the_values_of_their_time() -> None:
    for wrong in run_ranks(state_dicts_are_copies_of_now, 2, 8):
        assert wrong == []
