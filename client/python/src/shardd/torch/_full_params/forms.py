"""What the program holds of a parameter inside ``summon_full_params``, by the form of the API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from shardd.torch._job.job import TorchJob
from shardd.torch._units.flat_shard_param import FlatShardParam
from shardd.torch._units.names import flat_owner
from shardd.torch._units.placement import first_element, from_job_order, in_job_order

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

__all__ = ["FullParam", "full_param"]


class FullParam(Protocol):
    """One parameter of the job and what the program holds of it: one implementation for each form of the API."""

    index: int  # the daemon's
    fqn: str
    shape: torch.Size
    dtype: torch.dtype  # as stored
    trainable: bool  # the job has a gradient for it

    def empty(self, device: torch.device) -> torch.Tensor:
        """Makes the tensor that ``show`` takes, without its values."""

    def show(self, value: torch.Tensor, grad: torch.Tensor | None) -> None:
        """The program holds the whole parameter from here on; ``value`` and ``grad`` are its to edit."""

    def hide(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The program holds its shard again. Returns what it has left of value and gradient, in whatever shape."""

    def drop_grad(self) -> None:
        """``.grad`` of the shard becomes None."""

    def in_job_order(self, whole: torch.Tensor) -> torch.Tensor:
        """Returns the elements of the whole parameter, or of its gradient, in the job's order; 1-D."""

    # Where the parameters are cut over nodes and are gathered from what ranks hold:

    @property
    def group(self) -> Any:
        """The process group over whose ranks it is cut."""

    def piece(self) -> tuple[int, torch.Tensor]:
        """Returns the first element, and the elements, that this rank holds, in the job's order; 1-D."""

    def from_job_order(self, whole: torch.Tensor) -> torch.Tensor:
        """Returns the parameter of its elements in the job's order."""


class ShardedFullParam:
    """The form of ``fully_shard``: a plain parameter takes the place of the DTensor in the module's attributes."""

    def __init__(self, job: TorchJob, fsdp_param: FSDPParam) -> None:
        place = job.places[id(fsdp_param.sharded_param)]
        job.refuse_tensor_parallel("summon_full_params", "use state dicts and full_tensor(), which gather them")
        job.refuse_subclasses("summon_full_params", "use state dicts and full_tensor(), which gather them")
        job.refuse_several_meshes("summon_full_params", "use state dicts and full_tensor(), which gather them")
        self.index = place.index
        self.fqn = place.fqn
        self.trainable = place.trainable
        self.shape = fsdp_param._orig_size
        self.dtype = fsdp_param.sharded_param.dtype
        info = fsdp_param._module_info
        self._fsdp_param = fsdp_param
        self._sharded = fsdp_param.sharded_param
        self._places = [
            (info.module, info.param_name),
            *zip(info.shared_modules, info.shared_param_names),
        ]
        self._shown: nn.Parameter | None = None

    def empty(self, device: torch.device) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def show(self, value: torch.Tensor, grad: torch.Tensor | None) -> None:
        shown = nn.Parameter(value, requires_grad=self._sharded.requires_grad)
        if grad is not None:
            shown.grad = grad.to(self.dtype)
        self._shown = shown
        # torch looks at the DTensor after load_state_dict, which here goes into `shown`.
        self._fsdp_param.reset_sharded_param = _nothing  # type: ignore[method-assign]
        self._put(shown)

    def hide(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        module, name = self._places[0]
        left = module._parameters.get(name)
        if left is None:
            left = self._shown
        assert left is not None
        self._put(self._sharded)
        del self._fsdp_param.reset_sharded_param
        self._shown = None
        return left.detach(), left.grad

    def drop_grad(self) -> None:
        self._sharded.grad = None

    def in_job_order(self, whole: torch.Tensor) -> torch.Tensor:
        return in_job_order(self._fsdp_param, whole)

    @property
    def group(self) -> Any:
        return self._fsdp_param.mesh_info.shard_process_group

    def piece(self) -> tuple[int, torch.Tensor]:
        sharded: Any = self._sharded
        return first_element(self._fsdp_param), sharded._local_tensor.detach().reshape(-1)

    def from_job_order(self, whole: torch.Tensor) -> torch.Tensor:
        return from_job_order(self._fsdp_param, whole)

    def _put(self, param: nn.Parameter) -> None:
        for module, name in self._places:
            setattr(module, name, param)  # also where the class overrides it


class FlatFullParam:
    """The form of layout flat: the object that the user has shows the whole."""

    def __init__(self, job: TorchJob, fsdp_param: FlatShardParam) -> None:
        place = job.places[id(fsdp_param.sharded_param)]
        self.index = place.index
        self.fqn = place.fqn
        self.trainable = place.trainable
        self.shape = fsdp_param._orig_size
        self.dtype = fsdp_param.orig_dtype
        self._fsdp_param = fsdp_param
        self._param = fsdp_param.sharded_param
        self._uses = fsdp_param.uses
        self._shard: tuple[torch.Tensor, torch.Tensor | None] | None = None

    def empty(self, device: torch.device) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def show(self, value: torch.Tensor, grad: torch.Tensor | None) -> None:
        self._shard = (self._param.data, self._param.grad)
        self._swap(value, None if grad is None else grad.to(self._param.grad_dtype or self._param.dtype))

    def hide(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        assert self._shard is not None
        left = (self._param.data, self._param.grad)
        for use in self._uses:
            current = use.module._parameters.get(use.name)
            if current is not None and current is not self._param:  # another object, whose values count
                left = (current.detach(), current.grad)
                use.module._parameters[use.name] = self._param
        self._swap(*self._shard)
        self._shard = None
        return left

    def drop_grad(self) -> None:
        self._param.grad = None

    def in_job_order(self, whole: torch.Tensor) -> torch.Tensor:
        return whole.reshape(-1)

    @property
    def group(self) -> Any:
        return self._fsdp_param.mesh_info.shard_process_group

    def piece(self) -> tuple[int, torch.Tensor]:
        return self._fsdp_param.piece()

    def from_job_order(self, whole: torch.Tensor) -> torch.Tensor:
        return whole.view(self.shape)

    def _swap(self, data: torch.Tensor, grad: torch.Tensor | None) -> None:
        self._param.grad = None
        self._param.data = data
        self._param.grad = grad


class MemberFullParam:
    """The form of a parameter in a ``FlatParameter``: the module shows its parameters, and the ``FlatParameter`` is hidden meanwhile."""

    def __init__(self, job: TorchJob, fsdp_param: FlatShardParam) -> None:
        holder = fsdp_param.holder
        assert holder is not None and job.engine is not None
        place = job.places[id(holder.sharded_param)]
        number = next(i for i, member in enumerate(holder.members) if member is fsdp_param)
        self.index = place.members[number][0]
        info = job.engine.param_info(self.index)
        self.fqn = str(info["fqn"])
        self.trainable = place.trainable
        self._first = int(info["offset"])
        last, of_last = place.members[-1][0], holder.members[-1]
        self._end = int(job.engine.param_info(last)["offset"]) + of_last._orig_size.numel()
        self.shape = fsdp_param._orig_size
        self.dtype = fsdp_param.orig_dtype
        self._member = fsdp_param
        self._holder = holder
        self._outer = flat_owner(fsdp_param.home.modules[0])
        self._before: Any = None

    def empty(self, device: torch.device) -> torch.Tensor:
        """Returns this parameter's part of the whole FlatParameter."""
        flat = self._holder.full
        if flat is None:
            flat = self._holder.full = torch.zeros(self._end, dtype=self.dtype, device=device)
        return flat.narrow(0, self._first, self.shape.numel()).view(self.shape)

    def show(self, value: torch.Tensor, grad: torch.Tensor | None) -> None:
        flat = self._holder.sharded_param
        shown = nn.Parameter(value, requires_grad=flat.requires_grad)
        if grad is not None:
            shown.grad_dtype = flat.grad_dtype
            shown.grad = grad.to(flat.grad_dtype or flat.dtype)
        self._outer._parameters.pop(self._holder.name, None)
        self._holder.show_full()
        for use in self._member.uses:
            self._before = use.module.__dict__.pop(use.name, self._before)
            use.module._parameters[use.name] = shown

    def hide(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        use = self._member.uses[0]
        left = use.module._parameters[use.name]
        assert left is not None
        self._member.show(self._before)
        self._holder.hide_full()
        self._outer._parameters[self._holder.name] = self._holder.sharded_param
        return left.detach(), left.grad

    def drop_grad(self) -> None:
        """Does nothing: the parameters of a FlatParameter have one gradient together."""

    def in_job_order(self, whole: torch.Tensor) -> torch.Tensor:
        return whole.reshape(-1)

    @property
    def group(self) -> Any:
        return self._member.mesh_info.shard_process_group

    def piece(self) -> tuple[int, torch.Tensor]:
        return self._member.piece()

    def from_job_order(self, whole: torch.Tensor) -> torch.Tensor:
        return whole.view(self.shape)


def full_param(job: TorchJob, fsdp_param: Any) -> FullParam:
    if not isinstance(fsdp_param, FlatShardParam):
        return ShardedFullParam(job, fsdp_param)
    return FlatFullParam(job, fsdp_param) if fsdp_param.holder is None else MemberFullParam(job, fsdp_param)


def _nothing() -> None:
    return
