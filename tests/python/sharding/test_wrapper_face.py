"""What user code finds of FullyShardedDataParallel, and the order in which it unshards and reshards."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.fsdp import ShardingStrategy, StateDictType
from torch.distributed.fsdp._common_utils import TrainingState

from cluster import run_ranks
from sharding.wrapper_facts import differing, holds, initialised, left_out, orders, refusals, ties_across_units
from sharding.wrapper_hooks import hooks
from sharding.wrapper_scenarios import flat_parameters_in_odd_places, optimizer_in_backward


def test_parameters_are_the_users_objects_or_flat_parameters() -> None:
    for rank, facts in enumerate(run_ranks(holds, 2)):
        assert facts["same_objects"] and facts["still_same"]
        assert facts["pieces"] and facts["alone"] and facts["gradients"] and facts["empty"]
        assert facts["every_element_once"]
        assert all(facts["same_between"]) and facts["root_stays"] and facts["zeroed_between"]
        assert facts["forwards"] and facts["module"] and facts["index"] == 3
        assert facts["wrappers"] == (4, True)
        assert facts["root"] == (True, False)
        full = ShardingStrategy.FULL_SHARD
        assert facts["attributes"] == (full, full, rank, 2, torch.device("cpu"), False, None, True)
        assert facts["in_forward"] == (True, TrainingState.FORWARD_BACKWARD)
        assert facts["idle"] == TrainingState.IDLE
        assert facts["internals"] == (True, False, True, StateDictType.FULL_STATE_DICT, None)
        assert "expected to be in states" in facts["another_state"] and "IDLE" in facts["another_state"]
        assert facts["flat"] == [True] * 4 and facts["flat_gradient"] and facts["same_norm"] and facts["original"]
        assert 'use of parameter "layers.0.up.weight"' in facts["resharded_use"]


def test_optimizers_in_backward_step_where_the_gradient_is_there() -> None:
    for facts in run_ranks(optimizer_in_backward, 2):
        assert facts == {"moved": True, "alike": True, "dropped": True, "commits": 3}


def test_flat_parameters_survive_broadcasts_checkpoint_wrappers_and_wrappers_around_wrappers() -> None:
    for facts in run_ranks(flat_parameters_in_odd_places, 2):
        assert all(facts.values()), facts


def test_parameters_tied_across_units_are_one() -> None:
    for found in run_ranks(ties_across_units, 2):
        assert len(found) == 8
        for name, far, once in found:
            assert far < 2e-6, (name, far)
            assert once, name


def test_ignored_modules_and_replicate_subtrees_are_left_alone() -> None:
    for facts in run_ranks(left_out, 2):
        assert all(facts.values()), facts


def test_meta_modules_get_values_and_every_tensor_is_sent_once() -> None:
    for facts in run_ranks(initialised, 2):
        assert facts["output"] == [70.0] * 5, "rank 0's: weight 1, scale 10"
        assert facts["buffer"] == [10.0] * 3
        assert facts["sent"] == [3, 3, 35, 35]
        assert facts["init_fn"] == [28.0] * 5
        assert "it has no reset_parameters()" in facts["no_reset"]


def test_refusals_name_what_is_wrong() -> None:
    for texts in run_ranks(refusals, 2):
        assert texts["hook"] == "AssertionError: register_comm_hook can only be called on a root instance."
        assert "both process_group and device_mesh" in texts["groups"]
        assert "requires explicit specification of process group" in texts["hybrid"]
        assert "both ignored_modules and ignored_states" in texts["ignored"]
        assert "all nn.Parameter or all nn.Module" in texts["ignored_kind"]
        assert "torch sees no GPU in this process" in texts["device"]
        for name in ("subclass", "subclass2"):
            assert "NotImplementedError" in texts[name] and "a TwoTensor, a tensor subclass" in texts[name], texts[name]
        assert "modules to not already have FSDP applied" in texts["nested"]
        assert "TypeError: fully_shard: mp_policy and strategy" in texts["pair"]
        assert "TypeError: fully_shard: reshard_after_forward and mixed_precision" in texts["pair2"]
        assert 'sync_module_states and layout="dim0"' in texts["layout"]
        assert texts["twice"].startswith("AssertionError")
        assert "one homogeneous value for _use_orig_params but got True" in texts["uniform"]
        assert "one homogeneous value for limit_all_gathers but got False" in texts["uniform2"]
        assert "on inner FSDP instances" in texts["no_sync"]
        assert texts["one_layout"] == "", "both are layout flat"


def test_a_groups_topmost_modules_alone_carry_hooks_that_take_keywords() -> None:
    results = run_ranks(hooks, 2)
    for facts in results:
        assert facts["before"] == facts["after"] == ["", "layers.0", "layers.1", "layers.2"]
        assert facts["lists"] == ["0", "1", "2"], "not 1.0, whose parameters are the group of 1"
        assert facts["seen False"] == [torch.float32] * 2 and facts["seen True"] == [torch.bfloat16] * 2
        for low in (False, True):
            counts = facts[f"counters {low}"]
            assert facts[f"resharded {low}"] and counts["unshards"] >= 2 * 2 and counts["reductions"] > 0
    for name, whole in results[0]["wanted"].items():
        for low, tolerance in ((False, 1e-5), (True, 5e-2)):
            pieces = [grad for facts in results if (grad := facts[f"grads {low}"][name]) is not None]
            far = (torch.cat(pieces) - whole.flatten()).norm() / whole.norm()
            assert far < tolerance, (name, low, far)


def test_uniform_attributes_that_differ_between_ranks_are_named() -> None:
    told = {"use_orig_params": "_use_orig_params", "limit_all_gathers": "limit_all_gathers"}
    for rank, texts in enumerate(run_ranks(differing, 2)):
        for name, value in (("use_orig_params", False), ("limit_all_gathers", True)):
            text = f"Expects one homogeneous value for {told[name]} but got {value} on rank 0 and {not value} on rank 1"
            assert f"{text} (rank={rank})" in texts[name], texts
        assert texts["again"] == "", "the model that was refused can be wrapped anew"


def test_both_forms_unshard_and_reshard_in_one_order() -> None:
    results = run_ranks(orders, 2, limit_s=200)
    order = results[0]["wrapper"]["order"]
    assert set(order) == {0, 1} and order[0] == order[1]
    blocks = [f"layers.{i}" for i in range(3)]
    unshards = [name.split()[1] for name in order[0] if name.startswith("unshard")]
    assert unshards[:4] == ["(root)", *blocks], "left to right, depth first, each once"
    assert unshards[4:] == blocks[::-1], "the root is kept"
    for form in ("flat", "policy", "manual"):
        assert results[0][form]["order"] == order, form
        for rank in range(2):
            assert results[rank][form]["losses"] == pytest.approx(results[rank]["wrapper"]["losses"], rel=1e-6)
            assert results[rank][form]["counters"]["aborts"] == 0
