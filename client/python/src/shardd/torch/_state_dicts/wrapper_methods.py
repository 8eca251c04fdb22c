"""The static methods of ``FullyShardedDataParallel`` that are about state dicts, of today and of before."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.distributed.fsdp import (
    OptimStateDictConfig,
    OptimStateKeyType,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from torch.optim import Optimizer

from shardd.torch._state_dicts import optim_state_dict as saving
from shardd.torch._state_dicts import optim_state_dict_load as loading
from shardd.torch._state_dicts import state_dict_type as kinds

__all__ = ["StateDictMethods"]


def _deprecated(name: str, instead: str) -> None:
    warnings.warn(
        f"``FullyShardedDataParallel.{name}`` is being deprecated and is replaced by "
        f"``FullyShardedDataParallel.{instead}``.",
        FutureWarning,
        stacklevel=3,
    )


def _warn_optim_input(optim_input: Any) -> None:
    if optim_input is not None:
        warnings.warn(
            "The `optim_input` argument is deprecated and will be removed after PyTorch 1.13. You may remove it from your "
            "code without changing its functionality.",
            FutureWarning,
            stacklevel=3,
        )


class StateDictMethods:
    """Inherited by the wrapper. Arguments and results are those of torch 2.13's class."""

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings:
        """Sets the kind for all wrappers in ``module``; returns what was set before."""
        return kinds.set_state_dict_type(module, state_dict_type, state_dict_config, optim_state_dict_config)

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        """Returns what all wrappers in ``module`` are set to."""
        return kinds.get_state_dict_type(module)

    @staticmethod
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> contextlib.AbstractContextManager[None]:
        """As ``set_state_dict_type``, for the body of the ``with``."""
        return kinds.state_dict_type(module, state_dict_type, state_dict_config, optim_state_dict_config)

    @staticmethod
    def optim_state_dict(
        model: nn.Module, optim: Optimizer, optim_state_dict: dict[str, Any] | None = None, group: Any = None
    ) -> dict[str, Any]:
        """Returns state by clean name, with the parameters' shapes, full or sharded as ``state_dict_type`` says."""
        return saving.optim_state_dict(model, optim, optim_state_dict, group)

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: Optimizer,
        optim_state_dict: dict[str, Any] | None,
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: Any = None,
    ) -> dict[str, Any]:
        """What ``optim.load_state_dict`` takes, of a state dict by clean name."""
        return loading.optim_state_dict_to_load(
            model, optim, optim_state_dict, is_named_optimizer, load_directly, group
        )

    @staticmethod
    def full_optim_state_dict(
        model: nn.Module, optim: Optimizer, optim_input: Any = None, rank0_only: bool = True, group: Any = None
    ) -> dict[str, Any]:
        """Returns state of whole parameters, on rank 0 or on all."""
        _deprecated("full_optim_state_dict", "optim_state_dict")
        _warn_optim_input(optim_input)
        return saving.optim_state_dict(
            model, optim, group=group, kind=StateDictType.FULL_STATE_DICT, rank0_only=rank0_only
        )

    @staticmethod
    def sharded_optim_state_dict(model: nn.Module, optim: Optimizer, group: Any = None) -> dict[str, Any]:
        """Returns state of rows of parameters."""
        _deprecated("sharded_optim_state_dict", "optim_state_dict")
        return saving.optim_state_dict(model, optim, group=group, kind=StateDictType.SHARDED_STATE_DICT)

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any], model: nn.Module, optim_input: Any = None, optim: Optimizer | None = None
    ) -> dict[str, Any]:
        """What this rank loads of a full state dict that every rank has."""
        _deprecated("shard_full_optim_state_dict", "optim_state_dict_to_load")
        _warn_optim_input(optim_input)
        return loading.optim_state_dict_to_load(
            model, _optimizer(model, optim_input, optim), full_optim_state_dict, rank0_only=False
        )

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: dict[str, Any], model: nn.Module, optim: Optimizer
    ) -> dict[str, Any]:
        """What this rank loads of a sharded state dict."""
        _deprecated("flatten_sharded_optim_state_dict", "optim_state_dict_to_load")
        return loading.optim_state_dict_to_load(model, optim, sharded_optim_state_dict, rank0_only=False)

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any] | None,
        model: nn.Module,
        optim_input: Any = None,
        optim: Optimizer | None = None,
        group: Any = None,
    ) -> dict[str, Any]:
        """What this rank loads of a full state dict that rank 0 has."""
        _deprecated("scatter_full_optim_state_dict", "optim_state_dict_to_load")
        _warn_optim_input(optim_input)
        return loading.optim_state_dict_to_load(
            model, _optimizer(model, optim_input, optim), full_optim_state_dict, group=group, rank0_only=True
        )

    @staticmethod
    def rekey_optim_state_dict(
        optim_state_dict: dict[str, Any],
        optim_state_key_type: OptimStateKeyType,
        model: nn.Module,
        optim_input: list[dict[str, Any]] | Iterable[nn.Parameter] | None = None,
        optim: Optimizer | None = None,
    ) -> dict[str, Any]:
        """Changes keys from numbers to names or back."""
        _warn_optim_input(optim_input)
        return loading.rekey_optim_state_dict(optim_state_dict, optim_state_key_type, model, optim_input, optim)


def _optimizer(model: nn.Module, optim_input: Any, optim: Optimizer | None) -> Any:
    """What has the parameter groups: the optimizer, or what one was or will be made of."""
    if optim is not None:
        return optim

    class Groups:
        param_groups = (
            list(optim_input)
            if optim_input is not None and all(isinstance(item, dict) for item in list(optim_input))
            else [{"params": list(model.parameters() if optim_input is None else optim_input)}]
        )

    return Groups
