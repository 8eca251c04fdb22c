"""What ranks do in the tests of FSDP_USE_FULL_PREC_IN_EVAL=1, by torch's wrapper and by shardd's."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from state_dicts.wrapper_state_cases import face, quiet

MIXED = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)


def modes(impl: str, strategy: str, orig: bool, per_layer: bool) -> list[Any]:
    """Forwards with and without gradients, in both modes, after each other; with ``per_layer`` the root has no parameters."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    with quiet():
        net = face(impl)(
            model,
            device_id=torch.device("cpu"),
            use_orig_params=orig,
            mixed_precision=MIXED,
            sharding_strategy=ShardingStrategy[strategy],
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}) if per_layer else None,
        )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(dist.get_rank()))
    out: list[Any] = []

    def forward(train: bool) -> torch.Tensor:
        net.train(train)
        output = net(batch)
        out.append((output.dtype, output.detach().float().clone()))
        return output  # type: ignore[no-any-return]

    forward(train=True).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        forward(train=False)
    forward(train=True)  # without a backward
    with torch.no_grad():
        forward(train=False)
        forward(train=True)
    forward(train=False)
    forward(train=True).float().square().mean().backward()
    if impl == "torch":  # its step does nothing after a forward without backward, or fails
        return out
    optimizer.step()
    with torch.no_grad():
        forward(train=False)
    return out
