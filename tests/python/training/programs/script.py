"""What a program of this folder has of its launcher: the form in which it shards, and where it goes on after a restart.

Programs use PyTorch's names alone. Under ``shardd.torch.install()`` these are shardd's, and ``resume`` and ``ride`` are
the two calls that a program adds to go on where it was; on PyTorch they do nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

__all__ = ["Script", "data"]


def data(step: int, *shape: int, rank: int | None = None) -> torch.Tensor:
    """This rank's numbers of a step."""
    seed = 100 * step + (dist.get_rank() if rank is None else rank)
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Script:
    """``form``: "fully_shard", "wrapper" or "plain" (not sharded). ``folder``: the same in all attempts of a launcher."""

    def __init__(self, form: str, folder: Path, swapped: bool) -> None:
        self.form = form
        self.folder = folder
        self.swapped = swapped
        self.models: list[Any] = []

    def shard(self, net: nn.Module, *kinds: type[nn.Module], precision: Any = None) -> Any:
        """``net`` in the script's form, each module of ``kinds`` a unit of its own; ``precision``: dtype of parameters and
        reductions, or a pair of them."""
        params, reduced = precision if isinstance(precision, tuple) else (precision, precision)
        if self.form == "fully_shard":
            from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

            policy = MixedPrecisionPolicy(param_dtype=params, reduce_dtype=reduced)
            for module in reversed([m for m in net.modules() if isinstance(m, kinds)]):  # inner ones first
                fully_shard(module, mp_policy=policy)
            net = fully_shard(net, mp_policy=policy)
        elif self.form == "wrapper":
            from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
            from torch.distributed.fsdp.wrap import ModuleWrapPolicy

            net = FullyShardedDataParallel(
                net,
                auto_wrap_policy=ModuleWrapPolicy(set(kinds)),
                use_orig_params=True,
                device_id=torch.device("cpu"),
                mixed_precision=MixedPrecision(params, reduced) if precision else None,
            )
        self.models.append(net)
        return net

    def resume(self, model: nn.Module) -> tuple[int, Any]:
        if not self.swapped:
            return 0, None
        import shardd.torch

        return shardd.torch.resume(model)

    def ride(self, state: Any) -> None:
        if self.swapped:
            import shardd.torch

            shardd.torch.ride(state)

    @contextlib.contextmanager
    def accumulating(self, model: Any, last: bool) -> Iterator[None]:
        """A micro-batch whose gradients are reduced only if it is the ``last``."""
        if self.form == "fully_shard":
            model.set_requires_gradient_sync(last)
            yield
        else:
            with contextlib.nullcontext() if last or self.form == "plain" else model.no_sync():
                yield

    def clip(self, model: Any, limit: float) -> float:
        if self.form == "wrapper":
            return float(model.clip_grad_norm_(limit))
        norm: Any = nn.utils.clip_grad_norm_(model.parameters(), limit)
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    def state_dict(self, model: Any) -> dict[str, torch.Tensor]:
        """The whole of it, on all ranks."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        return {name: value.detach().clone() for name, value in whole.items()}

    def parameters(self, model: Any) -> list[torch.Tensor]:
        """All of the model, whole."""
        if self.form == "wrapper":
            with model.summon_full_params(model, writeback=False):
                return [p.detach().clone() for p in model.parameters()]
        whole = (p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters())
        return [p.detach().clone() for p in whole]
