"""Models on GPUs, as far as that can be tried without one. The rest is in tests/gpu/torch."""

from __future__ import annotations

import gpu_forms
from cluster import run_ranks


def test_state_dicts_of_a_model_on_a_gpu_are_copies_and_full_ones_are_read_from_the_job() -> None:
    for found in run_ranks(gpu_forms.state_dicts_are_copies, 2):
        assert found["shares"] == []
        assert found["gathered"] == [[]]  # nothing is left to a message between ranks
        assert found["same"]
        assert found["moments"] == 0  # what was stored into the copy


def test_tied_parameters_are_one_copy_and_kept_variables_none() -> None:
    (found,) = run_ranks(gpu_forms.tied_copies, 1)
    assert found == {"tied": True, "apart": True, "kept": True}


def test_a_daemon_without_gpus_is_named_with_what_to_start() -> None:
    (text,) = run_ranks(gpu_forms.daemon_without_gpus, 1)
    assert "cuda:0" in text
    assert "cpu:0" in text
    assert "--devices=cuda:all" in text
