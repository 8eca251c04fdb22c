"""One ``fully_shard`` call's parameters, with the attribute names of torch's ``FSDPParamGroup``."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo, TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPCommContext, FSDPParamGroup
from torch.distributed.tensor import DTensor

from shardd.torch._process.extension import _C
from shardd.torch._process.torch_versions import reduction_policy
from shardd.torch._units import all_reduce_hook
from shardd.torch._units.precision import UnitPrecision

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy


logger = logging.getLogger("shardd.torch")

_TRAINING_STATES = (TrainingState.IDLE, TrainingState.FORWARD, TrainingState.PRE_BACKWARD, TrainingState.POST_BACKWARD)


def _refuse(what: str, instead: str) -> NotImplementedError:
    return NotImplementedError(f"{what}: shardd does not run trainer code in its communication; {instead}")


def calls_weakly(method: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a function that calls ``method`` and does not keep its object, which must be there."""
    bound = weakref.WeakMethod(method)

    def call(argument: Any) -> Any:
        alive = bound()
        assert alive is not None
        return alive(argument)

    return call


def _not_attached() -> None:
    raise AssertionError("a group that no state has attached")


def offloads(policy: OffloadPolicy, device: torch.device) -> bool:
    """Whether shards, reduced gradients and optimizer state are in host memory and a GPU computes with them."""
    return isinstance(policy, CPUOffloadPolicy) and device.type != "cpu"


class ShardGroup(_C.Unit):
    """The hot path is the base class, in C++; this holds what torch's ``FSDPModule`` and ``FSDPState`` look at.

    A state without parameters of its own has a group too, with none: its forward may still be the root's.
    ``ensure_registered`` is set by the state that attaches the group: it registers the model that the group is part of.
    """

    layout = "dim0"
    precision: UnitPrecision | None = None  # in layout flat: torch's MixedPrecision
    extension: Any = None  # of parameters that say themselves how they are gathered
    float8_gathers = False  # fully_shard's

    def __init__(
        self,
        fsdp_params: list[Any],
        modules: tuple[nn.Module, ...],
        mesh_info: FSDPMeshInfo,
        post_forward_mesh_info: FSDPMeshInfo | None,
        device: torch.device,
        mp_policy: MixedPrecisionPolicy,
        offload_policy: OffloadPolicy,
    ) -> None:
        super().__init__()
        self.modules = modules
        self.fsdp_params = fsdp_params
        self.mesh_info = mesh_info
        self._hybrid = self._is_hsdp
        self.post_forward_mesh_info = post_forward_mesh_info
        self.device = device
        self.mp_policy = mp_policy
        self._asked_policy = mp_policy
        self.offload_policy = offload_policy
        self.comm_ctx = FSDPCommContext()
        self.unshard_async_op = False
        self.force_sum_reduction_for_comms = False
        self.reduce_scatter_max_input_buffers = 1
        self._job_divide_factor: float | None = None
        self._gradient_divide_factor: float | None = None
        self.contributing = 1.0  # which part of the ranks the mean is over; see join_uneven
        self._module_fqn: str | None = None
        self._kept: dict[nn.Module, list[tuple[Any, nn.Parameter, str]]] = {}  # of modules that are being loaded
        self._param_group_index = 0
        self._num_param_groups = 1
        self._module_to_pre_save_state_dict_hook_handle: dict[nn.Module, Any] = {}
        self._module_to_pre_load_state_dict_hook_handle: dict[nn.Module, Any] = {}
        self._set_casts(mp_policy.param_dtype if mp_policy.cast_forward_inputs else None, mp_policy.output_dtype)
        self.ensure_registered: Callable[[], None] = _not_attached
        self.held: dict[
            int, Any
        ] = {}  # by the job's number: parameters or FlatParameters, of which this rank has shards
        self._reduced_hook: Callable[[torch.Tensor], None] | None = None
        self._all_reduce_hook_stream: Any = None

    # Attributes that FSDPModule's methods set.

    @property
    def post_forward_mesh_info(self) -> FSDPMeshInfo | None:
        return self._post_forward_mesh_info

    @post_forward_mesh_info.setter
    def post_forward_mesh_info(self, value: FSDPMeshInfo | None) -> None:
        self._post_forward_mesh_info = value
        self._reshard_after_forward = value is not None

    def post_forward_shard_size(self) -> int:
        """Returns over how many ranks the parameters are cut between forward and backward; 1 where they are not resharded."""
        info = self._post_forward_mesh_info
        return 1 if info is None else info.shard_mesh_size

    @property
    def gradient_divide_factor(self) -> float | None:
        return self._gradient_divide_factor

    @gradient_divide_factor.setter
    def gradient_divide_factor(self, value: float | None) -> None:
        if value is not None and not value > 0:
            raise ValueError(f"gradient divide factor: out of range (got {value}, want > 0)")
        self._gradient_divide_factor = value
        self._update_gradient_scale()

    def divide_factor(self) -> float:
        """Returns what gradients are divided by."""
        return self._gradient_divide_factor or float(self.mesh_info.mesh.size())

    def let_contribute(self, contributes: bool, contributing: float) -> None:
        """Says whether this rank's gradients count from now on, and over which part of the ranks the mean is."""
        self.contributes, self.contributing = contributes, contributing
        self._update_gradient_scale()

    def _update_gradient_scale(self, job_divide_factor: float | None = None) -> None:
        # The job divides by one factor, given when it is made; what a group wants otherwise goes in as gradients are
        # copied to the slot anyway.
        if job_divide_factor is not None:
            self._job_divide_factor = job_divide_factor
        if self._job_divide_factor is not None:
            self._scales_by_mesh = self._gradient_divide_factor is None  # else one factor divides all, as in PyTorch
            self._gradient_scale = self._job_divide_factor / (self.divide_factor() * self.contributing)

    @property
    def _all_gather_comm(self) -> None:
        return None

    @_all_gather_comm.setter
    def _all_gather_comm(self, comm: Any) -> None:
        raise _refuse("set_custom_all_gather", "the daemon's own transport is chosen and shown by shardctl")

    @property
    def _reduce_scatter_comm(self) -> None:
        return None

    @_reduce_scatter_comm.setter
    def _reduce_scatter_comm(self, comm: Any) -> None:
        raise _refuse(
            "set_custom_reduce_scatter", "use MixedPrecisionPolicy.reduce_dtype or set_gradient_divide_factor"
        )

    @property
    def _all_reduce_hook(self) -> Callable[[torch.Tensor], None] | None:
        return self._reduced_hook

    @_all_reduce_hook.setter
    def _all_reduce_hook(self, hook: Callable[[torch.Tensor], None] | None) -> None:
        if hook is not None and any(p.mesh_info.mesh != self.mesh_info.mesh for p in self.fsdp_params):
            raise _refuse(
                f"set_all_reduce_hook of {self._module_fqn or type(self.modules[0]).__name__}, whose parameters are on several meshes",
                "apply fully_shard to a module for each mesh",
            )
        self._reduced_hook = hook
        # What C++ holds the collector does not look through, and the program's hook may have the model.
        call = None if hook is None else calls_weakly(self._call_reduced_hook)
        self._set_gradient_hook(call, replaces=False)

    def _call_reduced_hook(self, gradients: list[tuple[int, torch.Tensor]]) -> None:
        hook = self._reduced_hook
        assert hook is not None
        held = [(self.held[number], gradient) for number, gradient in gradients]
        all_reduce_hook.apply(self, hook, self._all_reduce_hook_stream, held)

    @property
    def _is_hsdp(self) -> bool:
        return isinstance(self.mesh_info, HSDPMeshInfo)

    def set_symm_mem(self, backend: str = "NCCL") -> None:
        logger.info("set_symm_mem_for_comm(%r): nothing to do, the daemon owns its buffers", backend)

    def set_allocate_memory_from_process_group(self, enable: bool) -> None:
        logger.info(
            "set_allocate_memory_from_process_group_for_comm(%r): nothing to do, the daemon owns its buffers", enable
        )

    def _set_separate_reduce_scatter_group(self, enable: bool, new_groups: dict[Any, Any]) -> None:
        logger.info("set_separate_reduce_scatter_group(%r): nothing to do, the daemon's streams are separate", enable)

    # Life of the group.

    def lazy_init(self) -> None:
        """Reads parameters as the program left them, before registration; it registers nothing."""
        if self._bound:
            return
        for fsdp_param in self.fsdp_params:
            with torch.inference_mode(False):  # of views, which a subclass makes, and the model may be trained later
                fsdp_param.reset_sharded_param()
            info = fsdp_param._module_info
            for module, name in zip(info.shared_modules, info.shared_param_names):
                setattr(module, name, fsdp_param.sharded_param)  # load_state_dict(assign=True) unties what was tied
            fsdp_param._init_extensions()
        FSDPParamGroup._validate_no_meta_params(self)  # type: ignore[arg-type]
        self.check_device()
        stored = [p.sharded_param.dtype for p in self.fsdp_params if p.sharded_param.requires_grad]
        self.mp_policy = reduction_policy(self._asked_policy, stored)
        for fsdp_param in self.fsdp_params:
            fsdp_param.init_dtype_attrs(self.mp_policy)
        FSDPParamGroup._register_state_dict_hooks(self)  # type: ignore[arg-type]

    def check_device(self) -> None:
        """Raises where the program has moved parameters since: the job has memory where the unit is."""
        want = torch.device("cpu") if offloads(self.offload_policy, self.device) else self.device
        for fsdp_param in self.fsdp_params:
            got = getattr(fsdp_param.sharded_param, "_local_tensor", fsdp_param.sharded_param).device
            if got != want:
                raise RuntimeError(
                    f'register parameter "{fsdp_param._param_fqn or tuple(fsdp_param._orig_size)}" of '
                    f"{type(self.modules[0]).__name__}: it is on another device than its unit (got {got}, want {want}); move "
                    "the model before it is wrapped or sharded, or pass device_id"
                )

    def before_load(self, module: nn.Module) -> None:
        kept = self._kept[module] = []
        for fsdp_param in self.fsdp_params:
            info = fsdp_param._module_info
            places = [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names)]
            kept += [(fsdp_param, fsdp_param.sharded_param, name) for owner, name in places if owner is module]

    def after_load(self, module: nn.Module) -> None:
        """Copies what load_state_dict(assign=True) put in a parameter's place into it, and gives it back to the module."""
        for fsdp_param, kept, name in self._kept.pop(module, []):
            given = module._parameters[name]
            if given is kept or not isinstance(given, DTensor):
                continue
            with torch.no_grad():
                kept.copy_(given)
            kept.grad = given.grad  # none, unless the program has put one there: what there was is the old object's
            module._parameters[name] = kept
            if fsdp_param._module_info.module is module:
                fsdp_param.reset_sharded_param()

    def unshard(self, async_op: bool = False) -> None:
        """Asks the daemon for the whole parameters; ``wait_for_unshard`` or the next forward puts them in the modules."""
        self.ensure_registered()
        self._request_unshard()

    def wait_for_unshard(self) -> None:
        self._wait_for_unshard()

    @property
    def _training_state(self) -> TrainingState:
        return _TRAINING_STATES[self._training]

    @property
    def _sharded_state(self) -> ShardedState:
        return ShardedState.UNSHARDED if self.is_unsharded else ShardedState.SHARDED

    @property
    def is_sharded_post_forward(self) -> bool:
        return False

    def __repr__(self) -> str:
        return f"ShardGroup(fqn={self._module_fqn})"
