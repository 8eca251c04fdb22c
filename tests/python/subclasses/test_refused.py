"""What is refused of weights that say themselves how they are gathered leaves the model as it was."""

from __future__ import annotations

from cluster import run_ranks
from subclasses.refused_scenarios import another_dimension, methods_alone, smaller_meshes


def test_another_dimension_is_refused_before_anything_is_replaced() -> None:
    for found in run_ranks(another_dimension, 2):
        assert found.pop("said").startswith(
            "NotImplementedError: fully_shard: a parameter of shape (4, 12): shard_placement_fn cuts its dimension 1, and it is a Low"
        )
        assert all(found.values()), found


def test_a_mesh_of_its_own_is_refused_before_replacing() -> None:
    for rank, found in enumerate(run_ranks(smaller_meshes, 4)):
        own = [0, 2] if rank % 2 == 0 else [1, 3]
        assert found.pop("by placement").startswith(
            "NotImplementedError: fully_shard: a parameter of shape (4, 12): shard_placement_fn gives it a mesh of its own, and it is a Low"
        )
        assert found.pop("by module").startswith(
            "NotImplementedError: fully_shard: a parameter of shape (4, 12), sharded before: it is a Low"
        )
        behind = found.pop("behind the model")
        assert behind.startswith('NotImplementedError: register parameter "experts.0.weight": it is a Low'), behind
        assert f"(got {own}, want [0, 1, 2, 3])" in behind
        assert all(found.values()), found


def test_methods_without_a_dispatch_are_refused() -> None:
    for found in run_ranks(methods_alone, 2):
        assert found["said"].startswith(
            "NotImplementedError: fully_shard: a parameter of shape (4, 4): OnlyMethods has fsdp_pre_all_gather and no __tensor_flatten__"
        )
        assert found["as it was"]
