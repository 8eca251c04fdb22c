"""Models on GPUs, as far as that can be tried without one. The rest is in tests/gpu/torch."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from cluster import run_ranks
from job import gpu_forms
from shardd.torch._job import gradient_moves
from shardd.torch._sharding import wrapper_arguments
from shardd.torch._torch_optimizers.optimizer_state import scalar_device


def test_gpu_state_dicts_are_copies_or_read_from_the_job() -> None:
    for found in run_ranks(gpu_forms.state_dicts_are_copies, 2):
        assert found["shares"] == []
        assert found["gathered"] == [[]]  # nothing is left to a message between ranks
        assert found["same"]
        assert found["moments"] == 0  # what was stored into the copy


def test_tied_parameters_are_one_copy_and_kept_variables_none() -> None:
    (found,) = run_ranks(gpu_forms.tied_copies, 1)
    assert found == {"tied": True, "apart": True, "kept": True}


def test_a_model_moved_after_it_was_wrapped_is_named() -> None:
    (found,) = run_ranks(gpu_forms.moved_after_it_was_wrapped, 1)
    assert list(found) == ["rows", "flat", "pieces", "wrapper"]
    for text in found.values():
        assert "got cpu, want cuda:0" in text and "move the model before it is wrapped" in text


def test_what_is_ignored_does_not_say_where_the_model_is() -> None:
    assert run_ranks(gpu_forms.device_of_what_is_not_ignored, 1) == ["cpu"]


def test_what_param_init_fn_makes_is_moved_too(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[torch.device] = []
    monkeypatch.setattr(wrapper_arguments, "move", lambda modules, *_: moved.extend(m.weight.device for m in modules))
    module = nn.Linear(3, 2, device="meta")
    cpu = torch.device("cpu")
    wrapper_arguments.place(module, wrapper_arguments.Ignored(set(), set()), cpu, lambda m: m.to_empty(device="cpu"))
    assert moved == [cpu]


def test_inputs_of_a_root_go_where_it_computes() -> None:
    (found,) = run_ranks(gpu_forms.inputs_of_a_root, 1)
    assert found["same"]
    assert found["devices"] == ["meta"] * 3
    assert found["other"] == (3, "cpu")  # lengths of a packed sequence stay
    assert found["nothing"] == ((), {}) and found["by name"] == ((), {"x": 1})


@pytest.mark.parametrize("option", ["fused", "capturable"])
def test_resumed_optimizer_scalars_are_where_its_options_want_them(option: str) -> None:
    param, cpu = torch.empty(2, device="meta"), torch.device("cpu")
    for was_on_gpu in (False, True):
        assert scalar_device("step", param, {option: True}, was_on_gpu) == param.device
        assert scalar_device("step", param, {option: None}, was_on_gpu) == cpu
    assert scalar_device("mu_product", param, {option: True}, False) == param.device
    assert scalar_device("eta", param, {option: False}, True) == param.device
    assert scalar_device("eta", param, {}, False) == cpu


@pytest.mark.parametrize("flat", [False, True])
def test_gradients_that_moved_are_where_their_parameter_is(flat: bool) -> None:
    sharded = nn.Parameter(torch.empty(6, device="meta"))
    param = SimpleNamespace(sharded_param=sharded, holder=None, piece=lambda: (2, torch.empty(3)))
    if flat:
        param.holder = SimpleNamespace(slices={id(param): SimpleNamespace(start=1, numel=3)})
    else:
        param.sharded_param = sharded = nn.Parameter(torch.empty(3, device="meta"))
    gradient_moves._show(param, torch.arange(8.0))  # type: ignore[arg-type]
    assert sharded.grad is not None and sharded.grad.device == sharded.device


def test_a_daemon_without_gpus_is_named_with_what_to_start() -> None:
    (text,) = run_ranks(gpu_forms.daemon_without_gpus, 1)
    assert "cuda:0" in text
    assert "cpu:0" in text
    assert "--devices=cuda:all" in text
