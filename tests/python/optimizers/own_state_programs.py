"""Programs that change an optimizer's state by other ways than its steps, for test_unseen.py."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from optimizers.optim_cases import full, full_state, parameters_of
from optimizers.unseen_programs import KINDS, Program, backward, end, look, model_of, program, train

__all__ = ["Program"]


# Two optimizers of the same parameters.


@program("same parameters", daemon=False)
def two_of_one_kind_take_turns() -> dict[str, Any]:
    """Each counts its own steps."""
    model = model_of()
    first, second = KINDS["AdamW"](model.parameters()), KINDS["Adam"](model.parameters(), lr=5e-3)
    losses = []
    for step in range(6):
        losses.append(backward(model, step))
        (first if step % 3 else second).step()
        model.zero_grad()
    return end(model, first, losses=losses, second=full_state(second))


@program("same parameters", daemon=False)
def one_loads_the_others_state_and_both_go_on() -> dict[str, Any]:
    model = model_of()
    first = KINDS["AdamW"](model.parameters())
    losses = train(model, first, 3)
    second = KINDS["AdamW"](model.parameters(), lr=5e-3)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for step in range(3, 7):
        losses.append(backward(model, step))
        (first if step % 2 else second).step()
        model.zero_grad()
    return end(model, first, losses=losses, second=full_state(second))


# Loads.


def _loads_with_momentum(kind: str, before: float, after: float, **more: Any) -> dict[str, Any]:
    model = model_of()
    optimizer = KINDS[kind](model.parameters(), momentum=before, **more)
    losses = train(model, optimizer, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["momentum"] = after
    for number, param in enumerate(model.parameters()):
        buffer = torch.full_like(param.detach(), 0.02)
        saved["state"][number] = {**saved["state"].get(number, {}), "momentum_buffer": buffer}
    optimizer.load_state_dict(saved)
    losses += train(model, optimizer, range(2, 5))
    return end(model, optimizer, losses=losses, momentum=optimizer.param_groups[0]["momentum"])


@program("own state")
def momentum_begins_with_a_load() -> dict[str, Any]:
    return _loads_with_momentum("SGD", 0.0, 0.9)


@program("own state")
def rmsprops_momentum_begins_with_a_load() -> dict[str, Any]:
    return _loads_with_momentum("RMSprop", 0.0, 0.9, centered=False)


@program("own state")
def momentum_ends_with_a_load() -> dict[str, Any]:
    return _loads_with_momentum("SGD", 0.9, 0.0)


@program("own state", daemon=False)
def rmsprops_momentum_ends_and_begins_again() -> dict[str, Any]:
    """torch keeps the buffer meanwhile."""
    model = model_of()
    optimizer = KINDS["RMSprop"](model.parameters(), centered=False)
    losses = []
    for step in range(5):
        optimizer.param_groups[0]["momentum"] = 0.0 if 2 <= step < 4 else 0.9
        losses += train(model, optimizer, range(step, step + 1))
    return end(model, optimizer, losses=losses)


@program("own state", daemon=False)
def loaded_state_has_names_of_the_programs() -> dict[str, Any]:
    model = model_of()
    optimizer = KINDS["AdamW"](model.parameters())
    losses = train(model, optimizer, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    for number, entry in saved["state"].items():
        entry["mine"] = torch.tensor(float(number))
    optimizer.load_state_dict(saved)
    losses += train(model, optimizer, range(2, 5))
    return end(model, optimizer, losses=losses, keys=look(optimizer)["keys"])


@program("own state", daemon=False)
def state_gets_names_of_the_programs() -> dict[str, Any]:
    model = model_of()
    optimizer = KINDS["AdamW"](model.parameters())
    losses = train(model, optimizer, 2)
    for param in model.parameters():
        optimizer.state[param]["ema"] = param.detach().clone()
    losses += train(model, optimizer, range(2, 5))
    return end(model, optimizer, losses=losses, keys=look(optimizer)["keys"])


@program("own state")
def names_of_the_programs_before_the_first_step() -> dict[str, Any]:
    """SGD without momentum has no state of its own; what a program puts there stays."""
    model = model_of()
    optimizer = KINDS["SGD"](model.parameters(), momentum=0.0)
    for number, param in enumerate(model.parameters()):
        optimizer.state[param]["mine"] = number
    losses = train(model, optimizer, 3)
    return end(model, optimizer, losses=losses, mine=[optimizer.state[p]["mine"] for p in model.parameters()])


@program("own state")
def hooks_that_change_a_state_dicts_shape() -> dict[str, Any]:
    model = model_of()
    optimizer = KINDS["AdamW"](model.parameters())
    optimizer.register_state_dict_post_hook(lambda _, saved: {"wrapped": saved})
    optimizer.register_load_state_dict_pre_hook(lambda _, saved: saved["wrapped"])
    losses = train(model, optimizer, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    losses += train(model, optimizer, range(2, 4))
    optimizer.load_state_dict(copy.deepcopy(saved))
    losses += train(model, optimizer, range(4, 6))
    wrapped = [list(saved), sorted(saved["wrapped"])]
    kept = {number: {n: full(v) for n, v in e.items()} for number, e in saved["wrapped"]["state"].items()}
    parameters = parameters_of(model)
    return {"losses": losses, "wrapped": wrapped, "kept": kept, "parameters": parameters, "model": model}


# Counts of steps that are changed in place, as a warm restart of the bias correction does it.


def _counts_change(change: Callable[[torch.Tensor], Any], kind: str = "AdamW") -> dict[str, Any]:
    model = model_of()
    optimizer = KINDS[kind](model.parameters())
    losses = train(model, optimizer, 3)
    for entry in optimizer.state.values():
        change(entry["step"])
    steps = [look(optimizer)["steps"], sorted({float(e["step"]) for e in optimizer.state_dict()["state"].values()})]
    losses += train(model, optimizer, range(3, 6))
    return end(model, optimizer, losses=losses, steps=steps)


@program("counts in place")
def counts_are_zeroed() -> dict[str, Any]:
    return _counts_change(lambda step: step.zero_())


@program("counts in place")
def counts_are_added_to() -> dict[str, Any]:
    return _counts_change(lambda step: step.add_(100), "Adam")


@program("counts in place")
def counts_are_filled_by_their_data() -> dict[str, Any]:
    return _counts_change(lambda step: step.data.fill_(50))


@program("counts in place")
def one_count_changes_between_backward_and_step() -> dict[str, Any]:
    model = model_of()
    optimizer = KINDS["AdamW"](model.parameters())
    losses = train(model, optimizer, 2)
    losses.append(backward(model, 2))
    next(iter(optimizer.state.values()))["step"] += 10
    optimizer.step()
    optimizer.zero_grad()
    losses += train(model, optimizer, range(3, 5))
    return end(model, optimizer, losses=losses)


@program("counts in place")
def a_hook_behind_a_load_sets_counts() -> dict[str, Any]:
    model = model_of()
    optimizer = KINDS["AdamW"](model.parameters())

    def set_counts(loaded: Any) -> None:
        for entry in loaded.state.values():
            entry["step"].fill_(50)

    optimizer.register_load_state_dict_post_hook(set_counts)
    losses = train(model, optimizer, 2)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    losses += train(model, optimizer, range(2, 5))
    return end(model, optimizer, losses=losses)


# Param groups that are appended to the list itself.


def _append_group(optimizer: Any, params: list[Any], **more: Any) -> None:
    optimizer.param_groups.append({**optimizer.param_groups[0], "params": params, **more})


@program("groups in place", daemon=False)
def a_group_that_is_not_sharded_is_appended() -> dict[str, Any]:
    model = model_of()
    beside = torch.nn.Parameter(torch.ones(3))
    optimizer = KINDS["SGD"](model.parameters())
    losses = train(model, optimizer, 2)
    _append_group(optimizer, [beside])
    for step in range(2, 5):
        losses.append(backward(model, step))
        beside.grad = torch.full((3,), float(step))
        optimizer.step()
        optimizer.zero_grad()
    return end(model, optimizer, losses=losses, beside=beside.detach().clone())


@program("groups in place")
def a_sharded_group_is_appended_and_taken_out() -> dict[str, Any]:
    model = model_of()
    params = list(model.parameters())
    optimizer = KINDS["AdamW"](params[1:])
    losses = train(model, optimizer, 2)
    model.zero_grad()
    _append_group(optimizer, params[:1], lr=2e-2)
    losses += train(model, optimizer, range(2, 4))
    model.zero_grad()
    del optimizer.param_groups[1]
    losses += train(model, optimizer, range(4, 6))
    return {"losses": losses, "parameters": parameters_of(model), "model": model}
