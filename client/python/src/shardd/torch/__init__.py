"""Drop-in for ``torch.distributed.fsdp.fully_shard`` whose shards live in the shardd daemon.

    from shardd.torch import fully_shard          # instead of torch.distributed.fsdp
    from shardd.torch.optim import AdamW          # instead of torch.optim

Everything public of this package is named here; modules with an underscore are private.
"""

from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    UnshardHandle,
    register_fsdp_forward_method,
    share_comm_ctx,
)

from shardd.torch import _signals, optim
from shardd.torch._api import clip_grad_norm_, commit, counters, finish, open_window, reattach, resume, ride
from shardd.torch._full_params import summon_full_params
from shardd.torch._fully_shard import FSDPModule, fully_shard
from shardd.torch._install import install, swapped, uninstall
from shardd.torch._plan import MemoryPlan, memory_plan
from shardd.torch._safetensors import load_safetensors, save_safetensors
from shardd.torch._steps import Step, steps
from shardd.torch._wrapper import FullyShardedDataParallel

_signals.install()

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "CPUOffloadPolicy",
    "FSDPModule",
    "FullyShardedDataParallel",
    "MemoryPlan",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ShardingStrategy",
    "Step",
    "UnshardHandle",
    "clip_grad_norm_",
    "commit",
    "counters",
    "finish",
    "fully_shard",
    "install",
    "load_safetensors",
    "memory_plan",
    "open_window",
    "optim",
    "reattach",
    "register_fsdp_forward_method",
    "resume",
    "ride",
    "save_safetensors",
    "share_comm_ctx",
    "steps",
    "summon_full_params",
    "swapped",
    "uninstall",
]
