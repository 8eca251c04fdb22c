"""How torch's own optimizers take less memory on shards, which changes no bit: state ahead of the first step, ``foreach`` in chunks."""

from __future__ import annotations

import pytest

from cluster import run_ranks
from optimizers import stock_memory_scenarios
from optimizers.test_optim_stock import _equal


@pytest.mark.parametrize(
    "kind", ["adamw", "adamw-foreach", "amsgrad", "rmsprop", "nadam", "radam", "adadelta", "adamax"]
)
def test_the_first_step_finds_its_state_in_the_job(kind: str) -> None:
    for facts in run_ranks(stock_memory_scenarios.first_step, 2, kind):
        assert facts["own"] == 0 and facts["in_job"] >= facts["params"], facts


@pytest.mark.parametrize("kind", ["adamw-foreach", "amsgrad"])
def test_foreach_steps_hold_a_chunk_and_change_no_bit(kind: str) -> None:
    for cut, whole in zip(
        run_ranks(stock_memory_scenarios.between_operations, 2, kind, 1 << 10),
        run_ranks(stock_memory_scenarios.between_operations, 2, kind, 1 << 30),
    ):
        assert whole["most"] == whole["all"], "nothing is cut"
        assert cut["most"] <= max(1 << 10, cut["largest"]) < cut["all"] / 2
        _equal(cut, whole)


@pytest.mark.parametrize("kind", sorted(stock_memory_scenarios.FOREACH))
def test_foreach_steps_in_chunks_have_torchs_bits(kind: str) -> None:
    for facts in run_ranks(stock_memory_scenarios.beside_torch, 2, kind):
        assert all(facts["same"]) and facts["theirs"] == 1, facts
        assert (facts["ours"] > 1) == (kind != "Adagrad"), facts


def test_a_programs_optimizer_groups_its_tensors_as_in_torch() -> None:
    for facts in run_ranks(stock_memory_scenarios.beside_torch, 2, "ByGroupNorm"):
        assert all(facts["same"]) and facts["ours"] == facts["theirs"] == 1, facts


@pytest.mark.parametrize(
    ("kind", "hook", "everywhere"),
    [
        ("Rprop", "warm-up", False),
        ("ASGD", "warm-up", False),
        ("ASGD", "warm-up", True),
        ("Adam", "amsgrad", False),
        ("AdamW", "skip", False),
        ("AdamW", "skip", True),
    ],
)
def test_a_programs_hook_before_the_first_step_counts(kind: str, hook: str, everywhere: bool) -> None:
    for facts in run_ranks(stock_memory_scenarios.beside_torch, 2, kind, hook, everywhere):
        assert all(facts["same"]), facts


def test_shared_sparse_and_foreign_tensors_are_not_cut() -> None:
    (groups,) = run_ranks(stock_memory_scenarios.groups_of_plain_tensors, 1)
    assert groups == {"three": 3, "one of them twice": 1, "one sparse": 1, "a program's": 1}


def test_dropped_state_and_empty_state_are_not_committed() -> None:
    for facts in run_ranks(stock_memory_scenarios.dropped_state, 2):
        assert facts["all"] == facts["params"] and facts["dropped"] == 3 == facts["params"] - facts["beside"], facts
        assert facts["others"] == 0 and set(facts["numbers"]) == {7}, facts
