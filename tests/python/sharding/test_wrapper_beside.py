"""The wrapper beside PyTorch's in the same processes: kinds, orders and settings of state dicts, hybrid strategies, the handle."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.fsdp import ShardingStrategy

from cluster import run_ranks
from sharding import wrapper_beside
from state_dicts.test_state_dict import same


def _ordered(got: Any, want: Any, where: str) -> None:
    """Dictionaries have the same keys in the same order."""
    if isinstance(want, dict):
        assert list(got) == list(want), where
        for key in want:
            _ordered(got[key], want[key], f"{where} {key}")
    elif isinstance(want, list | tuple):
        for number, (one, other) in enumerate(zip(got, want)):
            _ordered(one, other, f"{where} {number}")


def _right(value: Any) -> Any:
    """Without what PyTorch gathers wrongly on CPU devices: a full ``exp_avg`` has the values of ``exp_avg_sq``."""
    if isinstance(value, dict):
        return {k: tuple(v.shape) if k == "exp_avg" and hasattr(v, "shape") else _right(v) for k, v in value.items()}
    return [_right(item) for item in value] if isinstance(value, list | tuple) else value


def _beside(ours: Any, theirs: Any, where: str) -> None:
    _ordered(ours, theirs, where)
    same(_right(ours), _right(theirs), where, 2e-5)


def test_every_rank_gets_unsharded_models_and_rank_0_their_optimizer() -> None:
    for rank, result in enumerate(run_ranks(wrapper_beside.unsharded, 2)):
        for orig, theirs, ours in result:
            _beside(ours, theirs, f"use_orig_params={orig}")
            model, optimizer = ours[True]
            assert len(model) == 10 and (optimizer == {}) == (rank == 1), "rank0_only is for the optimizer's alone"


def test_state_dict_settings_kinds_and_orders_are_torchs() -> None:
    for result in run_ranks(wrapper_beside.settings, 2):
        for (orig, mesh), theirs, ours in result:
            _beside(ours, theirs, f"use_orig_params={orig} mesh={mesh}")
            assert ("_use_dtensor", True) in ours["at first"][2][1] or not mesh
            state = list(ours[wrapper_beside.FULL][1]["state"])
            assert (state == ["blocks.0.bias", "blocks.0.weight", "blocks.2.weight", "head.bias", "head.weight",
                              "into.bias", "into.weight", "norm.bias", "norm.weight"]) == orig  # fmt: skip


def test_settings_that_differ_between_units_are_an_error() -> None:
    for theirs, ours in run_ranks(wrapper_beside.settings_that_differ, 2):
        assert "All FSDP modules must have the same state dict settings" in theirs
        assert ours == theirs


@pytest.mark.parametrize("strategy", [ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2])
def test_hybrid_strategies_are_torchs_by_a_mesh_and_by_groups(strategy: ShardingStrategy) -> None:
    for result in run_ranks(wrapper_beside.hybrid, 4, strategy):
        for (by, orig), theirs, ours in result:
            _beside(ours, theirs, f"{by} use_orig_params={orig}")


def test_the_handle_has_torchs_values_or_says_what_to_use() -> None:
    for result in run_ranks(wrapper_beside.handle, 2):
        for name, value in result.items():
            if isinstance(value, list) and len(value) == 2 and isinstance(value[0], dict):
                theirs, ours = value
                same(ours, theirs, name)
        assert "named_parameters" in result["_handle.flat_param"]
        assert "memory_plan" in result["_handle._local_shard"]
        assert "counters" in result["_exec_order_data"]
        assert "hybrid" in result["_inter_node_pg"]
        assert "_comm_hook" in result["_communication_hook"]
        assert result["hasattr"] == [False, False, False]
