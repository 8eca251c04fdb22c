"""The state that ``fully_shard`` puts on a module."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed._composable_state import _insert_module_state
from torch.distributed.device_mesh import _get_device_handle
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState, _get_module_fsdp_state

from shardd.torch._process.dynamo import no_dynamo, skip_frame
from shardd.torch._process.extension import _C
from shardd.torch._process.torch_versions import set_param_groups
from shardd.torch._ranks.mesh import members_of
from shardd.torch._units.model_identity import identity_of
from shardd.torch._units.shard_group import ShardGroup

# In the order of their making, so that every rank finds the same roots in the same order.
_states: list[weakref.ref[ShardState]] = []


_made = 0


def _count() -> None:
    global _made
    _made += 1


@dataclass(frozen=True)
class GivenUp:
    """Jobs of a model that its program has begun with in this process, before the one that it goes on in."""

    names: tuple[str, ...]  # the first is the one that a restart looks for
    step: int  # committed in them


class ModelJob(Protocol):
    """What a state knows of the job that its model is registered as; ``TorchJob`` is one."""

    engine: _C.Engine | None
    closed: bool

    @property
    def alive(self) -> bool: ...

    def root(self) -> ShardState | None: ...

    def given_up(self) -> GivenUp | None: ...

    def retire(self) -> None: ...


Register = Callable[["ShardState", bool], None]


class ShardState(FSDPState):
    """torch's state with shardd's group and hooks.

    It knows its model's job when there is one. Who makes jobs is given to ``attach`` and called where a unit is used.
    """

    _state_name = "shardd"

    def __init__(self) -> None:
        super().__init__()
        self._unit: ShardGroup | None = None
        self._job: ModelJob | None = None  # of the root; None before registration
        self._register: Register | None = None
        self.identity = ""  # see identity_of
        self.ignored: Any = None  # what the unit leaves alone, in layout flat
        self.attributes: dict[str, Any] = {}  # that all units of a model must have alike
        self._registrations = 0
        self.given_up: GivenUp | None = None  # of the root: jobs before its own, whose values it has taken along
        # A state dict has its sharded parameters' memory, from before there was a job.
        self.given_out = False
        self.loaded = False  # the program has loaded values of its own into it, before there was a job
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

    def attach(self, unit: ShardGroup, register: Register) -> None:
        """Installs the group and the module hooks.

        ``register``: registers the model of a state, or, with True, registers it anew with what is trained now.
        """
        self._unit, self._register = unit, register
        unit.ensure_registered = self._ensure_registered
        units = [s._unit for m in self._modules for below in m.modules() if (s := state_of(below)) and s._unit]
        managed: dict[int, list[str]] = {}
        for info in (p._module_info for u in dict.fromkeys([unit, *units]) for p in u.fsdp_params):
            uses = zip([info.module, *info.shared_modules], [info.param_name, *info.shared_param_names])
            for module, name in uses:
                managed.setdefault(id(module), []).append(name)
        self.identity = identity_of(self._modules, managed, members_of(unit.mesh_info).ranks)
        self.list_groups()
        ensure = weakref.WeakMethod(self._ensure_registered)

        def lazy_init(unfreeze: bool) -> None:
            method = ensure()
            if method is not None:
                method(unfreeze)

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
        """Sets what FSDPModule's methods go through: no group without parameters."""
        unit = self._unit
        set_param_groups(self, [unit] if unit is not None and unit.fsdp_params else [])

    def _joined(self) -> ShardState:
        """Returns the root of the model whose units this one's modules are."""
        root = self._state_ctx.all_states[0]
        assert isinstance(root, ShardState)
        return root

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
        """Ends groups of which only some modules ran, at the end of the root's forward, and with ``...`` of a backward."""
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
        """Returns the state of the model that this one's module is part of."""
        outermost = self._outermost()
        return outermost._joined() if outermost._is_root is False else outermost

    def _outermost(self) -> ShardState:
        """Returns the state of the outermost module around this one."""
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
    def _ensure_registered(self, unfreeze: bool = False) -> None:
        """``unfreeze``: what is trained has changed; with all ranks, inside a pass or where nothing is written."""
        if self._job is None or not self._job.alive or unfreeze:
            assert self._register is not None
            self._register(self, unfreeze)

    def _register_again(self, state_is_lost: bool = True) -> None:
        """Gives the job up because the plan has changed; the parameters stay here, and the next use makes the job anew.

        RuntimeError once there are committed steps, as optimizer state goes with the job; ``state_is_lost`` False: it is
        in this process, or nobody has it any more.
        """
        job = self._job
        if job is None:
            return
        if state_is_lost and job.engine is not None and job.engine.info()["committed_step"] > 0:
            raise RuntimeError(
                "change of a registered model: the job has committed steps, whose optimizer state would be lost; build "
                "the optimizer and change parameters before the first step"
            )
        root = job.root()
        if root is not None and job.engine is not None and not state_is_lost:
            root.given_up = job.given_up()
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
    """Returns the state of a module that ``fully_shard`` was applied to."""
    state = _get_module_fsdp_state(module)
    return state if isinstance(state, ShardState) else None


def made() -> int:
    """Counts the modules, or lists of them, that this process has sharded."""
    return _made


def units() -> list[ShardGroup]:
    """Returns the groups of all models of this process, in the order of their making."""
    return [state._unit for ref in list(_states) if (state := ref()) is not None and state._unit is not None]


def root_states() -> list[ShardState]:
    """Returns the outermost states of this process, in the order of their making."""
    states = [state for ref in list(_states) if (state := ref()) is not None and hasattr(state, "_modules")]
    inner: set[int] = set()
    for state in states:
        for module in state._modules:
            inner.update(id(below) for child in module.children() for below in child.modules())
    return [state for state in states if all(id(module) not in inner for module in state._modules)]
