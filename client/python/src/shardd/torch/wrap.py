"""PyTorch's wrap policies, for ``auto_wrap_policy`` of the wrapper and ``policy`` of ``fully_shard``.

The very objects of ``torch.distributed.fsdp.wrap``. ``enable_wrap`` takes ``wrapper_cls=FullyShardedDataParallel``.
"""

from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    enable_wrap,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrap,
)

__all__ = [
    "CustomPolicy",
    "ModuleWrapPolicy",
    "always_wrap_policy",
    "enable_wrap",
    "lambda_auto_wrap_policy",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "wrap",
]
