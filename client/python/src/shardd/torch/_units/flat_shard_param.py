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

from shardd.torch._units.flat_parameter import FlatHolder, Slice
from shardd.torch._units.shard_group import ShardGroup
from shardd.torch._units.state import state_of
from shardd.torch._units.subclasses import refuse_subclass

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

__all__ = ["FlatShardParam", "Use", "composable", "cut_flat", "flat_param_of", "is_sharded", "lay_out", "managed_uses"]

ALIGNMENT_BYTES = 16  # of each parameter's start in its flat parameter

# What a parameter object that the user gave has become.
_known: Any = WeakTensorKeyDictionary()


def flat_param_of(param: torch.Tensor) -> FlatShardParam | None:
    """Returns what layout flat knows of the parameter; None where no flat parameter has it."""
    ref = _known.get(param)
    return None if ref is None else ref()


def is_sharded(param: torch.Tensor) -> bool:
    """Whether a unit has it already, as one of its parameters or its ``FlatParameter``."""
    return flat_param_of(param) is not None or getattr(param, "_is_flat_param", False)


class FlatUnit(ShardGroup):
    """What a parameter asks of the unit that has it; ``FlatGroup`` is one."""

    layout = "flat"

    def shard_of(self) -> tuple[int, int]:
        """Returns which of how many pieces of its flat parameters this rank has."""
        raise NotImplementedError

    def take_over(self, fsdp_param: FlatShardParam) -> None:
        """Takes a tied parameter, which turns out to be this unit's, from the unit that had it."""
        raise NotImplementedError


@dataclass
class Use:
    """A place where a module has the parameter, and the unit that module belongs to."""

    unit: weakref.ref[FlatUnit]
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
        self.numel = param.numel()  # of this rank's piece
        self.holder: FlatHolder[FlatShardParam] | None = None
        self._original: Any = None
        self.uses: list[Use] = []
        self._unsharded_param: Any = None
        self._saved: tuple[int, torch.Tensor] | None = None
        _known[param] = weakref.ref(self)

    @property
    def home(self) -> FlatUnit:
        """The unit of its first use, which unshards it."""
        unit = self.uses[0].unit()
        assert unit is not None
        return unit

    def uses_in(self, unit: Any) -> list[Use]:
        return [use for use in self.uses if use.unit() is unit]

    @property
    def _module_info(self) -> ParamModuleInfo:
        first, *others = self.uses
        return ParamModuleInfo(first.module, first.name, [u.module for u in others], [u.name for u in others])

    def join(self, holder: FlatHolder[FlatShardParam]) -> None:
        """Moves the whole, which the parameter still has, into a FlatParameter; modules have the parameter no more."""
        whole = self.sharded_param.detach().reshape(-1)
        cut = holder.slices[id(self)]
        holder.local[cut.start : cut.start + cut.numel] = whole[cut.first : cut.first + cut.numel]
        self.holder = holder
        holder.members.append(self)
        self._original = self.sharded_param  # others may look for it, under which it is known
        self._original.grad = None
        self._original.data = torch.empty(0, dtype=self.orig_dtype, device=holder.local.device)
        self.sharded_param = holder.sharded_param
        self.show(torch.empty(self._orig_size, dtype=self.orig_dtype, device="meta"))

    def show(self, tensor: torch.Tensor) -> None:
        """Gives modules ``tensor`` as their attribute, where the parameter is in a FlatParameter."""
        for use in self.uses:
            use.module._parameters.pop(use.name, None)
            use.module.__dict__[use.name] = tensor

    def cut(self, first: int, numel: int) -> None:
        """Cuts the whole, which the parameter still has, to this rank's piece. The rest is freed."""
        self.first = first
        self.sharded_param.grad = None
        data = self.sharded_param.detach()
        self.numel = data.numel() if self.whole else numel
        if self.whole:
            self.sharded_param.data = (
                data.contiguous() if _alone(data) else data.clone(memory_format=torch.contiguous_format)
            )
        else:
            self.sharded_param.data = data.reshape(-1)[first : first + numel].clone()

    # What registration does.

    def reset_sharded_param(self) -> None:
        """Reads again what the program has made of the parameter since."""
        if self.holder is None:
            found = [use.module._parameters.get(use.name) for use in self.uses]
            others = {id(p): p for p in found if p is not None and p is not self.sharded_param}
            if len(others) > 1:
                raise NotImplementedError(
                    f'register parameter "{self._name()}": Changing shared parameters is not supported: its modules '
                    f"were given different objects (got {len(others)}, want 1)"
                )
            self._take_over(others.popitem()[1] if others else self.sharded_param)
        self.orig_dtype = self.sharded_param.dtype

    def _name(self) -> str:
        first = self.uses[0]
        return self._param_fqn or f"{type(first.module).__name__}.{first.name}"

    def _take_over(self, param: nn.Parameter) -> None:
        """What the program holds by now, perhaps another object: a piece of the same shape, or the whole, as
        ``load_state_dict`` with assign=True gives it."""
        shape = self._orig_size if self.whole else torch.Size([self.numel])
        if param.shape != shape and param.shape != self._orig_size:
            raise RuntimeError(
                f'register parameter "{self._name()}": Cannot writeback when the parameter shape changes (got '
                f"{tuple(param.shape)}, want {tuple(shape)}, this rank's piece of it, or {tuple(self._orig_size)})"
            )
        before, other = self.sharded_param, param is not self.sharded_param
        if other:
            self.become(param)
            for use in self.uses:
                if use.module._parameters.get(use.name) is before:
                    use.module._parameters[use.name] = param
        if param.shape != shape or (self.whole and other):
            self.cut(self.first, self.numel)

    def become(self, param: nn.Parameter) -> None:
        """Makes ``param`` what the program has from now on."""
        before, self.sharded_param = self.sharded_param, param
        _known.pop(before, None)
        _known[param] = weakref.ref(self)
        if before.grad_dtype != before.dtype:  # registration has set it
            param.grad_dtype = before.grad_dtype

    def init_dtype_attrs(self, mp_policy: MixedPrecisionPolicy) -> None:
        param_dtype, reduce_dtype = mp_policy.param_dtype, mp_policy.reduce_dtype
        floating = self.orig_dtype.is_floating_point
        self.param_dtype = param_dtype if floating and param_dtype != self.orig_dtype else None
        self.reduce_dtype = None if reduce_dtype == (param_dtype or self.orig_dtype) else reduce_dtype

    def take_range(self, first: int, numel: int) -> torch.Tensor:
        """The job's piece of it may be another one than it was cut to (a tie, a frozen neighbour): what is here is given
        to the job first. The tensor that will lie in the job's memory, alone in its storage."""
        if not self.whole and (first, numel) != (self.first, self.sharded_param.numel()):
            self.save_values()
            self.first, self.numel = first, numel
            self.sharded_param.grad = None  # of another piece
            self.sharded_param.data = torch.empty(numel, dtype=self.orig_dtype, device=self.sharded_param.device)
        elif not _alone(self.sharded_param.detach()):
            self.sharded_param.data = self.sharded_param.detach().clone(memory_format=torch.contiguous_format)
        return self.sharded_param.detach()

    def save_values(self) -> None:
        """Remembers what is here now for the job, wherever the piece will lie."""
        if self._saved is None:
            self._saved = self.piece()

    def piece(self) -> tuple[int, torch.Tensor]:
        """Returns its first element in the parameter, and ``local``."""
        if self.holder is not None:
            return self.holder.values_of(self)
        return self.first, self.sharded_param.detach().reshape(-1)

    @property
    def local(self) -> torch.Tensor:
        """This rank's piece, one-dimensional: a view of what the program holds, of a FlatParameter too."""
        return self.piece()[1]

    def take_initial_values(self) -> tuple[int, torch.Tensor]:
        """Returns first element and values that this rank has to give to the job, and forgets what was saved of them."""
        saved, self._saved = self._saved, None
        return self.piece() if saved is None else saved


def _alone(tensor: torch.Tensor) -> bool:
    size_bytes = tensor.numel() * tensor.element_size()
    return tensor.is_contiguous() and tensor.storage_offset() == 0 and tensor.untyped_storage().nbytes() == size_bytes


@dataclass(frozen=True)
class Cut:
    """Where a flat parameter begins in this rank's eyes: its shard is elements [start, start + piece)."""

    offsets: tuple[int, ...]  # of its parameters
    start: int
    piece: int

    def slice(self, number: int, numel: int) -> Slice:
        """Returns what the shard has of parameter ``number``, which has ``numel`` elements."""
        offset = self.offsets[number]
        first = min(max(self.start - offset, 0), numel)
        end = min(max(self.start + self.piece - offset, 0), numel)
        return Slice(first, end - first, offset + first - self.start)


def cut_flat(sizes: list[int], dtype: torch.dtype, param_dtype: torch.dtype | None, shard: int, shards: int) -> Cut:
    """Lays out and cuts parameters of these numels as the daemon's plan does (common/plan/layout.cc)."""
    unsharded = param_dtype if param_dtype is not None and dtype.is_floating_point else dtype
    alignment = ALIGNMENT_BYTES // min(dtype.itemsize, unsharded.itemsize)
    offsets = []
    end = 0
    for size in sizes:
        offsets.append(-(-end // alignment) * alignment)
        end = offsets[-1] + size
    piece = -(-end // (shards * alignment)) * alignment
    return Cut(tuple(offsets), shard * piece, piece)


def lay_out(
    params: list[FlatShardParam], shard: int, shards: int, param_dtype: torch.dtype | None, module: nn.Module | None
) -> None:
    """Cuts whole parameters into a flat parameter for each (dtype, requires_grad). A ``module`` gets ``FlatParameter``s."""
    kinds: dict[Any, list[FlatShardParam]] = {}
    for param in params:
        kinds.setdefault((param.orig_dtype, param.sharded_param.requires_grad), []).append(param)
    for (dtype, requires_grad), members in kinds.items():
        cut = cut_flat([m._orig_size.numel() for m in members], dtype, param_dtype, shard, shards)
        slices = [cut.slice(i, m._orig_size.numel()) for i, m in enumerate(members)]
        if module is None:
            for member, piece in zip(members, slices):
                member.cut(piece.first, piece.numel)
            continue
        holder: FlatHolder[FlatShardParam] = FlatHolder(module, requires_grad, dtype, members[0].sharded_param.device)
        holder.lay_out({id(m): piece for m, piece in zip(members, slices)}, cut.piece)
        for member in members:
            member.join(holder)


def composable(module: nn.Module) -> bool:
    """Whether shardd may have its parameters: it is no root of a ``replicate`` subtree, which reduces its own gradients."""
    return "replicate" not in (_get_registry(module) or {})


def managed_uses(
    modules: Iterable[nn.Module], ignored_modules: set[nn.Module], ignored_params: set[nn.Parameter]
) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Yields every place of a parameter below ``modules`` that no other unit, ignored module or ``replicate`` has, in order."""
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
            refuse_subclass(param, f'shard parameter "{name}" of {type(module).__name__}')
            yield module, name, param
        for child in module.children():
            yield from visit(child, False)

    for module in modules:
        yield from visit(module, True)
