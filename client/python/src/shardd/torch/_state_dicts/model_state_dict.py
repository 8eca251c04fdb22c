"""State dicts of models with flat units: hooks on each unit's module, for all three kinds, and for loads of any of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardd.torch._job.job import job_of
from shardd.torch._state_dicts import checkpoint_face, model_loading
from shardd.torch._state_dicts.flat_places import keys_in_order
from shardd.torch._state_dicts.flat_units import WRAPPED, flat_state_of, shows_full_params
from shardd.torch._state_dicts.model_saving import Saving
from shardd.torch._units.names import clean_name
from shardd.torch._units.state import ShardState

__all__ = ["install_hooks"]

_savings: dict[int, Saving] = {}  # by root state


def install_hooks(module: nn.Module) -> None:
    """Installs them on a module that carries a unit with flat parameters. Called once, by who makes the unit."""
    checkpoint_face.install()
    module.register_state_dict_pre_hook(_before_save)
    module._register_state_dict_hook(_after_save)
    module._register_load_state_dict_pre_hook(model_loading.load, with_module=True)
    module.register_load_state_dict_post_hook(_after_load)


def _before_save(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    state = flat_state_of(module)
    root = state._find_root()
    saving = _savings.get(id(root))
    if saving is not None and saving.module is not module and any(m is module for m in saving.module.modules()):
        return  # inside of that
    if saving is not None:  # an exception ended it
        _end(root)
    _savings[id(root)] = Saving.begin(module, state)


def _end(root: ShardState) -> None:
    _savings.pop(id(root)).end()


def _strip(state_dict: dict[str, Any], prefix: str) -> None:
    old = prefix + WRAPPED
    for key in [key for key in state_dict if key.startswith(old)]:
        state_dict[prefix + key[len(old) :]] = state_dict.pop(key)


@torch.no_grad()
def _after_save(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
    state = flat_state_of(module)
    root = state._find_root()
    saving = _savings[id(root)]
    try:
        _strip(state_dict, prefix)
        saving.replace(module, state, state_dict, prefix)
    except BaseException:
        _end(root)
        raise
    if saving.module is module:
        _end(root)
        if any(param.holder is not None for param in saving.uses.values()):
            order = {prefix + key: number for number, key in enumerate(keys_in_order(module, saving.uses))}
            for key in sorted((k for k in state_dict if k in order), key=order.__getitem__):
                state_dict[key] = state_dict.pop(key)


def _after_load(module: nn.Module, incompatible: Any) -> None:
    root = flat_state_of(module)._find_root()
    if (job := job_of(root)) is not None and job.alive and not shows_full_params(root):
        job.commit_write(module)
    for keys in incompatible:
        keys[:] = [clean_name(key) for key in keys]
