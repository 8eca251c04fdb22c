"""Where a unit's ``MixedPrecision`` takes hold: hooks of its module, and the first use of its model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from shardd.torch._units.precision import BufferDtypes, UnitPrecision, cast_buffers, input_dtype
from shardd.torch._units.state import ShardState, state_of

__all__ = ["begin", "install"]


def install(precision: UnitPrecision, state: ShardState) -> None:
    """Gives the unit of ``state`` its precision, and its module hooks: they run before those that unshard."""
    assert state._unit is not None
    state._unit.precision = precision
    module = precision.buffers.module
    if precision.buffers.compute is not None:
        module._register_state_dict_hook(_restore_hook)
    if precision.full_in_eval:
        # The unit's own pre-forward hook is the first so far.
        module.register_forward_pre_hook(_FullInEval(state, precision), prepend=True)


def _follow_mode(precision: UnitPrecision, state: ShardState) -> None:
    """Lets the forward that begins compute with what is stored where the module is in eval mode, else in param_dtype."""
    state._ensure_registered()
    unit = state._unit
    assert unit is not None
    full = not precision.buffers.module.training
    unit._full_precision = full
    for fsdp_param in unit.fsdp_params:
        if getattr(fsdp_param, "holder", None) is not None:  # modules have the tensor all the time
            fsdp_param.show(fsdp_param._stored_param if full else fsdp_param._unsharded_param)
    if not state._is_root:
        return
    if full:
        precision.buffers.cast_to_original()
    elif precision.buffers_are_full:
        cast_buffers(_buffers_of(state._state_ctx.all_states))
    precision.buffers_are_full = full


class _FullInEval:
    def __init__(self, state: ShardState, precision: UnitPrecision) -> None:
        self._state, self._precision = state, precision

    def __call__(self, module: nn.Module, args: Any) -> None:
        _follow_mode(self._precision, self._state)


def _restore_hook(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
    state = state_of(module)
    if state is not None and state._unit is not None and state._unit.precision is not None:
        state._unit.precision.buffers.restore(state_dict, prefix)


def _buffers_of(states: Iterable[Any]) -> list[BufferDtypes]:
    return [state._unit.precision.buffers for state in states if state._unit.precision is not None]


def begin(root: ShardState) -> None:
    """Casts buffers, and inputs from now on. It is called where a model is first used and who is inside whom is known."""
    states: list[Any] = list(root._state_ctx.all_states)
    for state in states:
        precision = state._unit.precision
        if precision is not None:
            inputs = input_dtype(precision.policy, state is root)
            state._unit._set_casts(inputs if state is root or state._unit.fsdp_params else None, None)
    cast_buffers(_buffers_of(states))
