"""Parameters that are no plain tensors: quantized weights and the like, which say themselves how they are gathered."""

from __future__ import annotations

import torch

__all__ = ["refuse_subclass"]


def refuse_subclass(param: torch.Tensor, what: str) -> None:
    """Raises NotImplementedError where ``param`` computes with a dispatch of its own: there are no bytes that could be shared.

    what: the operation and the object, for the text.
    """
    if type(param).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl:
        raise NotImplementedError(
            f"{what}: it is a {type(param).__name__}, a tensor subclass with its own dispatch (fsdp_pre_all_gather, "
            "quantized weights); shardd shares plain tensors, so ignore it"
        )
