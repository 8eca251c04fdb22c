"""What ranks do in the tests of models and gradients that the program drops while something of them is in use."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from job.life_scenarios import counters_of, trainer
from models import loss_of

_LIMIT_S = 60


def _until(path: str) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while not os.path.exists(path):
        if time.monotonic() > deadline:
            raise TimeoutError(path)
        time.sleep(0.01)


def collected_while_it_waits(folder: str, wait: str) -> dict[str, Any]:
    """Rank 0 drops its model in a call that waits for rank 1, where another thread's collector finds it."""
    model, optimizer = trainer()
    rank = dist.get_rank()
    optimizer.param_groups[0]["lr"] = 0.0
    loss_of(model, 0, 0, rank).backward()
    want = [p.grad.full_tensor().clone() for p in model.parameters()]
    optimizer.step()
    optimizer.zero_grad()
    params = list(model.parameters())
    seen: dict[str, Any] = {}
    loss = loss_of(model, 0, 0, rank)
    if wait == "step":
        loss.backward()
    if rank == 0:
        gc.disable()  # not before the wait
        root, started = weakref.ref(model), threading.Event()
        del model

        def collect() -> None:
            started.wait()
            time.sleep(0.5)  # by then the other thread waits
            gc.collect()
            seen["kept"] = root() is not None
            open(f"{folder}/collected", "w").close()

        thread = threading.Thread(target=collect)
        thread.start()
        started.set()
    else:
        _until(f"{folder}/collected")
    if wait == "step":
        optimizer.step()
    else:
        loss.backward()
    if rank == 0:
        thread.join()
        del loss
        gc.enable()
        gc.collect()
        seen["gone"] = root() is None
    dist.barrier()
    got = [p.grad.full_tensor().clone() for p in params]  # in memory of their own by now, on rank 0
    seen["same"] = all(torch.equal(a, b) for a, b in zip(got, want))
    return seen


def _plain(**options: Any) -> Any:
    from shardd.torch import FullyShardedDataParallel

    torch.manual_seed(1)
    return FullyShardedDataParallel(nn.Linear(64, 64), use_orig_params=True, device_id=torch.device("cpu"), **options)


def _backward(model: Any, scale: float) -> None:
    (model(torch.ones(2, 64)) * scale).sum().backward()


def views_of_gradients() -> dict[str, Any]:
    """What was ``.grad`` is held, where the program gives ``.grad`` another storage, and the job ends."""
    from shardd.torch import finish

    model = _plain()
    _backward(model, 1.0)
    param = next(p for p in model.parameters() if p.grad is not None)
    held = param.grad.detach()
    want = held.clone()
    param.grad.data = torch.zeros_like(held)
    _backward(model, 3.0)
    out = {"as it was": torch.equal(held, want), "new": torch.equal(param.grad, 3 * want)}
    counts = counters_of(model)
    dist.barrier()
    finish(model)
    out["after the end"] = torch.equal(held, want)
    return {**out, "counters": counts}


def gradients_put_aside() -> dict[str, Any]:
    """``.grad`` is another tensor than the one that is held, after a step and after a backward that raised."""
    model = _plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    _backward(model, 1.0)
    param = next(p for p in model.parameters() if p.grad is not None)
    held, want = param.grad, param.grad.clone()
    param.grad = torch.zeros_like(want)
    _backward(model, 3.0)
    out = {"as it was": torch.equal(held, want), "added": torch.equal(param.grad, 3 * want)}
    optimizer.step()

    class Raises(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            raise ValueError("in backward")

    failed = 0
    try:
        # The parameters' gradients come first: the loss is made of the input's after those of the weights.
        Raises.apply(model(torch.ones(2, 64, requires_grad=True))).sum().backward()
    except ValueError:
        failed += 1
    held, want = param.grad, param.grad.clone()
    param.grad = torch.zeros_like(want)
    _backward(model, 1.0)
    out["again"] = failed == 1 and torch.equal(held, want)
    return {**out, "counters": counters_of(model)}
