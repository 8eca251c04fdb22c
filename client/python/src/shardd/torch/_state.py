"""The state that ``fully_shard`` puts on a module."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.distributed._composable_state import _insert_module_state
from torch.distributed.device_mesh import _get_device_handle
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState, _get_module_fsdp_state

from shardd.torch._dynamo import no_dynamo, skip_frame
from shardd.torch._flat_group import settle_ties
from shardd.torch._group import ShardGroup, members_of
from shardd.torch._identity import identity_of
from shardd.torch._job import TorchJob
from shardd.torch._mixed_precision import begin

# In the order of their making, so that every rank finds the same roots in the same order.
_states: list[weakref.ref[ShardState]] = []


_made = 0


def _count() -> None:
    global _made
    _made += 1


class ShardState(FSDPState):
    """torch's state with shardd's group, hooks and registration."""

    _state_name = "shardd"

    def __init__(self) -> None:
        super().__init__()
        self._unit: ShardGroup | None = None
        self._job: TorchJob | None = None  # of the root; None before registration
        self.identity = ""  # see identity_of
        self.ignored: Any = None  # what the unit leaves alone, in layout flat
        self.attributes: dict[str, Any] = {}  # that all units of a model must have alike
        self._registrations = 0
        self._training = True  # of the root: not registered for a forward without gradients
        _states.append(weakref.ref(self, _states.remove))
        _count()

    def init(
        self,
        modules: tuple[nn.Module, ...],
        device: torch.device,
        mp_policy: MixedPrecisionPolicy,
        auto_reshard_after_forward: bool,
    ) -> None:
        for module in modules:
            _insert_module_state(module, self)
        self._modules = modules
        self._device = device
        self._device_handle = _get_device_handle(device.type)
        self._mp_policy = mp_policy
        self._auto_reshard_after_forward = auto_reshard_after_forward

    def attach(self, unit: ShardGroup) -> None:
        """Installs the group and the module hooks."""
        self._unit = unit
        units = [s._unit for m in self._modules for below in m.modules() if (s := state_of(below)) and s._unit]
        managed: dict[int, list[str]] = {}
        for info in (p._module_info for u in dict.fromkeys([unit, *units]) for p in u.fsdp_params):
            uses = zip([info.module, *info.shared_modules], [info.param_name, *info.shared_param_names])
            for module, name in uses:
                managed.setdefault(id(module), []).append(name)
        self.identity = identity_of(self._modules, managed, members_of(unit.mesh_info).ranks)
        self.list_groups()
        ensure = weakref.WeakMethod(self._ensure_registered)

        def lazy_init(extend: bool) -> None:
            method = ensure()
            if method is not None:
                method(extend)

        unit._set_lazy_init(skip_frame(lazy_init))
        if len(self._modules) == 1:
            module = self._modules[0]
            module.register_forward_pre_hook(unit._pre_forward_hook(), prepend=True, with_kwargs=True)
            module.register_forward_hook(unit._post_forward_hook(), prepend=False)
            return
        for module in self._modules:
            module.register_forward_pre_hook(self._pre_forward_of_list, prepend=True, with_kwargs=True)
            module.register_forward_hook(self._post_forward_of_list, prepend=False, always_call=True)

    def list_groups(self) -> None:
        """What FSDPModule's methods go through: no group without parameters."""
        unit = self._unit
        self._fsdp_param_groups[:] = [unit] if unit is not None and unit.fsdp_params else []  # type: ignore[list-item]

    def _lazy_init(self) -> None:
        if self._is_root is None:
            root = self._modules[0]
            states = list(dict.fromkeys(s for m in root.modules() if (s := state_of(m)) is not None))
            self._check_attributes(states)
            if self._join(states):
                return
            settle_ties(root, states)
            super()._lazy_init()
            begin(self)

    def _join(self, states: list[ShardState]) -> bool:
        """A second wrapper, without parameters of its own, around units of a model that has been used: it runs them as parts
        of that model, as PyTorch's does. With parameters there is no one root, which FSDPState refuses."""
        others = [state for state in states if state is not self]
        assert self._unit is not None
        if self._unit.layout != "flat" or self._unit.fsdp_params or len({id(s._state_ctx) for s in others}) != 1:
            return False
        if any(state._is_root is not False for state in others):
            return False
        self._is_root, self._state_ctx = False, others[0]._state_ctx
        self._job = self._joined()._job
        return True

    def _joined(self) -> ShardState:
        """The root of the model whose units this one's modules are."""
        root = self._state_ctx.all_states[0]
        assert isinstance(root, ShardState)
        return root

    def _check_attributes(self, states: list[ShardState]) -> None:
        for state in states:
            for name, value in self.attributes.items():
                if state.attributes.get(name, value) != value:
                    raise ValueError(
                        f"Expects one homogeneous value for {name} but got {state.attributes[name]} for "
                        f"{type(state._modules[0]).__name__} and {value} for the root"
                    )

    # Lists of modules: one group, whose forward begins with the first that runs and ends with the last.

    @no_dynamo
    def _pre_forward_of_list(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not self._modules_to_run_forward:
            self._modules_to_run_forward.update(self._modules)
        return self._pre_forward(module, args, kwargs)

    @no_dynamo
    def _post_forward_of_list(self, module: nn.Module, args: Any, output: Any) -> Any:
        assert self._unit is not None
        if module in self._modules_to_run_forward:
            self._modules_to_run_forward.remove(module)
            if not self._modules_to_run_forward:
                return self._unit._post_forward(output)
        return self._unit._cast_output(output)

    @no_dynamo
    def _complete_partial(self, output: Any) -> Any:
        """At the end of the root's forward, and with ``...`` of a backward: groups of which only some modules ran."""
        if output is ...:
            for state in self._state_ctx.all_states:
                state._modules_to_run_forward.clear()
            return None
        for state in reversed(self._state_ctx.all_states):
            if state is not self and state._modules_to_run_forward:
                assert isinstance(state, ShardState) and state._unit is not None
                output = state._unit._post_forward(output)
                state._modules_to_run_forward.clear()
        return output

    # What torch's register_forward_method and others call.

    def _pre_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self._unit is not None
        result = self._unit._pre_forward(args, kwargs)
        return (args, kwargs) if result is None else result

    def _post_forward(self, module: nn.Module, input: Any, output: Any) -> Any:
        assert self._unit is not None
        return self._unit._post_forward(output)

    # Registration.

    def _next_registration(self) -> str:
        """Tells this model's jobs apart from others', alike on all ranks, whichever thread uses which model first."""
        self._registrations += 1
        again = f"-{self._registrations}" if self._registrations > 1 else ""
        return f"{self.identity}{again}"

    def _find_root(self) -> ShardState:
        """The state of the model that this one's module is part of."""
        outermost = self._outermost()
        return outermost._joined() if outermost._is_root is False else outermost

    def _outermost(self) -> ShardState:
        """The state of the outermost module around this one."""
        root, largest = self, 0
        own = self._modules[0]
        for ref in _states:
            state = ref()
            # One without modules is of a call that failed.
            if state is None or state is self or len(getattr(state, "_modules", ())) != 1:
                continue
            inside = list(state._modules[0].modules())
            if len(inside) > largest and any(module is own for module in inside):
                root, largest = state, len(inside)
        return root

    @no_dynamo
    def _ensure_registered(self, extend: bool = False) -> None:
        """``extend``: what is trained has changed; with all ranks, inside a pass or where nothing is written."""
        if self._job is not None and self._job.alive and not extend:
            return
        root = self._outermost()
        root._training = torch.is_grad_enabled()
        # What is made here outlives an inference_mode or no_grad around the first use.
        with torch.inference_mode(False), torch.no_grad():
            if root._is_root is None:
                root._lazy_init()
                assert root._unit is not None
                if root._is_root:
                    for module in root._modules:  # what a failed forward began is given up at once
                        module.register_forward_hook(root._unit._forward_failed_hook(), always_call=True)
            if not root._is_root:
                root = root._joined()
            if root._job is not None and root._job.closed:
                raise RuntimeError("use of a fully sharded module: its job was closed; make the model anew")
            if not any(state._unit is not None and state._unit.fsdp_params for state in root._state_ctx.all_states):
                return  # as PyTorch: the modules run as they are
            job = TorchJob.register(root) if not extend or root._job is None else root._job.extended(root)
        for state in (*root._state_ctx.all_states, self):
            assert isinstance(state, ShardState)
            state._job = job

    def _register_again(self) -> None:
        """The plan has changed: the job is given up, with the parameters kept here, and made anew at the next use."""
        job = self._job
        if job is None:
            return
        if job.engine is not None and job.engine.info()["committed_step"] > 0:
            raise RuntimeError(
                "change of a registered model: the job has committed steps, whose optimizer state would be lost; build "
                "the optimizer and change parameters before the first step"
            )
        root = job.root()
        job.retire()
        if root is not None:
            for state in root._state_ctx.all_states:
                assert isinstance(state, ShardState)
                state._job = None

    def _reset_iter_state(self) -> None:
        if self._is_root is False:
            raise RuntimeError("reset_iter_state must be called on the root FSDP module")
        for state in self._state_ctx.all_states:
            state._modules_to_run_forward.clear()
        if self._job is not None and self._job.engine is not None:
            self._job.engine.reset_iteration()


def state_of(module: nn.Module) -> ShardState | None:
    """The state of a module that ``fully_shard`` was applied to."""
    state = _get_module_fsdp_state(module)
    return state if isinstance(state, ShardState) else None


def made() -> int:
    """How many modules, or lists of them, this process has sharded."""
    return _made


def units() -> list[ShardGroup]:
    """Of all models of this process."""
    return [state._unit for ref in list(_states) if (state := ref()) is not None and state._unit is not None]


def root_states() -> list[ShardState]:
    """The outermost states of this process, in the order of their making."""
    states = [state for ref in list(_states) if (state := ref()) is not None and hasattr(state, "_modules")]
    inner: set[int] = set()
    for state in states:
        for module in state._modules:
            inner.update(id(below) for child in module.children() for below in child.modules())
    return [state for state in states if all(id(module) not in inner for module in state._modules)]
