"""What ranks do in the tests of backward without synchronisation: `.grad` is then this rank's own, where torch shows it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy, ShardingStrategy

from state_dicts.wrapper_state_cases import face, quiet


def _net() -> nn.Sequential:
    """Every piece is aligned as torch's, so that flat parameters are alike."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 4))


def _loss(model: Any, step: int) -> torch.Tensor:
    seed = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return model(torch.randn(3, 8, generator=seed)).square().mean()  # type: ignore[no-any-return]


def _shown(model: nn.Module) -> list[Any]:
    """By clean name, in order: a rank's own gradient is whole whatever its piece is."""
    grads = [(name.replace("_fsdp_wrapped_module.", ""), param.grad) for name, param in model.named_parameters()]
    return [
        (name, None if g is None else (g.dtype, getattr(g, "_local_tensor", g).detach().clone())) for name, g in grads
    ]


def micro_batches(impl: str, strategy: str, orig: bool, mixed: bool) -> list[Any]:
    """Own gradients alone, clipped, stepped with, dropped, and over and under synchronised ones."""
    out: list[Any] = []
    with quiet():
        model = face(impl)(
            _net(),
            sharding_strategy=ShardingStrategy[strategy],
            use_orig_params=orig,
            device_id=torch.device("cpu"),
            mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if mixed else None,
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def backward(step: int, sync: bool) -> None:
            if sync:
                _loss(model, step).backward()
            else:
                with model.no_sync():
                    _loss(model, step).backward()
            out.append((step, sync, _shown(model)))

        def values() -> list[torch.Tensor]:
            return [param.detach().clone() for param in model.parameters()]

        backward(0, sync=False)
        backward(1, sync=False)
        out.append((float(model.clip_grad_norm_(0.1)), _shown(model)))
        backward(2, sync=True)
        optimizer.step()
        optimizer.zero_grad()
        out.append(values())
        backward(3, sync=False)
        backward(4, sync=True)
        optimizer.zero_grad()
        backward(5, sync=False)
        optimizer.zero_grad()
        backward(6, sync=True)
        backward(7, sync=False)
        backward(8, sync=False)
        backward(9, sync=True)
        optimizer.step()
        out.append(values())
    return out


def fully_sharded(impl: str, reduced: torch.dtype | None) -> list[Any]:
    """``set_requires_gradient_sync(False)``: modules that stay unsharded show it, and others nothing."""
    import shardd.torch

    fully_shard: Any = shardd.torch.fully_shard if impl == "shardd" else torch.distributed.fsdp.fully_shard
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduced)
    model: Any = _net()
    fully_shard(model[0], mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    out = []

    def backward(step: int, sync: bool, reshard: bool) -> None:
        model.set_requires_gradient_sync(sync)
        model.set_reshard_after_backward(reshard)
        _loss(model, step).backward()
        out.append((step, _shown(model)))

    backward(0, sync=False, reshard=False)
    backward(1, sync=False, reshard=False)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    out.append(_shown(model))
    backward(2, sync=False, reshard=True)
    backward(3, sync=True, reshard=True)
    optimizer.step()
    optimizer.zero_grad()
    backward(4, sync=False, reshard=False)
    for param in model.parameters():
        param.grad = None
    backward(5, sync=False, reshard=False)
    backward(6, sync=True, reshard=True)
    optimizer.step()
    out.append([param.full_tensor().detach().clone() for param in model.parameters()])
    return out


def daemon_steps_refused(strategy: str) -> list[str]:
    """A step of the daemon's optimizer wants synchronised gradients: it says so, and the next ones go on."""
    from shardd.torch.optim import SGD

    with quiet():
        model = face("shardd")(
            _net(),
            sharding_strategy=ShardingStrategy[strategy],
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )
        optimizer = SGD(model.parameters(), lr=0.1)
        with model.no_sync():
            _loss(model, 0).backward()
        try:
            optimizer.step()
            texts = [""]
        except RuntimeError as error:
            texts = [str(error)]
        _loss(model, 1).backward()
        optimizer.step()
        texts.append(str(model[0].weight.grad is not None))
    return texts


def own_step(impl: str, orig: bool) -> list[Any]:
    """NO_SHARD: clipping and stepping by own gradients. What went wrong, the norm, how far parameters moved, and what comes next."""
    with quiet():
        model = face(impl)(
            _net(),
            sharding_strategy=ShardingStrategy.NO_SHARD,
            use_orig_params=orig,
            device_id=torch.device("cpu"),
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with model.no_sync():
            _loss(model, 0).backward()
        norm = float(model.clip_grad_norm_(100.0))
        before = [param.detach().clone() for param in model.parameters()]
        error = ""
        try:
            optimizer.step()
        except RuntimeError as raised:
            error = str(raised)
        moved = max(float((p.detach() - b).abs().max()) for p, b in zip(model.parameters(), before))
        optimizer.zero_grad()
        loss = _loss(model, 1)
        loss.backward()
        optimizer.step()
    return [error, norm, moved, loss.item()]
