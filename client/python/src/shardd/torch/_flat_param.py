"""A parameter in layout ``flat``: this rank's piece of it is a plain tensor, cut wherever the cut falls."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed._composable.contract import _get_registry
from torch.distributed.fsdp._fully_shard._fsdp_param import ParamModuleInfo
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

    from shardd.torch._flat_group import FlatGroup

__all__ = ["FlatShardParam", "Use", "composable", "flat_param_of", "lay_out", "managed_uses"]

ALIGNMENT_BYTES = 16  # of each parameter's start in its flat parameter

# What a parameter object that the user gave has become.
_known: Any = WeakTensorKeyDictionary()


def flat_param_of(param: torch.Tensor) -> FlatShardParam | None:
    """``None``: no flat parameter has it."""
    ref = _known.get(param)
    return None if ref is None else ref()


@dataclass
class Use:
    """A place where a module has the parameter, and the unit that module belongs to."""

    unit: weakref.ref[FlatGroup]
    module: nn.Module
    name: str


class FlatShardParam:
    """What ``FlatGroup`` knows of one parameter, with the attribute names of torch's ``FSDPParam``.

    ``sharded_param`` is the object that the user gave, whose data is this rank's piece: elements [first, first + numel)
    of the parameter, one-dimensional, or all of it in its own shape where it is not cut (``whole``).
    """

    def __init__(self, param: nn.Parameter, mesh_info: FSDPMeshInfo, whole: bool) -> None:
        self._orig_size = param.size()
        self._orig_param_uid = id(self)
        self._param_fqn: str | None = None
        self.sharded_param: Any = param
        self.mesh_info = mesh_info
        self.whole = whole
        self.orig_dtype = param.dtype
        self.param_dtype: torch.dtype | None = None
        self.reduce_dtype: torch.dtype | None = None
        self.first = 0
        self.uses: list[Use] = []
        self._unsharded_param: Any = None
        self._stale: tuple[int, torch.Tensor] | None = None
        _known[param] = weakref.ref(self)

    @property
    def home(self) -> FlatGroup:
        """The unit that unshards it: that of its first use."""
        unit = self.uses[0].unit()
        assert unit is not None
        return unit

    def uses_in(self, unit: Any) -> list[Use]:
        return [use for use in self.uses if use.unit() is unit]

    @property
    def _module_info(self) -> ParamModuleInfo:
        first, *others = self.uses
        return ParamModuleInfo(first.module, first.name, [u.module for u in others], [u.name for u in others])

    @property
    def local(self) -> torch.Tensor:
        return self.sharded_param.detach()

    def cut(self, first: int, numel: int) -> None:
        """From the whole, which the parameter still holds, to this rank's piece. The rest is freed."""
        self.first = first
        self.sharded_param.grad = None
        data = self.sharded_param.detach()
        if self.whole:
            self.sharded_param.data = (
                data.contiguous() if _alone(data) else data.clone(memory_format=torch.contiguous_format)
            )
        else:
            self.sharded_param.data = data.reshape(-1)[first : first + numel].clone()

    # What registration does.

    def reset_sharded_param(self) -> None:
        """Reads again what the program has made of the parameter since."""
        use = self.uses[0]
        current = use.module._parameters.get(use.name)
        if current is not None and current is not self.sharded_param:
            self._take_over(current)
        self.orig_dtype = self.sharded_param.dtype

    def _take_over(self, param: nn.Parameter) -> None:
        """Another object has taken its place (``load_state_dict`` with assign=True): with a piece, or the whole."""
        before = self.sharded_param
        if param.shape != before.shape and param.shape != self._orig_size:
            raise ValueError(
                f'register parameter "{self._param_fqn}": the object that was assigned to its module has another shape '
                f"(got {tuple(param.shape)}, want {tuple(before.shape)} or {tuple(self._orig_size)})"
            )
        self.sharded_param = param
        _known[param] = weakref.ref(self)
        for use in self.uses:
            if use.module._parameters.get(use.name) is before:
                use.module._parameters[use.name] = param
        if param.shape != before.shape or self.whole:
            self.cut(self.first, before.numel())

    def init_dtype_attrs(self, mp_policy: MixedPrecisionPolicy) -> None:
        param_dtype, reduce_dtype = mp_policy.param_dtype, mp_policy.reduce_dtype
        floating = self.orig_dtype.is_floating_point
        self.param_dtype = param_dtype if floating and param_dtype != self.orig_dtype else None
        self.reduce_dtype = None if reduce_dtype == (param_dtype or self.orig_dtype) else reduce_dtype

    def take_range(self, first: int, numel: int) -> torch.Tensor:
        """The job's piece of it may be another one than it was cut to (a tie, a frozen neighbour): what is here is given
        to the job first. The tensor that will lie in the job's memory, alone in its storage."""
        if not self.whole and (first, numel) != (self.first, self.sharded_param.numel()):
            self._stale = (self.first, self.local)
            self.first = first
            self.sharded_param.data = torch.empty(numel, dtype=self.orig_dtype)
        elif not _alone(self.local):
            self.sharded_param.data = self.local.clone(memory_format=torch.contiguous_format)
        return self.local

    def given(self) -> tuple[int, torch.Tensor]:
        """First element and values of the parameter that this rank has to give to the job."""
        stale, self._stale = self._stale, None
        return (self.first, self.local.reshape(-1)) if stale is None else stale


def _alone(tensor: torch.Tensor) -> bool:
    size_bytes = tensor.numel() * tensor.element_size()
    return tensor.is_contiguous() and tensor.storage_offset() == 0 and tensor.untyped_storage().nbytes() == size_bytes


def lay_out(params: list[FlatShardParam], shard: int, shards: int, param_dtype: torch.dtype | None) -> None:
    """Cuts whole parameters as the daemon's plan will: a flat parameter for each (dtype, requires_grad), in equal pieces."""
    kinds: dict[Any, list[FlatShardParam]] = {}
    for param in params:
        kinds.setdefault((param.orig_dtype, param.sharded_param.requires_grad), []).append(param)
    for (dtype, _), members in kinds.items():
        unsharded = param_dtype if param_dtype is not None and dtype.is_floating_point else dtype
        alignment = ALIGNMENT_BYTES // min(dtype.itemsize, unsharded.itemsize)
        offsets = []
        end = 0
        for member in members:
            start = -(-end // alignment) * alignment
            offsets.append(start)
            end = start + member._orig_size.numel()
        piece = -(-end // (shards * alignment)) * alignment
        for member, offset in zip(members, offsets):
            numel = member._orig_size.numel()
            first = min(max(shard * piece - offset, 0), numel)
            last = min(max((shard + 1) * piece - offset, 0), numel)
            member.cut(0 if member.whole else first, numel if member.whole else last - first)


def composable(module: nn.Module) -> bool:
    """Not the root of a ``replicate`` subtree, whose gradients are reduced by that."""
    return "replicate" not in (_get_registry(module) or {})


def managed_uses(
    modules: Iterable[nn.Module], ignored_modules: set[nn.Module], ignored_params: set[nn.Parameter]
) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Every place of a parameter below ``modules`` that no other unit, ignored module or ``replicate`` has, in order."""
    from shardd.torch._state import state_of

    visited: set[nn.Module] = set()

    def visit(module: nn.Module, root: bool) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
        if module in visited or module in ignored_modules or not composable(module):
            return
        if not root and state_of(module) is not None:
            return
        visited.add(module)
        for name, param in module._parameters.items():
            if param is None or param in ignored_params:
                continue
            if isinstance(param, DTensor):
                raise NotImplementedError(
                    f'shard parameter "{name}" of {type(module).__name__}: it is a DTensor already (tensor parallel, or '
                    "fully_shard with its layout dim0); ignore it, or use one layout for the whole model"
                )
            yield module, name, param
        for child in module.children():
            yield from visit(child, False)

    for module in modules:
        yield from visit(module, True)
