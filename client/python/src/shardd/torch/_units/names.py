"""Names of parameters and buffers as the bare model has them, whatever wraps it or parts of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_WRAPPED_MODULE, ActivationWrapper
from torch.nn.parallel import DistributedDataParallel

__all__ = ["WRAPPED_MODULE", "Entry", "clean_name", "entries_of", "flat_owner", "modules_of", "unwrapped"]

WRAPPED_MODULE = "_fsdp_wrapped_module"  # torch's FSDP_WRAPPED_MODULE

# Attributes under which wrappers keep what they wrap. They begin with an underscore: no module of a user's has them.
_WRAPPED = frozenset({WRAPPED_MODULE, "_checkpoint_wrapped_module", "_orig_mod", "_dmp_wrapped_module"})


@dataclass
class Entry:
    """A place in the model that holds a parameter or a persistent buffer. Tied ones have several."""

    fqn: str
    module: nn.Module
    name: str
    is_parameter: bool

    def tensor(self) -> torch.Tensor:
        held = (self.module._parameters if self.is_parameter else self.module._buffers)[self.name]
        assert held is not None
        return held


def clean_name(name: str) -> str:
    """Removes the components that wrappers add. DDP's ``module.`` stays: only the model tells it from a user's."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPED)


def modules_of(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yields as ``named_modules(remove_duplicate=False)`` does, with clean names; a wrapper and what it wraps share one."""
    yield prefix, model
    for name, child in model.named_children():
        adds_nothing = name in _WRAPPED or (name == "module" and isinstance(model, DistributedDataParallel))
        yield from modules_of(child, prefix if adds_nothing else f"{prefix}.{name}" if prefix else name)


def entries_of(model: nn.Module) -> Iterator[Entry]:
    """Yields parameters and persistent buffers in the order of ``state_dict``."""
    for prefix, module in modules_of(model):
        where = f"{prefix}." if prefix else ""
        for name, param in module._parameters.items():
            if param is not None:
                yield Entry(where + name, module, name, True)
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield Entry(where + name, module, name, False)


def unwrapped(module: nn.Module) -> nn.Module:
    """Returns what is inside a ``FullyShardedDataParallel``, and any other module itself."""
    inner = module._modules.get(WRAPPED_MODULE)
    return module if inner is None else inner


def flat_owner(module: nn.Module) -> nn.Module:
    """Returns where ``FlatParameter``s of a unit are registered: inside a checkpoint wrapper, too, whether it wraps or is wrapped."""
    inner = unwrapped(module)
    return getattr(inner, _CHECKPOINT_WRAPPED_MODULE) if isinstance(inner, ActivationWrapper) else inner
