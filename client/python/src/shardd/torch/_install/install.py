"""``install``: PyTorch's names for sharding become shardd's, in the whole process.

Libraries import ``fully_shard`` and ``FullyShardedDataParallel`` inside their own functions or at their top, so a changed
import in a script does not reach them. Here every module of the process that holds one of PyTorch's objects, under whatever
name, gets shardd's; what is imported later finds them in ``torch.distributed.fsdp``. Policies, enums, configurations and
``register_fsdp_forward_method`` are PyTorch's own in both packages, so nothing is to be done about them.
"""

from __future__ import annotations

import importlib
import logging
import multiprocessing.spawn
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed.fsdp

from shardd.torch._install import optimizers as torch_optimizers
from shardd.torch._sharding.fully_shard import FSDPModule, fully_shard
from shardd.torch._sharding.wrapper import FullyShardedDataParallel

__all__ = ["install", "swapped", "uninstall"]

logger = logging.getLogger("shardd.torch")

# PyTorch's object and shardd's. Taken when this module is imported, which is before anything is swapped.
_SHARDING: list[tuple[Any, Any]] = [
    (torch.distributed.fsdp.fully_shard, fully_shard),
    (torch.distributed.fsdp.FSDPModule, FSDPModule),
    (torch.distributed.fsdp.FullyShardedDataParallel, FullyShardedDataParallel),
]

# They go on with PyTorch's: what shardd derives from, and PyTorch's composable replicate, which does too.
_KEEP = ("shardd", "torch.distributed._composable.replicate_with_fsdp")

_active: list[tuple[Any, Any]] = []
_own: set[tuple[str, str]] = set()  # (module, name) that held shardd's before: imported from shardd.torch on purpose
_prepare = multiprocessing.spawn.get_preparation_data
_starts_others = False


def _holders() -> Iterator[tuple[str, ModuleType]]:
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and not any(name == kept or name.startswith(f"{kept}.") for kept in _KEEP):
            yield name, module


def _bindings(objects: list[Any]) -> list[tuple[str, ModuleType, str, int]]:
    """(module's name, module, name in it, number of the object)"""
    numbers = {id(value): number for number, value in enumerate(objects)}
    return [
        (module_name, module, name, numbers[id(value)])
        for module_name, module in _holders()
        for name, value in list(vars(module).items())
        if id(value) in numbers
    ]


def _swap(pairs: list[tuple[Any, Any]]) -> None:
    for _, module, name, number in _bindings([old for old, _ in pairs]):
        setattr(module, name, pairs[number][1])


class _InstallInChild:
    """Unpickled by a process that multiprocessing has spawned, it installs there what is installed here."""

    def __init__(self, optimizers: bool) -> None:
        self._optimizers = optimizers

    def __reduce__(self) -> Any:
        # Before the child has its parent's sys.path, so the package's own folder goes along.
        folder = str(Path(__file__).resolve().parents[3])
        return exec, (
            f"import sys\nsys.path.append({folder!r})\nimport shardd.torch\n"
            f"shardd.torch.install(optimizers={self._optimizers})",
        )


def _prepare_child(name: str) -> dict[str, Any]:
    global _starts_others
    _starts_others = True
    data = _prepare(name)
    data["shardd"] = _InstallInChild(torch_optimizers.replaced())
    return data


def starts_others() -> bool:
    """Whether multiprocessing has started processes here, in which PyTorch's sharding is shardd's as well."""
    return _starts_others


def install(*, optimizers: bool = True) -> list[str]:
    """Makes PyTorch's sharding in this process shardd's, for accelerate, transformers, Lightning and scripts without a changed line.

    Best called before models are made; modules that are sharded already stay what they are. Processes that this one starts
    by ``multiprocessing`` install as well. ``optimizers``: the daemon makes the steps of ``torch.optim.Adam``, ``AdamW``,
    ``SGD``, ``Adagrad``, ``RMSprop``, ``Muon`` and ``Adafactor``, whose classes stay PyTorch's; it is settled with a model's first use, and where the daemon cannot (a warning says
    why), or with False, they step in the trainers. Returns what ``swapped`` does. Calling it again changes nothing, or adds
    the optimizers. A reference to what shards that was taken before and is kept elsewhere than in a module (a default
    argument, a container) is not found.
    """
    for kept in _KEEP[1:]:
        importlib.import_module(kept)  # with PyTorch's names still there
    pairs = [pair for pair in _SHARDING if pair not in _active]
    replaces = optimizers and not torch_optimizers.replaced()
    if replaces:
        torch_optimizers.replace()
    if pairs:
        _own.update((module, name) for module, _, name, _ in _bindings([new for _, new in pairs]))
        _swap(pairs)
        _active.extend(pairs)
        multiprocessing.spawn.get_preparation_data = _prepare_child
    if pairs or replaces:
        logger.info("%s are shardd's in this process", ", ".join(swapped()))
    return swapped()


def uninstall() -> None:
    """PyTorch's names are PyTorch's again, also in modules that were imported meanwhile. For tests.

    Names that a module had imported from shardd.torch before ``install`` stay.
    """
    for module_name, module, name, number in _bindings([new for _, new in _active]):
        if (module_name, name) not in _own:
            setattr(module, name, _active[number][0])
    if torch_optimizers.replaced():
        torch_optimizers.put_back()
    _active.clear()
    _own.clear()
    multiprocessing.spawn.get_preparation_data = _prepare


def swapped() -> list[str]:
    """Lists where shardd's stand in place of PyTorch's now: ``module.name``, sorted. The list is empty where nothing is installed.

    Of optimizers, whose classes stay where they are, it has ``step``.
    """
    found = _bindings([new for _, new in _active])
    names = [f"{module}.{name}" for module, _, name, _ in found if (module, name) not in _own]
    if torch_optimizers.replaced():
        names += [f"{kind.__module__}.{kind.__qualname__}.step" for kind in torch_optimizers.CLASSES]
    return sorted(names)
