"""A model is registered: whoever uses a unit of it first, on all ranks, gets the model's job."""

from __future__ import annotations

import torch

from shardd.torch._job import opening, unfreezing
from shardd.torch._job.meshes import settle_rows
from shardd.torch._process.torch_versions import find_states
from shardd.torch._units import precision_hooks
from shardd.torch._units.flat_group import settle_ties
from shardd.torch._units.shard_group import ShardGroup
from shardd.torch._units.state import ShardState, state_of

__all__ = ["attach", "begin_model"]


def attach(state: ShardState, unit: ShardGroup) -> None:
    """``unit`` is what ``state`` shards, from now on, and its first use registers the model around it."""
    state.attach(unit, _register)


def _register(state: ShardState, unfreeze: bool) -> None:
    root = state._outermost()
    root._training = torch.is_grad_enabled()
    # What is made here outlives an inference_mode or no_grad around the first use.
    with torch.inference_mode(False), torch.no_grad():
        if root._is_root is None:
            begin_model(root)
            assert root._unit is not None
            if root._is_root:
                for module in root._modules:  # what a failed forward began is given up at once
                    module.register_forward_hook(root._unit._forward_failed_hook(), always_call=True)
        if not root._is_root:
            root = root._joined()
        if root._job is not None and root._job.closed:
            raise RuntimeError("use of a fully sharded module: its job was closed; make the model anew")
        if not any(other._unit is not None and other._unit.fsdp_params for other in root._state_ctx.all_states):
            return  # as PyTorch: the modules run as they are
        job = unfreezing.unfreeze(root) if unfreeze and root._job is not None else opening.register(root)
    for member in (*root._state_ctx.all_states, state):
        assert isinstance(member, ShardState)
        member._job = job


def begin_model(root: ShardState) -> None:
    """Where a model is first used, before it is registered: which units are its own is settled from now on."""
    if root._is_root is not None:
        return
    module = root._modules[0]
    states = list(dict.fromkeys(s for m in module.modules() if (s := state_of(m)) is not None))
    _check_attributes(root, states)
    if _join(root, states):
        return
    settle_ties(module, states)
    find_states(root)
    settle_rows(root)
    precision_hooks.begin(root)


def _join(root: ShardState, states: list[ShardState]) -> bool:
    """A second wrapper, without parameters of its own, around units of a model that has been used: it runs them as parts
    of that model, as PyTorch's does. With parameters there is no one root, which FSDPState refuses."""
    others = [state for state in states if state is not root]
    assert root._unit is not None
    if root._unit.layout != "flat" or root._unit.fsdp_params or len({id(s._state_ctx) for s in others}) != 1:
        return False
    if any(state._is_root is not False for state in others):
        return False
    root._is_root, root._state_ctx = False, others[0]._state_ctx
    root._job = root._joined()._job
    return True


def _check_attributes(root: ShardState, states: list[ShardState]) -> None:
    for state in states:
        for name, value in root.attributes.items():
            if state.attributes.get(name, value) != value:
                raise ValueError(
                    f"Expects one homogeneous value for {name} but got {state.attributes[name]} for "
                    f"{type(state._modules[0]).__name__} and {value} for the root"
                )
