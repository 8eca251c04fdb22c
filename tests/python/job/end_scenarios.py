"""What ranks do in the tests of forks and of the end of the interpreter. Each function runs on every rank."""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from job.life_scenarios import counters_of, trainer
from models import Case, build, loss_of, shard, train_steps
from rank_main import report

_LIMIT_S = 60

# The end of the interpreter.

_alive: list[Any] = []


def ends(how: str) -> None:
    """Ends with tensors of the job alive, in the middle of something, and a handler that reads them last of all."""
    model = build(Case())

    def read_last() -> None:  # registered before shardd's own, so it runs after that
        report(event="read", total=float(sum(p._local_tensor.sum() for p in model.parameters())))

    atexit.register(read_last)
    from shardd.torch import fully_shard
    from shardd.torch.optim import AdamW

    shard(model, Case(), fully_shard)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    if how == "unregistered":
        return
    train_steps(model, optimizer, range(2))
    report(event="trained", total=float(sum(p._local_tensor.sum() for p in model.parameters())))
    if how == "nothing-alive":
        atexit.unregister(read_last)
        return
    loss = loss_of(model, 2, 0, dist.get_rank())
    _alive.extend([model, optimizer, loss, [p.grad for p in model.parameters()]])
    if how == "unsharded":
        model.unshard()
    elif how == "backward":
        loss.backward()
    elif how == "thread":
        if dist.get_rank() == 0:
            threading.Thread(target=loss.backward, daemon=True).start()
            time.sleep(0.5)  # into its wait for rank 1
    elif how == "exit-status":
        sys.exit(3)
    elif how == "exception":
        raise ArithmeticError("mine")


def finishes_first(stock: bool, kind: str) -> dict[str, Any]:
    """The last forward of all; rank 0 is still in the middle of it when rank 1 has finished."""
    from shardd.torch import finish

    rank = dist.get_rank()
    model, optimizer = trainer(stock)
    train_steps(model, optimizer, range(2))
    if rank == 0:
        model.layers[1].register_forward_hook(lambda *_: dist.barrier())
    with torch.set_grad_enabled(kind == "backward"):
        loss = loss_of(model, 2, 0, 0)
    text = ""
    if rank == 1:
        del loss  # its backward never comes
        finish(model)
        dist.barrier()
        return {"text": text}
    if kind == "backward":
        try:
            loss.backward()
        except RuntimeError as error:
            text = f"{type(error).__name__}: {error}"
    return {"loss": loss.item(), "text": text, "counters": counters_of(model)}


# Forks.


def _uses_in_child(model: nn.Module, gradient: Any, unsharded: Any, queue: Any) -> None:
    texts = {}
    for name, use in {
        "parameter": lambda: next(model.parameters())._local_tensor.sum(),
        "gradient": lambda: gradient._local_tensor.sum(),
        "unsharded": lambda: unsharded.sum(),
        "write": lambda: next(model.parameters())._local_tensor.add_(1),
        "forward": lambda: loss_of(model, 0, 0, 0),
    }.items():
        try:
            use()
            texts[name] = ""
        except RuntimeError as error:
            texts[name] = str(error)
    queue.put(texts)
    gc.collect()
    sys.exit(0)


def fork_while_registered(stock: bool) -> dict[str, Any]:
    model, optimizer = trainer(stock)
    losses = train_steps(model, optimizer, range(2))
    loss = loss_of(model, 2, 0, dist.get_rank())
    loss.backward()
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    model.layers[0].unshard()
    arguments = (model, model.layers[0].up.weight.grad or model.head.weight.grad, model.layers[0].up.weight, queue)
    child = context.Process(target=_uses_in_child, args=arguments)
    child.start()
    texts = queue.get()
    child.join(_LIMIT_S)
    model.layers[0].reshard()
    pid = os.fork()
    if pid == 0:
        sys.exit(0)  # through the interpreter's whole end, handlers included
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    optimizer.step()
    optimizer.zero_grad()
    losses += [loss.item(), *train_steps(model, optimizer, range(3, 6))]
    return {"texts": texts, "codes": (child.exitcode, status), "losses": losses, "counters": counters_of(model)}
