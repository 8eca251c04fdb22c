"""Drop-in for ``torch.distributed.fsdp`` whose shards live in the shardd daemon.

    from shardd.torch import fully_shard          # instead of torch.distributed.fsdp
    from shardd.torch.wrap import ModuleWrapPolicy  # instead of torch.distributed.fsdp.wrap, whose policies these are
    from shardd.torch.optim import AdamW          # instead of torch.optim

Everything public of this package is named here; packages with an underscore are private (README.md beside this file has their order). Options are PyTorch's own classes,
from whichever package they are imported:

strategies: ``ShardingStrategy``, all five. Of ``fully_shard``: ``reshard_after_forward`` and a mesh of two dimensions.
policies: those of ``wrap``, module classes and functions, as ``auto_wrap_policy`` or ``fully_shard(policy=)``.
mixed precision: ``MixedPrecision`` of the wrapper, ``MixedPrecisionPolicy`` of ``fully_shard``, each unit its own.
offload: ``CPUOffload``, ``CPUOffloadPolicy`` and ``OffloadPolicy`` are accepted. On CPUs shards are in host memory anyway; on a GPU
    ``fully_shard(offload_policy=CPUOffloadPolicy())`` offloads, and the wrapper and layout flat refuse.
prefetch: ``BackwardPrefetch``, ``forward_prefetch``, ``limit_all_gathers`` and lists of modules are accepted; what is
    unsharded is not copied on CPUs, and elsewhere the daemon prefetches in the order that it has recorded.
state dicts: ``StateDictType`` with its configurations, for the wrapper's ``state_dict_type`` and relatives.
"""

from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    OptimStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
    UnshardHandle,
    register_fsdp_forward_method,
    share_comm_ctx,
)

from shardd.torch import optim, wrap
from shardd.torch._full_params.summon import summon_full_params
from shardd.torch._install.install import install, swapped, uninstall
from shardd.torch._job.job import jobs as _jobs
from shardd.torch._job.job_optimizer import steps_in_daemon as _steps_in_daemon
from shardd.torch._process.torch_versions import DataParallelMeshDims
from shardd.torch._sharding.flatten_params import FlattenParamsWrapper
from shardd.torch._sharding.fully_shard import FSDPModule, fully_shard
from shardd.torch._sharding.wrapper import FullyShardedDataParallel
from shardd.torch._state_dicts.safetensors import load_safetensors, save_safetensors
from shardd.torch._torch_optimizers import hooks as _hooks
from shardd.torch._training.api import commit, counters, finish, hand_in_edits, reattach, resume, ride
from shardd.torch._training.clip import clip_grad_norm_
from shardd.torch._training.memory_plan import MemoryPlan, memory_plan
from shardd.torch._training.shards import shard_metadata
from shardd.torch._training.steps import Step, steps
from shardd.torch._training.uneven import UnevenInputs, join_uneven
from shardd.torch._units.shard_metadata import ShardMetadata, ShardPiece

_hooks.install(_jobs, but_not=lambda optimizer: _steps_in_daemon(optimizer) is not None)

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "FlattenParamsWrapper",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MemoryPlan",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "ShardMetadata",
    "ShardPiece",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "Step",
    "UnevenInputs",
    "UnshardHandle",
    "clip_grad_norm_",
    "commit",
    "counters",
    "finish",
    "fully_shard",
    "hand_in_edits",
    "install",
    "join_uneven",
    "load_safetensors",
    "memory_plan",
    "optim",
    "reattach",
    "register_fsdp_forward_method",
    "resume",
    "ride",
    "save_safetensors",
    "shard_metadata",
    "share_comm_ctx",
    "steps",
    "summon_full_params",
    "swapped",
    "uninstall",
    "wrap",
]
