"""Models that are tensor parallel, sharded further, against torch's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as fsdp

from cluster import Cluster, run_ranks
from units.tensor_parallel_scenarios import (
    beside_plain_parameters,
    clipped_beside_plain_parameters,
    over_one_mesh,
    restarted,
    saved_and_loaded_elsewhere,
    trained_on_both,
)


def _close(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "of_daemon"),
    [((2, 2), False), ((2, 2), True), ((2, 1, 2), False)],
    ids=["2x2", "2x2-daemon", "2x1x2"],
)
def test_a_tensor_parallel_model_trains_as_torchs(shape: tuple[int, ...], of_daemon: bool) -> None:
    for results in run_ranks(trained_on_both, 4, shape, of_daemon):
        ours, theirs = results["shardd"], results["torch"]
        assert ours["placements"] == theirs["placements"]
        assert [placed for placed, _ in ours["grads"]] == [placed for placed, _ in theirs["grads"]]
        for what in ("losses", "norms", "grads", "local", "whole"):
            if what == "grads":
                _close([grad for _, grad in ours[what]], [grad for _, grad in theirs[what]])
            else:
                _close(ours[what], theirs[what])
        names = results["jobs"]["names"]
        assert names[0] == names[2] and names[1] == names[3] and names[0] != names[1], "a job for each tp rank"
        assert not of_daemon or "call shardd.torch.clip_grad_norm_" in results["refused"]["texts"][0]


def test_a_tensor_parallel_checkpoint_loads_into_other_meshes() -> None:
    for facts in run_ranks(saved_and_loaded_elsewhere, 4):
        for shape in ("(4, 1)", "(1, 4)"):
            _close(facts[shape], facts["(2, 2)"])
            _close(facts[f"whole {shape}"], facts["whole (2, 2)"])


@pytest.mark.skipif(not hasattr(fsdp, "DataParallelMeshDims"), reason="this torch has no dp_mesh_dims")
def test_one_mesh_of_all_dimensions_is_as_torchs() -> None:
    for results in run_ranks(over_one_mesh, 4):
        assert results["shardd"]["placements"] == results["torch"]["placements"]
        for what in ("losses", "local", "whole"):
            _close(results["shardd"][what], results["torch"][what])


def test_plain_parameters_beside_tensor_parallel_ones_train_as_torchs() -> None:
    for results in run_ranks(beside_plain_parameters, 4):
        assert results["shardd"]["placements"] == results["torch"]["placements"]
        for what in ("losses", "whole"):
            _close(results["shardd"][what], results["torch"][what])


def test_plain_and_tensor_parallel_gradients_are_clipped_in_one_call() -> None:
    for results in run_ranks(clipped_beside_plain_parameters, 4):
        ours, theirs = results["shardd"], results["torch"]
        for what in ("norms", "grads", "whole"):
            _close(ours[what], theirs[what])
        assert min(theirs["norms"]) > 0 and len(set(theirs["norms"])) == len(theirs["norms"])


def _restarted(folder: Path, ahead: bool, start_over: bool = False) -> list[dict[str, Any]]:
    folder.mkdir()
    with Cluster(2, str(folder), {"SHARDD_JOB": "tensor-parallel"}) as cluster:
        for rank in range(2):
            cluster.start(restarted, rank, (ahead, start_over))
        assert set(cluster.wait(120).values()) == {7}, [cluster.log(rank) for rank in range(2)]
        return [cluster.events(rank)[-1] for rank in range(2)]


def test_jobs_that_have_committed_different_steps_are_not_resumed(tmp_path: Path) -> None:
    assert [facts["start"] for facts in _restarted(tmp_path / "first", ahead=False)] == [0, 0]
    for facts in _restarted(tmp_path / "same", ahead=True):
        assert facts["start"] == 1
        assert len(facts["refused"]) == 3 and all("tensor parallel" in text for text in facts["refused"])
    for facts in _restarted(tmp_path / "apart", ahead=False):
        assert facts["start"] == -1 and "different steps (got 2 to 3" in facts["text"], facts
    assert [facts["start"] for facts in _restarted(tmp_path / "over", ahead=False, start_over=True)] == [2, 3]
