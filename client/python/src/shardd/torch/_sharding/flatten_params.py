"""``FlattenParamsWrapper``: a module whose parameters are views of flat ones, which are its only parameters."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardd.torch._units.shard_metadata import ShardMetadata, cut_pieces

__all__ = ["FlattenParamsWrapper"]

_MODULE = "_fpw_module"  # fairscale's name
_PREFIX = _MODULE + "."


@dataclass
class _Flattened:
    """One parameter: every place that has it, the first of which names it."""

    places: list[tuple[nn.Module, str]]
    name: str
    shape: torch.Size
    offset: int


@dataclass
class _FlatParam:
    """A flat parameter of the wrapper, by its attribute's name, and what it is made of."""

    name: str
    members: list[_Flattened] = field(default_factory=list)

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return [flat[m.offset : m.offset + m.shape.numel()].view(m.shape) for m in self.members]


class FlattenParamsWrapper(nn.Module):
    """Wraps ``module`` and flattens its parameters into ``flat_param``: one-dimensional, one behind the other as they are found.

    params: which of them; None: all but those that are in a flat parameter already. Parameters of another dtype or
        requires_grad go into a second one, ``flat_param_1``, and so on: ``flat_params`` has them all. Tied parameters are in it once.

    While it is flattened the module has views of it in the places of its parameters, which are made anew by each forward.
    Attributes, indices and calls are the module's. State dicts have the module's own names. A wrapper may be given to
    ``fully_shard`` or ``FullyShardedDataParallel`` as any module; where they shard ``flat_param``, state dicts have that.
    """

    def __init__(self, module: nn.Module, params: Iterable[nn.Parameter] | None = None) -> None:
        super().__init__()
        self._fpw_module = module
        self._flat: list[_FlatParam] = []
        self._orders = [(inner, list(inner._parameters)) for inner in module.modules()]
        self._is_flattened = False
        self._keeps_flat = False  # in the state dict that is made or loaded
        kinds: dict[tuple[torch.dtype, bool], list[tuple[nn.Parameter, _Flattened]]] = {}
        for param, found in _members(module, params):
            kinds.setdefault((param.dtype, param.requires_grad), []).append((param, found))
        for number, ((_, requires_grad), members) in enumerate(kinds.items()):
            flat = _FlatParam(f"flat_param_{number}" if number else "flat_param")
            end = 0
            for _, found in members:
                found.offset, end = end, end + found.shape.numel()
                flat.members.append(found)
            with torch.no_grad():
                values = torch.cat([param.detach().reshape(-1) for param, _ in members])
            made: Any = nn.Parameter(values, requires_grad=requires_grad)
            made._is_flattened = True  # no other wrapper flattens it
            self._flat.append(flat)
            self.register_parameter(flat.name, made)
        self._show_views()
        self._register_state_dict_hook(_after_state_dict)
        self.register_state_dict_pre_hook(_before_state_dict)
        self._register_load_state_dict_pre_hook(_before_load, with_module=True)
        self.register_load_state_dict_post_hook(_after_load)

    @property
    def module(self) -> nn.Module:
        """What is wrapped."""
        return self._fpw_module

    @property
    def flat_params(self) -> list[nn.Parameter]:
        """The flat parameters; none while the module is unflattened."""
        return [param for flat in self._flat if (param := self._parameters.get(flat.name)) is not None]

    @property
    def is_flattened(self) -> bool:
        return self._is_flattened

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == _MODULE:
                raise
            return getattr(self._fpw_module, name)

    def __getitem__(self, key: Any) -> Any:
        return self._fpw_module.__getitem__(key)  # type: ignore[operator]

    def __len__(self) -> int:
        return len(self._fpw_module)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's, with views of the flat parameters as they are now."""
        if self._is_flattened:
            self._show_views()
        return self._fpw_module(*args, **kwargs)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._apply(*args, **kwargs)
        if self._is_flattened and self._is_whole():
            self._show_views()
        return result

    def _is_whole(self) -> bool:
        """Whether flat parameters are not sharded, or are whole for now."""
        numels = [sum(self.metadata(number)[2]) for number in range(len(self._flat))]
        return all(isinstance(p, nn.Parameter) and not isinstance(p, DTensor) and p.numel() == n
                   for p, n in zip(self.flat_params, numels))  # fmt: skip

    # What it is made of.

    def metadata(self, index: int = 0) -> tuple[list[str], list[torch.Size], list[int]]:
        """Returns names, shapes and numels of the parameters of flat parameter ``index``, in order."""
        members = self._flat[index].members
        return [m.name for m in members], [m.shape for m in members], [m.shape.numel() for m in members]

    def shard_metadata(self, first: int, end: int, index: int = 0) -> ShardMetadata:
        """Returns what elements [first, end) of flat parameter ``index`` are; those behind its own end are padding.

        ValueError where the range is empty or begins behind its end.
        """
        names, shapes, numels = self.metadata(index)
        if not 0 <= first < min(end, sum(numels)):
            raise ValueError(
                f'shard metadata of "{self._flat[index].name}": invalid range (got [{first}, {end}), want 0 <= first < end, and '
                f"first < {sum(numels)})"
            )
        pieces = cut_pieces(names, shapes, [m.offset for m in self._flat[index].members], first, end)
        return ShardMetadata("(root)", pieces, end - first, max(end - max(sum(numels), first), 0))

    def get_param_views(self, data: torch.Tensor | Sequence[torch.Tensor] | None = None) -> list[torch.Tensor]:
        """Returns views of the original parameters, of ``data`` (one tensor for each flat parameter) where it is given.

        ValueError where one has another number of elements.
        """
        if data is None:
            given: list[torch.Tensor] = list(self.flat_params)
        else:
            given = [data] if isinstance(data, torch.Tensor) else list(data)
        views = []
        for number, (flat, tensor) in enumerate(zip(self._flat, given, strict=True)):
            want = sum(self.metadata(number)[2])
            if tensor.numel() != want:
                raise ValueError(
                    f'views of "{flat.name}": wrong number of elements (got {tensor.numel()}, want {want})'
                )
            views += flat.views(tensor.reshape(-1))
        return views

    # Flattened or not.

    @contextlib.contextmanager
    def unflatten_params(self) -> Iterator[None]:
        """The module has its parameters inside the context, over the same memory, gradients too; nothing where it has them already.

        What the program makes of them counts, also where it puts another object in a parameter's place. Behind it, after
        an exception too, they are flat again.
        """
        if not self._is_flattened:
            yield
            return
        if not self._is_whole():
            raise RuntimeError("unflatten_params: the flat parameters are sharded; use it inside summon_full_params")
        kept = self._unflatten()
        try:
            yield
        finally:
            self._flatten(kept)

    def _show_views(self) -> None:
        for flat in self._flat:
            for found, view in zip(flat.members, flat.views(self._parameters[flat.name])):  # type: ignore[arg-type]
                for module, name in found.places:
                    module._parameters.pop(name, None)
                    setattr(module, name, view)  # recurrent modules keep lists of what they are given so
        self._is_flattened = True

    def _unflatten(self) -> dict[str, nn.Parameter]:
        kept: dict[str, nn.Parameter] = {}
        for flat in self._flat:
            param = self._parameters.pop(flat.name)
            assert param is not None
            kept[flat.name] = param
            gradients = flat.views(param.grad) if param.grad is not None else None
            for number, (found, view) in enumerate(zip(flat.members, flat.views(param.detach()))):
                shown = nn.Parameter(view, requires_grad=param.requires_grad)
                if gradients is not None:
                    shown.grad = gradients[number]
                for module, name in found.places:
                    module.__dict__.pop(name, None)
                    setattr(module, name, shown)
        for module, names in self._orders:
            for name in names:
                if name in module._parameters:
                    module._parameters[name] = module._parameters.pop(name)
        self._is_flattened = False
        return kept

    @torch.no_grad()
    def _flatten(self, kept: dict[str, nn.Parameter]) -> None:
        for flat in self._flat:
            param = kept[flat.name]
            for found, view in zip(flat.members, flat.views(param.detach())):
                shown = self._shown(found, view)
                if shown.data_ptr() != view.data_ptr():
                    view.copy_(shown)
                if shown.grad is not None:
                    if param.grad is None:
                        param.grad = torch.zeros_like(param)
                    of_flat = param.grad[found.offset : found.offset + found.shape.numel()].view(found.shape)
                    if shown.grad.data_ptr() != of_flat.data_ptr():
                        of_flat.copy_(shown.grad)
            self.register_parameter(flat.name, param)
        self._show_views()

    def _shown(self, found: _Flattened, before: torch.Tensor) -> torch.Tensor:
        """Returns what the program has left in the places of a parameter: of several, the one that it has changed."""
        shown = [param for module, name in found.places if (param := module._parameters.get(name)) is not None]
        changed = [param for param in shown if param.data_ptr() != before.data_ptr()]
        if not shown or shown[0].shape != found.shape:
            got = tuple(shown[0].shape) if shown else None
            raise RuntimeError(
                f'flatten parameter "{found.name}": it has another shape (got {got}, want {tuple(found.shape)})'
            )
        return (changed or shown)[0]

    def flat_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Returns the state dict with flat parameters under their own names, which ``load_state_dict`` takes, too."""
        self._keeps_flat = True
        try:
            return self.state_dict(*args, **kwargs)
        finally:
            self._keeps_flat = False

    def __deepcopy__(self, memo: dict[int, Any]) -> FlattenParamsWrapper:
        make, arguments = self.__reduce__()
        made = make(*arguments)
        memo[id(self)] = made
        return made

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Pickles and copies are of the module with its own parameters, which is flattened again where it is loaded."""
        with self.unflatten_params():
            module = copy.deepcopy(self._fpw_module)
        places = [[found.name for found in flat.members] for flat in self._flat]
        return _rebuild, (type(self), module, [name for names in places for name in names], self.training)


def _rebuild(kind: type, module: nn.Module, names: list[str], training: bool) -> Any:
    made = kind(module, [module.get_parameter(name) for name in names])
    made.training = training
    return made


def _members(module: nn.Module, params: Iterable[nn.Parameter] | None) -> list[tuple[nn.Parameter, _Flattened]]:
    wanted = None if params is None else list(params)
    for param in wanted or ():
        if not isinstance(param, nn.Parameter):
            raise TypeError(f"flatten parameters: not an nn.Parameter (got {type(param).__name__})")
        if getattr(param, "_is_flattened", False):
            raise ValueError("flatten parameters: one of them is a flat parameter already")
    chosen = None if wanted is None else {id(param) for param in wanted}
    found: dict[int, tuple[nn.Parameter, _Flattened]] = {}
    for prefix, inner in module.named_modules():
        for name, param in inner._parameters.items():
            if (
                param is None
                or getattr(param, "_is_flattened", False)
                or (chosen is not None and id(param) not in chosen)
            ):
                continue
            full = f"{prefix}.{name}" if prefix else name
            found.setdefault(id(param), (param, _Flattened([], full, param.shape, 0)))[1].places.append((inner, name))
    if chosen is not None and (missing := len(chosen - found.keys())):
        raise ValueError(f"flatten parameters: the module does not have {missing} of them (got {len(chosen)} in all)")
    return list(found.values())


# State dicts: the module's own names, whatever is around the wrapper.


def _before_state_dict(module: Any, prefix: str, keep_vars: bool) -> None:
    if module._is_flattened and not module._keeps_flat and module._is_whole():
        module.__dict__["_kept"] = module._unflatten()


def _after_state_dict(module: Any, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
    kept = module.__dict__.pop("_kept", None)
    if kept is not None:
        module._flatten(kept)
    for key in [key for key in state_dict if key.startswith(prefix + _PREFIX)]:
        state_dict[prefix + key[len(prefix + _PREFIX) :]] = state_dict.pop(key)


def _before_load(module: Any, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    own = {prefix + flat.name for flat in module._flat}
    for key in [key for key in state_dict if key.startswith(prefix) and key not in own]:
        state_dict[prefix + _PREFIX + key[len(prefix) :]] = state_dict.pop(key)
    if module._is_flattened and own.isdisjoint(state_dict) and module._is_whole():
        module.__dict__["_kept"] = module._unflatten()


def _after_load(module: Any, incompatible: Any) -> None:
    kept = module.__dict__.pop("_kept", None)
    if kept is not None:
        module._flatten(kept)
    for keys in (incompatible.missing_keys, incompatible.unexpected_keys):
        keys[:] = [key.replace(_PREFIX, "") for key in keys]
