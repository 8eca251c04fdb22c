"""Ranks that are threads of one process, on the threaded process groups of torch.testing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed import multi_threaded_pg as threaded


def _in_threads(work: Callable[[], Any], world: int, store: dist.Store | None = None) -> list[Any]:
    results: list[Any] = [None] * world
    store = dist.HashStore() if store is None else store

    def run(rank: int) -> None:
        dist.init_process_group(backend="threaded", rank=rank, world_size=world, store=store)
        try:
            results[rank] = work()
        except BaseException as error:
            results[rank] = error
            threaded.ProcessLocalGroup.exception_handle(error)
        finally:
            dist.destroy_process_group()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def _train(impl: str, number: int) -> dict[str, Any]:
    """One model of several, which each rank makes one after the other."""
    if impl == "torch":
        from torch.distributed.fsdp import fully_shard
    else:
        from shardd.torch import fully_shard
    model = nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 3, bias=number > 0))
    generator = torch.Generator().manual_seed(number)  # torch's own is the process'
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator))
    if dist.get_rank() == 1 and number == 0:  # ranks drift apart
        threading.Event().wait(0.2)
    for module in (model[0], model[2], model):
        fully_shard(module)
    inside: list[str] = []
    model[0].register_forward_hook(lambda module, *_: inside.append(type(module.weight).__name__))
    if impl == "daemon":
        from shardd.torch.optim import AdamW

        optimizer: torch.optim.Optimizer = AdamW(model.parameters(), lr=1e-2)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(4):
        data = torch.Generator().manual_seed(100 * step + dist.get_rank())
        loss = model(torch.randn(4, 7, generator=data)).square().sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    result = {
        "losses": losses,
        "parameters": {name: p.full_tensor().detach() for name, p in model.named_parameters()},  # type: ignore[attr-defined]
        "inside": inside,
        "outside": type(model[0].weight).__name__,
    }
    if impl != "torch":
        from shardd.torch import commit, counters

        commit(model)
        result["counters"] = counters(model)
    return result


def trained(impls: list[str], world: int) -> dict[str, list[Any]]:
    """By implementation and rank: what two models, made one after the other, have come to."""

    def train(impl: str) -> list[Any]:
        found = _in_threads(lambda: [_train(impl, 0), _train(impl, 1)], world)
        for rank, one in enumerate(found):
            if isinstance(one, BaseException):
                raise RuntimeError(f"rank {rank} of {impl}") from one
        return found

    return _isolated(lambda: {impl: train(impl) for impl in impls})


def _isolated(run: Callable[[], Any]) -> Any:
    threaded._install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)  # each thread has its own names of groups
    try:
        return run()
    finally:
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        threaded._uninstall_threaded_pg()


def groups_over_one_store(world: int) -> list[list[Any]]:
    """Two groups of threads, one after the other. What the first has made is kept, as are its jobs."""
    kept = []

    def work() -> Any:
        from shardd.torch import fully_shard

        model = nn.Linear(4, 6)
        fully_shard(model)
        kept.append(model)
        if dist.get_rank() == 0:
            time.sleep(0.2)  # the others ask for the job's name before it is there
        model(torch.ones(2, 4)).sum().backward()
        return model.weight.grad.full_tensor()[0, 0].item()  # type: ignore[operator, union-attr]

    store = dist.HashStore()
    return _isolated(lambda: [_in_threads(work, world, store) for _ in range(2)])


class Broken(Exception):
    pass


def left(where: str, keeps: bool, world: int) -> list[tuple[str, str, float]]:
    """Rank 1 ends for good, in a pass or before it; who has its model keeps it, or nobody does. By rank: what was raised, and when."""
    kept: list[Any] = []
    began: list[float] = []

    def work() -> Any:
        from shardd.torch import fully_shard

        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
        for module in (model[0], model[2], model):
            fully_shard(module)
        if keeps:
            kept.append(model)
        x = torch.ones(2, 4, requires_grad=True)
        model(x).sum().backward()
        lasts = dist.get_rank() == 1

        def fail(gradient: torch.Tensor) -> None:
            if lasts:
                began.append(time.monotonic())
                raise Broken("of rank 1")

        if where == "backward":
            model[1].register_forward_hook(lambda module, args, output: output.register_hook(fail) and None)
        elif where == "forward":
            model[1].register_forward_hook(lambda module, args, output: fail(output))
        elif lasts:
            fail(x)
        try:
            for _ in range(3):
                model(x).sum().backward()
        except Broken:
            raise
        except BaseException as error:
            return type(error).__name__, str(error), time.monotonic() - began[0]
        return "", "", time.monotonic() - began[0]

    found = _isolated(lambda: _in_threads(work, world))
    return [one if isinstance(one, tuple) else (type(one).__name__, str(one), 0.0) for one in found]
