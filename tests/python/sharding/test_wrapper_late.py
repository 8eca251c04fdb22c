"""A rank that notices a difference late, parameters unfrozen with gradients there, and outputs that hide their tensors."""

from __future__ import annotations

from cluster import run_ranks
from sharding import wrapper_late
from state_dicts.test_state_dict import same


def test_a_rank_that_notices_late_is_told_the_difference() -> None:
    text = "Expects one homogeneous value for limit_all_gathers but got True on rank 0 and False on rank 1"
    for rank, error in enumerate(run_ranks(wrapper_late.noticed_late, 2)):
        assert error.startswith("ValueError: ") and f"{text} (rank={rank})" in error, error


def test_parameters_are_unfrozen_while_gradients_of_others_are_there() -> None:
    for result in run_ranks(wrapper_late.unfrozen_with_gradients, 2):
        for name, got in result.items():
            want = got.pop("alone")
            for optimizer, ours in got.items():
                if name == "FlatParameter":  # PyTorch shows whole gradients of original parameters alone
                    ours["gradients"] = want["gradients"]
                same(ours, want, f"{name} {optimizer}", 1e-6)


def test_a_root_whose_output_hides_its_tensors_gets_its_gradients() -> None:
    for result in run_ranks(wrapper_late.hidden_outputs, 2):
        for face, got in result.items():
            want = got.pop("tensor")
            for how, seen in got.items():
                if face == "reshards":  # nothing says that they are needed again before the first is used
                    assert "is resharded" in seen[0] and "call unshard() on that module" in seen[0]
                    continue
                same(seen, want, f"{face} {how}", 1e-6)


def test_process_groups_without_processes_are_refused_with_what_to_use() -> None:
    (texts,) = run_ranks(wrapper_late.stand_ins, 1)
    for name in ("mock", "stub"):
        assert "process_group: " in texts[name] and 'use backend "gloo"' in texts[name], texts
    for name in ("fake", "fake wrapper"):
        assert "FakeStore" in texts[name] and 'use backend "gloo"' in texts[name], texts


def test_a_store_into_a_piece_during_full_parameters_is_named() -> None:
    other, error = run_ranks(wrapper_late.stored_beside_full_parameters, 2, environment={"SHARDD_TIMEOUT_MS": "4000"})
    assert "inside of full parameters" in error and 'write parameter "' in error and "(rank=1)" in error, error
    assert "HandIn" not in other, other


def test_ignored_parameters_beside_a_flat_parameter_are_in_torchs_order() -> None:
    for theirs, ours in run_ranks(wrapper_late.ignored_beside_a_flat_parameter, 2):
        assert ours == theirs
