"""``FullyShardedDataParallel``: torch 2.13's wrapper class, whose flat parameters live in the daemon."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_WRAPPED_MODULE, ActivationWrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    OffloadPolicy,
    ShardingStrategy,
)
from torch.distributed.fsdp._common_utils import TrainingState

from shardd.torch._full_params.summon import summon_full_params
from shardd.torch._job.registration import attach
from shardd.torch._sharding import comm_hooks
from shardd.torch._sharding.auto_wrap import auto_wrap
from shardd.torch._sharding.device import check_offload, device_of
from shardd.torch._sharding.fully_shard import apply_and_watch, watch_loads
from shardd.torch._sharding.ignored import find_ignored
from shardd.torch._sharding.wrapper_arguments import (
    HYBRID,
    forget_mesh,
    make_mesh,
    mixed_policy,
    place,
    strategy_of,
    sync,
)
from shardd.torch._sharding.wrapper_internals import ABSENT, WrapperInternals
from shardd.torch._state_dicts.model_state_dict import install_hooks
from shardd.torch._state_dicts.wrapper_methods import StateDictMethods
from shardd.torch._training.clip import clip_model
from shardd.torch._units import precision_hooks
from shardd.torch._units.flat_group import RESHARDS, FlatGroup, place_alike
from shardd.torch._units.names import WRAPPED_MODULE
from shardd.torch._units.precision import UnitPrecision, full_precision_in_eval
from shardd.torch._units.state import ShardState, state_of

__all__ = ["FullyShardedDataParallel"]

_PREFIX = WRAPPED_MODULE + "."


class FullyShardedDataParallel(StateDictMethods, WrapperInternals, nn.Module):
    """Wraps a module and shards its parameters, gradients and optimizer state; the daemon owns them.

    Arguments, methods and attributes are those of torch 2.13's class of this name. Parameters are plain tensors: with
    ``use_orig_params`` the objects that the user gave, each this rank's piece of it (one-dimensional, possibly empty);
    without, one ``FlatParameter`` for each dtype and requires_grad. The job is opened at the first forward.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: Any = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: Any = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], Any] | None = None,
        device_id: int | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        super().__init__()
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            warnings.warn(
                f"FSDP will not all-gather parameters for containers that do not implement forward: {module}",
                stacklevel=2,
            )
        ignored = find_ignored(module, ignored_modules, ignored_states)
        device = device_of([module], ignored, device_id, device_mesh)
        check_offload(cpu_offload is not None and cpu_offload.offload_params, device)
        chooses = auto_wrap_policy is not None
        mesh_info = make_mesh(process_group, device_mesh, sharding_strategy, chooses, device.type)
        self._synced: set[int] = set()
        if auto_wrap_policy is not None:
            hybrid = sharding_strategy in HYBRID
            auto_wrap(
                module,
                auto_wrap_policy,
                ignored.modules,
                ignored.params,
                {
                    "process_group": None if hybrid else process_group,
                    "sharding_strategy": sharding_strategy,
                    "cpu_offload": cpu_offload,
                    "backward_prefetch": backward_prefetch,
                    "mixed_precision": mixed_precision,
                    "param_init_fn": param_init_fn,
                    "device_id": device_id,
                    "sync_module_states": sync_module_states,
                    "forward_prefetch": forward_prefetch,
                    "limit_all_gathers": limit_all_gathers,
                    "use_orig_params": use_orig_params,
                    "ignored_states": list(ignored.params),
                    "device_mesh": mesh_info.mesh if hybrid else device_mesh,
                },
                FullyShardedDataParallel,
            )
            if hybrid and device_mesh is None:
                forget_mesh(module, mesh_info.mesh)
        self.process_group = mesh_info.shard_process_group
        self.rank = self.process_group.rank()
        self.world_size = self.process_group.size()
        self.sharding_strategy = strategy_of(sharding_strategy, self.world_size)
        self.cpu_offload = cpu_offload or CPUOffload()
        self.mixed_precision = mixed_precision or MixedPrecision()
        self.backward_prefetch = backward_prefetch
        self.forward_prefetch = forward_prefetch
        self.limit_all_gathers = limit_all_gathers
        self.compute_device = device
        self._use_orig_params = use_orig_params
        place(module, ignored, device, param_init_fn)
        if sync_module_states:
            for nested in module.modules():
                self._synced |= getattr(nested, "_synced", set())
            sync(module, ignored, mesh_info, self._synced)
        self._fsdp_wrapped_module = module
        reshards = self.sharding_strategy in RESHARDS
        policy = mixed_policy(mixed_precision)
        state = ShardState()
        state.ignored = ignored
        state.attributes = {
            "_use_orig_params": use_orig_params,
            "limit_all_gathers": limit_all_gathers,
            "_use_full_prec_in_eval": full_precision_in_eval(),
        }
        state.init((self,), self.compute_device, policy, auto_reshard_after_forward=reshards)
        attach(
            state,
            FlatGroup(
                (self,),
                (module,),
                mesh_info,
                self.sharding_strategy,
                use_orig_params,
                reshards,
                device,
                policy,
                OffloadPolicy(),
                ignored.modules,
                ignored.params,
            ),
        )
        place_alike((self,))
        precision_hooks.install(UnitPrecision(self, mixed_precision, ignored.modules), state)
        state.__dict__["_given_mesh"] = device_mesh  # state dicts are then DTensors, as torch's are
        install_hooks(self)
        for managed in module.modules():  # for torch.compile
            if managed not in ignored.modules:
                managed._is_fsdp_managed_module = True  # type: ignore[assignment]
                managed._fsdp_use_orig_params = use_orig_params  # type: ignore[assignment]
                if state_of(managed) is None:
                    watch_loads(managed, state)

    @property
    def _state(self) -> ShardState:
        state = state_of(self)
        assert state is not None
        return state

    @property
    def module(self) -> nn.Module:
        """What is wrapped, without a checkpoint wrapper around it."""
        inner = self._fsdp_wrapped_module
        return getattr(inner, _CHECKPOINT_WRAPPED_MODULE) if isinstance(inner, ActivationWrapper) else inner

    @property
    def training_state(self) -> TrainingState:
        """What is under way in this unit."""
        if "_shows_full_params" in self.__dict__:  # by summon_full_params
            return TrainingState.SUMMON_FULL_PARAMS
        unit = self._state._unit
        assert unit is not None
        return TrainingState.FORWARD_BACKWARD if unit._training else TrainingState.IDLE

    def __getattr__(self, name: str) -> Any:
        """Attributes of the wrapped module."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == WRAPPED_MODULE:
                raise
            if name in ABSENT:
                raise AttributeError(f"{name}: {ABSENT[name]}") from None
            return getattr(self._fsdp_wrapped_module, name)

    def __getitem__(self, key: Any) -> Any:
        return self._fsdp_wrapped_module.__getitem__(key)  # type: ignore[operator]

    def __len__(self) -> int:
        return len(self._fsdp_wrapped_module)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's. Hooks of this module unshard and reshard."""
        return self._fsdp_wrapped_module(*args, **kwargs)

    def check_is_root(self) -> bool:
        """Whether no other wrapper is around this one."""
        return self._state._outermost() is self._state

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        """All wrappers in ``module``, itself included, from the outside in; ``root_only``: without nested ones."""
        found = list(dict.fromkeys(m for m in module.modules() if isinstance(m, FullyShardedDataParallel)))
        return [m for m in found if not root_only or m.check_is_root()]

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients are added up and not shown; the first forward and backward after it synchronise them."""
        if not self.check_is_root():
            raise RuntimeError(
                "`no_sync()` on inner FSDP instances is not supported. Please call `no_sync()` on root FSDP module."
            )
        if self.training_state != TrainingState.IDLE:
            raise RuntimeError(f"no_sync: a forward or backward is under way (got {self.training_state}, want IDLE)")
        units = [m._state._unit for m in self.fsdp_modules(self)]
        before = [unit.reduce_grads for unit in units if unit is not None]
        try:
            for unit in units:
                assert unit is not None
                unit.reduce_grads = False
            yield
        finally:
            for unit, value in zip(units, before):
                assert unit is not None
                unit.reduce_grads = value

    def apply(self, fn: Callable[[nn.Module], None]) -> Any:
        """``fn`` of every module below and of this one, with whole parameters, which are written back. All ranks call it."""
        job = self._state._job
        if job is not None and job.engine is not None and job.engine.full_params:
            return super().apply(fn)  # of a wrapper around this one
        with summon_full_params(self):
            return super().apply(fn)

    @staticmethod
    @contextlib.contextmanager
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> Iterator[None]:
        """Whole parameters as stored, in ``module`` and below it: see ``shardd.torch.summon_full_params``.

        Where nothing is sharded (NO_SHARD, one rank) edits stay whatever ``writeback`` says, as in torch.
        """
        wrappers = FullyShardedDataParallel.fsdp_modules(module)
        whole = bool(wrappers) and all(w._unit.strategy == ShardingStrategy.NO_SHARD for w in wrappers)
        keeps = writeback or (whole and not rank0_only)
        with summon_full_params(module, recurse, keeps, rank0_only, offload_to_cpu, with_grads):
            yield

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clips by the norm of all gradients of the model, each counted once, with one collective of all ranks.

        Returns that norm, in the widest dtype of the gradients. Of the root, outside of forward and backward. Under
        ``no_sync`` it is the norm of what is added up over ranks so far, which is scaled where the job has it.
        """
        if not self.check_is_root():
            raise RuntimeError("`clip_grad_norm_()` should only be called on the root FSDP instance")
        return clip_model(self, self._state, max_norm, norm_type, self.process_group)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        parent = super()._apply
        return apply_and_watch(self._state, lambda: parent(*args, **kwargs))

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As nn.Module's; without the wrappers' part of the names inside ``summon_full_params``."""
        clean = self.training_state == TrainingState.SUMMON_FULL_PARAMS
        for name, param in super().named_parameters(*args, **kwargs):
            yield (name.replace(_PREFIX, "") if clean else name), param

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """As nn.Module's; without the wrappers' part of the names inside ``summon_full_params``."""
        clean = self.training_state == TrainingState.SUMMON_FULL_PARAMS
        for name, buffer in super().named_buffers(*args, **kwargs):
            yield (name.replace(_PREFIX, "") if clean else name), buffer

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Lets ``hook(state, gradient, shard)`` reduce gradients, or ``hook(state, gradient)`` with NO_SHARD. Of the root.

        It is called when a backward has ended, for each unit in the order of the backward. What PyTorch's own hooks do the
        daemon does.
        """
        if not self.check_is_root():
            raise AssertionError("register_comm_hook can only be called on a root instance.")
        comm_hooks.register(self.fsdp_modules(self), state, hook)
