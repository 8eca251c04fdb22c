"""State of torch's own optimizers, re-homed into the job's memory, so that it outlives the trainer.

When a state tensor was made, by a step or ahead of the first one (new_state.py), its storage is swapped: the optimizer goes on
with the same tensor, whose values are then the job's. What has the shape of the parameter's rows and at most 4 bytes an element lies there, as
the parameters do. Scalars (``step``) lie in one buffer that goes with every commit (scalars.py), as do
numbers and other small values. What is neither stays in the trainer and is named once.

What goes with a commit shares 1 MiB with the program's own state, so it is small: each way of keeping a parameter's
state once, 4 bytes a parameter to say which, and 8 for each scalar of a parameter.
"""

from __future__ import annotations

import logging
import pickle
import weakref
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp._fully_shard._fsdp_common import _from_local_no_grad
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.optim import Optimizer

from shardd.torch._process.extension import _C
from shardd.torch._torch_optimizers.scalars import Scalars
from shardd.torch._units.flat_parameter import FlatHolder
from shardd.torch._units.flat_shard_param import FlatShardParam
from shardd.torch._units.place import Place, local_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

logger = logging.getLogger("shardd.torch")

_COPIED_BYTES = 1024  # of one value that goes with the commit as it is


def in_form_of(fsdp_param: Any, rows: torch.Tensor) -> torch.Tensor:
    """Gives ``rows``, this rank's part of something with the parameter's shape and placement, the form that the parameter has itself."""
    if isinstance(fsdp_param, FlatShardParam | FlatHolder):
        return rows
    spec = fsdp_param._sharding_spec
    meta = spec.tensor_meta
    assert meta is not None
    if meta.dtype != rows.dtype:
        spec = DTensorSpec(spec.mesh, spec.placements, TensorMeta(meta.shape, meta.stride, rows.dtype))
    return _from_local_no_grad(rows, spec)


@dataclass(frozen=True)
class _Value:
    """How one entry of a parameter's state is kept. Alike for most parameters: pickled once."""

    name: str
    kind: str  # "dtensor", "rows", "scalar", "copied", "lost"
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()  # of a scalar: () or (1,)
    place: int = 0  # "dtensor", "rows": which state of the job; "scalar": which of the parameter's
    on_gpu: bool = False  # "scalar": it was where the parameter is


_Layout = tuple[_Value, ...]


@dataclass
class _Home:
    values: _Layout = ()
    tensors: list[tuple[str, torch.Tensor]] = field(default_factory=list)  # as the optimizer has them
    owner: Callable[[], Optimizer | None] = lambda: None  # whose state it is; None: that is gone

    def holds(self, state: dict[str, Any]) -> bool:
        return len(state) == len(self.values) and all(state.get(name) is tensor for name, tensor in self.tensors)


def _alone(tensor: torch.Tensor) -> bool:
    size_bytes = tensor.numel() * tensor.element_size()
    return tensor.is_contiguous() and tensor.storage_offset() == 0 and tensor.untyped_storage().nbytes() == size_bytes


def scalar_device(name: str, param: torch.Tensor, group: dict[str, Any], was_on_gpu: bool) -> torch.device:
    """Returns where an optimizer with these options wants a scalar of ``param``: who committed it may have had others.

    A fused or capturable one has all beside the parameter; of others ``step`` is on the host, where reading it waits for nothing.
    """
    beside = group.get("fused") or group.get("capturable") or (was_on_gpu and name != "step")
    return param.device if beside else torch.device("cpu")


def _params_of(optimizer: Optimizer) -> list[Any]:
    return [param for group in optimizer.param_groups for param in group["params"]]


class OptimizerMemory:
    """Owns where one job has the state of torch's optimizers. Parameters are numbered as the daemon numbers them."""

    def __init__(self, engine: _C.Engine, places: dict[int, Place], states: int, param_count: int) -> None:
        """``places`` are the job's, by id of the sharded parameter; ``states`` counts the tensors that the job has for each parameter."""
        self._engine = engine
        self._places = places
        self._states = states
        self._homes: dict[int, _Home] = {}
        self._packed_homes: bytes | None = None
        self._copied: dict[int, list[str]] = {}  # names of small values, by parameter
        self._told: set[tuple[str, str]] = set()
        self._param_count = param_count
        self._scalars = Scalars(param_count)
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._pending: dict[int, _Home] = {}
        self._pending_copied: dict[int, dict[str, Any]] = {}

    def _index(self, param: Any) -> int:
        place = self._places.get(id(param))
        return -1 if place is None else place.index

    # After a step.

    def keep(self, optimizer: Optimizer) -> None:
        """Moves into the job what state the optimizer has made since the last call."""
        taken = False
        for param in _params_of(optimizer):
            taken |= self.keep_of(optimizer, param)
        if taken:
            _C.return_freed_memory()

    def keep_of(self, optimizer: Optimizer, param: Any) -> bool:
        """Moves one parameter's; false where there is nothing new. The allocator may keep what it took."""
        index = self._index(param)
        state = optimizer.state.get(param)
        if index < 0:
            return False
        home = self._homes.get(index)
        owner = None if home is None else home.owner()
        if not state:
            if home is not None and (owner is None or owner is optimizer):  # the program has dropped it
                del self._homes[index]
                self._packed_homes = None
            return False
        if home is not None and home.holds(state):
            if owner is not optimizer:
                home.owner = weakref.ref(optimizer)
            return False
        self._packed_homes = None
        home = self._homes[index] = self._take(index, param, state, type(optimizer).__name__)
        home.owner = weakref.ref(optimizer)
        return True

    def _take(self, index: int, param: Any, state: dict[str, Any], optimizer: str) -> _Home:
        home = _Home()
        values: list[_Value] = []
        rows = local_of(param)
        states = scalars = 0
        for name, value in list(state.items()):
            local = value._local_tensor if isinstance(value, DTensor) else value
            if not isinstance(local, torch.Tensor):
                kind = "copied" if len(pickle.dumps(value)) <= _COPIED_BYTES else "lost"
                entry = _Value(name, kind)
            elif self._lies_in_job(local, rows, states):
                if not _alone(local):
                    local = local.clone(memory_format=torch.contiguous_format)
                    if isinstance(value, DTensor):
                        value._local_tensor = local
                    else:
                        value = state[name] = local
                self._engine.adopt_state(index, states, local, True)
                kind = "dtensor" if isinstance(value, DTensor) else "rows"
                entry = _Value(name, kind, local.dtype, place=states)
                states += 1
            elif value is local and self._scalars.takes(local, scalars):
                if not _alone(local):
                    value = state[name] = local = local.clone()
                self._scalars.keep(local, index, scalars)
                entry = _Value(name, "scalar", local.dtype, tuple(local.shape), scalars, local.is_cuda)
                scalars += 1
            elif value is local and local.numel() * local.element_size() <= _COPIED_BYTES:
                entry = _Value(name, "copied")
            else:
                entry = _Value(name, "lost")
            values.append(entry)
            if isinstance(value, torch.Tensor):
                home.tensors.append((name, value))
            if entry.kind == "lost" and (optimizer, name) not in self._told:
                self._told.add((optimizer, name))
                logger.warning(
                    'optimizer %s: its state "%s" stays in this process and is lost with it (%s)',
                    optimizer,
                    name,
                    type(value).__name__ if local is not value or not isinstance(local, torch.Tensor) else local.shape,
                )
        home.values = tuple(values)
        self._pending.pop(index, None)
        return home

    def _lies_in_job(self, local: torch.Tensor, rows: torch.Tensor, states: int) -> bool:
        alike = local.shape == rows.shape and local.device == rows.device
        return alike and local.element_size() <= 4 and states < self._states

    def pack(self, optimizers: Iterable[Optimizer]) -> dict[str, Any] | None:
        """Returns what goes with the commit: where everything lies, the scalars, the small values."""
        for optimizer in optimizers:
            self._optimizers.add(optimizer)
        homes = {**self._pending, **self._homes}  # also what no optimizer has taken since the restart
        if not homes:
            return None
        if self._packed_homes is None:
            layouts: dict[_Layout, int] = {}
            numbers = array("I", bytes(4 * self._param_count))  # by parameter: from 1, 0 for none
            for index, home in homes.items():
                numbers[index] = layouts.setdefault(home.values, len(layouts) + 1)
            self._packed_homes = pickle.dumps((list(layouts), numbers.tobytes()))
            self._scalars.used = max(
                (v.place + 1 for layout in layouts for v in layout if v.kind == "scalar"), default=0
            )
            names = {i: [v.name for v in home.values if v.kind == "copied"] for i, home in self._homes.items()}
            self._copied = {index: list_ for index, list_ in names.items() if list_}
        copied = {index: self._pending_copied[index] for index in self._pending if index in self._pending_copied}
        for optimizer in self._optimizers if self._copied else ():
            for param in _params_of(optimizer):
                index = self._index(param)
                if index in self._copied and self._homes[index].owner() is optimizer:
                    state = optimizer.state.get(param, {})
                    copied[index] = {n: state.get(n) for n in self._copied[index]}
        return {"homes": self._packed_homes, "scalars": self._scalars.pack(), "copied": copied}

    def loses(self) -> bool:
        """Whether some state stays in this process."""
        return any(value.kind == "lost" for home in self._homes.values() for value in home.values)

    # After a restart, or a step that was undone.

    def restore(self, packed: dict[str, Any] | None, optimizers: list[Optimizer]) -> None:
        """Makes state what was committed (``None``: nothing was). Optimizers that are made later get it before they step.

        Where something is missing it raises, and the optimizers have what they had.
        """
        pending = {} if packed is None else self._unpacked(packed)
        forget = set(self._homes)
        self._packed_homes = None
        self._homes.clear()
        self._pending = pending
        self._pending_copied = {} if packed is None else packed["copied"]
        if packed is not None:
            self._scalars.restore(packed["scalars"])
        for optimizer in optimizers:
            for param in _params_of(optimizer):
                index = self._index(param)
                if index in forget and index not in pending:
                    optimizer.state.pop(param, None)
            self.give(optimizer, replace=True)

    def _unpacked(self, packed: dict[str, Any]) -> dict[int, _Home]:
        layouts, numbers = pickle.loads(packed["homes"])
        for value in (value for layout in layouts for value in layout):
            if value.kind == "lost":
                raise RuntimeError(
                    f'resume: state "{value.name}" of the optimizer stayed in the trainer and is lost with it; go on from '
                    "a checkpoint, or use an optimizer whose state has the shape of its parameters"
                )
            if value.kind in ("dtensor", "rows") and value.place >= self._states:
                raise RuntimeError(
                    f'resume: state "{value.name}" of the optimizer has no place in the job (got {self._states} states '
                    f"for each parameter, want {value.place + 1}); build the same optimizer as before"
                )
        return {i: _Home(layouts[number - 1]) for i, number in enumerate(array("I", numbers)) if number}

    def give(self, optimizer: Optimizer, replace: bool = False) -> None:
        """Gives this optimizer the committed state of its parameters that nobody has taken yet."""
        if not self._pending:
            return
        for param, group in [(param, g) for g in optimizer.param_groups for param in g["params"]]:
            index = self._index(param)
            if index not in self._pending or (optimizer.state.get(param) and not replace):
                continue
            home = self._pending[index]
            state = {v.name: self._made(index, param, v, group) for v in home.values}
            del self._pending[index]
            optimizer.state[param] = state
            home.tensors = [(n, value) for n, value in state.items() if isinstance(value, torch.Tensor)]
            home.owner = weakref.ref(optimizer)
            self._homes[index] = home
            self._packed_homes = None
            self._optimizers.add(optimizer)

    def _made(self, index: int, param: Any, value: _Value, group: dict[str, Any]) -> Any:
        if value.kind == "copied":
            return self._pending_copied.get(index, {}).get(value.name)
        assert value.dtype is not None
        device = local_of(param).device
        if value.kind == "scalar":
            there = scalar_device(value.name, local_of(param), group, value.on_gpu)
            return self._scalars.made(index, value.place, value.dtype, value.shape, there)
        rows = torch.empty(local_of(param).shape, dtype=value.dtype, device=device)
        self._engine.adopt_state(index, value.place, rows, False)
        return rows if value.kind == "rows" else in_form_of(self._places[id(param)].fsdp_param(), rows)
