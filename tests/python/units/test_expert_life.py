"""Models with experts on a mesh of their own: ranks that die, checkpoints, experts without tokens, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cluster import run_ranks
from shardd.torch._process.torch_versions import PLACES_ON_MESHES
from torchrun import relaunched
from units import expert_life_scenarios


def _close(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["daemon", "torch"])
def test_killed_ranks_leave_all_experts_at_one_step(kind: str) -> None:
    kills = ((1, 2, "step"), (2, 4, "forward"), (3, 5, "after"))
    arguments = (7, kind)
    run = relaunched(expert_life_scenarios.resumed, 4, *arguments, kills, restarts=len(kills))
    assert run.code == 0, run.log[-6000:]
    assert len(run.of("killed")) == len(kills)
    for tried in range(1, len(kills) + 1):
        starts = {event["step"] for event in run.of("start", attempt=tried)}
        assert len(starts) == 1 and starts.pop() > 0, "all go on from one step"
    for rank, want in enumerate(run_ranks(expert_life_scenarios.resumed, 4, *arguments, ())):
        for name, value in want["local"].items():
            assert torch.equal(run.results[rank]["local"][name], value), name


@pytest.mark.parametrize("kind", ["daemon", "torch"])
def test_a_checkpoint_of_experts_loads_into_other_meshes(kind: str) -> None:
    for facts in run_ranks(expert_life_scenarios.saved_and_loaded_elsewhere, 4, kind):
        for shape in ("(4, 1)", "(1, 4)"):
            for what in ("saved", "full", "losses", "after"):
                _close(facts[f"{what} {shape}"], facts[f"{what} (2, 2)"])


@pytest.mark.skipif(not PLACES_ON_MESHES, reason="torch 2.10's shard_placement_fn gives no meshes")
def test_an_expert_without_tokens_has_zeros_or_none() -> None:
    for rank, facts in enumerate(run_ranks(expert_life_scenarios.without_tokens, 4)):
        assert facts["grad 2"] is None
        first = 2.0 * torch.ones(4, 4)  # of two rows of ones on rank 0
        third = 2.0 * 4.0 * torch.ones(4, 4)
        # Divided by the ranks of the expert's mesh; the other mesh's expert of that name has another gradient.
        _close(facts["grad 0"], first / 2 if rank % 2 == 0 else torch.zeros(4, 4))
        _close(facts["grad 1"], first / 2 if rank % 2 == 0 else third / 2)


def test_what_several_meshes_cannot_is_refused_by_name() -> None:
    for texts in run_ranks(expert_life_scenarios.refused, 4):
        for name in ("summon", "safetensors", "reattach"):
            assert "on a smaller mesh than the model" in texts[name]
        for name in ("join", "join by placement", "hook") if PLACES_ON_MESHES else ("join",):
            assert "on several meshes" in texts[name]
        assert "is on a smaller mesh than the model" in texts["muon"]
        if not PLACES_ON_MESHES:
            assert "shard_placement_fn gave another mesh for a parameter" in texts["by placement"]
            assert texts["then"] == "trains", "nothing was replaced"
        assert texts["shapes"] == "[64, 128]", "the plan has the experts of both expert parallel ranks"
        assert "its mesh differs from the other modules'" in texts["flat"]
        for name in ("crosses", "larger"):
            assert 'register parameter "0.weight": its mesh is no regular part of the model' in texts[name], texts
